"""What an instance does, for whoever decides about its strategy: a ring of records, many writers and one reader.

    writer  claim a position (CAS of the tail), write the record, then its lap (release)
    reader  copy records from the head on while their lap is the one due there, then give their places free (head, release)

It is lossy: a record that finds no place is dropped and counted. What is kept is thus every record from the last drain on up to
the first drop, and nothing in between is missing; overwriting the oldest would leave the reader to guess which part of the time
it sees. A writer that is stopped between claim and lap holds up the reader, not other writers; a drain ends before its record.

While nobody listens an operation pays for one load and a branch. A ring belongs to one process and its threads; a
forked child has nobody who listens.
"""

from libc.stdint cimport int64_t, uint8_t, uint16_t, uint32_t, uint64_t
from libc.string cimport memcpy

from subetha._atomics cimport (
    cas_acq_rel_u64, fetch_add_acq_rel_u64, load_acquire_u32, load_acquire_u64, load_relaxed_u64, store_release_u32,
    store_release_u64,
)
from subetha._layout cimport Observation
from subetha._process cimport fork_generation, monotonic_ns

cdef extern from * nogil:
    bint unlikely(bint condition)

ctypedef struct Observations:
    # read by every operation
    uint64_t armed              # bit n: operation n is recorded
    Observation *records
    uint64_t bits               # log2 of how many records there is room for
    uint64_t size
    int64_t since               # the fork that it was armed since
    uint8_t pad0[88]
    uint64_t tail
    uint64_t dropped
    uint8_t pad1[112]
    uint64_t head


cdef inline uint32_t lap_of(const Observations *ring, uint64_t position) noexcept nogil:
    """Never 0 in the first lap: that is what a place says that was never written."""
    return <uint32_t> ((position >> ring.bits) + 1)


cdef inline bint observation_put(Observations *ring, uint16_t op, uint16_t flags, uint64_t value) noexcept nogil:
    """False: no place, it was dropped."""
    cdef Observation *record
    cdef uint64_t tail
    cdef int64_t used
    if ring.since != fork_generation():
        # who listened is the process that forked this one
        store_release_u64(&ring.armed, 0)
        return False
    while True:
        tail = load_relaxed_u64(&ring.tail)
        # Q4: pairs with Q3
        used = <int64_t> (tail - load_acquire_u64(&ring.head))
        if used >= <int64_t> ring.size:
            fetch_add_acq_rel_u64(&ring.dropped, 1)
            return False
        # below 0: the tail that was read is old
        if used >= 0 and cas_acq_rel_u64(&ring.tail, tail, tail + 1):
            break
    record = &ring.records[tail & (ring.size - 1)]
    record.time_ns = <uint64_t> monotonic_ns()
    record.value = value
    record.op = op
    record.flags = flags
    # Q1: pairs with Q2
    store_release_u32(&record.lap, lap_of(ring, tail))
    return True


cdef inline bint observations_want(const Observations *ring, uint16_t op) noexcept nogil:
    """Does somebody listen for this operation?"""
    # Q6: pairs with Q5
    return load_acquire_u64(&ring.armed) >> op & 1


cdef inline uint64_t observations_ready(Observations *ring) noexcept nogil:
    """How many records are to be had, from the head on."""
    cdef uint64_t head = load_relaxed_u64(&ring.head)
    cdef uint64_t n
    for n in range(ring.size):
        # Q2: pairs with Q1
        if load_acquire_u32(&ring.records[(head + n) & (ring.size - 1)].lap) != lap_of(ring, head + n):
            return n
    return ring.size


cdef inline void observations_take(Observations *ring, Observation *to, uint64_t n) noexcept nogil:
    """Copy the next `n` records, which are ready, and give their places free. One reader at a time."""
    cdef uint64_t head = load_relaxed_u64(&ring.head)
    cdef uint64_t first = head & (ring.size - 1)
    cdef uint64_t straight = min(n, ring.size - first)
    memcpy(to, &ring.records[first], straight * sizeof(Observation))
    memcpy(to + straight, ring.records, (n - straight) * sizeof(Observation))
    # Q3: pairs with Q4
    store_release_u64(&ring.head, head + n)


cdef inline void observations_arm(Observations *ring, uint64_t ops) noexcept nogil:
    """Let the operations of `ops` (bits) be recorded; none: nobody listens. The records have their memory."""
    if ring.since != fork_generation():
        # what the parent's threads were writing is never finished
        store_release_u64(&ring.head, load_relaxed_u64(&ring.tail))
        ring.since = fork_generation()
    # Q5: pairs with Q6
    store_release_u64(&ring.armed, ops)

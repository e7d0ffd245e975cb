"""How an instance changes its strategy while operations are under way: the header that both shake hands over.

    operation  read the generation, count up under its parity, read it again: where it moved on count down and begin anew
    migration  write the next generation's tag, publish the generation, wait until nobody is counted under the old parity

Without the second look a migration could find nobody under the old parity just before an operation is counted there, and drop
what that operation then uses. A generation whose parity still has operations of the one two before is not published, so the tag
of a parity stays as it is while anybody is counted under it.

A header belongs to one process, where several threads use it; nothing of it lies in a mapped file, so no other process's death
leaves anything. A forked child starts with nobody counted: the threads that were are not there.
"""

from libc.stdint cimport int64_t, uint8_t, uint32_t, uint64_t

from subetha._atomics cimport (
    fence_after_rmw, fetch_add_acq_rel_u64, load_relaxed_u64, load_seq_cst_u64, store_relaxed_u64, store_seq_cst_u64,
)
from subetha._layout cimport EMPTY, FULL, OK, Code
from subetha._process cimport fork_generation, wake_up_to

ctypedef struct Handshake:
    # read by every operation, written by migrations only
    uint64_t generation
    uint64_t tags[2]            # by parity
    uint8_t pad0[104]
    uint64_t in_flight[2]       # by parity
    int64_t since               # the fork that they are counted since
    uint32_t drained            # waiters' word of those who drain


cdef inline void handshake_init(Handshake *header, uint64_t tag) noexcept nogil:
    header.generation = 0
    header.tags[0] = header.tags[1] = tag
    header.in_flight[0] = header.in_flight[1] = 0
    header.since = fork_generation()
    header.drained = 0


cdef inline void handshake_forget_parent(Handshake *header) noexcept nogil:
    if header.since != fork_generation():
        header.since = fork_generation()
        store_relaxed_u64(&header.in_flight[0], 0)
        store_relaxed_u64(&header.in_flight[1], 0)


cdef inline bint handshake_exit(Handshake *header, uint64_t parity) noexcept nogil:
    """End an operation. False: nobody is counted under this parity."""
    # G5: pairs with G4; who finds nobody left sees all that the operations did
    cdef uint64_t before = fetch_add_acq_rel_u64(&header.in_flight[parity], <uint64_t> -1)
    if before == 0:
        fetch_add_acq_rel_u64(&header.in_flight[parity], 1)
        return False
    if before == 1:
        wake_up_to(&header.drained, 0x7FFFFFFF)
    return True


cdef inline bint handshake_enter_as_of(Handshake *header, uint64_t generation) noexcept nogil:
    """Begin an operation under a generation that was read before. False: it has moved on since, and nothing is counted."""
    # G3: pairs with G4; either this look at the generation sees the migration, or the migration's look at the count sees this
    fetch_add_acq_rel_u64(&header.in_flight[generation & 1], 1)
    fence_after_rmw()
    # G1: pairs with G2
    if load_seq_cst_u64(&header.generation) == generation:
        return True
    handshake_exit(header, generation & 1)
    return False


cdef inline uint64_t handshake_enter(Handshake *header) noexcept nogil:
    """Begin an operation; the parity that it is counted under. Repeated only where a migration came in between."""
    cdef uint64_t generation
    handshake_forget_parent(header)
    while True:
        # G1: pairs with G2
        generation = load_seq_cst_u64(&header.generation)
        if handshake_enter_as_of(header, generation):
            return generation & 1


cdef inline uint64_t handshake_tag_of(const Handshake *header, uint64_t parity) noexcept nogil:
    """The strategy of an operation that is counted under `parity`; it stays until the operation ends."""
    return load_relaxed_u64(&header.tags[parity])


cdef inline Code handshake_is_drained(void *context, bint thorough) noexcept nogil:
    """OK once no operation of the generation before the current one is under way, else EMPTY."""
    cdef Handshake *header = <Handshake *> context
    # G4: pairs with G3 and G5
    return OK if load_seq_cst_u64(&header.in_flight[(load_seq_cst_u64(&header.generation) + 1) & 1]) == 0 else EMPTY


cdef inline Code handshake_migrate(Handshake *header, uint64_t tag) noexcept nogil:
    """Begin the next generation, with `tag`. FULL: operations of the one before the current are still under way.

    One thread at a time.
    """
    cdef uint64_t following
    handshake_forget_parent(header)
    if handshake_is_drained(header, False) != OK:
        return FULL
    following = load_relaxed_u64(&header.generation) + 1
    store_relaxed_u64(&header.tags[following & 1], tag)
    # G2: pairs with G1
    store_seq_cst_u64(&header.generation, following)
    return OK

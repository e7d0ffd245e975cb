"""Records of participants: FREE -> USED (incarnation+1) -> FREE.

    status = incarnation << 8 | FREE, USED or DYING

Whoever registers locks the slot's byte first, writes the record's fields while it is FREE (nobody else can: the byte is
locked), then CASes the status to USED. `last_seen_epoch` is written by beats, the bitmap by the participant's threads;
`status` last at registration and first at leaving. A death leaves a USED record whose byte nobody holds.
"""

from libc.stdint cimport int64_t, uint32_t, uint64_t

from subetha._atomics cimport cas_seq_cst_u64, load_acquire_u32, load_acquire_u64, load_seq_cst_u64, store_release_u32, \
    store_release_u64
from subetha._layout cimport EMPTY, LOST, OK, SLOT_FREE, SLOT_USED, Code, Participant

ctypedef struct Records:
    Participant *first
    uint64_t count

cdef enum:
    SNAPSHOT_TRIES = 64


cdef inline uint64_t status_pack(uint64_t incarnation, uint64_t state) noexcept nogil:
    return incarnation << 8 | state


cdef inline uint64_t status_incarnation(uint64_t status) noexcept nogil:
    return status >> 8


cdef inline uint64_t status_state(uint64_t status) noexcept nogil:
    return status & 0xFF


cdef inline Code record_join(
    Participant *record, uint32_t pid, uint32_t role, uint64_t epoch, uint64_t boot_hash, uint64_t now, uint64_t *status
) noexcept nogil:
    """FREE -> USED with the next incarnation, by whoever holds the slot's lock. LOST: the record is not free."""
    cdef uint64_t seen = load_acquire_u64(&record.status)
    if status_state(seen) != SLOT_FREE:
        return LOST
    # T1: pairs with T2; a snapshot of the last registration that reads one of these must see that it has ended (H3)
    store_release_u32(&record.pid, pid)
    store_release_u32(&record.role, role)
    store_release_u64(&record.last_seen_epoch, epoch)
    store_release_u64(&record.in_flight_bitmap, 0)
    store_release_u64(&record.completed, 0)
    store_release_u64(&record.boot_hash, boot_hash)
    store_release_u64(&record.started_ns, now)
    store_release_u64(&record.runs, 0)
    status[0] = status_pack(status_incarnation(seen) + 1, SLOT_USED)
    # H1: pairs with H2
    return OK if cas_seq_cst_u64(&record.status, seen, status[0]) else LOST


cdef inline void record_leave(Participant *record, uint64_t status) noexcept nogil:
    # H3: pairs with H2; the incarnation stays, so the next one is higher
    cas_seq_cst_u64(&record.status, status, status_pack(status_incarnation(status), SLOT_FREE))


cdef inline Code record_snapshot(Participant *record, Participant *copy) noexcept nogil:
    """One registration's fields, all of the same incarnation. EMPTY: free, dying, or changing hands without end."""
    cdef int _tries
    cdef uint64_t status
    for _tries in range(SNAPSHOT_TRIES):
        # H2: pairs with H1 and H3
        status = load_seq_cst_u64(&record.status)
        if status_state(status) != SLOT_USED:
            return EMPTY
        # T2: pairs with T1 and T3
        copy.pid = load_acquire_u32(&record.pid)
        copy.role = load_acquire_u32(&record.role)
        copy.last_seen_epoch = load_acquire_u64(&record.last_seen_epoch)
        copy.in_flight_bitmap = load_acquire_u64(&record.in_flight_bitmap)
        copy.completed = load_acquire_u64(&record.completed)
        copy.started_ns = load_acquire_u64(&record.started_ns)
        copy.status = status
        if load_seq_cst_u64(&record.status) == status:
            return OK
    return EMPTY


cdef inline uint64_t records_silent(Records *records, uint64_t first, uint64_t epoch, uint64_t spared_pid) noexcept nogil:
    """Of the 64 records from `first` on, a bit for each that has work in hand and has not beaten since `epoch`."""
    cdef Participant copy
    cdef uint64_t i
    cdef uint64_t bits = 0
    for i in range(first, min(first + 64, <uint64_t> records.count)):
        if (
            record_snapshot(&records.first[i], &copy) == OK
            and copy.in_flight_bitmap != 0
            and copy.last_seen_epoch < epoch
            and copy.pid != spared_pid
        ):
            bits |= <uint64_t> 1 << (i - first)
    return bits


cdef inline bint record_is(Participant *record, uint64_t incarnation16) noexcept nogil:
    """Is the record still used by the incarnation of a job id (its low 16 bits)? seq_cst after a publish (P1)."""
    cdef uint64_t status = load_seq_cst_u64(&record.status)
    return status_state(status) == SLOT_USED and status_incarnation(status) & 0xFFFF == incarnation16

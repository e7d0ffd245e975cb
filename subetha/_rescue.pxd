"""Moving on what the dead have left. Dead is the kernel's word: the record is used, and nobody holds the lock on its byte.

    record   USED(i) -> DYING(i) -> FREE(i)      the last step after a whole pass that found nothing to do
    cell     WRITING(dead) -> FREE                       READY(dead) without a reference -> FREE (its push had not returned)
             TAKEN(dead) -> RETRY(me), version+1, published
             RETRY(dead) without a reference -> RETRY(me), version+1, published
             COLLECTED(dead), FENCED(dead) -> FREE       DONE, DEAD(dead) without a reference: published

No lock is needed: any number of rescuers may work on one victim. Each reads a cell's word, then sees that the record still shows
the dead incarnation, then CASes that very word. A number is free for others only after all of this, so a rescuer that was stopped
for an hour finds another record or another word. What it leaves in its own name when it dies, the next one finds.
"""

from libc.stdint cimport int64_t, uint64_t

from subetha._atomics cimport cas_seq_cst_u64, load_seq_cst_u64
from subetha._cells cimport Cells, cell_word
from subetha._heartbeat cimport Records, record_leave, status_incarnation, status_pack, status_state
from subetha._layout cimport SLOT_DYING, SLOT_FREE, Participant
from subetha._process cimport lock_test

ctypedef struct Death:
    Participant *record
    uint64_t status         # DYING, with the dead incarnation
    uint64_t number


cdef inline bint is_dead(Records *records, int fd, int64_t lock_base, uint64_t slot, uint64_t *status) noexcept nogil:
    """Does the record of `slot` belong to somebody who holds no lock? `status` is what the record showed before the test."""
    # D1: pairs with H1 and H3; whoever registers locks first and writes USED after, whoever leaves does it the other way round
    status[0] = load_seq_cst_u64(&records.first[slot].status)
    return status_state(status[0]) != SLOT_FREE and lock_test(fd, lock_base + <int64_t> slot) == 0


cdef inline bint death_begin(Records *records, uint64_t slot, uint64_t status, Death *out) noexcept nogil:
    """Mark the record of one that `is_dead` as DYING. False: it is somebody else's, or free, by now."""
    out.record = &records.first[slot]
    out.number = slot + 1
    out.status = status_pack(status_incarnation(status), SLOT_DYING)
    # D2: pairs with P1; from here on the incarnation has moved on for everybody
    return status == out.status or cas_seq_cst_u64(&out.record.status, status, out.status)


cdef inline bint death_of_mine(Records *records, uint64_t slot, uint64_t *status) noexcept nogil:
    """Begin the rescue of a slot whose byte this process has just locked, under the next incarnation: others stop theirs."""
    cdef uint64_t next = status_pack(status_incarnation(status[0]) + 1, SLOT_DYING)
    # D2: pairs with P1
    if not cas_seq_cst_u64(&records.first[slot].status, status[0], next):
        return False
    status[0] = next
    return True


cdef inline bint death_goes_on(Death *death) noexcept nogil:
    """Is the number still the dead one's? Asked after a cell's word was read, and before the CAS from it."""
    # D3: pairs with H1 and H3
    return load_seq_cst_u64(&death.record.status) == death.status


cdef inline bint number_is_nobodys(Records *records, uint64_t number) noexcept nogil:
    """Can nobody have this number, or has nobody? Asked after a cell's word was read that names it.

    Whoever has taken the number since cannot have written that word: no word comes back within a version.
    """
    if number == 0 or number > records.count:
        return True
    # D3: pairs with H1 and H3
    return status_state(load_seq_cst_u64(&records.first[number - 1].status)) == SLOT_FREE


cdef inline uint64_t word_of(Cells *cells, uint64_t index) noexcept nogil:
    # D4: pairs with C8; either whoever finishes a job sees the mark of its client (P1), or this sees its word
    return load_seq_cst_u64(cell_word(cells, index))


cdef inline void death_end(Death *death) noexcept nogil:
    """The number is free again."""
    record_leave(death.record, death.status)

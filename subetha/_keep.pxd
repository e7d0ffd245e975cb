"""Kept results: those of jobs that were submitted with `keep_s`, to be read by anyone who knows the job's id.

    keep     DONE -> KEPT(me)                     its client has collected it, or has gone; the cell is then this one's alone
             KEPT(me) -> KEPT(0)                  after `due_ns` was written: when it expires (realtime)
    rescue   KEPT(dead) -> KEPT(me), version+1    and on; with the next version also where it is done in the dead one's own name
    expire   KEPT(0) -> FREE                      by whoever finds that its time has passed: the leader's timer, or who needs a cell
    forget   KEPT(0) -> FREE                      by anyone, before that

A result's frame stays where its worker has written it. Who reads one copies it and looks at the word again, so that nothing has
to be held: a reader may stop or die, and whoever frees the cell waits for nobody (models/keep.pml).

In a durable queue an expired cell is not waited for. The disk may have it as DONE or KEPT until its next job; after a loss of the
power such a result is there once more, if its bytes still are those of its CRC-32. One that was forgotten is not.
"""

from libc.stdint cimport int64_t, uint8_t, uint32_t, uint64_t

from subetha._atomics cimport cas_seq_cst_u64, fence_seq_cst, load_acquire_u64, load_relaxed_u32, load_relaxed_u64
from subetha._blocks cimport block_linked, block_relink, block_word
from subetha._cells cimport cell_word, word_is_one_of, word_owner, word_pack, word_state, word_version
from subetha._layout cimport DONE, FREE_BACKED, FREE_HOLE, KEPT, LINKED, PARKED, READY, RETRY, TAKEN, JobCell
from subetha._queue cimport (
    Queue, cell_synced, due_now, frame_at, is_letter, job_cell, job_free_if, kept_settle, result_area,
)
from subetha._rescue cimport number_is_nobodys

cdef enum Sight:
    ABSENT = 0      # no cell has a result of this job, or ever will
    PENDING = 1     # it waits or runs
    OTHERS = 2      # it is done, and its result is its submitter's alone
    READABLE = 3    # its result is there, or its dead letter

cdef enum:
    RESULT_HEADER_BYTES = 7
    CLOCK_SLACK_S = 86400   # the clock may have been set back by so much since the time was written


cdef inline void kept_take_over(Queue *q, uint64_t index, uint64_t word) noexcept nogil:
    """KEPT, in nobody's hands or with a time that cannot be: KEPT(me), version+1, and settled. Not where somebody was faster."""
    cdef JobCell *cell = job_cell(q, index)
    cdef uint64_t mine = word_pack(word_version(word) + 1, KEPT, q.owner)
    block_relink(&q.arena, load_relaxed_u64(&cell.job_block), index, word_version(word))
    block_relink(&q.arena, load_relaxed_u64(&cell.result_block), index, word_version(word))
    # C6: pairs with N2
    if cas_seq_cst_u64(cell_word(&q.cells, index), word, mine):
        kept_settle(q, index, mine)


cdef inline const uint8_t *kept_frame(Queue *q, uint64_t index, uint64_t word, uint64_t length) noexcept nogil:
    """The frame of a result that is there, or NULL."""
    cdef uint64_t block = load_relaxed_u64(&job_cell(q, index).result_block)
    cdef const uint8_t *at = frame_at(q, result_area(q, index), q.result_bytes, length, block, index, word_version(word))
    if at == NULL and block and word_state(word) == KEPT:
        # somebody is taking it over, and has moved the link already
        at = frame_at(q, result_area(q, index), q.result_bytes, length, block, index, word_version(word) + 1)
    return at


cdef inline bint kept_is_lost(Queue *q, uint64_t index, uint64_t word) noexcept nogil:
    """Can nobody ever read a kept result, since its lengths or blocks contradict each other?"""
    cdef uint64_t length = load_relaxed_u64(&job_cell(q, index).result_length)
    cdef uint64_t block = load_relaxed_u64(&job_cell(q, index).result_block)
    cdef uint64_t *of_block
    cdef uint64_t seen
    if length < RESULT_HEADER_BYTES:
        return True
    if kept_frame(q, index, word, length) != NULL:
        return False
    of_block = block_word(&q.arena, block)
    if block == 0 or of_block == NULL:
        return True
    seen = load_acquire_u64(of_block)
    # another one's, or nobody's; with an owner a repair may be about to give it back
    return seen == FREE_HOLE or seen == FREE_BACKED or seen & 0xF == LINKED


cdef inline bint kept_has_expired(Queue *q, uint64_t index, uint64_t now) noexcept nogil:
    return load_relaxed_u64(&job_cell(q, index).due_ns) <= now


cdef inline void kept_mend(Queue *q, uint64_t index, uint64_t word) noexcept nogil:
    """Undo what no rescue and no time would ever end."""
    cdef JobCell *cell = job_cell(q, index)
    cdef uint64_t latest = <uint64_t> load_relaxed_u32(&cell.keep_s) + CLOCK_SLACK_S
    if word_owner(word) != 0 and not number_is_nobodys(&q.records, word_owner(word)):
        return
    if load_relaxed_u32(&cell.keep_s) == 0 or kept_is_lost(q, index, word):
        job_free_if(q, index, word)
    elif word_owner(word) != 0 or not kept_has_expired(q, index, due_now(q) + latest * 1000000000):
        kept_take_over(q, index, word)


cdef inline uint64_t kept_free_expired(Queue *q) noexcept nogil:
    """Free the results whose time has passed; how many."""
    cdef uint64_t now = due_now(q)
    cdef uint64_t i, word
    cdef uint64_t n = 0
    for i in range(q.cells.count):
        # N2: pairs with N1
        word = load_acquire_u64(cell_word(&q.cells, i))
        if word_state(word) == KEPT and word_owner(word) == 0 and kept_has_expired(q, i, now):
            n += job_free_if(q, i, word)
    return n


cdef inline uint64_t queue_forget(Queue *q, uint64_t job_id) noexcept nogil:
    """Free every kept result of the job id; how many there were."""
    cdef uint64_t i, word
    cdef uint64_t n = 0
    for i in range(q.cells.count):
        # N2: pairs with N1
        word = load_acquire_u64(cell_word(&q.cells, i))
        if (
            word_state(word) == KEPT and word_owner(word) == 0 and load_relaxed_u64(&job_cell(q, i).job_id) == job_id
            and job_free_if(q, i, word)
        ):
            cell_synced(q, i)
            n += 1
    return n


cdef inline Sight job_sight(Queue *q, uint64_t index, uint64_t job_id, uint64_t now, uint64_t *word) noexcept nogil:
    """What a cell says of a job; `word` is the word that says so."""
    cdef JobCell *cell = job_cell(q, index)
    cdef Sight sight
    cdef uint64_t seen
    cdef int _tries
    for _tries in range(8):
        # N2: pairs with N1 and C8
        seen = load_acquire_u64(cell_word(&q.cells, index))
        word[0] = seen
        if load_relaxed_u64(&cell.job_id) != job_id:
            return ABSENT
        sight = ABSENT
        if word_is_one_of(seen, 1 << READY | 1 << RETRY | 1 << PARKED | 1 << TAKEN):
            sight = PENDING
        elif is_letter(seen):
            sight = READABLE
        elif word_state(seen) == DONE:
            sight = READABLE if load_relaxed_u32(&cell.keep_s) else OTHERS
        elif word_state(seen) == KEPT and (word_owner(seen) != 0 or not kept_has_expired(q, index, now)):
            sight = READABLE
        # F1: pairs with C3 and C4; what was read belongs to this word, or the cell has moved on
        fence_seq_cst()
        if load_acquire_u64(cell_word(&q.cells, index)) == seen:
            return sight
    return PENDING


cdef inline Sight queue_sight(Queue *q, uint64_t job_id, uint64_t *index, uint64_t *word) noexcept nogil:
    """One look for a job, first in the cell where it was last (`index`). READABLE: `index` and `word` say where.

    A job that is copied while this goes through the cells may be ABSENT, as it was not in the one yet and is not in the other any
    more: that counts when it was found so several times in a row.
    """
    cdef uint64_t now = due_now(q)
    cdef uint64_t i
    cdef Sight sight
    cdef Sight best = ABSENT
    if index[0] < q.cells.count:
        best = job_sight(q, index[0], job_id, now, word)
        if best != ABSENT:
            return best
    for i in range(q.cells.count):
        sight = job_sight(q, i, job_id, now, word)
        if sight > best:
            best = sight
            index[0] = i
        if sight == READABLE:
            break
    return best

"""Moving on the work of those who live and do not get on: lapsed (stopped, or their machine slept) or overdue (a job out of time).

Lapsed moves work, dead moves memory: such a process may wake and write at any moment, so its cells stay its own.

    a spare cell   FREE -> WRITING(me), the job is copied, the original's word is seen once more -> RETRY(me)
    the original   TAKEN(w) -> FENCED(w) or OVERDUE(w): w's result is refused from here on; w or its rescuer frees the cell
    the copy       then published in `back`; where it was overdue: -> TAKEN(me) -> DONE(me) with JobTimeout, delivered

A job that runs and is cancelled is overdue at once, for whoever cancels it; then its client gets JobCancelled.

In this order: a copy alone is withdrawn (or is a double, which its client drops by the job id), a fence alone would lose the job.
In a durable queue the disk has each step before the next one.
"""

from libc.stdint cimport int64_t, uint8_t, uint32_t, uint64_t
from libc.stdlib cimport calloc, free

from subetha._atomics cimport cas_seq_cst_u64, copy_unowned, fence_seq_cst, load_acquire_u32, load_acquire_u64, \
    load_relaxed_u64, store_relaxed_u32, store_relaxed_u64
from subetha._blocks cimport block_allocate, block_data, block_link, block_of
from subetha._cells cimport (
    cell_publish, cell_word, cells_acquire, word_is_one_of, word_owner, word_pack, word_state, word_version,
)
from subetha._layout cimport (
    CLAIMABLE, COLLECTABLE, DONE, EMPTY, FENCED, LOST, OK, OVERDUE, RETRY, TAKEN, Code, JobCell,
)
from subetha._queue cimport (
    LEVELS, Mailbox, Queue, block_synced, cell_synced, claim_lost, deadline_put, job_area, job_cell, job_charge, job_free_if,
    job_level, queue_deliver, queue_mailbox, queue_publish_back, result_ended, result_write,
)
from subetha._recovery cimport mark_mailboxes, rescue_undelivered, rescue_unpublished, write_end
from subetha._repair cimport refs_call_for_repair, refs_mark_all


cdef inline bint copy_block(
    Queue *q, JobCell *original, uint64_t from_index, uint64_t word, uint64_t index, uint64_t version
) noexcept nogil:
    """Copy the block of a long job for the copy (index, version). False: there is none to be had, or the original has moved on."""
    cdef JobCell *copy = job_cell(q, index)
    cdef uint64_t length = load_relaxed_u64(&original.job_length)
    cdef uint64_t block
    cdef uint8_t *data = block_of(&q.arena, load_relaxed_u64(&original.job_block), length, from_index, word_version(word))
    if data == NULL:
        # its worker was stopped while it put the job back, and has moved the link already
        data = block_of(&q.arena, load_relaxed_u64(&original.job_block), length, from_index, word_version(word) + 1)
    if data == NULL or block_allocate(&q.arena, &q.cells, length, q.block_owner, &block) != OK:
        return False
    copy_unowned(block_data(&q.arena, block), data, length)
    store_relaxed_u64(&copy.job_block, block)
    block_link(&q.arena, block, index, version)
    return block_synced(q, block, length)


cdef inline void copy_header(JobCell *copy, JobCell *original) noexcept nogil:
    """All but the word, and without what belongs to the original's claim."""
    cdef uint64_t *to = <uint64_t *> copy
    cdef uint64_t *source = <uint64_t *> original
    cdef size_t i
    for i in range(1, sizeof(JobCell) // sizeof(uint64_t)):
        store_relaxed_u64(&to[i], load_relaxed_u64(&source[i]))
    result_write(copy, 0, 0, 0)
    store_relaxed_u64(&copy.job_block, 0)
    store_relaxed_u32(&copy.charged, 0)
    store_relaxed_u64(&copy.deadline_ns, 0)
    store_relaxed_u64(&copy.progress, 0)


cdef inline bint copy_job(Queue *q, uint64_t from_index, uint64_t word, uint64_t *index, uint64_t *waits) noexcept nogil:
    """A copy of the job TAKEN with `word`: RETRY(me), not published yet. False: no spare cell, or the job has moved on."""
    cdef JobCell *original = job_cell(q, from_index)
    cdef JobCell *copy
    cdef uint64_t writing
    cdef uint64_t hint = 0
    if cells_acquire(&q.cells, 0, &hint, q.owner, index, &writing) != OK:
        return False
    copy = job_cell(q, index[0])
    copy_header(copy, original)
    if load_relaxed_u64(&original.job_block) == 0:
        copy_unowned(job_area(q, index[0]), job_area(q, from_index), q.job_bytes)
    elif not copy_block(q, original, from_index, word, index[0], word_version(writing)):
        job_free_if(q, index[0], writing)
        return False
    # F1: pairs with C3 and C4; what was copied was read before this
    fence_seq_cst()
    if load_acquire_u64(cell_word(&q.cells, from_index)) != word:
        job_free_if(q, index[0], writing)
        return False
    cell_publish(&q.cells, index[0], writing, RETRY)
    waits[0] = word_pack(word_version(writing), RETRY, q.owner)
    if not cell_synced(q, index[0]):
        job_free_if(q, index[0], waits[0])
        return False
    return True


cdef inline void answer_overdue(Queue *q, uint64_t index, uint64_t waits, bint cancelled) noexcept nogil:
    """The copy of an overdue job: RETRY(me) -> TAKEN(me) -> DONE(me) with JobTimeout, or JobCancelled, delivered."""
    cdef JobCell *cell = job_cell(q, index)
    cdef uint64_t taken = word_pack(word_version(waits), TAKEN, q.owner)
    cdef uint64_t done = word_pack(word_version(waits), DONE, q.owner)
    cdef Mailbox box
    # C7: pairs with C5 and C6
    if not cas_seq_cst_u64(cell_word(&q.cells, index), waits, taken):
        return
    write_end(q, cell, index, cancelled)
    # C8: pairs with R3 and C9
    if not cas_seq_cst_u64(cell_word(&q.cells, index), taken, done):
        claim_lost(q, index, taken)
        return
    if not queue_mailbox(q, cell.job_id >> 48, &box):
        result_ended(q, index, done)
    elif queue_deliver(q, &box, cell.job_id, index, done) != OK:
        refs_call_for_repair(&box.refs)


cdef inline bint fence_job(Queue *q, uint64_t index, uint64_t word, uint32_t state, bint cancelled) noexcept nogil:
    """Move a TAKEN job away from its worker, whose cell becomes `state`. False: not now, or not any more."""
    cdef uint64_t copy, waits
    cdef uint32_t level
    if not copy_job(q, index, word, &copy, &waits):
        return False
    # F2: pairs with C8; either the worker's result is there, or it is refused
    if not cas_seq_cst_u64(cell_word(&q.cells, index), word, word_pack(word_version(word), state, word_owner(word))):
        job_free_if(q, copy, waits)
        return False
    cell_synced(q, index)
    if state == OVERDUE:
        answer_overdue(q, copy, waits, cancelled)
        return True
    level = job_level(job_cell(q, copy))
    if queue_publish_back(q, level, word_version(waits), copy) != OK:
        refs_call_for_repair(&q.back[level])
    return True


cdef inline Code queue_cancel_running(Queue *q, uint64_t job_id) noexcept nogil:
    """End a job that has been started. EMPTY: nobody has it; LOST: not just now, it is only claimed or there is no spare cell."""
    cdef uint64_t i, word
    cdef JobCell *cell
    for i in range(q.cells.count):
        word = load_acquire_u64(cell_word(&q.cells, i))
        cell = job_cell(q, i)
        if word_state(word) != TAKEN or load_relaxed_u64(&cell.job_id) != job_id:
            continue
        # J2: pairs with J1
        if load_acquire_u32(&cell.charged) != job_charge(word):
            return LOST
        return OK if fence_job(q, i, word, OVERDUE, True) else LOST
    return EMPTY


cdef inline bint mark_all(Queue *q, uint8_t *seen) noexcept nogil:
    """`seen[cell]` for what waits, `seen[cells + cell]` for what lies in a mailbox. False: repair first."""
    cdef uint32_t level
    for level in range(<uint32_t> LEVELS):
        if not refs_mark_all(&q.back[level], &q.cells, CLAIMABLE, seen):
            return False
        if not refs_mark_all(&q.submit[level], &q.cells, CLAIMABLE, seen):
            return False
    return mark_mailboxes(q, seen + q.cells.count)


cdef inline uint64_t queue_lapse(Queue *q, uint64_t number) noexcept nogil:
    """Move on what a silent participant has in hand, or was about to hand over; how many jobs."""
    cdef uint64_t i, word
    cdef uint64_t moved = 0
    cdef uint8_t *seen = NULL
    for i in range(q.cells.count):
        word = load_acquire_u64(cell_word(&q.cells, i))
        if word_owner(word) != number:
            continue
        if word_state(word) == TAKEN:
            moved += fence_job(q, i, word, FENCED, False)
        elif word_state(word) == RETRY or word_is_one_of(word, COLLECTABLE):
            if seen == NULL:
                seen = <uint8_t *> calloc(2 * q.cells.count, 1)
                if seen == NULL or not mark_all(q, seen):
                    break
            # marked after the word was read: look at the word again
            if load_acquire_u64(cell_word(&q.cells, i)) != word:
                continue
            if word_state(word) == RETRY and not seen[i]:
                moved += 1
                rescue_unpublished(q, i, word)
            elif word_state(word) != RETRY and not seen[q.cells.count + i]:
                moved += 1
                rescue_undelivered(q, i, word)
    free(seen)
    return moved


cdef inline void queue_end_overdue(Queue *q, int64_t now) noexcept nogil:
    """Fence every job that has run out of time, and note when the next one will."""
    cdef uint64_t i, word, deadline
    cdef JobCell *cell
    for i in range(q.cells.count):
        word = load_acquire_u64(cell_word(&q.cells, i))
        if word_state(word) != TAKEN:
            continue
        cell = job_cell(q, i)
        # J2: pairs with J1
        if load_acquire_u32(&cell.charged) != job_charge(word):
            # not started by this claim: whoever has the job now has only claimed it, or buries who had it
            continue
        deadline = load_relaxed_u64(&cell.deadline_ns)
        if deadline == 0:
            continue
        if deadline > <uint64_t> now or not fence_job(q, i, word, OVERDUE, False):
            deadline_put(q, deadline if deadline > <uint64_t> now else <uint64_t> now + 100000000)

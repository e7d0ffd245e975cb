"""Repair and rescue of a queue: what was damaged is found again, what the dead have left is moved on.

The rules are those of _repair.pxd and _rescue.pxd.

A job that a dead worker had in hand is first taken over, so that one process alone writes into its cell:

    TAKEN(dead) -> TAKEN(me), version+1      then its death is written down, and
    TAKEN(me) -> RETRY(me), version+1        published in `back`; or, after max_attempts deaths,
    TAKEN(me) -> DEAD(me)                    published in the client's mailbox, so that its submitter hears of it
    DEAD(r) -> DEAD(0), version+1            told; the letter stays until it is dropped or retried

So is a result that a dead client was about to keep:

    KEPT(dead) -> KEPT(me), version+1        then when it expires is written, and
    KEPT(me) -> KEPT(0)
"""

from libc.stdint cimport int32_t, int64_t, uint8_t, uint32_t, uint64_t
from libc.stdio cimport snprintf
from libc.stdlib cimport calloc, free, malloc
from libc.string cimport memset

from subetha._atomics cimport cas_acq_rel_u64, cas_seq_cst_u64, load_acquire_u64, load_relaxed_u32, load_relaxed_u64, \
    store_release_u64
from subetha._blocks cimport (
    FALLOC_FL_KEEP_SIZE, FALLOC_FL_PUNCH_HOLE, Arena, block_is_nobodys, block_link, block_owned, block_ref, block_relink,
    block_size, fallocate_again,
)
from subetha._cells cimport (
    cell_word, word_is_one_of, word_owner, word_pack, word_state, word_version,
)
from subetha._layout cimport (
    CLAIMABLE, COLLECTABLE, COLLECTED, DEAD, DONE, EMPTY, FENCED, FREE, FREE_HOLE, KEPT, NO_PLACE, OK, OVERDUE, OWNED,
    PARKED, QUARANTINED, READY, RETRY, TAKEN, WRITING, Cause, Code, JobCell,
)
from subetha._keep cimport kept_mend, kept_take_over
from subetha._park cimport due_from_cells, parked_mend
from subetha._process cimport realtime_ns, wake_some
from subetha._queue cimport (
    CAUSES, LEVELS, UNKNOWN_CAUSE, Mailbox, Queue, cause_write, cell_synced, claim_lost, client_has_gone, is_letter, job_cell,
    job_charge, job_discard, job_free_if, job_level, queue_deliver, queue_delivered, queue_give_back, queue_mailbox,
    queue_publish_back, result_area, result_ended, result_write,
)
from subetha._repair cimport (
    refs_call_for_repair, refs_mark, refs_mark_all, refs_mend, refs_mended,
)
from subetha._rescue cimport Death, death_begin, death_end, death_goes_on, number_is_nobodys, word_of
from subetha._ring cimport ref_cell, ref_full, ref_is_live, refs_publish_due

cdef enum:
    RESCUE_PASSES = 64
    STATUS_OF_ERROR = 1
    HEADER_OF_RESULT = 7
    HELD_BY_OWNER = 1 << WRITING | 1 << TAKEN | 1 << COLLECTED | 1 << FENCED | 1 << OVERDUE


# ---- repair ----


cdef inline bint job_mend(Queue *q, uint64_t index) noexcept nogil:
    """Undo words that nobody can ever move on: unknown states, and owners that no participant is or can be.

    True: it was a job in the hands of nobody, which waits again.
    """
    cdef uint64_t word = load_acquire_u64(cell_word(&q.cells, index))
    cdef uint64_t mine
    if word_state(word) == PARKED:
        parked_mend(q, index, word)
    elif word_state(word) == KEPT:
        kept_mend(q, index, word)
    elif word_state(word) > KEPT:
        job_free_if(q, index, word)
    elif not word_is_one_of(word, HELD_BY_OWNER) or not number_is_nobodys(&q.records, word_owner(word)):
        return False
    elif word_state(word) == TAKEN:
        mine = word_pack(word_version(word) + 1, TAKEN, q.owner)
        block_relink(&q.arena, load_relaxed_u64(&job_cell(q, index).job_block), index, word_version(word))
        # C6: pairs with R3
        if cas_seq_cst_u64(cell_word(&q.cells, index), word, mine):
            rescue_put_back(q, index, mine)
            return True
    elif word_state(word) == FENCED or word_state(word) == OVERDUE:
        job_discard(q, index, word)
    else:
        job_free_if(q, index, word)
    return False


cdef inline void mark_own_results(Queue *q, Mailbox *box, uint64_t number, uint8_t *seen) noexcept nogil:
    """Set `seen[cell]` for every result of the client `number` that its mailbox leads to; another's it would only pass."""
    cdef uint64_t s, place
    for s in range(box.refs.size):
        place = load_acquire_u64(&box.refs.places[s])
        if ref_full(&box.refs, place) and ref_is_live(&box.refs, &q.cells, COLLECTABLE, place) and (
            load_relaxed_u64(&job_cell(q, ref_cell(&box.refs, place)).job_id) >> 48 == number
        ):
            seen[ref_cell(&box.refs, place)] = 1


cdef inline uint64_t repair_cells(Queue *q, const uint8_t *seen, bint *whole) noexcept nogil:
    """Publish every waiting or finished cell that no place leads to; how many. `seen`: a byte a cell for each priority, and
    one for the mailboxes."""
    cdef uint64_t i, word, job_id
    cdef uint64_t found = 0
    cdef Mailbox box
    cdef Code code
    cdef uint32_t level
    whole[0] = True
    for i in range(q.cells.count):
        word = load_acquire_u64(cell_word(&q.cells, i))
        code = EMPTY
        if word_is_one_of(word, CLAIMABLE):
            level = job_level(job_cell(q, i))
            if seen[level * q.cells.count + i]:
                continue
            code = refs_publish_due(&q.back[level], &q.cells, CLAIMABLE, word_version(word), i)
            if code == NO_PLACE:
                code = queue_publish_back(q, level, word_version(word), i)
            if code != OK:
                # no repair may be going on in this ring, or only one that has passed this cell
                refs_call_for_repair(&q.back[level])
        elif word_state(word) == DONE or (is_letter(word) and word_owner(word) != 0):
            if seen[LEVELS * q.cells.count + i]:
                continue
            job_id = load_relaxed_u64(&job_cell(q, i).job_id)
            if queue_mailbox(q, job_id >> 48, &box):
                cell_synced(q, i)
                code = refs_publish_due(&box.refs, &q.cells, COLLECTABLE, word_version(word), i)
                if code != OK:
                    refs_call_for_repair(&box.refs)
                code = queue_delivered(q, &box, job_id, i, word, code)
            else:
                result_ended(q, i, word)
        found += code == OK
        whole[0] = whole[0] and (code == OK or code == EMPTY)
    return found


cdef inline bint block_found(Queue *q, uint64_t ref) noexcept nogil:
    """Link a block, OWNED by this one, to the cell whose job or result lies in it. False: there is none."""
    cdef uint64_t i, word
    cdef JobCell *cell
    for i in range(q.cells.count):
        cell = job_cell(q, i)
        word = load_acquire_u64(cell_word(&q.cells, i))
        if (
            (load_relaxed_u64(&cell.job_block) == ref and word_is_one_of(word, CLAIMABLE | 1 << PARKED | 1 << TAKEN | 1 << DEAD))
            or (load_relaxed_u64(&cell.result_block) == ref and word_is_one_of(word, 1 << COLLECTED | 1 << KEPT | COLLECTABLE))
        ):
            # should the cell go on meanwhile, then this is a version that it has passed, and anybody's
            block_link(&q.arena, ref, i, word_version(word))
            return True
    return False


cdef inline void repair_blocks(Queue *q) noexcept nogil:
    """Blocks that nobody can ever free: back to whose job or result lies in them, or to the disk."""
    cdef Arena *arena = &q.arena
    cdef uint64_t i, word
    cdef uint32_t c
    for c in range(arena.classes):
        for i in range(arena.counts[c]):
            # B2: pairs with B1 and B4
            word = load_acquire_u64(&arena.words[c][i])
            if block_is_nobodys(&q.records, word) and cas_acq_rel_u64(
                &arena.words[c][i], word, block_owned(q.block_owner)
            ) and not block_found(q, block_ref(c, i)):
                block_punch(arena, c, i)


cdef inline int64_t queue_repair(Queue *q) noexcept nogil:
    """Make every ring, mailbox, cell and block agree again; how many jobs and results were found. -1: no memory."""
    cdef uint64_t i
    cdef uint32_t level
    cdef uint32_t back_due[3]
    cdef uint32_t submit_due[3]
    cdef Mailbox box
    cdef bint whole
    cdef uint64_t found = 0
    cdef uint8_t *seen = <uint8_t *> calloc((LEVELS + 1) * q.cells.count, 1)
    cdef uint32_t *mail_due = <uint32_t *> calloc(q.records.count, sizeof(uint32_t))
    if seen == NULL or mail_due == NULL:
        free(seen)
        free(mail_due)
        return -1
    repair_blocks(q)
    for i in range(q.cells.count):
        found += job_mend(q, i)
    for level in range(<uint32_t> LEVELS):
        back_due[level] = refs_mend(&q.back[level])
        submit_due[level] = refs_mend(&q.submit[level])
        refs_mark(&q.back[level], &q.cells, CLAIMABLE, seen + level * q.cells.count)
        refs_mark(&q.submit[level], &q.cells, CLAIMABLE, seen + level * q.cells.count)
    for i in range(q.records.count):
        if queue_mailbox(q, i + 1, &box):
            mail_due[i] = refs_mend(&box.refs)
            mark_own_results(q, &box, i + 1, seen + LEVELS * q.cells.count)
    found += repair_cells(q, seen, &whole)
    if whole:
        for level in range(<uint32_t> LEVELS):
            refs_mended(&q.back[level], back_due[level])
            refs_mended(&q.submit[level], submit_due[level])
        for i in range(q.records.count):
            if mail_due[i] and queue_mailbox(q, i + 1, &box):
                refs_mended(&box.refs, mail_due[i])
    free(seen)
    free(mail_due)
    due_from_cells(q)
    wake_some(&q.lines.items, 0x7FFFFFFF)
    return found


# ---- rescue ----


cdef inline uint32_t crc32_of(const uint8_t *data, uint64_t length) noexcept nogil:
    """zlib's CRC-32, or 1 for 0; of the few bytes that the core writes itself."""
    cdef uint32_t crc = 0xFFFFFFFF
    cdef uint64_t i
    cdef int _bit
    for i in range(length):
        crc ^= <uint32_t> data[i]
        for _bit in range(8):
            crc = crc >> 1 ^ (<uint32_t> 0xEDB88320 * (crc & 1))
    crc = ~crc
    return crc if crc else 1


cdef inline void finish_error(Queue *q, JobCell *cell, uint64_t index, int length) noexcept nogil:
    """The result frame around an error's text of `length` bytes that stands in its place already, cut where it had no room."""
    cdef uint8_t *at = result_area(q, index)
    if length > <int> q.result_bytes - HEADER_OF_RESULT - 1:
        length = <int> q.result_bytes - HEADER_OF_RESULT - 1
    at[0] = cell.job_id & 0xFF
    at[1] = (cell.job_id >> 8) & 0xFF
    at[2] = (cell.job_id >> 16) & 0xFF
    at[3] = (cell.job_id >> 24) & 0xFF
    at[4] = STATUS_OF_ERROR
    at[5] = length & 0xFF
    at[6] = length >> 8
    result_write(cell, 0, HEADER_OF_RESULT + length, crc32_of(at, HEADER_OF_RESULT + length) if q.is_durable else 0)


cdef inline void write_end(Queue *q, JobCell *cell, uint64_t index, bint cancelled) noexcept nogil:
    """Of a job that was ended while it ran: it was cancelled, or out of time."""
    cdef char *text = <char *> result_area(q, index) + HEADER_OF_RESULT
    cdef uint64_t room = q.result_bytes - HEADER_OF_RESULT
    if cancelled:
        finish_error(q, cell, index, snprintf(text, room, "JobCancelled: it was cancelled while it ran"))
    else:
        finish_error(q, cell, index, snprintf(
            text, room, "JobTimeout: it ran longer than %.3f s, its timeout", <double> cell.timeout_ms * 1e-3
        ))


cdef inline void write_letter(Queue *q, JobCell *cell, uint64_t index) noexcept nogil:
    cdef char *text = <char *> result_area(q, index) + HEADER_OF_RESULT
    cdef uint64_t room = q.result_bytes - HEADER_OF_RESULT
    cdef Cause *last = &cell.causes[(cell.attempts - 1) % CAUSES]
    if last.code == UNKNOWN_CAUSE:
        finish_error(q, cell, index, snprintf(
            text, room, "WorkerDied: in the last of %u attempts its worker (pid %u) died of an unknown cause",
            <unsigned int> cell.attempts, <unsigned int> last.pid,
        ))
    else:
        finish_error(q, cell, index, snprintf(
            text, room, "WorkerDied: in the last of %u attempts its worker (pid %u) died with %s %d",
            <unsigned int> cell.attempts, <unsigned int> last.pid,
            b"signal" if last.code < 0 else b"exit code", <int> (-last.code if last.code < 0 else last.code),
        ))


cdef inline void rescue_put_back(Queue *q, uint64_t index, uint64_t mine) noexcept nogil:
    """A job TAKEN with `mine`: back to wait."""
    if queue_give_back(q, index, mine) != OK:
        refs_call_for_repair(&q.back[job_level(job_cell(q, index))])


cdef inline Code set_aside(Queue *q, uint64_t index, uint64_t word, uint32_t state) noexcept nogil:
    """TAKEN(me) -> DEAD(me) or QUARANTINED(me), the error's text written before; its submitter is told."""
    cdef uint64_t letter = word_pack(word_version(word), state, q.owner)
    cdef uint64_t job_id = load_relaxed_u64(&job_cell(q, index).job_id)
    cdef Mailbox box
    # C8: pairs with R3 and C9
    if not cas_seq_cst_u64(cell_word(&q.cells, index), word, letter):
        claim_lost(q, index, word)
        return OK
    if queue_mailbox(q, job_id >> 48, &box):
        return queue_deliver(q, &box, job_id, index, letter)
    cell_synced(q, index)
    result_ended(q, index, letter)
    return OK


cdef inline Code quarantine_job(Queue *q, uint64_t index, uint64_t word) noexcept nogil:
    """A job that this process claimed as `word`, and whose bytes are not those that were handed in."""
    finish_error(q, job_cell(q, index), index, snprintf(
        <char *> result_area(q, index) + HEADER_OF_RESULT, q.result_bytes - HEADER_OF_RESULT,
        "ExecutionError: the job's bytes were damaged (their CRC-32 is wrong); cell %u is quarantined", <unsigned int> index,
    ))
    return set_aside(q, index, word, QUARANTINED)


cdef inline Code bury_job(Queue *q, uint64_t index, uint64_t died, uint64_t word, uint32_t pid, int32_t code) noexcept nogil:
    """A job taken over as `word` from a worker that had it as `died`: write down the death, put it back or make it a letter."""
    cdef JobCell *cell = job_cell(q, index)
    if cell.charged == job_charge(died) and cell.attempts > 0:
        cause_write(&cell.causes[(cell.attempts - 1) % CAUSES], <uint64_t> realtime_ns(), pid, code)
    if cell.attempts == 0 or cell.attempts < cell.max_attempts:
        return queue_give_back(q, index, word)
    write_letter(q, cell, index)
    return set_aside(q, index, word, DEAD)


cdef inline bint rescue_taken(Queue *q, uint64_t index, uint64_t word, uint32_t pid, int32_t code) noexcept nogil:
    """TAKEN(dead) -> TAKEN(me), version+1, and on. False: somebody was faster."""
    cdef uint64_t mine = word_pack(word_version(word) + 1, TAKEN, q.owner)
    block_relink(&q.arena, load_relaxed_u64(&job_cell(q, index).job_block), index, word_version(word))
    # C6: pairs with R3
    if not cas_seq_cst_u64(cell_word(&q.cells, index), word, mine):
        return False
    if bury_job(q, index, word, mine, pid, code) != OK:
        refs_call_for_repair(&q.back[job_level(job_cell(q, index))])
    return True


cdef inline void rescue_unpublished(Queue *q, uint64_t index, uint64_t word) noexcept nogil:
    """RETRY(dead) that no place leads to: claimed, as anyone may whom a repair has shown it, and put back."""
    cdef uint64_t mine = word_pack(word_version(word), TAKEN, q.owner)
    # C7: pairs with C5 and C6
    if cas_seq_cst_u64(cell_word(&q.cells, index), word, mine):
        rescue_put_back(q, index, mine)


cdef inline void rescue_undelivered(Queue *q, uint64_t index, uint64_t word) noexcept nogil:
    """DONE or DEAD(dead) that its client's mailbox does not hold: deliver it."""
    cdef Mailbox box
    cdef uint64_t job_id = load_relaxed_u64(&job_cell(q, index).job_id)
    if not queue_mailbox(q, job_id >> 48, &box):
        result_ended(q, index, word)
    elif queue_deliver(q, &box, job_id, index, word) != OK:
        refs_call_for_repair(&box.refs)


cdef inline bint mark_mailboxes(Queue *q, uint8_t *seen) noexcept nogil:
    cdef uint64_t i
    cdef Mailbox box
    for i in range(q.records.count):
        if queue_mailbox(q, i + 1, &box) and not refs_mark_all(&box.refs, &q.cells, COLLECTABLE, seen):
            return False
    return True


cdef inline int64_t rescue_pass(
    Queue *q, Death *death, uint32_t pid, int32_t code, uint8_t *seen, uint8_t *delivered
) noexcept nogil:
    """One pass over places and cells; how many cells were not as they must be when the number is given free. -1: repair first."""
    cdef uint64_t i, word
    cdef int64_t found = 0
    cdef uint32_t level, state
    cdef bint mail_is_marked = False
    cdef bint is_own
    memset(seen, 0, q.cells.count)
    memset(delivered, 0, q.cells.count)
    for level in range(<uint32_t> LEVELS):
        if not refs_mark_all(&q.back[level], &q.cells, CLAIMABLE, seen):
            return -1
        if not refs_mark_all(&q.submit[level], &q.cells, CLAIMABLE, seen):
            return -1
    for i in range(q.cells.count):
        word = word_of(&q.cells, i)
        state = word_state(word)
        if state == FREE:
            continue
        is_own = word_owner(word) == death.number
        if (state == DONE or (is_letter(word) and word_owner(word))) and (
            load_relaxed_u64(&job_cell(q, i).job_id) >> 48 == death.number
        ):
            # a result for the dead client, or for an earlier one of its number
            if not death_goes_on(death):
                return found
            found += 1
            result_ended(q, i, word)
            continue
        if not is_own:
            continue
        if not death_goes_on(death):
            return found
        if state == WRITING or state == COLLECTED or (state == READY and not seen[i]):
            found += 1
            job_free_if(q, i, word)
        elif state == FENCED or state == OVERDUE:
            found += 1
            job_discard(q, i, word)
        elif state == TAKEN:
            found += 1
            rescue_taken(q, i, word, pid, code)
        elif state == KEPT:
            found += 1
            kept_take_over(q, i, word)
        elif state == RETRY and not seen[i]:
            found += 1
            rescue_unpublished(q, i, word)
        elif state == DONE or is_letter(word):
            if client_has_gone(q, load_relaxed_u64(&job_cell(q, i).job_id)):
                # it may lie in a mailbox that nobody looks into any more: whoever put it there died before it saw that
                found += 1
                result_ended(q, i, word)
                continue
            if not mail_is_marked:
                mail_is_marked = True
                if not mark_mailboxes(q, delivered):
                    return -1
                # marked after the word was read: look at the word again
                if word_of(&q.cells, i) != word:
                    continue
            if not delivered[i]:
                found += 1
                rescue_undelivered(q, i, word)
    return found


cdef inline void block_punch(Arena *arena, uint32_t c, uint64_t index) noexcept nogil:
    """OWNED(me) -> punched, FREE_HOLE."""
    fallocate_again(
        arena.fd, FALLOC_FL_PUNCH_HOLE | FALLOC_FL_KEEP_SIZE, arena.data[c] + index * block_size(c), block_size(c)
    )
    # B1: pairs with B2
    store_release_u64(&arena.words[c][index], FREE_HOLE)


cdef inline uint64_t rescue_blocks(Queue *q, Death *death) noexcept nogil:
    """OWNED(dead) -> OWNED(me) -> punched, FREE_HOLE; how many."""
    cdef Arena *arena = &q.arena
    cdef uint64_t found = 0
    cdef uint64_t i, seen
    cdef uint32_t c
    for c in range(arena.classes):
        for i in range(arena.counts[c]):
            # B2: pairs with B1 and B4
            seen = load_acquire_u64(&arena.words[c][i])
            if seen & 0xF != OWNED or (seen >> 4) & 0xFFFF != death.number:
                continue
            # of whichever incarnation: the word has it, so a CAS from it cannot hit a later one's
            if not death_goes_on(death):
                return found
            found += 1
            if cas_acq_rel_u64(&arena.words[c][i], seen, block_owned(q.block_owner)):
                block_punch(arena, c, i)
    return found


cdef inline int64_t queue_rescue(Queue *q, uint64_t slot, uint64_t status, int32_t code) noexcept nogil:
    """Rescue what the dead holder of `slot` has left, pass after pass until one finds nothing. 1; 0: it is not dead any more;
    -1: no memory. Where it cannot end (others damage the places) the record stays DYING for the next one who looks."""
    cdef Death death
    cdef int64_t found
    cdef int _pass
    cdef uint32_t pid = load_relaxed_u32(&q.records.first[slot].pid)
    cdef uint8_t *seen
    if not death_begin(&q.records, slot, status, &death):
        return 0
    seen = <uint8_t *> malloc(2 * q.cells.count)
    if seen == NULL:
        return -1
    for _pass in range(RESCUE_PASSES):
        found = rescue_pass(q, &death, pid, code, seen, seen + q.cells.count)
        if found == 0 and rescue_blocks(q, &death) == 0:
            # it may have been looking at the parked cells, or had parked a job and not said so
            due_from_cells(q)
            death_end(&death)
            break
        if found < 0 and queue_repair(q) < 0:
            break
    free(seen)
    wake_some(&q.lines.items, 0x7FFFFFFF)
    wake_some(&q.lines.space, 0x7FFFFFFF)
    return 1

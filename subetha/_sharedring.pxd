"""A ring used alone: cells with messages and the ring of references to them, in one file.

A deque used alone (_shareddeque.pxd) is such a ring, for its put-backs, and beside it the places of the deque (`ends`).

    push     FREE -> WRITING(me), write, READY(me), publish
    pop      READY, RETRY -> TAKEN(me), copy, FREE, pass the place
    release  TAKEN(me) -> RETRY(me) version+1, publish

What a death leaves: WRITING or TAKEN with a dead owner; READY or RETRY that no place leads to (its push had not returned).
"""

from libc.stdint cimport int64_t, uint8_t, uint32_t, uint64_t
from libc.string cimport memcpy, memset

from subetha._atomics cimport cas_acq_rel_u64, cas_seq_cst_u64, load_acquire_u64, load_relaxed_u64, store_relaxed_u64
from subetha._cells cimport (
    Cells, Filled, cell_free_if, cell_free_owned, cell_publish, cell_word, cells_acquire, word_is_one_of, word_owner, word_pack,
    word_state, word_version,
)
from subetha._deque cimport Ends, ends_mark, ends_mend, ends_unchanged
from subetha._heartbeat cimport Records
from subetha._layout cimport (
    CLAIMABLE, EMPTY, FREE, FULL, LOST, NO_PLACE, OK, READY, RETRY, TAKEN, WRITING, Code, RingCell, RingLines,
)
from subetha._process cimport is_time_to_look, wake_one, wake_some
from subetha._repair cimport cell_mend, refs_call_for_repair, refs_look, refs_mark, refs_mark_all, refs_mend, refs_mended
from subetha._rescue cimport Death, death_begin, death_end, death_goes_on, is_dead, word_of
from subetha._ring cimport Ref, Refs, refs_pass, refs_peek, refs_publish, refs_publish_due, refs_waits

cdef enum:
    PASSES = 64     # of one rescue; others may put something in the dead one's name between two of them, but not for long

ctypedef struct Ring:
    Cells cells
    Refs refs
    Ends ends           # of a deque; in a ring its size is 0
    RingLines *lines
    uint64_t owner      # this handle's number
    uint64_t hint       # private: where a free cell may be
    int64_t looked_ns   # private: when the hints were last looked for in the places


cdef inline Code ring_write(Ring *ring, const uint8_t *data, Py_ssize_t length, Filled *out) noexcept nogil:
    """Claim a FREE cell and write; it stays WRITING."""
    cdef RingCell *cell
    cdef Code code = cells_acquire(&ring.cells, 0, &ring.hint, ring.owner, &out.cell, &out.word)
    if code != OK:
        return code
    cell = <RingCell *> cell_word(&ring.cells, out.cell)
    cell.length = <uint32_t> length
    memcpy(<uint8_t *> cell + sizeof(RingCell), data, length)
    return OK


cdef inline Code ring_fill(Ring *ring, const uint8_t *data, Py_ssize_t length, Filled *out) noexcept nogil:
    """Claim a FREE cell, write, READY. The reference is still to be published."""
    cdef Code code = ring_write(ring, data, length, out)
    if code == OK:
        cell_publish(&ring.cells, out.cell, out.word, READY)
    return code


cdef inline Code ring_publish(Ring *ring, Filled *filled) noexcept nogil:
    return refs_publish(&ring.refs, &ring.cells, CLAIMABLE, word_version(filled.word), filled.cell)


cdef inline bint ring_withdraw(Ring *ring, Filled *filled) noexcept nogil:
    """READY -> FREE. False where somebody has it already: then it was pushed."""
    if cell_free_if(&ring.cells, filled.cell, word_pack(word_version(filled.word), READY, ring.owner)):
        wake_one(&ring.lines.space)
        return True
    return False


cdef inline Code ring_take(Ring *ring, Ref *ref) noexcept nogil:
    """READY or RETRY -> TAKEN(me) on the oldest; `ref.word` is the word held then. The place is still to be passed."""
    cdef Code code
    cdef uint64_t taken
    while True:
        code = refs_peek(&ring.refs, &ring.cells, CLAIMABLE, ref)
        if code != OK:
            return code
        taken = word_pack(word_version(ref.word), TAKEN, ring.owner)
        # C7: pairs with C5 and C6; whoever loses finds the place stale
        if cas_acq_rel_u64(cell_word(&ring.cells, ref.cell), ref.word, taken):
            ref.word = taken
            return OK


cdef inline void ring_free(Ring *ring, Ref *ref) noexcept nogil:
    """TAKEN(me) -> FREE, then the place; the locked instruction of the place comes before the look at the waiters."""
    cell_free_owned(&ring.cells, ref.cell, ref.word)
    refs_pass(&ring.refs, ref)
    store_relaxed_u64(&ring.hint, ref.cell)
    wake_one(&ring.lines.space)


cdef inline Code ring_put_back(Ring *ring, uint64_t index, uint64_t word) noexcept nogil:
    """TAKEN(me) -> RETRY(me) with the next version, then published."""
    cdef uint64_t back = word_pack(word_version(word) + 1, RETRY, ring.owner)
    cdef Code code
    # C6: pairs with R3
    if not cas_seq_cst_u64(cell_word(&ring.cells, index), word, back):
        return LOST
    code = refs_publish(&ring.refs, &ring.cells, CLAIMABLE, word_version(back), index)
    wake_one(&ring.lines.items)
    return code


cdef inline Code ring_publish_found(Ring *ring, uint64_t version, uint64_t index) noexcept nogil:
    """Publish a waiting cell that no place leads to, also while a repair is due.

    Where damage has filled every place with references to other waiting cells, the oldest of these are claimed and put
    back, which makes all their earlier references stale.
    """
    cdef Code code
    cdef Ref ref
    cdef uint64_t _n
    for _n in range(ring.cells.count + 1):
        code = refs_publish_due(&ring.refs, &ring.cells, CLAIMABLE, version, index)
        if code != NO_PLACE or ring_take(ring, &ref) != OK:
            return code
        refs_pass(&ring.refs, &ref)
        ring_put_back(ring, ref.cell, ref.word)
    return NO_PLACE


cdef inline Code ring_has_items(void *context, bint thorough) noexcept nogil:
    cdef Ring *ring = <Ring *> context
    cdef Ref ref
    if not thorough:
        if refs_waits(&ring.refs):
            return EMPTY
    elif is_time_to_look(&ring.looked_ns):
        refs_look(&ring.refs)
    return refs_peek(&ring.refs, &ring.cells, CLAIMABLE, &ref)


cdef inline Code ring_has_space(void *context, bint thorough) noexcept nogil:
    """While spinning one cell is looked at, some way ahead; before a sleep every one.

    Cells come free in about the order of the ring, so that one tells of a whole run of free cells: a submitter that went on
    with the first would move in step with the taker, both at the speed of one cache line.
    """
    cdef Ring *ring = <Ring *> context
    cdef uint64_t i = (load_relaxed_u64(&ring.hint) + ring.cells.count // 8) % ring.cells.count
    if word_state(load_acquire_u64(cell_word(&ring.cells, i))) == FREE:
        return OK
    if thorough:
        for i in range(ring.cells.count):
            if word_state(load_acquire_u64(cell_word(&ring.cells, i))) == FREE:
                store_relaxed_u64(&ring.hint, i)
                return OK
    return FULL


# ---- repair and rescue, of a ring and of a deque ----


cdef inline bint ring_mark_all(Ring *ring, uint8_t *seen) noexcept nogil:
    """Set `seen[cell]` for every cell that a live reference leads to. False where one may have been missed: repair first."""
    return refs_mark_all(&ring.refs, &ring.cells, CLAIMABLE, seen) and (
        ring.ends.size == 0 or ends_mark(&ring.ends, &ring.cells, seen)
    )


cdef inline uint64_t ring_repair(Ring *ring, uint64_t most_owner, uint8_t *seen) noexcept nogil:
    """Make places and cells agree again; how many messages were found. `seen`: a zeroed byte a cell."""
    cdef uint64_t i, word
    cdef uint64_t found = 0
    cdef bint whole = True
    cdef Code code
    cdef uint64_t pushes = 0
    cdef uint32_t due = refs_mend(&ring.refs)
    if ring.ends.size != 0:
        ends_mend(&ring.ends)
        # S1: pairs with S2
        pushes = load_acquire_u64(ring.ends.pushes)
        ends_mark(&ring.ends, &ring.cells, seen)
    refs_mark(&ring.refs, &ring.cells, CLAIMABLE, seen)
    for i in range(ring.cells.count):
        word = cell_mend(&ring.cells, i, most_owner, ring.owner)
        if not seen[i] and word_is_one_of(word, CLAIMABLE):
            if ring.ends.size != 0 and word_state(word) == READY and not ends_unchanged(&ring.ends, pushes):
                # of a push that goes on: it becomes visible with all others of its batch, or not at all
                continue
            code = ring_publish_found(ring, word_version(word), i)
            found += code == OK
            whole = whole and code == OK
    if whole:
        refs_mended(&ring.refs, due)
    wake_some(&ring.lines.items, 0x7FFFFFFF)
    return found


cdef inline uint64_t ring_rescue_pass(Ring *ring, Death *death, const uint8_t *seen) noexcept nogil:
    """One pass over the cells; how many were not as they must be when the number is given free."""
    cdef uint64_t i, word, back
    cdef uint64_t found = 0
    for i in range(ring.cells.count):
        word = word_of(&ring.cells, i)
        if word_owner(word) != death.number:
            continue
        if not death_goes_on(death):
            return found
        if word_state(word) == WRITING or (word_state(word) == READY and not seen[i]):
            found += 1
            # C4: pairs with C1
            cell_free_if(&ring.cells, i, word)
        elif word_state(word) == TAKEN or (word_state(word) == RETRY and not seen[i]):
            found += 1
            back = word_pack(word_version(word) + 1, RETRY, ring.owner)
            # C6: pairs with R3
            if cas_seq_cst_u64(cell_word(&ring.cells, i), word, back):
                if ring_publish_found(ring, word_version(back), i) != OK:
                    refs_call_for_repair(&ring.refs)
    return found


cdef inline bint ring_rescue(Ring *ring, Records *records, uint64_t slot, uint64_t status, uint8_t *seen) noexcept nogil:
    """Rescue what the dead holder of `slot` has left, pass after pass until one finds nothing. False: it is not dead any more.

    Where it cannot end (others damage the places) the record stays DYING for the next one who looks.
    """
    cdef Death death
    cdef int _pass
    if not death_begin(records, slot, status, &death):
        return False
    for _pass in range(PASSES):
        memset(seen, 0, ring.cells.count)
        if not ring_mark_all(ring, seen):
            memset(seen, 0, ring.cells.count)
            ring_repair(ring, records.count, seen)
        elif ring_rescue_pass(ring, &death, seen) == 0:
            death_end(&death)
            break
    wake_some(&ring.lines.items, 0x7FFFFFFF)
    wake_some(&ring.lines.space, 0x7FFFFFFF)
    return True


cdef inline uint64_t ring_rescue_dead(
    Ring *ring, Records *records, int fd, int64_t lock_base, uint8_t *seen
) noexcept nogil:
    """Rescue what every dead participant has left; how many of them."""
    cdef uint64_t slot, status
    cdef uint64_t rescued = 0
    for slot in range(records.count):
        if slot + 1 != ring.owner and is_dead(records, fd, lock_base, slot, &status):
            rescued += ring_rescue(ring, records, slot, status, seen)
    return rescued

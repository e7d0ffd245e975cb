"""A deque used alone: cells with messages, a deque of references to them, and a ring `back` for put-backs, in one file.

    push     FREE -> WRITING(me), write; then all of a batch READY(me), their places, and bottom
    pop      READY -> TAKEN(me) on the newest, bottom, top; copy, FREE
    steal    READY -> TAKEN(me) on the oldest, top; copy, FREE
    release  TAKEN(me) -> RETRY(me) version+1, published in `back`, which every take looks at first

The owner's word in the file says who may push: a participant and its incarnation. It is taken by CAS once the one that it
names has left, or is dead and rescued to the end.

The functions at the end serve both a ring and a deque: they look whether there are ends.
"""

from libc.stdint cimport int64_t, uint8_t, uint64_t
from libc.stdlib cimport calloc, free

from subetha._atomics cimport cas_seq_cst_u64, load_acquire_u64, load_relaxed_u64, load_seq_cst_u64, store_relaxed_u64, \
    store_release_u64
from subetha._cells cimport Filled, cell_free_if, cell_word, word_state
from subetha._deque cimport (
    Ends, ends_prefetch, ends_push, ends_settle, ends_take_newest, ends_take_oldest,
    ends_unchanged, ends_wait,
)
from subetha._layout cimport CLAIMABLE, CORRUPT, EMPTY, LOST, OK, READY, Code
from subetha._process cimport is_time_to_look, wake_one
from subetha._repair cimport refs_call_for_repair, refs_look
from subetha._ring cimport Ref, unlikely, refs_pass, refs_peek, refs_prefetch, refs_waits
from subetha._sharedring cimport Ring, ring_free, ring_has_items, ring_mark_all, ring_put_back, ring_take


# ---- the owner ----


cdef inline bint deque_is_owned(Ring *ring, uint64_t mine) noexcept nogil:
    # O1: pairs with O2
    return load_acquire_u64(ring.ends.owner) == mine


cdef inline bint deque_own(Ring *ring, uint64_t seen, uint64_t mine) noexcept nogil:
    """Become the owner in the place of `seen`, which nobody is any more. False: somebody else was faster."""
    cdef uint64_t pushes
    # O2: pairs with O1; whoever dies from here on has left what any owner may leave
    if not cas_seq_cst_u64(ring.ends.owner, seen, mine):
        return False
    ends_settle(&ring.ends)
    pushes = load_relaxed_u64(ring.ends.pushes)
    if pushes & 1:
        # what a push that was cut had made READY is free again: its owner was rescued before
        # S2: pairs with S1
        store_release_u64(ring.ends.pushes, pushes + 1)
    return True


cdef inline void deque_disown(Ring *ring, uint64_t mine) noexcept nogil:
    # O2: pairs with O1
    cas_seq_cst_u64(ring.ends.owner, mine, 0)


# ---- push and pop, by the owner, one thread at a time ----


cdef inline void ends_settle_damaged(Ring *ring) noexcept nogil:
    """Another process has damaged top or bottom: begin again, and let a repair find what was visible."""
    ends_settle(&ring.ends)
    refs_call_for_repair(&ring.refs)


cdef inline bint ends_have_room(Ends *ends, uint64_t n) noexcept nogil:
    """Are there places for `n` more, at most as many as there are cells?"""
    # E3: pairs with E4
    cdef uint64_t span = load_relaxed_u64(ends.bottom) - load_seq_cst_u64(ends.top)
    return span <= <uint64_t> ends.size - n


cdef inline void deque_make_room(Ring *ring, uint64_t n) noexcept nogil:
    """Places for `n` more. What stands in the way at the top is stepped over where it is gone, else goes on into `back`.

    There are twice as many places as cells, so live references are in the way only beside a lot that damage has left.
    """
    cdef Ends *ends = &ring.ends
    cdef Ref ref
    cdef uint64_t top
    cdef int64_t span
    cdef uint64_t _n
    for _n in range(<uint64_t> ends.size + 8):
        # E3: pairs with E4
        top = load_seq_cst_u64(ends.top)
        span = <int64_t> (load_relaxed_u64(ends.bottom) - top)
        if span < 0 or span > ends.size:
            ends_settle_damaged(ring)
        elif span + <int64_t> n <= ends.size:
            return
        elif ends_take_oldest(ends, &ring.cells, ring.owner, &ref) == OK:
            if ring_put_back(ring, ref.cell, ref.word) != OK:
                refs_call_for_repair(&ring.refs)


cdef inline bint deque_push(Ring *ring, const Filled *filled, uint64_t n, uint64_t mine) noexcept nogil:
    """Show cells that were written, all at once. False: this is not the owner any more."""
    if not deque_is_owned(ring, mine):
        return False
    if unlikely(not ends_have_room(&ring.ends, n)):
        deque_make_room(ring, n)
    ends_push(&ring.ends, &ring.cells, filled, n)
    return True


cdef inline Code deque_take(Ring *ring, Ref *ref, bint newest) noexcept nogil:
    """Take a put-back, else the newest or the oldest. EMPTY only where nothing waited at one moment."""
    cdef uint64_t head
    cdef Code code
    while True:
        code = ring_take(ring, ref)
        if code == OK:
            refs_pass(&ring.refs, ref)
        if code != EMPTY:
            return code
        # R1: pairs with R5
        head = load_acquire_u64(ring.refs.head)
        if newest:
            code = ends_take_newest(&ring.ends, &ring.cells, ring.owner, ref)
            if code == CORRUPT:
                ends_settle_damaged(ring)
        else:
            code = ends_take_oldest(&ring.ends, &ring.cells, ring.owner, ref)
        if code != EMPTY:
            return code
        # put back meanwhile: what was visible in the deque when `back` was looked at may be in `back` now
        code = refs_peek(&ring.refs, &ring.cells, CLAIMABLE, ref)
        if code == EMPTY and load_acquire_u64(ring.refs.head) == head:
            return EMPTY
        if code == CORRUPT:
            return CORRUPT


cdef inline Code deque_pop(Ring *ring, Ref *ref, uint64_t mine) noexcept nogil:
    """LOST: this is not the owner any more."""
    return deque_take(ring, ref, True) if deque_is_owned(ring, mine) else LOST


# ---- looking for what damage hides ----


cdef inline void deque_look(Ring *ring) noexcept nogil:
    """Call for a repair where a message waits that nothing leads to although no push goes on."""
    cdef uint64_t i
    # S1: pairs with S2
    cdef uint64_t before = load_acquire_u64(ring.ends.pushes)
    cdef uint8_t *seen
    if before & 1:
        return
    seen = <uint8_t *> calloc(ring.cells.count, 1)
    if seen == NULL:
        # the next look may have memory
        return
    if ring_mark_all(ring, seen):
        for i in range(ring.cells.count):
            if seen[i] or word_state(load_acquire_u64(cell_word(&ring.cells, i))) != READY:
                continue
            if ends_unchanged(&ring.ends, before):
                refs_call_for_repair(&ring.refs)
            break
    free(seen)


# ---- a ring or a deque ----


cdef inline Code take_oldest(Ring *ring, Ref *ref) noexcept nogil:
    return ring_take(ring, ref) if ring.ends.size == 0 else deque_take(ring, ref, False)


cdef inline void pass_taken(Ring *ring, Ref *ref) noexcept nogil:
    """After `take_oldest`, while the cell is held or once it is free; a deque's is passed when it is taken."""
    if ring.ends.size == 0:
        refs_pass(&ring.refs, ref)


cdef inline void free_taken(Ring *ring, Ref *ref) noexcept nogil:
    """TAKEN(me) -> FREE, and the place, where that is not passed yet."""
    if ring.ends.size == 0:
        ring_free(ring, ref)
        return
    # C4: pairs with C1; a locked instruction, since a look at the waiters follows
    cell_free_if(&ring.cells, ref.cell, ref.word)
    store_relaxed_u64(&ring.hint, ref.cell)
    wake_one(&ring.lines.space)


cdef inline void prefetch_oldest(Ring *ring, int n) noexcept nogil:
    if ring.ends.size == 0:
        refs_prefetch(&ring.refs, &ring.cells, n)
    else:
        ends_prefetch(&ring.ends, &ring.cells, n)


cdef inline Code has_items(void *context, bint thorough) noexcept nogil:
    cdef Ring *ring = <Ring *> context
    cdef Ref ref
    cdef Code code
    if ring.ends.size == 0:
        return ring_has_items(context, thorough)
    if not thorough:
        return EMPTY if refs_waits(&ring.refs) and not ends_wait(&ring.ends) else OK
    if is_time_to_look(&ring.looked_ns):
        refs_look(&ring.refs)
        deque_look(ring)
    code = refs_peek(&ring.refs, &ring.cells, CLAIMABLE, &ref)
    return code if code != EMPTY or not ends_wait(&ring.ends) else OK

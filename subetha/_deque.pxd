"""A deque of references to cells: one owner pushes and pops at the bottom, anyone takes at the top.

    top       the oldest position that may hold a waiting reference; everyone advances it, by CAS
    bottom    the position that is filled next; stored by the owner alone

Position p lies in place p % places, which has the words of a ring's places (_ring.pxd). Only the owner writes them, and
nobody frees them: inside [top, bottom) a reference is visible, outside it is none. The cell decides who got a message; top
and bottom decide what can be seen, and so differ from Chase and Lev's where these would lose a message to a death:

    push   fill places, then bottom = b + n: one store shows all of them
    pop    CAS the newest one's cell; then bottom = b, and a look at top. Where that is b as well the position is used up:
           top = b + 1, bottom = b + 1. These steps follow whether or not the cell was got
    take   read top, bottom, the place; CAS the cell; always CAS top from t to t + 1, so that one whose cell is gone is
           stepped over by anyone

What a death leaves: a place below bottom whose cell is taken (stepped over); a bottom that is top - 1 or top (empty; a new
owner uses up the position top before it pushes, since a thief that woke late may still advance top over it); filled places
from bottom on, of a push that had not returned (none of its messages is there); an odd `pushes`.

`pushes` is odd while cells of a push are READY and not visible yet. A repair leaves READY cells alone then, since publishing
one of them would show a part of a batch.

Source: D. Chase, Y. Lev, Dynamic circular work-stealing deque (2005); the order of the steps: models/deque.pml.
"""

from libc.stdint cimport int64_t, uint8_t, uint32_t, uint64_t

from subetha._atomics cimport (
    cas_acq_rel_u64, cas_seq_cst_u64, load_acquire_u64, load_relaxed_u64, load_seq_cst_u64, store_relaxed_u64,
    store_release_u64, store_seq_cst_u64,
)
from subetha._cells cimport (
    Cells, Filled, cell_prefetch, cell_publish, cell_word, word_is_one_of, word_pack, word_version,
)
from subetha._layout cimport CLAIMABLE, CORRUPT, EMPTY, OK, READY, TAKEN, Code, DequeLines
from subetha._ring cimport (
    Ref, Refs, ref_cell, ref_empty, ref_full_at, ref_full_word, ref_is_live, ref_version_is, refs_init_places,
)

ctypedef struct Ends:
    Refs refs               # places and their widths; the hints are a ring's
    int64_t size            # places; 0: this is a ring, which has no ends
    uint64_t *top
    uint64_t *bottom
    uint64_t *owner         # incarnation << 16 | number; 0: nobody
    uint64_t *pushes


cdef inline void ends_init(Ends *ends, DequeLines *lines, uint64_t *places, uint32_t cell_bits) noexcept nogil:
    ends.top = &lines.top
    ends.bottom = &lines.bottom
    ends.owner = &lines.owner
    ends.pushes = &lines.pushes
    refs_init_places(&ends.refs, places, cell_bits)
    ends.size = <int64_t> ends.refs.size


cdef inline bint ends_impossible(Ends *ends, int64_t span) noexcept nogil:
    """Can `bottom - top` be nothing that calls and deaths leave?"""
    return span > ends.size or span < -ends.size


cdef inline uint64_t *ends_place(Ends *ends, uint64_t position) noexcept nogil:
    return &ends.refs.places[position & ends.refs.size_mask]


cdef inline void ends_advance(Ends *ends, uint64_t top) noexcept nogil:
    # E4: pairs with E3; whoever loses was overtaken
    cas_seq_cst_u64(ends.top, top, top + 1)


cdef inline bint ends_claim(Ends *ends, Cells *cells, uint64_t position, uint64_t number, Ref *out) noexcept nogil:
    """READY or RETRY -> TAKEN(number) on the cell that a position's place leads to. False: it is gone, for ever."""
    cdef uint64_t place = load_acquire_u64(ends_place(ends, position))
    cdef uint64_t cell = ref_cell(&ends.refs, place)
    cdef uint64_t word
    if not ref_full_at(&ends.refs, place, position) or cell >= cells.count:
        return False
    # R3: pairs with C5, C6 and C8
    word = load_acquire_u64(cell_word(cells, cell))
    if not ref_version_is(&ends.refs, place, word_version(word)) or not word_is_one_of(word, CLAIMABLE):
        return False
    out.cell = cell
    out.word = word_pack(word_version(word), TAKEN, number)
    # C7: pairs with C5 and C6
    return cas_acq_rel_u64(cell_word(cells, cell), word, out.word)


cdef inline Code ends_take_oldest(Ends *ends, Cells *cells, uint64_t number, Ref *out) noexcept nogil:
    """Take at the top. EMPTY only where nothing was visible at one moment. CORRUPT: top and bottom are impossible."""
    cdef uint64_t top
    cdef int64_t span
    cdef bint got
    cdef int64_t tries = 0
    while tries < 4 * ends.size + 1024:
        tries += 1
        # E3: pairs with E4
        top = load_seq_cst_u64(ends.top)
        # E1: pairs with E2; after top, which only grows: what is empty by this pair was empty when bottom was read
        span = <int64_t> (load_seq_cst_u64(ends.bottom) - top)
        if ends_impossible(ends, span):
            if load_seq_cst_u64(ends.top) == top:
                return CORRUPT
            # others went on between the two loads
            continue
        if span <= 0:
            return EMPTY
        got = ends_claim(ends, cells, top, number, out)
        ends_advance(ends, top)
        if got:
            return OK
    return CORRUPT


cdef inline Code ends_take_newest(Ends *ends, Cells *cells, uint64_t number, Ref *out) noexcept nogil:
    """Take at the bottom; by the owner, one thread at a time."""
    cdef uint64_t bottom, top
    cdef int64_t span
    cdef bint got
    cdef int64_t tries = 0
    while tries < 4 * ends.size + 1024:
        tries += 1
        bottom = load_relaxed_u64(ends.bottom) - 1
        # E3: pairs with E4
        span = <int64_t> (bottom - load_seq_cst_u64(ends.top))
        if span < -1 or span >= ends.size:
            return CORRUPT
        if span < 0:
            return EMPTY
        got = ends_claim(ends, cells, bottom, number, out)
        # E2: pairs with E1; seq_cst before the load of top: a thief that advances top over this position is seen here
        store_seq_cst_u64(ends.bottom, bottom)
        # E3: pairs with E4
        top = load_seq_cst_u64(ends.top)
        if <int64_t> (bottom - top) <= 0:
            if bottom == top:
                ends_advance(ends, top)
            # E2: pairs with E1
            store_release_u64(ends.bottom, bottom + 1)
        if got:
            return OK
    return CORRUPT


cdef inline void ends_push(Ends *ends, Cells *cells, const Filled *filled, uint64_t n) noexcept nogil:
    """Make cells READY and show them all at once; by the owner, one thread at a time, where there is room for `n` places."""
    cdef uint64_t bottom = load_relaxed_u64(ends.bottom)
    cdef uint64_t pushes = load_relaxed_u64(ends.pushes) | 1
    cdef uint64_t i
    # before the first READY, which is a release store: whoever sees that finds this odd, or changed
    store_relaxed_u64(ends.pushes, pushes)
    for i in range(n):
        cell_publish(cells, filled[i].cell, filled[i].word, READY)
        store_relaxed_u64(
            ends_place(ends, bottom + i),
            ref_empty(&ends.refs, (bottom + i) >> ends.refs.size_bits)
            | ref_full_word(&ends.refs, word_version(filled[i].word), filled[i].cell),
        )
    # E2: pairs with E1; with the places before it; seq_cst, since a look at the waiters' word follows (W1)
    store_seq_cst_u64(ends.bottom, bottom + n)
    # S2: pairs with S1
    store_release_u64(ends.pushes, pushes + 1)


cdef inline void ends_settle(Ends *ends) noexcept nogil:
    """Use up the position top where nothing is visible, or top and bottom are impossible; by an owner that just became it."""
    cdef uint64_t top = load_seq_cst_u64(ends.top)
    cdef int64_t span = <int64_t> (load_relaxed_u64(ends.bottom) - top)
    if 0 < span <= ends.size:
        return
    ends_advance(ends, top)
    # E2: pairs with E1
    store_seq_cst_u64(ends.bottom, load_seq_cst_u64(ends.top))


cdef inline void ends_mend(Ends *ends) noexcept nogil:
    """Where top and bottom are impossible nothing is visible from here on; whoever mends publishes the messages elsewhere."""
    cdef uint64_t top = load_seq_cst_u64(ends.top)
    cdef uint64_t bottom = load_seq_cst_u64(ends.bottom)
    if ends_impossible(ends, <int64_t> (bottom - top)) and load_seq_cst_u64(ends.top) == top:
        ends_advance(ends, top)
        # E2: pairs with E1; an owner that stores its own at the same time is right
        cas_seq_cst_u64(ends.bottom, bottom, top + 1)


cdef inline bint ends_mark(Ends *ends, Cells *cells, uint8_t *seen) noexcept nogil:
    """Set `seen[cell]` for every cell that a visible reference leads to. False: top and bottom are impossible."""
    # E1: pairs with E2; bottom before top, the other way round than a thief: a new owner between the two shows too much, if
    # anything, and never a reference that is none
    cdef uint64_t bottom = load_seq_cst_u64(ends.bottom)
    # E3: pairs with E4
    cdef uint64_t position = load_seq_cst_u64(ends.top)
    cdef uint64_t place
    if <int64_t> (bottom - position) > ends.size:
        return False
    while <int64_t> (bottom - position) > 0:
        place = load_acquire_u64(ends_place(ends, position))
        if ref_full_at(&ends.refs, place, position) and ref_is_live(&ends.refs, cells, CLAIMABLE, place):
            seen[ref_cell(&ends.refs, place)] = 1
        position += 1
    return True


cdef inline bint ends_unchanged(Ends *ends, uint64_t pushes) noexcept nogil:
    """Has no push gone on since `pushes` was read? Asked after a cell's word was read that no visible reference leads to."""
    # S1: pairs with S2
    return pushes & 1 == 0 and load_acquire_u64(ends.pushes) == pushes


cdef inline bint ends_wait(Ends *ends) noexcept nogil:
    """Is something visible, or impossible?"""
    # E3: pairs with E4
    cdef uint64_t top = load_seq_cst_u64(ends.top)
    # E1: pairs with E2
    cdef int64_t span = <int64_t> (load_seq_cst_u64(ends.bottom) - top)
    return span > 0 or span < -ends.size


cdef inline void ends_prefetch(Ends *ends, Cells *cells, int n) noexcept nogil:
    """Ask for the cells of the next `n` references."""
    cdef uint64_t top = load_relaxed_u64(ends.top)
    cdef int64_t span = <int64_t> (load_relaxed_u64(ends.bottom) - top)
    cdef int i
    for i in range(n):
        if i >= span:
            return
        cell_prefetch(cells, ref_cell(&ends.refs, load_relaxed_u64(ends_place(ends, top + <uint64_t> i))))


cdef inline uint64_t ends_length(Ends *ends) noexcept nogil:
    """How many references are visible; those whose cells are taken count until somebody steps over them."""
    cdef uint64_t bottom = load_acquire_u64(ends.bottom)
    cdef int64_t span = <int64_t> (bottom - load_acquire_u64(ends.top))
    if span < 0:
        return 0
    return <uint64_t> (span if span < ends.size else ends.size)

"""A ring of references to cells: many publishers, many takers, no waiting for anybody.

A place is one word: lap | full | version | cell number. Positions count up and wrap; position p lies in place p % places
and has lap p / places (compared modulo). The places are twice the cells, so live references always fit.

    (lap, empty) --publish: CAS--> (lap, full, version, cell) --take: CAS--> (lap+1, empty)

Publishing is one CAS of a finished payload, so a dead or stopped process leaves no hole. A taker first gets the cell
(CAS of its word), then frees the place. A place whose cell is not claimable with that version is stale; whoever meets it
frees it. The cell decides who has a job: `head` and `tail` are hints that anyone may advance and that one bounded scan
finds again.

What a death leaves: a full place whose cell is taken (stale, freed by the next one who looks), or a hint one behind
(advanced by the next one who looks).

Source: the places follow Michael and Scott's tagged slots; laps as in Vyukov's bounded MPMC queue, without its holes.
"""

from libc.stdint cimport int64_t, uint32_t, uint64_t

from subetha._atomics cimport (
    cas_acq_rel_u64, cas_seq_cst_u64, load_acquire_u64, load_relaxed_u32, load_relaxed_u64, load_seq_cst_u64,
)
from subetha._cells cimport Cells, cell_prefetch, cell_word, word_is_one_of, word_version
from subetha._layout cimport CORRUPT, EMPTY, NO_PLACE, OK, Code, RingLines

cdef extern from * nogil:
    bint likely(bint condition)
    bint unlikely(bint condition)

ctypedef struct Refs:
    uint64_t *tail
    uint64_t *head
    uint32_t *due           # bit 0: a repair goes on, or its repairer has died; above it the lap that it gives
    uint64_t *places
    uint64_t size           # places, a power of two
    uint64_t size_mask
    uint64_t position_mask  # positions wrap where laps do
    uint64_t cell_mask      # the fields of a place's word
    uint64_t version_mask   # before its shift
    uint64_t full_bit
    uint32_t size_bits
    uint32_t cell_bits
    uint32_t lap_bits
    uint32_t lap_shift

ctypedef struct Ref:
    uint64_t position
    uint64_t place          # the place's word as read
    uint64_t cell
    uint64_t word           # the cell's word as read


cdef inline void refs_init_places(Refs *refs, uint64_t *places, uint32_t cell_bits) noexcept nogil:
    """The widths of a place's word, which a deque shares."""
    cdef uint32_t lap_bits = (63 - cell_bits) // 2
    cdef uint32_t version_bits = 63 - cell_bits - lap_bits
    refs.places = places
    refs.cell_bits = cell_bits
    refs.size_bits = cell_bits + 1
    refs.lap_bits = lap_bits
    refs.lap_shift = 64 - lap_bits
    refs.size = <uint64_t> 1 << refs.size_bits
    refs.size_mask = refs.size - 1
    refs.position_mask = (<uint64_t> 1 << (lap_bits + refs.size_bits)) - 1
    refs.cell_mask = (<uint64_t> 1 << cell_bits) - 1
    refs.version_mask = (<uint64_t> 1 << version_bits) - 1
    refs.full_bit = <uint64_t> 1 << (refs.lap_shift - 1)


cdef inline void refs_init(Refs *refs, RingLines *lines, uint64_t *places, uint32_t cell_bits) noexcept nogil:
    refs.tail = &lines.tail
    refs.head = &lines.head
    refs.due = &lines.due
    refs_init_places(refs, places, cell_bits)


cdef inline uint64_t ref_lap(Refs *refs, uint64_t place) noexcept nogil:
    return place >> refs.lap_shift


cdef inline bint ref_full(Refs *refs, uint64_t place) noexcept nogil:
    return place & refs.full_bit != 0


cdef inline uint64_t ref_cell(Refs *refs, uint64_t place) noexcept nogil:
    return place & refs.cell_mask


cdef inline uint64_t ref_full_word(Refs *refs, uint64_t version, uint64_t cell) noexcept nogil:
    """A place's word, but for the lap."""
    return refs.full_bit | (version & refs.version_mask) << refs.cell_bits | cell


cdef inline bint ref_version_is(Refs *refs, uint64_t place, uint64_t version) noexcept nogil:
    return ((place >> refs.cell_bits) ^ version) & refs.version_mask == 0


cdef inline uint64_t ref_empty(Refs *refs, uint64_t lap) noexcept nogil:
    # the shift drops what is above lap_bits: laps wrap
    return lap << refs.lap_shift


cdef inline bint ref_full_at(Refs *refs, uint64_t place, uint64_t position) noexcept nogil:
    """Is the place full, in the lap of the position?"""
    return (place ^ ref_empty(refs, position >> refs.size_bits)) >> (refs.lap_shift - 1) == 1


cdef inline int64_t signed_difference(uint64_t a, uint64_t b, uint32_t bits) noexcept nogil:
    """a - b of two counters that wrap at 2**bits."""
    return <int64_t> ((a - b) << (64 - bits)) >> (64 - bits)


cdef inline int64_t lap_difference(Refs *refs, uint64_t place, uint64_t position) noexcept nogil:
    return signed_difference(ref_lap(refs, place), position >> refs.size_bits, refs.lap_bits)


cdef inline bint ref_leads(
    Refs *refs, Cells *cells, uint32_t states, uint64_t position, uint64_t place, Ref *out
) noexcept nogil:
    """Is the place full, in the lap of the position, and leads to a cell in one of `states`? `out` says to which."""
    cdef uint64_t word
    if not ref_full_at(refs, place, position) or ref_cell(refs, place) >= cells.count:
        return False
    # R3: pairs with C5, C6 and C8
    word = load_acquire_u64(cell_word(cells, ref_cell(refs, place)))
    if not ref_version_is(refs, place, word_version(word)) or not word_is_one_of(word, states):
        return False
    out.position = position
    out.place = place
    out.cell = ref_cell(refs, place)
    out.word = word
    return True


cdef inline bint ref_is_live(Refs *refs, Cells *cells, uint32_t states, uint64_t place) noexcept nogil:
    """Does the full place lead to a cell in one of `states` with its version? Once false, false for ever."""
    cdef uint64_t word
    if ref_cell(refs, place) >= cells.count:
        return False
    # R3: pairs with C5, C6 and C8
    word = load_acquire_u64(cell_word(cells, ref_cell(refs, place)))
    return ref_version_is(refs, place, word_version(word)) and word_is_one_of(word, states)


cdef inline void refs_advance_hint(Refs *refs, uint64_t *hint, uint64_t position) noexcept nogil:
    # R5: pairs with R1; whoever loses was overtaken
    cas_seq_cst_u64(hint, position, (position + 1) & refs.position_mask)


cdef inline void refs_free_place(Refs *refs, uint64_t position, uint64_t place) noexcept nogil:
    """(lap, full) -> (lap+1, empty), if nobody has done so."""
    # R4: pairs with R2
    cas_acq_rel_u64(
        &refs.places[position & refs.size_mask], place, ref_empty(refs, ref_lap(refs, place) + 1)
    )


cdef inline Code refs_contradict(Refs *refs, uint64_t old_head, uint64_t old_tail) noexcept nogil:
    """What a scan that found a contradiction means: nothing, if others went on meanwhile."""
    if load_acquire_u64(refs.head) != old_head or load_acquire_u64(refs.tail) != old_tail:
        return OK
    return CORRUPT


cdef inline Code refs_rebuild_hints(Refs *refs) noexcept nogil:
    """Find head and tail again from the places: one bounded scan.

    Each place gives the position it holds or waits for; head is the least of these, tail the least position that is
    still to be published. Both only ever grow at a place, so what the scan finds is never ahead of the truth.
    """
    cdef uint64_t old_head = load_acquire_u64(refs.head)
    cdef uint64_t old_tail = load_acquire_u64(refs.tail)
    cdef uint64_t base = ref_lap(refs, load_acquire_u64(&refs.places[0]))
    cdef uint64_t place, s
    cdef int64_t lap, here
    cdef int64_t least_head = <int64_t> 1 << 62
    cdef int64_t least_tail = <int64_t> 1 << 62
    cdef int64_t greatest = -(<int64_t> 1 << 62)
    cdef int64_t greatest_full = greatest
    for s in range(refs.size):
        place = load_acquire_u64(&refs.places[s])
        lap = signed_difference(ref_lap(refs, place), base, refs.lap_bits)
        if lap > 1 or lap < -1:
            return refs_contradict(refs, old_head, old_tail)
        here = lap * <int64_t> refs.size + <int64_t> s
        if here < least_head:
            least_head = here
        if here > greatest:
            greatest = here
        if ref_full(refs, place):
            if here > greatest_full:
                greatest_full = here
            here += <int64_t> refs.size
        if here < least_tail:
            least_tail = here
    if greatest - least_head >= <int64_t> refs.size or greatest_full > least_tail:
        return refs_contradict(refs, old_head, old_tail)
    cas_seq_cst_u64(refs.head, old_head, (base * refs.size + <uint64_t> least_head) & refs.position_mask)
    cas_seq_cst_u64(refs.tail, old_tail, (base * refs.size + <uint64_t> least_tail) & refs.position_mask)
    return OK


cdef inline bint refs_fill_tail(Refs *refs, uint64_t full) noexcept nogil:
    """Put a reference at the tail, where that is right and nobody is faster."""
    # R1: pairs with R5
    cdef uint64_t position = load_acquire_u64(refs.tail) & refs.position_mask
    cdef uint64_t empty = ref_empty(refs, position >> refs.size_bits)
    # R2: pairs with R4 and R6
    cdef uint64_t place = load_acquire_u64(&refs.places[position & refs.size_mask])
    # the same lap, and not full
    if place ^ empty >= refs.full_bit:
        return False
    # R6: pairs with R2; seq_cst, since a look at the waiters' word follows (W1)
    if not cas_seq_cst_u64(&refs.places[position & refs.size_mask], place, empty | full):
        return False
    refs_advance_hint(refs, refs.tail, position)
    return True


cdef inline Code refs_publish_due(Refs *refs, Cells *cells, uint32_t states, uint64_t version, uint64_t cell) noexcept nogil:
    """Put a reference to (version, cell) at the tail.

    OK also when the same reference lies there already. NO_PLACE: a live reference from the lap before is in the way.
    CORRUPT: places and hints contradict each other after the hints were looked for.
    """
    cdef uint64_t position, place, empty
    cdef int64_t lead
    cdef uint64_t full = ref_full_word(refs, version, cell)
    cdef bint rebuilt = False
    cdef uint64_t tries = 0
    while tries < 4 * refs.size + 64:
        tries += 1
        if refs_fill_tail(refs, full):
            return OK
        # R1: pairs with R5
        position = load_acquire_u64(refs.tail) & refs.position_mask
        empty = ref_empty(refs, position >> refs.size_bits)
        # R2: pairs with R4 and R6
        place = load_acquire_u64(&refs.places[position & refs.size_mask])
        if place ^ empty < refs.full_bit:
            continue
        if place == empty | full:
            refs_advance_hint(refs, refs.tail, position)
            return OK
        lead = lap_difference(refs, place, position)
        if (lead == 0 and ref_full(refs, place)) or lead == 1:
            refs_advance_hint(refs, refs.tail, position)
        elif lead == -1 and ref_full(refs, place) and not ref_is_live(refs, cells, states, place):
            refs_free_place(refs, position, place)
        elif load_acquire_u64(refs.tail) & refs.position_mask == position:
            if rebuilt:
                return NO_PLACE if lead == -1 and ref_full(refs, place) else CORRUPT
            rebuilt = True
            if refs_rebuild_hints(refs) != OK:
                return CORRUPT
    return CORRUPT


cdef inline Code refs_publish(Refs *refs, Cells *cells, uint32_t states, uint64_t version, uint64_t cell) noexcept nogil:
    """`refs_publish_due`, unless a repair is due: CORRUPT then."""
    if unlikely(load_relaxed_u32(refs.due) & 1):
        return CORRUPT
    if likely(refs_fill_tail(refs, ref_full_word(refs, version, cell))):
        return OK
    return refs_publish_due(refs, cells, states, version, cell)


cdef inline bint refs_behind(Refs *refs, uint64_t position, uint64_t other) noexcept nogil:
    return signed_difference(other, position, refs.lap_bits + refs.size_bits) > 0


cdef inline Code refs_peek_on(Refs *refs, Cells *cells, uint32_t states, Ref *out) noexcept nogil:
    """`refs_peek`, where the first look has not decided."""
    cdef uint64_t position, place, tail
    cdef uint64_t earlier_tail = 0
    cdef int64_t lead
    cdef bint rebuilt = False
    cdef bint doubted = False
    cdef uint64_t tries = 0
    while tries < 4 * refs.size + 64:
        tries += 1
        # R1: pairs with R5
        position = load_acquire_u64(refs.head) & refs.position_mask
        # R2: pairs with R4 and R6; seq_cst, since a waiter has set its bit before (W2)
        place = load_seq_cst_u64(&refs.places[position & refs.size_mask])
        if ref_leads(refs, cells, states, position, place, out):
            return OK
        if ref_full_at(refs, place, position):
            refs_free_place(refs, position, place)
            refs_advance_hint(refs, refs.head, position)
            continue
        lead = lap_difference(refs, place, position)
        if lead == 1:
            refs_advance_hint(refs, refs.head, position)
            continue
        if lead == 0:
            # an empty head: the tail may lag by the one reference whose publisher has not advanced it
            tail = load_acquire_u64(refs.tail) & refs.position_mask
            lead = signed_difference(tail, position, refs.lap_bits + refs.size_bits)
            if lead == 0 or lead == -1:
                return EMPTY
            if lead > 0 and not (doubted and refs_behind(refs, position, earlier_tail)):
                # perhaps published since the place was read: a tail read before the place makes it sure
                doubted = True
                earlier_tail = tail
                continue
        if load_acquire_u64(refs.head) & refs.position_mask != position:
            continue
        if rebuilt:
            return CORRUPT
        rebuilt = True
        doubted = False
        if refs_rebuild_hints(refs) != OK:
            return CORRUPT
    return CORRUPT


cdef inline Code refs_peek(Refs *refs, Cells *cells, uint32_t states, Ref *out) noexcept nogil:
    """The oldest reference that leads to a cell in one of `states`; stale ones before it are freed.

    EMPTY is checked against the tail, so a wrong hint cannot make it last. The caller then takes the cell by a CAS from
    `out.word` and calls `refs_pass`; if that CAS fails it peeks again.
    """
    cdef uint64_t position, place
    if unlikely(load_relaxed_u32(refs.due) & 1):
        return CORRUPT
    # R1: pairs with R5
    position = load_acquire_u64(refs.head) & refs.position_mask
    # R2: pairs with R4 and R6; seq_cst, since a waiter has set its bit before (W2)
    place = load_seq_cst_u64(&refs.places[position & refs.size_mask])
    if ref_leads(refs, cells, states, position, place, out):
        return OK
    # R1: pairs with R5
    if place ^ ref_empty(refs, position >> refs.size_bits) < refs.full_bit and (
        load_acquire_u64(refs.tail) & refs.position_mask == position
    ):
        return EMPTY
    return refs_peek_on(refs, cells, states, out)


cdef inline bint refs_waits(Refs *refs) noexcept nogil:
    """A look while spinning: is the place at the head still to be filled? The publishers' own line, the tail, is left alone."""
    cdef uint64_t position = load_acquire_u64(refs.head) & refs.position_mask
    cdef uint64_t place = load_acquire_u64(&refs.places[position & refs.size_mask])
    return place ^ ref_empty(refs, position >> refs.size_bits) < refs.full_bit


cdef inline void refs_prefetch(Refs *refs, Cells *cells, int n) noexcept nogil:
    """Ask for the cells that the next `n` references lead to. Places still to be filled are left to their publishers."""
    cdef uint64_t position = load_relaxed_u64(refs.head)
    cdef uint64_t place
    cdef int i
    for i in range(n):
        place = load_relaxed_u64(&refs.places[(position + <uint64_t> i) & refs.size_mask])
        if not ref_full(refs, place):
            return
        cell_prefetch(cells, ref_cell(refs, place))


cdef inline void refs_pass(Refs *refs, Ref *ref) noexcept nogil:
    """Free the place of a reference whose cell was taken, and advance the head."""
    refs_free_place(refs, ref.position, ref.place)
    refs_advance_hint(refs, refs.head, ref.position)


cdef inline uint64_t refs_length(Refs *refs) noexcept nogil:
    """How many references lie between the hints; stale ones count until somebody frees them."""
    cdef int64_t n = signed_difference(
        load_acquire_u64(refs.tail) & refs.position_mask,
        load_acquire_u64(refs.head) & refs.position_mask,
        refs.lap_bits + refs.size_bits,
    )
    if n < 0:
        return 0
    return <uint64_t> n if <uint64_t> n < refs.size else refs.size

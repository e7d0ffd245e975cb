"""Finding jobs again after places or hints were damaged: give every place a new lap, then publish what nothing refers to.

A repair needs no lock. The ring's word `due` says that one goes on, and which lap it gives: `due` = lap << 1 | 1. Whoever finds
it so helps with the same lap, and leaves alone what has that lap already; nobody empties a place for a repair that is over. So a
repairer that is stopped or dies leaves nothing behind that lasts, and one that wakes late cannot empty what was filled again
(models/repair.pml). Bit 0 goes when everything was published.

Publishing a waiting cell a second time is harmless: both references name the same version, the cell decides who gets it,
and the other reference is stale from then on.
"""

from libc.stdint cimport int64_t, uint8_t, uint32_t, uint64_t

from subetha._atomics cimport (
    cas_seq_cst_u32, cas_seq_cst_u64, load_acquire_u64, load_seq_cst_u32,
)
from subetha._cells cimport (
    Cells, cell_free_if, cell_word, word_is_one_of, word_owner, word_pack, word_state, word_version,
)
from subetha._layout cimport (
    COLLECTED, CORRUPT, FENCED, KEPT, OK, OVERDUE, RETRY, TAKEN, WRITING, Code,
)
from subetha._ring cimport (
    Refs, ref_cell, ref_empty, ref_full, ref_is_live, ref_lap, refs_rebuild_hints, signed_difference,
)

cdef enum:
    LAPS_OF_A_REPAIR = 3    # a place that is so far ahead of the repair's lap was filled and emptied since


cdef inline bint lap_is_near(Refs *refs, uint64_t lap, uint64_t target, int64_t behind, int64_t ahead) noexcept nogil:
    cdef int64_t difference = signed_difference(lap, target, refs.lap_bits)
    return -behind <= difference and difference <= ahead


cdef inline uint64_t refs_fresh_lap(Refs *refs, uint32_t due) noexcept nogil:
    """A lap that neither a place nor `due` shows, nor one near it. Where damage has left none such, another repair follows."""
    cdef uint64_t mask = (<uint64_t> 1 << refs.lap_bits) - 1
    cdef uint64_t target = (((load_acquire_u64(refs.tail) & refs.position_mask) >> refs.size_bits) + 2) & mask
    cdef uint64_t s
    cdef bint is_fresh
    cdef int _tries
    for _tries in range(64):
        is_fresh = not lap_is_near(refs, (due >> 1) & mask, target, 1, 1)
        for s in range(refs.size):
            if not is_fresh:
                break
            is_fresh = not lap_is_near(refs, ref_lap(refs, load_acquire_u64(&refs.places[s])), target, 1, LAPS_OF_A_REPAIR)
        if is_fresh:
            break
        target = (target + LAPS_OF_A_REPAIR + 2) & mask
    return target


cdef inline void refs_call_for_repair(Refs *refs) noexcept nogil:
    """A waiting cell may be without a reference: begin a repair, also where one goes on that may have passed that cell."""
    cdef uint32_t due
    cdef int _tries
    for _tries in range(64):
        # again where it fails: the one that goes on may just have ended, and have passed that cell
        due = load_seq_cst_u32(refs.due)
        if cas_seq_cst_u32(refs.due, due, <uint32_t> (refs_fresh_lap(refs, due) << 1) | 1):
            return


cdef inline void refs_relap(Refs *refs, uint32_t due) noexcept nogil:
    """Empty every place that has not the lap of the repair `due` (or a later one, given since), as long as that goes on."""
    cdef uint64_t lap = due >> 1
    cdef uint64_t s, place
    cdef int _tries
    for s in range(refs.size):
        for _tries in range(64):
            place = load_acquire_u64(&refs.places[s])
            if lap_is_near(refs, ref_lap(refs, place), lap, 0, LAPS_OF_A_REPAIR):
                break
            if load_seq_cst_u32(refs.due) != due:
                return
            if cas_seq_cst_u64(&refs.places[s], place, ref_empty(refs, lap)):
                break


cdef inline uint32_t refs_mend(Refs *refs) noexcept nogil:
    """Consistent places keep their references, unless a repair goes on; else all are emptied.

    Returns `due`, for `refs_mended` once all is published again. Several may be at it.
    """
    cdef uint32_t due = 0
    cdef int _tries
    for _tries in range(8):
        due = load_seq_cst_u32(refs.due)
        if due & 1:
            refs_relap(refs, due)
        if refs_rebuild_hints(refs) == OK:
            return due
        if load_seq_cst_u32(refs.due) == due:
            # damaged, perhaps once more during the repair
            cas_seq_cst_u32(refs.due, due, <uint32_t> (refs_fresh_lap(refs, due) << 1) | 1)
    return due


cdef inline void refs_mended(Refs *refs, uint32_t due) noexcept nogil:
    """Every waiting cell has its reference again: the repair is over, unless another one was begun since."""
    if due & 1:
        cas_seq_cst_u32(refs.due, due, due & ~<uint32_t> 1)


cdef inline Code refs_look(Refs *refs) noexcept nogil:
    """Find the hints again in the places; where these contradict each other, say that a repair is due."""
    if refs_rebuild_hints(refs) == OK:
        return OK
    if not load_seq_cst_u32(refs.due) & 1:
        refs_call_for_repair(refs)
    return CORRUPT


cdef inline void refs_mark(Refs *refs, Cells *cells, uint32_t states, uint8_t *seen) noexcept nogil:
    """Set `seen[cell]` for every cell that a live reference leads to."""
    cdef uint64_t s, place
    for s in range(refs.size):
        place = load_acquire_u64(&refs.places[s])
        if ref_full(refs, place) and ref_is_live(refs, cells, states, place):
            seen[ref_cell(refs, place)] = 1


cdef inline bint refs_mark_all(Refs *refs, Cells *cells, uint32_t states, uint8_t *seen) noexcept nogil:
    """`refs_mark`. False where a repair was due or moved the references meanwhile: then one may have been missed."""
    cdef uint64_t tail = load_acquire_u64(refs.tail) & refs.position_mask
    if load_seq_cst_u32(refs.due) & 1:
        return False
    refs_mark(refs, cells, states, seen)
    # a repair gives every place a new lap
    return not load_seq_cst_u32(refs.due) & 1 and (
        ((load_acquire_u64(refs.tail) & refs.position_mask) - tail) & refs.position_mask
    ) < refs.size


cdef inline uint64_t cell_mend(Cells *cells, uint64_t index, uint64_t most_owner, uint64_t me) noexcept nogil:
    """Undo words that nobody can ever move on: unknown states, and owners that no participant can have.

    Returns the word that the cell has now.
    """
    cdef uint64_t word = load_acquire_u64(cell_word(cells, index))
    cdef uint64_t back
    cdef bint nobody = word_owner(word) == 0 or word_owner(word) > most_owner
    if word_state(word) > KEPT or (
        nobody and word_is_one_of(word, 1 << WRITING | 1 << COLLECTED | 1 << FENCED | 1 << OVERDUE)
    ):
        cell_free_if(cells, index, word)
    elif nobody and word_state(word) == TAKEN:
        back = word_pack(word_version(word) + 1, RETRY, me)
        # C6: pairs with R3
        cas_seq_cst_u64(cell_word(cells, index), word, back)
    return load_acquire_u64(cell_word(cells, index))

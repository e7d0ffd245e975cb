"""Finding jobs again after places or hints were damaged: give every place a new lap, then publish what nothing refers to.

A repair needs no lock. While places are empty that should not be, the ring's word `due` says so: whoever meets it repairs too,
so a repairer that is stopped or dies leaves nothing behind that lasts.

Publishing a waiting cell a second time is harmless: both references name the same version, the cell decides who gets it,
and the other reference is stale from then on.
"""

from libc.stdint cimport uint8_t, uint32_t, uint64_t

from subetha._atomics cimport (
    cas_seq_cst_u32, cas_seq_cst_u64, fetch_add_seq_cst_u32, load_acquire_u64, load_seq_cst_u32, store_release_u64,
)
from subetha._cells cimport (
    Cells, cell_free_if, cell_word, word_is_one_of, word_owner, word_pack, word_state, word_version,
)
from subetha._layout cimport (
    COLLECTED, CORRUPT, DONE, FENCED, FREE, OK, OVERDUE, READY, RETRY, TAKEN, WRITING, Code,
)
from subetha._ring cimport Refs, ref_cell, ref_empty, ref_full, ref_is_live, refs_rebuild_hints

cdef enum:
    OWNED_STATES = 1 << WRITING | 1 << TAKEN | 1 << COLLECTED | 1 << FENCED


cdef inline void refs_relap(Refs *refs) noexcept nogil:
    """Empty every place under one new lap and point both hints there. Cells keep their jobs; the caller publishes them."""
    cdef uint64_t lap = ((load_acquire_u64(refs.tail) & refs.position_mask) >> refs.size_bits) + 2
    cdef uint64_t s, place
    cdef int _tries
    lap &= (<uint64_t> 1 << refs.lap_bits) - 1
    for s in range(refs.size):
        for _tries in range(64):
            place = load_acquire_u64(&refs.places[s])
            if cas_seq_cst_u64(&refs.places[s], place, ref_empty(refs, lap)):
                break
    store_release_u64(refs.head, (lap << refs.size_bits) & refs.position_mask)
    store_release_u64(refs.tail, (lap << refs.size_bits) & refs.position_mask)


cdef inline uint32_t refs_mend(Refs *refs) noexcept nogil:
    """Consistent places keep their references; else all are emptied, after the word `due` was counted up.

    Returns `due`, for `refs_mended` once all is published again. Several may be at it: each does the whole work, and only
    the last one to empty the places can take `due` away.
    """
    cdef uint32_t due = load_seq_cst_u32(refs.due)
    if refs_rebuild_hints(refs) != OK:
        # 0 once in 2**32 repairs would mean "none is due": then counted once more
        due = fetch_add_seq_cst_u32(refs.due, 1) + 1
        if due == 0:
            due = fetch_add_seq_cst_u32(refs.due, 1) + 1
        refs_relap(refs)
    return due


cdef inline void refs_mended(Refs *refs, uint32_t due) noexcept nogil:
    """Every waiting cell has its reference again: the repair is over, unless somebody emptied the places since."""
    if due:
        cas_seq_cst_u32(refs.due, due, 0)


cdef inline void refs_call_for_repair(Refs *refs) noexcept nogil:
    """A waiting cell may be without a reference: whoever comes next repairs."""
    fetch_add_seq_cst_u32(refs.due, 1)


cdef inline Code refs_look(Refs *refs) noexcept nogil:
    """Find the hints again in the places; where these contradict each other, say that a repair is due."""
    if refs_rebuild_hints(refs) == OK:
        return OK
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
    if load_seq_cst_u32(refs.due):
        return False
    refs_mark(refs, cells, states, seen)
    # a repair gives every place a new lap
    return not load_seq_cst_u32(refs.due) and (
        ((load_acquire_u64(refs.tail) & refs.position_mask) - tail) & refs.position_mask
    ) < refs.size


cdef inline uint64_t cell_mend(Cells *cells, uint64_t index, uint64_t most_owner, uint64_t me) noexcept nogil:
    """Undo words that nobody can ever move on: unknown states, and owners that no participant can have.

    Returns the word that the cell has now.
    """
    cdef uint64_t word = load_acquire_u64(cell_word(cells, index))
    cdef uint64_t back
    cdef bint nobody = word_owner(word) == 0 or word_owner(word) > most_owner
    if word_state(word) > OVERDUE or (nobody and word_is_one_of(word, 1 << WRITING | 1 << COLLECTED | 1 << FENCED)):
        cell_free_if(cells, index, word)
    elif nobody and word_state(word) == TAKEN:
        back = word_pack(word_version(word) + 1, RETRY, me)
        # C6: pairs with R3
        cas_seq_cst_u64(cell_word(cells, index), word, back)
    return load_acquire_u64(cell_word(cells, index))

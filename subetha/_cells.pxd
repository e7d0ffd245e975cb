"""Owned cells: the state word, finding a free cell, and the claim that names its owner in the same instruction.

    FREE -> WRITING(p) -> READY(p) -> TAKEN(w) -> FREE                     a ring used alone
                                      TAKEN(w) -> DONE(w) -> COLLECTED(c) -> FREE      a queue
                                      TAKEN(w) -> RETRY(w), version+1      put back

    word = version 44 | state 4 | owner 16. Only `word` says who may touch the rest of a cell:

    WRITING, COLLECTED   its owner alone writes and reads it
    READY, RETRY         nobody writes it
    TAKEN                its owner reads the job and writes the result
    DONE                 nobody writes it

What a death leaves: the word with the dead owner's number in it, to be freed (WRITING, COLLECTED) or put back (TAKEN).
The version goes up when a cell is freed and at every put-back, so a reference to an earlier version is stale for ever.
"""

from libc.stdint cimport int64_t, uint8_t, uint16_t, uint32_t, uint64_t

from subetha._atomics cimport (
    cas_acq_rel_u64, cas_seq_cst_u64, load_acquire_u64, load_relaxed_u64, prefetch_write, store_release_u64,
    store_relaxed_u64,
)
from subetha._layout cimport FREE, FULL, OK, WRITING, CellState, Code

cdef enum:
    OWNER_BITS = 16
    STATE_BITS = 4
    VERSION_BITS = 44
    STATE_SHIFT = OWNER_BITS
    VERSION_SHIFT = OWNER_BITS + STATE_BITS

ctypedef struct Cells:
    uint8_t *base
    uint64_t count
    uint64_t stride
    uint32_t bits           # log2(count)

ctypedef struct Filled:
    uint64_t cell       # was filled, and still without a reference
    uint64_t word       # its word while it was being filled


cdef inline uint64_t word_pack(uint64_t version, uint32_t state, uint64_t owner) noexcept nogil:
    # the shift drops what is above 44 bits: versions wrap
    return version << VERSION_SHIFT | <uint64_t> state << STATE_SHIFT | owner


cdef inline uint64_t word_version(uint64_t word) noexcept nogil:
    return word >> VERSION_SHIFT


cdef inline uint32_t word_state(uint64_t word) noexcept nogil:
    return <uint32_t> (word >> STATE_SHIFT) & ((1 << STATE_BITS) - 1)


cdef inline uint64_t word_owner(uint64_t word) noexcept nogil:
    return word & ((1 << OWNER_BITS) - 1)


cdef inline bint word_is_one_of(uint64_t word, uint32_t states) noexcept nogil:
    return (states >> word_state(word)) & 1


cdef inline uint64_t *cell_word(Cells *cells, uint64_t index) noexcept nogil:
    return <uint64_t *> (cells.base + index * cells.stride)


cdef inline uint64_t word_freed(uint64_t word) noexcept nogil:
    return word_pack(word_version(word) + 1, FREE, 0)


cdef inline Code cells_acquire(
    Cells *cells, uint64_t first, uint64_t *hint, uint64_t owner, uint64_t *index, uint64_t *word
) noexcept nogil:
    """FREE -> WRITING(owner) on some cell from `first` on; one bounded scan that starts at the caller's private hint.

    `hint` is a guess that several threads of a process may write; `index` and `word` are what was claimed.
    """
    cdef uint64_t seen, claimed
    cdef uint64_t i = load_relaxed_u64(hint)
    cdef uint64_t n = cells.count - first
    if i < first or i >= cells.count:
        i = first
    while n > 0:
        # C1: pairs with C3 and C4; the last reads of whoever freed the cell come before our writes
        seen = load_acquire_u64(cell_word(cells, i))
        if word_state(seen) == FREE:
            claimed = word_pack(word_version(seen), WRITING, owner)
            # C2: pairs with C3 and C4, as C1; one submitter wins
            if cas_acq_rel_u64(cell_word(cells, i), seen, claimed):
                index[0] = i
                word[0] = claimed
                store_relaxed_u64(hint, i + 1)
                return OK
        i += 1
        if i == cells.count:
            i = first
        n -= 1
    return FULL


cdef inline void cell_prefetch(Cells *cells, uint64_t index) noexcept nogil:
    """Ask for the first two lines of a cell that is to be written soon."""
    # only then, since a division takes longer than all the rest
    if index >= cells.count:
        index %= cells.count
    prefetch_write(cells.base + index * cells.stride)
    prefetch_write(cells.base + index * cells.stride + 64)


cdef inline void cell_publish(Cells *cells, uint64_t index, uint64_t word, CellState state) noexcept nogil:
    """Owner's store of the next state, with everything it wrote in the cell before it."""
    # C5: pairs with R3 and C7 of whoever follows the reference
    store_release_u64(cell_word(cells, index), word_pack(word_version(word), state, word_owner(word)))


cdef inline void cell_free_owned(Cells *cells, uint64_t index, uint64_t word) noexcept nogil:
    """FREE with the next version, by the owner of a state that nobody else may change (WRITING, COLLECTED; TAKEN in a ring)."""
    # C3: pairs with C1
    store_release_u64(cell_word(cells, index), word_freed(word))


cdef inline bint cell_free_if(Cells *cells, uint64_t index, uint64_t word) noexcept nogil:
    """FREE with the next version, if the word is still the one read."""
    # C4: pairs with C1
    return cas_seq_cst_u64(cell_word(cells, index), word, word_freed(word))

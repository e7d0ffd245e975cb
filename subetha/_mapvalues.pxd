"""Values of a map that are longer than its cells have room for: each in a block of the arena at the end of the map's file.

Such a cell has the reference of its block where its value would begin. Words, classes and the taking of a block: _blocks.pxd.

    FREE_* -> OWNED(me) -> LINKED(cell, version)     by who has that cell as WRITING(me) of that version, before it is READY
           -> OWNED(other)                           once the cell has moved past that version

Nobody frees a block: the cell's next version does, in the CAS that frees the cell, and whoever needs a block takes it over. So a
block belongs to its cell for as long as that is WRITING or READY of one version, and who may free the cell is all there is to say.

The bytes of a block are written and read by system calls alone, never through the mapping. There may be a hole under what is read,
as soon as another one has taken the block and given its disk space back; in memory (tmpfs) a look at that would need space, and
where there is none, be a signal. A call answers with zeros or an error.

What a death leaves: OWNED(dead), to be made free; or LINKED to a cell that its rescue frees. OWNED(dead) may have disk behind it or
not, and becomes FREE_BACKED all the same, without anybody's having to own it meanwhile: it was counted as backed before, and who
writes into it gets an error where the disk has no room.
"""

from libc.stdint cimport int64_t, uint8_t, uint32_t, uint64_t
from libc.string cimport memcmp

from subetha._atomics cimport cas_acq_rel_u64, fence_acquire, fence_release, load_acquire_u64, load_relaxed_u32, \
    load_relaxed_u64, store_relaxed_u64
from subetha._blocks cimport (
    Arena, arena_count_backed, arena_keeps_limit, block_allocate, block_cell, block_data, block_is_nobodys, block_linked,
    block_of, block_owned, block_passed, block_ref, block_word,
)
from subetha._cells cimport Cells, cell_word, word_state
from subetha._heartbeat cimport Records
from subetha._layout cimport (
    CORRUPT, EMPTY, FREE, FREE_BACKED, LINKED, LOST, NO_BLOCK, NO_DISK, NOT_READ, OK, OWNED, READY, Code, MapCell,
)
from subetha._rescue cimport Death, death_goes_on

cdef extern from "unistd.h" nogil:
    int64_t pread(int fd, void *to, size_t length, int64_t offset)
    int64_t pwrite(int fd, const void *data, size_t length, int64_t offset)

cdef extern from "errno.h" nogil:
    int errno
    enum:
        EINTR

cdef enum:
    PIECE = 4096            # bytes that are compared at a time
    INTERRUPTIONS = 100     # of one call, before it counts as failed


cdef inline bint file_write(int fd, const uint8_t *data, uint64_t length, uint64_t offset) noexcept nogil:
    cdef int64_t n
    cdef int interruptions = 0
    while length > 0:
        n = pwrite(fd, data, length, offset)
        if n > 0:
            data += n
            length -= n
            offset += n
            continue
        interruptions += 1
        if n == 0 or errno != EINTR or interruptions == INTERRUPTIONS:
            return False
    return True


cdef inline bint file_read(int fd, uint8_t *to, uint64_t length, uint64_t offset) noexcept nogil:
    """False: the file was cut, or the disk failed."""
    cdef int64_t n
    cdef int interruptions = 0
    while length > 0:
        n = pread(fd, to, length, offset)
        if n > 0:
            to += n
            length -= n
            offset += n
            continue
        interruptions += 1
        if n == 0 or errno != EINTR or interruptions == INTERRUPTIONS:
            return False
    return True


cdef inline uint64_t value_ref(Cells *cells, uint64_t index) noexcept nogil:
    """The reference of a cell's block, where its value is longer than the cell has room for."""
    return load_relaxed_u64(<uint64_t *> (<uint8_t *> cell_word(cells, index) + sizeof(MapCell)))


cdef inline Code value_put(
    Arena *arena, Cells *cells, uint64_t owner, uint64_t index, uint64_t version, const uint8_t *data, uint64_t length,
    uint64_t *ref
) noexcept nogil:
    """Write into a block, and link it to a cell that the caller has as WRITING. NO_BLOCK, NO_DISK. CORRUPT: somebody has taken it
    away."""
    cdef Code code
    # what a rescue or repair has made FREE_BACKED is taken without a look at the limit
    if load_relaxed_u64(&arena.lines.backed_bytes) > arena.limit and not arena_keeps_limit(arena, cells, owner):
        return NO_BLOCK
    code = block_allocate(arena, cells, length, owner, ref)
    if code != OK:
        return code
    # B5: pairs with B6
    fence_release()
    if not file_write(arena.fd, data, length, block_data(arena, ref[0]) - arena.base):
        # whether there is disk behind it nobody knows
        cas_acq_rel_u64(block_word(arena, ref[0]), block_owned(owner), FREE_BACKED)
        return NO_DISK
    if not cas_acq_rel_u64(block_word(arena, ref[0]), block_owned(owner), block_linked(index, version)):
        return CORRUPT
    return OK


cdef inline bint value_is_whole(Arena *arena, uint64_t ref, uint64_t index, uint64_t version) noexcept nogil:
    """Asked after something was copied out of a block: has it been that cell's all the time?"""
    fence_acquire()
    # B6: pairs with B5; whoever has copied a byte of the next content sees here that the block was taken before
    return load_acquire_u64(block_word(arena, ref)) == block_linked(index, version)


cdef inline Code value_copy(
    Arena *arena, uint64_t ref, uint64_t index, uint64_t version, uint8_t *to, uint64_t length
) noexcept nogil:
    """Copy a value out of its block. LOST: the cell has moved on. NOT_READ."""
    cdef uint8_t *data = block_of(arena, ref, length, index, version)
    if data == NULL:
        return LOST
    if not file_read(arena.fd, to, length, data - arena.base):
        return NOT_READ
    return OK if value_is_whole(arena, ref, index, version) else LOST


cdef inline Code value_compare(
    Arena *arena, uint64_t ref, uint64_t index, uint64_t version, const uint8_t *expected, uint64_t length
) noexcept nogil:
    """OK: it is what was expected; LOST: another one. EMPTY: the cell has moved on. NOT_READ."""
    cdef uint8_t piece[PIECE]
    cdef uint8_t *data = block_of(arena, ref, length, index, version)
    cdef uint64_t done = 0
    cdef uint64_t n
    cdef bint equal = True
    if data == NULL:
        return EMPTY
    while equal and done < length:
        n = length - done if length - done < <uint64_t> PIECE else PIECE
        if not file_read(arena.fd, piece, n, data - arena.base + done):
            return NOT_READ
        equal = memcmp(piece, expected + done, n) == 0
        done += n
    if not value_is_whole(arena, ref, index, version):
        return EMPTY
    return OK if equal else LOST


# ---- rescue and repair ----


cdef inline uint64_t values_rescue(Arena *arena, Death *death) noexcept nogil:
    """OWNED(dead) -> FREE_BACKED; how many."""
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
            # B4: pairs with B2
            cas_acq_rel_u64(&arena.words[c][i], seen, FREE_BACKED)
    return found


cdef inline bint value_is_nobodys(
    Arena *arena, Cells *cells, Records *records, uint64_t value_bytes, uint64_t word, uint64_t ref
) noexcept nogil:
    """Does a block's word say what no call has written, or what nobody will ever change?"""
    cdef uint64_t index = block_cell(word)
    cdef uint64_t cell
    cdef int64_t passed
    if word & 0xF != LINKED:
        return block_is_nobodys(records, word)
    if index >= cells.count:
        return True
    # B3: pairs with C3 and C4; after the block's word, so that what is read here is not before it
    cell = load_acquire_u64(cell_word(cells, index))
    passed = block_passed(word, cell)
    if passed != 0:
        return passed < 0
    if word_state(cell) == READY:
        return (
            value_ref(cells, index) != ref
            or load_relaxed_u32(&(<MapCell *> cell_word(cells, index)).value_length) <= value_bytes
        )
    # of a free cell nobody has had that version yet; any other one its owner is filling
    return word_state(cell) == FREE


cdef inline void values_repair(Arena *arena, Cells *cells, Records *records, uint64_t value_bytes) noexcept nogil:
    """Make free the blocks that nobody would ever take, and count what is backed."""
    cdef uint64_t i, word
    cdef uint32_t c
    for c in range(arena.classes):
        for i in range(arena.counts[c]):
            # B2: pairs with B1 and B4
            word = load_acquire_u64(&arena.words[c][i])
            if value_is_nobodys(arena, cells, records, value_bytes, word, block_ref(c, i)):
                # B4: pairs with B2
                cas_acq_rel_u64(&arena.words[c][i], word, FREE_BACKED)
    if arena.classes != 0:
        store_relaxed_u64(&arena.lines.backed_bytes, arena_count_backed(arena))

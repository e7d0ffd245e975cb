"""Blocks for payloads longer than a cell's areas: power-of-two size classes in the sparse arena file.

    word = rest 60 | state 4
    FREE_HOLE            no disk behind it; fallocate before use, so that a full disk is an error and not a SIGBUS
    FREE_BACKED          disk behind it, reused first
    OWNED(incarnation 44, participant 16)   being written; with the incarnation, so that a slow rescuer of an earlier one fails
    LINKED(cell 20, version 40)   belongs to that job; may be freed once the cell has moved past that version

    FREE_* -> OWNED(p) -> LINKED(c, v) -> FREE_BACKED           LINKED(c, v) -> LINKED(c, v+1) before a put-back's bump
    FREE_BACKED -> OWNED(p) -> (punched) -> FREE_HOLE

What a death leaves: OWNED(dead), to be freed as FREE_HOLE (it may have been punched); or LINKED to a version that its cell
has passed, which any allocation takes over. `backed_bytes` and `high` are hints, counted again before "full" is said.
"""

from libc.stdint cimport int64_t, uint8_t, uint32_t, uint64_t

from subetha._atomics cimport (
    cas_acq_rel_u64, fence_release, fetch_add_acq_rel_u64, load_acquire_u64, load_relaxed_u64, load_seq_cst_u64,
    store_relaxed_u64, store_release_u64,
)
from subetha._cells cimport Cells, cell_word, word_version
from subetha._heartbeat cimport Records, status_incarnation, status_state
from subetha._layout cimport FREE_BACKED, FREE_HOLE, LINKED, NO_BLOCK, NO_DISK, OK, OWNED, SLOT_FREE, Code

cdef extern from "fcntl.h" nogil:
    int fallocate(int fd, int mode, int64_t offset, int64_t length)
    enum:
        FALLOC_FL_KEEP_SIZE
        FALLOC_FL_PUNCH_HOLE

cdef extern from "errno.h" nogil:
    int errno
    enum:
        EINTR

cdef enum:
    BLOCK_SHIFT = 12            # the smallest class: 4096 bytes
    MAX_CLASSES = 28
    QUICK_PROBES = 64
    TRIMS = 64

ctypedef struct ArenaLines:
    uint64_t backed_bytes
    uint8_t pad0[120]
    uint64_t high[28]           # a class: blocks below it may have been backed

ctypedef struct Arena:
    int fd
    uint32_t classes
    uint64_t limit              # bytes that may be backed at one time
    ArenaLines *lines
    uint8_t *base               # of the mapping
    uint64_t *words[28]
    uint64_t counts[28]
    uint64_t data[28]           # offsets in the file
    uint64_t hints[28]          # private


cdef inline uint64_t block_size(uint32_t size_class) noexcept nogil:
    return <uint64_t> 1 << (BLOCK_SHIFT + size_class)


cdef inline uint64_t block_owned(uint64_t owner) noexcept nogil:
    return owner << 4 | OWNED


cdef inline uint64_t block_linked(uint64_t cell, uint64_t version) noexcept nogil:
    # the shift leaves 40 bits of the version
    return version << 24 | cell << 4 | LINKED


cdef inline uint64_t block_ref(uint32_t size_class, uint64_t index) noexcept nogil:
    return <uint64_t> (size_class + 1) << 32 | index


cdef inline uint64_t *block_word(Arena *arena, uint64_t ref) noexcept nogil:
    """The word of a block, or NULL where the reference (read from shared memory) names none."""
    cdef uint64_t size_class = (ref >> 32) - 1
    cdef uint64_t index = <uint32_t> ref
    if size_class >= arena.classes or index >= arena.counts[size_class]:
        return NULL
    return &arena.words[size_class][index]


cdef inline uint8_t *block_data(Arena *arena, uint64_t ref) noexcept nogil:
    cdef uint32_t size_class = <uint32_t> (ref >> 32) - 1
    return arena.base + arena.data[size_class] + (<uint64_t> <uint32_t> ref) * block_size(size_class)


cdef inline uint64_t arena_end(Arena *arena) noexcept nogil:
    """Where its file ends."""
    cdef uint32_t last = arena.classes - 1
    return arena.data[last] + arena.counts[last] * block_size(last)


cdef inline uint8_t *block_of(Arena *arena, uint64_t ref, uint64_t length, uint64_t cell, uint64_t version) noexcept nogil:
    """The data of a block that belongs to (cell, version) and holds `length` bytes, else NULL: nothing else is read."""
    cdef uint64_t *word = block_word(arena, ref)
    if word == NULL or load_acquire_u64(word) != block_linked(cell, version):
        return NULL
    if length > block_size(<uint32_t> (ref >> 32) - 1):
        return NULL
    return block_data(arena, ref)


cdef inline uint64_t block_cell(uint64_t word) noexcept nogil:
    """The cell that a LINKED block names."""
    return (word >> 4) & 0xFFFFF


cdef inline int64_t block_passed(uint64_t word, uint64_t cell) noexcept nogil:
    """Has the cell's word moved past the version that a LINKED block names? Above 0: it has; below: it has not come to it."""
    return <int64_t> ((word_version(cell) - (word >> 24)) << 24)


cdef inline bint block_is_orphan(Cells *cells, uint64_t word) noexcept nogil:
    """LINKED to a version that its cell has moved past."""
    cdef uint64_t cell = block_cell(word)
    if word & 0xF != LINKED:
        return False
    # B3: pairs with C3 and C4
    return cell >= cells.count or block_passed(word, load_acquire_u64(cell_word(cells, cell))) > 0


cdef inline bint block_is_nobodys(Records *records, uint64_t word) noexcept nogil:
    """Does a block's word say nothing, or name an owner who has gone?"""
    cdef uint64_t number = (word >> 4) & 0xFFFF
    cdef uint64_t status
    if word & 0xF != OWNED:
        return word & 0xF != LINKED and word != FREE_HOLE and word != FREE_BACKED
    if number == 0 or number > records.count:
        return True
    # D3: pairs with H1 and H3; who has registered since is another incarnation, and has not written this word
    status = load_seq_cst_u64(&records.first[number - 1].status)
    return status_state(status) == SLOT_FREE or block_owned(status_incarnation(status) << 16 | number) != word


cdef inline uint64_t arena_count_backed(Arena *arena) noexcept nogil:
    cdef uint64_t total = 0
    cdef uint64_t i
    cdef uint32_t c
    for c in range(arena.classes):
        for i in range(arena.counts[c]):
            if load_relaxed_u64(&arena.words[c][i]) & 0xF != FREE_HOLE:
                total += block_size(c)
    return total


cdef inline bint block_try_reuse(Arena *arena, Cells *cells, uint32_t c, uint64_t index, uint64_t owner) noexcept nogil:
    cdef uint64_t *word = &arena.words[c][index]
    # B2: pairs with B1 and B4
    cdef uint64_t seen = load_acquire_u64(word)
    if seen == FREE_BACKED or block_is_orphan(cells, seen):
        return cas_acq_rel_u64(word, seen, block_owned(owner))
    return False


cdef inline int fallocate_again(int fd, int mode, int64_t offset, int64_t length) noexcept nogil:
    """fallocate, begun again where a signal came in between."""
    cdef int _tries
    for _tries in range(100):
        if fallocate(fd, mode, offset, length) == 0:
            return 0
        if errno != EINTR:
            return -1
    return -1


cdef inline uint64_t arena_trim(Arena *arena, Cells *cells, uint64_t owner, uint64_t wanted) noexcept nogil:
    """Punch free blocks, and those whose cell has moved on, until `wanted` bytes were given back to the disk; the largest first."""
    cdef uint64_t got = 0
    cdef uint64_t i
    cdef int c
    for c in range(<int> arena.classes - 1, -1, -1):
        for i in range(arena.counts[c]):
            if got >= wanted:
                return got
            if block_try_reuse(arena, cells, c, i, owner):
                # B5: pairs with B6
                fence_release()
                if fallocate_again(
                    arena.fd,
                    FALLOC_FL_PUNCH_HOLE | FALLOC_FL_KEEP_SIZE,
                    arena.data[c] + i * block_size(c),
                    block_size(c),
                ) == 0:
                    fetch_add_acq_rel_u64(&arena.lines.backed_bytes, -<int64_t> block_size(c))
                    got += block_size(c)
                    # B1: pairs with B2
                    store_release_u64(&arena.words[c][i], FREE_HOLE)
                else:
                    store_release_u64(&arena.words[c][i], FREE_BACKED)
    return got


cdef inline bint arena_keeps_limit(Arena *arena, Cells *cells, uint64_t owner) noexcept nogil:
    """Count what is backed, and trim as long as that is too much and there is something to trim. False: it is too much."""
    cdef uint64_t backed
    cdef int _tries
    for _tries in range(TRIMS):
        backed = arena_count_backed(arena)
        store_relaxed_u64(&arena.lines.backed_bytes, backed)
        if backed <= arena.limit:
            return True
        if arena_trim(arena, cells, owner, backed - arena.limit) == 0:
            break
    return arena_count_backed(arena) <= arena.limit


cdef inline Code block_back(Arena *arena, Cells *cells, uint32_t c, uint64_t index, uint64_t owner) noexcept nogil:
    """Put disk behind an owned hole, within the arena's limit."""
    cdef uint64_t size = block_size(c)
    cdef int _tries
    if fetch_add_acq_rel_u64(&arena.lines.backed_bytes, size) + size > arena.limit:
        # the owned hole itself is counted here, and those of others
        if not arena_keeps_limit(arena, cells, owner):
            fetch_add_acq_rel_u64(&arena.lines.backed_bytes, -<int64_t> size)
            return NO_BLOCK
    for _tries in range(2):
        if fallocate_again(arena.fd, 0, arena.data[c] + index * size, size) == 0:
            return OK
        if arena_trim(arena, cells, owner, size) == 0:
            break
    fetch_add_acq_rel_u64(&arena.lines.backed_bytes, -<int64_t> size)
    return NO_DISK


cdef inline Code block_allocate(Arena *arena, Cells *cells, uint64_t length, uint64_t owner, uint64_t *ref) noexcept nogil:
    """A block of the least class that holds `length` bytes, OWNED by `owner`: warm ones first, then a hole, then any."""
    cdef uint32_t c = 0
    cdef uint64_t high, i, n, probes, _probe
    cdef Code code
    while block_size(c) < length:
        c += 1
        if c >= arena.classes:
            return NO_BLOCK
    if c >= arena.classes or arena.counts[c] == 0:
        return NO_BLOCK
    high = load_relaxed_u64(&arena.lines.high[c])
    if high > arena.counts[c]:
        high = arena.counts[c]
    i = load_relaxed_u64(&arena.hints[c])
    probes = high if high < QUICK_PROBES else QUICK_PROBES
    for _probe in range(probes):
        if i >= high:
            i = 0
        if block_try_reuse(arena, cells, c, i, owner):
            store_relaxed_u64(&arena.hints[c], i)
            ref[0] = block_ref(c, i)
            return OK
        i += 1
    for n in range(arena.counts[c]):
        i = high + n
        if i >= arena.counts[c]:
            i -= arena.counts[c]
        if block_try_reuse(arena, cells, c, i, owner):
            store_relaxed_u64(&arena.hints[c], i)
            ref[0] = block_ref(c, i)
            return OK
        if load_relaxed_u64(&arena.words[c][i]) == FREE_HOLE and cas_acq_rel_u64(
            &arena.words[c][i], FREE_HOLE, block_owned(owner)
        ):
            code = block_back(arena, cells, c, i, owner)
            if code != OK:
                store_release_u64(&arena.words[c][i], FREE_HOLE)
                return code
            if i >= high:
                # a hint: two who raise it at once may leave the lower one, which costs a look at a few more words
                store_relaxed_u64(&arena.lines.high[c], i + 1)
            store_relaxed_u64(&arena.hints[c], i)
            ref[0] = block_ref(c, i)
            return OK
    return NO_BLOCK


cdef inline void block_link(Arena *arena, uint64_t ref, uint64_t cell, uint64_t version) noexcept nogil:
    """OWNED -> LINKED, by the owner, before the cell's word shows the job or the result."""
    store_release_u64(block_word(arena, ref), block_linked(cell, version))


cdef inline void block_relink(Arena *arena, uint64_t ref, uint64_t cell, uint64_t version) noexcept nogil:
    """To the next version, before the put-back bumps the cell's."""
    cdef uint64_t *word = block_word(arena, ref)
    if word != NULL:
        cas_acq_rel_u64(word, block_linked(cell, version), block_linked(cell, version + 1))


cdef inline void block_free(Arena *arena, uint64_t ref, uint64_t cell, uint64_t version) noexcept nogil:
    """LINKED -> FREE_BACKED, if the block still belongs to (cell, version)."""
    cdef uint64_t *word = block_word(arena, ref)
    if word != NULL:
        # B4: pairs with B2
        cas_acq_rel_u64(word, block_linked(cell, version), FREE_BACKED)

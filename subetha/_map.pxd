"""A hash map: two arrays of slots that refer to cells with keys and values, in one file.

    slot     EMPTY(g)             generation 61 | flags 3
             KEY(g, cell)         version | cell | generation | flags 3: is a key, is present, is frozen. The cell number takes
                                  log2(cells) bits, the rest is halved between version (at least 24) and generation
    phase    generation 62 | MapPhase 2; generation g lies in array g & 1
    cell     FREE -> WRITING(me) -> READY(me) -> READY(0) -> FREE, version+1

    set      fill a cell, READY(me); CAS the key's slot to refer to it; READY(0); free the cell that was there before
    delete   CAS the slot from present to absent: the cell stays, since the slot goes on to be the key's
    get      find the slot, copy, look at the cell's word once more
    long     values lie in blocks, which come and go with their cells: _mapvalues.pxd

A key's slot is the first EMPTY one from hash & mask on, and it keeps that one for the whole generation. So two writers of a
key meet at one slot, and no key is there twice. What deleted keys hold is given back by a rebuild, which moves the present ones
into the other array:

    STABLE(g) -> CLEANING(g)     the other array becomes EMPTY(g + 1), slot by slot
              -> MOVING(g)       each slot is frozen; if absent its cell is freed, if present it is copied into the other array
              -> STABLE(g + 1)

Anybody may do any step beside others; a phase is ended by whoever has himself seen the whole array as it must be. A word
says which generation it belongs to, so that the CAS of one who was stopped for an hour fails. Writers go on until they meet a
frozen slot, or MOVING: then they complete the move first. Nobody waits for anybody.

Readers look at the array of the generation that the phase showed, and nowhere else. A frozen word cannot change: it is what the
key's slot was when the move passed it, and nothing can have been changed elsewhere before the phase went on.

What a death leaves: WRITING or READY(dead) that no slot refers to, READY(dead) in a slot (published, and not yet READY(0)),
READY(0) that no slot refers to (replaced, and not yet freed), a phase that the next writer or rebuild goes on with.

The order of the steps: models/map.pml.
"""

from libc.stdint cimport int64_t, uint8_t, uint32_t, uint64_t
from libc.string cimport memcpy, memset

from subetha._atomics cimport (
    cas_acq_rel_u64, cas_seq_cst_u64, copy_shared, fence_acquire, fence_after_rmw, fence_release, fetch_add_acq_rel_u64,
    load_acquire_u64, load_relaxed_u32, load_relaxed_u64, store_relaxed_u32, store_relaxed_u64,
)
from subetha._blocks cimport Arena, block_of
from subetha._cells cimport (
    VERSION_BITS, Cells, Filled, cell_free_if, cell_publish, cell_word, cells_acquire, word_owner, word_pack, word_state,
    word_version,
)
from subetha._heartbeat cimport Records
from subetha._layout cimport (
    CLEANING, CORRUPT, EMPTY, FREE, FULL, KEY_BYTES, KEY_WORDS, LOST, MOVING, OK, READY, STABLE, WRITING, Code, MapCell,
    MapLines,
)
from subetha._mapvalues cimport value_compare, value_copy, value_put, value_ref, values_repair, values_rescue
from subetha._rescue cimport Death, death_begin, death_end, death_goes_on, is_dead, number_is_nobodys, word_of

cdef extern from * nogil:
    bint unlikely(bint condition)

cdef enum:
    HAS_KEY = 1
    IS_PRESENT = 2
    IS_FROZEN = 4
    FLAG_BITS = 3
    LEAST_VERSION_BITS = 24
    PHASE_BITS = 2
    PHASE_MASK = 3

cdef enum:
    # before a call says that somebody keeps changing the file: each try fails only because another process went on
    MAP_TRIES = 1 << 16
    SLOT_TRIES = 1 << 12
    MAP_MOVES = 256
    MAP_PASSES = 64
    FEW_ABSENT = 4

cdef enum Expects:
    ANYTHING = 0
    SOME_VALUE = 1
    NO_VALUE = 2
    THIS_VALUE = 3

ctypedef struct Map:
    Cells cells
    MapLines *lines
    uint64_t *slots[2]
    uint64_t size               # slots of one array: a power of two, at least twice the cells
    uint64_t reserve            # cells beyond the capacity
    uint64_t value_bytes        # longer values lie in blocks
    uint64_t longest            # of all values
    uint64_t seed
    uint64_t turn_mask          # of the part of a generation that the word of a key has room for
    uint64_t version_mask       # of a cell's version
    uint64_t cell_mask          # of its number
    uint32_t cell_shift
    uint32_t version_shift
    uint64_t owner              # this handle's number
    uint64_t hint               # private: where a free cell may be
    uint64_t sum                # the timer's: of what it saw when it looked last
    uint64_t block_owner        # this handle's number with its incarnation
    Arena arena                 # of no classes where the map was made without

ctypedef struct MapKey:
    uint64_t hash
    uint64_t words[6]           # zeros behind the key
    uint32_t length
    uint32_t count              # of the words

ctypedef struct Blob:
    const uint8_t *data
    uint64_t length

ctypedef struct MapFound:
    uint64_t *slot
    uint64_t word               # of the slot
    uint64_t generation
    uint64_t cell               # where the word has a key
    uint64_t version            # of the cell
    uint64_t seen               # the cell's word, which showed that
    uint32_t length             # of the value


# ---- keys ----


cdef inline uint64_t hash_word(uint64_t h, uint64_t word) noexcept nogil:
    h = (h ^ word) * <uint64_t> 0x9E3779B97F4A7C15
    return h ^ h >> 32


cdef inline uint64_t hash_end(uint64_t h) noexcept nogil:
    h *= <uint64_t> 0xD6E8FEB86659FD93
    return h ^ h >> 32


cdef inline uint64_t map_hash(const MapKey *key, uint64_t seed) noexcept nogil:
    """The seed differs from file to file, so that no keys collide in all of them."""
    cdef uint64_t h = seed ^ key.length
    cdef uint32_t i
    for i in range(key.count):
        h = hash_word(h, key.words[i])
    return hash_end(h)


cdef inline uint64_t last_word(const uint8_t *data, uint32_t length) noexcept nogil:
    """The last `length % 8` bytes, which are some, with zeros behind. By loads only: to load a word that was just stored in parts
    takes longer than all the rest of a lookup."""
    cdef uint64_t word
    cdef uint32_t low, high
    if length > 8:
        memcpy(&word, data + length - 8, 8)
        return word >> (64 - 8 * (length & 7))
    if length >= 4:
        memcpy(&low, data, 4)
        memcpy(&high, data + length - 4, 4)
        return <uint64_t> high << 8 * (length - 4) | low
    return data[0] | <uint64_t> data[length // 2] << 8 * (length // 2) | <uint64_t> data[length - 1] << 8 * (length - 1)


cdef inline void map_key_init(MapKey *key, uint64_t seed, const uint8_t *data, uint32_t length) noexcept nogil:
    """Copy a key of at most KEY_BYTES, and hash it, as `map_hash`."""
    cdef uint64_t h = seed ^ length
    cdef uint64_t word
    cdef uint32_t i
    key.length = length
    key.count = (length + 7) // 8
    for i in range(length // 8):
        memcpy(&word, data + 8 * i, 8)
        key.words[i] = word
        h = hash_word(h, word)
    if length & 7:
        word = last_word(data, length)
        key.words[key.count - 1] = word
        h = hash_word(h, word)
    key.hash = hash_end(h)


cdef inline MapCell *map_cell(Map *map, uint64_t index) noexcept nogil:
    return <MapCell *> cell_word(&map.cells, index)


cdef inline uint8_t *map_value(Map *map, uint64_t index) noexcept nogil:
    return <uint8_t *> map_cell(map, index) + sizeof(MapCell)


cdef inline bint map_cell_has(const MapCell *cell, const MapKey *key) noexcept nogil:
    """Is that its key? Somebody may be writing there: it counts where `map_cell_is` says so afterwards."""
    cdef uint32_t i
    if load_relaxed_u64(&cell.hash) != key.hash or load_relaxed_u32(&cell.key_length) != key.length:
        return False
    for i in range(key.count):
        if load_relaxed_u64(&cell.key[i]) != key.words[i]:
            return False
    return True


cdef inline bint map_key_read(Map *map, uint64_t index, MapKey *out, uint32_t *length) noexcept nogil:
    """Copy a cell's key and its value's length, as `map_cell_has`. False: no cell is like that."""
    cdef MapCell *cell = map_cell(map, index)
    cdef uint32_t i
    out.hash = load_relaxed_u64(&cell.hash)
    out.count = 0
    out.length = load_relaxed_u32(&cell.key_length)
    length[0] = load_relaxed_u32(&cell.value_length)
    if out.length > <uint32_t> KEY_BYTES or length[0] > map.longest:
        return False
    out.count = (out.length + 7) // 8
    for i in range(out.count):
        out.words[i] = load_relaxed_u64(&cell.key[i])
    return out.hash == map_hash(out, map.seed)


# ---- words ----


cdef inline void map_init_widths(Map *map, uint32_t cell_bits) noexcept nogil:
    cdef uint32_t rest = 64 - FLAG_BITS - cell_bits
    cdef uint32_t version_bits = rest // 2 if rest // 2 > LEAST_VERSION_BITS else LEAST_VERSION_BITS
    map.cell_shift = 64 - cell_bits - version_bits
    map.version_shift = 64 - version_bits
    map.turn_mask = (<uint64_t> 1 << (rest - version_bits)) - 1
    map.version_mask = (<uint64_t> 1 << version_bits) - 1
    map.cell_mask = (<uint64_t> 1 << cell_bits) - 1


cdef inline uint64_t slot_empty(uint64_t generation) noexcept nogil:
    return generation << FLAG_BITS


cdef inline uint64_t slot_key(Map *map, uint64_t generation, uint64_t cell, uint64_t version) noexcept nogil:
    """A present key that is not frozen."""
    return (
        version << map.version_shift | cell << map.cell_shift | (generation & map.turn_mask) << FLAG_BITS
        | HAS_KEY | IS_PRESENT
    )


cdef inline bint slot_is_of(Map *map, uint64_t word, uint64_t generation) noexcept nogil:
    if word & HAS_KEY:
        return ((word >> FLAG_BITS) ^ generation) & map.turn_mask == 0
    return word & ~<uint64_t> IS_FROZEN == slot_empty(generation)


cdef inline uint64_t slot_cell(Map *map, uint64_t word) noexcept nogil:
    return word >> map.cell_shift & map.cell_mask


cdef inline bint slot_refers(Map *map, uint64_t word, uint64_t index, uint64_t version) noexcept nogil:
    return slot_cell(map, word) == index and (version ^ word >> map.version_shift) & map.version_mask == 0


cdef inline uint64_t *map_slots(Map *map, uint64_t generation) noexcept nogil:
    return map.slots[generation & 1]


cdef inline uint64_t map_phase(Map *map) noexcept nogil:
    # K1: pairs with K2
    return load_acquire_u64(&map.lines.phase)


cdef inline uint64_t slot_load(const uint64_t *slot) noexcept nogil:
    # K3: pairs with K4
    return load_acquire_u64(slot)


cdef inline bint slot_cas(uint64_t *slot, uint64_t seen, uint64_t word) noexcept nogil:
    # K4: pairs with K3; with the cell that a new word refers to
    return cas_acq_rel_u64(slot, seen, word)


cdef inline bint phase_cas(Map *map, uint64_t seen, uint64_t phase) noexcept nogil:
    # K2: pairs with K1; with every slot that whoever ends the phase has seen
    return cas_seq_cst_u64(&map.lines.phase, seen, phase)


cdef inline bint map_cell_shows(Map *map, uint64_t word, uint64_t index, uint64_t *version, uint64_t *seen) noexcept nogil:
    """Is the cell still what the slot's word refers to? Asked after something was copied out of it. `seen` is the cell's word.

    A cell that was freed since counts: nobody writes there before it is somebody's own (WRITING).
    """
    fence_acquire()
    # K5: pairs with K6 and C4; whoever has copied a byte of the next content sees here that its cell was freed before
    seen[0] = load_acquire_u64(cell_word(&map.cells, index))
    version[0] = word_version(seen[0])
    if word_state(seen[0]) == FREE:
        version[0] = (version[0] - 1) & ((<uint64_t> 1 << VERSION_BITS) - 1)
    elif word_state(seen[0]) != READY:
        return False
    return slot_refers(map, word, index, version[0])


cdef inline bint map_cell_is(Map *map, uint64_t word, uint64_t index, uint64_t *version) noexcept nogil:
    """`map_cell_shows`, for whoever does not look again."""
    cdef uint64_t seen
    return map_cell_shows(map, word, index, version, &seen)


# ---- finding ----


cdef inline Code map_probe(Map *map, uint64_t phase, const MapKey *key, bint writes, MapFound *out) noexcept nogil:
    """The key's slot in one generation. OK: it is there (present, or where one `writes` also absent); EMPTY: out.slot is where it
    would be (or, where one does not write, anywhere). LOST: what was seen is not of that phase. CORRUPT.

    A reader passes absent keys by without a look: the one it looks for is absent, too, wherever its slot is.
    """
    cdef uint64_t generation = phase >> PHASE_BITS
    cdef uint64_t *slots = map_slots(map, generation)
    cdef uint64_t mask = map.size - 1
    cdef uint64_t i = key.hash & mask
    cdef uint64_t word, again
    cdef uint64_t _n
    cdef const MapCell *cell
    cdef bint is_it
    cdef int tries = 0
    out.generation = generation
    for _n in range(map.size):
        word = slot_load(&slots[i])
        while True:
            if not slot_is_of(map, word, generation) or (writes and word & IS_FROZEN):
                return LOST
            if not word & HAS_KEY:
                out.slot = &slots[i]
                out.word = word
                return EMPTY
            if not writes and not word & IS_PRESENT:
                break
            out.cell = slot_cell(map, word)
            if out.cell >= map.cells.count:
                return CORRUPT
            cell = map_cell(map, out.cell)
            is_it = map_cell_has(cell, key)
            out.length = load_relaxed_u32(&cell.value_length)
            if map_cell_shows(map, word, out.cell, &out.version, &out.seen):
                if is_it:
                    out.slot = &slots[i]
                    out.word = word
                    return OK if out.length <= map.longest else CORRUPT
                break
            again = slot_load(&slots[i])
            tries += 1
            if again == word or tries == SLOT_TRIES:
                return LOST
            word = again
        i = (i + 1) & mask
    return CORRUPT


cdef inline Code map_find(Map *map, const MapKey *key, bint writes, MapFound *out) noexcept nogil:
    """`map_probe` in the current generation; whoever writes completes a move first. Never LOST."""
    cdef uint64_t phase
    cdef Code code
    cdef int moves = 0
    cdef int _tries
    for _tries in range(MAP_TRIES):
        phase = map_phase(map)
        if moves == MAP_MOVES or (writes and phase & PHASE_MASK > MOVING):
            return CORRUPT
        if writes and phase & PHASE_MASK == MOVING:
            moves += 1
            map_move(map, phase)
            continue
        code = map_probe(map, phase, key, writes, out)
        if code != LOST:
            return code
        if map_phase(map) == phase:
            return CORRUPT
    return CORRUPT


cdef inline Code map_look_at(Map *map, uint64_t phase, uint64_t i, MapKey *key, MapFound *out) noexcept nogil:
    """The key of a slot. EMPTY: no present one. LOST: what was seen is not of that phase. CORRUPT."""
    cdef uint64_t *slot = &map_slots(map, phase >> PHASE_BITS)[i]
    cdef uint64_t word
    cdef bint is_whole
    cdef int _tries
    out.generation = phase >> PHASE_BITS
    out.slot = slot
    for _tries in range(SLOT_TRIES):
        out.word = word = slot_load(slot)
        if not slot_is_of(map, word, out.generation):
            return LOST
        if not word & IS_PRESENT:
            return EMPTY
        out.cell = slot_cell(map, word)
        if out.cell >= map.cells.count:
            return CORRUPT
        is_whole = map_key_read(map, out.cell, key, &out.length)
        if map_cell_shows(map, word, out.cell, &out.version, &out.seen):
            return OK if is_whole else CORRUPT
        if slot_load(slot) == word:
            return LOST
    return LOST


cdef inline bint map_still(Map *map, const MapFound *found) noexcept nogil:
    """Asked after the value was copied: is the copy whole, and what the slot referred to?"""
    cdef uint64_t version
    fence_acquire()
    # K5: pairs with K6 and C4; as nearly always, nothing at all has become of the cell
    if load_acquire_u64(cell_word(&map.cells, found.cell)) == found.seen:
        return True
    return map_cell_is(map, found.word, found.cell, &version) and version == found.version


cdef inline Code map_find_block(Map *map, const MapFound *found, uint64_t *ref) noexcept nogil:
    """The block that a value lies in which was found. LOST: it is not the key's any more. CORRUPT: there is no such block."""
    cdef uint64_t seen
    ref[0] = value_ref(&map.cells, found.cell)
    if block_of(&map.arena, ref[0], found.length, found.cell, found.version) != NULL:
        return OK if map_still(map, found) else LOST
    fence_acquire()
    # K5: pairs with K6 and C4; while a cell is READY its block is linked to it
    seen = load_acquire_u64(cell_word(&map.cells, found.cell))
    return CORRUPT if word_state(seen) == READY and word_version(seen) == found.version else LOST


cdef inline Code map_copy_block(Map *map, const MapFound *found, uint64_t ref, uint8_t *to) noexcept nogil:
    """Copy the value. LOST: it is not the key's any more. NOT_READ."""
    return value_copy(&map.arena, ref, found.cell, found.version, to, found.length)


cdef inline Code map_block_is(Map *map, const MapFound *found, const Blob *value) noexcept nogil:
    cdef uint64_t ref
    cdef Code code = map_find_block(map, found, &ref)
    if code == OK:
        return value_compare(&map.arena, ref, found.cell, found.version, value.data, value.length)
    return EMPTY if code == LOST else code


cdef inline Code map_value_is(Map *map, const MapFound *found, const Blob *value) noexcept nogil:
    """OK: it is; LOST: it is another one; EMPTY: the cell is not the key's any more. Of a block also CORRUPT and NOT_READ."""
    cdef const uint64_t *at = <const uint64_t *> map_value(map, found.cell)
    cdef uint64_t expected
    cdef uint64_t done = 0
    cdef bint equal = found.length == value.length
    if unlikely(equal and value.length > map.value_bytes):
        return map_block_is(map, found, value)
    while equal and done < value.length:
        expected = 0
        memcpy(&expected, value.data + done, 8 if value.length - done >= 8 else value.length - done)
        equal = load_relaxed_u64(&at[done // 8]) == expected
        done += 8
    if not map_still(map, found):
        return EMPTY
    return OK if equal else LOST


# ---- changing ----


cdef inline Code map_fill_block(Map *map, const Blob *value, const Filled *out) noexcept nogil:
    """Put the value into a block, and its reference into the cell that is being filled. The cell is free again where that fails."""
    cdef uint64_t ref
    cdef Code code = value_put(
        &map.arena, &map.cells, map.block_owner, out.cell, word_version(out.word), value.data, value.length, &ref
    )
    if code == OK:
        store_relaxed_u64(<uint64_t *> map_value(map, out.cell), ref)
    else:
        # C4: pairs with C1
        cell_free_if(&map.cells, out.cell, out.word)
        store_relaxed_u64(&map.hint, out.cell)
    return code


cdef inline Code map_fill(Map *map, const MapKey *key, const Blob *value, Filled *out) noexcept nogil:
    """Claim a FREE cell, write, READY(me). No slot refers to it yet."""
    cdef MapCell *cell
    cdef uint32_t i
    cdef Code code = cells_acquire(&map.cells, 0, &map.hint, map.owner, &out.cell, &out.word)
    if code != OK:
        return code
    cell = map_cell(map, out.cell)
    # K6: pairs with K5
    fence_release()
    store_relaxed_u64(&cell.hash, key.hash)
    store_relaxed_u32(&cell.key_length, key.length)
    store_relaxed_u32(&cell.value_length, <uint32_t> value.length)
    for i in range(key.count):
        store_relaxed_u64(&cell.key[i], key.words[i])
    if unlikely(value.length > map.value_bytes):
        code = map_fill_block(map, value, out)
        if code != OK:
            return code
    else:
        copy_shared(map_value(map, out.cell), value.data, value.length)
    cell_publish(&map.cells, out.cell, out.word, READY)
    return OK


cdef inline bint map_has_room(Map *map) noexcept nogil:
    """May one more key have a slot? Asked after its cell was claimed, as everybody does: so the last free cell is never taken by
    new keys, and goes round among the overwrites. Where several are at it, a few keys more than the capacity may get in."""
    cdef uint64_t phase = map_phase(map)
    cdef uint64_t *slots = map_slots(map, phase >> PHASE_BITS)
    cdef uint64_t i = load_relaxed_u64(&map.hint)
    cdef uint64_t found = 0
    cdef uint64_t keys = 0
    cdef uint64_t _n
    for _n in range(map.cells.count):
        if i >= map.cells.count:
            i = 0
        found += word_state(load_acquire_u64(cell_word(&map.cells, i))) == FREE
        if found == map.reserve:
            return True
        i += 1
    if found == 0:
        return False
    # some of the reserve is in the hands of others, who may be stopped: count the keys. Where a move ends meanwhile the CAS of
    # the slot fails anyway
    for i in range(map.size):
        keys += slot_load(&slots[i]) & HAS_KEY
    return keys < map.cells.count - map.reserve


cdef inline void map_unrefer(Map *map, uint64_t index, uint64_t version) noexcept nogil:
    """Free a cell that a slot referred to until just now, whoever had filled it."""
    cdef uint64_t word
    cdef int _tries
    for _tries in range(4):
        word = load_acquire_u64(cell_word(&map.cells, index))
        if word_state(word) != READY or word_version(word) != version:
            return
        # C4: pairs with C1
        if cell_free_if(&map.cells, index, word):
            store_relaxed_u64(&map.hint, index)
            return


cdef inline void map_settle(
    Map *map, const uint64_t *slot, uint64_t generation, uint64_t put, uint64_t index, uint64_t version
) noexcept nogil:
    """READY(me) -> READY(0), after the slot was made to be `put`. Who has replaced it since may have died before it freed the
    cell, and then the rescue has left that alone, since it was ours."""
    cdef uint64_t settled = word_pack(version, READY, 0)
    cdef uint64_t phase, word
    cdef uint64_t i
    cdef int _tries
    # K7: pairs with K8; where it fails the cell was freed meanwhile. Before the load of the slot: either that shows the one who
    # has replaced it, or whoever rescues that one finds READY(0)
    if not cas_seq_cst_u64(cell_word(&map.cells, index), word_pack(version, READY, map.owner), settled):
        return
    fence_after_rmw()
    word = slot_load(slot)
    if word == put:
        return
    if slot_is_of(map, word, generation) and not slot_refers(map, word, index, version):
        map_unrefer(map, index, version)
        return
    # it was deleted, or moved: what a sweep does, for this cell alone
    for _tries in range(MAP_PASSES):
        phase = map_phase(map)
        if phase & PHASE_MASK == MOVING:
            map_move(map, phase)
            continue
        for i in range(map.size):
            word = slot_load(&map_slots(map, phase >> PHASE_BITS)[i])
            if word & HAS_KEY and slot_is_of(map, word, phase >> PHASE_BITS) and slot_refers(map, word, index, version):
                return
        if map_phase(map) | CLEANING == phase | CLEANING:
            # C4: pairs with C1
            cell_free_if(&map.cells, index, settled)
            return


cdef inline bint map_replace(Map *map, const MapFound *found, const Filled *filled) noexcept nogil:
    """Let the slot refer to a filled cell instead of what was found there. False: it is something else by now."""
    cdef uint64_t word = slot_key(map, found.generation, filled.cell, word_version(filled.word))
    if not slot_cas(found.slot, found.word, word):
        return False
    map_settle(map, found.slot, found.generation, word, filled.cell, word_version(filled.word))
    if found.word & HAS_KEY:
        map_unrefer(map, found.cell, found.version)
        if not found.word & IS_PRESENT:
            fetch_add_acq_rel_u64(&map.lines.absent, <uint64_t> -1)
    return True


cdef inline bint map_remove(Map *map, const MapFound *found) noexcept nogil:
    """Present -> absent. False: the slot is something else by now."""
    if not slot_cas(found.slot, found.word, found.word & ~<uint64_t> IS_PRESENT):
        return False
    fetch_add_acq_rel_u64(&map.lines.absent, 1)
    return True


cdef inline Code map_change(
    Map *map, const MapKey *key, Expects expects, const Blob *expected, const Blob *value, MapFound *out
) noexcept nogil:
    """Let the key have `value` (NULL: none), where it has what is expected.

    EMPTY: it has none. LOST: it has another one, see `out`. FULL: no cell. NO_BLOCK, NO_DISK, NOT_READ. CORRUPT.
    """
    cdef Filled filled = Filled(0, 0)
    cdef bint is_filled = False
    cdef bint is_there
    cdef Code code
    cdef int _tries
    for _tries in range(MAP_TRIES):
        # 1. where is the key, and has it what is expected?
        code = map_find(map, key, True, out)
        if code != OK and code != EMPTY:
            break
        is_there = code == OK and out.word & IS_PRESENT
        code = OK
        if not is_there and (expects == SOME_VALUE or expects == THIS_VALUE):
            code = EMPTY
        elif is_there and expects == NO_VALUE:
            code = LOST
        elif expects == THIS_VALUE:
            code = map_value_is(map, out, expected)
            if code == EMPTY:
                continue
        if code != OK:
            break
        # 2. without a value: present becomes absent
        if value == NULL:
            if not is_there or map_remove(map, out):
                break
            continue
        # 3. with one: fill a cell, once
        if not is_filled:
            code = map_fill(map, key, value, &filled)
            if code != OK:
                break
            is_filled = True
        # 4. a key without a slot takes one more cell for good
        if not out.word & HAS_KEY and not map_has_room(map):
            code = FULL
            break
        # 5. refer to it
        if map_replace(map, out, &filled):
            is_filled = False
            break
    else:
        code = CORRUPT
    if is_filled:
        # C4: pairs with C1
        cell_free_if(&map.cells, filled.cell, word_pack(word_version(filled.word), READY, map.owner))
        store_relaxed_u64(&map.hint, filled.cell)
    return code


# ---- the next generation ----


cdef inline bint map_move_key(Map *map, uint64_t phase, uint64_t word, uint64_t index) noexcept nogil:
    """Copy a frozen present key into the other array, unless it is there. False: the phase has gone on.

    A word that refers to no key is dropped.
    """
    cdef uint64_t generation = (phase >> PHASE_BITS) + 1
    cdef uint64_t *slots = map_slots(map, generation)
    cdef uint64_t mask = map.size - 1
    cdef uint64_t i, seen, other, version, copy
    cdef uint64_t _n
    cdef MapKey key
    cdef uint32_t length
    cdef bint is_whole = map_key_read(map, index, &key, &length)
    cdef bint is_it
    cdef int _tries
    if not map_cell_is(map, word, index, &version):
        return map_phase(map) == phase
    if is_whole and unlikely(length > map.value_bytes):
        is_whole = block_of(&map.arena, value_ref(&map.cells, index), length, index, version) != NULL
    # what has no block, or is no key, while the cell is the same one is damage
    seen = load_acquire_u64(cell_word(&map.cells, index))
    if word_state(seen) != READY or word_version(seen) != version:
        return map_phase(map) == phase
    if not is_whole:
        return True
    copy = slot_key(map, generation, index, version)
    i = key.hash & mask
    for _n in range(map.size):
        for _tries in range(SLOT_TRIES):
            seen = slot_load(&slots[i])
            if slot_is_of(map, seen, generation) and not seen & IS_FROZEN:
                # where the CAS fails, another one may have copied this very key
                if seen & HAS_KEY or slot_cas(&slots[i], seen, copy):
                    break
            elif map_phase(map) != phase:
                return False
            else:
                # damage: no generation but this one is here while the phase lasts
                slot_cas(&slots[i], seen, slot_empty(generation))
        else:
            return False
        if not seen & HAS_KEY or seen == copy:
            return True
        other = slot_cell(map, seen)
        if other < map.cells.count:
            is_it = map_cell_has(map_cell(map, other), &key)
            if map_cell_is(map, seen, other, &version):
                if is_it:
                    return True
            elif map_phase(map) != phase:
                return False
        i = (i + 1) & mask
    return True


cdef inline bint map_move_slot(Map *map, uint64_t phase, uint64_t *slot) noexcept nogil:
    """Freeze a slot, and bring into the other array what is present. False: the phase has gone on."""
    cdef uint64_t generation = phase >> PHASE_BITS
    cdef uint64_t index, cell
    cdef uint64_t word = slot_load(slot)
    cdef int _tries
    for _tries in range(SLOT_TRIES):
        if not slot_is_of(map, word, generation):
            if map_phase(map) != phase:
                return False
            # damage: no generation but this one is here while its phase lasts
            slot_cas(slot, word, slot_empty(generation) | IS_FROZEN)
        elif word & IS_FROZEN:
            break
        else:
            slot_cas(slot, word, word | IS_FROZEN)
        word = slot_load(slot)
    else:
        return False
    if not word & HAS_KEY:
        return True
    index = slot_cell(map, word)
    if index >= map.cells.count:
        return True
    if word & IS_PRESENT:
        return map_move_key(map, phase, word, index)
    cell = load_acquire_u64(cell_word(&map.cells, index))
    # after the cell's word was read: it is no later one whose version is the same modulo
    if map_phase(map) != phase:
        return False
    if word_state(cell) == READY and slot_refers(map, word, index, word_version(cell)):
        # C4: pairs with C1
        cell_free_if(&map.cells, index, cell)
    return True


cdef inline void map_move(Map *map, uint64_t phase) noexcept nogil:
    """MOVING(g) -> STABLE(g + 1), unless the phase goes on before."""
    cdef uint64_t generation = phase >> PHASE_BITS
    cdef uint64_t *slots = map_slots(map, generation)
    cdef uint64_t *others = map_slots(map, generation + 1)
    cdef uint64_t i, word
    for i in range(map.size):
        if not map_move_slot(map, phase, &slots[i]):
            return
        word = slot_load(&others[i])
        if not slot_is_of(map, word, generation + 1) or word & IS_FROZEN:
            if map_phase(map) != phase:
                return
            # damage, as in map_move_key
            slot_cas(&others[i], word, slot_empty(generation + 1))
    if phase_cas(map, phase, (generation + 1) << PHASE_BITS | STABLE):
        store_relaxed_u64(&map.lines.absent, 0)


cdef inline void map_clean(Map *map, uint64_t phase) noexcept nogil:
    """CLEANING(g) -> MOVING(g), unless the phase goes on before."""
    cdef uint64_t generation = (phase >> PHASE_BITS) + 1
    cdef uint64_t *slots = map_slots(map, generation)
    cdef uint64_t empty = slot_empty(generation)
    cdef uint64_t i, word
    cdef int tries
    for i in range(map.size):
        tries = 0
        word = slot_load(&slots[i])
        while word != empty:
            # after the word was read: it is of an earlier generation then
            if map_phase(map) != phase or tries == SLOT_TRIES:
                return
            tries += 1
            slot_cas(&slots[i], word, empty)
            word = slot_load(&slots[i])
    phase_cas(map, phase, (phase & ~<uint64_t> PHASE_MASK) | MOVING)


cdef inline Code map_go_on(Map *map, bint begins) noexcept nogil:
    """Complete a move that goes on; where one `begins`, make the next generation anyway."""
    cdef uint64_t phase = map_phase(map)
    cdef uint64_t generation = phase >> PHASE_BITS
    cdef int _tries
    for _tries in range(MAP_PASSES):
        if phase >> PHASE_BITS != generation:
            return OK
        if phase & PHASE_MASK == MOVING:
            map_move(map, phase)
        elif not begins:
            return OK
        elif phase & PHASE_MASK == STABLE:
            phase_cas(map, phase, generation << PHASE_BITS | CLEANING)
        elif phase & PHASE_MASK == CLEANING:
            map_clean(map, phase)
        else:
            return CORRUPT
        phase = map_phase(map)
    return CORRUPT


cdef inline uint64_t map_count(Map *map, uint64_t *absent, uint64_t *sum) noexcept nogil:
    """Present keys, absent ones, and a sum that another one follows after nearly every change. Exact while nobody writes."""
    cdef uint64_t phase = map_phase(map)
    cdef uint64_t *slots = map_slots(map, phase >> PHASE_BITS)
    cdef uint64_t present = 0
    cdef uint64_t i, word
    absent[0] = 0
    sum[0] = phase
    for i in range(map.size):
        word = slot_load(&slots[i])
        sum[0] = (sum[0] ^ word) * <uint64_t> 0x9E3779B97F4A7C15
        if word & HAS_KEY and slot_is_of(map, word, phase >> PHASE_BITS):
            if word & IS_PRESENT:
                present += 1
            else:
                absent[0] += 1
    return present


cdef inline int map_watch(void *context) noexcept nogil:
    """The timer's: rebuild where deleted keys hold an eighth of the cells, and a few more, and nothing was written since the last
    look."""
    cdef Map *map = <Map *> context
    cdef uint64_t few = map.cells.count // 8 + FEW_ABSENT
    cdef uint64_t absent, sum
    if load_relaxed_u64(&map.lines.absent) <= few:
        return 0
    map_count(map, &absent, &sum)
    if absent <= few:
        store_relaxed_u64(&map.lines.absent, absent)
    elif sum == map.sum:
        map_go_on(map, True)
    map.sum = sum
    return 0


# ---- rescue and repair ----


cdef inline bint map_mark(Map *map, const uint64_t *words, uint8_t *seen) noexcept nogil:
    """Set `seen[cell]` for every cell whose word is such that a slot refers to it. False: that could not be seen, since a move
    went on: of the frozen array not every word is a reference."""
    cdef uint64_t phase = map_phase(map)
    cdef uint64_t generation = phase >> PHASE_BITS
    cdef uint64_t *slots = map_slots(map, generation)
    cdef uint64_t i, word, cell
    if phase & PHASE_MASK == MOVING:
        map_move(map, phase)
        return False
    for i in range(map.size):
        word = slot_load(&slots[i])
        if word & HAS_KEY and slot_is_of(map, word, generation):
            cell = slot_cell(map, word)
            if cell < map.cells.count and slot_refers(map, word, cell, word_version(words[cell])):
                seen[cell] = 1
    return map_phase(map) | CLEANING == phase | CLEANING


cdef inline int map_sweep(Map *map, Records *records, Death *death, uint64_t *words, uint8_t *seen) noexcept nogil:
    """Move on the cells of nobody, and those of `death`; how many of these (NULL: of all). -1: too many generations went by.

    What was published once (READY(0)) is in a slot, or was in one when its word was read; so if none refers to it after that, none
    ever will. `words` and `seen`: room for one of each a cell.
    """
    cdef uint64_t i, word, owner
    cdef uint32_t state
    cdef int found = 0
    cdef int _tries
    for _tries in range(MAP_PASSES):
        for i in range(map.cells.count):
            # K8: pairs with K7
            words[i] = word_of(&map.cells, i)
        memset(seen, 0, map.cells.count)
        if map_mark(map, words, seen):
            break
    else:
        return -1
    for i in range(map.cells.count):
        word = words[i]
        state = word_state(word)
        owner = word_owner(word)
        if state == FREE:
            continue
        if state == READY and owner == 0:
            if seen[i]:
                continue
        elif state == READY or state == WRITING:
            if death != NULL and owner == death.number:
                if not death_goes_on(death):
                    return found
            elif not number_is_nobodys(records, owner):
                continue
        found += death == NULL or owner == death.number
        if state == READY and seen[i]:
            cas_acq_rel_u64(cell_word(&map.cells, i), word, word_pack(word_version(word), READY, 0))
        else:
            # C4: pairs with C1
            cell_free_if(&map.cells, i, word)
    return found


cdef inline bint map_rescue(
    Map *map, Records *records, uint64_t slot, uint64_t status, uint64_t *words, uint8_t *seen
) noexcept nogil:
    """Rescue what the dead holder of `slot` has left, pass after pass until one finds nothing. False: it is not dead any more.

    Where it cannot end (others damage the file) the record stays DYING for the next one who looks.
    """
    cdef Death death
    cdef int _pass
    if not death_begin(records, slot, status, &death):
        return False
    for _pass in range(MAP_PASSES):
        map_go_on(map, False)
        if map_sweep(map, records, &death, words, seen) == 0 and values_rescue(&map.arena, &death) == 0:
            death_end(&death)
            break
    return True


cdef inline uint64_t map_rescue_dead(
    Map *map, Records *records, int fd, int64_t lock_base, uint64_t *words, uint8_t *seen
) noexcept nogil:
    """Rescue what every dead participant has left; how many of them."""
    cdef uint64_t slot, status
    cdef uint64_t rescued = 0
    for slot in range(records.count):
        if slot + 1 != map.owner and is_dead(records, fd, lock_base, slot, &status):
            rescued += map_rescue(map, records, slot, status, words, seen)
    return rescued


cdef inline bint array_generation(Map *map, int which, uint64_t *out) noexcept nogil:
    """The generation that most slots without a key name (R. S. Boyer, J S. Moore, MJRTY); at least half of all have no key."""
    cdef uint64_t i, word
    cdef uint64_t votes = 0
    for i in range(map.size):
        word = slot_load(&map.slots[which][i])
        if word & (HAS_KEY | IS_PRESENT) or (word >> FLAG_BITS) & 1 != <uint64_t> which:
            continue
        if votes == 0:
            out[0] = word >> FLAG_BITS
        votes += 1 if out[0] == word >> FLAG_BITS else -1
    return votes != 0


cdef inline void map_mend_phase(Map *map) noexcept nogil:
    """Where the phase is none, or names a generation that the slots do not, find it again in them.

    As slots have them: they have room for one bit less of a generation than the phase.
    """
    cdef uint64_t generations[2]
    cdef bint known[2]
    cdef uint64_t phase, later, mended
    cdef int _tries
    for _tries in range(MAP_PASSES):
        phase = map_phase(map)
        known[0] = array_generation(map, 0, &generations[0])
        known[1] = array_generation(map, 1, &generations[1])
        later = phase >> PHASE_BITS & 1
        if phase & PHASE_MASK <= MOVING and known[later] and (
            slot_empty(generations[later]) == slot_empty(phase >> PHASE_BITS)
        ):
            return
        later = 1 if known[1] and (
            not known[0] or <int64_t> slot_empty(generations[1] - generations[0]) > 0
        ) else 0
        mended = generations[later] << PHASE_BITS | STABLE if known[later] else phase & ~<uint64_t> PHASE_MASK
        if known[0] and known[1] and slot_empty(generations[later]) == slot_empty(generations[1 - later] + 1):
            # to move what is moved already does no harm
            mended = generations[1 - later] << PHASE_BITS | MOVING
        if phase_cas(map, phase, mended) and not known[later]:
            # nothing tells it: any generation will do
            return


cdef inline int map_repair(Map *map, Records *records, uint64_t *words, uint8_t *seen) noexcept nogil:
    """Mend the phase, drop what refers to nothing, free what nothing refers to; how many cells these were. -1: it did not end."""
    cdef int found
    map_mend_phase(map)
    if map_go_on(map, True) != OK:
        return -1
    found = map_sweep(map, records, NULL, words, seen)
    values_repair(&map.arena, &map.cells, records, map.value_bytes)
    return found

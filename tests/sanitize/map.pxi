# A map: writers, readers, mortals, those who rebuild and rescue; with values in cells, or in cells and blocks.

cdef enum:
    M_PUT
    M_DELETED
    M_COUNTED
    M_FOUND
    M_LONG
    M_REFUSED
    M_REBUILT
    M_DIED
    M_RESCUED
    MAP_COUNTS

cdef enum:
    MAP_COUNTERS = 2        # keys that are counted up, each by compare-and-swap
    MAP_KEYS = 7
    LONG_VALUE = 9000

MAP_NAMES = "put deleted counted found long refused rebuilt died rescued".split()


cdef class MapWorld(World):

    cdef Map map

    def __init__(self, const uint8_t[::1] contents, int fd, sizes, arena, int capacity, int value_bytes, uint64_t seed):
        cdef Map *m = &self.map
        cdef uint8_t *base = <uint8_t *> &contents[0]
        cdef uint64_t i, end, count
        cdef uint32_t c
        slots, records, participants, cells, count, stride, reserve = sizes
        self.maps = contents
        self.fd = fd
        self.lock_base = contents.shape[0]
        m.lines = <MapLines *> (base + 128)
        m.size = (<uint64_t> records - <uint64_t> slots) // 16
        m.slots[0] = <uint64_t *> (base + <uint64_t> slots)
        m.slots[1] = m.slots[0] + m.size
        map_init_widths(m, (<object> count - 1).bit_length())
        m.reserve = reserve
        m.value_bytes = m.longest = value_bytes
        m.seed = seed
        m.cells.base = base + <uint64_t> cells
        m.cells.count = count
        m.cells.stride = stride
        self.records.first = <Participant *> (base + <uint64_t> records)
        self.records.count = participants
        if arena:
            limit, lines, words, data, counts = arena
            m.arena.fd = fd
            m.arena.base = base
            m.arena.limit = limit
            m.arena.lines = <ArenaLines *> (base + <uint64_t> lines)
            m.arena.classes = len(counts)
            for c in range(m.arena.classes):
                m.arena.words[c] = <uint64_t *> (base + <uint64_t> words[c])
                m.arena.data[c] = data[c]
                m.arena.counts[c] = counts[c]
            m.longest = block_size(m.arena.classes - 1)
            # nobody touches the bytes of blocks through the mapping
            self.poison(base + <uint64_t> data[0], contents.shape[0] - data[0])
        self.poison(base, 128)
        end = sizeof(MapCell) + (<uint64_t> value_bytes + 7) // 8 * 8
        for i in range(count):
            self.poison(m.cells.base + i * m.cells.stride + end, m.cells.stride - end)

    cdef bint sit_down(self, Map *map, Holder *me) noexcept nogil:
        map[0] = self.map
        if not self.join(me, 1, False):
            return False
        map.owner = me.slot + 1
        map.block_owner = status_incarnation(me.status) << 16 | map.owner
        return True

    cdef void tidy(self, Map *map) noexcept nogil:
        """What a call does that finds no room, and more."""
        cdef uint64_t *words = <uint64_t *> calloc(map.cells.count, sizeof(uint64_t))
        cdef uint8_t *seen = <uint8_t *> calloc(map.cells.count, 1)
        count_add(
            &self.counts[M_RESCUED], map_rescue_dead(map, &self.records, self.fd, self.lock_base, words, seen)
        )
        map_sweep(map, &self.records, NULL, words, seen)
        values_repair(&map.arena, &map.cells, &self.records, map.value_bytes)
        if map_go_on(map, True) != OK:
            self.fault()
        self.count(M_REBUILT)
        free(words)
        free(seen)

    # ---- values ----

    cdef uint64_t length_of(self, Map *map, uint64_t stamp) noexcept nogil:
        """Longest ones of a cell often; one of four in a block, where there are any."""
        if map.arena.classes != 0 and stamp & 3 == 0:
            return map.value_bytes + 1 + stamp * 977 % (LONG_VALUE - map.value_bytes)
        return map.value_bytes if stamp & 4 else 8 + stamp % (map.value_bytes - 7)

    cdef void make_value(self, Map *map, uint64_t number, uint64_t stamp, uint8_t *text, Blob *value) noexcept nogil:
        value.data = text
        value.length = self.length_of(map, stamp)
        memcpy(text, &stamp, 8)
        fill_bytes(text + 8, number << 32 | stamp, value.length - 8)

    cdef uint64_t check_value(self, Map *map, uint64_t number, const Blob *value) noexcept nogil:
        """Look at every byte; its stamp."""
        cdef uint64_t stamp = 0
        if value.length < 8:
            self.fault()
            return 0
        memcpy(&stamp, value.data, 8)
        if value.length != self.length_of(map, stamp) or not bytes_agree(
            value.data + 8, number << 32 | stamp, value.length - 8
        ):
            self.fault()
        if value.length > map.value_bytes:
            self.count(M_LONG)
        return stamp

    cdef void name(self, Map *map, uint64_t number, MapKey *key) noexcept nogil:
        """Keys of 1 to 48 bytes."""
        cdef uint8_t text[48]
        fill_bytes(text, number, 48)
        map_key_init(key, map.seed, text, <uint32_t> (1 + number * 23 % 48))

    cdef Code look_up(self, Map *map, const MapKey *key, uint8_t *text, Blob *value) noexcept nogil:
        """As SharedHashMap.read: OK or EMPTY, where nothing is wrong."""
        cdef MapFound found
        cdef uint64_t ref
        cdef Code code
        cdef int _tries
        for _tries in range(MAP_TRIES):
            code = map_find(map, key, False, &found)
            if code != OK:
                return code
            value.data = text
            value.length = found.length
            if found.length > map.value_bytes:
                code = map_find_block(map, &found, &ref)
                if code == OK:
                    code = map_copy_block(map, &found, ref, text)
                if code != LOST:
                    return code
                continue
            copy_unowned(text, map_value(map, found.cell), found.length)
            if map_still(map, &found):
                return OK
        return CORRUPT

    cdef Code change(
        self, Map *map, const MapKey *key, Expects expects, const Blob *expected, const Blob *value
    ) noexcept nogil:
        cdef MapFound found
        cdef Code code = map_change(map, key, expects, expected, value, &found)
        if code == FULL or code == NO_BLOCK:
            self.count(M_REFUSED)
            self.tidy(map)
        elif code == CORRUPT or code == NO_DISK or code == NOT_READ:
            self.fault()
        return code

    # ---- roles ----

    cdef void change_one(self, Map *map, uint64_t *random, uint8_t *text, uint8_t *other) noexcept nogil:
        cdef MapKey key
        cdef Blob before, after
        cdef uint64_t number = next_random(random) % MAP_KEYS
        cdef uint64_t how = next_random(random) & 7
        cdef uint64_t stamp
        cdef Code code
        self.name(map, number, &key)
        if number < MAP_COUNTERS:
            code = self.look_up(map, &key, text, &before)
            if code != OK and code != EMPTY:
                self.fault()
                return
            stamp = self.check_value(map, number, &before) if code == OK else 0
            self.make_value(map, number, stamp + 1, other, &after)
            if self.change(map, &key, THIS_VALUE if code == OK else NO_VALUE, &before, &after) == OK:
                self.count(M_COUNTED)
            return
        stamp = next_random(random) & 0xFFFFFF
        self.make_value(map, number, stamp, text, &after)
        if how < 6:
            code = self.change(map, &key, ANYTHING if how < 4 else NO_VALUE, NULL, &after)
            if code == OK:
                self.count(M_PUT)
        elif self.change(map, &key, ANYTHING, NULL, NULL) == OK:
            self.count(M_DELETED)

    def write(self, uint64_t seed):
        cdef Map map
        cdef Holder me
        cdef uint8_t *text
        with nogil:
            if not self.sit_down(&map, &me):
                self.fault()
            text = <uint8_t *> calloc(2, map.longest)
            while self.goes_on():
                self.change_one(&map, &seed, text, text + map.longest)
            self.leave(&me)
            free(text)

    def read(self, uint64_t seed):
        """Without a number. Counters never go back."""
        cdef Map map
        cdef MapKey key
        cdef Blob value
        cdef uint64_t last[MAP_COUNTERS]
        cdef uint64_t number, stamp
        cdef uint8_t *text
        cdef Code code
        with nogil:
            map = self.map
            memset(last, 0, sizeof(last))
            text = <uint8_t *> calloc(1, map.longest)
            while self.goes_on():
                number = next_random(&seed) % MAP_KEYS
                self.name(&map, number, &key)
                code = self.look_up(&map, &key, text, &value)
                if code == EMPTY:
                    continue
                if code != OK:
                    self.fault()
                    continue
                self.count(M_FOUND)
                stamp = self.check_value(&map, number, &value)
                if number < MAP_COUNTERS:
                    if stamp < last[number]:
                        self.fault()
                    last[number] = stamp
            free(text)

    cdef void stop_half_way(self, Map *map, uint64_t *random, uint8_t *text) noexcept nogil:
        cdef MapKey key
        cdef MapFound found
        cdef Filled filled
        cdef Blob value
        cdef uint64_t number = MAP_COUNTERS + next_random(random) % (MAP_KEYS - MAP_COUNTERS)
        cdef uint64_t how = next_random(random) % 5
        cdef uint64_t ref, phase
        cdef Code code
        self.name(map, number, &key)
        self.make_value(map, number, next_random(random) & 0xFFFFFF, text, &value)
        if how == 0:
            cells_acquire(&map.cells, 0, &map.hint, map.owner, &filled.cell, &filled.word)
        elif how == 1:
            block_allocate(&map.arena, &map.cells, LONG_VALUE, map.block_owner, &ref)
        elif how == 2:
            map_fill(map, &key, &value, &filled)
        elif how == 3:
            # published, and not READY(0) yet; what was there before is not free
            code = map_find(map, &key, True, &found)
            if (code == OK or code == EMPTY) and found.word & HAS_KEY and map_fill(map, &key, &value, &filled) == OK:
                slot_cas(found.slot, found.word, slot_key(map, found.generation, filled.cell, word_version(filled.word)))
        else:
            phase = map_phase(map)
            if phase & PHASE_MASK == STABLE:
                phase_cas(map, phase, phase | CLEANING)

    def die_again_and_again(self, uint64_t seed):
        cdef Map map
        cdef Holder me
        cdef uint8_t *text
        cdef int _n
        with nogil:
            text = <uint8_t *> calloc(2, self.map.longest)
            while self.goes_on():
                if not self.sit_down(&map, &me):
                    sched_yield()
                    continue
                for _n in range(next_random(&seed) & 7):
                    self.change_one(&map, &seed, text, text + map.longest)
                self.stop_half_way(&map, &seed, text)
                self.die(&me)
                self.count(M_DIED)
            free(text)

    def look_after(self):
        cdef Map map
        cdef Holder me
        with nogil:
            if not self.sit_down(&map, &me):
                self.fault()
            while self.goes_on():
                self.tidy(&map)
                pause(1000000)
            self.leave(&me)

    def finish(self):
        """Rescue the last ones; then every cell is free or a key's, and every block free, passed or a cell's."""
        cdef Map map
        cdef Holder me
        cdef MapKey key
        cdef Blob value
        cdef uint64_t i, absent, total, word
        cdef uint64_t present = 0
        cdef uint64_t used = 0
        cdef uint64_t counted = 0
        cdef uint32_t c
        cdef uint8_t *text = <uint8_t *> calloc(1, self.map.longest)
        if not self.sit_down(&map, &me):
            self.fault()
        self.tidy(&map)
        self.tidy(&map)
        for i in range(<uint64_t> MAP_KEYS):
            self.name(&map, i, &key)
            if self.look_up(&map, &key, text, &value) == OK:
                present += 1
                total = self.check_value(&map, i, &value)
                if i < MAP_COUNTERS:
                    counted += total
        if present != map_count(&map, &absent, &total) or absent or counted != <uint64_t> count_get(&self.counts[M_COUNTED]):
            self.fault()
        for i in range(map.cells.count):
            word = load_acquire_u64(cell_word(&map.cells, i))
            if word_state(word) == FREE:
                continue
            used += 1
            if word_state(word) != READY or word_owner(word) != 0:
                self.fault()
        if used != present:
            self.fault()
        for c in range(map.arena.classes):
            for i in range(map.arena.counts[c]):
                word = load_acquire_u64(&map.arena.words[c][i])
                if word & 0xF == OWNED or value_is_nobodys(
                    &map.arena, &map.cells, &self.records, map.value_bytes, word, block_ref(c, i)
                ):
                    self.fault()
        self.leave(&me)
        free(text)
        return {name: self.counts[i] for i, name in enumerate(MAP_NAMES)}

# SharedHashMap: keys and values of bytes in one mapped file (algorithms: _cells.pxd, _map.pxd).

cdef object MAP_CELL_BYTES = layout.MAP_CELL.itemsize
cdef object MISSING = object()

cdef enum:
    PASSES_OF_ENTRIES = 1000    # each lost because the map was rebuilt meanwhile
    ROOM_YIELDS = 64    # turns of others that a new key waits for cells which they hold for a moment only
    BLOCK_YIELDS = 8    # turns of others that a long value waits for blocks
    PARTICIPANT_BITS = 16       # of `extra`; above them arena_bytes


cdef tuple map_sizes(object capacity, object value_bytes, object participants):
    """Cells, slots of one array, offsets of the arrays, records and cells, stride of a cell, and the cells' end (bytes)."""
    count = capacity + layout.map_reserve(capacity)
    size = 1 << (2 * count - 1).bit_length()
    slots = LINES + layout.MAP_LINES.itemsize
    records = slots + 2 * size * 8
    cells = layout.align(records + participants * layout.PARTICIPANT.itemsize, layout.HOT_LINE)
    stride = layout.align(MAP_CELL_BYTES + layout.align(value_bytes, 8), layout.LINE)
    return count, size, slots, records, cells, stride, cells + count * stride


cdef tuple map_file_sizes(object cells_end, object arena_bytes):
    """Where the arena begins, from where on disk space is taken only for blocks in use, and size of the file (bytes)."""
    if not arena_bytes:
        return cells_end, cells_end, cells_end
    begin = layout.align(cells_end, layout.HOT_LINE)
    *_, words_end, size = arena_sizes(arena_bytes, begin)
    return begin, words_end, size


cdef int check_map_numbers(object capacity, object value_bytes, object arena_bytes) except -1:
    check_number("capacity", capacity, 1, layout.MAX_MAP_CAPACITY)
    check_number("value_bytes", value_bytes, layout.MIN_VALUE_BYTES, layout.MAX_VALUE_BYTES)
    if isinstance(arena_bytes, bool) or arena_bytes != 0:
        check_number("arena_bytes", arena_bytes, layout.MIN_BLOCK_BYTES, layout.MAX_ARENA_BYTES)
        # the number of a cell has 20 bits in the word of a block
        check_number("capacity with arena_bytes", capacity, 1, layout.MAX_CELLS - layout.map_reserve(layout.MAX_MAP_CAPACITY))
    return 0


class MapItems(ItemsView):
    """`SharedHashMap.items()`: an iteration shows what there was at its beginning."""

    def __iter__(self):
        return iter((<SharedHashMap> self._mapping).entries(True, True))


class MapValues(ValuesView):
    """`SharedHashMap.values()`: an iteration shows what there was at its beginning."""

    def __iter__(self):
        return iter((<SharedHashMap> self._mapping).entries(False, True))


@cython.no_gc_clear
cdef class SharedHashMap(Numbered):
    """A mapping from bytes to bytes in one mapped file, for many readers and writers in many processes.

    Made by `create`, `open` or `open_or_create`. A `collections.abc.MutableMapping`, and beside it `compare_and_swap`. Each
    call on one key is atomic. Readers never wait and never see half of a value; a process that is stopped or dies in the middle of
    a call delays nobody. Every call may be made from any thread. A handle takes a number at its first change.

    A deleted key holds its room until the next rebuild: one runs by itself where room is needed, or where many keys were
    deleted and then nothing is written for a second.

    With `arena_bytes` values may be longer than a cell has room for: such a one lies in a block of the least power of two, from
    4096 bytes on, that holds it. A block is free when its key was overwritten, or deleted and a rebuild has passed; to overwrite
    a long value there must be room for both.

    Source: docs/design/map.md.
    """

    cdef Map shared
    cdef uint64_t key_seats     # keys that there is room for
    cdef uint64_t popped        # a slot: where popitem looks first

    def __init__(self):
        raise TypeError(
            "use SharedHashMap.create(path, capacity), SharedHashMap.open(path) or SharedHashMap.open_or_create(path, capacity)"
        )

    @classmethod
    def create(cls, path, capacity, value_bytes=56, *, arena_bytes=0, mode=0o600):
        """Create the file and open it.

        Parameters
        ----------
        path : str, bytes or os.PathLike
        capacity : int
            Keys at one time, from 1 to 2**20.
        value_bytes : int
            Longest value in bytes that lies beside its key, from 8 to 65536. Keys have at most 48 bytes.
        arena_bytes : int
            Bytes of blocks for longer values in use at one time, 4096 to 2**36; 0: there are no longer ones. Taken from the disk
            only as they are used; the file's apparent size is up to (number of size classes) times as large. `capacity` is then
            at most 2**20 - 16.
        mode : int
            Permission bits, kept under any umask; a group's bits admit other users.

        Raises
        ------
        ValueError
            A number outside its limits.
        FileExistsError
            The name is taken; that file is untouched.
        OSError
            No space, or no permission; nothing is left behind.
        """
        check_map_numbers(capacity, value_bytes, arena_bytes)
        *_, stride, cells_end = map_sizes(capacity, value_bytes, layout.RING_PARTICIPANTS)
        _, sparse_from, size = map_file_sizes(cells_end, arena_bytes)
        files.create(
            path, Kind.MAP, size, capacity=capacity, cell_bytes=stride, payload_bytes=value_bytes,
            extra=arena_bytes << PARTICIPANT_BITS | layout.RING_PARTICIPANTS, mode=mode, sparse_from=sparse_from,
        )
        return cls.open(path)

    @classmethod
    def open(cls, path, readonly=False):
        """Open an existing file.

        Raises
        ------
        FileNotFoundError, PermissionError
        LayoutMismatch
            Not a map of this layout version, or cut, or damaged.
        """
        cdef SharedHashMap made = cls.__new__(cls)
        made.map_file(path, Kind.MAP, readonly)
        try:
            made.attach()
            if not readonly and made.somebody_is_dead():
                made.rescue()
        except BaseException:
            made.close()
            raise
        return made

    @classmethod
    def open_or_create(cls, path, capacity, value_bytes=56, *, arena_bytes=0, mode=0o600):
        """Open the file, or create it where there is none; any number of processes may do so at once.

        Raises
        ------
        LayoutMismatch
            It exists with other numbers. Otherwise as `create` and `open`.
        """
        check_map_numbers(capacity, value_bytes, arena_bytes)
        try:
            made = cls.open(path)
        except FileNotFoundError:
            try:
                return cls.create(path, capacity, value_bytes, arena_bytes=arena_bytes, mode=mode)
            except FileExistsError:
                made = cls.open(path)
        found = (made.capacity, made.value_bytes, made.arena_bytes)
        if found != (capacity, value_bytes, arena_bytes):
            made.close()
            raise errors.LayoutMismatch(
                f"{os.fsdecode(path)}: expected capacity {capacity}, value_bytes {value_bytes} and arena_bytes {arena_bytes}, "
                f"found {found[0]}, {found[1]} and {found[2]}; open it with open(), or choose another path"
            )
        return made

    @staticmethod
    def _sizes(capacity, value_bytes, participants):
        """Stride of a cell, and size of the file (bytes)."""
        *_, stride, size = map_sizes(capacity, value_bytes, participants)
        return stride, size

    cdef int attach(self) except -1:
        header = self.file_header
        capacity, value, slots = int(header["capacity"]), int(header["payload_bytes"]), int(header["extra"])
        arena_bytes, slots = slots >> PARTICIPANT_BITS, slots & (1 << PARTICIPANT_BITS) - 1
        try:
            check_map_numbers(capacity, value, arena_bytes)
            check_number("participants", slots, 1, layout.MAX_PARTICIPANTS)
        except ValueError as error:
            raise errors.LayoutMismatch(f"{self.file_path}: {error}; the file is damaged") from None
        count, size, arrays, records, cells, stride, cells_end = map_sizes(capacity, value, slots)
        arena_begin, _, total = map_file_sizes(cells_end, arena_bytes)
        files.check_size(self.file_path, total, self.bytes.shape[0])
        self.shared.lines = <MapLines *> (self.base + LINES)
        self.shared.slots[0] = <uint64_t *> (self.base + <uint64_t> arrays)
        self.shared.slots[1] = self.shared.slots[0] + <uint64_t> size
        self.shared.size = size
        map_init_widths(&self.shared, (count - 1).bit_length())
        self.shared.reserve = layout.map_reserve(capacity)
        self.shared.value_bytes = value
        self.shared.seed = int(header["created_ns"])
        self.records.first = <Participant *> (self.base + <uint64_t> records)
        self.records.count = slots
        self.shared.cells.base = self.base + <uint64_t> cells
        self.shared.cells.count = count
        self.shared.cells.stride = stride
        self.shared.longest = value
        if arena_bytes:
            self.shared.arena.fd = self.fd
            arena_attach(&self.shared.arena, self.base, arena_bytes, arena_begin)
            largest = layout.MIN_BLOCK_BYTES << (self.shared.arena.classes - 1)
            self.shared.longest = max(value, min(largest, layout.MAX_LONG_VALUE_BYTES))
        self.key_seats = capacity
        return 0

    cdef int joined(self, uint64_t number) except -1:
        self.shared.owner = number
        self.shared.block_owner = status_incarnation(self.number.status) << 16 | number
        registration_look(&self.number.kept, map_watch, &self.shared)
        return 0

    cdef int give_up(self) except -1:
        if self.number is not None:
            # the timer looks at this mapping no more
            registration_look(&self.number.kept, NULL, NULL)
            # no call is under way, so nothing is held in its name
            self.number.give_up(True)
        return 0

    @property
    def capacity(self):
        """Keys that there is room for."""
        return self.key_seats

    @property
    def value_bytes(self):
        """Longest value in bytes that lies beside its key; longer ones lie in blocks, where there are any."""
        return self.shared.value_bytes

    @property
    def arena_bytes(self):
        """Bytes of blocks that may be in use at one time; 0: there are none."""
        return self.shared.arena.limit

    @property
    def arena_backed_bytes(self):
        """Bytes of blocks that have disk or memory behind them (counted block by block)."""
        self.enter()
        try:
            return arena_count_backed(&self.shared.arena)
        finally:
            self.leave()

    # ---- arguments ----

    @cython.final
    cdef inline int key_of(self, object given, MapKey *key) except -1:
        if PyBytes_CheckExact(given) and PyBytes_GET_SIZE(given) <= KEY_BYTES:
            map_key_init(key, self.shared.seed, <const uint8_t *> PyBytes_AS_STRING(given), <uint32_t> PyBytes_GET_SIZE(given))
            return 0
        return self.key_of_other(given, key)

    @cython.final
    cdef int key_of_other(self, object given, MapKey *key) except -1:
        cdef Text text
        bytes_like("key", given, &text)
        try:
            if text.length > KEY_BYTES:
                raise errors.PayloadTooLarge(
                    f"{self.file_path}: key: expected at most {KEY_BYTES} bytes, found {text.length}; use a digest of it"
                )
            map_key_init(key, self.shared.seed, text.data, <uint32_t> text.length)
        finally:
            text_done(&text)
        return 0

    @cython.final
    cdef int value_of(self, object given, Text *text, Blob *value) except -1:
        """`text` is the caller's to end."""
        bytes_like("value", given, text)
        if <uint64_t> text.length > self.shared.longest:
            length = text.length
            text_done(text)
            self.refuse_value(length)
        value.data = text.data
        value.length = text.length
        return 0

    @cython.final
    cdef int refuse_value(self, Py_ssize_t length) except -1:
        if self.shared.arena.classes:
            why = f"of {self.arena_bytes} bytes of blocks no block is larger; store less, or create it with larger arena_bytes"
        else:
            why = (
                f"store less, or create it with a larger value_bytes (up to {layout.MAX_VALUE_BYTES}), or with arena_bytes for "
                "values in blocks"
            )
        raise errors.PayloadTooLarge(
            f"{self.file_path}: value: expected at most {self.shared.longest} bytes, found {length}; {why}"
        )

    # ---- reading ----

    @cython.final
    cdef inline Code find(self, const MapKey *key, bint writes, MapFound *found) except? LOST:
        cdef Code code = map_find(&self.shared, key, writes, found)
        return code if code != CORRUPT else self.find_mending(key, writes, found)

    @cython.final
    cdef Code find_mending(self, const MapKey *key, bint writes, MapFound *found) except? LOST:
        cdef Code code = CORRUPT
        cdef int _tries
        for _tries in range(REPAIRS):
            self.mend()
            code = map_find(&self.shared, key, writes, found)
            if code != CORRUPT:
                return code
        raise_code(CORRUPT, self.file_path, "")

    @cython.final
    cdef bytes copy_of_block(self, const MapFound *found, int *repairs):
        """`copy_of`, for a value in a block."""
        cdef uint64_t ref
        cdef uint8_t *to
        cdef bytes value
        # before there is room for it: a length that says nothing is found here
        cdef Code code = map_find_block(&self.shared, found, &ref)
        if code == OK:
            value = PyBytes_FromStringAndSize(NULL, found.length)
            to = <uint8_t *> PyBytes_AS_STRING(value)
            with nogil:
                code = map_copy_block(&self.shared, found, ref, to)
            if code == OK:
                return value
        if code == NOT_READ:
            self.refuse_unread()
        if code == CORRUPT:
            repairs[0] += 1
            if repairs[0] > REPAIRS:
                raise_code(CORRUPT, self.file_path, "")
            self.mend()
        return None

    @cython.final
    cdef int refuse_unread(self) except -1:
        raise_code(NOT_READ, self.file_path, "a block could not be read: the file was cut, or its disk fails")

    @cython.final
    cdef inline bytes copy_of(self, const MapFound *found, int *repairs):
        """The value that was found; None where it is not the key's any more."""
        cdef bytes value
        if unlikely(found.length > self.shared.value_bytes):
            return self.copy_of_block(found, repairs)
        value = PyBytes_FromStringAndSize(NULL, found.length)
        copy_unowned(PyBytes_AS_STRING(value), map_value(&self.shared, found.cell), found.length)
        if unlikely(not map_still(&self.shared, found)):
            return None
        return value

    @cython.final
    cdef inline object read(self, object given, object default):
        cdef MapKey key
        cdef MapFound found
        cdef bytes value
        cdef int repairs = 0
        cdef int _tries
        self.enter()
        try:
            self.key_of(given, &key)
            for _tries in range(MAP_TRIES):
                if self.find(&key, False, &found) != OK:
                    self.observe(OP_GET, 1, 0)
                    return default
                value = self.copy_of(&found, &repairs)
                if value is not None:
                    self.observe(OP_GET, 0, found.length)
                    return value
            raise_code(CORRUPT, self.file_path, "")
        finally:
            self.leave()

    def get(self, key, default=None, /):
        """The value of a key, or `default` where there is none."""
        return self.read(key, default)

    def __getitem__(self, key):
        value = self.read(key, MISSING)
        if value is MISSING:
            raise KeyError(key)
        return value

    def __contains__(self, key):
        cdef MapKey sought
        cdef MapFound found
        cdef bint is_there
        self.enter()
        try:
            self.key_of(key, &sought)
            is_there = self.find(&sought, False, &found) == OK
            self.observe(OP_GET, not is_there, found.length if is_there else 0)
            return is_there
        finally:
            self.leave()

    def __len__(self):
        """How many keys there are; exact while nobody writes."""
        cdef uint64_t absent, sum_
        self.enter()
        try:
            return map_count(&self.shared, &absent, &sum_)
        finally:
            self.leave()

    @cython.final
    cdef list entries(self, bint keys, bint values):
        """Keys, values, or pairs of both, in one pass over one generation."""
        cdef MapKey key
        cdef MapFound found
        cdef uint64_t phase, i
        cdef Code code
        cdef list entries
        cdef bytes value = None
        cdef object name
        cdef int repairs = 0
        cdef int replaced
        cdef int _tries
        self.enter()
        try:
            for _tries in range(PASSES_OF_ENTRIES):
                phase = map_phase(&self.shared)
                entries = []
                replaced = 0
                code = OK
                i = 0
                while i < self.shared.size:
                    code = map_look_at(&self.shared, phase, i, &key, &found)
                    if code == OK and values:
                        value = self.copy_of(&found, &repairs)
                        if value is None:
                            # replaced meanwhile: the same slot again
                            replaced += 1
                            if replaced == SLOT_TRIES:
                                break
                            continue
                    if code == OK:
                        name = PyBytes_FromStringAndSize(<const char *> key.words, key.length) if keys else None
                        entries.append((name, value) if keys and values else name if keys else value)
                    elif code != EMPTY:
                        break
                    i += 1
                if i == self.shared.size and map_phase(&self.shared) >> PHASE_BITS == phase >> PHASE_BITS:
                    return entries
                if code == CORRUPT or (code == LOST and map_phase(&self.shared) == phase):
                    repairs += 1
                    if repairs > REPAIRS:
                        break
                    self.mend()
            raise_code(CORRUPT, self.file_path, "")
        finally:
            self.leave()

    def __iter__(self):
        """Iterate over the keys that there were at the beginning."""
        return iter(self.entries(True, False))

    def keys(self):
        """A view of the keys, as of any mapping."""
        return KeysView(self)

    def values(self):
        """A view of the values, as of any mapping."""
        return MapValues(self)

    def items(self):
        """A view of keys and values, as of any mapping."""
        return MapItems(self)

    def __eq__(self, other):
        if not isinstance(other, Mapping):
            return NotImplemented
        return dict(self.items()) == dict(other.items())

    # ---- changing ----

    @cython.final
    cdef Code change_once(
        self, const MapKey *key, Expects expects, const Blob *expected, const Blob *value, MapFound *found
    ) noexcept:
        """`map_change`, without the GIL where long values are written or compared."""
        cdef uint64_t longer = value.length if value != NULL else 0
        cdef Code code
        if expects == THIS_VALUE and expected.length > longer:
            longer = expected.length
        if longer <= self.shared.value_bytes:
            return map_change(&self.shared, key, expects, expected, value, found)
        with nogil:
            code = map_change(&self.shared, key, expects, expected, value, found)
        return code

    @cython.final
    cdef Code change(
        self, const MapKey *key, Expects expects, const Blob *expected, const Blob *value, MapFound *found
    ) except? FULL:
        """`map_change` with everything done about a full or damaged file. OK, EMPTY or LOST."""
        cdef Code code = self.change_once(key, expects, expected, value, found)
        cdef int repairs = 0
        cdef int turns = 0
        cdef bint is_new
        while code != OK and code != EMPTY and code != LOST:
            turns += code != CORRUPT
            if code == CORRUPT:
                repairs += 1
                if repairs > REPAIRS:
                    raise_code(CORRUPT, self.file_path, "")
                self.mend()
            elif code == FULL:
                is_new = not found.word & HAS_KEY
                if turns > ROOM_YIELDS or not self.make_key_room(turns, is_new):
                    self.raise_full(is_new)
            elif code == NOT_READ:
                self.refuse_unread()
            elif turns > BLOCK_YIELDS:
                raise_code(code, self.file_path, self.arena_text(code, value.length))
            else:
                self.make_block_room(turns)
            code = self.change_once(key, expects, expected, value, found)
        if value == NULL:
            self.observe(OP_REMOVE, code != OK, code == OK)
        else:
            self.observe(OP_PUT, code != OK, value.length)
        return code

    @cython.final
    cdef int make_block_room(self, int turn) except -1:
        """Free the blocks of the dead, the deleted and the replaced; then wait a turn for what others hold in a call."""
        cdef uint64_t absent, sum_
        if turn == 1:
            self.rescued_by(FULL_LOOK_MS)
            self.sweep()
            with nogil:
                values_repair(&self.shared.arena, &self.shared.cells, &self.records, self.shared.value_bytes)
        map_count(&self.shared, &absent, &sum_)
        if absent:
            with nogil:
                map_go_on(&self.shared, True)
        elif turn > 1:
            with nogil:
                sched_yield()
        return 0

    @cython.final
    cdef str arena_text(self, Code code, uint64_t length):
        if code == NO_DISK:
            return f"value: the disk has no room for a block of {length} bytes; make room, or lay the map elsewhere"
        return (
            f"value: no block for {length} bytes is left in the arena of {self.arena_bytes} bytes; delete or overwrite long values "
            "first, or create it with larger arena_bytes"
        )

    @cython.final
    cdef bint make_key_room(self, int turn, bint is_new) except -1:
        """Free what the dead, the deleted and the replaced hold. False: keys have it all, and no cell is left for a new one."""
        cdef uint64_t present, absent, sum_
        if turn == 1:
            self.rescued_by(FULL_LOOK_MS)
            self.sweep()
        present = map_count(&self.shared, &absent, &sum_)
        if absent:
            with nogil:
                map_go_on(&self.shared, True)
        elif is_new and present >= self.key_seats:
            return turn == 1
        elif turn > 1:
            # in the hands of others who write, for a moment unless they are stopped
            with nogil:
                sched_yield()
        return True

    @cython.final
    cdef int raise_full(self, bint is_new) except -1:
        cdef uint64_t absent, sum_
        present = map_count(&self.shared, &absent, &sum_)
        if is_new and present >= self.key_seats:
            detail = f"all {self.key_seats} keys that there is room for are there; delete some, or create it with a larger capacity"
        else:
            detail = (
                f"{present} of {self.key_seats} keys are there, and other processes hold every other cell in the middle of a call; "
                "try again when they have gone on"
            )
        raise errors.MapFull(f"{self.file_path}: {detail}")

    def __setitem__(self, key, value):
        cdef MapKey name
        cdef MapFound found
        cdef Text text
        cdef Blob blob
        self.enter()
        try:
            self.key_of(key, &name)
            self.value_of(value, &text, &blob)
            try:
                self.join()
                self.change(&name, ANYTHING, NULL, &blob, &found)
            finally:
                text_done(&text)
        finally:
            self.leave()

    def __delitem__(self, key):
        cdef MapKey name
        cdef MapFound found
        self.enter()
        try:
            self.key_of(key, &name)
            self.join()
            if self.change(&name, SOME_VALUE, NULL, NULL, &found) != OK:
                raise KeyError(key)
        finally:
            self.leave()

    @cython.final
    cdef bytes take(self, const MapKey *key):
        """Take a key out; its value, or None where it is not there."""
        cdef MapFound found
        cdef bytes value
        cdef int repairs = 0
        cdef int _tries
        for _tries in range(MAP_TRIES):
            if self.find(key, True, &found) != OK or not found.word & IS_PRESENT:
                self.observe(OP_REMOVE, 1, 0)
                return None
            value = self.copy_of(&found, &repairs)
            if value is not None and map_remove(&self.shared, &found):
                self.observe(OP_REMOVE, 0, 1)
                return value
        raise_code(CORRUPT, self.file_path, "")

    def pop(self, key, default=MISSING, /):
        """Take a key out and give its value: of several who pop it, one gets it.

        Raises
        ------
        KeyError
            It is not there, and no `default` was given.
        """
        cdef MapKey name
        cdef bytes value
        self.enter()
        try:
            self.key_of(key, &name)
            self.join()
            value = self.take(&name)
        finally:
            self.leave()
        if value is not None:
            return value
        if default is MISSING:
            raise KeyError(key)
        return default

    def popitem(self):
        """Take some key out and give it with its value.

        Raises
        ------
        KeyError
            There is none.
        """
        cdef MapKey key
        cdef MapFound found
        cdef uint64_t phase, i
        cdef uint64_t _n
        cdef Code code
        cdef bytes value
        cdef int repairs = 0
        cdef int _tries
        self.enter()
        try:
            self.join()
            for _tries in range(PASSES_OF_ENTRIES):
                map_go_on(&self.shared, False)
                phase = map_phase(&self.shared)
                code = OK
                for _n in range(self.shared.size):
                    # where the last one was found: before it there is nothing, as a rule
                    i = self.popped & (self.shared.size - 1)
                    code = map_look_at(&self.shared, phase, i, &key, &found)
                    if code == EMPTY:
                        self.popped = i + 1
                        continue
                    if code != OK or found.word & IS_FROZEN:
                        break
                    value = self.copy_of(&found, &repairs)
                    if value is None or not map_remove(&self.shared, &found):
                        break
                    self.observe(OP_REMOVE, 0, 1)
                    return PyBytes_FromStringAndSize(<const char *> key.words, key.length), value
                if code == EMPTY and map_phase(&self.shared) >> PHASE_BITS == phase >> PHASE_BITS:
                    raise KeyError(f"{self.file_path}: the map is empty")
                if code == CORRUPT or (code == LOST and map_phase(&self.shared) == phase):
                    repairs += 1
                    if repairs > REPAIRS:
                        break
                    self.mend()
            raise_code(CORRUPT, self.file_path, "")
        finally:
            self.leave()

    def setdefault(self, key, default, /):
        """The value of a key; where there is none, `default` becomes it. Of several who do this at once, all get the same."""
        cdef MapKey name
        cdef MapFound found = MapFound(NULL, 0, 0, 0, 0, 0, 0)
        cdef Text text
        cdef Blob blob
        cdef bytes value
        cdef int repairs = 0
        cdef int _tries
        self.enter()
        try:
            self.key_of(key, &name)
            self.value_of(default, &text, &blob)
            try:
                self.join()
                for _tries in range(MAP_TRIES):
                    if self.change(&name, NO_VALUE, NULL, &blob, &found) == OK:
                        return PyBytes_FromStringAndSize(<const char *> blob.data, blob.length)
                    value = self.copy_of(&found, &repairs)
                    if value is not None:
                        return value
                raise_code(CORRUPT, self.file_path, "")
            finally:
                text_done(&text)
        finally:
            self.leave()

    def compare_and_swap(self, key, expected, new):
        """Let a key have the value `new` if it has the value `expected`; None stands for no value, in both places.

        Returns
        -------
        bool
            Whether it had what was expected. Nothing else can have happened between that look and the change.
        """
        cdef MapKey name
        cdef MapFound found
        cdef Text old_text, new_text
        cdef Blob old, after
        cdef Expects expects = NO_VALUE
        self.enter()
        try:
            self.key_of(key, &name)
            old_text.held = new_text.held = False
            try:
                if expected is not None:
                    expects = THIS_VALUE
                    # one that is longer than a value may be is just not the one that is there
                    bytes_like("expected", expected, &old_text)
                    old.data = old_text.data
                    old.length = old_text.length
                if new is not None:
                    self.value_of(new, &new_text, &after)
                self.join()
                return self.change(&name, expects, &old, &after if new is not None else NULL, &found) == OK
            finally:
                text_done(&old_text)
                text_done(&new_text)
        finally:
            self.leave()

    def update(self, other=(), /):
        """Set every key of a mapping, or of an iterable of pairs. Each one is set by itself."""
        MutableMapping.update(self, other)

    def clear(self):
        """Delete every key that there is at the beginning, then rebuild."""
        cdef MapKey name
        cdef MapFound found
        self.enter()
        try:
            self.join()
            for key in self.entries(True, False):
                self.key_of(key, &name)
                self.change(&name, ANYTHING, NULL, NULL, &found)
            self.rebuild()
        finally:
            self.leave()

    # ---- upkeep ----

    def rebuild(self):
        """Give back what deleted keys hold, and let lookups be short again. Others may read and write meanwhile.

        It runs by itself where room is needed, and about a second after many deletions.

        Returns
        -------
        int
            How many deleted keys there were.
        """
        cdef uint64_t absent, sum_
        cdef Code code = OK
        cdef int _tries
        self.enter()
        try:
            self.join()
            map_count(&self.shared, &absent, &sum_)
            for _tries in range(REPAIRS):
                with nogil:
                    code = map_go_on(&self.shared, True)
                if code == OK:
                    return absent
                self.mend()
            raise_code(code, self.file_path, "")
        finally:
            self.leave()

    @cython.final
    cdef int mend(self) except -1:
        """Repair; where this handle may not write, say that somebody has to."""
        cdef uint64_t[::1] words
        cdef uint8_t[::1] seen
        cdef int found
        if self.is_readonly:
            raise errors.TransportError(
                f"{self.file_path}: slots and cells contradict each other: another process has damaged them; open it without "
                "readonly=True, then call repair()"
            )
        words = np.zeros(self.shared.cells.count, np.uint64)
        seen = np.zeros(self.shared.cells.count, np.uint8)
        with nogil:
            found = map_repair(&self.shared, &self.records, &words[0], &seen[0])
        if found < 0:
            raise_code(CORRUPT, self.file_path, "")
        return found

    def repair(self):
        """Make slots and cells agree again: drop what refers to no key, free what nothing refers to, and rebuild.

        For a file whose bytes another process has damaged; calls that meet a contradiction run it themselves. Others may
        read and write meanwhile.

        Returns
        -------
        int
            How many cells were freed that belonged to nobody and to no key.
        """
        self.enter()
        try:
            self.join()
            return self.mend()
        finally:
            self.leave()

    @cython.final
    cdef int sweep(self) except -1:
        """Free the cells that were replaced by somebody who has not freed them yet."""
        cdef uint64_t[::1] words = np.zeros(self.shared.cells.count, np.uint64)
        cdef uint8_t[::1] seen = np.zeros(self.shared.cells.count, np.uint8)
        with nogil:
            map_sweep(&self.shared, &self.records, NULL, &words[0], &seen[0])
        return 0

    def rescue(self):
        """Free what dead participants have left in the middle of a call, and complete what they had begun.

        `open`, and a new key that finds no room, do it by themselves. Others may read, write and rescue meanwhile.

        Returns
        -------
        int
            How many dead participants there were.
        """
        cdef uint64_t rescued
        self.enter()
        try:
            self.join()
            rescued = self.rescue_dead()
            self.sweep()
            return rescued
        finally:
            self.leave()

    cdef uint64_t rescue_dead(self) except? 0xFFFFFFFF:
        cdef uint64_t rescued
        cdef int64_t lock_base = self.bytes.shape[0]
        cdef uint64_t[::1] words = np.zeros(self.shared.cells.count, np.uint64)
        cdef uint8_t[::1] seen = np.zeros(self.shared.cells.count, np.uint8)
        with nogil:
            rescued = map_rescue_dead(&self.shared, &self.records, self.fd, lock_base, &words[0], &seen[0])
        return rescued

    cdef int rescue_as(self, uint64_t slot, uint64_t status) except -1:
        cdef uint64_t[::1] words = np.zeros(self.shared.cells.count, np.uint64)
        cdef uint8_t[::1] seen = np.zeros(self.shared.cells.count, np.uint8)
        with nogil:
            map_rescue(&self.shared, &self.records, slot, status, &words[0], &seen[0])
        return 0


MutableMapping.register(SharedHashMap)

"""The bytes of a ring's, a map's and of a table's file, for tests that write them by hand.

Also imported by the scripts that tests run in other processes.
"""

import contextlib
import ctypes
import errno
import fcntl
import os
import platform
import struct

import numpy as np

from subetha.layout import (
    ARENA_LINES,
    DEQUE_LINES,
    FILE_HEADER,
    HOT_LINE,
    LINE,
    LINES_OFFSET,
    MAP_CELL,
    MAP_LINES,
    MIN_BLOCK_BYTES,
    PARTICIPANT,
    RING_CELL,
    RING_LINES,
    STATE_SHIFT,
    TABLE_LINES,
    VERSION_SHIFT,
    BlockState,
    CellState,
    MapPhase,
    SlotState,
    align,
    cell_word,
    map_reserve,
)


def lock_is_held(path, byte):
    """Does anybody hold the lock on that byte of the file, this process through another descriptor included?"""
    probe = struct.pack("hhqqi4x", fcntl.F_WRLCK, os.SEEK_SET, byte, 1, 0)
    with open(path, "r+b") as file:
        return struct.unpack("hhqqi4x", fcntl.fcntl(file, fcntl.F_OFD_GETLK, probe))[0] != fcntl.F_UNLCK


LIBC = ctypes.CDLL(None, use_errno=True)
SYS_FUTEX = {"x86_64": 202, "aarch64": 98}
FUTEX_CMP_REQUEUE = 4


def asleep_on(word):
    """How many threads, of all processes, sleep in the kernel on a futex word (a numpy array of one u4) of a mapped file.

    The kernel counts those whom it moves from one word to another, here to the same, and wakes nobody.
    """
    address, any_number = ctypes.c_void_p(word.ctypes.data), ctypes.c_void_p(2**31 - 1)
    while True:
        moved = LIBC.syscall(
            ctypes.c_long(SYS_FUTEX[platform.machine()]),
            address,
            ctypes.c_int(FUTEX_CMP_REQUEUE),
            ctypes.c_int(0),
            any_number,
            address,
            ctypes.c_uint32(int(word[0])),
        )
        if moved >= 0:
            return moved
        if ctypes.get_errno() != errno.EAGAIN:  # it only changed meanwhile
            raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))


class RingFile:
    """A ring's file as numpy arrays that write through to it, with the widths of its references.

    `words`, `lengths`, `payloads`: one entry a cell. `places`: u8. `records`: PARTICIPANT. `tail`, `head`: hints,
    `items`, `space`: futex words.
    """

    def __init__(self, path):
        self.path = os.fspath(path)
        self.contents = np.asarray(np.memmap(self.path, np.uint8, "r+"))
        header = self.contents[: FILE_HEADER.itemsize].view(FILE_HEADER)[0]
        self.capacity, self.payload_bytes = int(header["capacity"]), int(header["payload_bytes"])
        participants = int(header["extra"])
        self.cell_bits = self.capacity.bit_length() - 1
        self.size = 2 * self.capacity
        self.size_bits = self.cell_bits + 1
        self.lap_bits = (63 - self.cell_bits) // 2
        self.version_bits = 63 - self.cell_bits - self.lap_bits
        self.places_at = LINES_OFFSET + RING_LINES.itemsize
        self.records_at = self.places_at + 8 * self.size
        self.cells_at = self.ends_at = align(self.records_at + participants * PARTICIPANT.itemsize, HOT_LINE)
        self.find_ends()
        self.stride = align(RING_CELL.itemsize + self.payload_bytes, LINE)
        self.lines = self.contents[LINES_OFFSET : self.places_at].view(RING_LINES)
        self.places = self.contents[self.places_at : self.records_at].view("<u8")
        self.records = self.contents[self.records_at :][: participants * PARTICIPANT.itemsize].view(PARTICIPANT)
        cells = self.contents[self.cells_at :].view(
            {
                "names": ["word", "length", "payload"],
                "formats": ["<u8", "<u4", ("u1", (self.payload_bytes,))],
                "offsets": [0, RING_CELL.fields["length"][1], RING_CELL.itemsize],
                "itemsize": self.stride,
            }
        )
        assert len(cells) == self.capacity
        self.words, self.lengths, self.payloads = cells["word"], cells["length"], cells["payload"]

    def find_ends(self):
        """A deque's file has more before its cells."""

    @property
    def tail(self):
        return int(self.lines["tail"][0])

    @tail.setter
    def tail(self, value):
        self.lines["tail"] = value

    @property
    def head(self):
        return int(self.lines["head"][0])

    @head.setter
    def head(self, value):
        self.lines["head"] = value

    @property
    def position_mask(self):
        return (1 << (self.lap_bits + self.size_bits)) - 1

    def empty_place(self, lap):
        return (lap % (1 << self.lap_bits)) << (1 + self.version_bits + self.cell_bits)

    def full_place(self, lap, version, cell):
        return (
            self.empty_place(lap)
            | 1 << (self.version_bits + self.cell_bits)
            | (version % (1 << self.version_bits)) << self.cell_bits
            | cell
        )

    def set_laps(self, lap):
        """Every place empty in one lap, and both hints at its first place: what a ring is after so many laps."""
        self.places[:] = self.empty_place(lap)
        self.tail = self.head = (lap << self.size_bits) & self.position_mask

    def set_versions(self, version):
        """Every cell free, with this version."""
        self.words[:] = cell_word(version, CellState.FREE, 0)

    def state_of(self, cell):
        return CellState(int(self.words[cell]) >> STATE_SHIFT & 0xF)

    def version_of(self, cell):
        return int(self.words[cell]) >> VERSION_SHIFT

    def owner_of(self, cell):
        return int(self.words[cell]) & 0xFFFF

    @property
    def states(self):
        return [self.state_of(cell) for cell in range(self.capacity)]

    @property
    def used_slots(self):
        """Slots of participants whose record says that somebody holds them."""
        return [int(slot) for slot in np.flatnonzero((self.records["status"] & 0xFF) == SlotState.USED)]

    def lock_of(self, slot):
        """Is the lock held that proves the life of the participant in that slot?"""
        return lock_is_held(self.path, len(self.contents) + slot)

    @contextlib.contextmanager
    def all_slots_held(self):
        """Hold the lock of every slot, as so many living participants do."""
        with open(self.path, "r+b") as file:
            lock = struct.pack("hhqqi4x", fcntl.F_WRLCK, os.SEEK_SET, len(self.contents), len(self.records), 0)
            fcntl.fcntl(file, fcntl.F_OFD_SETLK, lock)
            yield

    def write_message(self, cell, payload, *, state=CellState.READY, owner=0, version=None):
        """Make a cell hold a message, without any reference to it."""
        version = self.version_of(cell) if version is None else version
        self.lengths[cell] = len(payload)
        self.payloads[cell, : len(payload)] = np.frombuffer(payload, np.uint8)
        self.words[cell] = cell_word(version, state, owner)


class DequeFile(RingFile):
    """A deque's file: `ends` are its top, bottom, owner and pushes, `slots` its places; `places` and hints are those of `back`."""

    def find_ends(self):
        self.cells_at = align(self.ends_at + DEQUE_LINES.itemsize + 8 * self.size, HOT_LINE)
        self.ends = self.contents[self.ends_at :][: DEQUE_LINES.itemsize].view(DEQUE_LINES)
        self.slots = self.contents[self.ends_at + DEQUE_LINES.itemsize :][: 8 * self.size].view("<u8")

    def get(self, name):
        return int(self.ends[name][0])

    def put(self, **values):
        for name, value in values.items():
            self.ends[name] = value % 2**64

    @property
    def visible(self):
        """The positions from top to bottom."""
        return range(self.get("top"), self.get("bottom"))

    def cell_at(self, position):
        """The cell that a position's place leads to."""
        return int(self.slots[position % self.size]) % self.capacity

    def set_position(self, position):
        """Both ends at a position, as after so many pushes and takes."""
        self.put(top=position, bottom=position)


class MapFile:
    """A map's file as numpy arrays that write through to it.

    `arrays`: the two arrays of slots. `words`, `hashes`, `key_lengths`, `value_lengths`, `keys`, `values`: one entry a cell.
    `refs`: of a cell whose value lies in a block, that block. `blocks`: the words of each size class; `block_bytes`: its
    blocks, one a row. `words_end`: where the blocks begin, or the file's end.
    """

    HAS_KEY, IS_PRESENT, IS_FROZEN = 1, 2, 4

    def __init__(self, path):
        self.path = os.fspath(path)
        self.contents = np.asarray(np.memmap(self.path, np.uint8, "r+"))
        header = self.contents[: FILE_HEADER.itemsize].view(FILE_HEADER)[0]
        self.capacity, self.value_bytes = int(header["capacity"]), int(header["payload_bytes"])
        participants, self.arena_bytes = int(header["extra"]) & 0xFFFF, int(header["extra"]) >> 16
        self.count = self.capacity + map_reserve(self.capacity)
        self.size = 1 << (2 * self.count - 1).bit_length()
        cell_bits = (self.count - 1).bit_length()
        self.version_bits = max(24, (61 - cell_bits) // 2)
        self.turn_bits = 61 - cell_bits - self.version_bits
        self.cell_shift, self.shift = 3 + self.turn_bits, 64 - self.version_bits
        slots_at = LINES_OFFSET + MAP_LINES.itemsize
        records_at = slots_at + 2 * 8 * self.size
        cells_at = align(records_at + participants * PARTICIPANT.itemsize, HOT_LINE)
        self.lines = self.contents[LINES_OFFSET:slots_at].view(MAP_LINES)
        self.arrays = self.contents[slots_at:records_at].view("<u8").reshape(2, self.size)
        self.records = self.contents[records_at:][: participants * PARTICIPANT.itemsize].view(PARTICIPANT)
        stride = align(MAP_CELL.itemsize + align(self.value_bytes, 8), LINE)
        cells_end = cells_at + self.count * stride
        self.cells = self.contents[cells_at:cells_end].view(
            {
                "names": ["word", "hash", "key_length", "value_length", "key", "value"],
                "formats": ["<u8", "<u8", "<u4", "<u4", ("u1", (48,)), ("u1", (self.value_bytes,))],
                "offsets": [0, 8, 16, 20, 24, MAP_CELL.itemsize],
                "itemsize": stride,
            }
        )
        assert len(self.cells) == self.count
        self.refs = self.cells["value"][:, :8].view("<u8")[:, 0]
        self.map_arena(align(cells_end, HOT_LINE))
        self.words, self.hashes = self.cells["word"], self.cells["hash"]
        self.key_lengths, self.value_lengths = self.cells["key_length"], self.cells["value_length"]
        self.keys, self.values = self.cells["key"], self.cells["value"]

    def map_arena(self, begin):
        sizes = []
        while MIN_BLOCK_BYTES << len(sizes) <= self.arena_bytes:
            sizes.append(MIN_BLOCK_BYTES << len(sizes))
        at = align(begin + ARENA_LINES.itemsize, HOT_LINE)
        self.blocks, self.block_bytes = [], []
        for size in sizes:
            count = self.arena_bytes // size
            self.blocks.append(self.contents[at : at + 8 * count].view("<u8"))
            at = align(at + 8 * count, HOT_LINE)
        self.words_end = at = align(at, MIN_BLOCK_BYTES) if sizes else len(self.contents)
        for size, words in zip(sizes, self.blocks, strict=True):
            self.block_bytes.append(self.contents[at : at + size * len(words)].reshape(len(words), size))
            at += size * len(words)
        assert at == len(self.contents)
        self.arena_lines = self.contents[begin : begin + ARENA_LINES.itemsize].view(ARENA_LINES) if sizes else None

    @property
    def generation(self):
        return int(self.lines["phase"][0]) >> 2

    @property
    def phase(self):
        return MapPhase(int(self.lines["phase"][0]) & 3)

    def put_phase(self, phase, generation=None):
        self.lines["phase"] = (self.generation if generation is None else generation) << 2 | phase

    def set_generation(self, generation):
        """An empty map in that generation."""
        self.put_phase(MapPhase.STABLE, generation)
        self.arrays[generation & 1] = generation << 3
        self.arrays[1 - generation & 1] = (generation - 1) % 2**61 << 3 | self.IS_FROZEN

    def set_versions(self, version):
        """Every cell free, with this version."""
        self.words[:] = cell_word(version, CellState.FREE, 0)

    @property
    def slots(self):
        """Those of the current generation."""
        return self.arrays[self.generation & 1]

    def key_word(self, cell, version, flags=HAS_KEY | IS_PRESENT, generation=None):
        generation = self.generation if generation is None else generation
        return (
            version % (1 << self.version_bits) << self.shift
            | cell << self.cell_shift
            | generation % (1 << self.turn_bits) << 3
            | flags
        )

    def cell_of(self, word):
        return (int(word) & ((1 << self.shift) - 1)) >> self.cell_shift

    def state_of(self, cell):
        return CellState(int(self.words[cell]) >> STATE_SHIFT & 0xF)

    def version_of(self, cell):
        return int(self.words[cell]) >> VERSION_SHIFT

    @property
    def states(self):
        return [self.state_of(cell) for cell in range(self.count)]

    def key_at(self, cell):
        return self.keys[cell, : self.key_lengths[cell]].tobytes()

    def value_at(self, cell):
        if self.is_long(cell):
            size_class, index = self.block_of(cell)
            return self.block_bytes[size_class][index, : self.value_lengths[cell]].tobytes()
        return self.values[cell, : self.value_lengths[cell]].tobytes()

    def is_long(self, cell):
        return self.value_lengths[cell] > self.value_bytes

    def block_of(self, cell):
        """Size class and index of the block that a cell refers to."""
        return (int(self.refs[cell]) >> 32) - 1, int(self.refs[cell]) & 0xFFFFFFFF

    def block_faults(self):
        """What is wrong with blocks while nobody is in a call: each is free, or of a cell that has moved on, or its cell's."""
        faults = []
        for size_class, words in enumerate(self.blocks):
            for index, word in enumerate(map(int, words)):
                cell, version = word >> 4 & 0xFFFFF, word >> 24
                if word in (BlockState.FREE_HOLE, BlockState.FREE_BACKED):
                    continue
                if word & 0xF == BlockState.LINKED and cell < self.count:
                    passed = (self.version_of(cell) - version + (1 << 39)) % (1 << 40) - (1 << 39)
                    is_its = self.is_long(cell) and self.block_of(cell) == (size_class, index)
                    if passed > 0 or (passed == 0 and self.state_of(cell) == CellState.READY and is_its):
                        continue
                faults.append(f"block {index} of class {size_class} has the word {word:#x}")
        return faults

    def slot_of(self, key):
        """The index of the slot that refers to a cell with that key, present or not."""
        (found,) = [
            i
            for i, word in enumerate(map(int, self.slots))
            if word & self.HAS_KEY and self.key_at(self.cell_of(word)) == key
        ]
        return found

    def cell_for(self, key):
        return self.cell_of(self.slots[self.slot_of(key)])

    @property
    def referenced(self):
        """Cells that a slot of the current generation refers to: {cell: is it present}."""
        found = {}
        for word in map(int, self.slots[(self.slots & 1) != 0]):
            cell = self.cell_of(word)
            if word >> self.shift == self.version_of(cell) % (1 << self.version_bits):
                found[cell] = bool(word & self.IS_PRESENT)
        return found

    @property
    def used_slots(self):
        return [int(slot) for slot in np.flatnonzero((self.records["status"] & 0xFF) == SlotState.USED)]

    def faults(self):
        """What is not as it must be while nobody is in a call: every cell is FREE, or READY(0) and referred to.

        A FREE cell is nobody's, whatever a peer has written in the place of its owner.
        """
        referenced = self.referenced
        named = (self.slots & 1).sum()
        faults = [] if named == len(referenced) else [f"{named} slots refer to {len(referenced)} cells"]
        faults += [
            f"cell {cell} is {self.state_of(cell).name}, owner {int(self.words[cell]) & 0xFFFF}, "
            f"{'referred to' if cell in referenced else 'in no slot'}"
            for cell in range(self.count)
            if (
                int(self.words[cell]) & 0xFFFFF != CellState.READY << STATE_SHIFT
                if cell in referenced
                else self.state_of(cell) != CellState.FREE
            )
        ]
        keys = [self.key_at(cell) for cell in referenced]
        faults += [f"key {key!r} is there twice" for key in set(keys) if keys.count(key) > 1]
        return faults + self.block_faults()


class TableFile:
    """A heartbeat table's file as numpy arrays that write through to it."""

    def __init__(self, path):
        self.contents = np.asarray(np.memmap(os.fspath(path), np.uint8, "r+"))
        self.capacity = int(self.contents[: FILE_HEADER.itemsize].view(FILE_HEADER)[0]["capacity"])
        records_at = LINES_OFFSET + TABLE_LINES.itemsize
        self.epoch = self.contents[LINES_OFFSET : LINES_OFFSET + 8].view("<u8")
        self.records = self.contents[records_at:][: self.capacity * PARTICIPANT.itemsize].view(PARTICIPANT)

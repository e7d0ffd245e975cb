"""The bytes of a ring's and of a table's file, for tests that write them by hand.

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
    DEQUE_LINES,
    FILE_HEADER,
    HOT_LINE,
    LINE,
    LINES_OFFSET,
    PARTICIPANT,
    RING_CELL,
    RING_LINES,
    STATE_SHIFT,
    TABLE_LINES,
    VERSION_SHIFT,
    CellState,
    SlotState,
    align,
    cell_word,
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


class TableFile:
    """A heartbeat table's file as numpy arrays that write through to it."""

    def __init__(self, path):
        self.contents = np.asarray(np.memmap(os.fspath(path), np.uint8, "r+"))
        self.capacity = int(self.contents[: FILE_HEADER.itemsize].view(FILE_HEADER)[0]["capacity"])
        records_at = LINES_OFFSET + TABLE_LINES.itemsize
        self.epoch = self.contents[LINES_OFFSET : LINES_OFFSET + 8].view("<u8")
        self.records = self.contents[records_at:][: self.capacity * PARTICIPANT.itemsize].view(PARTICIPANT)

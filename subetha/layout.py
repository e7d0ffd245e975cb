"""Every byte that Subetha maps, as numpy structured dtypes.

The Cython core declares the same structs (`_layout.pxd`) and compares sizes and offsets with these at import.
All numbers are little-endian; lines that several processes write are 128 bytes apart.
`docs/design/memory-layout.md` shows the files as pictures.
"""

import enum
import struct
import zlib
from typing import NamedTuple

import numpy as np

MAGIC = b"SUBETHA\x00"
LAYOUT_VERSION = 1

LINE = 64
"""Bytes of a cache line; headers and cells are multiples of it."""
HOT_LINE = 128
"""Distance of two words that different processes write (adjacent-line prefetch)."""

MIN_CELLS, MAX_CELLS = 2, 2**20
MIN_QUEUE_CELLS = 16
MAX_PARTICIPANTS = 65_534
MIN_PAYLOAD_BYTES, MAX_PAYLOAD_BYTES = 8, 4088
RING_PARTICIPANTS = 1022
"""Handles that may hold a ring or a deque used alone at one time."""
KEY_BYTES = 48
"""Longest key of a map, in bytes."""
MAX_MAP_CAPACITY = 2**20
MIN_VALUE_BYTES, MAX_VALUE_BYTES = 8, 65_536
MAX_LONG_VALUE_BYTES = 2**32 - 1
"""Longest value of a map in a block, however large the blocks are."""
PRIORITIES = 3
MIN_AREA_BYTES, MAX_AREA_BYTES = 56, 32_768
MIN_BLOCK_BYTES = 4096
MAX_ARENA_BYTES = 2**36
SIZE_CLASSES = 28
"""Most size classes of an arena: blocks of 4096 << n bytes."""


class Kind(enum.IntEnum):
    """What a file is (`FILE_HEADER['kind']`)."""

    RING = 1
    DEQUE = 2
    MAP = 3
    TABLE = 4
    POOL = 5
    ARENA = 6
    REFERENCES = 7
    MAIL = 8


class CellState(enum.IntEnum):
    """States of a cell; `docs/design/cells.md` has the diagram."""

    FREE = 0
    WRITING = 1
    READY = 2
    TAKEN = 3
    DONE = 4
    COLLECTED = 5
    RETRY = 6
    FENCED = 7
    PARKED = 8
    DEAD = 9
    QUARANTINED = 10
    OVERDUE = 11
    KEPT = 12


class MapPhase(enum.IntEnum):
    """What goes on in a map; `docs/design/map.md` has the rules."""

    STABLE = 0
    CLEANING = 1
    MOVING = 2


class BlockState(enum.IntEnum):
    """States of a block of the arena."""

    FREE_HOLE = 0
    FREE_BACKED = 1
    OWNED = 2
    LINKED = 3


class SlotState(enum.IntEnum):
    """States of a record of a heartbeat table."""

    FREE = 0
    USED = 1
    DYING = 2


class Role(enum.IntEnum):
    """What a participant does; a label for people."""

    WORKER = 1
    CLIENT = 2
    SUPERVISOR = 3


class Op(enum.IntEnum):
    """What a record of an observation ring tells of (`OBSERVATION["op"]`), and what its `value` is.

    Bit 0 of `flags` says that there was no room, or nothing, at that moment; of a wait, that what it waited for came before it
    slept; of a scan, that something has to be reclaimed.
    """

    PUSH = 1
    """Put in, or submitted: how many."""
    POP = 2
    """Taken out, or received: how many."""
    CLAIM = 3
    """Claimed: how many."""
    WAIT = 4
    """The gap before something could be taken: how many ns nothing was there."""
    YIELD = 5
    """What was waited for came while others had the processor, which the wait had left to them for long: how many ns."""
    REGISTER = 6
    """Registered in a heartbeat table: the slot."""
    BEAT = 7
    """Beaten: the slot."""
    MARK = 8
    """Said to be in flight: the slot."""
    GET = 9
    """Looked up in a map: how many bytes were found."""
    PUT = 10
    """Put into a map: how many bytes."""
    REMOVE = 11
    """Removed from a map: 1."""
    WATCHDOG_SCAN = 12
    """A watchdog has scanned its table: how many participants have to be reclaimed."""


class WaitTag(enum.IntEnum):
    """Strategy of a handle: how long a call that takes looks for something new before it sleeps."""

    SLEEP = 0
    """Not at all."""
    BRIEF = 1
    """Some looks in a row, then 20 us; what a handle begins with."""
    SPIN = 2
    """The same, but 100 us."""


class HeartbeatSnapshot(NamedTuple):
    """One participant, as its record stood at one moment.

    Attributes
    ----------
    pid : int
        The process id it registered with: a label, not proof of life.
    last_seen_epoch : int
        Global epoch at its last beat.
    in_flight_bitmap : int
        64 bits, one a job it said to be running.
    role : Role
    """

    pid: int
    last_seen_epoch: int
    in_flight_bitmap: int
    role: Role


FILE_HEADER = np.dtype(
    [
        ("magic", "S8"),
        ("layout_version", "<u4"),
        ("kind", "<u4"),
        ("capacity", "<u8"),
        ("cell_bytes", "<u4"),
        ("payload_bytes", "<u4"),
        ("flags", "<u4"),
        ("mode", "<u4"),
        ("created_ns", "<u8"),
        ("extra", "<u8"),
        ("reserved", "<u4"),
        ("crc32", "<u4"),
    ]
)
"""Written once; the CRC-32 is over the bytes before it."""

FLAG_DISK = 1
"""`FILE_HEADER["flags"]` of a pool: what was accepted survives the power, too."""

RING_LINES = np.dtype(
    {
        "names": ["tail", "head", "items", "due", "space"],
        "formats": ["<u8", "<u8", "<u4", "<u4", "<u4"],
        "offsets": [0, HOT_LINE, 2 * HOT_LINE, 2 * HOT_LINE + 4, 3 * HOT_LINE],
        "itemsize": 4 * HOT_LINE,
    }
)
"""Hints of a ring, the futex words of those who wait for items and for space, and which repair goes on (`due`, bit 0)."""

DEQUE_LINES = np.dtype(
    {
        "names": ["top", "bottom", "owner", "pushes"],
        "formats": ["<u8", "<u8", "<u8", "<u8"],
        "offsets": [0, HOT_LINE, HOT_LINE + 8, HOT_LINE + 16],
        "itemsize": 2 * HOT_LINE,
    }
)
"""The two ends of a deque; `owner` = incarnation << 16 | number of who may push (0: nobody); `pushes` is odd during a push."""

MAP_LINES = np.dtype(
    {
        "names": ["phase", "absent"],
        "formats": ["<u8", "<u8"],
        "offsets": [0, HOT_LINE],
        "itemsize": 2 * HOT_LINE,
    }
)
"""`phase` = generation << 2 | MapPhase; `absent`, a hint, is how many keys were deleted since the last rebuild."""

POOL_LINES = np.dtype(
    {
        "names": ["items", "space", "deadline", "boot", "due"],
        "formats": ["<u4", "<u4", "<u8", "<u8", "<u8"],
        "offsets": [0, HOT_LINE, 2 * HOT_LINE, 3 * HOT_LINE, 3 * HOT_LINE + 8],
        "itemsize": 4 * HOT_LINE,
    }
)
"""Waiters for jobs and for room; `deadline` is when a running job may be out of time (monotonic ns), 0: none is known;
`boot` names the boot of the machine that the queue was brought up in (`reboot.py`); `due` is when the first parked job is due
(realtime ns, even; 0: none is known; LOOKING: somebody is finding that out), and bit 0: one is parked that nobody knew."""

LOOKING = 2
"""In the place of a time in `POOL_LINES["due"]`: somebody is looking through the parked cells."""
UNKNOWN_BIT = 1
"""In `POOL_LINES["due"]`: a job is parked since whoever claimed it did not know its closure id."""

QUEUE_GEOMETRY = np.dtype(
    [
        ("job_bytes", "<u4"),
        ("result_bytes", "<u4"),
        ("participants", "<u4"),
        ("quota", "<u4"),
        ("reserve", "<u4"),
        ("reserved", "<u4"),
        ("arena_bytes", "<u8"),
        ("padding", "V28"),
        ("crc32", "<u4"),
    ]
)
"""Second line of a pool, written once: what every other file of the queue is made from."""

RING_CELL = np.dtype([("word", "<u8"), ("length", "<u4"), ("reserved", "<u4")])
"""Header of a cell of a structure used alone; the payload follows."""

MAP_CELL = np.dtype([("word", "<u8"), ("hash", "<u8"), ("key_length", "<u4"), ("value_length", "<u4"), ("key", "V48")])
"""Header of a cell of a map, with the key (zeros behind it); the value follows."""

CAUSE = np.dtype([("when_ns", "<u8"), ("pid", "<u4"), ("code", "<i4")])
"""One death of a worker while it ran the job; `code` as `subprocess.Popen.returncode` has it, UNKNOWN_CAUSE, or
RAISED_CAUSE where it did not die."""

UNKNOWN_CAUSE = -(2**31)
RAISED_CAUSE = UNKNOWN_CAUSE + 1
CAUSES = 4
"""How many deaths a job cell remembers: the last ones."""

JOB_CELL = np.dtype(
    [
        ("word", "<u8"),
        ("job_id", "<u8"),
        ("job_length", "<u8"),
        ("result_length", "<u8"),
        ("job_block", "<u8"),
        ("result_block", "<u8"),
        ("attempts", "<u2"),
        ("max_attempts", "<u2"),
        ("priority", "u1"),
        ("doublings", "u1"),
        ("reserved", "V2"),
        ("timeout_ms", "<u4"),
        ("keep_s", "<u4"),
        ("submitted_ns", "<u8"),
        ("started_ns", "<u8"),
        ("due_ns", "<u8"),
        ("deadline_ns", "<u8"),
        ("progress", "<u8"),
        ("backoff_ms", "<u4"),
        ("job_crc32", "<u4"),
        ("result_crc32", "<u4"),
        ("charged", "<u4"),
        ("unknown_ns", "<u8"),
        ("causes", CAUSE, (CAUSES,)),
    ]
)
"""Header of a cell of a queue; the job area and the result area follow.

`charged` is 2 * version + 1 (low 32 bits) of the claim whose start counted as an attempt. `due_ns` is when a parked job is due, or
a kept result expires (realtime ns); 0: it is parked since somebody did not know its closure id, and `unknown_ns` (monotonic, bit 0
apart) is since when nobody does, or, where bit 0 is set, when somebody may have. After attempt n the next one begins
`backoff_ms` << min(n - 1, `doublings`) later.
"""

TABLE_LINES = np.dtype(
    {"names": ["epoch", "leader"], "formats": ["<u8", "<u8"], "offsets": [0, 8], "itemsize": HOT_LINE}
)
"""`leader` = term << 16 | number of the participant that ticks the epoch and looks for those who lapsed."""

PARTICIPANT = np.dtype(
    [
        ("status", "<u8"),
        ("last_seen_epoch", "<u8"),
        ("in_flight_bitmap", "<u8"),
        ("completed", "<u8"),
        ("boot_hash", "<u8"),
        ("started_ns", "<u8"),
        ("runs", "<u8"),
        ("pid", "<u4"),
        ("role", "<u4"),
    ]
)
"""Record of a participant; its number is slot + 1. `status` = incarnation << 8 | SlotState."""

IN_FLIGHT_CELLS = np.dtype(("<u4", (64,)))
"""Cell numbers beside a participant's bitmap, one a bit."""

ARENA_LINES = np.dtype(
    {
        "names": ["backed_bytes", "high"],
        "formats": ["<u8", ("<u8", (SIZE_CLASSES,))],
        "offsets": [0, HOT_LINE],
        "itemsize": HOT_LINE + 8 * SIZE_CLASSES,
    }
)
"""Hints of an arena: bytes that have disk behind them, and for each size class the first block that never had."""

OBSERVATION = np.dtype([("time_ns", "<u8"), ("value", "<u8"), ("op", "<u2"), ("flags", "<u2"), ("lap", "<u4")])
"""Record of an observation ring, which lies in no file: when (monotonic ns), what (`Op`), and the lap of the ring it is of."""

LINES_OFFSET = 128
"""Where the lines that change begin in every file."""

STATE_SHIFT, VERSION_SHIFT = 16, 20
VERSION_MASK = (1 << 44) - 1


def map_reserve(capacity: int) -> int:
    """How many cells a map has beside those for its keys: whoever writes needs one for a moment."""
    return max(4, min(16, capacity // 8))


UNKNOWN_AFTER_S = 10.0
"""After so many seconds without a live participant that runs it a job is answered with UnknownClosureId."""

QUEUE_MAP_VALUE_BYTES = 56
"""Longest value in the map of a queue."""


def map_capacity(cells: int, participants: int) -> int:
    """How many keys the map of a queue has room for."""
    return min(cells + 8 * participants, MAX_MAP_CAPACITY)


def reserve_of(cells: int) -> int:
    """How many of a queue's cells are kept back from submitters, for rescue."""
    return max(1, min(64, cells // 64))


GEOMETRY_NAMES = ("job_bytes", "result_bytes", "participants", "quota", "arena_bytes")


def geometry_fault(cells: int, geometry: dict[str, int]) -> str | None:
    """Which of a queue's numbers is outside its limits, and what they are; None if all are right."""
    if not MIN_QUEUE_CELLS <= cells <= MAX_CELLS or cells & (cells - 1):
        return f"cells: expected a power of two from {MIN_QUEUE_CELLS} to {MAX_CELLS}, found {cells}"
    limits = {
        "job_bytes": (MIN_AREA_BYTES, MAX_AREA_BYTES),
        "result_bytes": (MIN_AREA_BYTES, MAX_AREA_BYTES),
        "participants": (1, MAX_PARTICIPANTS),
        "quota": (1, cells - reserve_of(cells)),
        "arena_bytes": (MIN_BLOCK_BYTES, MAX_ARENA_BYTES),
    }
    for name, (least, most) in limits.items():
        if not least <= geometry[name] <= most:
            return f"{name}: expected {least} to {most}, found {geometry[name]}"
    return None


def cell_word(version: int, state: int, owner: int) -> int:
    """Pack a cell's state word: version 44 bits, state 4, owner 16."""
    return (version & VERSION_MASK) << VERSION_SHIFT | state << STATE_SHIFT | owner


def block_linked(cell: int, version: int) -> int:
    """Pack the word of a block that belongs to a cell's job: version 40 bits, cell 20, state 4."""
    return (version << 24 | cell << 4 | BlockState.LINKED) & (1 << 64) - 1


CHECKED_NUMBERS = (
    "job_id",
    "job_length",
    "timeout_ms",
    "keep_s",
    "backoff_ms",
    "max_attempts",
    "priority",
    "doublings",
)
"""Fields of a JOB_CELL that its `job_crc32` is over, before the frame's bytes."""
_CHECKED = struct.Struct("<QQIIIHBB")

Bytes = bytes | memoryview


def job_crc32(numbers: tuple[int, ...], *frame: Bytes) -> int:
    """What `JOB_CELL["job_crc32"]` is in a durable queue: over CHECKED_NUMBERS and the frame's bytes where they lie.

    Never 0, which says that there is none. The cell's version is not part of it: a put-back changes that, and must not have
    to change two words at once.
    """
    crc = zlib.crc32(_CHECKED.pack(*numbers))
    for part in frame:
        crc = zlib.crc32(part, crc)
    return crc or 1


def result_crc32(*frame: Bytes) -> int:
    """What `JOB_CELL["result_crc32"]` is in a durable queue: over the result's frame; never 0, which says that there is none."""
    crc = 0
    for part in frame:
        crc = zlib.crc32(part, crc)
    return crc or 1


def align(value: int, step: int) -> int:
    """Round `value` up to a multiple of `step`."""
    return -(-value // step) * step

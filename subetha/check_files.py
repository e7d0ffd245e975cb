"""The files of a queue directory as the verifier reads them: mapped read-only, and what is wrong with them noted."""

import errno
import fcntl
import os
import struct
import zlib
from collections.abc import Iterator
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from subetha import files
from subetha.errors import LayoutMismatch
from subetha.layout import (
    ARENA_LINES,
    FLAG_DISK,
    GEOMETRY_NAMES,
    HOT_LINE,
    IN_FLIGHT_CELLS,
    JOB_CELL,
    LINE,
    LINES_OFFSET,
    MAP_CELL,
    MAP_LINES,
    MIN_BLOCK_BYTES,
    PARTICIPANT,
    POOL_LINES,
    PRIORITIES,
    QUEUE_GEOMETRY,
    QUEUE_MAP_VALUE_BYTES,
    RING_LINES,
    SIZE_CLASSES,
    TABLE_LINES,
    Kind,
    align,
    geometry_fault,
    map_capacity,
    map_reserve,
    reserve_of,
)

__all__ = ["BlockClass", "Fault", "QueueView", "Ring", "UnusableError", "Words"]

Words = npt.NDArray[np.uint64]


class Fault(NamedTuple):
    """Something in a queue directory that is not as it must be.

    Attributes
    ----------
    kind : str
        `missing`, `damaged`, `foreign`, `unreadable`: a file; `state`, `owner`, `parked`, `kept`, `reference`, `job`, `result`:
        of a cell; `participant`; `due`, `places`, `hints`: of a ring; `block`; `repair`: the repair itself failed.
    where : str
        The file, cell, ring, mailbox, participant or block.
    text : str
        What was expected and what was found.
    words : tuple of int
        The words that show it; two looks have to find the same ones.
    """

    kind: str
    where: str
    text: str
    words: tuple[int, ...] = ()

    def as_dict(self) -> dict[str, str]:
        """Give `kind`, `where` and `text`, for JSON."""
        return {"kind": self.kind, "where": self.where, "text": self.text}


class UnusableError(Exception):
    """There is no pool to go by; the fault has been noted."""


class Ring(NamedTuple):
    """A ring of references: its lines (RING_LINES, shape (1,)) and its places (uint64)."""

    where: str
    lines: npt.NDArray[np.void]
    places: Words


class BlockClass(NamedTuple):
    """The blocks of `size` bytes: their words (uint64)."""

    size: int
    words: Words


class QueueView:
    """The files of a queue, mapped read-only. What is wrong with them goes to `faults`; a part that is missing is None."""

    def __init__(self, directory: bytes, faults: list[Fault]) -> None:
        self.directory = directory
        self.faults = faults
        self.table_fd = -1
        pool = self.pool = self._pool()
        self.cells = pool[LINES_OFFSET + POOL_LINES.itemsize :].view(_cell_kind(self.stride))
        self.rings = {
            f"{kind}-{level}": self._part(
                f"{kind}-{level}", Kind.REFERENCES, LINES_OFFSET + RING_LINES.itemsize + 16 * self.count
            )
            for level in range(PRIORITIES)
            for kind in ("back", "submit")
        }
        self.first_mailbox = align(LINES_OFFSET + 4 * self.participants, MIN_BLOCK_BYTES)
        self.mailbox_bytes = align(RING_LINES.itemsize + 16 * self.count, MIN_BLOCK_BYTES)
        self.mail = self._part("mail", Kind.MAIL, self.first_mailbox + self.participants * self.mailbox_bytes)
        self.class_offsets, arena_bytes = _arena_plan(self.arena_limit)
        self.arena = self._part("arena", Kind.ARENA, arena_bytes)
        self.lock_base = LINES_OFFSET + TABLE_LINES.itemsize
        self.lock_base += self.participants * (PARTICIPANT.itemsize + IN_FLIGHT_CELLS.itemsize)
        self.table = self._part("table", Kind.TABLE, self.lock_base, self.participants)
        self._part(
            "map", Kind.MAP, _map_bytes(self.count, self.participants), map_capacity(self.count, self.participants)
        )

    def close(self) -> None:
        """Close the table's descriptor, the only one that is kept."""
        if self.table_fd >= 0:
            os.close(self.table_fd)
            self.table_fd = -1

    def _note(self, kind: str, name: str, text: str) -> None:
        self.faults.append(Fault(kind, f"file {name}", text))

    def _open(self, name: str, kind: Kind) -> tuple[files.Bytes, np.void, int] | None:
        try:
            if not self.directory:
                raise FileNotFoundError(errno.ENOENT, "the directory's name is empty")
            return files.open_mapped(os.path.join(self.directory, name.encode()), kind, readonly=True)
        except FileNotFoundError as error:
            self._note("missing", name, f"cannot be opened: {error.strerror}")
        except LayoutMismatch as error:
            self._note("damaged", name, str(error))
        except OSError as error:
            self._note("unreadable", name, f"cannot be read: {error.strerror}")
        except ValueError as error:
            self._note("unreadable", name, f"cannot be read: {error}")
        return None

    def _pool(self) -> files.Bytes:
        opened = self._open("pool", Kind.POOL)
        if opened is None:
            raise UnusableError
        contents, header, fd = opened
        os.close(fd)
        fault = self._geometry(contents, header)
        if fault is not None:
            self._note("damaged", "pool", fault)
            raise UnusableError
        return contents

    def _geometry(self, contents: files.Bytes, header: np.void) -> str | None:
        """Take over the numbers that every other file follows from; what is wrong with them, or None."""
        raw = contents[LINE : 2 * LINE].tobytes()
        if len(raw) < LINE:
            return f"expected at least {2 * LINE} bytes, found {len(contents)}"
        geometry = np.frombuffer(raw, QUEUE_GEOMETRY)[0]
        if int(geometry["crc32"]) != zlib.crc32(raw[:-4]):
            return f"expected geometry CRC-32 {zlib.crc32(raw[:-4]):#010x}, found {int(geometry['crc32']):#010x}"
        self.count = int(header["capacity"])
        self.created_ns = int(header["created_ns"])
        self.is_durable = bool(int(header["flags"]) & FLAG_DISK)
        fault = geometry_fault(self.count, {name: int(geometry[name]) for name in GEOMETRY_NAMES})
        if fault is not None:
            return fault
        if int(geometry["reserve"]) != reserve_of(self.count):
            return f"reserve: expected {reserve_of(self.count)}, found {geometry['reserve']}"
        self.job_bytes = int(geometry["job_bytes"])
        self.result_bytes = int(geometry["result_bytes"])
        self.participants = int(geometry["participants"])
        self.arena_limit = int(geometry["arena_bytes"])
        self.cell_bits = self.count.bit_length() - 1
        self.stride = align(JOB_CELL.itemsize + self.job_bytes + self.result_bytes, LINE)
        size = LINES_OFFSET + POOL_LINES.itemsize + self.count * self.stride
        if len(contents) != size:
            return f"expected {size} bytes by its numbers, found {len(contents)}"
        return None

    def _part(self, name: str, kind: Kind, size: int, capacity: int | None = None) -> files.Bytes | None:
        opened = self._open(name, kind)
        if opened is None:
            return None
        contents, header, fd = opened
        if name == "table":
            self.table_fd = fd
        else:
            os.close(fd)
        if len(contents) != size:
            self._note("damaged", name, f"expected {size} bytes by the numbers of the pool, found {len(contents)}")
        elif (made := int(header["created_ns" if name == "map" else "extra"])) != self.created_ns:
            self._note(
                "foreign",
                name,
                f"expected a file of the queue made at {self.created_ns} ns, found one of a queue made at {made} ns",
            )
        elif capacity is not None and int(header["capacity"]) != capacity:
            self._note("damaged", name, f"expected a capacity of {capacity}, found {header['capacity']}")
        else:
            return contents
        return None

    def due(self) -> int:
        """The pool's word that tells of parked jobs."""
        return int(self.pool[LINES_OFFSET : LINES_OFFSET + POOL_LINES.itemsize].view(POOL_LINES)["due"][0])

    def ring(self, name: str) -> Ring | None:
        """A ring of jobs, or None where its file is missing."""
        contents = self.rings[name]
        return None if contents is None else self._ring_at(f"ring {name}", contents, LINES_OFFSET)

    def mailboxes(self) -> Iterator[tuple[int, Ring]]:
        """The mailboxes that were made, with their clients' numbers."""
        if self.mail is None:
            return
        made = self.mail[LINES_OFFSET : LINES_OFFSET + 4 * self.participants].view("<u4").copy()
        for slot in np.flatnonzero(made == 1).tolist():
            at = self.first_mailbox + slot * self.mailbox_bytes
            yield slot + 1, self._ring_at(f"mailbox {slot + 1}", self.mail, at)

    def _ring_at(self, where: str, contents: files.Bytes, at: int) -> Ring:
        places = at + RING_LINES.itemsize
        return Ring(
            where, contents[at:places].view(RING_LINES)[0:1], contents[places : places + 16 * self.count].view("<u8")
        )

    def block_classes(self) -> list[BlockClass]:
        """The words of the arena, by size class; none where its file is missing."""
        if self.arena is None:
            return []
        return [BlockClass(size, self.arena[at : at + 8 * count].view("<u8")) for size, at, count in self.class_offsets]

    def frame(self, cell: int, what: str, length: int, block: int) -> files.Bytes | None:
        """A job's or result's bytes where they lie: in the cell's area, or in a block that is there; None: nowhere."""
        if block == 0:
            at = JOB_CELL.itemsize + (0 if what == "job" else self.job_bytes)
            area = self.job_bytes if what == "job" else self.result_bytes
            start = LINES_OFFSET + POOL_LINES.itemsize + cell * self.stride + at
            return self.pool[start : start + length] if length <= area else None
        number, index = (block >> 32) - 1, block & 0xFFFFFFFF
        if self.arena is None or not 0 <= number < len(self.class_offsets):
            return None
        size, _, count = self.class_offsets[number]
        if index >= count or length > size:
            return None
        start = _data_starts(self.class_offsets)[number] + index * size
        return self.arena[start : start + length]

    def records(self) -> npt.NDArray[np.void]:
        """The participants' records; none where the table is missing."""
        if self.table is None:
            return np.zeros(0, PARTICIPANT)
        start = LINES_OFFSET + TABLE_LINES.itemsize
        return self.table[start : start + self.participants * PARTICIPANT.itemsize].view(PARTICIPANT)

    def is_locked(self, slot: int) -> bool:
        """Does somebody hold the lock on a participant's byte? The kernel drops it with the process."""
        probe = struct.pack("@hhqqi4x", fcntl.F_WRLCK, os.SEEK_SET, self.lock_base + slot, 1, 0)
        found = fcntl.fcntl(self.table_fd, fcntl.F_OFD_GETLK, probe)
        return bool(struct.unpack_from("@h", found)[0] != fcntl.F_UNLCK)


def _map_bytes(cells: int, participants: int) -> int:
    """The size of the file that tells who runs which closure ids."""
    count = map_capacity(cells, participants)
    count += map_reserve(count)
    at = LINES_OFFSET + MAP_LINES.itemsize + 2 * 8 * (1 << (2 * count - 1).bit_length())
    at = align(at + participants * PARTICIPANT.itemsize, HOT_LINE)
    return at + count * align(MAP_CELL.itemsize + QUEUE_MAP_VALUE_BYTES, LINE)


def _cell_kind(stride: int) -> np.dtype[np.void]:
    fields = JOB_CELL.fields
    assert fields is not None
    return np.dtype(
        {
            "names": list(fields),
            "formats": [kind[0] for kind in fields.values()],
            "offsets": [kind[1] for kind in fields.values()],
            "itemsize": stride,
        }
    )


def _data_starts(plan: list[tuple[int, int, int]]) -> list[int]:
    """Of each size class the offset of its first block."""
    _, at, count = plan[-1]
    starts = [align(align(at + 8 * count, HOT_LINE), MIN_BLOCK_BYTES)]
    for size, _, count in plan[:-1]:
        starts.append(starts[-1] + size * count)
    return starts


def _arena_plan(limit: int) -> tuple[list[tuple[int, int, int]], int]:
    """Of each size class the bytes of a block, the offset of its words and their number; and the size of the file."""
    plan: list[tuple[int, int, int]] = []
    at = align(LINES_OFFSET + ARENA_LINES.itemsize, HOT_LINE)
    while len(plan) < SIZE_CLASSES and MIN_BLOCK_BYTES << len(plan) <= limit:
        size = MIN_BLOCK_BYTES << len(plan)
        plan.append((size, at, limit // size))
        at = align(at + 8 * (limit // size), HOT_LINE)
    return plan, align(at, MIN_BLOCK_BYTES) + sum(size * count for size, _, count in plan)

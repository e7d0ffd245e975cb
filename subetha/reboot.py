"""The first open of a queue after the machine was started anew.

Nobody lives who worked with it, and after a power failure the disk may hold any mixture of the pages that were written since
they were last synced. What the cells say is taken; everything else is made again from them:

    READY, RETRY, PARKED           wait on, READY and RETRY in the order in which they were handed in
    TAKEN                          put back; or a dead letter, where that was its last attempt
    DEAD, QUARANTINED              stay letters: who was to be told is gone
    DONE                           freed: it has run, and its client is gone; with `keep_s` it is kept
    KEPT                           stays until it expires
    WRITING, COLLECTED, FENCED, OVERDUE    freed

Who ran which closure ids (`map`) is forgotten: all of them are gone. How long nobody has known a parked job counts from here.

In a durable queue a job whose CRC-32 is wrong is quarantined, and a result whose CRC-32 is wrong is freed. A job's id does not come
again, since a durable queue has each incarnation on the disk before its first job.

One process does this, under a lock (flock) on the pool that the kernel drops when it dies; the next one then begins anew, also
after another power failure: `boot` in the pool is written last. Others wait.
"""

import errno
import fcntl
import os
import struct
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from subetha import files
from subetha._core import HeartbeatTable, QueueHandle, punch_hole
from subetha.layout import (
    ARENA_LINES,
    CHECKED_NUMBERS,
    FLAG_DISK,
    JOB_CELL,
    LINES_OFFSET,
    LOOKING,
    MIN_BLOCK_BYTES,
    PARTICIPANT,
    POOL_LINES,
    PRIORITIES,
    RING_LINES,
    STATE_SHIFT,
    TABLE_LINES,
    UNKNOWN_BIT,
    VERSION_SHIFT,
    CellState,
    Kind,
    SlotState,
    block_linked,
    cell_word,
    job_crc32,
    result_crc32,
)
from subetha.routing import check_map, map_sizes
from subetha.wire import RESULT_HEADER_BYTES

WAIT_S = 60
"""How long others wait for the one that is at it."""

PARTS = tuple(f"{kind}-{level}" for level in range(PRIORITIES) for kind in ("back", "submit"))


def bring_up(directory: files.Path) -> None:
    """Make a queue of an earlier boot of the machine one that can be worked with. Nothing, where that has been done.

    Blocks while another process is at it, for up to a minute.

    Raises
    ------
    LayoutMismatch
        Its files are cut or damaged.
    TimeoutError
        Another process has been at it for a minute: it is stopped, or the disk hangs.
    """
    directory = os.fsencode(directory)
    pool, header, fd = files.open_mapped(os.path.join(directory, b"pool"), Kind.POOL)
    try:
        geometry = QueueHandle._geometry(directory, pool, header)
        _, _, size = QueueHandle._pool_sizes(
            int(header["capacity"]), int(geometry["job_bytes"]), int(geometry["result_bytes"])
        )
        files.check_size(directory, size, len(pool))
        lines = pool[LINES_OFFSET : LINES_OFFSET + POOL_LINES.itemsize].view(POOL_LINES)
        boot = files.boot_hash()
        if int(lines["boot"][0]) == boot:
            return
        with _alone(fd, directory):
            if int(lines["boot"][0]) == boot:
                return
            with _Queue(directory, pool, header, geometry) as queue:
                if not queue.is_in_use():
                    queue.make_anew()
                    os.fsync(fd)
            lines["boot"] = boot
            os.fsync(fd)
    finally:
        os.close(fd)


@contextmanager
def _alone(fd: int, directory: bytes) -> Iterator[None]:
    until = time.monotonic() + WAIT_S
    while True:
        try:
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
            break
        except BlockingIOError:
            if time.monotonic() > until:
                raise TimeoutError(
                    errno.ETIMEDOUT,
                    f"another process has been bringing this queue up after a start of the machine for {WAIT_S} s; "
                    "if it is stopped, end it (nothing is lost), and open the queue again",
                    os.fsdecode(directory),
                ) from None
            time.sleep(0.01)
    try:
        yield
    finally:
        fcntl.flock(fd, fcntl.LOCK_UN)


class _Class(NamedTuple):
    """A size class of the arena: its blocks' words, and where their data begin in the file."""

    size: int
    words: npt.NDArray[np.uint64]
    data: int


class _Queue:
    """Every file of a queue, mapped."""

    def __init__(self, directory: bytes, pool: files.Bytes, header: np.void, geometry: np.void) -> None:
        self.directory = directory
        self.created_ns = int(header["created_ns"])
        self.is_durable = bool(int(header["flags"]) & FLAG_DISK)
        self.count = int(header["capacity"])
        self.job_bytes = int(geometry["job_bytes"])
        self.result_bytes = int(geometry["result_bytes"])
        self.participants = int(geometry["participants"])
        self.fds: list[int] = []
        self.pool = pool
        offset, stride, _ = QueueHandle._pool_sizes(self.count, self.job_bytes, self.result_bytes)
        self.cells = pool[offset:].reshape(self.count, stride)
        try:
            self._map(int(geometry["arena_bytes"]))
        except BaseException:
            self.close()
            raise

    def _map(self, arena_bytes: int) -> None:
        reference_bytes = QueueHandle._references_size(self.count)
        self.rings = {name: self._part(name, Kind.REFERENCES, reference_bytes)[0] for name in PARTS}
        counts, words, data, _, size = QueueHandle._arena_sizes(arena_bytes)
        self.arena, self.arena_fd = self._part("arena", Kind.ARENA, size)
        self.words_end = data[0]
        self.classes = [
            _Class(MIN_BLOCK_BYTES << n, self.arena[at : at + 8 * count].view(np.uint64), data_at)
            for n, (count, at, data_at) in enumerate(zip(counts, words, data, strict=True))
        ]
        self.lock_base = HeartbeatTable._sizes(self.participants)[2]
        self.table, self.table_fd = self._part("table", Kind.TABLE, self.lock_base)
        self.first_mailbox, _, size = QueueHandle._mail_sizes(self.count, self.participants)
        self.mail, self.mail_fd = self._part("mail", Kind.MAIL, size)
        check_map(self.directory, self.created_ns)
        path = os.path.join(self.directory, b"map")
        self.map, _, fd = files.open_mapped(path, Kind.MAP)
        self.fds.append(fd)
        files.check_size(path, map_sizes(self.count, self.participants)[2], len(self.map))

    def _part(self, name: str, kind: Kind, size: int) -> tuple[files.Bytes, int]:
        path = os.path.join(self.directory, name.encode())
        contents, header, fd = files.open_mapped(path, kind)
        self.fds.append(fd)
        files.check_size(path, size, len(contents))
        files.check_belongs(path, self.created_ns, header)
        return contents, fd

    def __enter__(self) -> "_Queue":
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()

    def close(self) -> None:
        """Close the descriptors of the parts; the mappings go with the object."""
        while self.fds:
            os.close(self.fds.pop())

    def is_in_use(self) -> bool:
        """Does anybody hold a participant's lock? Then the machine was not started anew, whatever the pool says."""
        probe = struct.pack("@hhqqi4x", fcntl.F_WRLCK, os.SEEK_SET, self.lock_base, self.participants, 0)
        found = fcntl.fcntl(self.table_fd, fcntl.F_OFD_GETLK, probe)
        return bool(struct.unpack_from("@h", found)[0] != fcntl.F_UNLCK)

    def make_anew(self) -> None:
        """Settle every cell, then make everything else from the cells; all of it is on the disk when this returns."""
        for name in PARTS:
            self.rings[name][LINES_OFFSET:] = 0
        self._empty(self.mail, self.mail_fd, self.first_mailbox, len(self.mail))
        self.mail[LINES_OFFSET : self.first_mailbox] = 0
        self._free_records()
        self.map[LINES_OFFSET:] = 0
        lines = self.pool[LINES_OFFSET : LINES_OFFSET + POOL_LINES.itemsize].view(POOL_LINES)
        lines["deadline"] = 0
        self._keep_results()
        waiting = [job for job in map(self._settle, self._find_jobs()) if job is not None]
        lines["due"] = self._find_due()
        self._free_blocks()
        self._publish(waiting)
        for fd in self.fds:
            os.fsync(fd)

    # -- cells --

    def _cell(self, index: int) -> npt.NDArray[np.void]:
        return self.cells[index, : JOB_CELL.itemsize].view(JOB_CELL)

    def _find_jobs(self) -> list[int]:
        """Free every cell that holds no job to be kept, nor a kept result; the cells of the jobs."""
        words = self.cells[:, :8].copy().view(np.uint64)[:, 0]
        states = (words >> np.uint64(STATE_SHIFT)).astype(np.uint8) & np.uint8(0xF)
        kept = np.isin(states, (*_SETTLED, CellState.FREE, CellState.KEPT)) | (states > max(CellState))
        freed = ((words >> np.uint64(VERSION_SHIFT)) + np.uint64(1)) << np.uint64(VERSION_SHIFT)
        words[~kept] = freed[~kept]
        self.cells[:, :8] = words.view(np.uint8).reshape(-1, 8)
        found: list[int] = np.flatnonzero(kept & ~np.isin(states, (CellState.FREE, CellState.KEPT))).tolist()
        return found

    def _keep_results(self) -> None:
        """Let what is done and to be kept, or kept already, be KEPT by nobody, or free it."""
        now = time.time_ns()
        for index in self._find_kept(CellState.DONE, CellState.KEPT):
            cell = self._cell(index)
            word = int(cell["word"][0])
            version, state, owner = word >> VERSION_SHIFT, word >> STATE_SHIFT & 0xF, word & 0xFFFF
            latest = now + int(cell["keep_s"][0]) * 10**9
            due = int(cell["due_ns"][0]) if state == CellState.KEPT and owner == 0 else latest
            if due <= now or cell["keep_s"][0] == 0 or not self._result_is_whole(index):
                cell["word"] = cell_word(version + 1, CellState.FREE, 0)
                continue
            cell["due_ns"] = min(due, latest)
            cell["job_block"] = 0
            cell["word"] = cell_word(version if state == CellState.KEPT else version + 1, CellState.KEPT, 0)

    def _settle(self, index: int) -> int | None:
        """Give a cell the state that it goes on in; the cell, if it waits to be run."""
        cell = self._cell(index)
        word = int(cell["word"][0])
        version, state = word >> VERSION_SHIFT, word >> STATE_SHIFT & 0xF
        new = _SETTLED[CellState(state)] if state <= max(CellState) else CellState.QUARANTINED
        if new is not CellState.QUARANTINED and not self._is_whole(index):
            new = CellState.QUARANTINED
        elif state == CellState.TAKEN:
            is_charged = int(cell["charged"][0]) == (2 * version + 1) & 0xFFFF_FFFF
            if is_charged and cell["attempts"][0] >= cell["max_attempts"][0]:
                new = CellState.DEAD
        if state != new:
            version += 1
        cell["result_length"] = cell["result_block"] = cell["deadline_ns"] = cell["unknown_ns"] = 0
        cell["word"] = cell_word(version, new, 0)
        return index if new in (CellState.READY, CellState.RETRY) else None

    def _find_due(self) -> int:
        """When the first parked job is due, and whether there is one that nobody knew."""
        dues = [int(self._cell(index)["due_ns"][0]) for index in self._find_kept(CellState.PARKED)]
        first = min((max(due & ~UNKNOWN_BIT, LOOKING + 2) for due in dues if due), default=0)
        return first | (UNKNOWN_BIT if 0 in dues else 0)

    def _is_whole(self, index: int) -> bool:
        """Are the job's bytes those that were handed in? Without a CRC-32 only their place is known to be one."""
        cell = self._cell(index)[0]
        frame = self._frame(index, cell)
        if frame is None:
            return False
        numbers = tuple(int(cell[name]) for name in CHECKED_NUMBERS)
        return not self.is_durable or int(cell["job_crc32"]) == job_crc32(numbers, frame.data)

    def _result_is_whole(self, index: int) -> bool:
        """Is it a result's frame, and of this job; in a durable queue with the CRC-32 that it was given?"""
        cell = self._cell(index)[0]
        frame = self._frame(index, cell, "result")
        if frame is None or len(frame) < RESULT_HEADER_BYTES:
            return False
        if int.from_bytes(frame[:4].tobytes(), "little") != int(cell["job_id"]) & 0xFFFF_FFFF:
            return False
        return not self.is_durable or int(cell["result_crc32"]) == result_crc32(frame.data)

    def _frame(self, index: int, cell: np.void, what: str = "job") -> files.Bytes | None:
        length, block = int(cell[f"{what}_length"]), int(cell[f"{what}_block"])
        if block == 0:
            start = JOB_CELL.itemsize + (self.job_bytes if what == "result" else 0)
            area = self.result_bytes if what == "result" else self.job_bytes
            return self.cells[index, start : start + length] if length <= area else None
        found = self._block(block)
        if found is None or length > found[0].size:
            return None
        size_class, number = found
        start = size_class.data + number * size_class.size
        return self.arena[start : start + length]

    def _block(self, reference: int) -> tuple[_Class, int] | None:
        """The class and number of a block that a cell names, if there is such a one."""
        number, index = (reference >> 32) - 1, reference & 0xFFFF_FFFF
        if not 0 <= number < len(self.classes) or index >= len(self.classes[number].words):
            return None
        return self.classes[number], index

    # -- what is made from the cells --

    def _publish(self, waiting: list[int]) -> None:
        """Fill the rings: jobs that were put back before the others of their priority, else as they were handed in."""
        waiting.sort(key=lambda index: (int(self._cell(index)["submitted_ns"][0]), int(self._cell(index)["job_id"][0])))
        cell_bits = self.count.bit_length() - 1
        lap_bits = (63 - cell_bits) // 2
        version_mask = (1 << (63 - cell_bits - lap_bits)) - 1
        places: dict[str, list[int]] = {name: [] for name in PARTS}
        for index in waiting:
            cell = self._cell(index)[0]
            word = int(cell["word"])
            kind = "back" if word >> STATE_SHIFT & 0xF == CellState.RETRY else "submit"
            level = min(int(cell["priority"]), PRIORITIES - 1)
            version = word >> VERSION_SHIFT & version_mask
            places[f"{kind}-{level}"].append(1 << (63 - lap_bits) | version << cell_bits | index)
        for name, words in places.items():
            start = LINES_OFFSET + RING_LINES.itemsize
            self.rings[name][start : start + 8 * len(words)] = np.array(words, np.uint64).view(np.uint8)
            self.rings[name][LINES_OFFSET:start].view(RING_LINES)["tail"] = len(words)

    def _free_blocks(self) -> None:
        """Link the blocks of the kept jobs and results, and give the disk space of all others back."""
        self.arena[LINES_OFFSET : self.words_end] = 0
        for index in self._find_kept():
            word = int(self._cell(index)["word"][0])
            of = "result_block" if word >> STATE_SHIFT & 0xF == CellState.KEPT else "job_block"
            found = self._block(int(self._cell(index)[of][0]))
            if found is not None:
                found[0].words[found[1]] = block_linked(index, word >> VERSION_SHIFT)
        lines = self.arena[LINES_OFFSET : LINES_OFFSET + ARENA_LINES.itemsize].view(ARENA_LINES)
        for n, (size, words, data) in enumerate(self.classes):
            kept = np.flatnonzero(words).tolist()
            lines["backed_bytes"] += size * len(kept)
            lines["high"][0, n] = kept[-1] + 1 if kept else 0
            start = 0
            for index in [*kept, len(words)]:
                self._empty(self.arena, self.arena_fd, data + start * size, data + index * size)
                start = index + 1

    def _find_kept(self, *chosen: CellState) -> list[int]:
        """Find the cells whose job may still be run, or those in `chosen` states."""
        states = (self.cells[:, :8].copy().view(np.uint64)[:, 0] >> np.uint64(STATE_SHIFT)) & np.uint64(0xF)
        kept = np.isin(states, chosen) if chosen else (states != CellState.FREE) & (states != CellState.QUARANTINED)
        found: list[int] = np.flatnonzero(kept).tolist()
        return found

    def _free_records(self) -> None:
        """Every participant is gone; incarnations go on from where they are."""
        start = LINES_OFFSET + TABLE_LINES.itemsize
        end = start + self.participants * PARTICIPANT.itemsize
        records = self.table[start:end].view(PARTICIPANT)
        freed = (records["status"] >> np.uint64(8)) << np.uint64(8) | np.uint64(SlotState.FREE)
        self.table[start:] = 0
        records["status"] = freed
        self.table[LINES_OFFSET:start].view(TABLE_LINES)["leader"] = 0

    @staticmethod
    def _empty(contents: files.Bytes, fd: int, start: int, end: int) -> None:
        """Bytes that read as zeros, with no disk behind them where the file system can do that."""
        if start == end:
            return
        try:
            punch_hole(fd, start, end - start)
        except OSError as error:
            if error.errno != errno.EOPNOTSUPP:
                raise
            contents[start:end] = 0


_SETTLED = {
    CellState.READY: CellState.READY,
    CellState.RETRY: CellState.RETRY,
    CellState.PARKED: CellState.PARKED,
    CellState.TAKEN: CellState.RETRY,
    CellState.DEAD: CellState.DEAD,
    CellState.QUARANTINED: CellState.QUARANTINED,
}
"""What becomes of a cell that holds a job to be kept."""

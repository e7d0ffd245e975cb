"""Is a queue directory whole? A verifier that shares no code with the core that it verifies.

It maps the files read-only (`check_files.py`) and holds every word against the rules of `docs/design/cells.md`; only the
layout is common. A queue may be at work meanwhile. Then a look sees things in motion, so a fault counts only where two
looks, a pause apart, find the same one with the same words. Versions, laps and incarnations only go up: a word that stayed
the same was never another one between the looks.

For this to hold within one look, references are read before cells, and cells before what tells of their owners and
blocks: what a cell's word promises was promised before the evidence against it was read.
"""

import os
import time
import zlib
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from subetha import files
from subetha.check_files import Fault, QueueView, Ring, UnusableError, Words
from subetha.errors import SubethaError
from subetha.jobqueue import JobQueue
from subetha.layout import (
    CHECKED_NUMBERS,
    LOOKING,
    PRIORITIES,
    STATE_SHIFT,
    UNKNOWN_BIT,
    VERSION_SHIFT,
    BlockState,
    CellState,
    SlotState,
    job_crc32,
)
from subetha.wire import RESULT_HEADER_BYTES, SUBMIT_HEADER_BYTES

__all__ = ["CheckReport", "Fault", "check_queue", "look"]

PAUSE_S = 0.2
CLOCK_SLACK_S = 86_400
"""By how much the clock may have been set back since the time was written at which a result expires."""
STEADY_TRIES = 16
"""How often a ring is read again because its hints moved meanwhile; after that it is at work, and no fault is seen in it."""

Flags = npt.NDArray[np.bool_]

OWNED_STATES = (
    CellState.WRITING,
    CellState.TAKEN,
    CellState.COLLECTED,
    CellState.FENCED,
    CellState.OVERDUE,
)
JOB_STATES = (CellState.READY, CellState.RETRY, CellState.PARKED, CellState.TAKEN, CellState.DEAD)
"""States in which the job is there and may still be run."""
BLOCK_VERSION_MASK = (1 << 40) - 1


@dataclass
class CheckReport:
    """What a check found.

    Attributes
    ----------
    queue : str
        The directory, as it was given.
    faults : list of Fault
        Those that are there at the end.
    repaired : list of Fault
        Those that a repair took away.
    """

    queue: str
    faults: list[Fault] = field(default_factory=list)
    repaired: list[Fault] = field(default_factory=list)

    @property
    def exit_code(self) -> int:
        """0: sound, 1: repaired, 2: broken."""
        if self.faults:
            return 2
        return 1 if self.repaired else 0

    def as_dict(self) -> dict[str, Any]:
        """Give the report as one object for JSON."""
        return {
            "queue": self.queue,
            "sound": not self.faults,
            "faults": [fault.as_dict() for fault in self.faults],
            "repaired": [fault.as_dict() for fault in self.repaired],
        }


def check_queue(path: files.Path, *, repair: bool = False, pause: float = PAUSE_S) -> CheckReport:
    """Verify a queue directory, at rest or at work, and repair it where that is asked for. Nothing is ever deleted.

    Parameters
    ----------
    path : path
        The directory. Whatever it is, the report says what is wrong with it; nothing is raised.
    repair : bool
        Where there are faults: make missing files anew, move on what dead participants have left, and let rings, mailboxes
        and cells agree again. It may be done while others work with the queue.
    pause : float
        Seconds between two looks. What a process has begun and not finished for so long counts as a fault.

    Returns
    -------
    CheckReport
    """
    report = CheckReport(os.fsdecode(path), _settled(path, pause))
    if repair and report.faults:
        before = report.faults
        trouble = _repair(path)
        report.faults = _settled(path, pause)
        left = {(fault.kind, fault.where) for fault in report.faults}
        report.repaired = [fault for fault in before if (fault.kind, fault.where) not in left]
        if trouble is not None:
            report.faults.append(trouble)
    return report


def _settled(path: files.Path, pause: float) -> list[Fault]:
    """Look for faults, and at those there are once more."""
    first = set(look(path))
    if not first:
        return []
    time.sleep(pause)
    return [fault for fault in look(path) if fault in first]


def _repair(path: files.Path) -> Fault | None:
    """Repair what can be; the fault that it could not, or None."""
    try:
        with JobQueue.open(path) as queue:
            queue.rescue()
            queue.repair()
    except (SubethaError, OSError, MemoryError, ValueError) as error:
        return Fault("repair", "queue", f"the repair failed: {error}")
    return None


def look(path: files.Path) -> list[Fault]:
    """Look at a queue directory once; on a queue at work some of what this finds is only in motion."""
    faults: list[Fault] = []
    try:
        queue = QueueView(os.fsencode(path), faults)
    except UnusableError:
        return faults
    try:
        if not any(fault.kind != "missing" for fault in faults):
            faults.extend(_Look(queue).faults())
    except OSError as error:
        faults.append(Fault("unreadable", "file table", f"the kernel does not tell who is alive: {error}"))
    finally:
        queue.close()
    return faults


# --- one look ---------------------------------------------------------------------------------------------------------


class _Seen(NamedTuple):
    """A ring as one look found it."""

    faults: list[Fault]
    cells: npt.NDArray[np.intp]
    versions: Words


class _Look:
    """One look at the mapped files, in the order that makes two of them proof."""

    def __init__(self, queue: QueueView) -> None:
        self.queue = queue
        self.lap_bits = (63 - queue.cell_bits) // 2
        self.lap_shift = 64 - self.lap_bits
        self.ref_version_mask = (1 << (63 - queue.cell_bits - self.lap_bits)) - 1
        self.alive_cache: dict[int, tuple[int, bool]] = {}

    def faults(self) -> Iterator[Fault]:
        """Every fault; first what lies in the rings is read, then the cells, then the records and blocks."""
        queue = self.queue
        rings = {
            (kind, level): self._read_ring(queue.ring(f"{kind}-{level}"))
            for level in range(PRIORITIES)
            for kind in ("back", "submit")
        }
        boxes = {number: self._read_ring(ring) for number, ring in queue.mailboxes()}
        cells = self._read_cells()
        for seen in (*rings.values(), *boxes.values()):
            yield from seen.faults
        yield from self._states(cells)
        yield from self._parked(cells)
        yield from self._kept(cells)
        yield from self._waiting(cells, rings)
        yield from self._results(cells, boxes)
        yield from self._frames(cells)
        yield from self._participants()
        yield from self._blocks()

    # -- rings --

    def _read_ring(self, ring: Ring | None) -> _Seen:
        if ring is None:
            return _Seen([], np.zeros(0, np.intp), np.zeros(0, np.uint64))
        is_steady = False
        for _ in range(STEADY_TRIES):
            hints = self._hints(ring)
            places = np.array(ring.places)
            if self._hints(ring) == hints:
                is_steady = True
                break
        full = places[self._is_full(places)]
        return _Seen(
            self._ring_faults(ring.where, hints, places) if is_steady else [],
            (full & np.uint64(self.queue.count - 1)).astype(np.intp),
            full >> np.uint64(self.queue.cell_bits) & np.uint64(self.ref_version_mask),
        )

    @staticmethod
    def _hints(ring: Ring) -> tuple[int, int, int]:
        return int(ring.lines["tail"][0]), int(ring.lines["head"][0]), int(ring.lines["due"][0])

    def _is_full(self, places: Words) -> Flags:
        return (places >> np.uint64(self.lap_shift - 1) & np.uint64(1)).astype(np.bool_)

    def _ring_faults(self, where: str, hints: tuple[int, int, int], places: Words) -> list[Fault]:
        """Hold the places against each other, then the hints against the places.

        Every place names a position: the one it holds, or the one it waits for. Head is the least of them, tail the least
        that is still to be published. All of them lie within one lap.
        """
        tail, head, due = hints
        if due & 1:
            # Places are emptied and filled again; the cells behind them are not lost.
            return [
                Fault("due", where, f"a repair was begun and not ended (it gives lap {due >> 1})", (due, tail, head))
            ]
        size = len(places)
        laps = places >> np.uint64(self.lap_shift)
        base = int(laps[0])
        lead = (laps - laps[0] << np.uint64(self.lap_shift)).astype(np.int64) >> np.int64(self.lap_shift)
        positions = lead * size + np.arange(size, dtype=np.int64)
        full = self._is_full(places)
        least_head = int(positions.min())
        greatest = int(positions.max())
        least_tail = int((positions + size * full).min())
        greatest_full = int(positions[full].max()) if full.any() else least_head - 1
        if greatest - least_head >= size or greatest_full > least_tail:
            text = (
                f"the places contradict each other: positions {least_head} to {greatest} (of {size} places), "
                f"full up to {greatest_full}, the first to be filled is {least_tail}"
            )
            return [Fault("places", where, text, (tail, head, zlib.crc32(places.tobytes())))]
        bits = self.lap_bits + self.queue.cell_bits + 1
        wrap = (1 << bits) - 1
        true_tail, true_head = (base * size + least_tail) & wrap, (base * size + least_head) & wrap
        faults = []
        behind = _signed(true_tail - tail, bits)
        if not 0 <= behind <= 1:
            text = f"the tail is {tail & wrap}, the first place to be filled {true_tail}"
            faults.append(Fault("hints", where, text, (tail, head, true_tail)))
        behind = _signed(true_head - head, bits)
        # Publishers free stale places at the far end of a full ring without moving the head.
        if behind < 0 or (behind > 1 and least_tail - least_head < size - 1):
            text = f"the head is {head & wrap}, the first place in use {true_head}"
            faults.append(Fault("hints", where, text, (tail, head, true_head)))
        return faults

    # -- cells --

    def _read_cells(self) -> "_Cells":
        cells = self.queue.cells
        words = cells["word"].copy()
        fields = {
            name: cells[name].copy()
            for name in (
                *("job_id", "job_length", "result_length", "job_block", "result_block", "priority", "due_ns", "keep_s"),
            )
        }
        # What was read belongs to a word that is there before and after.
        steady = cells["word"] == words
        return _Cells(words, np.asarray(steady, np.bool_), fields)

    def _states(self, cells: "_Cells") -> Iterator[Fault]:
        for cell in cells.where(cells.states > max(CellState)):
            word = int(cells.words[cell])
            yield Fault("state", f"cell {cell}", f"no such state: {int(cells.states[cell])} (word {word:#x})", (word,))
        is_being_kept = (cells.states == CellState.KEPT) & (cells.owners != 0)
        for cell in cells.where(np.isin(cells.states, OWNED_STATES) | is_being_kept):
            word, owner = int(cells.words[cell]), int(cells.owners[cell])
            state = CellState(int(cells.states[cell])).name
            if not 0 < owner <= self.queue.participants:
                text = f"{state} by {owner}, which is the number of no participant"
                yield Fault("owner", f"cell {cell}", text, (word,))
                continue
            status, is_alive = self._alive(owner - 1)
            if not is_alive:
                text = f"{state} by participant {owner}, who is not alive"
                yield Fault("owner", f"cell {cell}", text, (word, status))

    def _parked(self, cells: "_Cells") -> Iterator[Fault]:
        """Nobody owns what is parked, and the pool's word `due` tells of it; it is read after the cells, which come first."""
        told = self.queue.due()
        time, is_unknown_told = told & ~UNKNOWN_BIT, bool(told & UNKNOWN_BIT)
        for cell in cells.where(cells.states == CellState.PARKED):
            word, owner, due = int(cells.words[cell]), int(cells.owners[cell]), int(cells.fields["due_ns"][cell])
            if owner != 0:
                yield Fault("owner", f"cell {cell}", f"PARKED by {owner}, expected nobody", (word,))
            if time == LOOKING:
                continue
            if due == 0 and not is_unknown_told:
                text = f"PARKED for who knows it, and the pool does not tell of such (due {told:#x})"
                yield Fault("parked", f"cell {cell}", text, (word, told))
            elif due != 0 and not 0 < time <= max(due, LOOKING + 2):
                text = f"PARKED until {due} ns, and the pool tells of none before {time} ns"
                yield Fault("parked", f"cell {cell}", text, (word, told))

    def _kept(self, cells: "_Cells") -> Iterator[Fault]:
        """What is kept expires, and not later than it was asked for."""
        now = time.time_ns()
        for cell in cells.where((cells.states == CellState.KEPT) & (cells.owners == 0)):
            word, due = int(cells.words[cell]), int(cells.fields["due_ns"][cell])
            keep_s = int(cells.fields["keep_s"][cell])
            if keep_s == 0:
                yield Fault("kept", f"cell {cell}", "KEPT, and no result of its job was to be kept", (word,))
            elif due > now + (keep_s + CLOCK_SLACK_S) * 10**9:
                # nothing of the time of this look: the second one is to find the same
                text = f"KEPT for {keep_s} s, and expires only {due // 10**9} s after 1970"
                yield Fault("kept", f"cell {cell}", text, (word, due))

    def _waiting(self, cells: "_Cells", rings: dict[tuple[str, int], _Seen]) -> Iterator[Fault]:
        claimable = np.isin(cells.states, (CellState.READY, CellState.RETRY))
        levels = np.minimum(cells.fields["priority"], PRIORITIES - 1)
        marks = np.zeros((PRIORITIES, self.queue.count), np.bool_)
        for (_, level), seen in rings.items():
            marks[level, self._led_to(cells, seen, claimable)] = True
        is_right = marks[levels, np.arange(self.queue.count)]
        for cell in cells.where(claimable & ~is_right):
            word = int(cells.words[cell])
            text = f"{CellState(int(cells.states[cell])).name}, and no ring of its priority {levels[cell]} leads to it"
            elsewhere = np.flatnonzero(marks[:, cell]).tolist()
            if elsewhere:
                text += f" (a ring of priority {elsewhere[0]} does)"
            yield Fault("reference", f"cell {cell}", text, (word,))

    def _results(self, cells: "_Cells", boxes: dict[int, _Seen]) -> Iterator[Fault]:
        waits = cells.untold
        clients = cells.fields["job_id"] >> np.uint64(48)
        is_there = np.zeros(self.queue.count, np.bool_)
        for number, seen in boxes.items():
            led_to = self._led_to(cells, seen, waits)
            is_there[led_to[clients[led_to] == number]] = True
        for cell in cells.where(waits & ~is_there):
            word, client = int(cells.words[cell]), int(clients[cell])
            text = (
                f"{CellState(int(cells.states[cell])).name}, and the mailbox of its client {client} does not lead to it"
            )
            if client not in boxes:
                text = f"{CellState(int(cells.states[cell])).name}, and its client {client} has no mailbox"
            yield Fault("reference", f"cell {cell}", text, (word,))

    def _led_to(self, cells: "_Cells", seen: _Seen, waits: Flags) -> npt.NDArray[np.intp]:
        """The cells that live references of a ring lead to."""
        is_same = cells.versions[seen.cells] & np.uint64(self.ref_version_mask) == seen.versions
        found: npt.NDArray[np.intp] = seen.cells[is_same & waits[seen.cells]]
        return found

    # -- frames and blocks --

    def _frames(self, cells: "_Cells") -> Iterator[Fault]:
        yield from self._frames_of(
            cells, "job", np.isin(cells.states, JOB_STATES), SUBMIT_HEADER_BYTES, self.queue.job_bytes
        )
        has_result = cells.untold | (cells.states == CellState.KEPT)
        yield from self._frames_of(cells, "result", has_result, RESULT_HEADER_BYTES, self.queue.result_bytes)
        if self.queue.is_durable:
            yield from self._checksums(cells)

    def _checksums(self, cells: "_Cells") -> Iterator[Fault]:
        """Of a durable queue: are the jobs those that were handed in? Their words, read after the bytes, vouch for these."""
        for cell in cells.where(np.isin(cells.states, (CellState.READY, CellState.RETRY, CellState.PARKED))):
            word = int(cells.words[cell])
            here = self.queue.cells[cell]
            numbers = tuple(int(here[name]) for name in CHECKED_NUMBERS)
            frame = self.queue.frame(cell, "job", int(here["job_length"]), int(here["job_block"]))
            found, expected = None if frame is None else job_crc32(numbers, frame.tobytes()), int(here["job_crc32"])
            if found not in (None, expected) and int(here["word"]) == word:
                text = f"the job was damaged (its CRC-32 is {found:#010x}, not {expected:#010x}); who claims it quarantines it"
                yield Fault("job", f"cell {cell}", text, (word, expected))

    def _frames_of(self, cells: "_Cells", what: str, has: Flags, least: int, area: int) -> Iterator[Fault]:
        lengths, blocks = cells.fields[f"{what}_length"], cells.fields[f"{what}_block"]
        for cell in cells.where(has & (lengths < least)):
            word, length = int(cells.words[cell]), int(lengths[cell])
            text = f"the {what} has {length} bytes, fewer than its header of {least}"
            yield Fault(what, f"cell {cell}", text, (word, length))
        for cell in cells.where(has & (blocks == 0) & (lengths > area)):
            word, length = int(cells.words[cell]), int(lengths[cell])
            text = f"the {what} has {length} bytes and no block; its area holds {area}"
            yield Fault(what, f"cell {cell}", text, (word, length))
        classes = self.queue.block_classes()
        for cell in cells.where(has & (blocks != 0)):
            word, length, block = int(cells.words[cell]), int(lengths[cell]), int(blocks[cell])
            number, index = (block >> 32) - 1, block & 0xFFFFFFFF
            if not 0 <= number < len(classes) or index >= len(classes[number].words):
                text = f"the {what} lies in block {block:#x}, which does not exist"
                yield Fault(what, f"cell {cell}", text, (word, block))
                continue
            found = int(classes[number].words[index])
            link = (word >> VERSION_SHIFT & BLOCK_VERSION_MASK) << 24 | cell << 4 | BlockState.LINKED
            where = f"{classes[number].size}/{index}"
            if found == BlockState.FREE_HOLE:
                text = f"the {what} lay in block {where}, which is empty: its bytes are lost, and its submitter will be told so"
                yield Fault(what, f"cell {cell}", text, (word, block, found))
            elif found != link:
                text = (
                    f"the {what} lies in block {where}, which is not linked to it: expected {link:#x}, found {found:#x}"
                )
                yield Fault(what, f"cell {cell}", text, (word, block, found))
            elif length > classes[number].size:
                text = f"the {what} has {length} bytes; its block {where} holds {classes[number].size}"
                yield Fault(what, f"cell {cell}", text, (word, block, length))

    def _blocks(self) -> Iterator[Fault]:
        for size, shared in self.queue.block_classes():
            words = np.array(shared)
            # An owner is judged after the word that names it was read.
            self.alive_cache.clear()
            states = words & np.uint64(0xF)
            # The two free states have nothing beside them: another word of theirs is never used again.
            unknown = (states > max(BlockState)) | ((states <= BlockState.FREE_BACKED) & (words > 1))
            for index in np.flatnonzero(unknown).tolist():
                word = int(words[index])
                yield Fault("block", f"block {size}/{index}", f"no such word: {word:#x}", (word,))
            for index in np.flatnonzero(states == BlockState.OWNED).tolist():
                word = int(words[index])
                owner, incarnation = word >> 4 & 0xFFFF, word >> 20
                status, is_alive = self._alive(owner - 1) if 0 < owner <= self.queue.participants else (0, False)
                if not is_alive or status >> 8 != incarnation:
                    text = f"owned by participant {owner} (incarnation {incarnation}), who is not alive"
                    yield Fault("block", f"block {size}/{index}", text, (word, status))

    # -- participants --

    def _participants(self) -> Iterator[Fault]:
        statuses = self.queue.records()["status"].copy()
        for slot in np.flatnonzero(statuses & np.uint64(0xFF) != SlotState.FREE).tolist():
            status = int(statuses[slot])
            state = status & 0xFF
            is_locked = self.queue.is_locked(slot)
            where = f"participant {slot + 1}"
            if not is_locked:
                pid = int(self.queue.records()["pid"][slot])
                text = f"dead (it was process {pid}), and what it has left was not moved on"
                yield Fault("participant", where, text, (status,))
            elif state > max(SlotState):
                yield Fault("participant", where, f"no such state: {state} (status {status:#x})", (status,))

    def _alive(self, slot: int) -> tuple[int, bool]:
        """The status of a record, and whether whoever it belongs to is alive."""
        found = self.alive_cache.get(slot)
        if found is None:
            records = self.queue.records()
            if not len(records):
                return 0, False
            status = int(records["status"][slot])
            is_used = status & 0xFF in (SlotState.USED, SlotState.DYING)
            found = self.alive_cache[slot] = status, is_used and self.queue.is_locked(slot)
        return found


class _Cells:
    """The cells as one look found them; `where` leaves out those that moved meanwhile."""

    def __init__(self, words: Words, steady: Flags, fields: dict[str, npt.NDArray[Any]]) -> None:
        self.words = words
        self.steady = steady
        self.fields = fields
        self.states = (words >> np.uint64(STATE_SHIFT)).astype(np.uint8) & np.uint8(0xF)
        self.owners = words & np.uint64(0xFFFF)
        self.versions: Words = words >> np.uint64(VERSION_SHIFT)
        is_letter = np.isin(self.states, (CellState.DEAD, CellState.QUARANTINED)) & (self.owners != 0)
        self.untold: Flags = (self.states == CellState.DONE) | is_letter

    def where(self, condition: Flags) -> list[int]:
        found: list[int] = np.flatnonzero(condition & self.steady).tolist()
        return found


def _signed(value: int, bits: int) -> int:
    """A difference of two counters that wrap at 2**bits."""
    value &= (1 << bits) - 1
    return value - (1 << bits) if value >> (bits - 1) else value

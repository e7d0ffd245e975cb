"""The queue directory: jobs go in, run in other processes, and their results come back to whoever submitted them.

Files of a queue (all made from the pool's geometry, so whoever opens it completes what is missing):

    pool                    cells, one a job
    arena                   blocks for long arguments and results
    back-N, submit-N        rings of references, N = priority
    table                   participants, their locks and beats
    mail                    a mailbox ring for each client; its disk space is taken at the client's first submit
    map                     who runs which closure ids (routing.py)
"""

import contextlib
import errno
import os
import threading
import zlib
from collections import Counter
from collections.abc import Iterable
from typing import Any, Literal, NamedTuple, Self

import numpy as np
import numpy.typing as npt

from subetha import files
from subetha._core import HeartbeatTable, JobClaim, OrdinaryJobs, QueueHandle, WorkState
from subetha.errors import LayoutMismatch, UnsupportedTransportFamily
from subetha.layout import (
    CAUSES,
    FLAG_DISK,
    GEOMETRY_NAMES,
    LINE,
    LINES_OFFSET,
    MIN_BLOCK_BYTES,
    PARTICIPANT,
    POOL_LINES,
    PRIORITIES,
    QUEUE_GEOMETRY,
    QUEUE_MAP_VALUE_BYTES,
    RAISED_CAUSE,
    STATE_SHIFT,
    UNKNOWN_AFTER_S,
    UNKNOWN_CAUSE,
    CellState,
    Kind,
    Role,
    geometry_fault,
    reserve_of,
)
from subetha.reboot import bring_up
from subetha.routing import Registrations, check_map, map_sizes
from subetha.sidecar import WaitingPolicy

_opening = threading.RLock()


def _after_fork() -> None:
    global _opening
    # another thread of the parent may have held it
    _opening = threading.RLock()


os.register_at_fork(after_in_child=_after_fork)

Durability = Literal["process", "disk"]


class QueueStats(NamedTuple):
    """What a queue holds, counted cell by cell while others work (so parts may be a moment apart).

    Attributes
    ----------
    cells : int
        Size of the pool; `reserve` of them are kept for rescue.
    free, waiting, running, done, other, parked, kept : int
        Cells in these states: `waiting` READY or RETRY, `running` TAKEN, `done` results not collected yet,
        `parked` not due yet, or known to no worker that has met them, `kept` results that `result` still gives though their
        submitters have them, or have gone, `other` whatever is between two states or set aside.
    waiting_by_priority : tuple of int
        `waiting`, by priority.
    states : dict
        Cells by the name of their state.
    participants : int
        Handles that take part now and are alive.
    quota, reserve : int
        Cells that one client may hold; cells kept back from submitters.
    arena_bytes, arena_backed_bytes : int
        Bytes of blocks that may have disk behind them, and that have.
    """

    cells: int
    free: int
    waiting: int
    running: int
    done: int
    other: int
    waiting_by_priority: tuple[int, ...]
    states: dict[str, int]
    participants: int
    quota: int
    reserve: int
    arena_bytes: int
    arena_backed_bytes: int
    parked: int
    kept: int


class WorkerDeath(NamedTuple):
    """One death of a worker while it ran a job.

    Attributes
    ----------
    when_ns : int
        When it was noticed, in ns since 1970.
    pid : int
        The worker's process id.
    exit_code : int or None
        As `subprocess.Popen.returncode` (negative for a signal); None where nobody who could know it saw the death.
    """

    when_ns: int
    pid: int
    exit_code: int | None


class DeadLetter(NamedTuple):
    """A job that was not to be tried again: its worker died in every attempt.

    Attributes
    ----------
    job_id : int
    attempts : int
        How often it was started; some of these may have ended in a retry, and not in a death.
    submitted_ns : int
        When it was handed in, in ns since 1970.
    deaths : tuple of WorkerDeath
        Those among the last four attempts, oldest first.
    """

    job_id: int
    attempts: int
    submitted_ns: int
    deaths: tuple[WorkerDeath, ...]


class QuarantinedJob(NamedTuple):
    """A job of a durable queue whose bytes are not those that were handed in; it will not run.

    After a power failure such a cell may also be the trace of a job that was being handed in, and was not accepted yet.

    Attributes
    ----------
    job_id : int
        As the cell has it; it may be damaged, too.
    cell : int
        Its cell.
    submitted_ns : int
        When it was handed in, in ns since 1970, as the cell has it.
    """

    job_id: int
    cell: int
    submitted_ns: int


class JobQueue(QueueHandle):
    """A queue directory, opened.

    One process creates it, any number open it. A handle may be used by several threads; it takes a number at its first
    submit, claim or receive, and its results come back to it alone. Results that were not collected when it closes are
    dropped, or kept where that was asked for (`result_ttl`); its jobs still run.

    Calls: `submit`, `cancel`, `cancel_running`, `try_recv`, `recv`, `recv_many`, `result`, `forget`, `try_claim`, `claim`, `runs`,
    `stats`, `cells`, `rescue`, `progress`, `dead_letters`, `retry_dead`, `drop_dead`, `quarantined`, `repair`, `close`.
    """

    _registrations: Registrations | None = None
    _runs: frozenset[int] | None = None

    @classmethod
    def create(
        cls,
        path: files.Path,
        cells: int = 4096,
        *,
        job_bytes: int = 192,
        result_bytes: int = 192,
        participants: int = 1024,
        arena_bytes: int = 2**30,
        quota: int | None = None,
        durability: Durability = "process",
        mode: int = 0o600,
        role: Role = Role.CLIENT,
        unknown_after: float = UNKNOWN_AFTER_S,
    ) -> Self:
        """Create a queue directory and open it.

        Parameters
        ----------
        path : path
            The directory; made where it is missing (its parent must be there).
        cells : int
            Jobs that may be waiting, running or uncollected at one time: a power of two from 16 to 2**20.
        job_bytes, result_bytes : int
            Bytes for a job's and a result's frame inside a cell, 56 to 32,768; longer ones go to blocks.
        participants : int
            Handles that may take part at one time, 1 to 65,534.
        arena_bytes : int
            Bytes of blocks in use at one time, 4096 to 2**36. Taken from the disk only as they are used; the file's apparent
            size is a multiple of it.
        quota : int, optional
            Cells that one client may hold; default: half of them.
        durability : str
            "process": an accepted job survives the death of any process. "disk": it survives the power, too. Then `submit`
            returns when the job is on the disk, and a result or an `ack` is on the disk before anybody is told of it.
        mode : int
            Permission bits of the files, kept under any umask.
        role : Role
            What this handle is called in the table.
        unknown_after : float
            For how many seconds no live participant must have said to run a job until this handle, where it does so itself
            (`runs`), answers it with UnknownClosureId.

        Raises
        ------
        ValueError, TypeError
            A number outside its limits.
        FileExistsError
            There is a queue already; it is untouched.
        OSError
            No space, or no permission; or the directory lies in memory (tmpfs), and the queue is to be durable.
        """
        geometry = _geometry(cells, job_bytes, result_bytes, participants, arena_bytes, quota)
        _create_pool(path, cells, geometry, _flags(durability), mode)
        return cls.open(path, role=role, unknown_after=unknown_after)

    @classmethod
    def open(
        cls,
        path: files.Path,
        readonly: bool = False,
        *,
        role: Role = Role.CLIENT,
        unknown_after: float = UNKNOWN_AFTER_S,
    ) -> Self:
        """Open an existing queue directory.

        Parameters
        ----------
        readonly : bool
            Map for looking only: no number is taken, `submit`, `claim` and `recv` are refused.
        role : Role
        unknown_after : float
            As in `create`.

        Raises
        ------
        FileNotFoundError
            No queue there.
        LayoutMismatch
            Files of another layout version, cut, damaged, or of different queues.
        TimeoutError
            The machine was started anew, and another process has been bringing the queue up for a minute.
        """
        if not readonly:
            _complete(path)
            bring_up(path)
        opened = cls._attach(path, readonly, role)
        try:
            check_map(os.fsencode(path), opened._created_ns)
            opened.unknown_after = unknown_after
        except BaseException:
            opened.close()
            raise
        return opened

    @classmethod
    def open_or_create(
        cls,
        path: files.Path,
        cells: int = 4096,
        *,
        job_bytes: int = 192,
        result_bytes: int = 192,
        participants: int = 1024,
        arena_bytes: int = 2**30,
        quota: int | None = None,
        durability: Durability = "process",
        mode: int = 0o600,
        role: Role = Role.CLIENT,
        unknown_after: float = UNKNOWN_AFTER_S,
    ) -> Self:
        """Open the queue, or create it where there is none; any number of processes may do so at once.

        Raises
        ------
        LayoutMismatch
            It exists with other numbers. Otherwise as `create` and `open`.
        """
        geometry = _geometry(cells, job_bytes, result_bytes, participants, arena_bytes, quota)
        flags = _flags(durability)
        try:
            queue = cls.open(path, role=role, unknown_after=unknown_after)
        except FileNotFoundError:
            # another process may be faster: then its queue is opened
            with contextlib.suppress(FileExistsError):
                _create_pool(path, cells, geometry, flags, mode)
            queue = cls.open(path, role=role, unknown_after=unknown_after)
        asked = (cells, durability, *(int(geometry[name]) for name in GEOMETRY_NAMES))
        found = (queue.cells_total, queue.durability, *(int(getattr(queue, name)) for name in GEOMETRY_NAMES))
        if asked != found:
            queue.close()
            names = ("cells", "durability", *GEOMETRY_NAMES)
            differing = ", ".join(
                f"{name} {a} (found {f})" for name, a, f in zip(names, asked, found, strict=True) if a != f
            )
            raise LayoutMismatch(
                f"{os.fsdecode(path)}: expected {differing}; open it with open(), or choose another directory"
            )
        return queue

    @property
    def participants(self) -> int:
        """Handles that may take part at one time."""
        return self.heartbeat.capacity

    def stats(self) -> QueueStats:
        """Count the cells by state, the participants and the arena's use. Does not block."""
        cells = self.cells()
        words = cells["word"].copy()
        codes = (words >> STATE_SHIFT).astype(np.uint8) & 0xF
        counts: Counter[str] = Counter()
        for code, n in enumerate(np.bincount(codes, minlength=16).tolist()):
            if n:
                counts[CellState(code).name if code < len(CellState) else "UNKNOWN"] += n
        waits = (codes == CellState.READY) | (codes == CellState.RETRY)
        levels = np.minimum(cells["priority"][waits], PRIORITIES - 1)
        waiting = counts["READY"] + counts["RETRY"]
        return QueueStats(
            cells=len(cells),
            free=counts["FREE"],
            waiting=waiting,
            running=counts["TAKEN"],
            done=counts["DONE"],
            other=len(cells) - waiting - sum(counts[state] for state in ("FREE", "TAKEN", "DONE", "PARKED", "KEPT")),
            waiting_by_priority=tuple(int(n) for n in np.bincount(levels, minlength=PRIORITIES)),
            states=dict(counts),
            participants=len(list(self.heartbeat)),
            quota=self.quota,
            reserve=self.reserve,
            arena_bytes=self.arena_bytes,
            arena_backed_bytes=self.arena_backed_bytes,
            parked=counts["PARKED"],
            kept=counts["KEPT"],
        )

    def runs(self, closure_ids: Iterable[int] | None, known: Iterable[int] | None = None) -> None:
        """Let this handle claim only jobs with these closure ids, and let the others know of it.

        A job that it meets and does not know it parks for the others, uncharged: who runs it takes it as soon as it looks,
        within about a tenth of a second. Where no live participant has said to run it for `unknown_after` seconds, whoever
        looks and has said what it runs answers it with UnknownClosureId. With an empty set everything that this handle
        meets goes that way.

        Parameters
        ----------
        closure_ids : iterable of int, optional
            None, as at the beginning: this handle claims every job, also those parked by others, and tells nobody of any; it
            answers none.
        known : iterable of int, optional
            What the others are told, where that is more: with these closure ids jobs may stay parked although this handle does
            not claim any now.

        Raises
        ------
        TypeError, ValueError
            No closure id.
        MapFull
            The queue's map has no room to let others know of every one; this handle runs them all the same.
        """
        chosen = None if closure_ids is None else frozenset(closure_ids)
        self._set_known(chosen)
        self._runs = chosen if chosen is None or known is None else frozenset(known)
        self._declare()

    def take_place(self, closure_id: int, places: int) -> int | None:
        """Take one of the places of a closure id that all handles of the queue share, so that only so many work at one time.

        A place is free again when it is given back, or its holder has died or closed its handle. Does not block.

        Parameters
        ----------
        places : int
            How many there are, 1 to 65,535; the same in every process, or the largest number counts.

        Returns
        -------
        int or None
            Which, for `give_place`; None where all are taken.

        Raises
        ------
        MapFull
            The queue's map has no room to say so.
        """
        return self.registrations().take_place(self.identity, closure_id, places)

    def give_place(self, closure_id: int, place: int) -> None:
        """Give back what `take_place` gave."""
        self.registrations().give_place(self.identity, closure_id, place)

    def _declare(self) -> None:
        # also after a fork, or where it could not be said the last time: then the same error would come at every claim
        self._set_declared()
        if self._runs or self._registrations is not None:
            self.registrations().say(self.identity, self._runs or ())

    def registrations(self) -> Registrations:
        """What the queue's participants have said of themselves and of certain jobs, for modules of this package."""
        if self._registrations is None:
            with _opening:
                if self._registrations is None:
                    self._registrations = Registrations(os.fsencode(self.path), self._created_ns, self.is_alive)
        return self._registrations

    def _live_closure_ids(self) -> set[int]:
        return self.registrations().live_ids()

    def _forget(self) -> None:
        """Before the number is given up."""
        # No name of this module may be used in it: the interpreter may be ending.
        if self._registrations is not None:
            self._registrations.take_back()

    def overdue_pids(self) -> set[int]:
        """Find the processes of which a job ran out of time and has been answered for them: whoever started one should end it."""
        words = self.cells()["word"]
        owners = words[(words >> STATE_SHIFT) & 0xF == CellState.OVERDUE] & 0xFFFF
        found = (self.heartbeat.snapshot(int(owner) - 1) for owner in owners if 0 < owner <= self.participants)
        return {snapshot.pid for snapshot in found if snapshot is not None}

    def dead_letters(self) -> list[DeadLetter]:
        """List the jobs that ended after their last attempt, with every death that is remembered. Does not block."""
        cells = self.cells()
        return [_letter(cell) for cell in cells[_states(cells) == CellState.DEAD]]

    def quarantined(self) -> list[QuarantinedJob]:
        """List the jobs of a durable queue whose bytes were found damaged; `drop_dead` drops them. Does not block."""
        cells = self.cells()
        return [
            QuarantinedJob(int(cells["job_id"][n]), n, int(cells["submitted_ns"][n]))
            for n in np.flatnonzero(_states(cells) == CellState.QUARANTINED).tolist()
        ]

    def progress(self, job_id: int) -> tuple[int, int] | None:
        """Find how far a running job says that it is: done and total, in any unit.

        Returns
        -------
        tuple of int, or None
            None where it does not run, or has said nothing. Does not block.
        """
        cells = self.cells()
        for cell in cells[(cells["job_id"] == job_id) & (_states(cells) == CellState.TAKEN)]:
            said = int(cell["progress"])
            return (said >> 32, said & 0xFFFF_FFFF) if said else None
        return None

    def make_policy(self) -> WaitingPolicy:
        """What decides by default how long a claim looks for a job before it sleeps, where a `Sidecar` has this queue."""
        return WaitingPolicy()

    @property
    def submit_side(self) -> "SubmitSide":
        """The queue as a transport of submit frames; its claims reply to the client that submitted."""
        return SubmitSide(self)

    @property
    def result_side(self) -> "ResultSide":
        """This handle's mailbox as a transport of result frames."""
        return ResultSide(self)


class SubmitSide:
    """A queue as a MessageTransport of submit frames (`wire.py`). The queue numbers the jobs itself."""

    claims_reply = True
    payload_bytes = None

    def __init__(self, queue: JobQueue) -> None:
        self._queue = queue
        self.try_claim = queue.try_claim
        self.claim = queue.claim
        self.runs = queue.runs
        self.take_place = queue.take_place
        self.give_place = queue.give_place
        # It is adaptive as its queue is.
        self.header = queue.header
        self.ring = queue.ring
        self.make_policy = queue.make_policy
        self.apply_migration = queue.apply_migration

    def ordinary_jobs(
        self, state: WorkState, registry: Any, table: HeartbeatTable | None, slot: int, most: int
    ) -> OrdinaryJobs:
        """Make what runs jobs of at most `most` bytes for a worker's loop, with nothing of Python in between."""
        return OrdinaryJobs(self._queue, state, registry, table, slot, most)

    def try_push(self, payload: bytes) -> int:
        """Submit the frame at priority 1; returns the job id, whose lower half is the token. Raises Full."""
        return self._queue._push_frame(payload, 0)

    def push(self, payload: bytes, timeout: float | None = None) -> int:
        """As `try_push`, waiting for room up to `timeout` seconds."""
        return self._queue._push_frame(payload, timeout)

    def try_pop(self) -> bytes:
        """Claim a job, acknowledge it and give back its frame: delivered at most once, and no result will come."""
        return self._pop(self.try_claim())

    def pop(self, timeout: float | None = None) -> bytes:
        """As `try_pop`, waiting for a job."""
        return self._pop(self.claim(timeout))

    @property
    def unknown_answered(self) -> int:
        """How many jobs the queue's handle has answered itself, since nobody knew their closure ids."""
        return self._queue.unknown_answered

    @staticmethod
    def _pop(claim: JobClaim) -> bytes:
        frame = claim.tobytes()
        claim.ack()
        return frame


class ResultSide:
    """A handle's mailbox as a MessageTransport of result frames (`wire.py`); for taking only."""

    payload_bytes = None

    def __init__(self, queue: JobQueue) -> None:
        self._queue = queue

    def try_push(self, payload: bytes) -> None:
        """Not here: a result goes out through `reply` of its job's claim.

        Raises
        ------
        UnsupportedTransportFamily
        """
        raise UnsupportedTransportFamily(
            f"{self._queue.path}: results go to their clients through the claim's reply(); nothing can be pushed here"
        )

    def try_claim(self) -> JobClaim:
        """Not here: a result is taken by `try_pop`.

        Raises
        ------
        UnsupportedTransportFamily
        """
        raise UnsupportedTransportFamily(f"{self._queue.path}: results are popped, not claimed; use try_pop() or pop()")

    def try_pop(self) -> bytes:
        """Take a result frame that is there; its token is the job id's lower half. Raises Empty."""
        return self._queue._pop_frame(0)

    def pop(self, timeout: float | None = None) -> bytes:
        """As `try_pop`, waiting for a result."""
        return self._queue._pop_frame(timeout)


def _states(cells: npt.NDArray[np.void]) -> npt.NDArray[np.uint8]:
    found: npt.NDArray[np.uint8] = (cells["word"] >> STATE_SHIFT).astype(np.uint8) & np.uint8(0xF)
    return found


def _letter(cell: np.void) -> DeadLetter:
    attempts = int(cell["attempts"])
    kept = min(attempts, CAUSES)
    causes = (cell["causes"][n % CAUSES] for n in range(attempts - kept, attempts))
    return DeadLetter(
        job_id=int(cell["job_id"]),
        attempts=attempts,
        submitted_ns=int(cell["submitted_ns"]),
        deaths=tuple(
            WorkerDeath(
                when_ns=int(cause["when_ns"]),
                pid=int(cause["pid"]),
                exit_code=None if cause["code"] == UNKNOWN_CAUSE else int(cause["code"]),
            )
            for cause in causes
            if cause["code"] != RAISED_CAUSE
        ),
    )


def _geometry(
    cells: int, job_bytes: int, result_bytes: int, participants: int, arena_bytes: int, quota: int | None
) -> np.void:
    asked = {
        "cells": cells,
        "job_bytes": job_bytes,
        "result_bytes": result_bytes,
        "participants": participants,
        "arena_bytes": arena_bytes,
        "quota": quota,
    }
    for name, value in asked.items():
        if type(value) is not int and not (value is None and name == "quota"):
            raise TypeError(f"{name}: expected an int, found {type(value).__name__}")
    numbers = {
        "job_bytes": job_bytes,
        "result_bytes": result_bytes,
        "participants": participants,
        "arena_bytes": arena_bytes,
        "quota": cells // 2 if quota is None else quota,
    }
    fault = geometry_fault(cells, numbers)
    if fault is not None:
        raise ValueError(fault)
    geometry = np.zeros(1, QUEUE_GEOMETRY)
    for name, number in numbers.items():
        geometry[name] = number
    geometry["reserve"] = reserve_of(cells)
    geometry["crc32"] = zlib.crc32(geometry.tobytes()[:-4])
    found: np.void = geometry[0]
    return found


def _flags(durability: str) -> int:
    if durability not in ("process", "disk"):
        raise ValueError(f"durability: expected 'process' or 'disk', found {durability!r}")
    return FLAG_DISK if durability == "disk" else 0


def _make_directory(directory: bytes, mode: int) -> None:
    """A directory as private, or as open to its group, as the files in it; these take its group then."""
    permissions = 0o700 | (0o2070 if mode & 0o070 else 0)
    os.mkdir(directory, 0o700)
    os.chmod(directory, permissions)


def _create_pool(path: files.Path, cells: int, geometry: np.void, flags: int, mode: int) -> None:
    """The pool decides: who links it first has made the queue."""
    directory = os.fsencode(path)
    parent = os.path.dirname(os.path.abspath(directory))
    if flags & FLAG_DISK:
        files.refuse_memory_file_system(directory)
    try:
        _make_directory(directory, mode)
        if flags & FLAG_DISK:
            files.sync_directory(parent)
    except FileExistsError:
        if not os.path.isdir(directory):
            raise NotADirectoryError(
                errno.ENOTDIR, "a queue is a directory; choose another path", os.fsdecode(directory)
            ) from None

    def fill(contents: files.Bytes) -> None:
        contents[LINE : 2 * LINE] = np.frombuffer(geometry.tobytes(), np.uint8)
        contents[LINES_OFFSET : LINES_OFFSET + POOL_LINES.itemsize].view(POOL_LINES)["boot"] = files.boot_hash()

    _, stride, size = QueueHandle._pool_sizes(cells, int(geometry["job_bytes"]), int(geometry["result_bytes"]))
    files.create(
        os.path.join(directory, b"pool"),
        Kind.POOL,
        size,
        capacity=cells,
        cell_bytes=stride,
        payload_bytes=int(geometry["job_bytes"]),
        flags=flags,
        mode=mode,
        durable=bool(flags & FLAG_DISK),
        fill=fill,
    )


def _complete(path: files.Path) -> None:
    """Make the files that the pool's creator has not made (yet, or because it died); others may do so at once."""
    directory = os.fsencode(path)
    names = [f"{kind}-{n}" for n in range(PRIORITIES) for kind in ("back", "submit")]
    names += ["arena", "table", "mail", "map"]
    missing = [name for name in names if not os.path.exists(os.path.join(directory, name.encode()))]
    pool = os.path.join(directory, b"pool")
    if not os.path.exists(pool):
        raise FileNotFoundError(
            errno.ENOENT,
            "no queue here (it has no file 'pool'); create it with JobQueue.create",
            os.fsdecode(directory),
        )
    if not missing:
        return
    contents, header, fd = files.open_mapped(pool, Kind.POOL, readonly=True)
    os.close(fd)
    geometry = QueueHandle._geometry(path, contents, header)
    cells, participants, limit = (
        int(header["capacity"]),
        int(geometry["participants"]),
        int(geometry["arena_bytes"]),
    )
    *_, words_end, arena_size = QueueHandle._arena_sizes(limit)
    first_mailbox, _, mail_size = QueueHandle._mail_sizes(cells, participants)
    map_capacity, map_stride, map_size = map_sizes(cells, participants)
    # kind, size, capacity, bytes of a cell, from where on the file is sparse
    plans: dict[str, tuple[Kind, int, int, int, int | None]] = {
        "arena": (Kind.ARENA, arena_size, limit, MIN_BLOCK_BYTES, words_end),
        "table": (Kind.TABLE, HeartbeatTable._sizes(participants)[2], participants, PARTICIPANT.itemsize, None),
        "mail": (Kind.MAIL, mail_size, participants, 8, first_mailbox),
        "map": (Kind.MAP, map_size, map_capacity, map_stride, None),
    }
    references = (Kind.REFERENCES, QueueHandle._references_size(cells), cells, 8, None)
    for name in missing:
        kind, size, capacity, cell_bytes, sparse_from = plans.get(name, references)
        # another process may be faster
        with contextlib.suppress(FileExistsError):
            files.create(
                os.path.join(directory, name.encode()),
                kind,
                size,
                capacity=capacity,
                cell_bytes=cell_bytes,
                payload_bytes=QUEUE_MAP_VALUE_BYTES if name == "map" else 0,
                # a map says there how many participants it has room for; it belongs to the queue by its time of creation
                extra=participants if name == "map" else int(header["created_ns"]),
                created_ns=int(header["created_ns"]) if name == "map" else None,
                mode=int(header["mode"]),
                sparse_from=sparse_from,
                durable=bool(int(header["flags"]) & FLAG_DISK),
            )

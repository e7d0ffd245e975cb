"""The main job, end to end on real files: worker processes hash every regular file below a folder.

One job reads one file and gives its SHA-256, bytes, lines and words; the submitting process reads the file too and
compares. Importing this module registers the handler, so ``subetha worker subetha.demo --queue DIR`` serves the jobs.

Paths are bytes throughout: they may hold any byte but NUL, and be longer than one system call takes.
"""

import contextlib
import errno
import hashlib
import os
import signal
import stat
import struct
import sysconfig
import tempfile
import time
from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Final, NamedTuple, Self

from subetha.errors import ArenaFull, Empty, Full, PassError, SchedError, TransportError
from subetha.jobqueue import JobQueue
from subetha.pass_registry import Pass, register
from subetha.pool import WorkerPool, WorkerPoolBroken, signals_deferred

__all__ = [
    "FINGERPRINT_CLOSURE_ID",
    "DemoReport",
    "Failure",
    "Fingerprint",
    "check_folder",
    "default_folder",
    "fingerprint",
    "open_regular",
    "printable",
    "regular_files",
    "run_demo",
]

FINGERPRINT_CLOSURE_ID: Final = 0xFFFF_DE30
"""Closure id of the handler: takes a path as bytes, gives a packed `Fingerprint`."""

QUEUE_CELLS: Final = 1024
QUEUE_ARENA_BYTES: Final = 16 * 2**20
"""Room for paths too long for a cell; a window of jobs, not the whole folder, has to fit."""

SHARED_MEMORY: Final = "/dev/shm"
"""Where the queue directory lies when there is room."""

READING_ROUNDS: Final = 5
"""So often is a file read in a worker that changes between its reading and the check."""


_CHUNK_BYTES = 256 * 1024
_RESULTS_AT_ONCE = 256
_PATH_PIECE_BYTES = 4095
"""The longest path of one system call: PATH_MAX without the closing NUL."""

# The bytes at which bytes.split() and isspace() in the C locale part words, as a blank; all others as an "x".
_WORDS_AND_GAPS = bytes(0x20 if byte in b" \t\n\v\f\r" else 0x78 for byte in range(256))


# --- reading files ----------------------------------------------------------------------------------------------------


class Fingerprint(NamedTuple):
    """What a job says of its file. `size` and `mtime_ns` are those before the reading began."""

    sha256: bytes
    length: int
    lines: int
    words: int
    size: int
    mtime_ns: int

    def pack(self) -> bytes:
        """Give the result of a job, 72 bytes little-endian: 32 of SHA-256, four u64, the time as i64."""
        return _FINGERPRINT.pack(*self)

    @classmethod
    def unpack(cls, result: bytes) -> Self:
        """Read back what `pack` gave.

        Raises
        ------
        ValueError
            `result` has another length.
        """
        if len(result) != _FINGERPRINT.size:
            raise ValueError(f"a fingerprint has {_FINGERPRINT.size} bytes, this result has {len(result)}")
        return cls(*_FINGERPRINT.unpack(result))


_FINGERPRINT: Final = struct.Struct("<32sQQQQq")


def _open_path(path: bytes, flags: int) -> int:
    """Open an absolute path of any length: one that is too long for a system call piece by piece."""
    directory: int | None = None
    try:
        while len(path) > _PATH_PIECE_BYTES:
            cut = path.rfind(b"/", 1, _PATH_PIECE_BYTES)
            if cut < 0:
                raise OSError(errno.ENAMETOOLONG, os.strerror(errno.ENAMETOOLONG))
            step = os.open(path[:cut], os.O_PATH | os.O_DIRECTORY | os.O_CLOEXEC, dir_fd=directory)
            if directory is not None:
                os.close(directory)
            directory = step
            path = path[cut:].lstrip(b"/")
        return os.open(path, flags | os.O_CLOEXEC, dir_fd=directory)
    finally:
        if directory is not None:
            os.close(directory)


def open_regular(path: bytes) -> int:
    """Open a regular file for reading, without following a symlink and without waiting at a fifo or a device.

    Parameters
    ----------
    path : bytes
        Absolute, of any length.

    Returns
    -------
    int
        The file descriptor, which is the caller's to close.

    Raises
    ------
    OSError
        It cannot be opened, or is no regular file (any more).
    """
    descriptor = _open_path(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_NOCTTY)
    try:
        if not stat.S_ISREG(os.fstat(descriptor).st_mode):
            raise OSError(errno.EINVAL, "not a regular file")
    except BaseException:
        os.close(descriptor)
        raise
    return descriptor


def fingerprint(path: bytes) -> Fingerprint:
    """Read the regular file at `path` and count it.

    Lines are newline bytes; words are what `bytes.split` parts at ASCII white space, as ``wc -w`` does in the C locale.

    Raises
    ------
    OSError
        See `open_regular`; or the file cannot be read.
    """
    descriptor = open_regular(path)
    try:
        status = os.fstat(descriptor)
        digest = hashlib.sha256()
        length = lines = words = 0
        last = b" "
        while chunk := os.read(descriptor, _CHUNK_BYTES):
            digest.update(chunk)
            length += len(chunk)
            lines += chunk.count(b"\n")
            # A word begins where an "x" follows a blank; the one blank or "x" kept from the chunk before joins them.
            gaps = last + chunk.translate(_WORDS_AND_GAPS)
            words += gaps.count(b" x")
            last = gaps[-1:]
    finally:
        os.close(descriptor)
    return Fingerprint(digest.digest(), length, lines, words, status.st_size, status.st_mtime_ns)


@register(FINGERPRINT_CLOSURE_ID)
def _fingerprint_job(path: bytes) -> bytes:
    try:
        return fingerprint(path).pack()
    except OSError as error:
        # Without the file name, of which an error's text may hold bytes that are no text: the submitter knows it.
        raise type(error)(error.strerror or str(error)) from None


class _Reading(NamedTuple):
    """What the submitting process finds in a file. `size` and `mtime_ns` are those after the reading ended."""

    sha256: bytes
    size: int
    mtime_ns: int


def _read_for_check(path: bytes) -> _Reading:
    descriptor = open_regular(path)
    try:
        digest = hashlib.sha256()
        while chunk := os.read(descriptor, _CHUNK_BYTES):
            digest.update(chunk)
        status = os.fstat(descriptor)
    finally:
        os.close(descriptor)
    return _Reading(digest.digest(), status.st_size, status.st_mtime_ns)


def regular_files(folder: bytes, on_error: Callable[[bytes, OSError], None]) -> Iterator[bytes]:
    """Give the path of each regular file below `folder`, at any depth; symlinks are not followed.

    Holds one directory open at a time, and walks without recursion.

    Parameters
    ----------
    folder : bytes
        An absolute path.
    on_error : callable
        Called with the path and the error of each directory that cannot be listed; the walk goes on.
    """
    folders = [folder]
    while folders:
        here = folders.pop()
        files: list[bytes] = []
        below: list[bytes] = []
        prefix = here if here.endswith(b"/") else here + b"/"
        try:
            # Only the folder asked for may be a symlink: one found below was skipped, and one put there since is new.
            flags = os.O_RDONLY | os.O_DIRECTORY | (0 if here is folder else os.O_NOFOLLOW)
            descriptor = _open_path(here, flags)
            try:
                with os.scandir(descriptor) as entries:
                    for entry in entries:
                        path = prefix + os.fsencode(entry.name)
                        if entry.is_dir(follow_symlinks=False):
                            below.append(path)
                        elif entry.is_file(follow_symlinks=False):
                            files.append(path)
            finally:
                os.close(descriptor)
        except OSError as error:
            on_error(here, error)
        yield from sorted(files)
        folders.extend(sorted(below, reverse=True))


def check_folder(folder: bytes) -> None:
    """See that the absolute path `folder`, of any length, is a folder that can be read.

    Raises
    ------
    OSError
        It is not.
    """
    os.close(_open_path(folder, os.O_RDONLY | os.O_DIRECTORY))


def printable(path: bytes) -> str:
    """Give `path` as text for a terminal: bytes that are not UTF-8 and control characters are escaped."""
    text = path.decode("utf-8", "backslashreplace")
    return "".join(char if char.isprintable() else char.encode("unicode_escape").decode("ascii") for char in text)


# --- the run ----------------------------------------------------------------------------------------------------------


class Failure(NamedTuple):
    """A file that could not be read, or a folder that could not be listed."""

    path: bytes
    error: str


@dataclass
class DemoReport:
    """What the demo found."""

    files: int = 0
    """Jobs: one for each regular file."""
    bytes_read: int = 0
    """Bytes read by the workers from files whose digest was confirmed."""
    seconds: float = 0.0
    """From the first submission to the last check."""
    failures: list[Failure] = field(default_factory=list)
    mismatches: list[bytes] = field(default_factory=list)
    """Paths whose digest differs from the one computed here, at equal size and time."""
    redelivered: int = 0
    """Jobs that came back more than one attempt later, since a worker died over them."""
    duplicates: int = 0
    """Results that came a second time for their job; dropped."""
    killed: int = 0
    """Workers that died during the run."""
    lost: int = 0
    """Jobs that did not come back."""
    problem: str | None = None
    """Why jobs did not come back."""

    @property
    def jobs_per_s(self) -> float:
        return self.files / self.seconds if self.seconds > 0 else 0.0

    @property
    def exit_code(self) -> int:
        """0 exactly if no digest differs and every job came back."""
        return 0 if not self.mismatches and not self.lost else 1

    def as_dict(self) -> dict[str, int | float]:
        """Give the numbers, as ``subetha demo --json`` prints them."""
        return {
            "files": self.files,
            "bytes": self.bytes_read,
            "seconds": round(self.seconds, 6),
            "jobs_per_s": round(self.jobs_per_s, 3),
            "failed": len(self.failures),
            "mismatched": len(self.mismatches),
            "redelivered": self.redelivered,
            "duplicates": self.duplicates,
            "lost": self.lost,
            "killed": self.killed,
        }


def run_demo(
    folder: bytes,
    workers: int,
    *,
    kill: bool = True,
    progress: Callable[[int, int], None] = lambda _done, _all: None,
) -> DemoReport:
    """Hash every regular file below `folder` in worker processes and check each digest here.

    The queue directory is a temporary one, in shared memory when there is room, and is removed also when this call
    ends by an exception; the workers are killed then.

    Parameters
    ----------
    folder : bytes
        An absolute path of any length.
    workers : int
        How many worker processes, at least 1.
    kill : bool
        Kill one of them by SIGKILL once half of the files are done.
    progress : callable, optional
        Called with the numbers of files that are done and of all.

    Raises
    ------
    OSError
        `folder` cannot be opened, or is no directory.
    """
    check_folder(folder)
    report = DemoReport()
    paths = list(regular_files(folder, lambda path, error: report.failures.append(_failure(path, error))))
    report.files = len(paths)
    with _temporary_queue() as queue:
        pool = WorkerPool([__name__], queue.path, workers)
        try:
            pool.start()
            run = _Run(queue, pool, paths, report, progress, kill)
            run.go()
            pool.stop()
        finally:
            with signals_deferred():
                pool.kill()
                pool.stop()
            report.killed = pool.deaths
            report.redelivered = queue.redelivered
    report.failures.sort()
    return report


def _failure(path: bytes, error: OSError) -> Failure:
    return Failure(path, f"{type(error).__name__}: {error.strerror or error}")


@contextlib.contextmanager
def _temporary_queue() -> Iterator[JobQueue]:
    """Create a queue directory where there is room, and remove it with all that it holds."""
    places = [SHARED_MEMORY] if os.access(SHARED_MEMORY, os.W_OK | os.X_OK) else []
    places.append(tempfile.gettempdir())
    for place in places:
        with _temporary_folder(place) as folder:
            try:
                queue = JobQueue.create(os.path.join(folder, "queue"), QUEUE_CELLS, arena_bytes=QUEUE_ARENA_BYTES)
            except (OSError, TransportError):
                # Its files are allocated in full, so a place without room shows here and not later.
                if place == places[-1]:
                    raise
                continue
            with queue:
                yield queue
            return


@contextlib.contextmanager
def _temporary_folder(place: str) -> Iterator[str]:
    folder = tempfile.TemporaryDirectory(prefix="subetha-demo-", dir=place)
    try:
        yield folder.name
    finally:
        # A second Ctrl-C waits until nothing is left behind.
        with signals_deferred():
            folder.cleanup()


@dataclass
class _Run:
    """One pass over all files: submits as far as there is room, collects, and checks while it waits."""

    queue: JobQueue
    pool: WorkerPool
    paths: list[bytes]
    report: DemoReport
    progress: Callable[[int, int], None]
    to_kill: bool
    clock: Callable[[], float] = time.monotonic

    def __post_init__(self) -> None:
        self.to_submit = deque(self.paths)
        self.outstanding: dict[int, bytes] = {}
        self.to_check: deque[tuple[bytes, Fingerprint]] = deque()
        self.rounds: dict[bytes, int] = {}
        self.done = 0
        self.received = 0
        self.room = True

    def go(self) -> None:
        """Run until every job came back and was checked, or until that cannot happen any more."""
        started = self.clock()
        self.progress(0, self.report.files)
        try:
            while self.to_submit or self.outstanding or self.to_check:
                if self.outstanding or self.to_submit:
                    self.pool.poll()
                self.submit()
                if self.to_kill and self.received and self.received >= self.report.files // 2:
                    self.kill_one()
                if not self.collect():
                    if self.to_check:
                        self.check(*self.to_check.popleft())
                    elif self.outstanding:
                        self.wait()
        except WorkerPoolBroken as error:
            self.report.problem = str(error)
            self.pool.stop()
            while self.collect():
                pass
            while self.to_check:
                self.check(*self.to_check.popleft())
            self.report.lost = len(self.outstanding) + len(self.to_submit)
        self.report.seconds = self.clock() - started

    def submit(self) -> None:
        """Submit as many jobs as there is room for; `room` says whether trying again makes sense."""
        while self.to_submit and self.room:
            path = self.to_submit[0]
            try:
                job_id = self.queue.submit(Pass(FINGERPRINT_CLOSURE_ID, path), wait=0)
            except (Full, ArenaFull) as error:
                if self.outstanding:
                    self.room = False
                    return
                # Nothing of ours is in the queue that could make room: this path alone is too much for it.
                self.fail(self.to_submit.popleft(), f"{type(error).__name__}: {error}")
            except (TransportError, SchedError) as error:
                self.fail(self.to_submit.popleft(), f"{type(error).__name__}: {error}")
            else:
                self.outstanding[job_id] = self.to_submit.popleft()

    def collect(self) -> bool:
        """Take the results that are there; says whether there was any."""
        results = self.queue.recv_many(_RESULTS_AT_ONCE) if self.outstanding else []
        for result in results:
            self.take(result.token, result.result)
        return bool(results)

    def wait(self) -> None:
        with contextlib.suppress(Empty):
            result = self.queue.recv(timeout=0.1)
            self.take(result.token, result.result)

    def take(self, job_id: int, result: bytes | PassError) -> None:
        self.room = True
        self.received += 1
        path = self.outstanding.pop(job_id, None)
        if path is None:
            self.report.duplicates += 1
        elif isinstance(result, PassError):
            self.fail(path, str(result))
        else:
            self.to_check.append((path, Fingerprint.unpack(result)))

    def check(self, path: bytes, found: Fingerprint) -> None:
        """Compare a worker's digest with one computed here."""
        try:
            here = _read_for_check(path)
        except OSError as error:
            self.fail(path, f"read by a worker, then not to be read again: {_failure(path, error).error}")
            return
        if here.sha256 == found.sha256:
            self.report.bytes_read += found.length
            self.finish()
        elif (here.size, here.mtime_ns) == (found.size, found.mtime_ns):
            self.report.mismatches.append(path)
            self.finish()
        else:
            self.rounds[path] = self.rounds.get(path, 1) + 1
            if self.rounds[path] > READING_ROUNDS:
                self.fail(path, f"kept changing: other contents each time it was read, {READING_ROUNDS} times")
            else:
                self.to_submit.append(path)

    def fail(self, path: bytes, error: str) -> None:
        self.report.failures.append(Failure(path, error))
        self.finish()

    def finish(self) -> None:
        self.done += 1
        self.progress(self.done, self.report.files)

    def kill_one(self) -> None:
        """End a worker by SIGKILL, one with a job in hand if there is any at this moment, and wait until its pool has seen it."""
        self.to_kill = False
        table = self.queue.heartbeat
        snapshots = (table.snapshot(slot) for slot in range(table.capacity))
        busy = {found.pid for found in snapshots if found is not None and found.in_flight_bitmap}
        pids = sorted(self.pool.pids, key=lambda pid: pid not in busy)
        if pids:
            deaths = self.pool.deaths
            os.kill(pids[0], signal.SIGKILL)
            while self.pool.deaths == deaths:
                self.pool.poll(1.0)


def default_folder() -> bytes:
    """Give the folder of the running Python's standard library."""
    return os.fsencode(sysconfig.get_path("stdlib"))

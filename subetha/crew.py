"""What an `Executor` runs on: its queue, its client and, where it has workers of its own, what keeps them alive.

`Executor` makes one `Crew` and calls it from the program's threads. One thread of the crew, the keeper, has the `WorkerPool`
to itself, and hears through a pipe when it is to end. A crew outlives its executor until the last job is done.

A private queue lies in a directory of its own, in shared memory, whose file "owner" stays locked while its process lives.
Who makes one removes those that nobody has locked: their processes were killed.
"""

import atexit
import contextlib
import fcntl
import logging
import os
import select
import shutil
import stat
import tempfile
import threading
import time
import warnings
from typing import Final

from subetha import files, job
from subetha._core import forks
from subetha.futures import Client, Help
from subetha.jobqueue import JobQueue
from subetha.layout import reserve_of
from subetha.logging import RecordReader
from subetha.pool import WorkerPool, WorkerPoolBroken, see_that_there_is_a_queue

__all__ = ["Crew", "is_private"]

SHARED_MEMORY: Final = "/dev/shm"
ROOM_BYTES: Final = 128 * 2**20
"""A private queue goes to disk where shared memory has less room than this."""

PRIVATE_CELLS: Final = 8192
"""Jobs that a private queue may hold, waiting, running or uncollected."""

COLLECT_S: Final = 0.25
"""Results are collected so often (s) also where nobody asks for any."""

_PREFIX = "subetha-executor-"
_OWNER, _RECORDS = "owner", "records"
# What the keeper of a crew is told through its pipe.
_END, _ABANDONED = b"x", b"a"
_YOUNG_S = 60

# The name under which a program knows it.
_LOGGER = logging.getLogger("subetha.executor")

_alive: "set[Crew]" = set()


class Crew:
    """Queue, client, worker processes and their keeper; its `finish` ends them."""

    def __init__(
        self,
        workers: int,
        queue: files.Path | None,
        modules: tuple[str, ...],
        queue_names: tuple[str, ...],
        started: bytes | None,
        limits: tuple[int | None, int | None],
        log_level: int,
        arena_bytes: int,
    ) -> None:
        self.is_private = queue is None
        self._owner_fd = -1
        if queue is None:
            self.directory, self._owner_fd = _make_private_directory()
        else:
            self.directory = os.path.abspath(os.fsdecode(queue))
        self._pid = os.getpid()
        self._refusal = ""
        # a signal's handler may shut down what its thread is shutting down
        self._finishing = threading.RLock()
        self._is_finished = False
        self._later: threading.Thread | None = None
        self._reader = self._writer = -1
        # What a garbage collection tells the keeper must not go to a descriptor that is somebody else's by now.
        self._telling = threading.RLock()
        made = contextlib.ExitStack()
        made.callback(self._remove)
        try:
            help_ = None
            if job.running is not None and job.running.pid == self._pid:
                help_ = Help(job.running.loop.serve_one, job.running.thread)
            self.client = Client(_open_queue(self.directory, self.is_private, arena_bytes), help_)
            made.callback(self.client.close)
            self._records = RecordReader(os.path.join(self.directory, _RECORDS)) if self.is_private else None
            if self._records is not None:
                made.callback(self._records.close)
            self._reader, self._writer = os.pipe2(os.O_CLOEXEC)
            made.callback(self._close_pipe)
            os.set_blocking(self._reader, False)
            self.has_workers = workers > 0
            pool = None
            if workers:
                pool = WorkerPool(
                    modules,
                    self.directory,
                    workers,
                    initializer=started,
                    log_ring=os.path.join(self.directory, _RECORDS) if self.is_private else None,
                    log_level=log_level,
                    # a Ctrl-C in a terminal is for the program, which ends them as it sees fit
                    is_own_group=True,
                    wake_fd=self._reader,
                    report=_LOGGER.warning,
                    max_jobs=limits[0],
                    max_bytes=limits[1],
                    queue_names=queue_names,
                )
                made.callback(pool.stop)
            self._keeper = threading.Thread(target=self._keep, args=(pool,), name="subetha-keeper", daemon=True)
            self._keeper.start()
        except BaseException:
            made.close()
            raise
        _alive.add(self)

    def _keep(self, pool: WorkerPool | None) -> None:
        """Start the workers and keep them alive until the executor ends; a thread."""
        if not self._keep_alive(pool):
            # Nothing runs any more, and the executor ends all the same.
            self._keep_alive(None)

    def _keep_alive(self, pool: WorkerPool | None) -> bool:
        """False where that failed; then all that is pending has failed, too."""
        try:
            with contextlib.nullcontext() if pool is None else pool:
                while True:
                    if pool is None:
                        select.select([self._reader], [], [], COLLECT_S)
                    else:
                        self._poll(pool)
                    if len(self.client):
                        # results that nobody waits for hold cells and blocks
                        self.client.collect_what_is_there()
                    if self._records is not None:
                        self._records.read()
                    told = self._read()
                    if _END in told:
                        return True
                    if _ABANDONED in told:
                        self.finish_later()
        except WorkerPoolBroken as error:
            self.client.fail(error)
        except BaseException as error:
            _LOGGER.exception("the thread that keeps the workers alive ended")
            broken = WorkerPoolBroken(f"the thread that keeps the workers alive ended: {type(error).__name__}: {error}")
            broken.__cause__ = error
            self.client.fail(broken)
        return False

    def _poll(self, pool: WorkerPool) -> None:
        try:
            pool.poll(COLLECT_S)
        except WorkerPoolBroken as error:
            # now, and not when the others have finished what they have in hand
            self.client.fail(error)
            raise

    def _tell(self, what: bytes) -> None:
        with self._telling:
            if self._writer >= 0:
                os.write(self._writer, what)

    def _close_pipe(self) -> None:
        with self._telling:
            reader, self._reader = self._reader, -1
            writer, self._writer = self._writer, -1
            if writer >= 0:
                os.close(reader)
                os.close(writer)

    def _read(self) -> bytes:
        try:
            return os.read(self._reader, 64)
        except BlockingIOError:
            return b""

    def check_open(self) -> None:
        if self._refusal or self.client.failure is not None or forks() != self.client.forks:
            raise self._why_not_open()

    def _why_not_open(self) -> BaseException:
        if self._refusal:
            return RuntimeError(f"cannot schedule new futures after {self._refusal}")
        if self.is_of_another_process():
            return RuntimeError(
                f"this executor belongs to process {self._pid}, of which this one ({os.getpid()}) is a fork: make another Executor"
            )
        assert self.client.failure is not None
        return self.client.failure

    @property
    def is_over(self) -> bool:
        return bool(self._refusal)

    def is_of_another_process(self) -> bool:
        return self.client.is_of_another_process()

    def is_own_thread(self) -> bool:
        """Whether this is one of the threads that `finish` waits for: in a callback, or a handler of logging."""
        return self._keeper is threading.current_thread() or self.client.is_own_thread()

    def refuse(self, why: str = "shutdown") -> None:
        self._refusal = self._refusal or why

    def finish(self) -> None:
        """Wait for what is pending, end the workers, remove what is private. Idempotent, from any thread."""
        self.refuse()
        if self.is_of_another_process():
            return
        with self._finishing:
            if self._is_finished:
                return
            if self.is_private:
                self.client.wait_for_all()
            else:
                self._wait_for_those_due()
            if not self._is_finished:
                self._end()

    def _wait_for_those_due(self) -> None:
        while True:
            # They may be due in a month, and whoever serves the queue then runs them. Again and again, since another thread may
            # have been in a submit.
            self.client.drop_those_for_later()
            if self.client.wait_for_all(COLLECT_S):
                return

    def _end(self) -> None:
        self._tell(_END)
        self._keeper.join()
        if self._records is not None:
            self._records.read()
            self._records.close()
        self.client.close()
        self._close_pipe()
        self._is_finished = True
        _alive.discard(self)
        self._remove()

    def finish_later(self) -> None:
        if self._is_finished or self._later is not None:
            return
        self._later = threading.Thread(target=self.finish, name="subetha-shutdown", daemon=True)
        # No thread can be started while the interpreter ends; then `end_with_interpreter` does it.
        with contextlib.suppress(RuntimeError):
            self._later.start()

    def abandon(self) -> None:
        """The executor is gone without a shutdown. A garbage collection calls this, in a thread that may hold any lock."""
        self.refuse()
        if not self._is_finished and not self.is_of_another_process():
            self._tell(_ABANDONED)

    def end_with_interpreter(self) -> None:
        if self.is_of_another_process():
            return
        self.refuse("interpreter shutdown")
        if not self.has_workers:
            # Others' workers do these jobs, perhaps much later; they do not need this process for it.
            self.client.fail(
                RuntimeError("the interpreter ends; the job stays in its queue, and its result is dropped")
            )
        self.finish()

    def _remove(self) -> None:
        if self._owner_fd >= 0:
            shutil.rmtree(self.directory, ignore_errors=True)
            fd, self._owner_fd = self._owner_fd, -1
            os.close(fd)


def _end_with_interpreter() -> None:
    for crew in list(_alive):
        crew.end_with_interpreter()


atexit.register(_end_with_interpreter)


def _open_queue(directory: str, is_private: bool, arena_bytes: int) -> JobQueue:
    if not is_private:
        see_that_there_is_a_queue(directory, None)
        return JobQueue.open(directory)
    return JobQueue.create(
        directory, PRIVATE_CELLS, arena_bytes=arena_bytes, quota=PRIVATE_CELLS - reserve_of(PRIVATE_CELLS)
    )


def _make_private_directory() -> tuple[str, int]:
    """A directory for a queue of this process, and the descriptor whose lock says that it is in use."""
    parent = _parent_of_private_directories()
    _remove_abandoned(parent)
    directory = tempfile.mkdtemp(prefix=_PREFIX, dir=parent)
    fd = os.open(os.path.join(directory, _OWNER), os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    return directory, fd


def is_private(directory: str) -> bool:
    """Whether the queue in a directory is an executor's own."""
    return os.path.exists(os.path.join(directory, _OWNER))


def _parent_of_private_directories() -> str:
    try:
        room = os.statvfs(SHARED_MEMORY)
    except OSError as error:
        why = f"it cannot be used ({error.strerror})"
    else:
        free = room.f_bavail * room.f_frsize
        if free >= ROOM_BYTES and os.access(SHARED_MEMORY, os.W_OK | os.X_OK):
            return SHARED_MEMORY
        why = f"it has {free >> 20} MiB free, and {ROOM_BYTES >> 20} MiB are wanted"
    parent = tempfile.gettempdir()
    warnings.warn(
        f"an executor's queue would be faster in {SHARED_MEMORY}, but {why}; it goes to {parent}. In a container, give it more "
        "(docker run --shm-size=1g; in Kubernetes an emptyDir of medium Memory mounted there)",
        RuntimeWarning,
        stacklevel=5,
    )
    return parent


def _remove_abandoned(parent: str) -> None:
    """Remove private directories whose processes were killed."""
    with contextlib.suppress(OSError), os.scandir(parent) as entries:
        for entry in entries:
            if entry.name.startswith(_PREFIX) and entry.is_dir(follow_symlinks=False):
                with contextlib.suppress(OSError):
                    _remove_if_abandoned(entry.path)


def _remove_if_abandoned(directory: str) -> None:
    found = os.lstat(directory)
    # One that is just being made has no owner's lock yet.
    if found.st_uid != os.getuid() or not stat.S_ISDIR(found.st_mode) or time.time() - found.st_mtime < _YOUNG_S:
        return
    with contextlib.ExitStack() as closing:
        try:
            fd = os.open(os.path.join(directory, _OWNER), os.O_RDWR | os.O_CLOEXEC | os.O_NOFOLLOW)
        except FileNotFoundError:
            pass
        else:
            closing.callback(os.close, fd)
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        shutil.rmtree(directory, ignore_errors=True)

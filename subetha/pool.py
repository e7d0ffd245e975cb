"""`WorkerPool`: the supervisor that keeps a number of worker processes alive, for ``subetha worker`` and for executors.

It starts each of them as ``python -m subetha.worker`` (worker.py), hears of a death at once (a pidfd in a selector), and
starts another in its place. Four times a second it looks whether one is stuck in a job that ran out of time, and kills it.

A worker place goes through these states::

    running --death--> waiting for its restart --delay over--> running
       |                         |
       |                         +--fifth quick death in a row--> the pool is broken: all places drain
       +--SIGTERM--> draining --job in hand done--> gone

A death is quick when it comes within `QUICK_DEATH_SECONDS` of the start and before the worker completed a job. Having
started is no sign of health: only a completed job, or staying alive for longer, ends a row of quick deaths.
"""

import contextlib
import logging
import math
import os
import selectors
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures.process import BrokenProcessPool
from dataclasses import dataclass, field
from types import TracebackType
from typing import Any, Final, Self

from subetha import files
from subetha.errors import HeartbeatError, LayoutMismatch, SubethaError
from subetha.jobqueue import Durability, JobQueue
from subetha.layout import Role
from subetha.worker import (
    EXIT_CANNOT_START,
    EXIT_INTERRUPTED,
    EXIT_RECYCLED,
    INITIALIZER_FAILED,
    OUTER_PYTHONPATH,
    STOP_SIGNALS,
)

__all__ = ["WorkerPool", "WorkerPoolBroken", "exit_cause", "restart_delay", "signals_deferred"]

QUICK_DEATH_SECONDS: Final = 10.0
"""A worker that dies within this time of its start, without having completed a job, died quickly."""

QUICK_DEATHS_LIMIT: Final = 5
"""So many quick deaths in a row of one worker place end the pool."""

OVERDUE_LOOK_SECONDS: Final = 0.25
"""How often the supervisor looks for workers that are stuck in a job that ran out of time."""

_FIRST_DELAY_SECONDS = 0.25
_LONGEST_DELAY_SECONDS = 5.0


class WorkerPoolBroken(SubethaError, BrokenProcessPool):
    """A worker place died quickly again and again, so that starting it once more would not help."""


def restart_delay(quick_deaths: int) -> float:
    """Give the delay before a worker place is started again.

    Parameters
    ----------
    quick_deaths : int
        How many quick deaths in a row the place has behind it; 0 after a death that was not quick.

    Returns
    -------
    float
        Seconds: 0 for the first restart, then 0.25, doubling up to 5.
    """
    if quick_deaths <= 1:
        return 0.0
    # The exponent is bounded because a float overflows long before a count of deaths does.
    return min(_LONGEST_DELAY_SECONDS, _FIRST_DELAY_SECONDS * 2.0 ** min(quick_deaths - 2, 32))


def exit_cause(returncode: int) -> str:
    """Say in words how a process ended: ``"exit code 3"`` or ``"killed by SIGSEGV"``.

    Parameters
    ----------
    returncode : int
        As `subprocess.Popen.returncode` gives it: negative for a signal.
    """
    if returncode >= 0:
        return f"exit code {returncode}"
    try:
        return f"killed by {signal.Signals(-returncode).name}"
    except ValueError:
        return f"killed by signal {-returncode}"


def _child_environment(environ: Mapping[str, str], path: Iterable[object]) -> dict[str, str]:
    """Give an environment in which a child finds modules exactly where this process does, whatever its directory."""
    child = dict(environ)
    child[OUTER_PYTHONPATH] = environ.get("PYTHONPATH", "")
    child["PYTHONPATH"] = os.pathsep.join(os.path.abspath(entry) for entry in path if isinstance(entry, str))
    return child


@dataclass
class _Running:
    """A worker process that has not been reaped."""

    process: subprocess.Popen[bytes]
    pidfd: int
    completed_fd: int
    started: float
    completed_before: int
    """What the table said of this pid at the start: a record that an earlier process of the same pid left behind."""
    was_stuck: bool = False
    """Whether it was killed over a job that ran out of time."""


@dataclass
class _Place:
    """One of the pool's worker places: who runs there, or when the next one is due."""

    number: int
    running: _Running | None = None
    due: float | None = None
    quick_deaths: int = 0


@dataclass
class _SignalPipe:
    """Turns the stop signals into bytes of a pipe, one each, so that none is lost or counted once for two."""

    _reader: int = -1
    _writer: int = -1
    _wakeup_before: int = -1
    _handlers_before: dict[signal.Signals, Any] = field(default_factory=dict)

    def __enter__(self) -> Self:
        self._reader, self._writer = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)
        self._wakeup_before = signal.set_wakeup_fd(self._writer, warn_on_full_buffer=False)
        for signum in STOP_SIGNALS:
            self._handlers_before[signum] = signal.signal(signum, lambda _signum, _frame: None)
        return self

    def __exit__(self, *_exc: object) -> None:
        for signum, handler in self._handlers_before.items():
            signal.signal(signum, signal.SIG_DFL if handler is None else handler)
        signal.set_wakeup_fd(self._wakeup_before)
        os.close(self._writer)
        os.close(self._reader)

    def fileno(self) -> int:
        return self._reader

    def read(self) -> int:
        """Give how many stop signals came since the last call; does not block."""
        try:
            return sum(signum in STOP_SIGNALS for signum in os.read(self._reader, 4096))
        except BlockingIOError:
            return 0


@contextlib.contextmanager
def signals_deferred() -> Iterator[None]:
    """Let SIGTERM and SIGINT wait for the end of the block, so that what their handlers raise does not tear it apart.

    Their handlers are replaced meanwhile, because blocked signals would come by another thread. Outside the main thread
    nothing is raised by a signal, so nothing is done.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    came: list[int] = []

    def raise_again() -> None:
        for signum in came:
            signal.raise_signal(signum)

    with contextlib.ExitStack() as afterwards:
        afterwards.callback(raise_again)
        for signum in STOP_SIGNALS:
            handler = signal.signal(signum, lambda signum, _frame: came.append(signum))
            afterwards.callback(signal.signal, signum, signal.SIG_DFL if handler is None else handler)
        yield


def see_that_there_is_a_queue(path: str, durability: Durability | None) -> None:
    """Create a queue directory with the defaults unless there is one, whatever its numbers are."""
    try:
        with JobQueue.open(path) as queue:
            if durability not in (None, queue.durability):
                raise LayoutMismatch(
                    f"{path}: expected durability {durability}, found a queue with {queue.durability}; "
                    "leave the durability out, or choose another directory"
                )
    except FileNotFoundError:
        # Somebody else may create it first; then that one is taken.
        with contextlib.suppress(FileExistsError):
            JobQueue.create(path, durability=durability or "process").close()


def _report_to_stderr(message: str) -> None:
    print(message, file=sys.stderr, flush=True)


class WorkerPool:
    """A number of worker processes on one queue directory, restarted when they die.

    The command line runs it by `run`; a program that has something else to do calls `start`, then `poll` now and
    then, and `stop` at the end (or uses ``with``). Not to be shared between threads.

    Parameters
    ----------
    modules : iterable of str
        Names of modules that every worker imports. They are found where this process finds them: a worker gets this
        process's `sys.path` as absolute paths.
    queue_path : path
        The queue directory; created with its defaults when it does not exist.
    processes : int
        How many worker processes, at least 1.
    durability : str, optional
        "process" or "disk", as in `JobQueue.create`: what a queue that is created here has, and what one that is there must
        have. Default: "process", and whatever is there.
    initializer : bytes, optional
        A pickle (`calls.dumps`) of a function and its arguments, called in every worker before its first job. Where it raises,
        the pool is broken.
    max_jobs : int, optional
        A worker that has run so many jobs is replaced by a fresh one.
    max_bytes : int, optional
        So is one with more resident memory than this, after the job in hand.
    queue_names : sequence of str
        Run the named handlers of these queues of names alone (`PassRegistry.serve`); default: each handler in its own.
    unknown_after : float, optional
        As in `JobQueue.open`.
    log_ring : path, optional
        Ring of a `logging.RecordReader`, which gets what the workers log.
    log_file : path, optional
        File to which they append what they log.
    log_level : int
        Their root logger's level, where one of these is given.
    is_own_group : bool
        Each worker is a process group of its own, which no Ctrl-C of the terminal reaches.
    wake_fd : int, optional
        `poll` returns when this descriptor is readable; reading it is up to the caller.
    clock : callable, optional
        Gives seconds; `time.monotonic` by default.
    backoff : callable, optional
        Gives the delay in seconds before a restart from the number of quick deaths in a row; `restart_delay` by
        default.
    report : callable, optional
        Takes each message (a death and its cause, the delay till the restart); prints to standard error by default.

    Raises
    ------
    ValueError
        No module; or `processes`, `max_jobs` or `max_bytes` is less than 1.
    """

    def __init__(
        self,
        modules: Iterable[str],
        queue_path: str | os.PathLike[str],
        processes: int,
        *,
        durability: Durability | None = None,
        initializer: bytes | None = None,
        max_jobs: int | None = None,
        max_bytes: int | None = None,
        queue_names: Sequence[str] = (),
        unknown_after: float | None = None,
        log_ring: files.Path | None = None,
        log_file: files.Path | None = None,
        log_level: int = logging.WARNING,
        is_own_group: bool = False,
        wake_fd: int | None = None,
        clock: Callable[[], float] = time.monotonic,
        backoff: Callable[[int], float] = restart_delay,
        report: Callable[[str], None] = _report_to_stderr,
    ) -> None:
        self.modules = tuple(modules)
        if not self.modules:
            raise ValueError("no module given: a worker needs at least one that registers handlers")
        if processes < 1:
            raise ValueError(f"processes must be at least 1, not {processes}")
        for name, most in (("max_jobs", max_jobs), ("max_bytes", max_bytes)):
            if most is not None and most < 1:
                raise ValueError(f"{name} must be at least 1, not {most}")
        self._options = {
            "--max-jobs": max_jobs,
            "--max-bytes": max_bytes,
            "--unknown-after": unknown_after,
            "--log-ring": None if log_ring is None else os.path.abspath(os.fsdecode(log_ring)),
            "--log-file": None if log_file is None else os.path.abspath(os.fsdecode(log_file)),
            "--log-level": log_level,
        }
        self._queue_names = tuple(queue_names)
        self.queue_path = os.path.abspath(os.fspath(queue_path))
        self._durability = durability
        self._initializer = initializer
        self._initializer_fd: int | None = None
        self._group = 0 if is_own_group else None
        self.deaths = 0
        """How many workers died without having been told to stop."""
        self._clock = clock
        self._backoff = backoff
        self._report = report
        self._places = [_Place(number) for number in range(1, processes + 1)]
        self._selector = selectors.DefaultSelector()
        if wake_fd is not None:
            self._selector.register(wake_fd, selectors.EVENT_READ)
        self._signals: _SignalPipe | None = None
        self._signals_seen = 0
        self._queue: JobQueue | None = None
        self._looked = self._clock()
        self._stopping = False
        self._killed = False
        self._codes_of_drained: list[int] = []
        self._broken: WorkerPoolBroken | None = None

    @property
    def processes(self) -> int:
        """How many worker places the pool has."""
        return len(self._places)

    @property
    def pids(self) -> list[int]:
        """The pids of the workers that run now, in the order of their places."""
        return [place.running.process.pid for place in self._places if place.running is not None]

    def start(self) -> None:
        """Open the queue (creating it if need be) and start every worker; does not wait until they are ready.

        Raises
        ------
        RuntimeError
            The pool was started before.
        LayoutMismatch
            What lies at the queue's path is something else.
        """
        if self._queue is not None or self._stopping:
            raise RuntimeError("a pool is started once; make another WorkerPool")
        see_that_there_is_a_queue(self.queue_path, self._durability)
        self._queue = JobQueue.open(self.queue_path, role=Role.SUPERVISOR)
        if self._initializer is not None:
            # Each worker reads it from its beginning, also one that starts much later.
            self._initializer_fd = os.memfd_create("subetha-initializer", os.MFD_CLOEXEC)
            with open(self._initializer_fd, "wb", closefd=False) as file:
                file.write(self._initializer)
        with self._undisturbed():
            for place in self._places:
                self._start(place)

    def poll(self, timeout: float | None = 0.0) -> None:
        """Wait for something to happen to a worker, and deal with it: reap the dead, start those that are due.

        Parameters
        ----------
        timeout : float or None, optional
            Longest wait in seconds; 0 by default, None for as long as it takes.

        Raises
        ------
        WorkerPoolBroken
            A place died quickly `QUICK_DEATHS_LIMIT` times in a row. The others have been told to drain; `stop` waits
            for them.
        """
        self._handle_events(timeout)
        if self._broken is not None:
            raise self._broken

    def run(self) -> int:
        """Start the workers and keep them alive until SIGTERM or SIGINT; only in the main thread.

        The first signal drains all workers: each finishes the job in hand. A second one kills them at once. Both also
        when the whole process group gets it.

        Returns
        -------
        int
            The exit code: 0 when all drained, 1 when one died in draining, 130 after a second signal.

        Raises
        ------
        WorkerPoolBroken
            See `poll`; the other workers have drained.
        """
        with _SignalPipe() as signals:
            self._signals = signals
            self._selector.register(signals, selectors.EVENT_READ)
            try:
                self.start()
                while not self._stopping:
                    self._handle_events(None)
                self.stop()
            finally:
                self.kill()
                self.stop()
                self._signals = None
        if self._killed or not {EXIT_INTERRUPTED, -signal.SIGINT}.isdisjoint(self._codes_of_drained):
            return EXIT_INTERRUPTED
        if self._broken is not None:
            raise self._broken
        return 1 if any(self._codes_of_drained) else 0

    def stop(self, timeout: float | None = None) -> bool:
        """Let every worker finish the job in hand and exit; may be called twice.

        Parameters
        ----------
        timeout : float or None, optional
            Those still at work after so many seconds are killed; None waits for as long as their jobs take.

        Returns
        -------
        bool
            Whether none had to be killed.
        """
        self._ask_to_stop()
        deadline = None if timeout is None else self._clock() + timeout
        try:
            while self.pids:
                left = None if deadline is None else deadline - self._clock()
                if left is not None and left <= 0:
                    self._report(f"subetha: workers still at work after {timeout} s, killing pids {self.pids}")
                    self.kill()
                    deadline = left = None
                self._handle_events(left)
        except BaseException:
            self.kill()
            while self.pids:
                self._handle_events(None)
            raise
        finally:
            self._selector.close()
            if self._queue is not None:
                self._queue.close()
            if self._initializer_fd is not None:
                os.close(self._initializer_fd)
                self._initializer_fd = None
        return not self._killed

    def kill(self) -> None:
        """End every worker at once by SIGKILL; `stop` reaps them. What they had in hand waits in the queue again."""
        self._stopping = True
        for place in self._places:
            place.due = None
            if place.running is not None:
                self._killed = True
                place.running.process.kill()

    def __enter__(self) -> Self:
        self.start()
        return self

    def __exit__(
        self, exc_type: type[BaseException] | None, exc: BaseException | None, tb: TracebackType | None
    ) -> None:
        self.stop()

    def _handle_events(self, timeout: float | None) -> None:
        """Wait once, at most `timeout` seconds or until the next restart is due, and handle all there is."""
        now = self._clock()
        for due in (place.due for place in self._places if place.due is not None):
            timeout = max(0.0, due - now) if timeout is None else min(timeout, max(0.0, due - now))
        ready = self._wait(None if timeout is None else now + timeout)
        # Signals come first: in a Ctrl-C for the whole group the workers' ends are part of the drain, not deaths.
        if self._signals is not None:
            self._obey(self._signals.read())
        with self._undisturbed():
            for key, _ in ready:
                if isinstance(key.data, _Place):
                    self._bury(key.data)
            now = self._clock()
            for place in self._places:
                if place.due is not None and place.due <= now:
                    self._start(place)

    def _wait(self, deadline: float | None) -> list[tuple[selectors.SelectorKey, int]]:
        """Wait until something is ready or until `deadline`; meanwhile end the workers that are stuck in a job."""
        while True:
            now = self._clock()
            if now - self._looked >= OVERDUE_LOOK_SECONDS:
                self._looked = now
                self._end_overdue()
            left = math.inf if deadline is None else max(0.0, deadline - now)
            ready = self._selector.select(min(left, OVERDUE_LOOK_SECONDS))
            if ready or left <= OVERDUE_LOOK_SECONDS:
                return ready

    def _end_overdue(self) -> None:
        """Kill the workers of which a job ran out of time: it has been answered, and they can claim nothing more."""
        if self._queue is None or self._queue.closed:
            return
        overdue = self._queue.overdue_pids()
        for place in self._places:
            if place.running is not None and place.running.process.pid in overdue:
                who = f"{self._name(place)} (pid {place.running.process.pid})"
                self._report(f"{who}: a job ran longer than its timeout, the worker is killed")
                place.running.was_stuck = True
                signal.pidfd_send_signal(place.running.pidfd, signal.SIGKILL)

    def _undisturbed(self) -> contextlib.AbstractContextManager[None]:
        """Keep a Ctrl-C in a program that does not use `run` from losing a process between its start and its record."""
        return signals_deferred() if self._signals is None else contextlib.nullcontext()

    def _obey(self, signals: int) -> None:
        if signals == 0:
            return
        self._signals_seen += signals
        if self._signals_seen == 1:
            self._report("subetha: draining, each worker finishes the job in hand (again: kill them at once)")
            self._ask_to_stop()
        else:
            self._report("subetha: killing all workers")
            self.kill()

    def _ask_to_stop(self) -> None:
        if self._stopping:
            return
        self._stopping = True
        for place in self._places:
            place.due = None
            if place.running is not None:
                place.running.process.send_signal(signal.SIGTERM)

    def _start(self, place: _Place) -> None:
        place.due = None
        completed_fd, childs_fd = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)
        command = [sys.executable, "-P", "-m", "subetha.worker", *self.modules]
        command += ["--queue", self.queue_path, "--completed-fd", str(childs_fd), "--supervisor-pid", str(os.getpid())]
        command += [f"{name}={value}" for name, value in self._options.items() if value is not None]
        command += [f"--queue-name={name}" for name in self._queue_names]
        inherited = [childs_fd]
        if self._initializer_fd is not None:
            command += ["--initializer-fd", str(self._initializer_fd)]
            inherited.append(self._initializer_fd)
        # Inherited blocked, the stop signals wait for the child until it has its handlers.
        unblocked = signal.pthread_sigmask(signal.SIG_BLOCK, STOP_SIGNALS)
        try:
            process = subprocess.Popen(
                command,
                stdin=subprocess.DEVNULL,
                env=_child_environment(os.environ, sys.path),
                pass_fds=inherited,
                process_group=self._group,
            )
        except OSError as error:
            os.close(completed_fd)
            self._after_death(place, self._name(place), f"could not be started: {error}", quick=True)
            return
        finally:
            signal.pthread_sigmask(signal.SIG_SETMASK, unblocked)
            os.close(childs_fd)
        pidfd = os.pidfd_open(process.pid)
        place.running = _Running(process, pidfd, completed_fd, self._clock(), self._completed_in_table(process.pid))
        self._selector.register(pidfd, selectors.EVENT_READ, place)

    def _bury(self, place: _Place) -> None:
        """Reap the worker of `place`, whose pidfd says that it has ended, and decide how its place goes on."""
        worker = place.running
        assert worker is not None
        returncode = worker.process.wait()
        self._selector.unregister(worker.pidfd)
        os.close(worker.pidfd)
        lived = self._clock() - worker.started
        completed, initializer_failed = self._last_word_of(worker)
        self._rescue(worker.process.pid, returncode)
        place.running = None
        who = f"{self._name(place)} (pid {worker.process.pid})"
        cause = exit_cause(returncode)
        if returncode == EXIT_RECYCLED and completed:
            if self._stopping:
                self._codes_of_drained.append(0)
                return
            place.quick_deaths = 0
            place.due = self._clock()
            return
        if self._stopping:
            self._codes_of_drained.append(returncode)
            if returncode != 0 and not self._killed:
                self._report(f"{who}: {cause} while draining")
            return
        cause += f" after {lived:.1f} s"
        if returncode == EXIT_CANNOT_START:
            cause += " (it could not import its modules or open its queue: traceback above)"
        if initializer_failed:
            self.deaths += 1
            self._break(f"{who}: {cause}. Its initializer raised (traceback above); all workers were stopped.")
            return
        quick = completed == 0 and lived < QUICK_DEATH_SECONDS and not worker.was_stuck
        self.deaths += 1
        self._after_death(place, who, cause, quick=quick, comes_again=returncode == EXIT_CANNOT_START)

    def _rescue(self, pid: int, returncode: int) -> None:
        """Let the jobs of a worker that has ended run again at once, and note how it ended."""
        assert self._queue is not None
        try:
            self._queue.rescue({pid: returncode, **self._ended()})
        except (SubethaError, OSError, MemoryError) as error:
            self._report(f"subetha: the jobs of pid {pid} wait until another process looks for the dead: {error}")

    def _ended(self) -> dict[int, int]:
        """Find how the workers ended that have, and are still to be buried: a rescue moves on the work of all of them."""
        processes = (place.running.process for place in self._places if place.running is not None)
        return {process.pid: code for process in processes if (code := process.poll()) is not None}

    def _after_death(self, place: _Place, who: str, cause: str, *, quick: bool, comes_again: bool = False) -> None:
        place.quick_deaths = place.quick_deaths + 1 if quick else 0
        if place.quick_deaths >= QUICK_DEATHS_LIMIT:
            self._report(f"{who}: {cause}")
            self._break(
                f"{who}: {cause}. That was quick death {place.quick_deaths} in a row of this worker place (within "
                f"{QUICK_DEATH_SECONDS:g} s of its start, before it completed a job), so all workers were stopped. "
                + ("Another start would end the same way: r" if comes_again else "R")
                + "emove the cause, then start them again."
            )
            return
        delay = self._backoff(place.quick_deaths)
        when = f"in {delay:g} s" if delay > 0 else "at once"
        row = f" (quick death {place.quick_deaths} of {QUICK_DEATHS_LIMIT})" if quick else ""
        self._report(f"{who}: {cause}, starts again {when}{row}")
        place.due = self._clock() + delay

    def _break(self, why: str) -> None:
        # the first cause is the one to be told
        self._broken = self._broken or WorkerPoolBroken(why)
        self._ask_to_stop()

    def _name(self, place: _Place) -> str:
        return f"subetha worker {place.number} of {len(self._places)}"

    def _last_word_of(self, worker: _Running) -> tuple[int, bool]:
        """Give how many jobs a dead worker completed, by its last word or its record, and whether its initializer raised."""
        try:
            told = os.read(worker.completed_fd, 32)
        except BlockingIOError:
            # A child of the worker still holds the other end.
            told = b""
        finally:
            os.close(worker.completed_fd)
        if told.isdigit():
            return int(told), False
        completed = self._completed_in_table(worker.process.pid) - worker.completed_before
        return completed, told == INITIALIZER_FAILED

    def _completed_in_table(self, pid: int) -> int:
        assert self._queue is not None
        table = self._queue.heartbeat
        completed = 0
        for slot in range(table.capacity):
            snapshot = table.snapshot(slot)
            if snapshot is not None and snapshot.pid == pid:
                # Another process may give the slot free between the two calls.
                with contextlib.suppress(HeartbeatError):
                    completed += table.completed(slot)
        return completed

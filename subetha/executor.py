"""`Executor`: a `concurrent.futures.Executor` whose workers take their jobs from a queue directory.

An executor without `queue` makes a private one in shared memory and keeps a crew of worker processes on it; both are gone
when it is. One with a queue's directory shares that with other clients and workers, and leaves it where it is.

    Executor -> Client (futures.py) -> queue directory -> worker processes (worker.py), kept alive by its crew (crew.py)
"""

import asyncio
import concurrent.futures
import dataclasses
import itertools
import logging
import os
import threading
import time
import weakref
from collections import deque
from collections.abc import AsyncIterator, Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, Final, ParamSpec, TypeVar

from subetha import calls, files, job
from subetha.crew import Crew, is_private
from subetha.errors import Full
from subetha.futures import JobFuture
from subetha.pass_registry import DEFAULT_QUEUE, Pieces, joined
from subetha.transport import backoff

__all__ = ["Executor", "default_executor", "set_default_executor"]

P = ParamSpec("P")
T = TypeVar("T")

ARENA_BYTES: Final = 2**30
"""What the blocks for long arguments and results may come to."""

UNIQUE_RESULT_TTL_S: Final = 10
"""So long (s) the result of a job with a unique key is kept, for other clients that have submitted the same one."""

CHOSEN_OPTIONS: Final = 256
"""Of so many different options of tasks it is remembered what they come to."""

PENDING_IN_MAP: Final = 1024
"""So many jobs of a `map` are handed in before the first of its results is taken, unless `buffersize` says otherwise."""


class Executor(concurrent.futures.Executor):
    """Runs functions in worker processes; nothing that was submitted is lost when one of them dies.

    It is used as `concurrent.futures.ProcessPoolExecutor` is, with these differences: a job whose worker dies runs again on
    another one (`WorkerDied` only after `max_attempts` deaths), a dead worker is replaced, functions need not be importable
    (lambdas, closures and what `__main__` defines travel by value), `submit` waits while the queue is full, `map` goes
    through endless iterables, and its futures can be awaited.

    Parameters
    ----------
    workers : int, optional
        Worker processes to start; default: one for each processor this process may use. 0 with `queue`: none, the workers
        are somebody else's (``subetha worker``).
    queue : path, optional
        A queue directory to share, made with its defaults where there is none. Default: a private one, in shared memory, which
        is gone after `shutdown`. Jobs in a shared queue outlive this executor.
    initializer : callable, optional
        Called in every worker at its start. Where it raises, every pending future fails with `BrokenProcessPool`.
    initargs : tuple
        Its arguments.
    modules : sequence of str
        Modules that every worker imports at its start, for the tasks in them.
    queue_names : sequence of str
        Names of queues that the workers serve, of the tasks in `modules` these alone; default: each task in its own. With a
        private queue they do not matter.
    max_attempts : int
        How often a job may be started before its worker's death ends it.
    backoff : float or (float, float), optional
        For how many seconds a job rests after such an attempt, doubled for each further one; and the longest rest.
    timeout : float, optional
        Longest run of each job in seconds: after that its worker is killed, and the future fails with `JobTimeout`.
    max_jobs_per_worker, max_worker_bytes : int, optional
        A worker that has run so many jobs, or has more resident memory after one, is replaced by a fresh one.
    log_level : int, optional
        Least level of what workers log, with a private queue; it reaches this process's loggers (`subetha.logging`). Default:
        the level of the root logger here.
    arena_bytes : int
        For a private queue: bytes of long arguments and results (those over some 180 bytes) in it at one time. Memory is
        taken only as it is used. A single one may be as large as half of it, at the least.

    Raises
    ------
    ValueError, TypeError
        An argument outside its limits.
    LayoutMismatch
        What lies at `queue` is something else.
    OSError
        No room for a queue.
    """

    def __init__(
        self,
        workers: int | None = None,
        *,
        queue: files.Path | None = None,
        initializer: Callable[..., object] | None = None,
        initargs: tuple[Any, ...] = (),
        modules: Sequence[str] = (),
        queue_names: Sequence[str] = (),
        max_attempts: int = 3,
        backoff: float | tuple[float, float] | None = None,
        timeout: float | None = None,
        max_jobs_per_worker: int | None = None,
        max_worker_bytes: int | None = None,
        log_level: int | None = None,
        arena_bytes: int = ARENA_BYTES,
    ) -> None:
        if workers is None:
            workers = len(os.sched_getaffinity(0))
        if isinstance(workers, bool) or not isinstance(workers, int):
            raise TypeError(f"workers: expected an int, found {type(workers).__name__}")
        if workers < (0 if queue is not None else 1):
            raise ValueError(
                f"workers: expected an int greater than 0 (or 0 with a queue whose workers are started elsewhere), found {workers}"
            )
        if initializer is not None and not callable(initializer):
            raise TypeError(f"initializer: expected a callable, found {type(initializer).__name__}")
        modules = _checked_names("modules", modules)
        queue_names = _checked_names("queue_names", queue_names)
        if queue is None:
            # its jobs are for all of its workers
            queue_names = ()
        if log_level is None:
            log_level = logging.getLogger().getEffectiveLevel()
        elif isinstance(log_level, bool) or not isinstance(log_level, int):
            raise TypeError(f"log_level: expected an int as logging.INFO is, found {type(log_level).__name__}")
        limits = max_jobs_per_worker, max_worker_bytes
        for name, most in (("max_jobs_per_worker", max_jobs_per_worker), ("max_worker_bytes", max_worker_bytes)):
            if most is not None and (isinstance(most, bool) or not isinstance(most, int)):
                raise TypeError(f"{name}: expected an int, found {type(most).__name__}")
            if most is not None and most < 1:
                raise ValueError(f"{name}: expected an int greater than 0, found {most}")
        self._options = calls.Options(1, timeout, max_attempts, backoff)
        # What was made of tasks' options, by their ids; holding these keeps the ids theirs.
        self._chosen: dict[int, tuple[calls.Options, calls.Options]] = {}
        self._is_private = queue is None
        # None: all, since others' workers are to know whatever comes to a shared queue
        self._modules = None if queue is not None else frozenset(modules)
        here = job.running
        if here is not None and queue is not None and os.path.abspath(os.fsdecode(queue)) == here.queue_path:
            # Of the other workers of this queue no more is known than of this one.
            self._modules = here.modules
            self._is_private = is_private(here.queue_path)
        started = None if initializer is None else joined(calls.dumps((initializer, tuple(initargs))))
        # the first one runs what brings its function along
        modules = (calls.__name__, *modules)
        self._crew = Crew(workers, queue, modules, queue_names, started, limits, log_level, arena_bytes)
        self._client = self._crew.client
        weakref.finalize(self, self._crew.abandon).atexit = False

    @property
    def queue(self) -> str:
        """The queue's directory."""
        return self._crew.directory

    def submit(self, fn: Callable[P, T], /, *args: P.args, **kwargs: P.kwargs) -> JobFuture[T]:
        """Hand ``fn(*args, **kwargs)`` in and return its future; waits while the queue is full.

        What cannot be pickled fails the future, and so does a task with a limit that the workers cannot see to.

        Raises
        ------
        ArenaTooSmall
            The arguments are longer than any block of the queue's arena.
        ArenaFull
            No block is left for them, and none of this executor's jobs has one that it could wait for.
        RuntimeError
            The executor was shut down.
        BrokenProcessPool
            Its workers cannot be started any more.
        """
        return self._submit(fn, args, kwargs)

    def _submit(
        self, fn: Callable[..., object], args: tuple[Any, ...], kwargs: Mapping[str, object] | None
    ) -> JobFuture[Any]:
        self._crew.check_open()
        try:
            job_ = self._encoded(fn, args, kwargs)
        except Exception as error:
            return JobFuture.finished(None, error)
        return self._client.submit(*job_)

    def _encoded(
        self, fn: Callable[..., object], args: tuple[Any, ...], kwargs: Mapping[str, object] | None
    ) -> tuple[int, bytes | Pieces, calls.Options, calls.Registered | None]:
        """What `Client.submit` takes."""
        if not isinstance(fn, calls.Registered):
            return calls.CALL_ID, calls.encode_call(fn, args, kwargs), self._options, None
        if not self._goes_by_number(fn):
            return calls.CALL_ID, calls.encode_call(fn, args, kwargs), self._options_of(fn), fn
        # In a queue of one's own the workers run all there is.
        closure_id = fn.home_id if self._is_private else fn.closure_id
        return closure_id, calls.encode_call(None, args, kwargs), self._options_of(fn), fn

    def _options_of(self, fn: calls.Registered) -> calls.Options:
        """What a task says of its jobs, and this executor where that says nothing."""
        own = fn.job_options
        found, chosen = self._chosen.get(id(own), (None, self._options))
        if found is not own:
            chosen = own.over(self._options)
            if chosen.unique_key is not None:
                # Two tasks may use the same keys, and another client may wait for the same job.
                return dataclasses.replace(
                    chosen,
                    unique_key=f"{fn.name}\0{chosen.unique_key}",
                    result_ttl=chosen.result_ttl or UNIQUE_RESULT_TTL_S,
                )
            if len(self._chosen) >= CHOSEN_OPTIONS:
                self._chosen.clear()
            self._chosen[id(own)] = own, chosen
        return chosen

    def _goes_by_number(self, fn: calls.Registered) -> bool:
        if self._modules is None or fn.__module__ in self._modules:
            return True
        if not self._is_private:
            # others' workers may know it; any other worker would run it in no queue of names, and beside any number of others
            return fn.queue_name != DEFAULT_QUEUE or fn.max_concurrency is not None
        if fn.max_concurrency is not None:
            raise ValueError(
                f"{fn!r} has max_concurrency={fn.max_concurrency}, which the workers of this executor cannot see to, since they "
                f"have not imported it; name its module in Executor(modules=...), found {fn.__module__!r}"
            )
        return False

    def result(self, job_id: int, timeout: float | None = None) -> Any:
        """Wait for a job that anybody has handed in to this queue with a `result_ttl`, and return or raise what came of it.

        Parameters
        ----------
        job_id : int
            `JobFuture.job_id`.
        timeout : float, optional
            Seconds; None waits for ever.

        Raises
        ------
        UnknownJob
            No such job is there: its time is over, or it was submitted without `result_ttl`.
        TimeoutError
            It is not done after `timeout` seconds.
        Exception
            What the function raised, and what its future would raise.
        """
        self._crew.check_open()
        value, error = calls.outcome_of(self._client.queue.result(job_id, timeout))
        if error is not None:
            raise error
        return value

    def map(
        self,
        fn: Callable[..., T],
        *iterables: Iterable[Any],
        timeout: float | None = None,
        chunksize: int = 1,
        buffersize: int | None = None,
    ) -> Iterator[T]:
        """Call `fn` with the items of each of the iterables, in workers, and give the results in order.

        Parameters
        ----------
        fn : callable
        *iterables : iterable
            Read as far as `buffersize` goes beyond the results taken, so they may be endless.
        timeout : float, optional
            Seconds from this call until the last result; `TimeoutError` after that.
        chunksize : int
            So many calls make one job. They fail and run again together, and a task's options are for the job.
        buffersize : int, optional
            Most jobs handed in whose results have not been taken; default 1024, or what the queue lets one client hold.

        Raises
        ------
        ValueError
            `chunksize` or `buffersize` is less than 1.
        """
        if chunksize < 1:
            raise ValueError(f"chunksize must be >= 1, not {chunksize}")
        most = self._most_in_map(buffersize)
        deadline = None if timeout is None else time.monotonic() + timeout
        calls_ = zip(*iterables, strict=False)
        if chunksize == 1:
            jobs = (self.submit(fn, *items) for items in calls_)
            return _results(jobs, most, deadline)
        chunks = iter(lambda: tuple(itertools.islice(calls_, chunksize)), ())
        jobs_of_many = (self._submit(fn, chunk, None) for chunk in chunks)
        return _flattened(_results(jobs_of_many, most, deadline))

    async def asubmit(self, fn: Callable[P, T], /, *args: P.args, **kwargs: P.kwargs) -> T:
        """Hand ``fn(*args, **kwargs)`` in and await its result; the event loop goes on also while the queue is full.

        Cancelling it cancels a job that waits.

        Raises
        ------
        Exception
            As `submit`, and what the function raises.
        """
        return await (await self._submit_without_blocking(fn, args, kwargs))

    async def _submit_without_blocking(
        self, fn: Callable[..., T], args: tuple[Any, ...], kwargs: Mapping[str, object]
    ) -> JobFuture[T]:
        pauses = backoff()
        self._crew.check_open()
        try:
            job_ = self._encoded(fn, args, kwargs)
        except Exception as error:
            return JobFuture.finished(None, error)
        while True:
            try:
                return self._client.submit(*job_, wait=False)
            except Full:
                await asyncio.sleep(next(pauses))
            self._crew.check_open()

    async def amap(
        self, fn: Callable[..., T], *iterables: Iterable[Any], buffersize: int | None = None
    ) -> AsyncIterator[T]:
        """Call `fn` with the items of each of the iterables, in workers; give the results in order to an ``async for``.

        Parameters
        ----------
        buffersize : int, optional
            Most jobs handed in whose results have not been taken; default 1024, or what the queue lets one client hold.
        """
        most = self._most_in_map(buffersize)
        waiting: deque[JobFuture[T]] = deque()
        try:
            for items in zip(*iterables, strict=False):
                waiting.append(await self._submit_without_blocking(fn, items, {}))
                if len(waiting) == most:
                    yield await waiting.popleft()
            while waiting:
                yield await waiting.popleft()
        finally:
            for future in waiting:
                future.cancel()

    def _most_in_map(self, buffersize: int | None) -> int:
        if buffersize is not None and buffersize < 1:
            raise ValueError(f"buffersize must be >= 1, not {buffersize}")
        return min(buffersize or PENDING_IN_MAP, max(1, self._client.queue.quota // 2))

    def shutdown(self, wait: bool = True, *, cancel_futures: bool = False) -> None:
        """Take no more jobs; when those that are pending are done, end the workers and, where it is private, the queue.

        In a shared queue jobs whose time (`delay`, `due`) has not come are not waited for: they stay there, and their futures
        fail.

        Parameters
        ----------
        wait : bool
            Return when all that has happened, otherwise at once; a callback of a future is never waited in.
        cancel_futures : bool
            Cancel what waits.
        """
        self._crew.refuse()
        if cancel_futures:
            self._client.cancel_all()
        if wait and not self._crew.is_own_thread():
            self._crew.finish()
        else:
            self._crew.finish_later()


def _checked_names(name: str, found: Sequence[str]) -> tuple[str, ...]:
    if isinstance(found, str):
        raise TypeError(f"{name}: expected a sequence of names, found one str; write (name,)")
    for one in found:
        if not isinstance(one, str):
            raise TypeError(f"{name}: expected names as str, found {type(one).__name__}")
    return tuple(found)


def _results(jobs: Iterator[JobFuture[T]], most: int, deadline: float | None) -> Iterator[T]:
    """Hand in the first `most` jobs now, and each of the others when a result has been taken."""
    waiting = deque(itertools.islice(jobs, most))

    def results() -> Iterator[T]:
        try:
            while waiting:
                # in no variable here, so that nothing refers to a result that was given out
                yield _next_result(waiting, jobs, deadline)
        finally:
            for future in waiting:
                future.cancel()

    return results()


def _next_result(waiting: deque[JobFuture[T]], jobs: Iterator[JobFuture[T]], deadline: float | None) -> T:
    future = waiting.popleft()
    try:
        value = future.result(None if deadline is None else max(0.0, deadline - time.monotonic()))
    finally:
        future.cancel()
    waiting.extend(itertools.islice(jobs, 1))
    return value


def _flattened(chunks: Iterator[list[T]]) -> Iterator[T]:
    for chunk in chunks:
        chunk.reverse()
        while chunk:
            yield chunk.pop()


# a destructor, or a signal's handler, may submit a task
_choosing = threading.RLock()
_default: Executor | None = None
_chosen: Executor | None = None


def default_executor() -> Executor:
    """Give the executor that tasks go to where nothing else is said.

    It is the one given to `set_default_executor`; in a job, one on the queue that the job came from; else, where the
    environment has ``SUBETHA_QUEUE``, one on that queue directory without workers of its own; else a private `Executor`. Made
    at the first call.
    """
    global _default
    with _choosing:
        if (
            _default is None
            or _default._crew.is_of_another_process()
            or (_default is not _chosen and _default._crew.is_over)
        ):
            directory = (job.running and job.running.queue_path) or os.environ.get("SUBETHA_QUEUE")
            _default = Executor() if not directory else Executor(0, queue=directory)
        return _default


def set_default_executor(executor: Executor | None) -> None:
    """Let tasks of this process go to `executor` where nothing else is said; None: as `default_executor` finds it."""
    global _default, _chosen
    if executor is not None and not isinstance(executor, Executor):
        raise TypeError(f"executor: expected an Executor or None, found {type(executor).__name__}")
    with _choosing:
        _default = _chosen = executor


def _after_fork() -> None:
    global _choosing
    # another thread of the parent may have held it
    _choosing = threading.RLock()


os.register_at_fork(after_in_child=_after_fork)

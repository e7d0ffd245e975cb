"""Futures of jobs, and the client that hands jobs in and collects what comes of them.

A client's results come to one mailbox. Whoever waits for one of its futures collects from it, for all of them (the leader);
a second thread that waits sleeps until its own result is there or the leader goes and it takes over. Where nobody waits in
`JobFuture.result`, but callbacks, `concurrent.futures.wait` or an event loop are to hear of a future, a thread of the client
leads. So a plain ``submit(...).result()`` has no thread between the mailbox and its caller. Callbacks run in the client's thread,
whoever collected, and never under the lead: one may wait, submit, cancel or shut down.

    submit --> pending --result collected--> finished
                  |
                  +--cancelled in its cell--> cancelled

A result is taken from the mailbox once, and from `Client._taken` when its future has it: a Ctrl-C in between loses nothing.
"""

import asyncio
import contextlib
import functools
import itertools
import logging
import os
import threading
import time
from collections import deque
from collections.abc import Callable, Generator
from concurrent.futures import CancelledError, Future, InvalidStateError
from concurrent.futures import TimeoutError as FutureTimeout
from concurrent.futures._base import CANCELLED_AND_NOTIFIED, FINISHED, PENDING
from datetime import datetime
from typing import Any, Generic, NamedTuple, TypeAlias, TypeVar

from subetha._core import FutureState, SubmittedResult, forks, settle_ordinary, submit_ordinary
from subetha.calls import Options, Outcome, Registered, keep_memory_warm, outcome_of
from subetha.errors import (
    ArenaFull,
    ArenaTooSmall,
    Empty,
    Full,
    JobCancelled,
    PassError,
    SubethaError,
    UnknownClosureId,
)
from subetha.jobqueue import JobQueue
from subetha.layout import STATE_SHIFT, CellState
from subetha.once import forget_unique, submit_unique
from subetha.pass_registry import Pieces

__all__ = ["Client", "JobFuture"]

T = TypeVar("T")

BATCH = 256
"""So many results are taken in a row before anything else is looked at."""

LOOK_AT_OTHERS_S = 0.01
"""A leader looks so often (s) whether a job that another client has handed in is done."""

LOOK_S = 0.25
"""A leader looks so often (s) whether what it waits for was settled by another thread."""

ROOM_S = 0.05
"""A submit that waits for room collects results in between, so often (s)."""

SHORTEST_PAUSE_S, LONGEST_PAUSE_S = 0.0002, 0.01
"""A job that waits for another one looks so often (s) for one that it could run meanwhile."""

_LOGGER = logging.getLogger("subetha.futures")

# Hands a job in: called with how long to wait (s), and the id that it is to have, or 0.
_Submit: TypeAlias = Callable[[float, int], int]


class JobFuture(FutureState, Future[T], Generic[T]):
    """What a submitted job will come to: a `concurrent.futures.Future` that can also be awaited.

    Not made directly: `Executor.submit` and a task's `submit` give them.

    Attributes
    ----------
    job_id : int or None
        The job's number in its queue; None where it was never handed in, since its arguments could not be pickled.
    """

    # What `Future` keeps is made when somebody asks for it: most futures live without a lock of their own.
    _client: "Client"
    _told = 0  # of the waiters

    @classmethod
    def finished(cls, value: Any, error: BaseException | None) -> "JobFuture[Any]":
        """Make one that is done: of a job that was not handed in."""
        future: JobFuture[Any] = cls(None)
        future._finish(value, error)
        return future

    # ---- what the base class's own methods, and `wait`, `as_completed` and asyncio, work on ----

    @property
    def _condition(self) -> threading.Condition:  # type: ignore[override]
        """Whoever takes it wants to be told, and does not collect."""
        condition = self._own_condition()
        if self._state == PENDING:
            self._client.serve(self)
        return condition

    @property
    def _waiters(self) -> list[Any]:  # type: ignore[override]
        made: list[Any] = self.__dict__.setdefault("_made_waiters", [])
        return made

    @property
    def _done_callbacks(self) -> list[Callable[["JobFuture[T]"], object]]:
        made: list[Callable[[JobFuture[T]], object]] = self.__dict__.setdefault("_made_callbacks", [])
        return made

    @property
    def _result(self) -> T | None:  # type: ignore[override]
        return self._outcome()[0] if self._state == FINISHED else None

    @property
    def _exception(self) -> BaseException | None:  # type: ignore[override]
        return self._outcome()[1] if self._state == FINISHED else None

    def _read(self, arrived: bytes | BaseException) -> Outcome:
        value, error = outcome_of(arrived)
        if isinstance(error, UnknownClosureId) and self._task is not None:
            error = UnknownClosureId(
                f"task {self._task.name!r} of the queue {self._task.queue_name!r}: {error}; start workers that import its "
                "module and serve its queue"
            )
        return value, error

    def _settle(self, state: str, arrived: bytes | BaseException | None = None) -> bool:
        """Set the state, unless it is set, and tell whoever waits; callbacks are left to `_call_callbacks`.

        False where nobody has asked for anything that would need a condition: then there are no callbacks, either.

        May be called again, after a Ctrl-C in it: what was left undone is done then.
        """
        if self._settle_alone(state, arrived):
            return False
        condition = self._own_condition()
        with condition:
            if self._state == PENDING:
                self._arrived = arrived
                self._state = state
            waiters = self.__dict__.get("_made_waiters", ())
            while self._told < len(waiters):
                waiter = waiters[self._told]
                self._told += 1
                if state != FINISHED:
                    waiter.add_cancelled(self)
                elif isinstance(arrived, BaseException):
                    waiter.add_exception(self)
                else:
                    waiter.add_result(self)
            condition.notify_all()
        return True

    def _has_callbacks(self) -> bool:
        return bool(self.__dict__.get("_made_callbacks"))

    def _call_callbacks(self) -> None:
        """Call each that has not been called; once the future is settled, by any thread that holds no lock."""
        callbacks: list[Callable[[JobFuture[T]], object]] = self.__dict__.get("_made_callbacks", [])
        # another thread may take from it, too
        with contextlib.suppress(IndexError):
            while True:
                self._call_back(callbacks.pop(0))

    def _call_back(self, callback: Callable[["JobFuture[T]"], object]) -> None:
        try:
            callback(self)
        except BaseException:
            # Its thread has others to serve.
            _LOGGER.exception("exception calling callback for %r", self)

    # ---- what users call ----

    def cancel(self, *, running: bool = False) -> bool:
        """Take the job back, where no worker has it yet.

        Parameters
        ----------
        running : bool
            End it also where one has it: that worker is killed and replaced.

        Returns
        -------
        bool
            Whether it is cancelled; False where it runs or is done.

        Raises
        ------
        TransportError
            A running one could not be ended in a second.
        """
        if self._state == PENDING:
            self._client.cancel(self, running)
        return self._state == CANCELLED_AND_NOTIFIED

    def cancelled(self) -> bool:
        return self._state == CANCELLED_AND_NOTIFIED

    def running(self) -> bool:
        """Whether a worker has the job now. Looks into the queue."""
        return self._state == PENDING and self._client.state_of(self) == CellState.TAKEN

    def progress(self) -> tuple[int, int] | None:
        """How far the job says that it is (`subetha.progress`): done and total; None where it does not run, or says nothing."""
        return self._client.queue.progress(self.job_id) if self._state == PENDING and self.job_id is not None else None

    def done(self) -> bool:
        if self._state == PENDING:
            self._client.collect_what_is_there()
        return self._state != PENDING

    def result(self, timeout: float | None = None) -> T:
        """Wait for the job and return what its function returned, or raise what it raised.

        Parameters
        ----------
        timeout : float, optional
            Seconds; None waits for ever.

        Raises
        ------
        TimeoutError
            It is not done after `timeout` seconds; it goes on.
        CancelledError
            It was cancelled.
        Exception
            What the function raised, with the traceback of the worker as its `__cause__`; `WorkerDied` or `JobTimeout`
            where the job ended otherwise.
        """
        try:
            value, raised = self._finished(timeout)
            if raised is not None:
                raise raised
            return value  # type: ignore[no-any-return]
        finally:
            # the traceback in a raised exception would refer to this frame, and this frame to the future that has it
            raised = self = None  # type: ignore[assignment]

    def exception(self, timeout: float | None = None) -> BaseException | None:
        """Wait for the job and return what its function raised, or None. Otherwise as `result`."""
        return self._finished(timeout)[1]

    def _finished(self, timeout: float | None) -> Outcome:
        if self._state == PENDING:
            self._client.wait_for(self, timeout)
        if self._state == FINISHED:
            return self._outcome()
        if self._state == CANCELLED_AND_NOTIFIED:
            raise CancelledError
        raise FutureTimeout(f"job {self.job_id} is not done after {timeout} s")

    def add_done_callback(self, fn: Callable[["JobFuture[T]"], object]) -> None:
        """Call ``fn(self)`` when the job is done or cancelled; at once where it is. What it raises is logged."""
        with self._condition:
            if self._state == PENDING:
                self._done_callbacks.append(fn)
                return
        self._call_back(fn)

    def __await__(self) -> Generator[Any, None, T]:
        return asyncio.wrap_future(self).__await__()

    def set_running_or_notify_cancel(self) -> bool:
        raise InvalidStateError("the state of a job's future is set by its queue alone")

    def set_result(self, result: T) -> None:
        raise InvalidStateError("the result of a job's future is set by its queue alone")

    def set_exception(self, exception: BaseException | None) -> None:
        raise InvalidStateError("the exception of a job's future is set by its queue alone")


def _left(deadline: float | None) -> float:
    """Seconds to wait before the next look at everything."""
    return LOOK_S if deadline is None else min(LOOK_S, deadline - time.monotonic())


class Help(NamedTuple):
    """What a worker does while a job of it waits for another one, so that they do not all wait.

    Attributes
    ----------
    serve_one : callable
        Runs a job that waits, if there is one; whether there was.
    thread : int
        The thread (`threading.get_ident`) that jobs run in.
    """

    serve_one: Callable[[], bool]
    thread: int


class Client:
    """Hands jobs to a queue and collects what comes of them. For any number of threads.

    Parameters
    ----------
    queue : JobQueue
        A handle that nobody else receives from. `close` closes it.
    help_ : Help, optional
        In a worker process: how to help with other jobs while one waits.
    """

    def __init__(self, queue: JobQueue, help_: Help | None = None) -> None:
        self.queue = queue
        self._help = help_
        self._pending: dict[int, JobFuture[Any]] = {}
        # Results out of the mailbox whose futures have not been told. Only for the leader.
        self._taken: list[SubmittedResult] = []
        # Results that came before their future was entered; its submitter looks here after that.
        self._early: dict[int, bytes | PassError] = {}
        self._leads = threading.RLock()
        self._leader = 0
        self._followers: dict[int, JobFuture[Any]] = {}
        # Those of jobs that other clients have handed in; among the pending ones, too.
        self._others: dict[int, JobFuture[Any]] = {}
        self._uniques = threading.RLock()
        self._served: set[JobFuture[Any]] = set()
        # Settled futures whose callbacks the client's thread is to call.
        self._owed: deque[JobFuture[Any]] = deque()
        # Jobs taken back out of the queue whose futures have not been told.
        self._taken_back: list[int] = []
        self._is_needed = threading.Event()
        self._starting = threading.Lock()
        self._thread: threading.Thread | None = None
        self.failure: BaseException | None = None
        """What all that is submitted fails with, since no result can come any more."""
        self._closed = False
        self._pid = os.getpid()
        self.forks = forks()
        """In which process it was made: another one is a fork of that."""
        keep_memory_warm()

    def __len__(self) -> int:
        """How many futures are pending."""
        return len(self._pending)

    def is_of_another_process(self) -> bool:
        """Whether this is a fork of the process that made the client."""
        return forks() != self.forks

    def _check_process(self) -> None:
        if self.is_of_another_process():
            raise RuntimeError(
                f"this future belongs to process {self._pid}, which forked this one ({os.getpid()}); its result goes there"
            )

    def submit(
        self,
        closure_id: int,
        data: bytes | Pieces,
        options: Options,
        task: Registered | None = None,
        *,
        wait: bool = True,
    ) -> JobFuture[Any]:
        """Hand a job in and give its future; waits while there is no room, collecting results meanwhile.

        An error of it names the task, of which the workers know the number alone.

        Raises
        ------
        Full
            There is no room, or no block, and `wait` is False.
        ArenaTooSmall
            The arguments are longer than any block.
        ArenaFull
            No block is left, and none is held by jobs of this client, so it would be of no use to wait for these.
        """
        future: JobFuture[Any] | None = None
        if options.is_ordinary:
            try:
                future = submit_ordinary(self.queue, closure_id, data, options.prepared, JobFuture, self, self._pending)
            except (ArenaFull, Full):
                # once more, and waiting
                pass
            else:
                if self._early or self.failure is not None:
                    self._see_to(future, None)
        if future is None:
            due = options.due_now()
            submit = functools.partial(self.queue._submit, closure_id, data, options.prepared, due)
            if options.unique_key is None:
                job_id = self._submitted(submit, 0, wait)
                future = self._pending[job_id] = JobFuture(self, job_id)
                self._see_to(future, due)
            else:
                future = self._submit_unique(submit, due, options.unique_key, wait)
        future._task = task
        return future

    def _submitted(self, submit: _Submit, job_id: int, wait: bool) -> int:
        """Hand a job in, waiting for room; its id."""
        try:
            return submit(0, job_id)
        except ArenaTooSmall:
            raise
        except (ArenaFull, Full) as error:
            if isinstance(error, ArenaFull) and not self._pending:
                # nothing of its own could make room
                raise
            if not wait:
                self.collect_what_is_there()
                raise Full(str(error)) from error
            return self._submit_when_room(submit, job_id)

    def _submit_unique(self, submit: _Submit, due: float | datetime | None, key: str, wait: bool) -> JobFuture[Any]:
        def submit_as(job_id: int) -> None:
            self._submitted(submit, job_id, wait)

        # Two threads must not be at one key: the second is to find the future of the first.
        with self._uniques:
            job_id, is_new = submit_unique(self.queue, key, submit_as)
            if is_new:
                future: JobFuture[Any] = JobFuture(self, job_id)
                future._unique_key = key
                self._pending[job_id] = future
                self._see_to(future, due)
                return future
            found = self._pending.get(job_id)
            if found is not None:
                return found
            # another client's: what comes of it is kept for a while
            future = JobFuture(self, job_id)
            self._pending[job_id] = self._others[job_id] = future
            return future

    def _see_to(self, future: JobFuture[Any], due: float | datetime | None) -> None:
        """Do what is left to do for a future just entered: its job was handed in, and may have ended."""
        if due is not None:
            future._due = due.timestamp() if isinstance(due, datetime) else due
        if self._early and future.job_id in self._early:
            self._settle_early(future.job_id)
        if self.failure is not None:
            self.fail(self.failure)

    def _submit_when_room(self, submit: _Submit, job_id: int) -> int:
        help_ = self._help if self._help is not None and self._help.thread == threading.get_ident() else None
        while True:
            # In a job: what takes the room may be jobs that wait for this very worker.
            if help_ is not None:
                help_.serve_one()
            # It may be this client's own results that take the room.
            wait = 0.0 if self._lead(self._collect, ROOM_S) else ROOM_S
            try:
                return submit(wait, job_id)
            except ArenaFull:
                if not self._pending:
                    raise
                # its own jobs hold blocks, and their results come by whoever leads
                time.sleep(wait)
            except Full:
                pass
            if self.failure is not None:
                raise self.failure

    def cancel(self, future: JobFuture[Any], running: bool = False) -> None:
        """Cancel the future's job where it waits, or also where it runs."""
        self._check_process()
        assert future.job_id is not None
        if future.job_id in self._others:
            # the job is for its own client to cancel
            self._settle(future.job_id, future, CANCELLED_AND_NOTIFIED, None)
            future._call_callbacks()
            return
        while not self._take_back(future.job_id) and future._state == PENDING:
            if not running:
                return
            if self.queue.cancel_running(future.job_id):
                # what comes as its result says so, and is here already
                self.wait_for(future, None)
            elif self.state_of(future) not in (CellState.READY, CellState.RETRY, CellState.PARKED):
                # done, then; otherwise it was put back between the two looks
                return
        self._settle_taken_back()
        if future._state != PENDING:
            future._call_callbacks()

    def _take_back(self, job_id: int) -> bool:
        # In one call, so that a Ctrl-C comes before or after both; then the next one who collects tells the future.
        self._taken_back.extend(itertools.compress((job_id,), map(self.queue.cancel, (job_id,))))
        return job_id in self._taken_back

    def _settle_taken_back(self) -> None:
        for job_id in list(self._taken_back):
            future = self._pending.get(job_id)
            if future is not None:
                self._settle(job_id, future, CANCELLED_AND_NOTIFIED, None)
            # another thread may do so, too
            with contextlib.suppress(ValueError):
                self._taken_back.remove(job_id)

    def cancel_all(self) -> None:
        """Cancel every job that waits."""
        for future in list(self._pending.values()):
            self.cancel(future)

    def state_of(self, future: JobFuture[Any]) -> CellState | None:
        """Find the state of the cell that a future's job is in; None where there is none."""
        cells = self.queue.cells()
        found = cells["word"][cells["job_id"] == future.job_id]
        states = [CellState(int(word >> STATE_SHIFT) & 0xF) for word in found if word >> STATE_SHIFT & 0xF]
        return next((state for state in states if state == CellState.TAKEN), states[0] if states else None)

    def serve(self, future: JobFuture[Any]) -> None:
        """Have the client's own thread collect until `future` is done, where nobody else does."""
        self._check_process()
        self._served.add(future)
        if future._state != PENDING:
            self._served.discard(future)
            return
        if self._thread is None:
            with self._starting:
                if self._thread is None:
                    thread = threading.Thread(target=self._run, name="subetha-collector", daemon=True)
                    thread.start()
                    self._thread = thread
        self._is_needed.set()

    def wait_for(self, future: JobFuture[Any], timeout: float | None) -> None:
        """Wait until `future` is settled, or `timeout` seconds; collects for all where nobody else does."""
        if forks() != self.forks:
            self._check_process()
        deadline = None if timeout is None else time.monotonic() + timeout
        if self._help is not None and self._help.thread == threading.get_ident():
            self._help_until(future, self._help.serve_one, deadline)
            return

        while future._state == PENDING:
            if not self._lead(self._collect_until, future, deadline) and (longest := _left(deadline)) > 0:
                self._follow(future, longest)
            if deadline is not None and _left(deadline) <= 0:
                return

    def _collect_until(self, future: JobFuture[Any], deadline: float | None) -> None:
        """Collect, once at least, until `future` is settled or the time is over."""
        self._collect(LOOK_S if deadline is None else max(0.0, _left(deadline)))
        while future._state == PENDING and (longest := _left(deadline)) > 0:
            self._collect(longest)

    def _help_until(self, future: JobFuture[Any], serve_one: Callable[[], bool], deadline: float | None) -> None:
        """As `wait_for`, in a job: the one waited for may be waiting for this very worker."""
        pause = SHORTEST_PAUSE_S
        while future._state == PENDING:
            if serve_one():
                pause = SHORTEST_PAUSE_S
                continue
            left = pause if deadline is None else min(pause, deadline - time.monotonic())
            if not self._lead(self._collect, max(0.0, left)) and left > 0:
                self._follow(future, left)
            if left <= 0:
                return
            pause = min(2 * pause, LONGEST_PAUSE_S)

    def _lead(self, collect: Callable[..., object], *given: Any) -> bool:
        """Call `collect` with what is given as the leader; False where another thread leads.

        A Ctrl-C may come at any moment in it, and finds this thread the leader no more.
        """
        me = threading.get_ident()
        # in a signal's handler, or a destructor
        is_nested = self._leader == me
        leads = False
        try:
            leads = self._leads.acquire(blocking=False)
            if leads:
                self._leader = me
                collect(*given)
        finally:
            # No call before the release: an interrupt comes in where one begins or has returned.
            if self._leader == me and not is_nested:
                self._leader = 0
            try:
                self._leads.release()
            except RuntimeError:
                # another thread leads
                leads = False
            else:
                if self._followers or self._served:
                    self._wake_next()
        return leads

    def _follow(self, future: JobFuture[Any], timeout: float) -> None:
        """Sleep until `future` is settled, or the leader has gone, or for `timeout` seconds.

        Never for longer than `LOOK_S`: the one whom a leader woke to follow it may have had to leave at that moment.
        """
        condition = future._own_condition()
        with condition:
            self._followers[id(future)] = future
            # A leader that goes looks at the followers after it has let go of the lead.
            if future._state == PENDING and self._leader:
                condition.wait(timeout)
            self._followers.pop(id(future), None)

    def _wake_next(self) -> None:
        """Let another one take the lead who needs it."""
        for future in list(self._followers.values()):
            if future._state == PENDING:
                condition = future._own_condition()
                with condition:
                    condition.notify_all()
                return
        if self._served:
            self._is_needed.set()

    def collect_what_is_there(self) -> None:
        """Take the results that are there; does not wait for any, nor for another thread that collects."""
        self._lead(self._collect, 0)

    def _collect(self, timeout: float) -> None:
        """Wait for a result up to `timeout` seconds, and settle the futures of all that are there. Only for the leader."""
        if self._taken_back:
            self._settle_taken_back()
        if self._others:
            timeout = min(timeout, LOOK_AT_OTHERS_S)
            self._settle_others()
        taken = self._taken
        if not taken:
            try:
                self.queue._recv_into(taken, BATCH, timeout)
            except Empty:
                return
            except Exception as error:
                # Nothing more will come to this handle, so nobody may go on waiting for it.
                self.fail(error)
                return
            taken.reverse()
        while True:
            settle_ordinary(taken, self._pending)
            if not taken:
                return
            result = taken[-1]
            future = self._pending.get(result.token)
            if future is not None:
                arrived = result.result
                state = CANCELLED_AND_NOTIFIED if isinstance(arrived, JobCancelled) else FINISHED
                self._settle(result.token, future, state, arrived)
            else:
                self._early[result.token] = result.result
                self._settle_early(result.token)
            # unless a signal's handler has collected meanwhile
            if taken and taken[-1] is result:
                taken.pop()

    def _settle(self, job_id: int, future: JobFuture[Any], state: str, arrived: bytes | BaseException | None) -> None:
        if future._settle(state, arrived):
            if future._has_callbacks():
                self._owed.append(future)
                self._is_needed.set()
            self._served.discard(future)
        if future._unique_key is not None and self.failure is None:
            # also where it was only told that it failed: whoever submits it next looks for the job itself
            with contextlib.suppress(SubethaError, OSError, ValueError):
                forget_unique(self.queue, future._unique_key, job_id)
        if self._others:
            self._others.pop(job_id, None)
        self._pending.pop(job_id, None)

    def _settle_others(self) -> None:
        """Look for what came of other clients' jobs."""
        for job_id, future in list(self._others.items()):
            try:
                arrived: bytes | BaseException = self.queue.result(job_id, 0)
            except TimeoutError:
                continue
            except SubethaError as error:
                arrived = error
            self._settle(job_id, future, FINISHED, arrived)

    def _settle_early(self, job_id: int) -> None:
        """Bring together a result and a future that came at the same time; whoever sees both does it, perhaps both do."""
        future = self._pending.get(job_id)
        arrived = self._early.get(job_id)
        if future is not None and arrived is not None:
            self._settle(job_id, future, FINISHED, arrived)
            self._early.pop(job_id, None)

    def _run(self) -> None:
        """Collect while a future is to be told of that nobody waits for, and call callbacks: the client's own thread."""
        while True:
            self._is_needed.clear()
            while self._owed:
                self._owed.popleft()._call_callbacks()
            if self._closed:
                return
            if not self._served:
                self._is_needed.wait()
            elif not self._lead(self._collect_for_served):
                # Whoever leads says so when it goes, but to one alone, who may be leaving, too.
                self._is_needed.wait(LOOK_S)

    def _collect_for_served(self) -> None:
        while self._served and not self._owed and not self._closed:
            self._collect(LOOK_S)

    def is_own_thread(self) -> bool:
        """Whether this is the thread that calls callbacks."""
        return self._thread is threading.current_thread()

    def wait_for_all(self, timeout: float | None = None) -> bool:
        """Wait until nothing is pending; whether that is so."""
        deadline = None if timeout is None else time.monotonic() + timeout
        while self._pending:
            left = None if deadline is None else deadline - time.monotonic()
            if left is not None and left <= 0:
                return False
            try:
                future = next(iter(self._pending.values()))
            except (StopIteration, RuntimeError):
                # settled, or changed, just now by another thread
                continue
            if future._state == PENDING:
                self.wait_for(future, left)
            else:
                # Another thread is about to take it out, or has left that to the next one who collects.
                self.collect_what_is_there()
                time.sleep(SHORTEST_PAUSE_S)
        return True

    def drop_those_for_later(self) -> None:
        """Let the futures of jobs whose time has not come fail, where they are pending; the jobs stay in the queue."""
        for job_id, future in list(self._pending.items()):
            if future._due > time.time():
                error = RuntimeError("the executor was shut down; this job, handed in for later, stays in its queue")
                self._settle(job_id, future, FINISHED, error)

    def fail(self, error: BaseException) -> None:
        """Let everything that is pending, and all that is submitted later, fail with `error`: no result can come any more."""
        self.failure = error
        for job_id, future in list(self._pending.items()):
            self._settle(job_id, future, FINISHED, error)

    def close(self) -> None:
        """Close the handle; what is pending fails, as does what is being submitted."""
        self.queue.close()
        self.fail(self.failure or RuntimeError("the executor was shut down before this job was done"))
        self._closed = True
        self._is_needed.set()
        thread = self._thread
        if thread is not None and thread is not threading.current_thread():
            thread.join()

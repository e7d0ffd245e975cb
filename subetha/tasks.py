"""Tasks: functions that are called here as ever, and submitted to run in a worker.

A task has a stable number, made from its name, under which every process that has imported its module can run it; a job of it
then holds no function, only arguments.
"""

import asyncio
import contextlib
import contextvars
import functools
import os
import sys
from collections.abc import AsyncIterator, Callable, Iterable, Iterator
from datetime import datetime, tzinfo
from typing import Any, Final, Generic, ParamSpec, Self, TypeVar, overload

from subetha import calls
from subetha.errors import CallFailed
from subetha.executor import Executor, default_executor
from subetha.futures import JobFuture
from subetha.pass_registry import DEFAULT_QUEUE, Pieces, closure_id_of, default_registry, joined, takes_buffers
from subetha.periodic import Periodic, Schedule, periodic_tasks

__all__ = ["Task", "eager", "task"]

P = ParamSpec("P")
T = TypeVar("T")

_is_eager: Final = contextvars.ContextVar("subetha_is_eager", default=False)


@contextlib.contextmanager
def eager() -> Iterator[None]:
    """Run tasks where they are submitted, for the tests of programs that use them.

    Inside of the ``with`` block `submit`, `submit_many`, `map`, `asubmit` and `amap` of a task call its function at once, in
    this thread (or asyncio task); a future is done when it is given. What the function raises is in the future. Nothing is
    pickled.
    """
    token = _is_eager.set(True)
    try:
        yield
    finally:
        _is_eager.reset(token)


class Task(calls.Registered, Generic[P, T]):
    """A function that can be submitted; made by the decorator `task`.

    Attributes
    ----------
    name : str
        What its number is made from.
    queue_name : str
        The queue of names that its jobs go to: workers may be told to serve some of these alone.
    closure_id : int
        Its number there, u32: the CRC-32 of ``name``, or of ``name@queue_name``.
    home_id : int
        The same for the queue that the decorator names.
    job_options : Options
        How its jobs are run, where a call does not say otherwise.
    retry_on : tuple of exception types
        Those after which a job of it is tried again, up to `max_attempts` times.
    max_concurrency : int or None
        How many jobs of it run at one time in a queue directory.
    """

    def __init__(
        self,
        function: Callable[P, T],
        name: str,
        job_options: calls.Options,
        retry_on: tuple[type[BaseException], ...] = (),
        queue_name: str = DEFAULT_QUEUE,
        max_concurrency: int | None = None,
    ) -> None:
        functools.update_wrapper(self, function)
        self.__qualname__: str = function.__qualname__
        self.name = name
        self.job_options = job_options
        self.retry_on = retry_on
        self.queue_name = queue_name
        self.max_concurrency = max_concurrency
        self.closure_id = self.home_id = closure_id_of(name, queue_name)
        self._function = function
        self._executor: Executor | None = None
        self._made_from: Task[P, T] | None = None

    def __call__(self, *args: P.args, **kwargs: P.kwargs) -> T:
        """Call the function here."""
        return self._function(*args, **kwargs)

    def options(
        self,
        *,
        executor: Executor | None = None,
        priority: int | None = None,
        timeout: float | None = None,
        max_attempts: int | None = None,
        backoff: float | tuple[float, float] | None = None,
        delay: float | None = None,
        due: float | datetime | None = None,
        queue_name: str | None = None,
        unique_key: str | None = None,
        result_ttl: float | None = None,
    ) -> Self:
        """Give the same task with other options; what is left out stays as it is.

        Parameters
        ----------
        executor : Executor, optional
            Where its jobs go, in place of `default_executor`.
        priority : int, optional
            0 (first), 1 or 2.
        timeout : float, optional
            Longest run in seconds.
        max_attempts : int, optional
            How often a job may be started before its worker's death, or an exception in `retry_on`, ends it.
        backoff : float or (float, float), optional
            For how many seconds a job rests after such an attempt, doubled for each further one up to the second number (an
            hour by default), less a random part of up to a half.
        delay : float, optional
            A job is not started for so many seconds after it was handed in.
        due : float or datetime, optional
            A job is not started before this time: seconds since 1970, as `time.time` gives them, or an aware datetime.
        queue_name : str, optional
            The queue of names that its jobs go to. With a private queue it does not matter.
        unique_key : str, optional
            While a job of this task with the same key is pending, `submit` gives that one's future and hands nothing in. It is
            looked for in the whole queue, whoever has submitted it.
        result_ttl : float, optional
            For how many seconds after its end the result can be fetched from any process: ``Executor.result(future.job_id)``. It
            takes up a cell for so long. Ten where there is a `unique_key`.

        Raises
        ------
        TypeError, ValueError
            One outside its limits.
        """
        chosen = object.__new__(type(self))
        chosen.__dict__.update(self.__dict__)
        said = calls.Options(priority, timeout, max_attempts, backoff, delay, due, unique_key, result_ttl)
        chosen.job_options = said.over(self.job_options)
        if queue_name is not None:
            _check_queue_name(queue_name)
            chosen.queue_name = queue_name
            chosen.closure_id = closure_id_of(self.name, queue_name)
        chosen._executor = executor or self._executor
        chosen._made_from = self._made_from or self
        return chosen

    def submit(self, *args: P.args, **kwargs: P.kwargs) -> JobFuture[T]:
        """Hand a call in, as `Executor.submit` does."""
        if _is_eager.get():
            return _called(self, args, kwargs)
        return self._where().submit(self, *args, **kwargs)

    def submit_many(self, *iterables: Iterable[Any]) -> list[JobFuture[T]]:
        """Hand in a call with the items of each of the iterables, as `map` takes them; all their futures, in order."""
        return [self.submit(*items) for items in zip(*iterables, strict=False)]  # type: ignore[call-arg]

    def map(
        self,
        *iterables: Iterable[Any],
        timeout: float | None = None,
        chunksize: int = 1,
        buffersize: int | None = None,
    ) -> Iterator[T]:
        """Call it with the items of each of the iterables, in workers, and give the results in order, as `Executor.map`."""
        if _is_eager.get():
            return map(self._function, *iterables)
        return self._where().map(self, *iterables, timeout=timeout, chunksize=chunksize, buffersize=buffersize)

    async def asubmit(self, *args: P.args, **kwargs: P.kwargs) -> T:
        """Hand a call in and await its result; the event loop goes on also while the queue is full."""
        if _is_eager.get():
            return self._function(*args, **kwargs)
        return await self._where().asubmit(self, *args, **kwargs)

    def amap(self, *iterables: Iterable[Any], buffersize: int | None = None) -> AsyncIterator[T]:
        """Call it with the items of each of the iterables, in workers; give the results in order to an ``async for``."""
        if _is_eager.get():
            return _asynchronous(map(self._function, *iterables))
        return self._where().amap(self, *iterables, buffersize=buffersize)

    def _where(self) -> Executor:
        return self._executor or default_executor()

    @takes_buffers
    def _run(self, data: bytes | memoryview) -> bytes | Pieces | CallFailed:
        return calls.run(self, data)

    def __reduce__(self) -> Any:
        if self._made_from is not None:
            return _with_options, (self._made_from, self.job_options, self.queue_name)
        # as functions go: by name, or by value where nobody else can import it, or would find something else
        found: Any = None if self.__module__ == "__main__" else sys.modules.get(self.__module__)
        for part in self.__qualname__.split("."):
            found = getattr(found, part, None)
        if found is not self:
            return Task, (
                self._function,
                self.name,
                self.job_options,
                self.retry_on,
                self.queue_name,
                self.max_concurrency,
            )
        return self.__qualname__

    def __repr__(self) -> str:
        return f"<task {self.name}>"


async def _asynchronous(items: Iterator[T]) -> AsyncIterator[T]:
    for item in items:
        yield item


def _called(task_: Task[Any, T], args: Any, kwargs: Any) -> JobFuture[T]:
    try:
        return JobFuture.finished(task_(*args, **kwargs), None)
    except Exception as error:
        return JobFuture.finished(None, error)


def _with_options(made_from: Task[P, T], job_options: calls.Options, queue_name: str) -> Task[P, T]:
    chosen = made_from.options(queue_name=queue_name)
    chosen.job_options = job_options
    return chosen


def _check_queue_name(queue_name: object) -> None:
    if not isinstance(queue_name, str):
        raise TypeError(f"queue_name: expected a str, found {type(queue_name).__name__}")
    if not queue_name:
        raise ValueError("queue_name: expected a name, found an empty str")


def _exception_types(retry_on: object) -> tuple[type[BaseException], ...]:
    types = retry_on if isinstance(retry_on, tuple) else (retry_on,)
    for one in types:
        if not (isinstance(one, type) and issubclass(one, BaseException)):
            raise TypeError(f"retry_on: expected exception types, found {one!r}")
    return types


def _module_name(function: Callable[..., Any]) -> str:
    """The name under which others import the function's module: of a script that is run, its file's name."""
    name = function.__module__
    if name != "__main__":
        return name
    main = sys.modules["__main__"]
    spec = getattr(main, "__spec__", None)
    if spec is not None:
        # python -m package or package.module
        return str(spec.name).removesuffix(".__main__")
    file = getattr(main, "__file__", None)
    return name if file is None else os.path.splitext(os.path.basename(file))[0]


@overload
def task(function: Callable[P, T], /) -> Task[P, T]: ...


@overload
def task(
    *,
    name: str | None = None,
    priority: int | None = None,
    timeout: float | None = None,
    max_attempts: int | None = None,
    retry_on: type[BaseException] | tuple[type[BaseException], ...] = (),
    backoff: float | tuple[float, float] | None = None,
    at_most_once: bool = False,
    result_ttl: float | None = None,
    queue_name: str = DEFAULT_QUEUE,
    max_concurrency: int | None = None,
    cron: str | None = None,
    timezone: str | tzinfo = "UTC",
) -> Callable[[Callable[P, T]], Task[P, T]]: ...


def task(
    function: Callable[..., Any] | None = None,
    /,
    *,
    name: str | None = None,
    priority: int | None = None,
    timeout: float | None = None,
    max_attempts: int | None = None,
    retry_on: type[BaseException] | tuple[type[BaseException], ...] = (),
    backoff: float | tuple[float, float] | None = None,
    at_most_once: bool = False,
    result_ttl: float | None = None,
    queue_name: str = DEFAULT_QUEUE,
    max_concurrency: int | None = None,
    cron: str | None = None,
    timezone: str | tzinfo = "UTC",
) -> Any:
    """Make a function a task: ``@task`` or ``@task(timeout=10)``.

    Parameters
    ----------
    name : str, optional
        What its number is made from; default: module and qualified name. It has to be the same in every process.
    priority : int, optional
        0 (first), 1 or 2; 1 by default.
    timeout : float, optional
        Longest run in seconds; after that the worker is killed, and the future fails with `JobTimeout`.
    max_attempts : int, optional
        How often a job may be started before its worker's death ends it (`WorkerDied`), or an exception in `retry_on`; 3 by
        default.
    retry_on : exception type, or tuple of them
        Where the function raises one of them the job runs again; the future gets the exception of the last attempt.
    backoff : float or (float, float), optional
        For how many seconds a job rests after an attempt that ended so, or with its worker's death; doubled for each further one
        up to the second number (an hour by default), less a random part of up to a half. Default: it does not rest.
    at_most_once : bool
        Never start a job again whose worker died: ``max_attempts=1``.
    result_ttl : float, optional
        For how many seconds after its end a result can be fetched from any process: ``Executor.result(future.job_id)``.
    queue_name : str
        The queue of names that its jobs go to: a worker may be told to serve some of them alone (``subetha worker
        --queue-name``).
    max_concurrency : int, optional
        How many jobs of it may run at one time, in all workers of a queue directory that have imported its module; the others
        wait, and do not hold up jobs of other tasks. A job whose worker is stopped counts until that is over, too.
        The workers of a private executor see to it where its `modules` name the task's module; otherwise the future fails with
        `ValueError`.
    cron : str, optional
        Run it by itself, without arguments, at the times that these five fields say: minute, hour, day of the month, month, day
        of the week. The worker processes that import its module at their start see to that; times at which there is none are made
        up for by one run. One that takes longer than until the next time runs twice at once, unless `max_concurrency` says
        otherwise.
    timezone : str or tzinfo
        Whose clock `cron` means.

    Returns
    -------
    Task, or the decorator

    Raises
    ------
    ValueError
        Another task, or a handler, has the same number; or the function is defined in another one and has no `name`, so that
        others would not find it; or an option is outside its limits.
    TypeError
        It is not a function; or an option is of another type.
    """
    if at_most_once:
        if max_attempts not in (None, 1):
            raise ValueError(f"at_most_once is max_attempts=1; found max_attempts={max_attempts}, too")
        if retry_on != ():
            raise ValueError("at_most_once: a job that is to be tried again (retry_on) is started more than once")
        max_attempts = 1
    job_options = calls.Options(priority, timeout, max_attempts, backoff, result_ttl=result_ttl)
    retry_types = _exception_types(retry_on)
    schedule = None if cron is None else Schedule.of(cron, timezone)
    _check_queue_name(queue_name)
    if max_concurrency is not None:
        if isinstance(max_concurrency, bool) or not isinstance(max_concurrency, int):
            raise TypeError(f"max_concurrency: expected an int, found {type(max_concurrency).__name__}")
        if not 1 <= max_concurrency <= 65_535:
            raise ValueError(f"max_concurrency: expected an int from 1 to 65535, found {max_concurrency}")
    if name is not None and not isinstance(name, str):
        raise TypeError(f"name: expected a str, found {type(name).__name__}")

    def decorate(function: Callable[P, T]) -> Task[P, T]:
        if isinstance(function, Task):
            raise TypeError(f"{function!r} is a task already")
        if not hasattr(function, "__qualname__"):
            raise TypeError(f"expected a function, found {type(function).__name__}")
        if asyncio.iscoroutinefunction(function):
            raise TypeError(f"{function.__qualname__} is a coroutine function; a worker runs plain functions")
        if name is None and "<" in function.__qualname__:
            raise ValueError(
                f"{function.__qualname__} is defined inside of a function, where workers do not find it by importing its module; "
                "move it to the module, or give it a name: @subetha.task(name=...)"
            )
        full_name = name or f"{_module_name(function)}.{function.__qualname__}"
        made = Task(function, full_name, job_options, retry_types, queue_name, max_concurrency)
        try:
            default_registry.register_named(
                full_name, made._run, queue_name=queue_name, max_concurrency=max_concurrency
            )
        except ValueError as error:
            raise ValueError(f"task {error}: @subetha.task(name=...)") from None
        # one of the same name that was here before may have been periodic
        periodic_tasks.pop(made.home_id, None)
        if schedule is not None:
            data = joined(calls.encode_call(None, (), {}))
            periodic_tasks[made.home_id] = Periodic(schedule, data, job_options.prepared)
        return made

    return decorate if function is None else decorate(function)

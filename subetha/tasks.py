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
import zlib
from collections.abc import AsyncIterator, Callable, Iterable, Iterator
from typing import Any, Final, Generic, ParamSpec, Self, TypeVar, overload

from subetha import calls
from subetha.errors import CallFailed
from subetha.executor import Executor, default_executor
from subetha.futures import JobFuture
from subetha.pass_registry import default_registry

__all__ = ["Task", "eager", "task"]

P = ParamSpec("P")
T = TypeVar("T")

_is_eager: Final = contextvars.ContextVar("subetha_is_eager", default=False)
_tasks: Final[dict[int, "Task[Any, Any]"]] = {}


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
    closure_id : int
        That number, u32: the name's CRC-32.
    job_options : Options
        How its jobs are run, where a call does not say otherwise.
    """

    def __init__(self, function: Callable[P, T], name: str, job_options: calls.Options) -> None:
        functools.update_wrapper(self, function)
        self.__qualname__: str = function.__qualname__
        self.name = name
        self.job_options = job_options
        self.closure_id = zlib.crc32(name.encode())
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
            How often a job may be started before its worker's death ends it.

        Raises
        ------
        TypeError, ValueError
            One outside its limits.
        """
        chosen = object.__new__(type(self))
        chosen.__dict__.update(self.__dict__)
        chosen.job_options = calls.Options(priority, timeout, max_attempts).over(self.job_options)
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

    def _run(self, data: bytes) -> bytes | CallFailed:
        return calls.run(self._call, data)

    def _call(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> T:
        return self._function(*args, **kwargs)

    def __reduce__(self) -> Any:
        if self._made_from is not None:
            return _with_options, (self._made_from, self.job_options)
        # as functions go: by name, or by value where nobody else can import it, or would find something else
        found: Any = None if self.__module__ == "__main__" else sys.modules.get(self.__module__)
        for part in self.__qualname__.split("."):
            found = getattr(found, part, None)
        if found is not self:
            return Task, (self._function, self.name, self.job_options)
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


def _with_options(made_from: Task[P, T], job_options: calls.Options) -> Task[P, T]:
    chosen = made_from.options()
    chosen.job_options = job_options
    return chosen


def _register(made: Task[Any, Any]) -> None:
    other = _tasks.get(made.closure_id)
    number = f"{made.closure_id} (the CRC-32 of its name)"
    if other is not None and other.name != made.name:
        raise ValueError(
            f"task {made.name!r} has the number {number}, and so has task {other.name!r}; give one of them another name: "
            "@subetha.task(name=...)"
        )
    if made.closure_id == calls.CALL_ID or (other is None and default_registry.is_registered(made.closure_id)):
        raise ValueError(
            f"task {made.name!r} has the number {number}, under which a handler is registered already; give it another name: "
            "@subetha.task(name=...)"
        )
    _tasks[made.closure_id] = made
    default_registry.register(made.closure_id, made._run)


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
    at_most_once: bool = False,
) -> Callable[[Callable[P, T]], Task[P, T]]: ...


def task(
    function: Callable[..., Any] | None = None,
    /,
    *,
    name: str | None = None,
    priority: int | None = None,
    timeout: float | None = None,
    max_attempts: int | None = None,
    at_most_once: bool = False,
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
        How often a job may be started before its worker's death ends it (`WorkerDied`); 3 by default.
    at_most_once : bool
        Never start a job again whose worker died: ``max_attempts=1``.

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
        max_attempts = 1
    job_options = calls.Options(priority, timeout, max_attempts)
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
        made = Task(function, name or f"{_module_name(function)}.{function.__qualname__}", job_options)
        _register(made)
        return made

    return decorate if function is None else decorate(function)

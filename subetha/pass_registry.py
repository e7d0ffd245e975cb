"""Which handler runs for which closure id, and the one place where a handler is called.

A handler is registered under a u32 id in every process that may run it; a `Pass` names the id and carries the argument
bytes. The module functions work on one registry of the process; `PassRegistry` is for separate ones.

A handler may have a name in place of an id, from which its id is made, and be run under that in several queues of names.
"""

import operator
import threading
import zlib
from collections.abc import Callable, Iterable, Set
from typing import Any, Final, NamedTuple, TypeAlias, TypeVar, overload

from subetha._core import Pass
from subetha.errors import ExecutionError, PassError, UnknownClosureId

__all__ = [
    "DEFAULT_QUEUE",
    "Handler",
    "Pass",
    "PassRegistry",
    "PassResult",
    "closure_id_of",
    "default_registry",
    "execute",
    "is_registered",
    "register",
    "registered_count",
    "unregister",
]


class Pieces(list[bytes | memoryview]):
    """Bytes in several pieces, one behind the other: for a long result that is not to be copied together first."""

    __slots__ = ()


def joined(data: bytes | Pieces) -> bytes:
    """Copy pieces together."""
    return b"".join(data) if isinstance(data, Pieces) else data


PassResult: TypeAlias = bytes | Pieces | PassError
"""What a pass comes to: the bytes of its handler, or the error in their place."""

Handler: TypeAlias = Callable[[bytes], bytes | bytearray | memoryview | Pieces | PassError]
"""Takes the argument bytes of a pass, gives its result."""

DEFAULT_QUEUE: Final = "default"
"""Name of the queue of handlers that say no other."""

_H = TypeVar("_H", bound=Handler)
_C = TypeVar("_C", bound=Callable[..., object])


def takes_buffers(handler: _C) -> _C:
    """Mark a handler that takes long arguments as a memoryview, where they lie, in place of bytes."""
    handler.takes_buffers = True  # type: ignore[attr-defined]
    return handler


_CLOSURE_ID_END = 2**32


def closure_id_of(name: str, queue_name: str = DEFAULT_QUEUE) -> int:
    """The id under which a named handler is run in a queue: the CRC-32 of ``name``, or of ``name@queue_name``."""
    return zlib.crc32((name if queue_name == DEFAULT_QUEUE else f"{name}@{queue_name}").encode())


class Limit(NamedTuple):
    """How many may run at one time.

    Attributes
    ----------
    closure_id : int
        Those of one handler are counted together, under this one of its ids.
    places : int
    """

    closure_id: int
    places: int


class _Named(NamedTuple):
    handler: "Handler"
    queue_name: str
    max_concurrency: int | None


class _Absent:
    """Stands for a handler that was not given, since None given as one is a mistake to report."""


_ABSENT: Final = _Absent()


class PassRegistry:
    """Handlers by closure id.

    Every method may be called from any thread. No lock is held while a handler runs, so a handler may itself register,
    unregister or execute.
    """

    __slots__ = ("_changing", "_named", "_names", "_served", "changes", "handlers", "limits")

    def __init__(self) -> None:
        self.handlers: dict[int, Handler] = {}
        """By closure id; to be read only."""
        self._named: dict[str, _Named] = {}
        self._names: dict[int, str] = {}
        # None: every handler in its own queue
        self._served: tuple[str, ...] | None = None
        self.limits: dict[int, Limit] = {}
        """Of the closure ids of which only so many may run at one time."""
        self.changes = 0
        """Counts up whenever the set of closure ids with a handler becomes another one."""
        # Lookups need no lock; it only makes "replace and say what was replaced" one step among writers.
        self._changing = threading.Lock()

    @overload
    def register(self, closure_id: int, handler: Handler) -> Handler | None: ...

    @overload
    def register(self, closure_id: int) -> Callable[[_H], _H]: ...

    def register(self, closure_id: int, handler: Any = _ABSENT) -> Handler | Callable[[_H], _H] | None:
        """Register `handler` under `closure_id`, replacing the one registered before.

        Without `handler` it is a decorator: ``@register(7)`` registers the function below it and leaves it unchanged.

        Parameters
        ----------
        closure_id : int
            0 to 2**32 - 1.
        handler : callable, optional
            Takes the argument bytes, gives bytes, a bytearray or a memoryview (or a `PassError` instance, which
            becomes the result as it stands).

        Returns
        -------
        callable or None
            The handler replaced, or None; as a decorator, the function that registers.

        Raises
        ------
        ValueError
            `closure_id` is outside 0 to 2**32 - 1.
        TypeError
            `closure_id` is not an integer (a bool is refused too), or `handler` is not callable.
        """
        closure_id = _checked_id(closure_id)
        if handler is _ABSENT:

            def registering(decorated: _H) -> _H:
                self._replace(closure_id, decorated)
                return decorated

            return registering
        return self._replace(closure_id, handler)

    def _replace(self, closure_id: int, handler: Handler) -> Handler | None:
        if not callable(handler):
            raise TypeError(f"the handler for closure id {closure_id} must be callable, not {handler!r}")
        with self._changing:
            replaced = self.handlers.get(closure_id)
            self.handlers[closure_id] = handler
            self.changes += replaced is None
        return replaced

    def register_named(
        self,
        name: str,
        handler: Handler,
        *,
        queue_name: str = DEFAULT_QUEUE,
        max_concurrency: int | None = None,
    ) -> int:
        """Register `handler` under the id that is made from its name, and from `queue_name`; it replaces one of the same name.

        Parameters
        ----------
        max_concurrency : int, optional
            How many jobs of it may run at one time, in all workers of a queue directory.

        Returns
        -------
        int
            The closure id.

        Raises
        ------
        ValueError
            Another handler has the same id.
        """
        with self._changing:
            named = _Named(handler, queue_name, max_concurrency)
            ids = self._ids_of(name, named)
            for closure_id in ids:
                self._check_is_free(closure_id, name)
            self._named[name] = named
            # Those that stay are not missing for a moment: a worker may look one up just now.
            self._register_ids(name, named)
            self._drop_ids(name, ids)
        return closure_id_of(name, queue_name)

    def serve(self, queue_names: Iterable[str]) -> None:
        """Run in this process what belongs to these queues alone: each named handler in all of them, and in no other one.

        Handlers without a name belong to the queue "default".

        Raises
        ------
        ValueError
            An id that a handler would have there belongs to another one.
        """
        with self._changing:
            self._served = tuple(dict.fromkeys(queue_names))
            for name, named in self._named.items():
                for closure_id in self._ids_of(name, named):
                    self._check_is_free(closure_id, name)
                self._register_ids(name, named)

    def _ids_of(self, name: str, named: _Named) -> set[int]:
        return {closure_id_of(name, queue_name) for queue_name in (named.queue_name, *(self._served or ()))}

    def _check_is_free(self, closure_id: int, name: str) -> None:
        other = self._names.get(closure_id)
        if other == name or (other is None and closure_id not in self.handlers):
            return
        has = "under which a handler is registered already" if other is None else f"and so has {other!r}"
        raise ValueError(
            f"{name!r} has the closure id {closure_id} (the CRC-32 of its name), {has}; give one of them another name"
        )

    def _register_ids(self, name: str, named: _Named) -> None:
        home = closure_id_of(name, named.queue_name)
        for closure_id in self._ids_of(name, named):
            self._names[closure_id] = name
            self.handlers[closure_id] = named.handler
            if named.max_concurrency is not None:
                self.limits[closure_id] = Limit(home, named.max_concurrency)
            else:
                self.limits.pop(closure_id, None)
        self.changes += 1

    def _drop_ids(self, name: str, but: Set[int] = frozenset()) -> None:
        for closure_id in [one for one, other in self._names.items() if other == name and one not in but]:
            del self._names[closure_id]
            self.handlers.pop(closure_id, None)
            self.limits.pop(closure_id, None)

    def unregister(self, closure_id: int) -> Handler | None:
        """Remove the handler of `closure_id` and return it, or None where there was none. One with a name goes with all its ids.

        Calls of the handler that are running go on to their end.
        """
        closure_id = _checked_id(closure_id)
        with self._changing:
            removed = self.handlers.pop(closure_id, None)
            if closure_id in self._names:
                name = self._names[closure_id]
                self._drop_ids(name)
                del self._named[name]
            self.changes += removed is not None
        return removed

    def is_registered(self, closure_id: int) -> bool:
        """Whether a handler is registered under `closure_id`."""
        return _checked_id(closure_id) in self.handlers

    def closure_ids(self) -> frozenset[int]:
        """Return the closure ids that are run in this process: those with a handler, in the queues that it serves."""
        with self._changing:
            if self._served is None:
                return frozenset(self.handlers)
            found = {closure_id_of(name, queue_name) for name in self._named for queue_name in self._served}
            if DEFAULT_QUEUE in self._served:
                found.update(self.handlers.keys() - self._names.keys())
            return frozenset(found)

    def registered_count(self) -> int:
        """Return the number of closure ids with a handler."""
        return len(self.handlers)

    def execute(self, pass_: Pass) -> PassResult:
        """Run the handler of `pass_` in this thread.

        Parameters
        ----------
        pass_ : Pass
            The closure id and the arguments.

        Returns
        -------
        bytes or PassError
            What the handler returned. Every exception it lets out, `SystemExit` and `KeyboardInterrupt` included,
            becomes an `ExecutionError` with the text ``ClassName: message`` and the exception as its ``__cause__``,
            and so does a result of another type. `UnknownClosureId` where no handler is registered.
        """
        return self._run(pass_.closure_id, self.handlers.get(pass_.closure_id), pass_.args)

    def execute_in_place(self, closure_id: int, args: memoryview) -> PassResult:
        """As `execute`, without a copy of the arguments where the handler `takes_buffers`."""
        handler = self.handlers.get(closure_id)
        try:
            given = args if getattr(handler, "takes_buffers", False) else bytes(args)
        except MemoryError as error:
            return _execution_error(error)
        return self._run(closure_id, handler, given)

    def _run(self, closure_id: int, handler: Any, args: bytes | memoryview) -> PassResult:
        if handler is None:
            return UnknownClosureId(f"closure id {closure_id}: no handler is registered in this process")
        try:
            result = handler(args)
        except BaseException as error:
            return self.failed(error)
        return self.checked(closure_id, result)

    @staticmethod
    def checked(closure_id: int, result: object) -> PassResult:
        """Make a pass's result of what its handler has returned."""
        try:
            if type(result) is bytes or type(result) is Pieces:
                return result
            if isinstance(result, PassError):
                # Whoever sends it needs its text, and __str__ is the handler's code as well.
                str(result)
                return result
            if isinstance(result, (bytes, bytearray, memoryview)):
                return bytes(result)
            raise TypeError(f"handler {closure_id} returned {type(result).__name__}, not bytes")
        except BaseException as error:
            return _execution_error(error)

    @staticmethod
    def failed(error: BaseException) -> ExecutionError:
        """Make a pass's result of what its handler has raised."""
        return _execution_error(error)


def _checked_id(closure_id: int) -> int:
    if isinstance(closure_id, bool):
        raise TypeError(f"a closure id is an integer from 0 to {_CLOSURE_ID_END - 1}, not the bool {closure_id}")
    try:
        number = operator.index(closure_id)
    except TypeError:
        raise TypeError(
            f"a closure id is an integer from 0 to {_CLOSURE_ID_END - 1}, not {type(closure_id).__name__}"
        ) from None
    if not 0 <= number < _CLOSURE_ID_END:
        raise ValueError(f"closure id {number} is outside 0 to {_CLOSURE_ID_END - 1}")
    return number


def _execution_error(error: BaseException) -> ExecutionError:
    name = type(error).__name__
    try:
        message = str(error)
    except BaseException as unprintable:
        # __str__ is the handler's code as well, and must not end a worker either.
        message = f"(its __str__ raised {type(unprintable).__name__})"
    text = f"{name}: {message}" if message else name
    # Lone surrogates, as in the names of files that are not UTF-8, do not encode: they travel escaped.
    failure = ExecutionError(text.encode("utf-8", "backslashreplace").decode("utf-8"))
    failure.__cause__ = error
    return failure


default_registry: Final = PassRegistry()
"""The registry of the process, on which the functions of this module work."""

register = default_registry.register
unregister = default_registry.unregister
is_registered = default_registry.is_registered
registered_count = default_registry.registered_count
execute = default_registry.execute

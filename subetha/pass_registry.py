"""Which handler runs for which closure id, and the one place where a handler is called.

A handler is registered under a u32 id in every process that may run it; a `Pass` names the id and carries the argument
bytes. The module functions work on one registry of the process; `PassRegistry` is for separate ones.
"""

import operator
import threading
from collections.abc import Callable
from typing import Any, Final, TypeAlias, TypeVar, overload

from subetha._core import Pass
from subetha.errors import ExecutionError, PassError, UnknownClosureId

__all__ = [
    "Handler",
    "Pass",
    "PassRegistry",
    "PassResult",
    "default_registry",
    "execute",
    "is_registered",
    "register",
    "registered_count",
    "unregister",
]

PassResult: TypeAlias = bytes | PassError
"""What a pass comes to: the bytes of its handler, or the error in their place."""

Handler: TypeAlias = Callable[[bytes], bytes | bytearray | memoryview | PassError]
"""Takes the argument bytes of a pass, gives its result."""

_H = TypeVar("_H", bound=Handler)

_CLOSURE_ID_END = 2**32


class _Absent:
    """Stands for a handler that was not given, since None given as one is a mistake to report."""


_ABSENT: Final = _Absent()


class PassRegistry:
    """Handlers by closure id.

    Every method may be called from any thread. No lock is held while a handler runs, so a handler may itself register,
    unregister or execute.
    """

    __slots__ = ("_changing", "_handlers", "changes")

    def __init__(self) -> None:
        self._handlers: dict[int, Handler] = {}
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
            replaced = self._handlers.get(closure_id)
            self._handlers[closure_id] = handler
            self.changes += replaced is None
        return replaced

    def unregister(self, closure_id: int) -> Handler | None:
        """Remove the handler of `closure_id` and return it, or None where there was none.

        Calls of the handler that are running go on to their end.
        """
        closure_id = _checked_id(closure_id)
        with self._changing:
            removed = self._handlers.pop(closure_id, None)
            self.changes += removed is not None
        return removed

    def is_registered(self, closure_id: int) -> bool:
        """Whether a handler is registered under `closure_id`."""
        return _checked_id(closure_id) in self._handlers

    def closure_ids(self) -> frozenset[int]:
        """Return the closure ids with a handler."""
        with self._changing:
            return frozenset(self._handlers)

    def registered_count(self) -> int:
        """Return the number of closure ids with a handler."""
        return len(self._handlers)

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
        closure_id = pass_.closure_id
        handler = self._handlers.get(closure_id)
        if handler is None:
            return UnknownClosureId(f"closure id {closure_id}: no handler is registered in this process")
        try:
            result = handler(pass_.args)
            if type(result) is bytes:
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

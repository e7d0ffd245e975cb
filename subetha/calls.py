"""Calls as bytes: what a job holds that was made from a Python call, and what comes back for it.

A job's arguments are a pickle: of ``(function, args, kwargs)`` under `CALL_ID`, for any callable, or of ``(args, kwargs)``
under a task's own id; where kwargs is None, args has those of several calls, for a list of what they return. What plain pickle
would only find again in the submitter's own process (lambdas, closures, whatever `__main__` defines) goes by value, by cloudpickle.

The most frequent calls are shorter: of a function that a module has under its name (pickle would name it, too, but take as long
for that as for all the rest), or a task's, with nothing but a few numbers and texts::

    NAMED u8 | length of the name u16 | module NUL function | pickle of args
    PLAIN u8 | pickle of args

And a result that is long bytes is these, which are then copied once only::

    WHOLE u8 | bytes

Where large buffers belong to it (long bytes, numpy arrays, whatever pickles out of band), they lie behind the pickle::

    WITH_BUFFERS u8 | zeros u8 * 3 | how many u32 | pickle's length u64 | each buffer's length u64 | pickle | buffers

each buffer at a multiple of `ALIGNMENT` bytes. (A bare pickle begins with 0x80.)
"""

import pickle
import struct
import time
import traceback
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, fields
from datetime import datetime
from types import TracebackType
from typing import Any, Final, TypeAlias

from subetha._core import SubmitOptions, decode_plain, encode_plain, is_plain
from subetha.errors import CallFailed, ExecutionError, RemoteTraceback, TryAgain
from subetha.layout import PRIORITIES, align
from subetha.pass_registry import Pieces, default_registry, joined, takes_buffers

__all__ = [
    "CALL_ID",
    "Options",
    "Outcome",
    "Registered",
    "dumps",
    "encode_call",
    "failure",
    "loads",
    "outcome_of",
    "run",
]

CALL_ID: Final = 2**32 - 1
"""Closure id of a job that brings its function along."""

ALIGNMENT: Final = 64
"""Where buffers begin, in bytes, as numpy likes them."""

OUT_OF_BAND_BYTES: Final = 4096
"""A shorter buffer is copied into the pickle."""

# NAMED and PLAIN are 2 and 3.
_WITH_BUFFERS, _WHOLE = 1, 4
_PROTOCOL = 5
_HEAD = struct.Struct("<B3xIQ")
Outcome: TypeAlias = tuple[Any, BaseException | None]
"""A value and None, or None and what was raised."""


@dataclass(frozen=True, slots=True)
class Options:
    """How a job is to be run; what is None is left to whoever hands it in.

    Attributes
    ----------
    priority : int, optional
        0 (first), 1 or 2.
    timeout : float, optional
        Longest run in seconds.
    max_attempts : int, optional
        How often it may be started before its worker's death, or an exception in `retry_on`, ends it, 1 to 65,535.
    backoff : float or (float, float), optional
        For how many seconds it rests after such an attempt, doubled for each further one; and the longest rest.
    delay : float, optional
        It is not started for so many seconds after it was handed in.
    due : float or datetime, optional
        It is not started before this time: seconds since 1970, or an aware datetime.
    unique_key : str, optional
        It is not handed in while another one with this key is pending.
    result_ttl : float, optional
        For how many seconds what came of it can be fetched by its id, from any process.

    Raises
    ------
    TypeError, ValueError
        One outside its limits.
    """

    priority: int | None = None
    timeout: float | None = None
    max_attempts: int | None = None
    backoff: float | tuple[float, float] | None = None
    delay: float | None = None
    due: float | datetime | None = None
    unique_key: str | None = None
    result_ttl: float | None = None
    prepared: SubmitOptions = field(init=False, repr=False, compare=False)
    """What the queue stores with each job of them."""
    is_ordinary: bool = field(init=False, repr=False, compare=False)
    """Whether that is all: a job of them may start at once, and any number of times."""

    def __post_init__(self) -> None:
        for name, least, most in (("priority", 0, PRIORITIES - 1), ("max_attempts", 1, 65_535)):
            found = getattr(self, name)
            if found is None:
                continue
            if isinstance(found, bool) or not isinstance(found, int):
                raise TypeError(f"{name}: expected an int from {least} to {most}, found {type(found).__name__}")
            if not least <= found <= most:
                raise ValueError(f"{name}: expected an int from {least} to {most}, found {found}")
        if self.unique_key is not None and not isinstance(self.unique_key, str):
            raise TypeError(f"unique_key: expected a str, found {type(self.unique_key).__name__}")
        _check_seconds("timeout", self.timeout)
        _check_seconds("result_ttl", self.result_ttl)
        if self.delay != 0:
            _check_seconds("delay", self.delay)
        rests: tuple[object, ...] = self.backoff if isinstance(self.backoff, tuple) else (self.backoff,)
        for seconds in rests:
            _check_seconds("backoff", seconds)
        if isinstance(self.backoff, tuple) and (len(rests) != 2 or not self.backoff[0] <= self.backoff[1]):
            raise ValueError(f"backoff: expected (first, longest) with first <= longest, found {self.backoff}")
        if self.due is not None:
            if self.delay is not None:
                raise ValueError(f"expected delay or due, found both: {self.delay} and {self.due}")
            if isinstance(self.due, bool) or not isinstance(self.due, (int, float, datetime)):
                raise TypeError(f"due: expected seconds since 1970 or a datetime, found {type(self.due).__name__}")
            if isinstance(self.due, datetime) and self.due.utcoffset() is None:
                raise ValueError(
                    f"due: expected a datetime with a time zone, found {self.due}; for local time: due.astimezone()"
                )
        prepared = SubmitOptions(
            1 if self.priority is None else self.priority,
            self.timeout,
            self.max_attempts or 3,
            self.backoff,
            self.result_ttl,
        )
        object.__setattr__(self, "prepared", prepared)
        object.__setattr__(self, "is_ordinary", self.delay is None and self.due is None and self.unique_key is None)

    def __reduce__(self) -> tuple[type["Options"], tuple[Any, ...]]:
        return Options, tuple(getattr(self, name) for name in _OPTION_NAMES)

    def over(self, others: "Options") -> "Options":
        """Fill in from `others` what is None here; of `delay` and `due` the one that is here replaces both."""
        found = {name: getattr(self, name) for name in _OPTION_NAMES}
        has_time = self.delay is not None or self.due is not None
        for name, value in found.items():
            if value is None and not (has_time and name in ("delay", "due")):
                found[name] = getattr(others, name)
        return Options(**found)

    def due_now(self) -> float | datetime | None:
        """Tell when a job that is handed in now may start; None: at once."""
        return self.due if self.delay is None else time.time() + self.delay


def _check_seconds(name: str, seconds: object) -> None:
    if seconds is None:
        return
    if isinstance(seconds, bool) or not isinstance(seconds, (int, float)):
        raise TypeError(f"{name}: expected seconds, found {type(seconds).__name__}")
    if not seconds > 0:
        raise ValueError(f"{name}: expected seconds > 0, found {seconds}")


_OPTION_NAMES: Final = tuple(one.name for one in fields(Options) if one.init)


class Registered:
    """A function that jobs name by a number, where the workers have imported its module; `tasks.Task` is one.

    Attributes
    ----------
    name, queue_name : str
    closure_id : int
        u32.
    home_id : int
        The same, in the queue that the function itself names.
    job_options : Options
    queue_name : str
    max_concurrency : int or None
        How many of it may run at one time; who does not run it under its own number cannot see to that.
    retry_on : tuple of exception types
        Those of its exceptions after which it is to be tried again.
    """

    name: str
    queue_name: str
    closure_id: int
    home_id: int
    max_concurrency: int | None
    job_options: Options
    retry_on: tuple[type[BaseException], ...]
    __module__: str

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        raise NotImplementedError


def keep_memory_warm() -> None:
    """Let the C library keep some 60 MB of what is freed: arguments and results come and go, and fresh pages cost more than copies.

    glibc learns how much to keep from the longest piece of memory that was freed (up to 32 MiB). Not touched, that costs nothing.
    """
    bytes(31 * 2**20)


class _Long:
    """Stands for long bytes in a pickle, so that they can lie out of band."""

    __slots__ = ("data",)

    def __init__(self, data: bytes) -> None:
        self.data = data

    def __reduce_ex__(self, _protocol: object) -> tuple[type[bytes], tuple[pickle.PickleBuffer]]:
        return bytes, (pickle.PickleBuffer(self.data),)


def _set_long_aside(value: object) -> object:
    return _Long(value) if type(value) is bytes and len(value) >= OUT_OF_BAND_BYTES else value


def dumps(value: object) -> bytes | Pieces:
    """Pickle a value, so that another process can make it again.

    Where long buffers belong to it they are not copied: what comes back refers to them.

    Parameters
    ----------
    value : object
        Anything that pickle or cloudpickle takes.

    Raises
    ------
    Exception
        What cloudpickle, or the value's own methods, raise where it cannot be pickled.
    """
    buffers: list[memoryview] = []

    def is_in_band(buffer: pickle.PickleBuffer) -> bool:
        raw = buffer.raw()
        if raw.nbytes < OUT_OF_BAND_BYTES:
            return True
        buffers.append(raw)
        return False

    try:
        data = pickle.dumps(value, _PROTOCOL, buffer_callback=is_in_band)
        goes_by_value = b"__main__" in data
    except Exception:
        # What it cannot do cloudpickle may; and where that cannot either, its error says more.
        goes_by_value = True
    if goes_by_value:
        # Late, since it takes as long to import as much of the rest.
        import cloudpickle

        buffers.clear()
        data = cloudpickle.dumps(value, _PROTOCOL, buffer_callback=is_in_band)
    return _in_pieces(data, buffers) if buffers else data


def _in_pieces(data: bytes, buffers: Sequence[memoryview]) -> Pieces:
    pieces = Pieces(
        (
            _HEAD.pack(_WITH_BUFFERS, len(buffers), len(data)),
            struct.pack(f"<{len(buffers)}Q", *(buffer.nbytes for buffer in buffers)),
            data,
        )
    )
    at = _HEAD.size + 8 * len(buffers) + len(data)
    for buffer in buffers:
        pieces += (bytes(align(at, ALIGNMENT) - at), buffer)
        at = align(at, ALIGNMENT) + buffer.nbytes
    return pieces


def loads(data: bytes | bytearray | memoryview, *, is_writable: bool = False) -> Any:
    """Make a value again that `dumps` has pickled; its buffers stay where they are, read-only, and keep `data` alive.

    Parameters
    ----------
    data : bytes-like
    is_writable : bool
        Copy them where `data` cannot be written to, so that they can.

    Raises
    ------
    Exception
        Whatever a class of the value raises, or an import.
    """
    if data and data[0] == _WHOLE:
        return bytes(memoryview(data)[1:])
    if not data or data[0] != _WITH_BUFFERS:
        return pickle.loads(data)
    _, count, length = _HEAD.unpack_from(data)
    lengths = struct.unpack_from(f"<{count}Q", data, _HEAD.size)
    view = memoryview(data)
    is_copied = is_writable and view.readonly
    at = _HEAD.size + 8 * count
    pickled = view[at : at + length]
    at += length
    buffers: list[bytearray | memoryview] = []
    for length in lengths:
        at = align(at, ALIGNMENT)
        part = view[at : at + length]
        buffers.append(bytearray(part) if is_copied else part)
        at += length
    if at != len(data):
        raise ValueError(f"expected {at} bytes of a pickle and its buffers, found {len(data)}")
    return pickle.loads(pickled, buffers=buffers)


def encode_call(
    function: Callable[..., object] | None, args: tuple[Any, ...], kwargs: Mapping[str, object] | None
) -> bytes | Pieces:
    """Pickle a call: with its function for `CALL_ID`, without (None) for a task. Without `kwargs`: one with each of `args`."""
    if not kwargs and kwargs is not None:
        plain = encode_plain(function, args)
        if plain is not None:
            return plain
    args = tuple(map(_set_long_aside, args))
    return dumps((args, kwargs) if function is None else (function, args, kwargs))


@takes_buffers
def _run_call(data: bytes | memoryview) -> bytes | Pieces | CallFailed:
    return run(None, data)


def run(function: Registered | None, data: bytes | memoryview) -> bytes | Pieces | CallFailed:
    """Run a job: unpickle what it holds, call, pickle what comes of it.

    Parameters
    ----------
    function : Registered, optional
        None: `data` brings the function.

    Returns
    -------
    bytes, Pieces or CallFailed
        The value, or what was raised: anything at all, `SystemExit` and `KeyboardInterrupt` included; `TryAgain` where the
        function is to be tried again after that.
    """
    kind = CallFailed
    kwargs: Mapping[str, Any] | None = {}
    try:
        plain = decode_plain(function, data)
        if plain is not None:
            called, args = plain
        else:
            *brought, args, kwargs = loads(data)
            (called,) = brought or (function,)
        retry_on = called.retry_on if isinstance(called, Registered) else ()
        try:
            value = [called(*items) for items in args] if kwargs is None else called(*args, **kwargs)
        except retry_on:
            # not for what cannot be unpickled or pickled: it never will be
            kind = TryAgain
            raise
        if is_plain(value):
            return pickle.dumps(value, _PROTOCOL)
        if type(value) is bytes and len(value) >= OUT_OF_BAND_BYTES:
            return Pieces((bytes((_WHOLE,)), value))
        return dumps(value)
    except BaseException as error:
        return failure(error, kind)


def failure(error: BaseException, kind: type[CallFailed] = CallFailed) -> CallFailed:
    """Make what travels in the place of a value: the exception, where it can be pickled, its text and its traceback."""
    text = "".join(traceback.format_exception_only(error)).strip()
    trace = "".join(traceback.format_exception(type(error), error, _below_this_module(error.__traceback__)))
    try:
        pickled = joined(dumps(error))
    except Exception as unpickled:
        pickled = b""
        text += f" (it could not be pickled: {type(unpickled).__name__}: {unpickled})"
    return kind(text, joined(dumps((trace, pickled))))


def _below_this_module(trace: TracebackType | None) -> TracebackType | None:
    """Leave out the first frames, which are of how the function came to be called."""
    while trace is not None and trace.tb_next is not None and trace.tb_frame.f_code.co_filename == __file__:
        trace = trace.tb_next
    return trace


def outcome_of(result: bytes | bytearray | BaseException) -> Outcome:
    """Make of a job's result what its caller gets; what cannot be unpickled becomes an `ExecutionError`.

    Parameters
    ----------
    result : bytes or PassError
        As `SubmittedResult.result` has it. Or any other exception, which is what the caller gets then.

    Returns
    -------
    value, exception
        One of them None.
    """
    try:
        if not isinstance(result, BaseException):
            return loads(result, is_writable=True), None
        if not isinstance(result, CallFailed):
            return None, result
        text = str(result)
        trace, pickled = loads(result.data)
    except (Exception, SystemExit) as error:
        return None, _unreadable("the result of this job could not be unpickled", error)
    try:
        raised = loads(pickled) if pickled else ExecutionError(text)
        if not isinstance(raised, BaseException):
            raise TypeError(f"expected an exception, found {type(raised).__name__}")
    except (Exception, SystemExit) as error:
        raised = _unreadable(text, error)
    raised.__cause__ = RemoteTraceback(trace)
    return None, raised


def _unreadable(text: str, error: BaseException) -> ExecutionError:
    made = ExecutionError(f"{text} ({type(error).__name__}: {error})")
    made.__cause__ = error
    return made


default_registry.register(CALL_ID, _run_call)

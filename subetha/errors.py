"""Every exception that Subetha raises, below one root.

Each also derives from what a caller already catches (`queue.Full`, `queue.Empty`, `ValueError`), and each message
carries the values: what was expected, what was found, what to do.
"""

import queue
from concurrent.futures import BrokenExecutor


class SubethaError(Exception):
    """Root of all errors of this package."""


class LayoutMismatch(SubethaError):
    """A file is not what was asked for: wrong magic, version, kind, size, checksum or owner."""


class TransportError(SubethaError):
    """A message could not be moved through a ring or a queue."""


class Full(TransportError, queue.Full):
    """No room at the moment; the message says which limit was hit."""


class MapFull(Full):
    """A map holds as many keys as it may; the message says how many that is, and what holds them."""


class Empty(TransportError, queue.Empty):
    """Nothing to take at the moment."""


class PayloadTooLarge(TransportError, ValueError):
    """A payload is longer than the cells of this file."""


class NotOwner(TransportError):
    """A push or pop of a deque by somebody who is not its owner; the message says who is."""


class ArenaFull(TransportError):
    """No block of the size asked for is left, or the disk is full."""


class ArenaTooSmall(ArenaFull, PayloadTooLarge):
    """A payload is longer than the largest block of the arena, so that waiting does not help."""


class UnknownJob(TransportError, KeyError):
    """No cell of a queue has this job, or a result of it that is kept."""

    def __str__(self) -> str:
        # a KeyError's would be the repr
        return Exception.__str__(self)


class HeartbeatError(SubethaError):
    """A heartbeat table refused a registration or a slot."""


class TableFull(HeartbeatError):
    """Every slot of the heartbeat table is taken."""


class SchedError(SubethaError):
    """The scheduler refused a pass, a result or a transport."""


class ArgsTooLarge(SchedError, ValueError):
    """The arguments of a pass do not fit the submit transport."""


class UnsupportedTransportFamily(SchedError):
    """This kind of transport cannot do what was asked of it."""


class PassError(SubethaError):
    """A pass ran to an error instead of a result."""


class UnknownClosureId(PassError, LookupError):
    """No handler is registered under this closure id."""


class ExecutionError(PassError):
    """A handler raised; the text begins with the class name of what it raised."""


class CallFailed(ExecutionError):
    """A call raised; `data` is its exception, pickled, and the text what can be read without that.

    Parameters
    ----------
    text : str
    data : bytes
    """

    def __init__(self, text: str, data: bytes = b"") -> None:
        super().__init__(text)
        self.data = data

    def __reduce__(self) -> tuple[type["CallFailed"], tuple[str, bytes]]:
        return type(self), (str(self), self.data)


class TryAgain(CallFailed):
    """As `CallFailed`, of a job that is to be tried again: the answer only where that was its last attempt."""


class RemoteTraceback(Exception):
    """Cause of an exception that came from another process: its traceback there, as text.

    Attributes
    ----------
    tb : str
    """

    def __init__(self, tb: str) -> None:
        super().__init__(tb)
        self.tb = tb

    def __str__(self) -> str:
        return f'\n"""\n{self.tb}"""'


class WorkerDied(PassError, BrokenExecutor):
    """The worker that ran a job died, in the last of the attempts that the job was allowed."""


class JobTimeout(PassError, TimeoutError):
    """A job ran longer than its timeout allowed, and was ended."""


class JobCancelled(PassError):
    """A job was cancelled while it ran; whether it had done anything by then is not known."""


class ResultTooLarge(SchedError, PassError):
    """A result does not fit the result transport; it reaches the submitter in place of the result."""

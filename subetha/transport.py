"""What a transport of messages has to offer, and the adapters that make up for what it does not.

A transport moves frames of bytes. `PlainTransport` is the least the engine works with, `MessageTransport` is what it
wants: with claims, so that a message stays where it is until it is answered. Beyond that a transport may have, and only
this module looks for them:

``push(payload, timeout)``, ``pop(timeout)``, ``claim(timeout)``
    Blocking calls: they wait at most `timeout` seconds on the monotonic clock (None = for ever, 0 = not at all) and
    then raise `Full` or `Empty`. Where one is missing, `adapt` polls.
``pop_many(n)``
    Up to `n` messages at once.
``steal(timeout)``, ``steal_many(n)``
    Where a transport has these they stand for `pop` and `pop_many`: its own `pop` is something else (a deque's takes what
    was pushed last, and is the owner's alone).
``payload_bytes``
    The longest message it takes, in bytes; None or absent where it names no limit.
``claims_reply``
    True where a claim's `reply` reaches the submitter by itself. The others are paired with a transport that carries
    the results (`PairedSource`).
"""

import math
import time
from collections.abc import Callable, Iterator
from typing import Any, Protocol, TypeAlias, TypeVar, runtime_checkable

from subetha.errors import Empty, Full, UnsupportedTransportFamily

__all__ = [
    "AdaptedTransport",
    "BlockingTransport",
    "Claim",
    "ClaimSource",
    "MessageTransport",
    "PairedClaim",
    "PairedSource",
    "Payload",
    "PlainTransport",
    "PoppedClaim",
    "adapt",
    "backoff",
    "blocking_claim",
    "check_plain",
    "claims_reply",
    "deadline",
    "payload_limit",
    "poll",
    "pop_up_to",
    "reply_limit",
]

Payload: TypeAlias = bytes | bytearray | memoryview
"""A message on its way in: any of these, contiguous."""

Clock: TypeAlias = Callable[[], float]
Sleep: TypeAlias = Callable[[float], object]

T = TypeVar("T")

FIRST_PAUSE_S = 50e-6
LONGEST_PAUSE_S = 10e-3
REPLY_WAIT_S = 0.1


@runtime_checkable
class Claim(Protocol):
    """A message that is held: it stays in its transport, where nobody else gets it, until the claim ends.

    `reply`, `ack` and `release` end the claim, each once; a call that raises leaves it as it was.
    """

    @property
    def payload(self) -> memoryview:
        """The message, readable until the claim ends."""

    def started(self) -> object:
        """Say that the work begins: from now on a death of this process counts as an attempt."""

    def reply(self, payload: Payload, /) -> object:
        """Answer the message and take it out of the transport.

        Raises
        ------
        Full
            No room for the answer, also after a bounded wait. The claim is still held: reply again, or release.
        ArenaFull
            No memory for an answer of this length. The claim is still held.
        UnsupportedTransportFamily
            This transport has no way back.
        """

    def ack(self) -> object:
        """Take the message out of the transport without an answer."""

    def release(self) -> object:
        """Put the message back for somebody else, not counted as an attempt."""


@runtime_checkable
class PlainTransport(Protocol):
    """The least that a transport has: messages go in and come out, at once or not at all."""

    def try_push(self, payload: Payload, /) -> int | None:
        """Put a message in; `Full` where there is no room.

        A transport that numbers its messages itself gives back the number.
        """

    def try_pop(self) -> bytes:
        """Take the next message out; `Empty` where there is none."""


@runtime_checkable
class ClaimSource(Protocol):
    """Where messages are claimed from."""

    def try_claim(self) -> Claim:
        """Claim the next message; `Empty` where there is none."""


@runtime_checkable
class MessageTransport(PlainTransport, ClaimSource, Protocol):
    """A transport with claims. `Full` and `Empty` are raised; None never stands for "nothing there"."""


@runtime_checkable
class BlockingTransport(MessageTransport, Protocol):
    """A transport with the blocking calls as well; `timeout` is in seconds, None waits for ever."""

    def push(self, payload: Payload, timeout: float | None = None, /) -> int | None:
        """Put a message in, waiting for room; `Full` at the timeout."""

    def pop(self, timeout: float | None = None, /) -> bytes:
        """Take the next message out, waiting for one; `Empty` at the timeout."""

    def claim(self, timeout: float | None = None, /) -> Claim:
        """Claim the next message, waiting for one; `Empty` at the timeout."""


def check_plain(transport: object, place: str) -> None:
    """Raise `UnsupportedTransportFamily` unless `transport` is a `PlainTransport`; `place` names it in the message."""
    missing = [name for name in ("try_push", "try_pop") if not callable(getattr(transport, name, None))]
    if missing:
        raise UnsupportedTransportFamily(
            f"the {place} transport, a {type(transport).__name__}, has no {' and no '.join(missing)};"
            " a transport needs try_push(payload) and try_pop()"
        )


def native_pop(transport: object) -> Callable[..., bytes] | None:
    """Return the call of `transport` that takes the next message out, waiting so many seconds; None where it has none."""
    call: Callable[..., bytes] | None = getattr(transport, "steal", None) or getattr(transport, "pop", None)
    return call


def payload_limit(transport: object) -> int | None:
    """Return the longest message `transport` takes, in bytes, or None where it names no limit."""
    limit: int | None = getattr(transport, "payload_bytes", None)
    return limit


def claims_reply(source: object) -> bool:
    """Whether the claims of `source` carry their reply to the submitter by themselves."""
    return bool(getattr(source, "claims_reply", False))


def reply_limit(source: object) -> int | None:
    """Return the longest reply a claim of `source` takes, in bytes, or None where there is no limit."""
    limit: int | None = getattr(source, "reply_bytes", payload_limit(source))
    return limit


def deadline(timeout: float | None, clock: Clock) -> float:
    """Return the time on `clock` at which `timeout` seconds from now are over.

    Raises
    ------
    ValueError
        `timeout` is negative or not a number.
    """
    if timeout is None:
        return math.inf
    if not timeout >= 0:
        raise ValueError(f"timeout must be None or at least 0 seconds, not {timeout!r}")
    return clock() + timeout


def backoff() -> Iterator[float]:
    """Yield the pauses (s) between two looks at a transport that wakes nobody: 50 us, doubling up to 10 ms."""
    pause = FIRST_PAUSE_S
    while True:
        yield pause
        pause = min(2 * pause, LONGEST_PAUSE_S)


def poll(
    attempt: Callable[[], T],
    refusal: type[Full] | type[Empty],
    timeout: float | None,
    *,
    clock: Clock = time.monotonic,
    sleep: Sleep = time.sleep,
) -> T:
    """Call `attempt` until it no longer raises `refusal`, sleeping between the calls.

    Parameters
    ----------
    attempt : callable
        Called at least once, and once more when the time is over.
    refusal : type
        `Full` or `Empty`; anything else that `attempt` raises passes.
    timeout : float or None
        Seconds, None for ever; the last refusal is raised then.
    clock, sleep : callable
        The time in seconds, and a sleep of so many.
    """
    end = deadline(timeout, clock)
    pauses = backoff()
    while True:
        try:
            return attempt()
        except refusal:
            left = end - clock()
            if left <= 0:
                raise
        sleep(min(next(pauses), left))


class PoppedClaim:
    """The claim of a transport that has none: its message is out already, and lost if this process dies (at most once).

    `release` pushes it back, at the end of the queue, and raises `Full` where others have taken its room meanwhile: the
    claim is then still held, so that a caller can try again or finish the job after all. It has no way back for a
    reply.
    """

    __slots__ = ("_payload", "_transport")

    def __init__(self, transport: PlainTransport, payload: bytes) -> None:
        self._transport = transport
        self._payload: bytes | None = payload

    @property
    def payload(self) -> memoryview:
        """The message."""
        return memoryview(self._held())

    def _held(self) -> bytes:
        if self._payload is None:
            raise ValueError("this claim has ended: it was answered, acknowledged or released before")
        return self._payload

    def started(self) -> None:
        """Do nothing but check that the claim is held: there is nowhere to count attempts."""
        self._held()

    def reply(self, payload: Payload, /) -> None:
        """Raise `UnsupportedTransportFamily`."""
        self._held()
        raise UnsupportedTransportFamily(
            f"a {type(self._transport).__name__} has no way back for a reply of {len(payload)} bytes;"
            " pair it with a result transport (PairedSource)"
        )

    def ack(self) -> None:
        """End the claim; the message is out of the transport already."""
        self._held()
        self._payload = None

    def release(self) -> None:
        """Push the message back; `Full` where there is no room, and the claim is then still held."""
        self._transport.try_push(self._held())
        self._payload = None


class AdaptedTransport:
    """A transport with all its calls made up where it lacks them; see `adapt`."""

    def __init__(self, transport: PlainTransport, *, clock: Clock = time.monotonic, sleep: Sleep = time.sleep) -> None:
        check_plain(transport, "adapted")
        self._transport = transport
        self._clock = clock
        self._sleep = sleep
        self._native_push: Callable[..., int | None] | None = getattr(transport, "push", None)
        self._native_pop = native_pop(transport)
        self._native_try_claim: Callable[[], Claim] | None = getattr(transport, "try_claim", None)
        self._native_claim: Callable[..., Claim] | None = getattr(transport, "claim", None)
        self.payload_bytes = payload_limit(transport)
        self.claims_reply = self._native_try_claim is not None and claims_reply(transport)

    def _poll(self, attempt: Callable[[], T], refusal: type[Full] | type[Empty], timeout: float | None) -> T:
        return poll(attempt, refusal, timeout, clock=self._clock, sleep=self._sleep)

    def try_push(self, payload: Payload, /) -> int | None:
        """Put a message in; `Full` where there is no room."""
        return self._transport.try_push(payload)

    def try_pop(self) -> bytes:
        """Take the next message out; `Empty` where there is none."""
        return self._transport.try_pop()

    def try_claim(self) -> Claim:
        """Claim the next message, or take it out as a `PoppedClaim`; `Empty` where there is none."""
        if self._native_try_claim is not None:
            return self._native_try_claim()
        return PoppedClaim(self._transport, self._transport.try_pop())

    def push(self, payload: Payload, timeout: float | None = None, /) -> int | None:
        """Put a message in, waiting for room; `Full` at the timeout."""
        if self._native_push is not None:
            return self._native_push(payload, timeout)
        return self._poll(lambda: self._transport.try_push(payload), Full, timeout)

    def pop(self, timeout: float | None = None, /) -> bytes:
        """Take the next message out, waiting for one; `Empty` at the timeout."""
        if self._native_pop is not None:
            return self._native_pop(timeout)
        return self._poll(self._transport.try_pop, Empty, timeout)

    def claim(self, timeout: float | None = None, /) -> Claim:
        """Claim the next message, waiting for one; `Empty` at the timeout."""
        if self._native_claim is not None:
            return self._native_claim(timeout)
        if self._native_try_claim is not None:
            return self._poll(self._native_try_claim, Empty, timeout)
        return PoppedClaim(self._transport, self.pop(timeout))

    def pop_many(self, n: int, /) -> list[bytes]:
        """Take up to `n` messages out, as many as are there now."""
        return pop_up_to(self._transport, n)


def adapt(transport: PlainTransport, *, clock: Clock = time.monotonic, sleep: Sleep = time.sleep) -> BlockingTransport:
    """Return `transport` itself if it has claims and blocking calls, else an adapter that makes up for what is missing.

    Parameters
    ----------
    transport : PlainTransport
        Stays the caller's: nothing here closes it.
    clock, sleep : callable
        What the polling calls wait by; seconds.

    Raises
    ------
    UnsupportedTransportFamily
        `transport` lacks try_push or try_pop.
    """
    if isinstance(transport, BlockingTransport) and not hasattr(transport, "steal"):
        return transport
    return AdaptedTransport(transport, clock=clock, sleep=sleep)


def blocking_claim(
    source: ClaimSource, *, clock: Clock = time.monotonic, sleep: Sleep = time.sleep
) -> Callable[[float | None], Claim]:
    """Return the call that claims from `source`, waiting at most so many seconds: its own, or one that polls."""
    native: Callable[[float | None], Claim] | None = getattr(source, "claim", None)
    if native is not None:
        return native
    return lambda timeout: poll(source.try_claim, Empty, timeout, clock=clock, sleep=sleep)


def pop_up_to(transport: PlainTransport, n: int) -> list[bytes]:
    """Take up to `n` messages out of `transport`, as many as are there now; [] where there are none.

    Raises
    ------
    ValueError
        `n` is negative.
    """
    if n < 0:
        raise ValueError(f"the number of messages must be at least 0, not {n}")
    native: Callable[[int], list[bytes]] | None = getattr(transport, "steal_many", None) or getattr(
        transport, "pop_many", None
    )
    if native is not None:
        return native(n)
    payloads: list[bytes] = []
    while len(payloads) < n:
        try:
            payloads.append(transport.try_pop())
        except Empty:
            break
        except Exception:
            # The messages taken out so far exist nowhere else: they are handed out, the next call meets the error.
            if not payloads:
                raise
            break
    return payloads


class PairedClaim:
    """A claim of one transport whose reply goes into another.

    `reply` pushes first and acknowledges then: a death in between makes the job run twice, never lose its result.
    """

    __slots__ = ("_claim", "_push", "_wait")

    def __init__(self, claim: Claim, push: Callable[[Payload, float], object], wait: float) -> None:
        self._claim = claim
        self._push = push
        self._wait = wait

    @property
    def payload(self) -> memoryview:
        """The message."""
        return self._claim.payload

    def started(self) -> object:
        """Say that the work begins."""
        return self._claim.started()

    def reply(self, payload: Payload, /) -> None:
        """Push `payload` into the result transport, then acknowledge the message.

        Raises
        ------
        Full
            The result transport had no room for the whole of the wait. The claim is still held.
        """
        self._push(payload, self._wait)
        self._claim.ack()

    def ack(self) -> object:
        """Take the message out without an answer."""
        return self._claim.ack()

    def release(self) -> object:
        """Put the message back."""
        return self._claim.release()


class PairedSource:
    """A source of claims that reply, made of a transport of jobs and one of results.

    Parameters
    ----------
    source, result : PlainTransport
        Where the jobs come from and where the results go; two different transports.
    reply_wait : float
        How long a reply waits for room, in seconds, before it raises `Full`: the steps in which a worker with a full
        result side looks whether it is to stop.
    clock, sleep : callable
        What polling waits by, where a transport has no blocking calls.
    """

    claims_reply = True

    def __init__(
        self,
        source: PlainTransport,
        result: PlainTransport,
        *,
        reply_wait: float = REPLY_WAIT_S,
        clock: Clock = time.monotonic,
        sleep: Sleep = time.sleep,
    ) -> None:
        check_plain(source, "submit")
        check_plain(result, "result")
        if source is result:
            raise ValueError("the submit and the result transport are the same; results would be run as passes")
        adapted: Any = adapt(source, clock=clock, sleep=sleep)
        self._try_claim: Callable[[], Claim] = adapted.try_claim
        self._claim: Callable[[float | None], Claim] = adapted.claim
        self._push: Callable[[Payload, float], object] = adapt(result, clock=clock, sleep=sleep).push
        self._reply_wait = reply_wait
        self.reply_bytes = payload_limit(result)

    def try_claim(self) -> PairedClaim:
        """Claim the next job; `Empty` where there is none."""
        return PairedClaim(self._try_claim(), self._push, self._reply_wait)

    def claim(self, timeout: float | None = None, /) -> PairedClaim:
        """Claim the next job, waiting for one; `Empty` at the timeout."""
        return PairedClaim(self._claim(timeout), self._push, self._reply_wait)

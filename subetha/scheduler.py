"""The worker loop, and a scheduler that runs it in a thread of this process.

`WorkerLoop` is the one loop that turns messages into results: `BackgroundScheduler` runs it in a thread,
`subetha.worker` in the main thread of a worker process. `Submitter` and `ResultCollector` are the two ends that a
client holds; each works on any transport.
"""

import operator
import os
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable
from contextlib import ExitStack, suppress
from types import TracebackType
from typing import Protocol, Self, runtime_checkable

from subetha._core import (
    HeartbeatTable,
    JobClaim,
    MappedPayload,
    OrdinaryJobs,
    Pass,
    SharedDeque,
    SharedRing,
    SubmittedResult,
    WorkState,
)
from subetha.dispatcher import MmfDispatcher, MmfFamily, MmfWorkloadShape
from subetha.errors import (
    ArenaFull,
    Empty,
    ExecutionError,
    Full,
    MapFull,
    PayloadTooLarge,
    ResultTooLarge,
    SchedError,
    TransportError,
    TryAgain,
    UnsupportedTransportFamily,
)
from subetha.failover import FailoverWatchdog, ReclaimReport
from subetha.layout import MAX_CELLS, MAX_PARTICIPANTS, MIN_CELLS, Role
from subetha.pass_registry import PassRegistry, PassResult, Pieces, default_registry, joined
from subetha.sidecar import AdaptiveInstance, HandshakeHeader, NoMigrationPolicy, ObservationRing, Policy, WaitingPolicy
from subetha.transport import (
    LONGEST_PAUSE_S,
    Claim,
    ClaimSource,
    Clock,
    PairedSource,
    Payload,
    PlainTransport,
    Sleep,
    adapt,
    backoff,
    blocking_claim,
    check_plain,
    claims_reply,
    deadline,
    payload_limit,
    pop_up_to,
    reply_limit,
)
from subetha.wire import (
    STATUS_ERROR,
    SUBMIT_HEADER_BYTES,
    decode_result,
    decode_submit,
    encode_result,
    encode_submit,
    submit_token,
)

__all__ = ["BackgroundScheduler", "ResultCollector", "Submitter", "WorkerLoop"]

# A worker in a blocked claim, or a submitter waiting for room, looks this often (s) whether it is to stop.
STOP_CHECK_S = 0.1

# So often (s) a worker that a stop wakes looks whether anything else is new: handlers, or jobs that it has answered for others.
IDLE_S = 1.9

# So long (s) a worker waits for room in the arena before its result becomes an error.
ARENA_PATIENCE_S = 10.0

# A job with a longer frame is read where it lies, in a mapping of its own, which then costs less than a copy.
MAPPED_BYTES = 2**17

# So many claims in a row that the transport fails with a TransportError end a worker loop.
CLAIM_FAILURES_LIMIT = 100

# A worker loop has one job in hand at a time, and beneath it those that wait for others: a bit of its slot's bitmap each.
IN_FLIGHT_BIT = 0
DEEPEST = 32

# What the jobs that run in this process read where it lies.
_in_place: list[MappedPayload] = []


def _before_fork() -> None:
    # The child may outlive the job, and nobody would see to it that what it has of this stays as it is.
    for mapped in _in_place.copy():
        mapped.keep()


os.register_at_fork(before=_before_fork)

CLOSURE_ID_BYTES = 4
_LAST_TOKEN = 2**32 - 1

# Of a result frame, behind the token.
_STATUS_AT = 4


class InFlightTable(Protocol):
    """What a worker loop tells of itself; a `HeartbeatTable` does it."""

    def mark_in_flight(self, slot: int, bit: int, /) -> object:
        """Say that a job is in hand."""

    def clear_in_flight(self, slot: int, bit: int, /) -> object:
        """Say that it no longer is."""

    def add_completed(self, slot: int, /) -> object:
        """Count a job as completed."""


@runtime_checkable
class Router(Protocol):
    """A source that leaves what its worker does not run to others; a queue's submit side does it."""

    @property
    def unknown_answered(self) -> int:
        """How many passes it has answered itself, since nobody runs them."""

    def runs(self, closure_ids: Iterable[int] | None, known: Iterable[int] | None = None, /) -> object:
        """Claim only passes with these closure ids, and let others know of those in `known`, or of these."""

    def take_place(self, closure_id: int, places: int, /) -> int | None:
        """Take one of the places that all have together for this closure id; None where none is free."""

    def give_place(self, closure_id: int, place: int, /) -> object:
        """Give it back."""


@runtime_checkable
class HasOrdinaryJobs(Protocol):
    """A source whose ordinary messages the core runs by itself; a queue's submit side."""

    def ordinary_jobs(
        self, state: WorkState, registry: PassRegistry, table: HeartbeatTable | None, slot: int, most: int, /
    ) -> OrdinaryJobs:
        """Make what runs those of at most so many bytes."""


class WorkerLoop(WorkState):
    """Claims passes, runs them and replies, until it is told to stop.

    An exception of a handler becomes the result of its pass, whatever its class; it never ends the loop.

    While the result side is full the loop waits with the answer in hand. Told to stop in that state, it tries for the
    time of one more reply and then releases the claim, so that the pass runs again later: nothing is dropped. A
    transport that has no claims is popped (at most once), and its message is pushed back in place of the release;
    should both sides be full at that moment, the loop goes on trying both, since what it holds exists nowhere else.

    Parameters
    ----------
    source : ClaimSource
        Its claims must carry their replies (``claims_reply``): a queue's submit side, or a `PairedSource`.
    registry : PassRegistry, optional
        Where the handlers are looked up; the registry of the process by default.
    table : InFlightTable, optional
        Told of the job in hand and of each one completed.
    slot : int, optional
        The slot in `table` of this loop; given exactly if `table` is.
    between : callable, optional
        Called after each message, before the next one is claimed.
    routes : bool
        Claim only passes that have a handler in `registry`, and tell so: `source` is a queue's submit side. A pass without a
        handler is then left to other workers, and answered with UnknownClosureId where none has registered one for long.
        Otherwise it is answered so at once. Handlers that are registered later count from the next claim on. Only so
        the limits of handlers (`max_concurrency`) hold.
    clock, sleep : callable
        The time in seconds and a sleep, for what has to be polled.

    Attributes
    ----------
    claim : Claim or None
        What is in hand; for the thread that runs the loop.
    completed : int
        Passes answered, errors included. Written by the thread that runs the loop.
    failed : int
        Those of them that were answered with an error.
    malformed : int
        Messages that were no passes: answered with an error where a token could be read, else acknowledged. Also those
        that the transport itself found damaged (TransportError at the claim).
    released : int
        Passes that ran, but were put back because the result side was full when the loop had to stop.
    retried : int
        Passes that ran and were put back to be tried again (`TryAgain`).
    lost : int
        Passes whose claim was taken away while they ran: somebody else has the job, so the result is dropped.

    Raises
    ------
    UnsupportedTransportFamily
        The claims of `source` do not reply.
    ValueError
        One of `table` and `slot` is given without the other.
    """

    __slots__ = (
        "_at_limit",
        "_between",
        "_bit",
        "_claim",
        "_clock",
        "_limit",
        "_limits_again",
        "_ordinary",
        "_place",
        "_registry",
        "_router",
        "_sleep",
        "_slot",
        "_table",
        "_told",
        "_unknown",
    )

    def __init__(
        self,
        source: ClaimSource,
        *,
        registry: PassRegistry | None = None,
        table: InFlightTable | None = None,
        slot: int | None = None,
        between: Callable[[], object] | None = None,
        routes: bool = False,
        clock: Clock = time.monotonic,
        sleep: Sleep = time.sleep,
    ) -> None:
        if not claims_reply(source):
            raise UnsupportedTransportFamily(
                f"the claims of a {type(source).__name__} have no way back for a result;"
                " pair it with a result transport: PairedSource(submit, result)"
            )
        if (table is None) != (slot is None):
            raise ValueError(f"table and slot go together; found table={table!r} and slot={slot!r}")
        if routes and not isinstance(source, Router):
            raise UnsupportedTransportFamily(
                f"a {type(source).__name__} cannot leave passes to other workers; route over a queue's submit side"
            )
        self._claim = blocking_claim(source, clock=clock, sleep=sleep)
        self._registry = default_registry if registry is None else registry
        self._router = source if routes and isinstance(source, Router) else None
        # Of the registry's changes, and of the passes that the source has answered itself: how many were seen.
        self._told = -1
        self._unknown = 0 if self._router is None else self._router.unknown_answered
        # Closure ids that are not claimed now, since as many run as may, and when to look again.
        self._at_limit: set[int] = set()
        self._limits_again = 0.0
        # What the claim in hand has of such places.
        self._place: tuple[int, int] | None = None
        self._limit = reply_limit(source)
        self._table = table
        self._slot = -1 if slot is None else slot
        self._clock = clock
        self._sleep = sleep
        self._bit = IN_FLIGHT_BIT
        self._between = between
        self._ordinary: OrdinaryJobs | None = None
        if isinstance(source, HasOrdinaryJobs) and (table is None or isinstance(table, HeartbeatTable)):
            self._ordinary = source.ordinary_jobs(self, self._registry, table, self._slot, MAPPED_BYTES)

    @property
    def stopping(self) -> bool:
        """Whether `stop` was called."""
        return self._stopping

    def stop(self) -> None:
        """Let `run` return once the job in hand is done; it claims no other. Idempotent, returns at once.

        Safe from any thread and from a signal handler: it takes no lock. A loop that waits for a message notices at once
        where the core waits for it, else within 0.1 s.
        """
        self._stopping = True
        if self._ordinary is not None:
            self._ordinary.wake()

    def rest(self) -> None:
        """Let go the memory that is kept for the next message, where there is any."""
        if self._ordinary is not None:
            self._ordinary.rest()

    def run(self) -> None:
        """Serve until `stop`, in the calling thread. A stopped loop does not start again.

        Raises
        ------
        TransportError
            100 claims in a row failed with it. A single one is counted as a malformed message.
        Exception
            What the transport or the table raised: the source was closed without `stop` (ValueError), the disk failed
            (OSError). A claim in hand was released before.
        """
        serve = self._serve
        failures = 0
        while not self._stopping:
            try:
                claim = self._work()
            except Empty:
                failures = 0
                self.rest()
                continue
            except TransportError:
                failures += 1
                self.malformed += 1
                if failures == CLAIM_FAILURES_LIMIT:
                    raise
                self._sleep(LONGEST_PAUSE_S)
                continue
            except ValueError:
                # Whoever stops the loop may close the source without waiting for it.
                if self.stopping:
                    return
                raise
            failures = 0
            if claim is None:
                continue
            serve(claim)
            # Held over the wait for the next one, it would keep the last message's memory.
            del claim
            if self._between is not None:
                self._between()

    def serve_one(self) -> bool:
        """Run one message that waits, if there is one, in a handler of this loop's thread: while that waits for another one.

        Returns
        -------
        bool
            False where none waits, the loop is to stop, or `DEEPEST` handlers wait in each other already.
        """
        if self._stopping or self._bit + 1 >= DEEPEST:
            return False
        try:
            claim = self._claim_next(0)
        except Empty:
            return False
        self._bit += 1
        try:
            self._serve(claim)
        finally:
            self._bit -= 1
        return True

    def _work(self) -> Claim | None:
        """Run jobs as long as they are ordinary ones; the first that is not, or None: there may be something else to do."""
        if self._ordinary is None:
            return self._claim_next(STOP_CHECK_S)
        if self._router is not None:
            self._route(self._router)
            if self._registry.limits:
                return self._claim_next(STOP_CHECK_S)
        return self._ordinary.run(IDLE_S, self._between)

    def _claim_next(self, timeout: float) -> Claim:
        router = self._router
        if router is None:
            return self._claim(timeout)
        self._route(router)
        claim = self._claim(timeout)
        if self._registry.limits and not self._has_place(router, claim):
            raise Empty("as many jobs of it run as may")
        return claim

    def _route(self, router: Router) -> None:
        """Tell of the handlers that there are now; count what was answered since none has one."""
        changes = self._registry.changes
        if self._at_limit and self._clock() >= self._limits_again:
            self._at_limit.clear()
            self._told = -1
        if changes != self._told:
            known = self._registry.closure_ids()
            # Where no room is left to tell of all, they are run here all the same.
            with suppress(MapFull):
                router.runs(known - self._at_limit, known)
            self._told = changes
        answered = router.unknown_answered
        for _ in range(answered - self._unknown):
            self.completed += 1
            self.failed += 1
            if self._table is not None:
                self._table.add_completed(self._slot)
        self._unknown = answered

    def _has_place(self, router: Router, claim: Claim) -> bool:
        """Take one of the places where only so many may run; where none is free leave the job to others, and do not claim more."""
        # no more of it: the rest may be long, or malformed
        limit = self._registry.limits.get(int.from_bytes(claim.payload[:CLOSURE_ID_BYTES], "little"))
        if limit is None:
            return True
        place = None
        try:
            # What cannot be counted is not run.
            with suppress(MapFull):
                place = router.take_place(*limit)
        finally:
            if place is None:
                assert isinstance(claim, JobClaim)
                # taken away meanwhile it goes on elsewhere, too
                with suppress(TransportError):
                    claim.leave_to_others()
        if place is not None:
            self._place = limit.closure_id, place
            return True
        self._at_limit.update(one for one, other in self._registry.limits.items() if other == limit)
        self._limits_again = self._clock() + STOP_CHECK_S
        self._told = -1
        return False

    def _serve(self, claim: Claim) -> None:
        place, self._place = self._place, None
        try:
            self._run(claim)
        finally:
            if place is not None:
                assert self._router is not None
                self._router.give_place(*place)
                # what waits for it comes next
                self._limits_again = 0.0

    def _run(self, claim: Claim) -> None:
        beneath, self.claim = self.claim, claim
        try:
            try:
                claim.started()
                try:
                    token, result = self._execute(claim)
                except TransportError as error:
                    self._answer_malformed(claim, error)
                    return
            except BaseException as error:
                self._give_up(claim, error)
                return
            self._end(claim, token, result)
        finally:
            self.claim = beneath

    def _end(self, claim: Claim, token: int, result: PassResult | None, error: Exception | None = None) -> None:
        """Answer with the result, or go on after `error`, which the first try has raised; without a result the start has."""
        try:
            if error is not None and result is None:
                raise error
            self._answer(claim, token, result, error)
        except BaseException as raised:
            self._give_up(claim, raised)

    def _answer(self, claim: Claim, token: int, result: PassResult | None, error: Exception | None) -> None:
        assert result is not None
        if isinstance(result, TryAgain) and isinstance(claim, JobClaim) and claim.retry():
            self.retried += 1
            self._clear_in_flight()
            return
        frame = self._frame_of(token, result, claim)
        answer: bytes | Pieces | None = frame
        try:
            if error is not None:
                raise error
            _reply(claim, frame)
        except Exception as refusal:
            answer = self._deliver_after(refusal, claim, token, frame)
        self._clear_in_flight()
        if answer is None:
            self.released += 1
            return
        if self._table is not None:
            self._table.add_completed(self._slot)
        self.completed += 1
        # what is in pieces is a value
        if isinstance(answer, bytes) and answer[_STATUS_AT] & STATUS_ERROR:
            self.failed += 1

    def _give_up(self, claim: Claim, error: BaseException) -> None:
        """Count the claim as lost where it was taken away meanwhile; else release it, and raise `error`."""
        is_lost = _lost_after(error, claim)
        if not is_lost or not isinstance(error, TransportError):
            raise error
        self.lost += 1
        self._clear_in_flight()

    def _clear_in_flight(self) -> None:
        if self._table is not None:
            self._table.clear_in_flight(self._slot, self._bit)

    def _execute(self, claim: Claim) -> tuple[int, PassResult]:
        """Run what a claim holds; its token (a queue's jobs need none), and the result. `TransportError` where it is malformed."""
        payload = claim.payload
        mapped = None
        try:
            if isinstance(claim, JobClaim) and len(payload) >= MAPPED_BYTES:
                mapped = claim.map_payload()
            if mapped is None:
                token, pass_ = decode_submit(payload)
        except MemoryError as error:
            # The job is too long for this worker, which goes on with others; released it would come again.
            return submit_token(payload) or 0, ExecutionError(f"MemoryError: no room for the job's arguments: {error}")
        self._mark_in_flight()
        if mapped is not None:
            return 0, self._execute_in_place(mapped)
        return token, self._registry.execute(pass_)

    def _mark_in_flight(self) -> None:
        if self._table is not None:
            self._table.mark_in_flight(self._slot, self._bit)

    def _execute_in_place(self, mapped: MappedPayload) -> PassResult:
        view = mapped.view()
        closure_id = int.from_bytes(view[:CLOSURE_ID_BYTES], "little")
        _in_place.append(mapped)
        try:
            result = self._registry.execute_in_place(closure_id, view[SUBMIT_HEADER_BYTES:])
        finally:
            _in_place.remove(mapped)
        del view
        # What is in use still, as an array that the handler has put somewhere, stays as it is when the block is another job's.
        mapped.keep()
        return result

    def _frame_of(self, token: int, result: PassResult, claim: Claim) -> bytes | Pieces:
        if isinstance(result, Pieces):
            if isinstance(claim, JobClaim):
                return result
            result = joined(result)
        return encode_result(token, result, self._limit)

    def _answer_malformed(self, claim: Claim, error: TransportError) -> None:
        self.malformed += 1
        token = submit_token(claim.payload)
        if token is None:
            claim.ack()
            return
        frame = encode_result(token, ExecutionError(f"malformed: {error}"), self._limit)
        self._reply_until_stopped(claim, frame)

    def _deliver_after(
        self, error: Exception, claim: Claim, token: int, frame: bytes | Pieces
    ) -> bytes | Pieces | None:
        """Go on after the first reply raised `error`: the frame that went out, or None where the claim is released."""
        if isinstance(error, PayloadTooLarge):
            frame = encode_result(token, ResultTooLarge(str(error)), self._limit)
        elif not isinstance(error, (ArenaFull, Full)):
            raise error
        try:
            return frame if self._reply_until_stopped(claim, frame) else None
        except ArenaFull as still_full:
            frame = encode_result(token, ResultTooLarge(str(still_full)), self._limit)
            return frame if self._reply_until_stopped(claim, frame) else None

    def _reply_until_stopped(self, claim: Claim, frame: bytes | Pieces) -> bool:
        """Reply, waiting for room; False where the loop was stopped meanwhile and the claim is released.

        For room in the arena `ARENA_PATIENCE_S` at the most: what fills it may be results that nobody collects.
        """
        pauses = backoff()
        patient_until = self._clock() + ARENA_PATIENCE_S
        while True:
            # Read before the attempt: a stop in the middle of it leaves the answer one whole reply more.
            stopping = self._stopping
            try:
                _reply(claim, frame)
                return True
            except (ArenaFull, Full) as error:
                if stopping and _released(claim):
                    return False
                if isinstance(error, ArenaFull) and self._clock() >= patient_until:
                    raise
            # A reply may raise Full without having waited.
            self._sleep(next(pauses))


def _reply(claim: Claim, frame: bytes | Pieces) -> None:
    if isinstance(frame, Pieces):
        assert isinstance(claim, JobClaim)
        claim.reply_in_pieces(frame)
    else:
        claim.reply(frame)


def _released(claim: Claim) -> bool:
    try:
        claim.release()
    except Full:
        return False
    return True


def _lost_after(error: BaseException, claim: Claim) -> bool:
    """Release after `error`, noting in it where that fails; whether the claim was over or taken away."""
    try:
        claim.release()
    except Exception as unreleased:
        error.add_note(f"the claim in hand could not be released: {type(unreleased).__name__}: {unreleased}")
        return not isinstance(unreleased, Full)
    return False


class Submitter:
    """Puts passes into a submit transport. One may be shared by any number of threads.

    Two submitters on one transport count their tokens apart and so use the same ones; whoever has to tell their results
    apart shares one submitter (`BackgroundScheduler.submitter` gives all callers the same), or uses a queue, which
    numbers the passes itself.

    Parameters
    ----------
    transport : PlainTransport
        Where the passes go; stays the caller's.
    first_token : int
        The token to begin with, 1 to 2**32 - 1.
    clock, sleep : callable
        The time in seconds and a sleep, for what has to be polled.
    """

    def __init__(
        self,
        transport: PlainTransport,
        *,
        first_token: int = 1,
        clock: Clock = time.monotonic,
        sleep: Sleep = time.sleep,
    ) -> None:
        check_plain(transport, "submit")
        if not 1 <= first_token <= _LAST_TOKEN:
            raise ValueError(f"first_token must be from 1 to {_LAST_TOKEN}, not {first_token}")
        blocking = adapt(transport, clock=clock, sleep=sleep)
        self._try_push: Callable[[Payload], int | None] = blocking.try_push
        self._push: Callable[[Payload, float], int | None] = blocking.push
        self._limit = payload_limit(transport)
        self._clock = clock
        self._next_token = first_token
        self._numbering = threading.Lock()
        self._refusal: Callable[[], Exception] | None = None

    def submit(self, pass_: Pass, timeout: float | None = None) -> int:
        """Submit `pass_` and return its token, under which the result will come.

        Parameters
        ----------
        pass_ : Pass
            What to run.
        timeout : float, optional
            Seconds to wait for room; None waits for ever, 0 not at all.

        Returns
        -------
        int
            The token, 1 to 2**32 - 1: counted up by one for each submit, and from the last one to 1. Where the
            transport numbers its messages itself, the low half of its number.

        Raises
        ------
        Full
            No room at the timeout; the pass was not submitted.
        ArgsTooLarge
            The arguments do not fit the transport.
        ValueError
            The submitter, its scheduler or its transport is closed, or `timeout` is negative.
        SchedError
            The worker thread of the scheduler has ended with the error that is the cause of this one.
        """
        if self._refusal is not None:
            raise self._refusal()
        end = deadline(timeout, self._clock)
        with self._numbering:
            token = self._next_token
            self._next_token = token + 1 if token < _LAST_TOKEN else 1
        frame = encode_submit(pass_.closure_id, token, pass_.args, self._limit)
        try:
            number = self._try_push(frame)
        except Full:
            number = self._push_when_room(frame, end)
        return token if number is None else number & _LAST_TOKEN

    def _push_when_room(self, frame: bytes, end: float) -> int | None:
        while True:
            left = end - self._clock()
            try:
                return self._push(frame, min(max(left, 0.0), STOP_CHECK_S))
            except Full:
                if self._refusal is not None:
                    raise self._refusal() from None
                if left <= STOP_CHECK_S:
                    raise

    def refuse(self, reason: Callable[[], Exception]) -> None:
        """Let every `submit` from now on, and each that waits for room, raise ``reason()``."""
        self._refusal = reason

    def close(self) -> None:
        """Let `submit` raise ValueError from now on. The transport stays open. Idempotent, from any thread."""
        self.refuse(lambda: ValueError("submit on a closed submitter"))


class ResultCollector:
    """Takes results out of a result transport. One may be shared by any number of threads; each result goes to one.

    Parameters
    ----------
    transport : PlainTransport
        Where the results come from; stays the caller's.
    clock, sleep : callable
        The time in seconds and a sleep, for what has to be polled.
    """

    def __init__(self, transport: PlainTransport, *, clock: Clock = time.monotonic, sleep: Sleep = time.sleep) -> None:
        check_plain(transport, "result")
        blocking = adapt(transport, clock=clock, sleep=sleep)
        self._transport = blocking
        self._try_pop: Callable[[], bytes] = blocking.try_pop
        self._pop: Callable[[float | None], bytes] = blocking.pop
        # Frames that came out in one batch with a malformed one: its error must not swallow them.
        self._popped: deque[bytes] = deque()

    def _kept(self) -> bytes | None:
        if not self._popped:
            return None
        try:
            return self._popped.popleft()
        except IndexError:
            # Another thread had the last one.
            return None

    def try_recv(self) -> SubmittedResult:
        """Return the next result.

        Raises
        ------
        Empty
            There is none at the moment.
        TransportError
            The next message was no result; it is taken out.
        ValueError
            The transport is closed.
        """
        kept = self._kept()
        return decode_result(self._try_pop() if kept is None else kept)

    def recv(self, timeout: float | None = None) -> SubmittedResult:
        """Return the next result, waiting for it `timeout` seconds at most (None = for ever).

        Raises
        ------
        Empty
            None came in time.
        TransportError
            The next message was no result; it is taken out.
        ValueError
            The transport is or gets closed.
        """
        kept = self._kept()
        return decode_result(self._pop(timeout) if kept is None else kept)

    def recv_many(self, n: int) -> list[SubmittedResult]:
        """Return up to `n` results, as many as are there now; [] where there are none.

        Raises
        ------
        TransportError
            The next message was no result; it is taken out. One further back ends the list before it.
        ValueError
            `n` is negative, or the transport is closed.
        """
        n = operator.index(n)
        frames: deque[bytes] = deque()
        while len(frames) < n and (kept := self._kept()) is not None:
            frames.append(kept)
        if not frames:
            frames.extend(pop_up_to(self._transport, n))
        results: list[SubmittedResult] = []
        while frames:
            frame = frames.popleft()
            try:
                results.append(decode_result(frame))
            except TransportError:
                if results:
                    frames.appendleft(frame)
                self._popped.extendleft(reversed(frames))
                if not results:
                    raise
                break
        return results


class BackgroundScheduler:
    """One worker thread between a submit and a result transport.

    Made by `start` (two rings in files), `start_by_workload_shape` (rings or deques in files) or
    `start_with_transports`; closed by `close` or at the end of a ``with``. The handlers come from the registry of the
    process unless another one is given. Over two separate transports delivery is at least once: a pass whose result was
    delivered just before a death runs, and is delivered, again.

    The thread is a daemon: a scheduler that nobody closed does not keep its process alive.

    Parameters
    ----------
    submit, result : PlainTransport
        Where the passes come from and where the results go.
    table : HeartbeatTable
        Where the worker registers.
    registry : PassRegistry, optional
        Where the handlers are looked up.
    owned : ExitStack, optional
        Closed with the scheduler; on an exception of this call it stays the caller's.
    """

    def __init__(
        self,
        submit: PlainTransport,
        result: PlainTransport,
        table: HeartbeatTable,
        *,
        registry: PassRegistry | None = None,
        owned: ExitStack | None = None,
    ) -> None:
        check_plain(submit, "submit")
        check_plain(result, "result")
        if submit is result:
            raise ValueError("the submit and the result transport are the same; results would be run as passes")
        claiming = adapt(submit)
        source: ClaimSource = claiming if claims_reply(claiming) else PairedSource(submit, result)
        self._table = table
        self._pid = os.getpid()
        # How the worker waits is the strategy of the handle that it claims through; other transports have none.
        self._waits_at = submit if isinstance(submit, AdaptiveInstance) else None
        self._header = HandshakeHeader() if self._waits_at is None else self._waits_at.header
        self._ring = ObservationRing() if self._waits_at is None else self._waits_at.ring
        self._submitter = Submitter(submit)
        self._collector = ResultCollector(result)
        self._error: BaseException | None = None
        self._unraised: BaseException | None = None
        self._tearing_down = threading.Lock()
        self._torn_down = False
        self._owned = ExitStack()
        self._slot = table.register(self._pid, Role.WORKER, auto_beat=True)
        try:
            self._loop = WorkerLoop(source, registry=registry, table=table, slot=self._slot)
            self._thread = threading.Thread(target=self._work, name=f"subetha-worker-{self._slot}", daemon=True)
            self._thread.start()
        except BaseException:
            table.unregister(self._slot)
            raise
        if owned is not None:
            self._owned = owned.pop_all()

    @classmethod
    def start(
        cls,
        submit_path: str | os.PathLike[str],
        result_path: str | os.PathLike[str],
        heartbeat_path: str | os.PathLike[str],
        capacity: int,
        heartbeat_capacity: int,
        *,
        registry: PassRegistry | None = None,
    ) -> Self:
        """Open two rings and a heartbeat table, creating those that are missing, and start the worker.

        Parameters
        ----------
        submit_path, result_path, heartbeat_path : path
            Three different files.
        capacity : int
            Cells of each ring, for what waits and what is claimed: a power of two from 2 to 2**20.
        heartbeat_capacity : int
            Participants: 1 to 65,534.
        registry : PassRegistry, optional
            Where the handlers are looked up; the registry of the process by default.

        Raises
        ------
        ValueError
            A capacity is outside its limits, or two of the paths are the same.
        LayoutMismatch
            A file exists and is something else.
        TableFull
            No slot is left in the table. Whatever was opened is closed again, here as after every other error.
        """
        _check_paths(submit_path, result_path, heartbeat_path)
        _check_capacity(capacity)
        _check_heartbeat_capacity(heartbeat_capacity)
        with ExitStack() as owned:
            submit = owned.enter_context(SharedRing.open_or_create(submit_path, capacity))
            result = owned.enter_context(SharedRing.open_or_create(result_path, capacity))
            table = owned.enter_context(HeartbeatTable.open_or_create(heartbeat_path, heartbeat_capacity))
            return cls(submit, result, table, registry=registry, owned=owned)

    @classmethod
    def start_by_workload_shape(
        cls,
        submit_path: str | os.PathLike[str],
        submit_shape: MmfWorkloadShape,
        result_path: str | os.PathLike[str],
        result_shape: MmfWorkloadShape,
        heartbeat_path: str | os.PathLike[str],
        capacity: int,
        heartbeat_capacity: int,
        *,
        registry: PassRegistry | None = None,
    ) -> tuple[Self, MmfFamily, MmfFamily]:
        """Open what `MmfDispatcher` picks for the two shapes and a heartbeat table, creating what is missing, and start.

        Who opens a deque how follows from who pushes, since only its owner can:

        - The worker pushes the results. It owns a result deque from the start to the close; whoever collects in another
          process opens it as a thief (`SharedDeque.open_as_thief`). Two schedulers cannot share a result deque, as
          they can a ring.
        - The worker steals the passes and never has to own a submit deque. Its owner is whoever submits first, through
          `submitter` of this scheduler or a handle of `SharedDeque.open` anywhere; or who has created the file before.
          Until that one has closed its handle or died, `submit` from anywhere else raises NotOwner.

        Parameters
        ----------
        submit_path, result_path, heartbeat_path : path
            Three different files. Those that exist are opened with all that they hold, and never made anew.
        submit_shape, result_shape : MmfWorkloadShape
            How passes are submitted, how results are collected.
        capacity : int
            Cells of each ring or deque: a power of two from 2 to 2**20.
        heartbeat_capacity : int
            Participants: 1 to 65,534.
        registry : PassRegistry, optional
            Where the handlers are looked up; the registry of the process by default.

        Returns
        -------
        scheduler : BackgroundScheduler
        submit_family, result_family : MmfFamily
            What was picked.

        Raises
        ------
        UnsupportedTransportFamily
            A shape calls for a hash map, which moves no messages. No file was made.
        NotOwner
            Somebody else owns the result deque.
        LayoutMismatch
            A file exists and is something else, for instance a ring where a deque was picked.
        ValueError, TableFull
            As for `start`.
        """
        submit_family = _pick_transport("submit", submit_shape)
        result_family = _pick_transport("result", result_shape)
        _check_paths(submit_path, result_path, heartbeat_path)
        _check_capacity(capacity)
        _check_heartbeat_capacity(heartbeat_capacity)
        with ExitStack() as owned:
            submit = _open_transport(submit_family, submit_path, capacity, pushed_by_worker=False)
            owned.enter_context(submit)
            result = _open_transport(result_family, result_path, capacity, pushed_by_worker=True)
            owned.enter_context(result)
            table = owned.enter_context(HeartbeatTable.open_or_create(heartbeat_path, heartbeat_capacity))
            return cls(submit, result, table, registry=registry, owned=owned), submit_family, result_family

    @classmethod
    def start_with_transports(
        cls,
        submit: PlainTransport,
        result: PlainTransport,
        heartbeat_path: str | os.PathLike[str],
        heartbeat_capacity: int,
        *,
        registry: PassRegistry | None = None,
    ) -> Self:
        """Start the worker between two transports, which stay the caller's: `close` leaves them open.

        Where the claims of `submit` carry their replies themselves (``claims_reply``), the worker does not write into
        `result`; it is then only what the collector reads. A transport without claims is popped: what it gave is lost
        if this process dies.

        Parameters
        ----------
        submit, result : PlainTransport
            Two different transports.
        heartbeat_path : path
            Of the heartbeat table, created if missing.
        heartbeat_capacity : int
            Participants: 1 to 65,534.
        registry : PassRegistry, optional
            Where the handlers are looked up; the registry of the process by default.

        Raises
        ------
        UnsupportedTransportFamily
            A transport lacks try_push or try_pop.
        ValueError
            `submit` and `result` are the same, or the capacity is outside its limits.
        LayoutMismatch, TableFull
            As for `start`.
        """
        check_plain(submit, "submit")
        check_plain(result, "result")
        _check_heartbeat_capacity(heartbeat_capacity)
        with ExitStack() as owned:
            table = owned.enter_context(HeartbeatTable.open_or_create(heartbeat_path, heartbeat_capacity))
            return cls(submit, result, table, registry=registry, owned=owned)

    @property
    def error(self) -> BaseException | None:
        """What ended the worker thread before `close` did, or None."""
        return self._error

    def submitter(self) -> Submitter:
        """Return the submitter; the same one for all callers, so that no token is used twice."""
        return self._submitter

    def collector(self) -> ResultCollector:
        """Return the collector; the same one for all callers.

        Results that nobody collected stay in the result transport when the scheduler closes.
        """
        return self._collector

    def heartbeat(self) -> HeartbeatTable:
        """Return the heartbeat table, open until `close`."""
        return self._table

    def slot_idx(self) -> int:
        """Return the worker's slot in the heartbeat table."""
        return self._slot

    def watchdog_scan(self) -> ReclaimReport:
        """Begin the next epoch of the heartbeat table and report who has fallen silent with work in hand.

        This process is never judged. A dead participant's claims need no scan: whoever uses the same transports moves
        them on (see `SharedRing.rescue`).

        Returns
        -------
        ReclaimReport
            See `FailoverWatchdog.scan`; the grace is one epoch.
        """
        return FailoverWatchdog(self.heartbeat(), spared_pid=os.getpid(), ring=self._ring).scan()

    @property
    def header(self) -> HandshakeHeader:
        """How the worker waits for passes: the header of the submit transport, where that has one."""
        return self._header

    @property
    def ring(self) -> ObservationRing:
        """What is done: the observations of the submit transport, where that has some, and of the scans."""
        return self._ring

    def make_policy(self) -> Policy:
        """Return a policy for how the worker waits; one that leaves it alone where the transport has no such strategies."""
        return NoMigrationPolicy() if self._waits_at is None else WaitingPolicy()

    def apply_migration(self, new_tag: int) -> bool | None:
        """Change how the worker waits (`sidecar.WAIT_SLEEP`, `WAIT_BRIEF`, `WAIT_SPIN`).

        Returns
        -------
        bool
            False where that is not possible at the moment.

        Raises
        ------
        ValueError
            No such strategy.
        UnsupportedTransportFamily
            The submit transport has no strategies.
        """
        if self._waits_at is None:
            raise UnsupportedTransportFamily(
                "this scheduler's submit transport waits in one way only; it cannot be changed"
            )
        return self._waits_at.apply_migration(new_tag)

    def close(self, timeout: float | None = None) -> None:
        """Stop the worker, wait until it has finished the job in hand, and close what `start` opened.

        Idempotent, from any thread, also from several at once and from a handler (which then does not wait for itself).
        Submitting raises ValueError from now on, also where a submit waits for room. With a full result side the
        worker gives the job in hand back to the submit side within a fraction of a second. Results that were not
        collected stay in the result transport.

        Parameters
        ----------
        timeout : float, optional
            Seconds to wait for the job in hand; None waits for ever.

        Raises
        ------
        TimeoutError
            The worker is still busy. It ends, and what was opened is closed, as soon as its job does; close() again
            waits for that.
        SchedError
            The worker thread had ended with an error before, which is the cause of this one. Everything is closed
            nevertheless, and it is raised once.
        """
        end = deadline(timeout, time.monotonic)
        self._submitter.close()
        self._loop.stop()
        if threading.current_thread() is self._thread:
            return
        self._thread.join(min(max(end - time.monotonic(), 0.0), threading.TIMEOUT_MAX))
        if self._thread.is_alive():
            raise TimeoutError(
                f"the worker thread (slot {self._slot}) is still busy with a pass after {timeout} s;"
                " it closes when that ends, and close() again waits for it"
            )
        self._tear_down()
        with self._tearing_down:
            error, self._unraised = self._unraised, None
        if error is not None:
            raise self._worker_error() from error

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close()

    def _work(self) -> None:
        try:
            try:
                self._loop.run()
            finally:
                if self._loop.stopping:
                    # A close that timed out, or came from a handler, has left this to the worker.
                    self._tear_down()
        except BaseException as error:
            self._error = self._unraised = error
            if not self._loop.stopping:
                self._submitter.refuse(self._worker_error)

    def _worker_error(self) -> SchedError:
        failure = SchedError(
            f"the worker thread (slot {self._slot}) ended with {type(self._error).__name__}: {self._error};"
            " no pass is run any more: close this scheduler and start another"
        )
        failure.__cause__ = self._error
        return failure

    def _tear_down(self) -> None:
        with self._tearing_down:
            if self._torn_down:
                return
            self._torn_down = True
            # Again: a worker that died meanwhile may have put its own refusal in the place of this one.
            self._submitter.close()
            with self._owned:
                # In a forked child the slot is still the parent's.
                if os.getpid() == self._pid:
                    self._table.unregister(self._slot)


def _pick_transport(place: str, shape: MmfWorkloadShape) -> MmfFamily:
    family = MmfDispatcher.pick(shape)
    if family == MmfFamily.SHARED_HASH_MAP:
        raise UnsupportedTransportFamily(
            f"the {place} shape, {shape!r}, calls for {family!r}, which moves no messages;"
            " a scheduler works over StreamingMpmc and WorkStealing"
        )
    return family


def _open_transport(
    family: MmfFamily, path: str | os.PathLike[str], capacity: int, *, pushed_by_worker: bool
) -> SharedDeque | SharedRing:
    if not isinstance(family, MmfFamily.SharedDeque):
        return SharedRing.open_or_create(path, capacity)
    # Closed at once: who creates a deque is its owner, and that one is to be whoever pushes.
    SharedDeque.open_or_create(path, capacity).close()
    opened = SharedDeque.open_or_create(path, capacity)
    if pushed_by_worker:
        try:
            # Now, while the caller can be told: the worker's first reply would find no way out of it.
            opened.own()
        except BaseException:
            opened.close()
            raise
    return opened


def _check_paths(
    submit_path: str | os.PathLike[str], result_path: str | os.PathLike[str], heartbeat_path: str | os.PathLike[str]
) -> None:
    paths = {
        "submit_path": os.path.realpath(submit_path),
        "result_path": os.path.realpath(result_path),
        "heartbeat_path": os.path.realpath(heartbeat_path),
    }
    if len(set(paths.values())) < len(paths):
        raise ValueError(f"three different files are needed; found {paths}")


def _check_capacity(capacity: int) -> None:
    # Before any file is made: rings and deques would check it too, the second of them with the first already there.
    if not MIN_CELLS <= capacity <= MAX_CELLS or capacity & (capacity - 1):
        raise ValueError(f"capacity must be a power of two from {MIN_CELLS} to {MAX_CELLS}, not {capacity}")


def _check_heartbeat_capacity(heartbeat_capacity: int) -> None:
    if not 1 <= heartbeat_capacity <= MAX_PARTICIPANTS:
        raise ValueError(f"heartbeat_capacity must be from 1 to {MAX_PARTICIPANTS}, not {heartbeat_capacity}")

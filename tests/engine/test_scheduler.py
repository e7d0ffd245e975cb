"""The worker loop, the two ends a client holds, and the scheduler that runs the loop in a thread."""

import collections
import contextlib
import gc
import os
import signal
import subprocess
import sys
import textwrap
import threading
import weakref

import pytest

import subetha.scheduler
from subetha._core import HeartbeatTable, Pass, SharedDeque, SharedRing
from subetha.dispatcher import DequeVariant, MmfFamily, MmfWorkloadShape, WorkloadShape
from subetha.errors import (
    ArenaFull,
    ArenaTooSmall,
    ArgsTooLarge,
    CallFailed,
    Empty,
    ExecutionError,
    Full,
    LayoutMismatch,
    NotOwner,
    PassError,
    PayloadTooLarge,
    ResultTooLarge,
    SchedError,
    TableFull,
    TransportError,
    UnknownClosureId,
    UnsupportedTransportFamily,
)
from subetha.layout import Role
from subetha.pass_registry import PassRegistry
from subetha.scheduler import BackgroundScheduler, ResultCollector, Submitter, WorkerLoop
from subetha.transport import PairedSource
from subetha.wire import MAX_ARG_LEN, MAX_RESULT_LEN, decode_result, decode_submit, encode_result, encode_submit

WAIT_S = 30
ECHO, RAISE, BLOCK, LONG, EXIT = 1, 2, 3, 4, 5


class DequeTransport:
    """A transport in this process's memory, without claims or blocking calls."""

    def __init__(self, capacity=1000):
        self.capacity = capacity
        self.messages = collections.deque()
        self.changing = threading.Lock()

    def try_push(self, payload):
        with self.changing:
            if len(self.messages) >= self.capacity:
                raise Full(f"all {self.capacity} places are taken")
            self.messages.append(bytes(payload))

    def try_pop(self):
        with self.changing:
            if not self.messages:
                raise Empty("no message")
            return self.messages.popleft()


class ScriptedClaim:
    """A claim that replies by itself, writes down what is done with it, and raises what the script says."""

    def __init__(self, frame, log, reply_errors=()):
        self.frame = frame
        self.log = log
        self.reply_errors = list(reply_errors)
        self.replies = []

    @property
    def payload(self):
        return memoryview(self.frame)

    def started(self):
        self.log.append("started")

    def reply(self, payload):
        if self.reply_errors:
            error = self.reply_errors.pop(0)
            self.log.append(f"reply raises {type(error).__name__}")
            raise error
        self.log.append("reply")
        self.replies.append(decode_result(payload))

    def ack(self):
        self.log.append("ack")

    def release(self):
        self.log.append("release")


class ScriptedSource:
    """Gives its claims, or raises those that are exceptions; then stops the loop, or raises `at_end`."""

    claims_reply = True

    def __init__(self, *claims, at_end=None):
        self.claims = list(claims)
        self.at_end = at_end
        self.loop = None

    def try_claim(self):
        return self.claim(0)

    def claim(self, timeout):
        assert 0 < timeout <= 0.5
        if self.claims:
            claim = self.claims.pop(0)
            if isinstance(claim, Exception):
                raise claim
            return claim
        if self.at_end is not None:
            raise self.at_end
        self.loop.stop()
        raise Empty("the script is over")


class TableLog:
    def __init__(self, log):
        self.log = log

    def mark_in_flight(self, slot, bit):
        self.log.append(f"mark {slot}")

    def clear_in_flight(self, slot, bit):
        self.log.append(f"clear {slot}")

    def add_completed(self, slot):
        self.log.append(f"completed {slot}")


class Gate:
    """Holds a handler until it is opened."""

    def __init__(self):
        self.inside = threading.Event()
        self.opened = threading.Event()

    def handler(self, args):
        self.inside.set()
        assert self.opened.wait(WAIT_S)
        return b"through " + args


@pytest.fixture
def gate():
    gate = Gate()
    yield gate
    gate.opened.set()


@pytest.fixture
def registry(gate):
    registry = PassRegistry()
    registry.register(ECHO, bytes.upper)
    registry.register(BLOCK, gate.handler)
    registry.register(LONG, lambda args: bytes(int(args)))

    @registry.register(RAISE)
    def raising(args):
        raise ValueError(args.decode())

    @registry.register(EXIT)
    def leaving(args):
        raise {b"exit": SystemExit, b"interrupt": KeyboardInterrupt, b"generator": GeneratorExit}[args](3)

    return registry


@pytest.fixture
def paths(tmp_path):
    return [tmp_path / name for name in ("submit", "result", "table")]


@pytest.fixture
def scheduler(paths, registry):
    with BackgroundScheduler.start(*paths, 64, 8, registry=registry) as scheduler:
        yield scheduler


def in_thread(call):
    """Run `call` in a thread; the function returned waits for what it gives or raises."""
    outcome = []

    def run():
        try:
            outcome.append((call(), None))
        except BaseException as error:
            outcome.append((None, error))

    thread = threading.Thread(target=run, daemon=True)
    thread.start()

    def result():
        thread.join(WAIT_S)
        assert not thread.is_alive(), "the call still blocks"
        given, error = outcome[0]
        if error is not None:
            raise error
        return given

    return result


def run_loop(*claims, registry, at_end=None, **options):
    source = ScriptedSource(*claims, at_end=at_end)
    loop = source.loop = WorkerLoop(source, registry=registry, **options)
    loop.run()
    return loop


def submit_frame(closure_id, args=b"", token=9):
    return encode_submit(closure_id, token, args)


# --- the worker loop ------------------------------------------------------------------------------------------------


def test_one_pass_is_started_marked_run_replied_cleared_and_counted_in_this_order(registry):
    log = []
    registry.register(ECHO, lambda args: (log.append("run"), args.upper())[1])
    claim = ScriptedClaim(submit_frame(ECHO, b"abc"), log)
    loop = run_loop(claim, registry=registry, table=TableLog(log), slot=6)
    assert log == ["started", "mark 6", "run", "reply", "clear 6", "completed 6"]
    assert (claim.replies[0].token, claim.replies[0].result) == (9, b"ABC")
    assert (loop.completed, loop.failed, loop.malformed, loop.released) == (1, 0, 0, 0)


def test_the_loop_works_without_a_table(registry):
    claims = [ScriptedClaim(submit_frame(ECHO, b"a"), []) for _ in range(3)]
    assert run_loop(*claims, registry=registry).completed == 3
    assert [claim.replies[0].result for claim in claims] == [b"A"] * 3


def test_without_a_registry_the_handlers_of_the_process_run():
    closure_id = 4_123_456_790
    subetha.pass_registry.register(closure_id, bytes.upper)
    try:
        claim = ScriptedClaim(submit_frame(closure_id, b"a"), [])
        run_loop(claim, registry=None)
    finally:
        subetha.pass_registry.unregister(closure_id)
    assert claim.replies[0].result == b"A"


@pytest.mark.parametrize("how", ["exit", "interrupt", "generator"])
def test_no_exception_of_a_handler_ends_the_loop(registry, how):
    first, second = ScriptedClaim(submit_frame(EXIT, how.encode()), []), ScriptedClaim(submit_frame(ECHO, b"a"), [])
    loop = run_loop(first, second, registry=registry)
    assert type(first.replies[0].result) is ExecutionError
    assert second.replies[0].result == b"A"
    assert (loop.completed, loop.failed) == (2, 1)


def test_errors_are_counted_as_failed_and_as_completed(registry):
    log = []
    claims = [ScriptedClaim(submit_frame(closure_id, b"x"), log) for closure_id in (RAISE, 777, ECHO)]
    loop = run_loop(*claims, registry=registry, table=TableLog(log), slot=0)
    assert [type(claim.replies[0].result) for claim in claims] == [ExecutionError, UnknownClosureId, bytes]
    assert (loop.completed, loop.failed) == (3, 2)
    assert log.count("completed 0") == 3


def test_a_malformed_message_with_a_token_is_answered_with_an_error(registry):
    log = []
    claim = ScriptedClaim(submit_frame(ECHO, b"abc", token=321)[:9], log)
    loop = run_loop(claim, registry=registry, table=TableLog(log), slot=0)
    assert claim.replies[0].token == 321
    assert type(claim.replies[0].result) is ExecutionError
    assert log == ["started", "reply"]
    assert (loop.completed, loop.malformed) == (0, 1)


@pytest.mark.parametrize("length", [0, 1, 7])
def test_a_malformed_message_without_a_token_is_acknowledged_and_counted(registry, length):
    log = []
    claim = ScriptedClaim(submit_frame(ECHO, b"abc")[:length], log)
    loop = run_loop(claim, registry=registry)
    assert log == ["started", "ack"]
    assert (loop.completed, loop.malformed) == (0, 1)


def test_a_malformed_message_is_answered_once_the_result_side_has_room(registry):
    claim = ScriptedClaim(submit_frame(ECHO)[:9], [], [Full("no room")] * 3)
    run_loop(claim, registry=registry, sleep=lambda seconds: None)
    assert len(claim.replies) == 1


@pytest.mark.parametrize("error", [ArenaTooSmall("9 bytes asked, 8 left"), PayloadTooLarge("9 bytes asked, 8 left")])
def test_a_result_that_the_transport_cannot_hold_becomes_a_result_too_large(registry, error):
    claim = ScriptedClaim(submit_frame(ECHO, b"abc"), [], [error])
    loop = run_loop(claim, registry=registry)
    assert type(claim.replies[0].result) is ResultTooLarge
    assert "9 bytes asked, 8 left" in str(claim.replies[0].result)
    assert (loop.completed, loop.failed) == (1, 1)


def test_a_call_that_failed_counts_as_failed(registry):
    registry.register(ECHO + 50, lambda args: CallFailed("ValueError: boo", args))
    claim = ScriptedClaim(submit_frame(ECHO + 50, b"pickled"), [])
    loop = run_loop(claim, registry=registry)
    assert (loop.completed, loop.failed) == (1, 1)
    assert claim.replies[0].result.data == b"pickled"


@pytest.mark.parametrize(("refusals", "comes"), [(3, bytes), (12, ResultTooLarge)])
def test_a_worker_waits_for_room_in_the_arena_and_then_tells_the_submitter(registry, refusals, comes):
    now = [0.0]
    claim = ScriptedClaim(submit_frame(ECHO, b"abc"), [], [ArenaFull("9 bytes asked, 8 left")] * refusals)
    loop = run_loop(claim, registry=registry, clock=lambda: now[0], sleep=lambda _: now.__setitem__(0, now[0] + 1))
    assert type(claim.replies[0].result) is comes
    assert now[0] == min(refusals - 1, 10)
    assert loop.completed == 1


def test_a_result_past_the_reply_limit_of_the_source_becomes_a_result_too_large(registry):
    source = ScriptedSource(ScriptedClaim(submit_frame(LONG, b"200"), []))
    claim = source.claims[0]
    source.reply_bytes = 100
    loop = source.loop = WorkerLoop(source, registry=registry)
    loop.run()
    assert type(claim.replies[0].result) is ResultTooLarge
    assert (loop.completed, loop.failed) == (1, 1)


def test_a_full_result_side_is_waited_for_with_pauses_in_between(registry):
    log, pauses = [], []
    claim = ScriptedClaim(submit_frame(ECHO, b"a"), log, [Full("no room")] * 21)
    loop = run_loop(claim, registry=registry, table=TableLog(log), slot=0, sleep=pauses.append)
    assert claim.replies[0].result == b"A"
    assert len(pauses) == 20
    assert 0 < min(pauses) < max(pauses) <= 10e-3
    assert log[-2:] == ["clear 0", "completed 0"]
    assert loop.completed == 1


def test_a_full_result_side_at_stop_releases_the_claim_after_one_more_try(registry):
    log = []
    claim = ScriptedClaim(submit_frame(ECHO, b"a"), log, [Full("no room")] * 100)
    source = ScriptedSource(claim)
    sleeps = []

    def stop_at_the_third(seconds):
        sleeps.append(seconds)
        if len(sleeps) == 3:
            loop.stop()

    loop = source.loop = WorkerLoop(source, registry=registry, table=TableLog(log), slot=0, sleep=stop_at_the_third)
    loop.run()
    assert log == ["started", "mark 0", *["reply raises Full"] * 5, "release", "clear 0"]
    assert (loop.completed, loop.released) == (0, 1)


def test_at_stop_a_last_try_that_finds_room_delivers_and_releases_nothing(registry):
    log = []
    claim = ScriptedClaim(submit_frame(ECHO, b"a"), log, [Full("no room")] * 2)
    source = ScriptedSource(claim)
    loop = source.loop = WorkerLoop(source, registry=registry, sleep=lambda seconds: loop.stop())
    loop.run()
    assert claim.replies[0].result == b"A"
    assert "release" not in log


def test_a_stop_in_the_middle_of_a_reply_leaves_the_answer_one_whole_reply_more(registry):
    log = []
    claim = ScriptedClaim(submit_frame(ECHO, b"a"), log, [Full("no room")] * 2)
    reply = claim.reply

    def stopped_meanwhile(payload):
        if len(claim.reply_errors) == 1:
            loop.stop()
        reply(payload)

    claim.reply = stopped_meanwhile
    source = ScriptedSource(claim)
    loop = source.loop = WorkerLoop(source, registry=registry, sleep=lambda seconds: None)
    loop.run()
    assert claim.replies[0].result == b"A"
    assert "release" not in log


def test_with_both_sides_full_at_stop_the_job_is_kept_until_one_has_room(registry):
    submit, result = DequeTransport(1), DequeTransport(1)
    submit.try_push(submit_frame(ECHO, b"a"))
    result.try_push(b"in the way")
    looks = []

    def between_looks(seconds):
        looks.append(seconds)
        if len(looks) == 1:
            submit.try_push(b"took its place")
            loop.stop()
        if len(looks) == 50:
            submit.try_pop()

    source = PairedSource(submit, result, reply_wait=0)
    loop = WorkerLoop(source, registry=registry, sleep=between_looks)
    loop.run()
    assert len(looks) == 50
    assert list(submit.messages) == [submit_frame(ECHO, b"a")]
    assert loop.released == 1


def test_a_stopped_loop_claims_nothing(registry):
    claim = ScriptedClaim(submit_frame(ECHO), [])
    source = ScriptedSource(claim)
    loop = WorkerLoop(source, registry=registry)
    loop.stop()
    loop.stop()
    assert loop.stopping
    loop.run()
    assert claim.log == []


def test_a_stop_during_a_handler_finishes_that_job_and_claims_no_other(registry):
    first, second = ScriptedClaim(submit_frame(ECHO, b"a"), []), ScriptedClaim(submit_frame(ECHO, b"b"), [])
    source = ScriptedSource(first, second)
    loop = WorkerLoop(source, registry=registry)
    registry.register(ECHO, lambda args: (loop.stop(), args.upper())[1])
    loop.run()
    assert first.replies[0].result == b"A"
    assert second.log == []


def test_a_signal_handler_stops_a_loop_in_the_main_thread(registry, tmp_path):
    with SharedRing.create(tmp_path / "submit", 2) as submit, SharedRing.create(tmp_path / "result", 2) as result:
        loop = WorkerLoop(PairedSource(submit, result), registry=registry)
        registry.register(ECHO, lambda args: (signal.raise_signal(signal.SIGUSR1), b"finished")[1])
        submit.try_push(submit_frame(ECHO))
        submit.try_push(submit_frame(ECHO, token=10))
        usual = signal.signal(signal.SIGUSR1, lambda number, stack: loop.stop())
        try:
            loop.run()
        finally:
            signal.signal(signal.SIGUSR1, usual)
        assert [decode_result(frame).result for frame in result.pop_many(5)] == [b"finished"]
        assert [decode_submit(frame)[0] for frame in submit.pop_many(5)] == [10]


def test_a_source_closed_while_stopping_ends_the_loop_cleanly(registry):
    source = ScriptedSource(at_end=ValueError("closed"))
    loop = WorkerLoop(source, registry=registry)
    claim = source.claim
    source.claim = None

    def closed_meanwhile(timeout):
        loop.stop()
        return claim(timeout)

    source.claim = closed_meanwhile
    loop = WorkerLoop(source, registry=registry)
    loop.run()


@pytest.mark.parametrize("error", [ValueError("closed"), OSError("disk")])
def test_an_error_of_the_source_ends_a_loop_that_was_not_stopped_and_is_raised(registry, error):
    with pytest.raises(type(error), match=str(error)):
        run_loop(registry=registry, at_end=error)


@pytest.mark.parametrize("failures", [1, 99])
def test_messages_that_the_transport_finds_damaged_are_counted_and_do_not_end_the_loop(registry, failures):
    claim = ScriptedClaim(submit_frame(ECHO, b"a"), [])
    pauses = []
    damaged = [TransportError("damaged")] * failures
    loop = run_loop(*damaged, claim, *damaged, registry=registry, sleep=pauses.append)
    assert claim.replies[0].result == b"A"
    assert loop.malformed == len(pauses) == 2 * failures


def test_a_transport_that_fails_a_hundred_claims_in_a_row_ends_the_loop(registry):
    pauses = []
    with pytest.raises(TransportError, match="broken"):
        run_loop(registry=registry, at_end=TransportError("broken"), sleep=pauses.append)
    assert len(pauses) == 99


@pytest.mark.parametrize("error", [OSError("disk"), TransportError("the result ring is damaged")])
def test_an_error_of_the_reply_releases_the_claim_and_is_raised(registry, error):
    log = []
    claim = ScriptedClaim(submit_frame(ECHO), log, [error])
    with pytest.raises(type(error), match=str(error)):
        run_loop(claim, registry=registry)
    assert log == ["started", f"reply raises {type(error).__name__}", "release"]


def test_a_claim_that_was_taken_away_is_counted_as_lost_and_the_loop_goes_on(registry):
    log = []
    first = ScriptedClaim(submit_frame(ECHO, b"a"), log, [TransportError("taken away")])
    second = ScriptedClaim(submit_frame(ECHO, b"b"), [])

    def over():
        raise ValueError("this claim is over")

    first.release = over
    loop = run_loop(first, second, registry=registry, table=TableLog(log), slot=0)
    assert second.replies[0].result == b"B"
    assert (loop.lost, loop.completed) == (1, 1)
    assert log == ["started", "mark 0", "reply raises TransportError", "clear 0", "mark 0", "clear 0", "completed 0"]


def test_a_claim_that_finds_no_room_to_go_back_after_an_error_is_not_taken_for_lost(registry):
    claim = ScriptedClaim(submit_frame(ECHO), [], [TransportError("the result ring is damaged")])

    def no_room():
        raise Full("all places are taken")

    claim.release = no_room
    with pytest.raises(TransportError, match="the result ring is damaged") as raised:
        run_loop(claim, registry=registry)
    assert "all places are taken" in raised.value.__notes__[0]


def test_an_error_of_the_release_after_an_error_is_added_to_it_as_a_note(registry):
    claim = ScriptedClaim(submit_frame(ECHO), [], [OSError("disk")])

    def unreleasable():
        raise ValueError("it is closed")

    claim.release = unreleasable
    with pytest.raises(OSError, match="disk") as raised:
        run_loop(claim, registry=registry)
    assert "it is closed" in raised.value.__notes__[0]


def test_an_error_of_the_table_releases_the_claim_and_is_raised(registry):
    log = []
    table = TableLog(log)
    table.mark_in_flight = None
    with pytest.raises(TypeError):
        run_loop(ScriptedClaim(submit_frame(ECHO), log), registry=registry, table=table, slot=0)
    assert log == ["started", "release"]


def test_a_claim_is_let_go_before_the_next_one_is_waited_for(registry):
    claim = ScriptedClaim(submit_frame(ECHO), [])
    seen = weakref.ref(claim)
    source = ScriptedSource(claim)
    del claim
    loop = source.loop = WorkerLoop(source, registry=registry)
    give = source.claim
    alive_at_claim = []

    def claiming(timeout):
        gc.collect()
        alive_at_claim.append(seen() is not None)
        return give(timeout)

    source.claim = claiming
    loop = source.loop = WorkerLoop(source, registry=registry)
    loop.run()
    assert alive_at_claim == [True, False]


def test_a_source_whose_claims_do_not_reply_is_refused(tmp_path):
    ring = SharedRing.create(tmp_path / "ring", 2)
    with ring, pytest.raises(UnsupportedTransportFamily, match=r"SharedRing.*PairedSource"):
        WorkerLoop(ring)


@pytest.mark.parametrize("half", [{"table": TableLog([])}, {"slot": 0}])
def test_table_and_slot_are_given_together(half):
    with pytest.raises(ValueError, match="table and slot"):
        WorkerLoop(ScriptedSource(), **half)


# --- the submitter --------------------------------------------------------------------------------------------------


def test_tokens_count_up_from_one_and_go_out_with_the_pass():
    transport = DequeTransport()
    submitter = Submitter(transport)
    assert [submitter.submit(Pass(5, b"a%d" % n)) for n in range(3)] == [1, 2, 3]
    assert [decode_submit(frame) for frame in transport.messages] == [(n + 1, Pass(5, b"a%d" % n)) for n in range(3)]


def test_tokens_wrap_past_zero():
    submitter = Submitter(DequeTransport(), first_token=2**32 - 2)
    assert [submitter.submit(Pass(5, b"")) for _ in range(4)] == [2**32 - 2, 2**32 - 1, 1, 2]


@pytest.mark.parametrize("first_token", [0, -1, 2**32])
def test_a_first_token_out_of_range_is_refused(first_token):
    with pytest.raises(ValueError, match=rf"from 1 to 4294967295, not {first_token}"):
        Submitter(DequeTransport(), first_token=first_token)


def test_two_threads_that_submit_at_once_never_get_the_same_token():
    first_counts, second_counts = threading.Event(), threading.Event()

    class PausingInt(int):
        def __add__(self, other):
            if not first_counts.is_set():
                first_counts.set()
                # The other thread gets every chance to come in between reading and counting; a lock leaves it none.
                second_counts.wait(0.2)
            else:
                second_counts.set()
            return int(self) + other

    submitter = Submitter(DequeTransport(), first_token=PausingInt(5))
    first = in_thread(lambda: submitter.submit(Pass(ECHO, b"")))
    assert first_counts.wait(WAIT_S)
    second = submitter.submit(Pass(ECHO, b""))
    assert sorted([first(), second]) == [5, 6]


def test_where_the_transport_numbers_its_messages_the_token_is_the_low_half_of_the_number():
    class Numbering(DequeTransport):
        def try_push(self, payload):
            super().try_push(payload)
            return (77 << 32) + 0xFFFF_FFF0 + len(self.messages)

    submitter = Submitter(Numbering(2))
    assert submitter.submit(Pass(5, b"")) == 0xFFFF_FFF1
    assert submitter.submit(Pass(5, b"")) == 0xFFFF_FFF2


def test_a_submit_that_waited_for_room_has_the_number_of_the_transport_too():
    class Numbering(DequeTransport):
        def try_push(self, payload):
            super().try_push(payload)
            return 4242

    transport = Numbering(1)
    submitter = Submitter(transport, sleep=lambda seconds: transport.try_pop())
    submitter.submit(Pass(5, b""))
    assert submitter.submit(Pass(5, b"second")) == 4242
    assert decode_submit(transport.try_pop())[1] == Pass(5, b"second")


def test_arguments_that_do_not_fit_are_refused_at_submit_and_nothing_is_pushed(tmp_path):
    with SharedRing.create(tmp_path / "ring", 2) as ring:
        submitter = Submitter(ring)
        submitter.submit(Pass(5, bytes(MAX_ARG_LEN)))
        with pytest.raises(ArgsTooLarge):
            submitter.submit(Pass(5, bytes(MAX_ARG_LEN + 1)))
        assert len(ring) == 1


def test_a_full_transport_raises_full_at_the_timeout():
    now = [0.0]
    transport = DequeTransport(1)
    submitter = Submitter(transport, clock=lambda: now[0], sleep=lambda seconds: now.__setitem__(0, now[0] + seconds))
    submitter.submit(Pass(5, b"first"))
    with pytest.raises(Full):
        submitter.submit(Pass(5, b""), timeout=0)
    assert now[0] == 0
    with pytest.raises(Full):
        submitter.submit(Pass(5, b""), timeout=2.5)
    assert now[0] == pytest.approx(2.5)
    assert [decode_submit(frame)[1] for frame in transport.messages] == [Pass(5, b"first")]


@pytest.mark.parametrize("timeout", [-1, float("nan")])
def test_a_submit_timeout_that_is_no_length_of_time_is_refused(timeout):
    transport = DequeTransport(1)
    with pytest.raises(ValueError, match="at least 0 seconds"):
        Submitter(transport).submit(Pass(5, b""), timeout=timeout)
    assert not transport.messages


def test_a_closed_submitter_raises_value_error_and_pushes_nothing():
    transport = DequeTransport()
    submitter = Submitter(transport)
    submitter.close()
    submitter.close()
    with pytest.raises(ValueError, match="closed"):
        submitter.submit(Pass(5, b""))
    assert not transport.messages


def test_closing_a_submitter_ends_a_submit_that_waits_for_room():
    transport = DequeTransport(1)
    waiting = threading.Event()
    submitter = Submitter(transport, sleep=lambda seconds: waiting.set())
    submitter.submit(Pass(5, b"first"))
    blocked = in_thread(lambda: submitter.submit(Pass(5, b"")))
    assert waiting.wait(WAIT_S)
    submitter.close()
    with pytest.raises(ValueError, match="closed"):
        blocked()


@pytest.mark.parametrize(("end", "place"), [(Submitter, "submit"), (ResultCollector, "result")])
def test_a_transport_without_the_least_calls_is_refused(end, place):
    with pytest.raises(UnsupportedTransportFamily, match=f"the {place} transport.* try_push and no try_pop"):
        end(object())


# --- the collector --------------------------------------------------------------------------------------------------


def collected(*results, **options):
    transport = DequeTransport()
    for token, result in enumerate(results, start=1):
        transport.try_push(encode_result(token, result))
    return ResultCollector(transport, **options), transport


def test_try_recv_gives_results_in_order_and_then_raises_empty_without_waiting():
    collector, _ = collected(b"one", ExecutionError("ValueError: two"), sleep=lambda seconds: pytest.fail("it waits"))
    first, second = collector.try_recv(), collector.try_recv()
    assert (first.token, first.result) == (1, b"one")
    assert (second.token, type(second.result)) == (2, ExecutionError)
    with pytest.raises(Empty):
        collector.try_recv()


def test_recv_gives_up_at_its_timeout():
    now = [0.0]
    collector = ResultCollector(
        DequeTransport(), clock=lambda: now[0], sleep=lambda seconds: now.__setitem__(0, now[0] + seconds)
    )
    with pytest.raises(Empty):
        collector.recv(0)
    assert now[0] == 0
    with pytest.raises(Empty):
        collector.recv(timeout=3.0)
    assert now[0] == pytest.approx(3.0)


def test_recv_waits_for_a_result_that_is_not_there_yet():
    transport = DequeTransport()
    collector = ResultCollector(transport, sleep=lambda seconds: transport.try_push(encode_result(5, b"late")))
    assert collector.recv().result == b"late"


def test_recv_many_gives_what_is_there_and_at_most_n():
    collector, _ = collected(b"1", b"2", b"3")
    assert collector.recv_many(0) == []
    assert [result.result for result in collector.recv_many(2)] == [b"1", b"2"]
    assert [result.result for result in collector.recv_many(10)] == [b"3"]
    assert collector.recv_many(10) == []


def test_recv_many_takes_batches_from_a_ring(tmp_path):
    with SharedRing.create(tmp_path / "ring", 8) as ring:
        ring.push_many([encode_result(token, b"%d" % token) for token in range(1, 6)])
        collector = ResultCollector(ring)
        assert [result.token for result in collector.recv_many(3)] == [1, 2, 3]
        assert [result.token for result in collector.recv_many(3)] == [4, 5]
        assert collector.recv_many(3) == []


@pytest.mark.parametrize("n", [-1, -100])
def test_recv_many_refuses_a_negative_number(n):
    with pytest.raises(ValueError, match=str(n)):
        collected(b"1")[0].recv_many(n)


def test_recv_many_refuses_what_is_no_number():
    with pytest.raises(TypeError):
        collected(b"1")[0].recv_many("3")


@pytest.mark.parametrize("receive", [lambda c: c.try_recv(), lambda c: c.recv(0), lambda c: c.recv_many(5)[0]])
def test_a_malformed_result_raises_and_loses_none_of_those_around_it(receive):
    collector, transport = collected(b"1", b"2")
    transport.try_push(b"\x07")
    transport.try_push(b"")
    transport.try_push(encode_result(3, b"3"))
    transport.try_push(encode_result(4, b"4"))
    assert [result.token for result in collector.recv_many(5)] == [1, 2]
    for _ in range(2):
        with pytest.raises(TransportError):
            receive(collector)
    assert [collector.try_recv().token, receive(collector).token] == [3, 4]
    with pytest.raises(Empty):
        collector.try_recv()


def test_threads_that_share_a_collector_get_each_result_once():
    collector, _ = collected(*[b"%d" % n for n in range(1000)])
    together = threading.Barrier(4)

    def receive():
        together.wait(WAIT_S)
        mine = []
        while results := collector.recv_many(3):
            mine += [result.token for result in results]
        return mine

    waits = [in_thread(receive) for _ in range(4)]
    assert sorted(token for wait in waits for token in wait()) == list(range(1, 1001))


# --- the scheduler, over rings in files -----------------------------------------------------------------------------


def test_results_come_back_under_the_tokens_of_their_passes(scheduler):
    submitter, collector = scheduler.submitter(), scheduler.collector()
    # As many as fit the result ring, so that a client that first submits and then collects is never stuck.
    expected = {submitter.submit(Pass(ECHO, b"job %d" % n)): b"JOB %d" % n for n in range(64)}
    received = {}
    while len(received) < len(expected):
        result = collector.recv(WAIT_S)
        assert result.token not in received
        received[result.token] = result.result
    assert received == expected


def test_a_thousand_passes_go_through_rings_of_two_cells(paths, registry):
    with BackgroundScheduler.start(*paths, 2, 1, registry=registry) as scheduler:
        collector = scheduler.collector()
        receiving = in_thread(lambda: [collector.recv(WAIT_S) for _ in range(1000)])
        tokens = [scheduler.submitter().submit(Pass(ECHO, b"j%d" % n), WAIT_S) for n in range(1000)]
        results = receiving()
    assert [result.token for result in results] == tokens
    assert [result.result for result in results] == [b"J%d" % n for n in range(1000)]


def test_errors_come_back_as_instances_of_their_classes(scheduler):
    submitter, collector = scheduler.submitter(), scheduler.collector()
    for pass_, error_class, text in [
        (Pass(RAISE, b"bad"), ExecutionError, "ValueError: bad"),
        (Pass(777, b""), UnknownClosureId, "777"),
        (Pass(LONG, b"%d" % (MAX_RESULT_LEN + 1)), ResultTooLarge, str(MAX_RESULT_LEN + 1)),
        (Pass(EXIT, b"exit"), ExecutionError, "SystemExit: 3"),
        (Pass(EXIT, b"interrupt"), ExecutionError, "KeyboardInterrupt: 3"),
    ]:
        token = submitter.submit(pass_)
        result = collector.recv(WAIT_S)
        assert (result.token, type(result.result)) == (token, error_class)
        assert text in str(result.result)
        assert isinstance(result.result, PassError)
    submitter.submit(Pass(LONG, b"%d" % MAX_RESULT_LEN))
    assert collector.recv(WAIT_S).result == bytes(MAX_RESULT_LEN)
    assert scheduler.error is None


def test_all_callers_share_one_submitter_and_one_collector(scheduler):
    assert scheduler.submitter() is scheduler.submitter()
    assert scheduler.collector() is scheduler.collector()


def test_the_worker_is_in_the_heartbeat_table_with_what_it_does(scheduler, gate):
    table, slot = scheduler.heartbeat(), scheduler.slot_idx()
    snapshot = table.snapshot(slot)
    assert (snapshot.pid, snapshot.role, snapshot.in_flight_bitmap) == (os.getpid(), Role.WORKER, 0)
    scheduler.submitter().submit(Pass(BLOCK, b""))
    assert gate.inside.wait(WAIT_S)
    assert table.snapshot(slot).in_flight_bitmap == 1
    assert table.completed(slot) == 0
    gate.opened.set()
    scheduler.collector().recv(WAIT_S)
    # The next pass begins when the one before is cleared and counted.
    scheduler.submitter().submit(Pass(ECHO, b""))
    scheduler.collector().recv(WAIT_S)
    assert table.completed(slot) >= 1


def test_closing_gives_up_the_slot(paths, registry):
    with BackgroundScheduler.start(*paths, 4, 1, registry=registry) as scheduler:
        slot = scheduler.slot_idx()
        with HeartbeatTable.open(paths[2]) as table:
            assert table.snapshot(slot) is not None
    with HeartbeatTable.open(paths[2]) as table:
        assert table.snapshot(slot) is None


def test_closing_leaves_a_table_that_was_given_open_and_gives_the_slot_back_to_it(paths, registry):
    with HeartbeatTable.create(paths[2], 1) as table:
        with BackgroundScheduler(DequeTransport(), DequeTransport(), table, registry=registry) as scheduler:
            assert table.snapshot(scheduler.slot_idx()) is not None
        assert table.snapshot(scheduler.slot_idx()) is None


def test_a_scheduler_opens_the_files_that_another_one_left(paths, registry):
    with BackgroundScheduler.start(*paths, 4, 1, registry=registry) as scheduler:
        scheduler.submitter().submit(Pass(ECHO, b"a"))
        assert scheduler.collector().recv(WAIT_S).result == b"A"
    with BackgroundScheduler.start(*paths, 4, 1, registry=registry) as scheduler:
        scheduler.submitter().submit(Pass(ECHO, b"b"))
        assert scheduler.collector().recv(WAIT_S).result == b"B"


def test_a_pass_from_another_handle_of_the_ring_is_run_and_its_result_found_there(scheduler, paths):
    with SharedRing.open(paths[0]) as submit, SharedRing.open(paths[1]) as result:
        Submitter(submit, first_token=1000).submit(Pass(ECHO, b"a"))
        assert ResultCollector(result).recv(WAIT_S).token == 1000


def test_malformed_messages_do_not_end_the_worker(scheduler, paths):
    with SharedRing.open(paths[0]) as submit:
        submit.push(b"\x01")
        submit.push(submit_frame(ECHO, b"abc", token=55)[:9])
    collector = scheduler.collector()
    answered = collector.recv(WAIT_S)
    assert (answered.token, type(answered.result)) == (55, ExecutionError)
    scheduler.submitter().submit(Pass(ECHO, b"a"))
    assert collector.recv(WAIT_S).result == b"A"


def test_watchdog_scan_reports_who_is_silent_with_work_in_hand_but_never_this_process(scheduler):
    table = scheduler.heartbeat()
    table.mark_in_flight(scheduler.slot_idx(), 0)
    other = table.register(os.getppid())
    table.mark_in_flight(other, 5)
    first, second = scheduler.watchdog_scan(), scheduler.watchdog_scan()
    assert first.is_empty()
    assert [(dead.slot, dead.snapshot.in_flight_bitmap) for dead in second.dead_slots] == [(other, 1 << 5)]
    assert second.new_global_epoch == first.new_global_epoch + 1


# --- a full result side ---------------------------------------------------------------------------------------------


def fill(ring):
    """Fill `ring` and return how many messages that took."""
    count = 0
    try:
        while True:
            ring.try_push(encode_result(7_000_000 + count, b"in the way"))
            count += 1
    except Full:
        return count


def run_in_full_result_ring(scheduler, paths, gate):
    """Bring the worker to where it has a result in hand and no room for it."""
    submitter = scheduler.submitter()
    submitter.submit(Pass(BLOCK, b"a"))
    assert gate.inside.wait(WAIT_S)
    with SharedRing.open(paths[1]) as result:
        in_the_way = fill(result)
    gate.opened.set()
    return in_the_way


def test_a_full_result_ring_makes_the_worker_wait_and_no_result_is_dropped(paths, registry, gate):
    with BackgroundScheduler.start(*paths, 2, 1, registry=registry) as scheduler:
        in_the_way = run_in_full_result_ring(scheduler, paths, gate)
        collector = scheduler.collector()
        results = [collector.recv(WAIT_S) for _ in range(in_the_way + 1)]
        assert [result.token for result in results] == [7_000_000 + n for n in range(in_the_way)] + [1]
        assert results[-1].result == b"through a"
        with pytest.raises(Empty):
            collector.recv(0)


def test_closing_with_a_full_result_ring_puts_the_job_back_and_a_later_scheduler_runs_it(paths, registry, gate):
    with BackgroundScheduler.start(*paths, 2, 1, registry=registry) as scheduler:
        in_the_way = run_in_full_result_ring(scheduler, paths, gate)
        scheduler.close(WAIT_S)
    with SharedRing.open(paths[0]) as submit:
        assert len(submit) == 1
    with BackgroundScheduler.start(*paths, 2, 1, registry=registry) as scheduler:
        results = [scheduler.collector().recv(WAIT_S) for _ in range(in_the_way + 1)]
    assert [result.result for result in results] == [b"in the way"] * in_the_way + [b"through a"]


def test_closing_with_a_full_result_side_pushes_back_what_a_wrapped_transport_gave(tmp_path, registry, gate):
    submit, result = DequeTransport(2), DequeTransport(2)
    with BackgroundScheduler.start_with_transports(submit, result, tmp_path / "table", 1, registry=registry) as first:
        first.submitter().submit(Pass(BLOCK, b"a"))
        assert gate.inside.wait(WAIT_S)
        in_the_way = fill(result)
        gate.opened.set()
        first.close(WAIT_S)
    assert [decode_submit(frame)[1] for frame in submit.messages] == [Pass(BLOCK, b"a")]
    with BackgroundScheduler.start_with_transports(submit, result, tmp_path / "table", 1, registry=registry) as second:
        results = [second.collector().recv(WAIT_S).result for _ in range(in_the_way + 1)]
    assert results[-1] == b"through a"


# --- other transports -----------------------------------------------------------------------------------------------


def test_transports_of_the_least_kind_are_served_and_left_open(tmp_path, registry):
    submit, result = DequeTransport(), DequeTransport()
    with BackgroundScheduler.start_with_transports(submit, result, tmp_path / "t", 1, registry=registry) as scheduler:
        tokens = [scheduler.submitter().submit(Pass(ECHO, b"a%d" % n)) for n in range(20)]
        results = [scheduler.collector().recv(WAIT_S) for _ in range(20)]
        assert [(r.token, r.result) for r in results] == [(t, b"A%d" % n) for n, t in enumerate(tokens)]
        scheduler.submitter().submit(Pass(ECHO, b"left over"))
        while not result.messages:
            threading.Event().wait(0.001)
    assert scheduler.collector().try_recv().result == b"LEFT OVER"
    with pytest.raises(ValueError, match="closed"):
        scheduler.submitter().submit(Pass(ECHO, b""))


def test_a_scheduler_works_over_deques(paths, registry):
    with (
        SharedDeque.create(paths[0], 4) as submit,
        SharedDeque.create(paths[1], 4) as result,
        BackgroundScheduler.start_with_transports(submit, result, paths[2], 1, registry=registry) as scheduler,
    ):
        submitter, collector = scheduler.submitter(), scheduler.collector()
        for start in range(0, 40, 4):
            tokens = [submitter.submit(Pass(ECHO, b"a%d" % n), timeout=WAIT_S) for n in range(start, start + 4)]
            answers = [collector.recv(WAIT_S) for _ in tokens]
            assert [(a.token, a.result) for a in answers] == [(t, b"A%d" % (start + n)) for n, t in enumerate(tokens)]


def test_rings_that_were_given_stay_open_when_the_scheduler_closes(paths, registry):
    with SharedRing.create(paths[0], 2) as submit, SharedRing.create(paths[1], 2) as result:
        with BackgroundScheduler.start_with_transports(submit, result, paths[2], 1, registry=registry) as scheduler:
            scheduler.submitter().submit(Pass(ECHO, b"a"))
            assert scheduler.collector().recv(WAIT_S).result == b"A"
        submit.try_push(b"still open")
        assert submit.try_pop() == b"still open"


class ReplyingTransport(DequeTransport):
    """Its claims put their replies into `mailbox`."""

    claims_reply = True

    def __init__(self):
        super().__init__()
        self.mailbox = DequeTransport()

    def try_claim(self):
        claim = ScriptedClaim(self.try_pop(), [])
        claim.reply = self.mailbox.try_push
        return claim


def test_a_submit_side_whose_claims_reply_needs_no_help_from_the_result_side(tmp_path, registry):
    class TakingOnly:
        def try_push(self, payload):
            raise UnsupportedTransportFamily("results come from the claims")

        def try_pop(self):
            return submit.mailbox.try_pop()

    submit = ReplyingTransport()
    with BackgroundScheduler.start_with_transports(
        submit, TakingOnly(), tmp_path / "t", 1, registry=registry
    ) as scheduler:
        token = scheduler.submitter().submit(Pass(ECHO, b"a"))
        result = scheduler.collector().recv(WAIT_S)
    assert (result.token, result.result) == (token, b"A")


def test_a_submit_side_that_has_no_claims_is_paired_whatever_it_says_of_them(tmp_path, registry):
    submit, result = DequeTransport(), DequeTransport()
    submit.claims_reply = True
    with BackgroundScheduler.start_with_transports(submit, result, tmp_path / "t", 1, registry=registry) as scheduler:
        scheduler.submitter().submit(Pass(ECHO, b"a"))
        assert scheduler.collector().recv(WAIT_S).result == b"A"


# --- over the shapes of workloads, and the same over every way to start ---------------------------------------------

RING = MmfWorkloadShape.StreamingMpmc(1, 1)
DEQUE = MmfWorkloadShape.WorkStealing(WorkloadShape.producer_fast(8))
FAMILY = {RING: MmfFamily.SHARED_RING, DEQUE: MmfFamily.SharedDeque(DequeVariant.BATCHED)}
SHAPES = [(RING, RING), (RING, DEQUE), (DEQUE, RING), (DEQUE, DEQUE)]


def start_by_shapes(paths, shapes, registry, capacity=64):
    return BackgroundScheduler.start_by_workload_shape(
        paths[0], shapes[0], paths[1], shapes[1], paths[2], capacity, 8, registry=registry
    )


@contextlib.contextmanager
def over_transports(kind, paths, registry):
    with (
        kind.create(paths[0], 64) as submit,
        kind.create(paths[1], 64) as result,
        BackgroundScheduler.start_with_transports(submit, result, paths[2], 8, registry=registry) as scheduler,
    ):
        yield scheduler


WAYS_TO_START = {
    "start": lambda paths, registry: BackgroundScheduler.start(*paths, 64, 8, registry=registry),
    "ring transports": lambda paths, registry: over_transports(SharedRing, paths, registry),
    "deque transports": lambda paths, registry: over_transports(SharedDeque, paths, registry),
    "ring and ring by shape": lambda paths, registry: start_by_shapes(paths, (RING, RING), registry)[0],
    "ring and deque by shape": lambda paths, registry: start_by_shapes(paths, (RING, DEQUE), registry)[0],
    "deque and ring by shape": lambda paths, registry: start_by_shapes(paths, (DEQUE, RING), registry)[0],
    "deque and deque by shape": lambda paths, registry: start_by_shapes(paths, (DEQUE, DEQUE), registry)[0],
}


@pytest.fixture(params=WAYS_TO_START.values(), ids=WAYS_TO_START)
def any_scheduler(request, paths, registry):
    registry.register(11, lambda args: bytes(byte + 1 for byte in args))
    registry.register(12, lambda args: bytes(byte * 2 for byte in args))
    registry.register(13, lambda args: bytes(byte * 3 for byte in args))
    with request.param(paths, registry) as scheduler:
        yield scheduler


@pytest.mark.parametrize(
    ("closure_id", "expected"), [(11, b"\x02\x03\x04"), (12, b"\x02\x04\x06"), (13, b"\x03\x06\x09")]
)
def test_arguments_come_back_as_their_handler_maps_them(any_scheduler, closure_id, expected):
    token = any_scheduler.submitter().submit(Pass(closure_id, b"\x01\x02\x03"), WAIT_S)
    answer = any_scheduler.collector().recv(WAIT_S)
    assert (answer.token, answer.result) == (token, expected)


def test_an_unknown_closure_gives_an_error_result_and_the_worker_goes_on(any_scheduler):
    token = any_scheduler.submitter().submit(Pass(777, b""), WAIT_S)
    answer = any_scheduler.collector().recv(WAIT_S)
    assert (answer.token, type(answer.result)) == (token, UnknownClosureId)
    any_scheduler.submitter().submit(Pass(11, b"a"), WAIT_S)
    assert any_scheduler.collector().recv(WAIT_S).result == b"b"


def test_47_bytes_of_arguments_are_refused_at_submit_and_46_are_not(any_scheduler):
    with pytest.raises(ArgsTooLarge):
        any_scheduler.submitter().submit(Pass(ECHO, bytes(47)), WAIT_S)
    any_scheduler.submitter().submit(Pass(ECHO, b"a" * 46), WAIT_S)
    assert any_scheduler.collector().recv(WAIT_S).result == b"A" * 46
    with pytest.raises(Empty):
        any_scheduler.collector().try_recv()


def test_the_scheduler_is_registered_under_its_pid(any_scheduler):
    snapshot = any_scheduler.heartbeat().snapshot(any_scheduler.slot_idx())
    assert (snapshot.pid, snapshot.role) == (os.getpid(), Role.WORKER)


def test_16_passes_come_back_each_with_its_own_result(any_scheduler):
    submitter, collector = any_scheduler.submitter(), any_scheduler.collector()
    expected = {
        submitter.submit(Pass(11 + n % 3, bytes([n])), WAIT_S): bytes([(n + 1, n * 2, n * 3)[n % 3]]) for n in range(16)
    }
    answers = [collector.recv(WAIT_S) for _ in range(16)]
    assert {answer.token: answer.result for answer in answers} == expected


@pytest.mark.parametrize("shapes", SHAPES, ids=repr)
def test_starting_by_shapes_says_what_was_picked_and_makes_it(paths, registry, shapes):
    scheduler, *families = start_by_shapes(paths, shapes, registry)
    with scheduler:
        assert families == [FAMILY[shape] for shape in shapes]
        for path, shape in zip(paths, shapes, strict=False):
            (SharedRing if shape is RING else SharedDeque).open(path, readonly=True).close()


@pytest.mark.parametrize("place", [0, 1])
@pytest.mark.parametrize("other", [RING, DEQUE], ids=["ring", "deque"])
def test_a_key_value_shape_is_refused_and_no_file_is_made(paths, tmp_path, place, other):
    shapes = [other, other]
    shapes[place] = MmfWorkloadShape.KeyValueLookup(1, 1)
    with pytest.raises(UnsupportedTransportFamily, match=f"the {('submit', 'result')[place]} shape.*SHARED_HASH_MAP"):
        start_by_shapes(paths, shapes, None)
    assert os.listdir(tmp_path) == []


@pytest.mark.parametrize(("capacity", "heartbeat_capacity"), [(3, 8), (8, 0)])
def test_capacities_are_checked_before_any_file_is_made_by_shapes_too(paths, tmp_path, capacity, heartbeat_capacity):
    with pytest.raises(ValueError, match="capacity must be"):
        BackgroundScheduler.start_by_workload_shape(
            paths[0], DEQUE, paths[1], DEQUE, paths[2], capacity, heartbeat_capacity
        )
    with pytest.raises(ValueError, match="three different files"):
        BackgroundScheduler.start_by_workload_shape(paths[0], DEQUE, paths[0], DEQUE, paths[2], 8, 8)
    assert os.listdir(tmp_path) == []


@pytest.mark.parametrize("shapes", SHAPES, ids=repr)
def test_existing_files_are_opened_with_what_they_hold(paths, registry, shapes):
    kinds = [SharedRing if shape is RING else SharedDeque for shape in shapes]
    with kinds[0].create(paths[0], 64) as submit, kinds[1].create(paths[1], 64) as result:
        submit.push(submit_frame(ECHO, b"left over", token=5))
        result.push(encode_result(4, b"not collected"))
    files = [path.stat().st_ino for path in paths[:2]]
    scheduler, *_ = start_by_shapes(paths, shapes, registry)
    with scheduler:
        answers = [scheduler.collector().recv(WAIT_S) for _ in range(2)]
        assert [(a.token, a.result) for a in answers] == [(4, b"not collected"), (5, b"LEFT OVER")]
        scheduler.submitter().submit(Pass(ECHO, b"a"), WAIT_S)
        assert scheduler.collector().recv(WAIT_S).result == b"A"
    assert [path.stat().st_ino for path in paths[:2]] == files


def test_the_owner_of_a_submit_deque_submits_and_the_scheduler_only_steals_until_it_is_gone(paths, registry):
    with SharedDeque.create(paths[0], 64) as submit:
        scheduler, *_ = start_by_shapes(paths, (DEQUE, DEQUE), registry)
        with scheduler:
            submit.push_batch([submit_frame(ECHO, b"job %d" % n, token=100 + n) for n in range(16)])
            answers = [scheduler.collector().recv(WAIT_S) for _ in range(16)]
            assert {a.token: a.result for a in answers} == {100 + n: b"JOB %d" % n for n in range(16)}
            with pytest.raises(NotOwner, match="not the owner"):
                scheduler.submitter().submit(Pass(ECHO, b"a"))
            submit.close()
            token = scheduler.submitter().submit(Pass(ECHO, b"b"), WAIT_S)
            answer = scheduler.collector().recv(WAIT_S)
            assert (answer.token, answer.result) == (token, b"B")


def test_who_pushes_into_the_submit_deque_first_owns_it_also_after_the_start(paths, registry):
    scheduler, *_ = start_by_shapes(paths, (DEQUE, DEQUE), registry)
    with scheduler, SharedDeque.open(paths[0]) as submit:
        Submitter(submit, first_token=1000).submit(Pass(ECHO, b"a"))
        assert scheduler.collector().recv(WAIT_S).token == 1000
        with pytest.raises(NotOwner):
            scheduler.submitter().submit(Pass(ECHO, b"b"))


def test_the_passes_of_a_submitter_that_was_killed_are_run_and_its_place_is_taken(paths, registry):
    script = f"""
        import os, signal
        from subetha import SharedDeque
        from subetha.wire import encode_submit

        deque = SharedDeque.create({str(paths[0])!r}, 64)
        deque.push_batch([encode_submit({ECHO}, token, b"from the dead") for token in (7, 8, 9)])
        os.kill(os.getpid(), signal.SIGKILL)
        """
    ended = subprocess.run([sys.executable, "-c", textwrap.dedent(script)], capture_output=True, timeout=WAIT_S)
    assert (ended.returncode, ended.stderr) == (-signal.SIGKILL, b"")
    scheduler, *_ = start_by_shapes(paths, (DEQUE, DEQUE), registry)
    with scheduler:
        answers = [scheduler.collector().recv(WAIT_S) for _ in range(3)]
        assert sorted((a.token, a.result) for a in answers) == [(token, b"FROM THE DEAD") for token in (7, 8, 9)]
        scheduler.submitter().submit(Pass(ECHO, b"a"), WAIT_S)
        assert scheduler.collector().recv(WAIT_S).result == b"A"


def test_a_thief_in_another_handle_collects_and_cannot_push(paths, registry):
    scheduler, *_ = start_by_shapes(paths, (RING, DEQUE), registry)
    with scheduler, SharedDeque.open_as_thief(paths[1]) as result:
        token = scheduler.submitter().submit(Pass(ECHO, b"a"), WAIT_S)
        answer = ResultCollector(result).recv(WAIT_S)
        assert (answer.token, answer.result) == (token, b"A")
        with pytest.raises(NotOwner):
            result.push(b"")


def test_the_worker_owns_the_result_deque_from_the_start_to_the_close(paths, registry):
    scheduler, *_ = start_by_shapes(paths, (RING, DEQUE), registry)
    with SharedDeque.open(paths[1]) as other:
        with scheduler, pytest.raises(NotOwner, match=f"process {os.getpid()}"):
            other.push(b"")
        other.push(b"")


def open_files(folder):
    links = [os.path.realpath(f"/proc/self/fd/{fd}") for fd in os.listdir("/proc/self/fd")]
    return sorted(link for link in links if link.startswith(str(folder)))


def test_a_result_deque_that_somebody_else_owns_is_refused_at_the_start_and_all_closed_again(paths, registry, tmp_path):
    with SharedDeque.create(paths[1], 64) as other:
        before = open_files(tmp_path)
        other.push(encode_result(4, b"of somebody else"))
        with pytest.raises(NotOwner) as raised:
            start_by_shapes(paths, (DEQUE, DEQUE), registry)
        # the traceback still holds every local variable of the call
        assert raised.tb is not None
        assert open_files(tmp_path) == before
        assert other.steal() == encode_result(4, b"of somebody else")
    scheduler, *_ = start_by_shapes(paths, (DEQUE, DEQUE), registry)
    scheduler.close()


@pytest.mark.parametrize("place", [0, 1])
@pytest.mark.parametrize(("there", "asked"), [(SharedRing, DEQUE), (SharedDeque, RING)], ids=["ring", "deque"])
def test_a_file_of_the_other_family_is_refused_and_left_as_it_is(paths, registry, place, there, asked):
    with there.create(paths[place], 64) as made:
        made.push(b"kept")
    shapes = [RING, RING]
    shapes[place] = asked
    with pytest.raises(LayoutMismatch):
        start_by_shapes(paths, shapes, registry)
    with there.open(paths[place]) as made:
        assert made.try_pop() == b"kept"


def test_closing_with_a_full_result_deque_puts_the_job_back_and_a_later_scheduler_runs_it(paths, registry, gate):
    scheduler, *_ = start_by_shapes(paths, (DEQUE, DEQUE), registry, capacity=2)
    with scheduler:
        for pass_ in (Pass(ECHO, b"a"), Pass(ECHO, b"b"), Pass(BLOCK, b"c")):
            scheduler.submitter().submit(pass_, WAIT_S)
        assert gate.inside.wait(WAIT_S)
        gate.opened.set()
        scheduler.close(WAIT_S)
    with SharedDeque.open(paths[0]) as submit, SharedDeque.open(paths[1]) as result:
        assert (len(submit), len(result)) == (1, 2)
    scheduler, *_ = start_by_shapes(paths, (DEQUE, DEQUE), registry, capacity=2)
    with scheduler:
        assert [scheduler.collector().recv(WAIT_S).result for _ in range(3)] == [b"A", b"B", b"through c"]


# --- starting -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("capacity", [0, 1, 3, 63, 2**21, -2])
def test_a_ring_capacity_out_of_its_limits_is_refused_before_any_file_is_made(paths, tmp_path, capacity):
    with pytest.raises(ValueError, match=rf"2 to 1048576, not {capacity}"):
        BackgroundScheduler.start(*paths, capacity, 8)
    assert os.listdir(tmp_path) == []


@pytest.mark.parametrize("heartbeat_capacity", [0, -1, 65_535])
def test_a_table_capacity_out_of_its_limits_is_refused_before_any_file_is_made(paths, tmp_path, heartbeat_capacity):
    with pytest.raises(ValueError, match=rf"1 to 65534, not {heartbeat_capacity}"):
        BackgroundScheduler.start(*paths, 8, heartbeat_capacity)
    with pytest.raises(ValueError, match=rf"1 to 65534, not {heartbeat_capacity}"):
        BackgroundScheduler.start_with_transports(DequeTransport(), DequeTransport(), paths[2], heartbeat_capacity)
    assert os.listdir(tmp_path) == []


@pytest.mark.parametrize("same", [(0, 0, 2), (0, 1, 0), (0, 1, 1)])
def test_the_three_paths_must_be_three_files(paths, tmp_path, same):
    (tmp_path / "link").symlink_to(paths[same[0]])
    given = [paths[number] for number in same]
    for chosen in (given, [tmp_path / "link" if path == paths[0] else path for path in given[:1]] + given[1:]):
        with pytest.raises(ValueError, match="three different files"):
            BackgroundScheduler.start(*chosen, 8, 8)
    assert os.listdir(tmp_path) == ["link"]


@pytest.mark.parametrize("both", [DequeTransport(), ReplyingTransport()])
def test_one_transport_cannot_be_both_sides(paths, both):
    with pytest.raises(ValueError, match="same"):
        BackgroundScheduler.start_with_transports(both, both, paths[2], 8)


@pytest.mark.parametrize("wrong", [0, 1])
def test_a_side_without_the_least_calls_is_refused_with_its_name(paths, tmp_path, wrong):
    sides = [DequeTransport(), DequeTransport()]
    sides[wrong] = object()
    with pytest.raises(UnsupportedTransportFamily, match=f"the {('submit', 'result')[wrong]} transport"):
        BackgroundScheduler.start_with_transports(*sides, paths[2], 8)
    assert os.listdir(tmp_path) == []


@pytest.fixture
def opened(monkeypatch):
    """Every handle that the scheduler module opens, as (kind, handle)."""
    handles = []

    def recording(kind):
        class Recording:
            @staticmethod
            def open_or_create(*args, **options):
                handles.append((kind.__name__, kind.open_or_create(*args, **options)))
                return handles[-1][1]

        monkeypatch.setattr(subetha.scheduler, kind.__name__, Recording)

    recording(SharedRing)
    recording(HeartbeatTable)
    return handles


def assert_closed(handles, kinds):
    assert [kind for kind, _ in handles] == kinds
    for _, handle in handles:
        with pytest.raises(ValueError, match="closed"):
            handle.try_pop() if isinstance(handle, SharedRing) else handle.snapshot(0)


@pytest.mark.parametrize("broken", [0, 1, 2])
def test_when_one_file_does_not_open_those_before_it_are_closed_again(paths, opened, broken):
    paths[broken].write_bytes(b"no such layout" * 100)
    with pytest.raises(LayoutMismatch):
        BackgroundScheduler.start(*paths, 8, 8)
    assert_closed(opened, ["SharedRing", "SharedRing"][:broken])


def test_when_the_table_has_no_slot_left_everything_is_closed_again(paths, opened):
    with HeartbeatTable.create(paths[2], 1) as table:
        table.register(os.getpid())
        with pytest.raises(TableFull):
            BackgroundScheduler.start(*paths, 8, 1)
    assert_closed(opened, ["SharedRing", "SharedRing", "HeartbeatTable"])


def test_when_the_thread_does_not_start_the_slot_is_given_up_and_everything_closed(paths, opened, monkeypatch):
    def no_thread(self):
        raise RuntimeError("can't start new thread")

    monkeypatch.setattr(threading.Thread, "start", no_thread)
    with pytest.raises(RuntimeError, match="new thread"):
        BackgroundScheduler.start(*paths, 8, 1)
    assert_closed(opened, ["SharedRing", "SharedRing", "HeartbeatTable"])
    with HeartbeatTable.open(paths[2]) as table:
        assert table.snapshot(0) is None


def test_when_the_thread_does_not_start_a_table_that_was_given_has_its_slot_back(paths, monkeypatch):
    def no_thread(self):
        raise RuntimeError("can't start new thread")

    monkeypatch.setattr(threading.Thread, "start", no_thread)
    with HeartbeatTable.create(paths[2], 1) as table:
        with pytest.raises(RuntimeError, match="new thread"):
            BackgroundScheduler(DequeTransport(), DequeTransport(), table)
        assert table.snapshot(0) is None


# --- closing --------------------------------------------------------------------------------------------------------


def test_closing_closes_what_start_opened_and_ends_the_thread(paths, registry, opened):
    before = set(threading.enumerate())
    scheduler = BackgroundScheduler.start(*paths, 8, 1, registry=registry)
    (worker,) = set(threading.enumerate()) - before
    scheduler.close()
    assert not worker.is_alive()
    assert_closed(opened, ["SharedRing", "SharedRing", "HeartbeatTable"])


def test_closing_again_does_nothing(scheduler):
    scheduler.close()
    scheduler.close()
    scheduler.close(0)


def test_after_close_the_ends_and_the_table_raise_value_error(scheduler):
    submitter, collector = scheduler.submitter(), scheduler.collector()
    scheduler.close()
    for call in (
        lambda: submitter.submit(Pass(ECHO, b"")),
        lambda: scheduler.submitter().submit(Pass(ECHO, b"")),
        collector.try_recv,
        lambda: collector.recv(WAIT_S),
        lambda: collector.recv_many(1),
        lambda: scheduler.heartbeat().snapshot(0),
    ):
        with pytest.raises(ValueError, match="closed"):
            call()


def test_the_job_in_hand_is_finished_before_the_close(paths, registry, gate):
    scheduler = BackgroundScheduler.start(*paths, 8, 1, registry=registry)
    scheduler.submitter().submit(Pass(BLOCK, b"a"))
    scheduler.submitter().submit(Pass(ECHO, b"not claimed"))
    assert gate.inside.wait(WAIT_S)
    closing = in_thread(lambda: scheduler.close(WAIT_S))
    while not submitter_is_closed(scheduler):
        threading.Event().wait(0.001)
    gate.opened.set()
    closing()
    with SharedRing.open(paths[1]) as result, SharedRing.open(paths[0]) as submit:
        assert [decode_result(frame).result for frame in result.pop_many(9)] == [b"through a"]
        assert [decode_submit(frame)[1].args for frame in submit.pop_many(9)] == [b"not claimed"]


def submitter_is_closed(scheduler):
    # Arguments too long for the ring: refused after the check for a closed submitter, so nothing is ever submitted.
    try:
        scheduler.submitter().submit(Pass(ECHO, bytes(1000)))
    except ArgsTooLarge:
        return False
    except ValueError:
        return True


def test_a_close_that_times_out_raises_and_a_later_one_completes_it(paths, registry, gate):
    scheduler = BackgroundScheduler.start(*paths, 8, 1, registry=registry)
    scheduler.submitter().submit(Pass(BLOCK, b"a"))
    assert gate.inside.wait(WAIT_S)
    with pytest.raises(TimeoutError, match=r"0\.01 s"):
        scheduler.close(0.01)
    with pytest.raises(ValueError, match="closed"):
        scheduler.submitter().submit(Pass(ECHO, b""))
    assert scheduler.heartbeat().snapshot(scheduler.slot_idx()) is not None
    gate.opened.set()
    scheduler.close(WAIT_S)
    with SharedRing.open(paths[1]) as result:
        assert decode_result(result.try_pop()).result == b"through a"


def test_after_a_close_that_timed_out_the_worker_closes_everything_by_itself(paths, registry, gate, opened):
    before = set(threading.enumerate())
    scheduler = BackgroundScheduler.start(*paths, 8, 1, registry=registry)
    (worker,) = set(threading.enumerate()) - before
    scheduler.submitter().submit(Pass(BLOCK, b"a"))
    assert gate.inside.wait(WAIT_S)
    with pytest.raises(TimeoutError):
        scheduler.close(0)
    gate.opened.set()
    worker.join(WAIT_S)
    assert_closed(opened, ["SharedRing", "SharedRing", "HeartbeatTable"])
    with HeartbeatTable.open(paths[2]) as table:
        assert table.snapshot(scheduler.slot_idx()) is None


@pytest.mark.parametrize("timeout", [-1, float("nan")])
def test_a_close_timeout_that_is_no_length_of_time_is_refused_and_closes_nothing(scheduler, timeout):
    with pytest.raises(ValueError, match="at least 0 seconds"):
        scheduler.close(timeout)
    scheduler.submitter().submit(Pass(ECHO, b"a"))
    assert scheduler.collector().recv(WAIT_S).result == b"A"


def test_several_threads_may_close_at_once_and_all_find_it_closed(paths, registry, opened):
    scheduler = BackgroundScheduler.start(*paths, 8, 1, registry=registry)
    together = threading.Barrier(4)

    def close():
        together.wait(WAIT_S)
        scheduler.close(WAIT_S)
        assert_closed(opened, ["SharedRing", "SharedRing", "HeartbeatTable"])

    for wait in [in_thread(close) for _ in range(4)]:
        wait()


def test_a_handler_may_close_its_scheduler_and_its_result_is_still_delivered(paths, registry):
    scheduler = BackgroundScheduler.start(*paths, 8, 1, registry=registry)
    registry.register(9, lambda args: (scheduler.close(), b"closed it")[1])
    scheduler.submitter().submit(Pass(9, b""))
    scheduler._thread.join(WAIT_S)
    scheduler.close(WAIT_S)
    with SharedRing.open(paths[1]) as result:
        assert decode_result(result.try_pop()).result == b"closed it"


def test_closing_wakes_a_submit_that_waits_for_room_and_a_recv_that_waits_for_a_result(paths, registry, gate):
    scheduler = BackgroundScheduler.start(*paths, 2, 1, registry=registry)
    submitter = scheduler.submitter()
    submitter.submit(Pass(BLOCK, b"a"))
    assert gate.inside.wait(WAIT_S)
    receiving = in_thread(lambda: [scheduler.collector().recv(WAIT_S) for _ in range(9)])
    with SharedRing.open(paths[0]) as submit:
        fill(submit)
    submitting = in_thread(lambda: submitter.submit(Pass(ECHO, b""), WAIT_S))
    with pytest.raises(TimeoutError):
        scheduler.close(0)
    with pytest.raises(ValueError, match="closed"):
        submitting()
    gate.opened.set()
    scheduler.close(WAIT_S)
    with pytest.raises(ValueError, match="closed"):
        receiving()


def test_a_scheduler_nobody_closed_does_not_keep_its_process_alive(paths):
    script = f"""
        from subetha.scheduler import BackgroundScheduler
        BackgroundScheduler.start({str(paths[0])!r}, {str(paths[1])!r}, {str(paths[2])!r}, 8, 1)
        print("leaving")
        """
    ended = subprocess.run([sys.executable, "-c", textwrap.dedent(script)], capture_output=True, timeout=WAIT_S)
    assert (ended.returncode, ended.stdout, ended.stderr) == (0, b"leaving\n", b"")


def test_closing_in_a_forked_child_leaves_the_parents_worker_alone(paths):
    script = f"""
        import os, warnings
        from subetha.pass_registry import Pass, register
        from subetha.scheduler import BackgroundScheduler

        # From Python 3.12 on a fork with threads warns.
        warnings.simplefilter("ignore", DeprecationWarning)
        register(1, bytes.upper)
        scheduler = BackgroundScheduler.start({str(paths[0])!r}, {str(paths[1])!r}, {str(paths[2])!r}, 8, 1)
        child = os.fork()
        if child == 0:
            scheduler.close({WAIT_S})
            os._exit(17)
        _, status = os.waitpid(child, 0)
        assert os.waitstatus_to_exitcode(status) == 17, status
        assert scheduler.heartbeat().snapshot(scheduler.slot_idx()).pid == os.getpid()
        scheduler.submitter().submit(Pass(1, b"a"))
        assert scheduler.collector().recv({WAIT_S}).result == b"A"
        scheduler.close({WAIT_S})
        print("served")
        """
    ended = subprocess.run([sys.executable, "-c", textwrap.dedent(script)], capture_output=True, timeout=WAIT_S)
    assert (ended.returncode, ended.stdout, ended.stderr) == (0, b"served\n", b"")


# --- a worker that broke --------------------------------------------------------------------------------------------


class BreakingTransport(DequeTransport):
    """Raises OSError from the moment on that `broken` is set."""

    def __init__(self):
        super().__init__()
        self.broken = threading.Event()

    def try_pop(self):
        if self.broken.is_set():
            raise OSError("the disk is gone")
        return super().try_pop()


@pytest.fixture
def broken(tmp_path, registry):
    """A scheduler whose worker thread has ended with an OSError."""
    submit = BreakingTransport()
    scheduler = BackgroundScheduler.start_with_transports(
        submit, DequeTransport(), tmp_path / "table", 1, registry=registry
    )
    submit.broken.set()
    scheduler._thread.join(WAIT_S)
    yield scheduler
    try:
        scheduler.close(WAIT_S)
    except SchedError:
        return


def test_an_error_that_ended_the_worker_is_raised_by_submit(broken):
    for _ in range(2):
        with pytest.raises(SchedError, match="OSError: the disk is gone") as raised:
            broken.submitter().submit(Pass(ECHO, b""))
        assert raised.value.__cause__ is broken.error
    assert isinstance(broken.error, OSError)


def test_an_error_that_ended_the_worker_is_raised_once_by_close_which_still_closes(broken, tmp_path):
    with pytest.raises(SchedError, match="OSError: the disk is gone") as raised:
        broken.close(WAIT_S)
    assert raised.value.__cause__ is broken.error
    broken.close(WAIT_S)
    with pytest.raises(ValueError, match="closed"):
        broken.submitter().submit(Pass(ECHO, b""))
    with HeartbeatTable.open(tmp_path / "table") as table:
        assert table.snapshot(broken.slot_idx()) is None


def test_submitting_after_close_raises_value_error_also_where_the_worker_died_during_the_close(tmp_path, registry):
    submit = BreakingTransport()
    scheduler = BackgroundScheduler.start_with_transports(
        submit, DequeTransport(), tmp_path / "table", 1, registry=registry
    )
    submitter = scheduler.submitter()
    close_submitter = submitter.close

    def worker_dies_behind_it():
        close_submitter()
        submit.broken.set()
        scheduler._thread.join(WAIT_S)

    submitter.close = worker_dies_behind_it
    with pytest.raises(SchedError, match="the disk is gone"):
        scheduler.close(WAIT_S)
    with pytest.raises(ValueError, match="closed"):
        submitter.submit(Pass(ECHO, b""))


def test_an_error_that_ended_the_worker_leaves_a_with_block(broken):
    with pytest.raises(SchedError, match="the disk is gone"), broken:
        assert isinstance(broken.error, OSError)


def test_an_error_that_ended_the_worker_ends_a_submit_that_waits_for_room(tmp_path, registry):
    submit = BreakingTransport()
    submit.capacity = 0
    scheduler = BackgroundScheduler.start_with_transports(
        submit, DequeTransport(), tmp_path / "table", 1, registry=registry
    )
    submitting = in_thread(lambda: scheduler.submitter().submit(Pass(ECHO, b"")))
    submit.broken.set()
    with pytest.raises(SchedError, match="the disk is gone"):
        submitting()
    with pytest.raises(SchedError, match="the disk is gone"):
        scheduler.close(WAIT_S)


def test_a_ring_that_somebody_closed_under_the_worker_is_told_and_not_spun_on(paths, registry):
    with SharedRing.create(paths[0], 2) as submit, SharedRing.create(paths[1], 2) as result:
        scheduler = BackgroundScheduler.start_with_transports(submit, result, paths[2], 1, registry=registry)
        submit.close()
        scheduler._thread.join(WAIT_S)
        assert isinstance(scheduler.error, ValueError)
        with pytest.raises(SchedError, match="ValueError"):
            scheduler.close(WAIT_S)

"""One contract over every transport, and the adapters that make transports meet it."""

import collections
import itertools
import threading
from contextlib import contextmanager

import pytest

from subetha._core import SharedDeque, SharedRing
from subetha.errors import Empty, Full, PayloadTooLarge, UnsupportedTransportFamily
from subetha.jobqueue import JobQueue
from subetha.pass_registry import Pass
from subetha.transport import (
    AdaptedTransport,
    BlockingTransport,
    Claim,
    ClaimSource,
    MessageTransport,
    PairedSource,
    PlainTransport,
    adapt,
    backoff,
    blocking_claim,
    claims_reply,
    deadline,
    payload_limit,
    poll,
    pop_up_to,
    reply_limit,
)
from subetha.wire import decode_submit, encode_submit

WAIT_S = 30


class DequeTransport:
    """The least a transport has to have, in this process's memory."""

    def __init__(self, capacity):
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


class DequeClaim:
    def __init__(self, transport, message):
        self.transport = transport
        self.message = message
        self.calls = []

    def call(self, name):
        if not {"ack", "release"}.isdisjoint(self.calls):
            raise ValueError("this claim has ended")
        self.calls.append(name)

    @property
    def payload(self):
        self.call("payload")
        return memoryview(self.message)

    def started(self):
        self.call("started")

    def reply(self, payload):
        raise UnsupportedTransportFamily("no way back")

    def ack(self):
        self.call("ack")

    def release(self):
        self.call("release")
        self.transport.messages.appendleft(self.message)


class ClaimingDequeTransport(DequeTransport):
    """With claims, but no blocking calls."""

    def try_claim(self):
        return DequeClaim(self, self.try_pop())


class FakeTime:
    """A clock that only sleeping moves; `at` calls something when that many sleeps are done."""

    def __init__(self):
        self.now = 1000.0
        self.sleeps = []
        self.at = {}

    def clock(self):
        return self.now

    def sleep(self, seconds):
        self.sleeps.append(seconds)
        self.now += seconds
        self.at.get(len(self.sleeps), lambda: None)()


# --- the contract ---------------------------------------------------------------------------------------------------
#
# Each entry makes a transport with room for `capacity` messages, through adapt() as the engine uses it. Messages are
# submit frames, and only the pass in them is compared: a transport that numbers its messages itself sets the token.


@contextmanager
def ring(folder, capacity):
    with SharedRing.create(folder / "ring", capacity) as transport:
        yield adapt(transport)


@contextmanager
def shared_deque(folder, capacity):
    with SharedDeque.create(folder / "deque", capacity) as transport:
        yield adapt(transport)


@contextmanager
def thief_and_owner(folder, capacity):
    """What is pushed through the owner's handle is taken through a thief's."""
    with SharedDeque.create(folder / "deque", capacity) as owner, SharedDeque.open_as_thief(folder / "deque") as thief:
        taking = adapt(thief)
        taking.try_push, taking.push = owner.try_push, adapt(owner).push
        yield taking


@contextmanager
def plain_deque(folder, capacity):
    yield adapt(DequeTransport(capacity))


@contextmanager
def claiming_deque(folder, capacity):
    yield adapt(ClaimingDequeTransport(capacity))


@contextmanager
def queue(folder, capacity):
    with JobQueue.create(folder / "queue", 16, arena_bytes=2**16, quota=capacity) as made:
        yield adapt(made.submit_side)


TRANSPORTS = [ring, queue, shared_deque, thief_and_owner, plain_deque, claiming_deque]
CAPACITY = 4


@pytest.fixture(params=TRANSPORTS, ids=lambda made: made.__name__)
def transport(request, tmp_path):
    with request.param(tmp_path, CAPACITY) as made:
        yield made


def frame(number):
    return encode_submit(number, 1, b"message %d" % number)


def number_of(payload):
    _, pass_ = decode_submit(payload)
    assert pass_ == Pass(pass_.closure_id, b"message %d" % pass_.closure_id)
    return pass_.closure_id


def in_thread(call):
    """Run `call` in a thread; the function returned waits for its result."""
    outcome = []
    thread = threading.Thread(target=lambda: outcome.append(call()), daemon=True)
    thread.start()

    def result():
        thread.join(WAIT_S)
        assert not thread.is_alive(), "the call still blocks"
        return outcome[0]

    return result


def test_a_transport_has_every_call_of_the_protocols(transport):
    assert isinstance(transport, BlockingTransport)
    assert isinstance(transport, MessageTransport)


def test_messages_come_out_first_in_first_out_at_their_exact_length(transport):
    for number in range(CAPACITY):
        transport.try_push(frame(number))
    assert [number_of(transport.try_pop()) for _ in range(CAPACITY)] == list(range(CAPACITY))


@pytest.mark.parametrize("wrap", [bytes, bytearray, memoryview])
def test_a_message_may_be_any_buffer_and_comes_out_as_bytes(transport, wrap):
    transport.try_push(wrap(frame(1)))
    message = transport.try_pop()
    assert type(message) is bytes
    assert number_of(message) == 1


def test_an_empty_transport_raises_empty_from_every_call_that_takes(transport):
    for call in (transport.try_pop, transport.try_claim, lambda: transport.pop(0), lambda: transport.claim(0)):
        with pytest.raises(Empty):
            call()


def test_a_full_transport_raises_full_and_keeps_what_it_has(transport):
    for number in range(CAPACITY):
        transport.try_push(frame(number))
    for call in (lambda: transport.try_push(frame(99)), lambda: transport.push(frame(99), 0)):
        with pytest.raises(Full):
            call()
    assert [number_of(transport.try_pop()) for _ in range(CAPACITY)] == list(range(CAPACITY))
    with pytest.raises(Empty):
        transport.try_pop()


def test_each_message_taken_makes_room_for_one_over_many_laps(transport):
    for number in range(CAPACITY - 1):
        transport.push(frame(number))
    for number in range(CAPACITY - 1, 20 * CAPACITY):
        transport.push(frame(number))
        assert number_of(transport.pop()) == number - CAPACITY + 1


def test_blocking_calls_give_up_at_their_timeout(transport):
    for call in (lambda: transport.pop(0.01), lambda: transport.claim(0.01)):
        with pytest.raises(Empty):
            call()
    for number in range(CAPACITY):
        transport.try_push(frame(number))
    with pytest.raises(Full):
        transport.push(frame(99), 0.01)


@pytest.mark.parametrize("take", ["pop", "claim"])
def test_a_blocked_taker_gets_the_message_that_another_thread_pushes(transport, take):
    taken = in_thread(lambda: getattr(transport, take)(WAIT_S))
    transport.push(frame(5), WAIT_S)
    message = taken()
    assert number_of(message.payload if take == "claim" else message) == 5


def test_a_blocked_push_goes_in_when_another_thread_makes_room(transport):
    for number in range(CAPACITY):
        transport.try_push(frame(number))
    pushed = in_thread(lambda: (transport.push(frame(CAPACITY), WAIT_S), "in")[1])
    assert number_of(transport.pop(WAIT_S)) == 0
    assert pushed() == "in"
    assert [number_of(transport.try_pop()) for _ in range(CAPACITY)] == list(range(1, CAPACITY + 1))


def test_a_claim_shows_its_message_and_keeps_it_from_others(transport):
    transport.try_push(frame(1))
    transport.try_push(frame(2))
    first = transport.try_claim()
    second = transport.claim(0)
    assert isinstance(first, Claim)
    assert [number_of(first.payload), number_of(second.payload)] == [1, 2]
    with pytest.raises(Empty):
        transport.try_claim()
    with pytest.raises(Empty):
        transport.try_pop()


def test_an_acknowledged_message_is_gone(transport):
    transport.try_push(frame(1))
    claim = transport.try_claim()
    claim.started()
    claim.ack()
    with pytest.raises(Empty):
        transport.try_claim()


@pytest.mark.parametrize("started", [False, True])
def test_a_released_message_comes_out_again(transport, started):
    transport.try_push(frame(1))
    claim = transport.try_claim()
    if started:
        claim.started()
    claim.release()
    again = transport.try_claim()
    assert number_of(again.payload) == 1
    again.release()
    assert number_of(transport.try_pop()) == 1


@pytest.mark.parametrize("end", ["ack", "release"])
def test_an_ended_claim_ends_no_second_time(transport, end):
    transport.try_push(frame(1))
    transport.try_push(frame(2))
    claim = transport.try_claim()
    getattr(claim, end)()
    for call in (claim.ack, claim.release, claim.started, lambda: claim.payload):
        with pytest.raises(ValueError, match="claim"):
            call()
    left = sorted(number_of(message) for message in pop_up_to(transport, CAPACITY))
    assert left == ([2] if end == "ack" else [1, 2])


def test_a_claim_without_a_way_back_says_so_and_stays_held(transport):
    if claims_reply(transport):
        pytest.skip("its claims reply")
    transport.try_push(frame(1))
    claim = transport.try_claim()
    with pytest.raises(UnsupportedTransportFamily):
        claim.reply(b"result")
    claim.release()
    assert number_of(transport.try_pop()) == 1


def test_pop_up_to_takes_what_is_there_and_no_more_than_asked_for(transport):
    assert pop_up_to(transport, 3) == []
    for number in range(CAPACITY):
        transport.try_push(frame(number))
    assert pop_up_to(transport, 0) == []
    assert [number_of(message) for message in pop_up_to(transport, 3)] == [0, 1, 2]
    assert [number_of(message) for message in pop_up_to(transport, 3)] == [3]


def test_every_message_of_many_producers_reaches_one_of_many_consumers_once(transport):
    producers, consumers, each = 3, 3, 200
    seen = [[] for _ in range(consumers)]
    left = itertools.count(producers * each - 1, -1)

    def produce(producer):
        for sequence in range(each):
            transport.push(frame(producer * each + sequence), WAIT_S)

    def consume(mine):
        while next(left) >= 0:
            claim = transport.claim(WAIT_S)
            mine.append(number_of(claim.payload))
            claim.ack()

    waits = [in_thread(lambda p=p: produce(p)) for p in range(producers)]
    waits += [in_thread(lambda mine=mine: consume(mine)) for mine in seen]
    for wait in waits:
        wait()
    assert sorted(itertools.chain(*seen)) == list(range(producers * each))
    for mine, producer in itertools.product(seen, range(producers)):
        in_order = [number for number in mine if number // each == producer]
        assert in_order == sorted(in_order)


# --- protocols ------------------------------------------------------------------------------------------------------


def test_the_protocols_tell_transports_apart_by_their_calls():
    plain, claiming = DequeTransport(1), ClaimingDequeTransport(1)
    assert isinstance(plain, PlainTransport)
    assert not isinstance(plain, MessageTransport)
    assert isinstance(claiming, MessageTransport)
    assert not isinstance(claiming, BlockingTransport)
    assert isinstance(PairedSource(plain, claiming), ClaimSource)
    assert not isinstance(object(), PlainTransport)


def test_the_optional_attributes_default_to_no_limit_and_no_way_back():
    plain = DequeTransport(1)
    assert (payload_limit(plain), reply_limit(plain), claims_reply(plain)) == (None, None, False)
    plain.payload_bytes = 100
    plain.claims_reply = True
    assert (payload_limit(plain), reply_limit(plain), claims_reply(plain)) == (100, 100, True)
    plain.reply_bytes = 50
    assert reply_limit(plain) == 50


# --- waiting --------------------------------------------------------------------------------------------------------


def test_the_pauses_double_from_50_us_to_10_ms():
    pauses = list(itertools.islice(backoff(), 10))
    assert pauses[:8] == pytest.approx([50e-6 * 2**n for n in range(8)])
    assert pauses[8:] == [10e-3, 10e-3]


@pytest.mark.parametrize("timeout", [-1, -1e-9, float("nan")])
def test_a_timeout_that_is_no_length_of_time_is_refused(timeout):
    with pytest.raises(ValueError, match="at least 0 seconds"):
        deadline(timeout, lambda: 0.0)


def test_a_deadline_is_the_clock_plus_the_timeout():
    assert deadline(2.5, lambda: 1000.0) == 1002.5
    assert deadline(0, lambda: 1000.0) == 1000.0
    assert deadline(None, lambda: 1000.0) == float("inf")


def test_polling_sleeps_between_its_looks_and_not_past_its_deadline():
    time = FakeTime()
    looks = []

    def attempt():
        looks.append(time.now)
        raise Empty("nothing")

    with pytest.raises(Empty, match="nothing"):
        poll(attempt, Empty, 1.0, clock=time.clock, sleep=time.sleep)
    assert sum(time.sleeps) == pytest.approx(1.0)
    assert max(time.sleeps) <= 10e-3
    assert len(looks) == len(time.sleeps) + 1
    assert looks[-1] == pytest.approx(1001.0)


def test_polling_with_a_timeout_of_zero_looks_once_and_does_not_sleep():
    time = FakeTime()
    with pytest.raises(Full):
        poll(lambda: DequeTransport(0).try_push(b"x"), Full, 0, clock=time.clock, sleep=time.sleep)
    assert time.sleeps == []


def test_polling_lets_every_other_exception_pass():
    def attempt():
        raise OSError("gone")

    with pytest.raises(OSError, match="gone"):
        poll(attempt, Empty, None)


# --- adapt ----------------------------------------------------------------------------------------------------------


def test_a_transport_with_every_call_is_not_wrapped(tmp_path):
    with SharedRing.create(tmp_path / "ring", 2) as ring:
        assert adapt(ring) is ring


def test_a_deque_as_a_transport_is_stolen_from_and_never_popped(tmp_path):
    with SharedDeque.create(tmp_path / "deque", 4) as owner, SharedDeque.open_as_thief(tmp_path / "deque") as thief:
        assert isinstance(owner, MessageTransport)
        owner.push_batch([b"first", b"second", b"third"])
        # the owner's pop would give the last one, and a thief's NotOwner
        assert adapt(owner).pop(0) == b"first"
        assert adapt(thief).pop(None) == b"second"
        assert pop_up_to(thief, 5) == [b"third"]
        with pytest.raises(Empty):
            adapt(thief).pop(0.001)


@pytest.mark.parametrize("lacking", ["try_push", "try_pop"])
def test_a_transport_that_lacks_the_least_is_refused_with_the_missing_call_named(lacking):
    class Half:
        pass

    for name in {"try_push", "try_pop"} - {lacking}:
        setattr(Half, name, lambda self, *payload: None)
    with pytest.raises(UnsupportedTransportFamily, match=f"Half, has no {lacking};"):
        adapt(Half())


@pytest.mark.parametrize("made", [DequeTransport, ClaimingDequeTransport])
def test_adapted_blocking_calls_poll_on_the_clock_given(made):
    time = FakeTime()
    bare = made(1)
    transport = adapt(bare, clock=time.clock, sleep=time.sleep)
    time.at[7] = lambda: bare.try_push(b"late")
    assert transport.pop(5.0) == b"late"
    time.at[14] = lambda: bare.try_push(b"later")
    claim = transport.claim(5.0)
    assert claim.payload == b"later"
    bare.try_push(b"in the way")
    time.at[21] = bare.try_pop
    transport.push(b"pushed", 5.0)
    assert bare.try_pop() == b"pushed"
    assert len(time.sleeps) == 21


def test_adapted_calls_use_the_blocking_calls_a_transport_has():
    class Blocking(DequeTransport):
        def push(self, payload, timeout):
            self.pushed = (payload, timeout)
            return 77

        def pop(self, timeout):
            return b"popped %d" % timeout

        def pop_many(self, n):
            return [b"many"] * n

    bare = Blocking(1)
    transport = adapt(bare)
    assert transport.push(b"x", 3) == 77
    assert bare.pushed == (b"x", 3)
    assert transport.pop(4) == b"popped 4"
    # Without try_claim it is popped, and waits by the transport's own call.
    assert transport.claim(5).payload == b"popped 5"
    assert pop_up_to(transport, 2) == [b"many", b"many"]


def test_an_adapted_claim_uses_the_blocking_claim_a_transport_has():
    class Claiming(ClaimingDequeTransport):
        def claim(self, timeout):
            return DequeClaim(self, b"claimed %d" % timeout)

    assert adapt(Claiming(1)).claim(4).payload == b"claimed 4"
    assert blocking_claim(Claiming(1))(6).payload == b"claimed 6"


def test_an_adapted_transport_passes_on_limit_number_and_way_back():
    class Numbering(ClaimingDequeTransport):
        payload_bytes = 123
        claims_reply = True

        def try_push(self, payload):
            super().try_push(payload)
            return 2**40 + 5

    transport = adapt(Numbering(2))
    assert isinstance(transport, AdaptedTransport)
    assert (payload_limit(transport), claims_reply(transport)) == (123, True)
    assert transport.try_push(b"x") == 2**40 + 5
    assert transport.push(b"x") == 2**40 + 5


def test_a_popped_message_has_no_way_back_whatever_its_transport_says():
    bare = DequeTransport(1)
    bare.claims_reply = True
    assert not claims_reply(adapt(bare))


def test_a_popped_claim_is_released_to_the_end_of_the_queue():
    transport = adapt(DequeTransport(2))
    transport.try_push(b"first")
    transport.try_push(b"second")
    transport.try_claim().release()
    assert pop_up_to(transport, 2) == [b"second", b"first"]


def test_a_popped_claim_without_room_to_go_back_stays_held():
    transport = adapt(DequeTransport(1))
    transport.try_push(b"first")
    claim = transport.try_claim()
    transport.try_push(b"second")
    with pytest.raises(Full):
        claim.release()
    assert claim.payload == b"first"
    assert transport.try_pop() == b"second"
    claim.release()
    assert transport.try_pop() == b"first"


def test_a_blocking_claim_polls_a_source_that_has_none():
    time = FakeTime()
    source = ClaimingDequeTransport(1)
    time.at[3] = lambda: source.try_push(b"late")
    assert blocking_claim(source, clock=time.clock, sleep=time.sleep)(5.0).payload == b"late"
    with pytest.raises(Empty):
        blocking_claim(source, clock=time.clock, sleep=time.sleep)(0)
    assert len(time.sleeps) == 3


def test_pop_up_to_refuses_a_negative_number():
    with pytest.raises(ValueError, match="-1"):
        pop_up_to(DequeTransport(1), -1)


def test_pop_up_to_hands_out_what_it_took_before_an_error():
    class Breaking(DequeTransport):
        def try_pop(self):
            if not self.messages:
                raise OSError("gone")
            return super().try_pop()

    bare = Breaking(2)
    bare.try_push(b"only")
    assert pop_up_to(bare, 2) == [b"only"]
    with pytest.raises(OSError, match="gone"):
        pop_up_to(bare, 2)


# --- paired sources -------------------------------------------------------------------------------------------------


@pytest.fixture
def time():
    return FakeTime()


def paired(source, result, time):
    return PairedSource(source, result, reply_wait=0.1, clock=time.clock, sleep=time.sleep)


@pytest.mark.parametrize("made", [DequeTransport, ClaimingDequeTransport])
def test_a_paired_reply_goes_into_the_result_transport_and_ends_the_claim(made, time):
    source, result = made(2), DequeTransport(2)
    source.try_push(b"job")
    claim = paired(source, result, time).claim(0)
    assert isinstance(claim, Claim)
    assert claim.payload == b"job"
    claim.started()
    claim.reply(b"done")
    assert result.try_pop() == b"done"
    for transport in (source, result):
        with pytest.raises(Empty):
            transport.try_pop()


def test_a_paired_reply_is_pushed_before_the_job_is_acknowledged(time):
    source, result = ClaimingDequeTransport(1), DequeTransport(1)
    source.try_push(b"job")
    held = source.try_claim()
    source.try_claim = lambda: held
    acknowledged_at_push = []
    push = result.try_push
    result.try_push = lambda payload: (acknowledged_at_push.append("ack" in held.calls), push(payload))[1]
    paired(source, result, time).try_claim().reply(b"done")
    assert acknowledged_at_push == [False]
    assert held.calls == ["ack"]


def test_a_paired_reply_waits_a_bounded_time_for_room_and_then_still_holds_the_claim(time):
    source, result = ClaimingDequeTransport(1), DequeTransport(1)
    source.try_push(b"job")
    result.try_push(b"in the way")
    claim = paired(source, result, time).try_claim()
    with pytest.raises(Full):
        claim.reply(b"done")
    assert time.now == pytest.approx(1000.1)
    time.at[len(time.sleeps) + 3] = result.try_pop
    claim.reply(b"done")
    assert result.try_pop() == b"done"
    with pytest.raises(Empty):
        source.try_claim()


@pytest.mark.parametrize("end", ["ack", "release"])
def test_a_paired_claim_passes_on_how_it_ends(end, time):
    source = ClaimingDequeTransport(1)
    source.try_push(b"job")
    held = source.try_claim()
    source.try_claim = lambda: held
    claim = paired(source, DequeTransport(1), time).try_claim()
    claim.started()
    getattr(claim, end)()
    assert held.calls == ["started", end]


def test_a_paired_source_takes_its_reply_limit_from_the_result_side(tmp_path, time):
    result = DequeTransport(1)
    assert reply_limit(paired(DequeTransport(1), result, time)) is None
    with SharedRing.create(tmp_path / "ring", 2, payload_bytes=120) as ring:
        assert reply_limit(paired(DequeTransport(1), ring, time)) == 120
    assert claims_reply(paired(DequeTransport(1), result, time))


def test_a_paired_source_needs_two_different_transports_with_the_least_calls():
    same = DequeTransport(1)
    with pytest.raises(ValueError, match="same"):
        PairedSource(same, same)
    with pytest.raises(UnsupportedTransportFamily, match="submit transport, a object,"):
        PairedSource(object(), same)
    with pytest.raises(UnsupportedTransportFamily, match="result transport, a object,"):
        PairedSource(same, object())


def test_a_paired_job_stays_in_its_ring_until_the_result_is_out(tmp_path, time):
    with SharedRing.create(tmp_path / "jobs", 2) as jobs, SharedRing.create(tmp_path / "results", 2) as results:
        jobs.try_push(b"job")
        for filler in (b"a", b"b"):
            results.try_push(filler)
        claim = PairedSource(jobs, results, reply_wait=0).try_claim()
        with pytest.raises(Full):
            claim.reply(b"done")
        claim.release()
        assert jobs.try_pop() == b"job"
        assert results.pop_many(5) == [b"a", b"b"]


def test_a_ring_refuses_a_message_longer_than_its_payload(tmp_path):
    with SharedRing.create(tmp_path / "ring", 2) as ring:
        for call in (ring.try_push, lambda payload: adapt(ring).push(payload, 0)):
            with pytest.raises(PayloadTooLarge, match=r"\b56\b.*\b57\b"):
                call(bytes(57))

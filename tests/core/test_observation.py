"""ObservationRing: what is recorded, what is dropped, and what each structure records of itself."""

import os
import threading
import time

import numpy as np
import pytest
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from subetha import JobQueue, Pass
from subetha._core import HeartbeatTable, ObservationRing, SharedDeque, SharedHashMap, SharedRing, encode_result
from subetha.errors import Empty, Full
from subetha.layout import OBSERVATION, Op, WaitTag

WAIT_S = 30


def seen(ring, *fields):
    """The records that are there, as tuples; without `fields`: op, value, flags."""
    records = ring.drain()
    return [tuple(int(record[name]) for name in fields or ("op", "value", "flags")) for record in records]


@pytest.fixture
def ring():
    made = ObservationRing(8)
    made.arm()
    return made


def test_a_record_has_24_bytes():
    assert OBSERVATION.itemsize == 24


def test_a_ring_that_nobody_listens_to_records_nothing_and_drops_nothing():
    ring = ObservationRing(4)
    assert not ring.armed
    for _ in range(10):
        assert not ring.record(Op.PUSH)
    assert (len(ring), len(ring.drain()), ring.dropped) == (0, 0, 0)


def test_records_come_out_in_order_with_what_was_recorded(ring):
    before = time.monotonic_ns()
    assert ring.record(Op.PUSH, 3)
    assert ring.record(Op.WAIT, 2**64 - 1, 2**16 - 1)
    after = time.monotonic_ns()
    assert len(ring) == 2
    records = ring.drain()
    assert records.dtype == OBSERVATION
    assert records["op"].tolist() == [Op.PUSH, Op.WAIT]
    assert records["value"].tolist() == [3, 2**64 - 1]
    assert records["flags"].tolist() == [0, 2**16 - 1]
    assert before <= records["time_ns"][0] <= records["time_ns"][1] <= after
    assert len(ring) == len(ring.drain()) == 0


def test_a_full_ring_drops_the_new_records_and_counts_them(ring):
    for n in range(11):
        assert ring.record(Op.PUSH, n) == (n < 8)
    assert ring.dropped == 3
    assert seen(ring, "value") == [(n,) for n in range(8)]
    assert ring.record(Op.PUSH, 99)
    assert seen(ring, "value") == [(99,)]
    assert ring.dropped == 3


def test_what_was_recorded_stays_when_nobody_listens_any_more(ring):
    ring.record(Op.PUSH, 1)
    ring.disarm()
    ring.disarm()
    assert not ring.armed
    assert not ring.record(Op.PUSH, 2)
    assert seen(ring, "value") == [(1,)]


def test_only_the_operations_that_were_asked_for_are_recorded(ring):
    ring.arm([Op.WAIT, Op.YIELD])
    for op in Op:
        ring.record(op)
    assert seen(ring, "op") == [(Op.WAIT,), (Op.YIELD,)]
    ring.arm(())
    assert not ring.armed
    ring.arm()
    for op in list(Op)[:8]:
        assert ring.record(op)


@pytest.mark.parametrize("op", [0, 63, 64, -1])
def test_an_operation_that_there_is_not_is_refused(ring, op):
    with pytest.raises(ValueError, match="Op"):
        ring.record(op)
    with pytest.raises(ValueError, match="Op"):
        ring.arm([op])


@pytest.mark.parametrize(("value", "flags"), [(-1, 0), (2**64, 0), (0, -1), (0, 2**16)])
def test_numbers_that_a_record_cannot_hold_are_refused(ring, value, flags):
    with pytest.raises((ValueError, OverflowError)):
        ring.record(Op.PUSH, value, flags)
    assert len(ring) == 0


@pytest.mark.parametrize("capacity", [0, 1, 3, 2**21])
def test_a_capacity_is_a_power_of_two(capacity):
    with pytest.raises(ValueError, match="capacity"):
        ObservationRing(capacity)


class Observations(RuleBasedStateMachine):
    """A ring of 4 against a list, over many laps."""

    def __init__(self):
        super().__init__()
        self.ring = ObservationRing(4)
        self.armed = False
        self.kept = []
        self.dropped = 0

    @rule(value=st.integers(0, 2**64 - 1), flags=st.integers(0, 2**16 - 1), op=st.sampled_from(list(Op)))
    def record(self, value, flags, op):
        recorded = self.ring.record(op, value, flags)
        assert recorded == (self.armed and len(self.kept) < 4)
        if recorded:
            self.kept.append((op, value, flags))
        elif self.armed:
            self.dropped += 1

    @rule()
    def drain(self):
        assert seen(self.ring) == self.kept
        self.kept = []

    @rule(armed=st.booleans())
    def arm(self, armed):
        self.ring.arm() if armed else self.ring.disarm()
        self.armed = armed

    @invariant()
    def counts_are_right(self):
        assert (len(self.ring), self.ring.dropped, self.ring.armed) == (len(self.kept), self.dropped, self.armed)


TestObservations = Observations.TestCase


def test_with_threads_every_record_comes_once_and_in_the_order_of_its_writer_or_is_counted_as_dropped(shm):
    """The writers push into rings of their own that share nothing but the observations of one handle."""
    ring = ObservationRing(64)
    ring.arm()
    writers, each = 4, 20_000
    recorded = [0] * writers

    def write(number):
        for n in range(each):
            recorded[number] += ring.record(Op.PUSH, number << 32 | n)

    threads = [threading.Thread(target=write, args=(n,)) for n in range(writers)]
    for thread in threads:
        thread.start()
    taken = []
    while any(thread.is_alive() for thread in threads):
        taken.append(ring.drain())
    taken.append(ring.drain())
    values = np.concatenate(taken)["value"]
    assert len(values) == sum(recorded)
    assert len(values) + ring.dropped == writers * each
    for number in range(writers):
        own = values[values >> np.uint64(32) == number]
        assert len(own) == recorded[number]
        assert (np.diff(own.astype(np.int64)) > 0).all()


def test_two_readers_get_each_record_once(ring):
    got = [[], []]
    done = threading.Event()

    def read(mine):
        while not done.is_set():
            mine += [int(value) for value in ring.drain()["value"]]

    threads = [threading.Thread(target=read, args=(mine,)) for mine in got]
    for thread in threads:
        thread.start()
    recorded = [n for n in range(20_000) if ring.record(Op.PUSH, n)]
    done.set()
    for thread in threads:
        thread.join(WAIT_S)
    rest = [int(value) for value in ring.drain()["value"]]
    assert sorted(got[0] + got[1] + rest) == recorded


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_a_forked_child_has_nobody_who_listens(ring):
    ring.record(Op.PUSH, 1)
    child = os.fork()
    if child == 0:
        good = not ring.armed and not ring.record(Op.PUSH, 2) and len(ring) == len(ring.drain()) == 0
        ring.arm()
        good = good and ring.armed and ring.record(Op.POP, 3) and seen(ring) == [(Op.POP, 3, 0)]
        os._exit(0 if good else 1)
    assert os.waitpid(child, 0)[1] == 0
    assert seen(ring) == [(Op.PUSH, 1, 0)]


# --- what structures record -----------------------------------------------------------------------------------------


@pytest.fixture(params=[SharedRing, SharedDeque])
def messages(request, shm):
    with request.param.create(shm / "messages", 4) as made:
        yield made


def many(messages):
    return (messages.push_many if isinstance(messages, SharedRing) else messages.push_batch), (
        messages.pop_many if isinstance(messages, SharedRing) else messages.steal_many
    )


def test_a_ring_and_a_deque_record_what_is_put_in_and_taken(messages):
    push_many, pop_many = many(messages)
    messages.ring.arm()
    messages.try_push(b"1")
    messages.push(b"2")
    push_many([b"3", b"4"])
    with pytest.raises(Full):
        messages.try_push(b"5")
    messages.try_pop()
    messages.try_claim().ack()
    assert len(pop_many(9)) == 2
    assert pop_many(9) == []
    with pytest.raises(Empty):
        messages.try_pop()
    with pytest.raises(Empty):
        messages.try_claim()
    assert seen(messages.ring) == [
        (Op.PUSH, 1, 0),
        (Op.PUSH, 1, 0),
        (Op.PUSH, 2, 0),
        (Op.PUSH, 0, 1),
        (Op.POP, 1, 0),
        (Op.CLAIM, 1, 0),
        (Op.POP, 2, 0),
        (Op.POP, 0, 1),
        (Op.POP, 0, 1),
        (Op.CLAIM, 0, 1),
    ]


def test_a_disarmed_structure_records_nothing(messages):
    messages.try_push(b"1")
    messages.try_pop()
    assert len(messages.ring.drain()) == messages.ring.dropped == 0
    assert messages.ring is messages.ring
    assert messages.header is messages.header


def test_a_table_records_who_registers_beats_and_marks(shm):
    with HeartbeatTable.create(shm / "table", 4) as table:
        table.register(1)
        table.ring.arm()
        slot = table.register(2)
        table.beat(slot)
        table.mark_in_flight(slot, 5)
        assert seen(table.ring) == [(Op.REGISTER, slot, 0), (Op.BEAT, slot, 0), (Op.MARK, slot, 0)]


def test_a_map_records_lookups_changes_and_those_that_found_or_changed_nothing(shm):
    with SharedHashMap.create(shm / "map", 4) as shared:
        shared.ring.arm()
        shared[b"k"] = b"four"
        assert shared.get(b"k") == b"four"
        assert shared.get(b"other") is None
        assert b"k" in shared
        assert b"other" not in shared
        assert shared.setdefault(b"k", b"another") == b"four"
        assert not shared.compare_and_swap(b"k", b"wrong", b"x")
        assert shared.pop(b"k") == b"four"
        assert shared.pop(b"k", None) is None
        with pytest.raises(KeyError):
            del shared[b"k"]
        shared[b"last"] = b""
        assert shared.popitem() == (b"last", b"")
        found = seen(shared.ring)
    assert found == [
        (Op.PUT, 4, 0),
        (Op.GET, 4, 0),
        (Op.GET, 0, 1),
        (Op.GET, 4, 0),
        (Op.GET, 0, 1),
        (Op.PUT, 7, 1),
        (Op.PUT, 1, 1),
        (Op.REMOVE, 1, 0),
        (Op.REMOVE, 0, 1),
        (Op.REMOVE, 0, 1),
        (Op.PUT, 0, 0),
        (Op.REMOVE, 1, 0),
    ]


def test_a_queue_records_jobs_handed_in_claimed_and_received(shm):
    with JobQueue.create(shm / "queue", cells=16, quota=1) as queue:
        queue.ring.arm()
        queue.submit(Pass(1))
        with pytest.raises(Full):
            queue.submit(Pass(1), wait=0)
        queue.try_claim().reply(encode_result(0, b""))
        with pytest.raises(Empty):
            queue.try_claim()
        queue.try_recv()
        with pytest.raises(Empty):
            queue.try_recv()
        assert queue.recv_many(3) == []
        found = seen(queue.ring)
    assert found == [
        (Op.PUSH, 1, 0),
        (Op.PUSH, 0, 1),
        (Op.CLAIM, 1, 0),
        (Op.CLAIM, 0, 1),
        (Op.POP, 1, 0),
        (Op.POP, 0, 1),
        (Op.POP, 0, 1),
    ]


# --- waits, and their strategy --------------------------------------------------------------------------------------


@pytest.fixture(params=["ring", "deque", "queue"])
def taker(request, shm):
    """A handle that is taken from, with how to put something in and how to claim it."""
    if request.param == "queue":
        with JobQueue.create(shm / "taken", cells=16) as queue:
            assert queue.slot >= 0
            yield queue, lambda: queue.submit(Pass(1)), queue.claim
    else:
        kind = SharedRing if request.param == "ring" else SharedDeque
        with kind.create(shm / "taken", 16) as made:
            yield made, lambda: made.try_push(b"x"), made.claim


def test_a_gap_is_recorded_once_over_all_the_calls_that_waited_through_it(taker):
    handle, put, claim = taker
    handle.ring.arm([Op.WAIT])
    began = time.monotonic_ns()
    with pytest.raises(Empty):
        claim(0.01)
    first_is_over = time.monotonic_ns()
    for _ in range(2):
        with pytest.raises(Empty):
            claim(0.01)
    assert len(handle.ring) == 0
    at_least = time.monotonic_ns() - first_is_over
    put()
    claim(1).ack()
    at_most = time.monotonic_ns() - began
    put()
    claim(1).ack()
    ((value, flags),) = seen(handle.ring, "value", "flags")
    assert at_least <= value <= at_most
    assert flags == 0


@pytest.mark.parametrize("tag", list(WaitTag))
def test_whatever_the_strategy_a_waiting_claim_gets_what_comes(taker, tag):
    handle, put, claim = taker
    assert handle.apply_migration(tag)
    assert handle.header.tag == tag
    handle.ring.arm([Op.WAIT])
    for _ in range(20):
        later = threading.Timer(0.002, put)
        later.start()
        claim(WAIT_S).ack()
        later.join()
    assert len(handle.ring.drain()) <= 20
    assert handle.header.drain(0)


def test_a_handle_begins_with_the_brief_wait_and_knows_three(taker):
    handle, _, _ = taker
    assert handle.header.tag == WaitTag.BRIEF
    with pytest.raises(ValueError, match="WaitTag"):
        handle.apply_migration(3)
    assert handle.header.tag == WaitTag.BRIEF


def nothing_comes(claim):
    """How long (ns) a claim takes that gives up as soon as it may."""
    began = time.monotonic_ns()
    with pytest.raises(Empty):
        claim(1e-9)
    return time.monotonic_ns() - began


def some_are_under(limit, claim_once):
    """Whether one claim of many is faster than `limit` ns: a bound from above holds only where nothing else happens."""
    return any(claim_once() < limit for _ in range(20_000))


@pytest.mark.parametrize(("tag", "least", "under"), [(WaitTag.SLEEP, 0, 20_000), (WaitTag.BRIEF, 20_000, 100_000)])
def test_the_strategy_says_how_long_a_claim_looks_before_it_sleeps(taker, tag, least, under):
    handle, put, claim = taker
    assert handle.apply_migration(tag)

    def first():
        put()
        claim(1).ack()
        took = nothing_comes(claim)
        assert took >= least
        return took

    assert some_are_under(under, first)


def test_where_spinning_is_worth_it_a_claim_looks_for_100_us_but_only_the_first_of_a_gap(taker):
    handle, put, claim = taker
    assert handle.apply_migration(WaitTag.SPIN)

    def later():
        put()
        claim(1).ack()
        assert nothing_comes(claim) >= 100_000
        return nothing_comes(claim)

    assert some_are_under(100_000, later)


def test_a_migration_waits_for_no_sleeper_and_a_close_wakes_one_in_any_strategy(shm):
    for tag in WaitTag:
        with SharedRing.create(shm / f"ring{tag}", 4) as ring:
            assert ring.apply_migration(tag)
            ended = []

            def wait(ring=ring, ended=ended):
                try:
                    ring.claim()
                except ValueError as error:
                    ended.append(error)

            waiting = threading.Thread(target=wait)
            waiting.start()
            for other in (WaitTag.SLEEP, WaitTag.SPIN, WaitTag.BRIEF):
                assert ring.header.drain(WAIT_S)
                assert ring.apply_migration(other)
            ring.close()
            waiting.join(WAIT_S)
            assert len(ended) == 1

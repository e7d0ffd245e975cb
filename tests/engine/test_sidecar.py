"""The sidecar's thread, the policies, and who is an adaptive instance."""

import gc
import os
import threading
import time
import weakref

import numpy as np
import pytest

import subetha
from subetha import BackgroundScheduler, JobQueue, Pass, PassRegistry
from subetha._core import HeartbeatTable, SharedDeque, SharedHashMap, SharedRing
from subetha.errors import UnsupportedTransportFamily
from subetha.failover import FailoverWatchdog
from subetha.layout import OBSERVATION, Op, Role
from subetha.sidecar import (
    OP_WATCHDOG_SCAN,
    WAIT_BRIEF,
    WAIT_SLEEP,
    WAIT_SPIN,
    AdaptiveInstance,
    FixedPolicy,
    HandshakeHeader,
    InstanceStats,
    NoMigrationPolicy,
    ObservationRing,
    Policy,
    Sidecar,
    WaitingPolicy,
)

WAIT_S = 30


class Instance:
    """An adaptive instance whose migrations are written down."""

    def __init__(self, policy=None, tag=0):
        self.header = HandshakeHeader(tag)
        self.ring = ObservationRing(16)
        self.policy = policy
        self.applied = []
        self.changed = threading.Event()

    def make_policy(self):
        return self.policy

    def apply_migration(self, new_tag):
        self.applied.append(new_tag)
        if not self.header.migrate(new_tag):
            return False
        self.changed.set()
        return True


class Asked:
    """A policy that writes down what it is shown, and answers what the test says."""

    def __init__(self, answer=None):
        self.answer = answer
        self.shown = []
        self.asked = threading.Event()

    def decide(self, stats, current_tag):
        self.shown.append((stats, current_tag))
        self.asked.set()
        if isinstance(self.answer, BaseException):
            raise self.answer
        return current_tag if self.answer is None else self.answer


class Stuck(Asked):
    """A policy that does not return until the test lets it."""

    def __init__(self):
        super().__init__()
        self.go_on = threading.Event()

    def decide(self, stats, current_tag):
        super().decide(stats, current_tag)
        assert self.go_on.wait(WAIT_S)
        return current_tag


@pytest.fixture
def reports():
    return []


@pytest.fixture
def sidecar(reports):
    """A sidecar whose thread goes round once at each register, and then only after an hour: the test scans."""
    with Sidecar(busy_s=3600, idle_s=3600, report=reports.append) as made:
        yield made


def stats_of(*records, dropped=0):
    made = np.zeros(len(records), OBSERVATION)
    for n, (op, value, flags) in enumerate(records):
        made[n] = (n, value, op, flags, 1)
    return InstanceStats(made, dropped)


def settled(sidecar, instance):
    """Register it and wait for the scan that follows, so that the next one is the test's."""
    policy = Asked()
    sidecar.register(instance, policy)
    assert policy.asked.wait(WAIT_S)
    deadline = time.monotonic() + WAIT_S
    while sidecar._find(instance).scanning is not None:
        assert time.monotonic() < deadline
        time.sleep(0.001)
    policy.shown.clear()
    return policy


# --- who is an adaptive instance ------------------------------------------------------------------------------------


def test_rings_deques_maps_tables_queues_and_schedulers_are_adaptive_instances(shm):
    with (
        SharedRing.create(shm / "ring", 4) as ring,
        SharedDeque.create(shm / "deque", 4) as deque,
        SharedHashMap.create(shm / "map", 4) as shared,
        HeartbeatTable.create(shm / "table", 4) as table,
        JobQueue.create(shm / "queue", cells=16) as queue,
        BackgroundScheduler.start(shm / "s", shm / "r", shm / "t", 4, 4) as scheduler,
    ):
        for instance in (ring, deque, shared, table, queue, queue.submit_side, queue.heartbeat, scheduler):
            assert isinstance(instance, AdaptiveInstance)
            assert isinstance(instance.header, HandshakeHeader)
            assert isinstance(instance.ring, ObservationRing)
            assert not instance.ring.armed
            assert instance.make_policy() is None or isinstance(instance.make_policy(), Policy)
        assert (scheduler.header.tag, ring.header.tag) == (WAIT_BRIEF, WAIT_BRIEF)
        assert isinstance(queue.make_policy(), WaitingPolicy)
        assert isinstance(scheduler.make_policy(), WaitingPolicy)
        assert queue.submit_side.ring is queue.ring


def test_a_scheduler_over_other_transports_has_a_header_of_its_own_and_no_strategies(shm):
    class Plain:
        def try_push(self, payload):
            raise NotImplementedError

        def try_pop(self):
            raise subetha.Empty

    with BackgroundScheduler.start_with_transports(Plain(), Plain(), shm / "table", 4) as scheduler:
        assert isinstance(scheduler.make_policy(), NoMigrationPolicy)
        with pytest.raises(UnsupportedTransportFamily):
            scheduler.apply_migration(WAIT_SPIN)
        scheduler.ring.arm()
        scheduler.watchdog_scan()
        assert scheduler.ring.drain()["op"].tolist() == [OP_WATCHDOG_SCAN]


def test_a_sidecar_changes_how_the_worker_of_a_scheduler_waits(shm, sidecar):
    registry = PassRegistry()
    registry.register(1, bytes)
    with BackgroundScheduler.start(shm / "s", shm / "r", shm / "t", 4, 4, registry=registry) as scheduler:
        assert scheduler.header.tag == WAIT_BRIEF
        for tag in (WAIT_SPIN, WAIT_SLEEP, WAIT_BRIEF):
            sidecar.register(scheduler, FixedPolicy(tag))
            sidecar.scan()
            sidecar.unregister(scheduler)
            assert scheduler.header.drain(WAIT_S)
            assert scheduler.header.tag == tag
            scheduler.submitter().submit(Pass(1, b"x"))
            assert scheduler.collector().recv(WAIT_S).result == b"x"


# --- policies -------------------------------------------------------------------------------------------------------


def test_what_does_not_migrate_keeps_its_tag_and_what_is_fixed_wants_one():
    assert NoMigrationPolicy().decide(stats_of(), 5) == 5
    assert FixedPolicy(3).decide(stats_of(), 5) == 3


def test_stats_count_and_select_by_operation_and_flags():
    stats = stats_of((Op.WAIT, 10, 1), (Op.PUSH, 1, 0), (Op.WAIT, 30, 3), (Op.WAIT, 20, 2))
    assert stats.values(Op.WAIT).tolist() == [10, 30, 20]
    assert stats.values(Op.POP).tolist() == []
    assert (stats.count(Op.WAIT), stats.count(Op.WAIT, 1), stats.count(Op.WAIT, 3)) == (3, 2, 1)


def window(gaps_us=(5,), turns_us=(), jobs=1000, seconds=1.0, n=16):
    """What a policy is shown of one second: `n` times these gaps, turns of others, and how many jobs were taken."""
    records = [(Op.WAIT, int(us * 1000), 0) for us in gaps_us] * n
    records += [(Op.YIELD, us * 1000, 0) for us in turns_us]
    records += [(Op.CLAIM, jobs, 0)]
    return InstanceStats(stats_of(*records).records, 0, seconds)


NEAR, MIDDLE, FAR = window([5]), window([50]), window([5000])
CROWDED = window([5], turns_us=[3000])


class Clock:
    def __init__(self):
        self.now = 100.0

    def __call__(self):
        return self.now


@pytest.fixture
def clock():
    return Clock()


@pytest.fixture
def policy(clock):
    return WaitingPolicy(clock=clock)


@pytest.mark.parametrize(
    ("gaps", "wanted"),
    [
        ([5], WAIT_BRIEF),
        ([20], WAIT_BRIEF),
        ([20.1], WAIT_SPIN),
        ([100], WAIT_SPIN),
        ([100.1], WAIT_BRIEF),
        ([1000], WAIT_BRIEF),
        ([1000.1], WAIT_SLEEP),
        ([5] * 3 + [50], WAIT_SPIN),
        ([5] * 4 + [50], WAIT_BRIEF),
        ([5] + [5000] * 3, WAIT_BRIEF),
        ([5] + [5000] * 4, WAIT_SLEEP),
        ([50] + [5000] * 3, WAIT_SPIN),
    ],
)
def test_what_is_promising_follows_from_the_gaps_between_jobs(policy, gaps, wanted):
    assert policy.decide(window(gaps), WAIT_BRIEF) == wanted


def test_few_waits_or_a_short_time_decide_nothing_until_there_is_enough(policy):
    assert policy.decide(window([50], n=15), WAIT_BRIEF) == WAIT_BRIEF
    assert policy.decide(window([50], n=1), WAIT_BRIEF) == WAIT_SPIN
    policy = WaitingPolicy()
    for _ in range(2):
        assert policy.decide(window([50], seconds=0.1), WAIT_BRIEF) == WAIT_BRIEF
    assert policy.decide(window([50], seconds=0.1), WAIT_BRIEF) == WAIT_SPIN


def test_an_idle_instance_keeps_its_strategy_and_costs_no_memory(policy):
    for tag in (WAIT_SPIN, WAIT_BRIEF, WAIT_SLEEP):
        for _ in range(100):
            assert policy.decide(stats_of(), tag) == tag
            assert policy.decide(stats_of((Op.YIELD, 1, 0)), tag) == tag
    assert policy._gaps == []


def test_jobs_that_come_seldom_let_it_sleep_from_any_strategy_and_frequent_ones_wake_it_up(policy):
    for tag in (WAIT_BRIEF, WAIT_SPIN, WAIT_SLEEP):
        assert policy.decide(FAR, tag) == WAIT_SLEEP
    assert policy.decide(FAR, WAIT_SLEEP) == WAIT_SLEEP
    assert policy.decide(MIDDLE, WAIT_SLEEP) == WAIT_BRIEF
    assert policy.decide(MIDDLE, WAIT_BRIEF) == WAIT_SPIN


@pytest.mark.parametrize(("shown", "tried"), [(MIDDLE, WAIT_SPIN), (CROWDED, WAIT_SLEEP)])
def test_what_is_promising_stays_only_if_it_brings_more_jobs_a_second(policy, clock, shown, tried):
    gaps = [50] if tried == WAIT_SPIN else [5]
    assert policy.decide(shown, WAIT_BRIEF) == tried
    assert policy.decide(window(gaps, jobs=1049), tried) == WAIT_BRIEF
    assert policy.decide(shown, WAIT_BRIEF) == WAIT_BRIEF
    clock.now += 2
    assert policy.decide(shown, WAIT_BRIEF) == tried
    assert policy.decide(window(gaps, jobs=1050), tried) == tried
    # once it has shown that it is better it may be slower for a while
    assert policy.decide(window(gaps, jobs=10), tried) == tried


def test_what_fails_is_tried_again_after_longer_and_longer(policy, clock):
    for hold in (2, 4, 8, 16, 32, 60, 60):
        assert policy.decide(MIDDLE, WAIT_BRIEF) == WAIT_SPIN
        assert policy.decide(MIDDLE, WAIT_SPIN) == WAIT_BRIEF
        clock.now += hold - 0.01
        assert policy.decide(MIDDLE, WAIT_BRIEF) == WAIT_BRIEF
        clock.now += 0.02


def test_what_is_better_is_compared_again_after_longer_and_longer(policy, clock):
    more = window([5], jobs=2000)
    for hold in (2, 4, 8, 16, 32, 60, 60):
        assert policy.decide(CROWDED, WAIT_BRIEF) == WAIT_SLEEP
        assert policy.decide(more, WAIT_SLEEP) == WAIT_SLEEP
        clock.now += hold - 0.01
        assert policy.decide(more, WAIT_SLEEP) == WAIT_SLEEP
        clock.now += 0.02
        assert policy.decide(more, WAIT_SLEEP) == WAIT_BRIEF
    # not crowded any more: it stays
    assert policy.decide(NEAR, WAIT_BRIEF) == WAIT_BRIEF


def test_one_that_failed_does_not_keep_the_other_from_being_tried(policy):
    assert policy.decide(MIDDLE, WAIT_BRIEF) == WAIT_SPIN
    assert policy.decide(MIDDLE, WAIT_SPIN) == WAIT_BRIEF
    assert policy.decide(CROWDED, WAIT_BRIEF) == WAIT_SLEEP


def test_spinning_ends_where_the_gaps_are_no_longer_those_it_is_for(policy):
    assert policy.decide(MIDDLE, WAIT_BRIEF) == WAIT_SPIN
    assert policy.decide(window([50], jobs=2000), WAIT_SPIN) == WAIT_SPIN
    assert policy.decide(window([300], jobs=2000), WAIT_SPIN) == WAIT_BRIEF


def test_a_long_turn_now_and_then_is_no_reason_to_sleep(policy):
    assert policy.decide(window([5], turns_us=[3000], n=1000), WAIT_BRIEF) == WAIT_BRIEF


def test_records_that_were_dropped_count_as_jobs_like_those_that_were_not(policy):
    assert policy.decide(MIDDLE, WAIT_BRIEF) == WAIT_SPIN
    fuller = window([50], jobs=600)
    fuller = InstanceStats(fuller.records, len(fuller.records), fuller.seconds)
    assert policy.decide(fuller, WAIT_SPIN) == WAIT_SPIN


def test_a_strategy_that_somebody_else_has_chosen_meanwhile_is_not_taken_for_the_one_tried(policy):
    assert policy.decide(MIDDLE, WAIT_BRIEF) == WAIT_SPIN
    assert policy.decide(window([50], jobs=2000), WAIT_SLEEP) == WAIT_BRIEF


# --- scans ----------------------------------------------------------------------------------------------------------


def test_a_policy_is_shown_what_happened_since_the_scan_before_and_the_tag(sidecar):
    instance = Instance(tag=4)
    policy = settled(sidecar, instance)
    for n in range(18):
        instance.ring.record(Op.PUSH, n)
    sidecar.scan()
    instance.ring.record(Op.POP, 9)
    sidecar.scan()
    sidecar.scan()
    (first, tag), (second, _), (third, _) = policy.shown
    assert tag == 4
    assert (first.values(Op.PUSH).tolist(), first.dropped) == (list(range(16)), 2)
    assert (second.records["op"].tolist(), second.values(Op.POP).tolist(), second.dropped) == ([Op.POP], [9], 0)
    assert (len(third.records), third.dropped) == (0, 0)
    assert sidecar.stats(instance) is third
    assert third.seconds >= 0


def test_what_was_recorded_and_dropped_before_the_registration_is_nobodys(sidecar):
    instance = Instance()
    instance.ring.arm()
    for n in range(20):
        instance.ring.record(Op.PUSH, n)
    policy = Asked()
    sidecar.register(instance, policy)
    assert policy.asked.wait(WAIT_S)
    stats, _ = policy.shown[0]
    assert (len(stats.records), stats.dropped) == (0, 0)


def test_a_registered_instance_is_armed_for_what_its_policy_wants_to_hear_until_it_is_unregistered(sidecar):
    instance = Instance()
    sidecar.register(instance)
    assert instance.ring.record(Op.PUSH)
    sidecar.unregister(instance)
    assert not instance.ring.armed
    sidecar.register(instance, WaitingPolicy())
    assert not instance.ring.record(Op.PUSH)
    assert instance.ring.record(Op.WAIT)
    sidecar.unregister(instance)
    sidecar.register(instance, FixedPolicy(0))
    assert not instance.ring.armed


def test_an_instance_migrates_where_its_policy_wants_another_tag(sidecar):
    instance = Instance(tag=1)
    policy = settled(sidecar, instance)
    sidecar.scan()
    assert (instance.applied, sidecar.migrations(instance)) == ([], 0)
    policy.answer = 2
    sidecar.scan()
    sidecar.scan()
    assert (instance.applied, instance.header.tag, sidecar.migrations(instance)) == ([2], 2, 1)


def test_a_migration_that_is_not_possible_yet_is_tried_again_at_the_next_scan(sidecar):
    instance = Instance(tag=0)
    policy = settled(sidecar, instance)
    old = instance.header.enter_op()
    instance.header.migrate(1)
    policy.answer = 2
    sidecar.scan()
    assert (instance.header.tag, sidecar.migrations(instance)) == (1, 0)
    instance.header.exit_op(old)
    sidecar.scan()
    assert (instance.applied, instance.header.tag, sidecar.migrations(instance)) == ([2, 2], 2, 1)


def test_an_instance_without_a_policy_is_left_alone_and_one_with_its_own_is_not(sidecar):
    alone, decided = Instance(tag=1), Instance(policy=FixedPolicy(5))
    sidecar.register(alone)
    sidecar.register(decided)
    sidecar.scan()
    assert decided.changed.wait(WAIT_S)
    assert (alone.applied, decided.applied) == ([], [5])


def test_the_thread_scans_by_itself(reports):
    instance = Instance(policy=FixedPolicy(3))
    with Sidecar(busy_s=0.001, idle_s=0.002, report=reports.append) as sidecar:
        policy = Asked()
        sidecar.register(instance, policy)
        for n in range(5):
            policy.asked.clear()
            instance.ring.record(Op.PUSH, n)
            assert policy.asked.wait(WAIT_S)
        policy.answer = 9
        assert instance.changed.wait(WAIT_S)
    assert not instance.ring.armed
    values = [v for stats, _ in policy.shown for v in stats.values(Op.PUSH).tolist()]
    assert values == sorted(set(values))
    assert reports == []


def test_with_nothing_registered_there_is_no_thread_and_with_nothing_happening_it_sleeps():
    class Counted(Sidecar):
        rounds = 0

        def _scan(self, known):
            self.rounds += 1
            return super()._scan(known)

    with Counted(busy_s=0.001, idle_s=WAIT_S) as sidecar:
        assert sidecar._thread is None
        policy = Asked()
        sidecar.register(Instance(), policy)
        assert policy.asked.wait(WAIT_S)
        # pauses double: in the whole of WAIT_S seconds there is room for 15 of them
        time.sleep(0.2)
        assert sidecar.rounds <= 9


# --- errors ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("error", [RuntimeError("no idea"), SystemExit(1), KeyboardInterrupt(), StopIteration()])
def test_a_policy_that_raises_is_reported_and_ends_neither_the_thread_nor_the_others(reports, error):
    bad, good = Instance(), Instance()
    with Sidecar(busy_s=0.001, idle_s=0.001, report=reports.append) as sidecar:
        failing, fine = Asked(error), Asked()
        sidecar.register(bad, failing)
        sidecar.register(good, fine)
        for _ in range(3):
            for policy in (failing, fine):
                policy.asked.clear()
                assert policy.asked.wait(WAIT_S)
        assert sidecar.failures(bad) >= 2
        assert sidecar.failures(good) == 0
        assert sidecar._thread.is_alive()
        # the same error again and again is said once; after a scan that went well it is said again
        assert len(reports) == 1
        assert "its policy" in reports[0]
        assert type(error).__name__ in reports[0]
        failing.answer = None
        shown = len(failing.shown)
        while len(failing.shown) < shown + 2:
            time.sleep(0.001)
        failing.answer = error
        while len(reports) < 2:
            time.sleep(0.001)


@pytest.mark.parametrize("error", [SystemExit(1), KeyboardInterrupt()])
def test_an_interrupt_of_a_scan_in_the_callers_thread_is_the_callers(sidecar, error):
    instance, policy = Instance(), Asked()
    sidecar.register(instance, policy)
    # the thread's own scan is over
    assert policy.asked.wait(WAIT_S)
    while sidecar._registered[0].scanning is not None:
        time.sleep(0.001)
    policy.answer = error
    with pytest.raises(type(error)):
        sidecar.scan()
    assert sidecar.failures(instance) == 1


def test_a_migration_that_raises_is_reported_and_tried_again(sidecar, reports):
    instance = Instance(tag=1)
    policy = settled(sidecar, instance)
    policy.answer = 2
    instance.apply_migration = None
    sidecar.scan()
    assert len(reports) == 1
    assert "its migration from 1 to 2: TypeError" in reports[0]
    del instance.apply_migration
    sidecar.scan()
    assert (instance.header.tag, sidecar.failures(instance), sidecar.migrations(instance)) == (2, 1, 1)


def test_a_tag_that_a_handle_does_not_know_is_reported(sidecar, reports, shm):
    with SharedRing.create(shm / "ring", 4) as ring:
        sidecar.register(ring, FixedPolicy(77))
        sidecar.scan()
        assert ring.header.tag == WAIT_BRIEF
        sidecar.unregister(ring)
    assert "77" in reports[0]


def test_a_report_that_fails_ends_nothing_either(capsys):
    def report(message):
        raise OSError("no paper")

    with Sidecar(busy_s=3600, idle_s=3600, report=report) as sidecar:
        instance = Instance()
        settled(sidecar, instance).answer = ValueError("cannot say")
        sidecar.scan()
        assert sidecar.failures(instance) == 1
    error = capsys.readouterr().err
    assert "no paper" in error
    assert "cannot say" in error


def test_errors_go_to_standard_error_by_default(capsys):
    with Sidecar(busy_s=3600, idle_s=3600) as sidecar:
        instance = Instance()
        settled(sidecar, instance).answer = ValueError("cannot say")
        sidecar.scan()
    assert "cannot say" in capsys.readouterr().err


# --- unregister and close -------------------------------------------------------------------------------------------


def test_unregister_waits_for_a_scan_that_is_running(sidecar):
    instance, policy = Instance(), Stuck()
    sidecar.register(instance, policy)
    assert policy.asked.wait(WAIT_S)
    ended = threading.Event()
    leaving = threading.Thread(target=lambda: (sidecar.unregister(instance), ended.set()))
    leaving.start()
    assert not ended.wait(0.1)
    policy.go_on.set()
    assert ended.wait(WAIT_S)
    leaving.join()
    sidecar.scan()
    assert len(policy.shown) == 1


def test_unregister_says_so_where_a_policy_does_not_return_and_leaves_the_instance_out(sidecar):
    instance, policy = Instance(), Stuck()
    sidecar.register(instance, policy)
    assert policy.asked.wait(WAIT_S)
    with pytest.raises(TimeoutError, match="has not returned within 0"):
        sidecar.unregister(instance, timeout=0)
    with pytest.raises(ValueError, match="not registered"):
        sidecar.unregister(instance)
    assert not instance.ring.armed
    policy.go_on.set()


def test_unregister_does_not_wait_for_the_scan_that_calls_it(reports):
    instance = Instance()
    left = threading.Event()

    class Leaving:
        def decide(self, stats, current_tag):
            sidecar.unregister(instance)
            left.set()
            return current_tag

    with Sidecar(report=reports.append) as sidecar:
        sidecar.register(instance, Leaving())
        assert left.wait(WAIT_S)
    assert reports == []


def test_unregister_does_not_wait_for_the_scan_of_another_instance(sidecar):
    slow, other, policy = Instance(), Instance(), Stuck()
    sidecar.register(slow, policy)
    assert policy.asked.wait(WAIT_S)
    sidecar.register(other)
    sidecar.unregister(other, timeout=0)
    policy.go_on.set()


def test_nothing_is_registered_twice_nor_two_that_share_a_ring(sidecar, shm):
    with BackgroundScheduler.start(shm / "s", shm / "r", shm / "t", 4, 4) as scheduler:
        sidecar.register(scheduler)
        for _ in range(2):
            with pytest.raises(ValueError, match="registered already"):
                sidecar.register(scheduler)
        sidecar.unregister(scheduler)
        sidecar.register(scheduler)
    for call in (sidecar.unregister, sidecar.stats, sidecar.failures, sidecar.migrations):
        with pytest.raises(ValueError, match="not registered"):
            call(Instance())


def test_close_ends_the_thread_disarms_everything_and_may_come_again():
    sidecar = Sidecar()
    instances = [Instance() for _ in range(3)]
    for instance in instances:
        sidecar.register(instance)
    sidecar.close()
    sidecar.close()
    assert not sidecar._thread.is_alive()
    assert not any(instance.ring.armed for instance in instances)
    with pytest.raises(ValueError, match="closed"):
        sidecar.register(instances[0])
    with pytest.raises(ValueError, match="closed"):
        sidecar.scan()


def test_close_says_so_where_a_policy_does_not_return():
    policy = Stuck()
    sidecar = Sidecar()
    sidecar.register(Instance(), policy)
    assert policy.asked.wait(WAIT_S)
    with pytest.raises(TimeoutError, match="has not returned"):
        sidecar.close(timeout=0)
    policy.go_on.set()
    sidecar.close(WAIT_S)


def test_a_closed_sidecar_keeps_no_instance():
    sidecar = Sidecar()
    instance = Instance()
    sidecar.register(instance)
    sidecar.close()
    gone = weakref.ref(instance)
    del instance
    gc.collect()
    assert gone() is None


@pytest.mark.parametrize(("busy_s", "idle_s"), [(0, 1), (-1, 1), (2, 1), (float("nan"), 1)])
def test_pauses_that_make_no_sense_are_refused(busy_s, idle_s):
    with pytest.raises(ValueError, match="pauses"):
        Sidecar(busy_s=busy_s, idle_s=idle_s)


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_a_forked_child_closes_its_parents_sidecar_without_waiting_and_uses_it_not():
    sidecar = Sidecar()
    instance, policy = Instance(), Stuck()
    sidecar.register(instance, policy)
    assert policy.asked.wait(WAIT_S)
    with sidecar._changed:
        child = os.fork()
        if child == 0:
            sidecar.close()
            os._exit(0)
    assert os.waitpid(child, 0)[1] == 0
    policy.go_on.set()
    sidecar.close(WAIT_S)


# --- the watchdog's scans -------------------------------------------------------------------------------------------


def test_a_watchdog_scan_is_recorded_with_flag_1_where_something_must_be_reclaimed(shm):
    with HeartbeatTable.create(shm / "table", 4) as table:
        table.ring.arm([OP_WATCHDOG_SCAN])
        watchdog = FailoverWatchdog(table, 0)
        watchdog.scan()
        for pid in (11, 12):
            table.mark_in_flight(table.register(pid, Role.WORKER), 0)
        watchdog.scan()
        records = table.ring.drain()
        assert records["op"].tolist() == [OP_WATCHDOG_SCAN] * 2
        assert records["flags"].tolist() == [0, 1]
        assert records["value"].tolist() == [0, 2]


def test_a_schedulers_scan_is_recorded_in_the_schedulers_ring(shm):
    with BackgroundScheduler.start(shm / "s", shm / "r", shm / "t", 4, 4) as scheduler:
        scheduler.ring.arm([OP_WATCHDOG_SCAN])
        scheduler.heartbeat().ring.arm()
        scheduler.watchdog_scan()
        silent = scheduler.heartbeat().register(os.getpid() + 1, Role.WORKER)
        scheduler.heartbeat().mark_in_flight(silent, 0)
        scheduler.watchdog_scan()
        scheduler.watchdog_scan()
        records = scheduler.ring.drain()
        assert records["flags"].tolist() == [0, 0, 1]
        assert OP_WATCHDOG_SCAN not in scheduler.heartbeat().ring.drain()["op"]


def test_a_sidecar_can_hear_of_scans(shm, sidecar):
    with HeartbeatTable.create(shm / "table", 4) as table:
        policy = settled(sidecar, table)
        table.mark_in_flight(table.register(11, Role.WORKER), 0)
        FailoverWatchdog(table, 0).scan()
        sidecar.scan()
        ((stats, _),) = policy.shown
        assert (stats.count(OP_WATCHDOG_SCAN), stats.count(OP_WATCHDOG_SCAN, 1)) == (1, 1)

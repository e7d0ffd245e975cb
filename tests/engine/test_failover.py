"""The epoch watchdog, on a real heartbeat table: epochs pass and beats come when the test says so."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from subetha._core import HeartbeatTable
from subetha.errors import HeartbeatError
from subetha.failover import DeadSlot, FailoverWatchdog, ReclaimReport, iter_in_flight_bits
from subetha.layout import HeartbeatSnapshot, Role


@pytest.fixture
def table(shm):
    """A table of 8 slots in which nobody beats by itself."""
    with HeartbeatTable.create(shm / "table", 8) as made:
        yield made


def busy(table, pid, *bits, role=Role.WORKER):
    """Register a participant with these bits in flight; its slot."""
    slot = table.register(pid, role)
    for bit in bits:
        table.mark_in_flight(slot, bit)
    return slot


def slots_of(report):
    return [dead.slot for dead in report.dead_slots]


# --- who is reported ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("grace", [0, 1, 2, 5])
def test_a_lag_equal_to_the_grace_is_alive_and_one_more_epoch_is_dead(table, grace):
    slot = busy(table, 11, 3)
    watchdog = FailoverWatchdog(table, grace)
    for _ in range(grace):
        assert watchdog.scan().is_empty()
    assert slots_of(watchdog.scan()) == [slot]


def test_the_grace_is_one_epoch_unless_told(table):
    busy(table, 11, 0)
    watchdog = FailoverWatchdog(table)
    assert watchdog.grace_epochs == 1
    assert watchdog.scan().is_empty()
    assert not watchdog.scan().is_empty()


def test_with_no_grace_whoever_has_not_beaten_in_the_epoch_that_begins_is_dead(table):
    slot = busy(table, 11, 0)
    assert slots_of(FailoverWatchdog(table, 0).scan()) == [slot]


def test_another_grace_counts_from_the_next_scan_on(table):
    slot = busy(table, 11, 0)
    watchdog = FailoverWatchdog(table, 100)
    for _ in range(3):
        assert watchdog.scan().is_empty()
    watchdog.grace_epochs = 4
    assert watchdog.scan().is_empty()
    assert slots_of(watchdog.scan()) == [slot]


def test_who_has_nothing_in_flight_is_never_reported(table):
    idle, ended = busy(table, 11), busy(table, 12, 5)
    table.clear_in_flight(ended, 5)
    watchdog = FailoverWatchdog(table, 0)
    for _ in range(20):
        assert watchdog.scan().is_empty()
    table.mark_in_flight(idle, 0)
    assert slots_of(watchdog.scan()) == [idle]


@pytest.mark.parametrize("bit", [0, 1, 31, 32, 62, 63])
def test_any_one_bit_of_the_64_is_work_in_hand(table, bit):
    slot = busy(table, 11, bit)
    report = FailoverWatchdog(table, 0).scan()
    assert slots_of(report) == [slot]
    assert report.dead_slots[0].snapshot.in_flight_bitmap == 1 << bit


def test_a_slot_is_reported_at_every_scan_until_it_is_beaten_or_cleared(table):
    slot = busy(table, 11, 0)
    watchdog = FailoverWatchdog(table, 1)
    watchdog.scan()
    assert [slots_of(watchdog.scan()) for _ in range(3)] == [[slot]] * 3


def test_a_slot_that_is_beaten_again_is_alive_for_another_grace(table):
    slot = busy(table, 11, 0)
    watchdog = FailoverWatchdog(table, 1)
    watchdog.scan()
    assert slots_of(watchdog.scan()) == [slot]
    table.beat(slot)
    assert watchdog.scan().is_empty()
    assert slots_of(watchdog.scan()) == [slot]


def test_a_beat_that_is_ahead_of_the_epoch_of_the_scan_is_alive(table):
    # another one who ticks, and a beat, come between this scan's tick and its look at the slot
    slot = busy(table, 11, 0)

    class Overtaken:
        silent, snapshot = table.silent, table.snapshot

        def tick_global_epoch(self):
            epoch = table.tick_global_epoch()
            for _ in range(5):
                table.tick_global_epoch()
            table.beat(slot)
            return epoch

    assert FailoverWatchdog(Overtaken(), 0).scan().is_empty()


@pytest.mark.parametrize("what", ["beat", "clear_in_flight", "unregister"])
def test_who_beats_ends_its_work_or_leaves_while_the_scan_looks_is_not_reported(table, what):
    slot, other = busy(table, 11, 0), busy(table, 12, 0)

    class Overtaken:
        tick_global_epoch, snapshot = table.tick_global_epoch, table.snapshot

        def silent(self, before_epoch, spared_pid):
            found = table.silent(before_epoch, spared_pid)
            getattr(table, what)(slot, *([0] if what == "clear_in_flight" else []))
            return found

    assert slots_of(FailoverWatchdog(Overtaken(), 0).scan()) == [other]


def test_a_table_of_any_size_is_scanned_to_its_end(shm):
    with HeartbeatTable.create(shm / "table", 130) as table:
        for n in range(130):
            slot = table.register(100 + n)
            if n in (0, 63, 64, 127, 128, 129):
                table.mark_in_flight(slot, n % 64)
        assert table.silent(0) == []
        assert slots_of(FailoverWatchdog(table, 0).scan()) == [0, 63, 64, 127, 128, 129]
        assert slots_of(FailoverWatchdog(table, 0, spared_pid=227).scan()) == [0, 63, 64, 128, 129]


def test_free_slots_are_not_reported_and_a_new_holder_starts_with_a_fresh_beat(table):
    slots = [busy(table, 11 + n, n) for n in range(4)]
    watchdog = FailoverWatchdog(table, 0)
    assert slots_of(watchdog.scan()) == slots
    table.unregister(slots[1])
    table.unregister(slots[3])
    assert slots_of(watchdog.scan()) == [slots[0], slots[2]]
    assert busy(table, 99, 7) == slots[1]
    # it registered in the epoch that the last scan began
    watchdog.grace_epochs = 1
    assert slots_of(watchdog.scan()) == [slots[0], slots[2]]
    assert slots_of(watchdog.scan()) == [slots[0], slots[1], slots[2]]


def test_an_empty_table_gives_an_empty_report(table):
    report = FailoverWatchdog(table, 0).scan()
    assert report == ReclaimReport((), 1)


def test_the_spared_process_is_never_reported_in_whatever_slot_it_has(table):
    mine, other, mine_too = busy(table, 11, 0), busy(table, 12, 0), busy(table, 11, 63)
    watchdog = FailoverWatchdog(table, 0, spared_pid=11)
    for _ in range(3):
        assert slots_of(watchdog.scan()) == [other]
    assert slots_of(FailoverWatchdog(table, 0).scan()) == [mine, other, mine_too]
    assert slots_of(FailoverWatchdog(table, 0, spared_pid=13).scan()) == [mine, other, mine_too]


# --- the report -----------------------------------------------------------------------------------------------------


def test_a_report_has_every_dead_slot_ascending_with_its_record_at_the_scan(table):
    for _ in range(3):
        table.tick_global_epoch()
    slots = [
        busy(table, 11, 0, 2, role=Role.SUPERVISOR),
        busy(table, 12),
        busy(table, 13, 63, role=Role.CLIENT),
        busy(table, 14, *range(64)),
    ]
    report = FailoverWatchdog(table, 0).scan()
    assert report == ReclaimReport(
        (
            DeadSlot(slots[0], HeartbeatSnapshot(11, 3, 0b101, Role.SUPERVISOR)),
            DeadSlot(slots[2], HeartbeatSnapshot(13, 3, 1 << 63, Role.CLIENT)),
            DeadSlot(slots[3], HeartbeatSnapshot(14, 3, 2**64 - 1, Role.WORKER)),
        ),
        4,
    )
    # a report is of its moment
    table.clear_in_flight(slots[0], 0)
    table.beat(slots[2])
    assert report.dead_slots[0].snapshot.in_flight_bitmap == 0b101
    assert report.dead_slots[1].snapshot.last_seen_epoch == 3


def test_a_report_is_empty_exactly_without_a_dead_slot():
    dead = DeadSlot(0, HeartbeatSnapshot(11, 0, 1, Role.WORKER))
    assert ReclaimReport((), 7).is_empty()
    assert not ReclaimReport((dead,), 7).is_empty()


def test_each_scan_begins_the_next_epoch_for_all_who_share_the_table(table):
    first, second = FailoverWatchdog(table), FailoverWatchdog(table)
    for expected in range(1, 7):
        report = (first if expected % 2 else second).scan()
        assert report.new_global_epoch == expected == table.global_epoch


# --- clearing -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("bits", [(0,), (63,), (0, 1, 2, 63), tuple(range(64))])
def test_once_cleared_a_slot_is_not_reported_until_it_has_work_in_hand_again(table, bits):
    slot, other = busy(table, 11, *bits), busy(table, 12, 5)
    watchdog = FailoverWatchdog(table, 0)
    assert slots_of(watchdog.scan()) == [slot, other]
    watchdog.clear_dead_bitmap(slot)
    assert table.snapshot(slot).in_flight_bitmap == 0
    assert slots_of(watchdog.scan()) == [other]
    table.mark_in_flight(slot, bits[0])
    assert slots_of(watchdog.scan()) == [slot, other]


def test_clearing_a_slot_takes_nothing_but_its_bits(table):
    slot, other = busy(table, 11, 1, 2), busy(table, 12, 1, 2)
    table.tick_global_epoch()
    FailoverWatchdog(table).clear_dead_bitmap(slot)
    FailoverWatchdog(table).clear_dead_bitmap(slot)
    assert table.snapshot(slot) == HeartbeatSnapshot(11, 0, 0, Role.WORKER)
    assert table.snapshot(other) == HeartbeatSnapshot(12, 0, 0b110, Role.WORKER)


def test_clearing_a_slot_that_nobody_has_any_more_is_an_error(table):
    slot = busy(table, 11, 0)
    watchdog = FailoverWatchdog(table, 0)
    watchdog.scan()
    table.unregister(slot)
    with pytest.raises(HeartbeatError, match="not registered"):
        watchdog.clear_dead_bitmap(slot)


@pytest.mark.parametrize("slot", [-1, 8, 2**40])
def test_clearing_what_is_no_slot_is_an_error(table, slot):
    with pytest.raises(HeartbeatError):
        FailoverWatchdog(table).clear_dead_bitmap(slot)


# --- arguments ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("grace", [-1, -(2**70)])
def test_a_negative_grace_is_refused_with_its_value_and_nothing_ticks(table, grace):
    with pytest.raises(ValueError, match=f"grace_epochs: expected 0 or more, found {grace}"):
        FailoverWatchdog(table, grace)
    assert table.global_epoch == 0


@given(st.integers(0, 2**64 - 1))
def test_the_bits_of_a_bitmap_are_those_that_bin_shows_ascending(bitmap):
    written = bin(bitmap)[2:][::-1]
    assert list(iter_in_flight_bits(bitmap)) == [place for place, digit in enumerate(written) if digit == "1"]


@given(st.sets(st.integers(0, 63)))
def test_the_bits_of_a_bitmap_are_those_that_were_set(bits):
    assert list(iter_in_flight_bits(sum(1 << bit for bit in bits))) == sorted(bits)


@given(st.one_of(st.integers(max_value=-1), st.integers(min_value=2**64)))
def test_what_has_no_64_bits_is_refused_at_the_call(bitmap):
    # not only once the first bit is asked for
    with pytest.raises(ValueError, match=f"found {bitmap}"):
        iter_in_flight_bits(bitmap)

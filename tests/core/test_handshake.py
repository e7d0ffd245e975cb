"""HandshakeHeader: a migration and the operations under way, step by step and with threads."""

import os
import sys
import threading
import time

import pytest
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from subetha._core import HandshakeHeader

WAIT_S = 30


def test_a_header_begins_with_its_tag_in_generation_0_and_with_nobody_under_way():
    header = HandshakeHeader(7)
    assert (header.generation, header.tag, header.in_flight(0), header.in_flight(1)) == (0, 7, 0, 0)
    assert HandshakeHeader().tag == 0


@pytest.mark.parametrize("tag", [-1, 2**32])
def test_a_tag_has_32_bits(tag):
    with pytest.raises(ValueError, match="tag"):
        HandshakeHeader(tag)
    header = HandshakeHeader()
    with pytest.raises(ValueError, match="new_tag"):
        header.migrate(tag)
    assert header.generation == 0
    assert header.migrate(2**32 - 1)
    assert header.tag == 2**32 - 1


def test_an_operation_is_counted_under_the_parity_of_the_generation_until_it_ends():
    header = HandshakeHeader()
    for generation in range(4):
        assert header.generation == generation
        parity = header.enter_op()
        assert parity == generation % 2
        assert (header.in_flight(parity), header.in_flight(1 - parity)) == (1, 0)
        header.exit_op(parity)
        assert header.in_flight(parity) == 0
        assert header.migrate(generation)


@pytest.mark.parametrize("parity", [0, 1])
def test_an_operation_that_is_ended_twice_is_refused_and_the_count_stays_right(parity):
    header = HandshakeHeader()
    with pytest.raises(ValueError, match="parity"):
        header.exit_op(parity)
    assert header.in_flight(parity) == 0
    header.exit_op(header.enter_op())
    assert header.drain(0)


@pytest.mark.parametrize("parity", [-1, 2, None, "0"])
def test_there_are_two_parities(parity):
    header = HandshakeHeader()
    for call in (header.exit_op, header.in_flight, header.tag_of):
        with pytest.raises(ValueError, match="expected 0 or 1"):
            call(parity)


def test_an_operation_keeps_its_strategy_while_the_next_ones_have_another():
    header = HandshakeHeader(1)
    old = header.enter_op()
    assert header.migrate(2)
    new = header.enter_op()
    assert (header.tag, header.tag_of(old), header.tag_of(new)) == (2, 1, 2)


def test_a_drain_is_over_once_the_old_parity_is_empty_and_does_not_wait_for_the_new_one():
    header = HandshakeHeader()
    old = header.enter_op()
    assert header.migrate(1)
    new = header.enter_op()
    assert not header.drain(0)
    header.exit_op(old)
    assert header.drain(0)
    assert header.in_flight(new) == 1


def test_no_generation_begins_while_its_parity_is_in_use():
    header = HandshakeHeader(1)
    first = header.enter_op()
    assert header.migrate(2)
    assert not header.migrate(3)
    assert (header.generation, header.tag, header.tag_of(first)) == (1, 2, 1)
    header.exit_op(first)
    assert header.migrate(3)
    assert (header.generation, header.tag) == (2, 3)


# --- the second look ------------------------------------------------------------------------------------------------


def test_an_operation_that_a_migration_overtakes_before_it_is_counted_does_not_begin():
    header = HandshakeHeader()
    read = header.generation
    assert header.migrate(1)
    # nobody is counted under the old parity, so its strategy may be dropped from here on
    assert header.drain(0)
    assert not header._enter_as_of(read)
    assert (header.in_flight(0), header.in_flight(1)) == (0, 0)
    assert header._enter_as_of(header.generation)
    assert header.in_flight(1) == 1


def test_an_operation_that_two_migrations_overtake_does_not_begin_though_the_parity_is_the_same():
    header = HandshakeHeader()
    read = header.generation
    assert header.migrate(1)
    assert header.migrate(2)
    assert header.generation % 2 == read % 2
    assert not header._enter_as_of(read)
    assert header.in_flight(read % 2) == 0


class Handshake(RuleBasedStateMachine):
    """Operations that read the generation, are counted and end in any order, and a migrator among them."""

    def __init__(self):
        super().__init__()
        self.header = HandshakeHeader()
        self.tags = [0]
        self.reading = []
        self.under_way = []

    @rule()
    def read_the_generation(self):
        self.reading.append(self.header.generation)

    @precondition(lambda self: self.reading)
    @rule(data=st.data())
    def be_counted(self, data):
        generation = self.reading.pop(data.draw(st.integers(0, len(self.reading) - 1)))
        began = self.header._enter_as_of(generation)
        assert began == (generation == len(self.tags) - 1)
        if began:
            self.under_way.append(generation)

    @rule()
    def enter(self):
        assert self.header.enter_op() == (len(self.tags) - 1) % 2
        self.under_way.append(len(self.tags) - 1)

    @precondition(lambda self: self.under_way)
    @rule(data=st.data())
    def leave(self, data):
        generation = self.under_way.pop(data.draw(st.integers(0, len(self.under_way) - 1)))
        self.header.exit_op(generation % 2)

    @rule(tag=st.integers(0, 2**32 - 1))
    def migrate(self, tag):
        is_free = all(generation == len(self.tags) - 1 for generation in self.under_way)
        assert self.header.migrate(tag) == is_free
        if is_free:
            self.tags.append(tag)

    @invariant()
    def every_operation_has_the_strategy_it_began_with(self):
        assert self.header.generation == len(self.tags) - 1
        assert self.header.tag == self.tags[-1]
        for generation in self.under_way:
            assert self.header.tag_of(generation % 2) == self.tags[generation]
        assert self.header.drain(0) == all(generation == len(self.tags) - 1 for generation in self.under_way)
        for parity in (0, 1):
            assert self.header.in_flight(parity) == sum(g % 2 == parity for g in self.under_way)


TestHandshake = Handshake.TestCase


# --- waiting --------------------------------------------------------------------------------------------------------


def test_a_drain_that_has_to_wait_ends_when_the_last_operation_does():
    header = HandshakeHeader()
    old = [header.enter_op(), header.enter_op()]
    assert header.migrate(1)
    drained = []
    waiting = threading.Thread(target=lambda: drained.append(header.drain(WAIT_S)))
    began = time.monotonic()
    waiting.start()
    header.exit_op(old[0])
    waiting.join(0.1)
    assert waiting.is_alive()
    header.exit_op(old[1])
    waiting.join(WAIT_S)
    assert drained == [True]
    assert time.monotonic() - began < WAIT_S


def test_several_drains_end_together():
    header = HandshakeHeader()
    old = header.enter_op()
    header.migrate(1)
    drained = []
    waiting = [threading.Thread(target=lambda: drained.append(header.drain(WAIT_S))) for _ in range(4)]
    for thread in waiting:
        thread.start()
    header.exit_op(old)
    for thread in waiting:
        thread.join(WAIT_S)
    assert drained == [True] * 4


def test_a_drain_gives_up_at_its_timeout_and_burns_no_processor_time_until_then():
    header = HandshakeHeader()
    header.enter_op()
    header.migrate(1)
    began, used = time.monotonic(), time.thread_time()
    assert not header.drain(0.3)
    assert time.monotonic() - began >= 0.3
    assert time.thread_time() - used < 0.1


@pytest.mark.parametrize("timeout", [None, -1, float("nan")])
def test_a_drain_needs_a_bound(timeout):
    with pytest.raises(ValueError, match="timeout"):
        HandshakeHeader().drain(timeout)


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_a_forked_child_does_not_wait_for_its_parents_operations():
    header = HandshakeHeader(3)
    header.enter_op()
    header.migrate(4)
    child = os.fork()
    if child == 0:
        os._exit(0 if header.drain(0) and header.tag == 4 and header.migrate(5) else 1)
    assert os.waitpid(child, 0)[1] == 0
    assert not header.drain(0)


# --- threads --------------------------------------------------------------------------------------------------------


def test_with_threads_no_operation_meets_a_strategy_that_was_dropped():
    """A strategy is a cell of a list that the migrator puts to None after the drain, as it would close what belongs to it."""
    header = HandshakeHeader(0)
    strategies = ["in use"]
    met_dropped = []
    done = threading.Event()
    counts = [0] * 4

    def operate(number):
        while not done.is_set():
            parity = header.enter_op()
            found = strategies[header.tag_of(parity)]
            counts[number] += 1
            if found is None or strategies[header.tag_of(parity)] is None:
                met_dropped.append(header.generation)
            header.exit_op(parity)

    interval = sys.getswitchinterval()
    sys.setswitchinterval(1e-5)
    try:
        threads = [threading.Thread(target=operate, args=(n,)) for n in range(4)]
        for thread in threads:
            thread.start()
        for tag in range(1, 301):
            strategies.append("in use")
            assert header.migrate(tag)
            assert header.drain(WAIT_S)
            strategies[tag - 1] = None
        done.set()
        for thread in threads:
            thread.join(WAIT_S)
    finally:
        done.set()
        sys.setswitchinterval(interval)
    assert not met_dropped
    assert header.generation == 300
    assert (header.in_flight(0), header.in_flight(1)) == (0, 0)
    assert all(counts)

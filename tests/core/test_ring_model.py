"""SharedRing against a plain deque: small worlds, every call, with laps and versions that wrap on the way."""

import collections
import os
import shutil
import tempfile
from pathlib import Path

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import Bundle, RuleBasedStateMachine, consumes, initialize, invariant, rule

from subetha._core import SharedRing
from subetha.errors import Empty, Full
from subetha.layout import VERSION_MASK, CellState

from .ring_file import RingFile
from .traffic import payload_of

PAYLOADS = st.binary(max_size=16)
MEMORY = "/dev/shm" if os.access("/dev/shm", os.W_OK) else None


def age(raw, laps_left, versions_left, word_wraps):
    """Make a new ring look as it does shortly before its laps and its versions (in places, or in words too) wrap."""
    raw.set_laps((1 << raw.lap_bits) - laps_left)
    raw.set_versions((VERSION_MASK + 1 if word_wraps else 1 << raw.version_bits) - versions_left)


class RingAgainstDeque(RuleBasedStateMachine):
    """Two handles of one ring; the model is a deque of what waits, and claims in hand keep their cells."""

    claims = Bundle("claims")

    @initialize(
        capacity=st.sampled_from([2, 4]),
        laps_left=st.integers(0, 3),
        versions_left=st.integers(0, 5),
        word_wraps=st.booleans(),
    )
    def start(self, capacity, laps_left, versions_left, word_wraps):
        self.directory = Path(tempfile.mkdtemp(prefix="subetha-test-", dir=MEMORY))
        path = self.directory / "ring"
        SharedRing.create(path, capacity, payload_bytes=16).close()
        self.raw = RingFile(path)
        age(self.raw, laps_left, versions_left, word_wraps)
        self.handles = [SharedRing.open(path), SharedRing.open(path)]
        self.capacity = capacity
        self.waiting = collections.deque()
        self.held = 0

    def teardown(self):
        if hasattr(self, "handles"):
            for handle in self.handles:
                handle.close()
            shutil.rmtree(self.directory)

    @property
    def room(self):
        return self.capacity - len(self.waiting) - self.held

    @rule(who=st.integers(0, 1), payload=PAYLOADS, blocking=st.booleans())
    def push(self, who, payload, blocking):
        def call():
            return self.handles[who].push(payload, timeout=0) if blocking else self.handles[who].try_push(payload)

        if self.room:
            call()
            self.waiting.append(payload)
        else:
            with pytest.raises(Full):
                call()

    @rule(who=st.integers(0, 1), payloads=st.lists(PAYLOADS, max_size=6))
    def push_many(self, who, payloads):
        went_in = min(self.room, len(payloads))
        assert self.handles[who].push_many(payloads) == went_in
        self.waiting.extend(payloads[:went_in])

    @rule(who=st.integers(0, 1), blocking=st.booleans())
    def pop(self, who, blocking):
        def call():
            return self.handles[who].pop(timeout=0) if blocking else self.handles[who].try_pop()

        if self.waiting:
            assert call() == self.waiting.popleft()
        else:
            with pytest.raises(Empty):
                call()

    @rule(who=st.integers(0, 1), n=st.integers(0, 6))
    def pop_many(self, who, n):
        expected = [self.waiting.popleft() for _ in range(min(n, len(self.waiting)))]
        assert self.handles[who].pop_many(n) == expected

    @rule(target=claims, who=st.integers(0, 1), blocking=st.booleans())
    def claim(self, who, blocking):
        def call():
            return self.handles[who].claim(timeout=0) if blocking else self.handles[who].try_claim()

        if self.waiting:
            made, payload = call(), self.waiting.popleft()
            assert made.tobytes() == payload
            self.held += 1
            return [(made, payload)]
        with pytest.raises(Empty):
            call()
        return []

    @rule(held=consumes(claims))
    def ack(self, held):
        for made, payload in held:
            assert made.payload == payload
            made.ack()
            self.held -= 1

    @rule(held=consumes(claims))
    def release(self, held):
        for made, payload in held:
            made.started()
            made.release()
            self.held -= 1
            self.waiting.append(payload)

    @rule(who=st.integers(0, 1))
    def repair(self, who):
        assert self.handles[who].repair() == 0

    @rule(who=st.integers(0, 1))
    def fill_and_drain(self, who):
        """Go on by whole laps, so that wraps come soon."""
        for i in range(2 * self.capacity):
            if self.room:
                self.handles[who].try_push(payload_of(1, i, 16))
                self.waiting.append(payload_of(1, i, 16))
            if self.waiting:
                assert self.handles[1 - who].try_pop() == self.waiting.popleft()

    @invariant()
    def counts_agree(self):
        if not hasattr(self, "handles"):
            return
        assert [len(handle) for handle in self.handles] == [len(self.waiting)] * 2
        states = collections.Counter(self.raw.states)
        assert states[CellState.FREE] == self.room
        assert states[CellState.TAKEN] == self.held
        assert states[CellState.READY] + states[CellState.RETRY] == len(self.waiting)


RingAgainstDeque.TestCase.settings = settings(max_examples=40, stateful_step_count=40)
TestRingAgainstDeque = RingAgainstDeque.TestCase


@pytest.mark.parametrize("word_wraps", [False, True], ids=["in places", "in words"])
@pytest.mark.parametrize("capacity", [2, 4])
def test_thousands_of_messages_cross_the_wrap_of_laps_and_versions(path, capacity, word_wraps):
    SharedRing.create(path, capacity).close()
    raw = RingFile(path)
    age(raw, 100, 150, word_wraps)
    lap_before, version_before = raw.head >> raw.size_bits, raw.version_of(0)
    with SharedRing.open(path) as ring:
        waiting = collections.deque()
        for i in range(4000):
            if len(waiting) < capacity:
                ring.try_push(payload_of(0, i))
                waiting.append(payload_of(0, i))
            if i % 3 == 0:
                claim = ring.try_claim()
                assert claim.tobytes() == waiting[0]
                if i % 2:
                    claim.release()
                    waiting.rotate(-1)
                else:
                    claim.ack()
                    waiting.popleft()
            elif waiting and i % 5:
                assert ring.try_pop() == waiting.popleft()
            assert len(ring) == len(waiting)
        assert raw.head >> raw.size_bits < lap_before
        assert (raw.version_of(0) < version_before) == word_wraps
        assert ring.pop_many(9) == list(waiting)


@pytest.mark.parametrize("capacity", [2, 4, 64])
@pytest.mark.parametrize("laps_left", [0, 1, 2])
def test_a_full_ring_across_the_wrap_is_full_and_keeps_its_order(path, capacity, laps_left):
    SharedRing.create(path, capacity).close()
    raw = RingFile(path)
    age(raw, laps_left, 1, True)
    with SharedRing.open(path) as ring:
        for start in range(0, 5 * capacity, capacity):
            payloads = [payload_of(2, start + i) for i in range(capacity)]
            assert ring.push_many([*payloads, b"no room"]) == capacity
            assert len(ring) == capacity
            with pytest.raises(Full):
                ring.try_push(b"no room")
            assert ring.pop_many(capacity + 1) == payloads
            # an odd step, so that the fill starts at another place each time
            ring.try_push(b"step")
            assert ring.try_pop() == b"step"


@pytest.mark.parametrize("capacity", [2, 4])
def test_an_old_reference_does_not_lead_to_a_new_message_in_its_cell(path, capacity):
    SharedRing.create(path, capacity).close()
    raw = RingFile(path)
    with SharedRing.open(path) as ring:
        ring.try_push(b"old")
        reference = int(raw.places[0])
        assert ring.try_pop() == b"old"
        ring.push_many([b"%d" % i for i in range(capacity)])
        # as a publisher that slept since then would leave it: the place of the oldest message says the old version
        position = raw.head
        raw.places[position % raw.size] = raw.full_place(position >> raw.size_bits, 0, reference & (capacity - 1))
        got = ring.pop_many(capacity)
        assert len(got) == len(set(got)) == capacity - 1
        assert ring.repair() == 1
        assert sorted([*got, ring.try_pop()]) == [b"%d" % i for i in range(capacity)]

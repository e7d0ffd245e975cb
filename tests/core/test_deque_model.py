"""SharedDeque against a plain deque: small worlds, every call, with laps, versions and positions that wrap on the way."""

import collections
import os
import shutil
import tempfile
from pathlib import Path

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import Bundle, RuleBasedStateMachine, consumes, initialize, invariant, rule

from subetha._core import SharedDeque
from subetha.errors import Empty, Full, NotOwner
from subetha.layout import VERSION_MASK, CellState

from .ring_file import DequeFile

PAYLOADS = st.binary(max_size=16)
MEMORY = "/dev/shm" if os.access("/dev/shm", os.W_OK) else None


class DequeAgainstDeque(RuleBasedStateMachine):
    """An owner, a thief and one who may follow the owner; the model is what waits, and what was put back, which goes first."""

    claims = Bundle("claims")

    @initialize(
        capacity=st.sampled_from([2, 4]),
        laps_left=st.integers(0, 3),
        positions_left=st.sampled_from([0, 1, 5]),
        versions_left=st.integers(0, 5),
        word_wraps=st.booleans(),
    )
    def start(self, capacity, laps_left, positions_left, versions_left, word_wraps):
        self.directory = Path(tempfile.mkdtemp(prefix="subetha-test-", dir=MEMORY))
        self.path = self.directory / "deque"
        SharedDeque.create(self.path, capacity, 16).close()
        self.raw = DequeFile(self.path)
        self.raw.set_laps((1 << self.raw.lap_bits) - laps_left)
        self.raw.set_versions((VERSION_MASK + 1 if word_wraps else 1 << self.raw.version_bits) - versions_left)
        # the laps of the places wrap, or the positions themselves
        self.raw.set_position(
            (1 << (self.raw.lap_bits + self.raw.size_bits)) - positions_left if laps_left % 2 else -positions_left
        )
        self.owner, self.thief = SharedDeque.open(self.path), SharedDeque.open_as_thief(self.path)
        self.owner.own()
        self.capacity = capacity
        self.waiting, self.back = collections.deque(), collections.deque()
        self.held = 0

    def teardown(self):
        if hasattr(self, "owner"):
            self.owner.close()
            self.thief.close()
            shutil.rmtree(self.directory)

    @property
    def room(self):
        return self.capacity - len(self.waiting) - len(self.back) - self.held

    def expect(self, call, *, newest=False):
        """`call` takes what the model says is next."""
        if self.back:
            expected = self.back.popleft()
        elif self.waiting:
            expected = self.waiting.pop() if newest else self.waiting.popleft()
        else:
            with pytest.raises(Empty):
                call()
            return None
        got = call()
        assert (got if isinstance(got, bytes) else got.tobytes()) == expected
        return got, expected

    @rule(payload=PAYLOADS, timeout=st.sampled_from([0, 0.0]))
    def push(self, payload, timeout):
        if self.room:
            self.owner.push(payload, timeout)
            self.waiting.append(payload)
        else:
            with pytest.raises(Full):
                self.owner.push(payload, timeout)

    @rule(payloads=st.lists(PAYLOADS, max_size=5))
    def push_batch(self, payloads):
        if len(payloads) <= self.room:
            assert self.owner.push_batch(payloads) == len(payloads)
            self.waiting.extend(payloads)
        else:
            with pytest.raises(Full):
                self.owner.push_batch(payloads)

    @rule()
    def pop(self):
        self.expect(self.owner.pop, newest=True)

    @rule(by_owner=st.booleans(), waits=st.booleans())
    def steal(self, by_owner, waits):
        handle = self.owner if by_owner else self.thief
        self.expect(lambda: handle.steal(timeout=0.0) if waits else handle.steal())

    @rule(by_owner=st.booleans(), n=st.integers(0, 6))
    def steal_many(self, by_owner, n):
        expected = []
        while len(expected) < n and (self.back or self.waiting):
            expected.append((self.back or self.waiting).popleft())
        assert (self.owner if by_owner else self.thief).steal_many(n) == expected

    @rule(target=claims, by_owner=st.booleans())
    def claim(self, by_owner):
        made = self.expect((self.owner if by_owner else self.thief).try_claim)
        self.held += made is not None
        return made

    @rule(made=consumes(claims))
    def ack(self, made):
        if made is not None:
            assert made[0].payload == made[1]
            made[0].ack()
            self.held -= 1

    @rule(made=consumes(claims))
    def release(self, made):
        if made is not None:
            made[0].release()
            self.held -= 1
            self.back.append(made[1])

    @rule()
    def a_thief_does_not_push(self):
        for call in (lambda: self.thief.push(b""), self.thief.pop, lambda: self.thief.push_batch([])):
            with pytest.raises(NotOwner):
                call()

    @rule()
    def another_owner_follows(self):
        if self.held:
            return
        follower = SharedDeque.open(self.path)
        with pytest.raises(NotOwner):
            follower.own()
        self.owner.close()
        self.owner = follower
        follower.own()

    @rule(by_owner=st.booleans())
    def repair(self, by_owner):
        assert (self.owner if by_owner else self.thief).repair() == 0

    @rule(newest=st.booleans())
    def fill_and_drain(self, newest):
        """Go on by whole laps, so that wraps come soon."""
        for n in range(2 * self.capacity):
            if self.room:
                self.push(b"%d" % n, 0)
            if newest:
                self.pop()
            else:
                self.steal(False, False)

    @invariant()
    def counts_agree(self):
        if not hasattr(self, "owner"):
            return
        waiting = len(self.waiting) + len(self.back)
        assert [len(self.owner), len(self.thief)] == [waiting] * 2
        states = collections.Counter(self.raw.states)
        assert states[CellState.FREE] == self.room
        assert states[CellState.TAKEN] == self.held
        assert states[CellState.READY] + states[CellState.RETRY] == waiting


DequeAgainstDeque.TestCase.settings = settings(max_examples=40, stateful_step_count=40)
TestDequeAgainstDeque = DequeAgainstDeque.TestCase

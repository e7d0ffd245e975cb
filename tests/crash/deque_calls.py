"""Calls of a SharedDeque under the stepper, as `ring_calls` has those of a ring: of thieves, and of owners, whose place the
survivor takes afterwards.
"""

import contextlib
import os

import ring_calls
from census import DequeCensus
from ring_calls import CAPACITY, FALLEN, NEVER, ONCE, PERHAPS, SURVIVOR, VICTIM, RingStage
from traffic import origin_of, payload_of

from subetha._core import SharedDeque
from subetha.errors import Empty, NotOwner
from subetha.layout import CellState, cell_word


def make_template(directory):
    """A deque that has been in use: its ends are not at the first place, and its versions differ."""
    with SharedDeque.create(os.path.join(directory, "deque"), CAPACITY) as deque:
        for n in range(6):
            deque.push(b"before")
            if n % 2:
                deque.try_claim().release()
            if n % 3:
                deque.pop()
            else:
                deque.steal()


class DequeStage(RingStage):
    file = "deque"
    kind = SharedDeque
    census_of = DequeCensus

    def take_many(self, n):
        return self.ring.steal_many(n)


class Thief(DequeStage):
    """The survivor is the owner."""


class Owner(DequeStage):
    """The victim is the owner; the survivor becomes it where nobody is any more."""

    def fill(self):
        with SharedDeque.open(self.path) as maker:
            for n in range(self.waiting):
                maker.push(payload_of(SURVIVOR, n))

    def setup(self):
        super().setup()
        self.ring.own()

    def traffic(self):
        self.drain()
        if self.census.file.get("owner"):
            # not before its first push, nor when it is closed
            try:
                self.ring.push(b"")
            except NotOwner:
                pass
            else:
                raise AssertionError("two own the deque")
        assert self.ring.rescue() == 0, "a stopped process is not dead"


class Push(Owner):
    def setup(self):
        super().setup()
        self.payload = payload_of(self.producer, 0)

    def call(self):
        self.ring.push(self.payload)

    def expect(self, returned, value):
        self.expected[self.producer, 0] = ONCE if returned else PERHAPS


class FirstPush(Push):
    """It becomes the owner on the way."""

    handles_join = False

    def setup(self):
        DequeStage.setup(self)
        self.payload = payload_of(self.producer, 0)


class PushBatch(Owner):
    waiting = 1
    size = 3

    def setup(self):
        super().setup()
        self.payloads = [payload_of(self.producer, n) for n in range(self.size)]

    def call(self):
        return self.ring.push_batch(self.payloads)

    def expect(self, returned, value):
        for n in range(self.size):
            self.expected[VICTIM, n] = ONCE if returned else PERHAPS

    def settle(self):
        super().settle()
        all_or_nothing(self, VICTIM)


def all_or_nothing(stage, producer, size=PushBatch.size):
    seen = [stage.seen[producer, n] for n in range(size)]
    assert len(set(seen)) == 1, f"a part of a batch came: {seen}"


class PushOverStale(Push):
    """The places of a whole lap lie before it, stale: a place whose cell is gone is stepped over to make room."""

    waiting = 3

    def fill(self):
        super().fill()
        census = self.census_of(self.path)
        # as takers leave it that died between cell and top, and whose claims were put back and taken
        census.file.put(top=census.file.get("bottom") - census.file.size)
        for n in range(census.file.size - self.waiting):
            position = census.file.get("top") + n
            census.file.slots[position % census.file.size] = census.file.full_place(position // census.file.size, 0, 0)


class Pop(Owner):
    waiting = 3

    def call(self):
        return [self.ring.pop()]

    def expect(self, returned, value):
        if isinstance(value, Exception):
            return
        self.expected[SURVIVOR, self.waiting - 1] = NEVER if returned else PERHAPS
        if returned:
            # one that was stopped may have been left with an older one, or with none
            assert all(origin_of(payload)[0] == SURVIVOR for payload in value)


class PopLast(Pop):
    """Owner and thieves meet at the last one."""

    waiting = 1


class PopBack(Pop):
    """What it pops was put back."""

    waiting = 2

    def before(self):
        super().before()
        self.ring.try_claim().release()

    def expect(self, returned, value):
        if not isinstance(value, Exception):
            self.expected[SURVIVOR, 0] = NEVER if returned else PERHAPS


class Steal(Thief):
    waiting = 3
    takes = 1

    def call(self):
        return [self.ring.steal()]

    def expect(self, returned, value):
        if isinstance(value, Exception):
            return
        for n in range(self.takes):
            self.expected[SURVIVOR, n] = NEVER if returned else PERHAPS


class StealLast(Steal):
    waiting = 1


class StealMoved(Steal):
    """While it is stopped all that waits moves into `back`, one message after the other: at no moment is nothing there."""

    waiting = 2

    def traffic(self):
        with contextlib.suppress(Empty):
            self.ring.try_claim().release()
        # the last one as by another thief, who had found `back` empty before that
        file = self.census.file
        for cell in map(file.cell_at, file.visible):
            if file.state_of(cell) is CellState.READY:
                file.words[cell] = cell_word(file.version_of(cell) + 1, CellState.RETRY, min(self.alive) + 1)
        file.put(top=file.get("bottom"))
        self.ring.repair()

    def after_stop(self, value):
        assert isinstance(value, list), f"{value!r} although something waited all the time"
        super().after_stop(value)


class StealMany(Steal):
    takes = 3

    def call(self):
        return self.ring.steal_many(3)


class ClaimAndAck(Thief):
    def call(self):
        claim = self.ring.try_claim()
        content = claim.tobytes()
        claim.ack()
        return [content]

    def expect(self, returned, value):
        if not isinstance(value, Exception):
            self.expected[SURVIVOR, 0] = NEVER if returned else PERHAPS


class ClaimAndRelease(Thief):
    def call(self):
        self.ring.try_claim().release()


class Hold(Thief):
    def call(self):
        self.claim = self.ring.try_claim()


class Close(Owner):
    waiting = 3

    def setup(self):
        super().setup()
        self.claims = [self.ring.try_claim() for _ in range(2)]

    def call(self):
        self.ring.close()


class TakeOver(Owner):
    """The owner has died in the middle of a batch; the victim takes its place, and the survivor the victim's."""

    waiting = 1
    dies = (("PushBatch", CellState.READY),)

    def setup(self):
        DequeStage.setup(self)

    def call(self):
        self.ring.own()

    def finish(self, value):
        self.ring.close()

    def after_fall(self, fallen, pid):
        for n in range(PushBatch.size):
            self.expected[fallen.producer, n] = NEVER

    def settle(self):
        super().settle()
        assert all(count == 1 for count in self.seen.values())


class TakeOverPop(TakeOver):
    """The owner has died over the cell of the last message, before it moved an end."""

    dies = (("PopLast", CellState.TAKEN),)

    def after_fall(self, fallen, pid):
        """What it had in hand waits again."""


class PushAfterPop(TakeOverPop):
    """The take-over and a push in one."""

    def call(self):
        self.ring.push(payload_of(VICTIM, 0))

    def expect(self, returned, value):
        self.expected[VICTIM, 0] = ONCE if returned else PERHAPS


class Rescue(DequeStage):
    """The owner has died in the middle of a batch, a thief over a claim, another one in the middle of a release."""

    waiting = 2
    fill = Owner.fill
    dies = (("PushBatchOfTwo", CellState.READY), ("Hold", None), ("ClaimAndRelease", CellState.RETRY))

    def call(self):
        return self.ring.rescue()

    def finish(self, value):
        self.ring.close()

    def after_fall(self, fallen, pid):
        if isinstance(fallen, PushBatch):
            for n in range(fallen.size):
                self.expected[fallen.producer, n] = NEVER

    after_kill_beside = ring_calls.Rescue.after_kill_beside


class PushBatchOfTwo(PushBatch):
    size = 2


CALLS = {
    "push": Push,
    "first_push": FirstPush,
    "push_batch": PushBatch,
    "push_over_stale": PushOverStale,
    "pop": Pop,
    "pop_last": PopLast,
    "pop_back": PopBack,
    "steal": Steal,
    "steal_last": StealLast,
    "steal_moved": StealMoved,
    "steal_many": StealMany,
    "claim_and_ack": ClaimAndAck,
    "claim_and_release": ClaimAndRelease,
    "close": Close,
    "take_over": TakeOver,
    "take_over_pop": TakeOverPop,
    "push_after_pop": PushAfterPop,
    "rescue": Rescue,
}
__all__ = ["CALLS", "DYING", "FALLEN", "make_template"]
DYING = {kind.__name__: kind for kind in (Hold, ClaimAndRelease, PushBatch, PushBatchOfTwo, PopLast)}

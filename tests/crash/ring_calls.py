"""Calls of a SharedRing under the stepper: what stands before, what the victim does, and what must be found afterwards."""

import contextlib
import os
import shutil
from collections import Counter

import numpy as np
from census import RingCensus, nothing_left, states_of
from traffic import origin_of, payload_of

from subetha._core import SharedRing
from subetha.errors import Empty, Full
from subetha.layout import CellState

CAPACITY = 4
SURVIVOR, VICTIM, TRAFFIC, ROUND, FALLEN = 1, 2, 3, 4, 5
ONCE, NEVER, PERHAPS = {1}, {0}, {0, 1}
ALWAYS_SEEN = (CellState.TAKEN, CellState.RETRY)


def make_template(directory):
    """A ring that has been in use: its hints are not at the first place, and its versions differ."""
    path = os.path.join(directory, "ring")
    with SharedRing.create(path, CAPACITY) as ring:
        for n in range(6):
            ring.try_push(b"before")
            if n % 2:
                ring.try_claim().release()
            ring.try_pop()


class RingStage:
    """The survivor, its messages, and one call of a victim on the same ring.

    `setup`, `call` and `finish` run in the victim. `dies` are (call, state) of others that die before, where a cell comes to
    that state for the first time.
    """

    file = "ring"
    kind = SharedRing
    census_of = RingCensus
    waiting = 2
    dies = ()
    dies_first = False
    lapses = ()
    handles_join = True
    producer = VICTIM

    def __init__(self, directory):
        self.directory = directory
        self.path = os.path.join(directory, self.file)

    @classmethod
    def copy(cls, template, directory):
        os.mkdir(directory)
        shutil.copyfile(os.path.join(template, cls.file), os.path.join(directory, cls.file))
        return cls(directory)

    @property
    def watched(self):
        return [(self.path, 0)]

    def take_many(self, n):
        return self.ring.pop_many(n)

    # ---- the survivor, before ----

    def before(self):
        self.ring = self.kind.open(self.path)
        self.fill()
        self.take_many(0)
        self.census = self.census_of(self.path)
        self.alive = set(self.census.file.used_slots)
        self.expected = {(SURVIVOR, n): ONCE for n in range(self.waiting)}
        self.seen = Counter()

    def fill(self):
        for n in range(self.waiting):
            self.ring.try_push(payload_of(SURVIVOR, n))

    def count(self, state):
        return states_of(self.census_of(self.path).words).count(state)

    # ---- the victim ----

    def message(self, n):
        return payload_of(self.producer, n)

    def setup(self):
        self.ring = self.kind.open(self.path)
        if self.handles_join:
            self.take_many(0)

    def call(self):
        raise NotImplementedError

    def finish(self, value):
        self.ring.close()
        return value

    # ---- the survivor, afterwards ----

    def expect(self, returned, value):
        """Put into `expected` how often each message may come."""

    def note(self, payloads):
        self.seen.update(map(origin_of, payloads))

    def look_at_trace(self):
        """Did the call that was stepped through do what it is there for?"""

    def after_fall(self, fallen, pid):
        """Another one, of that pid, dies before the victim's call begins."""

    def after_kill(self, returned, value):
        self.expect(returned, value)
        words = self.census.words.copy()
        for cell, state in enumerate(states_of(words)):
            if state in ALWAYS_SEEN:
                self.expected[origin_of(self.census.content(cell))] = ONCE
        was_there = (self.census.file.records["status"] & 0xFF != 0).sum() - len(self.alive)
        rescued = self.ring.rescue()
        assert rescued == was_there, f"rescue() says {rescued}, where {was_there} were dead"
        nothing_left(self.census.leftover(self.alive))
        self.settle()

    def settle(self):
        """Drain, compare, count, and fill the ring once more."""
        self.drain()
        for origin, allowed in self.expected.items():
            assert self.seen[origin] in allowed, f"message {origin} came {self.seen[origin]} times, expected {allowed}"
        strange = set(self.seen) - set(self.expected)
        assert not strange, f"messages nobody has pushed: {strange}"
        nothing_left(self.census.faults(self.alive))
        sequence = [payload_of(ROUND, n) for n in range(CAPACITY)]
        for payload in sequence:
            self.ring.try_push(payload)
        try:
            self.ring.try_push(b"")
        except Full:
            pass
        else:
            raise AssertionError("more than the capacity went in")
        assert self.take_many(2 * CAPACITY) == sequence
        nothing_left(self.census.faults(self.alive))
        self.close()
        nothing_left(self.census.faults(set()))

    def drain(self):
        order = []
        with contextlib.suppress(Empty):
            while True:
                order.append(self.ring.try_pop())
        self.note(order)
        mine = [origin for origin in map(origin_of, order) if origin[0] == VICTIM]
        assert mine == sorted(mine), f"the victim's messages came as {mine}"
        assert [n for _, n in mine] == list(range(mine[0][1] if mine else 0, len(mine) + (mine[0][1] if mine else 0)))

    def close(self):
        self.ring.close()

    # ---- the victim is only stopped ----

    def traffic(self):
        """Ten times the capacity goes past the one that is stopped."""
        self.drain()
        for n in range(10 * CAPACITY):
            payload = payload_of(TRAFFIC, n)
            self.expected[origin_of(payload)] = ONCE
            # the one that is stopped may hold three of the four cells
            self.ring.try_push(payload)
            self.note([self.ring.try_pop()])
        assert self.ring.rescue() == 0, "a stopped process is not dead"

    def meanwhile(self):
        """Again and again until the victim has ended."""

    def after_stop(self, value):
        self.expect(True, value)
        # what the victim has taken out itself
        for payload in value if isinstance(value, list) else []:
            self.note([payload])
        for n in range(self.waiting):
            self.expected[SURVIVOR, n] = ONCE
        if isinstance(value, list):
            for payload in value:
                self.expected[origin_of(payload)] = ONCE
        self.settle()


class TryPush(RingStage):
    def setup(self):
        super().setup()
        self.payload = self.message(0)

    def call(self):
        self.ring.try_push(self.payload)

    def expect(self, returned, value):
        self.expected[self.producer, 0] = ONCE if returned else PERHAPS


class FirstPush(TryPush):
    handles_join = False


class PushMany(RingStage):
    waiting = 1

    def setup(self):
        super().setup()
        self.payloads = [self.message(n) for n in range(3)]

    def call(self):
        return self.ring.push_many(self.payloads)

    def expect(self, returned, value):
        for n in range(3):
            self.expected[VICTIM, n] = PERHAPS if not returned else ONCE if n < value else NEVER


class TryPop(RingStage):
    waiting = 3
    takes = 1

    def call(self):
        return [self.ring.try_pop()]

    def expect(self, returned, value):
        if isinstance(value, Exception):
            return
        for n in range(self.takes):
            self.expected[SURVIVOR, n] = NEVER if returned else PERHAPS
        if returned:
            assert all(origin_of(payload)[0] in (SURVIVOR, TRAFFIC) for payload in value)


class PopMany(TryPop):
    takes = 3

    def call(self):
        return self.ring.pop_many(3)


class ClaimAndAck(RingStage):
    def call(self):
        claim = self.ring.try_claim()
        content = claim.tobytes()
        claim.ack()
        return [content]

    def expect(self, returned, value):
        if not isinstance(value, Exception):
            self.expected[SURVIVOR, 0] = NEVER if returned else PERHAPS


class ClaimAndRelease(RingStage):
    def call(self):
        self.ring.try_claim().release()


class Close(RingStage):
    waiting = 3

    def setup(self):
        super().setup()
        self.claims = [self.ring.try_claim() for _ in range(2)]

    def call(self):
        self.ring.close()


class Repair(RingStage):
    """Places and a hint have been overwritten."""

    waiting = 3

    def before(self):
        super().before()
        places = self.census.file.places
        places[1:6] = places[1:6][::-1] ^ np.uint64(1 << 50)
        self.census.file.tail += 5

    def call(self):
        return self.ring.repair()

    def after_kill_beside(self, tracee, slow):
        slow.go_on()
        self.ring.rescue()
        self.settle()


class Rescue(RingStage):
    """Three have died: over a claim, in the middle of a release, and before a push was published."""

    waiting = 2
    dies = (("Hold", None), ("ClaimAndRelease", CellState.RETRY), ("TryPush", CellState.READY))

    def call(self):
        return self.ring.rescue()

    def finish(self, value):
        self.ring.close()

    def after_fall(self, fallen, pid):
        self.expected[fallen.producer, 0] = PERHAPS

    def after_kill_beside(self, tracee, slow):
        """Others take numbers and messages before the slow rescuer goes on: it must leave these alone."""
        self.ring.rescue()
        others = [self.kind.open(self.path) for _ in range(4)]
        held = []
        for other in others:
            with contextlib.suppress(Empty):
                held.append(other.try_claim())
        slow.go_on()
        for claim in held:
            self.note([claim.tobytes()])
            claim.ack()
        for other in others:
            other.close()
        self.ring.rescue()
        nothing_left(self.census.leftover(self.alive))
        self.settle()


class Hold(RingStage):
    def call(self):
        self.claim = self.ring.try_claim()


class HalfPush(Rescue):
    dies = (("PushMany", CellState.WRITING), ("TryPop", CellState.TAKEN))

    def after_fall(self, fallen, pid):
        for n in range(3):
            self.expected[fallen.producer, n] = PERHAPS


CALLS = {
    "try_push": TryPush,
    "first_push": FirstPush,
    "push_many": PushMany,
    "try_pop": TryPop,
    "pop_many": PopMany,
    "claim_and_ack": ClaimAndAck,
    "claim_and_release": ClaimAndRelease,
    "close": Close,
    "repair": Repair,
    "rescue": Rescue,
    "rescue_of_batches": HalfPush,
}
DYING = {kind.__name__: kind for kind in (Hold, ClaimAndRelease, TryPush, PushMany, TryPop)}

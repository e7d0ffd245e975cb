"""Two processes push into a ring and pop out of it, and one of them is killed at a random time, again and again.

Every message tells its producer, its number and a check of its bytes. A process notes in shared memory what it has pushed or
taken, right after the call; the dead one may have had so many in hand as its way of taking says, and no others are missing
or come twice.
"""

import contextlib
import mmap
import os
import struct
import time
import zlib

import numpy as np
import pytest

from subetha._core import SharedRing
from subetha.errors import Empty, Full
from subetha.layout import SlotState

from .crowd import Crowd, until

from ..crash.census import RingCensus, nothing_left  # isort: skip

LIFE = 1 << 18
"""Most messages of one producer's life."""
HEAD = struct.Struct("<III")
BATCH = 4
CLAIMS = 3


class Notes:
    """What the processes have done: `pushed` by each producer, `taken` of each message, and each one's progress."""

    def __init__(self, lives):
        self.pushed = np.frombuffer(mmap.mmap(-1, 8 * lives), "<i8")
        self.progress = np.frombuffer(mmap.mmap(-1, 4096), "<i8")
        # touched where messages were: most lives are short
        self.taken = mmap.mmap(-1, lives * LIFE)


def payload_of(life, number):
    body = (life * 7919 + number).to_bytes(4, "little") * (number % 11)
    return HEAD.pack(life, number, zlib.crc32(body, life ^ number)) + body


def origin_of(payload):
    life, number, _ = HEAD.unpack_from(payload)
    assert payload == payload_of(life, number), f"corrupt: {payload.hex()}"
    return life, number


def push(path, notes, life):
    with SharedRing.open(path) as ring:
        number = 0
        while number < LIFE - BATCH:
            if number % 50 < 2 * BATCH:
                went_in = ring.push_many([payload_of(life, number + i) for i in range(BATCH)])
            else:
                try:
                    ring.push(payload_of(life, number), timeout=1)
                    went_in = 1
                except Full:
                    continue
            number += went_in
            notes.pushed[life] = number
            notes.progress[0] += went_in


def take(path, notes, way):
    taken, progress = notes.taken, notes.progress

    def note(payload):
        life, number = origin_of(payload)
        taken[life * LIFE + number] += 1
        progress[1] += 1

    def linger(turn):
        # so that many a kill hits one who has something in hand
        if turn % 10 == 0:
            time.sleep(0.003)

    with SharedRing.open(path) as ring:
        turn = 0
        while True:
            turn += 1
            try:
                if way == "pop":
                    note(ring.pop(timeout=1))
                elif way == "pop_many":
                    for payload in ring.pop_many(BATCH) or [ring.pop(timeout=1)]:
                        note(payload)
                else:
                    claims = [ring.claim(timeout=1)]
                    if way == "several claims":
                        with contextlib.suppress(Empty):
                            claims += [ring.try_claim() for _ in range(CLAIMS - 1)]
                    for claim in claims:
                        if turn % 7 == 0:
                            claim.release()
                            continue
                        linger(turn)
                        note(claim.tobytes())
                        linger(turn + 1)
                        claim.ack()
            except Empty:
                continue


WAYS = {"pop": (1, 0), "pop_many": (BATCH, 0), "claim": (0, 1), "several claims": (0, 1)}
"""How many messages a death in the middle may make missing, and how many come twice."""
POPS, CLAIMING = ("pop", "pop_many"), ("claim", "several claims")


class Pair:
    """A ring with a producer and a consumer, one of whom dies."""

    def __init__(self, path, folder, dice, rounds, ways):
        self.path, self.dice, self.rounds, self.ways = path, dice, rounds, ways
        self.notes = Notes(rounds + 2)
        self.crowd = Crowd(folder)
        self.life = -1
        self.missing_allowed = self.twice_allowed = 0
        self.populate()

    def populate(self):
        if not self.crowd.of("producer"):
            self.life += 1
            self.crowd.start("producer", push, self.path, self.notes, self.life)
        if not self.crowd.of("consumer"):
            way = self.dice.choice(self.ways)
            self.crowd.start("consumer", take, self.path, self.notes, way, extra=way)

    def both_get_on(self):
        """Each of the two does something: whoever lives is not held up by who has died."""
        begun = self.notes.progress[:2].copy()

        def do():
            # a producer at the end of its life is replaced
            for member, code in self.crowd.ended():
                assert (member.role, code) == ("producer", 0), f"{member} ended with {code}"
            self.populate()
            return np.all(self.notes.progress[:2] > begun)

        until(do, lambda: f"both get on; {self.notes.progress[:2] - begun}", self.crowd)

    def kill_one(self):
        one = self.dice.choice(self.crowd.members)
        if one.role == "consumer":
            missing, twice = WAYS[one.extra]
            self.missing_allowed += missing
            self.twice_allowed += twice
        self.crowd.kill(one)

    def rage(self):
        for _ in range(self.rounds):
            self.both_get_on()
            time.sleep(self.dice.uniform(0, 0.02))
            self.kill_one()
            self.populate()
        self.both_get_on()

    def empty(self):
        """The producer dies, the consumer takes what is left and dies."""
        for producer in self.crowd.of("producer"):
            self.crowd.kill(producer)
        with SharedRing.open(self.path, readonly=True) as ring:
            until(lambda: len(ring) == 0 and not np.any(ring.cells()["word"] >> 16 & 0xF), "it is empty", self.crowd)
        for consumer in self.crowd.of("consumer"):
            self.crowd.kill(consumer)

    def check(self):
        missing = twice = 0
        taken = np.frombuffer(self.notes.taken, np.uint8)
        for life in range(self.life + 1):
            pushed = int(self.notes.pushed[life])
            came = taken[life * LIFE : life * LIFE + pushed + BATCH + 1]
            missing += int(np.count_nonzero(came[:pushed] == 0))
            twice += int(np.sum(np.maximum(came, 1) - 1))
            assert not np.any(came[pushed + BATCH :]), f"life {life} has pushed {pushed}: more came"
        assert missing <= self.missing_allowed, f"{missing} missing, at most {self.missing_allowed} were in hand"
        assert twice <= self.twice_allowed, f"{twice} came twice, at most {self.twice_allowed} were in hand"
        return missing, twice


def capacity_of(path):
    with SharedRing.open(path) as ring:
        found = ring.push_many([b"x"] * (ring.capacity + 1))
        assert ring.pop_many(found + 1) == [b"x"] * found
        return found


def loop(path, folder, dice, rounds, ways, capacity, prepare=lambda file: None):
    SharedRing.create(path, capacity).close()
    prepare(RingCensus(path).file)
    pair = Pair(path, folder, dice, rounds, ways)
    try:
        pair.rage()
        pair.empty()
    finally:
        pair.crowd.end()
    missing, twice = pair.check()
    with SharedRing.open(path) as ring:
        ring.rescue()
        assert ring.repair() == 0
    assert capacity_of(path) == capacity
    nothing_left(RingCensus(path).faults(set()))
    return pair, missing, twice


def tell_figures(figures, pair, missing, twice, begun):
    killed = pair.crowd.counted
    figures(
        kills=pair.rounds,
        seconds=round(time.monotonic() - begun),
        messages=int(pair.notes.progress[1]),
        missing=f"{missing} of {pair.missing_allowed} in the hands of the killed",
        twice=f"{twice} of {pair.twice_allowed}",
        producers_killed=killed["producers_killed"],
        consumers_killed=killed["consumers_killed"],
    )


@pytest.mark.parametrize(("ways", "capacity"), [(POPS, 64), (CLAIMING, 4)], ids=["pops", "claims"])
def test_a_push_pop_loop_survives_the_death_of_either(shm, tmp_path, dice, sized, figures, ways, capacity):
    begun = time.monotonic()
    pair, missing, twice = loop(os.fspath(shm / "ring"), tmp_path, dice, sized(20, 1000), ways, capacity)
    tell_figures(figures, pair, missing, twice, begun)


@pytest.mark.parametrize("wrap", ["in places", "in words"])
def test_a_push_pop_loop_with_deaths_goes_over_the_wraps_of_versions_and_laps(
    shm, tmp_path, dice, sized, figures, wrap
):
    path, capacity, begun = os.fspath(shm / "ring"), 16, time.monotonic()
    rounds = sized(15, 200)

    def limit(file):
        return 1 << (file.version_bits if wrap == "in places" else 44)

    def prepare(file):
        # some deaths before, at and after it: between two of them there are some laps
        file.set_laps((1 << file.lap_bits) - 1 - dice.randrange(rounds // 5))
        file.set_versions(limit(file) - 1 - dice.randrange(rounds // 5))
        file.records["status"] = ((1 << 56) - 1 - dice.randrange(3)) << 8 | SlotState.FREE

    pair, missing, twice = loop(path, tmp_path, dice, rounds, list(WAYS), capacity, prepare)
    tell_figures(figures, pair, missing, twice, begun)
    file = RingCensus(path).file
    assert file.tail < file.position_mask >> 1
    assert all((file.version_of(cell) - limit(file)) % (1 << 44) < 1 << 43 for cell in range(capacity))

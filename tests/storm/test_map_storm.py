"""Two processes in step on one key while its neighbours are deleted; and writers that are killed at random times, with short
values and with values in blocks.

A killed writer notes in shared memory what it has done, right after the call; one call of each of the dead may have been
done and not noted.
"""

import os
import time

import pytest

from subetha._core import SharedHashMap
from subetha.errors import ArenaFull, MapFull

from .crowd import Board, Crowd, until

from ..core.ring_file import MapFile  # isort: skip
from ..core.traffic import origin_of, payload_of  # isort: skip
from ..crash.census import nothing_left, records_faults  # isort: skip

FIRST, SECOND, NEIGHBOUR = 0, 1, 2
NEIGHBOURS = 6
COUNTERS = 3


def meet(path, board, me, rounds):
    """`setdefault` a key beside the other one, who has come to the same round; then one of them takes it out."""
    other = 1 - me
    with SharedHashMap.open(path) as shared:
        for n in range(rounds):
            key = b"key %d" % (n % 16)
            board[me] = 3 * n + 1
            while board[other] < 3 * n + 1:
                os.sched_yield()
            while True:
                try:
                    got = shared.setdefault(key, b"%d of %d" % (n, me))
                    break
                except MapFull:
                    os.sched_yield()
            assert got in (b"%d of 0" % n, b"%d of 1" % n), (n, got)
            assert shared.get(key) == got, (n, got)
            board[me] = 3 * n + 2
            while board[other] < 3 * n + 2:
                os.sched_yield()
            assert shared.get(key) == got, (n, got)
            board[me] = 3 * n + 3
            while board[other] < 3 * n + 3:
                os.sched_yield()
            if n % 2 == me:
                assert shared.pop(key) == got, (n, got)
                board[4] += shared.get(key) is not None


def disturb(path, board, rounds):
    turn = 0
    with SharedHashMap.open(path) as shared:
        while board[FIRST] < 3 * rounds or board[SECOND] < 3 * rounds:
            turn += 1
            shared[b"neighbour %d" % (turn % NEIGHBOURS)] = b"%d" % turn
            shared.pop(b"neighbour %d" % (turn * 5 % NEIGHBOURS), None)
            board[NEIGHBOUR] = turn


def test_two_processes_insert_one_key_once_while_its_neighbours_are_deleted(shm, sized, figures):
    rounds = sized(4000, 1_000_000)
    path, board, crowd = shm / "map", Board(), Crowd(shm)
    SharedHashMap.create(path, 10).close()
    begun = time.monotonic()
    try:
        for me in (FIRST, SECOND):
            crowd.start("writer", meet, path, board, me, rounds)
        crowd.start("neighbour", disturb, path, board, rounds)
        seen = board[FIRST]
        while crowd.members:
            until(lambda seen=seen: crowd.ended() or board[FIRST] > seen or not crowd.members, "it goes on", crowd)
            seen = board[FIRST]
    finally:
        crowd.check()
        crowd.end()
    assert (board[FIRST], board[SECOND], board[4]) == (3 * rounds, 3 * rounds, 0)
    nothing_left(MapFile(path).faults())
    figures(rounds=rounds, seconds=round(time.monotonic() - begun), generations=MapFile(path).generation)


def write(path, board, life):
    """Count one up by compare_and_swap, overwrite, delete, insert; what was done is noted by life."""
    with SharedHashMap.open(path) as shared:
        turn = 0
        while True:
            turn += 1
            key = b"counter %d" % (turn % COUNTERS)
            seen = shared.get(key)
            if shared.compare_and_swap(key, seen, b"%d" % (int(seen or 0) + 1)):
                board[8 + life] += 1
                board[0] += 1
            try:
                shared[b"of %d" % (life % 4)] = b"%d" % turn * 7
                shared.setdefault(b"common", b"%d" % life)
            except MapFull:
                continue
            shared.pop(b"of %d" % ((life + turn) % 4), None)
            shared.pop(b"common", None)
            if turn % 20 == 0:
                shared.rebuild()


def kill_writers(crowd, board, dice, lives, start, reader=None):
    """Kill one of those who write at a random time, and start the next one, for each of `lives`; who lives gets on meanwhile."""
    for life in lives:
        before, looks = board[0], board[2]
        until(lambda before=before: board[0] > before, "those who live get on", crowd)
        if reader is not None:
            until(lambda looks=looks: board[2] > looks, "and the one who reads", crowd)
        time.sleep(dice.uniform(0, 0.02))
        victim = dice.choice([member for member in crowd.members if member is not reader])
        if dice.random() < 0.3:
            # nobody waits for one that is stopped
            crowd.stop(victim, 60)
            before = board[0]
            until(lambda before=before: board[0] > before, "the others get on", crowd)
        crowd.kill(victim)
        start(life)


def test_killed_writers_leave_a_whole_map_and_counters_that_lost_nothing(shm, dice, sized, figures):
    lives = sized(40, 480)
    path, board, crowd = shm / "map", Board(), Crowd(shm)
    SharedHashMap.create(path, 8).close()
    begun = time.monotonic()
    try:
        for life in range(3):
            crowd.start("writer", write, path, board, life)
        kill_writers(crowd, board, dice, range(3, lives), lambda life: crowd.start("writer", write, path, board, life))
    finally:
        crowd.check()
        crowd.end()
    noted = sum(board[8 + n] for n in range(lives))
    with SharedHashMap.open(path) as shared:
        shared.rescue()
        counted = sum(int(shared.get(b"counter %d" % n, b"0")) for n in range(COUNTERS))
        raw = MapFile(path)
        alive = set(raw.used_slots)
        assert len(alive) == 1, "this handle alone takes part"
        nothing_left(raw.faults() + records_faults(raw.records, alive))
        # the whole capacity is there
        shared.clear()
        for n in range(shared.capacity):
            shared[b"%d" % n] = b""
        with pytest.raises(MapFull):
            shared[b"more"] = b""
    assert noted <= counted <= noted + lives, f"{counted} counted, {noted} noted"
    figures(kills=lives, seconds=round(time.monotonic() - begun), counted=counted, unnoted=counted - noted)


ARENA_BYTES = 3 << 17
COUNTER, LONG = 0, 1


def long_value(kind, n):
    """From 8 bytes to 40,000; the same ones that the counter `n` has are found again."""
    return payload_of(kind, n, 8 + n * 7919 % (60 if n % 3 == 0 else 40_000))


def write_long(path, board, life):
    """As `write`, with values that mostly lie in blocks, and more of them than there are blocks."""
    with SharedHashMap.open(path) as shared:
        turn = 0
        while True:
            turn += 1
            key = b"counter %d" % (turn % COUNTERS)
            try:
                seen = shared.get(key)
                count = origin_of(seen)[1] if seen is not None else 0
                if shared.compare_and_swap(key, seen, long_value(COUNTER, count + 1)):
                    board[8 + life] += 1
                    board[0] += 1
                shared[b"of %d" % ((life + turn) % 12)] = long_value(LONG, turn)
            except (ArenaFull, MapFull):
                board[1] += 1
                shared.pop(b"of %d" % (turn % 12), None)
            shared.pop(b"of %d" % ((life + 5 * turn) % 24), None)
            if turn % 50 == 0:
                shared.rebuild()


def read_long(path, board):
    """Nothing that is read is torn, and no counter goes back."""
    last = [0] * COUNTERS
    with SharedHashMap.open(path, readonly=True) as shared:
        while True:
            for value in shared.values():
                origin_of(value)
            for n in range(COUNTERS):
                value = shared.get(b"counter %d" % n)
                if value is not None:
                    kind, count = origin_of(value)
                    assert (kind, value) == (COUNTER, long_value(COUNTER, count))
                    assert count >= last[n], f"counter {n} went from {last[n]} to {count}"
                    last[n] = count
            board[2] += 1


def test_killed_writers_of_long_values_leave_all_blocks_and_counters_that_lost_nothing(shm, dice, sized, figures):
    lives = sized(30, 300)
    path, board, crowd = shm / "map", Board(), Crowd(shm)
    SharedHashMap.create(path, 16, arena_bytes=ARENA_BYTES).close()
    begun = time.monotonic()
    try:
        crowd.start("reader", read_long, path, board)
        reader = crowd.members[0]
        for life in range(2):
            crowd.start("writer", write_long, path, board, life)
        kill_writers(
            crowd,
            board,
            dice,
            range(2, lives),
            lambda life: crowd.start("writer", write_long, path, board, life),
            reader,
        )
    finally:
        crowd.check()
        crowd.end()
    noted = sum(board[8 + n] for n in range(lives))
    with SharedHashMap.open(path) as shared:
        shared.rescue()
        values = [shared.get(b"counter %d" % n) for n in range(COUNTERS)]
        counted = sum(origin_of(value)[1] for value in values if value is not None)
        raw = MapFile(path)
        nothing_left(raw.faults() + records_faults(raw.records, set(raw.used_slots)))
        assert len(raw.used_slots) == 1, "this handle alone takes part"
        # all of the room is there, in blocks of any size
        for size in (1 << 15, 1 << 16, 1 << 17):
            shared.clear()
            for n in range(ARENA_BYTES // size):
                shared[b"%d" % n] = payload_of(LONG, n, size)
            assert all(origin_of(value) == (LONG, int(key)) for key, value in shared.items())
            with pytest.raises((ArenaFull, MapFull)):
                shared[b"more"] = bytes(57)
            assert shared.arena_backed_bytes <= ARENA_BYTES
    assert noted <= counted <= noted + lives, f"{counted} counted, {noted} noted"
    figures(
        kills=lives,
        seconds=round(time.monotonic() - begun),
        counted=counted,
        unnoted=counted - noted,
        refused=board[1],
        looks=board[2],
    )

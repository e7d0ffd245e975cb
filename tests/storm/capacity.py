"""What a structure can hold, found out by filling it: the same before a storm and after it."""

import contextlib

import numpy as np

from subetha.errors import ArenaFull, Full, TableFull
from subetha.jobqueue import JobQueue
from subetha.layout import STATE_SHIFT, VERSION_SHIFT, CellState, SlotState, cell_word
from subetha.pass_registry import Pass
from subetha.wire import encode_result

BLOCK = 200_000
"""Bytes of a block of which the arena has fewer than the pool has cells."""


def submit_until(error, queue, args, **options):
    ids = []
    with contextlib.suppress(error):
        while True:
            ids.append(queue.submit(Pass(1, args), wait=0, **options))
    return ids


def cells_and_places(queue, priority):
    """How many jobs go in, through `back`, and out as results again."""
    ids = submit_until(Full, queue, b"", priority=priority)
    for claim in [queue.try_claim() for _ in ids]:
        claim.release()
    for _ in ids:
        queue.try_claim().reply(encode_result(0, b""))
    assert sorted(result.token for result in queue.recv_many(len(ids) + 1)) == sorted(ids)
    return len(ids)


def blocks(queue):
    ids = submit_until(ArenaFull, queue, bytes(BLOCK))
    assert all(queue.cancel(job_id) for job_id in ids)
    return len(ids)


def numbers(path):
    """How many handles take part at one time."""
    with contextlib.ExitStack() as stack:
        found = 0
        with contextlib.suppress(TableFull):
            while True:
                stack.enter_context(JobQueue.open(path)).slot  # noqa: B018
                found += 1
        return found


def capacity_of(path):
    with JobQueue.open(path) as queue:
        found = {f"cells and places {level}": cells_and_places(queue, level) for level in range(3)}
        found["blocks"] = blocks(queue)
    return found | {"numbers": numbers(path)}


# --- counters just below their wraps --------------------------------------------------------------------------------


def lap_and_version_bits(cells):
    rest = 63 - (cells.bit_length() - 1)
    return rest // 2, rest - rest // 2


def make_old(lines, places, cells, before_wrap):
    """Let a ring of references, none of them live, be empty and `before_wrap` positions before its laps wrap."""
    lap_bits, _ = lap_and_version_bits(cells)
    position = (len(places) << lap_bits) - before_wrap
    lap, first = divmod(position, len(places))
    laps = (lap + (np.arange(len(places)) < first)) % (1 << lap_bits)
    places[:] = laps.astype(np.uint64) << np.uint64(64 - lap_bits)
    lines["head"] = lines["tail"] = position


def make_mailboxes(path):
    """Let every number have its mailbox."""
    with contextlib.ExitStack() as stack:
        first = stack.enter_context(JobQueue.open(path))
        for handle in [first, *(stack.enter_context(JobQueue.open(path)) for _ in range(first.participants - 1))]:
            handle.recv_many(1)


def make_queue_old(files, version, incarnation, dice, spread):
    """Let the files of a queue at rest look as after so many uses that counters wrap soon, each at its own time.

    Every cell reaches `version` with one of its first `spread` uses.
    """
    cells, records = files.cells, files.records
    assert len(files.mailboxes) == len(records)
    assert np.all(cells["word"] >> np.uint64(STATE_SHIFT) & np.uint64(0xF) == CellState.FREE)
    assert np.all(records["status"] & np.uint64(0xFF) == SlotState.FREE)
    cells["word"] = [cell_word(version - 1 - dice.randrange(spread), CellState.FREE, 0) for _ in range(len(cells))]
    records["status"] = [(incarnation - 1 - dice.randrange(3)) << 8 | SlotState.FREE for _ in range(len(records))]
    for name in files.ring_names:
        # `back` sees few jobs: there a wrap comes with the first of them
        before = dice.randrange(1, 4) if name.startswith("back") else dice.randrange(1, len(cells) // 2)
        make_old(*files.ring(name), len(cells), before)


def wrapped(files, version):
    """Which cells have gone past `version`, and which rings past the wrap of their positions?"""
    half = 1 << 43
    cells = [(int(word) >> VERSION_SHIFT) - version & (2 * half - 1) < half for word in files.cells["word"]]
    lap_bits, _ = lap_and_version_bits(len(files.cells))
    rings = {name: int(files.ring(name)[0]["tail"][0]) < len(files.cells) << lap_bits for name in files.ring_names}
    return cells, rings

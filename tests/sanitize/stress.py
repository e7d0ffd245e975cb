"""Runs the worlds of _stress.pyx, each for some seconds, and says what they did, one line of JSON each.

Exit code 1: a message or job was lost, doubled or torn, or something was left behind. What a sanitizer reports is its own.
"""

import argparse
import contextlib
import json
import mmap
import os
import sys
import tempfile
import threading
import time
from pathlib import Path

import _stress
import numpy as np

sys.path.append(os.fspath(Path(__file__).resolve().parents[1] / "core"))

from ring_file import MapFile

from subetha import HeartbeatTable, JobQueue, SharedDeque, SharedHashMap, SharedRing
from subetha._core import QueueHandle
from subetha.layout import (
    DEQUE_LINES,
    FILE_HEADER,
    HOT_LINE,
    LINE,
    LINES_OFFSET,
    PARTICIPANT,
    RING_CELL,
    RING_LINES,
    RING_PARTICIPANTS,
    align,
    map_reserve,
    reserve_of,
)

RING_NAMES = ["back-0", "back-1", "back-2", "submit-0", "submit-1", "submit-2"]


@contextlib.contextmanager
def mapped(*paths):
    """The contents of each file, writable, and a descriptor of each."""
    fds = [os.open(path, os.O_RDWR) for path in paths]
    try:
        yield [np.frombuffer(mmap.mmap(fd, 0), np.uint8) for fd in fds], fds
    finally:
        for fd in fds:
            os.close(fd)


def run_roles(world, seconds, *roles):
    """Every role at once, each in a thread that waits for all others; `stop` after some seconds."""
    barrier = threading.Barrier(len(roles))
    failures = []

    def run(role, arguments):
        barrier.wait()
        try:
            role(*arguments)
        except BaseException as error:
            failures.append(error)

    threads = [threading.Thread(target=run, args=(role, arguments)) for role, *arguments in roles]
    for thread in threads:
        thread.start()
    time.sleep(seconds)
    world.stop()
    for thread in threads:
        thread.join()
    for failure in failures:
        raise failure


def message_sizes(capacity, payload, is_deque):
    """As message_sizes of _messages.pxi, without the size of the file."""
    places = LINES_OFFSET + RING_LINES.itemsize
    records = places + 2 * capacity * 8
    ends = cells = align(records + RING_PARTICIPANTS * PARTICIPANT.itemsize, HOT_LINE)
    if is_deque:
        cells = align(ends + DEQUE_LINES.itemsize + 2 * capacity * 8, HOT_LINE)
    return places, records, ends, cells, align(RING_CELL.itemsize + payload, LINE)


def ring(folder, seconds, capacity, payload=56):
    path = os.path.join(folder, f"ring-{capacity}")
    SharedRing.create(path, capacity, payload_bytes=payload).close()
    sizes = message_sizes(capacity, payload, False)
    with mapped(path) as ((contents,), (fd,)):
        world = _stress.RingWorld(contents, fd, sizes, capacity, payload, RING_PARTICIPANTS, 2)
        shared = _stress.Handle(world)
        run_roles(
            world,
            seconds,
            (world.produce, 0, 11),
            (world.produce, 1, 12),
            (world.consume, 13),
            (world.consume, 14, shared),
            (world.consume, 15, shared),
            (world.die_again_and_again, 16),
            (world.look_after, 17),
        )
        shared.leave()
        counts = world.finish(18)
        world.close()
        return counts, world.found_faults


def deque(folder, seconds, capacity, payload=56):
    path = os.path.join(folder, f"deque-{capacity}")
    SharedDeque.create(path, capacity, payload_bytes=payload).close()
    sizes = message_sizes(capacity, payload, True)
    with mapped(path) as ((contents,), (fd,)):
        world = _stress.DequeWorld(contents, fd, sizes, capacity, payload, RING_PARTICIPANTS, 2)
        run_roles(
            world,
            seconds,
            (world.own, 0, 51),
            (world.own, 1, 52),
            (world.steal, 53),
            (world.steal, 54),
            (world.die_again_and_again, 55),
            (world.look_after, 56),
        )
        counts = world.finish(57)
        world.close()
        return counts, world.found_faults


def shared_map(folder, seconds, capacity, arena_bytes):
    # a gap behind the value of each cell, for AddressSanitizer
    path, value_bytes = os.path.join(folder, f"map-{capacity}-{arena_bytes}"), 61
    SharedHashMap.create(path, capacity, value_bytes, arena_bytes=arena_bytes).close()
    raw = MapFile(path)

    def offset(array):
        return array.ctypes.data - raw.contents.ctypes.data

    sizes = (
        *(offset(raw.arrays), offset(raw.records), len(raw.records)),
        *(offset(raw.cells), raw.count, raw.cells.strides[0], map_reserve(capacity)),
    )
    arena = arena_bytes and (
        *(arena_bytes, offset(raw.arena_lines), [offset(words) for words in raw.blocks]),
        *([offset(data) for data in raw.block_bytes], [len(words) for words in raw.blocks]),
    )
    with mapped(path) as ((contents,), (fd,)):
        created_ns = int(contents[:64].view(FILE_HEADER)["created_ns"][0])
        world = _stress.MapWorld(contents, fd, sizes, arena, capacity, value_bytes, created_ns)
        run_roles(
            world,
            seconds,
            (world.write, 51),
            (world.write, 52),
            (world.read, 53),
            (world.read, 54),
            (world.die_again_and_again, 55),
            (world.look_after,),
        )
        counts = world.finish()
        world.close()
        return counts, world.found_faults


def table(folder, seconds, slots=4):
    path = os.path.join(folder, "table")
    HeartbeatTable.create(path, slots).close()
    with mapped(path) as ((contents,), (fd,)):
        world = _stress.TableWorld(contents, fd, HeartbeatTable._sizes(slots), slots)
        run_roles(
            world,
            seconds,
            (world.take_part, 21),
            (world.take_part, 22),
            (world.take_part, 23),
            (world.watch,),
            (world.watch,),
            (world.rescue,),
        )
        counts = world.finish()
        world.close()
        return counts, world.found_faults


def queue(folder, seconds, cells, durability="process", arena_bytes=2**16):
    # gaps behind the areas of each cell, for AddressSanitizer
    geometry = {"cells": cells, "job_bytes": 121, "result_bytes": 131, "participants": 16, "arena_bytes": arena_bytes}
    directory = os.path.join(folder, f"queue-{cells}")
    JobQueue.create(directory, durability=durability, **geometry).close()
    geometry |= {"quota": cells, "reserve": reserve_of(cells), "durability": durability}
    sizes = {
        "pool": QueueHandle._pool_sizes(cells, geometry["job_bytes"], geometry["result_bytes"]),
        "mail": QueueHandle._mail_sizes(cells, geometry["participants"]),
        "arena": QueueHandle._arena_sizes(arena_bytes),
        "table": HeartbeatTable._sizes(geometry["participants"]),
    }
    names = [*sizes, *RING_NAMES]
    with mapped(*(os.path.join(directory, name) for name in names)) as (contents, fds):
        files, descriptors = (dict(zip(names, values, strict=True)) for values in (contents, fds))
        world = _stress.QueueWorld(files, descriptors, sizes, geometry, 2)
        run_roles(
            world,
            seconds,
            (world.serve, 31),
            (world.serve, 32),
            (world.work, 33, 1, True),
            (world.work, 34, 2, True),
            (world.read_and_forget, 39),
            (world.read_and_forget, 40),
            (world.die_again_and_again, 35),
            (world.look_after, 36),
            (world.fence, 37),
        )
        counts = world.finish(38)
        world.close()
        return counts, world.found_faults


def durable(_folder, seconds, cells):
    """On the disk, where a sync takes its time, and not where the others lie."""
    with tempfile.TemporaryDirectory() as folder:
        return queue(folder, seconds, cells, "disk")


def adaptive(folder, seconds, bits):
    world = _stress.AdaptiveWorld(bits)
    run_roles(
        world,
        seconds,
        (world.operate, 41),
        (world.operate, 42),
        (world.operate, 43),
        (world.migrate,),
        (world.observe, 1),
        (world.observe, 2),
        (world.drain,),
    )
    counts = world.finish()
    world.close()
    return counts, world.found_faults


WORLDS = {
    "ring-2": (ring, 2),
    "ring-64": (ring, 64),
    "deque-4": (deque, 4),
    "deque-64": (deque, 64),
    "map": (shared_map, 8, 0),
    "map-blocks": (shared_map, 8, 2**17),
    "table": (table,),
    "queue-16": (queue, 16),
    "queue-64": (queue, 64),
    "durable-16": (durable, 16),
    "adaptive": (adaptive, 4),
}


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seconds", type=float, default=3.0)
    parser.add_argument("worlds", nargs="*", metavar="WORLD", help=f"of {', '.join(WORLDS)}; all of them unless given")
    options = parser.parse_args()
    if unknown := set(options.worlds) - set(WORLDS):
        parser.error(f"expected some of {', '.join(WORLDS)}, found {', '.join(sorted(unknown))}")
    broken = False
    with tempfile.TemporaryDirectory(dir="/dev/shm") as folder:
        for name in options.worlds or WORLDS:
            make, *arguments = WORLDS[name]
            began = time.monotonic()
            counts, faults = make(folder, options.seconds, *arguments)
            seconds = round(time.monotonic() - began, 1)
            print(json.dumps({"world": name, "seconds": seconds, "faults": faults, **counts}), flush=True)
            broken = broken or faults > 0
    return int(broken)


if __name__ == "__main__":
    sys.exit(main())

"""Rings beside deques, for the shapes that MmfDispatcher routes: the table of docs/design/dispatcher.md."""

import multiprocessing
import os
import time
from functools import partial
from statistics import median

from subetha import Empty, Full, SharedDeque, SharedRing, WorkloadShape

from . import RUNS
from .folders import Folder

PAYLOAD = bytes(range(56))
CAPACITY = 1024
MESSAGES = 200_000
ROUND_TRIPS = 3_000
BATCHES_TO_SLEEPERS = 50
BATCHES_ALONE = 8_000

SHAPES = {
    "request_reply()": WorkloadShape.request_reply(),
    "producer_fast(2)": WorkloadShape.producer_fast(2),
    "producer_fast(4)": WorkloadShape.producer_fast(4),
    "producer_fast(8)": WorkloadShape.producer_fast(8),
    "producer_fast(64)": WorkloadShape.producer_fast(64),
    "fan_out(2, 1)": WorkloadShape.fan_out(2, 1),
    "fan_out(2, 64)": WorkloadShape.fan_out(2, 64),
    "WorkloadShape(2, 64, True)": WorkloadShape(2, 64, True),
}
MEASURES = ["processor, put", "processor, take", "clock"]
WAYS = ["ring", "deque, per item", "deque, batched"]


def put_many(ring, batch):
    if len(batch) == 1:
        ring.push(batch[0], None)
        return 1
    return ring.push_many(batch)


def put_one_by_one(deque, batch):
    for payload in batch:
        deque.push(payload, None)
    return len(batch)


def put_at_once(deque, batch):
    try:
        return deque.push_batch(batch)
    except Full:
        # what thieves have in hand is not waiting any more, and its cells are not free yet
        os.sched_yield()
        return 0


PUT = dict(zip(WAYS, [put_many, put_one_by_one, put_at_once], strict=True))


def put_when_there_is_room(put, structure, batch):
    done = 0
    while done < len(batch):
        while CAPACITY - len(structure) < len(batch) - done:
            os.sched_yield()
        done += put(structure, batch[done:] if done else batch)


def opened(path):
    """The structure at `path` for its takers, with the calls that take one and many."""
    if path.endswith("ring"):
        ring = SharedRing.open(path)
        return ring, ring.pop, ring.pop_many
    thief = SharedDeque.open_as_thief(path)
    return thief, thief.steal, thief.steal_many


def take(path, replies_path, batch_size, way, parent):
    """Take messages until `parent` says something, and answer each where there is a path for that."""
    source, take_one, take_many = opened(path)
    replies = None
    if replies_path is not None:
        replies = (SharedRing if way == "ring" else SharedDeque).open(replies_path)
    put = PUT[way]
    parent.send("ready")
    while True:
        try:
            taken = [take_one(0.05)]
        except Empty:
            if parent.poll():
                break
            continue
        if batch_size > 1:
            taken += take_many(batch_size - 1)
        if replies is not None:
            put(replies, taken)
    source.close()
    if replies is not None:
        replies.close()


class World:
    """One shape and one way: the file or files, and the processes that take."""

    def __init__(self, shape, way):
        self.shape = shape
        self.put = PUT[way]
        self.folder = Folder()
        kind = SharedRing if way == "ring" else SharedDeque
        end = "ring" if way == "ring" else "deque"
        self.structure = kind.create(self.folder.file(f"work.{end}"), CAPACITY)
        self.replies = None
        self.is_round_trip = shape == WorkloadShape.request_reply()
        if self.is_round_trip:
            kind.open_or_create(self.folder.file(f"replies.{end}"), CAPACITY).close()
            self.replies, self.take_reply, _ = opened(self.folder.file(f"replies.{end}"))
        context = multiprocessing.get_context("spawn")
        self.takers = []
        for _ in range(shape.n_thieves):
            here, there = context.Pipe()
            process = context.Process(
                target=take,
                args=(self.structure.path, self.replies and self.replies.path, shape.batch_size, way, there),
            )
            process.start()
            # the taker's end is its own, so that its death ends a wait for it
            there.close()
            here.recv()
            self.takers.append((process, here))

    def close(self):
        for process, here in self.takers:
            here.send("end")
            process.join()
        self.structure.close()
        if self.replies is not None:
            self.replies.close()
        self.folder.remove()

    def wait_until_taken(self):
        while len(self.structure):
            os.sched_yield()

    def run(self):
        """Nanoseconds a message."""
        put, structure = partial(put_when_there_is_room, self.put), self.structure
        batch = [PAYLOAD] * self.shape.batch_size
        if self.is_round_trip:
            take_reply = self.take_reply
            began = time.perf_counter_ns()
            for _ in range(ROUND_TRIPS):
                put(structure, batch)
                take_reply(60)
            return (time.perf_counter_ns() - began) / ROUND_TRIPS
        if self.shape.wait_idle:
            spent = 0
            for _ in range(BATCHES_TO_SLEEPERS):
                # long past the moment from which on a taker that finds nothing sleeps
                time.sleep(0.001)
                began = time.perf_counter_ns()
                put(structure, batch)
                self.wait_until_taken()
                spent += time.perf_counter_ns() - began
            return spent / (BATCHES_TO_SLEEPERS * len(batch))
        batches = MESSAGES // len(batch)
        began = time.perf_counter_ns()
        for _ in range(batches):
            put(structure, batch)
        self.wait_until_taken()
        return (time.perf_counter_ns() - began) / (batches * len(batch))


class Alone:
    """Processor time of putting and of taking, both in this thread: what the others on the machine do hardly counts."""

    def __init__(self, shape, way):
        self.batch = [PAYLOAD] * shape.batch_size
        self.put = PUT[way]
        self.folder = Folder()
        kind, end = (SharedRing, "ring") if way == "ring" else (SharedDeque, "deque")
        self.structure = kind.create(self.folder.file(f"work.{end}"), CAPACITY)
        self.source, self.take_one, self.take_many = opened(self.structure.path)

    def close(self):
        self.source.close()
        self.structure.close()
        self.folder.remove()

    def run(self):
        """Nanoseconds a message for putting and for taking."""
        put, structure, batch, n = self.put, self.structure, self.batch, len(self.batch)
        together = CAPACITY // n
        repeats = max(1, BATCHES_ALONE // together // n)
        putting = taking = 0
        for _ in range(repeats):
            began = time.thread_time_ns()
            for _ in range(together):
                put(structure, batch)
            between = time.thread_time_ns()
            if n == 1:
                take_one = self.take_one
                for _ in range(together):
                    take_one()
            else:
                take_many = self.take_many
                for _ in range(together):
                    take_many(n)
            putting += between - began
            taking += time.thread_time_ns() - between
        messages = repeats * together * n
        return putting / messages, taking / messages


class WorkStealing:
    """56-byte messages from an owner to the thieves of a shape, in nanoseconds a message.

    The processor time of putting and taking is that of one thread. By the clock it is what passes between processes (a
    round trip, where the shape is one). The ways take turns, so that a busy machine is hard on all of them alike.
    """

    params = [list(SHAPES), MEASURES, WAYS]
    param_names = ["shape", "measure", "way"]
    timeout = 600

    def setup_cache(self):
        runs = {}
        for name, shape in SHAPES.items():
            worlds, alone = {}, {}
            try:
                for way in WAYS:
                    alone[way] = Alone(shape, way)
                    worlds[way] = World(shape, way)
                for way in WAYS:
                    alone[way].run()
                    worlds[way].run()
                for _ in range(RUNS):
                    for way in WAYS:
                        figures = [*alone[way].run(), worlds[way].run()]
                        for measure, figure in zip(MEASURES, figures, strict=True):
                            runs.setdefault((name, measure, way), []).append(figure)
            finally:
                for world in [*worlds.values(), *alone.values()]:
                    world.close()
        return runs

    setup_cache.timeout = 600

    def track_message(self, runs, shape, measure, way):
        return median(runs[shape, measure, way])

    track_message.unit = "ns"

"""SharedRing: a push and a pop in one thread, and a stream of messages between two processes."""

import multiprocessing
import time
from statistics import median

from subetha import SharedRing

from . import RUNS
from .folders import Folder

PAYLOAD = bytes(range(56))
BATCH = 256


class OneThread:
    """`try_push` then `try_pop` of 56 bytes, in nanoseconds a pair."""

    unit = "ns"
    PAIRS = 100_000

    def setup(self):
        self.folder = Folder()
        self.ring = SharedRing.create(self.folder.file("ring"), 4096)

    def teardown(self):
        self.ring.close()
        self.folder.remove()

    def _run(self):
        push, pop = self.ring.try_push, self.ring.try_pop
        began = time.perf_counter_ns()
        for _ in range(self.PAIRS):
            push(PAYLOAD)
            pop()
        return (time.perf_counter_ns() - began) / self.PAIRS

    def _runs(self):
        self._run()
        return [self._run() for _ in range(RUNS)]

    def track_pair(self):
        return median(self._runs())

    track_pair.unit = "ns"

    def track_pair_least(self):
        return min(self._runs())

    track_pair_least.unit = "ns"


class Batches:
    """`push_many` then `pop_many` of 256 messages of 56 bytes in one thread, in nanoseconds a message."""

    def setup(self):
        self.folder = Folder()
        self.ring = SharedRing.create(self.folder.file("ring"), 4096)

    def teardown(self):
        self.ring.close()
        self.folder.remove()

    def track_message(self):
        batch = [PAYLOAD] * BATCH
        figures = []
        for _ in range(RUNS):
            began = time.perf_counter_ns()
            for _ in range(400):
                self.ring.push_many(batch)
                self.ring.pop_many(BATCH)
            figures.append((time.perf_counter_ns() - began) / (400 * BATCH))
        return median(figures)

    track_message.unit = "ns"


def consume(path, count, mode, go):
    """Pop `count` messages and answer each run with how many nanoseconds it took from the first to the last."""
    with SharedRing.open(path) as ring:
        pop, pop_many = ring.pop, ring.pop_many
        while go.recv():
            got = 1
            pop()
            began = time.perf_counter_ns()
            if mode == "one a call":
                for _ in range(count - 1):
                    pop()
            else:
                while got < count:
                    here = len(pop_many(BATCH))
                    if not here:
                        pop()
                        here = 1
                    got += here
            go.send(time.perf_counter_ns() - began)


class TwoProcesses:
    """56-byte messages from one process to another, in messages a second."""

    params = ["one a call", "batches of 256"]
    param_names = ["mode"]
    timeout = 300
    COUNT = 256 * 4000

    def setup(self, mode):
        self.folder = Folder()
        self.ring = SharedRing.create(self.folder.file("ring"), 4096)
        self.here, there = multiprocessing.Pipe()
        self.consumer = multiprocessing.get_context("spawn").Process(
            target=consume, args=(self.ring.path, self.COUNT, mode, there)
        )
        self.consumer.start()
        # the consumer's end is its own, so that its death ends a wait for it
        there.close()

    def teardown(self, mode):
        self.here.send(False)
        self.consumer.join()
        self.ring.close()
        self.folder.remove()

    def _run(self, mode):
        push, push_many = self.ring.push, self.ring.push_many
        self.here.send(True)
        if mode == "one a call":
            for _ in range(self.COUNT):
                push(PAYLOAD)
        else:
            batch = [PAYLOAD] * BATCH
            for _ in range(self.COUNT // BATCH):
                done = push_many(batch)
                while done < BATCH:
                    push(PAYLOAD)
                    done += 1 + push_many(batch[done + 1 :])
        return self.COUNT / self.here.recv() * 1e9

    def track_rate(self, mode):
        return median(self._run(mode) for _ in range(RUNS))

    track_rate.unit = "messages/s"

    def track_rate_spread(self, mode):
        figures = sorted(self._run(mode) for _ in range(RUNS))
        return figures[-1] - figures[0]

    track_rate_spread.unit = "messages/s"

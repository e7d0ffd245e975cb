"""SharedDeque: a push and a pop, a push and a steal, and batches, each in one thread."""

import time
from statistics import median

from subetha import SharedDeque

from .folders import Folder

PAYLOAD = bytes(range(56))
RUNS = 9
BATCH = 256


class OneThread:
    """`push` of 56 bytes, then `pop` by the owner or `steal`, in nanoseconds a pair."""

    params = ["pop", "steal"]
    param_names = ["take"]
    unit = "ns"
    PAIRS = 100_000

    def setup(self, take):
        self.folder = Folder()
        self.deque = SharedDeque.create(self.folder.file("deque"), 4096)

    def teardown(self, take):
        self.deque.close()
        self.folder.remove()

    def _run(self, take):
        push, take = self.deque.push, getattr(self.deque, take)
        began = time.perf_counter_ns()
        for _ in range(self.PAIRS):
            push(PAYLOAD)
            take()
        return (time.perf_counter_ns() - began) / self.PAIRS

    def _runs(self, take):
        self._run(take)
        return [self._run(take) for _ in range(RUNS)]

    def track_pair(self, take):
        return median(self._runs(take))

    track_pair.unit = "ns"

    def track_pair_least(self, take):
        return min(self._runs(take))

    track_pair_least.unit = "ns"


class Batches:
    """`push_batch` then `steal_many` of 256 messages of 56 bytes in one thread, in nanoseconds a message."""

    def setup(self):
        self.folder = Folder()
        self.deque = SharedDeque.create(self.folder.file("deque"), 4096)

    def teardown(self):
        self.deque.close()
        self.folder.remove()

    def track_message(self):
        batch = [PAYLOAD] * BATCH
        figures = []
        for _ in range(RUNS):
            began = time.perf_counter_ns()
            for _ in range(400):
                self.deque.push_batch(batch)
                self.deque.steal_many(BATCH)
            figures.append((time.perf_counter_ns() - began) / (400 * BATCH))
        return median(figures)

    track_message.unit = "ns"

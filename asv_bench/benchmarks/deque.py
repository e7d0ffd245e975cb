"""SharedDeque beside SharedRing: a message in and out again, and batches of them, each in one thread."""

import time
from statistics import median

from subetha import SharedDeque, SharedRing

from . import RUNS
from .folders import Folder

PAYLOAD = bytes(range(56))


class Pair:
    """A deque and a ring, measured in turns, so that both meet the same moods of the machine."""

    def setup(self, *_params):
        self.folder = Folder()
        self.deque = SharedDeque.create(self.folder.file("deque"), 4096)
        self.ring = SharedRing.create(self.folder.file("ring"), 4096)

    def teardown(self, *_params):
        self.deque.close()
        self.ring.close()
        self.folder.remove()

    def figures(self, turn, *ways):
        """Nanoseconds a message: for each way RUNS figures, of turns that follow upon one another."""
        for way in ways:
            turn(*way)
        return zip(*([turn(*way) for way in ways] for _ in range(RUNS)), strict=True)


class OneThread(Pair):
    """`push` of 56 bytes, then `pop` by the owner or `steal`; the ring's `try_push` and `try_pop` for the ratio."""

    params = ["pop", "steal"]
    param_names = ["take"]
    PAIRS = 50_000

    def _turn(self, push, take):
        began = time.perf_counter_ns()
        for _ in range(self.PAIRS):
            push(PAYLOAD)
            take()
        return (time.perf_counter_ns() - began) / self.PAIRS

    def _figures(self, take):
        ways = (self.deque.push, getattr(self.deque, take)), (self.ring.try_push, self.ring.try_pop)
        return self.figures(self._turn, *ways)

    def track_pair(self, take):
        return median(next(self._figures(take)))

    track_pair.unit = "ns"

    def track_pair_least(self, take):
        return min(next(self._figures(take)))

    track_pair_least.unit = "ns"

    def track_ratio_to_ring(self, take):
        deque, ring = self._figures(take)
        return median(deque) / median(ring)


class Batches(Pair):
    """`push_batch` then `steal_many`, and the ring's `push_many` then `pop_many`, in nanoseconds a message."""

    params = [1, 4, 16, 64, 256]
    param_names = ["batch"]
    MESSAGES = 50_000

    def _turn(self, push, take, size):
        batch = [PAYLOAD] * size
        turns = self.MESSAGES // size
        began = time.perf_counter_ns()
        for _ in range(turns):
            push(batch)
            take(size)
        return (time.perf_counter_ns() - began) / (turns * size)

    def _figures(self, batch):
        ways = (self.deque.push_batch, self.deque.steal_many, batch), (self.ring.push_many, self.ring.pop_many, batch)
        return self.figures(self._turn, *ways)

    def track_message(self, batch):
        return median(next(self._figures(batch)))

    track_message.unit = "ns"

    def track_ratio_to_ring(self, batch):
        deque, ring = self._figures(batch)
        return median(deque) / median(ring)

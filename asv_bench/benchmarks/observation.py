"""What observation costs a ring's push and pop, while nobody listens and while somebody does."""

import time
from statistics import median

from subetha import ObservationRing, SharedRing
from subetha.layout import Op

from . import RUNS
from .folders import Folder

PAYLOAD = bytes(range(56))


class Pair:
    """`try_push` then `try_pop` of 56 bytes in one thread, in nanoseconds a pair.

    The ring of observations is emptied between the runs, or fills up after its first 4096 records: then each is dropped.
    """

    params = ["disarmed", "armed for something else", "armed", "armed and full"]
    param_names = ["observation"]
    PAIRS = 100_000

    def setup(self, observation):
        self.folder = Folder()
        self.ring = SharedRing.create(self.folder.file("ring"), 4096)
        if observation == "armed for something else":
            self.ring.ring.arm([Op.WAIT])
        elif observation != "disarmed":
            self.ring.ring.arm()

    def teardown(self, observation):
        self.ring.close()
        self.folder.remove()

    def _run(self, observation):
        push, pop, drain = self.ring.try_push, self.ring.try_pop, self.ring.ring.drain
        took = 0
        for _ in range(self.PAIRS // 2000):
            if observation == "armed":
                drain()
            began = time.perf_counter_ns()
            for _ in range(2000):
                push(PAYLOAD)
                pop()
            took += time.perf_counter_ns() - began
        return took / self.PAIRS

    def track_pair(self, observation):
        self._run(observation)
        return median(self._run(observation) for _ in range(RUNS))

    track_pair.unit = "ns"

    def track_pair_least(self, observation):
        self._run(observation)
        return min(self._run(observation) for _ in range(RUNS))

    track_pair_least.unit = "ns"


class Drain:
    """A reader takes 4096 records, in microseconds."""

    def setup(self):
        self.ring = ObservationRing(4096)
        self.ring.arm()

    def track_drain(self):
        figures = []
        for _ in range(RUNS):
            for n in range(4096):
                self.ring.record(Op.PUSH, n)
            began = time.perf_counter_ns()
            self.ring.drain()
            figures.append((time.perf_counter_ns() - began) / 1000)
        return median(figures)

    track_drain.unit = "us"

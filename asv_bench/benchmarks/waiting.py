"""How a worker waits for its next job: round trips at gaps between jobs, for each strategy and for the policy that chooses.

By hand, with the strategies in turn, since a machine changes from minute to minute:

    python -m benchmarks.waiting 5
"""

import contextlib
import multiprocessing
import os
import resource
import sys
import time
from statistics import median, quantiles

from subetha import JobQueue, Pass, PassRegistry, Sidecar, WorkerLoop
from subetha.layout import WaitTag

from . import RUNS
from .folders import Folder

ECHO, SET, USED, STOP = range(1, 5)
JOB = Pass(ECHO, b"\x01\x02\x03\x04")
ADAPTIVE = 255
STRATEGIES = {tag.name.lower(): tag for tag in WaitTag} | {"adaptive": ADAPTIVE}
GAPS_US = [0, 5, 20, 50, 100, 1000]
SETTLE_S = 1.0


def serve(path, ready):
    """Run the worker loop, with the strategy that jobs tell it."""
    registry = PassRegistry()
    registry.register(ECHO, bytes)
    with JobQueue.open(path) as queue, contextlib.ExitStack() as sidecars:
        loop = WorkerLoop(queue.submit_side, registry=registry, table=queue.heartbeat, slot=queue.slot)

        def choose(args):
            sidecars.close()
            if args[0] == ADAPTIVE:
                sidecars.enter_context(Sidecar()).register(queue)
            elif not queue.apply_migration(args[0]):
                raise RuntimeError("a call is under way in a loop that makes one at a time")
            return b""

        registry.register(SET, choose)
        registry.register(USED, lambda _: repr(sum(resource.getrusage(resource.RUSAGE_SELF)[:2])).encode())
        registry.register(STOP, lambda _: loop.stop() or b"")
        ready.send(os.getpid())
        loop.run()


class Gaps:
    """Round trips of 4 bytes through one worker process, the client busy for the gap before each."""

    params = [list(STRATEGIES), [5, 50, 1000]]
    param_names = ["strategy", "gap_us"]
    timeout = 300

    def setup(self, strategy, gap_us):
        self.folder = Folder()
        self.queue = JobQueue.create(self.folder.file("queue"))
        here, there = multiprocessing.Pipe()
        self.worker = multiprocessing.get_context("spawn").Process(target=serve, args=(self.queue.path, there))
        self.worker.start()
        # the worker's end is its own, so that its death ends the wait
        there.close()
        here.recv()
        self.round_trips(2000, 0)
        self.choose(strategy, gap_us)

    def teardown(self, *_):
        self.ask(STOP)
        self.worker.join()
        self.queue.close()
        self.folder.remove()

    def ask(self, closure_id, args=b""):
        self.queue.submit(Pass(closure_id, args))
        result = self.queue.recv().result
        if not isinstance(result, bytes):
            raise result
        return result

    def choose(self, strategy, gap_us):
        self.ask(SET, bytes([STRATEGIES[strategy]]))
        # what is chosen is tried, and then compared, for a quarter of a second each
        settle_s = SETTLE_S * RUNS / 9 if strategy == "adaptive" else 0.1
        began = time.perf_counter()
        while time.perf_counter() - began < settle_s:
            self.round_trips(100, gap_us)

    def round_trips(self, rounds, gap_us):
        submit, recv, now = self.queue.submit, self.queue.recv, time.perf_counter_ns
        figures = []
        for _ in range(rounds):
            until = now() + gap_us * 1000
            while now() < until:
                pass
            began = now()
            submit(JOB)
            recv()
            figures.append((now() - began) / 1000)
        return figures

    def rounds_for(self, gap_us):
        return RUNS * (33 if gap_us >= 1000 else 333)

    def track_p50(self, strategy, gap_us):
        return median(self.round_trips(self.rounds_for(gap_us), gap_us))

    track_p50.unit = "us"

    def track_worker_processor(self, strategy, gap_us):
        """Processor time of the worker for each second."""
        return self.measure(gap_us)[2]

    track_worker_processor.unit = "s/s"

    def measure(self, gap_us):
        """Give p50 (us), p99 (us), processor seconds of the worker a second, and round trips a second."""
        rounds = self.rounds_for(gap_us)
        used, began = float(self.ask(USED)), time.perf_counter()
        figures = self.round_trips(rounds, gap_us)
        took = time.perf_counter() - began
        used = float(self.ask(USED)) - used
        return median(figures), quantiles(figures, n=100)[-1], used / took, rounds / took


def main(rounds):
    """Measure every strategy at every gap, `rounds` times in turn, in one worker process; print medians and spreads."""
    bench = Gaps()
    found = {}
    bench.setup("brief", 0)
    try:
        for _ in range(rounds):
            for gap_us in GAPS_US:
                for strategy in STRATEGIES:
                    bench.choose(strategy, gap_us)
                    found.setdefault((gap_us, strategy), []).append(bench.measure(gap_us))
    finally:
        bench.teardown()
    print("  gap strategy   p50 us (least, most)    p99 us (least, most)      worker cpu  round trips/s")
    for (gap_us, strategy), figures in found.items():
        p50, p99, used, rate = ([round(figure, 2) for figure in column] for column in zip(*figures, strict=True))
        print(
            f"{gap_us:5} {strategy:9} {median(p50):8.1f} ({min(p50):.1f}, {max(p50):.1f})"
            f" {median(p99):10.1f} ({min(p99):.1f}, {max(p99):.1f}) {median(used):8.2f} {median(rate):10.0f}"
        )


if __name__ == "__main__":
    main(int(sys.argv[1]) if len(sys.argv) > 1 else 5)

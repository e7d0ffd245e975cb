"""Does it stay as fast with much to do, and with many workers."""

import contextlib
import operator
import time

from . import IS_BRIEF
from .pools import pool
from .queues import WINDOW, passes, queue_with_workers
from .turns import InTurns, in_turns, median, spread


class Waiting(InTurns):
    """Passes a second through one worker, with so many under way at every moment: waiting, running, or answered."""

    params = [[100, 1000, 10_000] if IS_BRIEF else [100, 1000, 10_000, 100_000, 1_000_000]]
    param_names = ["jobs"]

    def setup_cache(self):
        return in_turns(self.params, self._begin)

    setup_cache.timeout = 1800

    @contextlib.contextmanager
    def _begin(self, jobs):
        cells = 1 << (jobs + jobs // 16 + 64).bit_length()
        if cells > 2**20:
            cells = 2**20
        with queue_with_workers(cells, 1) as (queue, _):
            yield lambda: passes(queue, jobs, 5_000 if IS_BRIEF else 200_000)

    def track_passes(self, figures, jobs):
        return median(figures[jobs,])

    track_passes.unit = "passes/s"

    def track_passes_spread(self, figures, jobs):
        return spread(figures[jobs,])

    track_passes_spread.unit = "passes/s"


class Workers(InTurns):
    """Small jobs for so many workers, in jobs a second: passes of 4 bytes with a window of 512, and futures of an executor."""

    params = [["subetha, passes", "subetha", "ProcessPoolExecutor"], [2, 4] if IS_BRIEF else [1, 2, 4, 8, 16, 32, 64]]
    param_names = ["peer", "workers"]

    def setup_cache(self):
        # those of one number take turns; all at one time would be too many
        return in_turns(self.params, self._begin, together=lambda _, workers: f"{workers:3}")

    setup_cache.timeout = 3600

    @contextlib.contextmanager
    def _begin(self, peer, workers):
        if peer == "subetha, passes":
            with queue_with_workers(4096, workers) as (queue, _):
                yield lambda: passes(queue, WINDOW, 5_000 if IS_BRIEF else 100_000)
            return
        count = 1000 if IS_BRIEF else 20_000
        with pool(peer, workers) as executor:
            for _ in executor.map(operator.neg, range(100 * workers)):
                pass

            def measure():
                began = time.perf_counter()
                for future in [executor.submit(operator.neg, n) for n in range(count)]:
                    future.result()
                return count / (time.perf_counter() - began)

            yield measure

    def track_jobs(self, figures, peer, workers):
        return median(figures[peer, workers])

    track_jobs.unit = "jobs/s"

    def track_jobs_spread(self, figures, peer, workers):
        return spread(figures[peer, workers])

    track_jobs_spread.unit = "jobs/s"

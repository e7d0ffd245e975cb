"""What memory is taken: by a queue, by a worker that waits, and by many jobs one after the other."""

import contextlib
import operator
import os

import numpy as np
import psutil

from subetha import JobQueue, Pass

from . import IS_BRIEF
from .children import child
from .folders import Folder
from .pools import pool, see_that_there_is
from .queues import WINDOW, passes, queue_with_workers
from .turns import InTurns, in_turns, median
from .work import ECHO

MIB = 2**20


def backed_bytes(folder):
    """What the files of a folder take, which may be far less than their sizes."""
    return sum(entry.stat().st_blocks * 512 for entry in os.scandir(folder))


class Queue:
    """A queue of 65,536 cells: what its files take, and the resident memory of a process that has used every cell."""

    CELLS = 65_536
    timeout = 300

    def setup(self):
        self.folder = Folder()
        before = psutil.Process().memory_info().rss
        with JobQueue.create(self.folder.file("queue"), self.CELLS, quota=self.CELLS - self.CELLS // 32) as queue:
            self.new_bytes = backed_bytes(queue.path)
            for n in range(queue.quota):
                queue.submit(Pass(ECHO, b"%08d" % n))
            self.resident_bytes = psutil.Process().memory_info().rss - before
            self.full_bytes = backed_bytes(queue.path)

    def teardown(self):
        self.folder.remove()

    def track_files_when_new(self):
        return self.new_bytes / MIB

    track_files_when_new.unit = "MiB"

    def track_files_when_full(self):
        return self.full_bytes / MIB

    track_files_when_full.unit = "MiB"

    def track_resident_when_full(self):
        return self.resident_bytes / MIB

    track_resident_when_full.unit = "MiB"


def host(peer, parent):
    """Have one worker, which has numpy imported; say who it is, and keep it until `parent` hangs up."""
    with pool(peer, 1) as workers:
        # by that it is imported, and nothing of this package
        workers.submit(np.sum, np.ones(8)).result()
        for n in range(100):
            workers.submit(operator.neg, n).result()
        parent.send((workers.submit(os.getpid).result(), os.getpid()))
        with contextlib.suppress(EOFError):
            parent.recv()


class IdleWorker(InTurns):
    """Memory of a worker that has run a few small jobs and has numpy imported, in MiB.

    Resident memory counts what forked workers share with each other; `track_unique` does not.
    """

    params = [["subetha", "ProcessPoolExecutor forkserver", "ProcessPoolExecutor spawn", "loky", "dask"]]
    param_names = ["peer"]

    def setup_cache(self):
        return in_turns(self.params, self._begin)

    setup_cache.timeout = 600

    @contextlib.contextmanager
    def _begin(self, peer):
        see_that_there_is(peer)
        with child(host, peer) as hosted:
            worker, _ = hosted.recv()

            def measure():
                found = psutil.Process(worker).memory_full_info()
                return found.rss / MIB, found.uss / MIB

            yield measure

    def track_resident(self, figures, peer):
        return median(rss for rss, _ in figures[peer,])

    track_resident.unit = "MiB"

    def track_unique(self, figures, peer):
        return median(uss for _, uss in figures[peer,])

    track_unique.unit = "MiB"


class ManyJobs(InTurns):
    """How much resident memory grows over many jobs, after the first tenth of them, in KiB: the worker's and this process's.

    `SUBETHA_BENCH_JOBS` says how many passes; a tenth as many calls of an executor.
    """

    params = [["passes", "calls"], ["worker", "client"]]
    param_names = ["jobs", "process"]
    JOBS = int(os.environ.get("SUBETHA_BENCH_JOBS", "20000" if IS_BRIEF else "1000000"))
    timeout = 3600

    def setup_cache(self):
        passes_, calls = self._growth_over_passes(), self._growth_over_calls()
        return {
            (jobs, process): [growth[process]]
            for jobs, growth in (("passes", passes_), ("calls", calls))
            for process in self.params[1]
        }

    setup_cache.timeout = 3600

    def _growth_over_passes(self):
        with queue_with_workers(4096, 1) as (queue, pids):
            return self._growth(pids[0], lambda count: passes(queue, WINDOW, count), self.JOBS)

    def _growth_over_calls(self):
        with pool("subetha", 1) as executor:

            def call(count):
                for _ in executor.map(operator.neg, range(count)):
                    pass

            return self._growth(executor.submit(os.getpid).result(), call, self.JOBS // 10)

    def _growth(self, worker, run, count):
        processes = {"worker": psutil.Process(worker), "client": psutil.Process()}
        run(count // 10)
        before = {name: process.memory_info().rss for name, process in processes.items()}
        run(count - count // 10)
        return {name: (process.memory_info().rss - before[name]) / 1024 for name, process in processes.items()}

    def track_growth(self, figures, jobs, process):
        return figures[jobs, process][0]

    track_growth.unit = "KiB"

"""Worker threads of one process on one queue: with a free-threaded Python they scale with the processors."""

import contextlib
import os
import sys
import sysconfig
import threading
import time

from subetha import JobQueue, Pass, PassRegistry, WorkerLoop
from subetha.layout import Role

from . import IS_BRIEF
from .folders import Folder
from .turns import InTurns, in_turns, median, spread

COUNT = 1
JOB = Pass(COUNT, b"\x01\x02\x03\x04")
WINDOW = 64


def count(_args):
    """Some 30 us of Python, so that the thread that hands in is not what is measured."""
    total = 0
    for n in range(500):
        total += n
    return total.to_bytes(4)


def see_that_it_is_free_threaded():
    if not sysconfig.get_config_var("Py_GIL_DISABLED"):
        raise NotImplementedError(f"this is no free-threaded build of Python {sys.version.split()[0]}: there is a GIL")
    if sys._is_gil_enabled():
        raise NotImplementedError("the GIL was switched on (PYTHON_GIL=1, -X gil=1, or by an extension that needs it)")


class Threads(InTurns):
    """Jobs a second of Python code for so many threads, each with a handle and a worker loop of its own."""

    params = [sorted({1, 2, len(os.sched_getaffinity(0))})]
    param_names = ["threads"]

    def setup_cache(self):
        return in_turns(self.params, self._begin)

    setup_cache.timeout = 600

    @contextlib.contextmanager
    def _begin(self, threads):
        see_that_it_is_free_threaded()
        with self._running(threads) as queue:
            jobs = 500 if IS_BRIEF else 20_000

            def measure():
                began = time.perf_counter()
                for n in range(jobs):
                    queue.submit(JOB)
                    if n >= WINDOW:
                        queue.recv()
                for _ in range(min(WINDOW, jobs)):
                    queue.recv()
                return jobs / (time.perf_counter() - began)

            yield measure

    @contextlib.contextmanager
    def _running(self, threads):
        folder = Folder()
        registry = PassRegistry()
        registry.register(COUNT, count)
        loops = []
        try:
            with JobQueue.create(folder.file("queue"), arena_bytes=2**20) as queue, contextlib.ExitStack() as stack:
                for _ in range(threads):
                    handle = stack.enter_context(JobQueue.open(queue.path, role=Role.WORKER))
                    loop = WorkerLoop(handle.submit_side, registry=registry, table=handle.heartbeat, slot=handle.slot)
                    loops.append((loop, threading.Thread(target=loop.run, daemon=True)))
                try:
                    for _, thread in loops:
                        thread.start()
                    yield queue
                finally:
                    for loop, _ in loops:
                        loop.stop()
                    for _, thread in loops:
                        thread.join()
        finally:
            folder.remove()

    def track_jobs(self, figures, threads):
        return median(figures[threads,])

    track_jobs.unit = "jobs/s"

    def track_jobs_spread(self, figures, threads):
        return spread(figures[threads,])

    track_jobs_spread.unit = "jobs/s"

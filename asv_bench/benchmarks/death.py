"""A worker is killed in the middle of a job: how long until the job runs again.

A job connects to a socket of this process, says who it is, and waits there: the first time until it is killed, the second time
for an answer that lets it end. The figure is the time from just before the SIGKILL to the second connection.

ProcessPoolExecutor and loky fail all pending jobs then, and multiprocessing.Pool never answers for the one that ran, so none of
them has a figure here.
"""

import contextlib
import os
import signal
import socket
import time

from subetha import Executor, JobQueue

from . import IS_BRIEF
from .folders import Folder
from .pools import pool, see_that_there_is
from .turns import InTurns, in_turns, median

SITUATIONS = {"an idle worker": (2, 0), "10,000 jobs waiting": (2, 10_000), "one worker, started anew": (1, 0)}
"""How many workers, and how many jobs wait when the one in hand loses its worker."""

PATIENCE_S = 60


def tell_and_wait(address):
    """The job in hand."""
    with socket.socket(socket.AF_UNIX) as here:
        here.connect(address)
        here.sendall(str(os.getpid()).encode())
        here.recv(1)


def rest(seconds):
    """A job that waits. It is short, since no worker is idle before the job that it has is done."""
    time.sleep(seconds)


class Server:
    """Where the jobs in hand say that they run."""

    def __init__(self, folder):
        self.address = folder.file("socket")
        self._socket = socket.socket(socket.AF_UNIX)
        self._socket.bind(self.address)
        self._socket.listen()
        self._socket.settimeout(PATIENCE_S)

    def accept(self):
        """Wait for a job; give its connection and the pid of its worker."""
        connection, _ = self._socket.accept()
        connection.settimeout(PATIENCE_S)
        return connection, int(connection.recv(16))

    def close(self):
        self._socket.close()


@contextlib.contextmanager
def workers_of(peer, count, folder):
    if peer == "subetha":
        # a private queue has fewer cells
        JobQueue.create(folder.file("queue"), 2**15).close()
        executor = Executor(count, queue=folder.file("queue"), max_attempts=1000)
        try:
            yield executor
        finally:
            executor.shutdown(cancel_futures=True)
    else:
        import dask

        # so often a task may lose its worker
        with dask.config.set({"distributed.scheduler.allowed-failures": 1000}), pool(peer, count) as workers:
            yield workers


class RunsAgain(InTurns):
    """SIGKILL of a worker in the middle of a job until the job runs again, in milliseconds."""

    params = [["subetha", "dask"], list(SITUATIONS)]
    param_names = ["peer", "situation"]
    timeout = 900

    def setup_cache(self):
        # one after the other, since those who wait take a processor
        return in_turns(self.params, self._begin, together=lambda *one: one)

    setup_cache.timeout = 900

    @contextlib.contextmanager
    def _begin(self, peer, situation):
        count, backlog = SITUATIONS[situation]
        if IS_BRIEF:
            backlog //= 50
        see_that_there_is(peer)
        folder = Folder()
        try:
            with contextlib.closing(Server(folder)) as server, workers_of(peer, count, folder) as workers:
                waiting = []

                def measure():
                    self._wait_until_all_work(server, workers, count)
                    doomed = workers.submit(tell_and_wait, server.address)
                    connection, pid = server.accept()
                    waiting[:] = [job for job in waiting if not job.done()]
                    waiting.extend(workers.submit(rest, 0.001) for _ in range(backlog - len(waiting)))
                    began = time.perf_counter()
                    os.kill(pid, signal.SIGKILL)
                    again, pid_again = server.accept()
                    took = time.perf_counter() - began
                    assert pid_again != pid
                    connection.close()
                    again.sendall(b"x")
                    again.close()
                    doomed.result(PATIENCE_S)
                    return took * 1000

                yield measure
                for job in waiting:
                    job.cancel()
        finally:
            folder.remove()

    def _wait_until_all_work(self, server, workers, count):
        """Let each worker have a job at one time; so each has completed one after its start, which makes its death no quick one."""
        jobs = [workers.submit(tell_and_wait, server.address) for _ in range(count)]
        connections = [server.accept() for _ in range(count)]
        assert len({pid for _, pid in connections}) == count
        for connection, _ in connections:
            connection.sendall(b"x")
            connection.close()
        for job in jobs:
            job.result(PATIENCE_S)

    def track_median(self, figures, peer, situation):
        return median(figures[peer, situation])

    track_median.unit = "ms"

    def track_longest(self, figures, peer, situation):
        return max(figures[peer, situation])

    track_longest.unit = "ms"

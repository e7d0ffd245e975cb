"""A queue directory with worker processes on it, and many passes through them."""

import contextlib
import os
import time

from subetha import JobQueue, Pass, WorkerPool

from .folders import Folder
from .work import ECHO
from .work import __name__ as WORK

JOB = Pass(ECHO, b"\x01\x02\x03\x04")
CELL_BYTES = 1024
"""What a cell of a queue takes at the most, with its share of the rings."""

WINDOW = 512


@contextlib.contextmanager
def queue_with_workers(cells, workers):
    """A queue of its own and the pids of its worker processes, which have all started."""
    folder = Folder()
    try:
        room = os.statvfs(folder.path)
        if room.f_bavail * room.f_frsize < 2 * cells * CELL_BYTES:
            raise NotImplementedError(f"{folder.path} has no room for {cells} cells")
        # nearly all of them for the one client
        quota = cells - cells // 32
        with (
            JobQueue.create(folder.file("queue"), cells, arena_bytes=2**20, quota=quota) as queue,
            WorkerPool([WORK], queue.path, workers) as pool,
        ):
            began, left = time.monotonic(), workers
            while left:
                if time.monotonic() - began > 300:
                    raise TimeoutError(f"{left} of {workers} workers have not started within five minutes")
                queue.submit(JOB)
                queue.recv()
                pool.poll()
                table = queue.heartbeat
                told = (table.snapshot(slot) for slot in range(table.capacity))
                left = workers - sum(one is not None and one.pid in pool.pids for one in told)
            yield queue, pool.pids
    finally:
        folder.remove()


def passes(queue, under_way, count):
    """Passes a second, for `count` of them, with so many submitted and not received at every moment."""
    submit, recv, recv_many = queue.submit, queue.recv, queue.recv_many
    for _ in range(under_way):
        submit(JOB)
    began = time.perf_counter()
    submitted = received = 0
    while received < count:
        recv()
        got = 1 + len(recv_many(WINDOW))
        received += got
        for _ in range(got):
            submit(JOB)
        submitted += got
    took = time.perf_counter() - began
    for _ in range(under_way + submitted - received):
        recv()
    return received / took

"""What a worker process works on, and what a job may know of itself, and say, while it runs."""

import os
import threading
from typing import NamedTuple

from subetha._core import JobClaim
from subetha.scheduler import WorkerLoop

__all__ = ["CurrentJob", "Running", "current_job", "progress"]


class Running(NamedTuple):
    """What a worker process works on.

    Attributes
    ----------
    queue_path : str
    loop : WorkerLoop
    thread : int
        Its `threading.get_ident`.
    pid : int
        The worker's; another one is that of a process which a job forked.
    modules : frozenset of str
        Modules that it imported at its start, as did every worker of its pool.
    """

    queue_path: str
    loop: WorkerLoop
    thread: int
    pid: int
    modules: frozenset[str]

    def is_in_job_thread(self) -> bool:
        """Whether the caller is in the thread that jobs run in, and in no fork of it."""
        return threading.get_ident() == self.thread and os.getpid() == self.pid


running: Running | None = None
"""What this process works on, where it is a worker."""


class CurrentJob(NamedTuple):
    """The job that runs in this thread.

    Attributes
    ----------
    job_id : int
    attempt : int
        1 where it runs for the first time; more where a worker died over it.
    queue_path : str
        The directory of its queue.
    """

    job_id: int
    attempt: int
    queue_path: str


def progress(done: int, total: int) -> None:
    """Say how far the job that runs in this thread is; outside of one it does nothing.

    Its submitter reads it by `JobFuture.progress`, anybody by `JobQueue.progress`.

    Parameters
    ----------
    done, total : int
        In any unit, 0 to 2**32 - 1.

    Raises
    ------
    TypeError, ValueError
        One of them is no such number.
    TransportError
        The job was taken away from this worker: it was too slow, or stopped for too long. Its result will be refused.
    """
    claim = _claim_here()
    if claim is not None:
        claim.progress(done, total)


def current_job() -> CurrentJob | None:
    """Tell which job runs in this thread; None outside of the worker thread of a worker process, and in what a job forks."""
    claim = _claim_here()
    if claim is None:
        return None
    assert running is not None
    return CurrentJob(claim.job_id, claim.attempts, running.queue_path)


def _claim_here() -> JobClaim | None:
    if running is None or not running.is_in_job_thread():
        return None
    claim = running.loop.claim
    return claim if isinstance(claim, JobClaim) else None

"""Jobs that are in a queue once: those with a unique key, and the next one of each periodic task.

What stands for such a job in the queue's map names it before it is there::

    none, or a job that is over --> promised by me --> there
                                        |
                                        +--I die--> whoever meets it looks for the job: there, or promised by that one

One whose promiser lives, and does not submit for `PATIENCE_S`, is promised by the next one, too; the first then finds its promise
gone and takes its job back. Where that has begun to run already, it runs twice.
"""

import time
from collections.abc import Callable
from typing import Final

import numpy as np

from subetha.errors import MapFull
from subetha.jobqueue import JobQueue
from subetha.layout import STATE_SHIFT, CellState
from subetha.routing import Promise, unique_key
from subetha.transport import backoff

__all__ = ["forget_unique", "holds", "submit_once", "submit_unique"]

PATIENCE_S: Final = 1.0
"""So long (s) a job that a live participant has promised may fail to be there."""

_PENDING = (CellState.READY, CellState.RETRY, CellState.TAKEN, CellState.PARKED)


def holds(queue: JobQueue, job_id: int) -> bool:
    """Whether the job is in the queue and not done."""
    cells = queue.cells()
    # Twice: one that is moved from a cell to another meanwhile may be seen in neither.
    for _ in range(2):
        words = cells["word"][cells["job_id"] == job_id]
        if np.isin((words >> STATE_SHIFT) & 0xF, _PENDING).any():
            return True
    return False


def submit_unique(queue: JobQueue, key: str, submit: Callable[[int], object]) -> tuple[int, bool]:
    """Hand a job in, unless one with the same key is in the queue and not done.

    Parameters
    ----------
    key : str
    submit : callable
        Hands it in under the job id that it gets, to `queue`.

    Returns
    -------
    job_id : int
        Of the one that has the key now.
    is_new : bool
        Whether that is this one.

    Raises
    ------
    MapFull
        The queue's map has no room for another key.
    Exception
        What `submit` raises; then nobody has the key.
    """

    def is_over(promise: Promise) -> bool:
        return not holds(queue, promise.job_id)

    try:
        return submit_once(queue, unique_key(key), is_over, 0, submit)
    except MapFull:
        _forget_those_that_are_over(queue)
    return submit_once(queue, unique_key(key), is_over, 0, submit)


def submit_once(
    queue: JobQueue,
    key: bytes,
    is_over: Callable[[Promise], bool],
    due_ns: int,
    submit: Callable[[int], object],
) -> tuple[int, bool]:
    """Hand a job in, unless what stands under `key` in the queue's map is not over. As `submit_unique`.

    Parameters
    ----------
    is_over : callable
        Whether a job that was there makes room for the next one.
    due_ns : int
        What the map says of the time of this one.
    """
    map_ = queue.registrations().map
    job_id = 0
    pauses = backoff()
    patient_until = time.monotonic() + PATIENCE_S
    while True:
        seen = map_.get(key)
        found = Promise.read(seen)
        if found is not None and found.is_there and not is_over(found):
            return found.job_id, False
        if found is not None and not found.is_there:
            if holds(queue, found.job_id):
                map_.compare_and_swap(key, seen, found._replace(is_there=True).to_bytes())
                continue
            if queue.is_alive(found.number, found.incarnation) and time.monotonic() < patient_until:
                time.sleep(next(pauses))
                continue
        job_id = job_id or queue._new_job_id()
        mine = Promise(False, job_id, due_ns, *queue.identity)
        if not map_.compare_and_swap(key, seen, mine.to_bytes()):
            continue
        said = mine._replace(is_there=True).to_bytes()
        try:
            submit(job_id)
        except BaseException:
            # it is there all the same where a Ctrl-C came just after
            map_.compare_and_swap(key, mine.to_bytes(), said if holds(queue, job_id) else None)
            raise
        # whoever has met it meanwhile has said so
        if map_.compare_and_swap(key, mine.to_bytes(), said) or map_.get(key) == said or not queue.cancel(job_id):
            return job_id, True
        # This process was stopped for so long that another one has promised one, too.
        job_id = 0


def forget_unique(queue: JobQueue, key: str, job_id: int) -> None:
    """Say that the job that had a key is over, so that nothing has to be kept of it."""
    map_ = queue.registrations().map
    name = unique_key(key)
    seen = map_.get(name)
    found = Promise.read(seen)
    if found is not None and found.job_id == job_id:
        map_.compare_and_swap(name, seen, None)


def _forget_those_that_are_over(queue: JobQueue) -> None:
    map_ = queue.registrations().map
    for name in map_:
        if name[:1] != b"U":
            continue
        seen = map_.get(name)
        found = Promise.read(seen)
        if seen is not None and (found is None or (found.is_there and not holds(queue, found.job_id))):
            map_.compare_and_swap(name, seen, None)

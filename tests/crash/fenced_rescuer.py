"""Steps a rescuer through its call, and fences the job it has taken over as a leader does that takes it for lapsed.

    python fenced_rescuer.py DIRECTORY to_try_again|to_bury|unpublished

Says what became of the cell that was fenced in its hands, or why calls cannot be stepped through here.
"""

import os
import signal
import sys

import numpy as np
from ptrace import Tracee, Watched, why_not

from subetha.jobqueue import JobQueue
from subetha.layout import (
    JOB_CELL,
    LINE,
    LINES_OFFSET,
    POOL_LINES,
    STATE_SHIFT,
    VERSION_SHIFT,
    CellState,
    align,
    cell_word,
)
from subetha.pass_registry import Pass

CELLS, BYTES = 16, 192


def words_of(path):
    """The state words of a queue's cells, to be written too."""
    pool = np.memmap(os.path.join(path, "pool"), np.uint8, "r+")
    stride = align(JOB_CELL.itemsize + 2 * BYTES, LINE)
    return pool[LINES_OFFSET + POOL_LINES.itemsize :].view("<u8")[: CELLS * stride // 8 : stride // 8]


def state_of(word):
    return CellState((int(word) >> STATE_SHIFT) & 0xF)


def die_with_a_job(path, max_attempts):
    """A process that takes part, submits a job, starts it and is killed."""
    told, tell = os.pipe()
    pid = os.fork()
    if pid == 0:
        try:
            queue = JobQueue.open(path)
            queue.submit(Pass(1, b"job"), max_attempts=max_attempts)
            claim = queue.try_claim()
            claim.started()
            os.write(tell, b"started")
            signal.pause()
        finally:
            os._exit(1)
    os.close(tell)
    assert os.read(told, 7) == b"started"
    os.close(told)
    return pid


def cell_after(path, left):
    JobQueue.create(path, CELLS, job_bytes=BYTES, result_bytes=BYTES, arena_bytes=2**18, participants=16).close()
    handles = []

    def setup():
        handles.append(JobQueue.open(path))
        handles.append(handles[0].slot)

    rescuer = Tracee(setup, lambda: handles[0].rescue(), lambda _: handles[1])
    try:
        # its timer would be faster
        rescuer.freeze_others()
        victim = die_with_a_job(path, 1 if left == "to_bury" else 3)
        os.kill(victim, signal.SIGKILL)
        os.waitpid(victim, 0)
        words = words_of(path)
        (cell,) = np.flatnonzero((words >> np.uint64(STATE_SHIFT)) & np.uint64(0xF) == CellState.TAKEN)
        dead_one = int(words[cell]) & 0xFFFF
        if left == "unpublished":
            words[cell] = cell_word((int(words[cell]) >> VERSION_SHIFT) + 1, CellState.RETRY, dead_one)
        fenced = []

        def fence(_):
            word = int(words[cell])
            if not fenced and state_of(word) is CellState.TAKEN and word & 0xFFFF != dead_one:
                # what a leader does that takes it for lapsed; the copy waits elsewhere
                fenced.append(word)
                words[cell] = cell_word(word >> VERSION_SHIFT, CellState.FENCED, word & 0xFFFF)

        rescuer.trace(Watched([(os.path.join(path, "pool"), 0)]), fence)
        if not fenced or rescuer.value != 1:
            return f"fenced {fenced}, rescued {rescuer.value}"
        # by way of COLLECTED with the next version
        freed = int(words[cell]) == cell_word((fenced[0] >> VERSION_SHIFT) + 2, CellState.FREE, 0)
        return "freed" if freed else f"{state_of(words[cell])!r}"
    finally:
        rescuer.kill()


if __name__ == "__main__":
    print(why_not() or cell_after(os.path.join(sys.argv[1], "queue"), sys.argv[2]))

"""The jobs of the storms: what each is follows from its number, and so does the only right answer."""

import os
import random
import time

import numpy as np

from subetha._core import Pass
from subetha.errors import Empty, ExecutionError, HeartbeatError, JobTimeout, WorkerDied
from subetha.jobqueue import JobQueue
from subetha.layout import Role
from subetha.pass_registry import register
from subetha.scheduler import WorkerLoop

ECHOES, FAILS, GROWS, LATE = range(1, 5)
LONG = 20_000
"""Bytes that need a block."""
TIMEOUT_S = 0.3
EVERY_ATTEMPT = 65_535
FEW_ATTEMPTS = 3


RESOLVED, DIED = range(2)
"""On a client's board: how many jobs were answered, and how many of them by WorkerDied."""


BEGUN, ENDED = range(2)
"""In the diary of runs, beside the job's number."""


class Diary:
    """A file of records of two 32-bit numbers, appended by any process in one write each."""

    def __init__(self, path):
        self.path = os.fspath(path)
        self.fd = os.open(self.path, os.O_CREAT | os.O_RDWR | os.O_APPEND | os.O_CLOEXEC)

    def note(self, first, second):
        os.write(self.fd, first.to_bytes(4, "little") + second.to_bytes(4, "little"))

    @property
    def entries(self):
        """Shape (n, 2), u4."""
        return np.fromfile(self.path, "<u4").reshape(-1, 2)

    def __len__(self):
        return os.fstat(self.fd).st_size // 8


def never_ended(accepted, runs):
    """Numbers of the first diary that no run to its end is noted for in the second one; of those out of time, no run at all."""
    noted = runs.entries
    ended = set(noted[noted[:, 1] == ENDED, 0].tolist())
    begun = set(noted[:, 0].tolist())
    return sorted(
        number
        for number in set(accepted.entries[:, 0].tolist())
        if number not in (begun if kind_of(number) == LATE else ended)
    )


def kind_of(number):
    return {0: FAILS, 1: GROWS, 2: GROWS}.get(number % 20, LATE if number % 997 == 5 else ECHOES)


def filler(number, length):
    return random.Random(number).randbytes(length)


def args_of(number):
    length = LONG + number % 1000 if number % 23 == 0 else number % 300
    return number.to_bytes(4, "little") + filler(number, length)


def result_of(number):
    """What the handler gives for the job's arguments, worked out on the client's side."""
    args = args_of(number)
    return args[::-1] * (1 + 12_000 // len(args)) if kind_of(number) == GROWS else args[::-1]


def options_of(number):
    return {
        "due": time.time() + 0.03 * (number % 4) if number % 7 == 3 else None,
        "priority": number % 3,
        "max_attempts": FEW_ATTEMPTS if number % 5 == 4 else EVERY_ATTEMPT,
        "timeout": TIMEOUT_S if kind_of(number) == LATE else None,
    }


def job(number):
    return Pass(kind_of(number), args_of(number))


def is_right(number, result):
    """Is it one of the answers that the job may have? A worker's death in each of few attempts is one."""
    kind = kind_of(number)
    if isinstance(result, WorkerDied):
        return number % 5 == 4
    if kind == LATE and isinstance(result, JobTimeout):
        return True
    if kind == FAILS:
        return isinstance(result, ExecutionError) and f"job {number} fails" in str(result)
    return result == result_of(number)


def take_results(queue, expected, answered, board):
    """Take what is there, waiting a little for the first one; each must be the only and the right answer of its job.

    `expected` and `answered`: job id to number.
    """
    try:
        results = [queue.recv(0.02), *queue.recv_many(50)]
    except Empty:
        return
    for result in results:
        assert result.token not in answered, f"a second answer to job {answered[result.token]}: {result}"
        assert result.token in expected, f"an answer to {result.token:#x}, which is not asked for: {result}"
        number = answered[result.token] = expected.pop(result.token)
        assert is_right(number, result.result), f"job {number}: {str(result.result)[:200]}"
        board[RESOLVED] += 1
        board[DIED] += isinstance(result.result, WorkerDied)


def register_jobs(runs, seconds=0.004):
    """Handlers that take their time, and note in the diary `runs` when they begin and when there is only the result to give."""

    def run(args, longer=0.0):
        number = int.from_bytes(args[:4], "little")
        runs.note(number, BEGUN)
        # so that most kills hit a job
        time.sleep(seconds * (number % 8) / 4 + longer)
        runs.note(number, ENDED)
        return number

    def echoes(args):
        run(args)
        return args[::-1]

    def fails(args):
        raise ValueError(f"job {run(args)} fails")

    def grows(args):
        run(args)
        return args[::-1] * (1 + 12_000 // len(args))

    def late(args):
        run(args, 2 * TIMEOUT_S)
        return args[::-1]

    for kind, handler in {ECHOES: echoes, FAILS: fails, GROWS: grows, LATE: late}.items():
        register(kind, handler)


class ParkingSide:
    """A queue's submit side that puts some of what it claims back for a little later."""

    claims_reply = True
    payload_bytes = None

    def __init__(self, side):
        self.side, self.runs = side, side.runs
        self.take_place, self.give_place = side.take_place, side.give_place
        self.dice = random.Random()

    @property
    def unknown_answered(self):
        return self.side.unknown_answered

    def try_push(self, payload):
        return self.side.try_push(payload)

    def try_pop(self):
        return self.side.try_pop()

    def try_claim(self):
        return self.claim(0)

    def claim(self, timeout=None):
        claim = self.side.claim(timeout)
        if self.dice.random() < 0.1:
            if self.dice.random() < 0.5:
                claim.started()
            claim.park(time.time() + self.dice.choice([0.0, 0.01, 0.1]), charged=claim.max_attempts > FEW_ATTEMPTS)
            raise Empty("parked")
        return claim


def work(path, runs, seconds=0.004):
    """The life of a worker: the one worker loop over a queue directory."""
    register_jobs(runs, seconds)
    queue = JobQueue.open(path, role=Role.WORKER, unknown_after=60)
    try:
        WorkerLoop(ParkingSide(queue.submit_side), table=queue.heartbeat, slot=queue.slot, routes=True).run()
    except HeartbeatError as error:
        # whoever started it starts another one
        if "ran out of time" not in str(error):
            raise

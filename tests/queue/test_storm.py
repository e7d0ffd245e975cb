"""A storm of kills over a queue at work: no job is lost, none is answered twice, and nothing is left behind."""

import os
import random
import time
from collections import Counter

import pytest

from subetha._core import decode_submit, encode_result
from subetha.errors import Empty, WorkerDied
from subetha.jobqueue import JobQueue
from subetha.pass_registry import Pass

from .participants import eventually, participant

__all__ = ["participant"]  # a fixture

JOBS = 2000
WORKERS = 3
KILL_EVERY_S = 0.05
KILLS = 60
"""Then it calms down: where a start takes longer than the time between two kills nothing would ever be done."""
DEADLINE_S = 90

WORK = """
while True:
    claim = queue.claim(120)
    claim.started()
    args = decode_submit(claim.payload)[1].args
    # a job takes its time, so that most kills hit one
    time.sleep(0.002)
    claim.reply(encode_result(0, args[::-1]))
"""


@pytest.fixture
def path(shm):
    return os.fspath(shm / "queue")


def args_of(number):
    return number.to_bytes(4, "little") + random.Random(number).randbytes(20_000 if number % 40 == 0 else number % 300)


def open_files():
    return len(os.listdir("/proc/self/fd"))


@pytest.mark.slow
@pytest.mark.parametrize("max_attempts", [3, 65_535])
def test_every_job_is_answered_once_while_a_worker_is_killed_every_50_ms(path, participant, max_attempts):
    dice = random.Random(max_attempts)

    def start():
        made = participant()
        made.begin(WORK)
        return made

    with JobQueue.create(path, 256, arena_bytes=2**22, participants=16, quota=200) as queue:
        workers = [start() for _ in range(WORKERS)]
        queue.submit(Pass(1, b""))
        queue.recv(DEADLINE_S)
        before = open_files()
        expected, answers = {}, Counter()
        died = kills = submitted = 0
        next_kill = time.monotonic()
        deadline = next_kill + DEADLINE_S
        while sum(answers.values()) < JOBS:
            now = time.monotonic()
            assert now < deadline, f"{len(answers)} of {JOBS} jobs came in {DEADLINE_S} s; {queue.stats()}"
            if now >= next_kill and kills < KILLS:
                next_kill = now + KILL_EVERY_S
                victim = workers.pop(dice.randrange(WORKERS))
                queue.rescue({victim.pid: victim.kill()})
                workers.append(start())
                kills += 1
            while submitted < JOBS and len(expected) < 150:
                job_id = queue.submit(
                    Pass(1, args_of(submitted)), priority=submitted % 3, max_attempts=max_attempts, wait=0
                )
                expected[job_id] = submitted
                submitted += 1
            try:
                result = queue.recv(0.01)
            except Empty:
                continue
            answers[result.token] += 1
            number = expected.pop(result.token)
            if isinstance(result.result, WorkerDied):
                died += 1
            else:
                assert result.result == args_of(number)[::-1], number
        assert kills > 5
        assert set(answers.values()) == {1}
        assert queue.recv_many(10) == []
        assert queue.duplicates == 0
        letters = queue.dead_letters()
        assert len(letters) == died
        assert max_attempts == 3 or died == 0
        for letter in letters:
            assert queue.drop_dead(letter.job_id)
        for worker in workers:
            queue.rescue({worker.pid: worker.kill()})
        eventually(lambda: queue.stats().states == {"FREE": 256}, f"the capacity is whole: {queue.stats()}")
        assert queue.stats().participants == 1
        # two pipes led to each of those who worked then
        assert open_files() == before - 2 * WORKERS
        assert queue.repair() == 0
        job_id = queue.submit(Pass(1, b"after the storm"))
        claim = queue.claim(DEADLINE_S)
        assert decode_submit(claim.payload)[1].args == b"after the storm"
        claim.reply(encode_result(0, b"calm"))
        result = queue.recv(DEADLINE_S)
        assert (result.token, result.result) == (job_id, b"calm")

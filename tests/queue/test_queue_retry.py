"""Attempts that are to be followed by another one: `JobClaim.retry`, and what `backoff` lets a job wait for after an attempt."""

import os
import signal
import time

import numpy as np
import pytest

from subetha._core import encode_result
from subetha.errors import Empty, WorkerDied
from subetha.jobqueue import JobQueue
from subetha.pass_registry import Pass

from .participants import WAIT_S, eventually, participant

__all__ = ["participant"]  # a fixture

LATER = 1000.0
"""Seconds that no test waits for; clocks are set forward instead."""


def forward(queue, seconds):
    queue._clock_shift_ns += int(seconds * 1e9)


def rest_of(queue, job_id):
    """Seconds until the job is due."""
    cells = queue.cells()
    (due,) = cells["due_ns"][cells["job_id"] == job_id]
    return (int(due) - time.time_ns() - queue._clock_shift_ns) / 1e9


def refuses(queue):
    with pytest.raises(Empty):
        queue.try_claim()
    return True


def fail_once(queue):
    claim = queue.claim(WAIT_S)
    claim.started()
    assert claim.retry()


def test_a_job_without_backoff_is_tried_again_at_once_and_each_attempt_is_counted(make):
    queue = make()
    job_id = queue.submit(Pass(1, b"x" * 20_000), max_attempts=3)
    for n in range(2):
        claim = queue.claim(WAIT_S)
        assert (claim.job_id, claim.attempts) == (job_id, n)
        claim.started()
        assert claim.retry()
    claim = queue.claim(WAIT_S)
    claim.started()
    assert not claim.retry(), "it was the last one"
    claim.reply(encode_result(0, b"at last"))
    assert queue.recv(WAIT_S).result == b"at last"
    assert queue.stats().states == {"FREE": 16}
    with pytest.raises(ValueError, match="over"):
        claim.retry()


def test_the_rest_is_doubled_up_to_the_longest_less_a_random_part_of_at_most_a_half(make):
    queue = make()
    job_id = queue.submit(Pass(1, b""), max_attempts=100, backoff=(LATER, 5 * LATER))
    for whole in (LATER, 2 * LATER, 4 * LATER, 4 * LATER, 4 * LATER):
        fail_once(queue)
        assert whole / 2 - 1 <= rest_of(queue, job_id) <= whole + 1
        assert refuses(queue)
        forward(queue, whole + 1)


def test_rests_of_different_jobs_differ(make):
    queue = make(64)
    ids = [queue.submit(Pass(1, b""), backoff=LATER) for _ in range(20)]
    for _ in ids:
        fail_once(queue)
    rests = [rest_of(queue, job_id) for job_id in ids]
    assert max(rests) - min(rests) > LATER / 10


def test_without_a_longest_rest_it_is_an_hour_or_the_first_one(make):
    queue = make()
    queue.submit(Pass(1, b""), backoff=1)
    queue.submit(Pass(1, b""), backoff=86_400)
    cells = queue.cells()
    found = cells[cells["backoff_ms"] > 0]
    assert sorted(zip(found["backoff_ms"].tolist(), found["doublings"].tolist(), strict=True)) == [
        (1000, 11),
        (86_400_000, 0),
    ]


def test_a_job_whose_worker_died_rests_too_and_only_then_runs_again(make, participant):
    queue = make()
    job_id = queue.submit(Pass(1, b"x" * 20_000), backoff=LATER)
    worker = participant()
    worker.do("held.append(queue.claim(60))", "held[0].started()")
    worker.kill()
    queue.rescue({worker.pid: -signal.SIGKILL})
    assert refuses(queue)
    assert (queue.stats().parked, queue.stats().waiting) == (1, 0)
    assert LATER / 2 - 1 <= rest_of(queue, job_id) <= LATER + 1
    forward(queue, LATER + 1)
    claim = queue.try_claim()
    assert (claim.job_id, claim.attempts) == (job_id, 1)
    claim.ack()
    assert queue.stats().states == {"FREE": 16}


def test_a_job_that_was_only_claimed_or_given_back_does_not_rest(make, participant):
    queue = make()
    queue.submit(Pass(1, b""), backoff=LATER)
    worker = participant()
    worker.do("held.append(queue.claim(60))")
    worker.kill()
    queue.rescue({worker.pid: -signal.SIGKILL})
    claim = queue.try_claim()
    claim.started()
    claim.release()
    claim = queue.try_claim()
    assert claim.attempts == 0
    claim.ack()


def test_a_retry_that_was_given_back_after_its_rest_does_not_rest_again(make):
    queue = make()
    queue.submit(Pass(1, b""), backoff=LATER)
    fail_once(queue)
    forward(queue, LATER + 1)
    queue.try_claim().release()
    claim = queue.try_claim()
    assert claim.attempts == 1
    claim.ack()


def test_of_a_job_that_failed_and_then_killed_its_worker_only_the_death_is_listed(make, participant):
    queue = make()
    job_id = queue.submit(Pass(1, b""), max_attempts=2)
    fail_once(queue)
    worker = participant()
    worker.do("held.append(queue.claim(60))", "held[0].started()")
    worker.kill()
    queue.rescue({worker.pid: -signal.SIGKILL})
    answer = queue.recv(WAIT_S)
    assert (answer.token, type(answer.result)) == (job_id, WorkerDied)
    assert str(answer.result) == f"in the last of 2 attempts its worker (pid {worker.pid}) died with signal 9"
    (letter,) = queue.dead_letters()
    assert letter.attempts == 2
    assert [(death.pid, death.exit_code) for death in letter.deaths] == [(worker.pid, -signal.SIGKILL)]


def test_a_claim_that_was_taken_away_is_not_tried_again(make, participant):
    queue = make()
    queue.submit(Pass(1, b""), timeout=0.01)
    worker = participant()
    worker.do("held.append(queue.claim(60))", "held[0].started()")
    eventually(lambda: queue.stats().done, "it was ended")
    worker.do(
        "try:\n"
        "    held[0].retry()\n"
        "except Exception as error:\n"
        "    assert 'taken away' in str(error)\n"
        "else:\n"
        "    raise AssertionError"
    )
    assert "JobTimeout" in repr(queue.recv(WAIT_S).result)


@pytest.mark.parametrize("backoff", [0, -1, (0, 5), (2, 1), (1, 2, 3), (), float("nan")])
def test_what_is_no_backoff_is_refused(make, backoff):
    queue = make()
    with pytest.raises(ValueError, match="backoff"):
        queue.submit(Pass(1, b""), backoff=backoff)
    assert queue.stats().states == {"FREE": 16}


def test_a_cell_that_says_nonsense_of_its_rest_harms_no_other_job(make, files_of):
    queue = make()
    queue.submit(Pass(1, b""), backoff=1.0)
    claim = queue.claim(WAIT_S)
    claim.started()
    cells = files_of(queue.path).cells
    here = cells["backoff_ms"] > 0
    cells["backoff_ms"][here] = np.iinfo(np.uint32).max
    cells["doublings"][here] = 255
    assert claim.retry()
    queue.submit(Pass(1, b"next"))
    queue.claim(WAIT_S).ack()


def test_a_rest_survives_every_handle(tmp_path):
    path = os.fspath(tmp_path / "queue")
    try:
        queue = JobQueue.create(path, 16, arena_bytes=2**20, participants=8, durability="disk")
    except OSError as error:
        pytest.skip(str(error))
    with queue:
        job_id = queue.submit(Pass(1, b""), backoff=LATER)
        fail_once(queue)
    with JobQueue.open(path) as queue:
        assert refuses(queue)
        assert 0 < rest_of(queue, job_id) <= LATER + 1
        forward(queue, LATER + 1)
        claim = queue.try_claim()
        assert claim.attempts == 1
        claim.ack()

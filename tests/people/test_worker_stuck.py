"""Workers that never come back from a job, and workers whose supervisor is gone."""

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import psutil
import pytest

from subetha.errors import JobTimeout
from subetha.jobqueue import JobQueue
from subetha.pass_registry import Pass
from subetha.pool import WorkerPool

PROGRAM = [sys.executable, "-c", "from subetha.cli import main; main()"]

STUCK = """
import os, threading, time
from subetha import register

@register(1)
def swallows_every_exception(_args):
    while True:
        try:
            while True:
                time.sleep(0.01)
        except BaseException:
            pass

@register(2)
def holds_the_gil(_args):
    pow(3, 10**9)

@register(3)
def joins_a_thread(_args):
    thread = threading.Thread(target=threading.Event().wait)
    thread.start()
    thread.join()

@register(4)
def pid(_args):
    return str(os.getpid()).encode()
"""
WAYS = {"swallows every exception": 1, "holds the GIL": 2, "joins a thread": 3}
PID = 4


@pytest.fixture
def queue(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[JobQueue]:
    """A queue, and the module `stuck` on the path of its workers."""
    (tmp_path / "stuck.py").write_text(STUCK)
    monkeypatch.syspath_prepend(str(tmp_path))
    with JobQueue.create(tmp_path / "queue", cells=64, arena_bytes=2**20) as queue:
        yield queue


def until(condition: Callable[[], object], pool: WorkerPool | None = None) -> None:
    deadline = time.monotonic() + 60
    while not condition():
        assert time.monotonic() < deadline, "not within a minute"
        if pool is not None:
            pool.poll(0.05)
        time.sleep(0.005)


@pytest.mark.parametrize("way", WAYS)
def test_a_worker_that_is_stuck_in_a_job_out_of_time_is_killed_and_replaced(
    queue: JobQueue, way: str, capfd: pytest.CaptureFixture[str]
) -> None:
    with WorkerPool(["stuck"], queue.path, 1) as pool:
        queue.submit(Pass(PID))
        first = int(queue.recv(60).result)
        late = queue.submit(Pass(WAYS[way]), timeout=0.2)
        queue.submit(Pass(PID), max_attempts=1)
        result = queue.recv(60)
        assert (result.token, type(result.result)) == (late, JobTimeout)
        until(lambda: first not in pool.pids, pool)
        second = int(queue.recv(60).result)
        assert second != first
        assert pool.deaths == 1
        pool.kill()
    said = capfd.readouterr().err
    assert f"(pid {first}): a job ran longer than its timeout, the worker is killed" in said
    assert queue.stats().states == {"FREE": queue.cells_total}


@pytest.mark.slow
def test_a_pool_does_not_break_over_jobs_out_of_time(queue: JobQueue) -> None:
    with WorkerPool(["stuck"], queue.path, 1) as pool:
        for _ in range(6):
            queue.submit(Pass(WAYS["joins a thread"]), timeout=0.05)
        until(lambda: pool.deaths == 6, pool)
        assert all(isinstance(queue.recv(60).result, JobTimeout) for _ in range(6))
        pool.kill()


@pytest.mark.slow
@pytest.mark.parametrize("way", [None, "holds the GIL"], ids=["idle", "holds the GIL"])
def test_workers_end_with_their_supervisor_and_give_their_job_back(
    queue: JobQueue, tmp_path: Path, way: str | None
) -> None:
    supervisor = subprocess.Popen(
        [*PROGRAM, "worker", "stuck", "--queue", str(queue.path), "--processes", "2"],
        env=os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)},
        cwd=tmp_path,
        stderr=subprocess.DEVNULL,
    )
    try:
        queue.submit(Pass(PID))
        queue.recv(60)
        if way is not None:
            queue.submit(Pass(WAYS[way]), max_attempts=5)
            until(lambda: queue.stats().running)
        workers = psutil.Process(supervisor.pid).children()
        assert len(workers) == 2
        os.kill(supervisor.pid, signal.SIGKILL)
        supervisor.wait()
        _, left = psutil.wait_procs(workers, timeout=15)
        assert left == []
    finally:
        supervisor.kill()
        supervisor.wait()
    until(lambda: queue.stats().waiting == (way is not None) and queue.stats().running == 0)

"""Jobs whose workers die over them, under the supervisor: they run again, or their submitter hears how it ended."""

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from subetha._core import SubmittedResult
from subetha.errors import Empty, WorkerDied
from subetha.jobqueue import JobQueue
from subetha.pass_registry import Pass
from subetha.pool import WorkerPool

WAIT_S = 60

PID, KILLED_ONCE, KILLED_ALWAYS, EXITS_WITH_7, KILLED_WHEN_TOLD = range(1, 6)

HANDLERS = """
import os, signal
from subetha.pass_registry import register

@register(1)
def pid(_args):
    return b"%d" % os.getpid()

@register(2)
def killed_once(flag):
    try:
        open(flag, "x").close()
    except FileExistsError:
        return b"ran again"
    os.kill(os.getpid(), signal.SIGKILL)

@register(3)
def killed_always(_args):
    os.kill(os.getpid(), signal.SIGKILL)

@register(4)
def exits_with_7(_args):
    os._exit(7)

@register(5)
def killed_when_told(fifo):
    code = open(fifo, "rb").read()
    os._exit(7) if code == b"7" else os.kill(os.getpid(), int(code))
"""


@pytest.fixture
def modules(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder on the path, with `handlers` in it."""
    folder = tmp_path / "modules"
    folder.mkdir()
    (folder / "handlers.py").write_text(HANDLERS)
    monkeypatch.syspath_prepend(str(folder))
    return folder


@pytest.fixture
def queue(tmp_path: Path) -> Iterator[JobQueue]:
    with JobQueue.create(tmp_path / "queue", cells=64, arena_bytes=2**20) as queue:
        yield queue


@pytest.fixture
def make_pool(modules: Path, queue: JobQueue) -> Iterator[Callable[..., WorkerPool]]:
    """Start a pool whose workers are replaced at once, however quickly they die."""
    pools = []

    def make(processes: int = 1) -> WorkerPool:
        pool = WorkerPool(["handlers"], queue.path, processes, backoff=lambda _deaths: 0.0, report=lambda _text: None)
        pools.append(pool)
        pool.start()
        return pool

    yield make
    for pool in pools:
        pool.kill()
        pool.stop()


def receive(queue: JobQueue, pool: WorkerPool) -> SubmittedResult:
    """The next result, while the pool does its work."""
    deadline = time.monotonic() + WAIT_S
    while time.monotonic() < deadline:
        pool.poll(0.01)
        try:
            return queue.try_recv()
        except Empty:
            continue
    pytest.fail(f"no result came in {WAIT_S} s")


def no_second_result_comes(queue: JobQueue, pool: WorkerPool) -> None:
    """Results of one worker come in the order of the jobs, so one that is asked for now comes behind any other."""
    last = queue.submit(Pass(PID))
    assert receive(queue, pool).token == last
    with pytest.raises(Empty):
        queue.try_recv()


def just_after_a_look(queue: JobQueue) -> None:
    """Until half a second later this process's timer does not look for the dead: the supervisor is first to see one."""
    epoch = queue.heartbeat.tick_global_epoch()
    deadline = time.monotonic() + WAIT_S
    while True:
        snapshot = queue.heartbeat.snapshot(queue.slot)
        if snapshot is not None and snapshot.last_seen_epoch >= epoch:
            return
        assert time.monotonic() < deadline, "the timer stands still"
        time.sleep(0.002)


def test_a_job_that_kills_its_worker_once_runs_again_and_its_result_comes_once(
    make_pool: Callable[..., WorkerPool], queue: JobQueue, tmp_path: Path
) -> None:
    pool = make_pool()
    job_id = queue.submit(Pass(KILLED_ONCE, os.fsencode(tmp_path / "flag")))
    result = receive(queue, pool)
    assert (result.token, result.result) == (job_id, b"ran again")
    assert pool.deaths == 1
    assert queue.redelivered == 1
    no_second_result_comes(queue, pool)
    assert queue.dead_letters() == []
    assert queue.stats().states == {"FREE": 64}


@pytest.mark.parametrize("max_attempts", [1, 3])
def test_a_job_that_always_kills_its_worker_ends_after_max_attempts_and_the_pool_goes_on(
    make_pool: Callable[..., WorkerPool], queue: JobQueue, max_attempts: int
) -> None:
    pool = make_pool()
    first = pool.pids
    job_id = queue.submit(Pass(KILLED_ALWAYS), max_attempts=max_attempts)
    result = receive(queue, pool)
    assert result.token == job_id
    assert isinstance(result.result, WorkerDied)
    assert f"in the last of {max_attempts} attempts its worker" in str(result.result)
    no_second_result_comes(queue, pool)
    assert pool.deaths == max_attempts
    assert len(pool.pids) == 1
    assert pool.pids != first
    (letter,) = queue.dead_letters()
    assert (letter.job_id, letter.attempts) == (job_id, max_attempts)
    assert queue.drop_dead(job_id)
    assert queue.stats().states == {"FREE": 64}


@pytest.mark.parametrize(
    ("told", "returncode", "words"),
    [(b"9", -signal.SIGKILL, "signal 9"), (b"11", -signal.SIGSEGV, "signal 11"), (b"7", 7, "exit code 7")],
)
def test_the_supervisor_sees_how_a_worker_ended_and_the_submitter_hears_it(
    make_pool: Callable[..., WorkerPool], queue: JobQueue, tmp_path: Path, told: bytes, returncode: int, words: str
) -> None:
    pool = make_pool()
    os.mkfifo(tmp_path / "fifo")
    queue.submit(Pass(KILLED_WHEN_TOLD, os.fsencode(tmp_path / "fifo")), max_attempts=1)
    with open(tmp_path / "fifo", "wb") as fifo:
        (pid,) = pool.pids
        just_after_a_look(queue)
        fifo.write(told)
    while pool.deaths == 0:
        pool.poll(WAIT_S)
    error = queue.recv(WAIT_S).result
    assert isinstance(error, WorkerDied)
    assert str(error) == f"in the last of 1 attempts its worker (pid {pid}) died with {words}"
    (letter,) = queue.dead_letters()
    assert [(death.pid, death.exit_code) for death in letter.deaths] == [(pid, returncode)]


def test_a_worker_that_exits_in_a_job_is_charged_as_one_that_is_killed(
    make_pool: Callable[..., WorkerPool], queue: JobQueue
) -> None:
    pool = make_pool()
    queue.submit(Pass(EXITS_WITH_7), max_attempts=2)
    error = receive(queue, pool).result
    assert isinstance(error, WorkerDied)
    assert "in the last of 2 attempts" in str(error)
    assert pool.deaths == 2
    no_second_result_comes(queue, pool)


def test_the_jobs_of_the_other_workers_are_not_disturbed_by_one_that_always_kills_its_own(
    make_pool: Callable[..., WorkerPool], queue: JobQueue
) -> None:
    pool = make_pool(2)
    doomed = queue.submit(Pass(KILLED_ALWAYS))
    wanted = {queue.submit(Pass(PID)) for _ in range(20)}
    results = [receive(queue, pool) for _ in range(21)]
    assert {result.token for result in results} == {doomed, *wanted}
    assert [result.token for result in results if isinstance(result.result, WorkerDied)] == [doomed]
    assert all(isinstance(result.result, bytes) for result in results if result.token != doomed)


def test_under_the_program_jobs_survive_their_workers_too(modules: Path, queue: JobQueue, tmp_path: Path) -> None:
    command = [sys.executable, "-c", "from subetha.cli import main; main()"]
    command += ["worker", "handlers", "--queue", str(queue.path), "--processes", "2"]
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)}
    with subprocess.Popen(command, env=environment, stderr=subprocess.PIPE) as supervisor:
        try:
            once = queue.submit(Pass(KILLED_ONCE, os.fsencode(tmp_path / "flag")))
            doomed = queue.submit(Pass(KILLED_ALWAYS), max_attempts=2)
            results = {found.token: found.result for found in (queue.recv(WAIT_S) for _ in range(2))}
            assert results[once] == b"ran again"
            assert isinstance(results[doomed], WorkerDied)
            queue.submit(Pass(PID))
            assert isinstance(queue.recv(WAIT_S).result, bytes)
        finally:
            supervisor.terminate()
            _, said = supervisor.communicate()
    assert supervisor.returncode == 0
    assert said.count(b"killed by SIGKILL") == 3


def test_of_two_workers_that_die_at_once_each_cause_is_kept(
    make_pool: Callable[..., WorkerPool], queue: JobQueue, tmp_path: Path
) -> None:
    pool = make_pool(processes=2)
    fifos = [tmp_path / "first", tmp_path / "second"]
    for fifo in fifos:
        os.mkfifo(fifo)
        queue.submit(Pass(KILLED_WHEN_TOLD, os.fsencode(fifo)), max_attempts=1)
    # each open waits until a worker reads: then both have a job in hand
    files = [open(fifo, "wb", buffering=0) for fifo in fifos]  # noqa: SIM115
    pids = list(pool.pids)
    just_after_a_look(queue)
    for pid in pids:
        os.kill(pid, signal.SIGKILL)
    for pid in pids:
        os.waitid(os.P_PID, pid, os.WEXITED | os.WNOWAIT)
    for _ in range(2):
        receive(queue, pool)
    for file in files:
        file.close()
    assert [letter.deaths[0].exit_code for letter in queue.dead_letters()] == [-9, -9]

"""Workers that are restarted again and again leave nothing behind; after a restart of everything every job runs."""

import itertools
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import psutil
import pytest

from subetha.check import check_queue
from subetha.jobqueue import JobQueue
from subetha.layout import STATE_SHIFT, CellState, Role, SlotState

from . import jobs
from .capacity import capacity_of
from .crowd import Board, Crowd, until

from ..crash.census import QueueCensus, nothing_left  # isort: skip

HERE = Path(__file__).parent
PROGRAM = [sys.executable, "-c", "from subetha.cli import main; main()"]
WAITS = (CellState.READY, CellState.RETRY)
GOES = 2


class Supervised:
    """A queue, `subetha worker` over it, and clients of it."""

    def __init__(self, path, folder, processes, job_seconds):
        self.path, self.folder, self.processes, self.job_seconds = path, folder, processes, job_seconds
        JobQueue.create(path, 4096, quota=4000, arena_bytes=2**26, participants=64).close()
        self.before = capacity_of(path)
        self.crowd = Crowd(folder)
        self.runs, self.accepted = jobs.Diary(folder / "runs"), jobs.Diary(folder / "accepted")
        self.board = Board()
        self.census = QueueCensus(path)
        self.supervisor = None

    def start_workers(self):
        path = [os.fspath(HERE), *sys.path]
        self.supervisor = subprocess.Popen(
            [*PROGRAM, "worker", "worker_jobs", "--queue", self.path, "--processes", str(self.processes)],
            env=os.environ
            | {
                "PYTHONPATH": os.pathsep.join(path),
                "SUBETHA_STORM_RUNS": self.runs.path,
                "SUBETHA_STORM_JOB_SECONDS": str(self.job_seconds),
            },
            stdin=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )

    def states(self):
        return (self.census.words >> STATE_SHIFT) & 0xF

    def workers(self):
        """How many jobs each living worker has completed, by pid."""
        records = self.census.records.copy()
        is_one = (records["status"] & np.uint64(0xFF) == SlotState.USED) & (records["role"] == Role.WORKER)
        alive = {child.pid for child in psutil.Process(self.supervisor.pid).children()}
        return {int(record["pid"]): int(record["completed"]) for record in records[is_one] if record["pid"] in alive}

    def all_at_work(self):
        """The pids of the workers, once each place has one that has completed a job, and no dead one has a number any more."""
        completed = self.workers()
        records = self.census.records
        in_use = records["pid"][records["status"] & np.uint64(0xFF) != SlotState.FREE].tolist()
        known = {self.supervisor.pid, *completed, *(member.pid for member in self.crowd.members)}
        return (
            list(completed) if sum(map(bool, completed.values())) == self.processes and set(in_use) <= known else None
        )

    def supervised(self):
        """The pids of the supervisor and of its workers."""
        return [self.supervisor.pid, *(child.pid for child in psutil.Process(self.supervisor.pid).children())]

    def stop_workers(self):
        self.supervisor.terminate()
        self.supervisor.wait()

    def what_is_there(self):
        with JobQueue.open(self.path, readonly=True) as queue:
            return f"{self.board[jobs.RESOLVED]} resolved, {queue.stats()}"

    def is_whole(self):
        """Everything is over: what was there at the creation is there again."""
        lost = jobs.never_ended(self.accepted, self.runs)
        assert not lost, f"{len(lost)} accepted jobs never ran to their end: {lost[:10]}"
        with JobQueue.open(self.path) as queue:
            queue.rescue()
            assert queue.dead_letters() == []
            nothing_left(QueueCensus(self.path).faults({queue.slot}))
        report = check_queue(self.path)
        assert report.exit_code == 0, report
        assert capacity_of(self.path) == self.before

    def end(self):
        self.crowd.end()
        if self.supervisor is not None and self.supervisor.poll() is None:
            for pid in self.supervised():
                os.kill(pid, signal.SIGKILL)
            self.supervisor.wait()


@pytest.fixture
def supervised():
    made = []

    def make(*arguments):
        made.append(Supervised(*arguments))
        return made[-1]

    yield make
    for one in made:
        one.end()


def client(path, board, accepted, count, at_once):
    """Submit `count` jobs, at most so many at once, and take their results; then stay for as long as the board says."""
    expected, answered = {}, {}
    # without those that run out of time: these end their worker
    numbers = (number for number in itertools.count() if jobs.kind_of(number) != jobs.LATE)
    submitted = 0
    with JobQueue.open(path) as queue:
        while (submitted < count or expected) and board[GOES] == 0:
            while submitted < count and len(expected) < at_once:
                number = next(numbers)
                options = jobs.options_of(number) | {"max_attempts": jobs.EVERY_ATTEMPT}
                job_id = queue.submit(jobs.job(number), wait=60, **options)
                accepted.note(number, os.getpid())
                expected[job_id] = number
                submitted += 1
            jobs.take_results(queue, expected, answered, board)
        while board[GOES] == 0:
            time.sleep(0.01)
        while expected:
            jobs.take_results(queue, expected, answered, board)
        assert queue.recv_many(10) == []


# --- restarts of workers --------------------------------------------------------------------------------------------


def belongings(pid):
    """What a process has open, mapped from files and running, and how many maps it has at all."""
    process = Path("/proc") / str(pid)
    # a pipe's or a pidfd's number differs, its kind does not
    opened = sorted(os.readlink(fd).split(":")[0] for fd in (process / "fd").iterdir())
    maps = [line.split(maxsplit=5) for line in (process / "maps").read_text().splitlines()]
    named = sorted(line[5] for line in maps if len(line) > 5 and line[5].startswith("/"))
    return {"open": opened, "mapped": named, "threads": len(list((process / "task").iterdir()))}, len(maps)


MORE_MAPS = 16
"""Anonymous maps come and go with the interpreter's heap; one a restart would be many more."""


@pytest.mark.slow
def test_supervisor_client_and_the_oldest_worker_stay_as_they_are_over_restarts(
    shm, tmp_path, dice, sized, figures, supervised
):
    first, restarts = sized((3, 8), (20, 200))
    queue = supervised(os.fspath(shm / "queue"), tmp_path, 4, 0.004)
    queue.start_workers()
    queue.crowd.start("client", client, queue.path, queue.board, queue.accepted, 2**31, 12)
    begun = time.monotonic()
    oldest = dice.choice(until(queue.all_at_work, "all work", queue.crowd))
    (living,) = queue.crowd.of("client")
    watched = {"supervisor": queue.supervisor.pid, "client": living.pid, "oldest worker": oldest}
    killed = 0
    then = most_maps = files = None
    while killed < restarts:
        # some at once, others one after the other
        workers = set(until(queue.all_at_work, "all work", queue.crowd)) - {oldest}
        victims = dice.sample(sorted(workers), min(dice.randrange(1, 4), restarts - killed))
        for pid in victims:
            os.kill(pid, signal.SIGKILL)
            killed += 1
            until(lambda pid=pid: not psutil.pid_exists(pid), "it is reaped", queue.crowd)
        if killed < first:
            continue
        until(queue.all_at_work, "all work", queue.crowd)
        now = {name: belongings(pid) for name, pid in watched.items()}
        if then is None:
            then = {name: kept for name, (kept, _) in now.items()}
            most_maps = {name: maps + MORE_MAPS for name, (_, maps) in now.items()}
            files = sorted(os.listdir(queue.path))
        for name, (kept, maps) in now.items():
            assert kept == then[name], f"{name} after {killed} restarts"
            assert maps <= most_maps[name], f"{name} after {killed} restarts"
        assert sorted(os.listdir(queue.path)) == files
    seconds = time.monotonic() - begun
    queue.board[GOES] = 1
    until(lambda: living in [member for member, _ in queue.crowd.ended()], "the client ends", queue.crowd)
    queue.crowd.check()
    assert set(queue.workers()) >= {oldest}
    queue.stop_workers()
    assert queue.supervisor.returncode == 0
    queue.is_whole()
    assert queue.board[jobs.RESOLVED] == len(queue.accepted)
    figures(
        restarts=killed,
        seconds=round(seconds),
        jobs=len(queue.accepted),
        **{
            f"{name}s_descriptors_maps_threads": f"{len(kept['open'])}/{now[name][1]}/{kept['threads']}"
            for name, kept in then.items()
        },
    )


# --- a restart of everything ----------------------------------------------------------------------------------------


@pytest.fixture
def place(shm, tmp_path):
    """Where a queue may be made: on a tmpfs or on a disk."""

    def find(where):
        if where == "memory":
            return os.fspath(shm / "queue")
        kind = subprocess.run(["stat", "-f", "-c", "%T", tmp_path], capture_output=True, text=True, check=True)
        if kind.stdout.strip() in ("tmpfs", "ramfs"):
            pytest.skip(f"temporary files lie on a {kind.stdout.strip()} here; the same test on a tmpfs runs anyway")
        return os.fspath(tmp_path / "queue")

    return find


@pytest.mark.slow
@pytest.mark.parametrize(
    ("where", "submitter"), [("memory", "dies too"), ("disk", "lives"), ("memory", "lives"), ("disk", "dies too")]
)
def test_jobs_that_wait_and_jobs_in_flight_run_after_the_death_of_everybody(
    place, tmp_path, dice, sized, figures, supervised, where, submitter
):
    if (where, submitter) in [("memory", "lives"), ("disk", "dies too")] and not sized(False, True):
        pytest.skip("this one is among those of the full size only")
    path = place(where)
    count, deaths, processes = sized((80, 1, 2), (2000, 5, 4))
    queue = supervised(path, tmp_path, processes, 0.02)
    begun = time.monotonic()
    queue.crowd.start("client", client, path, queue.board, queue.accepted, count, count)
    until(lambda: len(queue.accepted) == count, "all are accepted", queue.crowd)
    waited, in_flight = [], []
    for _ in range(deaths):
        queue.start_workers()
        # at any time of the jobs, the last one with some left to run
        wanted = len(queue.runs) + 2 * dice.randrange(1, count // (deaths + 1))
        until(lambda wanted=wanted: len(queue.runs) >= wanted, "jobs run", queue.crowd)
        doomed = queue.supervised()
        for member in queue.crowd.members:
            if submitter == "lives":
                # it shall see nothing before the test has looked
                queue.crowd.stop(member, 0)
            else:
                doomed.append(member.pid)
        dice.shuffle(doomed)
        for pid in doomed:
            os.kill(pid, signal.SIGKILL)
        queue.supervisor.wait()
        if submitter == "dies too":
            until(lambda: queue.crowd.ended() or not queue.crowd.members, "the submitter is reaped")
        until(lambda doomed=doomed: not any(map(psutil.pid_exists, doomed)), "all are dead")
        states = queue.states()
        waited.append(int(np.isin(states, WAITS).sum()))
        in_flight.append(int(np.sum(states == CellState.TAKEN)))
        assert waited[-1] > 0
        assert in_flight[-1] > 0
        queue.crowd.let_go_on()
        queue.crowd.check()
    queue.start_workers()
    if submitter == "lives":
        until(lambda: queue.board[jobs.RESOLVED] == count, queue.what_is_there, queue.crowd)
        queue.board[GOES] = 1
        (living,) = queue.crowd.members
        until(lambda: living in [member for member, _ in queue.crowd.ended()], "the client ends", queue.crowd)
        queue.crowd.check()
    until(lambda: not queue.states().any(), queue.what_is_there)
    queue.stop_workers()
    queue.is_whole()
    figures(
        jobs=count,
        restarts_of_everything=deaths,
        waiting=waited,
        in_flight=in_flight,
        runs=int(np.sum(queue.runs.entries[:, 1] == jobs.BEGUN)),
        seconds=round(time.monotonic() - begun),
    )

"""Storms over a queue at work: workers, leaders and clients are killed and stopped, and no job is lost or answered twice.

The test itself takes no part in the queue, so that any process may be its leader. One client lives (it is stopped now and
then), the others are killed.
"""

import contextlib
import fcntl
import os
import signal
import time

import numpy as np
import pytest

from subetha.check import check_queue
from subetha.errors import Full
from subetha.jobqueue import JobQueue
from subetha.layout import STATE_SHIFT, TABLE_LINES, CellState, Role, SlotState

from . import jobs
from .capacity import capacity_of, make_mailboxes, make_queue_old, wrapped
from .crowd import PATIENCE_S, Board, Crowd, until

from ..crash.census import QueueCensus, QueueFiles, nothing_left  # isort: skip

WORKERS = 4
CELLS = 256
QUOTA = 240
LIVE_AT_ONCE = 100
DOOMED_AT_ONCE = 30
KILL_EVERY_S = 0.05
LEADERS_TURN_S = 15
FIRST_OF_DOOMED = 1 << 20
CALM_CLIENT_S = 0.2

CANCELLED, DUPLICATES, REDELIVERED, GOES = range(2, 6)


def live(path, board, count, dice):
    """The living client: every job that it has submitted and not cancelled is answered once."""
    expected, answered = {}, {}
    number = 0
    at_once = LIVE_AT_ONCE
    with JobQueue.open(path) as queue:
        queue.recv_many(1)
        queue._sequence = 2**32 - 200
        while number < count or expected:
            while number < count and len(expected) < at_once:
                try:
                    job_id = queue.submit(jobs.job(number), wait=0, **jobs.options_of(number))
                except Full:
                    break
                assert job_id not in answered
                expected[job_id] = number
                if dice.random() < 0.02 and queue.cancel(job_id):
                    answered[job_id] = expected.pop(job_id)
                    board[CANCELLED] += 1
                number += 1
            jobs.take_results(queue, expected, answered, board)
            if at_once == 1 and not expected:
                # now everybody was idle for a moment
                time.sleep(CALM_CLIENT_S)
                at_once = LIVE_AT_ONCE
            elif dice.random() < 0.002:
                at_once = 1
        while board[GOES] == 0:
            jobs.take_results(queue, expected, answered, board)
        assert queue.recv_many(10) == []
        board[DUPLICATES], board[REDELIVERED] = queue.duplicates, queue.redelivered


def live_until_killed(path, first, accepted, board):
    """A client that notes what was accepted, and is killed at some time."""
    expected, answered = {}, {}
    with JobQueue.open(path) as queue:
        number = first
        while True:
            while len(expected) < DOOMED_AT_ONCE:
                # none that may end as a letter
                number += 1 + (number % 5 == 3)
                try:
                    job_id = queue.submit(jobs.job(number), wait=0, **jobs.options_of(number))
                except Full:
                    break
                accepted.note(number, os.getpid())
                expected[job_id] = number
            jobs.take_results(queue, expected, answered, board)


def bury(path, lines):
    """Who started the workers hears first of their deaths."""
    with JobQueue.open(path, role=Role.SUPERVISOR) as queue:
        queue.rescue()
        with open(lines, closefd=False) as told:
            for line in told:
                pid, code = map(int, line.split())
                queue.rescue({pid: code})


class Storm:
    """A queue directory, its crowd, and what the dice do to them."""

    def __init__(self, path, folder, dice, count):
        self.path, self.dice, self.count = path, dice, count
        self.crowd = Crowd(folder)
        self.runs, self.accepted = jobs.Diary(folder / "runs"), jobs.Diary(folder / "accepted")
        self.board, self.board_of_doomed = Board(), Board()
        self.census = QueueCensus(path)
        self.leader = self.census.files.bytes("table")[128:][: TABLE_LINES.itemsize].view(TABLE_LINES)["leader"]
        self.ear, self.mouth = os.pipe()
        fcntl.fcntl(self.mouth, fcntl.F_SETFL, os.O_NONBLOCK)
        self.doomed = 0
        self.spared = None
        self.fenced = set()
        self.leaders_are_left_alone = True
        self.live = self.crowd.start("client", live, path, self.board, count, dice)
        self.populate()

    def populate(self):
        """Put others in the place of those who have died or ended."""
        for member, code in self.crowd.ended():
            # a worker whose job ran out of time ends by itself, for its supervisor to start another one
            assert member.role == "worker", f"{member} ended with {code}"
            self.crowd.counted["workers_ended"] += 1
            self.tell(member.pid, code)
        while len(self.crowd.of("worker")) < WORKERS:
            self.crowd.start("worker", jobs.work, self.path, self.runs)
        if not self.crowd.of("undertaker"):
            self.crowd.start("undertaker", bury, self.path, self.ear)
        while len(self.crowd.of("doomed client")) < 2:
            first = FIRST_OF_DOOMED * (1 + self.doomed)
            self.doomed += 1
            self.crowd.start("doomed client", live_until_killed, self.path, first, self.accepted, self.board_of_doomed)

    def tell(self, pid, code):
        with contextlib.suppress(BlockingIOError):
            os.write(self.mouth, b"%d %d\n" % (pid, code))

    def slots_of(self, pid):
        records = self.census.records
        return np.flatnonzero((records["pid"] == pid) & (records["status"] & np.uint64(0xFF) == SlotState.USED))

    def has_job(self, member):
        words = self.census.words
        owners = words[(words >> STATE_SHIFT) & 0xF == CellState.TAKEN] & 0xFFFF
        return bool(np.isin(self.slots_of(member.pid) + 1, owners).any())

    def leading(self):
        """The member that leads, or None."""
        slot = (int(self.leader[0]) & 0xFFFF) - 1
        pid = int(self.census.records["pid"][slot]) if slot >= 0 else 0
        return next((member for member in self.crowd.members if member.pid == pid), None)

    def kill(self, member):
        if member.role == "worker":
            self.crowd.counted["in_a_job" if self.has_job(member) else "idle"] += 1
            self.crowd.counted["while_stopped"] += member.goes_on is not None
        self.crowd.counted["leaders_killed"] += member is self.leading()
        code = self.crowd.kill(member)
        if member.role == "worker" and self.dice.random() < 0.5:
            self.tell(member.pid, code)

    def stop(self, member, seconds):
        self.crowd.counted["leaders_stopped"] += member is self.leading()
        self.crowd.stop(member, seconds)

    def strike(self):
        """A worker dies, and sometimes others too."""
        leader = self.leading()
        left_alone = (self.spared, leader if self.leaders_are_left_alone else None)
        self.kill(self.dice.choice([worker for worker in self.crowd.of("worker") if worker not in left_alone]))
        other = self.dice.choice(self.crowd.of("doomed client", "undertaker"))
        if self.dice.random() < 0.06 and other not in left_alone:
            self.kill(other)
        if self.dice.random() < 0.05 and leader not in (None, self.live, *left_alone) and leader in self.crowd.members:
            self.kill(leader)
        self.populate()

    def halt(self):
        """Somebody stops for a while: a worker, the leader, or anybody."""
        running = [member for member in self.crowd.members if member.goes_on is None]
        leader = self.leading()
        if self.leaders_are_left_alone and leader in running:
            running.remove(leader)
        workers = [member for member in running if member.role == "worker"]
        if len(self.crowd.members) - len(running) > 3:
            return
        chosen = self.dice.random()
        if chosen < 0.3 and leader in running:
            self.stop(leader, self.dice.choice([0.3, 1.5, 3.5, 7.5]))
        elif chosen < 0.8 and len(workers) > 2:
            self.stop(self.dice.choice(workers), self.dice.choice([0.02, 0.3, 2.0, 7.5]))
        elif running:
            self.stop(self.dice.choice(running), self.dice.choice([0.1, 0.6]))

    def spare(self):
        """One worker is stopped with a job in hand, and not killed before that job was moved on."""
        for worker in self.crowd.of("worker"):
            if worker.goes_on is not None:
                continue
            os.kill(worker.pid, signal.SIGSTOP)
            if self.has_job(worker):
                self.spared = worker
                self.stop(worker, float("inf"))
                return
            os.kill(worker.pid, signal.SIGCONT)

    def see_what_was_moved_on(self):
        words = self.census.words
        fenced = set(words[(words >> STATE_SHIFT) & 0xF == CellState.FENCED].tolist())
        self.crowd.counted["jobs_moved_on"] += len(fenced - self.fenced)
        self.fenced = fenced
        if self.spared is None or self.spared.goes_on is None:
            self.spare()
        elif np.isin(self.slots_of(self.spared.pid) + 1, [word & 0xFFFF for word in fenced]).any():
            self.spared.goes_on = time.monotonic()

    def rage(self, is_long=True):
        """Until every job of the living client is resolved, and in a long one that of a stopped worker was moved on."""
        begun = looked = now = time.monotonic()
        next_strike, next_halt = now, now + 1
        seen = idle = 0
        while self.board[jobs.RESOLVED] + self.board[CANCELLED] < self.count or (
            is_long and not self.crowd.counted["jobs_moved_on"]
        ):
            now = time.monotonic()
            # a new leader grants everybody a fresh window: where each one dies at once nothing is ever moved on
            self.leaders_are_left_alone = (now - begun) // LEADERS_TURN_S % 2 == 0
            self.crowd.check()
            self.crowd.let_go_on(now)
            if is_long:
                self.see_what_was_moved_on()
            if self.board[jobs.RESOLVED] > seen:
                seen, idle = self.board[jobs.RESOLVED], 0
            elif self.live.goes_on is None:
                # the time for which the client itself is stopped does not count
                idle += now - looked
            looked = now
            if idle > PATIENCE_S:
                pytest.fail(f"nothing was resolved for {PATIENCE_S} s: {self.state()}")
            if now >= next_strike:
                next_strike = now + KILL_EVERY_S
                self.strike()
            if now >= next_halt:
                next_halt = now + self.dice.uniform(0.1, 0.6)
                self.halt()
            time.sleep(0.005)
        self.seconds = time.monotonic() - begun
        self.mailbox = f"mail/{self.slots_of(self.live.pid)[0] + 1}"

    def state(self):
        with JobQueue.open(self.path, readonly=True) as queue:
            return f"{self.board[jobs.RESOLVED]} resolved, {self.board[CANCELLED]} cancelled, {queue.stats()}"

    def calm_down(self):
        """No more kills but of the doomed clients: what they had submitted runs, and everything comes free."""
        self.crowd.let_go_on()
        for member in self.crowd.of("doomed client"):
            self.crowd.kill(member)

        def is_free():
            words = self.census.words
            states = set(((words >> STATE_SHIFT) & 0xF).tolist())
            return states <= {CellState.FREE, CellState.DEAD}

        until(is_free, self.state, self.crowd)
        self.board[GOES] = 1
        until(lambda: self.live in [member for member, _ in self.crowd.ended()], "the living client ends", self.crowd)
        self.crowd.check()

    def end(self):
        self.crowd.end()
        for fd in (self.ear, self.mouth):
            os.close(fd)


@contextlib.contextmanager
def storm_over(path, folder, dice, count):
    storm = Storm(path, folder, dice, count)
    try:
        yield storm
    finally:
        storm.end()


def weather(path, folder, dice, count, *, is_long=True, prepare=lambda path: None):
    """A storm over a fresh queue, and everything that must hold after it. Gives the storm, for its figures."""
    with JobQueue.create(path, CELLS, quota=QUOTA, arena_bytes=2**25, participants=16, job_bytes=192, result_bytes=192):
        pass
    before = capacity_of(path)
    prepare(path)
    with storm_over(path, folder, dice, count) as storm:
        storm.rage(is_long)
        storm.calm_down()
        board = storm.board
        assert board[jobs.RESOLVED] + board[CANCELLED] == count
        for member in storm.crowd.of("worker", "undertaker"):
            storm.crowd.kill(member)
    lost = jobs.never_ended(storm.accepted, storm.runs)
    assert not lost, f"{len(lost)} accepted jobs of killed clients never ran to their end: {lost[:10]}"
    with JobQueue.open(path) as queue:
        queue.rescue()
        letters = queue.dead_letters()
        assert len(letters) == board[jobs.DIED]
        for letter in letters:
            assert letter.attempts == jobs.FEW_ATTEMPTS
            assert queue.drop_dead(letter.job_id)
        nothing_left(QueueCensus(path).faults({queue.slot}))
    report = check_queue(path)
    assert report.exit_code == 0, report
    assert capacity_of(path) == before
    return storm


def tell_figures(figures, storm):
    board = storm.board
    figures(
        jobs=storm.count,
        seconds=round(storm.seconds),
        runs=int(np.sum(storm.runs.entries[:, 1] == jobs.BEGUN)),
        cancelled=board[CANCELLED],
        worker_died=board[jobs.DIED],
        redelivered=board[REDELIVERED],
        doubles_dropped=board[DUPLICATES],
        jobs_of_killed_clients=len(storm.accepted),
        **dict(sorted(storm.crowd.counted.items())),
    )


@pytest.mark.slow
def test_every_job_of_the_living_client_is_resolved_once(shm, tmp_path, dice, sized, figures):
    storm = weather(os.fspath(shm / "queue"), tmp_path, dice, sized(400, 20_000))
    tell_figures(figures, storm)
    counted = storm.crowd.counted
    assert counted["in_a_job"] > 0
    assert counted["doomed clients_killed"] > 0
    assert counted["jobs_moved_on"] > 0


WRAPS = {
    # version and incarnation that are about to be reached
    "in words": (2**44, 2**16),
    "in blocks": (2**40, 2**44),
    "in charges": (2**31, 2**32),
    "in places": (2**28, 2**20),
}


@pytest.mark.parametrize("wrap", WRAPS)
def test_a_storm_goes_over_the_wraps_of_versions_laps_and_incarnations(shm, tmp_path, dice, sized, figures, wrap):
    version, incarnation = WRAPS[wrap]
    if wrap != "in words" and not sized(False, True):
        pytest.skip("this one is among those of the full size only")

    def prepare(path):
        make_mailboxes(path)
        make_queue_old(QueueFiles(path), version, incarnation, dice, sized(2, 20))

    storm = weather(
        os.fspath(shm / "queue"), tmp_path, dice, sized(600, 4000), is_long=sized(False, True), prepare=prepare
    )
    cells, rings = wrapped(QueueFiles(storm.path), version)
    tell_figures(figures, storm)
    assert np.mean(cells) > 0.5
    assert [name for name in rings if not rings[name] and (name == storm.mailbox or "/" not in name)] == []

"""Periodic tasks: their next job waits in the queue, once, whoever comes and goes."""

import contextlib
import logging
import os
import time
from datetime import UTC, datetime, timedelta, timezone
from pathlib import Path

import pytest

from subetha import Executor, JobQueue, Pass, task
from subetha._core import SubmitOptions
from subetha.errors import Full
from subetha.pass_registry import PassRegistry, closure_id_of
from subetha.periodic import Keeper, Periodic, Schedule, periodic_tasks
from subetha.routing import Promise, periodic_key

HERE = Path(__file__).parent
WAIT_S = 60
ID = closure_id_of("periodic")
MINUTE = 60.0


class Clock:
    """A wall clock some hours ahead of the real one, in the middle of a minute, so that nothing becomes due."""

    def __init__(self):
        self.now = (time.time() // MINUTE + 300.5) * MINUTE

    def __call__(self):
        return self.now


@pytest.fixture
def path(shm):
    JobQueue.create(shm / "queue", 64, arena_bytes=2**20, participants=32).close()
    return shm / "queue"


@pytest.fixture
def queue(path):
    with JobQueue.open(path) as found:
        yield found


@pytest.fixture
def every_minute(monkeypatch):
    set_schedule(monkeypatch, "* * * * *")
    registry = PassRegistry()
    registry.register_named("periodic", bytes)
    return registry


def set_schedule(monkeypatch, expression, options=None):
    monkeypatch.setitem(
        periodic_tasks, ID, Periodic(Schedule.of(expression, UTC), b"data", SubmitOptions(**(options or {})))
    )


@pytest.fixture
def keepers(path, every_minute):
    made = []

    def make(clock):
        made.append(Keeper(path, every_minute, clock=clock))
        return made[-1]

    yield make
    for keeper in made:
        keeper.stop()


def dues(queue):
    """When the jobs that wait are due, in minutes since 1970."""
    cells = queue.cells()
    return sorted(int(due) / 1e9 / MINUTE for due in cells["due_ns"][cells["word"] >> 16 & 0xF > 0] if due)


def minutes(clock):
    return clock.now / MINUTE


class TestKeeper:
    def test_the_next_job_is_there_once_however_many_look(self, keepers, queue):
        clock = Clock()
        for keeper in (keepers(clock), keepers(clock), keepers(clock)):
            for _ in range(3):
                assert 0 < keeper.look() <= 5
        assert dues(queue) == [minutes(clock) + 0.5]

    def test_when_its_time_has_come_the_one_after_it_follows(self, keepers, queue):
        clock = Clock()
        one, other = keepers(clock), keepers(clock)
        one.look()
        clock.now += MINUTE
        other.look()
        one.look()
        assert dues(queue) == [minutes(clock) - 0.5, minutes(clock) + 0.5]

    def test_of_times_that_passed_while_nobody_looked_one_job_is_left(self, keepers, queue):
        clock = Clock()
        keepers(clock).look()
        first = minutes(clock) + 0.5
        clock.now += 100 * MINUTE
        keepers(clock).look()
        assert dues(queue) == [first, minutes(clock) + 0.5]

    def test_another_expression_takes_the_place_of_one_that_is_due_later(self, keepers, queue, monkeypatch):
        clock = Clock()
        set_schedule(monkeypatch, "0 0 29 2 *")
        keepers(clock).look()
        set_schedule(monkeypatch, "* * * * *")
        keepers(clock).look()
        assert dues(queue) == [minutes(clock) + 0.5]

    def test_a_job_that_is_there_is_found_where_nothing_was_said_of_it(self, keepers, queue):
        clock = Clock()
        keepers(clock).look()
        map_ = queue.registrations().map
        # as a boot of the machine does
        del map_[periodic_key(ID)]
        keepers(clock).look()
        assert dues(queue) == [minutes(clock) + 0.5]
        assert Promise.read(map_[periodic_key(ID)]).is_there

    def test_what_was_promised_by_one_that_died_is_handed_in_by_the_next(self, keepers, queue):
        clock = Clock()
        with JobQueue.open(queue.path) as dying:
            promise = Promise(False, dying._new_job_id(), int((minutes(clock) + 0.5) * MINUTE * 1e9), *dying.identity)
            queue.registrations().map[periodic_key(ID)] = promise.to_bytes()
        keepers(clock).look()
        assert dues(queue) == [minutes(clock) + 0.5]

    def test_the_options_of_the_task_go_with_its_jobs(self, keepers, queue, monkeypatch):
        set_schedule(monkeypatch, "* * * * *", {"priority": 2, "timeout": 5.0})
        keepers(Clock()).look()
        cells = queue.cells()
        (cell,) = cells[cells["due_ns"] > 0]
        assert (cell["priority"], cell["timeout_ms"], cell["closure_id"]) == (2, 5000, ID)

    def test_tasks_of_other_queues_are_left_to_those_who_serve_them(self, keepers, queue, every_minute):
        every_minute.serve(["mail"])
        keepers(Clock()).look()
        assert dues(queue) == []

    def test_results_are_taken_and_failures_logged(self, keepers, queue, caplog):
        from subetha._core import encode_result
        from subetha.errors import ExecutionError

        keeper = keepers(Clock())
        keeper._queue.submit(Pass(1))
        queue.claim(WAIT_S).reply(encode_result(0, ExecutionError("it is broken")))
        with caplog.at_level(logging.ERROR):
            keeper.look()
        assert "it is broken" in caplog.text
        assert queue.stats().done == 0

    def test_where_the_queue_is_full_the_next_look_hands_it_in(self, keepers, queue):
        clock = Clock()
        keeper = keepers(clock)
        with contextlib.ExitStack() as clients, contextlib.suppress(Full):
            while True:
                client = clients.enter_context(JobQueue.open(queue.path))
                for _ in range(client.quota):
                    client.submit(Pass(9), wait=0)
        with pytest.raises(Full):
            keeper.look()
        assert dues(queue) == []
        queue.claim(WAIT_S).ack()
        keeper.look()
        assert dues(queue) == [minutes(clock) + 0.5]


class TestSchedule:
    def test_times_are_those_of_the_zones_clock(self):
        summer = datetime(2026, 7, 1, 12, 0, tzinfo=UTC).timestamp()
        assert Schedule.of("0 9 * * *", "Europe/Berlin").next_after(summer) == summer + 19 * 3600
        east = timezone(timedelta(hours=5))
        assert Schedule.of("0 9 * * *", east).next_after(summer) == summer + 16 * 3600

    def test_a_time_that_the_clock_leaves_out_is_not_lost(self):
        before = datetime(2026, 3, 29, 0, 50, tzinfo=UTC).timestamp()
        found = Schedule.of("30 2 * * *", "Europe/Berlin").next_after(before)
        assert before < found < before + 3600

    @pytest.mark.parametrize(
        ("cron", "zone", "error", "text"),
        [
            ("* * * *", "UTC", ValueError, "cron: expected five fields"),
            ("61 * * * *", "UTC", ValueError, "Bad minute"),
            ("0 0 31 2 *", "UTC", ValueError, "31 2"),
            (5, "UTC", TypeError, "cron: expected a str"),
            ("* * * * *", "Mars/Olympus", ValueError, "timezone: expected a name"),
            ("* * * * *", 5, TypeError, "timezone: expected a str"),
        ],
    )
    def test_what_is_no_schedule_is_refused(self, cron, zone, error, text):
        with pytest.raises(error, match=text):
            task(cron=cron, timezone=zone)

    def test_a_task_of_the_same_name_that_is_not_periodic_ends_it(self):
        made = task(name="often", cron="* * * * *")(os.getpid)
        assert made.home_id in periodic_tasks
        task(name="often")(os.getpid)
        assert made.home_id not in periodic_tasks


def test_workers_hand_the_next_job_in_and_run_it_when_its_time_has_come(shm, monkeypatch, tmp_path):
    (tmp_path / "beats.py").write_text(
        "import subetha\n"
        "@subetha.task(cron='* * * * *', queue_name='beats', max_attempts=7)\n"
        "def beat():\n"
        f"    open({os.fspath(tmp_path / 'ran')!r}, 'w').close()\n"
    )
    monkeypatch.syspath_prepend(tmp_path)
    directory = shm / "queue"
    number = closure_id_of("beats.beat", "beats")
    with Executor(2, queue=directory, modules=["beats"]), JobQueue.open(directory) as queue:

        def parked():
            cells = queue.cells()
            return cells[(cells["closure_id"] == number) & (cells["due_ns"] > 0)]

        deadline = time.monotonic() + WAIT_S
        while not len(parked()):
            assert time.monotonic() < deadline
            time.sleep(0.01)
        (cell,) = parked()
        assert cell["max_attempts"] == 7
        assert 0 < int(cell["due_ns"]) / 1e9 - time.time() + 1 <= MINUTE + 1
        # the time comes for whoever claims next: a minute is too long for a test
        job_id = int(cell["job_id"])
        queue._clock_shift_ns += int(MINUTE * 1e9)
        claim = queue.try_claim()
        assert claim.job_id == job_id
        claim.park(time.time())
        while not (tmp_path / "ran").exists():
            assert time.monotonic() < deadline
            time.sleep(0.01)

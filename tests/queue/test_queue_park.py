"""Parked jobs: due times, jobs put back for later, and jobs that whoever claimed them does not know."""

import os
import shutil
import signal
import threading
import time
from datetime import UTC, datetime, timedelta

import numpy as np
import pytest

from subetha import reboot
from subetha._core import decode_submit, encode_result
from subetha.check import check_queue
from subetha.errors import Empty, LayoutMismatch, MapFull, UnknownClosureId
from subetha.jobqueue import JobQueue
from subetha.layout import LINES_OFFSET, LOOKING, POOL_LINES, UNKNOWN_BIT, CellState, cell_word, map_capacity
from subetha.pass_registry import Pass, PassRegistry
from subetha.scheduler import WorkerLoop

from .participants import WAIT_S, eventually, just_after_a_look, participant

__all__ = ["participant"]  # a fixture

LATER = 1000.0
"""Seconds that no test waits for; clocks are set forward instead."""
LONG = 20_000


def soon():
    return time.time() + LATER


def forward(*queues, seconds=LATER + 1):
    for queue in queues:
        queue._clock_shift_ns += int(seconds * 1e9)


def args_of(claim):
    return bytes(decode_submit(claim.payload)[1].args)


def all_args(queue):
    found = []
    while True:
        try:
            claim = queue.try_claim()
        except Empty:
            return found
        found.append(args_of(claim))
        claim.ack()


def due_word(path):
    pool = np.memmap(os.path.join(path, "pool"), np.uint8, "r+")
    return pool[LINES_OFFSET : LINES_OFFSET + POOL_LINES.itemsize].view(POOL_LINES)["due"]


def refuses(queue):
    with pytest.raises(Empty):
        queue.try_claim()
    return True


# --- due times --------------------------------------------------------------------------------------------------------


def test_a_job_does_not_run_before_it_is_due(make):
    queue = make()
    job_id = queue.submit(Pass(1, b"later"), due=soon())
    assert refuses(queue)
    stats = queue.stats()
    assert (stats.parked, stats.waiting, stats.other, stats.free) == (1, 0, 0, 15)
    forward(queue, seconds=LATER - 1)
    assert refuses(queue)
    forward(queue, seconds=2)
    claim = queue.try_claim()
    assert (claim.job_id, args_of(claim), claim.attempts) == (job_id, b"later", 0)
    claim.reply(encode_result(0, b"done"))
    assert queue.recv(WAIT_S).result == b"done"
    assert queue.stats().states == {"FREE": 16}


@pytest.mark.parametrize("due", [0, -5.0, 1.5, datetime(2020, 1, 1, tzinfo=UTC)])
def test_a_time_that_has_passed_is_at_once(make, due):
    queue = make()
    queue.submit(Pass(1, b"now"), due=due)
    assert queue.stats().waiting == 1
    assert all_args(queue) == [b"now"]


def test_an_aware_datetime_is_the_same_moment_in_any_zone(make):
    queue = make()
    moment = datetime.now(UTC) + timedelta(seconds=LATER)
    queue.submit(Pass(1, b""), due=moment)
    queue.submit(Pass(1, b""), due=moment.astimezone())
    dues = queue.cells()["due_ns"]
    assert dues[dues > 0].tolist() == [int(moment.timestamp() * 1e9)] * 2


@pytest.mark.parametrize(
    ("due", "error", "text"),
    [
        (True, TypeError, "bool"),
        ("tomorrow", TypeError, "str"),
        (datetime(2030, 1, 1), ValueError, "astimezone"),
        (float("nan"), ValueError, "nan"),
        (float("inf"), ValueError, "inf"),
        (1e10, ValueError, "1"),
        (10**400, ValueError, "1"),
    ],
)
def test_what_is_no_time_is_refused_and_nothing_changes(make, due, error, text):
    queue = make()
    with pytest.raises(error, match=text):
        queue.submit(Pass(1, b""), due=due)
    queue.submit(Pass(1, b"kept"))
    claim = queue.try_claim()
    with pytest.raises(error, match=text):
        claim.park(due)
    claim.ack()
    assert queue.stats().states == {"FREE": 16}


def test_those_that_are_due_first_run_first(make):
    queue = make(64)
    times = [5, 3, 9, 1, 7, 2, 8, 0, 6, 4]
    start = soon()
    for n in times:
        queue.submit(Pass(1, b"%d" % n), due=start + n)
    forward(queue, seconds=LATER + 4.5)
    assert all_args(queue) == [b"%d" % n for n in range(5)]
    forward(queue, seconds=10)
    assert all_args(queue) == [b"%d" % n for n in range(5, 10)]


def test_priority_counts_before_everything_else(make):
    queue = make(64)
    due = soon()
    for priority in (2, 0, 1):
        queue.submit(Pass(1, b"due %d" % priority), priority=priority, due=due)
        queue.submit(Pass(1, b"waits %d" % priority), priority=priority)
    forward(queue)
    found = all_args(queue)
    assert [int(name[-1:]) for name in found] == [0, 0, 1, 1, 2, 2]


def test_neither_the_due_nor_the_waiting_ones_of_a_priority_starve(make):
    queue = make(64, quota=50)
    due = soon()
    for n in range(20):
        queue.submit(Pass(1, b"due"), due=due + n / 100)
        queue.submit(Pass(1, b"waits"))
    forward(queue)
    found = all_args(queue)
    for kind in (b"due", b"waits"):
        assert found[:20].count(kind) == 10


def test_a_job_put_back_for_later_waits_and_its_attempt_is_taken_back(make):
    queue = make()
    job_id = queue.submit(Pass(1, b"x" * LONG))
    for round_ in range(5):
        claim = queue.try_claim()
        assert (claim.job_id, claim.attempts, args_of(claim)) == (job_id, 0, b"x" * LONG), round_
        claim.started()
        claim.park(time.time() + queue._clock_shift_ns / 1e9 + LATER)
        with pytest.raises(ValueError, match="over"):
            claim.ack()
        assert refuses(queue)
        forward(queue)
    queue.try_claim().ack()
    assert queue.stats().states == {"FREE": 16}
    assert queue.repair() == 0


def test_a_charged_attempt_stays_counted_and_the_next_start_counts_again(make):
    queue = make()
    queue.submit(Pass(1, b""))
    for attempts in range(4):
        claim = queue.try_claim()
        assert claim.attempts == attempts
        claim.started()
        claim.started()
        assert claim.attempts == attempts + 1
        claim.park(0, charged=True)
    claim = queue.try_claim()
    claim.park(0, charged=True)
    assert queue.try_claim().attempts == 4, "it was not started"


@pytest.mark.parametrize("length", [10, LONG])
def test_a_parked_job_can_be_cancelled(make, length):
    queue = make()
    first = queue.submit(Pass(1, bytes(length)), due=soon())
    second = queue.submit(Pass(1, bytes(length)))
    queue.try_claim().park(soon())
    assert queue.cancel(first)
    assert queue.cancel(second)
    assert not queue.cancel(second)
    forward(queue)
    assert refuses(queue)
    assert queue.stats().states == {"FREE": 16}


def test_a_parked_job_counts_for_its_clients_quota(make):
    queue = make(quota=3)
    for _ in range(3):
        queue.submit(Pass(1, b""), due=soon())
    with pytest.raises(Exception, match="quota"):
        queue.submit(Pass(1, b""), wait=0)


def test_thousands_come_in_order(make):
    queue = make(4096, quota=4000)
    start = soon()
    for n in range(3000):
        queue.submit(Pass(1, b"%d" % n), priority=n % 3, due=start + (n * 7 % 3000) / 10)
    forward(queue, seconds=LATER + 301)
    expected = [b"%d" % n for level in range(3) for n in sorted(range(level, 3000, 3), key=lambda n: n * 7 % 3000)]
    assert all_args(queue) == expected


def test_looks_are_bounded_where_something_else_is_to_be_done(make, files_of):
    """A job that is always due to be looked at (its word is damaged again and again) does not stop the traffic."""
    queue = make(4096)
    word = due_word(queue.path)
    for _ in range(200):
        queue.submit(Pass(1, b"waits"))
        word[0] = LOOKING + 2
        claim = queue.try_claim()
        assert args_of(claim) == b"waits"
        claim.ack()


# --- waiting ----------------------------------------------------------------------------------------------------------


def test_who_waits_for_a_job_wakes_when_one_is_due(make):
    """Not at the end of the half second that it would sleep otherwise: at least one of some times, on any machine."""
    queue = make()
    worker = make.open()
    late = []
    for _ in range(6):
        taken = []
        thread = threading.Thread(target=lambda taken=taken: taken.append((worker.claim(WAIT_S), time.time())))
        thread.start()
        time.sleep(0.01)
        due = time.time() + 0.1
        queue.submit(Pass(1, b""), due=due)
        thread.join()
        claim, when = taken[0]
        claim.ack()
        assert when >= due - 0.001
        late.append(when - due)
    assert min(late) < 0.15, late


def test_who_sleeps_hears_of_a_job_that_is_parked_since_another_does_not_know_it(make):
    queue, knows, other = make(), make.open(), make.open()
    knows.runs({7})
    other.runs({8})
    late = []
    for _ in range(6):
        taken = []
        thread = threading.Thread(target=lambda taken=taken: taken.append((knows.claim(WAIT_S), time.time())))
        thread.start()
        time.sleep(0.01)
        begun = time.time()
        queue.submit(Pass(7, b""))
        with pytest.raises(Empty):
            other.try_claim()
        thread.join()
        claim, when = taken[0]
        claim.ack()
        late.append(when - begun)
    assert min(late) < 0.3, late


# --- deaths -----------------------------------------------------------------------------------------------------------


def test_a_parked_job_survives_whoever_parked_it(make, participant):
    queue = make()
    job_id = queue.submit(Pass(1, bytes(LONG)))
    worker = participant()
    worker.do("held.append(queue.claim(60))", "held[0].started()", "held[0].park(time.time() + 1000)")
    worker.kill()
    eventually(lambda: queue.rescue() or queue.stats().participants == 1, "the dead one is rescued")
    assert queue.stats().parked == 1
    forward(queue)
    claim = queue.try_claim()
    assert (claim.job_id, len(args_of(claim)), claim.attempts) == (job_id, LONG, 0)
    claim.reply(encode_result(0, b"done"))
    assert queue.recv(WAIT_S).token == job_id


def test_a_job_for_later_survives_everybody(make, participant):
    queue = make()
    path = queue.path
    client = participant()
    client.do("queue.submit(Pass(1, b'later'), due=time.time() + 1000)")
    queue.close()
    client.kill()
    queue = make.open()
    queue.rescue()
    assert queue.stats().parked == 1
    forward(queue)
    assert args_of(queue.claim(WAIT_S)) == b"later"
    assert os.path.exists(path)


@pytest.mark.parametrize("left", [0, LOOKING])
def test_a_rescue_puts_right_what_one_that_looked_or_parked_has_left(make, participant, left):
    queue = make()
    due = soon()
    queue.submit(Pass(1, b""), due=due)
    worker = participant()
    worker.do("queue.slot")
    just_after_a_look(queue)
    word = due_word(queue.path)
    word[0] = left
    worker.kill()
    assert queue.rescue() == 1
    assert abs(int(word[0]) - int(due * 1e9)) <= 1


def test_the_timer_puts_the_word_right_from_the_cells(make):
    queue = make()
    due = soon()
    queue.submit(Pass(1, b""), due=due)
    word = due_word(queue.path)
    for damaged in (0, LOOKING, 2**64 - 1, 2**63):
        word[0] = damaged
        # one of the looks is a second after the last one
        eventually(lambda: abs(int(word[0] & ~np.uint64(1)) - int(due * 1e9)) <= 1, f"{damaged} was put right")


def test_a_look_that_nobody_ends_is_done_by_another(make):
    queue = make()
    queue.submit(Pass(1, b"kept"), due=soon())
    word = due_word(queue.path)
    forward(queue)
    word[0] = LOOKING
    claim = queue.claim(WAIT_S)
    assert args_of(claim) == b"kept"
    claim.ack()
    assert refuses(queue)
    assert word[0] == 0


def test_repair_and_check_know_what_is_parked(make, files_of):
    queue = make()
    queue.submit(Pass(1, bytes(LONG)), due=soon())
    queue.submit(Pass(1, b""), due=soon())
    assert check_queue(queue.path, pause=0).faults == []
    path = queue.path
    queue.close()
    cells = files_of(path).cells
    parked = np.flatnonzero(cells["word"] >> np.uint64(16) & np.uint64(0xF) == CellState.PARKED)
    cells["word"][parked[0]] |= np.uint64(3)
    due_word(path)[0] = 0
    report = check_queue(path, pause=0)
    assert sorted(fault.kind for fault in report.faults) == ["owner", "parked", "parked"]
    report = check_queue(path, repair=True, pause=0)
    assert (report.exit_code, len(report.repaired)) == (1, 3)
    queue = make.open()
    forward(queue)
    assert sorted(map(len, all_args(queue))) == [0, LONG]


@pytest.mark.parametrize("seed", range(3))
def test_damaged_dues_and_priorities_neither_crash_nor_hang_and_lose_nothing(make, files_of, seed):
    queue = make(64)
    dice = np.random.default_rng(seed)
    cells, word = files_of(queue.path).cells, due_word(queue.path)
    sent = {b"%d" % n for n in range(30)}
    for args in sent:
        queue.submit(Pass(1, args), due=soon())
    found = []
    for _ in range(300):
        cell = int(dice.integers(64))
        cells["due_ns"][cell] = dice.choice(np.array([0, 1, 2, 3, 2**63, 2**64 - 1, 2**62], np.uint64))
        cells["priority"][cell] = dice.integers(256)
        cells["unknown_ns"][cell] = dice.choice(np.array([0, 1, 2**63, 2**64 - 1], np.uint64))
        word[0] = dice.choice(np.array([0, 1, 2, 3, 4, 2**63, 2**64 - 1, 2**64 - 2], np.uint64))
        try:
            claim = queue.try_claim()
        except Empty:
            continue
        found.append(args_of(claim))
        claim.ack()
    cells["due_ns"] = 1
    queue.repair()
    found += all_args(queue)
    assert sorted(found) == sorted(sent)


# --- the power --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("durability", ["process", "disk"])
def test_parked_jobs_are_there_after_a_boot(tmp_path, durability):
    path = os.fspath(tmp_path / "queue")
    try:
        queue = JobQueue.create(path, 16, arena_bytes=2**20, participants=8, durability=durability)
    except OSError as error:
        pytest.skip(str(error))
    due = soon()
    queue.submit(Pass(1, b"first" * 2000), due=due)
    queue.submit(Pass(1, b"second"))
    queue.try_claim().park(due + 5)
    queue.runs({8})
    queue.submit(Pass(7, b"strange"))
    assert refuses(queue)
    copy = path + "-then"
    shutil.copytree(path, copy)
    queue.close()
    pool = np.memmap(os.path.join(copy, "pool"), np.uint8, "r+")
    pool[LINES_OFFSET : LINES_OFFSET + POOL_LINES.itemsize].view(POOL_LINES)["boot"] = 1
    due_word(copy)[0] = 0
    with JobQueue.open(copy) as queue:
        assert queue.stats().states == {"FREE": 13, "PARKED": 3}
        assert abs(int(due_word(copy)[0] & ~np.uint64(1)) - int(due * 1e9)) <= 1
        assert int(due_word(copy)[0]) & UNKNOWN_BIT
        assert set(queue.cells()["unknown_ns"].tolist()) == {0}
        assert check_queue(copy, pause=0).faults == []
        assert queue._live_closure_ids() == set()
        assert all_args(queue) == [b"strange"]
        forward(queue)
        assert all_args(queue) == [b"first" * 2000]
        forward(queue, seconds=10)
        assert all_args(queue) == [b"second"]
    assert reboot.PARTS


# --- who knows what ---------------------------------------------------------------------------------------------------


def test_a_job_goes_to_a_handle_that_runs_it(make):
    queue, seven, eight = make(64), make.open(), make.open()
    seven.runs([7])
    eight.runs({8})
    ids = {queue.submit(Pass(n, b"%d" % n * (1 if n == 7 else LONG)), priority=n % 2): n for n in (7, 8)}
    for handle, wanted in ((eight, 8), (seven, 7)):
        claim = handle.claim(WAIT_S)
        assert (ids[claim.job_id], decode_submit(claim.payload)[1].closure_id) == (wanted, wanted)
        claim.started()
        claim.reply(encode_result(0, b"%d" % wanted))
    assert sorted(result.result for result in queue.recv_many(3)) == [b"7", b"8"]
    assert (queue.redelivered, queue.stats().states) == (0, {"FREE": 64})


def test_a_job_that_others_did_not_know_is_not_charged_and_goes_by_priority(make):
    queue, other, knows = make(), make.open(), make.open()
    other.runs({8})
    for n, priority in enumerate((2, 1, 0)):
        queue.submit(Pass(7, b"%d" % n), priority=priority)
    assert refuses(other)
    assert queue.stats().parked == 3
    queue.submit(Pass(7, b"waits"), priority=1)
    knows.runs({7})
    claims = [knows.try_claim() for _ in range(4)]
    assert [claim.attempts for claim in claims] == [0] * 4
    found = [args_of(claim) for claim in claims]
    assert (found[0], set(found[1:3]), found[3]) == (b"2", {b"1", b"waits"}, b"0")


def test_who_has_nothing_else_to_do_takes_all_that_others_did_not_know_one_after_the_other(make):
    jobs = 1000
    queue, other, knows = make(2**16), make.open(), make.open()
    other.runs({8})
    for n in range(jobs):
        queue.submit(Pass(7, b"%d" % n))
    assert refuses(other)
    knows.runs({7})
    assert all_args(knows) == [b"%d" % n for n in range(jobs)]


def test_a_look_at_many_cells_may_take_longer_before_another_one_does_it(make):
    """In 65,536 cells 150 ms. At least one of some times, on any machine."""
    queue = make(2**16)
    queue.submit(Pass(1, b"kept"), due=soon())
    word = due_word(queue.path)
    steps = []
    for _ in range(10):
        just_after_a_look(queue)
        began = time.monotonic()
        word[0] = LOOKING
        refuses(queue)
        time.sleep(0.04)
        refuses(queue)
        steps.append((time.monotonic() - began < 0.1, int(word[0]) == LOOKING))
    assert (True, True) in steps, steps


def test_a_handle_that_says_nothing_runs_everything_also_what_others_have_parked(make):
    queue, other = make(), make.open()
    other.runs({8})
    queue.submit(Pass(7, b"seven"))
    assert refuses(other)
    assert all_args(queue) == [b"seven"]
    queue.submit(Pass(7, b"again"))
    assert refuses(other)
    other.runs(None)
    assert all_args(other) == [b"again"]


def test_what_no_live_handle_runs_is_answered_after_a_while_and_not_before(make):
    queue, worker = make(), make.open(unknown_after=10.0)
    worker.runs({8})
    job_id = queue.submit(Pass(7, b"x"))
    assert refuses(worker)
    forward(worker, seconds=9)
    assert refuses(worker)
    assert (worker.unknown_answered, queue.stats().parked) == (0, 1)
    forward(worker, seconds=2)
    eventually(lambda: refuses(worker) and worker.unknown_answered, "it was answered")
    answer = queue.recv(WAIT_S)
    assert (answer.token, type(answer.result)) == (job_id, UnknownClosureId)
    assert "7" in str(answer.result)
    assert "11" in str(answer.result)
    assert queue.stats().states == {"FREE": 16}


def test_what_a_live_handle_runs_is_never_answered_for_it(make, participant):
    queue, worker = make(), make.open()
    worker.runs({8})
    busy = participant()
    busy.do("queue.runs({7})")
    queue.submit(Pass(7, b"x"))
    for _ in range(4):
        assert refuses(worker)
        forward(worker, seconds=60)
        time.sleep(0.11)
    assert (worker.unknown_answered, queue.stats().parked) == (0, 1)
    busy.kill()
    # found alive until a moment ago: it counts from there
    assert refuses(worker)
    assert worker.unknown_answered == 0
    forward(worker, seconds=11)

    def is_answered():
        refuses(worker)
        forward(worker, seconds=1)
        return worker.unknown_answered == 1

    eventually(is_answered, "it was answered")
    assert isinstance(queue.recv(WAIT_S).result, UnknownClosureId)
    assert len(worker.registrations().map) == 1, "the dead one's key was removed"


def test_who_meets_many_jobs_that_it_does_not_run_ends_in_time(make):
    queue, other = make(), make.open()
    other.runs({8})
    for _ in range(3):
        queue.submit(Pass(7, b""))
    queue.submit(Pass(8, b"mine"))
    with pytest.raises(Empty):
        other.claim(1e-9)
    assert (queue.stats().parked, queue.stats().waiting) == (1, 3)
    assert args_of(other.claim(0)) == b"mine", "who does not wait goes on to what it runs"


def test_who_meets_many_jobs_that_it_does_not_run_hears_signals(make):
    class Interrupted(Exception):
        pass

    def interrupt(*_):
        raise Interrupted

    def claim():
        signal.setitimer(signal.ITIMER_REAL, 0.002)
        queue.claim(WAIT_S)

    jobs = 50_000
    queue = make(2**16, quota=jobs)
    queue.runs({8})
    # what others run it has found out by then, which may take it to Python code
    queue.submit(Pass(7, b""))
    assert refuses(queue)
    for _ in range(jobs - 1):
        queue.submit(Pass(7, b""))
    before = signal.signal(signal.SIGALRM, interrupt)
    try:
        with pytest.raises(Interrupted):
            claim()
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)
    assert queue.stats().parked < jobs


def test_a_handle_that_closes_or_says_something_else_takes_back_what_it_said(make):
    queue, other = make(), make.open()
    other.runs({1, 2, 3})
    assert queue._live_closure_ids() == {1, 2, 3}
    other.runs({3, 4})
    assert queue._live_closure_ids() == {3, 4}
    other.runs(())
    assert queue._live_closure_ids() == set()
    other.runs({5})
    other.close()
    assert len(queue.registrations().map) == 0


def test_an_empty_set_runs_nothing_and_answers_for_nobody_in_time(make):
    queue, worker = make(), make.open(unknown_after=0)
    worker.runs(set())
    queue.submit(Pass(7, b"x"))
    eventually(lambda: refuses(worker) and worker.unknown_answered, "it was answered")
    assert isinstance(queue.recv(WAIT_S).result, UnknownClosureId)


def test_who_has_jobs_to_run_answers_for_nobody_for_a_small_part_of_the_time_only(make):
    queue, worker = make(1024), make.open(unknown_after=0)
    worker.runs({8})
    for _ in range(200):
        queue.submit(Pass(7, b"x"))
    eventually(lambda: refuses(worker) and worker.unknown_answered == 200, "they were answered")
    for _ in range(200):
        queue.submit(Pass(7, b"x"))
    for _ in range(40):
        queue.submit(Pass(8, b"mine"))

    def slow():
        time.sleep(0.02)
        return {8}

    # as if each answer took that long, on a slow disk
    worker._live_closure_ids = slow
    claim = worker.try_claim()
    began = time.monotonic()
    for _ in range(39):
        claim.ack()
        time.sleep(0.005)
        claim = worker.try_claim()
        answered = worker.unknown_answered - 200
        assert answered <= 1 + (time.monotonic() - began) / 0.2
    claim.ack()
    assert answered
    worker._live_closure_ids = lambda: {8}
    eventually(lambda: refuses(worker) and worker.unknown_answered == 400, "they were answered")


@pytest.mark.parametrize("closure_ids", [[-1], [2**32], ["7"], [True]])
def test_what_is_no_closure_id_is_refused(make, closure_ids):
    queue = make()
    with pytest.raises((TypeError, ValueError), match="closure_id"):
        queue.runs(closure_ids)
    queue.submit(Pass(7, b"x"))
    assert all_args(queue) == [b"x"]


def test_a_forked_child_says_under_its_own_number_what_it_runs(make, run_script):
    queue = make()
    out = run_script(
        """
        queue = JobQueue.open(sys.argv[1])
        queue.runs({7})
        before = queue.identity
        def child():
            try:
                queue.try_claim()
            except Empty:
                pass
            assert queue.identity != before
            registered = queue.registrations()
            assert registered.live_ids() == {7}
            assert len(registered.map) == 2
            queue.close()
        wait_for([fork(child)])
        assert queue._live_closure_ids() == {7}
        print("fine")
        """,
        queue.path,
    )
    assert out == "fine\n"


def test_what_was_opened_for_a_look_at_the_map_is_closed_with_the_queue(make):
    queue = make()
    map_ = queue.registrations().map
    queue.close()
    assert map_.closed


def test_an_older_directory_gets_its_map_when_it_is_opened(make):
    make().close()
    path = make.open().path
    os.unlink(os.path.join(path, "map"))
    queue = make.open()
    queue.runs({7})
    assert make.open()._live_closure_ids() == {7}


def test_the_map_of_another_queue_is_refused(make, tmp_path):
    queue = make()
    with JobQueue.create(tmp_path / "other", 16, arena_bytes=2**20, participants=64) as other:
        shutil.copy(os.path.join(other.path, "map"), os.path.join(queue.path, "map"))
    with pytest.raises(LayoutMismatch, match="map"):
        queue.runs({7})
    assert [fault.kind for fault in check_queue(queue.path, pause=0).faults] == ["foreign"]


def test_where_the_map_is_full_the_handle_runs_them_all_the_same(make):
    queue = make(participants=1)
    with pytest.raises(MapFull):
        queue.runs(range(1000))
    queue.submit(Pass(999, b"x"))
    assert all_args(queue) == [b"x"]


def test_what_the_dead_have_said_makes_room_for_what_others_say(make, participant):
    queue = make(participants=4)
    room = map_capacity(16, 4)
    for n in range(3):
        worker = participant()
        worker.do(f"queue.runs(range({n * room}, {n * room + room // 2 + 1}))")
        worker.kill()
    queue.runs(range(room))
    assert queue._live_closure_ids() == set(range(room))


def test_a_job_whose_cell_says_nonsense_while_it_is_parked_is_answered_and_holds_up_nobody(make, files_of):
    queue, other, knows = make(), make.open(), make.open()
    other.runs({8})
    queue.submit(Pass(7, bytes(LONG)))
    assert refuses(other)
    cells = files_of(queue.path).cells
    cells["job_block"][cells["job_block"] != 0] = 2**40
    knows.runs({7})
    assert refuses(knows)
    assert "damaged" in str(queue.recv(WAIT_S).result)


def test_a_worker_loop_that_routes_counts_what_nobody_knew_and_learns_what_is_registered_later(make):
    queue, handle = make(), make.open(unknown_after=0)
    registry = PassRegistry()
    registry.register(1, bytes.upper)
    loop = WorkerLoop(handle.submit_side, registry=registry, table=handle.heartbeat, slot=handle.slot, routes=True)
    thread = threading.Thread(target=loop.run)
    thread.start()
    try:
        queue.submit(Pass(1, b"known"))
        assert queue.recv(WAIT_S).result == b"KNOWN"
        queue.submit(Pass(2, b"strange"))
        assert isinstance(queue.recv(WAIT_S).result, UnknownClosureId)
        eventually(lambda: (loop.completed, loop.failed) == (2, 1), "it was counted")
        registry.register(2, bytes.lower)
        eventually(lambda: queue._live_closure_ids() == {1, 2}, "the others know of it")
        queue.submit(Pass(2, b"LATER"))
        assert queue.recv(WAIT_S).result == b"later"
    finally:
        loop.stop()
        thread.join()


def test_a_stopped_worker_is_no_dead_one(make, participant):
    queue = make()
    other = participant()
    other.do("queue.runs({7})")
    os.kill(other.pid, signal.SIGSTOP)
    assert queue._live_closure_ids() == {7}
    os.kill(other.pid, signal.SIGCONT)
    other.do("queue.close()")
    assert queue._live_closure_ids() == set()


def test_a_parked_word_that_names_an_owner_is_taken_all_the_same(make, files_of):
    queue = make()
    queue.submit(Pass(1, b"x"), due=soon())
    cells = files_of(queue.path).cells
    at = int(np.flatnonzero(cells["due_ns"])[0])
    cells["word"][at] = cell_word(int(cells["word"][at]) >> 20, CellState.PARKED, 5)
    forward(queue)
    assert all_args(queue) == [b"x"]

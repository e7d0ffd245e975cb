"""Results that are kept: `submit(..., result_ttl=...)`, then `result` by anyone who knows the job's id, until they expire."""

import os
import signal
import threading
import time

import numpy as np
import pytest

from subetha._core import decode_submit, encode_result
from subetha.check import check_queue
from subetha.errors import (
    ArenaFull,
    CallFailed,
    ExecutionError,
    Full,
    JobCancelled,
    JobTimeout,
    TransportError,
    UnknownClosureId,
    UnknownJob,
    WorkerDied,
)
from subetha.jobqueue import JobQueue
from subetha.layout import STATE_SHIFT, VERSION_SHIFT, CellState, cell_word
from subetha.pass_registry import Pass

from .participants import WAIT_S, eventually, participant

__all__ = ["participant"]  # a fixture

TTL = 1000.0
"""Seconds that no test waits for; clocks are set forward instead."""
LONG = 20_000


@pytest.fixture
def path(shm):
    """Where a queue may be made: in memory, for there are many."""
    return os.fspath(shm / "queue")


def forward(*queues, seconds=TTL + 1):
    for queue in queues:
        queue._clock_shift_ns += int(seconds * 1e9)


def hand_in(queue, args=b"job", ttl=TTL, **options):
    return queue.submit(Pass(1, args), result_ttl=ttl, **options)


def run_next(queue, answer=b"fine"):
    claim = queue.claim(WAIT_S)
    claim.started()
    claim.reply(encode_result(0, answer))


def keep(queue, answer=b"fine", args=b"job", ttl=TTL):
    """A job that has run, and whose result is collected. Its id."""
    job_id = hand_in(queue, args, ttl)
    run_next(queue, answer)
    assert queue.recv(WAIT_S).token == job_id
    return job_id


def states(queue):
    return {state: n for state, n in queue.stats().states.items() if state != "FREE"}


def is_unknown(queue, job_id):
    with pytest.raises(UnknownJob):
        queue.result(job_id, 0)
    return True


# ---- reading ----


@pytest.mark.parametrize("length", [0, 40, LONG])
def test_a_collected_result_is_there_for_anyone_as_often_as_they_ask(make, length):
    queue = make()
    job_id = keep(queue, b"r" * length)
    for handle in (queue, make.open(), make.open(readonly=True)):
        for timeout in (None, 0, 1):
            assert handle.result(job_id, timeout) == b"r" * length
    assert (queue.stats().kept, queue.stats().other, states(queue)) == (1, 0, {"KEPT": 1})
    assert check_queue(queue.path).faults == []


def test_a_result_is_there_before_its_submitter_has_collected_it(make):
    queue = make()
    job_id = hand_in(queue)
    run_next(queue, b"early")
    assert make.open(readonly=True).result(job_id, 0) == b"early"
    assert queue.recv(WAIT_S).result == b"early"


def test_a_reader_waits_for_a_job_that_waits_and_runs(make):
    queue, other = make(), make.open(readonly=True)
    job_id = hand_in(queue)
    found = []
    reader = threading.Thread(target=lambda: found.append(other.result(job_id, WAIT_S)))
    reader.start()
    claim = queue.claim(WAIT_S)
    for timeout in (0, 0.01):
        with pytest.raises(TimeoutError, match=f"job {job_id} was not done in {timeout} s"):
            other.result(job_id, timeout)
    claim.release()
    run_next(queue, b"at last")
    reader.join(WAIT_S)
    assert found == [b"at last"]


def test_a_job_for_later_is_waited_for(make):
    queue = make()
    job_id = hand_in(queue, due=time.time() + TTL)
    with pytest.raises(TimeoutError):
        queue.result(job_id, 0)


def test_errors_are_given_back_and_not_raised(make):
    queue = make()
    errors = [
        ExecutionError("ValueError: no"),
        CallFailed("ValueError: no", b"pickled"),
        UnknownClosureId("closure id 1"),
    ]
    for error in errors:
        found = queue.result(keep(queue, error))
        assert (type(found), str(found)) == (type(error), str(error))


def test_the_errors_of_the_core_are_kept_too(make):
    queue = make()
    cancelled = hand_in(queue)
    claim = queue.claim(WAIT_S)
    claim.started()
    assert queue.cancel_running(cancelled)
    assert isinstance(queue.recv(WAIT_S).result, JobCancelled)
    assert isinstance(make.open(readonly=True).result(cancelled, 0), JobCancelled)
    assert queue.stats().kept == 1


def test_a_job_that_ran_out_of_time_is_kept_as_such(make, participant):
    queue = make()
    slow = participant(queue.path)
    job_id = hand_in(queue, timeout=0.05)
    slow.do("held.append(queue.claim(60))", "held[-1].started()")
    assert isinstance(queue.result(job_id, WAIT_S), JobTimeout)
    assert isinstance(queue.recv(WAIT_S).result, JobTimeout)
    assert isinstance(queue.result(job_id, 0), JobTimeout)


def test_a_handle_that_is_closed_ends_its_readers(make):
    queue = make()
    job_id = hand_in(queue)
    other = make.open(readonly=True)
    ended = []

    def read():
        try:
            other.result(job_id)
        except ValueError as error:
            ended.append(str(error))

    reader = threading.Thread(target=read)
    reader.start()
    while not reader.is_alive():
        time.sleep(0.001)
    other.close()
    reader.join(WAIT_S)
    assert len(ended) == 1
    assert "closed" in ended[0]


def test_a_signal_ends_a_wait_for_a_result(make):
    queue = make()
    job_id = hand_in(queue)

    class Alarm(Exception):
        pass

    def ring(*_):
        raise Alarm

    before = signal.signal(signal.SIGALRM, ring)
    try:
        signal.setitimer(signal.ITIMER_REAL, 0.05)
        with pytest.raises(Alarm):
            queue.result(job_id)
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)


# ---- what is not kept ----


def test_a_result_of_a_job_without_result_ttl_is_its_submitters_alone(make):
    queue = make()
    job_id = queue.submit(Pass(1, b"job"))
    with pytest.raises(TimeoutError):
        queue.result(job_id, 0)
    run_next(queue)
    for _ in range(2):
        with pytest.raises(UnknownJob, match="results are kept only for jobs submitted with result_ttl"):
            queue.result(job_id)
        queue.recv_many(1)
    assert states(queue) == {}


def test_a_job_that_nobody_knows_is_a_key_error_with_a_readable_text(make):
    queue = make()
    with pytest.raises(KeyError) as caught:
        queue.result(12345)
    assert isinstance(caught.value, TransportError)
    assert str(caught.value).startswith(queue.path), "and not its repr"
    assert "no cell has job 12345" in str(caught.value)


@pytest.mark.parametrize("end", ["cancel", "ack"])
def test_a_job_without_a_result_leaves_none(make, end):
    queue = make()
    job_id = hand_in(queue)
    if end == "cancel":
        assert queue.cancel(job_id)
    else:
        queue.claim(WAIT_S).ack()
    assert is_unknown(queue, job_id)
    assert states(queue) == {}


@pytest.mark.parametrize("ttl", [0, -1, float("nan")])
def test_a_ttl_is_a_positive_number_of_seconds(make, ttl):
    with pytest.raises(ValueError, match="result_ttl: expected None or seconds > 0"):
        hand_in(make(), ttl=ttl)


@pytest.mark.parametrize(
    ("ttl", "kept_for"), [(0.1, 1), (1, 1), (1.5, 2), (1e15, 2**32 - 1), (float("inf"), 2**32 - 1)]
)
def test_a_ttl_is_rounded_up_to_seconds_and_cut_at_136_years(make, ttl, kept_for):
    queue = make()
    job_id = hand_in(queue, ttl=ttl)
    cells = queue.cells()
    assert cells["keep_s"][cells["job_id"] == job_id] == [kept_for]


@pytest.mark.parametrize("call", ["result", "forget"])
@pytest.mark.parametrize(
    ("job_id", "error"), [("1", TypeError), (True, TypeError), (0, ValueError), (2**64, ValueError)]
)
def test_what_is_no_job_id_is_refused(make, call, job_id, error):
    with pytest.raises(error, match="job_id"):
        getattr(make(), call)(job_id)


# ---- expiry ----


def test_a_result_expires_when_its_time_has_passed_since_it_was_collected(make):
    queue, other = make(), make.open(readonly=True)
    job_id = keep(queue)
    cells = queue.cells()
    (due,) = cells["due_ns"][cells["word"] >> STATE_SHIFT & 0xF == CellState.KEPT]
    assert abs(int(due) - time.time_ns() - TTL * 1e9) < 60e9
    forward(other, seconds=TTL - 100)
    assert other.result(job_id) == b"fine"
    forward(other, seconds=200)
    assert is_unknown(other, job_id)
    assert queue.result(job_id) == b"fine", "by its clock it is there"


def test_the_timer_frees_what_has_expired_with_its_block(make):
    queue = make()
    job_id = keep(queue, b"r" * LONG, b"a" * LONG)
    assert states(queue) == {"KEPT": 1}
    forward(queue)
    eventually(lambda: states(queue) == {}, "the expired result was not freed by the timer")
    assert is_unknown(queue, job_id)
    assert check_queue(queue.path).faults == []


def test_who_finds_no_free_cell_frees_what_has_expired(make):
    queue = make(quota=15)
    queue._watch()  # from here on its timer looks no more
    kept = [keep(queue) for _ in range(10)]
    short = [keep(queue, ttl=TTL / 2) for _ in range(5)]
    with pytest.raises(Full):
        hand_in(queue, wait=0)
    forward(queue, seconds=TTL / 2 + 1)
    new = [hand_in(queue, wait=0) for _ in short]
    assert states(queue) == {"KEPT": 10, "READY": 5}
    assert [queue.result(job_id) for job_id in kept] == [b"fine"] * 10
    assert all(is_unknown(queue, job_id) for job_id in short)
    with pytest.raises(Full):
        hand_in(queue, wait=0)
    assert len(new) == 5


def test_who_waits_for_room_gets_it_when_something_expires(make):
    queue = make(quota=15)
    for _ in range(15):
        keep(queue, ttl=1)
    assert hand_in(queue, wait=WAIT_S)


def test_kept_results_do_not_count_against_the_quota(make):
    queue = make(quota=4)
    for _ in range(8):
        keep(queue)
    waiting = [hand_in(queue, wait=0) for _ in range(4)]
    # then its own count is too high, and the cells are counted
    assert make.open().cancel(waiting[0])
    assert hand_in(queue, wait=0)


def test_the_arguments_of_a_kept_result_give_their_block_back(make):
    queue = make(arena_bytes=2**16)
    kept = [keep(queue, b"r", b"a" * LONG) for _ in range(5)]
    assert [queue.result(job_id) for job_id in kept] == [b"r"] * 5
    for _ in range(2):
        hand_in(queue, b"a" * LONG)
    with pytest.raises(ArenaFull):
        hand_in(queue, b"a" * LONG)


def test_forgetting_a_result_frees_its_cell_and_block_at_once(make):
    queue, other = make(), make.open()
    job_id = keep(queue, b"r" * LONG, b"a" * LONG)
    assert other.forget(job_id)
    assert states(queue) == {}
    assert not other.forget(job_id)
    assert is_unknown(queue, job_id)
    assert check_queue(queue.path).faults == []
    assert keep(queue, b"next") != job_id


def test_what_is_still_to_be_collected_is_not_forgotten(make):
    queue = make()
    job_id = hand_in(queue)
    assert not queue.forget(job_id)
    run_next(queue)
    assert not queue.forget(job_id)
    assert queue.recv(WAIT_S).result == b"fine"
    assert queue.forget(job_id)


def test_a_handle_for_looking_forgets_nothing(make):
    queue = make()
    job_id = keep(queue)
    with pytest.raises(TransportError, match="read-only"):
        make.open(readonly=True).forget(job_id)
    assert queue.result(job_id) == b"fine"


# ---- clients that go ----


@pytest.mark.parametrize("length", [10, LONG])
def test_a_result_that_its_submitter_has_not_collected_when_it_closes_is_kept(make, length):
    client, queue = make(), make.open()
    job_id = hand_in(client, b"a" * length)
    plain = client.submit(Pass(1, b""))
    for _ in range(2):
        run_next(queue, b"r" * length)
    client.close()
    assert states(queue) == {"KEPT": 1}
    assert queue.result(job_id, 0) == b"r" * length
    assert is_unknown(queue, plain)
    assert check_queue(queue.path).faults == []


def test_a_worker_that_answers_after_its_client_has_closed_keeps_the_result(make):
    client, queue = make(), make.open()
    job_id = hand_in(client)
    claim = queue.claim(WAIT_S)
    client.close()
    claim.reply(encode_result(0, b"late"))
    assert queue.result(job_id, 0) == b"late"
    assert states(queue) == {"KEPT": 1}


@pytest.mark.parametrize("answered", [True, False])
def test_a_result_is_kept_when_its_client_is_killed(make, participant, answered):
    queue = make()
    client = participant(queue.path)
    job_id = client.get("queue.submit(Pass(1, b''), result_ttl=1000)")
    claim = queue.claim(WAIT_S)
    if answered:
        claim.reply(encode_result(0, b"r" * LONG))
    client.kill()
    queue.rescue()
    if not answered:
        claim.reply(encode_result(0, b"r" * LONG))
    assert queue.result(job_id, WAIT_S) == b"r" * LONG
    assert states(queue) == {"KEPT": 1}
    assert check_queue(queue.path).faults == []


def test_what_a_dead_client_was_about_to_keep_is_kept_by_its_rescuer(make, participant, files_of):
    queue = make()
    client = participant(queue.path)
    job_id = client.get("queue.submit(Pass(1, b'a' * 20_000), result_ttl=1000)")
    run_next(queue, b"r" * LONG)
    cell = files_of(queue.path).cells[np.flatnonzero(queue.cells()["job_id"] == job_id)[0]]
    number = client.get("queue.slot") + 1
    # killed after its CAS, before it could write when this expires
    version = int(cell["word"]) >> VERSION_SHIFT
    os.kill(client.pid, signal.SIGSTOP)
    cell["word"] = cell_word(version, CellState.KEPT, number)
    assert queue.result(job_id, 0) == b"r" * LONG, "its frame is whole, whoever has it"
    client.kill()
    queue.rescue()
    eventually(lambda: int(cell["word"]) & 0xFFFF == 0, "it was not rescued")
    assert int(cell["word"]) == cell_word(version + 1, CellState.KEPT, 0)
    assert (int(cell["due_ns"]) - time.time_ns()) / 1e9 == pytest.approx(TTL, abs=60)
    assert queue.result(job_id, 0) == b"r" * LONG
    assert int(cell["job_block"]) == 0
    assert queue.arena_backed_bytes <= 2**16
    assert check_queue(queue.path).faults == []
    forward(queue)
    eventually(lambda: states(queue) == {}, "it does not expire")


def test_a_dead_letter_stays_one_and_its_error_is_read(make, participant):
    queue = make()
    job_id = hand_in(queue, max_attempts=1)
    worker = participant(queue.path)
    worker.do("held.append(queue.claim(60))", "held[-1].started()")
    worker.kill()
    queue.rescue()
    assert isinstance(queue.result(job_id, WAIT_S), WorkerDied)
    assert isinstance(queue.recv(WAIT_S).result, WorkerDied)
    assert states(queue) == {"DEAD": 1}
    assert isinstance(make.open(readonly=True).result(job_id, 0), WorkerDied)
    assert not queue.forget(job_id)
    assert queue.retry_dead(job_id)
    run_next(queue, b"this time")
    # nobody waits for it any more; that its submitter drops it is not known before it looks
    assert queue.result(job_id, 0) == b"this time"
    assert queue.recv_many(1) == []
    assert queue.drop_dead(job_id) is False
    assert is_unknown(queue, job_id)


def test_a_second_result_of_one_job_is_not_kept_beside_the_first(make, files_of):
    queue = make()
    job_id = hand_in(queue)
    copy = queue.submit(Pass(1, b"copy"), result_ttl=TTL)
    cells = files_of(queue.path).cells
    cells["job_id"][cells["job_id"] == copy] = job_id
    for _ in range(2):
        run_next(queue)
    assert [result.token for result in queue.recv_many(2)] == [job_id]
    assert (queue.duplicates, states(queue)) == (1, {"KEPT": 1})


def test_a_reader_is_not_misled_by_a_job_that_is_moved_into_another_cell(make, participant):
    queue, reader = make(), make.open(readonly=True)
    slow = participant(queue.path)
    job_id = hand_in(queue)
    slow.do("held.append(queue.claim(60))", "held[-1].started()")
    found = []
    waiting = threading.Thread(target=lambda: found.append(reader.result(job_id, WAIT_S)))
    waiting.start()
    assert queue.cancel_running(job_id)
    waiting.join(WAIT_S)
    assert isinstance(found[0], JobCancelled)


def test_readers_beside_jobs_that_come_and_go_see_only_whole_results_of_their_own(make, participant):
    """The cells of forgotten results are used again at once, while others read them."""
    queue = make(16, quota=15)
    reader = participant(queue.path)
    reader.do(
        "import subetha.errors",
        "def read(ids):\n"
        "    seen = 0\n"
        "    for job_id in ids:\n"
        "        try:\n"
        "            result = queue.result(job_id, 0)\n"
        "        except (subetha.errors.UnknownJob, TimeoutError):\n"
        "            continue\n"
        "        assert result[:8] == job_id.to_bytes(8, 'little') and set(result[8:]) <= {job_id % 251}, (job_id, result[:40])\n"
        "        seen += 1\n"
        "    return seen",
    )
    seen, ids = 0, []
    for n in range(300):
        reader.begin(f"print(end='')\nseen = globals().get('seen', 0) + read({ids[-14:]})")
        for _ in range(14):
            length = LONG if n % 7 == 0 else 150
            job_id = hand_in(queue)
            claim = queue.claim(WAIT_S)
            claim.reply(encode_result(0, job_id.to_bytes(8, "little") + bytes([job_id % 251]) * length))
            assert queue.recv(WAIT_S).token == job_id
            ids.append(job_id)
            if len(ids) > 14:
                queue.forget(ids[-15])
        reader.heard()
    seen = reader.get("seen")
    assert seen > 0
    for job_id in ids[-14:]:
        assert queue.forget(job_id)
    assert states(queue) == {}


# ---- damage ----


def kept_cell(queue, files_of, length=40):
    job_id = keep(queue, b"r" * length)
    return job_id, files_of(queue.path).cells[np.flatnonzero(queue.cells()["job_id"] == job_id)[0]]


DAMAGE = {
    "result_length": [0, 6, 300, 2**40, 2**64 - 1],
    "result_block": [1, 1 << 32 | 2**32 - 1, 2**64 - 1],
    "result_crc32": [1],
}


@pytest.mark.parametrize("length", [40, LONG])
@pytest.mark.parametrize(("field", "value"), [(field, value) for field, values in DAMAGE.items() for value in values])
def test_a_damaged_result_is_an_error_and_not_a_crash(make, files_of, field, value, length):
    queue = make()
    job_id, cell = kept_cell(queue, files_of, length)
    if (value, length) == (300, LONG):
        # a shorter one in a block is as good as any; in an inline one it is not what its header says
        value = 2**16
    cell[field] = value
    assert isinstance(make.open(readonly=True).result(job_id, 0), ExecutionError)


@pytest.mark.parametrize(
    ("damage", "kinds"),
    [
        ({"keep_s": 0}, {"kept"}),
        ({"due_ns": 2**63}, {"kept"}),
        ({"due_ns": 2**64 - 1}, {"kept"}),
        ({"result_length": 2**40}, {"result"}),
        ({"result_length": 3}, {"result"}),
        ({"result_block": 77 << 32}, {"result"}),
        ({"owner": 9}, {"owner"}),
        ({"owner": 60_000}, {"owner"}),
    ],
)
def test_a_check_finds_a_kept_cell_that_would_never_expire_or_be_read_and_mends_it(make, files_of, damage, kinds):
    queue = make()
    job_id, cell = kept_cell(queue, files_of)
    # its timer would mend some of this, too
    queue.close()
    for field, value in damage.items():
        if field == "owner":
            cell["word"] |= value
        else:
            cell[field] = value
    assert {fault.kind for fault in check_queue(queue.path, pause=0).faults} == kinds
    report = check_queue(queue.path, repair=True, pause=0)
    assert (report.faults, {fault.kind for fault in report.repaired}) == ([], kinds)
    queue = make.open()
    # from here on its timer looks
    assert queue.cancel(queue.submit(Pass(1)))
    if "due_ns" in damage or "owner" in damage:
        assert queue.result(job_id, 0) == b"r" * 40
        forward(queue)
    eventually(lambda: states(queue) == {}, "it was not freed")


def test_a_repair_leaves_sound_results_alone(make):
    queue = make()
    kept = [keep(queue, b"r" * length) for length in (10, LONG)]
    words = queue.cells()["word"].copy()
    queue.repair()
    assert (queue.cells()["word"] == words).all()
    assert [len(queue.result(job_id)) for job_id in kept] == [10, LONG]


def test_a_repair_links_the_block_of_a_kept_result_again(make, files_of):
    queue = make()
    job_id, cell = kept_cell(queue, files_of, LONG)
    block = int(cell["result_block"])
    files = files_of(queue.path)
    size = 4096 << (block >> 32) - 1
    words = files.block_words(size)
    words[block & 0xFFFFFFFF] = 2**60 + 9
    assert isinstance(queue.result(job_id, 0), ExecutionError)
    queue.repair()
    assert queue.result(job_id, 0) == b"r" * LONG


# ---- options of the job go with it ----


def test_a_forked_child_reads_the_results_of_its_parent(make):
    queue = make()
    job_id = keep(queue, b"of the parent")
    pid = os.fork()
    if pid == 0:
        code = 1
        try:
            code = 0 if queue.result(job_id, 0) == b"of the parent" else 2
        finally:
            os._exit(code)
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0


def test_a_lapsed_worker_does_not_cost_the_result_its_ttl(make, participant):
    queue = make()
    slow = participant(queue.path)
    job_id = hand_in(queue, timeout=0.05)
    slow.do("held.append(queue.claim(60))", "held[-1].started()")
    queue.recv(WAIT_S)
    cells = queue.cells()
    (cell,) = cells[cells["word"] >> STATE_SHIFT & 0xF == CellState.KEPT]
    assert (int(cell["job_id"]), int(cell["keep_s"])) == (job_id, TTL)


def test_jobs_without_result_ttl_leave_no_trace_of_it(make):
    queue = make()
    queue.submit(Pass(1, b"job"))
    claim = queue.claim(WAIT_S)
    assert decode_submit(claim.payload)[1].args == b"job"
    claim.reply(encode_result(0, b""))
    queue.recv(WAIT_S)
    assert states(queue) == {}
    assert set(queue.cells()["due_ns"].tolist()) == {0}


def test_a_kept_result_is_found_after_any_number_of_others(make):
    with JobQueue.open(make(64).path) as queue:
        first = keep(queue, b"first")
        for _ in range(200):
            queue.forget(keep(queue))
        assert queue.result(first) == b"first"

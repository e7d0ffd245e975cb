"""Those who live and do not get on: stopped workers, jobs out of time, files that were taken away."""

import os
import shutil
import signal

import numpy as np
import pytest

from subetha.errors import ExecutionError, HeartbeatError, JobCancelled, JobTimeout, TransportError
from subetha.jobqueue import JobQueue
from subetha.layout import LINES_OFFSET, TABLE_LINES, VERSION_SHIFT
from subetha.pass_registry import Pass
from subetha.wire import encode_result

from .participants import WAIT_S, eventually, participant

__all__ = ["participant"]  # a fixture


@pytest.fixture
def path(shm):
    return os.fspath(shm / "queue")


LATE = "\n".join(
    (
        "try:",
        "    held[0].reply(encode_result(0, b'late'))",
        "    error = None",
        "except Exception as raised:",
        "    error = raised",
    )
)


CLAIM_UNTIL_AN_ERROR = "\n".join(
    (
        "while True:",
        "    try:",
        "        held.append(queue.claim(60))",
        "    except Exception as raised:",
        "        error = raised",
        "        break",
    )
)


def with_the_job_in_hand(participant):
    worker = participant()
    worker.do("held.append(queue.claim(60))", "held[0].started()")
    return worker


def lines_of_the_table(path):
    """The lines `epoch` and `leader` of a new queue, in which this process does not take part."""
    JobQueue.create(path, 64).close()
    contents = np.memmap(os.path.join(path, "table"), np.uint8, "r")
    return contents[LINES_OFFSET : LINES_OFFSET + TABLE_LINES.itemsize].view(TABLE_LINES)


def all_is_free(queue):
    eventually(lambda: queue.stats().states == {"FREE": queue.cells_total}, "every cell is free")


# --- stopped ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("length", [10, pytest.param(20_000, marks=pytest.mark.slow)], ids=["inline", "block"])
def test_the_job_of_a_stopped_worker_runs_elsewhere_and_its_late_answer_is_refused(make, participant, length):
    queue = make()
    args = os.urandom(length)
    job_id = queue.submit(Pass(1, args))
    worker = with_the_job_in_hand(participant)
    os.kill(worker.pid, signal.SIGSTOP)
    claim = queue.claim(WAIT_S)
    assert (claim.job_id, claim.tobytes()[10:], claim.attempts) == (job_id, args, 1)
    assert queue.stats().states["FENCED"] == 1
    claim.started()
    claim.reply(encode_result(0, b"in time"))
    assert queue.recv(WAIT_S).result == b"in time"
    os.kill(worker.pid, signal.SIGCONT)
    worker.do(LATE)
    assert worker.get("type(error).__name__") == TransportError.__name__
    assert "its job runs elsewhere" in worker.get("str(error)")
    assert worker.get("queue.refused") == 1
    all_is_free(queue)
    # it works on
    another = queue.submit(Pass(1, b"another"))
    worker.do("held[0] = queue.claim(60)", "held[0].started()", "held[0].reply(encode_result(0, b'fine'))")
    result = queue.recv(WAIT_S)
    assert (result.token, result.result) == (another, b"fine")
    assert (queue.duplicates, queue.stats().states) == (0, {"FREE": queue.cells_total})


@pytest.mark.slow
def test_what_a_stopped_worker_has_only_claimed_is_moved_too_and_it_can_die_after_that(make, participant):
    queue = make()
    for name in (b"a", b"b", b"c"):
        queue.submit(Pass(1, name))
    worker = participant()
    worker.do("held.extend(queue.claim(60) for _ in range(3))", "held[0].started()")
    os.kill(worker.pid, signal.SIGSTOP)
    found = []
    for _ in range(3):
        claim = queue.claim(WAIT_S)
        found.append((claim.tobytes()[10:], claim.attempts))
        claim.ack()
    assert found == [(b"a", 1), (b"b", 0), (b"c", 0)]
    worker.kill()
    all_is_free(queue)


@pytest.mark.slow
def test_the_reserve_is_there_for_the_copy_where_submitters_have_taken_all_else(make, participant):
    queue = make(cells=16, quota=15)
    first = queue.submit(Pass(1, b"first"))
    worker = with_the_job_in_hand(participant)
    spare = queue.stats().free
    for _ in range(spare - queue.stats().reserve):
        queue.submit(Pass(1, b"other"), wait=0)
    held = [queue.claim(0) for _ in range(queue.stats().waiting)]
    os.kill(worker.pid, signal.SIGSTOP)
    claim = queue.claim(WAIT_S)
    assert claim.job_id == first
    claim.ack()
    for other in held:
        other.ack()
    worker.kill()
    all_is_free(queue)


@pytest.mark.slow
def test_a_stopped_leader_is_replaced(participant, path):
    table = lines_of_the_table(path)
    leader = participant()
    leader.do("queue.slot")
    first = eventually(lambda: int(table["leader"][0]) & 0xFFFF, "a leader")
    assert first == leader.get("queue.slot") + 1
    other = participant()
    other.do("queue.slot")
    os.kill(leader.pid, signal.SIGSTOP)
    eventually(lambda: int(table["leader"][0]) & 0xFFFF == other.get("queue.slot") + 1, "another leader")
    epoch = int(table["epoch"][0])
    eventually(lambda: int(table["epoch"][0]) > epoch, "the epoch goes on")
    os.kill(leader.pid, signal.SIGCONT)
    eventually(lambda: int(table["epoch"][0]) > epoch + 2, "one leader ticks")
    assert int(table["leader"][0]) & 0xFFFF == other.get("queue.slot") + 1


@pytest.mark.slow
def test_nobody_is_declared_anything_where_the_whole_group_was_stopped(participant, path):
    table = lines_of_the_table(path)
    worker, client = participant(), participant()
    client.do("queue.submit(Pass(1, b'job'))")
    worker.do("held.append(queue.claim(60))", "held[0].started()")
    eventually(lambda: int(table["leader"][0]), "a leader")
    for one in (worker, client):
        os.kill(one.pid, signal.SIGSTOP)
    # longer than the grace: no one else is there who could tell the time
    signal.sigtimedwait([], 8)
    epoch = int(table["epoch"][0])
    for one in (worker, client):
        os.kill(one.pid, signal.SIGCONT)
    eventually(lambda: int(table["epoch"][0]) >= epoch + 2, "they go on")
    worker.do(LATE)
    assert worker.get("repr(error)") == "None"
    assert client.get("queue.recv(60).result.decode()") == "late"


# --- out of time ------------------------------------------------------------------------------------------------------


def test_a_job_out_of_time_is_answered_and_its_worker_claims_nothing_more(make, participant):
    queue = make()
    late = queue.submit(Pass(1, b"late"), timeout=0.2)
    worker = with_the_job_in_hand(participant)
    result = queue.recv(WAIT_S)
    assert (result.token, type(result.result)) == (late, JobTimeout)
    assert str(result.result) == "it ran longer than 0.200 s, its timeout"
    assert queue.overdue_pids() == {worker.pid}
    worker.do(LATE)
    assert "its job ran out of time" in worker.get("str(error)")
    assert queue.overdue_pids() == set()
    queue.submit(Pass(1, b"next"))
    worker.do("try:\n    queue.claim(0)\nexcept Exception as raised:\n    error = raised")
    assert worker.get("type(error).__name__") == HeartbeatError.__name__
    claim = queue.claim(WAIT_S)
    claim.ack()
    all_is_free(queue)


def test_a_worker_that_is_killed_over_a_job_out_of_time_takes_no_other_with_it(make, participant):
    queue = make()
    queue.submit(Pass(1, b"late"), timeout=0.2)
    queue.submit(Pass(1, b"innocent"), max_attempts=1)
    worker = with_the_job_in_hand(participant)
    worker.do("held.append(queue.claim(60))")
    assert isinstance(queue.recv(WAIT_S).result, JobTimeout)
    worker.kill()
    claim = queue.claim(WAIT_S)
    assert (claim.tobytes()[10:], claim.attempts) == (b"innocent", 0)
    claim.ack()
    all_is_free(queue)
    assert queue.dead_letters() == []


def test_a_running_job_that_is_cancelled_is_answered_and_its_worker_claims_nothing_more(make, participant):
    queue = make()
    unwanted = queue.submit(Pass(1, b"unwanted"), max_attempts=1)
    worker = with_the_job_in_hand(participant)
    assert not queue.cancel(unwanted)
    assert queue.cancel_running(unwanted)
    result = queue.recv(0)
    assert (result.token, type(result.result)) == (unwanted, JobCancelled)
    assert queue.overdue_pids() == {worker.pid}
    assert not queue.cancel_running(unwanted)
    worker.do(LATE)
    assert "its job ran out of time" in worker.get("str(error)")
    worker.do("try:\n    queue.claim(0)\nexcept Exception as raised:\n    error = raised")
    assert worker.get("type(error).__name__") == HeartbeatError.__name__
    all_is_free(queue)


def test_only_a_job_that_runs_can_be_cancelled_so(make):
    queue = make()
    waits = queue.submit(Pass(1, b"waits"))
    assert not queue.cancel_running(waits)
    claim = queue.claim(0)
    with pytest.raises(TransportError, match=r"could not be cancelled in 1 s: .* before it started it"):
        queue.cancel_running(waits)
    claim.started()
    claim.reply(encode_result(0, b"done"))
    assert not queue.cancel_running(waits)
    assert queue.recv(0).result == b"done"
    assert not queue.cancel_running(waits)


def test_a_claim_that_was_taken_away_can_be_forgotten(make, participant):
    queue = make()
    unwanted = queue.submit(Pass(1, b"unwanted"))
    worker = with_the_job_in_hand(participant)
    assert queue.cancel_running(unwanted)
    worker.do(
        "import gc, sys",
        "told = []",
        "sys.unraisablehook = told.append",
        "held.clear()",
        "gc.collect()",
    )
    assert worker.get("(told, queue.refused)") == [[], 1]
    assert isinstance(queue.recv(0).result, JobCancelled)
    all_is_free(queue)


def test_a_long_job_that_runs_is_cancelled_with_its_block(make, participant):
    queue = make()
    unwanted = queue.submit(Pass(1, bytes(10_000)))
    worker = with_the_job_in_hand(participant)
    assert queue.cancel_running(unwanted)
    assert isinstance(queue.recv(0).result, JobCancelled)
    worker.do(LATE)
    all_is_free(queue)


def test_a_job_that_ends_in_time_is_left_alone(make):
    queue = make()
    queue.submit(Pass(1, b"quick"), timeout=3600)
    claim = queue.claim(WAIT_S)
    claim.started()
    assert queue.cells()["deadline_ns"].max() > 0
    claim.reply(encode_result(0, ExecutionError("as it came")))
    assert str(queue.recv(WAIT_S).result) == "as it came"


def test_the_time_of_a_job_runs_from_its_start_and_not_from_its_claim(make):
    queue = make()
    queue.submit(Pass(1, b"patient"), timeout=0.001)
    claim = queue.claim(WAIT_S)
    assert queue.cells()["deadline_ns"].max() == 0
    claim.release()
    claim = queue.claim(WAIT_S)
    claim.reply(encode_result(0, b"never started"))
    assert queue.recv(WAIT_S).result == b"never started"


def test_the_time_that_an_earlier_start_used_up_is_not_held_against_the_next_claim(make, participant):
    queue = make()
    again = queue.submit(Pass(1, b"again"), timeout=0.2)
    claim = queue.claim(WAIT_S)
    claim.started()
    claim.release()
    claim = queue.claim(WAIT_S)
    # the leader looks at every cell when it ends this one, whose deadline comes later and whose cell lies behind
    other = queue.submit(Pass(1, b"other"), timeout=0.3)
    worker = with_the_job_in_hand(participant)
    assert queue.recv(WAIT_S).token == other
    assert queue.overdue_pids() == {worker.pid}
    claim.reply(encode_result(0, b"in time"))
    result = queue.recv(WAIT_S)
    assert (result.token, result.result) == (again, b"in time")
    worker.kill()
    all_is_free(queue)


def test_a_job_taken_over_from_the_dead_is_not_overdue_for_who_took_it(make, participant, files_of):
    queue = make()
    queue.submit(Pass(1, b"again"), timeout=0.2)
    claim = queue.claim(WAIT_S)
    claim.started()
    # as a rescuer leaves it between two steps: TAKEN with the next version, and with all that the dead one wrote
    cells = files_of(queue.path).cells
    cell = int(np.flatnonzero(cells["job_id"] == claim.job_id)[0])
    cells["word"][cell] += np.uint64(1 << VERSION_SHIFT)
    taken = int(cells["word"][cell])
    queue.submit(Pass(1, b"other"), timeout=0.3)
    worker = with_the_job_in_hand(participant)
    assert isinstance(queue.recv(WAIT_S).result, JobTimeout)
    assert (queue.overdue_pids(), int(cells["word"][cell])) == ({worker.pid}, taken)
    cells["word"][cell] -= np.uint64(1 << VERSION_SHIFT)
    claim.ack()


# --- files taken away -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["pool", "table", "arena", "mail", None])
def test_every_call_says_so_when_a_file_was_deleted_under_its_users(make, participant, path, name):
    queue = make()
    queue.submit(Pass(1, b"job"))
    worker = participant()
    worker.do("queue.slot")
    if name is None:
        shutil.rmtree(path)
    else:
        os.unlink(os.path.join(path, name))
    for call in (lambda: queue.recv(WAIT_S), lambda: queue.submit(Pass(1)), lambda: queue.claim(WAIT_S)):
        with pytest.raises(TransportError, match="deleted or replaced while it was in use"):
            eventually(lambda call=call: call() and False, "an error")
    worker.do(CLAIM_UNTIL_AN_ERROR)
    assert "deleted or replaced" in worker.get("str(error)")


def test_a_replaced_file_is_noticed_too(make, path):
    queue = make()
    queue.submit(Pass(1, b"job"))
    os.replace(shutil.copy(os.path.join(path, "pool"), os.path.join(path, "copy")), os.path.join(path, "pool"))
    with pytest.raises(TransportError, match="deleted or replaced while it was in use"):
        queue.recv(WAIT_S)

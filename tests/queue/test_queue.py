"""JobQueue: every public call in one process, its errors, and whose result is whose."""

import gc
import os
import threading
import time

import numpy as np
import pytest

from subetha._core import decode_result, decode_submit, encode_result, encode_submit
from subetha.errors import (
    Empty,
    ExecutionError,
    Full,
    HeartbeatError,
    LayoutMismatch,
    TableFull,
    TransportError,
    UnsupportedTransportFamily,
)
from subetha.jobqueue import JobQueue
from subetha.layout import CellState, Role, SlotState
from subetha.pass_registry import Pass, UnknownClosureId

WAIT_S = 30

ENDS = {
    "ack": lambda claim: claim.ack(),
    "release": lambda claim: claim.release(),
    "reply": lambda claim: claim.reply(encode_result(0, b"r")),
}


def job(number=0):
    return Pass(7, b"job %d" % number)


def reply(claim, data=b"done"):
    claim.reply(encode_result(0, data))


# --- create, open ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("option", "value", "least", "most"),
    [
        ("cells", 8, "16", str(2**20)),
        ("cells", 2**21, "16", str(2**20)),
        ("cells", 17, "16", str(2**20)),
        ("job_bytes", 55, "56", "32768"),
        ("job_bytes", 32_769, "56", "32768"),
        ("result_bytes", 0, "56", "32768"),
        ("result_bytes", 32_769, "56", "32768"),
        ("participants", 0, "1", "65534"),
        ("participants", 65_535, "1", "65534"),
        ("arena_bytes", 4095, "4096", str(2**36)),
        ("arena_bytes", 2**36 + 1, "4096", str(2**36)),
        ("quota", 0, "1", "4032"),
        ("quota", 4033, "1", "4032"),
    ],
)
@pytest.mark.parametrize("call", [JobQueue.create, JobQueue.open_or_create])
def test_a_number_outside_its_limits_is_refused_by_name_and_nothing_is_created(call, path, option, value, least, most):
    with pytest.raises(ValueError, match=option) as caught:
        call(path, **{option: value})
    assert least in str(caught.value)
    assert most in str(caught.value)
    assert str(value) in str(caught.value)
    assert not os.path.exists(path)


@pytest.mark.parametrize("option", ["cells", "job_bytes", "result_bytes", "participants", "arena_bytes", "quota"])
@pytest.mark.parametrize("value", [True, 64.0, "64"])
def test_a_number_that_is_no_int_is_refused_by_name(path, option, value):
    with pytest.raises(TypeError, match=f"{option}.*{type(value).__name__}"):
        JobQueue.create(path, **{option: value})
    assert not os.path.exists(path)


def test_creating_over_a_queue_is_refused_and_leaves_it_alone(make, path):
    queue = make()
    job_id = queue.submit(job())
    with pytest.raises(FileExistsError, match="pool"):
        JobQueue.create(path, 32)
    assert queue.cells_total == 16
    assert queue.claim(WAIT_S).job_id == job_id


def test_opening_where_there_is_no_queue_is_refused_and_creates_nothing(path):
    for readonly in (False, True):
        with pytest.raises(FileNotFoundError, match="queue"):
            JobQueue.open(path, readonly)
    assert not os.path.exists(path)


@pytest.mark.parametrize(
    ("option", "value"),
    [
        ("cells", 32),
        ("job_bytes", 256),
        ("result_bytes", 256),
        ("participants", 63),
        ("quota", 3),
        ("arena_bytes", 2**23),
    ],
)
def test_open_or_create_names_what_differs_from_what_was_asked(make, path, option, value):
    kept = {"cells": 16, "participants": 64, "arena_bytes": 2**24, "job_bytes": 192, "result_bytes": 192, "quota": 8}
    make(**kept)
    JobQueue.open_or_create(path, **kept).close()
    with pytest.raises(LayoutMismatch, match=rf"expected {option} {value} \(found {kept[option]}\);"):
        JobQueue.open_or_create(path, **{**kept, option: value})


def test_a_queue_is_not_made_by_calling_its_class():
    with pytest.raises(TypeError, match=r"JobQueue\.create"):
        JobQueue()


@pytest.mark.parametrize("name", ["queue", b"queue", "Warteschlange \N{SNOWMAN}", b"not \xff UTF-8"])
def test_a_path_may_be_text_or_bytes_of_any_kind(tmp_path, name):
    path = os.path.join(os.fsencode(tmp_path), name) if isinstance(name, bytes) else os.path.join(tmp_path, name)
    with JobQueue.create(path, 16, arena_bytes=2**20) as queue:
        assert queue.path == os.fsdecode(path)
        queue.submit(job())
        with JobQueue.open(path) as worker:
            reply(worker.claim(WAIT_S))
        assert queue.recv(WAIT_S).result == b"done"


def test_a_path_like_path_is_taken_and_what_the_queue_was_made_with_can_be_read(tmp_path):
    with JobQueue.create(
        tmp_path / "queue", 64, job_bytes=64, result_bytes=128, participants=5, arena_bytes=2**20, quota=9
    ) as queue:
        assert (queue.cells_total, queue.job_bytes, queue.result_bytes, queue.participants) == (64, 64, 128, 5)
        assert (queue.arena_bytes, queue.quota, queue.reserve) == (2**20, 9, 1)


def test_open_or_create_after_open_or_create_meets_the_same_queue(path):
    with JobQueue.open_or_create(path, 16) as first, JobQueue.open_or_create(path, 16) as second:
        job_id = first.submit(job())
        assert second.claim(WAIT_S).job_id == job_id


# --- a job's way ----------------------------------------------------------------------------------------------------


def test_a_job_goes_out_runs_and_its_result_comes_back(make):
    client, worker = make(), make.open(role=Role.WORKER)
    job_id = client.submit(Pass(42, b"arguments"))
    claim = worker.claim(WAIT_S)
    token, pass_ = decode_submit(claim.payload)
    assert (pass_.closure_id, pass_.args) == (42, b"arguments")
    assert claim.job_id == job_id
    assert token == job_id & 0xFFFFFFFF
    claim.started()
    claim.reply(encode_result(token, b"answer"))
    result = client.recv(WAIT_S)
    assert (result.token, result.result) == (job_id, b"answer")
    assert client.stats().free == 16


def test_a_job_id_is_number_incarnation_and_sequence(make):
    client = make()
    ids = [client.submit(job()) for _ in range(5)]
    assert {job_id >> 48 for job_id in ids} == {client.slot + 1}
    assert {job_id >> 32 & 0xFFFF for job_id in ids} == {1}
    assert [job_id & 0xFFFFFFFF for job_id in ids] == [1, 2, 3, 4, 5]


def test_the_queue_puts_the_jobs_own_token_into_a_result(make):
    client = make()
    job_id = client.submit(job())
    client.claim(WAIT_S).reply(encode_result(0xDEADBEEF, b"x"))
    frame = client.result_side.pop(WAIT_S)
    assert decode_result(frame).token == job_id & 0xFFFFFFFF


def test_an_error_comes_back_as_its_class_with_its_text(make):
    client = make()
    client.submit(job())
    client.submit(job())
    client.claim(WAIT_S).reply(encode_result(0, UnknownClosureId("nobody knows 7")))
    client.claim(WAIT_S).reply(encode_result(0, ExecutionError("KeyError: 'x'")))
    first, second = client.recv(WAIT_S).result, client.recv(WAIT_S).result
    assert (type(first), str(first)) == (UnknownClosureId, "nobody knows 7")
    assert (type(second), str(second)) == (ExecutionError, "KeyError: 'x'")


def test_results_come_in_the_order_in_which_the_jobs_ended(make):
    client = make()
    ids = [client.submit(job(n)) for n in range(4)]
    claims = [client.claim(WAIT_S) for _ in range(4)]
    for n in (2, 0, 3, 1):
        reply(claims[n])
    assert [client.recv(WAIT_S).token for _ in range(4)] == [ids[n] for n in (2, 0, 3, 1)]


def test_recv_says_empty_at_its_timeout_and_recv_many_gives_what_is_there(make):
    client = make()
    for call in (client.try_recv, lambda: client.recv(0), lambda: client.recv(0.01)):
        with pytest.raises(Empty, match="result"):
            call()
    assert client.recv_many(10) == []
    ids = [client.submit(job(n)) for n in range(3)]
    for _ in ids:
        reply(client.claim(WAIT_S))
    assert client.recv_many(0) == []
    assert [result.token for result in client.recv_many(2)] == ids[:2]
    assert client.try_recv().token == ids[2]
    assert client.recv_many(10) == []
    with pytest.raises(ValueError, match="-1"):
        client.recv_many(-1)


def test_claim_says_empty_at_its_timeout(make):
    worker = make()
    for call in (worker.try_claim, lambda: worker.claim(0), lambda: worker.claim(0.01)):
        with pytest.raises(Empty, match="job"):
            call()


@pytest.mark.parametrize("call", ["claim", "recv"])
@pytest.mark.parametrize(("timeout", "error"), [(-1, ValueError), (float("nan"), ValueError), ("1", TypeError)])
def test_a_timeout_that_is_none_is_refused(make, call, timeout, error):
    queue = make()
    with pytest.raises(error):
        getattr(queue, call)(timeout)


@pytest.mark.parametrize(
    ("options", "error", "text"),
    [
        ({"priority": -1}, ValueError, "priority: expected 0 to 2, found -1"),
        ({"priority": 3}, ValueError, "priority: expected 0 to 2, found 3"),
        ({"priority": True}, TypeError, "priority"),
        ({"priority": "0"}, TypeError, "priority"),
        ({"max_attempts": 0}, ValueError, "max_attempts: expected 1 to 65535, found 0"),
        ({"max_attempts": 65_536}, ValueError, "max_attempts: expected 1 to 65535, found 65536"),
        ({"max_attempts": 1.5}, TypeError, "max_attempts"),
        ({"timeout": 0}, ValueError, "timeout"),
        ({"timeout": -3}, ValueError, "timeout"),
        ({"timeout": float("nan")}, ValueError, "timeout"),
        ({"timeout": "5"}, TypeError, None),
        ({"wait": -1}, ValueError, "-1"),
        ({"wait": float("nan")}, ValueError, "nan"),
        ({"wait": "5"}, TypeError, None),
    ],
)
def test_submit_refuses_an_option_outside_its_limits_and_hands_nothing_in(make, options, error, text):
    queue = make()
    with pytest.raises(error, match=text):
        queue.submit(job(), **options)
    assert queue.stats().waiting == 0


@pytest.mark.parametrize("wrong", [None, b"frame", (7, b"args")])
def test_submit_takes_a_pass_and_nothing_else(make, wrong):
    with pytest.raises(TypeError):
        make().submit(wrong)


def test_what_submit_was_told_stands_in_the_cell_until_it_is_claimed(make):
    queue = make()
    before = time.time_ns()
    job_id = queue.submit(job(), priority=2, timeout=1.5, max_attempts=9)
    queue.submit(job(), timeout=1e30)
    cells = queue.cells()
    cell = cells[cells["job_id"] == job_id]
    assert len(cell) == 1
    assert (cell["priority"], cell["timeout_ms"], cell["max_attempts"], cell["attempts"]) == (2, 1_500, 9, 0)
    assert before <= cell["submitted_ns"][0] <= time.time_ns()
    assert sorted(cells["timeout_ms"])[-1] == 2**32 - 1
    queue.claim(WAIT_S).ack()
    claim = queue.claim(WAIT_S)
    assert (claim.job_id, claim.attempts, claim.max_attempts) == (job_id, 0, 9)
    claim.started()
    claim.started()
    assert claim.attempts == 1
    assert cell["started_ns"][0] == 0, "boolean indexing copies"
    assert queue.cells()["started_ns"].max() >= before


# --- claims ---------------------------------------------------------------------------------------------------------


def test_an_acknowledged_job_is_over_and_no_result_comes(make):
    client = make()
    job_id = client.submit(job())
    client.claim(WAIT_S).ack()
    assert client.stats().free == 16
    with pytest.raises(Empty):
        client.try_recv()
    with pytest.raises(Empty):
        client.try_claim()
    assert client.cancel(job_id) is False


@pytest.mark.parametrize("started", [True, False])
def test_a_released_job_comes_again_uncharged(make, started):
    client = make()
    job_id = client.submit(job())
    for _ in range(3):
        claim = client.claim(WAIT_S)
        assert (claim.job_id, claim.attempts) == (job_id, 0)
        assert decode_submit(claim.payload)[1] == job()
        if started:
            claim.started()
            assert claim.attempts == 1
        claim.release()
    assert client.stats().waiting == 1


@pytest.mark.parametrize("first", ENDS)
@pytest.mark.parametrize("second", [*ENDS, "started"])
def test_a_claim_ends_once(make, first, second):
    client = make()
    client.submit(job())
    claim = client.claim(WAIT_S)
    view = claim.payload
    ENDS[first](claim)
    before = client.cells()["word"].copy()
    with pytest.raises(ValueError, match="over"):
        ENDS.get(second, lambda claim: claim.started())(claim)
    for look in (claim.tobytes, lambda: claim.payload, lambda: claim.attempts, lambda: claim.max_attempts):
        with pytest.raises(ValueError, match="over"):
            look()
    with pytest.raises(ValueError, match="released"):
        bytes(view)
    assert (client.cells()["word"] == before).all()


def test_a_payload_is_the_frame_where_it_lies_and_cannot_be_written(make):
    client = make()
    job_id = client.submit(Pass(3, b"abc"))
    claim = client.claim(WAIT_S)
    frame = encode_submit(3, job_id & 0xFFFFFFFF, b"abc")
    assert claim.payload == frame
    assert claim.tobytes() == frame
    assert claim.payload.readonly
    assert claim.payload is claim.payload
    with pytest.raises(TypeError):
        claim.payload[0] = 1
    with pytest.raises(ValueError, match="read-only"):
        np.frombuffer(claim.payload, np.uint8)[0] = 1


@pytest.mark.parametrize("end", ENDS)
@pytest.mark.parametrize("look", [lambda view: view, lambda view: view[2:], memoryview])
def test_a_claim_cannot_end_while_an_array_looks_at_its_payload(make, end, look):
    client = make()
    client.submit(Pass(3, b"abcdef"))
    claim = client.claim(WAIT_S)
    array = np.frombuffer(look(claim.payload), np.uint8)
    before = array.tobytes()
    with pytest.raises(BufferError):
        ENDS[end](claim)
    assert client.stats().running == 1
    assert array.tobytes() == before
    assert claim.tobytes().endswith(b"abcdef")
    del array
    ENDS[end](claim)
    assert client.stats().running == 0


def test_a_malformed_reply_is_refused_and_the_claim_is_still_held(make):
    client = make()
    client.submit(job())
    claim = client.claim(WAIT_S)
    good = encode_result(0, b"12345")
    for bad in (b"", good[:6], good[:-1], good + b"x", good[:4] + b"\x02" + good[5:]):
        with pytest.raises(TransportError, match="malformed"):
            claim.reply(bad)
    for bad in (None, "text", 5):
        with pytest.raises(TypeError):
            claim.reply(bad)
    assert client.stats().running == 1
    claim.reply(bytearray(good))
    assert client.recv(WAIT_S).result == b"12345"


def test_a_reply_may_be_any_contiguous_buffer(make):
    client = make()
    frame = encode_result(0, b"12345")
    for form in (bytearray(frame), memoryview(frame), np.frombuffer(frame, np.uint8)):
        client.submit(job())
        client.claim(WAIT_S).reply(form)
        assert client.recv(WAIT_S).result == b"12345"
    client.submit(job())
    claim = client.claim(WAIT_S)
    with pytest.raises((BufferError, ValueError)):
        claim.reply(np.frombuffer(frame * 2, np.uint8)[::2])
    claim.release()


@pytest.mark.parametrize("looked_at", [True, False])
def test_a_claim_that_is_dropped_without_an_end_puts_its_job_back(make, looked_at):
    client = make()
    job_id = client.submit(job())
    claim = client.claim(WAIT_S)
    claim.started()
    if looked_at:
        assert len(claim.payload) == 15
    del claim
    gc.collect()
    claim = client.claim(WAIT_S)
    assert (claim.job_id, claim.attempts) == (job_id, 0)


def test_a_claim_that_is_dropped_while_an_array_looks_at_it_is_put_back_at_the_latest_with_that(make, run_script):
    client = make()
    job_id = client.submit(Pass(3, b"looked at"))
    run_script(
        """
        client, worker = JobQueue.open(sys.argv[1]), JobQueue.open(sys.argv[1])
        for look in (lambda view: view, lambda view: view[3:]):
            claim = worker.claim(20)
            claim.started()
            array = np.frombuffer(look(claim.payload), np.uint8)
            del claim
            gc.collect()
            assert array.tobytes().endswith(b"looked at")
            del array
            gc.collect()
            assert client.stats().states == {"FREE": 15, "RETRY": 1}, client.stats()
        """,
        client.path,
    )
    claim = client.claim(WAIT_S)
    assert (claim.job_id, claim.attempts) == (job_id, 0)


@pytest.mark.parametrize("looked_at", [True, False])
def test_a_claim_that_is_dropped_together_with_its_handle_puts_its_job_back(make, run_script, looked_at):
    client = make()
    job_id = client.submit(job())
    run_script(
        """
        client = JobQueue.open(sys.argv[1])
        for _ in range(10):
            worker = JobQueue.open(sys.argv[1])
            claim = worker.claim(20)
            claim.started()
            if sys.argv[2] == "True":
                assert len(claim.payload) == 15
            del claim, worker
            gc.collect()
            assert client.stats().states == {"FREE": 15, "RETRY": 1}, client.stats()
        """,
        client.path,
        looked_at,
    )
    claim = client.claim(WAIT_S)
    assert (claim.job_id, claim.attempts) == (job_id, 0)


@pytest.mark.parametrize("look", ["None", "claim.payload", "np.frombuffer(claim.payload, np.uint8)"])
def test_a_process_that_ends_without_closing_puts_its_claims_back_and_says_nothing(make, run_script, look):
    client = make()
    job_id = client.submit(job())
    run_script(
        f"""
        queue = JobQueue.open(sys.argv[1])
        claim = queue.claim(20)
        claim.started()
        view = {look}
        """,
        client.path,
    )
    assert client.stats().states == {"FREE": 15, "RETRY": 1}
    claim = client.claim(WAIT_S)
    assert (claim.job_id, claim.attempts) == (job_id, 0)


# --- cancel ---------------------------------------------------------------------------------------------------------


def test_cancel_takes_back_what_waits_and_nothing_else(make):
    client, worker = make(), make.open()
    waiting, running, done, taken_back, released = (client.submit(job(n)) for n in range(5))
    claims = {}
    for _ in range(5):
        claim = worker.claim(WAIT_S)
        claims[claim.job_id] = claim
    reply(claims[done])
    for put_back in (waiting, taken_back, released):
        claims[put_back].release()
    assert client.cancel(taken_back) is True
    assert client.cancel(taken_back) is False
    assert client.cancel(running) is False
    assert client.cancel(done) is False
    assert client.cancel(released + 1000) is False
    assert client.recv(WAIT_S).token == done
    assert client.cancel(done) is False
    again = worker.claim(WAIT_S)
    assert again.job_id == waiting
    assert worker.cancel(released) is True, "any handle may cancel a job by its id"
    with pytest.raises(Empty):
        worker.try_claim()
    reply(claims[running])
    reply(again)
    assert sorted(result.token for result in client.recv_many(10)) == [waiting, running]
    assert client.stats().free == 16


def test_cancel_leaves_a_running_job_to_its_claim_and_its_client(make):
    client, worker = make(), make.open()
    job_id = client.submit(job())
    for _ in range(2):
        claim = worker.claim(WAIT_S)
        for handle in (client, worker):
            assert handle.cancel(job_id) is False
        claim.started()
        assert client.cancel(job_id) is False
        claim.release()
    claim = worker.claim(WAIT_S)
    assert client.cancel(job_id) is False
    reply(claim, b"all the same")
    assert client.cancel(job_id) is False
    result = client.recv(WAIT_S)
    assert (result.token, result.result) == (job_id, b"all the same")


@pytest.mark.parametrize("other_bit", [1 << 63, 1 << 48, 1 << 47, 1 << 32, 1 << 31, 1])
def test_cancel_knows_a_job_by_its_whole_id_alone(make, other_bit):
    client, worker = make(), make.open()
    job_id = client.submit(job())
    assert client.cancel(job_id ^ other_bit) is False
    assert client.cancel(job_id & 0xFFFFFFFF) is False, "a token of the scheduler is no job id"
    assert worker.claim(WAIT_S).job_id == job_id


def test_a_job_cancelled_by_another_handle_makes_room_in_the_quota_of_its_own_client_alone(make):
    client, other = make(quota=2), make.open()
    ids = [client.submit(job(n), wait=0) for n in range(2)]
    other.submit(job(), wait=0)
    assert other.cancel(ids[0]) is True
    assert client.cancel(ids[0]) is False
    for handle in (client, other):
        handle.submit(job(), wait=0)
        with pytest.raises(Full, match="quota"):
            handle.submit(job(), wait=0)


def test_a_waiting_job_of_a_closed_client_can_be_cancelled(make):
    worker, client = make(), make.open()
    job_id = client.submit(job())
    client.close()
    assert worker.cancel(job_id) is True
    assert worker.stats().states == {"FREE": 16}


def test_cancel_of_what_is_not_known_takes_no_slot(make):
    queue = make()
    assert queue.cancel(1 << 48 | 1 << 32 | 1) is False
    assert queue.stats().participants == 0


@pytest.mark.parametrize(
    ("wrong", "error"), [(0, ValueError), (-1, ValueError), (2**64, ValueError), ("1", TypeError), (True, TypeError)]
)
def test_cancel_refuses_what_can_be_no_job_id(make, wrong, error):
    with pytest.raises(error, match=r"job_id.*found"):
        make().cancel(wrong)


# --- stats, cells ---------------------------------------------------------------------------------------------------


def test_stats_counts_the_cells_by_what_they_do(make):
    client, worker = make(64), make.open(role=Role.WORKER)
    for priority, n in ((0, 3), (1, 4), (2, 5)):
        for _ in range(n):
            client.submit(job(), priority=priority)
    running = [worker.claim(WAIT_S) for _ in range(6)]
    reply(running.pop())
    reply(running.pop())
    running.pop().release()
    stats = client.stats()
    assert (stats.cells, stats.free, stats.waiting, stats.running, stats.done, stats.other) == (64, 52, 7, 3, 2, 0)
    assert stats.waiting_by_priority in ((0, 2, 5), (1, 1, 5))
    assert stats.states == {"FREE": 52, "READY": 6, "RETRY": 1, "TAKEN": 3, "DONE": 2}
    assert (stats.participants, stats.quota, stats.reserve) == (2, 32, 1)
    assert (stats.arena_bytes, stats.arena_backed_bytes) == (2**24, 0)
    client.submit(Pass(1, bytes(5000)))
    assert client.stats().arena_backed_bytes == 8192
    assert [s.role for s in map(client.heartbeat.snapshot, client.heartbeat) if s] == [Role.CLIENT, Role.WORKER]


def test_cells_shows_the_headers_read_only_also_after_the_handle_was_closed(make):
    queue = make()
    job_id = queue.submit(job())
    cells = queue.cells()
    assert len(cells) == 16
    assert np.count_nonzero(cells["job_id"] == job_id) == 1
    with pytest.raises(ValueError, match="read-only"):
        cells["job_id"][0] = 1
    queue.close()
    assert np.count_nonzero(cells["job_id"] == job_id) == 1


# --- quota, Full ----------------------------------------------------------------------------------------------------


def test_full_says_that_the_cells_are_the_limit(make):
    first = make(quota=15)
    for n in range(15):
        first.submit(job(n), wait=0)
    other = make.open()
    for wait in (0, 0.01):
        with pytest.raises(Full, match="all 15 cells") as caught:
            other.submit(job(), wait=wait)
        assert "quota" not in str(caught.value)
    assert other.stats().states == {"FREE": 1, "READY": 15}


def test_a_client_holds_its_quota_and_never_more(make):
    client = make(quota=4)
    for n in range(4):
        client.submit(job(n), wait=0)
    for _ in range(3):
        for wait in (0, 0.01):
            with pytest.raises(Full, match="quota of 4 cells"):
                client.submit(job(), wait=wait)
            assert client.stats().waiting == 4
    other = make.open()
    other.submit(job(), wait=0)
    assert other.stats().waiting == 5


@pytest.mark.parametrize("room", ["recv", "recv_many", "ack", "cancel", "pop"])
def test_a_client_at_its_quota_has_as_much_room_as_it_made(make, room):
    client, worker = make(quota=4), make.open()
    ids = [client.submit(job(n), wait=0) for n in range(4)]
    for step in range(1, 8):
        if room == "cancel":
            assert client.cancel(ids.pop())
        elif room == "ack":
            worker.claim(WAIT_S).ack()
        else:
            reply(worker.claim(WAIT_S))
            if room == "recv":
                client.recv(WAIT_S)
            elif room == "recv_many":
                assert len(client.recv_many(2)) == 1
            else:
                client.result_side.pop(WAIT_S)
        ids.append(client.submit(job(10 + step), wait=WAIT_S))
        with pytest.raises(Full, match="quota"):
            client.submit(job(), wait=0)
        assert worker.stats().free == 12


def test_a_submit_that_nobody_makes_room_for_ends_although_it_was_to_wait_for_ever(make, run_script):
    client = make(quota=2)
    client.close()
    run_script(
        """
        queue = JobQueue.open(sys.argv[1])
        for _ in range(2):
            queue.submit(Pass(1, b""))
            queue.claim(0).reply(encode_result(0, b"r"))
        try:
            queue.submit(Pass(1, b""))
        except Full as error:
            assert "quota of 2" in str(error) and "nobody collects" in str(error), error
        else:
            raise AssertionError("submitted over the quota")
        assert len(queue.recv_many(5)) == 2
        queue.submit(Pass(1, b""), wait=0)
        """,
        client.path,
        seconds=25,
    )


def test_a_submit_waits_for_the_room_that_another_thread_makes_by_receiving(make):
    client, worker = make(quota=2), make.open()
    received = []
    ids = []

    def receive():
        while len(received) < 40:
            received.append(client.recv(WAIT_S).token)

    def work():
        for _ in range(40):
            reply(worker.claim(WAIT_S))

    threads = [threading.Thread(target=receive), threading.Thread(target=work)]
    for thread in threads:
        thread.start()
    ids.extend(client.submit(job(n)) for n in range(40))
    for thread in threads:
        thread.join(WAIT_S)
    assert received == ids


def test_a_submit_waits_for_the_cell_that_another_client_frees(make):
    first, second = make(quota=15), make.open()
    ids = [first.submit(job(n), wait=0) for n in range(15)]
    waiter = threading.Thread(target=second.submit, args=(job(99),))
    waiter.start()
    assert first.cancel(ids[3])
    waiter.join(WAIT_S)
    assert not waiter.is_alive()
    assert second.stats().states == {"FREE": 1, "READY": 15}


def test_a_result_has_room_in_a_pool_that_is_full_of_results(make):
    client, worker = make(quota=15), make.open()
    for _ in range(3):
        ids = [client.submit(job(n), wait=0) for n in range(15)]
        for n in range(15):
            reply(worker.claim(WAIT_S), b"result %d" % n)
        assert worker.stats().done == 15
        with pytest.raises(Full):
            worker.submit(job(), wait=0)
        assert [(r.token, r.result) for r in client.recv_many(99)] == [
            (job_id, b"result %d" % n) for n, job_id in enumerate(ids)
        ]


# --- read-only, closed, table ---------------------------------------------------------------------------------------


def test_a_read_only_handle_looks_takes_no_slot_and_changes_nothing(make):
    client = make()
    job_id = client.submit(job())
    looker = make.open(readonly=True)
    before = client.cells()["word"].copy()
    for call in (
        lambda: looker.submit(job()),
        looker.try_claim,
        lambda: looker.claim(1),
        looker.try_recv,
        lambda: looker.recv(1),
        lambda: looker.recv_many(1),
        lambda: looker.cancel(job_id),
        looker.repair,
        lambda: looker.slot,
        lambda: looker.submit_side.try_push(encode_submit(1, 0, b"")),
        lambda: looker.result_side.try_pop(),
        lambda: looker.heartbeat.register(os.getpid()),
    ):
        with pytest.raises(TransportError, match="read-only"):
            call()
    assert looker.stats().waiting == 1
    assert looker.stats().participants == 1
    assert looker.cells()["job_id"].max() == job_id
    assert (client.cells()["word"] == before).all()
    claim = client.claim(WAIT_S)
    assert looker.stats().running == 1, "it sees what others do"
    claim.ack()


def test_a_handle_takes_its_slot_at_its_first_submit_claim_or_receive(make):
    queue = make()
    assert queue.stats().participants == 0
    for n, call in enumerate(
        (
            lambda handle: handle.submit(job()),
            lambda handle: handle.try_claim(),
            lambda handle: handle.recv_many(1),
            lambda handle: handle.slot,
        )
    ):
        handle = make.open(role=Role.WORKER)
        handle.stats()
        assert queue.stats().participants == n
        call(handle)
        assert queue.stats().participants == n + 1
        assert handle.slot == n
        snapshot = handle.heartbeat.snapshot(n)
        assert (snapshot.pid, snapshot.role) == (os.getpid(), Role.WORKER)
    handle.close()
    assert queue.stats().participants == 3


def test_no_slot_left_is_an_error_that_says_so_until_one_is_given_up(make):
    queue = make(participants=2)
    first, second, third = make.open(), make.open(), make.open()
    first.submit(job())
    second.submit(job())
    for call in (lambda: third.submit(job()), third.try_claim, third.try_recv):
        with pytest.raises(TableFull, match="all 2 slots"):
            call()
    assert queue.stats().waiting == 2
    first.close()
    third.submit(job())
    assert third.slot == 0


def test_a_closed_handle_refuses_every_call(make):
    queue = make()
    queue.submit(job())
    claim = queue.claim(WAIT_S)
    sides = queue.submit_side, queue.result_side
    assert not queue.closed
    assert "open" in repr(queue)
    queue.close()
    queue.close()
    assert queue.closed
    assert "closed" in repr(queue)
    frame = encode_submit(1, 0, b"")
    for call in (
        lambda: queue.submit(job()),
        queue.try_claim,
        queue.claim,
        queue.try_recv,
        queue.recv,
        lambda: queue.recv_many(1),
        lambda: queue.cancel(1),
        queue.stats,
        queue.cells,
        queue.repair,
        lambda: queue.slot,
        lambda: queue.arena_backed_bytes,
        queue.__enter__,
        lambda: sides[0].try_push(frame),
        lambda: sides[0].push(frame),
        sides[0].try_pop,
        sides[0].pop,
        sides[0].try_claim,
        sides[0].claim,
        sides[1].try_pop,
        sides[1].pop,
        lambda: queue.heartbeat.beat(0),
        claim.tobytes,
        lambda: claim.payload,
        claim.started,
        claim.ack,
        claim.release,
        lambda: reply(claim),
    ):
        with pytest.raises(ValueError, match="closed"):
            call()


def test_looking_at_a_claim_of_a_closed_handle_is_an_error_and_no_crash(make, run_script):
    queue = make()
    queue.submit(job())
    queue.close()
    run_script(
        """
        queue = JobQueue.open(sys.argv[1])
        claim = queue.claim(20)
        queue.close()
        gc.collect()
        for look in (lambda: claim.attempts, lambda: claim.max_attempts):
            try:
                look()
            except ValueError as error:
                assert "closed" in str(error), error
            else:
                raise AssertionError("looked at memory of a closed handle")
        assert claim.job_id
        """,
        queue.path,
    )


def test_closing_the_table_of_a_queue_does_not_pull_it_from_under_the_queue(make, run_script):
    queue = make()
    queue.submit(job())
    queue.close()
    run_script(
        """
        queue = JobQueue.open(sys.argv[1])
        claim = queue.claim(20)
        try:
            queue.heartbeat.close()
        except ValueError as error:
            assert "close the queue" in str(error), error
        gc.collect()
        for call in (
            lambda: claim.reply(encode_result(0, b"r")),
            lambda: queue.submit(Pass(1, b"")),
            lambda: queue.try_recv(),
            lambda: queue.stats(),
            lambda: queue.repair(),
        ):
            try:
                call()
            except (SubethaError, ValueError):
                pass
        queue.close()
        """,
        queue.path,
    )


@pytest.mark.parametrize("looked_at", [True, False])
@pytest.mark.parametrize("started", [True, False])
def test_the_claims_of_a_closed_handle_are_put_back_uncharged_before_the_waiting(make, started, looked_at):
    client, worker = make(), make.open()
    ids = [client.submit(job(n)) for n in range(4)]
    claims = [worker.claim(WAIT_S) for _ in range(2)]
    for claim in claims:
        if started:
            claim.started()
        if looked_at:
            assert decode_submit(claim.payload)[0]
    worker.close()
    again = [client.claim(WAIT_S) for _ in range(4)]
    assert sorted(claim.job_id for claim in again[:2]) == ids[:2]
    assert [claim.job_id for claim in again[2:]] == ids[2:]
    assert [claim.attempts for claim in again] == [0] * 4


def test_a_view_of_a_payload_outlives_the_close_that_puts_its_job_back(make, run_script):
    client = make()
    job_id = client.submit(Pass(1, b"0123456789"))
    run_script(
        """
        client = JobQueue.open(sys.argv[1])
        for end in ("ack", "release", "started", "tobytes", None):
            worker = JobQueue.open(sys.argv[1])
            claim = worker.claim(20)
            array = np.frombuffer(claim.payload, np.uint8)
            worker.close()
            assert client.stats().states == {"FREE": 15, "RETRY": 1}, client.stats()
            assert array.tobytes().endswith(b"0123456789")
            if end:
                try:
                    getattr(claim, end)()
                except (ValueError, BufferError):
                    pass
                else:
                    raise AssertionError(end)
            del claim, worker
            gc.collect()
            assert array.tobytes().endswith(b"0123456789")
            del array
            gc.collect()
            assert client.stats().states == {"FREE": 15, "RETRY": 1}, client.stats()
        """,
        client.path,
    )
    assert client.claim(WAIT_S).job_id == job_id


def test_a_queue_closes_at_the_end_of_its_with_block(make):
    queue = make()
    with JobQueue.open(queue.path) as handle:
        handle.submit(job())
        assert queue.stats().participants == 1
    assert handle.closed
    assert queue.stats().participants == 0


def test_a_handle_whose_lock_was_closed_by_other_code_says_so_and_claims_no_more(make, run_script):
    queue = make()
    queue.close()
    run_script(
        """
        queue, other = JobQueue.open(sys.argv[1]), JobQueue.open(sys.argv[1])

        def descriptors():
            return {fd for fd in os.listdir("/proc/self/fd") if os.path.exists("/proc/self/fd/" + fd)}

        before = descriptors()
        queue.slot
        (lock,) = descriptors() - before
        queue.submit(Pass(1, b"held"))
        claim = queue.claim(20)
        assert os.readlink("/proc/self/fd/" + lock).endswith("table")
        os.close(int(lock))
        # the timer looks twice a second
        while True:
            try:
                queue.cancel(queue.submit(Pass(1, b"")))
            except HeartbeatError as error:
                assert "open it again" in str(error), error
                break
            time.sleep(0.01)
        for call in (queue.try_claim, queue.claim, lambda: claim.reply(encode_result(0, b""))):
            try:
                call()
            except HeartbeatError:
                continue
            raise AssertionError(call)
        other.submit(Pass(1, b"x"))
        other.claim(20).reply(encode_result(0, b"fine"))
        assert other.recv(20).result == b"fine"
        queue.close()
        """,
        queue.path,
    )


# --- as transports --------------------------------------------------------------------------------------------------


def test_the_sides_carry_frames(make):
    client, worker = make(), make.open()
    submit, result, served = client.submit_side, client.result_side, worker.submit_side
    assert submit.claims_reply is True
    assert submit.payload_bytes is None
    assert result.payload_bytes is None
    job_id = submit.try_push(encode_submit(5, 99, b"args"))
    assert job_id >> 48 == client.slot + 1
    claim = served.claim(WAIT_S)
    assert decode_submit(claim.payload) == (job_id & 0xFFFFFFFF, Pass(5, b"args"))
    claim.reply(encode_result(0, b"r"))
    assert result.try_pop() == encode_result(job_id & 0xFFFFFFFF, b"r")
    job_id = submit.push(bytearray(encode_submit(5, 99, b"more")), WAIT_S)
    assert served.pop(WAIT_S) == encode_submit(5, job_id & 0xFFFFFFFF, b"more")
    for nothing in (served.try_pop, served.try_claim, result.try_pop, lambda: result.pop(0.01), lambda: served.pop(0)):
        with pytest.raises(Empty):
            nothing()
    assert client.stats().free == 16


def test_a_side_refuses_what_it_cannot_do(make):
    queue = make(quota=1)
    with pytest.raises(UnsupportedTransportFamily, match="reply"):
        queue.result_side.try_push(encode_result(1, b""))
    with pytest.raises(UnsupportedTransportFamily, match="pop"):
        queue.result_side.try_claim()
    frame = encode_submit(1, 0, b"abc")
    for malformed in (b"", frame[:9], frame[:-1], frame + b"x"):
        with pytest.raises(TransportError, match="malformed"):
            queue.submit_side.try_push(malformed)
    with pytest.raises(TypeError):
        queue.submit_side.try_push("text")
    queue.submit_side.try_push(frame)
    with pytest.raises(Full, match="quota"):
        queue.submit_side.try_push(frame)
    with pytest.raises(Full, match="quota"):
        queue.submit_side.push(frame, 0.01)


# --- whose result is whose ------------------------------------------------------------------------------------------


def test_two_handles_in_one_process_have_a_mailbox_each(make):
    worker = make()
    clients = [make.open() for _ in range(3)]
    ids = [[client.submit(Pass(c, b"%d" % n)) for n in range(3)] for c, client in enumerate(clients)]
    for _ in range(9):
        claim = worker.claim(WAIT_S)
        _, pass_ = decode_submit(claim.payload)
        reply(claim, b"%d:%s" % (pass_.closure_id, pass_.args))
    for c, client in enumerate(clients):
        results = client.recv_many(99)
        assert [result.token for result in results] == ids[c]
        assert [result.result for result in results] == [b"%d:%d" % (c, n) for n in range(3)]


def test_the_results_of_a_closed_client_are_dropped_and_its_cells_come_free(make):
    worker, client = make(), make.open()
    waiting, running, _ = (client.submit(job(n)) for n in range(3))
    claims = [worker.claim(WAIT_S) for _ in range(3)]
    reply(claims[2])
    claims[0].release()
    client.close()
    assert worker.stats().states == {"FREE": 14, "RETRY": 1, "TAKEN": 1}, "done jobs leave with their client"
    reply(claims[1])
    assert worker.stats().states == {"FREE": 15, "RETRY": 1}, "an end that comes later frees the cell"
    claim = worker.claim(WAIT_S)
    assert claim.job_id == waiting, "what was accepted still runs"
    reply(claim)
    assert worker.stats().states == {"FREE": 16}
    assert worker.cancel(running) is False


@pytest.mark.parametrize("looks_first", [True, False])
def test_who_takes_the_number_again_never_gets_an_earlier_ones_result(make, looks_first):
    worker = make()
    worker.slot  # noqa: B018
    earlier = make.open()
    ids = [earlier.submit(job(n)) for n in range(3)]
    claims = [worker.claim(WAIT_S) for _ in range(2)]
    earlier.close()
    later = make.open()
    own = later.submit(job(9))
    assert own >> 48 == ids[0] >> 48
    assert own >> 32 != ids[0] >> 32
    assert own not in ids
    if looks_first:
        assert later.recv_many(9) == []
    reply(claims[0], b"for the earlier")
    claims[1].release()
    for _ in range(3):
        reply(worker.claim(WAIT_S), b"answer")
    assert [(result.token, result.result) for result in later.recv_many(9)] == [(own, b"answer")]
    assert later.recv_many(9) == []
    assert worker.stats().free == 16


def test_a_result_that_lies_in_the_mailbox_of_a_number_is_for_the_incarnation_that_submitted_it(make, files_of):
    """Frozen: the client died (its record was freed without a drain) and its mailbox still holds two results."""
    worker = make()
    worker.slot  # noqa: B018
    earlier = make.open()
    for n in range(2):
        earlier.submit(job(n))
        reply(worker.claim(WAIT_S))
    records = files_of(worker.path).records
    mailbox = files_of(worker.path).ring(f"mail/{earlier.slot + 1}")
    cells = files_of(worker.path).cells
    saved = [array.copy() for array in (*mailbox, cells["word"], cells["job_id"])]
    earlier.close()
    for array, kept in zip((*mailbox, cells["word"], cells["job_id"]), saved, strict=True):
        array[:] = kept
    later = make.open()
    assert later.recv_many(9) == []
    assert later.stats().states == {"FREE": 16}, "and the cells came free"
    own = later.submit(job(5))
    reply(worker.claim(WAIT_S), b"mine")
    assert [(r.token, r.result) for r in later.recv_many(9)] == [(own, b"mine")]
    assert records["status"][later.slot] & 0xFF == SlotState.USED


def test_the_incarnation_in_a_job_id_wraps_at_16_bits(make, files_of):
    queue = make()
    files_of(queue.path).records["status"][0] = 0xFFFE << 8
    seen = []
    for n in range(4):
        client = make.open()
        job_id = client.submit(job(n))
        seen.append(job_id >> 32 & 0xFFFF)
        reply(client.claim(WAIT_S), b"%d" % n)
        assert [(r.token, r.result) for r in client.recv_many(9)] == [(job_id, b"%d" % n)]
        client.submit(job())
        reply(client.claim(WAIT_S), b"left behind")
        client.close()
    assert seen == [0xFFFF, 0, 1, 2]
    assert queue.stats().states == {"FREE": 16}


def sequence_of(job_id):
    return job_id & 0xFFFFFFFF


def answer_next(worker):
    """Claim the job that is next and reply with what it was asked; the sequence in its frame has to be its own."""
    claim = worker.claim(WAIT_S)
    token, pass_ = decode_submit(claim.payload)
    assert token == sequence_of(claim.job_id)
    reply(claim, b"answer to " + pass_.args)


def test_the_sequence_in_a_job_id_wraps_at_32_bits_and_is_never_0(make):
    client, worker = make(), make.open()
    client._sequence = 2**32 - 3
    asked = {}
    for n in range(4):
        asked[client.submit(job(n))] = b"answer to job %d" % n
        answer_next(worker)
        result = client.recv(WAIT_S)
        assert result.result == asked[result.token]
    assert [sequence_of(job_id) for job_id in asked] == [2**32 - 2, 2**32 - 1, 1, 2]
    assert client.stats().states == {"FREE": 16}


def test_a_sequence_that_wraps_skips_every_pending_job_and_mixes_up_no_results(make):
    client, neighbour, worker = make(64), make.open(), make.open()
    ids = [client.submit(job(n)) for n in range(7)]
    put_back, running, cancelled, done, collected, waiting, _ = ids
    asked = {job_id: b"answer to job %d" % n for n, job_id in enumerate(ids)}
    claims = {claim.job_id: claim for claim in (worker.claim(WAIT_S) for _ in range(5))}
    reply(claims[collected], asked.pop(collected))
    assert client.recv(WAIT_S).token == collected
    reply(claims[done], asked[done])
    claims[put_back].release()
    claims[cancelled].release()
    assert client.cancel(cancelled)
    del asked[cancelled]
    # another client's sequences are its own: they neither skip nor are skipped
    theirs = {neighbour.submit(Pass(8, b"theirs %d" % n)): b"answer to theirs %d" % n for n in range(9)}

    client._sequence = 2**32 - 3
    later = [client.submit(job(100 + n)) for n in range(6)]
    asked |= {job_id: b"answer to job %d" % (100 + n) for n, job_id in enumerate(later)}
    free_again = [sequence_of(cancelled), sequence_of(collected)]
    assert [sequence_of(job_id) for job_id in later] == [2**32 - 2, 2**32 - 1, *free_again, 8, 9]
    assert (sequence_of(put_back), sequence_of(waiting)) == (1, 6)
    assert [sequence_of(job_id) for job_id in theirs] == list(range(1, 10))

    reply(claims[running], asked[running])
    while client.stats().waiting:
        answer_next(worker)
    assert {result.token: result.result for result in client.recv_many(99)} == asked
    assert {result.token: result.result for result in neighbour.recv_many(99)} == theirs
    assert client.stats().states == {"FREE": 64}


def test_cancel_after_the_wrap_takes_back_the_later_job_of_the_same_id(make):
    client, worker = make(), make.open()
    earlier, second = client.submit(job(1)), client.submit(job(2))
    assert client.cancel(earlier)
    client._sequence = 2**32 - 1
    later = client.submit(job(3))
    assert later == earlier
    assert client.cancel(later) is True
    assert client.cancel(later) is False
    answer_next(worker)
    assert [(result.token, result.result) for result in client.recv_many(9)] == [(second, b"answer to job 2")]
    assert client.stats().states == {"FREE": 16}


@pytest.mark.parametrize("number", [0, 5, 64, 65, 65_535])
def test_a_job_of_a_client_that_has_no_mailbox_is_over_without_a_result(make, files_of, number):
    client, worker = make(), make.open()
    client.submit(job())
    cells = files_of(client.path).cells
    cells["job_id"][cells["job_id"] != 0] = number << 48 | 1 << 32 | 1
    reply(worker.claim(WAIT_S))
    assert worker.stats().states == {"FREE": 16}
    assert client.recv_many(9) == []


def test_a_slot_that_is_not_registered_is_an_error_of_the_table(make):
    queue = make()
    with pytest.raises(HeartbeatError, match="slot 5"):
        queue.heartbeat.beat(5)
    assert queue.cells()["word"].max() >> 16 & 0xF == CellState.FREE

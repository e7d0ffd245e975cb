"""The part of a worker's loop that the core runs by itself: with handlers that are not Python it is no Python at all."""

import signal
import sys
import threading
import zlib

import pytest

from subetha import JobQueue, Pass, WorkerLoop, scheduler
from subetha.errors import Empty, ExecutionError, HeartbeatError, TransportError
from subetha.pass_registry import PassRegistry

WAIT_S = 60
SLOW_IN_C, QUICK_IN_C = 7, 8
JOBS = 4000


@pytest.fixture
def registry():
    found = PassRegistry()
    found.register(SLOW_IN_C, zlib.compress)
    # it never gives the GIL away
    found.register(QUICK_IN_C, bytes.upper)
    return found


@pytest.fixture
def queue(tmp_path, registry):
    with JobQueue.create(tmp_path / "queue", 8192, quota=2 * JOBS, arena_bytes=2**27) as queue:
        yield queue


@pytest.fixture
def switch_often():
    before = sys.getswitchinterval()
    sys.setswitchinterval(1e-5)
    yield
    sys.setswitchinterval(before)


def fill(queue, closure_id=SLOW_IN_C):
    for n in range(JOBS):
        queue.submit(Pass(closure_id, bytes(range(140)) + n.to_bytes(4, "little")))


def loop_over(queue, registry, **options):
    return WorkerLoop(queue.submit_side, registry=registry, table=queue.heartbeat, slot=queue.slot, **options)


def test_ordinary_jobs_are_run_answered_and_counted_without_python_in_between(queue, registry, monkeypatch):
    def not_here(*_args):
        raise AssertionError

    monkeypatch.setattr(WorkerLoop, "_serve", not_here)
    fill(queue)
    loop = loop_over(queue, registry, routes=True)
    thread = threading.Thread(target=loop.run)
    thread.start()
    for _ in range(JOBS):
        result = queue.recv(WAIT_S).result
        assert zlib.decompress(result)[:140] == bytes(range(140))
    loop.stop()
    thread.join(WAIT_S)
    assert (loop.completed, loop.failed, loop.claim) == (JOBS, 0, None)
    assert queue.heartbeat.completed(queue.slot) == JOBS
    assert queue.heartbeat.snapshot(queue.slot).in_flight_bitmap == 0


def test_a_signal_is_heard_while_no_handler_is_python(queue, registry):
    fill(queue)
    loop = loop_over(queue, registry)
    before = signal.signal(signal.SIGVTALRM, lambda *_: loop.stop())
    try:
        # of processor time, which goes by only as jobs are run
        signal.setitimer(signal.ITIMER_VIRTUAL, 0.001)
        loop.run()
    finally:
        signal.setitimer(signal.ITIMER_VIRTUAL, 0)
        signal.signal(signal.SIGVTALRM, before)
    assert 0 < loop.completed < JOBS


def test_other_threads_get_their_turns_while_no_handler_is_python(queue, registry, switch_often):
    loop = loop_over(queue, registry)
    is_seen, is_over = threading.Event(), threading.Event()

    def look():
        while not is_over.is_set():
            if loop.completed % JOBS:
                # neither before nor behind a run
                is_seen.set()

    thread = threading.Thread(target=look)
    thread.start()
    try:
        for _ in range(1000):
            fill(queue, QUICK_IN_C)
            with pytest.raises(Empty):
                loop._ordinary.run(0, None)
            assert len(queue.recv_many(JOBS)) == JOBS
            if is_seen.is_set():
                break
    finally:
        is_over.set()
        thread.join(WAIT_S)
    assert is_seen.is_set()


def test_what_a_handler_raises_or_returns_that_is_no_bytes_is_told(tmp_path, registry):
    registry.register(1, lambda _args: 5)
    registry.register(2, lambda _args: 1 / 0)
    registry.register(3, lambda _args: bytearray(b"copied"))
    registry.register(4, lambda args: args)
    with JobQueue.create(tmp_path / "queue", 64) as queue:
        loop = loop_over(queue, registry)
        expected = {queue.submit(Pass(n, b"args")): n for n in (1, 2, 3, 4, 5)}
        results = {}
        thread = threading.Thread(target=loop.run)
        thread.start()
        for _ in expected:
            found = queue.recv(WAIT_S)
            results[expected[found.token]] = found.result
        loop.stop()
        thread.join(WAIT_S)
        assert str(results[1]) == "TypeError: handler 1 returned int, not bytes"
        assert str(results[2]) == "ZeroDivisionError: division by zero"
        assert isinstance(results[2], ExecutionError)
        assert (results[3], results[4]) == (b"copied", b"args")
        assert "no handler is registered" in str(results[5])
        assert (loop.completed, loop.failed) == (5, 3)
        assert queue.stats().states == {"FREE": 64}


def test_a_handler_sees_its_claim(tmp_path, registry):
    seen = []
    registry.register(1, lambda _args: seen.append(loop.claim.job_id) or b"")
    with JobQueue.create(tmp_path / "queue", 64) as queue:
        loop = loop_over(queue, registry)
        job_id = queue.submit(Pass(1))
        queue.submit(Pass(1))
        loop._between = loop.stop
        loop.run()
        assert seen == [job_id]
        assert loop.claim is None
        assert queue.stats().waiting == 1


def test_a_slot_that_nobody_has_is_refused(tmp_path, registry):
    with JobQueue.create(tmp_path / "queue", 64) as queue, pytest.raises(HeartbeatError, match="not registered"):
        WorkerLoop(queue.submit_side, registry=registry, table=queue.heartbeat, slot=queue.slot + 1)


def test_what_was_opened_for_looking_only_is_refused_or_left_alone(tmp_path, registry):
    with JobQueue.create(tmp_path / "queue", 64) as queue, JobQueue.open(tmp_path / "queue", readonly=True) as looking:
        with pytest.raises(TransportError, match="read-only"):
            WorkerLoop(queue.submit_side, registry=registry, table=looking.heartbeat, slot=queue.slot)
        loop = WorkerLoop(looking.submit_side, registry=registry)
        loop.stop()
        loop.run()


def test_a_stop_ends_the_wait_for_a_job(tmp_path, registry, monkeypatch):
    monkeypatch.setattr(scheduler, "IDLE_S", 3600)
    with JobQueue.create(tmp_path / "queue", 64) as queue:
        loop = loop_over(queue, registry)
        thread = threading.Thread(target=loop.run)
        thread.start()
        queue.submit(Pass(SLOW_IN_C, b""))
        queue.recv(WAIT_S)
        loop.stop()
        thread.join(WAIT_S)
        assert not thread.is_alive()
        queue.close()
        loop.stop()


def test_without_a_job_it_says_so_in_time(tmp_path, registry):
    with JobQueue.create(tmp_path / "queue", 64) as queue:
        loop = loop_over(queue, registry)
        with pytest.raises(Empty):
            loop._ordinary.run(0.01, None)

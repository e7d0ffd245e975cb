"""Executor and its futures, as a user of concurrent.futures knows them, and what goes beyond that.

Functions defined inside of tests travel by value; a FIFO or a file in `tmp_path` says where a job is, in place of sleeps.
"""

import concurrent.futures
import dis
import gc
import itertools
import operator
import os
import signal
import subprocess
import sys
import textwrap
import threading
import time
import weakref
from collections.abc import Callable
from concurrent.futures import CancelledError
from concurrent.futures.process import BrokenProcessPool
from pathlib import Path
from queue import Queue

import numpy as np
import pytest

from subetha import (
    ArenaFull,
    ArenaTooSmall,
    Executor,
    JobQueue,
    ResultTooLarge,
    WorkerDied,
    WorkerPool,
    calls,
    crew,
    futures,
)
from subetha.errors import ExecutionError, JobTimeout, RemoteTraceback
from subetha.pass_registry import joined

WAIT_S = 60


@pytest.fixture(scope="module")
def two():
    """Two workers, for tests that leave them as they found them."""
    with Executor(2) as found:
        yield found


@pytest.fixture
def one(monkeypatch):
    """One worker on a queue of 64 cells."""
    monkeypatch.setattr(crew, "PRIVATE_CELLS", 64)
    with Executor(1) as found:
        yield found


class Gate:
    """A job that says that it runs, and waits until it may go on."""

    def __init__(self, folder: Path):
        self.started, self.go = folder / "started", folder / "go"
        os.mkfifo(self.started)
        os.mkfifo(self.go)

    def job(self) -> Callable[[], str]:
        started, go = os.fspath(self.started), os.fspath(self.go)

        def held() -> str:
            with open(started, "w") as fifo:
                fifo.write("x")
            with open(go) as fifo:
                return fifo.read()

        return held

    def wait(self) -> None:
        self.started.read_text()

    def open(self, text: str = "gone on") -> None:
        self.go.write_text(text)


@pytest.fixture
def gate(tmp_path):
    return Gate(tmp_path)


def outcome(future, timeout=WAIT_S):
    """The future's result, or the class of what it raises."""
    try:
        return future.result(timeout)
    except (CancelledError, TimeoutError) as error:
        return type(error)


def test_a_call_runs_in_another_process_and_its_result_comes_back(two):
    assert two.submit(pow, 2, 8).result(WAIT_S) == 256
    assert two.submit(int, "20", base=8).result(WAIT_S) == 16
    assert two.submit(os.getpid).result(WAIT_S) != os.getpid()


def test_arguments_called_fn_and_self_are_the_functions_own(two):
    assert two.submit(dict, fn=1, self=2).result(WAIT_S) == {"fn": 1, "self": 2}


def test_lambdas_closures_and_local_classes_travel_by_value(two):
    class Point:
        def __init__(self, x: int):
            self.x = x

    base = 40
    moved = two.submit(lambda point: Point(point.x + base), Point(2)).result(WAIT_S)
    assert type(moved) is Point
    assert moved.x == 42


def test_what_a_script_defines_comes_back_as_what_it_is_there(tmp_path):
    script = tmp_path / "script.py"
    script.write_text(
        textwrap.dedent(
            """
            from subetha import Executor

            class Apart(Exception):
                pass

            class Point:
                x = 1

            def move(point):
                point.x += 1
                return point

            def fail():
                raise Apart("far")

            if __name__ == "__main__":
                with Executor(1) as executor:
                    moved = executor.submit(move, Point()).result()
                    assert type(moved) is Point and moved.x == 2
                    assert type(executor.submit(fail).exception()) is Apart
                    print("as they are")
            """
        )
    )
    done = subprocess.run([sys.executable, script], capture_output=True, text=True, timeout=WAIT_S, check=False)
    assert (done.stdout, done.stderr, done.returncode) == ("as they are\n", "", 0)


class TestErrors:
    def test_an_exception_comes_back_as_itself_with_the_workers_traceback_as_its_cause(self, two):
        def nested():
            return {}["missing"]

        with pytest.raises(KeyError, match="missing") as caught:
            two.submit(nested).result(WAIT_S)
        assert type(caught.value.__cause__) is RemoteTraceback
        assert "in nested" in str(caught.value.__cause__)
        assert "calls.py" not in str(caught.value.__cause__)

    def test_notes_and_arguments_of_an_exception_come_along(self, two):
        def annotated():
            error = ValueError("a", 1)
            error.add_note("a note")
            raise error

        raised = two.submit(annotated).exception(WAIT_S)
        assert raised.args == ("a", 1)
        assert raised.__notes__ == ["a note"]

    def test_arguments_that_cannot_be_pickled_fail_their_own_future(self, two):
        with pytest.raises(TypeError, match="cannot pickle '_thread"):
            two.submit(print, threading.Lock()).result(WAIT_S)
        assert two.submit(pow, 2, 2).result(WAIT_S) == 4

    def test_a_result_that_cannot_be_pickled_fails_its_own_future(self, two):
        with pytest.raises(TypeError, match="cannot pickle '_thread"):
            two.submit(threading.Lock).result(WAIT_S)

    def test_an_exception_that_cannot_be_pickled_comes_as_its_type_and_text(self, two):
        def locked():
            error = ValueError("has a lock")
            error.lock = threading.Lock()
            raise error

        with pytest.raises(ExecutionError, match=r"ValueError: has a lock \(it could not be pickled: TypeError: "):
            two.submit(locked).result(WAIT_S)

    def test_an_exception_that_cannot_be_made_again_comes_as_its_type_and_text(self, two):
        def odd():
            class Odd(Exception):
                def __init__(self, first, second):
                    super().__init__(f"{first} and {second}")

            raise Odd(1, 2)

        with pytest.raises(ExecutionError, match=r"Odd: 1 and 2 \(TypeError: "):
            two.submit(odd).result(WAIT_S)

    @pytest.mark.parametrize("side", ["argument", "result"])
    def test_what_cannot_be_unpickled_fails_its_own_future(self, two, side):
        class Broken:
            def __reduce__(self):
                return operator.truediv, (1, 0)

        if side == "argument":
            with pytest.raises(ZeroDivisionError):
                two.submit(id, Broken()).result(WAIT_S)
        else:
            with pytest.raises(ExecutionError, match=r"could not be unpickled \(ZeroDivisionError: "):
                two.submit(lambda: Broken()).result(WAIT_S)
        assert two.submit(pow, 2, 2).result(WAIT_S) == 4

    @pytest.mark.parametrize("kind", [SystemExit, KeyboardInterrupt, GeneratorExit])
    def test_what_is_no_exception_ends_no_worker(self, one, kind):
        def leave():
            raise kind("leaving")

        before = one.submit(os.getpid).result(WAIT_S)
        with pytest.raises(kind):
            one.submit(leave).result(WAIT_S)
        assert one.submit(os.getpid).result(WAIT_S) == before


class TestDeaths:
    def test_a_job_whose_worker_is_killed_runs_again(self, tmp_path):
        def killed_once(mark):
            try:
                os.close(os.open(mark, os.O_CREAT | os.O_EXCL))
            except FileExistsError:
                return "again"
            os.kill(os.getpid(), signal.SIGKILL)
            raise AssertionError("alive")

        with Executor(1) as found:
            others = [found.submit(pow, 2, n) for n in range(20)]
            assert found.submit(killed_once, os.fspath(tmp_path / "mark")).result(WAIT_S) == "again"
            assert [other.result(WAIT_S) for other in others] == [2**n for n in range(20)]

    def test_a_job_that_ends_its_worker_in_each_attempt_fails_alone(self):
        with Executor(1, max_attempts=2) as found:
            with pytest.raises(WorkerDied):
                found.submit(os._exit, 3).result(WAIT_S)
            assert found.submit(pow, 2, 2).result(WAIT_S) == 4

    def test_a_worker_that_died_counts_as_a_broken_executor_for_those_who_catch_that(self):
        assert issubclass(WorkerDied, concurrent.futures.BrokenExecutor)

    def test_a_job_that_runs_out_of_time_is_ended_whatever_it_does(self):
        def deaf():
            while True:
                try:
                    time.sleep(3600)
                except BaseException:
                    continue

        with Executor(1, timeout=0.5) as found:
            with pytest.raises(JobTimeout):
                found.submit(deaf).result(WAIT_S)
            assert found.submit(pow, 2, 2).result(WAIT_S) == 4

    def test_an_initializer_runs_in_every_worker_also_in_a_later_one(self):
        def set_up(value):
            os.environ["SUBETHA_TEST"] = value

        with Executor(1, initializer=set_up, initargs=("set up",), max_attempts=1) as found:
            assert found.submit(os.getenv, "SUBETHA_TEST").result(WAIT_S) == "set up"
            assert found.submit(os._exit, 1).exception(WAIT_S) is not None
            assert found.submit(os.getenv, "SUBETHA_TEST").result(WAIT_S) == "set up"

    @pytest.mark.parametrize("kind", [LookupError, SystemExit])
    def test_an_initializer_that_raises_breaks_the_executor(self, capfd, kind):
        def fail():
            raise kind("nothing set up")

        with Executor(2, initializer=fail) as found:
            with pytest.raises(BrokenProcessPool, match="initializer raised"):
                found.submit(pow, 2, 2).result(WAIT_S)
            with pytest.raises(BrokenProcessPool, match="initializer raised"):
                found.submit(pow, 2, 2)
        assert f"{kind.__name__}: nothing set up" in capfd.readouterr().err

    @pytest.mark.parametrize("code", [os.EX_SOFTWARE, os.EX_TEMPFAIL, os.EX_CONFIG])
    def test_a_job_may_leave_with_any_exit_code(self, code):
        with Executor(1, max_attempts=1) as found:
            with pytest.raises(WorkerDied, match=f"exit code {code}"):
                found.submit(os._exit, code).result(WAIT_S)
            assert found.submit(pow, 2, 2).result(WAIT_S) == 4

    def test_a_broken_executor_that_nobody_refers_to_leaves_nothing(self, capfd):
        found = Executor(1, initializer=operator.truediv, initargs=(1, 0))
        assert isinstance(found.submit(pow, 2, 2).exception(WAIT_S), BrokenProcessPool)
        directory = found.queue
        del found
        gc.collect()
        deadline = time.monotonic() + WAIT_S
        while os.path.exists(directory):
            assert time.monotonic() < deadline
            time.sleep(0.01)

    def test_a_result_that_was_there_stays_when_the_workers_break(self):
        with Executor(1) as found:
            future = found.submit(pow, 2, 2)
            concurrent.futures.wait([future], WAIT_S)
            # the moment in which it is settled, and not taken out yet
            found._client._pending[future.job_id] = future
            found._client.fail(RuntimeError("broken"))
            assert future.result(0) == 4
            with pytest.raises(RuntimeError, match="broken"):
                found.submit(pow, 2, 2)

    def test_a_broken_executor_fails_what_is_pending_before_the_other_workers_are_done(self, gate, tmp_path):
        first = os.fspath(tmp_path / "first")

        def first_one_only():
            # the second worker fails to start once the first one has the job in hand
            try:
                os.close(os.open(first, os.O_CREAT | os.O_EXCL))
            except FileExistsError:
                gate_started = os.open(os.path.join(os.path.dirname(first), "second"), os.O_RDONLY)
                os.read(gate_started, 1)
                raise LookupError("not the second one") from None

        os.mkfifo(tmp_path / "second")
        with Executor(2, initializer=first_one_only) as found:
            held = found.submit(gate.job())
            gate.wait()
            waiting = found.submit(pow, 2, 2)
            with open(tmp_path / "second", "w") as fifo:
                fifo.write("x")
            with pytest.raises(BrokenProcessPool):
                waiting.result(WAIT_S)
            with pytest.raises(BrokenProcessPool):
                held.result(WAIT_S)
            gate.open()

    def test_a_ctrl_c_of_the_terminal_does_not_reach_the_workers(self, one):
        pid = one.submit(os.getpid).result(WAIT_S)
        assert os.getpgid(pid) == pid != os.getpgid(0)

    def test_a_fork_of_a_job_that_returns_from_it_answers_nothing(self, one):
        def forked():
            child = os.fork()
            if child == 0:
                # it goes on in the worker's loop, and must not end what is its parent's
                os.dup2(os.open(os.devnull, os.O_WRONLY), 2)
                return "child"
            os.waitpid(child, 0)
            return "parent"

        assert one.submit(forked).result(WAIT_S) == "parent"
        assert one.submit(pow, 2, 2).result(WAIT_S) == 4


class TestSizes:
    @pytest.mark.parametrize("length", [0, 1, 150, 180, 200, 4095, 4096, 4097, 65_535, 65_536, 1 << 20, (1 << 20) + 1])
    def test_bytes_of_any_length_come_back_as_they_went(self, two, length):
        data = bytes(itertools.islice(itertools.cycle(range(251)), length))
        assert two.submit(bytes, data).result(WAIT_S) == data
        assert two.submit(len, data).result(WAIT_S) == length

    @pytest.mark.parametrize("n", [0, 1, 500, 1000, 100_000])
    def test_arrays_come_back_as_they_went(self, two, n):
        array = np.arange(n, dtype=np.float64)
        doubled = two.submit(operator.mul, array, 2).result(WAIT_S)
        np.testing.assert_array_equal(doubled, array * 2)
        assert doubled.dtype == array.dtype

    def test_an_array_is_read_only_in_the_worker_and_can_be_written_to_here(self, two):
        array = np.zeros(10_000)
        assert not two.submit(lambda given: given.flags.writeable, array).result(WAIT_S)
        back = two.submit(np.zeros, 10_000).result(WAIT_S)
        back += 1
        assert back.sum() == 10_000

    def test_several_buffers_in_one_call_stay_apart(self, two):
        parts = {name: np.full(5000, value) for name, value in (("a", 1), ("b", 2.5), ("c", True))}
        back = two.submit(lambda **given: [given["c"], given["a"], given["b"]], **parts).result(WAIT_S)
        for found, name in zip(back, "cab", strict=True):
            np.testing.assert_array_equal(found, parts[name])

    def test_arguments_longer_than_any_block_are_refused_with_both_sizes(self):
        with (
            Executor(1, arena_bytes=1 << 20) as found,
            pytest.raises(ArenaTooSmall, match=r"2000\d\d\d bytes .* \(1048576 bytes\)"),
        ):
            found.submit(len, bytes(2_000_000))

    def test_a_result_longer_than_any_block_fails_its_future_with_both_sizes(self):
        with Executor(1, arena_bytes=1 << 20) as found:
            with pytest.raises(ResultTooLarge, match=r"2000\d\d\d bytes .* \(1048576 bytes\)"):
                found.submit(bytes, 2_000_000).result(WAIT_S)
            assert found.submit(pow, 2, 2).result(WAIT_S) == 4

    def test_more_long_results_than_the_arena_holds_all_come(self):
        with Executor(2, arena_bytes=1 << 20) as found:
            results = [found.submit(bytes, 200_000) for _ in range(40)]
            assert all(future.result(WAIT_S) == bytes(200_000) for future in results)

    def test_more_long_arguments_than_the_arena_holds_wait_for_room(self):
        with Executor(1, arena_bytes=1 << 20) as found:
            futures = [found.submit(len, bytes(200_000)) for _ in range(40)]
            assert [future.result(WAIT_S) for future in futures] == [200_000] * 40

    def test_blocks_that_others_hold_are_not_waited_for(self, tmp_path):
        directory = tmp_path / "queue"
        JobQueue.create(directory, arena_bytes=1 << 20).close()
        with JobQueue.open(directory) as other, Executor(0, queue=directory) as found:
            from subetha import Pass

            other.submit(Pass(1, bytes(600_000)))
            with pytest.raises(ArenaFull, match="is left in the arena"):
                found.submit(len, bytes(600_000))


class TestMap:
    def test_results_come_in_order_and_in_chunks(self, two):
        assert list(two.map(pow, range(10), range(10))) == [n**n for n in range(10)]
        assert list(two.map(pow, range(10), range(10), chunksize=3)) == [n**n for n in range(10)]
        assert list(two.map(pow, [], [])) == []

    def test_endless_iterables_are_read_as_far_as_the_buffer_goes(self, two):
        read = []
        results = two.map(abs, map(read.append, itertools.count()), buffersize=5, chunksize=1)
        assert len(read) == 5
        del results
        results = two.map(operator.neg, (read.append(n) or n for n in itertools.count()), buffersize=5)
        assert list(itertools.islice(results, 20)) == [-n for n in range(20)]
        assert len(read) <= 5 + 26

    def test_an_exception_ends_it_and_cancels_the_rest(self, one):
        results = one.map(operator.truediv, [1, 1, 1, 1], [1, 2, 0, 4])
        assert next(results) == 1
        assert next(results) == 0.5
        with pytest.raises(ZeroDivisionError):
            next(results)
        assert list(results) == []

    def test_a_timeout_counts_from_the_call(self, one, gate):
        held = one.submit(gate.job())
        gate.wait()
        results = one.map(abs, [-1], timeout=0.05)
        with pytest.raises(TimeoutError):
            next(results)
        gate.open()
        assert held.result(WAIT_S) == "gone on"

    @pytest.mark.parametrize(
        ("options", "text"),
        [({"chunksize": 0}, "chunksize must be >= 1, not 0"), ({"buffersize": 0}, "buffersize must be >= 1, not 0")],
    )
    def test_wrong_numbers_raise_at_the_call(self, two, options, text):
        with pytest.raises(ValueError, match=text):
            two.map(abs, [1], **options)


class TestCancelling:
    def test_what_waits_is_cancelled_and_what_runs_is_not(self, one, gate):
        running = one.submit(gate.job())
        waiting = one.submit(pow, 2, 2)
        gate.wait()
        assert running.running()
        assert not waiting.running()
        assert not running.cancel()
        assert waiting.cancel()
        assert waiting.cancel()
        assert waiting.cancelled()
        assert waiting.done()
        with pytest.raises(CancelledError):
            waiting.result(WAIT_S)
        with pytest.raises(CancelledError):
            waiting.exception(WAIT_S)
        gate.open()
        assert running.result(WAIT_S) == "gone on"
        assert not running.running()
        assert not running.cancel()

    def test_whoever_waits_for_a_cancelled_future_is_told(self, one, gate):
        one.submit(gate.job())
        waiting = one.submit(pow, 2, 2)
        gate.wait()
        told = []
        waiting.add_done_callback(told.append)
        waiter = threading.Thread(target=lambda: told.append(outcome(waiting)))
        waiter.start()
        waiting.cancel()
        waiter.join(WAIT_S)
        assert sorted(told, key=str) == sorted([waiting, CancelledError], key=str)
        assert concurrent.futures.wait([waiting], WAIT_S).done == {waiting}
        gate.open()

    def test_shutdown_cancels_what_waits_when_told_to(self, monkeypatch, gate):
        monkeypatch.setattr(crew, "PRIVATE_CELLS", 64)
        found = Executor(1)
        running = found.submit(gate.job())
        waiting = [found.submit(pow, 2, 2) for _ in range(20)]
        gate.wait()
        found.shutdown(wait=False, cancel_futures=True)
        assert all(future.cancelled() for future in waiting)
        gate.open()
        found.shutdown()
        assert running.result(0) == "gone on"

    def test_futures_cancelled_at_random_moments_all_end(self, two):
        futures = [two.submit(abs, -n) for n in range(3000)]
        cancelled = {n for n in range(0, 3000, 3) if futures[n].cancel()}
        for n, future in enumerate(futures):
            if n in cancelled:
                assert future.cancelled()
            else:
                assert future.result(WAIT_S) == n
        assert two.submit(pow, 2, 2).result(WAIT_S) == 4


class TestCallbacks:
    @pytest.mark.parametrize("kind", [ValueError, SystemExit, KeyboardInterrupt])
    def test_one_that_raises_harms_nobody_else(self, two, kind, caplog):
        def bad(_future):
            raise kind("in a callback")

        done = threading.Event()
        future = two.submit(pow, 2, 2)
        future.add_done_callback(bad)
        future.add_done_callback(lambda _future: done.set())
        assert done.wait(WAIT_S)
        assert "exception calling callback" in caplog.text
        assert future.result(WAIT_S) == 4
        after = two.submit(pow, 2, 3)
        heard = threading.Event()
        after.add_done_callback(lambda _future: heard.set())
        assert heard.wait(WAIT_S)

    def test_one_that_comes_late_is_called_at_once(self, two):
        future = two.submit(pow, 2, 2)
        future.result(WAIT_S)
        told = []
        future.add_done_callback(told.append)
        assert told == [future]

    def test_each_is_called_once_whoever_collects(self, two):
        called = Queue()
        futures = [two.submit(abs, n) for n in range(500)]
        for n, future in enumerate(futures):
            future.add_done_callback(lambda _future, n=n: called.put(n))
        threads = [
            threading.Thread(target=lambda step=step: [f.result(WAIT_S) for f in futures[::step]])
            for step in (1, 2, -1)
        ]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(WAIT_S)
        assert concurrent.futures.wait(futures, WAIT_S).not_done == set()
        # by the client's thread, which may be later than who waits
        assert sorted(called.get(timeout=WAIT_S) for _ in futures) == list(range(500))
        assert called.empty()

    def test_as_completed_and_wait_work_on_futures_of_several_executors(self, two, one):
        futures = [found.submit(abs, -n) for n in range(10) for found in (two, one)]
        with concurrent.futures.ThreadPoolExecutor(1) as threads:
            futures.append(threads.submit(abs, -10))
            found = sorted(f.result() for f in concurrent.futures.as_completed(futures, WAIT_S))
        assert found == sorted([*range(10), *range(10), 10])

    def test_one_may_wait_for_another_job(self, two, gate):
        behind = two.submit(gate.job())
        gate.wait()
        got = Queue()
        first = two.submit(pow, 2, 2)
        first.add_done_callback(lambda _future: got.put(outcome(behind, WAIT_S)))
        first.result(WAIT_S)
        gate.open()
        assert got.get(timeout=WAIT_S) == "gone on"

    def test_ones_that_submit_while_the_queue_is_full_get_on(self, one):
        done = threading.Event()
        count = itertools.count(1)

        def two_more(_future):
            if (n := next(count)) < 200:
                for _ in range(2):
                    one.submit(pow, 2, 2).add_done_callback(two_more)
            elif n == 200:
                done.set()

        for _ in range(40):
            one.submit(pow, 2, 2).add_done_callback(two_more)
        assert done.wait(WAIT_S)

    @pytest.mark.parametrize("also_elsewhere", [False, True])
    def test_one_may_shut_its_executor_down(self, gate, also_elsewhere):
        found = Executor(1)
        future = found.submit(gate.job())
        gate.wait()
        shut = threading.Event()
        future.add_done_callback(lambda _future: (found.shutdown(), shut.set()))
        thread = threading.Thread(target=found.shutdown, daemon=True)
        if also_elsewhere:
            thread.start()
        gate.open()
        assert shut.wait(WAIT_S)
        if not also_elsewhere:
            thread.start()
        thread.join(WAIT_S)
        assert not thread.is_alive()
        assert not os.path.exists(found.queue)

    def test_they_are_called_while_the_one_who_collects_waits_for_something_else(self, two, gate):
        held = two.submit(gate.job())
        gate.wait()
        waiting = threading.Thread(target=held.result, args=(WAIT_S,))
        waiting.start()
        for n in range(20):
            told = threading.Event()
            two.submit(pow, 2, n).add_done_callback(lambda _future, told=told: told.set())
            assert told.wait(WAIT_S)
        gate.open()
        waiting.join(WAIT_S)


def interrupted_at(n: int, call: Callable[[], object]) -> bool:
    """Call with a Ctrl-C at the n-th moment in `futures.py` at which the interpreter looks for one; whether there was such.

    It looks where a function begins and where a call has returned.
    """
    moments = itertools.count()
    codes: dict[object, dict[int, bool]] = {}
    was_interrupted = False

    def looks(code) -> dict[int, bool]:
        if code not in codes:
            instructions = list(dis.get_instructions(code))
            before = [None, *instructions[:-1]]
            codes[code] = {
                now.offset: now.opname == "RESUME" or (last is not None and last.opname.startswith("CALL"))
                for last, now in zip(before, instructions, strict=True)
            }
        return codes[code]

    def trace(frame, event, _arg):
        nonlocal was_interrupted
        if frame.f_code.co_filename != futures.__file__:
            return None
        frame.f_trace_lines, frame.f_trace_opcodes = False, True
        if event == "opcode" and looks(frame.f_code).get(frame.f_lasti) and next(moments) == n:
            was_interrupted = True
            raise KeyboardInterrupt
        return trace

    before = sys.gettrace()
    sys.settrace(trace)
    try:
        call()
    except KeyboardInterrupt:
        pass
    finally:
        sys.settrace(before)
    return was_interrupted


@pytest.mark.skipif(sys.version_info[:2] != (3, 11), reason="of Python 3.11 it is known where it looks for signals")
class TestInterrupts:
    def test_one_at_any_moment_of_result_leaves_nobody_waiting(self, two):
        for n in itertools.count():
            future = two.submit(abs, -n)
            goes_on = interrupted_at(n, lambda future=future: future.result(WAIT_S))
            with concurrent.futures.ThreadPoolExecutor(1) as another:
                assert another.submit(future.result, WAIT_S).result() == n
                assert another.submit(lambda: two.submit(pow, 2, 2).result(WAIT_S)).result() == 4
            if not goes_on:
                break
        assert n > 10

    def test_one_at_any_moment_of_cancel_leaves_the_job_there_or_cancelled(self, one, gate):
        held = one.submit(gate.job())
        gate.wait()
        for n in itertools.count():
            waiting = one.submit(pow, 2, 2)
            goes_on = interrupted_at(n, waiting.cancel)
            waiting.cancel()
            assert waiting.cancelled()
            if not goes_on:
                break
        assert n > 3
        gate.open()
        assert held.result(WAIT_S) == "gone on"

    def test_what_a_garbage_collection_cancels_it_cancels_at_any_moment(self, two):
        """Such as the end of a `map` that nobody has read to its end; here in a thread that has the future's condition."""

        def collect():
            with future._own_condition():
                future.cancel()
            done.set()

        future = two.submit(pow, 2, 2)
        done = threading.Event()
        threading.Thread(target=collect, daemon=True).start()
        assert done.wait(WAIT_S)


class TestWaiting:
    def test_a_result_that_is_not_there_in_time_raises_and_the_job_goes_on(self, one, gate):
        future = one.submit(gate.job())
        for timeout in (0, 0.01):
            with pytest.raises(TimeoutError, match="is not done after"):
                future.result(timeout)
        assert not future.done()
        gate.wait()
        gate.open()
        assert future.result(WAIT_S) == "gone on"

    @pytest.mark.parametrize(
        "ask", [futures.JobFuture.result, futures.JobFuture.exception], ids=["result", "exception"]
    )
    def test_it_waits_once_for_a_result_that_is_not_there_in_time(self, one, gate, monkeypatch, ask):
        future = one.submit(gate.job())
        waits = []
        original = one._client.wait_for
        monkeypatch.setattr(
            one._client, "wait_for", lambda waited, timeout: waits.append(timeout) or original(waited, timeout)
        )
        with pytest.raises(TimeoutError):
            ask(future, 0.01)
        assert waits == [0.01]
        gate.wait()
        gate.open()
        assert future.result(WAIT_S) == "gone on"

    def test_threads_that_wait_for_different_jobs_get_each_its_own(self, two):
        def ask(n):
            results[n] = two.submit(abs, -n).result(WAIT_S)

        results = {}
        threads = [threading.Thread(target=ask, args=(n,)) for n in range(1, 20)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(WAIT_S)
        assert results == {n: n for n in range(1, 20)}

    def test_when_the_one_who_collects_leaves_another_goes_on(self, one, gate):
        held = one.submit(gate.job())
        gate.wait()
        behind = one.submit(pow, 2, 2)
        got = []
        leader = threading.Thread(target=lambda: got.append(outcome(held, 0.3)))
        follower = threading.Thread(target=lambda: got.append(behind.result(WAIT_S)))
        leader.start()
        follower.start()
        leader.join(WAIT_S)
        gate.open()
        follower.join(WAIT_S)
        assert got == [TimeoutError, 4]

    def test_done_needs_nobody_who_waits(self, two):
        future = two.submit(pow, 2, 2)
        deadline = time.monotonic() + WAIT_S
        while not future.done():
            assert time.monotonic() < deadline
        assert future.result(0) == 4

    def test_more_jobs_than_the_queue_holds_wait_for_room_and_lose_nothing(self, one):
        futures = [one.submit(abs, -n) for n in range(1000)]
        assert [future.result(WAIT_S) for future in futures] == list(range(1000))

    def test_results_that_nobody_takes_leave_the_queue(self, one):
        for n in range(40):
            one.submit(abs, n)
        with JobQueue.open(one.queue, readonly=True) as queue:
            deadline = time.monotonic() + WAIT_S
            while queue.stats().free < queue.cells_total:
                assert time.monotonic() < deadline
                time.sleep(0.01)

    def test_a_ctrl_c_in_result_loses_nothing(self, one, gate):
        future = one.submit(gate.job())
        gate.wait()
        threading.Timer(0.2, lambda: os.kill(os.getpid(), signal.SIGINT)).start()
        with pytest.raises(KeyboardInterrupt):
            future.result(WAIT_S)
        gate.open()
        assert future.result(WAIT_S) == "gone on"


class TestNesting:
    def test_jobs_that_wait_for_jobs_of_their_own_share_one_worker(self, one):
        def count_down(n):
            from subetha import default_executor

            return n if n == 0 else default_executor().submit(count_down, n - 1).result() + 1

        assert one.submit(count_down, 6).result(WAIT_S) == 6

    def test_a_job_that_hands_in_more_than_the_queue_holds_runs_some_of_it(self, one):
        def parent(children):
            from subetha import default_executor

            futures = [default_executor().submit(abs, -n) for n in range(children)]
            return sum(future.result() for future in futures)

        assert one.submit(parent, 200).result(WAIT_S) == sum(range(200))

    def test_a_job_that_waits_runs_others_meanwhile(self, one):
        def parent(children):
            from subetha import default_executor

            return sum(default_executor().map(abs, range(children)))

        futures = [one.submit(parent, 10) for _ in range(3)]
        assert [future.result(WAIT_S) for future in futures] == [45] * 3


class TestLife:
    def test_a_private_queue_and_its_workers_are_gone_after_shutdown(self):
        found = Executor(2)
        pids = {found.submit(os.getpid).result(WAIT_S) for _ in range(20)}
        directory = found.queue
        assert os.path.isdir(directory)
        found.shutdown()
        found.shutdown()
        assert not os.path.exists(directory)
        for pid in pids:
            with pytest.raises(ProcessLookupError):
                os.kill(pid, 0)
        with pytest.raises(RuntimeError, match="cannot schedule new futures after shutdown"):
            found.submit(pow, 2, 2)

    def test_shutdown_without_waiting_lets_the_jobs_end(self, gate):
        found = Executor(1)
        future = found.submit(gate.job())
        gate.wait()
        found.shutdown(wait=False)
        gate.open()
        assert future.result(WAIT_S) == "gone on"
        found.shutdown()
        assert not os.path.exists(found.queue)

    def test_one_that_nobody_refers_to_ends_when_its_jobs_are_done(self):
        found = Executor(1)
        directory, gone = found.queue, weakref.ref(found)
        future = found.submit(pow, 2, 2)
        del found
        gc.collect()
        assert gone() is None
        assert future.result(WAIT_S) == 4
        deadline = time.monotonic() + WAIT_S
        while os.path.exists(directory):
            assert time.monotonic() < deadline
            time.sleep(0.01)

    def test_the_interpreter_ends_when_the_jobs_are_done(self):
        script = "from subetha import Executor; Executor(1).submit(print, 'apple', flush=True)"
        done = subprocess.run(
            [sys.executable, "-c", script], capture_output=True, text=True, timeout=WAIT_S, check=False
        )
        assert (done.stdout, done.stderr, done.returncode) == ("apple\n", "", 0)

    def test_workers_outlive_the_thread_that_made_their_executor(self):
        made = []
        thread = threading.Thread(target=lambda: made.append(Executor(1)))
        thread.start()
        thread.join(WAIT_S)
        with made[0] as found:
            before = found.submit(os.getpid).result(WAIT_S)
            assert found.submit(os.getpid).result(WAIT_S) == before

    def test_a_fork_is_told_to_make_its_own(self, two):
        future = two.submit(pow, 2, 2)
        reader, writer = os.pipe()
        child = os.fork()
        if child == 0:
            texts = []
            for call in (lambda: two.submit(pow, 2, 2), lambda: future.result(1)):
                try:
                    call()
                except RuntimeError as error:
                    texts.append(str(error))
            os.write(writer, "\n".join(texts).encode())
            os._exit(0)
        os.close(writer)
        os.waitpid(child, 0)
        with open(reader) as pipe:
            first, second = pipe.read().split("\n")
        assert "make another Executor" in first
        assert "its result goes there" in second
        assert future.result(WAIT_S) == 4

    def test_directories_of_killed_processes_are_removed(self):
        script = (
            "import os\nfrom subetha import Executor\nprint(Executor(1).queue, flush=True)\nos.kill(os.getpid(), 9)"
        )
        left = subprocess.run(
            [sys.executable, "-c", script], capture_output=True, text=True, timeout=WAIT_S, check=False
        )
        directory = left.stdout.strip()
        assert os.path.isdir(directory)
        os.utime(directory, (0, 0))
        with Executor(1) as found:
            assert not os.path.exists(directory)
            os.utime(found.queue, (0, 0))
            with Executor(1):
                assert os.path.exists(found.queue)

    def test_little_shared_memory_is_said_with_the_size_to_set_and_disk_taken(self, monkeypatch, tmp_path):
        monkeypatch.setattr(crew, "ROOM_BYTES", 2**60)
        monkeypatch.setattr("tempfile.tempdir", os.fspath(tmp_path))
        with pytest.warns(RuntimeWarning, match=r"docker run --shm-size=1g"):
            found = Executor(1)
        with found:
            assert found.queue.startswith(os.fspath(tmp_path))
            assert found.submit(pow, 2, 2).result(WAIT_S) == 4


class TestSharedQueue:
    def test_executors_share_the_workers_of_a_queue_and_get_each_its_own_results(self, shm):
        with Executor(1, queue=shm / "queue") as first, Executor(0, queue=shm / "queue") as second:
            mine = [first.submit(abs, -n) for n in range(50)]
            others = [second.submit(operator.neg, n) for n in range(50)]
            assert [future.result(WAIT_S) for future in mine] == list(range(50))
            assert [future.result(WAIT_S) for future in others] == [-n for n in range(50)]
        assert (shm / "queue" / "pool").exists()

    def test_its_jobs_run_in_workers_started_elsewhere(self, shm):
        with (
            WorkerPool(["subetha.calls"], shm / "queue", 1) as pool,
            Executor(0, queue=shm / "queue") as found,
        ):
            future = found.submit(os.getpid)
            while not future.done():
                pool.poll(0.05)
            assert future.result() in pool.pids

    def test_an_interpreter_with_no_workers_of_its_own_ends_and_leaves_its_jobs(self, shm):
        script = f"from subetha import Executor; Executor(0, queue={os.fspath(shm / 'queue')!r}).submit(print, 'later', flush=True)"
        subprocess.run([sys.executable, "-c", script], timeout=WAIT_S, check=True)
        with JobQueue.open(shm / "queue") as queue:
            assert queue.stats().waiting == 1


@pytest.mark.parametrize(
    ("arguments", "error", "text"),
    [
        ({"workers": 0}, ValueError, "workers: expected an int greater than 0"),
        ({"workers": -1}, ValueError, "workers: expected an int greater than 0"),
        ({"workers": 1.5}, TypeError, "workers: expected an int, found float"),
        ({"workers": True}, TypeError, "workers: expected an int, found bool"),
        ({"initializer": 5}, TypeError, "initializer: expected a callable, found int"),
        ({"modules": "json"}, TypeError, "modules: expected a sequence of names, found one str"),
        ({"modules": ["json", 5]}, TypeError, "modules: expected names as str, found int"),
        ({"max_attempts": 0}, ValueError, "max_attempts: expected an int from 1 to 65535, found 0"),
        ({"timeout": 0}, ValueError, "timeout: expected seconds > 0, found 0"),
        ({"timeout": "1"}, TypeError, "timeout: expected seconds, found str"),
        ({"arena_bytes": 1}, ValueError, "arena_bytes: expected 4096 to"),
    ],
)
def test_wrong_arguments_raise_at_the_call_and_leave_nothing(arguments, error, text, monkeypatch, tmp_path):
    monkeypatch.setattr(crew, "SHARED_MEMORY", os.fspath(tmp_path))
    with pytest.raises(error, match=text):
        Executor(**{"workers": 1, **arguments})
    assert os.listdir(tmp_path) == []


def test_one_whose_thread_cannot_be_started_leaves_nothing(monkeypatch, tmp_path):
    def refuse(_thread):
        raise RuntimeError("can't start new thread")

    gc.collect()
    before = len(os.listdir("/proc/self/fd"))
    monkeypatch.setattr(crew, "SHARED_MEMORY", os.fspath(tmp_path))
    monkeypatch.setattr(threading.Thread, "start", refuse)
    with pytest.raises(RuntimeError, match="can't start new thread") as caught:
        Executor(1)
    assert len(os.listdir("/proc/self/fd")) == before, caught
    assert os.listdir(tmp_path) == []


def test_an_end_tells_nobody_elses_descriptor():
    """A garbage collection may come at any moment of a shutdown in another thread."""
    found = Executor(1)
    its_crew = found._crew
    found.shutdown()
    reader, writer = os.pipe2(os.O_NONBLOCK)
    try:
        its_crew._is_finished = False
        its_crew.abandon()
        with pytest.raises(BlockingIOError):
            os.read(reader, 1)
    finally:
        its_crew._is_finished = True
        os.close(reader)
        os.close(writer)


def test_a_pickle_whose_end_is_missing_is_refused():
    whole = joined(calls.dumps(calls._set_long_aside(bytes(5000))))
    assert calls.loads(whole) == bytes(5000)
    with pytest.raises(ValueError, match=r"expected .* bytes of a pickle and its buffers, found"):
        calls.loads(whole[:-10])


def test_a_future_of_a_job_is_settled_by_its_queue_alone(two):
    future = two.submit(pow, 2, 2)
    for call in (future.set_running_or_notify_cancel, lambda: future.set_result(1), lambda: future.set_exception(None)):
        with pytest.raises(concurrent.futures.InvalidStateError):
            call()
    assert future.result(WAIT_S) == 4
    assert "finished returned int" in repr(future)


class TestRecycling:
    def test_a_worker_is_replaced_after_so_many_jobs_and_no_job_runs_twice(self, tmp_path):
        log = os.fspath(tmp_path / "log")

        def note(n):
            with open(log, "a") as file:
                file.write(f"{n}\n")
            return os.getpid()

        with Executor(1, max_jobs_per_worker=3) as found:
            pids = [future.result(WAIT_S) for future in [found.submit(note, n) for n in range(9)]]
        assert pids[0] == pids[1] == pids[2]
        assert len(set(pids)) == 3
        assert Path(log).read_text().split() == [str(n) for n in range(9)]

    def test_a_worker_that_has_grown_is_replaced(self):
        def grow():
            import builtins

            builtins.grown = b"x" * (200 << 20)
            return os.getpid()

        with Executor(1, max_worker_bytes=200 << 20) as found:
            before = found.submit(grow).result(WAIT_S)
            assert found.submit(os.getpid).result(WAIT_S) != before

    @pytest.mark.parametrize("name", ["max_jobs_per_worker", "max_worker_bytes"])
    def test_limits_are_positive_ints(self, name):
        with pytest.raises(ValueError, match=f"{name}: expected an int greater than 0, found 0"):
            Executor(1, **{name: 0})
        with pytest.raises(TypeError, match=f"{name}: expected an int, found float"):
            Executor(1, **{name: 1.5})


def test_a_job_knows_its_number_and_attempt(two):
    def know():
        from subetha import current_job

        return current_job()

    future = two.submit(know)
    found = future.result(WAIT_S)
    assert (found.job_id, found.attempt, found.queue_path) == (future.job_id, 1, two.queue)
    assert know() is None


class TestProgress:
    def test_the_submitter_and_others_see_how_far_a_job_is(self, one, tmp_path):
        steps = [os.fspath(tmp_path / f"step{n}") for n in range(3)]
        for step in steps:
            os.mkfifo(step)

        def work():
            import subetha

            for n, step in enumerate(steps):
                if n:
                    subetha.progress(n, 1000)
                open(step, "w").close()
                open(step).close()
            return "worked"

        def at(step):
            open(step).close()
            found = future.progress()
            with JobQueue.open(one.queue, readonly=True) as queue:
                assert queue.progress(future.job_id) == found
            open(step, "w").close()
            return found

        future = one.submit(work)
        assert [at(step) for step in steps] == [None, (1, 1000), (2, 1000)]
        assert future.result(WAIT_S) == "worked"
        assert future.progress() is None

    def test_a_next_attempt_begins_from_nothing(self, one, tmp_path):
        mark, held, go = (os.fspath(tmp_path / name) for name in ("mark", "held", "go"))
        os.mkfifo(held)
        os.mkfifo(go)

        def work():
            import subetha

            if not os.path.exists(mark):
                subetha.progress(5, 10)
                open(mark, "w").close()
                os.kill(os.getpid(), signal.SIGKILL)
            open(held, "w").close()
            open(go).close()

        future = one.submit(work)
        open(held).close()
        assert future.progress() is None
        open(go, "w").close()
        future.result(WAIT_S)

    @pytest.mark.parametrize(
        ("numbers", "error"), [((-1, 2), ValueError), ((1, 2**32), ValueError), ((0.5, 1), TypeError)]
    )
    def test_numbers_are_u32(self, two, numbers, error):
        def wrong():
            import subetha

            subetha.progress(*numbers)

        with pytest.raises(error, match="expected an int from 0 to 4294967295"):
            two.submit(wrong).result(WAIT_S)

    def test_outside_of_a_job_it_does_nothing(self):
        from subetha import progress

        progress(1, 2)


class TestCancellingWhatRuns:
    def test_its_worker_is_killed_and_replaced_and_the_others_go_on(self, one, gate):
        pid = one.submit(os.getpid).result(WAIT_S)
        running = one.submit(gate.job())
        others = [one.submit(abs, -n) for n in range(5)]
        gate.wait()
        told = []
        running.add_done_callback(told.append)
        assert running.cancel(running=True)
        assert running.cancelled()
        with pytest.raises(CancelledError):
            running.result(0)
        assert [future.result(WAIT_S) for future in others] == list(range(5))
        assert one.submit(os.getpid).result(WAIT_S) != pid
        assert told == [running]

    def test_what_waits_is_cancelled_without_killing_anybody(self, one, gate):
        running = one.submit(gate.job())
        waiting = one.submit(pow, 2, 2)
        gate.wait()
        assert waiting.cancel(running=True)
        gate.open()
        assert running.result(WAIT_S) == "gone on"

    def test_what_is_done_stays_done(self, one):
        future = one.submit(pow, 2, 2)
        assert future.result(WAIT_S) == 4
        assert not future.cancel(running=True)
        assert future.result() == 4

    def test_at_any_moment_a_future_is_either_cancelled_or_has_its_result(self, two):
        ends = []
        for n in range(30):
            future = two.submit(time.sleep, 0.001)
            time.sleep(n * 0.0001)
            cancelled = future.cancel(running=True)
            ends.append(outcome(future))
            assert ends[-1] == (CancelledError if cancelled else None)
        assert two.submit(pow, 2, 2).result(WAIT_S) == 4

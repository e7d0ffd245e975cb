"""Tasks: called here, submitted there, found by their numbers; and eager ones."""

import os
import subprocess
import sys
import textwrap
import zlib
from datetime import datetime
from pathlib import Path

import pytest

import subetha
from subetha import Executor, JobQueue, Task, WorkerDied, WorkerPool, register, task, unregister

HERE = Path(__file__).parent
WAIT_S = 60


@pytest.fixture
def sample(monkeypatch):
    monkeypatch.syspath_prepend(HERE)
    import sample_tasks

    return sample_tasks


@pytest.fixture
def workers(sample):
    """One worker that has imported the tasks, and its executor the default one."""
    with Executor(1, modules=["sample_tasks"]) as found:
        subetha.set_default_executor(found)
        yield found
        subetha.set_default_executor(None)


def test_a_task_is_called_here_as_ever(sample):
    assert sample.add(1, b=2) == 3
    assert sample.pid() == os.getpid()
    assert sample.add.__name__ == "add"
    assert sample.Holder.twice(4) == 8


def test_submitting_runs_it_in_a_worker(workers, sample):
    assert sample.add.submit(1, b=2).result(WAIT_S) == 3
    assert sample.pid.submit().result(WAIT_S) != os.getpid()
    assert sample.Holder.twice.submit(4).result(WAIT_S) == 8
    assert [future.result(WAIT_S) for future in sample.add.submit_many([1, 2], [10, 20])] == [11, 22]
    assert list(sample.add.map(range(5), range(5), chunksize=2)) == [0, 2, 4, 6, 8]


def test_a_job_of_a_task_names_it_by_number_and_holds_no_function(workers, sample, monkeypatch):
    submitted = []
    original = workers._client.submit
    monkeypatch.setattr(
        workers._client,
        "submit",
        lambda number, *args, **how: submitted.append(number) or original(number, *args, **how),
    )
    sample.add.submit(1).result(WAIT_S)
    assert submitted == [zlib.crc32(b"sample_tasks.add")]
    assert sample.add.closure_id == submitted[0]


def test_workers_of_a_private_queue_import_a_task_that_they_do_not_know(sample):
    with Executor(1) as found:
        assert found.submit(sample.add, 1, 2).result(WAIT_S) == 3
        assert sample.add.options(executor=found).submit(2, 3).result(WAIT_S) == 5


def test_tasks_reach_workers_that_were_started_elsewhere_with_their_module(sample, shm):
    with (
        WorkerPool(["sample_tasks"], shm / "queue", 1) as pool,
        Executor(0, queue=shm / "queue") as found,
    ):
        future = sample.pid.options(executor=found).submit()
        while not future.done():
            pool.poll(0.05)
        assert future.result() in pool.pids


def test_jobs_of_one_worker_that_wait_for_each_other_all_end(workers, sample):
    assert sample.fibonacci.submit(7).result(WAIT_S) == 13


def test_options_go_with_the_job_and_leave_the_task_as_it_is(sample, shm):
    with Executor(0, queue=shm / "queue") as found, JobQueue.open(shm / "queue", readonly=True) as queue:
        sample.pid.options(executor=found).submit()
        sample.pid.options(executor=found, priority=2, timeout=1.5, max_attempts=7).submit()
        sample.add.options(executor=found).submit(1)
        cells = queue.cells()
        used = cells[cells["job_id"] != 0]
        used = used[used["job_id"].argsort()]
        assert used["priority"].tolist() == [0, 2, 1]
        assert used["max_attempts"].tolist() == [2, 7, 3]
        assert used["timeout_ms"].tolist() == [30_000, 1_500, 0]
        found.shutdown(wait=False, cancel_futures=True)
    assert sample.pid.job_options.priority == 0


def test_an_executors_options_fill_in_what_a_task_leaves_open(sample, shm):
    with (
        Executor(0, queue=shm / "queue", timeout=5, max_attempts=9) as found,
        JobQueue.open(shm / "queue", readonly=True) as queue,
    ):
        found.submit(sample.pid)
        found.submit(sample.add, 1)
        cells = queue.cells()
        used = cells[cells["job_id"] != 0]
        assert sorted(used["max_attempts"].tolist()) == [2, 9]
        assert sorted(used["timeout_ms"].tolist()) == [5_000, 30_000]
        found.shutdown(wait=False, cancel_futures=True)


def test_a_job_that_may_run_once_at_most_is_not_started_again(workers, sample):
    with pytest.raises(WorkerDied):
        sample.die.submit().result(WAIT_S)


def test_the_environment_names_the_queue_that_tasks_go_to(sample, shm, monkeypatch):
    subetha.set_default_executor(None)
    JobQueue.create(shm / "queue").close()
    monkeypatch.setenv("SUBETHA_QUEUE", os.fspath(shm / "queue"))
    try:
        sample.add.submit(1)
        with JobQueue.open(shm / "queue", readonly=True) as queue:
            assert queue.stats().waiting == 1
        subetha.default_executor().shutdown(cancel_futures=True)
    finally:
        subetha.set_default_executor(None)


def test_a_task_of_a_script_has_the_name_under_which_workers_import_it(tmp_path):
    (tmp_path / "script.py").write_text(
        textwrap.dedent(
            """
            import subetha

            @subetha.task
            def double(x):
                return 2 * x

            if __name__ == "__main__":
                print(double.name)
                with subetha.Executor(1) as executor:
                    print(double.options(executor=executor).submit(21).result())
                with subetha.Executor(1, queue="queue", modules=["script"]) as executor:
                    print(double.options(executor=executor).submit(22).result())
            """
        )
    )
    done = subprocess.run(
        [sys.executable, "script.py"], cwd=tmp_path, capture_output=True, text=True, timeout=WAIT_S, check=False
    )
    assert (done.stdout, done.stderr) == ("script.double\n42\n44\n", "")


def test_a_task_that_no_worker_imports_submits_itself_in_a_worker(tmp_path):
    (tmp_path / "script.py").write_text(
        textwrap.dedent(
            """
            import subetha

            @subetha.task
            def fibonacci(n):
                if n < 2:
                    return n
                one, two = fibonacci.submit(n - 1), fibonacci.submit(n - 2)
                return one.result() + two.result()

            if __name__ == "__main__":
                with subetha.Executor(1) as executor:
                    print(fibonacci.options(executor=executor).submit(4).result())
            """
        )
    )
    done = subprocess.run(
        [sys.executable, "script.py"], cwd=tmp_path, capture_output=True, text=True, timeout=WAIT_S, check=False
    )
    assert (done.stdout, done.stderr) == ("3\n", "")


def test_a_task_of_a_local_function_goes_by_value():
    def inner(x):
        return 2 * x

    with Executor(1) as found:
        assert task(name="local")(inner).options(executor=found).submit(4).result(WAIT_S) == 8


class TestEager:
    def test_a_task_runs_where_it_is_submitted(self, sample):
        with subetha.eager():
            future = sample.pid.submit()
            assert future.done()
            assert future.result() == os.getpid()
            assert [f.result() for f in sample.add.submit_many([1, 2])] == [1, 2]
            assert list(sample.add.map([1, 2], [3, 4])) == [4, 6]
            assert sample.fibonacci.submit(6).result() == 8

    def test_what_it_raises_is_in_the_future(self, sample):
        with subetha.eager():
            future = sample.add.submit("a", 1)
            assert isinstance(future.exception(), TypeError)
            heard = []
            future.add_done_callback(heard.append)
            assert heard == [future]

    def test_it_ends_with_the_block(self, workers, sample):
        with subetha.eager():
            pass
        assert sample.pid.submit().result(WAIT_S) != os.getpid()


class TestRegistering:
    def test_two_tasks_of_one_number_are_refused_with_both_names(self):
        # a pair of names with one CRC-32
        assert zlib.crc32(b"plumless") == zlib.crc32(b"buckeroo")
        task(name="plumless")(abs)
        with pytest.raises(ValueError, match=r"task 'buckeroo' .* and so has 'plumless'.*name="):
            task(name="buckeroo")(abs)

    def test_a_number_of_a_handler_is_refused(self):
        number = zlib.crc32(b"taken")
        register(number, bytes)
        try:
            with pytest.raises(ValueError, match=r"'taken' .* a handler is registered already"):
                task(name="taken")(abs)
        finally:
            unregister(number)

    def test_the_same_name_again_replaces_the_task_as_a_reload_does(self):
        task(name="reloaded")(abs)
        assert task(name="reloaded")(len)("abc") == 3

    def test_a_function_inside_of_another_needs_a_name(self):
        def inner():
            return 1

        with pytest.raises(ValueError, match=r"inner is defined inside of a function.*name="):
            task(inner)
        assert task(name="inner")(inner)() == 1

    @pytest.mark.parametrize(
        ("options", "error", "text"),
        [
            ({"priority": 3}, ValueError, "priority: expected an int from 0 to 2, found 3"),
            ({"priority": "high"}, TypeError, "priority: expected an int from 0 to 2, found str"),
            ({"timeout": -1}, ValueError, "timeout: expected seconds > 0, found -1"),
            ({"timeout": float("nan")}, ValueError, "timeout: expected seconds > 0, found nan"),
            ({"max_attempts": 0}, ValueError, "max_attempts: expected an int from 1 to 65535, found 0"),
            ({"at_most_once": True, "max_attempts": 3}, ValueError, "at_most_once is max_attempts=1"),
            ({"name": 5}, TypeError, "name: expected a str, found int"),
            ({"backoff": 0}, ValueError, "backoff: expected seconds > 0, found 0"),
            ({"backoff": (2, 1)}, ValueError, "first <= longest"),
            ({"backoff": (1, 2, 3)}, ValueError, "first <= longest"),
            ({"backoff": "1"}, TypeError, "backoff: expected seconds, found str"),
            ({"retry_on": 5}, TypeError, "retry_on: expected exception types, found 5"),
            ({"retry_on": (OSError, "x")}, TypeError, "retry_on: expected exception types, found 'x'"),
            ({"retry_on": OSError, "at_most_once": True}, ValueError, "at_most_once"),
            ({"queue_name": 1}, TypeError, "queue_name: expected a str, found int"),
            ({"queue_name": ""}, ValueError, "queue_name"),
            ({"max_concurrency": 0}, ValueError, "max_concurrency: expected an int from 1 to 65535, found 0"),
            ({"max_concurrency": True}, TypeError, "max_concurrency: expected an int, found bool"),
        ],
    )
    def test_wrong_options_are_refused_at_once(self, options, error, text):
        with pytest.raises(error, match=text):
            task(**options)

    def test_wrong_options_of_a_call_are_refused_at_once(self, sample):
        for options, error in (
            ({"delay": -1}, ValueError),
            ({"delay": "1"}, TypeError),
            ({"delay": 1, "due": 5}, ValueError),
            ({"due": "tomorrow"}, TypeError),
            ({"due": datetime(2030, 1, 1)}, ValueError),
            ({"queue_name": ""}, ValueError),
        ):
            with pytest.raises(error, match=next(iter(options))):
                sample.add.options(**options)

    @pytest.mark.parametrize("wrong", [5, object()])
    def test_what_is_no_function_is_refused(self, wrong):
        with pytest.raises(TypeError, match="expected a function"):
            task(wrong)

    def test_a_coroutine_function_and_a_task_are_refused(self, sample):
        async def coroutine():
            pass

        with pytest.raises(TypeError, match="is a coroutine function"):
            task(name="coroutine")(coroutine)
        with pytest.raises(TypeError, match="is a task already"):
            task(sample.add)

    def test_its_text_names_it(self, sample):
        assert repr(sample.pid) == "<task custom name>"
        assert isinstance(sample.pid, Task)

"""What a task, or one call of it, may ask for: another attempt, a later time, certain workers, few at one time."""

import os
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from datetime import UTC, datetime, timedelta
from pathlib import Path

import pytest

import subetha
from subetha import CallFailed, Executor, JobQueue, TryAgain, UnknownClosureId, UnknownJob, WorkerPool
from subetha.calls import Options
from subetha.pass_registry import PassRegistry, closure_id_of

HERE = Path(__file__).parent
WAIT_S = 60
HOUR_S = 3600


@pytest.fixture
def sample(monkeypatch):
    monkeypatch.syspath_prepend(HERE)
    import sample_tasks

    return sample_tasks


@pytest.fixture
def directory(shm):
    return shm / "queue"


@pytest.fixture
def two(sample, directory):
    """Two workers that have imported the tasks."""
    with Executor(2, queue=directory, modules=["sample_tasks"]) as found:
        yield found
        found.shutdown(cancel_futures=True)


def rest_of(directory, future):
    """Seconds until the future's job is due; None where it is not parked."""
    with JobQueue.open(directory, readonly=True) as queue:
        cells = queue.cells()
        (cell,) = cells[(cells["job_id"] == future.job_id) & (cells["word"] != 0)]
        return (int(cell["due_ns"]) - time.time_ns()) / 1e9 if queue.stats().parked else None


def eventually(holds, what):
    deadline = time.monotonic() + WAIT_S
    while not holds():
        assert time.monotonic() < deadline, f"not so after {WAIT_S} s: {what}"
        time.sleep(0.01)


class TestRetries:
    def test_what_raises_one_of_the_chosen_exceptions_runs_again_until_it_does_not(self, two, sample, tmp_path):
        path = os.fspath(tmp_path / "calls")
        assert sample.flaky.options(executor=two).submit(path, 2).result(WAIT_S) == 3

    def test_after_the_last_attempt_the_exception_is_the_futures(self, two, sample, tmp_path):
        path = os.fspath(tmp_path / "calls")
        future = sample.flaky.options(executor=two).submit(path, 99)
        with pytest.raises(OSError, match="failure 4"):
            future.result(WAIT_S)
        future = sample.flaky.options(executor=two, max_attempts=1).submit(path, 99)
        with pytest.raises(OSError, match="failure 5"):
            future.result(WAIT_S)

    def test_other_exceptions_end_it_at_once(self, two, sample):
        with pytest.raises(TypeError):
            sample.flaky.options(executor=two).submit(None, 1).result(WAIT_S)

    def test_a_result_that_cannot_be_pickled_does_not_run_it_again(self, two, sample, tmp_path):
        path = tmp_path / "calls"
        with pytest.raises(TypeError, match="pickle"):
            sample.give_lock.options(executor=two).submit(os.fspath(path)).result(WAIT_S)
        assert path.read_text() == "x"

    def test_a_task_that_goes_by_value_is_tried_again_too(self, sample, tmp_path):
        path = os.fspath(tmp_path / "calls")
        with Executor(1) as found:
            assert found.submit(sample.flaky, path, 1).result(WAIT_S) == 2

    def test_it_rests_between_two_attempts(self, two, sample, directory, tmp_path):
        path = os.fspath(tmp_path / "calls")
        future = sample.flaky.options(executor=two, backoff=HOUR_S).submit(path, 1)
        eventually(lambda: rest_of(directory, future) is not None, "it rests")
        assert HOUR_S / 2 - WAIT_S < rest_of(directory, future) <= HOUR_S
        assert not future.done()
        assert future.cancel()

    def test_also_after_its_worker_died(self, two, sample, directory, tmp_path):
        future = sample.dies_once.options(executor=two).submit(os.fspath(tmp_path / "calls"))
        eventually(lambda: rest_of(directory, future) is not None, "it rests")
        assert HOUR_S / 2 - WAIT_S < rest_of(directory, future) <= HOUR_S
        assert future.cancel()

    def test_an_executor_may_say_for_all_how_long_jobs_rest(self, sample, directory, tmp_path):
        path = os.fspath(tmp_path / "calls")
        with Executor(1, queue=directory, modules=["sample_tasks"], backoff=(HOUR_S, HOUR_S)) as found:
            future = found.submit(sample.flaky, path, 1)
            eventually(lambda: rest_of(directory, future) is not None, "it rests")
            found.shutdown(cancel_futures=True)

    def test_a_handler_may_ask_for_another_attempt_too(self, directory):
        from subetha import Pass, WorkerLoop

        registry = PassRegistry()
        answers = [TryAgain("not yet"), CallFailed("over")]
        registry.register(1, lambda _args: answers.pop(0))
        with JobQueue.open_or_create(directory) as queue:
            loop = WorkerLoop(queue.submit_side, registry=registry, routes=True)
            queue.submit(Pass(1))
            assert loop.serve_one()
            assert (loop.retried, loop.completed) == (1, 0)
            assert loop.serve_one()
            assert (loop.retried, loop.completed, loop.failed) == (1, 1, 1)
            assert str(queue.recv(WAIT_S).result) == "over"


class TestMaps:
    @pytest.mark.parametrize("chunksize", [1, 2])
    def test_options_are_for_what_a_map_hands_in_too(self, two, sample, directory, chunksize):
        results = sample.add.options(executor=two, delay=HOUR_S, priority=2, timeout=7).map(
            range(4), chunksize=chunksize
        )
        with JobQueue.open(directory, readonly=True) as queue:
            cells = queue.cells()
            found = cells[cells["due_ns"] > time.time_ns()]
            assert len(found) == 4 // chunksize
            assert set(found["closure_id"].tolist()) == {sample.add.closure_id}
            assert set(found["priority"].tolist()) == {2}
            assert set(found["timeout_ms"].tolist()) == {7000}
        results.close()

    @pytest.mark.parametrize("chunksize", [1, 2])
    def test_so_is_what_their_task_is_tried_again_after(self, two, sample, tmp_path, chunksize):
        paths = [os.fspath(tmp_path / name) for name in "abcd"]
        found = sample.flaky.options(executor=two).map(paths, [1] * 4, chunksize=chunksize)
        # the second of a chunk fails in the chunk's second attempt
        assert list(found) == ([2] * 4 if chunksize == 1 else [3, 2] * 2)


class TestTimes:
    def test_a_delayed_job_is_parked_until_its_time(self, two, sample, directory):
        future = sample.add.options(executor=two, delay=HOUR_S).submit(1)
        assert HOUR_S - WAIT_S < rest_of(directory, future) <= HOUR_S
        assert not future.running()
        assert future.cancel()

    def test_so_is_one_with_a_due_time(self, two, sample, directory):
        moment = datetime.now(UTC) + timedelta(hours=1)
        futures = [sample.add.options(executor=two, due=due).submit(1) for due in (moment, moment.timestamp())]
        for future in futures:
            assert HOUR_S - WAIT_S < rest_of(directory, future) <= HOUR_S
            assert future.cancel()

    def test_it_runs_when_its_time_has_come(self, two, sample):
        began = time.monotonic()
        assert sample.add.options(executor=two, delay=0.2).submit(1, 2).result(WAIT_S) == 3
        assert time.monotonic() - began >= 0.2
        assert sample.add.options(executor=two, delay=0).submit(1, 2).result(WAIT_S) == 3
        assert sample.add.options(executor=two, due=0).submit(1, 2).result(WAIT_S) == 3

    def test_it_outlives_who_handed_it_in(self, sample, directory, tmp_path):
        path = os.fspath(tmp_path / "calls")
        with Executor(0, queue=directory) as found:
            future = sample.flaky.options(executor=found, delay=0.2).submit(path, 0)
        with pytest.raises(RuntimeError, match="stays in its queue"):
            future.result(WAIT_S)
        with Executor(1, queue=directory, modules=["sample_tasks"]):
            eventually(lambda: os.path.exists(path), "it has run")

    def test_one_whose_time_has_come_is_waited_for_as_any_other(self, sample, directory, tmp_path):
        path = os.fspath(tmp_path / "calls")
        with Executor(1, queue=directory, modules=["sample_tasks"]) as found:
            future = sample.alone.options(executor=found, delay=0.01).submit(path, 1.0)
            eventually(future.running, "it runs")
        assert future.result(0) == 1

    def test_one_that_another_thread_hands_in_during_the_shutdown_is_not_waited_for(
        self, sample, directory, monkeypatch
    ):
        found = Executor(0, queue=directory)
        client, late = found._client, []
        wait_for_all = client.wait_for_all

        def wait(timeout=None):
            if not late:
                late.append(client.submit(1, b"", Options(delay=HOUR_S)))
            return wait_for_all(WAIT_S if timeout is None else timeout)

        monkeypatch.setattr(client, "wait_for_all", wait)
        began = time.monotonic()
        found.shutdown()
        assert time.monotonic() - began < WAIT_S
        with pytest.raises(RuntimeError, match="stays in its queue"):
            late[0].result(0)


class TestQueueNames:
    def test_the_number_of_a_task_in_a_queue_is_made_of_both_names(self, sample):
        assert sample.send.closure_id == closure_id_of("sample_tasks.send", "mail")
        assert sample.send.options(queue_name="default").closure_id == closure_id_of("sample_tasks.send")
        assert sample.add.options(queue_name="mail").closure_id == closure_id_of("sample_tasks.add", "mail")
        assert (
            sample.add.closure_id == closure_id_of("sample_tasks.add") == closure_id_of("sample_tasks.add", "default")
        )

    def test_jobs_go_to_the_workers_that_serve_their_queue(self, sample, directory):
        with (
            WorkerPool(["subetha.calls", "sample_tasks"], directory, 1, queue_names=["mail"]) as mail,
            WorkerPool(["subetha.calls", "sample_tasks"], directory, 1, queue_names=["default", "images"]) as others,
            Executor(0, queue=directory) as found,
        ):
            for task, pool in (
                (sample.send, mail),
                (sample.pid.options(queue_name="mail"), mail),
                (sample.pid, others),
                (sample.send.options(queue_name="images"), others),
                (os.getpid, others),
            ):
                futures = [
                    found.submit(task) if task is os.getpid else task.options(executor=found).submit() for _ in range(5)
                ]
                assert {future.result(WAIT_S) for future in futures} == set(pool.pids)

    def test_a_worker_that_was_told_of_none_runs_each_task_in_its_own(self, two, sample):
        assert sample.send.options(executor=two).submit().result(WAIT_S) > 0
        assert sample.add.options(executor=two).submit(1).result(WAIT_S) == 1

    def test_where_nobody_serves_it_the_job_fails_after_a_while(self, sample, directory):
        with (
            WorkerPool(["sample_tasks"], directory, 1, unknown_after=0.2),
            Executor(0, queue=directory) as found,
        ):
            future = sample.add.options(executor=found, queue_name="nobody").submit(1)
            with pytest.raises(UnknownClosureId, match=str(closure_id_of("sample_tasks.add", "nobody"))) as caught:
                future.result(WAIT_S)
            assert "task 'sample_tasks.add' of the queue 'nobody'" in str(caught.value)

    def test_nor_is_it_run_elsewhere_where_a_job_hands_it_in(self, sample, directory):
        with (
            Executor(1, queue=directory, queue_names=("default",)) as found,
            WorkerPool(["sample_tasks"], directory, 1, queue_names=["mail"]) as mail,
        ):
            assert found.submit(sample.elsewhere, sample.send).result(WAIT_S) in mail.pids

    def test_in_a_private_queue_they_do_not_matter(self, sample):
        with Executor(1, modules=["sample_tasks"]) as found:
            assert sample.add.options(executor=found, queue_name="images").submit(1).result(WAIT_S) == 1
            assert sample.send.options(executor=found).submit().result(WAIT_S) > 0
            assert sample.add_elsewhere.options(executor=found).submit(1, 2).result(WAIT_S) == 3, "nor in its jobs"

    def test_nor_do_those_of_its_workers(self, sample):
        with Executor(1, modules=["sample_tasks"], queue_names=("mail",)) as found:
            assert found.submit(abs, -1).result(WAIT_S) == 1
            assert sample.add.options(executor=found).submit(1).result(WAIT_S) == 1

    def test_an_executor_starts_workers_for_some_of_them(self, sample, directory):
        with (
            Executor(1, queue=directory, modules=["sample_tasks"], queue_names=("mail",)) as mail,
            Executor(1, queue=directory, modules=["sample_tasks"], queue_names=("default",)),
        ):
            one = sample.send.options(executor=mail).submit().result(WAIT_S)
            other = sample.pid.options(executor=mail).submit().result(WAIT_S)
            assert one != other

    def test_a_registry_serves_handlers_that_are_registered_later_too(self):
        registry = PassRegistry()
        registry.register(5, bytes)
        registry.register_named("first", bytes)
        registry.serve(["mail"])
        assert registry.closure_ids() == {closure_id_of("first", "mail")}
        registry.register_named("second", bytes, queue_name="images")
        assert registry.closure_ids() == {closure_id_of(name, "mail") for name in ("first", "second")}
        registry.serve(["default"])
        assert registry.closure_ids() == {5, closure_id_of("first"), closure_id_of("second")}
        assert registry.unregister(closure_id_of("second")) is bytes
        assert registry.closure_ids() == {5, closure_id_of("first")}


class TestLimits:
    def test_no_more_of_a_task_run_at_one_time_than_may(self, two, sample, tmp_path):
        path = os.fspath(tmp_path / "calls")
        alone = sample.alone.options(executor=two)
        futures = [alone.submit(path, 0.01) for _ in range(40)]
        assert [future.result(WAIT_S) for future in futures] == [1] * 40

    def test_those_that_wait_hold_up_no_others(self, two, sample, tmp_path):
        path = os.fspath(tmp_path / "calls")
        alone = sample.alone.options(executor=two)
        futures = [alone.submit(path, 1.0) for _ in range(5)]
        assert sample.add.options(executor=two).submit(1).result(WAIT_S) == 1
        assert not futures[-1].done()
        two.shutdown(cancel_futures=True)

    def test_the_place_of_a_worker_that_died_is_free_again(self, two, sample, tmp_path):
        path = os.fspath(tmp_path / "calls")
        alone = sample.alone.options(executor=two, max_attempts=1)
        future = alone.submit(path, HOUR_S)
        eventually(future.running, "it runs")
        assert future.cancel(running=True)
        os.unlink(path)
        assert alone.submit(path).result(WAIT_S) == 1

    def test_where_the_workers_cannot_see_to_a_limit_the_job_is_refused(self, sample, tmp_path):
        path = os.fspath(tmp_path / "calls")
        with Executor(1) as found:
            with pytest.raises(ValueError, match="modules="):
                found.submit(sample.alone, path).result(WAIT_S)
            with pytest.raises(ValueError, match="modules="):
                list(found.map(sample.alone, [path] * 4, chunksize=2))
            assert not os.path.exists(path)
        with Executor(1, modules=["sample_tasks"]) as found:
            assert found.submit(sample.alone, path).result(WAIT_S) == 1

    def test_places_are_counted_over_all_processes(self, directory):
        with JobQueue.open_or_create(directory) as one, JobQueue.open(directory) as other:
            assert [one.take_place(7, 2), other.take_place(7, 2), one.take_place(7, 2)] == [0, 1, None]
            assert other.take_place(8, 1) == 0
            other.give_place(7, 1)
            assert one.take_place(7, 2) == 1
            assert other.take_place(7, 2) is None
            one.give_place(7, 0)
            one.give_place(7, 0)
            assert [other.take_place(7, 2), other.take_place(7, 2)] == [0, None]
            with JobQueue.open(directory) as third:
                assert third.take_place(9, 1) == 0
            assert other.take_place(9, 1) == 0, "who closes has gone"


class TestUniqueKeys:
    def test_while_one_is_pending_the_next_is_its_future(self, two, sample, tmp_path):
        path = os.fspath(tmp_path / "calls")
        alone = sample.alone.options(executor=two, unique_key="one", delay=HOUR_S)
        first = alone.submit(path)
        assert alone.submit(path) is first
        assert alone.options(unique_key="two").submit(path) is not first
        assert sample.add.options(executor=two, unique_key="one", delay=HOUR_S).submit(1) is not first
        assert first.cancel()
        assert alone.submit(path) is not first
        two.shutdown(cancel_futures=True)

    def test_when_it_is_done_the_next_one_runs(self, two, sample, tmp_path):
        path = os.fspath(tmp_path / "calls")
        flaky = sample.flaky.options(executor=two, unique_key="key")
        assert [flaky.submit(path, 0).result(WAIT_S) for _ in range(3)] == [1, 2, 3]
        with JobQueue.open(two.queue) as queue:
            assert [key for key in queue.registrations().map if key[:1] == b"U"] == [], "nothing is left of the key"

    def test_another_client_gets_what_came_of_it(self, two, sample, directory, tmp_path):
        path = os.fspath(tmp_path / "calls")
        with Executor(0, queue=directory) as other:
            first = sample.flaky.options(executor=two, unique_key="key", delay=0.3).submit(path, 0)
            second = sample.flaky.options(executor=other, unique_key="key").submit(path, 0)
            assert second.job_id == first.job_id
            assert not second.done()
            told = []
            second.add_done_callback(told.append)
            assert (first.result(WAIT_S), second.result(WAIT_S)) == (1, 1)
            eventually(lambda: told == [second], "it was called back")

    def test_another_client_that_cancels_it_leaves_it_to_the_first(self, two, sample, directory, tmp_path):
        path = os.fspath(tmp_path / "calls")
        with Executor(0, queue=directory) as other:
            first = sample.flaky.options(executor=two, unique_key="key", delay=0.3).submit(path, 0)
            second = sample.flaky.options(executor=other, unique_key="key").submit(path, 0)
            assert second.cancel()
            assert first.result(WAIT_S) == 1

    def test_where_the_first_client_takes_it_back_the_other_is_told(self, two, sample, directory, tmp_path):
        path = os.fspath(tmp_path / "calls")
        with Executor(0, queue=directory) as other:
            first = sample.flaky.options(executor=two, unique_key="key", delay=HOUR_S).submit(path, 0)
            second = sample.flaky.options(executor=other, unique_key="key").submit(path, 0)
            assert first.cancel()
            with pytest.raises(UnknownJob):
                second.result(WAIT_S)

    def test_many_threads_that_submit_one_key_share_a_future(self, two, sample):
        task = sample.add.options(executor=two, unique_key="key", delay=HOUR_S)
        with ThreadPoolExecutor(8) as threads:
            found = [future.result() for future in [threads.submit(task.submit, 1) for _ in range(40)]]
        assert len(set(found)) == 1
        assert found[0].cancel()

    def test_in_eager_mode_every_call_runs(self, sample, tmp_path):
        path = os.fspath(tmp_path / "calls")
        with subetha.eager():
            assert [sample.flaky.options(unique_key="key").submit(path, 0).result() for _ in range(2)] == [1, 2]


class TestKeptResults:
    def test_a_result_can_be_fetched_by_its_id_from_another_process(self, two, sample, directory):
        future = sample.add.options(executor=two, result_ttl=HOUR_S).submit([1, 2], [3])
        assert future.result(WAIT_S) == [1, 2, 3]
        program = (
            "import sys, subetha\n"
            "with subetha.Executor(0, queue=sys.argv[1]) as executor:\n"
            "    print(executor.result(int(sys.argv[2])), executor.result(int(sys.argv[2])))\n"
        )
        ran = subprocess.run(
            [sys.executable, "-c", program, directory, str(future.job_id)], capture_output=True, text=True, check=True
        )
        assert ran.stdout == "[1, 2, 3] [1, 2, 3]\n"

    def test_so_can_an_exception_and_one_that_is_yet_to_come(self, two, sample, tmp_path):
        path = os.fspath(tmp_path / "calls")
        future = sample.flaky.options(executor=two, result_ttl=HOUR_S, max_attempts=1, delay=0.2).submit(path, 99)
        with pytest.raises(TimeoutError):
            two.result(future.job_id, 0)
        with pytest.raises(OSError, match="failure 1"):
            two.result(future.job_id, WAIT_S)
        with pytest.raises(OSError, match="failure 1"):
            future.result(WAIT_S)

    def test_it_outlives_its_client(self, sample, directory):
        with Executor(0, queue=directory) as client:
            job_id = sample.add.options(executor=client, result_ttl=HOUR_S, delay=0.1).submit(1).job_id
        with Executor(1, queue=directory, modules=["sample_tasks"]) as other:
            assert other.result(job_id, WAIT_S) == 1

    def test_without_a_ttl_nothing_is_kept(self, two, sample):
        future = sample.add.options(executor=two).submit(1)
        assert future.result(WAIT_S) == 1
        with pytest.raises(UnknownJob, match="result_ttl"):
            two.result(future.job_id, WAIT_S)

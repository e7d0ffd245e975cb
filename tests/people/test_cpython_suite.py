"""CPython's own tests of executors, run over `Executor`. What is left out stands here with its reason."""

import importlib.util
import sys
from pickle import UnpicklingError

import pytest

from subetha import ExecutionError, Executor, WorkerDied

if importlib.util.find_spec("test.test_concurrent_futures") is None:
    pytest.skip("this Python comes without the package test.test_concurrent_futures", allow_module_level=True)

from test.test_concurrent_futures import executor as of_executors
from test.test_concurrent_futures import test_as_completed as of_as_completed
from test.test_concurrent_futures import test_deadlock as of_deadlocks
from test.test_concurrent_futures import test_init as of_initializers
from test.test_concurrent_futures import test_process_pool as of_process_pools
from test.test_concurrent_futures import test_shutdown as of_shutdown
from test.test_concurrent_futures import test_wait as of_wait
from test.test_concurrent_futures.util import BaseTestCase, ExecutorMixin


class SubethaExecutor(Executor):
    """`Executor` with the parameters that these tests give."""

    def __init__(self, max_workers=None, *, mp_context=None, **kwargs):
        super().__init__(max_workers, **kwargs)


class Workers(ExecutorMixin):
    executor_type = SubethaExecutor
    worker_count = 3

    def get_context(self):
        return None


@pytest.fixture(autouse=True)
def _names_of_this_package(monkeypatch):
    """What those modules name themselves: the error where a job's process dies, and where an executor is imported from."""
    # A job that cannot be unpickled fails alone here, with what its unpickling raised.
    monkeypatch.setattr(of_deadlocks, "BrokenProcessPool", (WorkerDied, ExecutionError, UnpicklingError, SystemExit))
    run = of_shutdown.assert_python_ok

    def run_with_this_package(option, code):
        code = code.replace("from concurrent.futures import Sub", "from subetha import Executor as Sub").replace(
            "max_workers=", ""
        )
        return run(option, f"import sys; sys.path[:] = {sys.path!r}\n{code}")

    monkeypatch.setattr(of_shutdown, "assert_python_ok", run_with_this_package)


class TestExecutor(Workers, of_executors.ExecutorTest, BaseTestCase):
    test_max_workers_negative = None  # the parameter is called workers, and so it is in the message (test_executor.py)


class TestProcessPool(Workers, BaseTestCase):
    """Those of ProcessPoolExecutor that do not look into its insides."""

    test_map_chunksize = of_process_pools.ProcessPoolExecutorTest.test_map_chunksize


class TestWait(Workers, of_wait.WaitTests, BaseTestCase):
    pass


class TestAsCompleted(Workers, of_as_completed.AsCompletedTests, BaseTestCase):
    pass


class TestShutdown(Workers, of_shutdown.ExecutorShutdownTest, BaseTestCase):
    # It cancels at once what it has just submitted, and expects that something runs already; see test_executor.py.
    test_cancel_futures = None


class TestInitializer(of_initializers.InitializerMixin, Workers, BaseTestCase):
    worker_count = 2


class TestDeadlocks(Workers, of_deadlocks.ExecutorDeadlockTest, BaseTestCase):
    worker_count = 2

    # these two look at the manager thread and the pipe of ProcessPoolExecutor
    test_shutdown_deadlock_pickle = None
    test_gh105829_should_not_deadlock_if_wakeup_pipe_full = None

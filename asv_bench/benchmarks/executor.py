"""Executor beside ProcessPoolExecutor, multiprocessing.Pool, loky and dask: the same calls, one worker that is warm."""

import contextlib
import operator
import time
from functools import partial

import numpy as np

from . import IS_BRIEF
from .pools import PEERS, pool
from .turns import InTurns, in_turns, median, spread, unfolded
from .work import added, negated

ARGUMENTS = {
    "a number": (operator.neg, 5),
    "1 MB there and back": (bytes, bytes(2**20)),
    "64 MB array, its sum back": (np.sum, np.ones(2**23)),
}
ROUNDS = {"a number": 2000, "1 MB there and back": 100, "64 MB array, its sum back": 5}


class RoundTrip(InTurns):
    """One call at a time: submit, run in the worker, `result`; the median of each run, in microseconds."""

    params = [PEERS, list(ARGUMENTS)]
    param_names = ["peer", "argument"]

    def setup_cache(self):
        return unfolded(in_turns([PEERS], self._begin), list(ARGUMENTS))

    setup_cache.timeout = 900

    @contextlib.contextmanager
    def _begin(self, peer):
        with pool(peer, 1) as workers:
            # its start is no part of it
            workers.submit(operator.neg, 1).result()
            yield lambda: {argument: self._times(peer, workers, argument) for argument in ARGUMENTS}

    @staticmethod
    def _times(peer, workers, argument):
        function, *arguments = ARGUMENTS[argument]
        rounds = ROUNDS[argument]
        if IS_BRIEF or peer == "dask":
            rounds = max(2, rounds // 20)
        figures = []
        for _ in range(rounds):
            began = time.perf_counter_ns()
            workers.submit(function, *arguments).result()
            figures.append((time.perf_counter_ns() - began) / 1000)
        return median(figures)

    def track_p50(self, figures, peer, argument):
        return median(figures[peer, argument])

    track_p50.unit = "us"

    def track_p50_spread(self, figures, peer, argument):
        return spread(figures[peer, argument])

    track_p50_spread.unit = "us"


def results(futures):
    for future in futures:
        future.result()


def all_of(found):
    for _ in found:
        pass


def futures(function, workers, count):
    results([workers.submit(function, n) for n in range(count)])


def submitted_many(task, workers, count):
    results(task.options(executor=workers).submit_many(range(count)))


def mapped(function, chunksize, workers, count):
    all_of(workers.map(function, range(count), range(count), chunksize=chunksize))


CALLS = {
    "futures": (partial(futures, operator.neg), 20_000),
    "futures of a task": (partial(futures, negated), 20_000),
    "submit_many of a task": (partial(submitted_many, negated), 20_000),
    "map": (partial(mapped, operator.add, 1), 20_000),
    "map of a task": (partial(mapped, added, 1), 20_000),
    "map in chunks of 64": (partial(mapped, operator.add, 64), 100_000),
    "map of a task in chunks of 64": (partial(mapped, added, 64), 100_000),
}
"""What each does with a pool, and how often in a run."""


class Throughput(InTurns):
    """Many small calls: all handed in, then all results taken, in calls a second."""

    params = [PEERS, list(CALLS)]
    param_names = ["peer", "calls"]

    def setup_cache(self):
        return unfolded(in_turns([PEERS], self._begin), list(CALLS), self._why_not)

    setup_cache.timeout = 1800

    @staticmethod
    def _why_not(peer, calls):
        if "task" in calls and peer != "subetha":
            return f"{peer} has no tasks"
        if "chunks" in calls and peer == "dask":
            return "dask has no chunks: each call is a task of its own"
        return None

    @contextlib.contextmanager
    def _begin(self, peer):
        with pool(peer, 1) as workers:
            workers.submit(operator.neg, 1).result()
            measured = [calls for calls in CALLS if self._why_not(peer, calls) is None]
            yield lambda: {calls: self._rate(peer, workers, calls) for calls in measured}

    @staticmethod
    def _rate(peer, workers, calls):
        act, count = CALLS[calls]
        if IS_BRIEF or peer == "dask":
            count //= 20
        began = time.perf_counter()
        act(workers, count)
        return count / (time.perf_counter() - began)

    def track_calls(self, figures, peer, calls):
        return median(figures[peer, calls])

    track_calls.unit = "calls/s"

    def track_calls_spread(self, figures, peer, calls):
        return spread(figures[peer, calls])

    track_calls_spread.unit = "calls/s"

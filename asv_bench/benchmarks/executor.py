"""Executor beside ProcessPoolExecutor, multiprocessing.Pool, loky and dask: the same calls, one worker that is warm."""

import contextlib
import operator
import time

import numpy as np

from . import IS_BRIEF
from .pools import PEERS, pool
from .turns import InTurns, in_turns, median, spread
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
        return in_turns(self.params, self._begin)

    setup_cache.timeout = 900

    @contextlib.contextmanager
    def _begin(self, peer, argument):
        function, *arguments = ARGUMENTS[argument]
        rounds = ROUNDS[argument]
        if IS_BRIEF or peer == "dask":
            rounds = max(2, rounds // 20)
        with pool(peer, 1) as workers:

            def measure():
                figures = []
                for _ in range(rounds):
                    began = time.perf_counter_ns()
                    workers.submit(function, *arguments).result()
                    figures.append((time.perf_counter_ns() - began) / 1000)
                return median(figures)

            # its start is no part of it
            measure()
            yield measure

    def track_p50(self, figures, peer, argument):
        return median(figures[peer, argument])

    track_p50.unit = "us"

    def track_p50_spread(self, figures, peer, argument):
        return spread(figures[peer, argument])

    track_p50_spread.unit = "us"


def results(futures):
    for future in futures:
        future.result()


# What each of them does, for so many calls, and in chunks of how many.
CALLS = {
    "futures": (lambda workers, n: results([workers.submit(operator.neg, i) for i in range(n)]), 20_000, 1),
    "futures of a task": (lambda workers, n: results([workers.submit(negated, i) for i in range(n)]), 20_000, 1),
    "submit_many of a task": (
        lambda workers, n: results(negated.options(executor=workers).submit_many(range(n))),
        20_000,
        1,
    ),
    "map": (lambda workers, n: all_of(workers.map(operator.add, range(n), range(n))), 20_000, 1),
    "map of a task": (lambda workers, n: all_of(workers.map(added, range(n), range(n))), 20_000, 1),
    "map in chunks of 64": (
        lambda workers, n: all_of(workers.map(operator.add, range(n), range(n), chunksize=64)),
        100_000,
        64,
    ),
    "map of a task in chunks of 64": (
        lambda workers, n: all_of(workers.map(added, range(n), range(n), chunksize=64)),
        100_000,
        64,
    ),
}


def all_of(found):
    for _ in found:
        pass


class Throughput(InTurns):
    """Many small calls: all handed in, then all results taken, in calls a second."""

    params = [PEERS, list(CALLS)]
    param_names = ["peer", "calls"]

    def setup_cache(self):
        return in_turns(self.params, self._begin)

    setup_cache.timeout = 1800

    @contextlib.contextmanager
    def _begin(self, peer, calls):
        act, count, chunk = CALLS[calls]
        if "task" in calls and peer != "subetha":
            raise NotImplementedError(f"{peer} has no tasks")
        if chunk > 1 and peer == "dask":
            raise NotImplementedError("dask has no chunks: each call is a task of its own")
        if IS_BRIEF or peer == "dask":
            count //= 20
        with pool(peer, 1) as workers:

            def measure():
                began = time.perf_counter()
                act(workers, count)
                return count / (time.perf_counter() - began)

            workers.submit(operator.neg, 1).result()
            yield measure

    def track_calls(self, figures, peer, calls):
        return median(figures[peer, calls])

    track_calls.unit = "calls/s"

    def track_calls_spread(self, figures, peer, calls):
        return spread(figures[peer, calls])

    track_calls_spread.unit = "calls/s"

"""Executor beside ProcessPoolExecutor and multiprocessing.Pool: the same calls, the peer as a parameter."""

import concurrent.futures
import multiprocessing
import operator
import time
from statistics import median

import numpy as np

from subetha import Executor

from . import RUNS

PEERS = ["subetha", "ProcessPoolExecutor", "multiprocessing.Pool"]


class _Pool:
    """multiprocessing.Pool with the two calls of an executor that are measured."""

    def __init__(self, workers):
        self._pool = multiprocessing.get_context("forkserver").Pool(workers)

    def submit(self, function, *arguments):
        found = self._pool.apply_async(function, arguments)
        found.result = found.get
        return found

    def map(self, function, *iterables, chunksize=1):
        return self._pool.starmap(function, zip(*iterables, strict=True), chunksize)

    def shutdown(self):
        self._pool.close()
        self._pool.join()


def _start(peer, workers):
    if peer == "subetha":
        return Executor(workers)
    if peer == "multiprocessing.Pool":
        return _Pool(workers)
    return concurrent.futures.ProcessPoolExecutor(workers, mp_context=multiprocessing.get_context("forkserver"))


class Calls:
    """One worker that is warm."""

    params = [PEERS]
    param_names = ["peer"]
    timeout = 300

    def setup(self, peer):
        self.executor = _start(peer, 1)
        for n in range(500):
            assert self.executor.submit(operator.neg, n).result() == -n

    def teardown(self, peer):
        self.executor.shutdown()

    def _median(self, measure):
        return median(measure() for _ in range(RUNS))

    def _round_trips(self, count, function, *arguments):
        def measure():
            figures = []
            for _ in range(count):
                began = time.perf_counter_ns()
                self.executor.submit(function, *arguments).result()
                figures.append((time.perf_counter_ns() - began) / 1000)
            return median(figures)

        return self._median(measure)

    def track_round_trip(self, peer):
        return self._round_trips(2000, operator.neg, 5)

    track_round_trip.unit = "us"

    def track_megabyte_there_and_back(self, peer):
        return self._round_trips(100, bytes, bytes(2**20)) / 1000

    track_megabyte_there_and_back.unit = "ms"

    def track_sum_of_64_megabytes(self, peer):
        return self._round_trips(5, np.sum, np.ones(2**23)) / 1000

    track_sum_of_64_megabytes.unit = "ms"

    def track_futures(self, peer):
        def measure():
            began = time.perf_counter()
            futures = [self.executor.submit(operator.neg, n) for n in range(20_000)]
            for future in futures:
                future.result()
            return len(futures) / (time.perf_counter() - began)

        return self._median(measure)

    track_futures.unit = "calls/s"

    def _map(self, count, chunksize):
        def measure():
            began = time.perf_counter()
            for _ in self.executor.map(operator.add, range(count), range(count), chunksize=chunksize):
                pass
            return count / (time.perf_counter() - began)

        return self._median(measure)

    def track_map(self, peer):
        return self._map(20_000, 1)

    track_map.unit = "calls/s"

    def track_map_in_chunks_of_64(self, peer):
        return self._map(100_000, 64)

    track_map_in_chunks_of_64.unit = "calls/s"


class Start:
    """A fresh executor of two workers, to its first result."""

    params = [PEERS]
    param_names = ["peer"]
    timeout = 300

    def track_first_result(self, peer):
        def measure():
            began = time.perf_counter()
            executor = _start(peer, 2)
            assert executor.submit(operator.neg, 1).result() == -1
            took = time.perf_counter() - began
            executor.shutdown()
            return took * 1000

        return median(measure() for _ in range(RUNS))

    track_first_result.unit = "ms"

"""SharedHashMap: lookups and overwrites from one process, beside what the standard library has for the same."""

import dbm
import multiprocessing
import shelve
import time
from statistics import median

from subetha import SharedHashMap

from . import RUNS
from .folders import Folder

VALUE = bytes(range(56))
KEYS = 2000


def key_of(n):
    return b"key %d" % n


class OneProcess:
    """One call on a map of 2000 keys with values of 56 bytes, in nanoseconds; each kind of call in turn, run by run."""

    params = ["get a key", "get no key", "put over a key", "compare and swap"]
    param_names = ["call"]
    CALLS = 100_000

    def setup(self, call):
        self.folder = Folder()
        self.map = SharedHashMap.create(self.folder.file("map"), 4096)
        for n in range(KEYS):
            self.map[key_of(n)] = VALUE

    def teardown(self, call):
        self.map.close()
        self.folder.remove()

    def _run(self, call):
        get, put, swap = self.map.get, self.map.__setitem__, self.map.compare_and_swap
        key, absent = key_of(77), b"absent"
        laps = range(self.CALLS)
        began = time.perf_counter_ns()
        if call == "get a key":
            for _ in laps:
                get(key)
        elif call == "get no key":
            for _ in laps:
                get(absent)
        elif call == "put over a key":
            for _ in laps:
                put(key, VALUE)
        else:
            for _ in laps:
                swap(key, VALUE, VALUE)
        return (time.perf_counter_ns() - began) / self.CALLS

    def _runs(self, call):
        self._run(call)
        return [self._run(call) for _ in range(RUNS)]

    def track_call(self, call):
        return median(self._runs(call))

    track_call.unit = "ns"

    def track_call_least(self, call):
        return min(self._runs(call))

    track_call_least.unit = "ns"


class Shared:
    """A mapping that another process can use as well: lookups and overwrites of one key, in microseconds.

    `dict` lives in a server of `multiprocessing` and is asked over a socket; `dbm` is a file, which only one process may write
    at a time, and `shelve` that with pickled values. The kinds run in turn, so that a busy moment hits all of them.
    """

    params = [["SharedHashMap", "Manager().dict", "dbm", "shelve"], ["get", "put"]]
    param_names = ["mapping", "call"]
    CALLS = {"SharedHashMap": 100_000, "Manager().dict": 2000, "dbm": 2000, "shelve": 2000}

    def setup_cache(self):
        folder = Folder()
        manager = multiprocessing.Manager()
        shared = SharedHashMap.create(folder.file("map"), 4096)
        mappings = {
            "SharedHashMap": shared,
            "Manager().dict": manager.dict(),
            "dbm": dbm.open(folder.file("dbm"), "c"),  # noqa: SIM115 - closed below, with the others
            "shelve": shelve.open(folder.file("shelve")),  # noqa: SIM115
        }
        figures = {}
        try:
            for name, mapping in mappings.items():
                for n in range(KEYS):
                    mapping[self._key(name, n)] = VALUE
            for _ in range(RUNS):
                for name, mapping in mappings.items():
                    for call in self.params[1]:
                        figures.setdefault((name, call), []).append(self._run(name, mapping, call))
        finally:
            for name in ("SharedHashMap", "dbm", "shelve"):
                mappings[name].close()
            manager.shutdown()
            folder.remove()
        return figures

    setup_cache.timeout = 300

    def _key(self, name, n):
        return key_of(n).decode() if name == "shelve" else key_of(n)

    def _run(self, name, mapping, call):
        key, calls = self._key(name, 77), self.CALLS[name]
        began = time.perf_counter_ns()
        if call == "get":
            for _ in range(calls):
                mapping[key]
        else:
            for _ in range(calls):
                mapping[key] = VALUE
        return (time.perf_counter_ns() - began) / calls / 1000

    def track_call(self, figures, mapping, call):
        return median(figures[mapping, call])

    track_call.unit = "us"

    def track_call_spread(self, figures, mapping, call):
        return max(figures[mapping, call]) - min(figures[mapping, call])

    track_call_spread.unit = "us"

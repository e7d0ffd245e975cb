"""HeartbeatTable: a beat, a snapshot, and a watchdog's scan over tables in which every slot is taken."""

import os
import time
from statistics import median

from subetha import FailoverWatchdog, HeartbeatTable

from . import RUNS
from .folders import Folder

CALLS = 20_000


class Calls:
    """Each call in one thread, in nanoseconds; `scan` ticks the epoch and finds that everybody lives."""

    params = ["beat", "snapshot", "silent", "scan"], [8, 64]
    param_names = ["call", "participants"]

    def setup(self, call, participants):
        self.folder = Folder()
        self.table = HeartbeatTable.create(self.folder.file("table"), participants)
        for _ in range(participants):
            self.table.mark_in_flight(self.table.register(os.getpid()), 0)
        if call == "scan":
            watchdog = FailoverWatchdog(self.table, grace_epochs=1_000_000_000)
            self.call, self.arguments = watchdog.scan, ()
        else:
            self.call, self.arguments = getattr(self.table, call), (0,)

    def teardown(self, call, participants):
        self.table.close()
        self.folder.remove()

    def track_call(self, call, participants):
        call, arguments = self.call, self.arguments
        figures = []
        for _ in range(RUNS):
            began = time.perf_counter_ns()
            for _ in range(CALLS):
                call(*arguments)
            figures.append((time.perf_counter_ns() - began) / CALLS)
        return median(figures)

    track_call.unit = "ns"

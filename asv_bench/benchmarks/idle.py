"""What a worker that waits costs."""

import contextlib
import time
from pathlib import Path

from . import IS_BRIEF, RUNS
from .children import child
from .memory import host
from .pools import PEERS, see_that_there_is
from .turns import InTurns, median

SECONDS = 1 if IS_BRIEF else 10
SETTLE_S = 0 if IS_BRIEF else 3


def use_of(pid):
    """Processor seconds of all threads of a process, and how often one of them has gone to sleep of itself."""
    seconds = sleeps = 0
    for thread in Path(f"/proc/{pid}/task").iterdir():
        # a thread may end meanwhile
        with contextlib.suppress(FileNotFoundError, ProcessLookupError):
            seconds += int((thread / "schedstat").read_text().split()[0]) / 1e9
            status = (thread / "status").read_text()
            sleeps += int(status.partition("\nvoluntary_ctxt_switches:")[2].split()[0])
    return seconds, sleeps


class Idle(InTurns):
    """One worker that has nothing to do, for ten seconds; and the program that has it."""

    params = [PEERS, ["worker", "program"]]
    param_names = ["peer", "process"]

    def setup_cache(self):
        figures = {}
        with contextlib.ExitStack() as stack:
            pids = {}
            for peer in PEERS:
                try:
                    see_that_there_is(peer)
                except NotImplementedError as error:
                    figures |= {(peer, process): str(error) for process in self.params[1]}
                    continue
                pids |= zip(
                    ((peer, process) for process in self.params[1]),
                    stack.enter_context(child(host, peer)).recv(),
                    strict=True,
                )
            figures |= {key: [] for key in pids}
            time.sleep(SETTLE_S)
            # All at one time: they are idle. Three times is enough for a median.
            for _ in range(min(RUNS, 3)):
                before = {key: use_of(pid) for key, pid in pids.items()}
                time.sleep(SECONDS)
                for key, pid in pids.items():
                    seconds, sleeps = use_of(pid)
                    figures[key].append(((seconds - before[key][0]), (sleeps - before[key][1]) / SECONDS))
        return figures

    setup_cache.timeout = 300

    def track_processor(self, figures, peer, process):
        """Seconds in ten seconds."""
        return median(seconds for seconds, _ in figures[peer, process]) * 10 / SECONDS

    track_processor.unit = "s"

    def track_wake_ups(self, figures, peer, process):
        return median(rate for _, rate in figures[peer, process])

    track_wake_ups.unit = "1/s"

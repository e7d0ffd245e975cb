"""JobQueue: from submit to result through a worker process, beside peers that carry bytes there and back and do no more."""

import contextlib
import os
import time
from statistics import median, quantiles

from subetha import BackgroundScheduler, JobQueue, PassRegistry
from subetha.files import MEMORY_FILE_SYSTEMS, file_system_of

from . import IS_BRIEF
from .channels import KINDS
from .children import child
from .folders import Folder
from .queues import JOB, WINDOW, passes, queue_with_workers
from .turns import InTurns, in_turns, spread, unfolded
from .work import ECHO

LONGEST_S = 1 if IS_BRIEF else 5
MESSAGE, STOP = b"\x01\x02\x03\x04", bytes(4)
PEERS = ["subetha", *(name for name in KINDS if name != "subetha")]


def echo(peer, there, back, parent):
    """Send back every message that comes, until one begins with a zero."""
    source, target = KINDS[peer].receiver(there), KINDS[peer].sender(back)
    with contextlib.closing(source), contextlib.closing(target):
        parent.send(os.getpid())
        take, put = source.take, target.put
        while True:
            message = take()
            put(message)
            # some come with zeros behind
            if message[0] == STOP[0]:
                break


@contextlib.contextmanager
def echoing(peer):
    """The calls that send to a process that echoes and take what comes back, and its pid."""
    folder = Folder()
    try:
        with (
            contextlib.closing(KINDS[peer](folder, "there", MESSAGE)) as there,
            contextlib.closing(KINDS[peer](folder, "back", MESSAGE)) as back,
        ):
            there.here_sends()
            back.here_receives()
            with child(echo, peer, there.address, back.address) as echoer:
                there.there_is_open()
                back.there_is_open()
                pid = echoer.recv()
                try:
                    yield there.put, back.take, pid
                finally:
                    there.put(STOP)
                    back.take()
    finally:
        folder.remove()


class RoundTrip(InTurns):
    """4 bytes to another process and its answer, one at a time, in microseconds.

    Subetha's are passes: accepted for good when `submit` returns, run by a worker, answered into a mailbox. The peers carry
    bytes there and back, and what was on its way is lost with the process that has it. "near" and "far" have the two processes
    on the first two, or the first and the last, of the processors that this one may use.
    """

    PLACES = ["unpinned", "near", "far"]
    params = [PEERS, PLACES]
    param_names = ["peer", "place"]
    ROUNDS, ASLEEP_ROUNDS = (200, 10) if IS_BRIEF else (20_000, 200)

    def setup_cache(self):
        cpus = sorted(os.sched_getaffinity(0))
        places = {"unpinned": None, "near": cpus[:2], "far": [cpus[0], cpus[-1]]}
        reasons = {}
        if len(cpus) < 2:
            reasons["near"] = "there is one processor only"
        if len(cpus) < 3:
            reasons["far"] = f"there are {len(cpus)} processors only"
        measured = {place: cpus for place, cpus in places.items() if place not in reasons}
        # one after the other, since those who poll burn a processor in others' turns, too
        figures = in_turns([PEERS], lambda peer: self._begin(peer, measured), together=str)
        return unfolded(figures, self.PLACES, lambda _, place: reasons.get(place))

    setup_cache.timeout = 1800

    @contextlib.contextmanager
    def _begin(self, peer, places):
        with contextlib.ExitStack() as stack:
            if peer == "subetha":
                queue, (pid,) = stack.enter_context(queue_with_workers(4096, 1))
                there, back, message = queue.submit, queue.recv, JOB
            else:
                there, back, pid = stack.enter_context(echoing(peer))
                message = MESSAGE
            anywhere = os.sched_getaffinity(0)
            never_waits = peer == "iceoryx2" or peer.startswith("subetha-ipc")

            def measure():
                found = {}
                for place, cpus in places.items():
                    if cpus is not None:
                        os.sched_setaffinity(0, cpus[:1])
                        os.sched_setaffinity(pid, cpus[1:])
                    try:
                        hot = self._times(there, back, message, self.ROUNDS, 0)
                        # who polls is never asleep
                        asleep = (
                            None
                            if never_waits
                            else median(self._times(there, back, message, self.ASLEEP_ROUNDS, 0.002))
                        )
                        found[place] = median(hot), quantiles(hot, n=100)[98], asleep
                    finally:
                        os.sched_setaffinity(0, anywhere)
                        os.sched_setaffinity(pid, anywhere)
                return found

            yield measure

    @staticmethod
    def _times(there, back, message, rounds, pause):
        figures = []
        # where both ends poll on a busy processor, each round trip may take the time slices of everybody else
        latest = time.perf_counter() + LONGEST_S
        for _ in range(rounds):
            if pause:
                time.sleep(pause)
            began = time.perf_counter_ns()
            there(message)
            back()
            figures.append((time.perf_counter_ns() - began) / 1000)
            if began > latest * 1e9 and len(figures) > 1:
                break
        return figures

    def track_hot_p50(self, figures, peer, place):
        return median(p50 for p50, _, _ in figures[peer, place])

    track_hot_p50.unit = "us"

    def track_hot_p99(self, figures, peer, place):
        return median(p99 for _, p99, _ in figures[peer, place])

    track_hot_p99.unit = "us"

    def track_hot_p50_spread(self, figures, peer, place):
        return spread([p50 for p50, _, _ in figures[peer, place]])

    track_hot_p50_spread.unit = "us"

    def track_asleep_p50(self, figures, peer, place):
        """The other process sleeps: 2 ms pass before each; nothing for those that poll."""
        found = [asleep for _, _, asleep in figures[peer, place]]
        return float("nan") if None in found else median(found)

    track_asleep_p50.unit = "us"


class Throughput(InTurns):
    """4 bytes there and back with a window of 512, in passes a second; the peers as in `RoundTrip`."""

    params = [[peer for peer in PEERS if peer != "iceoryx2"]]
    param_names = ["peer"]

    def setup_cache(self):
        # as in RoundTrip
        return in_turns(self.params, self._begin, together=str)

    setup_cache.timeout = 900

    @contextlib.contextmanager
    def _begin(self, peer):
        count = 5_000 if IS_BRIEF else 100_000
        if peer == "subetha":
            with queue_with_workers(4096, 1) as (queue, _):
                yield lambda: passes(queue, WINDOW, count)
            return
        with echoing(peer) as (put, take, _):

            def measure():
                began = time.perf_counter()
                for n in range(count):
                    put(MESSAGE)
                    if n >= WINDOW:
                        take()
                for _ in range(min(WINDOW, count)):
                    take()
                return count / (time.perf_counter() - began)

            yield measure

    def track_passes(self, figures, peer):
        return median(figures[peer,])

    track_passes.unit = "passes/s"

    def track_passes_spread(self, figures, peer):
        return spread(figures[peer,])

    track_passes_spread.unit = "passes/s"


class SchedulerOverRings:
    """BackgroundScheduler over two rings, its worker a thread of this process."""

    def setup(self):
        self.folder = Folder()
        registry = PassRegistry()
        registry.register(ECHO, bytes)
        self.scheduler = BackgroundScheduler.start(
            self.folder.file("submit"),
            self.folder.file("result"),
            self.folder.file("table"),
            1024,
            8,
            registry=registry,
        )

    def teardown(self):
        self.scheduler.close()
        self.folder.remove()

    def track_round_trip_p50(self):
        submit, recv = self.scheduler.submitter().submit, self.scheduler.collector().recv
        figures = []
        for _ in range(2000):
            began = time.perf_counter_ns()
            submit(JOB)
            recv()
            figures.append((time.perf_counter_ns() - began) / 1000)
        return median(figures)

    track_round_trip_p50.unit = "us"


class Durable:
    """What the disk costs, beside the disk alone: a write of 4096 bytes and its fsync, twice for a job and its end."""

    params = ("process", "disk", "write and fsync")
    param_names = ("what",)
    ROUNDS = 200

    def setup(self, what):
        # asv tears down what was skipped, too
        self.made = contextlib.ExitStack()
        folder = Folder(None)
        self.made.callback(folder.remove)
        if file_system_of(folder.path) in MEMORY_FILE_SYSTEMS:
            raise NotImplementedError("TMPDIR lies in memory")
        if what == "write and fsync":
            self.fd = os.open(folder.file("floor"), os.O_CREAT | os.O_RDWR)
            self.made.callback(os.close, self.fd)
        else:
            self.queue = self.made.enter_context(JobQueue.create(folder.file("queue"), durability=what))

    def teardown(self, what):
        self.made.close()

    def _write(self):
        for _ in range(2):
            os.pwrite(self.fd, bytes(4096), 0)
            os.fsync(self.fd)

    def _submit_and_end(self):
        self.queue.submit(JOB)
        self.queue.try_claim().ack()

    def track_submit_and_ack_p50(self, what):
        act = self._write if what == "write and fsync" else self._submit_and_end
        figures = []
        for _ in range(self.ROUNDS):
            began = time.perf_counter_ns()
            act()
            figures.append((time.perf_counter_ns() - began) / 1000)
        return median(figures)

    track_submit_and_ack_p50.unit = "us"

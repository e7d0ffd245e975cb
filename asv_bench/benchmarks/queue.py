"""JobQueue: from submit to result through a worker process."""

import multiprocessing
import os
import resource
import time
from statistics import median, quantiles

from subetha import BackgroundScheduler, JobQueue, Pass, PassRegistry, WorkerLoop
from subetha.files import MEMORY_FILE_SYSTEMS, file_system_of

from .folders import Folder

ECHO = 1
JOB = Pass(ECHO, b"\x01\x02\x03\x04")
ROUNDS = 20_000


def serve(path, ready):
    """Run the worker loop until a job says so; then tell how much processor time was used while idle."""
    registry = PassRegistry()
    registry.register(ECHO, bytes)
    with JobQueue.open(path) as queue:
        loop = WorkerLoop(queue.submit_side, registry=registry, table=queue.heartbeat, slot=queue.slot)
        registry.register(ECHO + 1, lambda _: loop.stop() or b"")
        registry.register(ECHO + 2, lambda _: str(sum(resource.getrusage(resource.RUSAGE_SELF)[:2])).encode())
        ready.send(os.getpid())
        loop.run()


class Worker:
    """One worker process with the worker loop of `subetha worker`, echoing."""

    timeout = 300

    def setup(self, *_):
        self.folder = Folder()
        self.queue = JobQueue.create(self.folder.file("queue"))
        here, there = multiprocessing.Pipe()
        self.worker = multiprocessing.get_context("spawn").Process(target=serve, args=(self.queue.path, there))
        self.worker.start()
        # the worker's end is its own, so that its death ends the wait
        there.close()
        here.recv()
        for _ in range(2000):
            self.queue.submit(JOB)
            self.queue.recv()

    def teardown(self, *_):
        self.queue.submit(Pass(ECHO + 1))
        self.queue.recv()
        self.worker.join()
        self.queue.close()
        self.folder.remove()

    def _ask(self, closure_id):
        self.queue.submit(Pass(closure_id))
        return self.queue.recv().result


class RoundTrip(Worker):
    """One 4-byte pass at a time: submit, run in the worker, receive."""

    def _round_trips(self, rounds, pause):
        submit, recv = self.queue.submit, self.queue.recv
        figures = []
        for _ in range(rounds):
            if pause:
                time.sleep(pause)
            began = time.perf_counter_ns()
            submit(JOB)
            recv()
            figures.append((time.perf_counter_ns() - began) / 1000)
        return figures

    def track_hot_p50(self):
        return median(self._round_trips(ROUNDS, 0))

    track_hot_p50.unit = "us"

    def track_hot_p99(self):
        return quantiles(self._round_trips(ROUNDS, 0), n=100)[98]

    track_hot_p99.unit = "us"

    def track_asleep_p50(self):
        """The worker sleeps: 2 ms pass before each submit."""
        return median(self._round_trips(500, 0.002))

    track_asleep_p50.unit = "us"


class Throughput(Worker):
    """A window of 512 passes under way."""

    WINDOW = 512

    def track_passes(self):
        submit, recv_many, recv = self.queue.submit, self.queue.recv_many, self.queue.recv
        count = 100_000
        pending = 0
        began = time.perf_counter()
        for _ in range(count):
            if pending == self.WINDOW:
                recv()
                pending -= 1 + len(recv_many(self.WINDOW))
            submit(JOB)
            pending += 1
        while pending:
            recv()
            pending -= 1
        return count / (time.perf_counter() - began)

    track_passes.unit = "passes/s"


class Idle(Worker):
    """Processor time of a worker that waits."""

    SECONDS = 5

    def track_share_of_a_core(self):
        before = float(self._ask(ECHO + 2))
        time.sleep(self.SECONDS)
        return (float(self._ask(ECHO + 2)) - before) / self.SECONDS * 100

    track_share_of_a_core.unit = "%"


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
        self.folder = Folder(None)
        if file_system_of(self.folder.path) in MEMORY_FILE_SYSTEMS:
            self.folder.remove()
            raise NotImplementedError("TMPDIR lies in memory")
        if what == "write and fsync":
            self.fd = os.open(self.folder.file("floor"), os.O_CREAT | os.O_RDWR)
        else:
            self.queue = JobQueue.create(self.folder.file("queue"), durability=what)

    def teardown(self, what):
        if what == "write and fsync":
            os.close(self.fd)
        else:
            self.queue.close()
        self.folder.remove()

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

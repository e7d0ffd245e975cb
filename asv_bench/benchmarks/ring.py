"""SharedRing and its peers: a message in and out again in one thread, and a stream of messages between two processes."""

import contextlib
import time

from subetha import SharedRing

from . import IS_BRIEF, RUNS
from .channels import BATCH, KINDS
from .children import child
from .folders import Folder
from .turns import InTurns, in_turns, median, spread

PAYLOAD = bytes(range(56))
PEERS = [name for name in KINDS if name != "iceoryx2"]


@contextlib.contextmanager
def channel(peer):
    """A new one between this process and whoever it is given to."""
    folder = Folder()
    try:
        with contextlib.closing(KINDS[peer](folder, "channel", PAYLOAD)) as made:
            yield made
    finally:
        folder.remove()


class OneThread(InTurns):
    """56 bytes put in and taken out, in nanoseconds a pair; by calls that do not wait, where there are such."""

    params = [PEERS]
    param_names = ["peer"]
    PAIRS = {"multiprocessing.Pipe": 10_000, "multiprocessing.Queue": 5_000}

    def setup_cache(self):
        return in_turns(self.params, self._begin)

    setup_cache.timeout = 300

    @contextlib.contextmanager
    def _begin(self, peer):
        with channel(peer) as both:
            both.in_one_thread()
            count = self.PAIRS.get(peer, 100_000) // (10 if IS_BRIEF else 1)

            def measure():
                began = time.perf_counter_ns()
                both.pairs(PAYLOAD, count)
                return (time.perf_counter_ns() - began) / count

            yield measure

    def track_pair(self, figures, peer):
        return median(figures[peer,])

    track_pair.unit = "ns"

    def track_pair_least(self, figures, peer):
        return min(figures[peer,])

    track_pair_least.unit = "ns"


class Batches:
    """`push_many` then `pop_many` of 256 messages of 56 bytes in one thread, in nanoseconds a message."""

    def setup(self):
        self.folder = Folder()
        self.ring = SharedRing.create(self.folder.file("ring"), 4096)

    def teardown(self):
        self.ring.close()
        self.folder.remove()

    def track_message(self):
        batch = [PAYLOAD] * BATCH
        figures = []
        for _ in range(RUNS):
            began = time.perf_counter_ns()
            for _ in range(400):
                self.ring.push_many(batch)
                self.ring.pop_many(BATCH)
            figures.append((time.perf_counter_ns() - began) / (400 * BATCH))
        return median(figures)

    track_message.unit = "ns"


def consume(peer, address, count, mode, parent):
    """Take `count` messages and answer each run with how many nanoseconds it took from the first to the last."""
    with contextlib.closing(KINDS[peer].receiver(address)) as here, contextlib.suppress(EOFError):
        parent.send("ready")
        while parent.recv():
            if mode == "one a call":
                here.receive(1)
                began = time.perf_counter_ns()
                here.receive(count - 1)
            else:
                began = time.perf_counter_ns()
                here.receive_batches(count)
            parent.send(time.perf_counter_ns() - began)


class TwoProcesses(InTurns):
    """56-byte messages from one process to another, in messages a second."""

    params = [PEERS, ["one a call", "batches of 256"]]
    param_names = ["peer", "mode"]
    COUNT = 256 * 4000
    FEWER = {"multiprocessing.Pipe": 4, "multiprocessing.Queue": 16}

    def setup_cache(self):
        # one after the other, since those who poll burn a processor in others' turns, too
        return in_turns(self.params, self._begin, together=lambda *one: one)

    setup_cache.timeout = 600

    @contextlib.contextmanager
    def _begin(self, peer, mode):
        if mode != "one a call" and not KINDS[peer].has_batches:
            raise NotImplementedError(f"{peer} has no calls for batches")
        count = self.COUNT // self.FEWER.get(peer, 1) // (16 if IS_BRIEF else 1)
        with channel(peer) as here:
            here.here_sends()
            with child(consume, peer, here.address, count, mode) as consumer:
                here.there_is_open()
                consumer.recv()
                send = here.send if mode == "one a call" else here.send_batches

                def measure():
                    consumer.send("go")
                    send(PAYLOAD, count)
                    return count / consumer.recv() * 1e9

                yield measure

    def track_rate(self, figures, peer, mode):
        return median(figures[peer, mode])

    track_rate.unit = "messages/s"

    def track_rate_spread(self, figures, peer, mode):
        return spread(figures[peer, mode])

    track_rate_spread.unit = "messages/s"

"""Calls of a JobQueue under the stepper: what stands before, what the victim does, and what must be found afterwards."""

import contextlib
import functools
import os
import shutil
import signal
import time
from collections import Counter

import numpy as np
from census import QueueCensus, nothing_left, states_of
from queue_files import QueueFiles

from subetha._core import SubmitOptions, decode_submit, encode_result
from subetha.errors import Empty, Full, TransportError, UnknownClosureId, UnknownJob
from subetha.jobqueue import JobQueue
from subetha.layout import LOOKING, UNKNOWN_BIT, VERSION_SHIFT, BlockState, CellState, SlotState, cell_word
from subetha.pass_registry import Pass, PassRegistry
from subetha.scheduler import WorkerLoop

CELLS, QUOTA, ARENA_BYTES, LONG = 16, 15, 2**18, 20_000
LONG_BLOCKS = ARENA_BYTES // 2**15
PLACES = 2 * CELLS
VICTIM, FALLEN = "V", 1
ONCE, NEVER, PERHAPS = {1}, {0}, {0, 1}
PATIENCE_S = 20
ENDED = (CellState.DEAD, CellState.KEPT)
"""States in which a job that is in nobody's hands stays until somebody asks for something."""
FAR = 4e9
"""When parked jobs are due (s since 1970): after any run of this. Who is to take them has its clock set forward."""
FAR_AHEAD_NS = 3 * 10**18
REST_S = 1000.0
"""For so long jobs rest; who waits for one has its clock set forward by that."""
OPTIONS = {"quota": QUOTA, "participants": 16, "arena_bytes": ARENA_BYTES}


@functools.cache
def pattern(key, length):
    """Bytes that follow from the key and their place."""
    start = sum(n * byte for n, byte in enumerate(key, 1))
    return (((np.arange(length, dtype=np.uint32) + start) * np.uint32(2654435761)) >> 24).astype(np.uint8).tobytes()


def arguments(name, length=40):
    """A job's arguments: eight bytes that name it, and bytes that follow from these."""
    key = name.encode().ljust(8)
    return key + pattern(key, length)


def named(args):
    """The name of a job with these arguments; ValueError where they are torn."""
    name = bytes(args[:8]).decode("ascii", "replace").rstrip()
    if bytes(args) != arguments(name, len(args) - 8):
        raise ValueError(f"torn arguments: {bytes(args[:40])!r}... of {len(args)} bytes")
    return name


def answer(name, who, length=60):
    key = name.encode().ljust(8) + who.encode()
    return key + pattern(key, length)


def answered(result):
    """Name of the job and of who ran it."""
    name, who = result[:8].decode("ascii", "replace").rstrip(), result[8:9].decode("ascii", "replace")
    if result != answer(name, who, len(result) - 9):
        raise ValueError(f"torn result: {result[:40]!r}... of {len(result)} bytes")
    return name, who


def in_pieces(data):
    return [data[:1], memoryview(data)[1:9000], b"", bytearray(data[9000:])]


def run(claim, who, length=60):
    claim.started()
    claim.reply(encode_result(0, answer(named(decode_submit(claim.payload)[1].args), who, length)))


def make_template(directory):
    """A queue that has been in use, and one with a dead letter whose submitter has been told and is gone."""
    with JobQueue.create(os.path.join(directory, "queue"), CELLS, **OPTIONS) as queue:
        for n in range(5):
            queue.submit(Pass(1, arguments(f"T{n}")), priority=n % 3)
            queue.try_claim().release()
            run(queue.try_claim(), "T")
            queue.recv(PATIENCE_S)
    shutil.copytree(os.path.join(directory, "queue"), os.path.join(directory, "letters"))
    with JobQueue.open(os.path.join(directory, "letters")) as queue:
        queue.submit(Pass(1, arguments("L0", LONG)), max_attempts=1)
        pid = os.fork()
        if pid == 0:
            claim = JobQueue.open(queue.path).try_claim()
            claim.started()
            os.kill(os.getpid(), signal.SIGKILL)
        os.waitpid(pid, 0)
        queue.rescue()
        assert isinstance(queue.recv(PATIENCE_S).result, Exception)


def copy_sparse(source, target):
    with open(source, "rb") as old, open(target, "wb") as new:
        size = os.fstat(old.fileno()).st_size
        os.truncate(new.fileno(), size)
        at = 0
        while at < size:
            try:
                start = os.lseek(old.fileno(), at, os.SEEK_DATA)
            except OSError:
                break
            at = os.lseek(old.fileno(), start, os.SEEK_HOLE)
            os.pwrite(new.fileno(), os.pread(old.fileno(), at - start, start), start)


class QueueStage:
    """The survivor, a client and a worker, and one call of a victim on the same queue.

    `setup`, `call` and `finish` run in the victim. `jobs` are the survivor's: name to the length of the arguments and the
    keywords of `submit`. `claims` and `results` say how often each job may be claimed afterwards, and how often the survivor
    gets its result. `dies` are (call, state) of others that die before: where a cell or block comes to that state for the
    first time, or (None) when the call has returned. Those of `lapses` are stopped there, and `silent` then.
    """

    template = "queue"
    jobs = {"S0": (40, {}), "S1": (40, {})}  # noqa: RUF012
    dies = ()
    dies_first = False
    lapses = ()
    producer = VICTIM

    def __init__(self, directory):
        self.directory = directory
        self.silent = []

    @classmethod
    def copy(cls, template, directory):
        source = os.path.join(template, cls.template)
        os.mkdir(directory)
        for name in os.listdir(source):
            copy_sparse(os.path.join(source, name), os.path.join(directory, name))
        return cls(directory)

    @property
    def watched(self):
        # of the arena its words: the data in between tell nobody anything
        sizes = {"arena": JobQueue._arena_sizes(ARENA_BYTES)[3], "mail": JobQueue._mail_sizes(CELLS, 4)[2]}
        return [(os.path.join(self.directory, name), sizes.get(name, 0)) for name in os.listdir(self.directory)]

    def name(self, n):
        return f"{self.producer}{n}"

    # ---- the survivor, before ----

    def before(self):
        self.queue = JobQueue.open(self.directory)
        self.queue._clock_shift_ns = FAR_AHEAD_NS
        self.alive = {self.queue.slot}
        self.ids = {}
        self.seen, self.got = Counter(), Counter()
        self.attempts = {}
        self.who = {}
        self.claims, self.results = {}, {}
        self.new_names = 0
        for name, (length, options) in self.jobs.items():
            self.submit(name, length, **options)

    def submit(self, name, length=40, **options):
        self.ids[self.queue.submit(Pass(1, arguments(name, length)), wait=PATIENCE_S, **options)] = name
        self.claims[name], self.results[name] = ONCE, ONCE

    def count(self, state):
        census = QueueCensus(self.directory)
        if isinstance(state, BlockState):
            return sum(int((words & 0xF == state).sum()) for _, words in census.blocks)
        return states_of(census.words).count(state)

    # ---- the victim ----

    def setup(self):
        self.queue = JobQueue.open(self.directory)
        self.queue.slot  # noqa: B018 - takes the number

    def call(self):
        raise NotImplementedError

    def finish(self, value):
        self.queue.close()
        return value

    def job(self, n, length=40):
        return Pass(1, arguments(self.name(n), length))

    def hand_in(self, n, length=40, **options):
        return self.queue.submit(self.job(n, length), wait=0, **options)

    def collect(self, n):
        """The results of `n` jobs, and no more."""
        found = [answered(self.queue.recv(PATIENCE_S).result)[0] for _ in range(n)]
        try:
            raise AssertionError(f"one result too many: {self.queue.try_recv()}")
        except Empty:
            return found

    # ---- the survivor, afterwards ----

    def expect(self, returned, value):
        """Put into `claims` and `results` what is not the same for all of the survivor's jobs."""

    def after_fall(self, fallen, pid):
        """Another one, of that pid, dies before the victim's call begins."""

    def look_at_the_dead(self, census):
        """What a job's cell says once its holder is dead decides what has to happen to it."""
        for cell, state in zip(census.cells, states_of(census.words), strict=True):
            if state in (CellState.TAKEN, CellState.RETRY, CellState.DONE):
                name = self.ids.get(int(cell["job_id"]))
                is_last = cell["max_attempts"] == 1 and cell["charged"] and state is CellState.TAKEN
                if name is not None:
                    self.claims[name] = NEVER if state is CellState.DONE or is_last else ONCE
                    self.results[name] = ONCE

    def after_kill(self, returned, value):
        self.expect(returned, value)
        census = QueueCensus(self.directory)
        self.look_at_the_dead(census)
        was_there = int((census.records["status"] & 0xFF != 0).sum()) - len(self.alive)
        rescued = self.queue.rescue()
        # fewer where the survivor's timer was faster
        assert rescued <= was_there, f"rescue() says {rescued}, where {was_there} were dead"
        nothing_left(census.leftover(self.alive))
        self.settle()

    def note_claim(self, claim):
        name = named(decode_submit(claim.payload)[1].args)
        self.seen[name] += 1
        self.attempts[name] = claim.attempts
        job = self.ids.get(claim.job_id)
        assert job in (None, name), f"job {job} has the arguments of {name}"
        run(claim, "S", 60 if self.seen.total() % 2 else LONG if self.has_long else 61)

    @property
    def has_long(self):
        return any(length == LONG for length, _ in self.jobs.values())

    def note_result(self, result):
        name = self.ids[result.token]
        self.got[name] += 1
        if isinstance(result.result, Exception):
            self.who[name] = type(result.result).__name__ + ": " + str(result.result)
            return
        found, self.who[name] = answered(result.result)
        assert found == name, f"job {name} has the result of {found}"

    def step(self):
        """Run what waits and take what is there; False where there is nothing."""
        done = 0
        try:
            self.note_claim(self.queue.try_claim())
            done += 1
        except Empty:
            pass
        for result in self.queue.recv_many(CELLS):
            self.note_result(result)
            done += 1
        return done > 0

    def run_all(self):
        """Until nothing is under way; the survivor's timer may have had a job in its hands for a moment."""
        deadline = time.monotonic() + 2
        while self.step() or (self.is_under_way() and time.monotonic() < deadline):
            pass

    def is_under_way(self):
        words = QueueCensus(self.directory).words
        return any(
            state not in (CellState.FREE, *ENDED) or (state in ENDED and int(word) & 0xFFFF)
            for word, state in zip(words, states_of(words), strict=True)
        )

    def settle(self):
        """Run everything, compare, count, and fill the queue once more."""
        self.run_all()
        for what, found, allowed in (("claimed", self.seen, self.claims), ("answered", self.got, self.results)):
            for name, times in allowed.items():
                assert found[name] in times, f"job {name} was {what} {found[name]} times, expected {times}"
            assert set(found) <= set(allowed), f"{what}, and nobody knows it: {set(found) - set(allowed)}"
        self.look_at_answers()
        for letter in self.queue.dead_letters():
            assert self.queue.drop_dead(letter.job_id)
        assert self.queue.duplicates in self.duplicates()
        census = QueueCensus(self.directory)
        nothing_left(census.faults(self.alive))
        self.whole_round()
        nothing_left(census.faults(self.alive))
        self.close()
        nothing_left(census.faults(set()))

    def look_at_answers(self):
        for name, who in self.who.items():
            assert who in "SV", f"job {name}: {who}"

    def look_at_trace(self):
        """Did the call that was stepped through do what it is there for?"""

    def duplicates(self):
        """How many second results the survivor may have dropped."""
        return {0}

    def whole_round(self):
        """As many jobs as there are cells for them, and as many blocks as there are."""
        for count, length in ((CELLS - 1, 40), (LONG_BLOCKS, LONG)):
            ids = [self.queue.submit(Pass(1, arguments(f"R{n}", length)), wait=0) for n in range(count)]
            if length != LONG:
                try:
                    raise AssertionError(f"one job too many: {self.queue.submit(Pass(1, b''), wait=0)}")
                except Full:
                    pass
            for n in range(count):
                claim = self.queue.try_claim()
                assert named(decode_submit(claim.payload)[1].args) == f"R{n}"
                run(claim, "S")
            assert [result.token for result in self.queue.recv_many(count + 1)] == ids

    def close(self):
        self.queue.close()

    # ---- the victim is only stopped ----

    def traffic(self):
        """Ten times the capacity goes past the one that is stopped."""
        for n in range(10 * CELLS):
            self.submit(f"N{n}", LONG if n % 32 == 0 else 40, priority=n % 3)
            self.step()
        while self.step():
            pass
        assert self.queue.rescue() == 0, "a stopped process is not dead"

    def meanwhile(self):
        if not self.step():
            time.sleep(0.0005)

    def after_stop(self, value):
        self.expect(True, value)
        self.settle()


# ---- clients ----


class Submit(QueueStage):
    length = 40

    def setup(self):
        super().setup()
        self.queue.recv_many(0)
        self.hand_in(0)
        self.next_job = self.job(1, self.length)

    def call(self):
        return self.queue.submit(self.next_job, wait=0)

    def finish(self, value):
        assert sorted(self.collect(2)) == [self.name(0), self.name(1)]
        return super().finish(value)

    def expect(self, returned, value):
        self.claims[self.name(0)] = ONCE
        self.claims[self.name(1)] = ONCE if returned else PERHAPS


class SubmitBlock(Submit):
    length = LONG


class SubmitPieces(Submit):
    """The arguments lie in several buffers."""

    length = LONG

    def call(self):
        return self.queue._submit(1, self.pieces, SubmitOptions(), None, 0)

    def setup(self):
        super().setup()
        self.pieces = in_pieces(self.next_job.args)


class SubmitDue(Submit):
    """The victim collects what the survivor, whose clock is ahead, has run."""

    def call(self):
        return self.queue.submit(self.next_job, due=FAR, wait=0)

    def look_at_trace(self):
        assert self.count(CellState.PARKED) == 1


class SubmitDueBlock(SubmitDue):
    length = LONG


class SubmitToFullArena(Submit):
    """Every byte of the arena lies in free blocks of another size: one of these is given back to the disk first."""

    length = 5000

    def before(self):
        super().before()
        ids = [self.queue.submit(Pass(1, arguments(f"B{n}", LONG)), wait=0) for n in range(LONG_BLOCKS)]
        self.run_before(len(ids) + len(self.jobs))
        assert self.queue.arena_backed_bytes == ARENA_BYTES
        self.holes_before = self.count(BlockState.FREE_HOLE)

    def look_at_trace(self):
        # one hole less of the size wanted, one more of another size
        assert self.count(BlockState.FREE_HOLE) == self.holes_before, "nothing was given back to the disk"

    def run_before(self, count):
        """Run and collect what is there, and hand the jobs of the survivor in again."""
        for _ in range(count):
            run(self.queue.try_claim(), "S")
        assert len(self.queue.recv_many(count)) == count
        self.ids.clear()
        for name, (length, options) in self.jobs.items():
            self.submit(name, length, **options)


class SubmitToFullRing(Submit):
    """Only references to cancelled jobs, behind one that waits, fill the ring: that one goes to `back` first."""

    jobs = {"S0": (LONG, {})}  # noqa: RUF012

    def before(self):
        super().before()
        for _ in range(PLACES - 1):
            assert self.queue.cancel(self.queue.submit(Pass(1, b"")))

    def look_at_trace(self):
        assert self.count(CellState.RETRY) == 1, "S0 was not put back"

    def setup(self):
        QueueStage.setup(self)
        self.queue.recv_many(0)
        self.hand_in(0, priority=0)
        self.next_job = self.job(1, self.length)


class FirstCall(QueueStage):
    """Takes a number, and makes a mailbox."""

    def setup(self):
        self.queue = JobQueue.open(self.directory)
        self.next_job = self.job(1)

    def call(self):
        return self.queue.submit(self.next_job, wait=0)

    def finish(self, value):
        assert self.collect(1) == [self.name(1)]
        return super().finish(value)

    def expect(self, returned, value):
        self.claims[self.name(1)] = ONCE if returned else PERHAPS


class FirstCallAmongTheDead(FirstCall):
    """Every other slot is a dead one's: one of these is rescued in its own name, and taken."""

    jobs = {"S0": (LONG, {"priority": 0}), "S1": (40, {})}  # noqa: RUF012

    def before(self):
        super().before()
        # looks from here on only when told: its timer would be faster
        self.queue._watch()
        self.fill_the_table()

    def fill_the_table(self):
        files = QueueFiles(self.directory)
        files.records["status"][files.records["status"] & 0xFF == SlotState.FREE] = 1 << 8 | SlotState.USED
        # the first of the dead has S0 in hand
        for cell in files.cells:
            if self.ids.get(int(cell["job_id"])) == "S0":
                cell["word"] = cell_word(int(cell["word"]) >> VERSION_SHIFT, CellState.TAKEN, self.queue.slot + 2)


class Recv(QueueStage):
    length = 60

    def setup(self):
        self.worker = JobQueue.open(self.directory)
        super().setup()
        self.hand_in(0, priority=0)
        run(self.worker.try_claim(), "S", self.length)
        self.hand_in(1)

    def call(self):
        return self.queue.recv(PATIENCE_S).result

    def finish(self, value):
        assert self.collect(1) == [self.name(1)]
        self.worker.close()
        return super().finish(value)

    def expect(self, returned, value):
        self.claims[self.name(1)] = ONCE
        if returned:
            assert answered(value) == (self.name(0), "S")


class RecvBlock(Recv):
    length = LONG


class RecvLetter(QueueStage):
    """The submitter of a job whose worker died in every attempt is told so."""

    def setup(self):
        super().setup()
        self.hand_in(0, LONG, priority=0, max_attempts=1)
        # whoever is traced stops at every signal
        signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGCHLD})
        pid = os.fork()
        if pid == 0:
            claim = JobQueue.open(self.directory).try_claim()
            claim.started()
            os.kill(os.getpid(), signal.SIGKILL)
        os.waitpid(pid, 0)
        self.queue.rescue()

    def call(self):
        return str(self.queue.recv(PATIENCE_S).result)

    def finish(self, value):
        self.collect(0)
        return super().finish(value)

    def expect(self, returned, value):
        self.claims[self.name(0)] = NEVER
        assert not returned or "its worker (pid" in value

    def settle(self):
        letters = [letter.job_id for letter in self.queue.dead_letters()]
        assert len(letters) == 1, f"letters: {letters}"
        super().settle()


class Cancel(QueueStage):
    length = LONG

    def setup(self):
        super().setup()
        self.job_id = self.hand_in(0, self.length)
        self.hand_in(1)

    def call(self):
        return self.queue.cancel(self.job_id)

    def finish(self, value):
        assert sorted(self.collect(1 if value else 2))[-1] == self.name(1)
        return super().finish(value)

    def expect(self, returned, value):
        self.claims[self.name(0)] = PERHAPS if not returned else NEVER if value else ONCE
        self.claims[self.name(1)] = ONCE


class Close(QueueStage):
    """Claims in hand, one of them started, a job of its own waiting, and a result that it has not collected."""

    jobs = {"S0": (LONG, {}), "S1": (40, {}), "S2": (40, {})}  # noqa: RUF012

    def setup(self):
        self.worker = JobQueue.open(self.directory)
        super().setup()
        self.hand_in(0, priority=0)
        run(self.worker.try_claim(), "S", LONG)
        self.claims_held = [self.queue.try_claim() for _ in range(2)]
        self.claims_held[0].started()
        self.hand_in(1)

    def call(self):
        self.queue.close()

    def finish(self, value):
        self.worker.close()

    def expect(self, returned, value):
        self.claims[self.name(1)] = ONCE


# ---- workers ----


class Claim(QueueStage):
    jobs = {"S0": (LONG, {}), "S1": (40, {})}  # noqa: RUF012

    def call(self):
        self.claim = self.queue.try_claim()

    def finish(self, value):
        if value is None:
            value = named(decode_submit(self.claim.payload)[1].args)
            run(self.claim, "V")
        return super().finish(value)

    def after_stop(self, value):
        if isinstance(value, str):
            self.claims[value] = NEVER
        super().after_stop(value)


class ClaimAndStart(Claim):
    def call(self):
        self.claim = self.queue.try_claim()
        self.claim.started()


class StartLast(Claim):
    """The job may be started once only: where its worker dies, it is a letter that names this one."""

    jobs = {"S0": (40, {"max_attempts": 1})}  # noqa: RUF012

    def call(self):
        self.claim = self.queue.try_claim()
        self.claim.started()

    def expect(self, returned, value):
        self.claims["S0"] = NEVER if returned else PERHAPS
        self.results["S0"] = ONCE

    def look_at_the_dead(self, census):
        """Whether it counts as started is decided at one of the instructions."""

    def look_at_answers(self):
        who = self.who["S0"]
        assert who == "S" or f"pid {self.victim_pid}" in who, f"{self.victim_pid} died; the letter: {who}"


class Serve(QueueStage):
    """One job from its claim to its answer, as a worker's loop runs it."""

    jobs = {"S0": (LONG, {}), "S1": (40, {})}  # noqa: RUF012

    def setup(self):
        super().setup()
        registry = PassRegistry()
        registry.register(1, self.run)
        self.loop = WorkerLoop(
            self.queue.submit_side, registry=registry, table=self.queue.heartbeat, slot=self.queue.slot
        )

    def run(self, args):
        self.served = named(args)
        return answer(self.served, "V")

    def call(self):
        self.served = None
        with contextlib.suppress(Empty):
            self.loop._ordinary.run(0, self.loop.stop)

    def finish(self, value):
        return super().finish(self.served if value is None else value)

    def after_stop(self, value):
        if isinstance(value, str):
            self.claims[value] = NEVER
        super().after_stop(value)

    def look_at_answers(self):
        for name, who in self.who.items():
            assert (self.seen[name] == 0) == (who == "V")


class Held(QueueStage):
    """The victim has a claim that it has started."""

    jobs = {"S0": (LONG, {}), "S1": (40, {})}  # noqa: RUF012

    def setup(self):
        super().setup()
        self.claim = self.queue.try_claim()
        self.claim.started()


class Reply(Held):
    length = 60

    def setup(self):
        super().setup()
        self.frame = encode_result(0, answer("S0", "V", self.length))

    def call(self):
        self.claim.reply(self.frame)

    def expect(self, returned, value):
        self.claims["S0"] = NEVER if returned else PERHAPS
        self.was_returned = returned

    def look_at_answers(self):
        super().look_at_answers()
        assert self.who["S0"] == "V" or not self.was_returned
        assert (self.seen["S0"] == 0) == (self.who["S0"] == "V")


class ReplyToGone(QueueStage):
    """The client dies while its worker is stopped in the reply, and others have its number when the worker goes on."""

    jobs = {}  # noqa: RUF012
    dies = (("SubmitOne", None),)

    def setup(self):
        super().setup()
        self.claim = self.queue.try_claim()
        self.claim.started()
        self.frame = encode_result(0, answer(f"{FALLEN}0", "V", LONG))

    def call(self):
        self.claim.reply(self.frame)

    def traffic(self):
        assert self.queue.rescue() <= 1
        self.others = [JobQueue.open(self.directory) for _ in range(2)]
        self.next = {other.submit(Pass(1, arguments(f"O{n}"))): other for n, other in enumerate(self.others)}
        self.claims.update({f"O{n}": ONCE for n in range(len(self.others))})

    def after_stop(self, value):
        self.run_all()
        for job_id, other in self.next.items():
            assert other.recv(PATIENCE_S).token == job_id
            assert other.recv_many(2) == []
            other.close()
        self.settle()

    def is_under_way(self):
        return False


class SubmitOne(QueueStage):
    """A client whose job waits."""

    def setup(self):
        super().setup()
        self.hand_in(0)

    def call(self):
        return None


class ReplyBlock(Reply):
    length = LONG


class ReplyInPieces(ReplyBlock):
    def setup(self):
        super().setup()
        self.pieces = in_pieces(answer("S0", "V", self.length))

    def call(self):
        self.claim.reply_in_pieces(self.pieces)


class Ack(Held):
    def call(self):
        self.claim.ack()

    def expect(self, returned, value):
        self.claims["S0"] = self.results["S0"] = NEVER if returned else PERHAPS


class Release(Held):
    def call(self):
        self.claim.release()


class Park(Held):
    def call(self):
        self.claim.park(FAR)

    def look_at_trace(self):
        assert self.count(CellState.PARKED) == 1


class ParkCharged(Held):
    """In its last attempt: nobody takes it for one that has died."""

    jobs = {"S0": (LONG, {"max_attempts": 1}), "S1": (40, {})}  # noqa: RUF012

    def call(self):
        self.claim.park(FAR, charged=True)

    def expect(self, returned, value):
        self.claims["S0"] = ONCE if returned else PERHAPS
        self.results["S0"] = ONCE

    def look_at_the_dead(self, census):
        """Whether it was parked, or died with its worker, is decided at one of the instructions."""

    def look_at_answers(self):
        who = self.who["S0"]
        assert who == "S" if self.seen["S0"] else f"pid {self.victim_pid}" in who, f"the letter: {who}"


class Retry(Held):
    """The job has one attempt left: it has had one, whether its worker has died of that or not, and rests until the other."""

    jobs = {"S0": (LONG, {"max_attempts": 2, "backoff": REST_S}), "S1": (40, {})}  # noqa: RUF012

    def call(self):
        return self.claim.retry()

    def look_at_trace(self):
        assert self.count(CellState.PARKED) == 1

    def expect(self, returned, value):
        assert value is True or not returned

    def step(self):
        self.queue._clock_shift_ns += int(REST_S * 1e9)
        return super().step()

    def look_at_answers(self):
        super().look_at_answers()
        assert self.attempts["S0"] == 1, f"S0 had {self.attempts['S0']} attempts before its last one, expected 1"


class Rest(Retry):
    """The victim claims a job whose worker has died of it a moment ago, and must let it rest."""

    jobs = {"S0": (LONG, {"max_attempts": 2, "backoff": REST_S})}  # noqa: RUF012

    def setup(self):
        # whoever is traced stops at every signal
        signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGCHLD})
        pid = os.fork()
        if pid == 0:
            claim = JobQueue.open(self.directory).try_claim()
            claim.started()
            os.kill(os.getpid(), signal.SIGKILL)
        os.waitpid(pid, 0)
        QueueStage.setup(self)
        self.queue.rescue()

    def call(self):
        try:
            self.queue.try_claim()
        except Empty:
            return
        raise AssertionError("it claimed a job that has to rest")

    def expect(self, returned, value):
        pass


class LeaveToOthers(Held):
    """The attempt does not count, unless this one has died of it."""

    def call(self):
        self.claim.leave_to_others()

    def look_at_trace(self):
        assert self.count(CellState.PARKED) == 1

    def expect(self, returned, value):
        self.allowed = {0} if returned else {0, 1}

    def look_at_answers(self):
        super().look_at_answers()
        assert self.attempts["S0"] in self.allowed, f"S0 had {self.attempts['S0']} attempts, expected {self.allowed}"


class ParkUnknown(QueueStage):
    """The victim claims a job that it does not run, and looks at the parked cells once, however long its steps take.

    What others run it has found out before, since it reads the whole map for that.
    """

    jobs = {}  # noqa: RUF012

    def setup(self):
        super().setup()
        self.queue.unknown_after = 1e8
        self.queue.runs({3})
        self.queue.submit(Pass(2, b""))
        self.call()
        self.queue.runs({2})
        # the look that shows this one finds out what others run, and the next look does not wait for its time
        self.queue.try_claim().ack()
        files = QueueFiles(self.directory)
        assert files.pool_lines["due"] == UNKNOWN_BIT
        files.pool_lines["due"] = 0
        self.hand_in(0, LONG)

    def call(self):
        try:
            self.queue.try_claim()
        except Empty:
            return
        raise AssertionError("it claimed a job that it does not run")

    def finish(self, value):
        assert self.collect(1) == [self.name(0)]
        return super().finish(value)

    def expect(self, returned, value):
        self.claims[self.name(0)] = ONCE

    def look_at_trace(self):
        assert self.count(CellState.PARKED) == 1


class AnswerUnknown(QueueStage):
    """The victim answers a job of its own that nobody has known for long; what others run it does not look up in the map."""

    jobs = {}  # noqa: RUF012

    def setup(self):
        super().setup()
        self.queue.unknown_after = 1e8
        self.queue.runs({2})
        self.hand_in(0, LONG)
        self.call()
        self.queue.unknown_after = 0
        self.queue._live_closure_ids = set
        # so that it looks at once
        QueueFiles(self.directory).pool_lines["due"] |= LOOKING + 2

    def call(self):
        try:
            self.queue.try_claim()
        except Empty:
            return
        except TransportError as error:
            raise AssertionError("what happened to another job is none of who claims") from error
        raise AssertionError("it claimed a job that it does not run")

    def finish(self, value):
        found = self.queue.recv(PATIENCE_S).result
        value = not isinstance(found, UnknownClosureId)
        assert not value or answered(found) == (self.name(0), "S")
        return super().finish(value)

    def expect(self, returned, value):
        self.claims[self.name(0)] = PERHAPS if not returned else ONCE if value else NEVER

    def look_at_trace(self):
        assert self.count(CellState.DONE) == 1


class TakeParked(Claim):
    jobs = {"S0": (LONG, {"due": FAR}), "S1": (40, {"due": FAR + 1})}  # noqa: RUF012

    def setup(self):
        super().setup()
        self.queue._clock_shift_ns = FAR_AHEAD_NS

    def look_at_trace(self):
        assert self.count(CellState.TAKEN) == 1


class CancelParked(QueueStage):
    def setup(self):
        super().setup()
        self.job_id = self.hand_in(0, LONG, due=FAR)
        self.hand_in(1)

    def call(self):
        return self.queue.cancel(self.job_id)

    def finish(self, value):
        assert sorted(self.collect(1 if value else 2))[-1] == self.name(1)
        return super().finish(value)

    def expect(self, returned, value):
        self.claims[self.name(0)] = PERHAPS if not returned else NEVER if value else ONCE
        self.claims[self.name(1)] = ONCE


class ReleaseToFullRing(Held):
    """Only references to cancelled jobs, behind one put back, fill the ring `back`: that one goes round."""

    jobs = {"S0": (40, {}), "S1": (LONG, {})}  # noqa: RUF012

    def before(self):
        super().before()
        first = self.queue.try_claim()
        second = self.queue.try_claim()
        assert named(decode_submit(second.payload)[1].args) == "S1"
        first_id = first.job_id
        second.release()
        files = QueueFiles(self.directory)
        for _ in range(PLACES - 1):
            job_id = self.queue.submit(Pass(1, b""), priority=0)
            claim = self.queue.try_claim()
            # one of priority 1 would have been claimed after S1
            files.cells["priority"][files.cells["job_id"] == job_id] = 1
            claim.release()
            assert self.queue.cancel(job_id)
        # the victim claims S0 before S1
        files.cells["priority"][files.cells["job_id"] == first_id] = 0
        first.release()
        self.before_the_round = self.version_of("S1")

    def version_of(self, name):
        return next(
            int(cell["word"]) >> VERSION_SHIFT
            for cell in QueueFiles(self.directory).cells
            if self.ids.get(int(cell["job_id"])) == name
        )

    def look_at_trace(self):
        assert self.version_of("S1") > self.before_the_round, "S1 has not gone round"

    def setup(self):
        super().setup()
        files = QueueFiles(self.directory)
        files.cells["priority"][files.cells["job_id"] == self.claim.job_id] = 1

    def call(self):
        self.claim.release()


class HoldLast(QueueStage):
    """Dies over a job in its last attempt."""

    def setup(self):
        super().setup()
        self.claim = self.queue.try_claim()

    def call(self):
        self.claim.started()


# ---- kept results ----


class Kept(QueueStage):
    """`kept` says how often a job's result must be there for whoever asks, once everything has run."""

    ttl = 1000

    def before(self):
        super().before()
        # by a clock that is ahead it would expire at once
        self.queue._clock_shift_ns = 0
        self.kept = {}

    def keep(self, n, length=40, worker="S", result=60, **options):
        """A job of the victim's that has run, with its result still to be collected."""
        job_id = self.hand_in(n, length, result_ttl=self.ttl, **options)
        run(self.worker.try_claim(), worker, result)
        return job_id

    def settle(self):
        self.run_all()
        self.look_at_kept()
        super().settle()

    def look_at_kept(self):
        census = QueueCensus(self.directory)
        found = Counter()
        for cell, state in zip(census.cells, states_of(census.words), strict=True):
            if state is CellState.KEPT:
                job_id = int(cell["job_id"])
                found[answered(self.queue.result(job_id, 0))[0]] += 1
                assert self.queue.forget(job_id)
        for name, times in self.kept.items():
            assert found[name] in times, f"the result of {name} was kept {found[name]} times, expected {times}"
        assert set(found) <= set(self.kept), f"kept, and nobody knows it: {found}"


class RecvKept(Kept, Recv):
    args_length = 40

    def setup(self):
        self.worker = JobQueue.open(self.directory)
        QueueStage.setup(self)
        self.keep(0, self.args_length, result=self.length, priority=0)
        self.hand_in(1)

    def expect(self, returned, value):
        super().expect(returned, value)
        self.kept[self.name(0)] = ONCE


class RecvKeptBlock(RecvKept):
    """The block of the arguments is given back, that of the result stays."""

    length = args_length = LONG


class CloseKept(Kept):
    """A result that is to be kept has not been collected, and one that is not."""

    def setup(self):
        self.worker = JobQueue.open(self.directory)
        super().setup()
        self.keep(0, LONG, result=LONG, priority=0)
        self.hand_in(1, priority=0)
        run(self.worker.try_claim(), "S")

    def call(self):
        self.queue.close()

    def finish(self, value):
        self.worker.close()

    def expect(self, returned, value):
        self.kept[self.name(0)] = ONCE


class ReplyKept(Kept, Reply):
    """The survivor collects the result, and it is kept then."""

    jobs = {"S0": (LONG, {"result_ttl": Kept.ttl}), "S1": (40, {})}  # noqa: RUF012
    length = LONG

    def expect(self, returned, value):
        super().expect(returned, value)
        self.kept["S0"] = ONCE


class ReplyKeptToGone(Kept):
    """Its client is gone: whoever answers keeps the result."""

    def setup(self):
        super().setup()
        with JobQueue.open(self.directory) as client:
            client.submit(Pass(1, arguments(self.name(0), LONG)), priority=0, result_ttl=self.ttl)
        self.claim = self.queue.try_claim()
        self.claim.started()
        self.frame = encode_result(0, answer(self.name(0), "V", LONG))

    def call(self):
        self.claim.reply(self.frame)

    def expect(self, returned, value):
        self.claims[self.name(0)] = NEVER if returned else PERHAPS
        self.kept[self.name(0)] = ONCE


class Forget(Kept):
    """A victim that was stopped in it leaves the cell to others, with other results in it."""

    def setup(self):
        self.worker = JobQueue.open(self.directory)
        super().setup()
        self.job_id = self.keep(0, LONG, result=LONG, priority=0)
        self.queue.recv(PATIENCE_S)

    def call(self):
        return self.queue.forget(self.job_id)

    def finish(self, value):
        assert value is True
        self.worker.close()
        return super().finish(value)

    def expect(self, returned, value):
        self.kept[self.name(0)] = NEVER if returned else PERHAPS


class ReadKept(Forget):
    """Who reads holds nothing."""

    def call(self):
        return answered(self.queue.result(self.job_id, 0)) == (self.name(0), "S")

    def expect(self, returned, value):
        self.kept[self.name(0)] = ONCE


class ReadForgotten(ReadKept):
    """While it is stopped in its look the result is forgotten, and the cell used by others: it gets the whole of it, or none."""

    length = 60

    def setup(self):
        self.worker = JobQueue.open(self.directory)
        QueueStage.setup(self)
        self.job_id = self.keep(0, result=self.length, priority=0)
        self.queue.recv(PATIENCE_S)

    def call(self):
        try:
            return super().call()
        except UnknownJob:
            return True

    def traffic(self):
        census = QueueCensus(self.directory)
        kept = np.array(states_of(census.words)) == CellState.KEPT
        assert [self.queue.forget(int(job_id)) for job_id in census.cells["job_id"][kept]] == [True]
        super().traffic()

    def expect(self, returned, value):
        self.kept[self.name(0)] = NEVER


class ReadForgottenBlock(ReadForgotten):
    length = LONG


class SubmitAmongExpired(Kept):
    """Every cell is free, taken, or has a result that has expired by the victim's clock."""

    jobs = {}  # noqa: RUF012

    def before(self):
        super().before()
        for n in range(CELLS - 2):
            length = LONG if n < 3 else 40
            self.queue.submit(Pass(1, arguments(f"E{n}", length)), result_ttl=self.ttl)
            run(self.queue.try_claim(), "S", length)
            self.queue.recv(PATIENCE_S)
            self.kept[f"E{n}"] = PERHAPS

    def setup(self):
        super().setup()
        self.hand_in(0)
        self.queue._clock_shift_ns = 2 * self.ttl * 10**9
        self.next_job = self.job(1)

    def call(self):
        return self.queue.submit(self.next_job, wait=0)

    def finish(self, value):
        assert sorted(self.collect(2)) == [self.name(0), self.name(1)]
        return super().finish(value)

    def expect(self, returned, value):
        self.claims[self.name(0)] = ONCE
        self.claims[self.name(1)] = ONCE if returned else PERHAPS
        if returned:
            self.kept = dict.fromkeys(self.kept, NEVER)

    def look_at_trace(self):
        assert self.count(CellState.KEPT) == 0


# ---- dead letters ----


class RetryDead(QueueStage):
    template = "letters"

    def before(self):
        super().before()
        self.letter = self.queue.dead_letters()[0].job_id

    def setup(self):
        super().setup()
        self.letter = self.queue.dead_letters()[0].job_id

    def call(self):
        return self.queue.retry_dead(self.letter)

    def expect(self, returned, value):
        # it is a letter still, or it runs again, and never neither
        self.claims["L0"] = ONCE if returned else PERHAPS

    def settle(self):
        self.run_all()
        assert self.seen["L0"] + len(self.queue.dead_letters()) == 1, "the letter is lost"
        super().settle()


class DropDead(RetryDead):
    def call(self):
        return self.queue.drop_dead(self.letter)

    def expect(self, returned, value):
        self.claims["L0"] = NEVER
        assert len(self.queue.dead_letters()) in ((0,) if returned else (0, 1))

    def settle(self):
        QueueStage.settle(self)


class DropDeadBesideAnother(DropDead):
    """The letter's cell and block are another client's by the time that the victim goes on."""

    def traffic(self):
        self.other = JobQueue.open(self.directory)
        self.other_id = self.other.submit(Pass(1, arguments("O0", LONG)))
        self.claims["O0"] = ONCE

    def meanwhile(self):
        time.sleep(0.0005)

    def after_stop(self, value):
        self.run_all()
        assert self.other.recv(PATIENCE_S).token == self.other_id
        self.other.close()
        super().after_stop(value)

    def is_under_way(self):
        return False


# ---- repair ----


class Repair(QueueStage):
    """Places of a ring and of a mailbox have been overwritten."""

    jobs = {"S0": (40, {}), "S1": (LONG, {}), "S2": (40, {"priority": 0}), "S3": (40, {"priority": 0})}  # noqa: RUF012

    def before(self):
        super().before()
        for _ in range(2):
            self.note_claim(self.queue.try_claim())
        files = QueueFiles(self.directory)
        for name in ("submit-1", f"mail/{self.queue.slot + 1}"):
            lines, places = files.ring(name)
            places[3:17] = places[3:17][::-1] ^ np.uint64(1 << 50)
            lines["tail"] += 5

    def call(self):
        return self.queue.repair()

    def look_at_the_dead(self, census):
        """Nobody is: two jobs have run before."""

    def after_kill_beside(self, tracee, slow):
        slow.go_on()
        self.queue.rescue()
        self.settle()


# ---- rescuers ----


class Rescue(QueueStage):
    """Workers have died: in the last attempt, with an answer not handed over, in the middle of a release."""

    jobs = {  # noqa: RUF012
        "S0": (40, {"max_attempts": 1, "priority": 0}),
        "S1": (LONG, {}),
        "S2": (LONG, {}),
        "S3": (40, {}),
    }
    dies = (
        ("HoldLast", None),
        ("ReplyFirst", CellState.DONE),
        ("ReleaseFirst", CellState.RETRY),
    )

    def call(self):
        return self.queue.rescue()

    def after_fall(self, fallen, pid):
        if isinstance(fallen, HoldLast):
            self.pid_of_last = pid

    def expect(self, returned, value):
        self.claims["S0"] = NEVER

    def look_at_answers(self):
        assert "WorkerDied" in self.who["S0"], self.who
        assert f"pid {self.pid_of_last}" in self.who["S0"], f"{self.pid_of_last} died; the letter: {self.who['S0']}"

    def after_kill_beside(self, tracee, slow):
        """Others take numbers and jobs before the slow rescuer goes on: it must leave these alone."""
        self.expect(tracee.returned, None)
        census = QueueCensus(self.directory)
        self.look_at_the_dead(census)
        self.queue.rescue()
        others = [JobQueue.open(self.directory) for _ in range(4)]
        slots = {other.slot for other in others}
        held = []
        for other in others:
            try:
                held.append(other.try_claim())
            except Empty:
                break
        self.submit("A0")
        slow.go_on()
        for claim in held:
            self.note_claim(claim)
        assert len(slots) == len(others)
        for other in others:
            other.close()
        self.queue.rescue()
        nothing_left(census.leftover(self.alive))
        self.settle()


class RescueOfParked(Rescue):
    """Others have died when they had parked a job or handed one in for later, and not said so."""

    jobs = {"S0": (LONG, {}), "S1": (40, {"due": FAR + 1})}  # noqa: RUF012
    dies = (
        ("Park", CellState.PARKED),
        ("SubmitDue", CellState.PARKED),
    )

    def after_fall(self, fallen, pid):
        if isinstance(fallen, SubmitDue):
            for n in range(2):
                self.claims[fallen.name(n)] = PERHAPS

    def expect(self, returned, value):
        pass

    def look_at_answers(self):
        QueueStage.look_at_answers(self)


class RescueOfKept(Kept, Rescue):
    """Clients have died when they were about to keep a result, and when one of theirs was in their mailbox."""

    jobs = {"S0": (LONG, {}), "S1": (40, {})}  # noqa: RUF012
    dies = (
        ("RecvKeptBlock", CellState.KEPT),
        ("CloseKept", CellState.KEPT),
        ("RecvKept", CellState.KEPT),
    )

    def after_fall(self, fallen, pid):
        for n in range(2):
            self.claims[fallen.name(n)] = PERHAPS
        self.kept[fallen.name(0)] = ONCE

    def expect(self, returned, value):
        pass

    def look_at_answers(self):
        QueueStage.look_at_answers(self)


class ReplyFirst(Held):
    def setup(self):
        super().setup()
        self.frame = encode_result(0, answer("S1", "V", LONG))

    def call(self):
        self.claim.reply(self.frame)


class ReleaseFirst(Held):
    def call(self):
        self.claim.release()


class RescueClients(Rescue):
    """Clients have died: writing into a block, before a job was published, and with a result half collected."""

    jobs = {"S0": (40, {}), "S1": (LONG, {})}  # noqa: RUF012
    dies = (
        ("SubmitBlock", BlockState.OWNED),
        ("Submit", CellState.READY),
        ("Recv", CellState.COLLECTED),
    )

    def after_fall(self, fallen, pid):
        for n in range(2):
            self.claims[fallen.name(n)] = PERHAPS

    def expect(self, returned, value):
        pass

    def look_at_answers(self):
        QueueStage.look_at_answers(self)


CALLS = {
    "submit": Submit,
    "submit_block": SubmitBlock,
    "submit_pieces": SubmitPieces,
    "submit_due": SubmitDue,
    "submit_due_block": SubmitDueBlock,
    "submit_to_full_arena": SubmitToFullArena,
    "submit_to_full_ring": SubmitToFullRing,
    "first_call": FirstCall,
    "first_call_among_the_dead": FirstCallAmongTheDead,
    "claim": Claim,
    "claim_and_start": ClaimAndStart,
    "serve": Serve,
    "start_last": StartLast,
    "reply": Reply,
    "reply_block": ReplyBlock,
    "reply_in_pieces": ReplyInPieces,
    "reply_to_gone": ReplyToGone,
    "ack": Ack,
    "release": Release,
    "release_to_full_ring": ReleaseToFullRing,
    "park": Park,
    "park_charged": ParkCharged,
    "retry": Retry,
    "rest": Rest,
    "leave_to_others": LeaveToOthers,
    "park_unknown": ParkUnknown,
    "answer_unknown": AnswerUnknown,
    "take_parked": TakeParked,
    "cancel_parked": CancelParked,
    "recv": Recv,
    "recv_block": RecvBlock,
    "recv_letter": RecvLetter,
    "cancel": Cancel,
    "close": Close,
    "repair": Repair,
    "rescue": Rescue,
    "rescue_of_clients": RescueClients,
    "rescue_of_parked": RescueOfParked,
    "rescue_of_kept": RescueOfKept,
    "recv_kept": RecvKept,
    "recv_kept_block": RecvKeptBlock,
    "close_kept": CloseKept,
    "reply_kept": ReplyKept,
    "reply_kept_to_gone": ReplyKeptToGone,
    "forget": Forget,
    "read_kept": ReadKept,
    "read_forgotten": ReadForgotten,
    "read_forgotten_block": ReadForgottenBlock,
    "submit_among_expired": SubmitAmongExpired,
    "retry_dead": RetryDead,
    "drop_dead": DropDead,
    "drop_dead_beside_another": DropDeadBesideAnother,
}
DYING = {
    kind.__name__: kind
    for kind in (
        *(HoldLast, SubmitOne, ReplyFirst, ReleaseFirst, SubmitBlock, Submit, Recv),
        *(Park, SubmitDue),
        *(RecvKept, RecvKeptBlock, CloseKept),
    )
}

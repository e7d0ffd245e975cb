"""Which job is next: priorities, first in first out, put-backs, cancelled places, counters just below their wrap."""

import collections
import itertools
import os
import tempfile
import time

import numpy as np
import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from subetha._core import decode_submit, encode_result
from subetha.errors import Empty, Full
from subetha.jobqueue import JobQueue
from subetha.layout import PRIORITIES, VERSION_SHIFT
from subetha.pass_registry import Pass

WAIT_S = 30
PLACES = 2 * 16


def next_args(worker):
    """Claim and acknowledge what is next; its arguments."""
    claim = worker.claim(WAIT_S)
    args = decode_submit(claim.payload)[1].args
    claim.ack()
    return args


def all_args(worker):
    taken = []
    while True:
        try:
            claim = worker.try_claim()
        except Empty:
            return taken
        taken.append(decode_submit(claim.payload)[1].args)
        claim.ack()


def test_a_lower_number_is_always_served_first(make):
    queue = make(64)
    for n, priority in enumerate((2, 1, 0, 1, 2, 0, 0, 1, 2)):
        queue.submit(Pass(1, b"%d-%d" % (priority, n)), priority=priority)
    assert next_args(queue) == b"0-2"
    queue.submit(Pass(1, b"0-9"), priority=0)
    assert all_args(queue) == [b"0-5", b"0-6", b"0-9", b"1-1", b"1-3", b"1-7", b"2-0", b"2-4", b"2-8"]


def test_jobs_without_a_priority_stand_in_the_middle(make):
    queue = make()
    queue.submit(Pass(1, b"last"), priority=2)
    queue.submit(Pass(1, b"default"))
    queue.submit_side.try_push(b"\x01\x00\x00\x00" + bytes(4) + b"\x05\x00frame")
    queue.submit(Pass(1, b"first"), priority=0)
    assert all_args(queue) == [b"first", b"default", b"frame", b"last"]


@pytest.mark.parametrize("priority", range(PRIORITIES))
def test_first_in_is_first_out_over_many_laps_of_the_ring(make, priority):
    queue = make()
    counter = itertools.count()
    waiting = collections.deque()
    for step in range(40 * PLACES):
        if len(waiting) < 1 + step % 8:
            n = next(counter)
            queue.submit(Pass(1, b"%d" % n), priority=priority, wait=0)
            waiting.append(b"%d" % n)
        else:
            assert next_args(queue) == waiting.popleft()
    assert all_args(queue) == list(waiting)


def test_the_jobs_of_several_submitters_mix_and_each_ones_own_keep_their_order(make):
    worker = make(64)
    clients = [make.open() for _ in range(3)]
    for n in range(10):
        for c, client in enumerate(clients):
            client.submit(Pass(c, b"%d" % n))
    taken = collections.defaultdict(list)
    for _ in range(30):
        claim = worker.claim(WAIT_S)
        pass_ = decode_submit(claim.payload)[1]
        taken[pass_.closure_id].append(int(pass_.args))
        claim.ack()
    assert taken == {c: list(range(10)) for c in range(3)}


def test_a_released_job_runs_before_those_that_wait_at_its_priority_and_after_more_urgent_ones(make):
    queue = make()
    for n in range(4):
        queue.submit(Pass(1, b"middle %d" % n), priority=1)
    queue.submit(Pass(1, b"late"), priority=2)
    claims = [queue.claim(WAIT_S) for _ in range(5)]
    assert claims[4].tobytes().endswith(b"late")
    for n in (4, 2, 1):
        claims[n].release()
    queue.submit(Pass(1, b"urgent"), priority=0)
    queue.submit(Pass(1, b"middle 9"), priority=1)
    queue.submit(Pass(1, b"late 9"), priority=2)
    assert all_args(queue) == [b"urgent", b"middle 2", b"middle 1", b"middle 9", b"late", b"late 9"]


def test_a_job_that_is_released_again_and_again_keeps_its_turn(make):
    queue = make()
    queue.submit(Pass(1, b"first"))
    queue.submit(Pass(1, b"second"))
    for _ in range(5 * PLACES):
        claim = queue.claim(WAIT_S)
        assert claim.tobytes().endswith(b"first")
        claim.release()
    assert all_args(queue) == [b"first", b"second"]


def test_a_cancelled_job_is_passed_over_wherever_it_stood(make):
    queue = make()
    for cancelled in ({0}, {1, 2}, {3}, {0, 3}, {0, 1, 2, 3}):
        ids = [queue.submit(Pass(1, b"%d" % n)) for n in range(4)]
        for n in cancelled:
            assert queue.cancel(ids[n])
        assert all_args(queue) == [b"%d" % n for n in range(4) if n not in cancelled]


# --- places of cancelled jobs ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("priority", range(PRIORITIES))
def test_submitting_and_cancelling_behind_an_old_job_is_never_full_and_leaves_it_first(make, priority):
    queue = make()
    old = queue.submit(Pass(1, b"old"), priority=priority)
    for _ in range(10 * PLACES):
        assert queue.cancel(queue.submit(Pass(1, b"young"), priority=priority, wait=0))
    queue.submit(Pass(1, b"last"), priority=priority, wait=0)
    assert queue.stats().waiting == 2
    claim = queue.claim(WAIT_S)
    assert (claim.job_id, claim.attempts) == (old, 0)
    claim.ack()
    assert all_args(queue) == [b"last"]


def test_several_old_jobs_keep_their_order_before_many_cancelled_ones(make):
    queue = make(quota=15)
    for round_ in range(3):
        for n in range(12):
            queue.submit(Pass(1, b"old %d" % n), wait=0)
        for _ in range(5 * PLACES):
            ids = [queue.submit(Pass(1, b"young"), wait=0) for _ in range(3)]
            assert all(queue.cancel(job_id) for job_id in ids)
        assert all_args(queue) == [b"old %d" % n for n in range(12)], round_
    assert queue.stats().free == 16


@pytest.mark.parametrize("second_after", [0, 1, 10, 31])
def test_old_jobs_are_not_lost_and_keep_their_order_while_others_come_and_go_among_them(make, second_after):
    """Each round moves one more job into the ring of put-backs, behind one that stays first, and cancels it there."""
    queue = make()
    queue.submit(Pass(1, b"oldest"))
    for n in range(PLACES + 4):
        if n == second_after:
            queue.submit(Pass(1, b"second"))
        passing = queue.submit(Pass(1, b"passing"), wait=0)
        for _ in range(PLACES + 2):
            assert queue.cancel(queue.submit(Pass(1, b"young"), wait=0))
        assert queue.cancel(passing), f"round {n}"
    queue.submit(Pass(1, b"late"), wait=0)
    for _ in range(PLACES + 2):
        assert queue.cancel(queue.submit(Pass(1, b"young"), wait=0))
    assert queue.stats().waiting == 3
    assert all_args(queue) == [b"oldest", b"second", b"late"]


def test_releasing_and_cancelling_behind_a_released_job_loses_none(make):
    queue, other = make(quota=15), make.open()
    keep = queue.submit(Pass(1, b"keep"))
    for _ in range(3 * PLACES):
        ids = [other.submit(Pass(1, b"young"), wait=0) for _ in range(4)]
        claims = [queue.claim(WAIT_S) for _ in range(5)]
        for claim in claims:
            claim.release()
        assert all(other.cancel(job_id) for job_id in ids)
    assert queue.stats().waiting == 1
    assert queue.claim(WAIT_S).job_id == keep


# --- counters just below their wrap ---------------------------------------------------------------------------------


def ring_bits(cells):
    """Bits of a place's lap and of its version (cells: a power of two)."""
    rest = 63 - (cells.bit_length() - 1)
    return rest // 2, rest - rest // 2


def set_position(lines, places, position, cells):
    """Make an empty ring look as if `position` jobs had gone through it."""
    lap_bits, version_bits = ring_bits(cells)
    shift = 1 + version_bits + cells.bit_length() - 1
    lap, place = divmod(position, len(places))
    laps = (lap + (np.arange(len(places)) < place)) % (1 << lap_bits)
    places[:] = laps.astype(np.uint64) << np.uint64(shift)
    lines["head"] = lines["tail"] = position % (len(places) << lap_bits)


VERSIONS = {
    "zero": 0,
    "below 30 bits": 2**30 - 5,
    "below 40 bits": 2**40 - 5,
    "below 44 bits": 2**44 - 5,
}


@pytest.mark.parametrize("versions", VERSIONS)
@pytest.mark.parametrize("before_wrap", [0, 3, PLACES, 2 * PLACES + 5])
def test_jobs_go_through_while_versions_and_laps_wrap(make, files_of, versions, before_wrap):
    first = make(quota=15, result_bytes=56, job_bytes=56)
    first.recv_many(1)
    path = first.path
    first.close()
    files = files_of(path)
    cells = files.cells
    cells["word"] = np.uint64(VERSIONS[versions]) << np.uint64(VERSION_SHIFT)
    lap_bits, version_bits = ring_bits(16)
    assert lap_bits + version_bits + 4 + 1 == 64
    assert len(files.ring_names) == 7
    for name in files.ring_names:
        set_position(*files.ring(name), (PLACES << lap_bits) - before_wrap, 16)
    queue = make.open()
    assert queue.slot == 0, "the mailbox with its late laps is this handle's"
    counter = itertools.count()
    for round_ in range(6):
        waiting = [
            (queue.submit(Pass(1, b"%d" % n * (1 + 60 * (n % 3 == 0))), priority=1, wait=0), n)
            for n in itertools.islice(counter, 15)
        ]
        with pytest.raises(Full):
            queue.submit(Pass(1, b""), wait=0)
        back = [queue.claim(WAIT_S) for _ in range(3)]
        for claim in back:
            claim.release()
        assert queue.cancel(waiting.pop(7)[0])
        for job_id, n in waiting:
            claim = queue.claim(WAIT_S)
            assert claim.job_id == job_id, round_
            assert decode_submit(claim.payload)[1].args == b"%d" % n * (1 + 60 * (n % 3 == 0))
            claim.reply(encode_result(0, b"r%d" % n * (1 + 60 * (n % 2))))
        assert [(r.token, r.result) for r in queue.recv_many(99)] == [
            (job_id, b"r%d" % n * (1 + 60 * (n % 2))) for job_id, n in waiting
        ]
    assert queue.stats().free == 16
    assert queue.repair() == 0
    for level in range(PRIORITIES):
        queue.submit(Pass(1, b"%d" % level), priority=level)
        claim = queue.claim(WAIT_S)
        claim.release()
        assert next_args(queue) == b"%d" % level
    assert np.all(cells["word"] >> np.uint64(16) & np.uint64(0xF) == 0)


@pytest.mark.parametrize("priority", range(PRIORITIES))
def test_a_stale_place_is_passed_over_when_its_cell_is_many_versions_on(make, files_of, priority):
    """A reference whose cell was freed and used again: the versions differ, also where the cell's has wrapped."""
    first = make()
    first.recv_many(1)
    first.close()
    files = files_of(first.path)
    files.cells["word"] = np.uint64(2**44 - 1) << np.uint64(VERSION_SHIFT)
    queue = make.open()
    ids = [queue.submit(Pass(1, b"cancelled %d" % n), priority=priority) for n in range(8)]
    assert all(queue.cancel(job_id) for job_id in ids)
    kept = [queue.submit(Pass(1, b"kept %d" % n), priority=priority) for n in range(8)]
    claims = [queue.claim(WAIT_S) for _ in range(8)]
    assert [claim.job_id for claim in claims] == kept
    with pytest.raises(Empty):
        queue.try_claim()


# --- against a model ------------------------------------------------------------------------------------------------


class QueueAgainstModel(RuleBasedStateMachine):
    """One client and two workers on one queue, against deques in Python."""

    CELLS = 16
    QUOTA = 9

    def __init__(self):
        super().__init__()
        self.folder = tempfile.TemporaryDirectory(ignore_cleanup_errors=True)
        self.client = JobQueue.create(
            os.path.join(self.folder.name, "queue"),
            self.CELLS,
            quota=self.QUOTA,
            participants=16,
            job_bytes=56,
            result_bytes=56,
            arena_bytes=2**22,
        )
        self.worker = JobQueue.open(self.client.path)
        self.counter = itertools.count()
        self.back = [collections.deque() for _ in range(PRIORITIES)]
        self.submitted = [collections.deque() for _ in range(PRIORITIES)]
        self.parked = {}
        self.now = 0
        self.start = time.time() + 10_000
        self.set_clock()
        self.jobs = {}
        self.claims = {}
        self.results = collections.deque()

    def teardown(self):
        self.claims.clear()
        self.worker.close()
        self.client.close()
        self.folder.cleanup()

    @property
    def held(self):
        return sum(map(len, (*self.back, *self.submitted, self.parked))) + len(self.claims) + len(self.results)

    @property
    def waiting(self):
        return [job_id for level in zip(self.back, self.submitted, strict=True) for ring in level for job_id in ring]

    def moment(self, ahead):
        return self.start + 1000 * (self.now + ahead)

    def set_clock(self):
        # half-way between two moments, so that none comes while the test takes its time
        self.worker._clock_shift_ns = int((self.moment(0.5) - time.time()) * 1e9)

    def first_due(self):
        """Those of the due jobs that may come first, by priority and time."""
        due = {job_id: (self.jobs[job_id][0], when) for job_id, when in self.parked.items() if when <= self.now}
        return [job_id for job_id, key in due.items() if key == min(due.values())]

    @initialize(version=st.sampled_from([0, 2**44 - 3, 2**30 - 3]))
    def start_at(self, version):
        pool = np.memmap(os.path.join(self.client.path, "pool"), np.uint8, "r+")
        cells = self.client.cells()
        offset = len(pool) - len(cells) * cells.dtype.itemsize
        for i in range(len(cells)):
            at = offset + i * cells.dtype.itemsize
            pool[at : at + 8] = np.frombuffer((version << VERSION_SHIFT).to_bytes(8, "little"), np.uint8)

    @rule(priority=st.integers(0, PRIORITIES - 1), length=st.sampled_from([0, 1, 40, 46, 47, 5000]))
    def submit(self, priority, length):
        args = b"%d:" % next(self.counter) + bytes(length)
        if self.held >= self.QUOTA:
            with pytest.raises(Full):
                self.client.submit(Pass(1, args), priority=priority, wait=0)
            return
        job_id = self.client.submit(Pass(1, args), priority=priority, wait=0)
        assert job_id not in self.jobs
        self.jobs[job_id] = (priority, args)
        self.submitted[priority].append(job_id)

    @rule(priority=st.integers(0, PRIORITIES - 1), length=st.sampled_from([0, 5000]), ahead=st.integers(1, 5))
    def submit_for_later(self, priority, length, ahead):
        args = b"%d:" % next(self.counter) + bytes(length)
        due = self.moment(ahead)
        if self.held >= self.QUOTA:
            with pytest.raises(Full):
                self.client.submit(Pass(1, args), priority=priority, due=due, wait=0)
            return
        job_id = self.client.submit(Pass(1, args), priority=priority, due=due, wait=0)
        self.jobs[job_id] = (priority, args)
        self.parked[job_id] = self.now + ahead

    @rule(ahead=st.integers(1, 4))
    def time_passes(self, ahead):
        self.now += ahead
        self.set_clock()

    @precondition(lambda self: self.claims)
    @rule(data=st.data(), ahead=st.integers(-2, 4), started=st.booleans())
    def park(self, data, ahead, started):
        job_id = data.draw(st.sampled_from(sorted(self.claims)))
        claim = self.claims.pop(job_id)
        if started:
            claim.started()
        claim.park(self.moment(ahead))
        self.parked[job_id] = self.now + ahead

    @rule()
    def claim(self):
        # due ones and others take turns, and a look at the parked cells may come a little later where others wait
        allowed = [*self.waiting[:1], *self.first_due()]
        if not allowed:
            with pytest.raises(Empty):
                self.worker.try_claim()
            return
        claim = self.worker.try_claim()
        expected = claim.job_id
        assert expected in allowed
        self.parked.pop(expected, None)
        assert decode_submit(claim.payload)[1].args == self.jobs[expected][1]
        for ring in (*self.back, *self.submitted):
            if expected in ring:
                ring.remove(expected)
        self.claims[expected] = claim

    @precondition(lambda self: self.claims)
    @rule(data=st.data(), length=st.sampled_from([0, 1, 49, 50, 9000]))
    def reply(self, data, length):
        job_id = data.draw(st.sampled_from(sorted(self.claims)))
        result = b"%d" % job_id + bytes(length)
        self.claims.pop(job_id).reply(encode_result(0, result))
        self.results.append((job_id, result))

    @precondition(lambda self: self.claims)
    @rule(data=st.data(), started=st.booleans())
    def release(self, data, started):
        job_id = data.draw(st.sampled_from(sorted(self.claims)))
        claim = self.claims.pop(job_id)
        assert claim.attempts == 0
        if started:
            claim.started()
        claim.release()
        self.back[self.jobs[job_id][0]].append(job_id)

    @precondition(lambda self: self.claims)
    @rule(data=st.data())
    def acknowledge(self, data):
        self.claims.pop(data.draw(st.sampled_from(sorted(self.claims)))).ack()

    @precondition(lambda self: self.jobs)
    @rule(data=st.data())
    def cancel(self, data):
        job_id = data.draw(st.sampled_from(sorted(self.jobs)))
        waits = job_id in self.waiting or job_id in self.parked
        assert self.client.cancel(job_id) is waits
        self.parked.pop(job_id, None)
        for ring in (*self.back, *self.submitted):
            if job_id in ring:
                ring.remove(job_id)

    @rule(n=st.integers(0, 4))
    def collect(self, n):
        expected = [self.results.popleft() for _ in range(min(n, len(self.results)))]
        assert [(result.token, result.result) for result in self.client.recv_many(n)] == expected

    @rule()
    def repair(self):
        assert self.worker.repair() == 0, "nothing was lost"

    @invariant()
    def the_cells_agree(self):
        stats = self.client.stats()
        assert stats.free == self.CELLS - self.held
        found = (stats.waiting, stats.parked, stats.running, stats.done)
        assert found == (len(self.waiting), len(self.parked), len(self.claims), len(self.results))


TestQueueAgainstModel = QueueAgainstModel.TestCase
TestQueueAgainstModel.settings = settings(
    max_examples=20,
    stateful_step_count=50,
    deadline=None,
    derandomize=True,
    database=None,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large],
)

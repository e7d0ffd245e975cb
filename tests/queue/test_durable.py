"""Durable queues, and the first open after a start of the machine: what the disk may have kept, and what is made of it."""

import errno
import json
import mmap
import os
import platform
import shutil
import signal
import threading
import time

import numpy as np
import pytest
from click.testing import CliRunner

from subetha import files, reboot
from subetha._core import decode_submit, encode_result
from subetha.check import check_queue
from subetha.cli import cli
from subetha.errors import Empty, ExecutionError, JobCancelled, LayoutMismatch, UnknownJob, WorkerDied
from subetha.jobqueue import JobQueue
from subetha.layout import CHECKED_NUMBERS, LINES_OFFSET, POOL_LINES, STATE_SHIFT, TABLE_LINES, CellState, cell_word
from subetha.pass_registry import Pass

from .participants import participant

__all__ = ["participant"]  # a fixture

LONG = 30_000
"""Bytes that need a block."""


@pytest.fixture
def path(tmp_path):
    where = files.file_system_of(tmp_path)
    if where in files.MEMORY_FILE_SYSTEMS:
        pytest.skip(f"{tmp_path} lies in memory ({where}); run pytest with --basetemp on a disk")
    return os.fspath(tmp_path / "queue")


@pytest.fixture
def durable(make):
    def made(cells=16, **options):
        return make(cells, durability="disk", **options)

    made.open = make.open
    return made


def start_the_machine(queue):
    """Leave the queue as the machine's end leaves it: nobody is there, and the pool names another boot. The path."""
    path = queue.path
    copy = path + "-then"
    shutil.copytree(path, copy)
    queue.close()
    # the copy knows nothing of what `close` has put right
    shutil.rmtree(path)
    os.rename(copy, path)
    boot_of(path)[0] = 1
    return path


def boot_of(path):
    pool = np.memmap(os.path.join(path, "pool"), np.uint8, "r+")
    return pool[LINES_OFFSET : LINES_OFFSET + POOL_LINES.itemsize].view(POOL_LINES)["boot"]


def run_all(queue):
    """Arguments of every job, in the order in which they are claimed."""
    ran = []
    while True:
        try:
            claim = queue.try_claim()
        except Empty:
            return ran
        ran.append(decode_submit(claim.payload)[1].args)
        claim.ack()


def states(queue):
    return {state: n for state, n in queue.stats().states.items() if state != "FREE"}


# ---- making one ----


def test_durability_is_kept_with_the_queue(durable, path):
    assert durable().durability == "disk"
    assert JobQueue.open(path).durability == "disk"


def test_a_queue_is_not_durable_unless_told(make):
    assert make().durability == "process"


def test_any_other_durability_is_refused_and_nothing_is_made(path):
    with pytest.raises(ValueError, match="durability: expected 'process' or 'disk', found 'power'"):
        JobQueue.create(path, durability="power")
    assert not os.path.exists(path)


def test_open_or_create_says_that_the_queue_is_less_durable_than_asked_for(make, path):
    make()
    with pytest.raises(LayoutMismatch, match=r"expected durability disk \(found process\)"):
        JobQueue.open_or_create(path, 16, arena_bytes=2**24, participants=64, durability="disk")


@pytest.mark.skipif(
    not os.path.isdir("/dev/shm") or files.file_system_of("/dev/shm") != "tmpfs", reason="no tmpfs here"
)
def test_a_durable_queue_is_refused_in_memory():
    where = f"/dev/shm/subetha-durable-{os.getpid()}"
    with pytest.raises(OSError, match="tmpfs is a file system in memory") as caught:
        JobQueue.create(where, durability="disk")
    assert caught.value.errno == errno.ENOTSUP
    assert not os.path.exists(where)


def test_jobs_and_results_of_any_length_pass_through_a_durable_queue(durable):
    queue = durable()
    for length in (0, 40, LONG):
        queue.submit(Pass(1, bytes(length)))
        claim = queue.try_claim()
        claim.started()
        claim.reply(encode_result(0, b"r" * length))
        assert queue.recv(5).result == b"r" * length
    assert states(queue) == {}


# ---- after a start of the machine ----


@pytest.fixture(params=["process", "disk"])
def either(request, make):
    """A queue of either durability; both are brought up after a start of the machine."""
    return lambda cells=32, **options: make(cells, durability=request.param, **options)


def test_waiting_jobs_wait_on_in_their_order(either):
    queue = either(arena_bytes=2**20)
    for n in range(9):
        queue.submit(Pass(1, b"%d" % n * (LONG if n == 4 else 1)), priority=n % 3)
    claim = queue.try_claim()
    claim.release()
    with JobQueue.open(start_the_machine(queue)) as queue:
        assert [ran[:1] for ran in run_all(queue)] == [b"%d" % n for n in (0, 3, 6, 1, 4, 7, 2, 5, 8)]
        assert states(queue) == {}
        assert queue.arena_backed_bytes <= 2**16
    assert check_queue(queue.path).exit_code == 0


def test_a_job_that_was_put_back_goes_before_the_others(either):
    queue = either()
    queue.submit(Pass(1, b"old"))
    queue.submit(Pass(1, b"new"))
    first = queue.try_claim()
    queue.try_claim().release()
    first.ack()
    queue.submit(Pass(1, b"newest"))
    with JobQueue.open(start_the_machine(queue)) as queue:
        assert run_all(queue) == [b"new", b"newest"]


def test_a_running_job_runs_again_and_its_attempt_is_counted(either):
    queue = either()
    queue.submit(Pass(1, b"job"))
    queue.submit(Pass(1, b"only claimed"))
    started, _claimed = queue.try_claim(), queue.try_claim()
    started.started()
    with JobQueue.open(start_the_machine(queue)) as queue:
        assert states(queue) == {"RETRY": 2}
        assert sorted((queue.try_claim().attempts, queue.try_claim().attempts)) == [0, 1]


def test_a_job_in_its_last_attempt_becomes_a_dead_letter(either):
    queue = either()
    job_id = queue.submit(Pass(1, bytes(LONG)), max_attempts=1)
    claim = queue.try_claim()
    claim.started()
    with JobQueue.open(start_the_machine(queue)) as queue:
        (letter,) = queue.dead_letters()
        assert (letter.job_id, letter.attempts, letter.deaths[0].exit_code) == (job_id, 1, None)
        assert queue.retry_dead(job_id)
        assert run_all(queue) == [bytes(LONG)]


@pytest.mark.parametrize(
    ("found", "left"),
    [
        ("FREE", None),
        ("WRITING", None),
        ("READY", "READY"),
        ("TAKEN", "RETRY"),
        ("DONE", None),
        ("COLLECTED", None),
        ("RETRY", "RETRY"),
        ("FENCED", None),
        ("PARKED", "PARKED"),
        ("DEAD", "DEAD"),
        ("QUARANTINED", "QUARANTINED"),
        ("OVERDUE", None),
        ("KEPT", None),
        (13, "QUARANTINED"),
        (15, "QUARANTINED"),
    ],
)
def test_each_state_is_settled(either, files_of, found, left):
    queue = either()
    queue.submit(Pass(1, b"job"))
    (cell,) = np.flatnonzero(queue.cells()["word"] >> STATE_SHIFT & 0xF)
    path = start_the_machine(queue)
    state = found if isinstance(found, int) else CellState[found]
    files_of(path).cells["word"][cell] = cell_word(7, state, 0 if found == "FREE" else 3)
    with JobQueue.open(path) as queue:
        assert states(queue) == ({} if left is None else {left: 1})
        word = int(queue.cells()["word"][cell])
        assert word & 0xFFFF == 0
        assert word >> 20 == (7 if found in (left, "FREE") else 8)
    assert check_queue(path).exit_code == 0


@pytest.mark.parametrize("length", [40, LONG])
@pytest.mark.parametrize("collected", [False, True])
def test_a_result_that_is_to_be_kept_is_there_after_a_start(either, collected, length):
    queue = either()
    job_id = queue.submit(Pass(1, b"a" * length), result_ttl=1000)
    plain = queue.submit(Pass(1, b""))
    for _ in range(2):
        queue.try_claim().reply(encode_result(0, b"r" * length))
    if collected:
        queue.recv_many(2)
    with JobQueue.open(start_the_machine(queue)) as queue:
        assert states(queue) == {"KEPT": 1}
        assert queue.result(job_id, 0) == b"r" * length
        with pytest.raises(UnknownJob):
            queue.result(plain)
        assert queue.arena_backed_bytes == (2**15 if length == LONG else 0)
        assert check_queue(queue.path).faults == []
        (cell,) = queue.cells()[queue.cells()["job_id"] == job_id]
        assert 0 < int(cell["due_ns"]) - time.time_ns() <= 1000 * 10**9
        assert queue.forget(job_id)
        assert states(queue) == {}


def test_a_result_that_has_expired_meanwhile_is_not(either, files_of):
    queue = either()
    job_id = queue.submit(Pass(1, b""), result_ttl=1000)
    queue.try_claim().reply(encode_result(0, b"r"))
    queue.recv(5)
    path = start_the_machine(queue)
    cells = files_of(path).cells
    cells["due_ns"][cells["job_id"] == job_id] = time.time_ns()
    with JobQueue.open(path) as queue:
        assert states(queue) == {}


@pytest.mark.parametrize(
    ("field", "value"),
    [("result_length", 3), ("result_length", 2**40), ("result_block", 2**64 - 1), ("job_id", 1 << 48 | 7)],
)
def test_a_result_that_is_none_is_freed_at_a_start(either, files_of, field, value):
    queue = either()
    queue.submit(Pass(1, b""), result_ttl=1000)
    queue.try_claim().reply(encode_result(0, b"r"))
    queue.recv(5)
    path = start_the_machine(queue)
    files_of(path).cells[field] = value
    with JobQueue.open(path) as queue:
        assert states(queue) == {}


@pytest.mark.parametrize("length", [40, LONG])
def test_a_kept_result_whose_bytes_are_torn_is_freed_at_a_start(durable, length):
    queue = durable()
    queue.submit(Pass(1, b""), result_ttl=1000)
    queue.try_claim().reply(encode_result(0, b"r" * length))
    path = start_the_machine(queue)
    for name in ("pool", "arena"):
        with open(os.path.join(path, name), "r+b") as file, mmap.mmap(file.fileno(), 0) as mapped:
            at = mapped.find(b"r" * 40)
            if at >= 0:
                mapped[at + 9 : at + 10] = b"X"
    with JobQueue.open(path) as queue:
        assert states(queue) == {}


def test_an_error_of_the_core_has_a_crc32_and_is_kept_over_a_start(durable):
    queue = durable()
    job_id = queue.submit(Pass(1, b""), result_ttl=1000)
    claim = queue.try_claim()
    claim.started()
    assert queue.cancel_running(job_id)
    assert isinstance(queue.recv(5).result, JobCancelled)
    with JobQueue.open(start_the_machine(queue)) as queue:
        assert isinstance(queue.result(job_id, 0), JobCancelled)


@pytest.mark.parametrize("length", [40, LONG])
def test_a_job_of_before_a_start_has_its_result_kept_though_its_client_has_no_mailbox(either, length):
    queue = either()
    job_id = queue.submit(Pass(1, b"job"), result_ttl=1000)
    plain = queue.submit(Pass(1, b"job"))
    with JobQueue.open(start_the_machine(queue)) as queue:
        for _ in range(2):
            queue.try_claim().reply(encode_result(0, b"r" * length))
        assert queue.result(job_id, 0) == b"r" * length
        assert states(queue) == {"KEPT": 1}
        with pytest.raises(UnknownJob):
            queue.result(plain)


def test_a_dead_letter_of_before_a_start_is_read_as_one(either):
    queue = either()
    job_id = queue.submit(Pass(1, b""), max_attempts=1, result_ttl=1000)
    claim = queue.try_claim()
    claim.started()
    with JobQueue.open(start_the_machine(queue)) as queue:
        found = queue.result(job_id)
        assert isinstance(found, WorkerDied)
        assert str(job_id) in str(found)
        assert states(queue) == {"DEAD": 1}


@pytest.mark.parametrize("seed", range(4))
def test_only_the_cells_are_believed(either, files_of, seed):
    """Everything else may be any mixture of what it was at different times; here it is noise."""
    queue = either(arena_bytes=2**18)
    for n in range(6):
        queue.submit(Pass(1, b"%d" % n * (LONG if n == 4 else 1)), priority=n % 3)
    path = start_the_machine(queue)
    noise = np.random.default_rng(seed)
    bytes_of = files_of(path).bytes
    arena_words = files_of(path).arena_classes[-1][1] + 8
    for name in os.listdir(path):
        if name != "pool":
            some = bytes_of(name)[LINES_OFFSET : arena_words if name == "arena" else None]
            some[:] = noise.integers(0, 256, len(some), np.uint8)
    bytes_of("pool")[LINES_OFFSET : LINES_OFFSET + POOL_LINES.itemsize] = noise.integers(
        0, 256, POOL_LINES.itemsize, np.uint8
    )
    with JobQueue.open(path) as queue:
        assert [ran[:1] for ran in run_all(queue)] == [b"0", b"3", b"1", b"4", b"2", b"5"]
        for n in range(queue.cells_total - queue.reserve):
            queue.submit(Pass(1, b"x" * (LONG if n < 2 else 1)), wait=0) if n < queue.quota else None
        assert states(queue) == {"READY": queue.quota}
    assert check_queue(path).exit_code == 0


def test_a_handle_of_now_is_not_mistaken_for_one_of_before(make):
    """`boot` is only a word in a file: where somebody holds a participant's lock, the machine was not started anew."""
    queue = make()
    queue.submit(Pass(1, b"job"))
    claim = queue.try_claim()
    boot_of(queue.path)[0] = 1
    other = make.open()
    assert states(other) == {"TAKEN": 1}
    assert boot_of(queue.path)[0] == files.boot_hash()
    claim.ack()


def test_a_job_id_does_not_come_again(durable):
    queue = durable()
    first = queue.submit(Pass(1, b""))
    with JobQueue.open(start_the_machine(queue)) as queue:
        assert queue.submit(Pass(1, b"")) >> 32 != first >> 32


def test_a_reader_changes_nothing(make):
    path = start_the_machine(make())
    JobQueue.open(path, readonly=True).close()
    assert boot_of(path)[0] == 1


def test_one_brings_it_up_and_others_wait(make, monkeypatch):
    queue = make()
    for n in range(8):
        queue.submit(Pass(1, b"%d" % n))
    path = start_the_machine(queue)
    times = []
    make_anew = reboot._Queue.make_anew
    monkeypatch.setattr(reboot._Queue, "make_anew", lambda self: (times.append(1), make_anew(self)))
    together = threading.Barrier(4)
    handles = []

    def open_it():
        together.wait()
        handles.append(JobQueue.open(path))

    threads = [threading.Thread(target=open_it) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(times) == 1
    assert run_all(handles[0]) == [b"%d" % n for n in range(8)]
    for handle in handles:
        handle.close()


def test_who_waits_too_long_is_told_what_to_do(make, monkeypatch):
    path = start_the_machine(make())
    monkeypatch.setattr(reboot, "WAIT_S", 0.05)
    fd = os.open(os.path.join(path, "pool"), os.O_RDWR)
    reboot.fcntl.flock(fd, reboot.fcntl.LOCK_EX)
    with pytest.raises(TimeoutError, match="if it is stopped, end it"):
        JobQueue.open(path)
    os.close(fd)
    JobQueue.open(path).close()


@pytest.mark.parametrize("fsyncs", range(11))
def test_one_that_dies_on_the_way_is_followed_by_another(make, monkeypatch, fsyncs):
    queue = make(durability="disk")
    for n in range(6):
        queue.submit(Pass(1, b"%d" % n), priority=n % 2)
    queue.try_claim().started()
    path = start_the_machine(queue)
    left = iter(range(fsyncs))

    def fsync(fd):
        if next(left, None) is None:
            raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(reboot.os, "fsync", fsync)
        with pytest.raises(KeyboardInterrupt):
            JobQueue.open(path)
    with JobQueue.open(path) as queue:
        assert sorted(run_all(queue)) == [b"%d" % n for n in range(6)]
    assert check_queue(path).exit_code == 0


def test_a_damaged_file_is_named(make, files_of):
    path = start_the_machine(make())
    os.truncate(os.path.join(path, "table"), 4096)
    with pytest.raises(LayoutMismatch, match="table: expected"):
        JobQueue.open(path)


def test_a_file_of_another_queue_is_refused(make, tmp_path):
    path = start_the_machine(make())
    with JobQueue.create(tmp_path / "other", 16, arena_bytes=2**24, participants=64) as other:
        shutil.copy(os.path.join(other.path, "mail"), os.path.join(path, "mail"))
    with pytest.raises(LayoutMismatch, match="mail: expected a file of the queue made at"):
        JobQueue.open(path)


# ---- damage ----


DAMAGE = (*CHECKED_NUMBERS, "job_crc32", "job", "block")


def damage(files_of, path, cell, what):
    """Change one bit of what the CRC-32 of a job is over."""
    queue_files = files_of(path)
    if what == "block":
        arena = queue_files.bytes("arena")
        arena[bytes(arena).index(b"L" * 100) + 50] ^= 1
    elif what == "job":
        queue_files.cells["job"][cell, 12] ^= 1
    else:
        queue_files.cells[what][cell] ^= 1


@pytest.mark.parametrize("what", DAMAGE)
def test_a_job_that_was_damaged_is_quarantined_and_the_rest_goes_on(durable, files_of, what):
    queue = durable(arena_bytes=2**18)
    job_id = queue.submit(Pass(1, b"L" * (LONG if what == "block" else 40)))
    queue.submit(Pass(1, b"good"))
    (cell, _) = np.flatnonzero(queue.cells()["word"] >> STATE_SHIFT & 0xF)
    path = start_the_machine(queue)
    damage(files_of, path, cell, what)
    with JobQueue.open(path) as queue:
        assert run_all(queue) == [b"good"]
        (quarantined,) = queue.quarantined()
        assert quarantined.cell == cell
        assert (quarantined.job_id == job_id) == (what != "job_id")
        assert check_queue(path).exit_code == 0
        assert queue.drop_dead(quarantined.job_id)
        assert states(queue) == {}
        assert queue.quarantined() == []


@pytest.mark.parametrize("what", [what for what in DAMAGE if what != "job_id"])
def test_a_job_that_is_damaged_while_it_waits_is_quarantined_and_its_submitter_told(durable, files_of, what):
    queue = durable(arena_bytes=2**18)
    job_id = queue.submit(Pass(1, b"L" * (LONG if what == "block" else 40)))
    queue.submit(Pass(1, b"good"))
    (cell, _) = np.flatnonzero(queue.cells()["word"] >> STATE_SHIFT & 0xF)
    damage(files_of, queue.path, cell, what)
    assert run_all(queue) == [b"good"]
    told = queue.recv(5)
    assert told.token == job_id
    assert isinstance(told.result, ExecutionError)
    assert "their CRC-32 is wrong" in str(told.result)
    assert [job.job_id for job in queue.quarantined()] == [job_id]
    assert queue.drop_dead(job_id)
    assert states(queue) == {}


@pytest.mark.parametrize("what", ["job", "block", "timeout_ms"])
def test_the_checker_says_which_waiting_job_is_damaged(durable, files_of, what):
    queue = durable(arena_bytes=2**18)
    queue.submit(Pass(1, b"good" * 10_000))
    queue.submit(Pass(1, b"L" * (LONG if what == "block" else 40)))
    assert check_queue(queue.path, pause=0).faults == []
    cell = int(np.flatnonzero(queue.cells()["word"] >> STATE_SHIFT & 0xF)[1])
    damage(files_of, queue.path, cell, what)
    (fault,) = check_queue(queue.path, pause=0).faults
    assert (fault.kind, fault.where) == ("job", f"cell {cell}")
    assert "the job was damaged" in fault.text


def test_quarantined_jobs_stand_among_the_dead_on_the_command_line(durable, files_of):
    queue = durable()
    job_id = queue.submit(Pass(1, b"job"))
    (cell,) = np.flatnonzero(queue.cells()["word"] >> STATE_SHIFT & 0xF)
    damage(files_of, queue.path, cell, "job")
    assert run_all(queue) == []

    def run(*arguments):
        ran = CliRunner().invoke(cli, ["dead", *arguments, "--queue", queue.path])
        assert ran.exit_code == 0, ran.output
        return ran.stdout

    (shown,) = json.loads(run("list", "--json"))
    assert (shown["job_id"], shown["quarantined"], shown["attempts"], shown["deaths"]) == (job_id, True, None, [])
    assert "quarantined" in run("list")
    run("retry", "--all")
    assert len(queue.quarantined()) == 1
    assert isinstance(queue.recv(5).result, ExecutionError)
    run("drop", str(job_id))
    assert states(queue) == {}


def test_a_quarantined_job_is_not_retried(durable, files_of):
    queue = durable()
    job_id = queue.submit(Pass(1, b"job"))
    (cell,) = np.flatnonzero(queue.cells()["word"] >> STATE_SHIFT & 0xF)
    damage(files_of, queue.path, cell, "job")
    assert run_all(queue) == []
    assert not queue.retry_dead(job_id)
    assert queue.dead_letters() == []


@pytest.mark.parametrize("length", [40, LONG])
def test_a_result_that_was_damaged_is_an_error(durable, files_of, length):
    queue = durable(arena_bytes=2**18)
    queue.submit(Pass(1, b""))
    claim = queue.try_claim()
    claim.reply(encode_result(0, b"R" * length))
    for name in ("arena", "pool"):
        contents = files_of(queue.path).bytes(name)
        at = bytes(contents).find(b"R" * 40)
        if at >= 0:
            contents[at + 20] ^= 1
    result = queue.recv(5).result
    assert isinstance(result, ExecutionError)
    assert "damaged by another process" in str(result)
    assert states(queue) == {}


# ---- a disk that refuses ----


REFUSING = """
def deny():
    # from here on every msync of this process, whatever its thread, fails: a filter on the number of the system call
    libc = ctypes.CDLL(None, use_errno=True)
    steps = [(0x20, 0, 0, 0), (0x15, 0, 1, MSYNC), (0x06, 0, 0, 0x00050000 | errno.EIO), (0x06, 0, 0, 0x7FFF0000)]
    code = ctypes.create_string_buffer(b"".join(struct.pack("HBBI", *step) for step in steps))
    program = ctypes.create_string_buffer(struct.pack("HxxxxxxP", len(steps), ctypes.addressof(code)))
    assert libc.prctl(38, 1, 0, 0, 0) == 0 and libc.syscall(SECCOMP, 1, 1, program) == 0, ctypes.get_errno()

def refused(call, *arguments):
    try:
        call(*arguments)
    except OSError as error:
        assert error.errno == errno.EIO, error
        return True
"""

MSYNC_AND_SECCOMP = {"x86_64": (26, 317), "aarch64": (227, 277)}


@pytest.fixture
def refusing():
    """Python code that defines `deny` and `refused`."""
    if platform.machine() not in MSYNC_AND_SECCOMP:
        pytest.skip(f"the numbers of msync and seccomp on {platform.machine()} are not known here")
    numbers = "MSYNC, SECCOMP = {}, {}\n".format(*MSYNC_AND_SECCOMP[platform.machine()])
    return "import ctypes, errno, struct\n" + numbers + REFUSING


@pytest.fixture
def run_refused(run_script, refusing):
    def run(path, script):
        return run_script(refusing + "queue = JobQueue.open(sys.argv[1])\n" + script, path)

    return run


@pytest.mark.parametrize("length", [40, LONG])
def test_a_job_that_the_disk_does_not_take_is_not_accepted(durable, run_refused, length):
    queue = durable(arena_bytes=2**18)
    run_refused(
        queue.path,
        f"""
queue.submit(Pass(1, b"first"))
deny()
assert refused(queue.submit, Pass(1, bytes({length})))
        """,
    )
    assert run_all(queue) == [b"first"]
    assert states(queue) == {}


def test_an_end_that_the_disk_does_not_take_is_told_to_everyone_and_the_error_raised(durable, run_refused):
    queue = durable()
    run_refused(
        queue.path,
        """
for n in range(3):
    queue.submit(Pass(1, b"%d" % n))
last = queue.submit(Pass(1, b"last"))
claims = [queue.try_claim() for _ in range(3)]
deny()
assert refused(claims[0].reply, encode_result(0, b"done"))
assert refused(claims[1].ack)
assert refused(queue.cancel, last)
assert queue.recv(5).result == b"done"
assert queue.stats().running == 1 and queue.stats().free == 15, queue.stats()
        """,
    )


def test_a_participant_whose_incarnation_the_disk_does_not_take_is_refused(durable, run_refused):
    queue = durable()
    run_refused(
        queue.path,
        """
deny()
assert refused(queue.submit, Pass(1, b""))
assert list(queue.heartbeat) == []
        """,
    )


def test_a_stuck_job_is_not_taken_away_before_its_copy_is_on_the_disk(durable, participant, files_of, refusing):
    """What it waits in lies there: the fence must not be on the disk without the copy, and without both nothing is lost."""
    queue = durable()
    worker = participant()
    worker.do("queue.submit(Pass(1, b'stuck'), timeout=600)", "held.append(queue.claim(60))", "held[0].started()")
    os.kill(worker.pid, signal.SIGSTOP)
    leader = participant()
    leader.do("queue.cancel(queue.submit(Pass(1, b'')))", refusing, "deny()")
    files = files_of(queue.path)
    [stuck] = np.flatnonzero(files.cells["deadline_ns"])
    files.cells["deadline_ns"][stuck] = 1
    term = files.bytes("table")[LINES_OFFSET : LINES_OFFSET + TABLE_LINES.itemsize].view(TABLE_LINES)["leader"]
    term[0] = ((int(term[0]) >> 16) + 1) << 16 | leader.get("queue.slot") + 1
    leader.do("queue._watch()")
    assert states(queue) == {"TAKEN": 1}
    leader.kill()

    queue.cancel(queue.submit(Pass(1, b"")))
    term[0] = ((int(term[0]) >> 16) + 1) << 16 | queue.slot + 1
    queue._watch()
    assert states(queue) == {"OVERDUE": 1, "DONE": 1}

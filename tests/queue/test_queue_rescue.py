"""What the dead leave in a queue: real kills, and frozen states written by hand; then `rescue`, called or by the timer alone.

Every process that takes part rescues by itself, so a test that wants to be first kills `just_after_a_look`; the others hold
whoever is faster.
"""

import os
import signal
import struct
import time
from contextlib import contextmanager
from fcntl import F_OFD_SETLK, F_WRLCK, fcntl

import numpy as np
import pytest

from subetha._core import decode_submit, encode_result
from subetha.errors import Empty, Full, TableFull, TransportError, WorkerDied
from subetha.jobqueue import JobQueue
from subetha.layout import (
    LINES_OFFSET,
    STATE_SHIFT,
    TABLE_LINES,
    VERSION_MASK,
    VERSION_SHIFT,
    BlockState,
    CellState,
    SlotState,
    cell_word,
)
from subetha.pass_registry import Pass

from .participants import WAIT_S, eventually, just_after_a_look, participant

__all__ = ["participant"]  # a fixture


@pytest.fixture
def path(shm):
    """Where a queue may be made: in memory, for there are many."""
    return os.fspath(shm / "queue")


BLOCK_BYTES = 32_768
"""The size class of a job of 20,000 bytes."""


def pattern(seed, length):
    return np.random.default_rng(seed).bytes(length)


def submit(queue, name, **options):
    return queue.submit(Pass(1, name.encode()), **options)


def name_of(claim):
    return decode_submit(claim.payload)[1].args.decode()


def claim_all(queue):
    """The names of all jobs that wait, in the order of their claims; each is acknowledged."""
    names = []
    while queue.stats().waiting:
        claim = queue.claim(WAIT_S)
        names.append(name_of(claim))
        claim.ack()
    return names


def run_next(queue, answer=b"fine"):
    """Claim the next job and answer it; its name and how often it had been started, this time included."""
    claim = queue.claim(WAIT_S)
    claim.started()
    found = name_of(claim), claim.attempts
    claim.reply(encode_result(0, answer))
    return found


def no_result_is_left(queue):
    with pytest.raises(Empty):
        queue.try_recv()


def is_whole(queue, files):
    """Every cell is free, no block is in use, no record is used but those of the living; and a job runs."""
    eventually(
        lambda: queue.stats().states == {"FREE": queue.cells_total}, f"every cell is free: {queue.stats().states}"
    )
    for size, *_ in files.arena_classes:
        assert (files.block_words(size) & 0xF <= BlockState.FREE_BACKED).all(), "a block is still in use"
    eventually(
        lambda: [int(slot) for slot in np.flatnonzero(files.records["status"] & 0xFF)] == list(queue.heartbeat),
        "no record is used but those of the living",
    )
    assert queue.repair() == 0
    job_id = submit(queue, "another")
    assert run_next(queue) == ("another", 1)
    result = queue.recv(WAIT_S)
    assert (result.token, result.result) == (job_id, b"fine")


def die_with(queue, participant, *lines, kill=None, is_watched=False):
    """A worker that claims the next job, runs these lines and dies; the pid it had, and how it ended.

    Where it `is_watched`, no timer sees that before a rescue that the test calls now.
    """
    worker = participant()
    worker.do("held.append(queue.claim(60))", *lines)
    if is_watched:
        just_after_a_look(queue)
    returncode = worker.kill() if kill is None else worker.exit(kill)
    return worker.pid, returncode


def make_letter(queue, participant, name="doomed", *, deaths=1, **options):
    """Submit a job that `deaths` workers die over, and let it become a dead letter. Its id."""
    job_id = queue.submit(Pass(1, name if isinstance(name, bytes) else name.encode()), max_attempts=deaths, **options)
    for _ in range(deaths):
        die_with(queue, participant, "held[0].started()")
        queue.rescue()
    eventually(lambda: any(letter.job_id == job_id for letter in queue.dead_letters()), "a dead letter")
    return job_id


# --- whether a death is charged -------------------------------------------------------------------------------------


def test_jobs_that_were_only_claimed_go_back_uncharged_however_often(make, files_of, participant):
    queue = make()
    submit(queue, "a", max_attempts=1)
    for _ in range(4):
        die_with(queue, participant)
        queue.rescue()
    assert queue.dead_letters() == []
    assert run_next(queue) == ("a", 1)
    assert queue.recv(WAIT_S).result == b"fine"
    is_whole(queue, files_of(queue.path))


@pytest.mark.parametrize("max_attempts", [1, 2, 3])
def test_a_started_job_runs_again_until_its_workers_have_died_in_max_attempts_runs(
    make, files_of, participant, max_attempts
):
    queue = make()
    job_id = submit(queue, "a", max_attempts=max_attempts)
    for n in range(max_attempts):
        no_result_is_left(queue)
        worker = participant()
        worker.do("held.append(queue.claim(60))")
        assert worker.get("held[0].attempts") == n
        worker.do("held[0].started()", "held[0].started()")
        assert worker.get("held[0].attempts") == n + 1
        worker.kill()
        queue.rescue()
    result = queue.recv(WAIT_S)
    assert result.token == job_id
    assert isinstance(result.result, WorkerDied)
    assert f"in the last of {max_attempts} attempts" in str(result.result)
    no_result_is_left(queue)
    assert queue.stats().states == {"FREE": 15, "DEAD": 1}
    assert [letter.attempts for letter in queue.dead_letters()] == [max_attempts]
    assert queue.drop_dead(job_id)
    is_whole(queue, files_of(queue.path))


def test_without_being_told_a_job_has_three_attempts(make, participant):
    queue = make()
    submit(queue, "a")
    for _ in range(2):
        die_with(queue, participant, "held[0].started()")
        queue.rescue()
    assert run_next(queue) == ("a", 3)
    assert queue.recv(WAIT_S).result == b"fine"


def test_of_one_dead_worker_only_the_started_jobs_are_charged(make, files_of, participant):
    queue = make()
    for name in "abcd":
        submit(queue, name, max_attempts=2)
    worker = participant()
    worker.do("held += [queue.claim(60) for _ in range(4)]", "held[1].started()", "held[3].started()")
    worker.kill()
    queue.rescue()
    assert [run_next(queue) for _ in range(4)] == [("a", 1), ("b", 2), ("c", 1), ("d", 2)]
    assert len([queue.recv(WAIT_S) for _ in range(4)]) == 4
    is_whole(queue, files_of(queue.path))


def test_a_run_that_was_released_is_not_charged_by_a_later_death(make, participant):
    queue = make()
    submit(queue, "a", max_attempts=1)
    die_with(queue, participant, "held[0].started()", "held.pop().release()", "held.append(queue.claim(60))")
    queue.rescue()
    assert run_next(queue) == ("a", 1)


def test_a_job_whose_worker_died_once_says_so_to_who_receives_it(make, participant):
    queue = make()
    submit(queue, "a")
    submit(queue, "b")
    die_with(queue, participant, "held[0].started()")
    queue.rescue()
    for _ in range(2):
        run_next(queue)
    assert [queue.recv(WAIT_S).result for _ in range(2)] == [b"fine"] * 2
    assert (queue.redelivered, queue.duplicates) == (1, 0)


# --- order ----------------------------------------------------------------------------------------------------------


def test_rescued_jobs_run_before_those_that_wait_at_their_priority_and_after_those_of_a_higher_one(
    make, files_of, participant
):
    queue = make()
    for priority in (1, 2):
        submit(queue, f"claimed {priority}", priority=priority)
    worker = participant()
    worker.do("held += [queue.claim(60) for _ in range(2)]", "held[1].started()")
    for priority in (2, 1, 0):
        submit(queue, f"waiting {priority}", priority=priority)
        submit(queue, f"behind {priority}", priority=priority)
    worker.kill()
    queue.rescue()
    eventually(lambda: queue.stats().waiting == 8, "all wait again")
    assert claim_all(queue) == [
        "waiting 0",
        "behind 0",
        "claimed 1",
        "waiting 1",
        "behind 1",
        "claimed 2",
        "waiting 2",
        "behind 2",
    ]
    is_whole(queue, files_of(queue.path))


def test_the_jobs_of_one_dead_worker_come_in_the_order_of_their_submits(make, participant):
    queue = make()
    for n in range(6):
        submit(queue, f"{n}")
    worker = participant()
    worker.do("held += [queue.claim(60) for _ in range(4)]")
    worker.kill()
    queue.rescue()
    eventually(lambda: queue.stats().waiting == 6, "all wait again")
    assert claim_all(queue) == list("012345")


# --- what the submitter hears ---------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("code", "words"),
    [(None, "with signal 9"), (0, "with exit code 0"), (7, "with exit code 7"), (255, "with exit code 255")],
)
def test_the_submitter_hears_how_the_last_worker_ended_from_who_saw_it(make, participant, code, words):
    queue = make()
    submit(queue, "a", max_attempts=1)
    pid, returncode = die_with(queue, participant, "held[0].started()", kill=code, is_watched=True)
    assert returncode == (-9 if code is None else code)
    assert queue.rescue({pid: returncode, pid + 1: 99}) == 1
    error = queue.recv(WAIT_S).result
    assert isinstance(error, WorkerDied)
    assert str(error) == f"in the last of 1 attempts its worker (pid {pid}) died {words}"


@pytest.mark.parametrize("told", ["nothing", "of others"])
def test_where_nobody_says_how_it_ended_the_cause_is_unknown(make, participant, told):
    queue = make()
    submit(queue, "a", max_attempts=1)
    pid, returncode = die_with(queue, participant, "held[0].started()")
    queue.rescue(None if told == "nothing" else {pid + 1: returncode})
    error = queue.recv(WAIT_S).result
    assert str(error) == f"in the last of 1 attempts its worker (pid {pid}) died of an unknown cause"


def test_the_error_keeps_its_class_where_results_have_the_least_room(make, participant):
    queue = make(result_bytes=56)
    submit(queue, "a", max_attempts=1)
    die_with(queue, participant, "held[0].started()")
    queue.rescue()
    error = queue.recv(WAIT_S).result
    assert isinstance(error, WorkerDied)
    assert "in the last of 1 attempts its worker (pid".startswith(str(error))


def test_rescue_says_how_many_dead_there_were_and_a_second_one_finds_none(make, files_of, participant):
    queue = make()
    victims = [participant() for _ in range(3)]
    for victim in victims:
        victim.get("queue.slot")
    assert queue.rescue() == 0
    just_after_a_look(queue)
    for victim in victims:
        victim.kill()
    assert queue.rescue() == 3
    assert [queue.rescue() for _ in range(3)] == [0, 0, 0]
    is_whole(queue, files_of(queue.path))


# --- dead letters ---------------------------------------------------------------------------------------------------


def test_a_dead_letter_tells_of_its_job_and_of_every_death(make, participant):
    queue = make()
    began = time.time_ns()
    job_id = submit(queue, "a", max_attempts=3)
    expected = []
    for kill, told in ((None, True), (7, True), (3, False)):
        pid, returncode = die_with(queue, participant, "held[0].started()", kill=kill, is_watched=told)
        queue.rescue({pid: returncode} if told else None)
        expected.append((pid, returncode if told else None))
    (letter,) = eventually(queue.dead_letters, "a letter")
    assert (letter.job_id, letter.attempts) == (job_id, 3)
    assert [(death.pid, death.exit_code) for death in letter.deaths] == expected
    times = [began, letter.submitted_ns, *(death.when_ns for death in letter.deaths), time.time_ns()]
    assert times == sorted(times)


def test_of_more_than_four_deaths_the_last_four_are_kept_oldest_first(make, participant):
    queue = make()
    submit(queue, "a", max_attempts=6)
    pids = []
    for code in range(6):
        pid, returncode = die_with(queue, participant, "held[0].started()", kill=code, is_watched=True)
        queue.rescue({pid: returncode})
        pids.append(pid)
    (letter,) = eventually(queue.dead_letters, "a letter")
    assert letter.attempts == 6
    assert [(death.pid, death.exit_code) for death in letter.deaths] == list(zip(pids, range(6), strict=True))[2:]
    times = [death.when_ns for death in letter.deaths]
    assert times == sorted(times)


def test_a_death_over_a_job_that_was_only_claimed_is_not_among_its_deaths(make, participant):
    queue = make()
    submit(queue, "a", max_attempts=2)
    pids = []
    for lines in ((), ("held[0].started()",), (), ("held[0].started()",)):
        pid, _ = die_with(queue, participant, *lines)
        queue.rescue()
        if lines:
            pids.append(pid)
    (letter,) = eventually(queue.dead_letters, "a letter")
    assert [death.pid for death in letter.deaths] == pids


def test_letters_are_listed_for_everybody_and_a_readonly_handle(make, path, participant):
    queue = make()
    job_ids = {make_letter(queue, participant, name) for name in ("a", "b")}
    for handle in (queue, make.open(), JobQueue.open(path, readonly=True)):
        assert {letter.job_id for letter in handle.dead_letters()} == job_ids
        handle.close()


def test_a_letter_stays_after_its_submitter_was_told_and_after_it_has_gone(make, path, participant):
    queue = make()
    job_id = make_letter(queue, participant)
    assert isinstance(queue.recv(WAIT_S).result, WorkerDied)
    queue.close()
    with JobQueue.open(path) as other:
        assert [letter.job_id for letter in other.dead_letters()] == [job_id]
        assert other.retry_dead(job_id)
        assert run_next(other) == ("doomed", 1)
        assert other.stats().states == {"FREE": 16}


def test_a_letter_retried_before_its_submitter_was_told_gives_exactly_the_real_result(make, files_of, participant):
    queue = make()
    job_id = make_letter(queue, participant, deaths=2)
    assert queue.retry_dead(job_id)
    assert queue.dead_letters() == []
    no_result_is_left(queue)
    assert run_next(queue, b"the real one") == ("doomed", 1)
    result = queue.recv(WAIT_S)
    assert (result.token, result.result) == (job_id, b"the real one")
    no_result_is_left(queue)
    is_whole(queue, files_of(queue.path))


def test_a_letter_retried_after_its_submitter_was_told_runs_and_gives_no_second_result(make, files_of, participant):
    queue = make()
    job_id = make_letter(queue, participant)
    assert queue.recv(WAIT_S).token == job_id
    assert queue.retry_dead(job_id)
    assert run_next(queue) == ("doomed", 1)
    no_result_is_left(queue)
    assert queue.recv_many(10) == []
    is_whole(queue, files_of(queue.path))


def test_a_retried_letter_has_all_its_attempts_again(make, participant):
    queue = make()
    job_id = make_letter(queue, participant, deaths=2)
    assert queue.retry_dead(job_id)
    pid, _ = die_with(queue, participant, "held[0].started()")
    queue.rescue()
    assert queue.dead_letters() == []
    last, _ = die_with(queue, participant, "held[0].started()")
    queue.rescue()
    (letter,) = eventually(queue.dead_letters, "a letter again")
    assert letter.attempts == 2
    assert [death.pid for death in letter.deaths] == [pid, last]
    assert isinstance(queue.recv(WAIT_S).result, WorkerDied)
    no_result_is_left(queue)


def test_a_retried_letter_runs_before_those_that_wait_at_its_priority(make, participant):
    queue = make()
    job_id = make_letter(queue, participant, priority=1)
    for priority in (2, 1, 0):
        submit(queue, f"waiting {priority}", priority=priority)
    assert queue.retry_dead(job_id)
    assert claim_all(queue) == ["waiting 0", "doomed", "waiting 1", "waiting 2"]


def test_another_handle_may_retry_or_drop_a_letter(make, participant):
    queue = make()
    first, second = (make_letter(queue, participant, name) for name in ("a", "b"))
    for _ in range(2):
        queue.recv(WAIT_S)
    other = make.open()
    assert other.retry_dead(first)
    assert other.drop_dead(second)
    assert run_next(queue) == ("a", 1)
    assert queue.dead_letters() == []
    assert queue.stats().free + queue.stats().done == 16


def test_what_is_no_letter_is_neither_retried_nor_dropped(make, participant):
    queue = make()
    waiting = submit(queue, "waits", priority=2)
    running = submit(queue, "runs", priority=0)
    claim = queue.claim(WAIT_S)
    letter = make_letter(queue, participant)
    before = queue.cells()["word"].copy()
    for job_id in (waiting, running, letter + 1, 1, 2**64 - 1):
        assert queue.retry_dead(job_id) is False
        assert queue.drop_dead(job_id) is False
    assert (queue.cells()["word"] == before).all()
    assert queue.recv(WAIT_S).token == letter
    assert queue.drop_dead(letter) is True
    assert queue.drop_dead(letter) is False
    assert queue.retry_dead(letter) is False
    claim.ack()
    with pytest.raises(ValueError, match="job_id"):
        queue.retry_dead(0)
    with pytest.raises(TypeError, match="job_id"):
        queue.drop_dead("1")


def test_a_dropped_letter_leaves_its_cell_and_its_block(make, files_of, participant):
    queue = make()
    files = files_of(queue.path)
    job_id = make_letter(queue, participant, pattern(1, 20_000))
    assert queue.recv(WAIT_S).token == job_id
    assert (files.block_words(BLOCK_BYTES) & 0xF == BlockState.LINKED).sum() == 1
    assert queue.drop_dead(job_id)
    is_whole(queue, files)


def test_a_letter_dropped_while_somebody_tells_of_it_leaves_its_block(make, files_of, participant):
    queue = make()
    files = files_of(queue.path)
    job_id = make_letter(queue, participant, pattern(1, 20_000))
    # as one that was about to tell of it, or to retry it, has left the link: moved, and the letter not
    words = files.block_words(BLOCK_BYTES)
    linked = words & 0xF == BlockState.LINKED
    words[linked] += np.uint64(1 << 24)
    assert queue.drop_dead(job_id)
    assert queue.recv(WAIT_S).token == job_id
    is_whole(queue, files)


def test_a_retried_letter_has_its_block(make, files_of, participant):
    queue = make()
    args = pattern(2, 20_000)
    told, untold = (make_letter(queue, participant, args) for _ in range(2))
    assert queue.recv(WAIT_S).token == told
    for job_id in (told, untold):
        assert queue.retry_dead(job_id)
        claim = queue.claim(WAIT_S)
        assert decode_submit(claim.payload)[1].args == args
        claim.reply(encode_result(0, args[::-1]))
    assert queue.recv(WAIT_S).result == args[::-1]
    is_whole(queue, files_of(queue.path))


@pytest.mark.parametrize("is_told", [True, False])
def test_dead_letters_do_not_count_for_the_quota(make, participant, is_told):
    queue = make(quota=2)
    for name in "ab":
        make_letter(queue, participant, name)
    if is_told:
        assert [type(queue.recv(WAIT_S).result) for _ in range(2)] == [WorkerDied] * 2
    for name in "cd":
        submit(queue, name, wait=0)
    with pytest.raises(Full, match="quota of 2"):
        submit(queue, "e", wait=0)


# --- blocks ---------------------------------------------------------------------------------------------------------


def test_jobs_in_blocks_survive_the_deaths_of_their_workers_byte_by_byte(make, files_of, participant):
    queue = make()
    jobs = {n: pattern(n, 20_000 + n) for n in range(3)}
    for args in jobs.values():
        queue.submit(Pass(1, args))
    for started in (True, False, True):
        worker = participant()
        worker.do("held += [queue.claim(60) for _ in range(3)]")
        if started:
            worker.do("[claim.started() for claim in held]")
        worker.kill()
        queue.rescue()
    for args in jobs.values():
        claim = queue.claim(WAIT_S)
        assert claim.attempts == 2
        assert decode_submit(claim.payload)[1].args == args
        claim.reply(encode_result(0, args[::-1]))
    assert [queue.recv(WAIT_S).result for _ in jobs] == [args[::-1] for args in jobs.values()]
    is_whole(queue, files_of(queue.path))


def test_blocks_that_the_dead_owned_are_free_and_without_disk(make, files_of, participant):
    queue = make(arena_bytes=2**16)
    files = files_of(queue.path)
    victim = participant()
    number = victim.get("queue.slot") + 1
    incarnation = int(files.records["status"][number - 1]) >> 8
    owned = (incarnation << 16 | number) << 4 | BlockState.OWNED
    earlier = (incarnation - 1 << 16 | number) << 4 | BlockState.OWNED
    others = (incarnation << 16 | queue.slot + 1) << 4 | BlockState.OWNED
    files.block_words(BLOCK_BYTES)[:] = owned
    files.block_words(4096)[:3] = [owned, earlier, others]
    queue.rescue()
    assert (files.block_words(BLOCK_BYTES) == owned).all()
    victim.kill()
    queue.rescue()
    eventually(lambda: not files.records["status"][number - 1] & 0xFF, "it is rescued")
    assert (files.block_words(BLOCK_BYTES) == BlockState.FREE_HOLE).all()
    # also what an earlier holder of the number has left, never what another participant owns
    assert list(files.block_words(4096)[:3]) == [BlockState.FREE_HOLE, BlockState.FREE_HOLE, others]
    files.block_words(4096)[:3] = BlockState.FREE_HOLE
    queue.submit(Pass(1, pattern(3, 20_000)), wait=0)
    assert len(name_free_args(queue)) == 20_000
    is_whole(queue, files)


def name_free_args(queue):
    claim = queue.claim(WAIT_S)
    args = decode_submit(claim.payload)[1].args
    claim.ack()
    return args


def test_a_result_block_of_a_reply_that_its_worker_did_not_survive_is_used_again(make, files_of, participant):
    queue = make(arena_bytes=2**15)
    files = files_of(queue.path)
    submit(queue, "a")
    worker = participant()
    worker.do("held.append(queue.claim(60))", "held[0].started()")
    (cell,) = np.flatnonzero(states(files) == CellState.TAKEN)
    version = int(files.cells["word"][cell]) >> VERSION_SHIFT
    # written and linked; its death came before DONE
    files.block_words(BLOCK_BYTES)[0] = version << 24 | int(cell) << 4 | BlockState.LINKED
    files.cells["result_block"][cell] = (3 + 1) << 32
    files.cells["result_length"][cell] = 20_000
    files.cells["result"][cell] = 0xEE
    worker.kill()
    queue.rescue()
    assert run_next(queue, pattern(4, 20_000)) == ("a", 2)
    assert queue.recv(WAIT_S).result == pattern(4, 20_000)
    is_whole(queue, files)


# --- results --------------------------------------------------------------------------------------------------------


def states(files):
    return (files.cells["word"] >> np.uint64(STATE_SHIFT)).astype(np.uint8) & 0xF


def write_result(files, cell, result):
    """What a worker has written in a cell before it says DONE; a frame of the job's own token."""
    frame = encode_result(int(files.cells["job_id"][cell]) & 0xFFFFFFFF, result)
    files.cells["result"][cell, : len(frame)] = np.frombuffer(frame, np.uint8)
    files.cells["result_length"][cell] = len(frame)


def test_a_result_that_was_done_and_not_delivered_at_the_death_of_its_worker_comes_once(make, files_of, participant):
    queue = make()
    files = files_of(queue.path)
    job_id = submit(queue, "a")
    worker = participant()
    worker.do("held.append(queue.claim(60))", "held[0].started()")
    (cell,) = np.flatnonzero(states(files) == CellState.TAKEN)
    write_result(files, cell, b"done")
    word = int(files.cells["word"][cell])
    files.cells["word"][cell] = word ^ (CellState.TAKEN ^ CellState.DONE) << STATE_SHIFT
    no_result_is_left(queue)
    worker.kill()
    queue.rescue()
    result = queue.recv(WAIT_S)
    assert (result.token, result.result) == (job_id, b"done")
    no_result_is_left(queue)
    assert queue.duplicates == 0
    is_whole(queue, files)


def test_a_result_that_was_delivered_before_the_death_of_its_worker_comes_once(make, files_of, participant):
    queue = make()
    job_id = submit(queue, "a")
    worker = participant()
    worker.do("held.append(queue.claim(60))", "held[0].reply(encode_result(0, b'done'))")
    worker.kill()
    queue.rescue()
    result = queue.recv(WAIT_S)
    assert (result.token, result.result) == (job_id, b"done")
    no_result_is_left(queue)
    is_whole(queue, files_of(queue.path))


def test_half_a_result_is_not_given_and_the_job_runs_again_from_its_own_bytes(make, files_of, participant):
    queue = make()
    files = files_of(queue.path)
    submit(queue, "a" * 150)
    worker = participant()
    worker.do("held.append(queue.claim(60))", "held[0].started()")
    (cell,) = np.flatnonzero(states(files) == CellState.TAKEN)
    files.cells["result"][cell] = 0xEE
    files.cells["result_length"][cell] = 99
    worker.kill()
    queue.rescue()
    assert run_next(queue, b"whole") == ("a" * 150, 2)
    assert queue.recv(WAIT_S).result == b"whole"
    is_whole(queue, files)


# --- dead clients ---------------------------------------------------------------------------------------------------


def test_the_uncollected_results_of_a_dead_client_are_freed_and_its_waiting_jobs_still_run(make, files_of, participant):
    queue = make()
    client = participant()
    client.do("ids = [queue.submit(Pass(1, b'%d' % n)) for n in range(4)]")
    assert run_next(queue) == ("0", 1)
    running = queue.claim(WAIT_S)
    assert queue.stats().done == 1
    client.kill()
    queue.rescue()
    eventually(lambda: queue.stats().states == {"FREE": 13, "TAKEN": 1, "READY": 2}, "its result is free")
    running.reply(encode_result(0, b"nobody's"))
    assert [run_next(queue) for _ in range(2)] == [("2", 1), ("3", 1)]
    is_whole(queue, files_of(queue.path))


def test_results_of_an_earlier_incarnation_never_reach_the_next_holder_of_its_number(make, files_of, participant):
    queue = make()
    for _ in range(3):
        client = participant()
        client.do("queue.submit(Pass(1, b'delivered'))", "queue.submit(Pass(1, b'late'))")
        number = client.get("queue.slot")
        run_next(queue, b"delivered")
        late = queue.claim(WAIT_S)
        client.kill()
        queue.rescue()
        eventually(lambda number=number: not queue.heartbeat.snapshot(number), "its number is free")
        heir = participant()
        assert heir.get("queue.slot") == number
        heir.do("mine = queue.submit(Pass(1, b'of the heir'))")
        late.reply(encode_result(0, b"late"))
        run_next(queue, b"of the heir")
        assert heir.get("(lambda found: (found.token == mine, found.result.decode()))(queue.recv(60))") == [
            True,
            "of the heir",
        ]
        assert heir.get("len(queue.recv_many(9))") == 0
        heir.do("queue.close()")
        heir.exit(0)
    is_whole(queue, files_of(queue.path))


def test_a_letter_of_a_dead_client_is_told_to_nobody_and_stays(make, files_of, participant):
    queue = make()
    client = participant()
    client.do("queue.submit(Pass(1, b'doomed'), max_attempts=1)")
    die_with(queue, participant, "held[0].started()")
    client.kill()
    queue.rescue()
    (letter,) = eventually(queue.dead_letters, "a letter")
    eventually(lambda: int(queue.cells()["word"][queue.cells()["word"] & 0xFFFF != 0].size) == 0, "it is nobody's")
    assert queue.drop_dead(letter.job_id)
    is_whole(queue, files_of(queue.path))


# --- a full table ---------------------------------------------------------------------------------------------------


def test_a_table_full_of_dead_makes_room(make, path, files_of, participant):
    make(participants=2).close()
    first, second = participant(), participant()
    first.do("[queue.submit(Pass(1, b'%d' % n)) for n in range(4)]")
    second.do("held += [queue.claim(60) for _ in range(2)]", "held[1].started()")
    with JobQueue.open(path) as late, pytest.raises(TableFull, match="all 2 slots"):
        late.submit(Pass(1, b"refused"))
    second.kill()
    first.kill()
    with JobQueue.open(path) as queue:
        assert queue.slot in (0, 1)
        queue.rescue()
        eventually(lambda: queue.stats().waiting == 4, "all wait again")
        assert [run_next(queue) for _ in range(4)] == [("0", 1), ("1", 2), ("2", 1), ("3", 1)]
        is_whole(queue, files_of(path))


# --- who is dead, and who is not ------------------------------------------------------------------------------------


def test_a_zombie_is_dead_and_so_is_the_parent_of_a_child_that_lives(make, files_of, participant):
    queue = make()
    submit(queue, "a")
    worker = participant()
    worker.do("held.append(queue.claim(60))", "child = os.fork() or signal.pause()")
    child = worker.get("child")
    os.kill(worker.pid, signal.SIGKILL)
    os.waitid(os.P_PID, worker.pid, os.WEXITED | os.WNOWAIT)
    queue.rescue()
    assert run_next(queue) == ("a", 1)
    assert queue.recv(WAIT_S).result == b"fine"
    os.kill(child, signal.SIGKILL)
    is_whole(queue, files_of(queue.path))


def test_what_a_stopped_process_has_claimed_is_left_alone(make, files_of, participant):
    queue = make()
    submit(queue, "a")
    worker = participant()
    worker.do("held.append(queue.claim(60))", "held[0].started()")
    os.kill(worker.pid, signal.SIGSTOP)
    os.waitid(os.P_PID, worker.pid, os.WSTOPPED)
    word = queue.cells()["word"].copy()
    assert queue.rescue() == 0
    just_after_a_look(queue)
    assert (queue.cells()["word"] == word).all()
    os.kill(worker.pid, signal.SIGCONT)
    worker.do("held[0].reply(encode_result(0, b'slow'))")
    assert queue.recv(WAIT_S).result == b"slow"
    worker.do("queue.close()")
    is_whole(queue, files_of(queue.path))


def test_a_readonly_handle_rescues_nothing(make, path, participant):
    queue = make()
    submit(queue, "a")
    worker = participant()
    worker.do("held.append(queue.claim(60))")
    worker.kill()
    queue.close()
    make_dead = participant()
    make_dead.get("queue.slot")
    make_dead.kill()
    with JobQueue.open(path, readonly=True) as looking:
        words, records = looking.cells()["word"].copy(), len(list(looking.heartbeat))
        with pytest.raises(TransportError, match="read-only"):
            looking.rescue()
        for call in (looking.retry_dead, looking.drop_dead):
            with pytest.raises(TransportError, match="read-only"):
                call(1)
        assert (looking.cells()["word"] == words).all()
        assert records == 0


# --- states written by hand -----------------------------------------------------------------------------------------

DEAD = 40
"""The number of a participant whose record is used, or dying, while nobody holds its byte."""


def kill_by_hand(files, *, state=SlotState.USED, incarnation=3, number=DEAD):
    files.records["pid"][number - 1] = 2**22 + 1
    # last: from here on everybody may rescue
    files.records["status"][number - 1] = incarnation << 8 | state


def written(queue, files, state, *, is_referred_to, version=0, owner=DEAD, block=False):
    """A cell in that state, of that owner and version, with a job of `queue`; and whether a place leads to it. Its number."""
    files.cells["word"][:] = cell_word(version, CellState.FREE, 0)
    queue.submit(Pass(1, pattern(5, 20_000) if block else b"job"))
    (cell,) = np.flatnonzero(states(files) == CellState.READY)
    write_result(files, cell, b"result")
    if not is_referred_to:
        lines, places = files.ring("submit-1")
        places[:] = 0
        lines["tail"] = lines["head"] = 0
    elif state in (CellState.DONE, CellState.DEAD):
        queue.claim(WAIT_S).reply(encode_result(0, b"result"))
    files.cells["word"][cell] = cell_word(version, state, owner)
    return int(cell)


RESULT, JOB, NOTHING = "the result comes", "the job runs", "nothing comes"


@pytest.mark.parametrize(
    ("record", "version"),
    [
        (SlotState.USED, 0),
        (SlotState.DYING, 7),
        (SlotState.USED, VERSION_MASK - 1),
        (SlotState.USED, VERSION_MASK),
    ],
    ids=["first", "half-rescued", "last-but-one", "last"],
)
@pytest.mark.parametrize(
    ("state", "is_referred_to", "what"),
    [
        (CellState.WRITING, False, NOTHING),
        (CellState.READY, True, JOB),
        (CellState.READY, False, NOTHING),
        (CellState.TAKEN, True, JOB),
        (CellState.TAKEN, False, JOB),
        (CellState.RETRY, True, JOB),
        (CellState.RETRY, False, JOB),
        (CellState.DONE, True, RESULT),
        (CellState.DONE, False, RESULT),
        (CellState.DEAD, True, RESULT),
        (CellState.DEAD, False, RESULT),
        (CellState.COLLECTED, False, NOTHING),
        (CellState.FENCED, False, NOTHING),
    ],
    ids=lambda value: value.name if isinstance(value, CellState) else None,
)
def test_each_state_of_a_dead_owner_ends_as_the_design_says(
    make, files_of, record, version, state, is_referred_to, what
):
    queue = make()
    files = files_of(queue.path)
    cell = written(queue, files, state, is_referred_to=is_referred_to, version=version)
    job_id = int(files.cells["job_id"][cell])
    kill_by_hand(files, state=record)
    queue.rescue()
    eventually(lambda: int(files.records["status"][DEAD - 1]) == 3 << 8 | SlotState.FREE, "it is rescued")
    if what == JOB:
        assert run_next(queue, b"result") == ("job", 1)
    if what != NOTHING:
        result = queue.recv(WAIT_S)
        assert (result.token, result.result) == (job_id, b"result")
    no_result_is_left(queue)
    assert queue.drop_dead(job_id) is (state == CellState.DEAD)
    if what == NOTHING:
        # by way of COLLECTED where a put-back may have been begun
        ends = version + (2 if state is CellState.FENCED else 1)
        assert queue.cells()["word"][cell] == cell_word(ends, CellState.FREE, 0)
    is_whole(queue, files)


@pytest.mark.parametrize("state", [CellState.TAKEN, CellState.RETRY, CellState.READY], ids=lambda state: state.name)
@pytest.mark.parametrize("version", [3, 2**40 - 1, VERSION_MASK])
def test_the_link_of_a_jobs_block_moves_with_the_version_of_its_cell(make, files_of, state, version):
    queue = make()
    files = files_of(queue.path)
    written(queue, files, state, is_referred_to=state == CellState.READY, version=version, block=True)
    kill_by_hand(files)
    queue.rescue()
    assert name_free_args(queue) == pattern(5, 20_000)
    is_whole(queue, files)


@pytest.mark.parametrize(
    "state",
    [CellState[name] for name in ("WRITING", "READY", "TAKEN", "RETRY", "DONE", "COLLECTED", "FENCED")],
    ids=lambda state: state.name,
)
def test_nothing_that_a_living_owner_holds_is_touched(make, files_of, participant, state):
    queue = make()
    files = files_of(queue.path)
    living = participant()
    owner = living.get("queue.slot") + 1
    cell = written(queue, files, state, is_referred_to=state != CellState.DONE, owner=owner)
    word = int(files.cells["word"][cell])
    kill_by_hand(files)
    queue.rescue()
    eventually(lambda: not int(files.records["status"][DEAD - 1]) & 0xFF, "it is rescued")
    assert int(files.cells["word"][cell]) == word
    files.cells["word"][cell] = cell_word(0, CellState.FREE, 0)


def test_a_rescuer_that_died_after_it_had_taken_a_job_over_does_not_charge_it_again(make, files_of):
    queue = make()
    files = files_of(queue.path)
    cell = written(queue, files, CellState.TAKEN, is_referred_to=False, version=8)
    # started by a claim of version 7, whose worker has died
    files.cells["attempts"][cell] = 2
    files.cells["charged"][cell] = 2 * 7 + 1
    kill_by_hand(files)
    queue.rescue()
    assert run_next(queue) == ("job", 3)
    assert queue.recv(WAIT_S).result == b"fine"
    is_whole(queue, files)


def test_a_letter_that_a_dead_rescuer_had_not_delivered_is_delivered_once(make, files_of):
    queue = make()
    files = files_of(queue.path)
    cell = written(queue, files, CellState.DEAD, is_referred_to=False)
    job_id = int(files.cells["job_id"][cell])
    kill_by_hand(files)
    queue.rescue()
    assert queue.recv(WAIT_S).token == job_id
    no_result_is_left(queue)
    assert queue.drop_dead(job_id)
    is_whole(queue, files)


def test_rescue_repairs_first_where_a_repair_is_due(make, files_of):
    queue = make()
    files = files_of(queue.path)
    submit(queue, "mine")
    lines, places = files.ring("submit-1")
    places[:] = 0
    lines["due"] = 1
    (cell,) = np.flatnonzero(states(files) == CellState.READY)
    # handed in by one that is dead now: the repairer had emptied the places
    files.cells["word"][cell] = cell_word(0, CellState.READY, DEAD)
    kill_by_hand(files)
    queue.rescue()
    assert run_next(queue) == ("mine", 1)


# --- by the timer alone ---------------------------------------------------------------------------------------------


def test_work_of_the_dead_moves_on_although_nobody_calls_rescue(make, files_of, participant):
    queue = make()
    submit(queue, "a")
    submit(queue, "b", max_attempts=1)
    worker = participant()
    worker.do("held += [queue.claim(60) for _ in range(2)]", "[claim.started() for claim in held]")
    worker.kill()
    assert isinstance(queue.recv(WAIT_S).result, WorkerDied)
    assert run_next(queue) == ("a", 2)
    assert queue.recv(WAIT_S).result == b"fine"
    (letter,) = queue.dead_letters()
    assert queue.drop_dead(letter.job_id)
    is_whole(queue, files_of(queue.path))


def test_a_process_rescues_while_its_python_holds_the_gil(make, path, participant):
    make().close()
    only, victim = participant(), participant()
    only.do("queue.submit(Pass(1, b'a'))")
    victim.do("held.append(queue.claim(60))", "held[0].started()")
    only.begin("3 ** 10**9")
    victim.kill()
    with JobQueue.open(path, readonly=True) as looking:
        eventually(lambda: looking.stats().waiting == 1, "the job waits again")
        # the check of the check: only native code has run there meanwhile
        assert not only.has_answered()
        only.kill()
        assert looking.stats().waiting == 1


# --- leadership -----------------------------------------------------------------------------------------------------


def leader_of(files):
    """(term, slot) of who leads."""
    word = int(files.bytes("table")[LINES_OFFSET : LINES_OFFSET + TABLE_LINES.itemsize].view(TABLE_LINES)["leader"][0])
    return word >> 16, (word & 0xFFFF) - 1


def test_a_living_participant_leads_and_another_one_when_it_is_killed_or_leaves(make, path, files_of, participant):
    make().close()
    files = files_of(path)
    assert leader_of(files) == (0, -1)
    members = {}
    for _ in range(3):
        member = participant()
        members[member.get("queue.slot")] = member
    with JobQueue.open(path, readonly=True) as looking:
        for end in ("kill", "leave"):
            term, leader = eventually(
                lambda: leader_of(files)[1] in members and leader_of(files), "one of the living leads"
            )
            member = members.pop(leader)
            if end == "kill":
                member.kill()
            else:
                member.do("queue.close()")
            new_term, new_leader = eventually(
                lambda leader=leader: leader_of(files)[1] != leader and leader_of(files), "another one leads"
            )
            assert new_term > term
            assert new_leader in members
            epoch = looking.heartbeat.global_epoch
            eventually(lambda epoch=epoch: looking.heartbeat.global_epoch > epoch, "the new one ticks")


# --- many at once ---------------------------------------------------------------------------------------------------


@contextmanager
def byte_held(files, number):
    """Hold the lock of a participant's byte."""
    table = os.path.join(files.path, "table")
    with open(table, "r+b") as file:
        byte = os.path.getsize(table) + number - 1
        fcntl(file, F_OFD_SETLK, struct.pack("hhqqi4x", F_WRLCK, os.SEEK_SET, byte, 1, 0))
        yield


def test_one_whose_byte_is_held_is_not_dead_until_it_is_let_go(make, files_of):
    queue = make()
    files = files_of(queue.path)
    cell = written(queue, files, CellState.TAKEN, is_referred_to=False)
    with byte_held(files, DEAD):
        kill_by_hand(files)
        word = int(files.cells["word"][cell])
        assert queue.rescue() == 0
        just_after_a_look(queue)
        assert int(files.cells["word"][cell]) == word
    assert run_next(queue) == ("job", 1)


def test_many_rescuers_at_once_give_back_each_job_of_many_dead_once_and_charge_it_once(make, files_of, participant):
    queue = make(64, participants=64, quota=60)
    files = files_of(queue.path)
    rescuers = [participant() for _ in range(3)]
    for rescuer in rescuers:
        rescuer.get("queue.slot")
    for n in range(40):
        queue.submit(Pass(1, pattern(n, 5000) if n % 4 == 0 else b"%d" % n), max_attempts=2 if n % 8 else 1)
    victims = [participant() for _ in range(20)]
    for victim in victims:
        victim.do("held += [queue.claim(60) for _ in range(2)]", "held[0].started()")
    for victim in victims:
        os.kill(victim.pid, signal.SIGKILL)
    for victim in victims:
        victim.wait()
    for rescuer in rescuers:
        rescuer.begin("queue.rescue()")
    queue.rescue()
    for rescuer in rescuers:
        rescuer.heard()
    letters = [queue.recv(WAIT_S) for _ in range(5)]
    assert all(isinstance(letter.result, WorkerDied) for letter in letters)
    again = []
    for _ in range(35):
        claim = queue.claim(WAIT_S)
        claim.started()
        again.append(claim.attempts)
        claim.reply(encode_result(0, b""))
    # every second job was started; those with one attempt are letters
    assert sorted(again) == [1] * 20 + [2] * 15
    tokens = [letter.token for letter in letters] + [queue.recv(WAIT_S).token for _ in range(35)]
    assert len(set(tokens)) == 40
    no_result_is_left(queue)
    pids = {victim.pid for victim in victims}
    for letter in queue.dead_letters():
        assert letter.attempts == 1
        assert [death.pid in pids for death in letter.deaths] == [True]
        assert queue.drop_dead(letter.job_id)
    for rescuer in rescuers:
        rescuer.do("queue.close()")
    is_whole(queue, files)


@pytest.mark.parametrize("length", [8, 20_000])
def test_a_result_in_the_mailbox_of_a_client_that_had_left_is_freed_when_its_worker_died_before_it_saw_that(
    make, participant, files_of, length
):
    queue = make()
    client, worker = participant(queue.path), participant(queue.path)
    client.do("queue.submit(Pass(1, b'job'))")
    worker.do(f"queue.claim(60).reply(encode_result(0, b'r' * {length}))")
    assert queue.stats().done == 1
    # as where the client had left, its mailbox empty, before the reference came
    slot = client.get("queue.slot")
    os.kill(client.pid, signal.SIGSTOP)
    files_of(queue.path).records["status"][slot] += np.uint64((1 << 8) - SlotState.USED)
    client.kill()
    worker.kill()
    queue.rescue()
    eventually(lambda: queue.stats().free == queue.cells_total, "the result lies there for ever")

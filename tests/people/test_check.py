"""`subetha check`: queues at rest and at work are sound; every kind of fault is found, and repaired where that can be."""

import json
import os
import random
import shutil
import signal
import subprocess
import sys
import textwrap
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
from click.testing import CliRunner

from subetha._core import encode_result
from subetha.check import Fault, check_queue
from subetha.cli import cli
from subetha.errors import Empty
from subetha.jobqueue import JobQueue
from subetha.layout import (
    ARENA_LINES,
    HOT_LINE,
    JOB_CELL,
    LINES_OFFSET,
    MIN_BLOCK_BYTES,
    PARTICIPANT,
    POOL_LINES,
    QUEUE_GEOMETRY,
    RING_LINES,
    STATE_SHIFT,
    TABLE_LINES,
    VERSION_SHIFT,
    BlockState,
    CellState,
    SlotState,
    align,
    cell_word,
)
from subetha.pass_registry import Pass

WAIT_S = 60
CELLS, PARTICIPANTS, ARENA = 16, 16, 2**18
PLACES = 2 * CELLS
LAP_SHIFT = 64 - (63 - 4) // 2
FILES = ["arena", "back-0", "back-1", "back-2", "mail", "pool", "submit-0", "submit-1", "submit-2", "table"]

SCRIPT_HEAD = """
import os, sys, time
from subetha._core import encode_result
from subetha.errors import Empty, Full
from subetha.jobqueue import JobQueue
from subetha.pass_registry import Pass
"""


def environment() -> dict[str, str]:
    return os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)}


class Bytes:
    """A queue's files as writable arrays: what a misbehaving peer, or a test, may write."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def of(self, name: str) -> npt.NDArray[Any]:
        return np.asarray(np.memmap(self.path / name, np.uint8, "r+"))

    def cell(self, number: int) -> npt.NDArray[Any]:
        stride = align(JOB_CELL.itemsize + 192 + 192, 64)
        at = LINES_OFFSET + POOL_LINES.itemsize + number * stride
        return self.of("pool")[at : at + JOB_CELL.itemsize].view(JOB_CELL)

    def cells_in(self, *states: CellState) -> list[int]:
        return [n for n in range(CELLS) if int(self.cell(n)["word"][0]) >> STATE_SHIFT & 0xF in states]

    def put(self, number: int, state: int, owner: int) -> None:
        """Another state and owner for a cell, at its version."""
        cell = self.cell(number)
        cell["word"] = cell_word(int(cell["word"][0]) >> VERSION_SHIFT, state, owner)

    def ring(self, name: str) -> tuple[npt.NDArray[Any], npt.NDArray[Any]]:
        file, _, number = name.partition("/")
        at = LINES_OFFSET
        if number:
            stride = align(RING_LINES.itemsize + 8 * PLACES, MIN_BLOCK_BYTES)
            at = align(LINES_OFFSET + 4 * PARTICIPANTS, MIN_BLOCK_BYTES) + (int(number) - 1) * stride
        places = at + RING_LINES.itemsize
        contents = self.of(file)
        return contents[at:places].view(RING_LINES), contents[places : places + 8 * PLACES].view("<u8")

    @property
    def records(self) -> npt.NDArray[Any]:
        at = LINES_OFFSET + TABLE_LINES.itemsize
        return self.of("table")[at : at + PARTICIPANTS * PARTICIPANT.itemsize].view(PARTICIPANT)

    @property
    def smallest_blocks(self) -> npt.NDArray[Any]:
        """The words of the blocks of 4096 bytes."""
        at = align(LINES_OFFSET + ARENA_LINES.itemsize, HOT_LINE)
        return self.of("arena")[at : at + 8 * (ARENA // MIN_BLOCK_BYTES)].view("<u8")


@pytest.fixture
def path(shm: Path) -> Path:
    return shm / "queue"


@pytest.fixture
def client(path: Path) -> Iterator[JobQueue]:
    """A client that is alive: two jobs of its wait (cell 1, and cell 2 with a block), two results (3, and 4 with a block)."""
    with JobQueue.create(path, CELLS, participants=PARTICIPANTS, arena_bytes=ARENA) as queue:
        for _ in range(2):
            queue.submit(Pass(1, b"r"), priority=0)
        queue.submit(Pass(1, b"short"))
        queue.submit(Pass(1, b"l" * 3000))
        queue.claim(0).reply(encode_result(0, b"short"))
        queue.claim(0).reply(encode_result(0, b"l" * 3000))
        yield queue


@pytest.fixture
def at_rest(path: Path) -> Path:
    """A queue that nobody has open: a short job waits at priority 1, a long one at 2."""
    with JobQueue.create(path, CELLS, participants=PARTICIPANTS, arena_bytes=ARENA) as queue:
        queue.submit(Pass(1, b"short"))
        queue.submit(Pass(1, b"l" * 3000), priority=2)
    return path


def short_job(data: Bytes) -> int:
    """The cell of the job that waits, or has been taken, and has no block."""
    return next(n for n in data.cells_in(CellState.READY, CellState.TAKEN) if not data.cell(n)["job_block"][0])


def long_job(data: Bytes) -> int:
    return next(n for n in data.cells_in(CellState.READY) if data.cell(n)["job_block"][0])


def short_result(data: Bytes) -> int:
    return next(n for n in data.cells_in(CellState.DONE) if not data.cell(n)["result_block"][0])


def long_result(data: Bytes) -> int:
    return next(n for n in data.cells_in(CellState.DONE) if data.cell(n)["result_block"][0])


def check(path: Path, *options: str) -> tuple[int, dict[str, Any]]:
    """The exit code and the report of the command."""
    ran = CliRunner().invoke(cli, ["check", str(path), "--json", *options])
    assert ran.exception is None or isinstance(ran.exception, SystemExit), ran.output
    found = json.loads(ran.stdout)
    assert list(found) == ["queue", "sound", "faults", "repaired"]
    assert (found["queue"], found["sound"]) == (str(path), ran.exit_code != 2)
    return ran.exit_code, found


def found(path: Path) -> set[tuple[str, str]]:
    """Kind and place of what is wrong; it does not depend on the pause where nobody is at work."""
    return {(fault.kind, fault.where) for fault in check_queue(path, pause=0.0).faults}


def start(script: str, *arguments: object) -> "subprocess.Popen[str]":
    return subprocess.Popen(
        [sys.executable, "-c", SCRIPT_HEAD + textwrap.dedent(script), *map(str, arguments)],
        env=environment(),
        stdout=subprocess.PIPE,
        text=True,
    )


# --- sound ------------------------------------------------------------------------------------------------------------


def test_a_new_queue_is_sound(path: Path) -> None:
    JobQueue.create(path, 64).close()
    assert check(path) == (0, {"queue": str(path), "sound": True, "faults": [], "repaired": []})


def test_jobs_that_wait_and_results_that_lie_there_are_sound(client: JobQueue, path: Path) -> None:
    data = Bytes(path)
    assert len(data.cells_in(CellState.READY)) == len(data.cells_in(CellState.DONE)) == 2
    assert found(path) == set()
    claims = [client.claim(0), client.claim(0)]
    assert found(path) == set()
    claims[0].started()
    claims[0].release()
    assert found(path) == set()
    client.close()
    assert len(data.cells_in(CellState.RETRY)) == 2
    assert found(path) == set()


def test_a_queue_with_the_largest_and_the_smallest_numbers_is_sound(path: Path, tmp_path: Path) -> None:
    with JobQueue.create(path, 16, job_bytes=56, result_bytes=56, participants=1, arena_bytes=4096, quota=1) as queue:
        queue.submit(Pass(1, b"x" * 4000))
        assert found(path) == set()
    with JobQueue.create(tmp_path / "large", 2**14, arena_bytes=2**34) as queue:
        queue.submit(Pass(1, b"x" * 40_000))
        assert found(tmp_path / "large") == set()


def test_rings_that_went_round_are_sound(path: Path) -> None:
    with JobQueue.create(path, CELLS, arena_bytes=ARENA) as queue:
        for n in range(5 * PLACES):
            job_id = queue.submit(Pass(1, b"x" * (n * 100)))
            queue.claim(0).reply(encode_result(0, b"y" * (n * 100)))
            assert queue.recv(WAIT_S).token == job_id
            if n % 7 == 0:
                assert found(path) == set()


def test_a_head_left_behind_by_cancelled_jobs_is_sound(path: Path) -> None:
    with JobQueue.create(path, CELLS, arena_bytes=ARENA) as queue:
        for n in range(3 * PLACES):
            queue.cancel(queue.submit(Pass(1)))
            if n % 5 == 0:
                assert found(path) == set()
        queue.submit(Pass(1))
        assert found(path) == set()
        queue.claim(0).ack()
        assert found(path) == set()


def test_a_stopped_worker_with_a_job_in_hand_is_no_fault(client: JobQueue, path: Path) -> None:
    with start(
        "queue = JobQueue.open(sys.argv[1]); claim = queue.claim(60); print(flush=True); time.sleep(600)", path
    ) as worker:
        try:
            assert worker.stdout is not None
            worker.stdout.readline()
            worker.send_signal(signal.SIGSTOP)
            assert Bytes(path).cells_in(CellState.TAKEN)
            assert found(path) == set()
        finally:
            worker.kill()


WORK = {
    "client": """
        with JobQueue.open(sys.argv[1]) as queue:
            n = 0
            while os.path.exists(sys.argv[2]):
                n += 1
                for k in range(1 + n % 5):
                    try:
                        job_id = queue.submit(Pass(1, b"x" * (n * 37 % 9000)), priority=n % 3, wait=0.01)
                    except Full:
                        break
                    if n % 11 == k:
                        queue.cancel(job_id)
                try:
                    while n % 3:
                        queue.try_recv()
                except Empty:
                    pass
        """,
    "worker": """
        while os.path.exists(sys.argv[2]):
            # one that comes and goes
            with JobQueue.open(sys.argv[1]) as queue:
                for n in range(2000):
                    try:
                        claim = queue.claim(0.01)
                    except Empty:
                        break
                    claim.started()
                    if n % 7 == 0:
                        claim.release()
                    elif n % 13 == 0:
                        claim.ack()
                    else:
                        claim.reply(encode_result(0, b"y" * (n * 41 % 9000)))
        """,
}


def test_a_queue_at_work_has_never_a_fault(path: Path, tmp_path: Path) -> None:
    JobQueue.create(path, 64, participants=PARTICIPANTS, arena_bytes=2**22).close()
    flag = tmp_path / "go on"
    flag.touch()
    processes = [start(WORK[what], path, flag) for what in ("client", "worker", "client", "worker")]
    try:
        end = time.monotonic() + 2.5
        while time.monotonic() < end:
            # what is in motion is in another motion half a second later
            assert check_queue(path, pause=0.5).faults == []
            assert all(process.poll() is None for process in processes)
    finally:
        flag.unlink()
        codes = [process.wait(WAIT_S) for process in processes]
        for process in processes:
            process.communicate()
    assert codes == [0] * 4
    assert check(path)[0] == 0


def test_a_fault_that_only_one_of_two_looks_finds_does_not_count(
    client: JobQueue, path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    data = Bytes(path)
    cell = data.cell(short_job(data))
    versions = iter(range(1000, 2000))

    def go_on(_seconds: float) -> None:
        cell["word"] = cell_word(next(versions), CellState.TAKEN, 999)

    go_on(0)
    monkeypatch.setattr(time, "sleep", go_on)
    assert check_queue(path).faults == []
    monkeypatch.setattr(time, "sleep", lambda _seconds: None)
    assert [fault.kind for fault in check_queue(path).faults] == ["owner"]


# --- faults that a repair takes away ------------------------------------------------------------------------------------


def lose_reference(data: Bytes, ring: str) -> None:
    """As if the oldest reference had been taken and its cell had not."""
    lines, places = data.ring(ring)
    places[0] = 1 << LAP_SHIFT
    lines["head"] = 1


def unknown_state(data: Bytes) -> str:
    data.put(9, 13, 0)
    return "cell 9"


def taken_by_no_participant(data: Bytes) -> str:
    number = short_job(data)
    data.put(number, CellState.TAKEN, 999)
    return f"cell {number}"


def written_by_nobody(data: Bytes) -> str:
    data.put(9, CellState.WRITING, 0)
    return "cell 9"


def job_without_reference(data: Bytes) -> str:
    lose_reference(data, "submit-1")
    return f"cell {short_job(data)}"


def result_without_reference(data: Bytes) -> str:
    _, places = data.ring("mail/1")
    number = int(places[0]) & (CELLS - 1)
    lose_reference(data, "mail/1")
    return f"cell {number}"


def letter_without_reference(data: Bytes) -> str:
    number = short_job(data)
    data.cell(number)["result_length"] = 7
    data.put(number, CellState.DEAD, 1)
    return f"cell {number}"


def result_of_a_client_without_mailbox(data: Bytes) -> str:
    number = int(data.ring("mail/1")[1][0]) & (CELLS - 1)
    data.cell(number)["job_id"] = 7 << 48 | 1 << 32 | 1
    lose_reference(data, "mail/1")
    return f"cell {number}"


def repair_not_ended(data: Bytes) -> str:
    data.ring("back-2")[0]["due"] = 7 << 1 | 1
    return "ring back-2"


def laps_apart(data: Bytes) -> str:
    data.ring("submit-2")[1][5] = 9 << LAP_SHIFT
    return "ring submit-2"


def a_hole(data: Bytes) -> str:
    """A full place behind one that still waits."""
    places = data.ring("submit-0")[1]
    places[7] = 1 << (LAP_SHIFT - 1)
    return "ring submit-0"


def mailbox_laps_apart(data: Bytes) -> str:
    data.ring("mail/1")[1][20] = 9 << LAP_SHIFT
    return "mailbox 1"


def tail_ahead(data: Bytes) -> str:
    data.ring("back-1")[0]["tail"] += 1
    return "ring back-1"


def tail_behind(data: Bytes) -> str:
    data.ring("back-1")[0]["tail"] -= 2
    return "ring back-1"


def head_ahead(data: Bytes) -> str:
    data.ring("submit-1")[0]["head"] += 1
    return "ring submit-1"


def head_behind(data: Bytes) -> str:
    data.ring("submit-0")[0]["head"] -= 2
    return "ring submit-0"


def dead_participant(data: Bytes) -> str:
    data.records["status"][4] = 1 << 8 | SlotState.USED
    return "participant 5"


def dead_participant_half_rescued(data: Bytes) -> str:
    data.records["status"][4] = 1 << 8 | SlotState.DYING
    return "participant 5"


def taken_by_one_who_never_was(data: Bytes) -> str:
    number = short_job(data)
    data.put(number, CellState.TAKEN, 9)
    return f"cell {number}"


def job_at_another_priority(data: Bytes) -> str:
    number = short_job(data)
    data.cell(number)["priority"] = 0
    return f"cell {number}"


def result_in_the_mailbox_of_another(data: Bytes) -> str:
    number = short_result(data)
    data.cell(number)["job_id"] = 7 << 48 | 1 << 32 | 1
    return f"cell {number}"


def block_of_one_who_never_was(data: Bytes) -> str:
    data.smallest_blocks[9] = 1 << 20 | 9 << 4 | BlockState.OWNED
    return "block 4096/9"


def block_of_an_earlier_incarnation(data: Bytes) -> str:
    """Participant 1 is the client, in its first incarnation."""
    data.smallest_blocks[9] = 7 << 20 | 1 << 4 | BlockState.OWNED
    return "block 4096/9"


def block_in_an_unknown_state(data: Bytes) -> str:
    data.smallest_blocks[9] = 0xF
    return "block 4096/9"


def free_block_with_more_in_its_word(data: Bytes) -> str:
    data.smallest_blocks[9] = 1 << 20 | BlockState.FREE_BACKED
    return "block 4096/9"


def long_job_taken_by_one_who_never_was(data: Bytes) -> str:
    number = long_job(data)
    data.put(number, CellState.TAKEN, 9)
    return f"cell {number}"


def collected_by_one_who_never_was(data: Bytes) -> str:
    data.put(9, CellState.COLLECTED, 9)
    return "cell 9"


REPAIRABLE: dict[str, list[Callable[[Bytes], str]]] = {
    "state": [unknown_state],
    "owner": [
        taken_by_no_participant,
        written_by_nobody,
        taken_by_one_who_never_was,
        long_job_taken_by_one_who_never_was,
        collected_by_one_who_never_was,
    ],
    "reference": [
        job_without_reference,
        job_at_another_priority,
        result_in_the_mailbox_of_another,
        result_without_reference,
        letter_without_reference,
        result_of_a_client_without_mailbox,
    ],
    "due": [repair_not_ended],
    "places": [laps_apart, a_hole, mailbox_laps_apart],
    "hints": [tail_ahead, tail_behind, head_ahead, head_behind],
    "participant": [dead_participant, dead_participant_half_rescued],
    "block": [
        block_of_one_who_never_was,
        block_of_an_earlier_incarnation,
        block_in_an_unknown_state,
        free_block_with_more_in_its_word,
    ],
}
# The client's timer would be faster than the check.
NEEDS_NOBODY = {"participant"}


@pytest.mark.parametrize(
    ("kind", "craft"),
    [pytest.param(kind, craft, id=craft.__name__) for kind in REPAIRABLE for craft in REPAIRABLE[kind]],
)
def test_what_can_be_repaired_is_found_and_repaired(
    client: JobQueue, path: Path, kind: str, craft: Callable[[Bytes], str]
) -> None:
    if kind in NEEDS_NOBODY:
        client.close()
    where = craft(Bytes(path))
    assert found(path) == {(kind, where)}
    code, report = check(path, "--repair")
    assert (code, report["faults"]) == (1, [])
    assert [(fault["kind"], fault["where"]) for fault in report["repaired"]] == [(kind, where)]
    assert check(path) == (0, {"queue": str(path), "sound": True, "faults": [], "repaired": []})


def test_a_repair_loses_no_job(at_rest: Path) -> None:
    data = Bytes(at_rest)
    for craft in (laps_apart, tail_ahead, repair_not_ended, job_without_reference, dead_participant):
        craft(data)
    os.unlink(at_rest / "back-0")
    assert check(at_rest, "--repair")[0] == 1
    with JobQueue.open(at_rest) as queue:
        claims = [queue.claim(0), queue.claim(0)]
        assert [len(claim.payload) for claim in claims] == [10 + 5, 10 + 3000]


def test_a_job_in_the_hands_of_nobody_is_repaired_with_its_block(at_rest: Path) -> None:
    data = Bytes(at_rest)
    job_id = int(data.cell(long_job(data))["job_id"][0])
    long_job_taken_by_one_who_never_was(data)
    assert check(at_rest, "--repair")[0] == 1
    with JobQueue.open(at_rest) as queue:
        claims = [queue.claim(0), queue.claim(0)]
        assert [(claim.job_id == job_id, claim.tobytes()[10:]) for claim in claims] == [
            (False, b"short"),
            (True, b"l" * 3000),
        ]


def test_a_result_in_the_mailbox_of_another_client_reaches_its_own(client: JobQueue, path: Path) -> None:
    data = Bytes(path)
    with JobQueue.open(path) as other:
        other.recv_many(0)
        other_id = other.submit(Pass(1, b"other"), priority=0)
        client.claim(0).reply(encode_result(0, b"for the other"))
        _, places = data.ring(f"mail/{other.slot + 1}")
        number = int(places[0]) & (CELLS - 1)
        # into the mailbox of the client, behind its own results
        reference = int(places[0])
        lose_reference(data, f"mail/{other.slot + 1}")
        of_the_client, places = data.ring("mail/1")
        places[int(of_the_client["tail"][0])] = reference
        of_the_client["tail"] += 1
        assert found(path) == {("reference", f"cell {number}")}
        assert check(path, "--repair")[0] == 1
        result = other.recv(WAIT_S)
        assert (result.token, result.result) == (other_id, b"for the other")
        assert [result.result for result in client.recv_many(5)] == [b"short", b"l" * 3000]
    assert check(path)[0] == 0


@pytest.mark.parametrize("word", [0xF, 1 << 20 | BlockState.FREE_BACKED, 7 << 20 | 1 << 4 | BlockState.OWNED])
def test_a_block_whose_word_was_lost_goes_back_to_the_job_or_result_that_lies_in_it(
    client: JobQueue, path: Path, word: int
) -> None:
    data = Bytes(path)
    job, result = long_job(data), long_result(data)
    for block in (data.cell(job)["job_block"], data.cell(result)["result_block"]):
        data.smallest_blocks[int(block[0]) & 0xFFFF] = word
    assert {kind for kind, _ in found(path)} == {"block", "job", "result"}
    assert check(path, "--repair")[0] == 1
    claims = [client.claim(0), client.claim(0)]
    assert [claim.tobytes()[10:] for claim in claims] == [b"short", b"l" * 3000]
    assert [result.result for result in client.recv_many(5)] == [b"short", b"l" * 3000]


def test_a_block_of_a_dead_participant_is_found_and_given_back(at_rest: Path) -> None:
    data = Bytes(at_rest)
    dead_participant(data)
    data.smallest_blocks[9] = 1 << 20 | 5 << 4 | BlockState.OWNED
    assert found(at_rest) == {("participant", "participant 5"), ("block", "block 4096/9")}
    assert check(at_rest, "--repair")[0] == 1
    assert data.smallest_blocks[9] == BlockState.FREE_HOLE


@pytest.mark.parametrize("name", sorted(set(FILES) - {"pool", "arena"}))
def test_a_missing_file_is_found_and_made_anew(at_rest: Path, name: str) -> None:
    os.unlink(at_rest / name)
    code, report = check(at_rest)
    assert code == 2
    assert ("missing", f"file {name}") in {(fault["kind"], fault["where"]) for fault in report["faults"]}
    assert check(at_rest, "--repair")[0] == 1
    assert check(at_rest)[0] == 0


DIES_OVER_A_JOB = """
    queue = JobQueue.open(sys.argv[1])
    claim = queue.claim(60)
    claim.started()
    print(flush=True)
    time.sleep(600)
"""


def test_what_a_killed_worker_has_left_is_found_and_moved_on(at_rest: Path) -> None:
    with start(DIES_OVER_A_JOB, at_rest) as worker:
        assert worker.stdout is not None
        worker.stdout.readline()
        assert found(at_rest) == set()
        worker.kill()
    data = Bytes(at_rest)
    [cell] = data.cells_in(CellState.TAKEN)
    number = int(data.cell(cell)["word"][0]) & 0xFFFF
    assert found(at_rest) == {("owner", f"cell {cell}"), ("participant", f"participant {number}")}
    assert f"process {worker.pid}" in CliRunner().invoke(cli, ["check", str(at_rest)]).stdout
    assert check(at_rest, "--repair")[0] == 1
    assert check(at_rest)[0] == 0
    with JobQueue.open(at_rest) as queue:
        assert queue.claim(0).attempts == 1


# --- faults that stay -------------------------------------------------------------------------------------------------


def job_longer_than_its_area(data: Bytes) -> str:
    number = short_job(data)
    data.cell(number)["job_length"] = 193
    return f"cell {number}"


def job_shorter_than_its_header(data: Bytes) -> str:
    number = long_job(data)
    data.cell(number)["job_length"] = 9
    return f"cell {number}"


def job_longer_than_its_block(data: Bytes) -> str:
    number = long_job(data)
    data.cell(number)["job_length"] = 4097
    return f"cell {number}"


def job_in_a_block_of_another(data: Bytes) -> str:
    number = short_job(data)
    data.cell(number)["job_block"] = data.cell(long_job(data))["job_block"]
    return f"cell {number}"


def job_in_a_block_that_does_not_exist(data: Bytes) -> str:
    number = long_job(data)
    data.cell(number)["job_block"] += ARENA // MIN_BLOCK_BYTES
    return f"cell {number}"


def job_in_a_class_that_does_not_exist(data: Bytes) -> str:
    number = long_job(data)
    data.cell(number)["job_block"] += 30 << 32
    return f"cell {number}"


def job_in_an_earlier_version_of_its_block(data: Bytes) -> str:
    number = long_job(data)
    data.smallest_blocks[int(data.cell(number)["job_block"][0]) & 0xFFFF] += 1 << 24
    return f"cell {number}"


def result_longer_than_its_area(data: Bytes) -> str:
    number = short_result(data)
    data.cell(number)["result_length"] = 193
    return f"cell {number}"


def result_in_a_freed_block(data: Bytes) -> str:
    number = long_result(data)
    data.smallest_blocks[int(data.cell(number)["result_block"][0]) & 0xFFFF] = BlockState.FREE_BACKED
    return f"cell {number}"


BROKEN: dict[str, list[Callable[[Bytes], str]]] = {
    "job": [
        job_longer_than_its_area,
        job_shorter_than_its_header,
        job_longer_than_its_block,
        job_in_a_block_of_another,
        job_in_a_block_that_does_not_exist,
        job_in_a_class_that_does_not_exist,
        job_in_an_earlier_version_of_its_block,
    ],
    "result": [result_longer_than_its_area, result_in_a_freed_block],
}


@pytest.mark.parametrize(
    ("kind", "craft"), [pytest.param(kind, craft, id=craft.__name__) for kind in BROKEN for craft in BROKEN[kind]]
)
def test_what_cannot_be_repaired_is_found_and_stays_broken(
    client: JobQueue, path: Path, kind: str, craft: Callable[[Bytes], str]
) -> None:
    where = craft(Bytes(path))
    assert found(path) == {(kind, where)}
    code, report = check(path, "--repair")
    assert (code, report["repaired"]) == (2, [])
    assert [(fault["kind"], fault["where"]) for fault in report["faults"]] == [(kind, where)]


def test_a_missing_arena_is_made_anew_and_what_lay_in_it_is_said_to_be_lost_until_it_has_been_answered(
    at_rest: Path,
) -> None:
    os.unlink(at_rest / "arena")
    assert check(at_rest)[0] == 2
    code, report = check(at_rest, "--repair")
    assert code == 2
    assert [fault["kind"] for fault in report["repaired"]] == ["missing"]
    assert [fault["kind"] for fault in report["faults"]] == ["job"]
    assert "its bytes are lost, and its submitter will be told so" in report["faults"][0]["text"]
    assert check(at_rest, "--repair")[0] == 2
    with JobQueue.open(at_rest) as queue:
        claim = queue.claim(0)
        assert claim.tobytes()[10:] == b"short"
        with pytest.raises(Empty):
            queue.claim(0)
    assert check(at_rest)[0] == 0


DAMAGES: dict[str, Callable[[bytes], bytes]] = {
    "empty": lambda _contents: b"",
    "a header alone": lambda contents: contents[:64],
    "cut by a byte": lambda contents: contents[:-1],
    "too long": lambda contents: contents + b"\0",
    "random": lambda contents: random.Random(1).randbytes(len(contents)),
    "zeros": lambda contents: bytes(len(contents)),
    "random behind its header": lambda contents: contents[:64] + random.Random(2).randbytes(len(contents) - 64),
}


@pytest.mark.parametrize("how", DAMAGES)
@pytest.mark.parametrize("name", FILES)
def test_a_damaged_file_is_broken_named_and_left_alone(path: Path, name: str, how: str) -> None:
    JobQueue.create(path, CELLS, participants=PARTICIPANTS, arena_bytes=4096).close()
    bad = DAMAGES[how]((path / name).read_bytes())
    (path / name).write_bytes(bad)
    if how == "random behind its header" and name != "pool":
        # by its header a file of the queue, and some of what lies in it may even be repaired; no mailbox is in use
        assert check_queue(path, pause=0.0).exit_code == (0 if name == "mail" else 2)
        check_queue(path, pause=0.0, repair=True)
        return
    assert found(path) == {("damaged", f"file {name}")}
    report = check_queue(path, pause=0.0, repair=True)
    assert report.exit_code == 2
    assert {fault.kind for fault in report.faults} == {"damaged", "repair"}
    assert (path / name).read_bytes() == bad


def test_a_file_of_another_queue_is_broken(at_rest: Path, tmp_path: Path) -> None:
    JobQueue.create(tmp_path / "other", CELLS, participants=PARTICIPANTS, arena_bytes=ARENA).close()
    for name in sorted(set(FILES) - {"pool"}):
        shutil.move(at_rest / name, tmp_path / "kept")
        shutil.copy(tmp_path / "other" / name, at_rest / name)
        assert found(at_rest) == {("foreign", f"file {name}")}
        assert check(at_rest, "--repair")[0] == 2
        shutil.move(tmp_path / "kept", at_rest / name)
    assert check(at_rest)[0] == 0


def test_a_pool_with_another_number_in_its_second_line_is_broken(at_rest: Path) -> None:
    pool = Bytes(at_rest).of("pool")
    pool[64 + QUEUE_GEOMETRY.fields["quota"][1]] ^= 1
    assert found(at_rest) == {("damaged", "file pool")}


def test_a_file_of_another_kind_is_broken(at_rest: Path) -> None:
    shutil.copy(at_rest / "submit-0", at_rest / "table")
    assert found(at_rest) == {("damaged", "file table")}


def test_a_missing_pool_is_broken_and_nothing_is_made(at_rest: Path) -> None:
    os.unlink(at_rest / "pool")
    before = sorted(os.listdir(at_rest))
    code, report = check(at_rest, "--repair")
    assert code == 2
    assert [fault["kind"] for fault in report["faults"]] == ["missing", "repair"]
    assert sorted(os.listdir(at_rest)) == before


def make_directory(where: Path) -> None:
    where.mkdir()


def make_file(where: Path) -> None:
    where.write_bytes(b"text")


def make_loop(where: Path) -> None:
    where.symlink_to(where)


def make_directory_of_directories(where: Path) -> None:
    for name in FILES:
        (where / name).mkdir(parents=True)


def make_directory_of_pipes(where: Path) -> None:
    where.mkdir()
    for name in FILES:
        os.mkfifo(where / name)


@pytest.mark.parametrize(
    "make", [None, make_directory, make_file, make_loop, make_directory_of_directories, make_directory_of_pipes]
)
@pytest.mark.parametrize("options", [[], ["--repair"]])
def test_what_is_no_queue_is_broken_without_a_traceback(
    path: Path, make: Callable[[Path], None] | None, options: list[str]
) -> None:
    if make is not None:
        make(path)
    ran = CliRunner().invoke(cli, ["check", str(path), *options])
    assert ran.exit_code == 2
    assert isinstance(ran.exception, SystemExit)
    assert "BROKEN: file pool: " in ran.stdout


@pytest.mark.parametrize("name", FILES)
def test_a_file_that_may_not_be_read_is_broken(at_rest: Path, monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    # Said by the kernel in the place of permissions, which do not bind the superuser.
    whole = os.open

    def refuse(path: Any, *args: Any, **options: Any) -> int:
        if os.fsencode(path).endswith(b"/" + name.encode()):
            raise PermissionError(13, "Permission denied")
        return whole(path, *args, **options)

    monkeypatch.setattr(os, "open", refuse)
    assert ("unreadable", f"file {name}") in found(at_rest)
    assert check(at_rest, "--repair")[0] == 2


# --- what is printed ----------------------------------------------------------------------------------------------------


def test_each_fault_is_one_line_and_the_last_line_is_the_verdict(at_rest: Path) -> None:
    assert CliRunner().invoke(cli, ["check", str(at_rest)]).stdout == f"{at_rest}: sound\n"
    unknown_state(Bytes(at_rest))
    lines = CliRunner().invoke(cli, ["check", str(at_rest)]).stdout.splitlines()
    assert lines[0].startswith("BROKEN: cell 9: state: no such state: 13 ")
    assert lines[1:] == [f"{at_rest}: broken, 1 fault"]
    lines = CliRunner().invoke(cli, ["check", str(at_rest), "--repair"]).stdout.splitlines()
    assert lines[0].startswith("repaired: cell 9: state: no such state: 13 ")
    assert lines[1:] == [f"{at_rest}: sound, 1 repaired"]


def test_names_are_escaped(tmp_path: Path) -> None:
    name = os.fsencode(tmp_path) + b"/\xff\x1b[31m\n"
    ran = subprocess.run(
        [sys.executable, "-c", "from subetha.cli import main; main()", "check", name],
        env=environment(),
        capture_output=True,
        check=False,
    )
    assert (ran.returncode, ran.stderr) == (2, b"")
    assert b"\x1b" not in ran.stdout
    assert len(ran.stdout.splitlines()) == 2
    assert b"\\x1b[31m\\n" in ran.stdout


def test_a_fault_shows_no_words_in_json() -> None:
    assert list(Fault("state", "cell 1", "text", (1, 2)).as_dict()) == ["kind", "where", "text"]

"""`subetha status`: what a queue holds, who takes part, and which jobs run, whatever others have written into it."""

import json
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator
from datetime import datetime
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
from click.testing import CliRunner, Result

from subetha._core import encode_result
from subetha.cli import cli
from subetha.errors import Empty
from subetha.jobqueue import JobQueue
from subetha.layout import (
    JOB_CELL,
    LINES_OFFSET,
    PARTICIPANT,
    POOL_LINES,
    STATE_SHIFT,
    TABLE_LINES,
    VERSION_SHIFT,
    CellState,
    Role,
    align,
    cell_word,
)
from subetha.pass_registry import Pass

WAIT_S = 60
CELLS, PARTICIPANTS, ARENA = 64, 16, 2**20

KEYS = (
    "queue durability cells free waiting waiting_by_priority running parked parked_unknown next_due next_due_s done kept other "
    "states arena_bytes arena_backed_bytes max_participants participants jobs"
).split()
PARTICIPANT_KEYS = "number pid role completed in_hand silent_s".split()
JOB_KEYS = "job_id closure_id attempt max_attempts participant pid running_s timeout_s progress".split()

HOLDS_ONE_JOB = """
import sys, time
from subetha.errors import Empty
from subetha.jobqueue import JobQueue
from subetha.layout import Role
queue = JobQueue.open(sys.argv[1], role=Role.WORKER)
claim = queue.claim(60)
claim.started()
print(flush=True)
time.sleep(600)
"""


def environment() -> dict[str, str]:
    return os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)}


def run(*arguments: object) -> Result:
    ran = CliRunner().invoke(cli, ["status", *map(str, arguments)], env={"COLUMNS": "120"})
    assert ran.exception is None or isinstance(ran.exception, SystemExit), ran.exception
    return ran


def status_of(path: Path) -> dict[str, Any]:
    """The JSON object; the tables have been printed without an error, too."""
    assert run(path).exit_code == 0
    ran = run(path, "--json")
    assert ran.exit_code == 0
    found = json.loads(ran.stdout)
    assert isinstance(found, dict)
    return found


def shown(path: Path) -> dict[str, str]:
    """The first word of each line that the tables have, with the rest of the line."""
    ran = run(path)
    assert (ran.exit_code, ran.stderr) == (0, "")
    words = [line.split(maxsplit=1) for line in ran.stdout.splitlines() if " " in line.strip()]
    return {first: rest.strip() for first, rest in words}


@pytest.fixture
def path(shm: Path) -> Path:
    return shm / "queue"


@pytest.fixture
def client(path: Path) -> Iterator[JobQueue]:
    with JobQueue.create(path, CELLS, participants=PARTICIPANTS, arena_bytes=ARENA) as queue:
        yield queue


@pytest.fixture
def worker(client: JobQueue, path: Path) -> Iterator[JobQueue]:
    with JobQueue.open(path, role=Role.WORKER) as queue:
        yield queue


def cells_of(path: Path) -> npt.NDArray[Any]:
    """The cells as a misbehaving peer may write them."""
    fields = JOB_CELL.fields
    assert fields is not None
    kind = np.dtype(
        {
            "names": list(fields),
            "formats": [field[0] for field in fields.values()],
            "offsets": [field[1] for field in fields.values()],
            "itemsize": align(JOB_CELL.itemsize + 192 + 192, 64),
        }
    )
    contents = np.asarray(np.memmap(path / "pool", np.uint8, "r+"))
    return contents[LINES_OFFSET + POOL_LINES.itemsize :].view(kind)


def records_of(path: Path) -> npt.NDArray[Any]:
    """The participants' records, to be written."""
    at = LINES_OFFSET + TABLE_LINES.itemsize
    contents = np.asarray(np.memmap(path / "table", np.uint8, "r+"))
    return contents[at : at + PARTICIPANTS * PARTICIPANT.itemsize].view(PARTICIPANT)


# --- what it shows ----------------------------------------------------------------------------------------------------


def test_the_json_object_has_its_keys_and_counts(client: JobQueue, worker: JobQueue, path: Path) -> None:
    for priority in (0, 1, 1, 2, 2, 2):
        client.submit(Pass(1, b"job"), priority=priority)
    done, running = worker.claim(WAIT_S), worker.claim(WAIT_S)
    done.reply(encode_result(0, b"result"))
    running.started()
    client.submit(Pass(1, bytes(5000)), priority=2)
    found = status_of(path)
    assert list(found) == KEYS
    assert (found["queue"], found["durability"]) == (str(path), "process")
    assert (found["cells"], found["free"], found["running"], found["done"], found["other"]) == (64, 57, 1, 1, 0)
    assert (found["waiting"], found["waiting_by_priority"]) == (5, [0, 1, 4])
    assert found["states"] == {"FREE": 57, "READY": 5, "TAKEN": 1, "DONE": 1}
    assert (found["parked"], found["parked_unknown"], found["next_due"], found["next_due_s"]) == (0, 0, None, None)
    assert (found["arena_bytes"], found["arena_backed_bytes"]) == (ARENA, client.arena_backed_bytes)
    assert found["arena_backed_bytes"] > 0
    assert (found["max_participants"], len(found["participants"]), len(found["jobs"])) == (PARTICIPANTS, 2, 1)
    assert [list(one) for one in found["participants"]] == [PARTICIPANT_KEYS] * 2
    assert [list(job) for job in found["jobs"]] == [JOB_KEYS]
    rows = shown(path)
    assert rows["waiting"] == "5 (by priority: 0 at 0, 1 at 1, 4 at 2)"
    assert rows["free"] == "57 of 64 cells"
    assert rows["arena"] == f"{client.arena_backed_bytes:,} of 1,048,576 bytes backed"
    assert rows["durability"] == "process"


def test_a_running_job_is_shown_with_its_attempt_its_times_and_its_progress(
    client: JobQueue, worker: JobQueue, path: Path
) -> None:
    first = client.submit(Pass(4294967295, b"job"), timeout=600, max_attempts=5)
    second = client.submit(Pass(17, b"job"))
    before = time.time_ns()
    claims = [worker.claim(WAIT_S) for _ in range(2)]
    for claim in claims:
        claim.started()
    claims[0].progress(300, 1000)
    job, other = status_of(path)["jobs"]
    assert (job["job_id"], job["closure_id"], job["attempt"], job["max_attempts"]) == (first, 4294967295, 1, 5)
    assert (job["participant"], job["pid"], job["timeout_s"]) == (worker.slot + 1, os.getpid(), 600)
    assert job["progress"] == {"done": 300, "total": 1000}
    assert 0 <= other["running_s"] <= job["running_s"] <= (time.time_ns() - before) / 1e9 + 0.001
    assert (other["job_id"], other["closure_id"]) == (second, 17)
    assert (other["timeout_s"], other["progress"]) == (None, None)
    cells = cells_of(path)
    cells["started_ns"][cells["job_id"] == second] -= 3600 * 10**9
    rows = shown(path)
    closure, *attempt, pid, _, timeout, progress = rows[str(first)].split()
    assert (closure, attempt, pid) == ("4294967295", ["1", "of", "5"], str(os.getpid()))
    assert (timeout, progress) == ("600.0", "300/1000")
    assert rows[str(second)].split()[-3].startswith("3,60"), "seconds since its start"
    assert rows[str(second)].split()[-2:] == ["-", "-"]
    assert [job["job_id"] for job in status_of(path)["jobs"]] == [second, first], "the longest running comes first"


def test_the_closure_id_of_a_job_in_a_block_is_left_out(client: JobQueue, worker: JobQueue, path: Path) -> None:
    job_id = client.submit(Pass(17, bytes(5000)))
    claim = worker.claim(WAIT_S)
    [job] = status_of(path)["jobs"]
    assert (job["job_id"], job["closure_id"]) == (job_id, None)
    assert shown(path)[str(job_id)].split()[0] == "-"
    claim.ack()


def test_an_attempt_that_was_not_started_has_no_time_and_nothing_of_the_one_before(
    client: JobQueue, worker: JobQueue, path: Path
) -> None:
    job_id = client.submit(Pass(17, b"job"))
    claim = worker.claim(WAIT_S)
    claim.started()
    claim.progress(5, 10)
    claim.retry()
    again = worker.claim(WAIT_S)
    assert again.job_id == job_id
    [job] = status_of(path)["jobs"]
    assert (job["job_id"], job["attempt"], job["running_s"], job["progress"]) == (job_id, 1, None, None)
    assert shown(path)[str(job_id)].split() == ["17", "1", "of", "3", str(os.getpid()), "-", "-", "-"]
    again.started()
    [job] = status_of(path)["jobs"]
    assert (job["attempt"], job["progress"]) == (2, None)
    assert job["running_s"] is not None


def test_participants_are_shown_with_what_they_have_in_hand(client: JobQueue, worker: JobQueue, path: Path) -> None:
    ids = [client.submit(Pass(1, b"job")) for _ in range(3)]
    worker.claim(WAIT_S).reply(encode_result(0, b"result"))
    worker.heartbeat.add_completed(worker.slot)
    claims = [worker.claim(WAIT_S) for _ in range(2)]
    one, other = status_of(path)["participants"]
    assert (one["number"], one["pid"], one["role"], one["completed"]) == (client.slot + 1, os.getpid(), "client", 0)
    assert one["in_hand"] == []
    assert (other["number"], other["role"], other["completed"]) == (worker.slot + 1, "worker", 1)
    assert sorted(other["in_hand"]) == sorted(ids[1:])
    assert shown(path)[str(worker.slot + 1)].split()[:4] == [str(os.getpid()), "worker", "1", "2"]
    for claim in claims:
        claim.ack()
    assert [len(one["in_hand"]) for one in status_of(path)["participants"]] == [0, 0]


def test_the_seconds_since_the_last_beat_are_shown(client: JobQueue, path: Path) -> None:
    # of a slot without a timer, which only the test lets beat
    slot = client.heartbeat.register(os.getpid(), Role.SUPERVISOR)
    before = client.heartbeat.global_epoch
    client.heartbeat.beat(slot)
    for _ in range(3):
        client.heartbeat.tick_global_epoch()
    [one] = [one for one in status_of(path)["participants"] if one["number"] == slot + 1]
    assert one["role"] == "supervisor"
    assert 3 <= one["silent_s"] <= client.heartbeat.global_epoch - before


def test_parked_jobs_are_counted_and_the_next_due_one_is_told(client: JobQueue, worker: JobQueue, path: Path) -> None:
    now = time.time()
    for due in (now + 7200, now + 3600, now + 9000):
        client.submit(Pass(1, b"job"), due=due)
    found = status_of(path)
    assert (found["parked"], found["parked_unknown"]) == (3, 0)
    assert datetime.fromisoformat(found["next_due"]).timestamp() == int(now + 3600)
    assert 0 < found["next_due_s"] <= 3600
    assert shown(path)["parked"].startswith(f"3 (next due {found['next_due']}, in 3,")
    client.submit(Pass(2, b"job"))
    worker.runs([1])
    assert worker.stats().waiting == 1
    with pytest.raises(Empty):
        worker.claim(0)
    next_due = found["next_due"]
    found = status_of(path)
    assert (found["parked"], found["parked_unknown"]) == (4, 1)
    assert found["next_due"] == next_due
    assert shown(path)["parked"].startswith("4 (1 for a worker that knows them; next due ")


def test_what_is_due_already_is_due_now(client: JobQueue, path: Path) -> None:
    client.submit(Pass(1, b"job"), due=time.time() + 3600)
    cells = cells_of(path)
    cells["due_ns"][(cells["word"] >> STATE_SHIFT) & 0xF == CellState.PARKED] = 10**18
    found = status_of(path)
    assert datetime.fromisoformat(found["next_due"]).timestamp() == 10**9
    assert found["next_due_s"] < 0
    assert shown(path)["parked"] == f"1 (next due {found['next_due']}, now)"


def test_a_job_whose_worker_is_dead_is_shown_without_a_pid(path: Path) -> None:
    JobQueue.create(path, CELLS, participants=PARTICIPANTS, arena_bytes=ARENA).close()
    with JobQueue.open(path) as queue:
        job_id = queue.submit(Pass(1, b"job"))
    with subprocess.Popen(
        [sys.executable, "-c", HOLDS_ONE_JOB, path], env=environment(), stdout=subprocess.PIPE
    ) as holder:
        try:
            assert holder.stdout is not None
            holder.stdout.readline()
            [job] = status_of(path)["jobs"]
            assert (job["job_id"], job["pid"]) == (job_id, holder.pid)
        finally:
            holder.kill()
    # nobody is there who would move it on
    found = status_of(path)
    assert found["participants"] == []
    [job] = found["jobs"]
    assert (job["job_id"], job["pid"]) == (job_id, None)
    assert shown(path)[str(job_id)].split()[4] == "-"


def test_it_changes_nothing(client: JobQueue, path: Path) -> None:
    client.submit(Pass(1, b"job"))
    client.submit(Pass(1, b"job"), due=time.time() + 3600)
    client.close()
    names = sorted(os.listdir(path))
    before = [(path / name).read_bytes() for name in names]
    status_of(path)
    assert sorted(os.listdir(path)) == names
    assert [(path / name).read_bytes() for name in names] == before


# --- what others may have written -------------------------------------------------------------------------------------


def test_fields_that_say_nonsense_are_shown_as_such_or_left_out(client: JobQueue, worker: JobQueue, path: Path) -> None:
    running, parked = client.submit(Pass(1, b"job")), client.submit(Pass(1, b"job"), due=time.time() + 3600)
    claim = worker.claim(WAIT_S)
    claim.started()
    cells = cells_of(path)
    [cell] = np.flatnonzero(cells["job_id"] == running)
    good = cells[cell].copy()
    for name in ("job_id", "attempts", "max_attempts", "timeout_ms", "started_ns", "progress", "priority", "due_ns"):
        for value in (0, 1, np.iinfo(cells.dtype[name]).max):
            cells[name][cell] = value
            [job] = status_of(path)["jobs"]
            if name == "started_ns":
                assert (job["running_s"] is None) == (int(value) > 1)
            cells[name][cell] = good[name]
    for value in (1, 2**64 - 1):
        cells["due_ns"][cells["job_id"] == parked] = value
        assert datetime.fromisoformat(status_of(path)["next_due"]).timestamp() == value // 10**9
    # an owner that can be none, and one that is not there
    for owner in (0, PARTICIPANTS, PARTICIPANTS + 1, 65_535):
        version = int(good["word"]) >> VERSION_SHIFT
        cells["word"][cell] = cell_word(version, CellState.TAKEN, owner)
        [job] = status_of(path)["jobs"]
        assert (job["job_id"], job["participant"], job["pid"]) == (running, owner, None)
    for state in range(16):
        cells["word"][cell] = cell_word(version, state, worker.slot + 1)
        found = status_of(path)
        assert len(found["jobs"]) == (state == CellState.TAKEN)
        assert sum(found["states"].values()) == CELLS
        if state > max(CellState):
            assert found["states"]["UNKNOWN"] == found["other"] == 1
            assert shown(path)["other"] == "1 (1 UNKNOWN)"
    cells["word"][cell] = good["word"]
    claim.ack()


def test_records_that_say_nonsense_are_shown_as_such_or_left_out(client: JobQueue, path: Path) -> None:
    # of a slot without a timer, so that nothing but the test writes into it
    slot = client.heartbeat.register(os.getpid(), Role.WORKER)
    records = records_of(path)
    good = records[slot].copy()
    for name, value in (("pid", 2**32 - 1), ("role", 77), ("completed", 2**64 - 1), ("last_seen_epoch", 2**64 - 1)):
        records[name][slot] = value
        [one] = [one for one in status_of(path)["participants"] if one["number"] == slot + 1]
        if name == "last_seen_epoch":
            assert one["silent_s"] is None
        elif name != "role":
            assert one[name] == value
        else:
            assert one["role"] == "77"
        records[name][slot] = good[name]
    for status in (0, 2, 255, 2**64 - 1):
        records["status"][slot] = status
        assert slot + 1 not in [one["number"] for one in status_of(path)["participants"]]
    records["status"][slot] = good["status"]


def test_random_bytes_in_every_cell_and_record_are_no_crash(client: JobQueue, path: Path) -> None:
    client.submit(Pass(1, b"job"))
    client.close()
    dice = np.random.default_rng(1)
    for _ in range(20):
        for contents in (cells_of(path), records_of(path)):
            raw = contents.view(np.uint8)
            raw[:] = dice.integers(0, 256, len(raw), np.uint8)
        found = status_of(path)
        assert sum(found["states"].values()) == CELLS
        assert len(found["jobs"]) == found["running"] == found["states"].get("TAKEN", 0)


# --- where it cannot look ---------------------------------------------------------------------------------------------


def test_where_there_is_no_queue_the_error_says_what_was_expected(client: JobQueue, path: Path, shm: Path) -> None:
    ran = run(shm / "nothing")
    assert (ran.exit_code, ran.stdout) == (1, "")
    assert ran.stderr.startswith("Error: cannot use the queue directory ")
    assert "expected a directory that 'subetha worker --queue' or JobQueue.create has made" in ran.stderr
    assert not (shm / "nothing").exists()
    (shm / "file").write_bytes(b"text")
    ran = run(shm / "file", "--json")
    assert (ran.exit_code, ran.stdout) == (1, "")
    assert ran.stderr.startswith("Error: cannot use the queue directory ")
    ran = run()
    assert ran.exit_code == 2
    assert "Missing argument 'DIR'" in ran.stderr


def test_a_queue_that_is_damaged_or_not_whole_is_an_error_and_left_alone(
    client: JobQueue, path: Path, shm: Path
) -> None:
    client.close()
    for name in sorted(os.listdir(path)):
        shutil.copytree(path, shm / "copy")
        (shm / "copy" / name).write_bytes(b"text")
        ran = run(shm / "copy")
        assert (ran.exit_code, ran.stdout) == (1, ""), name
        assert f"copy/{name}: expected at least 64 bytes" in ran.stderr
        assert (shm / "copy" / name).read_bytes() == b"text"
        (shm / "copy" / name).unlink()
        ran = run(shm / "copy")
        assert (ran.exit_code, ran.stdout) == (1, ""), name
        assert f"copy/{name}'" in ran.stderr
        assert "'subetha check' tells what is missing" in ran.stderr
        assert not (shm / "copy" / name).exists()
        shutil.rmtree(shm / "copy")


# --- the command ------------------------------------------------------------------------------------------------------


def test_help_imports_neither_numpy_nor_the_core() -> None:
    script = (
        "import sys\nfrom subetha.cli import cli\n"
        "cli([*sys.argv[1:], '--help'], prog_name='subetha', standalone_mode=False)\n"
        "sys.exit(', '.join({'numpy', 'rich', 'subetha._core', 'subetha.jobqueue'} & set(sys.modules)))\n"
    )
    for arguments in ([], ["status"]):
        ran = subprocess.run(
            [sys.executable, "-c", script, *arguments], env=environment(), capture_output=True, check=False
        )
        assert ran.stderr.strip() == b""
        assert b"status" in ran.stdout


def test_nothing_is_cut_off_where_the_output_is_narrow(client: JobQueue, worker: JobQueue, path: Path) -> None:
    job_id = client.submit(Pass(4294967295, b"job"), timeout=4_000_000)
    claim = worker.claim(WAIT_S)
    claim.started()
    claim.progress(2**32 - 1, 2**32 - 1)
    ran = CliRunner().invoke(cli, ["status", str(path)], env={"COLUMNS": "80"})
    assert ran.exit_code == 0
    assert str(job_id) in ran.stdout
    assert "…" not in ran.stdout
    assert "\x1b" not in ran.stdout


def test_results_that_are_kept_are_counted(client: JobQueue, worker: JobQueue, path: Path) -> None:
    client.submit(Pass(1, b"job"), result_ttl=1000)
    worker.claim(WAIT_S).reply(encode_result(0, b"kept"))
    assert client.recv(WAIT_S).result == b"kept"
    assert (status_of(path)["kept"], status_of(path)["other"], shown(path)["kept"]) == (1, 0, "1")

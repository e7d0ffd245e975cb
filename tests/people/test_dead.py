"""`subetha dead`: jobs whose workers died are listed, retried and dropped."""

import json
import os
import signal
import subprocess
import sys
from collections.abc import Callable
from datetime import datetime
from pathlib import Path

import pytest
from click.testing import CliRunner, Result

from subetha.cli import cli
from subetha.errors import Empty
from subetha.jobqueue import JobQueue
from subetha.pass_registry import Pass

WAIT_S = 60

DIES_OVER_ONE_JOB = """
import sys, time
from subetha.jobqueue import JobQueue
queue = JobQueue.open(sys.argv[1])
claim = queue.claim(60)
claim.started()
print(flush=True)
time.sleep(600)
"""


def environment(**more: str) -> dict[str, str]:
    return os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)} | more


def run(*arguments: object) -> Result:
    ran = CliRunner().invoke(cli, ["dead", *map(str, arguments)])
    assert ran.exception is None or isinstance(ran.exception, SystemExit), ran.output
    return ran


@pytest.fixture
def path(shm: Path) -> Path:
    return shm / "queue"


@pytest.fixture
def queue_of_letters(path: Path) -> Callable[..., list[int]]:
    """Make a queue with a dead letter for each way in which a worker may have ended; the job ids."""

    def make(*endings: int | None) -> list[int]:
        ids = []
        JobQueue.create(path, 64, participants=16, arena_bytes=2**20).close()
        for ending in endings:
            with JobQueue.open(path) as queue:
                ids.append(queue.submit(Pass(1, b"job"), max_attempts=1))
            with subprocess.Popen(
                [sys.executable, "-c", DIES_OVER_ONE_JOB, path], env=environment(), stdout=subprocess.PIPE
            ) as worker:
                assert worker.stdout is not None
                worker.stdout.readline()
                worker.kill()
            # nobody else was there to be faster
            with JobQueue.open(path) as queue:
                assert queue.rescue({} if ending is None else {worker.pid: ending}) == 1
        return ids

    return make


def ids_in(path: Path) -> list[int]:
    with JobQueue.open(path, readonly=True) as queue:
        return [letter.job_id for letter in queue.dead_letters()]


def waiting_in(path: Path) -> list[int]:
    """The jobs that wait, claimed and put back."""
    claims = []
    with JobQueue.open(path) as queue:
        try:
            while True:
                claims.append(queue.claim(0))
        except Empty:
            return [claim.job_id for claim in claims]


# --- list -------------------------------------------------------------------------------------------------------------


def test_the_list_shows_each_letter_with_how_its_worker_ended(
    queue_of_letters: Callable[..., list[int]], path: Path
) -> None:
    before = datetime.now().astimezone().replace(microsecond=0)
    ids = queue_of_letters(-signal.SIGKILL, 7, None, -99)
    after = datetime.now().astimezone()
    letters = json.loads(run("list", "--queue", path, "--json").stdout)
    assert [list(letter) for letter in letters] == [["job_id", "quarantined", "attempts", "submitted", "deaths"]] * 4
    assert [letter["job_id"] for letter in letters] == ids
    assert [letter["attempts"] for letter in letters] == [1] * 4
    for letter in letters:
        assert before <= datetime.fromisoformat(letter["submitted"]) <= after
        [death] = letter["deaths"]
        assert list(death) == ["when", "pid", "exit_code", "cause"]
        assert before <= datetime.fromisoformat(death["when"]) <= after
    causes = [(letter["deaths"][0]["exit_code"], letter["deaths"][0]["cause"]) for letter in letters]
    assert causes == [(-9, "SIGKILL"), (7, "exit code 7"), (None, "unknown"), (-99, "signal 99")]
    shown = run("list", "--queue", path).stdout
    for letter in letters:
        [row] = [line for line in shown.splitlines() if str(letter["job_id"]) in line]
        assert letter["submitted"] in row
        assert letter["deaths"][0]["cause"] in row


def test_times_are_those_of_the_local_zone(queue_of_letters: Callable[..., list[int]], path: Path) -> None:
    queue_of_letters(None)
    with JobQueue.open(path, readonly=True) as queue:
        [letter] = queue.dead_letters()
    ran = subprocess.run(
        [sys.executable, "-c", "from subetha.cli import main; main()", "dead", "list", "--queue", path, "--json"],
        env=environment(TZ="XST-05:45"),
        capture_output=True,
        check=True,
    )
    [shown] = json.loads(ran.stdout)
    assert shown["submitted"].endswith("+05:45")
    assert datetime.fromisoformat(shown["submitted"]).timestamp() == letter.submitted_ns // 10**9


def test_the_list_writes_no_control_codes_into_a_pipe(queue_of_letters: Callable[..., list[int]], path: Path) -> None:
    queue_of_letters(-signal.SIGTERM)
    ran = subprocess.run(
        [sys.executable, "-c", "from subetha.cli import main; main()", "dead", "list", "--queue", path],
        env=environment(FORCE_COLOR="1", TTY_COMPATIBLE="1"),
        capture_output=True,
        check=False,
    )
    assert (ran.returncode, ran.stderr) == (0, b"")
    assert b"SIGTERM" in ran.stdout
    assert b"\x1b" not in ran.stdout


def test_a_queue_without_letters_has_an_empty_list(queue_of_letters: Callable[..., list[int]], path: Path) -> None:
    queue_of_letters()
    assert json.loads(run("list", "--queue", path, "--json").stdout) == []
    ran = run("list", "--queue", path)
    assert ran.exit_code == 0
    assert "job id" in ran.stdout


# --- retry and drop ---------------------------------------------------------------------------------------------------


def test_a_letter_that_is_retried_waits_again_with_all_its_attempts(
    queue_of_letters: Callable[..., list[int]], path: Path
) -> None:
    first, second = queue_of_letters(None, None)
    ran = run("retry", second, "--queue", path)
    assert (ran.exit_code, ran.output) == (0, "")
    assert ids_in(path) == [first]
    with JobQueue.open(path) as queue:
        claim = queue.claim(0)
        assert (claim.job_id, claim.attempts) == (second, 0)
        claim.ack()


def test_a_letter_that_is_dropped_is_gone(queue_of_letters: Callable[..., list[int]], path: Path) -> None:
    first, second = queue_of_letters(None, None)
    ran = run("drop", first, "--queue", path)
    assert (ran.exit_code, ran.output) == (0, "")
    assert ids_in(path) == [second]
    assert waiting_in(path) == []


@pytest.mark.parametrize("what", ["retry", "drop"])
def test_several_ids_may_be_given_decimal_or_hexadecimal(
    queue_of_letters: Callable[..., list[int]], path: Path, what: str
) -> None:
    first, second = queue_of_letters(None, None)
    assert run(what, first, f"0x{second:X}", hex(first), "--queue", path).exit_code == 0
    assert ids_in(path) == []
    assert sorted(waiting_in(path)) == (sorted([first, second]) if what == "retry" else [])


@pytest.mark.parametrize("what", ["retry", "drop"])
def test_each_id_that_is_not_there_is_told_and_the_others_are_done(
    queue_of_letters: Callable[..., list[int]], path: Path, what: str
) -> None:
    [there] = queue_of_letters(None)
    ran = run(what, 17, there, "0xff", "--queue", path)
    assert ran.exit_code == 1
    assert ran.stdout == ""
    assert ran.stderr == f"{path}: no dead letter 17 (0x11)\n{path}: no dead letter 255 (0xff)\n"
    assert ids_in(path) == []
    assert waiting_in(path) == ([there] if what == "retry" else [])


@pytest.mark.parametrize("what", ["retry", "drop"])
def test_all_means_every_letter_there_is(queue_of_letters: Callable[..., list[int]], path: Path, what: str) -> None:
    ids = queue_of_letters(None, 3)
    assert run(what, "--all", "--queue", path).exit_code == 0
    assert ids_in(path) == []
    assert sorted(waiting_in(path)) == (sorted(ids) if what == "retry" else [])
    assert run(what, "--all", "--queue", path).exit_code == 0


@pytest.mark.parametrize("what", ["retry", "drop"])
@pytest.mark.parametrize("arguments", [[], ["--all", "17"]])
def test_either_ids_or_all_have_to_be_given(
    queue_of_letters: Callable[..., list[int]], path: Path, what: str, arguments: list[str]
) -> None:
    queue_of_letters()
    ran = run(what, *arguments, "--queue", path)
    assert ran.exit_code == 2
    assert "give either job ids or --all" in ran.stderr


@pytest.mark.parametrize("text", ["", "x", "0", "0x", "1.5", "18446744073709551616", "ff"])
def test_what_is_no_job_id_is_a_usage_error(path: Path, text: str) -> None:
    ran = run("drop", text, "--queue", path)
    assert ran.exit_code == 2
    assert f"{text!r} is no job id" in ran.stderr


@pytest.mark.parametrize("arguments", [["list"], ["retry", "17"], ["drop", "--all"]])
def test_what_is_no_queue_is_an_error_that_says_so(path: Path, arguments: list[str]) -> None:
    ran = run(*arguments, "--queue", path)
    assert ran.exit_code == 1
    assert ran.stderr.startswith("Error: cannot use the queue directory ")
    assert not path.exists()
    path.mkdir()
    (path / "pool").write_bytes(b"text")
    ran = run(*arguments, "--queue", path)
    assert ran.exit_code == 1
    assert "this is no Subetha file" in ran.stderr


@pytest.mark.parametrize("arguments", [["dead"], ["dead", "list"], ["dead", "retry"], ["dead", "drop"], ["check"]])
def test_help_imports_neither_numpy_nor_the_core(arguments: list[str]) -> None:
    script = (
        "import sys\nfrom subetha.cli import cli\n"
        "cli([*sys.argv[1:], '--help'], prog_name='subetha', standalone_mode=False)\n"
        "sys.exit(', '.join({'numpy', 'rich', 'subetha._core', 'subetha.jobqueue'} & set(sys.modules)))\n"
    )
    ran = subprocess.run(
        [sys.executable, "-c", script, *arguments], env=environment(), capture_output=True, check=False
    )
    assert ran.stderr.strip() == b""
    assert ran.stdout.startswith(b"Usage: subetha " + arguments[0].encode())

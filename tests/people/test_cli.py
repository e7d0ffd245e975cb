"""The command line as a program: exit codes, what goes to which stream, and what a terminal or a pipe gets."""

import json
import os
import pty
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest
from click.testing import CliRunner

import subetha
import subetha.demo
from subetha.cli import cli
from subetha.demo import DemoReport, Failure

JSON_KEYS = "files bytes seconds jobs_per_s failed mismatched redelivered duplicates lost killed".split()

PROGRAM = [sys.executable, "-c", "from subetha.cli import main; main()"]


def environment(**more: str) -> dict[str, str]:
    return os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)} | more


def run_program(*arguments: str | bytes, **more: str) -> subprocess.CompletedProcess[bytes]:
    return subprocess.run([*PROGRAM, *arguments], env=environment(**more), capture_output=True, check=False)


@pytest.fixture
def tree(tmp_path: Path) -> Path:
    folder = tmp_path / "tree"
    folder.mkdir()
    (folder / "a").write_bytes(b"one\ntwo three\n")
    (folder / "empty").write_bytes(b"")
    (folder / os.fsdecode(b"\xff\x1b[31m\n")).write_bytes(b"12345")
    return folder


@pytest.fixture
def report(monkeypatch: pytest.MonkeyPatch) -> Iterator[DemoReport]:
    """What `run_demo` reports in this process, for the test to fill in."""
    found = DemoReport()
    monkeypatch.setattr(subetha.demo, "run_demo", lambda *_args, **_options: found)
    before = signal.getsignal(signal.SIGTERM)
    yield found
    signal.signal(signal.SIGTERM, before)


# --- demo ---


def test_the_demo_prints_one_json_object_with_its_keys(tree: Path) -> None:
    ran = run_program("demo", "--no-kill", os.fsencode(tree), "--workers", "2", "--json")
    assert ran.returncode == 0, ran.stderr
    found = json.loads(ran.stdout)
    assert list(found) == JSON_KEYS
    assert (found["files"], found["bytes"], found["failed"], found["mismatched"]) == (3, 19, 0, 0)
    assert (found["redelivered"], found["duplicates"], found["lost"], found["killed"]) == (0, 0, 0, 0)
    assert found["seconds"] > 0
    assert found["jobs_per_s"] == pytest.approx(3 / found["seconds"], rel=1e-3)
    assert ran.stderr == b""


def test_the_demo_writes_no_control_codes_into_a_pipe(tree: Path) -> None:
    ran = run_program("demo", "--no-kill", os.fsencode(tree), "--workers", "1")
    assert ran.returncode == 0, ran.stderr
    assert b"\x1b" not in ran.stdout + ran.stderr
    assert b"\r" not in ran.stdout + ran.stderr
    for words in (b"files", b"mismatched", b"jobs_per_s"):
        assert words in ran.stdout


def test_the_demo_shows_a_progress_bar_on_a_terminal(tree: Path) -> None:
    screen, terminal = pty.openpty()
    with subprocess.Popen(
        [*PROGRAM, "demo", "--no-kill", os.fsencode(tree), "--workers", "1", "--json"],
        env=environment(TERM="xterm"),
        stdout=subprocess.PIPE,
        stderr=terminal,
    ) as process:
        os.close(terminal)
        shown = read_terminal(screen)
        assert process.stdout is not None
        found = json.loads(process.stdout.read())
    os.close(screen)
    assert process.returncode == 0
    assert found["files"] == 3
    assert b"hashing files" in shown
    assert b"/3" in shown


def read_terminal(screen: int, until: bytes | None = None) -> bytes:
    """Read what a terminal shows, until some words or until the last process has closed it."""
    shown = b""
    while until is None or until not in shown:
        try:
            shown += os.read(screen, 4096)
        except OSError:
            break
    return shown


@pytest.mark.parametrize("signum", [signal.SIGINT, signal.SIGTERM])
@pytest.mark.parametrize("group", [False, True], ids=["parent", "group"])
def test_a_stopped_demo_leaves_neither_workers_nor_its_queue_directory(
    tmp_path: Path, signum: int, group: bool
) -> None:
    # Reading it would take a worker many minutes.
    with open(tmp_path / "endless", "wb") as file:
        file.truncate(2**40)
    screen, terminal = pty.openpty()
    with subprocess.Popen(
        [*PROGRAM, "demo", "--no-kill", tmp_path, "--workers", "2"],
        env=environment(TERM="xterm"),
        stdout=subprocess.DEVNULL,
        stderr=terminal,
        start_new_session=True,
    ) as process:
        os.close(terminal)
        assert b"0/1" in read_terminal(screen, until=b"0/1")
        workers = psutil.Process(process.pid).children()
        [queue] = {worker.cmdline()[worker.cmdline().index("--queue") + 1] for worker in workers}
        assert len(workers) == 2
        assert os.path.isdir(queue)
        if group:
            os.killpg(process.pid, signum)
        else:
            process.send_signal(signum)
        read_terminal(screen)
    os.close(screen)
    assert process.returncode == 128 + signum
    assert not any(worker.is_running() for worker in workers)
    assert not os.path.exists(os.path.dirname(queue))


@pytest.mark.parametrize(("mismatches", "lost", "code"), [(0, 0, 0), (1, 0, 1), (0, 1, 1)])
def test_the_exit_code_is_0_exactly_if_all_agree_and_all_came_back(
    report: DemoReport, tree: Path, mismatches: int, lost: int, code: int
) -> None:
    report.failures = [Failure(b"/gone", "FileNotFoundError: No such file or directory")]
    report.mismatches = [b"/wrong"] * mismatches
    report.lost = lost
    report.problem = "the workers died" if lost else None
    ran = CliRunner().invoke(cli, ["demo", str(tree)])
    assert ran.exit_code == code
    assert "failed: /gone: FileNotFoundError: No such file or directory\n" in ran.stdout
    assert ("MISMATCHED: /wrong\n" in ran.stdout) == bool(mismatches)
    assert ("1 of 0 jobs did not come back: the workers died" in ran.stderr) == bool(lost)


def test_troubles_are_red_on_a_terminal_only_whatever_the_environment_asks_for(
    report: DemoReport, tree: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("FORCE_COLOR", "1")
    monkeypatch.setenv("TTY_COMPATIBLE", "1")
    report.mismatches = [b"/wrong"]
    ran = CliRunner().invoke(cli, ["demo", str(tree)])
    assert "mismatched" in ran.stdout
    assert "\x1b" not in ran.stdout


def test_with_json_the_failed_files_are_listed_on_standard_error(report: DemoReport, tree: Path) -> None:
    report.failures = [Failure(b"/\xff\n\x1b", "OSError: \x1b[2J")]
    ran = CliRunner().invoke(cli, ["demo", str(tree), "--json"])
    assert list(json.loads(ran.stdout)) == JSON_KEYS
    assert ran.stderr == "failed: /\\xff\\n\\x1b: OSError: \\x1b[2J\n"


def test_names_are_escaped_for_an_output_without_their_letters(tmp_path: Path) -> None:
    script = (
        "import sys, subetha.demo as demo\n"
        "from subetha.cli import cli\n"
        "failures = [demo.Failure('/größe'.encode(), 'OSError: schade')]\n"
        "demo.run_demo = lambda *args, **options: demo.DemoReport(failures=failures)\n"
        "cli(['demo', sys.argv[1]])\n"
    )
    ran = subprocess.run(
        [sys.executable, "-c", script, tmp_path],
        env=environment(PYTHONIOENCODING="ascii"),
        capture_output=True,
        check=False,
    )
    assert ran.returncode == 0, ran.stderr
    assert b"failed: /gr\\xf6\\xdfe: OSError: schade\n" in ran.stdout


@pytest.mark.parametrize(
    ("folder", "words"),
    [
        (b"", "''"),
        (b"no-such-folder-\xff", "'no-such-folder-\\xff'"),
        (b"/dev/null", "'/dev/null'"),
    ],
)
def test_a_folder_that_cannot_be_read_is_a_usage_error_that_names_it(folder: bytes, words: str) -> None:
    ran = run_program("demo", "--no-kill", folder)
    assert ran.returncode == 2
    assert words in ran.stderr.decode()
    assert "give an existing folder" in ran.stderr.decode()


def test_the_demo_needs_at_least_one_worker() -> None:
    ran = CliRunner().invoke(cli, ["demo", "--workers", "0"])
    assert ran.exit_code == 2
    assert "0 is not in the range 1<=x<=512" in ran.stderr


# --- worker ---


def test_the_worker_command_asks_for_modules_and_a_queue() -> None:
    assert "Missing argument 'MODULE...'" in CliRunner().invoke(cli, ["worker", "--queue", "q"]).stderr
    assert "Missing option '--queue'" in CliRunner().invoke(cli, ["worker", "handlers"]).stderr
    ran = CliRunner().invoke(cli, ["worker", "handlers", "--queue", "q", "--processes", "0"])
    assert ran.exit_code == 2
    assert "0 is not in the range 1<=x<=1024" in ran.stderr


@pytest.mark.parametrize("module", ["jobs/handlers.py", "two words", "", ".relative"])
def test_what_is_no_module_name_is_a_usage_error(module: str) -> None:
    ran = CliRunner().invoke(cli, ["worker", module, "--queue", "q"])
    assert ran.exit_code == 2
    assert f"{module!r} is no module name" in ran.stderr


def test_a_file_in_place_of_a_module_name_is_a_usage_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "handlers.py").write_text("")
    ran = CliRunner().invoke(cli, ["worker", "handlers.py", "--queue", "q"])
    assert ran.exit_code == 2
    assert "give the module's name, 'handlers'" in ran.stderr


def test_what_is_no_queue_directory_is_an_error_and_no_traceback(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    ran = run_program("worker", "handlers", "--queue", str(tmp_path / "file"), "--processes", "1")
    assert ran.returncode == 1
    assert ran.stderr.startswith(b"Error: ")
    assert b"Traceback" not in ran.stderr


# --- the group ---


@pytest.mark.parametrize("arguments", [["--help"], ["demo", "--help"], ["worker", "--help"]])
def test_help_imports_neither_numpy_nor_the_core(arguments: list[str]) -> None:
    script = (
        "import sys\nfrom subetha.cli import cli\ncli(sys.argv[1:], prog_name='subetha', standalone_mode=False)\n"
        "sys.exit(', '.join({'numpy', 'rich', 'subetha._core', 'subetha.pool', 'subetha.worker'} & set(sys.modules)))\n"
    )
    ran = subprocess.run(
        [sys.executable, "-c", script, *arguments], env=environment(), capture_output=True, check=False
    )
    assert ran.stderr.strip() == b""
    assert ran.stdout.startswith(b"Usage: subetha")


def test_help_names_the_commands() -> None:
    ran = CliRunner().invoke(cli, ["--help"])
    assert ran.exit_code == 0
    for command in ("demo", "worker"):
        assert f"  {command} " in ran.stdout


def test_a_command_that_does_not_exist_is_a_usage_error() -> None:
    ran = CliRunner().invoke(cli, ["dance"])
    assert ran.exit_code == 2
    assert "No such command 'dance'" in ran.stderr


def test_the_version_is_that_of_the_package() -> None:
    ran = CliRunner().invoke(cli, ["--version"])
    assert (ran.exit_code, ran.stdout) == (0, f"subetha {subetha.__version__}\n")

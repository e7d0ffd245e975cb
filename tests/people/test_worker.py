"""Worker processes and their supervisor: real processes, real signals, and pipes in place of sleeps."""

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner

from subetha import files
from subetha.cli import cli
from subetha.errors import Empty, LayoutMismatch, SubethaError
from subetha.jobqueue import JobQueue
from subetha.layout import WaitTag
from subetha.pass_registry import Pass
from subetha.pool import (
    QUICK_DEATH_SECONDS,
    QUICK_DEATHS_LIMIT,
    WorkerPool,
    WorkerPoolBroken,
    exit_cause,
    restart_delay,
    signals_deferred,
)
from subetha.worker import EXIT_CANNOT_START

HELD, PID, INTERRUPTED_ONCE, INTERRUPTED_TWICE, ENVIRONMENT, READS_INPUT, STRATEGY, IMPORTED = range(1, 9)

HANDLERS = """
import json, os, signal, sys
from subetha.pass_registry import register

def tell(folder, name, text=b"x"):
    with open(os.path.join(folder, name), "wb") as fifo:
        fifo.write(text)

def hear(folder, name):
    with open(os.path.join(folder, name), "rb") as fifo:
        return fifo.read()

@register(1)
def held(folder):
    tell(folder, b"started")
    return hear(folder, b"go")

@register(2)
def pid(_args):
    return str(os.getpid()).encode()

@register(3)
def interrupted_once(_args):
    signal.raise_signal(signal.SIGINT)
    signal.raise_signal(signal.SIGTERM)
    signal.raise_signal(signal.SIGTERM)
    return b"finished"

@register(4)
def interrupted_twice(folder):
    signal.raise_signal(signal.SIGINT)
    tell(folder, b"started", b"alive after the first")
    signal.raise_signal(signal.SIGINT)
    return b"alive after the second"

@register(5)
def environment(_args):
    return json.dumps([sys.path, os.environ.get("PYTHONPATH")]).encode()

@register(6)
def reads_input(_args):
    return b"input: " + sys.stdin.buffer.read()

@register(7)
def strategy(_args):
    import gc
    from subetha.jobqueue import JobQueue
    return str(next(one for one in gc.get_objects() if isinstance(one, JobQueue)).header.tag).encode()

@register(8)
def imported(_args):
    return " ".join(sys.modules).encode()
"""


class Clock:
    """Seconds that pass when the test says so."""

    def __init__(self) -> None:
        self.now = 1000.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def modules(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder on the path for the modules of a test, with `handlers` in it."""
    folder = tmp_path / "modules"
    folder.mkdir()
    (folder / "handlers.py").write_text(HANDLERS)
    monkeypatch.syspath_prepend(str(folder))
    return folder


@pytest.fixture
def queue(tmp_path: Path) -> Iterator[JobQueue]:
    with JobQueue.create(tmp_path / "queue", cells=64, arena_bytes=2**20) as queue:
        yield queue


@pytest.fixture
def fifos(tmp_path: Path) -> Path:
    folder = tmp_path / "fifos"
    folder.mkdir()
    for name in ("started", "go"):
        os.mkfifo(folder / name)
    return folder


@pytest.fixture
def worker(
    modules: Path, queue: JobQueue, monkeypatch: pytest.MonkeyPatch
) -> Iterator[Callable[..., subprocess.Popen[bytes]]]:
    """Starts one worker process, without a supervisor."""
    processes = []

    def start(*names: str, before: Callable[[], None] | None = None) -> subprocess.Popen[bytes]:
        command = [sys.executable, "-m", "subetha.worker", *(names or ("handlers",)), "--queue", str(queue.path)]
        environment = os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)}
        process = subprocess.Popen(command, env=environment, stderr=subprocess.PIPE, preexec_fn=before)
        processes.append(process)
        return process

    yield start
    for process in processes:
        with process:
            process.kill()


@pytest.fixture
def make_pool(modules: Path, queue: JobQueue) -> Iterator[Callable[..., WorkerPool]]:
    pools = []

    def make(*names: str, processes: int = 1, **options: object) -> WorkerPool:
        pool = WorkerPool(names or ("handlers",), queue.path, processes, **options)  # type: ignore[arg-type]
        pools.append(pool)
        return pool

    yield make
    for pool in pools:
        pool.kill()
        pool.stop()


def run_job(queue: JobQueue, closure_id: int, args: bytes = b"") -> bytes:
    queue.submit(Pass(closure_id, args))
    result = queue.recv(timeout=60).result
    assert isinstance(result, bytes), result
    return result


def say_go(fifos: Path, text: bytes = b"result") -> None:
    (fifos / "go").write_bytes(text)


def wait_for_start(fifos: Path) -> bytes:
    return (fifos / "started").read_bytes()


# --- one worker process ---


def test_a_worker_whose_jobs_come_seldom_stops_looking_for_the_next_one_before_it_sleeps(
    worker: Callable[..., subprocess.Popen[bytes]], queue: JobQueue
) -> None:
    process = worker()
    assert run_job(queue, STRATEGY) == b"%d" % WaitTag.BRIEF
    began = time.monotonic()
    while run_job(queue, STRATEGY) != b"%d" % WaitTag.SLEEP:
        assert time.monotonic() - began < 60
        time.sleep(0.002)
    process.terminate()
    assert process.wait() == 0


def test_a_worker_imports_nothing_that_only_its_supervisor_needs(make_pool, queue):
    make_pool().start()
    imported = set(run_job(queue, IMPORTED).decode().split())
    assert "subetha.scheduler" in imported
    assert not imported & {"multiprocessing", "subprocess", "subetha.pool"}


@pytest.mark.parametrize("signum", [signal.SIGTERM, signal.SIGINT])
def test_a_worker_told_to_stop_finishes_the_job_in_hand_and_claims_no_other(
    worker: Callable[..., subprocess.Popen[bytes]], queue: JobQueue, fifos: Path, signum: int
) -> None:
    process = worker()
    held = queue.submit(Pass(HELD, os.fsencode(fifos)))
    queue.submit(Pass(PID, b""))
    wait_for_start(fifos)
    process.send_signal(signum)
    say_go(fifos)

    assert process.wait() == 0
    result = queue.recv(timeout=60)
    assert (result.token, result.result) == (held, b"result")
    with pytest.raises(Empty):
        queue.recv(timeout=0)


def test_an_idle_worker_told_to_stop_exits_with_0(
    worker: Callable[..., subprocess.Popen[bytes]], queue: JobQueue
) -> None:
    process = worker()
    assert run_job(queue, PID) == str(process.pid).encode()
    process.terminate()
    assert process.wait() == 0


def test_an_interrupt_and_the_forwarded_terminate_are_one_wish_to_drain(
    worker: Callable[..., subprocess.Popen[bytes]], queue: JobQueue
) -> None:
    process = worker()
    assert run_job(queue, INTERRUPTED_ONCE) == b"finished"
    assert process.wait() == 0


def test_a_second_interrupt_ends_a_worker_at_once_with_130(
    worker: Callable[..., subprocess.Popen[bytes]], queue: JobQueue, fifos: Path
) -> None:
    process = worker()
    queue.submit(Pass(INTERRUPTED_TWICE, os.fsencode(fifos)))
    assert wait_for_start(fifos) == b"alive after the first"
    assert process.wait() == 130
    with pytest.raises(Empty):
        queue.recv(timeout=0)


def test_a_worker_told_to_stop_during_its_imports_exits_with_0(
    worker: Callable[..., subprocess.Popen[bytes]], modules: Path, fifos: Path
) -> None:
    (modules / "slow.py").write_text(
        f"open({str(fifos / 'started')!r}, 'wb').close()\nopen({str(fifos / 'go')!r}, 'rb').close()\n"
    )
    process = worker("slow")
    wait_for_start(fifos)
    process.terminate()
    assert process.wait() == 0


def test_a_module_that_swallows_the_wish_to_stop_during_its_import_delays_it_only(
    worker: Callable[..., subprocess.Popen[bytes]], modules: Path, fifos: Path
) -> None:
    (modules / "greedy.py").write_text(
        "import signal\ntry:\n    signal.raise_signal(signal.SIGTERM)\nexcept BaseException:\n    pass\n"
        f"open({str(fifos / 'started')!r}, 'wb').close()\n"
    )
    process = worker("greedy")
    wait_for_start(fifos)
    assert process.wait() == 0


@pytest.mark.parametrize("signum", [signal.SIGTERM, signal.SIGINT])
@pytest.mark.parametrize("during_import", [False, True])
def test_a_terminate_in_the_shutdown_of_a_drained_worker_changes_nothing(
    worker: Callable[..., subprocess.Popen[bytes]],
    queue: JobQueue,
    modules: Path,
    fifos: Path,
    signum: int,
    during_import: bool,
) -> None:
    (modules / "late.py").write_text(
        "import os, signal\n"
        "class Late:\n"
        "    def __del__(self, kill=os.kill, pid=os.getpid(), signum=signal.SIGTERM):\n"
        "        kill(pid, signum)\n"
        "late = Late()\n"
    )
    (modules / "slow.py").write_text(
        f"open({str(fifos / 'started')!r}, 'wb').close()\nopen({str(fifos / 'go')!r}, 'rb').close()\n"
    )
    if during_import:
        process = worker("late", "slow")
        wait_for_start(fifos)
    else:
        process = worker("late", "handlers")
        run_job(queue, PID)
    process.send_signal(signum)
    assert process.wait() == 0


@pytest.mark.parametrize("during_import", [False, True])
def test_both_signals_at_once_before_a_job_can_be_in_hand_are_one_wish_to_stop(
    worker: Callable[..., subprocess.Popen[bytes]], modules: Path, during_import: bool
) -> None:
    # Raised while both are blocked, they come in one look of Python's at its signals; the next look, which some versions
    # of Python take only when asked, would report one that lost its handler meanwhile.
    (modules / "both.py").write_text(
        "import atexit, signal\n"
        "atexit.register(signal.pthread_sigmask, signal.SIG_BLOCK, ())\n"
        "both = (signal.SIGTERM, signal.SIGINT)\n"
        "signal.pthread_sigmask(signal.SIG_BLOCK, both)\n"
        "for signum in both:\n"
        "    signal.raise_signal(signum)\n"
        "signal.pthread_sigmask(signal.SIG_UNBLOCK, both)\n"
    )

    def raise_both() -> None:
        signal.pthread_sigmask(signal.SIG_BLOCK, (signal.SIGTERM, signal.SIGINT))
        for signum in (signal.SIGTERM, signal.SIGINT):
            os.kill(os.getpid(), signum)

    process = worker("both") if during_import else worker(before=raise_both)
    _, stderr = process.communicate()
    assert (process.returncode, stderr) == (0, b"")


# A SIGTERM in the middle of signal.signal(SIGTERM, SIG_IGN), after the look at the signals that came before it: the
# number is asked for its value, which raises SIGCHLD; the look finds that one and calls its handler, which raises
# SIGTERM, whose turn in this look is over. No step is bytecode, between two of which Python would look again.
TERMINATED_WHILE_IGNORING = """
import _signal, ctypes, functools, os, signal

libc = ctypes.CDLL(None)
raise_terminate, raise_child = libc["raise"], libc["raise"]
raise_terminate.argtypes = [ctypes.c_int, ctypes.c_int, ctypes.py_object]
signal.signal(signal.SIGCHLD, functools.partial(raise_terminate, signal.SIGTERM))
real = signal.signal

class Terminate:
    __index__ = staticmethod(functools.partial(sum, map(raise_child, [int(signal.SIGCHLD)]), int(signal.SIGTERM)))

def terminated(signum, handler):
    if (signum, handler) == (signal.SIGTERM, signal.SIG_IGN):
        before = _signal.signal(Terminate(), int(handler))
        os.write(2, b"ignored\\n")
        return before
    return real(signum, handler)

signal.signal = terminated
"""


def test_a_terminate_in_the_moment_in_which_it_is_made_to_be_ignored_changes_nothing(
    worker: Callable[..., subprocess.Popen[bytes]], queue: JobQueue, modules: Path
) -> None:
    (modules / "at_once.py").write_text(TERMINATED_WHILE_IGNORING)
    process = worker("at_once", "handlers")
    run_job(queue, PID)
    process.send_signal(signal.SIGINT)
    _, stderr = process.communicate()
    assert (process.returncode, stderr) == (0, b"ignored\n")


@pytest.mark.parametrize(
    ("source", "words"),
    [
        ("import no_such_module_anywhere\n", b"ModuleNotFoundError: No module named 'no_such_module_anywhere'"),
        ("import sys\nsys.exit(0)\n", b"SystemExit: 0"),
    ],
)
def test_a_module_that_cannot_be_imported_shows_its_traceback_and_ends_the_worker(
    worker: Callable[..., subprocess.Popen[bytes]], modules: Path, source: str, words: bytes
) -> None:
    (modules / "broken.py").write_text(source)
    process = worker("broken")
    _, stderr = process.communicate()
    assert process.returncode == EXIT_CANNOT_START
    assert words in stderr
    assert b"broken.py" in stderr


# --- the supervisor ---


@pytest.mark.parametrize(
    ("quick_deaths", "seconds"),
    [(0, 0.0), (1, 0.0), (2, 0.25), (3, 0.5), (4, 1.0), (5, 2.0), (6, 4.0), (7, 5.0), (10**6, 5.0)],
)
def test_the_first_restart_comes_at_once_and_the_next_ones_after_doubled_delays_up_to_5_s(
    quick_deaths: int, seconds: float
) -> None:
    assert restart_delay(quick_deaths) == seconds


@pytest.mark.parametrize(
    ("returncode", "words"),
    [(0, "exit code 0"), (3, "exit code 3"), (-11, "killed by SIGSEGV"), (-40, "killed by signal 40")],
)
def test_an_exit_cause_is_a_code_or_the_name_of_a_signal(returncode: int, words: str) -> None:
    assert exit_cause(returncode) == words


def test_a_worker_that_was_due_to_be_replaced_when_the_pool_was_stopped_has_drained(make_pool, queue):
    said: list[str] = []
    pool = make_pool(max_jobs=1, report=said.append)
    pool.start()
    (pid,) = pool.pids
    queue.submit(Pass(PID))
    assert queue.recv(60).result == b"%d" % pid
    # it has ended, and the pool has not looked since
    os.waitid(os.P_PID, pid, os.WEXITED | os.WNOWAIT)
    assert pool.stop(60)
    assert said == []


def test_jobs_go_to_the_workers_that_have_their_handlers_also_those_registered_later(
    modules: Path, queue: JobQueue, make_pool: Callable[..., WorkerPool]
) -> None:
    (modules / "learns.py").write_text(
        "from subetha.pass_registry import register\n"
        "@register(50)\n"
        "def learn(_args):\n"
        "    register(51, bytes.upper)\n"
        "    return b'learnt'\n"
    )
    one, other = make_pool("handlers"), make_pool("learns")
    one.start()
    other.start()
    waits = queue.submit(Pass(51, b"taught"))
    for _ in range(20):
        assert run_job(queue, PID) == str(one.pids[0]).encode()
    assert run_job(queue, 50) == b"learnt"
    result = queue.recv(timeout=60)
    assert (result.token, result.result) == (waits, b"TAUGHT")
    assert queue.stats().states == {"FREE": queue.cells_total}


def test_a_pool_needs_a_module_and_a_process(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="no module given"):
        WorkerPool([], tmp_path, 1)
    with pytest.raises(ValueError, match="at least 1, not 0"):
        WorkerPool(["handlers"], tmp_path, 0)


def test_a_pool_is_started_once(make_pool: Callable[..., WorkerPool]) -> None:
    pool = make_pool()
    pool.start()
    with pytest.raises(RuntimeError, match="started once"):
        pool.start()


def test_a_pool_creates_a_missing_queue_directory(tmp_path: Path, modules: Path) -> None:
    with WorkerPool(["handlers"], tmp_path / "new", 1) as pool, JobQueue.open(tmp_path / "new") as queue:
        assert run_job(queue, PID) == str(pool.pids[0]).encode()


def test_a_pool_creates_a_queue_of_the_durability_asked_for(tmp_path: Path, modules: Path) -> None:
    where = files.file_system_of(tmp_path)
    if where in files.MEMORY_FILE_SYSTEMS:
        pytest.skip(f"{tmp_path} lies in memory ({where}); run pytest with --basetemp on a disk")
    with (
        WorkerPool(["handlers"], tmp_path / "new", 1, durability="disk") as pool,
        JobQueue.open(tmp_path / "new") as queue,
    ):
        assert queue.durability == "disk"
        assert run_job(queue, PID) == str(pool.pids[0]).encode()


def test_a_queue_of_another_durability_is_refused_before_any_worker_starts(queue: JobQueue, modules: Path) -> None:
    pool = WorkerPool(["handlers"], queue.path, 1, durability="disk")
    with pytest.raises(LayoutMismatch, match="expected durability disk, found a queue with process"):
        pool.start()
    assert pool.pids == []
    pool.stop()
    ran = CliRunner().invoke(cli, ["worker", "handlers", "--queue", queue.path, "--durability", "disk"])
    assert ran.exit_code == 1
    assert "expected durability disk" in ran.stderr


def test_what_is_no_queue_directory_is_an_error_before_any_worker_starts(tmp_path: Path, modules: Path) -> None:
    file = tmp_path / "file"
    file.write_text("not a directory")
    pool = WorkerPool(["handlers"], file, 1)
    with pytest.raises((SubethaError, OSError)):
        pool.start()
    assert pool.pids == []
    pool.stop()


def test_jobs_run_in_every_process_of_a_pool(
    make_pool: Callable[..., WorkerPool], queue: JobQueue, tmp_path: Path
) -> None:
    pool = make_pool(processes=2)
    pool.start()
    folders = [tmp_path / name for name in ("a", "b")]
    for folder in folders:
        folder.mkdir()
        os.mkfifo(folder / "started")
        os.mkfifo(folder / "go")
        queue.submit(Pass(HELD, os.fsencode(folder)))
    # Both jobs have started before either may end, so two processes hold them.
    for folder in folders:
        wait_for_start(folder)
    for folder in folders:
        say_go(folder)
    assert [queue.recv(timeout=60).result for _ in folders] == [b"result"] * 2
    assert len(set(pool.pids)) == 2


def test_a_worker_finds_modules_where_its_supervisor_does_and_a_job_sees_the_outer_environment(
    make_pool: Callable[..., WorkerPool],
    queue: JobQueue,
    modules: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", ["modules", *sys.path])
    monkeypatch.setenv("PYTHONPATH", "/the/outer/one")
    pool = make_pool()
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir()
    (elsewhere / "handlers.py").write_text("raise SystemExit('the wrong one')")
    pool.start()
    path, pythonpath = json.loads(run_job(queue, ENVIRONMENT))
    assert path[0] == str(modules)
    assert set(path) == {os.path.abspath(entry) for entry in sys.path}
    assert pythonpath == "/the/outer/one"


def test_a_killed_worker_is_named_with_its_cause_and_replaced_at_once(make_pool: Callable[..., WorkerPool]) -> None:
    messages: list[str] = []
    pool = make_pool(processes=2, report=messages.append)
    pool.start()
    victim, other = pool.pids
    os.kill(victim, signal.SIGKILL)
    pool.poll(None)

    assert pool.deaths == 1
    assert len(pool.pids) == 2
    assert victim not in pool.pids
    assert other in pool.pids
    [message] = messages
    assert message.startswith(f"subetha worker 1 of 2 (pid {victim}): killed by SIGKILL after ")
    assert "starts again at once (quick death 1 of 5)" in message


def test_a_restart_waits_for_its_delay(make_pool: Callable[..., WorkerPool]) -> None:
    clock = Clock()
    messages: list[str] = []
    pool = make_pool(clock=clock, backoff=lambda _deaths: 5.0, report=messages.append)
    pool.start()
    os.kill(pool.pids[0], signal.SIGKILL)
    pool.poll(None)
    assert "starts again in 5 s" in messages[0]
    clock.now += 4.9
    pool.poll()
    assert pool.pids == []
    clock.now += 0.1
    pool.poll()
    assert len(pool.pids) == 1


def test_poll_returns_at_its_timeout_when_nothing_happens(make_pool: Callable[..., WorkerPool]) -> None:
    pool = make_pool()
    pool.start()
    pids = pool.pids
    pool.poll(0.01)
    pool.poll()
    assert pool.pids == pids


def poll_until_broken(pool: WorkerPool) -> str:
    def poll_for_ever() -> None:
        while True:
            pool.poll(None)

    with pytest.raises(WorkerPoolBroken) as caught:
        poll_for_ever()
    return str(caught.value)


def test_five_quick_deaths_in_a_row_end_the_pool_with_their_cause(
    make_pool: Callable[..., WorkerPool], modules: Path
) -> None:
    (modules / "dies.py").write_text("import os\nos._exit(3)\n")
    messages: list[str] = []
    delays_asked: list[int] = []

    def no_delay(quick_deaths: int) -> float:
        delays_asked.append(quick_deaths)
        return 0.0

    pool = make_pool("dies", backoff=no_delay, report=messages.append)
    pool.start()
    message = poll_until_broken(pool)
    assert "subetha worker 1 of 1 (pid " in message
    assert "exit code 3" in message
    assert "quick death 5 in a row" in message
    assert "Remove the cause" in message
    assert delays_asked == [1, 2, 3, 4]
    assert len(messages) == pool.deaths == 5
    assert all("exit code 3" in line for line in messages)
    assert pool.stop()
    assert pool.pids == []


@pytest.mark.slow
def test_a_module_that_cannot_be_imported_breaks_the_pool_which_says_that_it_would_come_again(
    make_pool: Callable[..., WorkerPool], capfd: pytest.CaptureFixture[str]
) -> None:
    pool = make_pool("no_such_module_anywhere", backoff=lambda _deaths: 0.0)
    pool.start()
    message = poll_until_broken(pool)
    assert "could not import its modules or open its queue" in message
    assert "Another start would end the same way" in message
    assert capfd.readouterr().err.count("ModuleNotFoundError: No module named 'no_such_module_anywhere'") == 5


def test_a_broken_place_lets_the_other_workers_finish_their_jobs(
    make_pool: Callable[..., WorkerPool], queue: JobQueue, fifos: Path
) -> None:
    pool = make_pool(processes=2, clock=Clock(), backoff=lambda _deaths: 0.0)
    pool.start()
    queue.submit(Pass(HELD, os.fsencode(fifos)))
    wait_for_start(fifos)
    [busy] = [found.pid for found in snapshots(queue) if found.in_flight_bitmap]

    def kill_the_idle_one_again_and_again() -> None:
        while True:
            [idle] = set(pool.pids) - {busy}
            os.kill(idle, signal.SIGKILL)
            pool.poll(None)

    with pytest.raises(WorkerPoolBroken):
        kill_the_idle_one_again_and_again()
    assert pool.pids == [busy]
    say_go(fifos)
    assert pool.stop()
    assert queue.recv(timeout=60).result == b"result"


def snapshots(queue: JobQueue) -> list:
    table = queue.heartbeat
    return [found for slot in range(table.capacity) if (found := table.snapshot(slot)) is not None]


def kill_and_poll(pool: WorkerPool, signum: int = signal.SIGKILL) -> None:
    deaths = pool.deaths
    os.kill(pool.pids[0], signum)
    while pool.deaths == deaths:
        pool.poll(None)


@pytest.fixture
def patient_pool(make_pool: Callable[..., WorkerPool]) -> WorkerPool:
    """A started pool of one worker whose clock stands still and whose restarts do not wait."""
    pool = make_pool(clock=Clock(), backoff=lambda _deaths: 0.0, report=lambda _message: None)
    pool.start()
    return pool


@pytest.mark.slow
def test_a_start_alone_is_no_sign_of_health(make_pool: Callable[..., WorkerPool], modules: Path, fifos: Path) -> None:
    (modules / "tells.py").write_text(f"open({str(fifos / 'started')!r}, 'wb').close()\n")
    pool = make_pool("tells", clock=Clock(), backoff=lambda _deaths: 0.0, report=lambda _message: None)
    pool.start()
    for _ in range(QUICK_DEATHS_LIMIT - 1):
        wait_for_start(fifos)
        kill_and_poll(pool)
    wait_for_start(fifos)
    with pytest.raises(WorkerPoolBroken):
        kill_and_poll(pool)


def test_a_completed_job_ends_a_row_of_quick_deaths(patient_pool: WorkerPool, queue: JobQueue) -> None:
    for _ in range(QUICK_DEATHS_LIMIT - 1):
        kill_and_poll(patient_pool)
    # A job is counted after its result went out: with the second result the first job has been.
    run_job(queue, PID)
    run_job(queue, PID)
    kill_and_poll(patient_pool)
    for _ in range(QUICK_DEATHS_LIMIT - 1):
        kill_and_poll(patient_pool)
    with pytest.raises(WorkerPoolBroken):
        kill_and_poll(patient_pool)


@pytest.mark.slow
def test_a_worker_that_completed_a_job_and_was_told_to_stop_by_somebody_died_no_quick_death(
    patient_pool: WorkerPool, queue: JobQueue
) -> None:
    for _ in range(QUICK_DEATHS_LIMIT + 1):
        run_job(queue, PID)
        kill_and_poll(patient_pool, signal.SIGTERM)
    assert patient_pool.deaths == QUICK_DEATHS_LIMIT + 1


def test_a_worker_that_lived_for_long_died_no_quick_death(patient_pool: WorkerPool) -> None:
    clock = patient_pool._clock
    assert isinstance(clock, Clock)
    for _ in range(QUICK_DEATHS_LIMIT + 1):
        clock.now += QUICK_DEATH_SECONDS
        kill_and_poll(patient_pool)


def test_a_worker_that_cannot_be_started_counts_as_a_quick_death(
    make_pool: Callable[..., WorkerPool], monkeypatch: pytest.MonkeyPatch
) -> None:
    pool = make_pool(backoff=lambda _deaths: 0.0)
    monkeypatch.setattr(sys, "executable", "/nonexistent/python")
    pool.start()
    assert "could not be started: [Errno 2]" in poll_until_broken(pool)


def test_a_stopped_pool_has_drained_and_can_be_stopped_again(
    make_pool: Callable[..., WorkerPool], queue: JobQueue
) -> None:
    messages: list[str] = []
    pool = make_pool(processes=2, report=messages.append)
    pool.start()
    run_job(queue, PID)
    assert pool.stop(timeout=60)
    assert pool.stop()
    assert pool.pids == []
    assert messages == []
    assert pool.deaths == 0


def test_a_pool_stopped_right_after_its_start_drains_too(make_pool: Callable[..., WorkerPool]) -> None:
    messages: list[str] = []
    pool = make_pool(report=messages.append)
    pool.start()
    assert pool.stop()
    assert messages == []


def test_stop_kills_those_that_are_still_at_work_at_its_timeout(
    make_pool: Callable[..., WorkerPool], queue: JobQueue, fifos: Path
) -> None:
    messages: list[str] = []
    pool = make_pool(report=messages.append)
    pool.start()
    queue.submit(Pass(HELD, os.fsencode(fifos)))
    wait_for_start(fifos)
    [pid] = pool.pids
    assert not pool.stop(timeout=0)
    assert pool.pids == []
    assert str(pid) in messages[0]


def test_an_interrupt_in_the_middle_of_a_start_comes_when_the_process_is_known(
    make_pool: Callable[..., WorkerPool], monkeypatch: pytest.MonkeyPatch
) -> None:
    real = subprocess.Popen
    started: list[int] = []

    def interrupted(*args: Any, **options: Any) -> subprocess.Popen[bytes]:
        process = real(*args, **options)
        started.append(process.pid)
        signal.raise_signal(signal.SIGINT)
        return process

    pool = make_pool(processes=2)
    monkeypatch.setattr(subprocess, "Popen", interrupted)
    with pytest.raises(KeyboardInterrupt):
        pool.start()
    assert pool.pids == started
    assert pool.stop()


def test_an_interrupt_in_the_middle_of_a_restart_leaves_the_pool_in_order(make_pool: Callable[..., WorkerPool]) -> None:
    pool = make_pool(report=lambda _message: signal.raise_signal(signal.SIGINT))
    pool.start()
    [victim] = pool.pids
    os.kill(victim, signal.SIGKILL)
    with pytest.raises(KeyboardInterrupt):
        pool.poll(None)
    assert len(pool.pids) == 1
    assert pool.pids != [victim]
    assert pool.stop()


def test_deferred_signals_find_their_handlers_again_and_come_at_the_end() -> None:
    handlers = [signal.getsignal(signum) for signum in (signal.SIGINT, signal.SIGTERM)]
    steps = []

    def interrupted() -> None:
        with signals_deferred():
            signal.raise_signal(signal.SIGINT)
            steps.append("after the signal")
        steps.append("after the block")

    with pytest.raises(KeyboardInterrupt):
        interrupted()
    assert steps == ["after the signal"]
    assert [signal.getsignal(signum) for signum in (signal.SIGINT, signal.SIGTERM)] == handlers


# --- the supervisor as a program ---


class Program:
    """``subetha worker`` in a process group of its own, with its standard error read line by line."""

    def __init__(self, folder: Path, *arguments: str) -> None:
        command = [sys.executable, "-c", "from subetha.cli import main; main()", "worker", *arguments]
        self.process = subprocess.Popen(
            command,
            cwd=folder,
            stdin=subprocess.PIPE,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.PIPE,
            text=True,
            start_new_session=True,
            env=os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)},
        )

    def read_until(self, words: str) -> list[str]:
        assert self.process.stderr is not None
        lines = []
        for line in self.process.stderr:
            lines.append(line)
            if words in line:
                return lines
        raise AssertionError(f"{words!r} not in what the program said: {lines}")

    def signal_group(self, signum: int) -> None:
        os.killpg(self.process.pid, signum)

    def end(self) -> str:
        _, stderr = self.process.communicate()
        return stderr


@pytest.fixture
def program(tmp_path: Path, queue: JobQueue) -> Iterator[Callable[..., Program]]:
    programs = []
    folder = tmp_path / "program"
    folder.mkdir()
    (folder / "handlers.py").write_text(HANDLERS)

    def start(*arguments: str) -> Program:
        programs.append(Program(folder, *(arguments or ("handlers", "--processes", "2")), "--queue", str(queue.path)))
        return programs[-1]

    yield start
    for program in programs:
        with program.process:
            if program.process.poll() is None:
                program.signal_group(signal.SIGKILL)


@pytest.mark.parametrize("signum", [signal.SIGTERM, signal.SIGINT])
@pytest.mark.parametrize("group", [False, True], ids=["supervisor", "group"])
def test_a_signal_drains_all_workers_also_when_the_whole_group_gets_it(
    program: Callable[..., Program], queue: JobQueue, fifos: Path, signum: int, group: bool
) -> None:
    running = program()
    queue.submit(Pass(HELD, os.fsencode(fifos)))
    wait_for_start(fifos)
    if group:
        running.signal_group(signum)
    else:
        running.process.send_signal(signum)
    running.read_until("draining, each worker finishes the job in hand")
    assert running.process.poll() is None
    say_go(fifos)
    assert running.end() == ""
    assert running.process.returncode == 0
    assert queue.recv(timeout=60).result == b"result"


@pytest.mark.parametrize("group", [False, True], ids=["supervisor", "group"])
def test_a_second_interrupt_ends_the_supervisor_and_its_workers_at_once(
    program: Callable[..., Program], queue: JobQueue, fifos: Path, group: bool
) -> None:
    running = program()
    queue.submit(Pass(HELD, os.fsencode(fifos)))
    wait_for_start(fifos)
    for words in ("draining", "killing all workers"):
        if group:
            running.signal_group(signal.SIGINT)
        else:
            running.process.send_signal(signal.SIGINT)
        if words == "draining" or not group:
            running.read_until(words)
    # The end of its standard error means that no worker holds it any more either.
    running.end()
    assert running.process.returncode == 130
    with pytest.raises(Empty):
        queue.recv(timeout=0)


def test_a_pool_that_breaks_ends_the_program_with_a_message_and_code_1(
    program: Callable[..., Program], tmp_path: Path
) -> None:
    (tmp_path / "program" / "dies.py").write_text("import os\nos.abort()\n")
    running = program("dies", "--processes", "1")
    lines = running.end().splitlines()
    assert running.process.returncode == 1
    deaths = [line for line in lines if line.startswith("subetha worker 1 of 1") and "killed by SIGABRT" in line]
    assert len(deaths) == 5
    assert ["starts again at once" in line for line in deaths] == [True, False, False, False, False]
    assert ["starts again in" in line for line in deaths] == [False, True, True, True, False]
    assert lines[-1].startswith("Error: subetha worker 1 of 1")
    assert "killed by SIGABRT" in lines[-1]


def test_the_program_restarts_a_worker_that_was_killed(program: Callable[..., Program], queue: JobQueue) -> None:
    running = program("handlers", "--processes", "1")
    first = run_job(queue, PID)
    os.kill(int(first), signal.SIGKILL)
    running.read_until("killed by SIGKILL")
    second = run_job(queue, PID)
    assert second != first
    running.process.terminate()
    running.end()
    assert running.process.returncode == 0


def test_a_job_does_not_read_what_is_typed_to_the_program(program: Callable[..., Program], queue: JobQueue) -> None:
    running = program()
    assert running.process.stdin is not None
    running.process.stdin.write("typed")
    running.process.stdin.close()
    assert run_job(queue, READS_INPUT) == b"input: "

"""The demo: reading files of every kind, the walk, the run against stand-ins for the queue, and whole runs."""

import errno
import functools
import hashlib
import os
import re
import subprocess
import tempfile
from collections import deque
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from subetha import demo
from subetha._core import SubmittedResult
from subetha.demo import (
    FINGERPRINT_CLOSURE_ID,
    READING_ROUNDS,
    DemoReport,
    Failure,
    Fingerprint,
    fingerprint,
    open_regular,
    printable,
    regular_files,
    run_demo,
)
from subetha.errors import ArenaFull, ArgsTooLarge, Empty, ExecutionError, Full, PassError
from subetha.jobqueue import JobQueue
from subetha.pass_registry import Pass, execute
from subetha.pool import WorkerPool


def write(path: Path, content: bytes = b"") -> bytes:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(content)
    return os.fsencode(path)


def make_long_file(folder: Path, content: bytes) -> bytes:
    """Make a file whose path is longer than PATH_MAX twice over, and give its path."""
    path = os.fsencode(folder)
    here = os.open(path, os.O_PATH)
    name = b"n" * 255
    for _ in range(34):
        os.mkdir(name, dir_fd=here)
        below = os.open(name, os.O_PATH, dir_fd=here)
        os.close(here)
        here = below
        path += b"/" + name
    file = os.open(b"file", os.O_CREAT | os.O_WRONLY, dir_fd=here)
    os.write(file, content)
    os.close(file)
    os.close(here)
    assert len(path) > 2 * os.pathconf("/", "PC_PATH_MAX")
    return path + b"/file"


# --- reading files ---


@given(st.lists(st.sampled_from(["a", "é", " ", "\n", "\t", "\v", "\f", "\r", "\0", "\x1c", "\x85", "\xa0"])))
def test_lines_and_words_are_counted_across_chunks_as_over_the_whole(pieces: list[str]) -> None:
    content = "".join(pieces).encode()
    with tempfile.NamedTemporaryFile() as file, pytest.MonkeyPatch.context() as patch:
        patch.setattr(demo, "_CHUNK_BYTES", 3)
        file.write(content)
        file.flush()
        found = fingerprint(os.fsencode(file.name))
    assert (found.length, found.lines, found.words) == (len(content), content.count(b"\n"), len(content.split()))
    assert found.sha256 == hashlib.sha256(content).digest()


def test_counts_are_those_of_wc(tmp_path: Path) -> None:
    path = write(tmp_path / "text", b"  one two\tthree\n\n four\r\nfive\x0bsix no newline at the end" * 5000)
    counted = subprocess.run(["wc", "-lwc", path], env={"LC_ALL": "C"}, stdout=subprocess.PIPE, check=True).stdout
    found = fingerprint(path)
    assert [found.lines, found.words, found.length] == [int(number) for number in counted.split()[:3]]


def test_a_fingerprint_has_the_size_and_time_of_the_file(tmp_path: Path) -> None:
    path = write(tmp_path / "old", b"x" * 7)
    os.utime(path, ns=(0, -1_500_000_000))
    found = fingerprint(path)
    assert (found.size, found.mtime_ns) == (7, -1_500_000_000)
    assert Fingerprint.unpack(found.pack()) == found


def test_a_result_of_another_length_is_no_fingerprint() -> None:
    with pytest.raises(ValueError, match="has 72 bytes, this result has 71"):
        Fingerprint.unpack(bytes(71))


def test_only_regular_files_are_opened_and_no_fifo_waits(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "fifo")
    (tmp_path / "link").symlink_to(write(tmp_path / "file"))
    for name in ("fifo", "."):
        with pytest.raises(OSError, match="not a regular file"):
            open_regular(os.fsencode(tmp_path / name))
    with pytest.raises(OSError, match="not a regular file"):
        open_regular(b"/dev/zero")
    with pytest.raises(OSError, match=re.escape(os.strerror(errno.ELOOP))):
        open_regular(os.fsencode(tmp_path / "link"))


def test_opening_leaves_no_descriptor_behind(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "fifo")
    path = make_long_file(tmp_path, b"")
    before = os.listdir("/proc/self/fd")
    for wrong in (os.fsencode(tmp_path / "fifo"), path + b"-not", path.replace(b"n" * 255, b"n" * 255 + b"/x", 1)):
        with pytest.raises(OSError, match=r"not a regular file|\[Errno"):
            open_regular(wrong)
    fingerprint(path)
    list(regular_files(os.fsencode(tmp_path), pytest.fail))
    assert os.listdir("/proc/self/fd") == before


def test_a_path_longer_than_path_max_is_read(tmp_path: Path) -> None:
    path = make_long_file(tmp_path, b"deep down\n")
    found = fingerprint(path)
    assert (found.length, found.lines, found.words) == (10, 1, 2)


def test_the_handler_is_registered_under_its_fixed_id(tmp_path: Path) -> None:
    path = write(tmp_path / "file", b"content")
    result = execute(Pass(FINGERPRINT_CLOSURE_ID, path))
    assert isinstance(result, bytes)
    assert Fingerprint.unpack(result) == fingerprint(path)


@pytest.mark.parametrize(
    ("path", "words"),
    [
        (b"/proc/self/mem", "OSError: Input/output error"),
        (b"/nonexistent-\xff", "FileNotFoundError: No such file or directory"),
        (b"/dev/null", "OSError: not a regular file"),
        (b"/" + b"n" * 5000, "OSError: File name too long"),
    ],
)
def test_a_job_on_a_file_that_cannot_be_read_says_why(path: bytes, words: str) -> None:
    result = execute(Pass(FINGERPRINT_CLOSURE_ID, path))
    assert isinstance(result, ExecutionError)
    assert str(result) == words


# --- the walk ---


def test_the_walk_gives_every_regular_file_and_nothing_else(tmp_path: Path) -> None:
    files = [write(tmp_path / name) for name in ("b", "a/x", "a/deeper/y", "c")]
    files.append(write(tmp_path / os.fsdecode(b"not-utf8-\xff\xfe\n")))
    os.mkfifo(tmp_path / "fifo")
    (tmp_path / "empty").mkdir()
    (tmp_path / "link").symlink_to(tmp_path / "b")
    (tmp_path / "loop").symlink_to(tmp_path)
    (tmp_path / "dangling").symlink_to("nowhere")
    assert sorted(regular_files(os.fsencode(tmp_path), pytest.fail)) == sorted(files)


def test_the_walk_follows_the_folder_itself_when_it_is_a_symlink(tmp_path: Path) -> None:
    write(tmp_path / "real/file")
    (tmp_path / "link").symlink_to("real")
    assert list(regular_files(os.fsencode(tmp_path / "link"), pytest.fail)) == [os.fsencode(tmp_path / "link/file")]


def test_the_walk_goes_deeper_than_the_stack_and_the_open_files_allow(tmp_path: Path) -> None:
    depth = 1100
    folder = os.fsencode(tmp_path)
    for _ in range(depth):
        folder += b"/d"
        os.mkdir(folder)
    os.close(os.open(folder + b"/f", os.O_CREAT | os.O_WRONLY))
    try:
        assert list(regular_files(os.fsencode(tmp_path), pytest.fail)) == [folder + b"/f"]
    finally:
        # What is so deep pytest cannot remove.
        os.unlink(folder + b"/f")
        for _ in range(depth):
            os.rmdir(folder)
            folder = folder[:-2]


def test_the_walk_goes_through_paths_longer_than_path_max(tmp_path: Path) -> None:
    path = make_long_file(tmp_path, b"")
    assert list(regular_files(os.fsencode(tmp_path), pytest.fail)) == [path]


def test_a_folder_that_vanished_or_became_a_symlink_is_told_and_the_walk_goes_on(tmp_path: Path) -> None:
    for name in ("a", "b"):
        (tmp_path / name).mkdir()
    first, last = write(tmp_path / "0"), write(tmp_path / "c/last")
    errors: list[tuple[bytes, int | None]] = []
    walk = regular_files(os.fsencode(tmp_path), lambda path, error: errors.append((path, error.errno)))
    assert next(walk) == first
    (tmp_path / "a").rmdir()
    (tmp_path / "b").rmdir()
    (tmp_path / "b").symlink_to("c")
    assert list(walk) == [last]
    assert errors == [(os.fsencode(tmp_path / "a"), errno.ENOENT), (os.fsencode(tmp_path / "b"), errno.ENOTDIR)]


@pytest.mark.parametrize(
    ("path", "text"),
    [
        (b"/plain name", "/plain name"),
        ("/größe".encode(), "/größe"),
        (b"/\xff\xfe", "/\\xff\\xfe"),
        (b"/\x1b[31m\n", "/\\x1b[31m\\n"),
        ("/\u202e\u2028".encode(), "/\\u202e\\u2028"),
    ],
)
def test_names_are_printed_with_escapes_for_what_is_no_text(path: bytes, text: str) -> None:
    assert printable(path) == text


# --- the run, against stand-ins ---


class StandInQueue:
    """Runs each job when it is submitted; holds `cells` at most; calls `after` once the file has been read."""

    def __init__(self, cells: int = 100) -> None:
        self.cells = cells
        self.most_held = 0
        self.submitted: list[bytes] = []
        self.results: deque[SubmittedResult] = deque()
        self.lose: set[bytes] = set()
        self.after: Callable[[bytes], None] = lambda path: None
        self.refuse: Exception | None = None
        self.run: Callable[[bytes], bytes | PassError] = lambda path: execute(Pass(FINGERPRINT_CLOSURE_ID, path))

    def submit(self, pass_: Pass, *, wait: float | None) -> int:
        assert wait == 0
        if self.refuse is not None:
            raise self.refuse
        if len(self.results) >= self.cells:
            raise Full("no cell is free")
        self.submitted.append(pass_.args)
        job_id = len(self.submitted)
        if pass_.args not in self.lose:
            self.results.append(SubmittedResult(job_id, self.run(pass_.args)))
            self.after(pass_.args)
        self.most_held = max(self.most_held, len(self.results))
        return job_id

    def recv_many(self, n: int) -> list[SubmittedResult]:
        return [self.results.popleft() for _ in range(min(n, len(self.results)))]

    def recv(self, timeout: float | None) -> SubmittedResult:
        if not self.results:
            raise Empty("nothing there")
        return self.results.popleft()


class StandInPool:
    def __init__(self) -> None:
        self.deaths = 0
        self.pids = [4711]
        self.on_poll: Callable[[], None] = lambda: None

    def poll(self) -> None:
        self.on_poll()

    def stop(self) -> None:
        pass


class StandInRun:
    """A run of the demo over `paths` whose queue, workers and clock the test holds."""

    def __init__(self, *paths: bytes, queue: StandInQueue | None = None) -> None:
        self.queue = queue or StandInQueue()
        self.pool = StandInPool()
        self.now = 0.0
        self.progress: list[tuple[int, int]] = []
        self.paths = list(paths)

    def go(self) -> DemoReport:
        report = DemoReport(files=len(self.paths))
        parts: Any = (self.queue, self.pool, self.paths, report)
        demo._Run(*parts, lambda done, total: self.progress.append((done, total)), False, lambda: self.now).go()
        return report


def test_a_run_counts_what_was_confirmed_and_reports_its_progress(tmp_path: Path) -> None:
    run = StandInRun(write(tmp_path / "a", b"12"), write(tmp_path / "b", b"345"))
    report = run.go()
    assert (report.bytes_read, report.failures, report.mismatches, report.exit_code) == (5, [], [], 0)
    assert run.progress == [(0, 2), (1, 2), (2, 2)]


def test_more_files_than_cells_go_through_a_window(tmp_path: Path) -> None:
    paths = [write(tmp_path / str(number), b"x") for number in range(10)]
    run = StandInRun(*paths, queue=StandInQueue(cells=3))
    report = run.go()
    assert report.bytes_read == 10
    assert run.queue.submitted == paths
    assert run.queue.most_held == 3


def test_a_wrong_digest_of_an_unchanged_file_is_a_mismatch_and_code_1(tmp_path: Path) -> None:
    path = write(tmp_path / "file", b"content")
    run = StandInRun(path)
    run.queue.run = lambda path: fingerprint(path)._replace(sha256=bytes(32)).pack()
    report = run.go()
    assert report.mismatches == [path]
    assert report.failures == []
    assert report.bytes_read == 0
    assert report.exit_code == 1


def test_a_file_that_changed_meanwhile_is_read_again(tmp_path: Path) -> None:
    path = write(tmp_path / "file", b"before")
    run = StandInRun(path)

    def change_once(_path: bytes) -> None:
        if len(run.queue.submitted) == 1:
            write(tmp_path / "file", b"afterwards")

    run.queue.after = change_once
    report = run.go()
    assert run.queue.submitted == [path, path]
    assert (report.bytes_read, report.mismatches, report.failures, report.exit_code) == (10, [], [], 0)


def test_a_change_of_the_time_alone_is_a_change(tmp_path: Path) -> None:
    path = write(tmp_path / "file", b"one")
    run = StandInRun(path)

    def change_once(_path: bytes) -> None:
        if len(run.queue.submitted) == 1:
            write(tmp_path / "file", b"two")
            os.utime(path, ns=(0, 1))

    run.queue.after = change_once
    report = run.go()
    assert len(run.queue.submitted) == 2
    assert report.mismatches == []


def test_a_change_while_the_check_reads_is_a_change(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = write(tmp_path / "file", b"before")
    run = StandInRun(path)
    real_read = os.read
    jobs_done: list[bytes] = []
    run.queue.after = jobs_done.append

    def read_and_change(descriptor: int, length: int) -> bytes:
        if len(jobs_done) == 1:
            os.truncate(path, 3)
        return real_read(descriptor, length)

    monkeypatch.setattr(os, "read", read_and_change)
    report = run.go()
    assert len(run.queue.submitted) == 2
    assert (report.bytes_read, report.mismatches, report.exit_code) == (3, [], 0)


def test_a_file_that_keeps_changing_has_failed_and_does_not_mismatch(tmp_path: Path) -> None:
    path = write(tmp_path / "file")
    run = StandInRun(path)
    run.queue.after = lambda _path: write(tmp_path / "file", b"x" * len(run.queue.submitted)) and None
    report = run.go()
    assert len(run.queue.submitted) == READING_ROUNDS
    assert report.mismatches == []
    [failure] = report.failures
    assert "kept changing" in failure.error
    assert report.exit_code == 0


def test_a_file_that_vanishes_between_job_and_check_has_failed(tmp_path: Path) -> None:
    path = write(tmp_path / "file")
    run = StandInRun(path, write(tmp_path / "other", b"other"))
    run.queue.after = lambda read: os.unlink(read) if read == path else None
    report = run.go()
    [failure] = report.failures
    assert failure.path == path
    assert "FileNotFoundError: No such file or directory" in failure.error
    assert report.bytes_read == 5
    assert report.exit_code == 0


def test_a_job_that_came_back_with_an_error_has_failed_and_the_rest_goes_on(tmp_path: Path) -> None:
    gone = os.fsencode(tmp_path / "gone")
    report = StandInRun(gone, write(tmp_path / "other", b"other")).go()
    assert report.failures == [Failure(gone, "FileNotFoundError: No such file or directory")]
    assert report.bytes_read == 5
    assert report.exit_code == 0


def test_a_second_result_of_a_job_is_counted_and_dropped(tmp_path: Path) -> None:
    run = StandInRun(write(tmp_path / "a", b"12"), write(tmp_path / "b", b"345"))
    run.queue.after = lambda _path: run.queue.results.append(run.queue.results[0])
    report = run.go()
    assert report.duplicates >= 1
    assert report.bytes_read == 5
    assert report.exit_code == 0


@pytest.mark.parametrize("error", [ArenaFull("no block of 9000 bytes"), Full("quota"), ArgsTooLarge("too long")])
def test_a_path_that_the_queue_has_no_room_for_at_all_has_failed(tmp_path: Path, error: Exception) -> None:
    run = StandInRun(write(tmp_path / "file"))
    run.queue.refuse = error
    [failure] = run.go().failures
    assert failure.error == f"{type(error).__name__}: {error}"


def test_a_full_arena_makes_the_run_wait_for_results(tmp_path: Path) -> None:
    run = StandInRun(write(tmp_path / "a", b"1"), write(tmp_path / "b", b"2"))

    def full_once(_path: bytes) -> None:
        run.queue.refuse = ArenaFull("no block of 9000 bytes")

    def room_again() -> None:
        if not run.queue.results:
            run.queue.refuse = None

    run.queue.after = full_once
    run.pool.on_poll = room_again
    report = run.go()
    assert (report.bytes_read, report.failures) == (2, [])


def test_a_slow_job_is_waited_for(tmp_path: Path) -> None:
    path = write(tmp_path / "file")
    run = StandInRun(path, write(tmp_path / "other", b"other"))
    run.queue.lose = {path}
    run.pool.deaths = 1

    def comes_back_after_an_hour() -> None:
        run.now += 10.0
        if run.now == 3600.0:
            run.queue.results.append(SubmittedResult(1, fingerprint(run.queue.submitted[0]).pack()))

    run.pool.on_poll = comes_back_after_an_hour
    report = run.go()
    assert (report.lost, report.exit_code) == (0, 0)


# --- whole runs ---


@pytest.fixture
def tree(tmp_path: Path) -> Path:
    folder = tmp_path / "tree"
    folder.mkdir()
    return folder


@pytest.fixture
def shared_memory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder in place of /dev/shm, to see what is left in it."""
    folder = tmp_path / "shared-memory"
    folder.mkdir()
    monkeypatch.setattr(demo, "SHARED_MEMORY", str(folder))
    return folder


def test_a_tree_is_hashed_in_worker_processes_and_every_digest_agrees(tree: Path, shared_memory: Path) -> None:
    contents = [b"", b"one line\n", b"\0\xff" * 300_000, b"words and words\n" * 30_000]
    for number, content in enumerate(contents):
        write(tree / f"sub{number % 2}" / str(number), content)
    seen: list[list[str]] = []
    report = run_demo(
        os.fsencode(tree), 2, kill=False, progress=lambda _done, _total: seen.append(os.listdir(shared_memory))
    )
    assert report.files == len(contents)
    assert report.bytes_read == sum(map(len, contents))
    assert report.seconds > 0
    assert report.jobs_per_s == report.files / report.seconds
    assert (report.failures, report.mismatches, report.lost, report.killed, report.exit_code) == ([], [], 0, 0, 0)
    assert len(seen[0]) == 1
    assert os.listdir(shared_memory) == []


def test_an_empty_folder_is_a_run_of_no_jobs(tree: Path) -> None:
    report = run_demo(os.fsencode(tree), 1, kill=False)
    assert report.as_dict() | {"seconds": 0} == dict.fromkeys(report.as_dict(), 0)
    assert report.exit_code == 0


def test_names_of_any_bytes_and_paths_of_any_length_are_read(tree: Path) -> None:
    write(tree / os.fsdecode(b"\xff\xfe\x1b[0m\n"), b"12")
    make_long_file(tree, b"345")
    report = run_demo(os.fsencode(tree), 1, kill=False)
    assert (report.files, report.bytes_read, report.failures, report.exit_code) == (2, 5, [], 0)


def test_a_folder_whose_own_path_is_longer_than_path_max_is_read(tree: Path) -> None:
    path = make_long_file(tree, b"345")
    report = run_demo(os.path.dirname(path), 1, kill=False)
    assert (report.files, report.bytes_read, report.exit_code) == (1, 3, 0)


def test_files_that_vanish_or_change_their_kind_after_the_walk_have_failed_and_the_rest_goes_on(tree: Path) -> None:
    names = ("a-vanishes", "b-fifo", "c-symlink", "d-stays", "e-directory")
    for name in names:
        write(tree / name, b"12345")

    def change(done: int, _total: int) -> None:
        if done > 0:
            return
        for name in names:
            if name != "d-stays":
                (tree / name).unlink()
        os.mkfifo(tree / "b-fifo")
        (tree / "c-symlink").symlink_to("d-stays")
        (tree / "e-directory").mkdir()

    report = run_demo(os.fsencode(tree), 2, progress=change, kill=False)
    assert [(os.path.basename(path), error) for path, error in report.failures] == [
        (b"a-vanishes", "FileNotFoundError: No such file or directory"),
        (b"b-fifo", "OSError: not a regular file"),
        (b"c-symlink", "OSError: Too many levels of symbolic links"),
        (b"e-directory", "OSError: not a regular file"),
    ]
    assert report.files == 5
    assert report.bytes_read == 5
    assert report.exit_code == 0


def test_a_folder_with_more_files_than_the_queue_has_cells_is_read(tree: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(demo, "QUEUE_CELLS", 16)
    for number in range(40):
        write(tree / str(number), b"x")
    report = run_demo(os.fsencode(tree), 2, kill=False)
    assert (report.files, report.bytes_read, report.exit_code) == (40, 40, 0)


def test_a_worker_killed_half_way_costs_no_file(tree: Path) -> None:
    for number in range(60):
        write(tree / str(number), b"%d " % number * 20_000)
    report = run_demo(os.fsencode(tree), 2)
    assert (report.killed, report.lost, report.duplicates, report.exit_code) == (1, 0, 0, 0)
    assert (report.files, report.failures, report.mismatches) == (60, [], [])
    assert report.bytes_read == sum(len(b"%d " % number) * 20_000 for number in range(60))


@pytest.mark.slow
def test_workers_that_die_for_good_end_the_run_with_code_1(
    tree: Path, tmp_path: Path, shared_memory: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "dies.py").write_text("import os\nos._exit(3)\n")
    monkeypatch.syspath_prepend(str(tmp_path))

    def pool_of_dying_workers(_modules: list[str], *rest: Any) -> WorkerPool:
        return WorkerPool(["dies"], *rest, backoff=lambda _deaths: 0.0)

    monkeypatch.setattr(demo, "WorkerPool", pool_of_dying_workers)
    write(tree / "file")
    report = run_demo(os.fsencode(tree), 1, kill=False)
    assert report.lost == 1
    assert report.killed == 5
    assert report.problem is not None
    assert "exit code 3" in report.problem
    assert report.exit_code == 1
    assert os.listdir(shared_memory) == []


def test_a_run_that_is_interrupted_ends_its_workers_and_leaves_no_queue_directory(
    tree: Path, shared_memory: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write(tree / "file")
    pools: list[WorkerPool] = []

    def remembered(*args: Any) -> WorkerPool:
        pools.append(WorkerPool(*args))
        return pools[0]

    def interrupt(_done: int, _total: int) -> None:
        assert pools[0].pids
        raise KeyboardInterrupt

    monkeypatch.setattr(demo, "WorkerPool", remembered)
    with pytest.raises(KeyboardInterrupt):
        run_demo(os.fsencode(tree), 2, progress=interrupt, kill=False)
    assert pools[0].pids == []
    assert os.listdir(shared_memory) == []


@pytest.mark.parametrize("lack", ["no such directory", "no room"])
def test_the_queue_lies_in_the_temporary_directory_when_shared_memory_has_no_room(
    tree: Path, tmp_path: Path, shared_memory: Path, monkeypatch: pytest.MonkeyPatch, lack: str
) -> None:
    temporary = tmp_path / "temporary"
    temporary.mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(temporary))
    if lack == "no room":
        monkeypatch.setattr(JobQueue, "create", functools.partial(create_with_room_only_in, temporary, JobQueue.create))
    else:
        shared_memory.rmdir()
    write(tree / "file", b"x")
    seen: list[list[str]] = []
    report = run_demo(
        os.fsencode(tree), 1, kill=False, progress=lambda _done, _total: seen.append(os.listdir(temporary))
    )
    assert report.exit_code == 0
    assert len(seen[0]) == 1
    assert os.listdir(temporary) == []
    if lack == "no room":
        assert os.listdir(shared_memory) == []


def create_with_room_only_in(
    place: Path, create: Callable[..., JobQueue], path: str, *args: Any, **kwargs: Any
) -> JobQueue:
    if not path.startswith(str(place)):
        raise OSError(errno.ENOSPC, "No space left on device", path)
    return create(path, *args, **kwargs)


def test_a_folder_that_is_none_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(NotADirectoryError):
        run_demo(write(tmp_path / "file"), 1)
    with pytest.raises(FileNotFoundError):
        run_demo(os.fsencode(tmp_path / "nothing"), 1)


def test_the_folder_by_default_is_the_standard_library() -> None:
    assert os.path.exists(demo.default_folder() + b"/os.py")

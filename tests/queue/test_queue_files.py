"""The queue directory's files: made all at once or not at all, completed by whoever comes, replaced by nobody."""

import gc
import os
import stat
import subprocess
import tempfile

import pytest

from subetha._core import encode_result
from subetha.errors import Empty, LayoutMismatch
from subetha.jobqueue import JobQueue
from subetha.pass_registry import Pass

WAIT_S = 30
PARTS = ["arena", "back-0", "back-1", "back-2", "mail", "map", "pool", "submit-0", "submit-1", "submit-2", "table"]
SMALL = {"participants": 16, "arena_bytes": 2**20}


def run_a_job(queue):
    job_id = queue.submit(Pass(1, b"a" * 500))
    claim = queue.claim(WAIT_S)
    assert claim.job_id == job_id
    claim.reply(encode_result(0, b"r" * 500))
    result = queue.recv(WAIT_S)
    assert (result.token, result.result) == (job_id, b"r" * 500)


def all_files(path):
    return sorted(os.path.join(folder, name) for folder, _, names in os.walk(path) for name in names)


def identities(path):
    """Device, inode and size of every file and directory of a queue."""
    return {
        name: (found.st_dev, found.st_ino, found.st_size if stat.S_ISREG(found.st_mode) else 0)
        for name in [path, *all_files(path)]
        for found in [os.stat(name)]
    }


@pytest.fixture
def umask():
    before = os.umask(0o022)
    yield os.umask
    os.umask(before)


@pytest.fixture
def mount(tmp_path):
    """A tmpfs of so many bytes; skips where nothing may be mounted."""
    points = []

    def mounted(size):
        point = tmp_path / f"disk-{len(points)}"
        point.mkdir()
        try:
            done = subprocess.run(
                ["mount", "-t", "tmpfs", "-o", f"size={size}", "subetha-test", point],
                capture_output=True,
                text=True,
                check=False,
            )
        except FileNotFoundError as error:
            pytest.skip(f"no tmpfs could be mounted: {error}")
        if done.returncode:
            pytest.skip(f"no tmpfs could be mounted: {done.stderr.strip()}")
        points.append(point)
        return point

    yield mounted
    for point in points:
        subprocess.run(["umount", "-l", point], check=True)


def test_a_queue_has_the_files_that_the_design_names(make, path):
    make()
    assert sorted(os.listdir(path)) == PARTS
    assert all(os.path.isfile(os.path.join(path, name)) for name in PARTS)


def test_a_mailbox_takes_disk_at_its_clients_first_submit_or_receive(make, path, files_of):
    queue = make(4096, participants=64)
    first, second = make.open(), make.open()

    def taken():
        return os.stat(os.path.join(path, "mail")).st_blocks * 512

    before = taken()
    assert before < 2**17
    with pytest.raises(Empty):
        queue.try_claim()
    assert taken() == before, "a worker needs none"
    assert files_of(path).mailboxes == []
    first.submit(Pass(1, b""))
    one = taken() - before
    assert one >= 2 * 4096 * 8
    second.recv_many(1)
    assert taken() - before == 2 * one
    assert files_of(path).mailboxes == [2, 3]
    first.close()
    make.open().recv_many(1)
    assert taken() - before == 2 * one, "the next holder of a number has its mailbox"


def test_the_arena_takes_no_disk_for_blocks_that_were_never_used(make, path):
    make(arena_bytes=2**30)
    found = os.stat(os.path.join(path, "arena"))
    assert found.st_size >= 2**30
    assert found.st_blocks * 512 < 2**23


@pytest.mark.parametrize("mask", [0o000, 0o022, 0o077, 0o777])
@pytest.mark.parametrize(("mode", "directory"), [(0o600, 0o700), (0o660, 0o2770), (0o640, 0o2770)])
def test_files_and_directories_have_the_mode_asked_for_under_any_umask(path, umask, mask, mode, directory):
    umask(mask)
    with JobQueue.create(path, 16, mode=mode, **SMALL) as queue:
        run_a_job(queue)
    assert {stat.S_IMODE(os.stat(name).st_mode) for name in all_files(path)} == {mode}
    assert len(all_files(path)) == len(PARTS)
    assert stat.S_IMODE(os.stat(path).st_mode) == directory


def test_a_file_completed_later_has_the_mode_that_the_queue_was_made_with(path, umask):
    JobQueue.create(path, 16, mode=0o660, **SMALL).close()
    for name in ("table", "back-1"):
        os.unlink(os.path.join(path, name))
    umask(0o077)
    JobQueue.open(path).close()
    assert {stat.S_IMODE(os.stat(name).st_mode) for name in all_files(path)} == {0o660}


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can give files to another user")
@pytest.mark.parametrize("name", ["pool", "arena", "submit-1", "table"])
def test_a_file_of_another_user_is_refused_unless_it_was_made_for_a_group(path, name):
    JobQueue.create(path, 16, **SMALL).close()
    os.chown(os.path.join(path, name), 54_321, -1)
    for readonly in (False, True):
        with pytest.raises(PermissionError, match="54321"):
            JobQueue.open(path, readonly)


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can give files to another user")
def test_a_queue_made_for_a_group_takes_files_of_its_other_members(path):
    with JobQueue.create(path, 16, mode=0o660, **SMALL) as queue:
        queue.recv_many(1)
    for name in all_files(path):
        os.chown(name, 54_321, -1)
    with JobQueue.open(path) as queue:
        run_a_job(queue)


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can become another user")
def test_another_user_gets_no_way_into_a_queue_made_for_its_owner_alone(run_script):
    with tempfile.TemporaryDirectory(dir="/dev/shm") as folder:
        os.chmod(folder, 0o777)
        JobQueue.create(os.path.join(folder, "queue"), 16, **SMALL).close()
        run_script(
            """
            import mmap
            folder = sys.argv[1]
            os.setgroups([])
            os.setgid(54321)
            os.setuid(54321)
            assert os.listdir(folder) == ["queue"]
            path = folder + "/queue"
            for call in (
                JobQueue.open, lambda path: JobQueue.open(path, True), lambda path: JobQueue.open_or_create(path, 16)
            ):
                try:
                    call(path)
                except (PermissionError, FileNotFoundError):
                    pass
                else:
                    raise AssertionError("opened")
            JobQueue.create(folder + "/own", 16).close()
            """,
            folder,
        )


def test_no_call_replaces_a_file_that_is_there(make, path):
    queue = make(**SMALL)
    run_a_job(queue)
    before = identities(path)
    with pytest.raises(FileExistsError):
        JobQueue.create(path, 16, **SMALL)
    with pytest.raises(LayoutMismatch):
        JobQueue.open_or_create(path, 32, **SMALL)
    with pytest.raises(LayoutMismatch):
        JobQueue.open_or_create(path, 16, participants=17, arena_bytes=2**20)
    for handle in (
        JobQueue.open(path),
        JobQueue.open(path, readonly=True),
        JobQueue.open_or_create(path, 16, **SMALL),
    ):
        handle.close()
    queue.close()
    with JobQueue.open(path) as again:
        run_a_job(again)
    assert identities(path) == before


@pytest.mark.parametrize(
    "missing",
    [*({name} for name in PARTS if name != "pool"), set(PARTS) - {"pool"}],
    ids=lambda names: "+".join(sorted(names)),
)
@pytest.mark.parametrize("call", ["open", "open_or_create"])
def test_a_half_made_queue_is_completed_by_whoever_opens_it(path, call, missing):
    JobQueue.create(path, 16, **SMALL).close()
    for name in missing:
        os.unlink(os.path.join(path, name))
    kept = {name: os.stat(os.path.join(path, name)).st_ino for name in os.listdir(path)}
    with pytest.raises(FileNotFoundError):
        JobQueue.open(path, readonly=True)
    assert set(os.listdir(path)) == set(kept), "who only looks makes nothing"
    with JobQueue.open(path) if call == "open" else JobQueue.open_or_create(path, 16, **SMALL) as queue:
        run_a_job(queue)
        with JobQueue.open(path) as other:
            run_a_job(other)
    assert sorted(os.listdir(path)) == PARTS
    assert {name: os.stat(os.path.join(path, name)).st_ino for name in kept} == kept


def test_a_queue_without_its_pool_is_no_queue(path):
    JobQueue.create(path, 16, **SMALL).close()
    os.unlink(os.path.join(path, "pool"))
    with pytest.raises(FileNotFoundError, match="pool"):
        JobQueue.open(path)
    assert "pool" not in os.listdir(path)
    # the other files are the lost queue's, not the new one's
    with pytest.raises(LayoutMismatch, match="queue"):
        JobQueue.open_or_create(path, 16, **SMALL)


def test_a_path_that_is_a_file_is_refused_and_left_alone(path):
    with open(path, "wb") as file:
        file.write(b"somebody's")
    for call in (JobQueue.create, JobQueue.open_or_create):
        with pytest.raises(NotADirectoryError, match="directory"):
            call(path, 16)
    for readonly in (False, True):
        with pytest.raises((NotADirectoryError, FileNotFoundError)):
            JobQueue.open(path, readonly)
    with open(path, "rb") as file:
        assert file.read() == b"somebody's"


def test_the_parent_of_a_queue_has_to_be_there(path):
    with pytest.raises(FileNotFoundError):
        JobQueue.create(os.path.join(path, "below"), 16)
    assert not os.path.exists(path)


def test_a_directory_that_is_there_becomes_a_queue_and_keeps_what_lies_in_it(path):
    os.mkdir(path, 0o755)
    with open(os.path.join(path, "notes"), "wb") as file:
        file.write(b"mine")
    with JobQueue.create(path, 16, **SMALL) as queue:
        run_a_job(queue)
    assert sorted(os.listdir(path)) == sorted([*PARTS, "notes"])
    assert stat.S_IMODE(os.stat(path).st_mode) == 0o755


# --- many at once, and deaths ---------------------------------------------------------------------------------------


@pytest.mark.parametrize(("there", "processes"), [(True, 32), (False, 12)], ids=["empty directory", "no directory yet"])
def test_many_processes_start_at_once_where_nothing_is_and_each_gets_its_own_results_once(
    path, run_script, there, processes
):
    if there:
        os.mkdir(path)
    run_script(
        """
        path, processes, jobs = sys.argv[1], int(sys.argv[2]), 5

        def work():
            gate.wait()
            with JobQueue.open_or_create(path, 256, participants=40, arena_bytes=2**24, quota=8) as queue:
                mine = {queue.submit(Pass(0, b"own %d" % n)): b"own %d" % n for n in range(jobs)}
                for _ in range(processes * jobs):
                    claim = queue.claim(50)
                    claim.started()
                    _, pass_ = decode_submit(claim.payload)
                    claim.reply(encode_result(0, b"%d|" % pass_.closure_id + pass_.args))
                for _ in range(jobs):
                    result = queue.recv(50)
                    assert result.result == b"0|" + mine.pop(result.token)

        def submit(number):
            gate.wait()
            with JobQueue.open_or_create(path, 256, participants=40, arena_bytes=2**24, quota=8) as queue:
                mine = {}
                for n in range(jobs):
                    args = pattern(number * 100 + n, (10, 1000, 10_000)[n % 3])
                    mine[queue.submit(Pass(number, args))] = args
                assert len(mine) == jobs
                for _ in range(jobs):
                    result = queue.recv(50)
                    assert result.result == b"%d|" % number + mine.pop(result.token)
                assert queue.recv_many(9) == []

        gate = Gate()
        pids = [fork(work)] + [fork(submit, number) for number in range(1, processes)]
        gate.open()
        wait_for(pids)
        """,
        path,
        processes,
    )
    assert sorted(os.listdir(path)) == PARTS
    with JobQueue.open(path) as queue:
        stats = queue.stats()
        assert (stats.cells, stats.free, stats.participants) == (256, 256, 0)
        run_a_job(queue)


def test_a_creator_killed_at_any_moment_leaves_nothing_that_stops_the_next(path, run_script):
    os.mkdir(path)
    run_script(
        """
        import random
        random.seed(7)
        for n in range(25):
            path = os.path.join(sys.argv[1], str(n))

            def create():
                with JobQueue.open_or_create(path, 16, participants=16, arena_bytes=2**20) as queue:
                    queue.submit(Pass(1, b"survives"))

            pid = fork(create)
            time.sleep(random.random() * 0.03)
            os.kill(pid, 9)
            code = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
            assert code in (0, -9), code
            queue = JobQueue.open_or_create(path, 16, participants=16, arena_bytes=2**20)
            waiting = queue.stats().waiting
            if code == 0:
                assert waiting == 1
            if waiting:
                queue.claim(0).ack()
            queue.submit(Pass(1, b"x" * 500))
            queue.claim(0).reply(encode_result(0, b"r" * 500))
            assert queue.recv(0).result == b"r" * 500
            queue.close()
            assert len(os.listdir(path)) == 11, os.listdir(path)
        """,
        path,
    )


# --- no room on the disk --------------------------------------------------------------------------------------------


def test_a_disk_too_small_for_the_pool_is_an_error_that_leaves_no_file(mount):
    path = os.fspath(mount("64k") / "queue")
    for call in (JobQueue.create, JobQueue.open_or_create):
        with pytest.raises(OSError, match=r"No space left.*bytes are needed; nothing was created"):
            call(path, 4096)
    assert all_files(path) == []


def test_a_disk_that_fills_up_between_the_files_leaves_whole_files_and_the_rest_is_made_later(mount):
    disk = mount("512k")
    path = os.fspath(disk / "queue")
    filler = disk / "filler"
    filler.write_bytes(bytes(470 * 1024))
    with pytest.raises(OSError, match="No space left") as caught:
        JobQueue.create(path, 16, participants=16, arena_bytes=2**23)
    assert caught.value.errno == 28
    left = {name: os.stat(os.path.join(path, name)).st_ino for name in os.listdir(path)}
    assert "pool" in left
    assert len(left) < len(PARTS)
    filler.unlink()
    with JobQueue.open(path) as queue:
        run_a_job(queue)
    assert sorted(os.listdir(path)) == PARTS
    assert {name: os.stat(os.path.join(path, name)).st_ino for name in left} == left


def test_a_limit_on_the_size_of_files_is_an_error_that_leaves_no_file(path, run_script):
    run_script(
        """
        import errno, resource
        resource.setrlimit(resource.RLIMIT_FSIZE, (65536, resource.RLIM_INFINITY))
        try:
            JobQueue.create(sys.argv[1], 4096)
        except OSError as error:
            assert error.errno == errno.EFBIG and "nothing was created" in str(error), error
        else:
            raise AssertionError("created beyond the limit")
        assert os.listdir(sys.argv[1]) == [], os.listdir(sys.argv[1])
        resource.setrlimit(resource.RLIMIT_FSIZE, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))
        JobQueue.create(sys.argv[1], 16).close()
        """,
        path,
    )


# --- nothing is left behind -----------------------------------------------------------------------------------------


def descriptors():
    gc.collect()
    return len(os.listdir("/proc/self/fd"))


def mappings(path):
    with open("/proc/self/maps") as lines:
        return sum(path in line for line in lines)


def test_closing_gives_back_every_descriptor_and_mapping(make, path):
    keeper = make(**SMALL)
    before = descriptors(), mappings(path)
    for _ in range(5):
        with JobQueue.open(path) as client, JobQueue.open(path) as worker, JobQueue.open(path, readonly=True) as looker:
            client.submit(Pass(1, b""))
            worker.claim(WAIT_S).reply(encode_result(0, b""))
            client.recv(WAIT_S)
            looker.stats()
    assert (descriptors(), mappings(path)) == before
    assert keeper.stats().participants == 0


@pytest.mark.parametrize("name", PARTS)
def test_an_open_that_fails_gives_back_every_descriptor_and_mapping(path, name):
    JobQueue.create(path, 16, **SMALL).close()
    with open(os.path.join(path, name), "r+b") as file:
        file.write(b"BROKEN")
    before = descriptors(), mappings(path)
    for readonly in (False, True):
        with pytest.raises(LayoutMismatch, match=name):
            JobQueue.open(path, readonly)
    assert (descriptors(), mappings(path)) == before

"""Files: made all at once or not at all, never replaced, and checked before a word of them is trusted."""

import errno
import gc
import os
import signal
import stat
import subprocess
import zlib

import numpy as np
import pytest

from subetha import files
from subetha._core import HeartbeatTable, SharedRing
from subetha.errors import LayoutMismatch
from subetha.layout import FILE_HEADER, LAYOUT_VERSION, MAGIC, Kind

MB = 2**20


def create(path, size=4096, **options):
    files.create(path, Kind.MAP, size, **{"capacity": 3, **options})


@pytest.fixture
def without_unnamed_files(monkeypatch):
    """A file system that has no files without a name."""
    real = os.open
    refused = []

    def open_with_names(path, flags, *mode, **options):
        if flags & os.O_TMPFILE == os.O_TMPFILE:
            refused.append(path)
            raise OSError(errno.EOPNOTSUPP, os.strerror(errno.EOPNOTSUPP), path)
        return real(path, flags, *mode, **options)

    monkeypatch.setattr(os, "open", open_with_names)
    return refused


@pytest.fixture(params=["unnamed", "named"])
def either_way(request):
    """Both ways to make a file: with O_TMPFILE, and where the file system has none of it."""
    if request.param == "named":
        request.getfixturevalue("without_unnamed_files")
    return request.param


class TestCreating:
    def test_the_header_says_what_the_file_is(self, path, either_way):
        files.create(path, Kind.DEQUE, 5000, capacity=2**40, cell_bytes=64, payload_bytes=48, extra=2**50, mode=0o640)
        raw = path.read_bytes()
        assert len(raw) == 5000
        header = np.frombuffer(raw[: FILE_HEADER.itemsize], FILE_HEADER)[0]
        assert raw[:8] == MAGIC
        expected = {
            "layout_version": LAYOUT_VERSION,
            "kind": Kind.DEQUE,
            "capacity": 2**40,
            "cell_bytes": 64,
            "payload_bytes": 48,
            "flags": 0,
            "mode": 0o640,
            "extra": 2**50,
            "reserved": 0,
            "crc32": zlib.crc32(raw[:60]),
        }
        assert {name: int(header[name]) for name in expected} == expected
        assert abs(int(header["created_ns"]) / 1e9 - path.stat().st_mtime) < 60
        assert raw[FILE_HEADER.itemsize :] == bytes(5000 - FILE_HEADER.itemsize)

    def test_space_is_really_taken(self, path, either_way):
        create(path, MB)
        assert path.stat().st_size == MB
        assert path.stat().st_blocks * 512 >= MB

    def test_a_sparse_tail_takes_no_space(self, path, either_way):
        create(path, 64 * MB, sparse_from=8192)
        assert path.stat().st_size == 64 * MB
        assert path.stat().st_blocks * 512 < MB

    def test_contents_are_there_before_the_name_is(self, shm, path, either_way):
        during = []

        def fill(contents):
            during.extend(name for name in os.listdir(shm) if name == path.name)
            assert contents.shape == (4096,)
            assert bytes(contents[:8]) == MAGIC
            contents[1000:1004] = 7

        create(path, fill=fill)
        assert during == []
        assert path.read_bytes()[999:1005] == b"\0\7\7\7\7\0"

    def test_an_unnamed_file_is_used_where_there_is_one(self, shm, path):
        create(path, fill=lambda contents: os.listdir(shm) == [] or pytest.fail(f"{os.listdir(shm)}"))
        assert os.listdir(shm) == [path.name]

    @pytest.mark.parametrize("code", [errno.EOPNOTSUPP, errno.EISDIR, errno.EINVAL])
    def test_else_a_temporary_name_is_used_that_does_not_stay(self, shm, path, monkeypatch, code):
        real, names = os.open, []

        def refuse(path, flags, *mode, **options):
            if flags & os.O_TMPFILE == os.O_TMPFILE:
                raise OSError(code, os.strerror(code), path)
            return real(path, flags, *mode, **options)

        monkeypatch.setattr(os, "open", refuse)
        create(path, fill=lambda contents: names.extend(os.listdir(shm)))
        assert len(names) == 1
        assert names[0].startswith(f"file.{os.getpid()}.")
        assert names[0].endswith(".tmp")
        assert os.listdir(shm) == [path.name]
        assert path.stat().st_nlink == 1

    def test_other_errors_of_the_directory_are_not_worked_around(self, shm, path, monkeypatch):
        real = os.open

        def refuse(path, flags, *mode, **options):
            if flags & os.O_TMPFILE == os.O_TMPFILE:
                raise OSError(errno.EACCES, os.strerror(errno.EACCES), path)
            return real(path, flags, *mode, **options)

        monkeypatch.setattr(os, "open", refuse)
        with pytest.raises(PermissionError):
            create(path)
        assert os.listdir(shm) == []

    @pytest.mark.parametrize("umask", [0o000, 0o077, 0o777])
    @pytest.mark.parametrize("mode", [0o600, 0o660, 0o666, 0o400])
    def test_the_mode_is_kept_under_any_umask(self, path, either_way, umask, mode):
        before = os.umask(umask)
        try:
            create(path, mode=mode)
        finally:
            os.umask(before)
        assert stat.S_IMODE(path.stat().st_mode) == mode

    def test_an_existing_name_is_never_replaced(self, shm, path, either_way):
        path.write_bytes(b"mine")
        with pytest.raises(FileExistsError, match="the file exists; open it, or choose another name") as caught:
            create(path)
        assert caught.value.filename == os.fspath(path)
        assert path.read_bytes() == b"mine"
        assert os.listdir(shm) == [path.name]

    def test_a_name_that_is_taken_meanwhile_is_not_replaced(self, shm, path, either_way):
        with pytest.raises(FileExistsError):
            create(path, fill=lambda contents: path.write_bytes(b"faster"))
        assert path.read_bytes() == b"faster"
        assert os.listdir(shm) == [path.name]

    @pytest.mark.parametrize(
        "error", [ZeroDivisionError("in fill"), KeyboardInterrupt(), OSError(errno.EIO, "in fill")]
    )
    def test_nothing_is_left_when_filling_fails(self, shm, path, either_way, error):
        gc.collect()  # what earlier tests left
        before = set(os.listdir("/proc/self/fd"))

        def fill(contents):
            raise error

        with pytest.raises(type(error)) as caught:
            create(path, fill=fill)
        assert caught.value is error
        assert os.listdir(shm) == []
        # the mapping lives as long as the traceback
        error.__traceback__ = caught = None
        gc.collect()
        assert set(os.listdir("/proc/self/fd")) == before

    def test_nothing_is_left_when_the_maker_is_killed(self, script, shm, path):
        child = script(
            """
            from subetha import files
            from subetha.layout import Kind
            files.create(sys.argv[1], Kind.MAP, 4096, capacity=1, fill=lambda _: os.kill(os.getpid(), signal.SIGKILL))
            """,
            path,
        )
        assert child.process.wait(60) == -signal.SIGKILL
        assert os.listdir(shm) == []

    def test_a_missing_directory_is_not_made(self, shm, either_way):
        for path in (shm / "no" / "file", shm / "no" / "such" / "file"):
            with pytest.raises(FileNotFoundError):
                create(path)
        assert os.listdir(shm) == []

    def test_a_file_is_no_directory(self, shm, path, either_way):
        path.write_bytes(b"")
        with pytest.raises(NotADirectoryError):
            create(path / "below")

    def test_names_may_be_bytes_and_relative(self, shm, monkeypatch, either_way):
        monkeypatch.chdir(shm)
        create(b"\xff.ring")
        create("plain")
        assert sorted(os.listdir(os.fsencode(shm))) == [b"plain", b"\xff.ring"]

    @pytest.mark.skipif(os.geteuid() != 0, reason="only root can become another user")
    def test_without_permission_for_the_directory_nothing_is_made(self, run_script, shm):
        shm.chmod(0o755)
        out = run_script(
            """
            import mmap  # while its file can still be read
            os.chdir(sys.argv[1])
            os.setuid(12345)
            try:
                SharedRing.create("ring", 4)
            except PermissionError as error:
                say(error.strerror)
            say(os.listdir())
            """,
            shm,
        )
        assert out.splitlines() == ["Permission denied", "[]"]


class TestFullDisks:
    @pytest.fixture
    def small_disk(self, shm):
        """A file system of 64 KiB."""
        where = shm / "disk"
        where.mkdir()
        mounted = subprocess.run(
            ["mount", "-t", "tmpfs", "-o", "size=64k", "tmpfs", where], capture_output=True, text=True
        )
        if mounted.returncode != 0:
            pytest.skip(f"a small file system cannot be mounted here: {mounted.stderr.strip()}")
        yield where
        subprocess.run(["umount", where], check=True)

    def test_a_full_disk_is_an_error_that_leaves_nothing(self, small_disk, either_way):
        path = small_disk / "file"
        for make, size in [
            (lambda: SharedRing.create(path, 1024), r"\d{6}"),
            (lambda: SharedRing.open_or_create(path, 2), r"\d{5}"),
            (lambda: HeartbeatTable.create(path, 1000), "320256"),
            (lambda: create(path, 200_000), "200000"),
        ]:
            with pytest.raises(OSError, match=f"{size} bytes are needed; nothing was created") as caught:
                make()
            assert caught.value.errno == errno.ENOSPC
            assert caught.value.filename == os.fspath(path)
            assert os.listdir(small_disk) == []
            assert os.statvfs(small_disk).f_bfree == os.statvfs(small_disk).f_blocks
        with HeartbeatTable.create(path, 100) as table:
            assert table.register(1) == 0
        with pytest.raises(OSError, match="bytes are needed"):
            HeartbeatTable.create(small_disk / "second", 150)
        assert os.listdir(small_disk) == ["file"]

    def test_a_file_larger_than_this_process_may_write_is_an_error_that_leaves_nothing(self, run_script, shm):
        out = run_script(
            """
            import errno, resource
            resource.setrlimit(resource.RLIMIT_FSIZE, (8192, 8192))
            real = os.open

            def without_unnamed_files(path, flags, *mode, **options):
                if flags & os.O_TMPFILE == os.O_TMPFILE:
                    raise OSError(errno.EOPNOTSUPP, "none here")
                return real(path, flags, *mode, **options)

            path = sys.argv[1] + "/file"
            for os.open in (real, without_unnamed_files):
                for make in (lambda: SharedRing.create(path, 4), lambda: HeartbeatTable.open_or_create(path, 1000)):
                    try:
                        make()
                    except OSError as error:
                        left = os.listdir(sys.argv[1])
                        told = "nothing was created" in str(error) and error.filename == path
                        say(errno.errorcode[error.errno], told, left)
            HeartbeatTable.create(path, 4).close()
            say(os.listdir(sys.argv[1]))
            """,
            shm,
        )
        assert out.splitlines() == ["EFBIG True []"] * 4 + ["['file']"]

    def test_a_name_that_may_not_be_on_the_disk_is_an_error_that_does_not_say_that_nothing_was_created(
        self, path, monkeypatch
    ):
        def full(_directory):
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

        monkeypatch.setattr(files, "sync_directory", full)
        with pytest.raises(OSError, match=r"No space left on device$"):
            create(path, durable=True)
        assert path.stat().st_size == 4096

    def test_more_than_any_disk_has_is_an_error(self, shm, path, either_way):
        with pytest.raises(OSError, match=f"{2**62} bytes are needed|too large|Invalid") as caught:
            create(path, 2**62)
        assert caught.value.errno in (errno.ENOSPC, errno.EFBIG, errno.EINVAL, errno.ENOMEM)
        assert os.listdir(shm) == []


class TestOpening:
    def test_an_opened_file_is_mapped_whole_and_shared(self, path):
        create(path, 5000)
        contents, header, fd = files.open_mapped(path, Kind.MAP)
        try:
            assert (contents.shape, contents.dtype, contents.flags.writeable) == ((5000,), np.uint8, True)
            assert header["capacity"] == 3
            contents[4999] = 9
            assert path.read_bytes()[4999] == 9
            assert os.fstat(fd).st_ino == path.stat().st_ino
            assert not os.get_inheritable(fd)
        finally:
            os.close(fd)

    def test_a_readonly_mapping_cannot_be_written(self, path):
        create(path)
        path.chmod(0o400)
        contents, _, fd = files.open_mapped(path, Kind.MAP, readonly=True)
        os.close(fd)
        assert not contents.flags.writeable
        with pytest.raises(ValueError, match="read-only"):
            contents[100] = 1

    def test_the_wrong_size_is_said_with_both(self, path):
        files.check_size(path, 100, 100)
        with pytest.raises(
            LayoutMismatch, match=r"file: expected 100 bytes by its header, found 99; the file was cut or is damaged"
        ):
            files.check_size(path, 100, 99)
        with pytest.raises(LayoutMismatch, match="found 101"):
            files.check_size(os.fsencode(path), 100, 101)

    def test_a_refused_file_is_closed_again(self, path):
        create(path)
        gc.collect()  # what earlier tests left
        before = set(os.listdir("/proc/self/fd"))
        with pytest.raises(LayoutMismatch, match="expected a file of kind RING, found MAP"):
            files.open_mapped(path, Kind.RING)
        assert set(os.listdir("/proc/self/fd")) == before

    @pytest.mark.skipif(os.geteuid() != 0, reason="only root can become another user")
    def test_another_user_needs_the_kernels_permission_and_the_makers(self, run_script, shm):
        shm.chmod(0o755)
        for name, mode in [("owner", 0o600), ("everybody", 0o606), ("group", 0o660)]:
            SharedRing.create(shm / name, 4, mode=mode).close()
        os.chown(shm / "group", -1, 12345)
        out = run_script(
            """
            import mmap  # while its file can still be read
            os.setgid(12345)
            os.setuid(12345)
            for name in ("owner", "everybody", "group"):
                for readonly in (False, True):
                    try:
                        with SharedRing.open(f"{sys.argv[1]}/{name}", readonly) as ring:
                            say(name, len(ring))
                    except PermissionError as error:
                        say(name, error.strerror.split(" (")[0])
            """,
            shm,
        )
        refusal = "everybody the file belongs to user 0 and was created for its owner alone"
        assert out.splitlines() == ["owner Permission denied"] * 2 + [refusal] * 2 + ["group 0"] * 2


class TestFileSystems:
    MOUNTS = (
        "proc /proc proc rw 0 0\n"
        "/dev/sda1 / ext4 rw 0 0\n"
        "server:/home {here} nfs4 rw 0 0\n"
        "tmpfs {here}/local tmpfs rw 0 0\n"
        "server:/a {here}/a\\040folder\\011with\\134all cifs rw 0 0\n"
        "first {here}/twice nfs rw 0 0\n"
        "second {here}/twice ext4 rw 0 0\n"
    )

    @pytest.fixture
    def mounts(self, shm):
        here = os.path.realpath(shm)
        (shm / "mounts").write_text(self.MOUNTS.replace("{here}", here))
        return os.fspath(shm / "mounts")

    @pytest.mark.parametrize(
        ("name", "expected"),
        [
            ("", "nfs4"),
            ("file", "nfs4"),
            ("deep/below/it", "nfs4"),
            ("local", "tmpfs"),
            ("local/deep/file", "tmpfs"),
            ("locality/file", "nfs4"),
            ("a folder\twith\\all/file", "cifs"),
            ("twice/file", "ext4"),
            ("../elsewhere", "ext4"),
        ],
    )
    def test_the_innermost_and_latest_mount_counts(self, shm, mounts, name, expected):
        assert files.file_system_of(shm / name, mounts) == expected
        assert files.file_system_of(os.fsencode(shm / name), mounts) == expected

    def test_links_are_followed(self, shm, mounts):
        (shm / "local").mkdir()
        (shm / "link").symlink_to(shm / "local")
        assert files.file_system_of(shm / "link" / "file", mounts) == "tmpfs"

    def test_a_path_that_no_mount_holds_has_no_name(self, shm):
        (shm / "mounts").write_text("tmpfs /nowhere tmpfs rw 0 0\n")
        assert files.file_system_of(shm, os.fspath(shm / "mounts")) == ""

    def test_the_kernels_list_is_understood(self):
        assert files.file_system_of("/proc/self/mounts") == "proc"

    @pytest.mark.parametrize("name", sorted(files.NETWORK_FILE_SYSTEMS))
    def test_network_file_systems_are_refused_by_name(self, shm, name):
        mounts = shm / "mounts"
        mounts.write_text(f"server:/x / {name} rw 0 0\n")
        with pytest.raises(OSError, match=f"{name} is a network file system: .*use a local directory") as caught:
            files.refuse_network_file_system(shm, os.fspath(mounts))
        assert caught.value.errno == errno.ENOTSUP
        assert caught.value.filename == os.fspath(shm)

    @pytest.mark.parametrize("name", ["tmpfs", "ext4", "xfs", "btrfs", "zfs", "overlay", "fuseblk", ""])
    def test_local_file_systems_are_accepted(self, shm, name):
        mounts = shm / "mounts"
        mounts.write_text(f"x / {name} rw 0 0\n")
        files.refuse_network_file_system(shm, os.fspath(mounts))

    @pytest.mark.parametrize("kind", [SharedRing, HeartbeatTable])
    def test_nothing_is_made_or_opened_on_a_network_file_system(self, shm, path, monkeypatch, kind):
        kind.create(shm / "there", 4).close()
        monkeypatch.setattr(files, "file_system_of", lambda path, mounts="": "nfs4")
        gc.collect()  # what earlier tests left
        before = set(os.listdir("/proc/self/fd"))
        for attempt in (
            lambda: kind.create(path, 4),
            lambda: kind.open_or_create(path, 4),
            lambda: kind.open(shm / "there"),
            lambda: kind.open(shm / "there", readonly=True),
        ):
            with pytest.raises(OSError, match="nfs4 is a network file system"):
                attempt()
        assert os.listdir(shm) == ["there"]
        assert set(os.listdir("/proc/self/fd")) == before

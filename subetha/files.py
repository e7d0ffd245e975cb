"""Creating and opening the files that Subetha maps.

Creation is atomic: an unnamed file in the same directory gets its space and its contents, then its name, without ever
replacing another file. Opening checks all that the header says before a word of the rest is trusted.
No call truncates, replaces or re-creates an existing file.
"""

import errno
import os
import stat
import time
import zlib
from collections.abc import Callable

import numpy as np
import numpy.typing as npt

from subetha.errors import LayoutMismatch
from subetha.layout import FILE_HEADER, LAYOUT_VERSION, MAGIC, Kind

Path = str | bytes | os.PathLike[str] | os.PathLike[bytes]
Bytes = npt.NDArray[np.uint8]

NETWORK_FILE_SYSTEMS = frozenset(
    "9p afs ceph cifs coda fuse.glusterfs fuse.s3fs fuse.sshfs gfs2 glusterfs gpfs lustre ncpfs nfs nfs4 ocfs2 smb3 smbfs".split()
)
"""Where a mapping is not shared between machines, or locks do not tell who lives."""

MEMORY_FILE_SYSTEMS = frozenset(("ramfs", "tmpfs"))


def file_system_of(path: Path, mounts: str = "/proc/self/mounts") -> str:
    """Name of the file system that holds `path`, as the kernel's list of mounts has it ("" if it has none)."""
    real = os.path.realpath(os.fsencode(path))
    best, name = b"", b""
    with open(mounts, "rb") as lines:
        for line in lines:
            _, point, kind = line.split(b" ")[:3]
            for escaped, plain in ((b"\\040", b" "), (b"\\011", b"\t"), (b"\\012", b"\n"), (b"\\134", b"\\")):
                point = point.replace(escaped, plain)
            inside = point == b"/" or real == point or real.startswith(point + b"/")
            if inside and len(point) >= len(best):
                best, name = point, kind
    return os.fsdecode(name)


def refuse_network_file_system(directory: Path, mounts: str = "/proc/self/mounts") -> None:
    """Raise OSError (ENOTSUP) where `directory` lies on a network file system."""
    name = file_system_of(directory, mounts)
    if name in NETWORK_FILE_SYSTEMS:
        raise OSError(
            errno.ENOTSUP,
            f"{name} is a network file system: its mappings and locks do not hold between machines; "
            "use a local directory, for example below /dev/shm or on a local disk",
            os.fsdecode(directory),
        )


def boot_hash() -> int:
    """What tells this boot of the machine from others: the first 8 bytes of the kernel's boot id."""
    with open("/proc/sys/kernel/random/boot_id", "rb") as file:
        return int.from_bytes(bytes.fromhex(file.read(36).decode().replace("-", ""))[:8], "little") or 1


def create(
    path: Path,
    kind: Kind,
    size: int,
    *,
    capacity: int,
    cell_bytes: int = 0,
    payload_bytes: int = 0,
    extra: int = 0,
    flags: int = 0,
    mode: int = 0o600,
    created_ns: int | None = None,
    sparse_from: int | None = None,
    durable: bool = False,
    fill: Callable[[Bytes], None] | None = None,
) -> None:
    """Create `path` of `size` bytes with its header and contents, all at once or not at all.

    Parameters
    ----------
    mode : int
        Permission bits, kept under any umask.
    created_ns : int, optional
        What the header gives as the time of creation; default: now.
    sparse_from : int, optional
        Offset in bytes from which no disk space is taken (the arena's data); default: space for all of it.
    durable : bool
        Return only when the file and its name are on the disk.
    fill : callable, optional
        Writes the rest of the contents into the mapped uint8 array of `size` bytes before the file has its name.

    Raises
    ------
    FileExistsError
        The name is taken; that file is untouched.
    OSError
        The disk is full (ENOSPC), the file would be too large (EFBIG), or the directory does not let us. When it comes from
        syncing the directory, the file is there, but its name may not be on the disk.
    """
    path = os.fsencode(path)
    directory = os.path.dirname(path) or b"."
    refuse_network_file_system(directory)
    header = np.zeros(1, FILE_HEADER)
    header["magic"] = MAGIC
    header["layout_version"] = LAYOUT_VERSION
    header["kind"] = kind
    header["capacity"] = capacity
    header["cell_bytes"] = cell_bytes
    header["payload_bytes"] = payload_bytes
    header["flags"] = flags
    header["mode"] = mode
    header["created_ns"] = time.time_ns() if created_ns is None else created_ns
    header["extra"] = extra
    header["crc32"] = zlib.crc32(header.tobytes()[:-4])
    fd, temporary = _open_unnamed(directory, path)
    try:
        os.fchmod(fd, mode)
        os.posix_fallocate(fd, 0, size if sparse_from is None else sparse_from)
        os.ftruncate(fd, size)
        contents = _map(fd, size, readonly=False)
        contents[: FILE_HEADER.itemsize] = np.frombuffer(header.tobytes(), np.uint8)
        if fill is not None:
            fill(contents)
        del contents
        if durable:
            os.fsync(fd)
        if temporary is None:
            # a directory descriptor, though unused, makes CPython call linkat, which alone can follow the link to the file
            os.link(f"/proc/self/fd/{fd}", path, src_dir_fd=fd, follow_symlinks=True)
        else:
            os.link(temporary, path)
    except OSError as error:
        if error.errno in (errno.ENOSPC, errno.EFBIG, errno.EDQUOT):
            raise OSError(
                error.errno,
                f"{os.strerror(error.errno)}: {size} bytes are needed; nothing was created",
                os.fsdecode(path),
            ) from error
        if error.errno == errno.EEXIST:
            raise FileExistsError(
                errno.EEXIST, "the file exists; open it, or choose another name", os.fsdecode(path)
            ) from None
        raise
    finally:
        if temporary is not None:
            os.unlink(temporary)
        os.close(fd)
    if durable:
        sync_directory(directory)


def sync_directory(directory: bytes) -> None:
    """Return when the names in a directory are on the disk."""
    fd = os.open(directory, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)


def refuse_memory_file_system(directory: Path) -> None:
    """Raise OSError (ENOTSUP) where what `directory` holds is gone with the power."""
    name = file_system_of(directory)
    if name in MEMORY_FILE_SYSTEMS:
        raise OSError(
            errno.ENOTSUP,
            f"{name} is a file system in memory, which no power failure leaves; choose a directory on a disk, or "
            "durability='process'",
            os.fsdecode(directory),
        )


def _open_unnamed(directory: bytes, path: bytes) -> tuple[int, bytes | None]:
    """A file without a name, which a death leaves nothing of; else, where the file system has none, a temporary one."""
    try:
        return os.open(directory, os.O_TMPFILE | os.O_RDWR | os.O_CLOEXEC, 0o600), None
    except OSError as error:
        if error.errno not in (errno.EOPNOTSUPP, errno.EISDIR, errno.EINVAL):
            raise
    temporary = b"%s.%d.%s.tmp" % (path, os.getpid(), os.urandom(4).hex().encode())
    return os.open(temporary, os.O_CREAT | os.O_EXCL | os.O_RDWR | os.O_CLOEXEC, 0o600), temporary


def _map(fd: int, size: int, readonly: bool) -> Bytes:
    with open(fd, "rb" if readonly else "r+b", buffering=0, closefd=False) as file:
        return np.memmap(file, dtype=np.uint8, mode="r" if readonly else "r+", shape=(size,))


def open_mapped(path: Path, kind: Kind, readonly: bool = False) -> tuple[Bytes, np.void, int]:
    """Map an existing file after checking its header.

    Returns
    -------
    contents : numpy.memmap, uint8, shape (file size,)
    header : numpy.void of FILE_HEADER
    fd : int
        A descriptor for the caller to close.

    Raises
    ------
    FileNotFoundError, PermissionError
        No such file; or it is another user's and was not created with a group's permission.
    LayoutMismatch
        It is not a Subetha file of this kind and layout version, or it was cut or damaged.
    """
    name = os.fsdecode(path)
    fd = os.open(path, (os.O_RDONLY if readonly else os.O_RDWR) | os.O_CLOEXEC | os.O_NONBLOCK)
    try:
        found = os.fstat(fd)
        if not stat.S_ISREG(found.st_mode):
            raise LayoutMismatch(
                f"{name}: expected a regular file, found mode {stat.filemode(found.st_mode)}; choose another path"
            )
        raw = os.pread(fd, FILE_HEADER.itemsize, 0)
        if len(raw) < FILE_HEADER.itemsize:
            raise LayoutMismatch(
                f"{name}: expected at least {FILE_HEADER.itemsize} bytes, found {len(raw)}; this is no Subetha file or it was cut"
            )
        header = np.frombuffer(raw, FILE_HEADER)[0]
        _check_header(name, raw, header, kind)
        if found.st_uid != os.geteuid() and not int(header["mode"]) & 0o060:
            raise PermissionError(
                errno.EACCES,
                f"the file belongs to user {found.st_uid} and was created for its owner alone (mode {int(header['mode']):o}); "
                "create it with a group mode such as 0o660 to share it",
                name,
            )
        refuse_network_file_system(path)
        contents = _map(fd, found.st_size, readonly)
    except BaseException:
        os.close(fd)
        raise
    return contents, header, fd


def _check_header(name: str, raw: bytes, header: np.void, kind: Kind) -> None:
    if raw[:8] != MAGIC:
        raise LayoutMismatch(f"{name}: expected magic {MAGIC!r}, found {raw[:8]!r}; this is no Subetha file")
    if header["layout_version"] != LAYOUT_VERSION:
        raise LayoutMismatch(
            f"{name}: expected layout version {LAYOUT_VERSION}, found {header['layout_version']}; "
            "use the release that made it, or make a new file"
        )
    if header["crc32"] != zlib.crc32(raw[:-4]):
        raise LayoutMismatch(
            f"{name}: expected header CRC-32 {zlib.crc32(raw[:-4]):#010x}, found {header['crc32']:#010x}; the file is damaged"
        )
    if header["kind"] != kind:
        found = Kind(header["kind"]).name if header["kind"] in list(Kind) else int(header["kind"])
        raise LayoutMismatch(f"{name}: expected a file of kind {kind.name}, found {found}; open it as what it is")


def check_belongs(path: Path, created_ns: int, header: np.void) -> None:
    """Raise LayoutMismatch where a file is not of the queue whose pool was made at `created_ns`."""
    if int(header["extra"]) != created_ns:
        raise LayoutMismatch(
            f"{os.fsdecode(path)}: expected a file of the queue made at {created_ns} ns, found one of a queue made at "
            f"{header['extra']} ns; put the right file back, or make a new queue"
        )


def check_size(path: Path, expected: int, found: int) -> None:
    """Raise LayoutMismatch where a file is not as long as its header says."""
    if found != expected:
        raise LayoutMismatch(
            f"{os.fsdecode(path)}: expected {expected} bytes by its header, found {found}; the file was cut or is damaged"
        )

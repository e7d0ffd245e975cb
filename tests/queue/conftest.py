"""What the queue's tests share: queues that close themselves, scripts in their own processes, and a queue's bytes."""

import os
import signal
import subprocess
import sys
import textwrap

import numpy as np
import pytest

from subetha.jobqueue import JobQueue
from subetha.layout import (
    ARENA_LINES,
    HOT_LINE,
    JOB_CELL,
    LINE,
    LINES_OFFSET,
    MIN_BLOCK_BYTES,
    PARTICIPANT,
    POOL_LINES,
    PRIORITIES,
    QUEUE_GEOMETRY,
    RING_LINES,
    SIZE_CLASSES,
    TABLE_LINES,
    align,
)

SCRIPT_SECONDS = 60

SCRIPT_HEAD = """
import faulthandler, gc, json, os, select, signal, sys, threading, time
faulthandler.enable()
import numpy as np
from subetha._core import decode_result, decode_submit, encode_result
from subetha.errors import *
from subetha.jobqueue import JobQueue
from subetha.pass_registry import Pass


def pattern(seed, length):
    # every byte follows from the seed and its place, so that a torn, mixed or moved one shows
    start = (seed * 2654435761 + 12345) & 0xFFFFFFFF
    values = (np.arange(length, dtype=np.uint64) * np.uint64(2246822519) + np.uint64(start)) >> np.uint64(11)
    return values.astype(np.uint8).tobytes()


def fork(function, *arguments):
    # the child ends with 0 where `function` returns, and with 1 where it raises
    pid = os.fork()
    if pid:
        return pid
    code = 1
    try:
        function(*arguments)
        code = 0
    except BaseException:
        import traceback
        traceback.print_exc()
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)


def wait_for(pids):
    ended = [(pid, os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])) for pid in pids]
    assert all(code == 0 for _, code in ended), ended


class Gate:
    # a pipe that many processes wait at and one opens
    def __init__(self):
        self.out, self.into = os.pipe()

    def wait(self):
        os.close(self.into)
        os.read(self.out, 1)

    def open(self):
        os.close(self.into)
"""


class QueueFiles:
    """A queue's files as writable structured arrays: the bytes that a misbehaving peer, or a test, may write."""

    def __init__(self, path):
        self.path = os.fspath(path)
        pool = self.bytes("pool")
        geometry = pool[LINE : 2 * LINE].view(QUEUE_GEOMETRY)[0]
        self.job_bytes, self.result_bytes = int(geometry["job_bytes"]), int(geometry["result_bytes"])
        self.participants, self.arena_limit = int(geometry["participants"]), int(geometry["arena_bytes"])
        self.cells_at = LINES_OFFSET + POOL_LINES.itemsize
        self.stride = align(JOB_CELL.itemsize + self.job_bytes + self.result_bytes, LINE)

    def bytes(self, name):
        return np.asarray(np.memmap(os.path.join(self.path, name), np.uint8, "r+"))

    @property
    def cells(self):
        kind = np.dtype(
            {
                "names": [*JOB_CELL.names, "job", "result"],
                "formats": [
                    *(JOB_CELL.fields[name][0] for name in JOB_CELL.names),
                    ("u1", self.job_bytes),
                    ("u1", self.result_bytes),
                ],
                "offsets": [
                    *(JOB_CELL.fields[name][1] for name in JOB_CELL.names),
                    JOB_CELL.itemsize,
                    JOB_CELL.itemsize + self.job_bytes,
                ],
                "itemsize": self.stride,
            }
        )
        return self.bytes("pool")[self.cells_at :].view(kind)

    def ring_place(self, name):
        """File of a ring of references, offset of its lines, offset and number of its places."""
        places = 2 * len(self.cells)
        file, _, number = name.partition("/")
        at = LINES_OFFSET
        if number:
            first = align(LINES_OFFSET + 4 * self.participants, MIN_BLOCK_BYTES)
            at = first + (int(number) - 1) * align(RING_LINES.itemsize + 8 * places, MIN_BLOCK_BYTES)
        return file, at, at + RING_LINES.itemsize, places

    def ring(self, name):
        """Lines (RING_LINES, shape (1,)) and places (uint64) of a ring of references."""
        file, at, places_at, places = self.ring_place(name)
        contents = self.bytes(file)
        return contents[at:places_at].view(RING_LINES), contents[places_at : places_at + 8 * places].view("<u8")

    @property
    def mailboxes(self):
        """Numbers of the participants whose mailbox is there."""
        made = self.bytes("mail")[LINES_OFFSET : LINES_OFFSET + 4 * self.participants].view("<u4")
        return [int(i) + 1 for i in np.flatnonzero(made)]

    @property
    def ring_names(self):
        return [
            *(f"{kind}-{level}" for level in range(PRIORITIES) for kind in ("back", "submit")),
            *(f"mail/{number}" for number in self.mailboxes),
        ]

    @property
    def records(self):
        start = LINES_OFFSET + TABLE_LINES.itemsize
        return self.bytes("table")[start : start + self.participants * PARTICIPANT.itemsize].view(PARTICIPANT)

    @property
    def arena_classes(self):
        """(block bytes, offset of the class's words, number of blocks) of each size class."""
        classes = []
        at = align(LINES_OFFSET + ARENA_LINES.itemsize, HOT_LINE)
        while len(classes) < SIZE_CLASSES and MIN_BLOCK_BYTES << len(classes) <= self.arena_limit:
            size = MIN_BLOCK_BYTES << len(classes)
            count = self.arena_limit // size
            classes.append((size, at, count))
            at = align(at + 8 * count, HOT_LINE)
        return classes

    def block_words(self, size):
        contents = self.bytes("arena")
        for block_bytes, at, count in self.arena_classes:
            if block_bytes == size:
                return contents[at : at + 8 * count].view("<u8")
        raise ValueError(f"no class of {size} bytes")


@pytest.fixture
def path(tmp_path):
    """Where a queue may be made."""
    return os.fspath(tmp_path / "queue")


@pytest.fixture
def make(path):
    """Create the queue (16 cells unless told) and handles of it; all are closed at the end."""
    handles = []

    def made(cells=16, **options):
        handles.append(JobQueue.create(path, cells, **{"arena_bytes": 2**24, "participants": 64, **options}))
        return handles[-1]

    def opened(readonly=False, **options):
        handles.append(JobQueue.open(path, readonly, **options))
        return handles[-1]

    made.open = opened
    yield made
    for handle in handles:
        handle.close()


@pytest.fixture
def files_of():
    return QueueFiles


@pytest.fixture
def start_script():
    """Start a Python script in a process of its own; it is killed with the test."""
    started = []

    def start(script, *arguments):
        process = subprocess.Popen(
            [
                sys.executable,
                "-W",
                "ignore::DeprecationWarning",
                "-c",
                SCRIPT_HEAD + textwrap.dedent(script),
                *map(str, arguments),
            ],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            start_new_session=True,
        )
        started.append(process)
        return process

    yield start
    for process in started:
        if process.poll() is None:
            os.killpg(process.pid, signal.SIGKILL)
        process.communicate()


@pytest.fixture
def run_script(start_script):
    """Run a script to its end within a hard time limit; its output.

    Anything but exit status 0 fails the test, and so does a word on standard error (an exception nobody could catch)
    unless `quiet` is false.
    """

    def run(script, *arguments, seconds=SCRIPT_SECONDS, quiet=True):
        process = start_script(script, *arguments)
        try:
            out, err = process.communicate(timeout=seconds)
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGABRT)
            out, err = process.communicate()
            pytest.fail(f"still running after {seconds} s\n{out}\n{err}")
        assert process.returncode == 0, f"exit status {process.returncode}\n{out}\n{err}"
        assert err == "" or not quiet, err
        return out

    return run

"""What the queue's tests share: queues that close themselves, and scripts in their own processes."""

import os
import signal
import subprocess
import sys
import textwrap

import pytest

from subetha.jobqueue import JobQueue

from .queue_files import QueueFiles

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

"""What the core's tests share: files, threads, scripts in processes of their own; no wait is without a bound."""

import contextlib
import os
import selectors
import signal
import subprocess
import sys
import textwrap
import threading
import time
from pathlib import Path

import pytest

from subetha._core import HeartbeatTable, SharedDeque, SharedHashMap, SharedRing

SCRIPT_SECONDS = 60

SCRIPT_HEAD = """
import faulthandler, gc, os, random, signal, sys, threading, time
faulthandler.enable()
import numpy as np
from ring_file import DequeFile, MapFile, RingFile, TableFile
from subetha._core import HeartbeatTable, SharedDeque, SharedHashMap, SharedRing
from subetha.errors import *
from subetha.layout import CellState, Role, cell_word
from traffic import origin_of, payload_of
gc.freeze()  # what was imported need not be looked through by every gc.collect()

def say(*words):
    print(*words, flush=True)

def heard():
    line = sys.stdin.readline()
    if not line:
        os._exit(3)
    return line.strip()

def call_beside_damage(seed, calls, own, open_mate, raw, call, damage, allowed):
    '''Call from two processes, here calls[0] times and there calls[1], while this one damages the file now and then.

    Nothing but `allowed` may come of it. The longest call here, in seconds.
    '''
    mate = os.fork()
    dice = random.Random(seed * 2 + (mate == 0))
    if mate == 0:
        own = open_mate(dice)
    code, longest = 0, 0.0
    for n in range(calls[0] if mate else calls[1]):
        if mate and dice.random() < 0.3:
            damage(raw, dice)
        start = time.monotonic()
        try:
            call(own, dice)
        except allowed:
            pass
        except BaseException as error:
            print(seed, n, repr(error), file=sys.stderr)
            code = 1
            break
        longest = max(longest, time.monotonic() - start)
    if mate == 0:
        os._exit(code)
    ended = os.waitstatus_to_exitcode(os.waitpid(mate, 0)[1])
    assert (code, ended) == (0, 0), (seed, code, ended)
    return longest
"""


class Script:
    """A Python script in a process of its own. It says lines on its standard output and hears lines on its input."""

    def __init__(self, text, *arguments):
        here = os.path.dirname(os.path.abspath(__file__))
        self.process = subprocess.Popen(
            # forking beside threads is what some of the scripts are about
            [
                sys.executable,
                "-W",
                "ignore::DeprecationWarning",
                "-c",
                SCRIPT_HEAD + textwrap.dedent(text),
                *map(str, arguments),
            ],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            env=os.environ | {"PYTHONPATH": os.pathsep.join([here, *sys.path])},
            start_new_session=True,
        )
        self.pid = self.process.pid
        self.unread = b""

    def heard(self, expected=None, seconds=SCRIPT_SECONDS):
        """The next line it says; with `expected`, that line and no other."""
        deadline = time.monotonic() + seconds
        with selectors.DefaultSelector() as selector:
            selector.register(self.process.stdout, selectors.EVENT_READ)
            while b"\n" not in self.unread:
                if not selector.select(max(0.0, deadline - time.monotonic())):
                    self.fail(f"said nothing for {seconds} s")
                more = os.read(self.process.stdout.fileno(), 65536)
                if not more:
                    self.fail("ended without another word")
                self.unread += more
        line, self.unread = self.unread.split(b"\n", 1)
        text = line.decode()
        if expected is not None and text != expected:
            self.fail(f"expected {expected!r}, heard {text!r}")
        return text

    def tell(self, text=""):
        self.process.stdin.write(f"{text}\n".encode())
        self.process.stdin.flush()

    def end(self, seconds=SCRIPT_SECONDS):
        """Wait for its end within a hard limit; anything but exit status 0 fails the test. The rest of what it said."""
        try:
            out, err = self.process.communicate(timeout=seconds)
        except subprocess.TimeoutExpired:
            self.fail(f"still running after {seconds} s")
        if self.process.returncode != 0:
            pytest.fail(f"{self.how_it_ended()}\n{out.decode()}\n{err.decode(errors='replace')}")
        return (self.unread + out).decode()

    def how_it_ended(self):
        code = self.process.returncode
        return f"killed by {signal.Signals(-code).name}" if code < 0 else f"exit status {code}"

    def kill(self):
        """SIGKILL, and wait until the kernel has buried it."""
        self.process.kill()
        self.process.wait()

    def fail(self, why):
        # faulthandler tells where it is; then its children go, too, which hold its pipes open
        with contextlib.suppress(subprocess.TimeoutExpired):
            self.process.send_signal(signal.SIGABRT)
            self.process.wait(5)
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.pid, signal.SIGKILL)
        out, err = self.process.communicate()
        pytest.fail(f"{why} ({self.how_it_ended()})\n{out.decode()}\n{err.decode(errors='replace')}")

    def bury(self):
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.pid, signal.SIGKILL)
        for pipe in (self.process.stdin, self.process.stdout, self.process.stderr):
            with contextlib.suppress(BrokenPipeError):
                pipe.close()
        self.process.wait()


@pytest.fixture
def script():
    """Start a script in a process of its own; all that are left are killed with the test."""
    started = []

    def start(text, *arguments):
        started.append(Script(text, *arguments))
        return started[-1]

    yield start
    for one in started:
        one.bury()


@pytest.fixture
def run_script(script):
    """Run a script to its end; its output."""

    def run(text, *arguments, seconds=SCRIPT_SECONDS):
        return script(text, *arguments).end(seconds)

    return run


@pytest.fixture
def path(shm) -> Path:
    """Where a file may be made."""
    return shm / "file"


@pytest.fixture
def ring(path):
    """A ring of 4 cells, 56 bytes each, at `path`."""
    with SharedRing.create(path, 4) as made:
        yield made


@pytest.fixture
def deque(path):
    """A deque of 4 cells, 56 bytes each, at `path`, owned by this handle."""
    with SharedDeque.create(path, 4) as made:
        yield made


@pytest.fixture
def shared_map(path):
    """A map of 8 keys, values of 56 bytes, at `path`."""
    with SharedHashMap.create(path, 8) as made:
        yield made


@pytest.fixture
def table(path):
    """A table of 4 slots at `path`."""
    with HeartbeatTable.create(path, 4) as made:
        yield made


@pytest.fixture
def in_threads():
    """Run functions at once, each in a thread of its own; whatever one of them raises is raised here."""

    def run(*functions, seconds=SCRIPT_SECONDS):
        results, errors = [None] * len(functions), []

        def one(i, function):
            try:
                results[i] = function()
            except BaseException as error:
                errors.append(error)

        threads = [threading.Thread(target=one, args=item, daemon=True) for item in enumerate(functions)]
        for thread in threads:
            thread.start()
        deadline = time.monotonic() + seconds
        for thread in threads:
            thread.join(max(0.0, deadline - time.monotonic()))
        if errors:
            raise errors[0]
        assert not any(thread.is_alive() for thread in threads), f"still running after {seconds} s"
        return results

    return run


@pytest.fixture
def eventually():
    """Wait until a condition holds, and fail the test where it does not within the limit."""

    def wait(condition, what, seconds=20):
        deadline = time.monotonic() + seconds
        while not condition():
            if time.monotonic() > deadline:
                pytest.fail(f"not within {seconds} s: {what}")
            time.sleep(0.005)

    return wait

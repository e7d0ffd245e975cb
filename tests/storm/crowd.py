"""A crowd of forked processes that the dice kill, stop and let go on, and what must be left of a structure after them."""

import contextlib
import ctypes
import mmap
import os
import signal
import sys
import time
import traceback
import warnings
from collections import Counter
from pathlib import Path

import numpy as np
import pytest

# where tests/crash/census.py finds what it reads files with
sys.path += [os.fspath(Path(__file__).parents[1] / name) for name in ("core", "queue")]

PATIENCE_S = 60
PR_SET_PDEATHSIG = 1
LIBC = ctypes.CDLL(None)


class Member:
    """One process of the crowd."""

    def __init__(self, role, pid, extra=None):
        self.role, self.pid, self.extra = role, pid, extra
        self.goes_on = None
        """When a stopped one is to go on; None while it runs."""

    def __repr__(self):
        return f"{self.role} {self.pid}"


class Crowd:
    """The processes, by role. What one of them raises ends up in a file, and fails the test at the next `check`."""

    def __init__(self, folder):
        self.members = []
        self.counted = Counter()
        self.trouble = os.fspath(folder / "trouble")
        self.trouble_fd = os.open(self.trouble, os.O_CREAT | os.O_RDWR | os.O_APPEND | os.O_CLOEXEC)

    def start(self, role, function, *arguments, extra=None):
        with warnings.catch_warnings():
            # no thread of this process holds a lock that a child needs
            warnings.simplefilter("ignore", DeprecationWarning)
            pid = os.fork()
        if pid == 0:
            LIBC.prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
            code = 1
            try:
                function(*arguments)
                code = 0
            except BaseException:
                os.write(self.trouble_fd, f"{role} {os.getpid()}: {traceback.format_exc()}".encode())
            finally:
                os._exit(code)
        self.members.append(Member(role, pid, extra))
        return self.members[-1]

    def of(self, *roles):
        return [member for member in self.members if member.role in roles]

    def kill(self, member):
        """SIGKILL, and reap it."""
        os.kill(member.pid, signal.SIGKILL)
        self.counted[f"{member.role}s_killed"] += 1
        return self.reap(member)

    def reap(self, member):
        code = os.waitstatus_to_exitcode(os.waitpid(member.pid, 0)[1])
        self.members.remove(member)
        return code

    def ended(self):
        """Members that have ended by themselves, reaped, with their exit codes."""
        found = []
        for member in list(self.members):
            pid, status = os.waitpid(member.pid, os.WNOHANG)
            if pid:
                self.members.remove(member)
                found.append((member, os.waitstatus_to_exitcode(status)))
        return found

    def stop(self, member, seconds):
        os.kill(member.pid, signal.SIGSTOP)
        member.goes_on = time.monotonic() + seconds
        self.counted["stops"] += 1
        self.counted["stops_beyond_the_grace"] += seconds > 6

    def let_go_on(self, now=float("inf")):
        """SIGCONT to those whose time has come, by default to all."""
        for member in self.members:
            if member.goes_on is not None and member.goes_on <= now:
                os.kill(member.pid, signal.SIGCONT)
                member.goes_on = None

    def check(self):
        if os.fstat(self.trouble_fd).st_size:
            pytest.fail(Path(self.trouble).read_text(), pytrace=False)

    def end(self):
        for member in list(self.members):
            with contextlib.suppress(ProcessLookupError):
                self.kill(member)
        os.close(self.trouble_fd)


class Board:
    """Numbers in memory that the test and its crowd share."""

    def __init__(self):
        self.numbers = np.frombuffer(mmap.mmap(-1, 4096), "<i8")

    def __getitem__(self, which):
        return int(self.numbers[which])

    def __setitem__(self, which, value):
        self.numbers[which] = value


def until(condition, what, crowd=None):
    """Wait until `condition()` is true, and give its value."""
    deadline = time.monotonic() + PATIENCE_S
    while not (found := condition()):
        if crowd is not None:
            crowd.check()
        if time.monotonic() > deadline:
            pytest.fail(f"not within {PATIENCE_S} s: {what() if callable(what) else what}")
        time.sleep(0.01)
    return found

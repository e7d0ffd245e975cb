"""Processes that take part in a queue and do what a test tells them, to be killed at a place that the test knows."""

import contextlib
import json
import os
import selectors
import signal
import sys
import time
import traceback
import warnings

import pytest

from subetha._core import decode_submit, encode_result
from subetha.jobqueue import JobQueue
from subetha.pass_registry import Pass

WAIT_S = 60

LINES_OF_ALL: list[int] = []
"""The test's ends of the pipes to its participants: a forked one must not hold those of the others."""


class Participant:
    """A forked process with a handle `queue` of its own, and a list `held` for claims.

    `do` runs a line of Python there, `get` gives the value of an expression; both wait for the answer, `begin` does not.
    """

    def __init__(self, path):
        commands, self.commands = os.pipe()
        self.answers, answers = os.pipe()
        self.returncode = None
        self.unread = b""
        with warnings.catch_warnings():
            # the only other threads are timers of the core, which knows of forks
            warnings.simplefilter("ignore", DeprecationWarning)
            self.pid = os.fork()
        if self.pid == 0:
            try:
                for fd in (*LINES_OF_ALL, self.commands, self.answers):
                    os.close(fd)
                serve(path, commands, answers)
            except BaseException:
                os.write(answers, json.dumps(["error", traceback.format_exc()]).encode() + b"\n")
            finally:
                os._exit(1)
        LINES_OF_ALL.extend((self.commands, self.answers))
        os.close(commands)
        os.close(answers)

    def begin(self, line):
        os.write(self.commands, json.dumps(["do", line]).encode() + b"\n")

    def do(self, *lines):
        for line in lines:
            self.begin(line)
            self.heard()

    def get(self, expression):
        os.write(self.commands, json.dumps(["get", expression]).encode() + b"\n")
        return self.heard()

    def has_answered(self, seconds=0.0):
        with selectors.DefaultSelector() as selector:
            selector.register(self.answers, selectors.EVENT_READ)
            return bool(selector.select(seconds))

    def heard(self):
        while b"\n" not in self.unread:
            if not self.has_answered(WAIT_S):
                pytest.fail(f"participant {self.pid} said nothing for {WAIT_S} s")
            more = os.read(self.answers, 65536)
            if not more:
                pytest.fail(f"participant {self.pid} ended without an answer")
            self.unread += more
        line, self.unread = self.unread.split(b"\n", 1)
        word, value = json.loads(line)
        if word == "error":
            pytest.fail(f"in participant {self.pid}: {value}")
        return value

    def kill(self):
        """SIGKILL, and reap it; what `subprocess.Popen.returncode` would say."""
        if self.returncode is None:
            os.kill(self.pid, signal.SIGKILL)
        return self.wait()

    def exit(self, code):
        self.begin(f"os._exit({code})")
        return self.wait()

    def wait(self):
        if self.returncode is None:
            self.returncode = os.waitstatus_to_exitcode(os.waitpid(self.pid, 0)[1])
            for fd in (self.commands, self.answers):
                LINES_OF_ALL.remove(fd)
                os.close(fd)
        return self.returncode


def serve(path, commands, answers):
    """The life of a participant: until its test is over, or it is killed."""
    signal.alarm(120)
    known = {
        "os": os,
        "sys": sys,
        "time": time,
        "signal": signal,
        "contextlib": contextlib,
        "Pass": Pass,
        "encode_result": encode_result,
        "decode_submit": decode_submit,
        "queue": JobQueue.open(path),
        "held": [],
    }
    with open(commands) as lines:
        for line in lines:
            kind, text = json.loads(line)
            value = None
            if kind == "do":
                exec(text, known)
            else:
                value = eval(text, known)
            os.write(answers, json.dumps(["value", value]).encode() + b"\n")
    os._exit(0)


@pytest.fixture
def participant(path):
    """Start a participant of the queue at `path`; all that are left are killed with the test."""
    started = []

    def start(path=path):
        started.append(Participant(path))
        return started[-1]

    yield start
    for one in started:
        one.kill()


def just_after_a_look(queue):
    """Wait until this process's timer has looked for the dead: for half a second it does not do so again.

    So long a test has for a kill, and a `rescue` that is the first to see it, where no other process lives.
    """
    slot = queue.slot
    epoch = queue.heartbeat.tick_global_epoch()
    deadline = time.monotonic() + WAIT_S
    while queue.heartbeat.snapshot(slot).last_seen_epoch < epoch:
        assert time.monotonic() < deadline, "the timer stands still"
        time.sleep(0.002)


def eventually(condition, what):
    """Wait until `condition()` is true, and give its value; the test fails where that does not come within a minute."""
    deadline = time.monotonic() + WAIT_S
    while not (found := condition()):
        if time.monotonic() > deadline:
            pytest.fail(f"not within {WAIT_S} s: {what}")
        time.sleep(0.005)
    return found

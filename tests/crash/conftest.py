"""Kills at every kind of instant: a call is stepped through once, then a victim is killed or stopped at each of the points.

By default these are the points at which the shared files are not what they were at the point before, or the kernel was
called, and some of the others. SUBETHA_KILL_POINTS=all takes every machine instruction inside the extension module, a number
so many of those others for each call.
"""

import contextlib
import json
import os
import queue
import shutil
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest

HERE = Path(__file__).parent
# one for each core: with two tests at a time each has one
SERVERS = 1 if "PYTEST_XDIST_WORKER" in os.environ else 2
OTHERS = os.environ.get("SUBETHA_KILL_POINTS", "2")
ANSWER_S = 75


class Server:
    """A process that forks, kills and looks (`server.py`); a new one where the old one has ended."""

    def __init__(self):
        self.process = None

    def start(self):
        self.process = subprocess.Popen(
            # forking beside the timer thread is what it is there for
            [sys.executable, "-W", "ignore::DeprecationWarning", os.fspath(HERE / "server.py")],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            bufsize=1,
            env=os.environ
            | {
                "PYTHONPATH": os.pathsep.join(
                    [*(os.fspath(HERE.parent / name) for name in ("crash", "core", "queue")), *sys.path]
                ),
                "PYTHONHASHSEED": "0",
            },
            start_new_session=True,
        )
        return json.loads(self.process.stdout.readline())["why_not"]

    def ask(self, **order):
        if self.process is None:
            self.start()
        ends = threading.Timer(ANSWER_S, self.process.kill)
        ends.start()
        try:
            self.process.stdin.write(json.dumps(order) + "\n")
            line = self.process.stdout.readline()
        finally:
            ends.cancel()
        if line:
            return json.loads(line)
        return {"fault": f"the server ended: {self.end()}"}

    def end(self):
        """Let it go; the last it had to say."""
        if self.process is None:
            return ""
        with contextlib.suppress(OSError):
            self.process.stdin.close()
        words = self.process.stderr.read()
        self.process.stdout.close()
        self.process.stderr.close()
        self.process.wait()
        self.process = None
        return words


@pytest.fixture(scope="session")
def servers():
    started = [Server() for _ in range(SERVERS)]
    why_not = started[0].start()
    try:
        if why_not:
            pytest.skip(why_not)
        yield started
    finally:
        for server in started:
            server.end()


def source_of(point):
    """Function and line of a point, where the machine can tell."""
    module, offset, hit, _ = point
    path = next((path for path in core_files() if path.name == module), None)
    text = f"{module}+{offset:#x}, time {hit}"
    if path is None or shutil.which("addr2line") is None:
        return text
    found = subprocess.run(
        ["addr2line", "-f", "-i", "-s", "-e", path, hex(offset)], capture_output=True, text=True, check=False
    ).stdout.split()
    return f"{text}: {' < '.join(found[:6])}"


def core_files():
    import subetha._core

    return [Path(subetha._core.__file__)]


def chosen(points, others):
    """Those that tell, the first, the last, and `others` of the others, evenly."""
    if others == "all":
        return points
    # the first time that each of them is come to: the hundredth round of a loop is dear, and like the first one
    quiet = [point for point in points if not point[3] and point[2] == 1]
    step = max(1, len(quiet) // max(1, int(others)))
    return [point for point in points if point[3]] + quiet[::step][: int(others)] + points[-1:]


class Campaign:
    """What happens at each of a call's points."""

    def __init__(self, servers):
        self.servers = servers
        self.traced = {}

    def points(self, what, call):
        if (what, call) not in self.traced:
            answer = self.servers[0].ask(do="trace", what=what, call=call)
            if "fault" in answer:
                pytest.fail(f"{call} could not be stepped through: {answer['fault']}", pytrace=False)
            self.traced[what, call] = answer["points"]
        return self.traced[what, call]

    def run(self, orders):
        """Give the orders to the servers; fails with what was wrong afterwards, and where. Says how many there were (`-s`)."""
        waiting, faults, missed = queue.SimpleQueue(), [], []
        began = time.monotonic()
        for order in orders:
            waiting.put(order)

        def work(server):
            while len(faults) < 4:
                try:
                    order = waiting.get_nowait()
                except queue.Empty:
                    return
                answer = server.ask(**order)
                if "fault" in answer:
                    faults.append((order, answer["fault"]))
                elif order["point"] is not None and not answer["hit"]:
                    missed.append(order["point"])

        threads = [threading.Thread(target=work, args=(server,)) for server in self.servers]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        if faults:
            told = "\n".join(
                f"{order['do']} {order['call']} at "
                f"{source_of(order['point']) if order['point'] else 'its end'}: {fault.strip().splitlines()[-1]}"
                for order, fault in faults
            )
            pytest.fail(f"{len(faults)} of {len(orders)}:\n{told}\n\nthe first one:\n{faults[0][1]}", pytrace=False)
        order = orders[0]
        print(
            f"{order['do']} {order['what']} {order['call']}: {len(orders) - len(missed)} of {len(orders)} points reached, "
            f"{time.monotonic() - began:.0f} s"
        )
        # what a timer does in between moves a few of them; beside another rescuer there is less left to do
        most = len(orders) if order["do"] == "beside" else max(3, len(orders) // 5)
        assert len(missed) <= most, f"{len(missed)} of {len(orders)} points were not reached"

    def kill(self, what, call):
        """Kill at each chosen point, and right after the call."""
        points = chosen(self.points(what, call), OTHERS)
        self.run([{"do": "kill", "what": what, "call": call, "point": point} for point in [*points, None]])

    def stop(self, what, call, others=2):
        points = chosen(self.points(what, call), OTHERS if OTHERS == "all" else others)
        self.run([{"do": "stop", "what": what, "call": call, "point": point} for point in points])

    def kill_beside_a_stopped_one(self, what, call):
        points = chosen(self.points(what, call), OTHERS if OTHERS == "all" else 2)
        self.run(
            [
                {"do": "beside", "what": what, "call": call, "point": point, "other": points[(7 * n + 3) % len(points)]}
                for n, point in enumerate(points)
            ]
        )


@pytest.fixture(scope="session")
def campaign(servers):
    return Campaign(servers)

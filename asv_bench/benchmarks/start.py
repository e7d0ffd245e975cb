"""How long it takes until something runs: the first results of a fresh executor, imports, the command line.

Everything is started anew for each figure, in a fresh interpreter.
"""

import contextlib
import os
import subprocess
import sys
import sysconfig
import time
from pathlib import Path

import subetha

from .peers import needed
from .turns import InTurns, in_turns, median, spread, unfolded


def environment():
    """Of an interpreter that finds the `subetha` that this one has, also where that is not an installed one."""
    folder = str(Path(subetha.__file__).parents[1])
    is_installed = folder in (sysconfig.get_path("platlib"), sysconfig.get_path("purelib"))
    return os.environ if is_installed else {**os.environ, "PYTHONPATH": folder}


# Prints the milliseconds from before an executor is made until its first result, twice in one program.
FIRST_RESULT = """
import operator, time
{imports}
for _ in range(2):
    began = time.perf_counter()
    executor = {executor}
    assert executor.submit(operator.neg, 1).result() == -1
    print((time.perf_counter() - began) * 1000)
    executor.shutdown()
"""
POOL = "concurrent.futures.ProcessPoolExecutor(2, multiprocessing.get_context({method!r}))"
EXECUTORS = {
    "subetha": ("import subetha; subetha.Executor", "subetha.Executor(2)"),
    **{
        f"ProcessPoolExecutor {method}": (
            "import concurrent.futures.process, multiprocessing",
            POOL.format(method=method),
        )
        for method in ("forkserver", "spawn")
    },
    "loky": ("import loky", "loky.ProcessPoolExecutor(2)"),
}


class FirstResult(InTurns):
    """A fresh executor of two workers to its first result, in milliseconds; and the next one of the same program."""

    params = [list(EXECUTORS), ["first", "second"]]
    param_names = ["peer", "executor"]

    def setup_cache(self):
        return unfolded(in_turns([list(EXECUTORS)], self._begin), self.params[1])

    setup_cache.timeout = 600

    @contextlib.contextmanager
    def _begin(self, peer):
        if peer == "loky":
            needed("loky")
        imports, executor = EXECUTORS[peer]
        program = FIRST_RESULT.format(imports=imports, executor=executor)

        def measure():
            command = [sys.executable, "-c", program]
            ran = subprocess.run(command, env=environment(), capture_output=True, text=True, check=True)
            return dict(zip(self.params[1], map(float, ran.stdout.split()), strict=True))

        yield measure

    def track_first_result(self, figures, peer, executor):
        return median(figures[peer, executor])

    track_first_result.unit = "ms"

    def track_first_result_spread(self, figures, peer, executor):
        return spread(figures[peer, executor])

    track_first_result_spread.unit = "ms"


class Import(InTurns):
    """Milliseconds that an import takes in a fresh interpreter, beyond those of numpy, which is imported first."""

    params = [
        ["import subetha", "from subetha import Executor", "from subetha import JobQueue, task", "import asyncio"]
    ]
    param_names = ["statement"]
    PROGRAM = "import time, numpy; began = time.perf_counter(); {}; print((time.perf_counter() - began) * 1000)"

    def setup_cache(self):
        return in_turns(self.params, self._begin)

    setup_cache.timeout = 300

    @contextlib.contextmanager
    def _begin(self, statement):
        command = [sys.executable, "-c", self.PROGRAM.format(statement)]
        yield lambda: float(subprocess.run(command, env=environment(), capture_output=True, check=True).stdout)

    def track_import(self, figures, statement):
        return median(figures[statement,])

    track_import.unit = "ms"


class Command(InTurns):
    """Milliseconds of a whole command, from its start to its end."""

    COMMANDS = {
        "subetha --help": "from subetha.cli import main; main()",
        "python -c pass": "pass",
        "python -c 'import numpy'": "import numpy",
        "python -c 'import subetha'": "import subetha",
    }
    params = [list(COMMANDS)]
    param_names = ["command"]

    def setup_cache(self):
        return in_turns(self.params, self._begin)

    setup_cache.timeout = 300

    @contextlib.contextmanager
    def _begin(self, command):
        argv = [sys.executable, "-c", self.COMMANDS[command], "--help"]

        def measure():
            began = time.perf_counter()
            subprocess.run(argv, env=environment(), stdout=subprocess.DEVNULL, check=True)
            return (time.perf_counter() - began) * 1000

        yield measure

    def track_command(self, figures, command):
        return median(figures[command,])

    track_command.unit = "ms"

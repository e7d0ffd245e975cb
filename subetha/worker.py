"""What a worker process runs: ``python -m subetha.worker MODULE... --queue DIR``.

It imports the modules, which register their handlers, opens the queue directory and runs the one worker loop in its main
thread. `WorkerPool` (pool.py) starts such processes; both sides keep to the exit codes and words that stand here first.
Nothing that only the supervisor needs (multiprocessing, subprocess) is imported here, so that a worker starts quickly.
"""

import argparse
import contextlib
import faulthandler
import importlib
import logging
import os
import signal
import sys
import threading
import time
import traceback
from collections.abc import Sequence
from types import FrameType
from typing import Final

from subetha import calls, job
from subetha._core import end_with_parent
from subetha.jobqueue import JobQueue
from subetha.layout import UNKNOWN_AFTER_S, Role
from subetha.logging import RecordHandler, file_handler
from subetha.pass_registry import default_registry
from subetha.periodic import Keeper, periodic_tasks
from subetha.scheduler import WorkerLoop
from subetha.sidecar import Sidecar

__all__ = ["main"]

EXIT_CANNOT_START: Final = os.EX_CONFIG
"""Exit code of a worker process that could not import its modules or open its queue."""

EXIT_RECYCLED: Final = os.EX_TEMPFAIL
"""Exit code of a worker process that has run as many jobs, or is as large, as it may be; another one takes its place."""

EXIT_INITIALIZER_FAILED: Final = os.EX_SOFTWARE
"""Exit code of a worker process whose initializer raised."""

EXIT_INTERRUPTED: Final = 128 + signal.SIGINT
"""Exit code after a second Ctrl-C, as a shell reports it."""

STOP_SIGNALS: Final = (signal.SIGTERM, signal.SIGINT)
"""They drain a worker process, which is started with both blocked."""

OUTER_PYTHONPATH: Final = "SUBETHA_OUTER_PYTHONPATH"
"""Environment variable that holds what the supervisor's PYTHONPATH is, while PYTHONPATH is its `sys.path`."""

INITIALIZER_FAILED: Final = b"i"
"""What a worker tells its supervisor in the place of how many jobs it completed: any job may leave with any exit code."""


class _Recycling:
    """Ends a worker's loop after a number of jobs, or above a number of bytes of resident memory."""

    LOOK_S = 0.2
    """So often (s) the memory is looked at, and after the first job."""

    def __init__(self, max_jobs: int | None, max_bytes: int | None) -> None:
        self.is_due = False
        self.loop: WorkerLoop | None = None
        self._max_jobs = max_jobs
        self._max_bytes = max_bytes
        self._look_at = 0.0
        if max_bytes is not None:
            import psutil

            self._process = psutil.Process()

    def __call__(self) -> None:
        assert self.loop is not None
        if self._max_jobs is not None and self.loop.completed >= self._max_jobs:
            self._end()
        if self._max_bytes is not None and time.monotonic() >= self._look_at:
            self._look_at = time.monotonic() + self.LOOK_S
            self.loop.rest()
            if self._process.memory_info().rss > self._max_bytes:
                self._end()

    def _end(self) -> None:
        assert self.loop is not None
        self.is_due = True
        self.loop.stop()


class _Drain:
    """Turns the signals that a worker process gets into the end of its loop.

    Only interrupts are counted: a group-wide Ctrl-C reaches a worker once from the terminal and once more as the
    SIGTERM that its supervisor forwards, and the two are one wish.
    """

    def __init__(self) -> None:
        self.requested = False
        self._interrupts = 0
        self._loop: WorkerLoop | None = None

    def install(self) -> None:
        signal.signal(signal.SIGTERM, self._on_terminate)
        signal.signal(signal.SIGINT, self._on_interrupt)
        # A supervisor starts its workers with both blocked, so that none gets lost or kills before this line.
        signal.pthread_sigmask(signal.SIG_UNBLOCK, STOP_SIGNALS)

    def attach(self, loop: WorkerLoop) -> None:
        """From here on a signal stops `loop`; before, it ends the process, since no job can be in hand."""
        self._loop = loop
        if self.requested:
            loop.stop()

    def finish(self) -> None:
        """Ignore SIGTERM for the rest of the process: what it asks for is done.

        A supervisor's SIGTERM may follow a Ctrl-C as late as in the interpreter's shutdown, which puts the default
        back in place of a handler, but not in place of this. Earlier would be wrong: children of a job inherit it.
        """
        # One that came just before is handled inside this call; with its handler gone it would be reported as an error.
        # Not so within another signal's handler, so this is not to be called there.
        signal.pthread_sigmask(signal.SIG_BLOCK, (signal.SIGTERM,))
        signal.signal(signal.SIGTERM, signal.SIG_IGN)

    def _on_terminate(self, _signum: int, _frame: FrameType | None) -> None:
        self._request()

    def _on_interrupt(self, _signum: int, _frame: FrameType | None) -> None:
        self._interrupts += 1
        if self._interrupts > 1:
            os._exit(EXIT_INTERRUPTED)
        self._request()

    def _request(self) -> None:
        came_before, self.requested = self.requested, True
        if self._loop is not None:
            self._loop.stop()
        elif not came_before:
            raise SystemExit(0)


def main(argv: Sequence[str] | None = None) -> int:
    """Run one worker process until it is told to stop.

    SIGTERM or a first SIGINT drains: the job in hand is finished and replied to, no other is claimed. A second SIGINT
    ends the process at once with code 130, whatever is in hand.

    Parameters
    ----------
    argv : sequence of str, optional
        ``MODULE... --queue DIR``; `sys.argv` without the program's name by default.

    Returns
    -------
    int
        The exit code: 0 after a drain, 78 (`os.EX_CONFIG`) when a module could not be imported or the queue not opened
        (the traceback is on standard error).
    """
    options = _parser().parse_args(argv)
    drain = _Drain()
    try:
        drain.install()
        _restore_pythonpath()
        if sys.stderr is not None:
            faulthandler.enable()
        if options.completed_fd is not None:
            os.set_inheritable(options.completed_fd, False)
        _set_up_logging(options.log_ring, options.log_file, options.log_level)
        for module in (calls.__name__, *options.modules):
            importlib.import_module(module)
        if options.initializer_fd is not None and not _initialized(options.initializer_fd):
            if options.completed_fd is not None:
                os.write(options.completed_fd, INITIALIZER_FAILED)
            return EXIT_INITIALIZER_FAILED
        if options.queue_names:
            default_registry.serve(options.queue_names)
        calls.keep_memory_warm()
        queue = JobQueue.open(options.queue, role=Role.WORKER, unknown_after=options.unknown_after)
        recycling = _Recycling(options.max_jobs, options.max_bytes)
        loop = recycling.loop = WorkerLoop(
            queue.submit_side,
            table=queue.heartbeat,
            slot=queue.slot,
            routes=True,
            between=None if options.max_jobs is None and options.max_bytes is None else recycling,
        )
        if options.supervisor_pid is not None:
            end_with_parent(options.supervisor_pid)
    except BaseException:
        # A module that leaves by sys.exit() in its import counts as one that could not be imported.
        if drain.requested:
            drain.finish()
            return 0
        traceback.print_exc()
        return EXIT_CANNOT_START
    # It chooses how long the loop's claims look for a job before they sleep.
    job.running = job.Running(
        os.path.abspath(options.queue), loop, threading.get_ident(), os.getpid(), frozenset(options.modules)
    )
    with queue, Sidecar() as sidecar, contextlib.ExitStack() as stack:
        drain.attach(loop)
        try:
            if periodic_tasks:
                keeper = Keeper(options.queue, default_registry)
                stack.callback(keeper.stop)
                keeper.start()
            sidecar.register(queue)
            loop.run()
        finally:
            drain.finish()
            # With the queue closed this process's record in the heartbeat table is gone, and its count with it.
            if options.completed_fd is not None:
                with contextlib.suppress(BrokenPipeError):  # the supervisor may be gone
                    os.write(options.completed_fd, b"%d" % loop.completed)
    return EXIT_RECYCLED if recycling.is_due and not drain.requested else 0


def _set_up_logging(ring: str | None, file: str | None, level: int) -> None:
    handlers: list[logging.Handler] = []
    if ring is not None:
        handlers.append(RecordHandler(ring, level))
    if file is not None:
        handlers.append(file_handler(file, level))
    if handlers:
        root = logging.getLogger()
        root.setLevel(level)
        for handler in handlers:
            root.addHandler(handler)


def _initialized(fd: int) -> bool:
    """Call the pool's initializer; False where it raised."""
    pickled = os.pread(fd, os.fstat(fd).st_size, 0)
    os.close(fd)
    try:
        function, args = calls.loads(pickled)
        function(*args)
    except (Exception, SystemExit):
        traceback.print_exc()
        return False
    return True


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m subetha.worker",
        description="One worker process. 'subetha worker' starts several and keeps them alive.",
    )
    parser.add_argument("modules", nargs="+", metavar="MODULE", help="imported first; registers handlers")
    parser.add_argument("--queue", required=True, metavar="DIR", help="an existing queue directory")
    parser.add_argument(
        "--queue-name",
        dest="queue_names",
        action="append",
        metavar="NAME",
        help="serve this queue of names; may be repeated",
    )
    parser.add_argument(
        "--unknown-after", type=float, default=UNKNOWN_AFTER_S, metavar="SECONDS", help="as JobQueue.open"
    )
    parser.add_argument("--completed-fd", type=int, help=argparse.SUPPRESS)
    parser.add_argument("--initializer-fd", type=int, help=argparse.SUPPRESS)
    parser.add_argument("--log-ring", metavar="FILE", help="ring that takes what is logged")
    parser.add_argument("--log-file", metavar="FILE", help="file to which what is logged is appended")
    parser.add_argument("--log-level", type=int, default=logging.WARNING, metavar="N", help="least level of that")
    parser.add_argument("--max-jobs", type=int, metavar="N", help="end with code 75 after so many jobs")
    parser.add_argument("--max-bytes", type=int, metavar="N", help="end with code 75 above so many bytes of memory")
    parser.add_argument("--supervisor-pid", type=int, help=argparse.SUPPRESS)
    return parser


def _restore_pythonpath() -> None:
    """Undo in this process's environment what the supervisor put there, so that a job's own children do not see it."""
    outer = os.environ.pop(OUTER_PYTHONPATH, None)
    if outer:
        os.environ["PYTHONPATH"] = outer
    elif outer is not None:
        os.environ.pop("PYTHONPATH", None)


if __name__ == "__main__":
    sys.exit(main())

"""Periodic jobs: each worker process sees to it that the next job of each periodic task it knows waits in the queue.

That job is parked until its time, so it survives every process, as any job for later does. When its time has come, whichever worker
looks first hands in the one after it (once.py); how many workers there are, or come and go, makes no difference. Times that pass
while no worker is there are made up for by one run.
"""

import logging
import os
import threading
import time
from collections.abc import Callable
from datetime import UTC, datetime, tzinfo
from typing import Final, NamedTuple
from zoneinfo import ZoneInfo

from subetha import files
from subetha._core import SubmitOptions
from subetha.errors import Empty, Full
from subetha.jobqueue import JobQueue
from subetha.layout import STATE_SHIFT, CellState, Role
from subetha.once import submit_once
from subetha.pass_registry import PassRegistry
from subetha.routing import Promise, periodic_key

__all__ = ["Keeper", "Periodic", "Schedule", "periodic_tasks"]

LONGEST_PAUSE_S: Final = 5.0
"""How often it is looked at least whether the next jobs are there: so late may they be after the clock was set."""

_LOGGER = logging.getLogger("subetha.periodic")


class Schedule(NamedTuple):
    """When a periodic task is due.

    Attributes
    ----------
    expression : str
        Five fields as for cron: minute, hour, day of the month, month, day of the week.
    zone : tzinfo
        Whose clock it means. Where that is set forward or back, as Debian's cron does it.
    """

    expression: str
    zone: tzinfo

    @classmethod
    def of(cls, expression: str, timezone: str | tzinfo) -> "Schedule":
        """Check an expression and a time zone.

        Raises
        ------
        TypeError, ValueError
            They are none; or no time matches the expression in the next 50 years.
        """
        if not isinstance(expression, str):
            raise TypeError(f"cron: expected a str as '*/5 * * * *', found {type(expression).__name__}")
        if isinstance(timezone, str):
            try:
                # without a look into the system's files, which a container may lack
                timezone = UTC if timezone == "UTC" else ZoneInfo(timezone)
            except (OSError, ValueError, KeyError) as error:
                raise ValueError(f"timezone: expected a name as 'Europe/Berlin', found {timezone!r}: {error}") from None
        elif not isinstance(timezone, tzinfo):
            raise TypeError(f"timezone: expected a str or a tzinfo, found {type(timezone).__name__}")
        made = cls(expression, timezone)
        made.next_after(time.time())
        return made

    def next_after(self, seconds: float) -> float:
        """Find the first time after `seconds` since 1970, in the same unit."""
        from cronsim import CronSim, CronSimError

        try:
            found = next(CronSim(self.expression, datetime.fromtimestamp(seconds, self.zone)), None)
        except CronSimError as error:
            raise ValueError(
                f"cron: expected five fields as in '*/5 * * * *', found {self.expression!r}: {error}"
            ) from None
        if found is None:
            raise ValueError(f"cron: no time in the next 50 years matches {self.expression!r}")
        # of an aware datetime, also of one that is there twice as the clock is set back
        return found.astimezone(UTC).timestamp()


class Periodic(NamedTuple):
    """A periodic task: when it is due, the bytes that its jobs hold, and how they are handed in."""

    schedule: Schedule
    data: bytes
    options: SubmitOptions


periodic_tasks: Final[dict[int, Periodic]] = {}
"""Those of this process by closure id. `tasks.task` enters them."""


class Keeper:
    """Sees to it that the next job of each periodic task is in the queue: a thread of a worker process.

    Parameters
    ----------
    queue_path : path
    registry : PassRegistry
        Tasks that this process does not run, since it serves other queues, are left to others.
    clock : callable
        Seconds since 1970.
    """

    def __init__(
        self, queue_path: files.Path, registry: PassRegistry, *, clock: Callable[[], float] = time.time
    ) -> None:
        # its own handle, since the results come there
        self._queue = JobQueue.open(queue_path, role=Role.CLIENT)
        self._registry = registry
        self._clock = clock
        self._pid = os.getpid()
        self._is_over = threading.Event()
        self._thread = threading.Thread(target=self._run, name="subetha-periodic", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def stop(self) -> None:
        """End the thread, which a fork of the process does not have, and close the handle; the jobs stay."""
        if os.getpid() == self._pid:
            # its lock may be held for ever in a fork
            self._is_over.set()
            if self._thread.is_alive():
                self._thread.join()
        self._queue.close()

    def look(self) -> float:
        """Hand in the next jobs that are missing; give the seconds until that may be needed again."""
        pause = LONGEST_PAUSE_S
        here = self._registry.closure_ids()
        # as it is now: a job may import others
        for closure_id, periodic in list(periodic_tasks.items()):
            if closure_id not in here:
                continue
            due = self._see_to_next(closure_id, periodic)
            pause = min(pause, max(0.0, due - self._clock()))
        self._drop_results()
        return pause

    def _see_to_next(self, closure_id: int, periodic: Periodic) -> float:
        """Give when the next job is due, which is there then."""
        now = self._clock()
        due = periodic.schedule.next_after(now)
        now_ns, due_ns = int(now * 1e9), int(due * 1e9)
        map_ = self._queue.registrations().map
        key = periodic_key(closure_id)
        said = Promise.read(map_.get(key))
        if said is None:
            # after a boot: what was parked is kept, and what was said of it is not
            kept = self._parked(closure_id, now_ns)
            if kept is not None:
                map_.compare_and_swap(key, None, Promise(True, *kept, *self._queue.identity).to_bytes())
        elif said.is_there and said.due_ns > due_ns and self._clock() < due:
            # by another expression that the task had, or another time that the clock said
            self._queue.cancel(said.job_id)

        def is_over(promise: Promise) -> bool:
            # not where this process was stopped until its next time had passed: others know the one after that
            return self._clock() < due and not now_ns < promise.due_ns <= due_ns

        submit_once(
            self._queue,
            key,
            is_over,
            due_ns,
            lambda job_id: self._queue._submit(closure_id, periodic.data, periodic.options, due, 0, job_id),
        )
        return due

    def _parked(self, closure_id: int, now_ns: int) -> tuple[int, int] | None:
        """Find the next job of a periodic task that is parked: its number, and when it is due."""
        cells = self._queue.cells()
        states = (cells["word"] >> STATE_SHIFT) & 0xF
        here = (states == CellState.PARKED) & (cells["closure_id"] == closure_id) & (cells["due_ns"] > now_ns)
        found = [(int(cell["due_ns"]), int(cell["job_id"])) for cell in cells[here & (cells["job_block"] == 0)]]
        if not found:
            return None
        due_ns, job_id = min(found)
        return job_id, due_ns

    def _drop_results(self) -> None:
        while True:
            try:
                found = self._queue.recv_many(256)
            except Empty:
                return
            for result in found:
                if isinstance(result.result, Exception):
                    _LOGGER.error("periodic job %d failed: %s", result.token, result.result)
            if not found:
                return

    def _run(self) -> None:
        pause = 0.0
        while not self._is_over.wait(pause):
            try:
                pause = self.look()
            except Full:
                # the next look may find room
                pause = LONGEST_PAUSE_S
            except Exception:
                # Without this thread the worker would go on, and no periodic job with it.
                if self._is_over.is_set():
                    return
                _LOGGER.exception("the next periodic jobs could not be handed in; that is tried again")
                pause = LONGEST_PAUSE_S

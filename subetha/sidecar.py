"""Strategies that are chosen while the work goes on: what instances observe, who decides, and the thread between them.

An adaptive instance (a ring, deque, table or queue handle, a `BackgroundScheduler`) has a `HandshakeHeader` with the tag of its
strategy and an `ObservationRing` with what it did. A `Sidecar` empties the rings of the instances that are registered with it,
asks the `Policy` of each, and where that wants another strategy lets the instance migrate; operations under way end under
the strategy they began with.

One policy is worth its while by measurement: `WaitingPolicy`, for handles that jobs or messages are taken through. Worker
processes run it by themselves.
"""

import math
import os
import signal
import sys
import threading
import time
from collections.abc import Callable, Collection
from dataclasses import dataclass
from types import TracebackType
from typing import Final, Protocol, Self, runtime_checkable

import numpy as np
import numpy.typing as npt

from subetha._core import HandshakeHeader, ObservationRing
from subetha.layout import OBSERVATION, Op, WaitTag

__all__ = [
    "OP_WATCHDOG_SCAN",
    "WAIT_BRIEF",
    "WAIT_SLEEP",
    "WAIT_SPIN",
    "AdaptiveInstance",
    "FixedPolicy",
    "HandshakeHeader",
    "InstanceStats",
    "NoMigrationPolicy",
    "ObservationRing",
    "Op",
    "Policy",
    "Sidecar",
    "WaitTag",
    "WaitingPolicy",
]

OP_WATCHDOG_SCAN: Final = Op.WATCHDOG_SCAN
WAIT_SLEEP: Final = WaitTag.SLEEP
WAIT_BRIEF: Final = WaitTag.BRIEF
WAIT_SPIN: Final = WaitTag.SPIN


@dataclass(frozen=True)
class InstanceStats:
    """What an instance did between two scans.

    Attributes
    ----------
    records : numpy.ndarray, shape (n,), dtype layout.OBSERVATION
        All that happened up to the first drop.
    dropped : int
        How many records found no room after that.
    seconds : float
        How long it is since the scan before, or since the instance was registered.
    """

    records: npt.NDArray[np.void]
    dropped: int = 0
    seconds: float = 0.0

    def values(self, op: Op) -> npt.NDArray[np.uint64]:
        """Return the values of the records of `op`, oldest first: shape (m,), uint64."""
        found: npt.NDArray[np.uint64] = self.records["value"][self.records["op"] == op]
        return found

    def count(self, op: Op, flags: int = 0) -> int:
        """Return how many records of `op` have all bits of `flags`."""
        chosen = (self.records["op"] == op) & ((self.records["flags"] & flags) == flags)
        return int(np.count_nonzero(chosen))


@runtime_checkable
class Policy(Protocol):
    """Decides about the strategy of one instance.

    A policy may name in an attribute `ops` the operations that it wants to hear of; without it all are recorded.
    """

    def decide(self, stats: InstanceStats, current_tag: int, /) -> int:
        """Return the tag of the strategy that the instance ought to have; `current_tag`, where nothing is to change.

        Called at every scan, also when nothing has happened; by one thread at a time.
        """


@runtime_checkable
class AdaptiveInstance(Protocol):
    """What a sidecar looks after."""

    @property
    def header(self) -> HandshakeHeader:
        """Which strategy it has, and who is under way under which."""

    @property
    def ring(self) -> ObservationRing:
        """What it does."""

    def make_policy(self) -> Policy | None:
        """Return the policy that suits it; None where there is none."""

    def apply_migration(self, new_tag: int, /) -> bool | None:
        """Change the strategy: make ready what it needs, `header.migrate`, and drop what the old one needed after a drain.

        Returns
        -------
        bool or None
            False where that is not possible at the moment; the policy is asked again at the next scan.
        """


class NoMigrationPolicy:
    """Leaves everything as it is."""

    def decide(self, _stats: InstanceStats, current_tag: int, /) -> int:
        """Return `current_tag`."""
        return current_tag


class FixedPolicy:
    """Wants one strategy whatever happens.

    Parameters
    ----------
    tag : int
        Its tag.
    """

    ops: Collection[Op] = ()

    def __init__(self, tag: int) -> None:
        self._tag = tag

    def decide(self, _stats: InstanceStats, _current_tag: int, /) -> int:
        """Return the tag."""
        return self._tag


class WaitingPolicy:
    """How long a worker that finds no job looks for one before it sleeps, from the gaps between its jobs.

    It begins with BRIEF, 20 us. Where three quarters of the jobs come after more than a millisecond it sleeps at once (SLEEP),
    which saves processor time and delays nothing. Two changes promise more jobs a second, and are tried:

    - SPIN, 100 us, where that catches a quarter more of the jobs than BRIEF; to be woken costs some 20 us.
    - SLEEP, where jobs come in long turns of others: each look gives the processor away for a whole turn, in which the job
      lies there, while a sleeper is put back on it at once.

    What was tried stays only if it brought a twentieth more jobs a second than BRIEF had before, and is compared anew after two
    seconds, then after four, up to a minute. What failed is tried again after the same times.

    `docs/design/sidecar.md` has the measurements.

    Parameters
    ----------
    clock : callable
        The time in seconds.
    """

    ops: Collection[Op] = (Op.WAIT, Op.YIELD, Op.CLAIM, Op.POP)

    LEAST_WAITS: Final = 16
    LEAST_SECONDS: Final = 0.25
    """So many waits, and so much time, are judged together."""
    BRIEF_NS: Final = 20_000
    SPIN_NS: Final = 100_000
    SELDOM_NS: Final = 1_000_000
    CROWDED_NS: Final = 20_000
    """Long turns of others in which jobs come, in ns for each wait."""
    SHARE: Final = 0.25
    GAIN: Final = 1.05
    FIRST_HOLD_S: Final = 2.0
    LONGEST_HOLD_S: Final = 60.0

    def __init__(self, *, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._forget()
        self._tried: int | None = None
        self._is_better = False
        self._rate_before = 0.0
        self._look_again = 0.0
        self._failed_until = {WaitTag.SLEEP: -math.inf, WaitTag.SPIN: -math.inf}
        self._hold_s = dict.fromkeys(self._failed_until, self.FIRST_HOLD_S)

    def _forget(self) -> None:
        self._gaps: list[npt.NDArray[np.uint64]] = []
        self._waits = 0
        self._late_ns = 0
        self._taken = 0.0
        self._seconds = 0.0

    def decide(self, stats: InstanceStats, current_tag: int, /) -> int:
        """Return the tag for what was observed; `current_tag` while that is too little."""
        self._seconds += stats.seconds
        if not len(stats.records):
            return current_tag
        gaps = stats.values(Op.WAIT)
        if len(gaps):
            self._gaps.append(gaps)
            self._waits += len(gaps)
        self._late_ns += int(stats.values(Op.YIELD).sum())
        # What was dropped is taken to be like what was not.
        taken = int(stats.values(Op.CLAIM).sum()) + int(stats.values(Op.POP).sum())
        self._taken += taken * (1 + stats.dropped / len(stats.records))
        if self._waits < self.LEAST_WAITS or self._seconds < self.LEAST_SECONDS:
            return current_tag
        seen = np.concatenate(self._gaps)
        late_ns, rate = self._late_ns / self._waits, self._taken / self._seconds
        self._forget()
        if _share(seen, self.SELDOM_NS) < self.SHARE:
            self._tried = None
            return WaitTag.SLEEP
        return self._choose(self._promising(seen, late_ns), rate, current_tag)

    def _promising(self, gaps: npt.NDArray[np.uint64], late_ns: float) -> WaitTag:
        if late_ns > self.CROWDED_NS:
            return WaitTag.SLEEP
        more = _share(gaps, self.SPIN_NS) - _share(gaps, self.BRIEF_NS)
        return WaitTag.SPIN if more >= self.SHARE else WaitTag.BRIEF

    def _choose(self, promising: WaitTag, rate: float, current_tag: int) -> int:
        now = self._clock()
        if self._tried is None or current_tag != self._tried:
            self._tried = None
            if current_tag != WaitTag.BRIEF or promising is WaitTag.BRIEF or now < self._failed_until[promising]:
                return WaitTag.BRIEF
            self._tried, self._is_better, self._rate_before = promising, False, rate
            return promising
        tried = WaitTag(self._tried)
        if self._is_better:
            stays = now < self._look_again and (tried is WaitTag.SLEEP or promising is tried)
        else:
            stays = self._is_better = rate >= self.GAIN * self._rate_before
            hold = self._hold_s[tried]
            self._hold_s[tried] = min(2 * hold, self.LONGEST_HOLD_S)
            if stays:
                self._look_again = now + hold
            else:
                self._failed_until[tried] = now + hold
        if stays:
            return tried
        self._tried = None
        return WaitTag.BRIEF


def _share(gaps: npt.NDArray[np.uint64], limit_ns: int) -> float:
    return int(np.count_nonzero(gaps <= limit_ns)) / len(gaps)


@dataclass(eq=False)
class _Registered:
    """An instance that is looked after."""

    instance: AdaptiveInstance
    ring: ObservationRing
    policy: Policy
    stats: InstanceStats
    scanned_at: float
    dropped: int
    scanning: threading.Thread | None = None
    migrations: int = 0
    failures: int = 0
    last_failure: str = ""


def _report_to_stderr(message: str) -> None:
    print(message, file=sys.stderr, flush=True)


class Sidecar:
    """One thread that scans the registered instances and lets their policies decide.

    It scans every `busy_s` seconds while something happens, seldomer and seldomer down to every `idle_s` while nothing does, and
    not at all while nothing is registered. An error of a policy or a migration is reported (once in a row) and counted; the thread
    and the other instances go on. A policy that does not return holds all of them up: `unregister` and `close` say so.

    For the process that made it: in a forked child nothing is scanned, and `close` does nothing. The thread is a daemon.

    Parameters
    ----------
    busy_s, idle_s : float
        The shortest and the longest pause, in seconds.
    report : callable
        Takes the text of an error; prints to standard error by default.
    clock : callable
        The time in seconds.

    Raises
    ------
    ValueError
        A pause is not positive, or the shortest is the longer one.
    """

    def __init__(
        self,
        *,
        busy_s: float = 0.1,
        idle_s: float = 2.0,
        report: Callable[[str], object] = _report_to_stderr,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        if not 0 < busy_s <= idle_s:
            raise ValueError(f"pauses: expected 0 < busy_s <= idle_s, found {busy_s} and {idle_s}")
        self._busy_s = busy_s
        self._idle_s = idle_s
        self._report = report
        self._clock = clock
        self._pid = os.getpid()
        self._changed = threading.Condition()
        self._registered: list[_Registered] = []
        self._thread: threading.Thread | None = None
        self._woken = False
        self._closed = False

    def register(self, instance: AdaptiveInstance, policy: Policy | None = None) -> None:
        """Look after `instance` from now on; its ring is armed, and what lay in it is dropped.

        Parameters
        ----------
        instance : AdaptiveInstance
        policy : Policy, optional
            By default what its `make_policy` gives, else `NoMigrationPolicy`.

        Raises
        ------
        ValueError
            It is registered already, or another one with the same ring; or the sidecar is closed, or its parent's.
        """
        if policy is None:
            policy = instance.make_policy()
        chosen: Policy = NoMigrationPolicy() if policy is None else policy
        ring = instance.ring
        with self._changed:
            self._check_open()
            if any(known.ring is ring for known in self._registered):
                raise ValueError(f"{instance!r} is registered already, or something that shares its ring")
            ops: Collection[Op] | None = getattr(chosen, "ops", None)
            ring.arm(ops)
            ring.drain()
            nothing = InstanceStats(np.empty(0, OBSERVATION))
            self._registered.append(_Registered(instance, ring, chosen, nothing, self._clock(), ring.dropped))
            if self._thread is None:
                self._thread = threading.Thread(target=self._run, name="subetha-sidecar", daemon=True)
                self._thread.start()
            self._wake()

    def unregister(self, instance: AdaptiveInstance, timeout: float | None = None) -> None:
        """Look after `instance` no more: its ring is disarmed. Waits for a scan of it that is running, unless called by that.

        Parameters
        ----------
        instance : AdaptiveInstance
        timeout : float, optional
            Seconds to wait; None waits for ever.

        Raises
        ------
        ValueError
            It is not registered.
        TimeoutError
            Its scan still runs: its policy or migration does not return. It is unregistered nevertheless.
        """
        with self._changed:
            known = self._find(instance)
            self._registered.remove(known)
            known.ring.disarm()
            if not self._changed.wait_for(lambda: _is_left(known), timeout):
                raise TimeoutError(
                    f"the policy or the migration of {instance!r} has not returned within {timeout} s; no other instance is"
                    " scanned until it does"
                )

    def stats(self, instance: AdaptiveInstance) -> InstanceStats:
        """Return what the last scan of `instance` found.

        Raises
        ------
        ValueError
            It is not registered.
        """
        with self._changed:
            return self._find(instance).stats

    def migrations(self, instance: AdaptiveInstance) -> int:
        """Return how often `instance` was told to migrate, and did. Raises ValueError as `stats`."""
        with self._changed:
            return self._find(instance).migrations

    def failures(self, instance: AdaptiveInstance) -> int:
        """Return how many scans of `instance` ended with an error. Raises ValueError as `stats`."""
        with self._changed:
            return self._find(instance).failures

    def scan(self) -> None:
        """Scan every instance now, in this thread, except for those that are being scanned.

        Errors are reported and counted, as in the sidecar's thread; a KeyboardInterrupt or SystemExit is raised, too.
        """
        with self._changed:
            self._check_open()
            chosen = list(self._registered)
        for known in chosen:
            self._scan(known)

    def close(self, timeout: float | None = None) -> None:
        """Unregister everything and end the thread, waiting for a scan that is running. Idempotent, from any thread.

        Raises
        ------
        TimeoutError
            A scan still runs after `timeout` seconds: a policy or migration does not return.
        """
        if os.getpid() != self._pid:
            return
        with self._changed:
            self._closed = True
            left, self._registered = self._registered, []
            for known in left:
                known.ring.disarm()
            thread = self._thread
            self._wake()
        if thread is None or thread is threading.current_thread():
            return
        thread.join(None if timeout is None else max(timeout, 0.0))
        if thread.is_alive():
            raise TimeoutError(
                f"a policy or a migration has not returned within {timeout} s; the sidecar's thread ends when it does"
            )

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close()

    def _check_open(self) -> None:
        if self._closed:
            raise ValueError("this sidecar is closed")
        if os.getpid() != self._pid:
            raise ValueError("this sidecar belongs to the process that forked this one; make another")

    def _find(self, instance: AdaptiveInstance) -> _Registered:
        for known in self._registered:
            if known.instance is instance:
                return known
        raise ValueError(f"{instance!r} is not registered")

    def _wake(self) -> None:
        self._woken = True
        self._changed.notify_all()

    def _run(self) -> None:
        # Python's handlers need the main thread to be interrupted, so no signal may land here.
        signal.pthread_sigmask(signal.SIG_BLOCK, signal.valid_signals())
        pause = self._busy_s
        while True:
            with self._changed:
                if self._closed:
                    return
                self._woken = False
                chosen = list(self._registered)
            was_busy = False
            for known in chosen:
                was_busy = self._scan(known) or was_busy
            pause = self._busy_s if was_busy else min(2 * pause, self._idle_s)
            with self._changed:
                # Without an instance there is nothing to look at until one is registered.
                self._changed.wait_for(lambda: self._woken or self._closed, pause if self._registered else None)

    def _scan(self, known: _Registered) -> bool:
        """Whether it had done anything."""
        with self._changed:
            if known not in self._registered or known.scanning is not None:
                return False
            known.scanning = threading.current_thread()
        step = "its observations"
        try:
            found = self._observed(known)
            current = known.instance.header.tag
            step = "its policy"
            wanted = known.policy.decide(found, current)
            if wanted != current:
                step = f"its migration from {current} to {wanted}"
                if known.instance.apply_migration(wanted) is not False:
                    known.migrations += 1
            known.last_failure = ""
            return len(found.records) > 0
        except BaseException as error:
            # Whatever it is, also a SystemExit, comes from code of others, and the sidecar's thread goes on without them.
            # Where `scan` was called by somebody else, a Ctrl-C or an exit is for that one.
            self._failed(known, f"{step}: {type(error).__name__}: {error}")
            if not isinstance(error, Exception) and threading.current_thread() is not self._thread:
                raise
            return False
        finally:
            with self._changed:
                known.scanning = None
                self._changed.notify_all()

    def _observed(self, known: _Registered) -> InstanceStats:
        now = self._clock()
        records = known.ring.drain()
        dropped = known.ring.dropped
        known.stats = InstanceStats(records, dropped - known.dropped, now - known.scanned_at)
        known.dropped, known.scanned_at = dropped, now
        return known.stats

    def _failed(self, known: _Registered, failure: str) -> None:
        known.failures += 1
        if failure == known.last_failure:
            return
        known.last_failure = failure
        try:
            self._report(f"sidecar: {known.instance!r}: {failure}")
        except Exception as error:
            print(f"sidecar: the report of an error failed: {error!r}; it was {failure}", file=sys.stderr, flush=True)


def _is_left(known: _Registered) -> bool:
    """Whether nobody but this thread is in a scan of `known`."""
    return known.scanning is None or known.scanning is threading.current_thread()

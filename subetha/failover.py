"""The epoch watchdog: who has fallen silent with work in hand, by the beats of a heartbeat table.

This is the rule for a table that is used alone, and the caller decides when a scan is due. A queue directory needs no scan:
every process that takes part watches it by its native timer, asks the kernel who is dead, and moves the work on.
"""

from collections.abc import Iterator
from typing import NamedTuple, Protocol

from subetha.layout import HeartbeatSnapshot, Op

IN_FLIGHT_BITS = 64


class WatchedTable(Protocol):
    """What a watchdog needs of a heartbeat table."""

    def silent(self, before_epoch: int, spared_pid: int = 0, /) -> list[int]: ...
    def tick_global_epoch(self) -> int: ...
    def snapshot(self, i: int, /) -> HeartbeatSnapshot | None: ...
    def clear_in_flight(self, i: int, bit: int, /) -> None: ...


class Observer(Protocol):
    """Who is told of a scan; an `ObservationRing` is one."""

    def record(self, op: int, value: int = 0, flags: int = 0, /) -> object: ...


class DeadSlot(NamedTuple):
    """A participant that is taken for dead.

    Attributes
    ----------
    slot : int
    snapshot : HeartbeatSnapshot
        Its record at the scan; `in_flight_bitmap` is what it had in hand.
    """

    slot: int
    snapshot: HeartbeatSnapshot


class ReclaimReport(NamedTuple):
    """What one scan found.

    Attributes
    ----------
    dead_slots : tuple of DeadSlot
        By slot, ascending.
    new_global_epoch : int
        The epoch that the scan began.
    """

    dead_slots: tuple[DeadSlot, ...]
    new_global_epoch: int

    def is_empty(self) -> bool:
        """Whether nobody is taken for dead."""
        return not self.dead_slots


class FailoverWatchdog:
    """Judges the participants of a heartbeat table by their beats.

    Parameters
    ----------
    table : HeartbeatTable
    grace_epochs : int
        How many epochs a beat may be behind: a lag equal to it is alive, a longer one is not.
    spared_pid : int, optional
        The process that is never judged, as a rule the caller's own: while it scans, it lives.
    ring : ObservationRing, optional
        Where a scan is recorded (`OP_WATCHDOG_SCAN`, flag 1 where somebody is taken for dead); the table's own by default.

    Raises
    ------
    ValueError
        `grace_epochs` is negative.
    """

    def __init__(
        self,
        table: WatchedTable,
        grace_epochs: int = 1,
        *,
        spared_pid: int | None = None,
        ring: Observer | None = None,
    ) -> None:
        if grace_epochs < 0:
            raise ValueError(f"grace_epochs: expected 0 or more, found {grace_epochs}")
        self._table = table
        self._spared_pid = spared_pid
        self._ring: Observer | None = getattr(table, "ring", None) if ring is None else ring
        self.grace_epochs = grace_epochs

    def scan(self) -> ReclaimReport:
        """Begin the next epoch and report who is more than the grace behind it with work in hand.

        Who has nothing in hand is never reported: there is nothing to reclaim. Does not block.
        """
        epoch = self._table.tick_global_epoch()
        dead = []
        for slot in self._table.silent(epoch - self.grace_epochs, self._spared_pid or 0):
            found = self._table.snapshot(slot)
            # it may have beaten, ended its work or left meanwhile
            if found is not None and found.in_flight_bitmap and epoch - found.last_seen_epoch > self.grace_epochs:
                dead.append(DeadSlot(slot, found))
        if self._ring is not None:
            self._ring.record(Op.WATCHDOG_SCAN, len(dead), 1 if dead else 0)
        return ReclaimReport(tuple(dead), epoch)

    def clear_dead_bitmap(self, slot: int) -> None:
        """Take every in-flight bit of `slot` away, once its work was reclaimed: the next scans do not report it again.

        Raises
        ------
        HeartbeatError
            The slot is not registered any more.
        """
        found = self._table.snapshot(slot)
        for bit in iter_in_flight_bits(found.in_flight_bitmap if found is not None else 1):
            self._table.clear_in_flight(slot, bit)


def iter_in_flight_bits(bitmap: int) -> Iterator[int]:
    """Give the numbers of the bits that are set in a 64-bit `bitmap`, ascending.

    Raises
    ------
    ValueError
        `bitmap` has no 64 bits.
    """
    if not 0 <= bitmap < 1 << IN_FLIGHT_BITS:
        raise ValueError(f"bitmap: expected 0 to 2**{IN_FLIGHT_BITS} - 1, found {bitmap}")
    return (bit for bit in range(IN_FLIGHT_BITS) if bitmap >> bit & 1)

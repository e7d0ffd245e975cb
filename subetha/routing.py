"""What the live participants of a queue have said, in the queue's file `map`: who runs which closure ids, and where only some may.

    "R" closure id, participant, incarnation                      this one runs that closure id
    "P" closure id, number of the place -> participant, incarnation    this one runs a job of that closure id, in one of its places
    "U" digest of a unique key -> PROMISE                         the job that has that key
    "C" closure id -> PROMISE                                     the next job of a periodic one

The first two count as long as that incarnation lives. Whoever meets one of one that has gone removes it, or takes its place;
who finds no room looks for such.

A PROMISE names a job before it is there: who hands in one that must not be there twice enters it, submits, and says that it did.
Who dies in between leaves one that others settle: by looking whether the job is there.
"""

import hashlib
import os
import struct
from collections.abc import Callable, Iterable
from typing import NamedTuple

from subetha import files
from subetha._core import SharedHashMap
from subetha.errors import LayoutMismatch, MapFull
from subetha.layout import QUEUE_MAP_VALUE_BYTES, Kind, map_capacity

_RUNS, _PLACE = b"R", b"P"
_KEY = struct.Struct("<cIHQ")
"""What it is for, closure id, number, incarnation."""
_PLACE_KEY = struct.Struct("<cIH")
"""What it is for, closure id, which place."""
_WHO = struct.Struct("<HQ")
"""Number, incarnation."""
_PROMISE = struct.Struct("<BQQHQ")


class Promise(NamedTuple):
    """What the map says of a job that is to be there once.

    Attributes
    ----------
    is_there : bool
        It was handed in; otherwise it may have been.
    job_id, due_ns : int
        Its number, and when it is due.
    number, incarnation : int
        Who hands it in.
    """

    is_there: bool
    job_id: int
    due_ns: int
    number: int
    incarnation: int

    @classmethod
    def read(cls, value: bytes | None) -> "Promise | None":
        """Read one from the map; None where there is none, or something else."""
        if value is None or len(value) != _PROMISE.size:
            return None
        is_there, *rest = _PROMISE.unpack(value)
        return cls(bool(is_there), *rest)

    def to_bytes(self) -> bytes:
        return _PROMISE.pack(*self)


def unique_key(key: str) -> bytes:
    """What the map has for a unique key."""
    return b"U" + hashlib.sha256(key.encode("utf-8", "surrogatepass")).digest()


def periodic_key(closure_id: int) -> bytes:
    """What the map has for a periodic job."""
    return b"C" + closure_id.to_bytes(4, "little")


def map_sizes(cells: int, participants: int) -> tuple[int, int, int]:
    """Capacity of a queue's map, bytes from one of its cells to the next, and size of the file."""
    capacity = map_capacity(cells, participants)
    stride, size = SharedHashMap._sizes(capacity, QUEUE_MAP_VALUE_BYTES, participants)
    return capacity, stride, size


def check_map(directory: bytes, created_ns: int) -> None:
    """Raise LayoutMismatch where the map is not of the queue whose pool was made at `created_ns`."""
    path = os.path.join(directory, b"map")
    contents, header, fd = files.open_mapped(path, Kind.MAP, readonly=True)
    del contents
    os.close(fd)
    if int(header["created_ns"]) != created_ns:
        raise LayoutMismatch(
            f"{os.fsdecode(path)}: expected the map of the queue made at {created_ns} ns, found that of one made at "
            f"{header['created_ns']} ns; put the right file back, or make a new queue"
        )


class Registrations:
    """What one handle of a queue has said, and what all have.

    Attributes
    ----------
    map : SharedHashMap

    Parameters
    ----------
    directory : bytes
        The queue's.
    created_ns : int
        When its pool was made.
    is_alive : callable
        Does the participant with this number and incarnation live?
    """

    def __init__(self, directory: bytes, created_ns: int, is_alive: Callable[[int, int], bool]) -> None:
        check_map(directory, created_ns)
        self.map = SharedHashMap.open(os.path.join(directory, b"map"))
        self.is_alive = is_alive
        self._identity = (0, 0)
        self._said: set[int] = set()

    def say(self, identity: tuple[int, int], closure_ids: Iterable[int]) -> None:
        """Let the keys of this handle be those of `closure_ids`, under its number and incarnation.

        Raises
        ------
        MapFull
            There is no room for another one; the others are there.
        """
        if identity != self._identity:
            # the keys of the number that it had before are a parent's, or go with whoever meets them
            self._identity, self._said = identity, set()
        wanted = set(closure_ids)
        for closure_id in self._said - wanted:
            self.map.pop(self._key(closure_id), b"")
            self._said.discard(closure_id)
        for closure_id in sorted(wanted - self._said):
            try:
                self.map[self._key(closure_id)] = b""
            except MapFull:
                # Where every job is known, nobody has met the keys of those who have gone.
                self.live_ids()
                self.map[self._key(closure_id)] = b""
            self._said.add(closure_id)

    def take_back(self) -> None:
        """Remove the keys of this handle."""
        self.say(self._identity, ())

    def _key(self, closure_id: int) -> bytes:
        return _KEY.pack(_RUNS, closure_id, *self._identity)

    def live_ids(self) -> set[int]:
        """Find the closure ids that any live participant runs; the keys of others are removed."""
        found: set[int] = set()
        lives: dict[tuple[int, int], bool] = {}
        for key in self.map:
            if len(key) != _KEY.size or key[:1] != _RUNS:
                continue
            _, closure_id, number, incarnation = _KEY.unpack(key)
            who = (number, incarnation)
            if who not in lives:
                lives[who] = self.is_alive(number, incarnation)
            if lives[who]:
                found.add(closure_id)
            else:
                self.map.pop(key, b"")
        return found

    def take_place(self, identity: tuple[int, int], closure_id: int, places: int) -> int | None:
        """Take one of so many places of a closure id; None where others have them all."""
        me = _WHO.pack(*identity)
        for place in range(places):
            key = _PLACE_KEY.pack(_PLACE, closure_id, place)
            if self.map.compare_and_swap(key, None, me):
                return place
            there = self.map.get(key)
            is_held = there is not None and len(there) == _WHO.size and self.is_alive(*_WHO.unpack(there))
            if not is_held and self.map.compare_and_swap(key, there, me):
                return place
        return None

    def give_place(self, identity: tuple[int, int], closure_id: int, place: int) -> None:
        """Give a place back that `take_place` gave."""
        self.map.compare_and_swap(_PLACE_KEY.pack(_PLACE, closure_id, place), _WHO.pack(*identity), None)

    def close(self) -> None:
        """Close the map."""
        self.map.close()

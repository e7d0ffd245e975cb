"""What the dead leave in a map: real kills, and frozen states written by hand; then `rescue`, by itself or called."""

import os
import struct
from contextlib import contextmanager
from fcntl import F_OFD_SETLK, F_UNLCK, F_WRLCK, fcntl

import numpy as np
import pytest

from subetha._core import SharedHashMap
from subetha.errors import MapFull, TableFull
from subetha.layout import VERSION_MASK, CellState, MapPhase, SlotState, cell_word

from .ring_file import MapFile, lock_is_held

FREE, WRITING, READY, TAKEN = (CellState[name] for name in ("FREE", "WRITING", "READY", "TAKEN"))
DEAD = 7
"""The number of the participant whose record is used, or dying, while nobody holds its byte."""


@pytest.fixture
def raw(path, shared_map):
    """The bytes of `shared_map`'s file, with two keys; the map has a number of its own."""
    shared_map[b"a"] = b"1"
    shared_map[b"b"] = b"2"
    return MapFile(path)


def kill_by_hand(raw, slot=DEAD - 1, *, incarnation=3, state=SlotState.USED):
    raw.records["status"][slot] = incarnation << 8 | state
    raw.records["pid"][slot] = 2**22 + 1


@contextmanager
def number_held(raw, slot):
    """A participant that lives as long as the block: its record, and the lock on its byte."""
    byte = len(raw.contents) + slot
    with open(raw.path, "r+b") as file:
        fcntl(file, F_OFD_SETLK, struct.pack("hhqqi4x", F_WRLCK, os.SEEK_SET, byte, 1, 0))
        raw.records["status"][slot] = 1 << 8 | SlotState.USED
        yield
        fcntl(file, F_OFD_SETLK, struct.pack("hhqqi4x", F_UNLCK, os.SEEK_SET, byte, 1, 0))
    assert not lock_is_held(raw.path, byte)


def free_cell(raw):
    return raw.states.index(FREE)


@pytest.mark.parametrize("record", [SlotState.USED, SlotState.DYING], ids=lambda state: state.name)
@pytest.mark.parametrize("version", [0, 5, VERSION_MASK - 1, VERSION_MASK])
@pytest.mark.parametrize("state", [WRITING, READY, TAKEN], ids=lambda state: state.name)
def test_a_cell_of_the_dead_that_no_slot_refers_to_is_free(shared_map, raw, record, version, state):
    cell = free_cell(raw)
    raw.words[cell] = cell_word(version, state, DEAD)
    kill_by_hand(raw, state=record)
    assert shared_map.rescue() == 1
    assert int(raw.words[cell]) == cell_word(version + 1, FREE, 0)
    assert int(raw.records["status"][DEAD - 1]) == 3 << 8 | SlotState.FREE
    assert shared_map.rescue() == 0
    assert raw.faults() == []
    assert dict(shared_map) == {b"a": b"1", b"b": b"2"}


@pytest.mark.parametrize("present", [True, False], ids=["present", "absent"])
def test_what_the_dead_had_published_is_there(shared_map, raw, present):
    # it died between the CAS of the slot and READY(0); somebody has deleted the key since, or not
    if not present:
        del shared_map[b"a"]
    cell = raw.cell_for(b"a")
    raw.words[cell] = cell_word(raw.version_of(cell), READY, DEAD)
    kill_by_hand(raw)
    assert shared_map.rescue() == 1
    assert int(raw.words[cell]) == cell_word(raw.version_of(cell), READY, 0)
    assert shared_map.get(b"a") == (b"1" if present else None)
    assert raw.faults() == []


@pytest.mark.parametrize("by_hand", [True, False], ids=["rescue", "where room is needed"])
def test_what_the_dead_had_replaced_and_not_freed_is_free(shared_map, raw, by_hand):
    cell = free_cell(raw)
    raw.words[cell] = cell_word(6, READY, 0)
    kill_by_hand(raw)
    if by_hand:
        assert shared_map.rescue() == 1
        assert int(raw.words[cell]) == cell_word(7, FREE, 0)
    else:
        for n in range(6):
            shared_map[b"%d" % n] = b""
        with pytest.raises(MapFull, match="all 8 keys"):
            shared_map[b"more"] = b""
    assert raw.faults() == []


def test_what_one_who_is_stopped_has_replaced_is_taken_where_room_is_needed(shared_map, raw):
    # nobody is dead
    for _ in range(4):
        raw.words[free_cell(raw)] = cell_word(6, READY, 0)
    for n in range(6):
        shared_map[b"%d" % n] = b""
    assert len(shared_map) == 8
    assert raw.faults() == []


@pytest.mark.parametrize("state", [WRITING, READY], ids=lambda state: state.name)
def test_nothing_that_a_living_one_holds_is_touched(shared_map, raw, state):
    with number_held(raw, 9):
        first, second, *_ = (cell for cell in range(raw.count) if raw.state_of(cell) == FREE)
        raw.words[first] = cell_word(4, state, 10)
        raw.words[second] = cell_word(4, state, DEAD)
        kill_by_hand(raw)
        assert shared_map.rescue() == 1
        assert int(raw.words[first]) == cell_word(4, state, 10)
        assert raw.state_of(second) == FREE
        shared_map.repair()
        assert int(raw.words[first]) == cell_word(4, state, 10)
    assert shared_map.rescue() == 1
    assert raw.faults() == []


@pytest.mark.parametrize(("stopped", "keys"), [(1, 8), (3, 8), (5, 6)])
def test_stopped_writers_keep_the_cells_they_fill_and_no_others(shared_map, raw, stopped, keys):
    # there are four cells more than the capacity
    with number_held(raw, 9):
        for _ in range(stopped):
            raw.words[free_cell(raw)] = cell_word(4, WRITING, 10)
        for n in range(keys - 2):
            shared_map[b"%d" % n] = b""
        text = "all 8 keys" if keys == 8 else "6 of 8 keys are there, and other processes hold every other cell"
        with pytest.raises(MapFull, match=text):
            shared_map[b"more"] = b""
        # what is there can be given new values all the same
        for _ in range(5):
            for key in shared_map:
                shared_map[key] = b"new"
        assert set(shared_map.values()) == {b"new"}
    assert shared_map.rescue() == 1
    assert raw.faults() == []


def test_a_move_that_the_dead_had_begun_is_completed(shared_map, raw):
    for n in range(4):
        shared_map[b"%d" % n] = b""
        del shared_map[b"%d" % n]
    raw.arrays[1] = 1 << 3
    raw.put_phase(MapPhase.MOVING)
    raw.arrays[0][:7] |= raw.IS_FROZEN
    kill_by_hand(raw)
    assert shared_map.rescue() == 1
    assert (raw.generation, raw.phase) == (1, MapPhase.STABLE)
    assert dict(shared_map) == {b"a": b"1", b"b": b"2"}
    assert raw.states.count(READY) == 2
    assert raw.faults() == []


def test_a_readonly_handle_rescues_nothing(path, shared_map, raw):
    raw.words[free_cell(raw)] = cell_word(0, WRITING, DEAD)
    kill_by_hand(raw)
    before = raw.contents.copy()
    with SharedHashMap.open(path, readonly=True) as looking:
        assert dict(looking) == {b"a": b"1", b"b": b"2"}
    assert (raw.contents == before).all()


def test_opening_rescues(path, shared_map, raw):
    cell = free_cell(raw)
    raw.words[cell] = cell_word(0, WRITING, DEAD)
    kill_by_hand(raw)
    SharedHashMap.open(path).close()
    assert raw.state_of(cell) == FREE
    assert int(raw.records["status"][DEAD - 1]) & 0xFF == SlotState.FREE


def test_a_table_full_of_dead_makes_room(path, raw, shared_map):
    raw.records["status"][1:] = 5 << 8 | SlotState.USED
    raw.words[free_cell(raw)] = cell_word(0, WRITING, 2)
    raw.words[free_cell(raw)] = cell_word(0, WRITING, len(raw.records))
    with all_held_but(raw, {0, 4}), SharedHashMap.open(path) as other:
        other[b"c"] = b"3"
        assert int(raw.records["pid"][4]) == os.getpid()
        with SharedHashMap.open(path) as refused, pytest.raises(TableFull, match="all 1022 slots"):
            refused[b"d"] = b""
    shared_map.rescue()
    assert raw.faults() == []


@contextmanager
def all_held_but(raw, slots):
    """Hold the lock of every slot but some."""
    with open(raw.path, "r+b") as file:
        for slot in range(len(raw.records)):
            if slot not in slots:
                byte = len(raw.contents) + slot
                fcntl(file, F_OFD_SETLK, struct.pack("hhqqi4x", F_WRLCK, os.SEEK_SET, byte, 1, 0))
        yield


def test_many_rescuers_at_once(path, shared_map, raw, in_threads):
    handles = [SharedHashMap.open(path) for _ in range(4)]
    for turn in range(20):
        raw.words[free_cell(raw)] = cell_word(turn, WRITING, DEAD)
        raw.words[free_cell(raw)] = cell_word(turn, READY, DEAD + 1)
        raw.words[free_cell(raw)] = cell_word(turn, READY, 0)
        kill_by_hand(raw, incarnation=turn + 1)
        kill_by_hand(raw, DEAD, incarnation=turn + 1)
        in_threads(*(handle.rescue for handle in handles))
        assert raw.faults() == []
        assert (raw.records["status"][DEAD - 1 : DEAD + 1] & np.uint64(0xFF) == SlotState.FREE).all()
    for handle in handles:
        handle.close()
    assert dict(shared_map) == {b"a": b"1", b"b": b"2"}


def test_a_killed_writer_is_rescued_by_the_next_who_needs_its_cell(path, script):
    with SharedHashMap.create(path, 2) as made:
        raw = MapFile(path)
        victim = script(
            """
            own = SharedHashMap.open(sys.argv[1])
            own[b"k"] = b"v"
            say("in")
            heard()
            """,
            path,
        )
        victim.heard("in")
        assert raw.used_slots == [0]
        # as if it had been killed in the middle of so many calls
        for _ in range(4):
            raw.words[free_cell(raw)] = cell_word(0, WRITING, 1)
        with pytest.raises(MapFull):
            made[b"other"] = b""
        victim.kill()
        made.rescue()
        made[b"other"] = b""
        assert dict(made) == {b"k": b"v", b"other": b""}
        assert raw.faults() == []

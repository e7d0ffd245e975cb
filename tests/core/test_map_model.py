"""SharedHashMap against a dict: small worlds, every call, with versions and generations that wrap on the way, and with values in
cells, or in cells and blocks."""

import os
import random
import shutil
import tempfile
from pathlib import Path

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from subetha._core import SharedHashMap
from subetha.errors import MapFull
from subetha.layout import VERSION_MASK, MapPhase

from .ring_file import MapFile

KEYS = st.sampled_from([b"", b"a", b"b", b"\0", b"k" * 48, b"key 7", b"key 8", b"\xff" * 9])
VALUES = st.binary(max_size=16) | st.builds(
    lambda seed, length: random.Random(seed).randbytes(length),
    st.integers(0, 3),
    st.sampled_from([17, 4095, 4096, 4097, 8192]) | st.integers(17, 8192),
)
ARENA_BYTES = 2**17
"""Enough for all that may be there at one time, and for what deleted keys hold only where a rebuild gives it back."""
MEMORY = "/dev/shm" if os.access("/dev/shm", os.W_OK) else None


class MapAgainstDict(RuleBasedStateMachine):
    """Three handles of one map, the last one read-only; the model is a dict."""

    @initialize(
        capacity=st.sampled_from([1, 2, 3, 8]),
        generation=st.sampled_from([0, 1, 2**27 - 1, 2**28 - 2, 2**29 - 1, 2**61 - 2]),
        versions_left=st.integers(0, 5),
        arena_bytes=st.sampled_from([0, ARENA_BYTES]),
    )
    def start(self, capacity, generation, versions_left, arena_bytes):
        self.directory = Path(tempfile.mkdtemp(prefix="subetha-test-", dir=MEMORY))
        path = self.directory / "map"
        SharedHashMap.create(path, capacity, value_bytes=16, arena_bytes=arena_bytes).close()
        self.longest = 2**16 if arena_bytes else 16
        self.raw = MapFile(path)
        if generation:
            self.raw.set_generation(generation)
        self.raw.set_versions(VERSION_MASK - versions_left)
        self.handles = [SharedHashMap.open(path), SharedHashMap.open(path), SharedHashMap.open(path, readonly=True)]
        self.capacity = capacity
        self.model = {}

    def teardown(self):
        if hasattr(self, "handles"):
            for handle in self.handles:
                handle.close()
            shutil.rmtree(self.directory)

    def has_room_for(self, key):
        return key in self.model or len(self.model) < self.capacity

    @rule(who=st.integers(0, 1), key=KEYS, value=VALUES)
    def set(self, who, key, value):
        value = value[: self.longest]
        if self.has_room_for(key):
            self.handles[who][key] = value
            self.model[key] = value
        else:
            with pytest.raises(MapFull):
                self.handles[who][key] = value

    @rule(who=st.integers(0, 1), key=KEYS)
    def delete(self, who, key):
        if key in self.model:
            del self.handles[who][key]
            del self.model[key]
        else:
            with pytest.raises(KeyError):
                del self.handles[who][key]

    @rule(who=st.integers(0, 1), key=KEYS)
    def pop(self, who, key):
        assert self.handles[who].pop(key, None) == self.model.pop(key, None)

    @rule(who=st.integers(0, 1))
    def popitem(self, who):
        if self.model:
            key, value = self.handles[who].popitem()
            assert self.model.pop(key) == value
        else:
            with pytest.raises(KeyError):
                self.handles[who].popitem()

    @rule(who=st.integers(0, 1), key=KEYS, value=VALUES)
    def setdefault(self, who, key, value):
        value = value[: self.longest]
        if self.has_room_for(key):
            assert self.handles[who].setdefault(key, value) == self.model.setdefault(key, value)
        else:
            with pytest.raises(MapFull):
                self.handles[who].setdefault(key, value)

    @rule(who=st.integers(0, 1), key=KEYS, data=st.data(), new=st.none() | VALUES)
    def compare_and_swap(self, who, key, data, new):
        new = new and new[: self.longest]
        expected = data.draw(st.none() | VALUES | st.just(self.model.get(key)))
        if self.model.get(key) != expected:
            assert not self.handles[who].compare_and_swap(key, expected, new)
        elif new is not None and not self.has_room_for(key):
            with pytest.raises(MapFull):
                self.handles[who].compare_and_swap(key, expected, new)
        else:
            assert self.handles[who].compare_and_swap(key, expected, new)
            self.model.pop(key, None)
            if new is not None:
                self.model[key] = new

    @rule(who=st.integers(0, 1), how=st.sampled_from(["clear", "rebuild", "repair", "rescue"]))
    def upkeep(self, who, how):
        getattr(self.handles[who], how)()
        if how == "clear":
            self.model.clear()

    @rule(phase=st.sampled_from([MapPhase.CLEANING, MapPhase.MOVING]), steps=st.integers(0, 40))
    def leave_a_rebuild(self, phase, steps):
        """As somebody leaves one who dies in it."""
        raw = self.raw
        if raw.phase != MapPhase.STABLE:
            return
        generation = raw.generation
        other = raw.arrays[1 - generation & 1]
        empty = (generation + 1) % 2**61 << 3
        other[: steps if phase == MapPhase.CLEANING else raw.size] = empty
        if phase == MapPhase.MOVING:
            raw.slots[:steps] |= raw.IS_FROZEN
        raw.put_phase(phase)

    @invariant()
    def they_agree(self):
        if not hasattr(self, "handles"):
            return
        for handle in self.handles:
            assert dict(handle.items()) == self.model
            assert sorted(handle) == sorted(self.model)
            assert len(handle) == len(self.model)
        for key in (b"", b"a", b"key 8"):
            assert self.handles[2].get(key) == self.model.get(key)
            assert (key in self.handles[1]) == (key in self.model)
        if self.raw.phase != MapPhase.MOVING:
            assert self.raw.faults() == []


MapAgainstDict.TestCase.settings = settings(max_examples=40, stateful_step_count=40)
TestMapAgainstDict = MapAgainstDict.TestCase

"""What a ring's or a queue's files must look like when everything has been taken out: nothing is left by the dead."""

import functools
from pathlib import Path

import numpy as np
from queue_files import QueueFiles
from ring_file import DequeFile, RingFile, TableFile

from subetha.layout import STATE_SHIFT, VERSION_SHIFT, BlockState, CellState, SlotState


class MappedOnce(QueueFiles):
    """Each file is mapped once."""

    def __init__(self, path):
        self.bytes = functools.cache(super().bytes)
        super().__init__(path)


CLAIMABLE = (CellState.READY, CellState.RETRY)
COLLECTABLE = (CellState.DONE, CellState.DEAD)


def nothing_left(faults):
    if faults:
        raise AssertionError("; ".join(faults))


def states_of(words):
    return [CellState(int(word) >> STATE_SHIFT & 0xF) for word in words]


def live_references(places, words, states):
    """Cells that full places lead to, with the version the place names and in one of `states`: the others are stale."""
    cell_bits = len(words).bit_length() - 1
    lap_bits = (63 - cell_bits) // 2
    version_bits = 63 - cell_bits - lap_bits
    found = []
    for place in map(int, places):
        cell, version = place % len(words), place >> cell_bits & ((1 << version_bits) - 1)
        word = int(words[cell])
        if (
            place >> (cell_bits + version_bits) & 1
            and (word >> VERSION_SHIFT) % (1 << version_bits) == version
            and CellState(word >> STATE_SHIFT & 0xF) in states
        ):
            found.append(cell)
    return found


def records_faults(records, alive):
    states = records["status"] & np.uint64(0xFF)
    expected = np.zeros(len(states), np.uint64)
    expected[sorted(alive)] = SlotState.USED
    return [
        f"the record of slot {slot} is {SlotState(int(states[slot])).name}, expected {SlotState(int(expected[slot])).name}"
        for slot in np.flatnonzero(states != expected)
    ]


def _cells(words, letters=0):
    return [
        f"cell {cell} is {state.name}, owner {int(words[cell]) & 0xFFFF}"
        for cell, state in enumerate(states_of(words))
        if state is not CellState.FREE and not (letters and state is CellState.DEAD and not int(words[cell]) & 0xFFFF)
    ]


def _ring(name, lines, places, words, states):
    faults = [f"{name}: a live reference to cell {cell}" for cell in live_references(places, words, states)]
    if lines["due"][0] & 1:
        faults.append(f"{name}: a repair is due ({lines['due'][0]})")
    return faults


def _ahead(version, other):
    """By how much `version` (40 bits) is ahead of the other one."""
    return (version - other + (1 << 39)) % (1 << 40) - (1 << 39)


class RingCensus:
    """A ring's file, counted."""

    file_of = RingFile

    def __init__(self, path):
        self.file = self.file_of(path)

    @property
    def words(self):
        return self.file.words

    def content(self, cell):
        return self.file.payloads[cell, : self.file.lengths[cell]].tobytes()

    def leftover(self, alive):
        """What is not as it must be once the dead are rescued: records, and cells in a dead one's hands."""
        return records_faults(self.file.records, alive) + _in_hands(self.words, alive)

    def faults(self, alive):
        """What is not as it must be with everything taken out; `alive`: slots of those who still take part."""
        return [
            *_cells(self.words),
            *_ring("ring", self.file.lines, self.file.places, self.words, CLAIMABLE),
            *records_faults(self.file.records, alive),
        ]


class DequeCensus(RingCensus):
    """A deque's file, counted."""

    file_of = DequeFile

    def faults(self, alive):
        faults = super().faults(alive)
        if len(self.file.visible):
            faults.append(f"the deque shows {self.file.visible}")
        if not alive and (self.file.get("owner") or self.file.get("pushes") % 2):
            faults.append(
                f"owner {self.file.get('owner'):#x}, pushes {self.file.get('pushes')} where the last one left in order"
            )
        return faults


def _in_hands(words, alive):
    return [
        f"cell {cell} is {state.name} in the hands of number {int(words[cell]) & 0xFFFF}, who is dead"
        for cell, state in enumerate(states_of(words))
        if (
            state in (CellState.WRITING, CellState.TAKEN, CellState.COLLECTED, CellState.FENCED)
            or (state is CellState.KEPT and int(words[cell]) & 0xFFFF)
        )
        and (int(words[cell]) & 0xFFFF) - 1 not in alive
    ]


class QueueCensus:
    """A queue's files, counted."""

    def __init__(self, path):
        self.files = MappedOnce(path)
        self.cells = self.files.cells
        self.rings = [(name, *self.files.ring(name)) for name in self.files.ring_names if "/" not in name]
        self.blocks = [(size, self.files.block_words(size)) for size, _, _ in self.files.arena_classes]
        self.records = TableFile(Path(path) / "table").records

    @property
    def words(self):
        return self.cells["word"]

    def leftover(self, alive):
        """What is not as it must be once the dead are rescued: records, blocks, and cells in a dead one's hands."""
        owned = [
            f"a block of {size} bytes is OWNED"
            for size, words in self.blocks
            for word in words[words & 0xF == BlockState.OWNED]
            if (int(word) >> 4 & 0xFFFF) - 1 not in alive
        ]
        return records_faults(self.records, alive) + _in_hands(self.words, alive) + owned

    def faults(self, alive, letters=0):
        """What is not as it must be with everything taken out; `letters`: whether dead letters may lie about."""
        words = self.words.copy()
        faults = _cells(words, letters)
        for name, lines, places in self.rings:
            faults += _ring(name, lines, places, words, CLAIMABLE)
        for number in self.files.mailboxes:
            faults += _ring(f"mail/{number}", *self.files.ring(f"mail/{number}"), words, COLLECTABLE)
        kept = set(np.flatnonzero(np.array(states_of(words)) == CellState.DEAD).tolist()) if letters else set()
        for size, blocks in self.blocks:
            for word in map(int, blocks[blocks & 0xF >= BlockState.OWNED]):
                cell = word >> 4 & 0xFFFFF
                if word & 0xF == BlockState.OWNED:
                    faults.append(f"a block of {size} bytes is OWNED by {word >> 4 & 0xFFFF}")
                elif cell not in kept and _ahead(word >> 24, int(words[cell]) >> VERSION_SHIFT) >= 0:
                    faults.append(f"a block of {size} bytes is LINKED to cell {cell} and a version it has not passed")
        return faults + records_faults(self.records, alive)

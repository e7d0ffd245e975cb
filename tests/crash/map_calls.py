"""Calls of a SharedHashMap under the stepper: what stands before, what the victim does, and what must be found afterwards."""

import contextlib
import functools
import os

from census import nothing_left, records_faults
from queue_calls import copy_sparse
from ring_file import MapFile
from traffic import origin_of, payload_of

from subetha._core import SharedHashMap
from subetha.errors import ArenaFull, MapFull
from subetha.layout import BlockState, CellState, MapPhase, cell_word

CAPACITY = 4
ARENA_BYTES = 1 << 17
SURVIVOR, VICTIM, TRAFFIC, ROUND, FALLEN = 1, 2, 3, 4, 5
KEY = b"the key"
REPLACED, IN_SLOT = "replaced, and not yet freed", "in a slot, and not yet READY(0)"


def make_template(directory):
    """A map that has been in use, and one with blocks: its versions differ, and it is in its second generation."""
    for name, arena_bytes, value in (("map", 0, b"before"), ("blocks", ARENA_BYTES, bytes(7000))):
        with SharedHashMap.create(os.path.join(directory, name), CAPACITY, arena_bytes=arena_bytes) as made:
            for n in range(6):
                made[b"%d" % (n % 3)] = value
            made.clear()


class MapStage:
    """The survivor, its keys, and one call of a victim on the same map.

    `setup`, `call` and `finish` run in the victim. `here` is what is in the map before, beside the survivor's own two keys.
    `dies` are (call, state) of others that die before.
    """

    here = ()
    deleted = ()
    dies = ()
    dies_first = False
    lapses = ()
    handles_join = True
    producer = VICTIM
    key = KEY
    file = "map"
    length = 56

    def __init__(self, directory):
        self.directory = directory
        self.path = os.path.join(directory, self.file)

    @classmethod
    def copy(cls, template, directory):
        os.mkdir(directory)
        copy_sparse(os.path.join(template, cls.file), os.path.join(directory, cls.file))
        return cls(directory)

    @property
    def watched(self):
        # of the blocks their words: the bytes in between tell nobody anything
        return [(self.path, MapFile(self.path).words_end)]

    @classmethod
    @functools.cache
    def value(cls, producer, n):
        return payload_of(producer, n, cls.length)

    # ---- the survivor, before ----

    def before(self):
        self.map = SharedHashMap.open(self.path)
        for n in range(2):
            self.map[b"mine %d" % n] = self.value(SURVIVOR, n)
        for key in (*self.here, *self.deleted):
            self.map[key] = self.value(SURVIVOR, 9)
        for key in self.deleted:
            del self.map[key]
        self.raw = MapFile(self.path)
        self.alive = set(self.raw.used_slots)
        # the values that each key may have afterwards
        self.allowed = {key: {value} for key, value in self.map.items()}

    def count(self, state):
        raw = MapFile(self.path)
        if isinstance(state, CellState):
            return raw.states.count(state)
        if isinstance(state, BlockState):
            return sum(int((words & 0xF == state).sum()) for words in raw.blocks)
        referenced = raw.referenced
        return sum(
            raw.states[cell] is CellState.READY
            and ((cell in referenced) == (state == IN_SLOT))
            and (bool(int(raw.words[cell]) & 0xFFFF) == (state == IN_SLOT))
            for cell in range(raw.count)
        )

    # ---- the victim ----

    @property
    def payload(self):
        return self.value(self.producer, 0)

    def setup(self):
        self.map = SharedHashMap.open(self.path)
        if self.handles_join:
            self.map.pop(b"nothing", None)
        # made before the call is stepped through
        self.made = self.payload, self.first

    def call(self):
        raise NotImplementedError

    def finish(self, value):
        self.map.close()
        return value

    # ---- the survivor, afterwards ----

    @property
    def after(self):
        """What the key has when the call has returned."""
        return self.payload

    @property
    def first(self):
        """What it has before."""
        return self.value(SURVIVOR, 9) if self.key in self.here else None

    def expect(self, returned, value):
        self.allowed[self.key] = {self.after} if returned else {self.first, self.after}

    def look_at_trace(self):
        """Did the call that was stepped through do what it is there for?"""

    def after_fall(self, fallen, pid):
        """Another one, of that pid, dies before the victim's call begins."""
        self.allowed[fallen.key] = {fallen.first, fallen.after}

    def contents(self):
        """Everything there is, whole, and by every way of reading the same."""
        with SharedHashMap.open(self.path, readonly=True) as looking:
            found = dict(looking.items())
            assert sorted(found) == sorted(looking)
            assert len(looking) == len(found)
            for key in self.allowed:
                assert looking.get(key) == found.get(key)
        for value in found.values():
            origin_of(value)
        return found

    def compare(self, found):
        for key, allowed in self.allowed.items():
            assert found.get(key) in allowed, f"{key} is {found.get(key)}, expected one of {allowed}"
        strange = set(found) - set(self.allowed)
        assert not strange, f"keys that nobody has set: {strange}"

    def after_kill(self, returned, value):
        self.expect(returned, value)
        # readers wait for nobody, and what they have seen stays
        found = self.contents()
        self.compare(found)
        was_there = (self.raw.records["status"] & 0xFF != 0).sum() - len(self.alive)
        rescued = self.map.rescue()
        assert rescued == was_there, f"rescue() says {rescued}, where {was_there} were dead"
        assert self.contents() == found
        self.settle()

    def settle(self):
        """Compare, count, and fill the map once more."""
        nothing_left(self.raw.faults() + records_faults(self.raw.records, self.alive))
        found = self.contents()
        self.compare(found)
        for key, value in found.items():
            self.map[key] = self.value(ROUND, 0)
            assert self.map.compare_and_swap(key, self.value(ROUND, 0), value)
        assert self.contents() == found
        self.map.rebuild()
        assert self.contents() == found
        for key, value in found.items():
            assert self.map.pop(key) == value
        for n in range(CAPACITY):
            self.map[b"%d" % n] = self.value(ROUND, n)
        try:
            self.map[b"more"] = b""
        except MapFull:
            pass
        else:
            raise AssertionError("more than the capacity went in")
        assert self.contents() == {b"%d" % n: self.value(ROUND, n) for n in range(CAPACITY)}
        nothing_left(self.raw.faults() + records_faults(self.raw.records, self.alive))
        self.fill_blocks()
        self.close()
        nothing_left(self.raw.faults() + records_faults(self.raw.records, set()))

    def fill_blocks(self):
        """All of the blocks' bytes can be used, in blocks of any size."""

    def close(self):
        self.map.close()

    # ---- the victim is only stopped ----

    def traffic(self):
        """The keys change again and again, the victim's too, and generations go past the one that is stopped."""
        for n in range(10 * CAPACITY):
            for key in (b"mine %d" % (n % 2), self.key):
                self.map[key] = self.value(TRAFFIC, n)
                assert self.map[key] == self.value(TRAFFIC, n)
                self.allowed[key] = {self.value(TRAFFIC, n)}
            if n % 3 == 0:
                assert self.map.pop(self.key) == self.value(TRAFFIC, n)
                assert self.key not in self.map
                self.allowed[self.key] = {None}
            if n % 5 == 0:
                self.map.rebuild()
        assert self.map.rescue() == 0, "a stopped process is not dead"

    def meanwhile(self):
        """Again and again until the victim has ended."""

    def after_stop(self, value):
        # it did what it does before the others or after them, or in between
        self.allowed[self.key] |= {self.after}
        self.map.rescue()
        self.settle()


class Insert(MapStage):
    def call(self):
        self.map[self.key] = self.payload


class FirstInsert(Insert):
    handles_join = False


class InsertAgain(Insert):
    """The key was deleted, and has its slot still."""

    deleted = (KEY,)


class InsertIntoFull(Insert):
    """A deleted key holds the last cell that a new one may have: a rebuild comes first."""

    here = (b"other",)
    deleted = (b"gone",)


class InsertBehindStopped(Insert):
    """A rebuild that has stopped half-way is completed first."""

    here = (b"other",)
    handles_join = False

    def before(self):
        super().before()
        generation = self.raw.generation
        self.raw.arrays[1 - generation & 1] = generation + 1 << 3
        self.raw.put_phase(MapPhase.MOVING)
        self.raw.slots[: self.raw.size // 2] |= self.raw.IS_FROZEN


class Overwrite(Insert):
    here = (KEY,)


class OverwriteInFull(Overwrite):
    here = (KEY, b"other")


class InsertReplaced(Insert):
    """Only stopped: what it has put into the slot is replaced by one who dies before it frees the victim's cell."""

    def traffic(self):
        raw = self.raw
        if KEY not in self.map or int(raw.words[raw.cell_for(KEY)]) & 0xFFFF == 0:
            # not in the slot yet, or READY(0) already
            return
        slot, cell = raw.slot_of(KEY), raw.cell_for(KEY)
        other = raw.states.index(CellState.FREE)
        for field in ("hash", "key_length", "value_length", "key", "value"):
            raw.cells[field][other] = raw.cells[field][cell]
        raw.words[other] = cell_word(raw.version_of(other), CellState.READY, 0)
        raw.slots[slot] = raw.key_word(other, raw.version_of(other))
        # the dead one's rescue leaves a cell alone that has a living owner
        assert self.map.rescue() == 0
        assert raw.state_of(cell) is CellState.READY

    def after_stop(self, value):
        self.expect(True, value)
        # nobody looks again: the victim itself has freed it
        nothing_left(self.raw.faults())
        self.settle()


class Delete(MapStage):
    here = (KEY,)
    after = None

    def call(self):
        with contextlib.suppress(KeyError):
            del self.map[self.key]


class Pop(MapStage):
    here = (KEY,)
    after = None

    def call(self):
        return self.map.pop(self.key, None)

    def expect(self, returned, value):
        super().expect(returned, value)
        assert not returned or value == self.first

    def after_stop(self, value):
        assert value is None or origin_of(value)[0] in (SURVIVOR, TRAFFIC)
        super().after_stop(value)


class SetDefault(MapStage):
    def call(self):
        return self.map.setdefault(self.key, self.payload)

    def expect(self, returned, value):
        super().expect(returned, value)
        assert not returned or value == self.payload

    def after_stop(self, value):
        assert origin_of(value)[0] in (VICTIM, TRAFFIC)
        super().after_stop(value)


class CompareAndSwap(MapStage):
    here = (KEY,)

    def call(self):
        return self.map.compare_and_swap(self.key, self.first, self.payload)

    def expect(self, returned, value):
        super().expect(returned, value)
        assert not returned or value is True

    def after_stop(self, value):
        # what it had to compare with is gone: it was the first, or has done nothing
        assert value in (True, False)
        self.map.rescue()
        self.settle()


class Get(MapStage):
    """Only stopped: what it gives is whole, and one of the values that the key had meanwhile."""

    here = (KEY,)

    def call(self):
        return self.map.get(self.key)

    def after_stop(self, value):
        assert value is None or origin_of(value)[0] in (SURVIVOR, TRAFFIC)
        self.map.rescue()
        self.settle()


class Items(MapStage):
    """Only stopped: every pair is whole, and no key comes twice."""

    here = (KEY,)

    def call(self):
        return list(self.map.items())

    def after_stop(self, value):
        keys = [key for key, _ in value]
        assert len(keys) == len(set(keys))
        assert {b"mine 0", b"mine 1"} <= set(keys) <= {b"mine 0", b"mine 1", KEY}
        for _, one in value:
            assert origin_of(one)[0] in (SURVIVOR, TRAFFIC)
        self.map.rescue()
        self.settle()


class Rebuild(MapStage):
    here = (KEY,)
    deleted = (b"gone",)

    def call(self):
        return self.map.rebuild()

    def expect(self, returned, value):
        """Nothing changes."""

    def after_stop(self, value):
        self.map.rescue()
        self.settle()

    def after_kill_beside(self, tracee, slow):
        """Others go on through some generations before the slow one does."""
        self.map.rescue()
        for n in range(5):
            self.map[KEY] = self.value(TRAFFIC, n)
            self.map.rebuild()
            del self.map[KEY]
        self.map[KEY] = self.value(TRAFFIC, 9)
        self.allowed[KEY] = {self.value(TRAFFIC, 9)}
        slow.go_on()
        self.map.rescue()
        self.settle()


class Close(MapStage):
    here = (KEY,)

    def call(self):
        self.map.close()

    def expect(self, returned, value):
        """Nothing changes."""


class Repair(MapStage):
    """A slot was overwritten: its key is lost, and its cell is in nobody's hands."""

    here = (KEY,)

    def before(self):
        super().before()
        self.raw.slots[self.raw.slot_of(KEY)] = self.raw.generation + 6 << 3
        self.allowed[KEY] = {None}

    def call(self):
        return self.map.repair()

    def expect(self, returned, value):
        """The others stay."""

    def after_kill(self, returned, value):
        self.map.repair()
        super().after_kill(returned, value)

    def after_kill_beside(self, tracee, slow):
        slow.go_on()
        self.map.repair()
        self.map.rescue()
        self.settle()


class Rescue(MapStage):
    """Four have died: before a byte was written, before a cell came into its slot, right after that, and before what was
    replaced was freed."""

    here = (b"replaced", b"published")
    dies = (
        ("DyingInsert", CellState.WRITING),
        ("DyingSetDefault", CellState.READY),
        ("DyingOverwrite", REPLACED),
        ("DyingPublish", IN_SLOT),
    )

    def call(self):
        return self.map.rescue()

    def finish(self, value):
        self.map.close()

    def expect(self, returned, value):
        """What the dead had done is seen."""

    def after_kill_beside(self, tracee, slow):
        """Others take numbers and cells before the slow rescuer goes on: it must leave these alone."""
        self.map.rescue()
        others = [SharedHashMap.open(self.path) for _ in range(4)]
        for n, other in enumerate(others):
            other[b"mine %d" % (n % 2)] = self.value(TRAFFIC, n)
            self.allowed[b"mine %d" % (n % 2)] = {self.value(TRAFFIC, n)}
        slow.go_on()
        for other in others:
            other.close()
        self.map.rescue()
        self.settle()


class DyingInsert(Insert):
    key = b"inserted"


class DyingSetDefault(SetDefault):
    key = b"default"


class DyingOverwrite(Overwrite):
    key = b"replaced"
    here = (b"replaced",)


class DyingPublish(Overwrite):
    key = b"published"
    here = (b"published",)


class InBlocks:
    """The same calls with values in blocks, of which there are some more than values."""

    file = "blocks"
    length = 5000

    def fill_blocks(self):
        for size in (1 << 15, 1 << 16, 1 << 17):
            self.map.clear()
            for n in range(ARENA_BYTES // size):
                self.map[b"%d" % n] = payload_of(ROUND, n, size)
            assert self.contents() == {b"%d" % n: payload_of(ROUND, n, size) for n in range(ARENA_BYTES // size)}
            if size > 1 << 15:
                try:
                    self.map[b"more"] = bytes(57)
                except ArenaFull:
                    pass
                else:
                    raise AssertionError("more than the arena went in")
            assert self.map.arena_backed_bytes <= ARENA_BYTES
            nothing_left(self.raw.faults())


class InsertBlock(InBlocks, Insert):
    pass


class InsertIntoFullArena(InsertBlock):
    """Deleted keys hold the blocks that are left: a rebuild comes first."""

    length = 30_000
    deleted = (b"gone", b"gone, too")


class OverwriteBlock(InBlocks, Overwrite):
    pass


class OverwriteWithBlock(InBlocks, Overwrite):
    """What was there lies in the cell."""

    def before(self):
        super().before()
        self.map[self.key] = self.first
        self.allowed[self.key] = {self.first}

    @property
    def first(self):
        return payload_of(SURVIVOR, 9)


class DeleteBlock(InBlocks, Delete):
    pass


class PopBlock(InBlocks, Pop):
    pass


class SetDefaultBlock(InBlocks, SetDefault):
    pass


class CompareAndSwapBlock(InBlocks, CompareAndSwap):
    pass


class GetBlock(InBlocks, Get):
    pass


class ItemsBlock(InBlocks, Items):
    pass


class RebuildBlock(InBlocks, Rebuild):
    pass


class RepairBlock(InBlocks, Repair):
    """The block's word was overwritten, too."""

    def before(self):
        super().before()
        self.raw.blocks[1][-1] = 0xF


class RescueBlock(InBlocks, Rescue):
    """Four have died: before the block was linked, before its cell came into its slot, right after that, and before what was
    replaced was freed."""

    dies = (
        ("DyingInsertBlock", BlockState.OWNED),
        ("DyingSetDefaultBlock", CellState.READY),
        ("DyingOverwriteBlock", REPLACED),
        ("DyingPublishBlock", IN_SLOT),
    )


class DyingInsertBlock(InBlocks, DyingInsert):
    pass


class DyingSetDefaultBlock(InBlocks, DyingSetDefault):
    pass


class DyingOverwriteBlock(InBlocks, DyingOverwrite):
    pass


class DyingPublishBlock(InBlocks, DyingPublish):
    pass


CALLS = {
    "insert": Insert,
    "first_insert": FirstInsert,
    "insert_again": InsertAgain,
    "insert_into_full": InsertIntoFull,
    "insert_behind_stopped": InsertBehindStopped,
    "insert_replaced": InsertReplaced,
    "overwrite": Overwrite,
    "overwrite_in_full": OverwriteInFull,
    "delete": Delete,
    "pop": Pop,
    "setdefault": SetDefault,
    "compare_and_swap": CompareAndSwap,
    "get": Get,
    "items": Items,
    "rebuild": Rebuild,
    "close": Close,
    "repair": Repair,
    "rescue": Rescue,
    "insert_block": InsertBlock,
    "insert_into_full_arena": InsertIntoFullArena,
    "overwrite_block": OverwriteBlock,
    "overwrite_with_block": OverwriteWithBlock,
    "delete_block": DeleteBlock,
    "pop_block": PopBlock,
    "setdefault_block": SetDefaultBlock,
    "compare_and_swap_block": CompareAndSwapBlock,
    "get_block": GetBlock,
    "items_block": ItemsBlock,
    "rebuild_block": RebuildBlock,
    "repair_block": RepairBlock,
    "rescue_block": RescueBlock,
}
DYING = {
    kind.__name__: kind
    for kind in (
        *(DyingInsert, DyingSetDefault, DyingOverwrite, DyingPublish),
        *(DyingInsertBlock, DyingSetDefaultBlock, DyingOverwriteBlock, DyingPublishBlock),
    )
}

"""Maps whose bytes somebody damaged: survived when open, and whole again after repair()."""

import random

import numpy as np
import pytest

from subetha._core import SharedHashMap
from subetha.errors import LayoutMismatch, TransportError
from subetha.layout import VERSION_MASK, CellState, MapPhase, cell_word

from .ring_file import MapFile
from .test_ring_malformed import header_with

FULL = 8


def key(n):
    return b"key %d" % n


def value(n):
    return b"value %d" % n


@pytest.fixture
def raw(path, shared_map):
    """The bytes of `shared_map`'s file; the map is full, and in generation 2."""
    for n in range(FULL):
        shared_map[key(n)] = value(n)
    shared_map.rebuild()
    shared_map.rebuild()
    return MapFile(path)


@pytest.mark.parametrize("generation", [2**61 - 3, 2**61 - 2, 2**61 - 1])
def test_a_repair_keeps_what_is_there_past_the_last_generation_that_slots_have_room_for(path, generation):
    """A slot has 61 bits of a generation, the phase 62; as in a map that has worked for ages."""
    SharedHashMap.create(path, 1, value_bytes=16).close()
    raw = MapFile(path)
    raw.set_generation(generation)
    with SharedHashMap.open(path) as shared:
        for n in range(4):
            shared.clear()
            shared[key(n)] = value(n)
            shared.repair()
            assert dict(shared) == {key(n): value(n)}
            assert raw.faults() == []


@pytest.mark.parametrize("generation", [2**61 - 3, 2**61 - 2, 2**61 - 1])
def test_a_repair_after_a_move_that_was_left_there_keeps_what_is_there(path, generation):
    SharedHashMap.create(path, 1, value_bytes=16).close()
    raw = MapFile(path)
    raw.set_generation(generation)
    raw.arrays[1 - generation & 1][:] = (generation + 1) % 2**61 << 3
    raw.put_phase(MapPhase.MOVING)
    with SharedHashMap.open(path) as shared:
        assert shared.pop(key(1), None) is None
        shared.clear()
        shared[key(1)] = value(1)
        shared.repair()
        assert dict(shared) == {key(1): value(1)}
        assert raw.faults() == []


def everything():
    return {key(n): value(n) for n in range(FULL)}


def works(made, raw):
    """It is whole, and every cell can be used."""
    assert raw.faults() == []
    made.clear()
    for turn in range(3):
        for n in range(FULL):
            made[key(n)] = value(n + turn)
        assert dict(made) == {key(n): value(n + turn) for n in range(FULL)}
    for n in range(FULL):
        assert made.pop(key(n)) == value(n + 2)
    assert raw.faults() == []


@pytest.mark.parametrize(
    ("fields", "text"),
    [
        ({"capacity": 0}, "capacity: expected 1 to 1048576, found 0; the file is damaged"),
        ({"capacity": 2**20 + 1}, "capacity: .*found 1048577"),
        ({"capacity": 9}, r"expected \d+ bytes by its header, found \d+"),
        ({"payload_bytes": 7}, "value_bytes: expected 8 to 65536, found 7"),
        ({"payload_bytes": 2**32 - 1}, "value_bytes: .*found 4294967295"),
        ({"payload_bytes": 120}, r"expected \d+ bytes by its header"),
        ({"extra": 0}, "participants: expected 1 to 65534, found 0"),
        ({"extra": 65_535}, "participants: .*found 65535"),
        ({"extra": 2**64 - 1}, "arena_bytes: expected 4096 to 68719476736, found 281474976710655; the file is damaged"),
        ({"extra": 4095 << 16 | 1022}, "arena_bytes: .*found 4095"),
        ({"extra": 4096 << 16 | 1022}, r"expected \d+ bytes by its header"),
    ],
    ids=str,
)
def test_a_header_with_other_numbers_is_refused(path, shared_map, fields, text):
    shared_map.close()
    path.write_bytes(header_with(path.read_bytes(), **fields))
    for readonly in (False, True):
        with pytest.raises(LayoutMismatch, match=text):
            SharedHashMap.open(path, readonly)


WORDS = {
    "zero": lambda raw, old: 0,
    "all ones": lambda raw, old: 2**64 - 1,
    "another generation's": lambda raw, old: raw.key_word(raw.cell_of(old), 0, generation=5),
    "empty in another generation": lambda raw, old: 6 << 3,
    "no flags that there are": lambda raw, old: old & ~7 | 2,
    "no cell": lambda raw, old: raw.key_word(raw.count, 0),
    "another version": lambda raw, old: raw.key_word(raw.cell_of(old), 77),
    "absent in another version": lambda raw, old: raw.key_word(raw.cell_of(old), 77, flags=1),
    "frozen while nothing moves": lambda raw, old: old | 4,
    "a free cell": lambda raw, old: raw.key_word(raw.states.index(CellState.FREE), 3),
}


class TestDamagedSlots:
    @pytest.mark.parametrize("word", WORDS.values(), ids=WORDS)
    def test_a_key_whose_slot_was_hit_is_lost_at_most_and_the_others_are_there(self, shared_map, raw, word):
        at = raw.slot_of(key(3))
        raw.slots[at] = word(raw, int(raw.slots[at]))
        for n in range(FULL):
            if n != 3:
                assert shared_map[key(n)] == value(n)
        assert shared_map.get(key(3)) in (value(3), None)
        shared_map.repair()
        assert dict(shared_map) in ({k: v for k, v in everything().items() if k != key(3)}, everything())
        works(shared_map, raw)

    @pytest.mark.parametrize("word", WORDS.values(), ids=WORDS)
    def test_writers_mend_it_by_themselves(self, shared_map, raw, word):
        at = raw.slot_of(key(3))
        raw.slots[at] = word(raw, int(raw.slots[at]))
        shared_map[key(3)] = b"new"
        assert shared_map[key(3)] == b"new"
        for n in range(FULL):
            assert shared_map.pop(key(n)) == (value(n) if n != 3 else b"new")
        shared_map.repair()
        works(shared_map, raw)

    def test_a_readonly_handle_says_what_to_do(self, path, shared_map, raw):
        at = raw.slot_of(key(3))
        raw.slots[at] = raw.key_word(raw.cell_of(raw.slots[at]), 77)
        before = path.read_bytes()
        with SharedHashMap.open(path, readonly=True) as looking:
            for call in (
                lambda: looking[key(3)],
                lambda: list(looking),
                lambda: looking.items() and list(looking.items()),
            ):
                with pytest.raises(
                    TransportError, match=r"contradict each other.*open it without readonly=True, then call repair"
                ):
                    call()
        assert path.read_bytes() == before
        shared_map.repair()
        with SharedHashMap.open(path, readonly=True) as looking:
            assert len(looking) == len(list(looking)) == FULL - 1

    def test_keys_behind_a_hole_are_found_again_by_a_repair(self, shared_map, raw):
        for n in range(0, FULL, 3):
            raw.slots[raw.slot_of(key(n))] = raw.generation << 3
        shared_map.repair()
        assert dict(shared_map) == {key(n): value(n) for n in range(FULL) if n % 3}
        works(shared_map, raw)

    def test_a_key_that_is_there_twice_is_so_once_after_a_repair(self, shared_map, raw):
        # a hole before it, by damage, and set once more
        first = raw.slot_of(key(0))
        raw.slots[first] = raw.generation << 3
        assert shared_map.get(key(0)) is None
        shared_map[key(0)] = b"second"
        shared_map.repair()
        assert dict(shared_map) == everything() | {key(0): b"second"}
        works(shared_map, raw)

    @pytest.mark.parametrize("array", [0, 1])
    @pytest.mark.parametrize("seed", range(3))
    def test_arrays_of_nonsense_leave_a_map_that_works(self, shared_map, raw, array, seed):
        raw.arrays[array] = np.random.default_rng(seed).integers(0, 2**64, raw.size, np.uint64)
        shared_map.repair()
        if array == 1:
            assert dict(shared_map) == everything()
        works(shared_map, raw)

    def test_every_slot_holding_a_key_is_no_endless_search(self, shared_map, raw):
        raw.arrays[0] = raw.key_word(raw.cell_for(key(0)), raw.version_of(raw.cell_for(key(0))))
        assert shared_map.get(b"no") is None
        assert shared_map[key(0)] == value(0)
        works(shared_map, raw)


class TestDamagedPhase:
    @pytest.mark.parametrize(
        "phase", [3, 1 << 2, 1 << 2 | 2, 2 << 2, 7 << 2 | 1, 12345678 << 2 | 2, 2**64 - 1, 2**64 - 2, 2**63], ids=hex
    )
    @pytest.mark.parametrize("generation", [0, 1, 6])
    def test_it_is_found_again_in_the_slots(self, path, phase, generation):
        with SharedHashMap.create(path, FULL) as made:
            raw = MapFile(path)
            for n in range(FULL):
                made[key(n)] = value(n)
            for _ in range(generation):
                made.rebuild()
            raw.lines["phase"] = phase
            assert made.get(key(0)) == value(0)
            made.repair()
            assert dict(made) == everything()
            works(made, raw)

    @pytest.mark.parametrize("phase", MapPhase)
    def test_another_phase_of_the_same_generation_loses_nothing(self, path, shared_map, raw, phase):
        shared_map.rebuild()
        raw.put_phase(phase)
        assert shared_map[key(0)] == value(0)
        shared_map[key(1)] = value(1)
        assert dict(shared_map) == everything()
        shared_map.repair()
        assert dict(shared_map) == everything()
        works(shared_map, raw)

    def test_a_readonly_handle_says_so(self, path, shared_map, raw):
        raw.lines["phase"] = 9 << 2
        with SharedHashMap.open(path, readonly=True) as looking:
            with pytest.raises(TransportError, match="contradict each other"):
                looking.get(b"k")
            with pytest.raises(TransportError, match="contradict each other"):
                list(looking)


class TestDamagedCells:
    @pytest.mark.parametrize("field", ["key_length", "value_length"])
    @pytest.mark.parametrize("length", [57, 2**31, 2**32 - 1])
    def test_an_impossible_length_shows_nothing_beyond_the_cell(self, path, shared_map, raw, field, length):
        cell = raw.cell_for(key(3))
        raw.cells[field][cell] = length
        with (
            SharedHashMap.open(path, readonly=True) as looking,
            pytest.raises(TransportError, match="contradict each other"),
        ):
            list(looking.items())
        assert shared_map.get(key(3)) is None
        expected = {k: v for k, v in everything().items() if k != key(3)}
        assert dict(shared_map) == expected
        shared_map.repair()
        works(shared_map, raw)

    @pytest.mark.parametrize("state", range(1, 16))
    @pytest.mark.parametrize("owner", [0, 900, 1023, 65535])
    def test_a_cell_in_no_slot_that_nobody_can_hold_is_free_after_a_repair(self, shared_map, raw, state, owner):
        cell = raw.states.index(CellState.FREE)
        raw.words[cell] = cell_word(9, state, owner)
        assert dict(shared_map) == everything()
        shared_map.repair()
        assert raw.state_of(cell) == CellState.FREE
        works(shared_map, raw)

    @pytest.mark.parametrize("state", [state for state in CellState if state != CellState.READY])
    def test_a_cell_that_a_slot_refers_to_in_another_state_costs_that_key(self, shared_map, raw, state):
        cell = raw.cell_for(key(3))
        raw.words[cell] = cell_word(raw.version_of(cell) + 2, state, 900 if state else 0)
        for n in range(FULL):
            assert shared_map.get(key(n)) == (value(n) if n != 3 else None)
        shared_map.repair()
        works(shared_map, raw)

    def test_other_hashes_and_keys_cost_those_keys(self, shared_map, raw):
        raw.hashes[raw.cell_for(key(1))] ^= np.uint64(1 << 40)
        raw.keys[raw.cell_for(key(2)), 0] ^= 1
        assert {k: shared_map.get(k) for k in everything()} == everything() | {key(1): None, key(2): None}
        works(shared_map, raw)

    def test_versions_that_run_ahead_do_no_harm(self, shared_map, raw):
        for cell in range(raw.count):
            if raw.state_of(cell) == CellState.FREE:
                raw.words[cell] = cell_word(VERSION_MASK, CellState.FREE, 0)
        works(shared_map, raw)

    def test_records_of_nonsense_hold_no_cell(self, path, shared_map, raw):
        dice = random.Random(3)
        raw.records.view("<u8")[16:] = [dice.getrandbits(64) for _ in range(raw.records.view("<u8").size - 16)]
        assert dict(shared_map) == everything()
        shared_map.rescue()
        works(shared_map, raw)


class TestLiveDamage:
    """In a process of its own with a hard limit, because what goes wrong here is a crash or a spin in compiled code."""

    def test_random_bytes_from_a_peer_neither_crash_nor_stop_those_who_read_and_write(self, run_script, path):
        out = run_script(
            """
            faulthandler.dump_traceback_later(55, exit=True)

            def call(own, dice):
                key = b"key %d" % dice.randrange(12)
                match dice.randrange(14):
                    case 0 | 1: own[key] = dice.randbytes(dice.randrange(57))
                    case 2: assert len(own.get(key, b"")) <= 56
                    case 3: assert len(own.pop(key, b"")) <= 56
                    case 4: assert len(own.setdefault(key, b"x")) <= 56
                    case 5: own.compare_and_swap(key, own.get(key), dice.choice([None, b"y" * 56]))
                    case 6: assert all(len(k) <= 48 and len(v) <= 56 for k, v in own.items())
                    case 7: assert 0 <= len(own) <= 64
                    case 8: own.rebuild()
                    case 9: own.repair()
                    case 10: own.rescue()
                    case 11: own.popitem()
                    case 12: key in own
                    case 13: own.clear()

            def damage(raw, dice):
                value = dice.choice([dice.getrandbits(64), dice.getrandbits(64) & 0xFFFFFFFF, 0, 2**64 - 1])
                array = raw.arrays[dice.randrange(2)]
                at = dice.randrange(raw.size)
                match dice.randrange(10):
                    case 0: raw.words[dice.randrange(raw.count)] = value
                    # words that look right: any state, any owner
                    case 1: raw.words[dice.randrange(raw.count)] = (
                        dice.randrange(4) << 20 | dice.randrange(16) << 16 | dice.randrange(4))
                    case 2: array[at] = value
                    case 3: array[at] = raw.arrays[dice.randrange(2)][dice.randrange(raw.size)]
                    case 4: array[at] ^= np.uint64(1 << dice.randrange(64))
                    case 5: raw.lines["phase"] = dice.choice([value, raw.generation << 2 | dice.randrange(4)])
                    case 6: raw.lines["phase"] = max(0, raw.generation + dice.randrange(-2, 3)) << 2 | dice.randrange(3)
                    case 7: raw.cells[dice.choice(["key_length", "value_length"])][dice.randrange(raw.count)] = (
                        value & 0xFFFFFFFF)
                    case 8: raw.records.view("<u8")[dice.randrange(raw.records.view("<u8").size)] = value
                    case 9: raw.lines["absent"] = value

            longest = 0.0
            for seed in range(12):
                path = f"{sys.argv[1]}.{seed}"
                own = SharedHashMap.create(path, 8)
                raw = MapFile(path)
                took = call_beside_damage(
                    seed, (700, 1500), own, lambda dice: SharedHashMap.open(path), raw, call, damage, (SubethaError, KeyError)
                )
                longest = max(longest, took)
                # whatever it looks like, a repair makes it whole again, once nobody has the numbers that nonsense names
                own.close()
                raw.records["status"] = 0
                holders = [SharedHashMap.open(path) for _ in range(4)]
                for holder in holders:
                    holder.rescue()
                own = SharedHashMap.open(path)
                own.rescue()
                for holder in holders:
                    holder.close()
                own.repair()
                own.repair()
                own.clear()
                assert raw.faults() == [], (seed, raw.faults())
                for n in range(8):
                    own[b"key %d" % n] = b"%d" % n
                assert dict(own) == {b"key %d" % n: b"%d" % n for n in range(8)}, seed
                own.close()
                os.unlink(path)
            say(longest < 20)
            """,
            path,
        )
        assert out == "True\n"

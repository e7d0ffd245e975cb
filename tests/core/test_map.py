"""SharedHashMap: what each call does, its limits and its errors, and the rebuild."""

import array
import collections.abc
import gc
import os
import stat

import pytest

from subetha._core import SharedHashMap
from subetha.errors import Full, LayoutMismatch, MapFull, PayloadTooLarge, TransportError
from subetha.layout import CellState, MapPhase, map_reserve

from .ring_file import MapFile


def key(n):
    return b"key %d" % n


def value(n):
    return b"value %d " % n * (n % 6)


def filled(path, capacity, n=None):
    made = SharedHashMap.create(path, capacity)
    for i in range(capacity if n is None else n):
        made[key(i)] = value(i)
    return made


class TestMapping:
    def test_it_is_a_mutable_mapping(self, shared_map):
        assert isinstance(shared_map, collections.abc.MutableMapping)

    def test_what_was_set_is_got(self, shared_map):
        shared_map[b"a"] = b"1"
        assert shared_map[b"a"] == shared_map.get(b"a") == b"1"
        assert b"a" in shared_map
        assert len(shared_map) == 1

    def test_what_is_not_there_is_said_so(self, shared_map):
        shared_map[b"other"] = b"x"
        assert b"a" not in shared_map
        assert shared_map.get(b"a") is None
        assert shared_map.get(b"a", 7) == 7
        assert shared_map.pop(b"a", 7) == 7
        assert shared_map.pop(b"a", None) is None
        for call in (
            lambda: shared_map[b"a"],
            lambda: shared_map.pop(b"a"),
            lambda: shared_map.__delitem__(b"a"),
        ):
            with pytest.raises(KeyError, match="b'a'"):
                call()
        assert dict(shared_map) == {b"other": b"x"}

    def test_a_value_is_replaced_and_deleted(self, shared_map):
        shared_map[b"a"] = b"1"
        shared_map[b"a"] = b"22"
        assert shared_map[b"a"] == b"22"
        del shared_map[b"a"]
        assert b"a" not in shared_map
        assert len(shared_map) == 0
        shared_map[b"a"] = b"333"
        assert shared_map.pop(b"a") == b"333"
        assert list(shared_map) == []

    def test_setdefault_keeps_what_is_there(self, shared_map):
        assert shared_map.setdefault(b"a", b"1") == b"1"
        assert shared_map.setdefault(b"a", b"2") == b"1"
        assert shared_map[b"a"] == b"1"

    def test_views_and_equality_are_those_of_a_dict(self, path):
        with filled(path, 8, 5) as made:
            model = {key(n): value(n) for n in range(5)}
            assert set(made) == set(made.keys()) == set(model)
            assert sorted(made.values()) == sorted(model.values())
            assert sorted(made.items()) == sorted(model.items())
            assert made == model
            assert made.keys() & {key(1), b"no"} == {key(1)}
            assert (key(2), value(2)) in made.items()
            assert (key(2), b"no") not in made.items()
            assert value(3) in made.values()
            assert len(made.items()) == len(made.values()) == len(made.keys()) == 5
            model[key(1)] = b"other"
            assert made != model
            assert made != 5
            assert isinstance(made.items(), collections.abc.ItemsView)

    def test_an_iteration_shows_what_was_there_at_its_beginning(self, path):
        with filled(path, 8, 4) as made:
            keys, pairs = iter(made), iter(made.items())
            made.clear()
            assert sorted(keys) == [key(n) for n in range(4)]
            assert sorted(pairs) == [(key(n), value(n)) for n in range(4)]

    def test_update_takes_mappings_and_pairs(self, shared_map):
        shared_map.update({b"a": b"1"})
        shared_map.update([(b"b", b"2"), (b"a", b"3")])
        shared_map.update()
        assert dict(shared_map) == {b"a": b"3", b"b": b"2"}

    def test_popitem_takes_each_once(self, path):
        with filled(path, 8) as made:
            assert sorted(made.popitem() for _ in range(8)) == [(key(n), value(n)) for n in range(8)]
            with pytest.raises(KeyError, match="the map is empty"):
                made.popitem()

    def test_clear_leaves_nothing_and_gives_back_the_room(self, path):
        with filled(path, 8) as made:
            made.clear()
            assert len(made) == 0
            assert MapFile(path).states == [CellState.FREE] * 12

    @pytest.mark.parametrize(
        "given", [bytearray(b"k"), memoryview(b"k"), array.array("B", b"k")], ids=lambda given: type(given).__name__
    )
    def test_other_buffers_are_taken_for_keys_and_values(self, shared_map, given):
        shared_map[given] = given
        assert shared_map[b"k"] == b"k"
        assert given in shared_map
        assert shared_map.get(given) == shared_map[given] == b"k"
        assert shared_map.setdefault(given, b"other") == b"k"
        assert shared_map.compare_and_swap(given, given, given)
        assert shared_map.pop(given) == b"k"

    @pytest.mark.parametrize("length", [*range(10), 15, 16, 17, 47, 48])
    def test_keys_of_every_length_are_told_apart(self, shared_map, length):
        full = bytes(range(1, 49))[:length]
        shared_map[full] = b"it"
        for other in {full[:-1], full + b"\0", full[:-1] + b"\0", full + b"\x01", full[1:]} - {full}:
            if len(other) <= 48:
                assert other not in shared_map
                shared_map[other] = b"other"
        assert shared_map[full] == b"it"
        assert full in list(shared_map)

    @pytest.mark.parametrize("length", [0, 1, 7, 8, 9, 55, 56])
    def test_values_of_every_length_come_back_exactly(self, shared_map, length):
        shared_map[b"k"] = b"\xff" * 56
        shared_map[b"k"] = bytes(range(200, 256))[:length]
        assert shared_map[b"k"] == bytes(range(200, 256))[:length]


class TestCompareAndSwap:
    def test_each_case(self, shared_map):
        assert not shared_map.compare_and_swap(b"k", b"x", b"1")
        assert not shared_map.compare_and_swap(b"k", b"x", None)
        assert shared_map.compare_and_swap(b"k", None, None)
        assert b"k" not in shared_map
        assert shared_map.compare_and_swap(b"k", None, b"1")
        assert not shared_map.compare_and_swap(b"k", None, b"2")
        assert not shared_map.compare_and_swap(b"k", None, None)
        assert not shared_map.compare_and_swap(b"k", b"2", b"3")
        assert shared_map[b"k"] == b"1"
        assert shared_map.compare_and_swap(b"k", b"1", b"1")
        assert shared_map.compare_and_swap(b"k", b"1", b"2" * 56)
        assert not shared_map.compare_and_swap(b"k", b"2" * 55, None)
        assert not shared_map.compare_and_swap(b"k", b"2" * 57, None)
        assert not shared_map.compare_and_swap(b"k", b"2" * 55 + b"3", None)
        assert shared_map.compare_and_swap(b"k", b"2" * 56, None)
        assert b"k" not in shared_map
        assert shared_map.compare_and_swap(b"k", None, b"")
        assert shared_map.compare_and_swap(b"k", b"", b"0")

    def test_what_fails_takes_no_room(self, path):
        with filled(path, 8) as made:
            for _ in range(100):
                assert not made.compare_and_swap(key(1), b"no", b"x")
                assert not made.compare_and_swap(key(1), None, b"x")
                made.setdefault(key(1), b"x")
            assert MapFile(path).faults() == []


class TestLimits:
    @pytest.mark.parametrize("capacity", [1, 2, 3, 7, 64, 100])
    def test_as_many_keys_as_the_capacity_and_no_more(self, path, capacity):
        with filled(path, capacity) as made:
            assert len(made) == made.capacity == capacity
            for refused in (
                lambda: made.__setitem__(b"more", b""),
                lambda: made.setdefault(b"more", b""),
                lambda: made.compare_and_swap(b"more", None, b""),
            ):
                with pytest.raises(
                    MapFull, match=f"all {capacity} keys that there is room for are there; delete some"
                ) as caught:
                    refused()
                assert isinstance(caught.value, Full)
            assert dict(made) == {key(n): value(n) for n in range(capacity)}
            assert MapFile(path).faults() == []

    @pytest.mark.parametrize("capacity", [1, 2, 7, 64])
    def test_a_full_map_takes_new_values_and_keys_for_deleted_ones(self, path, capacity):
        with filled(path, capacity) as made:
            for turn in range(5 * map_reserve(capacity)):
                for n in range(capacity):
                    made[key(n)] = value(n + turn)
            for turn in range(30):
                del made[key(turn)]
                made[key(turn + capacity)] = value(turn)
                assert key(turn) not in made
                assert len(made) == capacity
            assert MapFile(path).faults() == []
            with pytest.raises(MapFull):
                made[b"more"] = b""

    def test_a_map_that_is_full_of_deleted_keys_has_room_at_once(self, path):
        with filled(path, 8) as made:
            for n in range(8):
                del made[key(n)]
            for n in range(8, 16):
                made[key(n)] = b""
            assert len(made) == 8

    @pytest.mark.parametrize("long", [b"k" * 49, bytearray(5000)], ids=len)
    def test_a_key_that_is_too_long_is_refused_by_every_call(self, shared_map, long):
        for call in (
            lambda: shared_map[long],
            lambda: shared_map.get(long),
            lambda: long in shared_map,
            lambda: shared_map.__setitem__(long, b""),
            lambda: shared_map.__delitem__(long),
            lambda: shared_map.pop(long),
            lambda: shared_map.setdefault(long, b""),
            lambda: shared_map.compare_and_swap(long, None, b""),
        ):
            with pytest.raises(
                PayloadTooLarge, match=f"key: expected at most 48 bytes, found {len(long)}; use a digest"
            ):
                call()

    def test_a_value_that_is_too_long_is_refused(self, shared_map):
        shared_map[b"k"] = b"v"
        for call in (
            lambda: shared_map.__setitem__(b"k", b"x" * 57),
            lambda: shared_map.setdefault(b"other", b"x" * 57),
            lambda: shared_map.compare_and_swap(b"k", b"v", b"x" * 57),
        ):
            with pytest.raises(PayloadTooLarge, match="value: expected at most 56 bytes, found 57; store less"):
                call()
        assert dict(shared_map) == {b"k": b"v"}

    def test_what_is_no_buffer_is_refused_by_name(self, shared_map):
        with pytest.raises(
            TypeError, match="key: expected bytes or another contiguous buffer, found str; encode it first"
        ):
            shared_map["k"]
        with pytest.raises(TypeError, match=r"value: expected bytes .* found str"):
            shared_map[b"k"] = "v"
        with pytest.raises(TypeError, match=r"expected: expected bytes .* found str"):
            shared_map.compare_and_swap(b"k", "v", b"")
        for wrong in (None, 7, 1.5, [b"k"]):
            with pytest.raises(TypeError):
                shared_map[wrong]
            with pytest.raises(TypeError):
                shared_map[b"k"] = wrong
        with pytest.raises((BufferError, ValueError)):
            shared_map[memoryview(b"abcd")[::2]]
        assert len(shared_map) == 0

    @pytest.mark.parametrize(
        ("numbers", "error", "text"),
        [
            ((0,), ValueError, r"capacity: expected 1 to 1048576, found 0"),
            ((2**20 + 1,), ValueError, r"capacity: expected 1 to 1048576, found 1048577"),
            ((-1,), ValueError, "found -1"),
            (("8",), TypeError, "capacity: expected an int .*found str"),
            ((True,), TypeError, "found bool"),
            ((8, 7), ValueError, "value_bytes: expected 8 to 65536, found 7"),
            ((8, 65537), ValueError, "found 65537"),
            ((8, 8.0), TypeError, "value_bytes: .*found float"),
        ],
    )
    def test_numbers_outside_their_limits_are_refused(self, path, numbers, error, text):
        for make in (SharedHashMap.create, SharedHashMap.open_or_create):
            with pytest.raises(error, match=text):
                make(path, *numbers)
        assert not path.exists()

    @pytest.mark.parametrize("value_bytes", [8, 9, 57, 4096, 65536])
    def test_values_up_to_the_length_given_at_creation(self, path, value_bytes):
        with SharedHashMap.create(path, 4, value_bytes) as made:
            assert made.value_bytes == value_bytes
            for n in range(4):
                made[key(n)] = bytes([n]) * value_bytes
            assert [made[key(n)] for n in range(4)] == [bytes([n]) * value_bytes for n in range(4)]
            made[key(0)] = bytes([9]) * (value_bytes - 1)
            assert made[key(0)] == bytes([9]) * (value_bytes - 1)
            with pytest.raises(PayloadTooLarge):
                made[key(0)] = bytes(value_bytes + 1)


class TestFiles:
    def test_another_handle_sees_the_same(self, path, shared_map):
        with SharedHashMap.open(path) as other, SharedHashMap.open(path, readonly=True) as looking:
            shared_map[b"a"] = b"1"
            assert other[b"a"] == looking[b"a"] == b"1"
            del other[b"a"]
            assert b"a" not in looking
            assert b"a" not in shared_map

    def test_a_readonly_handle_changes_nothing(self, path):
        filled(path, 8).close()
        before = path.read_bytes()
        with SharedHashMap.open(path, readonly=True) as looking:
            assert looking[key(3)] == value(3)
            assert len(looking) == len(list(looking.items())) == 8
            assert looking.get(b"no") is None
            for call in (
                lambda: looking.__setitem__(b"k", b""),
                lambda: looking.__delitem__(key(1)),
                lambda: looking.pop(key(1)),
                looking.popitem,
                lambda: looking.setdefault(key(1), b""),
                lambda: looking.compare_and_swap(key(1), None, b""),
                lambda: looking.update({b"k": b""}),
                looking.clear,
                looking.rebuild,
                looking.rescue,
                looking.repair,
            ):
                with pytest.raises(TransportError, match="read-only"):
                    call()
        assert path.read_bytes() == before

    def test_looking_takes_no_number(self, path, shared_map):
        with SharedHashMap.open(path) as other:
            assert other.get(b"a") is None
            assert list(other) == []
            assert MapFile(path).used_slots == []
            other[b"a"] = b""
            assert MapFile(path).used_slots == [0]
        assert MapFile(path).used_slots == []

    def test_open_or_create(self, path):
        with SharedHashMap.open_or_create(path, 8, 64) as made:
            made[b"a"] = b"1"
            with SharedHashMap.open_or_create(path, 8, 64) as other:
                assert other[b"a"] == b"1"
            with pytest.raises(
                LayoutMismatch,
                match="expected capacity 9, value_bytes 64 and arena_bytes 0, found 8, 64 and 0; open it with open",
            ):
                SharedHashMap.open_or_create(path, 9, 64)
            with pytest.raises(LayoutMismatch, match="value_bytes 65 and arena_bytes 0, found 8, 64 and 0"):
                SharedHashMap.open_or_create(path, 8, 65)

    def test_create_never_replaces(self, path, shared_map):
        shared_map[b"a"] = b"1"
        with pytest.raises(FileExistsError):
            SharedHashMap.create(path, 8)
        assert shared_map[b"a"] == b"1"

    def test_mode_is_kept_under_any_umask(self, path):
        before = os.umask(0o077)
        try:
            SharedHashMap.create(path, 2, mode=0o660).close()
        finally:
            os.umask(before)
        assert stat.S_IMODE(path.stat().st_mode) == 0o660

    def test_a_map_is_not_made_directly(self):
        with pytest.raises(TypeError, match=r"use SharedHashMap\.create"):
            SharedHashMap()

    def test_repr_says_what_and_where(self, path, shared_map):
        assert repr(shared_map) == f"<SharedHashMap {str(path)!r} open>"
        shared_map.close()
        assert "closed" in repr(shared_map)

    def test_every_call_of_a_closed_handle_says_so(self, path, shared_map):
        shared_map[b"a"] = b"1"
        shared_map.close()
        shared_map.close()
        for call in CALLS.values():
            with pytest.raises(ValueError, match="this handle is closed"):
                call(shared_map)
        with SharedHashMap.open(path) as other:
            assert dict(other) == {b"a": b"1"}

    def test_every_public_call_is_among_those_tested(self):
        properties = {
            "arena_backed_bytes",
            "arena_bytes",
            "capacity",
            "closed",
            "header",
            "path",
            "ring",
            "value_bytes",
        }
        others = {"apply_migration", "close", "create", "make_policy", "open", "open_or_create"}
        public = {name for name in dir(SharedHashMap) if not name.startswith("_")}
        assert public == {name for name in CALLS if not name.startswith("_")} | properties | others

    def test_keys_that_were_given_out_outlive_the_handle(self, path):
        made = filled(path, 8)
        keys, got = iter(made), made[key(5)]
        made.close()
        del made
        gc.collect()
        assert len(list(keys)) == 8
        assert got == value(5)


CALLS = {
    "__getitem__": lambda made: made[b"a"],
    "__setitem__": lambda made: made.__setitem__(b"a", b""),
    "__delitem__": lambda made: made.__delitem__(b"a"),
    "__contains__": lambda made: b"a" in made,
    "__iter__": iter,
    "__len__": len,
    "__eq__": lambda made: made == {},
    "get": lambda made: made.get(b"a"),
    "pop": lambda made: made.pop(b"a"),
    "popitem": lambda made: made.popitem(),
    "setdefault": lambda made: made.setdefault(b"a", b""),
    "compare_and_swap": lambda made: made.compare_and_swap(b"a", None, None),
    "update": lambda made: made.update({b"a": b""}),
    "clear": lambda made: made.clear(),
    "keys": lambda made: list(made.keys()),
    "values": lambda made: list(made.values()),
    "items": lambda made: list(made.items()),
    "rebuild": lambda made: made.rebuild(),
    "rescue": lambda made: made.rescue(),
    "repair": lambda made: made.repair(),
}


class TestRebuild:
    def test_it_gives_back_what_deleted_keys_hold(self, path):
        with filled(path, 8) as made:
            raw = MapFile(path)
            for n in range(5):
                del made[key(n)]
            assert raw.states.count(CellState.FREE) == 4
            assert int(raw.lines["absent"][0]) == 5
            assert made.rebuild() == 5
            assert raw.states.count(CellState.FREE) == 9
            assert (raw.generation, raw.phase) == (1, MapPhase.STABLE)
            assert int(raw.lines["absent"][0]) == 0
            assert dict(made) == {key(n): value(n) for n in range(5, 8)}
            assert made.rebuild() == 0
            assert raw.generation == 2
            assert raw.faults() == []

    def test_a_key_keeps_its_slot_until_then(self, path):
        with filled(path, 8) as made:
            raw = MapFile(path)
            before = {n: raw.slot_of(key(n)) for n in range(8)}
            for n in range(8):
                del made[key(n)]
                made.setdefault(key(n), b"again")
                made[key(n)] = b"and again"
            del made[key(3)]
            assert {n: raw.slot_of(key(n)) for n in range(8)} == before

    def test_many_keys_go_through_a_small_map(self, path):
        with SharedHashMap.create(path, 4) as made:
            for n in range(3000):
                made[key(n)] = value(n)
                if n >= 3:
                    assert made.pop(key(n - 3)) == value(n - 3)
            raw = MapFile(path)
            assert raw.generation > 500
            assert raw.faults() == []
            assert dict(made) == {key(n): value(n) for n in range(2997, 3000)}

    def test_it_runs_by_itself_once_nobody_writes(self, path, eventually):
        with filled(path, 32) as made:
            raw = MapFile(path)
            for n in range(20):
                del made[key(n)]
            eventually(lambda: raw.generation == 1 and raw.phase == MapPhase.STABLE, "the timer has rebuilt")
            assert raw.states.count(CellState.READY) == 12
            assert raw.faults() == []
            assert int(raw.lines["absent"][0]) == 0

    def test_not_for_a_few_deleted_keys(self, path, eventually):
        with filled(path, 32) as made, SharedHashMap.create(f"{path}.2", 32) as other:
            for n in range(4):
                del made[key(n)]
            # the same timer looks at both; when it has looked at the other one twice, it has at this one
            for n in range(20):
                other[key(n)] = b""
                del other[key(n)]
            eventually(lambda: MapFile(f"{path}.2").generation == 1, "the timer has rebuilt the other one")
            assert MapFile(path).generation == 0

    def test_a_hint_that_is_wrong_is_counted_anew(self, path, eventually):
        with filled(path, 32) as made:
            raw = MapFile(path)
            made[key(0)] = b""
            raw.lines["absent"] = 2**63
            eventually(lambda: int(raw.lines["absent"][0]) == 0, "the timer has counted")
            assert raw.generation == 0

    @pytest.mark.parametrize("phase", [MapPhase.CLEANING, MapPhase.MOVING])
    def test_a_rebuild_that_was_left_is_read_past_and_completed(self, path, phase):
        with filled(path, 8) as made:
            raw = MapFile(path)
            del made[key(2)]
            if phase == MapPhase.MOVING:
                raw.arrays[1] = 1 << 3
            raw.put_phase(phase)
            # half of the slots have been frozen
            half = raw.arrays[0][: raw.size // 2]
            if phase == MapPhase.MOVING:
                half |= raw.IS_FROZEN
            expected = {key(n): value(n) for n in range(8) if n != 2}
            with SharedHashMap.open(path, readonly=True) as looking:
                assert dict(looking) == expected
                assert looking.get(key(2)) is None
                assert b"no" not in looking
                assert len(looking) == 7
            assert raw.generation == 0
            made[key(3)] = b"new"
            assert raw.generation == (phase == MapPhase.MOVING)
            made.rebuild()
            assert dict(made) == expected | {key(3): b"new"}
            assert (raw.generation, raw.phase) == (1 + (phase == MapPhase.MOVING), MapPhase.STABLE)
            assert raw.faults() == []

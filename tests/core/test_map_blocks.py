"""SharedHashMap with values in blocks: lengths, room, what the dead leave, and what damage may not do."""

import contextlib
import os
import subprocess

import numpy as np
import pytest

from subetha._core import SharedHashMap
from subetha.errors import ArenaFull, LayoutMismatch, MapFull, PayloadTooLarge, TransportError
from subetha.layout import BlockState, CellState, SlotState, block_linked, cell_word

from .ring_file import MapFile
from .traffic import origin_of, payload_of

FREE_HOLE, FREE_BACKED = BlockState.FREE_HOLE, BlockState.FREE_BACKED
ARENA = 1 << 16
CLASSES = [4096 << n for n in range(5)]
DEAD = 7
"""The number of the participant whose record is used while nobody holds its byte."""


@pytest.fixture
def long_map(path):
    """A map of 8 keys, values of 56 bytes, and up to 64 KiB in blocks."""
    with SharedHashMap.create(path, 8, arena_bytes=ARENA) as made:
        yield made


@pytest.fixture
def raw(path, long_map):
    return MapFile(path)


def points_to(fd, path):
    try:
        return os.path.samestat(os.fstat(fd), os.stat(path))
    except OSError:
        return False


def owned(number, incarnation=3):
    return incarnation << 20 | number << 4 | BlockState.OWNED


def kill_by_hand(raw, incarnation=3):
    raw.records["status"][DEAD - 1] = incarnation << 8 | SlotState.USED


def fill(made, size):
    """Values that each take a block of `size` bytes, until there is none; how many went in."""
    n = 0
    with contextlib.suppress(ArenaFull, MapFull):
        while True:
            made[b"%d" % n] = payload_of(1, n, size - 7)
            n += 1
    return n


def whole_capacity(made, raw):
    """Everything that the map was made with can be used, in blocks of every size."""
    for size in CLASSES:
        made.clear()
        assert fill(made, size) == min(8, ARENA // size), size
        assert all(origin_of(value) == (1, int(key)) for key, value in made.items())
        assert raw.faults() == []
        assert made.arena_backed_bytes <= ARENA
    made.clear()
    assert len(made) == 0
    assert raw.faults() == []


class TestLengths:
    @pytest.mark.parametrize(
        "length", [0, 55, 56, 57, *(size + d for size in CLASSES for d in (-1, 0, 1) if size + d <= ARENA)]
    )
    def test_every_call_gives_back_what_was_put_in(self, long_map, raw, length):
        value, other = os.urandom(length), os.urandom(length)
        long_map[b"k"] = value
        assert long_map[b"k"] == long_map.get(b"k") == long_map.setdefault(b"k", b"x") == value
        assert list(long_map.items()) == [(b"k", value)]
        assert list(long_map.values()) == [value]
        assert b"k" in long_map
        if length:
            # the last byte and the first one count, too
            assert not long_map.compare_and_swap(b"k", value[:-1] + bytes([value[-1] ^ 1]), b"x")
            assert not long_map.compare_and_swap(b"k", bytes([value[0] ^ 1]) + value[1:], b"x")
        assert not long_map.compare_and_swap(b"k", value + b"x", b"x")
        if 2 * max(CLASSES[0], length) <= ARENA:
            assert long_map.compare_and_swap(b"k", value, other)
            value = other
        long_map.rebuild()
        assert long_map.pop(b"k") == value
        assert long_map.setdefault(b"k", value) == value
        assert long_map.popitem() == (b"k", value)
        assert raw.faults() == []

    def test_a_value_takes_the_least_block_that_holds_it_and_none_where_the_cell_does(self, long_map, raw):
        for length in (0, 56, 57, 4096, 4097, 16_385):
            long_map[b"k"] = bytes(length)
            cell = raw.cell_for(b"k")
            assert raw.is_long(cell) == (length > 56)
            if length > 56:
                size_class, _ = raw.block_of(cell)
                assert CLASSES[size_class] // 2 < max(length, 4096) <= CLASSES[size_class]

    def test_other_buffers_go_into_blocks(self, long_map):
        value = np.arange(1000, dtype="<u8")
        long_map[b"k"] = value
        assert long_map[b"k"] == value.tobytes()
        assert long_map.compare_and_swap(b"k", memoryview(value), bytearray(5000))
        assert long_map[b"k"] == bytes(5000)

    def test_a_value_that_no_block_holds_is_refused_with_both_lengths(self, long_map):
        long_map[b"k"] = b"v"
        text = f"value: expected at most 65536 bytes, found 65537; of {ARENA} bytes of blocks no block is larger"
        for call in (
            lambda: long_map.__setitem__(b"k", bytes(ARENA + 1)),
            lambda: long_map.setdefault(b"n", bytes(ARENA + 1)),
            lambda: long_map.compare_and_swap(b"k", b"v", bytes(ARENA + 1)),
        ):
            with pytest.raises(PayloadTooLarge, match=text):
                call()
        assert not long_map.compare_and_swap(b"k", bytes(ARENA + 1), b"x")
        assert dict(long_map) == {b"k": b"v"}

    def test_the_largest_block_is_a_power_of_two(self, path):
        with SharedHashMap.create(path, 8, arena_bytes=3 * 4096) as made:
            made[b"k"] = bytes(8192)
            with pytest.raises(PayloadTooLarge, match="at most 8192 bytes, found 8193"):
                made[b"k"] = bytes(8193)

    def test_cells_may_have_more_room_than_the_largest_block(self, path):
        with SharedHashMap.create(path, 8, 9000, arena_bytes=4096) as made:
            made[b"k"] = bytes(9000)
            assert made[b"k"] == bytes(9000)
            with pytest.raises(PayloadTooLarge, match="at most 9000 bytes, found 9001"):
                made[b"k"] = bytes(9001)


class TestFile:
    def test_it_takes_disk_space_for_blocks_in_use_only(self, path, long_map, raw):
        empty = os.stat(path).st_blocks * 512
        assert os.stat(path).st_size > empty >= raw.words_end - 4096
        long_map[b"k"] = bytes(ARENA)
        assert long_map.arena_backed_bytes == ARENA
        assert os.stat(path).st_blocks * 512 >= empty + ARENA

    def test_without_blocks_it_is_what_it_was(self, path):
        with SharedHashMap.create(path, 8) as made:
            raw = MapFile(path)
            assert (made.arena_bytes, made.arena_backed_bytes) == (0, 0)
            assert raw.contents[48:56].view("<u8")[0] == 1022
            assert raw.words_end == len(raw.contents)
            with pytest.raises(
                PayloadTooLarge, match=r"at most 56 bytes, found 57.*or with arena_bytes for values in blocks"
            ):
                made[b"k"] = bytes(57)

    @pytest.mark.parametrize(
        ("capacity", "arena_bytes", "error", "text"),
        [
            (8, 4095, ValueError, "arena_bytes: expected 4096 to 68719476736, found 4095"),
            (8, 2**36 + 1, ValueError, "arena_bytes: .*found 68719476737"),
            (8, -1, ValueError, "arena_bytes: .*found -1"),
            (8, "4096", TypeError, "arena_bytes: expected an int .* found str"),
            (8, False, TypeError, "arena_bytes: expected an int .* found bool"),
            (2**20 - 15, 4096, ValueError, "capacity with arena_bytes: expected 1 to 1048560, found 1048561"),
        ],
    )
    def test_numbers_outside_their_limits_are_refused(self, path, capacity, arena_bytes, error, text):
        for make in (SharedHashMap.create, SharedHashMap.open_or_create):
            with pytest.raises(error, match=text):
                make(path, capacity, arena_bytes=arena_bytes)
        assert not path.exists()

    def test_cells_with_the_highest_numbers_have_blocks(self, path):
        with SharedHashMap.create(path, 2**20 - 16, 8, arena_bytes=4 * 4096) as made:
            raw = MapFile(path)
            raw.words[: raw.count - 20] = cell_word(0, CellState.READY, 0)
            for n in range(3):
                made[b"%d" % n] = payload_of(1, n, 100)
            assert {raw.cell_for(b"%d" % n) for n in range(3)} <= set(range(raw.count - 20, raw.count))
            assert raw.block_faults() == []
            assert dict(made) == {b"%d" % n: payload_of(1, n, 100) for n in range(3)}

    def test_open_or_create_compares_the_blocks_too(self, path):
        SharedHashMap.open_or_create(path, 8, arena_bytes=ARENA).close()
        with SharedHashMap.open_or_create(path, 8, arena_bytes=ARENA) as made:
            assert made.arena_bytes == ARENA
        with pytest.raises(LayoutMismatch, match="and arena_bytes 0, found 8, 56 and 65536"):
            SharedHashMap.open_or_create(path, 8)

    def test_other_handles_see_long_values(self, path, long_map):
        long_map[b"k"] = payload_of(1, 2, 5000)
        with SharedHashMap.open(path) as other, SharedHashMap.open(path, readonly=True) as looking:
            assert other[b"k"] == looking[b"k"] == payload_of(1, 2, 5000)
            other[b"k"] = payload_of(3, 4, 30_000)
            assert long_map[b"k"] == looking[b"k"] == payload_of(3, 4, 30_000)

    def test_a_block_that_cannot_be_read_is_said_and_stays(self, path, long_map):
        long_map[b"k"] = value = payload_of(1, 2, 5000)
        # the lock that proves this process alive has a descriptor of its own
        held = sorted(fd for fd in map(int, os.listdir("/proc/self/fd")) if points_to(fd, path))
        fd = held[0]
        kept, nothing = os.dup(fd), os.open(os.devnull, os.O_RDWR)
        try:
            os.dup2(nothing, fd)
            for call in (
                lambda: long_map[b"k"],
                lambda: list(long_map.items()),
                lambda: long_map.pop(b"k"),
                lambda: long_map.compare_and_swap(b"k", value, b"x"),
            ):
                with pytest.raises(TransportError, match="a block could not be read"):
                    call()
        finally:
            os.dup2(kept, fd)
            os.close(kept)
            os.close(nothing)
        assert dict(long_map) == {b"k": value}


class TestRoom:
    def test_a_full_arena_is_said_with_length_and_limit_and_changes_nothing(self, long_map, raw):
        assert fill(long_map, 16_384) == 4
        before = dict(long_map)
        long_map[b"short"] = b"s"
        text = f"value: no block for 16377 bytes is left in the arena of {ARENA} bytes; delete or overwrite long values"
        for call in (
            lambda: long_map.__setitem__(b"n", payload_of(2, 0, 16_377)),
            lambda: long_map.__setitem__(b"0", payload_of(2, 0, 16_377)),
            lambda: long_map.__setitem__(b"short", payload_of(2, 0, 16_377)),
            lambda: long_map.setdefault(b"n", payload_of(2, 0, 16_377)),
            lambda: long_map.compare_and_swap(b"1", before[b"1"], payload_of(2, 0, 16_377)),
        ):
            with pytest.raises(ArenaFull, match=text):
                call()
        assert dict(long_map) == before | {b"short": b"s"}
        assert raw.faults() == []

    @pytest.mark.parametrize("how", ["delete", "pop", "short", "clear"])
    def test_what_is_given_up_can_be_used_at_once(self, long_map, raw, how):
        fill(long_map, 16_384)
        match how:
            case "delete":
                del long_map[b"2"]
            case "pop":
                long_map.pop(b"2")
            case "short":
                long_map[b"2"] = b"short"
            case "clear":
                long_map.clear()
        long_map[b"new"] = payload_of(3, 0, 16_000)
        assert long_map[b"new"] == payload_of(3, 0, 16_000)
        assert raw.faults() == []

    def test_blocks_of_one_size_give_their_room_to_those_of_another(self, long_map, raw):
        whole_capacity(long_map, raw)
        for size in reversed(CLASSES):
            long_map.clear()
            assert fill(long_map, size) == min(8, ARENA // size)
            assert long_map.arena_backed_bytes <= ARENA

    def test_overwriting_goes_on_for_ever_with_room_for_one_more(self, path):
        with SharedHashMap.create(path, 2, arena_bytes=3 * 4096) as made:
            for n in range(500):
                made[b"%d" % (n % 2)] = payload_of(1, n, 4000)
                assert made[b"%d" % (n % 2)] == payload_of(1, n, 4000)

    def test_a_full_map_takes_no_blocks(self, long_map, raw):
        for n in range(8):
            long_map[b"%d" % n] = b"short"
        for _ in range(3):
            with pytest.raises(MapFull):
                long_map[b"more"] = bytes(60_000)
        for n in range(8):
            del long_map[b"%d" % n]
        whole_capacity(long_map, raw)

    def test_a_full_disk_is_an_error_and_not_a_signal(self, shm):
        point = shm / "small"
        point.mkdir()
        mounted = subprocess.run(
            ["mount", "-t", "tmpfs", "-o", "size=1m", "subetha-test", point], capture_output=True, check=False
        )
        if mounted.returncode:
            pytest.skip(f"no tmpfs could be mounted: {mounted.stderr.decode()}")
        try:
            with SharedHashMap.create(point / "map", 8, arena_bytes=1 << 22) as made:
                made[b"first"] = payload_of(1, 0, 300_000)
                with pytest.raises(
                    ArenaFull, match="no room for a block of 600000 bytes; make room, or lay the map elsewhere"
                ):
                    made[b"second"] = bytes(600_000)
                # words that say "backed" of what is not
                raw = MapFile(point / "map")
                (point / "rest").write_bytes(bytes(os.statvfs(point).f_bavail * os.statvfs(point).f_bsize))
                raw.blocks[4][:] = FREE_BACKED
                with pytest.raises(ArenaFull, match="no room for a block of 60000 bytes"):
                    made[b"third"] = bytes(60_000)
                assert dict(made) == {b"first": payload_of(1, 0, 300_000)}
                (point / "rest").unlink()
                made[b"third"] = payload_of(1, 1, 60_000)
                assert made[b"third"] == payload_of(1, 1, 60_000)
                del raw
        finally:
            subprocess.run(["umount", point], check=True)


class TestDeaths:
    @pytest.mark.parametrize("backed", [True, False])
    def test_a_block_that_a_dead_one_was_writing_is_free(self, long_map, raw, backed):
        whole_capacity(long_map, raw)
        free = next(i for i, word in enumerate(raw.blocks[0]) if int(word) == FREE_HOLE) if not backed else 0
        raw.blocks[0][free] = owned(DEAD)
        kill_by_hand(raw)
        assert long_map.rescue() == 1
        assert int(raw.blocks[0][free]) == FREE_BACKED
        assert int(raw.records["status"][DEAD - 1]) == 3 << 8 | SlotState.FREE
        whole_capacity(long_map, raw)

    @pytest.mark.parametrize("state", [CellState.WRITING, CellState.READY])
    def test_a_block_of_a_cell_that_was_not_published_goes_with_it(self, long_map, raw, state):
        cell = raw.states.index(CellState.FREE)
        raw.words[cell] = cell_word(5, state, DEAD)
        raw.blocks[4][0] = block_linked(cell, 5)
        raw.arena_lines["backed_bytes"] = ARENA
        raw.refs[cell], raw.value_lengths[cell] = 5 << 32, ARENA
        kill_by_hand(raw)
        # where it is needed
        long_map[b"k"] = payload_of(1, 1, ARENA)
        assert long_map[b"k"] == payload_of(1, 1, ARENA)
        assert raw.faults() == []
        assert long_map.rescue() == 0
        whole_capacity(long_map, raw)

    def test_a_block_of_somebody_who_lives_is_left_alone(self, path, long_map, raw):
        with SharedHashMap.open(path) as other:
            other[b"mine"] = b"x"
            (slot,) = raw.used_slots
            word = owned(slot + 1, int(raw.records["status"][slot]) >> 8)
            raw.blocks[4][0] = word
            for call in (long_map.rescue, long_map.repair):
                call()
                assert int(raw.blocks[4][0]) == word
            with pytest.raises(ArenaFull):
                long_map[b"k"] = bytes(ARENA)
            assert int(raw.blocks[4][0]) == word
            raw.blocks[4][0] = FREE_HOLE

    def test_one_of_an_earlier_registration_is_free_after_a_repair(self, long_map, raw):
        long_map[b"k"] = b"x"
        (slot,) = raw.used_slots
        raw.blocks[4][0] = owned(slot + 1, 77)
        raw.arena_lines["backed_bytes"] = ARENA
        long_map.repair()
        assert int(raw.blocks[4][0]) == FREE_BACKED
        whole_capacity(long_map, raw)

    def test_killed_writers_leave_all_of_the_room(self, run_script, path):
        out = run_script(
            """
            import random, signal
            dice = random.Random(5)
            made = SharedHashMap.create(sys.argv[1], 8, arena_bytes=1 << 16)
            for n in range(40):
                child = os.fork()
                if child == 0:
                    own = SharedHashMap.open(sys.argv[1])
                    turn = 0
                    while True:
                        turn += 1
                        try:
                            own[b"%d" % (turn % 3)] = payload_of(n, turn, 8 + turn * 977 % 20_000)
                        except ArenaFull:
                            pass
                        if turn % 7 == 0:
                            own.pop(b"%d" % (turn % 5), None)
                time.sleep(dice.uniform(0.002, 0.05))
                os.kill(child, signal.SIGKILL)
                os.waitpid(child, 0)
                for value in made.values():
                    origin_of(value)
            made.rescue()
            raw = MapFile(sys.argv[1])
            assert raw.faults() == [], raw.faults()
            for size in (4096, 8192, 16384, 32768, 65536):
                made.clear()
                for n in range(min(8, 65536 // size)):
                    made[b"%d" % n] = payload_of(1, n, size)
                assert all(origin_of(value) == (1, int(key)) for key, value in made.items())
            say("whole")
            """,
            path,
        )
        assert out == "whole\n"


BLOCK_WORDS = {
    "free": lambda raw, cell: FREE_BACKED,
    "a hole": lambda raw, cell: FREE_HOLE,
    "all ones": lambda raw, cell: 2**64 - 1,
    "no state": lambda raw, cell: 0xF,
    "free, and more": lambda raw, cell: 1 << 40 | FREE_BACKED,
    "a later version": lambda raw, cell: block_linked(cell, raw.version_of(cell) + 9),
    "an earlier version": lambda raw, cell: block_linked(cell, raw.version_of(cell) - 1),
    "another cell": lambda raw, cell: block_linked(raw.states.index(CellState.FREE), 1000),
    "no cell": lambda raw, cell: block_linked(2**20 - 1, 0),
    "of nobody": lambda raw, cell: owned(900),
    "of no number": lambda raw, cell: owned(65_535),
}
REFS = {
    "none": 0,
    "all ones": 2**64 - 1,
    "no class": 6 << 32,
    "no index": 1 << 32 | 16,
    "a free one": 1 << 32 | 9,
    "the other's": None,
}


class TestDamage:
    @pytest.fixture
    def two(self, long_map, raw):
        """Keys `a` and `b` with long values, `c` with a short one."""
        long_map[b"a"], long_map[b"b"], long_map[b"c"] = payload_of(1, 1, 5000), payload_of(1, 2, 6000), b"short"
        return {b"a": payload_of(1, 1, 5000), b"b": payload_of(1, 2, 6000), b"c": b"short"}

    def lost_at_most(self, path, long_map, raw, two):
        others = {key: value for key, value in two.items() if key != b"a"}
        with SharedHashMap.open(path, readonly=True) as looking:
            assert {key: looking.get(key) for key in others} == others
            for call in (lambda: looking[b"a"], lambda: list(looking.items())):
                with pytest.raises(TransportError, match=r"contradict each other.*open it without readonly=True"):
                    call()
        assert long_map.get(b"a") is None
        assert dict(long_map) == others
        long_map.repair()
        assert dict(long_map) == others
        assert raw.faults() == []
        whole_capacity(long_map, raw)

    @pytest.mark.parametrize("word", BLOCK_WORDS.values(), ids=BLOCK_WORDS)
    def test_a_value_whose_block_was_hit_is_lost_and_the_others_are_there(self, path, long_map, raw, two, word):
        cell = raw.cell_for(b"a")
        size_class, index = raw.block_of(cell)
        raw.blocks[size_class][index] = word(raw, cell)
        self.lost_at_most(path, long_map, raw, two)

    @pytest.mark.parametrize("ref", REFS.values(), ids=REFS)
    def test_a_reference_to_no_block_of_its_own_costs_that_value(self, path, long_map, raw, two, ref):
        raw.refs[raw.cell_for(b"a")] = raw.refs[raw.cell_for(b"b")] if ref is None else ref
        self.lost_at_most(path, long_map, raw, two)

    @pytest.mark.parametrize("length", [8193, ARENA, ARENA + 1, 2**31, 2**32 - 1])
    def test_an_impossible_length_shows_nothing_beyond_the_block(self, path, long_map, raw, two, length):
        raw.value_lengths[raw.cell_for(b"a")] = length
        self.lost_at_most(path, long_map, raw, two)

    @pytest.mark.parametrize("word", BLOCK_WORDS.values(), ids=BLOCK_WORDS)
    @pytest.mark.parametrize("call", ["set", "swap", "pop", "popitem", "setdefault", "rebuild"])
    def test_writers_mend_it_by_themselves(self, long_map, raw, word, call):
        long_map[b"a"] = payload_of(1, 1, 5000)
        cell = raw.cell_for(b"a")
        size_class, index = raw.block_of(cell)
        raw.blocks[size_class][index] = word(raw, cell)
        match call:
            case "set":
                long_map[b"a"] = b"new"
            case "swap":
                assert not long_map.compare_and_swap(b"a", payload_of(1, 1, 5000), b"new")
            case "pop":
                assert long_map.pop(b"a", None) is None
            case "popitem":
                with pytest.raises(KeyError):
                    long_map.popitem()
            case "setdefault":
                assert long_map.setdefault(b"a", b"new") == b"new"
            case "rebuild":
                long_map.rebuild()
        assert long_map.get(b"a") == (b"new" if call in ("set", "setdefault") else None)
        long_map.repair()
        assert raw.faults() == []
        whole_capacity(long_map, raw)

    @pytest.mark.parametrize("seed", range(3))
    def test_words_of_nonsense_leave_all_of_the_room(self, long_map, raw, two, seed):
        for words in raw.blocks:
            words[:] = np.random.default_rng(seed).integers(0, 2**64, len(words), np.uint64)
        long_map.repair()
        assert dict(long_map) == {b"c": b"short"}
        whole_capacity(long_map, raw)

    def test_hints_of_nonsense_are_counted_anew(self, long_map, raw, two):
        for value in (2**64 - 1, 2**63, 0, 5):
            raw.arena_lines["backed_bytes"] = value
            raw.arena_lines["high"] = value
            if value < 2**63:
                # believed, until a repair
                for size in CLASSES:
                    long_map.clear()
                    assert fill(long_map, size) == min(8, ARENA // size)
                long_map.repair()
            whole_capacity(long_map, raw)

    def test_random_bytes_from_a_peer_neither_crash_nor_stop_those_who_read_and_write(self, run_script, path):
        out = run_script(
            """
            faulthandler.dump_traceback_later(55, exit=True)

            def call(own, dice):
                key = b"key %d" % dice.randrange(6)
                length = dice.choice([0, 56, 57, 3000, 5000, 9000, 20_000, 65_536])
                match dice.randrange(12):
                    case 0 | 1 | 2: own[key] = bytes(length)
                    case 3: assert len(own.get(key, b"")) <= 65_536
                    case 4: assert len(own.pop(key, b"")) <= 65_536
                    case 5: assert len(own.setdefault(key, bytes(length))) <= 65_536
                    case 6: own.compare_and_swap(key, own.get(key), dice.choice([None, bytes(length)]))
                    case 7: assert all(len(k) <= 48 and len(v) <= 65_536 for k, v in own.items())
                    case 8: own.rebuild()
                    case 9: own.repair()
                    case 10: own.rescue()
                    case 11: own.popitem()

            def damage(raw, dice):
                value = dice.choice([dice.getrandbits(64), dice.getrandbits(64) & 0xFFFFFFFF, 0, 2**64 - 1])
                words = dice.choice(raw.blocks)
                at, cell = dice.randrange(len(words)), dice.randrange(raw.count)
                match dice.randrange(9):
                    case 0: words[at] = value
                    case 1: words[at] = dice.randrange(4)
                    # words that look right
                    case 2: words[at] = raw.version_of(cell) + dice.randrange(-1, 2) << 24 & 2**64 - 1 | cell << 4 | 3
                    case 3: words[at] = dice.randrange(1, 9) << 20 | dice.randrange(4) << 4 | 2
                    case 4: raw.refs[cell] = dice.choice([value, dice.randrange(7) << 32 | dice.randrange(20)])
                    case 5: raw.value_lengths[cell] = dice.choice([value & 0xFFFFFFFF, dice.randrange(70_000)])
                    case 6: raw.arena_lines["backed_bytes"] = value
                    case 7: raw.arena_lines["high"] = value
                    case 8: raw.words[cell] = dice.randrange(4) << 20 | dice.randrange(16) << 16 | dice.randrange(4)

            longest = 0.0
            for seed in range(8):
                path = f"{sys.argv[1]}.{seed}"
                own = SharedHashMap.create(path, 8, arena_bytes=1 << 16)
                raw = MapFile(path)
                took = call_beside_damage(
                    seed, (500, 1000), own, lambda dice: SharedHashMap.open(path), raw, call, damage, (SubethaError, KeyError)
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
                for size in (4096, 8192, 16384, 32768, 65536):
                    own.clear()
                    for n in range(min(8, 65536 // size)):
                        own[b"key %d" % n] = payload_of(1, n, size)
                    assert all(origin_of(value) == (1, int(key[4:])) for key, value in own.items())
                own.close()
                os.unlink(path)
            say(longest < 20)
            """,
            path,
        )
        assert out == "True\n"

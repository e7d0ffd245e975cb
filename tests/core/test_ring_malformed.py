"""Rings whose bytes somebody damaged: refused when opened, survived when open, and whole again after repair()."""

import itertools
import os
import random
import socket
import zlib

import numpy as np
import pytest

from subetha._core import HeartbeatTable, SharedDeque, SharedHashMap, SharedRing
from subetha.errors import Empty, Full, LayoutMismatch, TransportError
from subetha.layout import FILE_HEADER, LINES_OFFSET, RING_LINES, RING_PARTICIPANTS, CellState, Kind, cell_word

from .ring_file import RingFile
from .traffic import payload_of

WAIT_S = 30
HEADER_BYTES = FILE_HEADER.itemsize


def drain(ring):
    messages = []
    while True:
        try:
            messages.append(ring.try_pop())
        except Empty:
            return messages


def header_with(contents, **fields):
    """The file's bytes with other values in its header, and the checksum that belongs to them."""
    header = np.frombuffer(contents[:HEADER_BYTES], FILE_HEADER).copy()
    for name, value in fields.items():
        header[name] = value
    header["crc32"] = zlib.crc32(header.tobytes()[:-4])
    return header.tobytes() + contents[HEADER_BYTES:]


DAMAGES = {
    "empty": (lambda good: b"", r"expected at least 64 bytes, found 0; this is no Subetha file"),
    "a byte": (lambda good: good[:1], r"expected at least 64 bytes, found 1;"),
    "one byte short of a header": (lambda good: good[:63], r"expected at least 64 bytes, found 63;"),
    "nothing but a header": (lambda good: good[:64], r"expected \d+ bytes by its header, found 64; the file was cut"),
    "one byte short": (lambda good: good[:-1], r"expected \d+ bytes by its header, found \d+"),
    "half": (lambda good: good[: len(good) // 2], r"expected \d+ bytes by its header, found \d+"),
    "one byte more": (lambda good: good + b"\0", r"expected \d+ bytes by its header, found \d+"),
    "zeros": (lambda good: bytes(len(good)), r"expected magic b'SUBETHA\\x00', found b'\\x00\\x00"),
    "random": (lambda good: random.Random(5).randbytes(len(good)), r"expected magic .*; this is no Subetha file"),
    "text": (lambda good: b"#!/bin/sh\n" + b"exit 1\n" * 50, r"expected magic .* found b'#!/bin/s'"),
    "another magic": (lambda good: b"SUBETHB\0" + good[8:], r"found b'SUBETHB\\x00'"),
    "an older layout": (
        lambda good: header_with(good, layout_version=0),
        r"expected layout version 1, found 0; use the release",
    ),
    "a newer layout": (
        lambda good: header_with(good, layout_version=2),
        r"expected layout version 1, found 2; use the release",
    ),
    "a wrong checksum": (
        lambda good: good[:60] + bytes([good[60] ^ 1]) + good[61:],
        r"expected header CRC-32 0x[0-9a-f]{8}, found 0x[0-9a-f]{8}; the file is damaged",
    ),
    "a changed header": (lambda good: good[:16] + b"\x08" + good[17:], r"expected header CRC-32"),
    "an unknown kind": (
        lambda good: header_with(good, kind=99),
        r"expected a file of kind \w+, found 99; open it as what it is",
    ),
    "another kind": (lambda good: header_with(good, kind=Kind.ARENA), r"expected a file of kind \w+, found ARENA"),
    "no capacity": (lambda good: header_with(good, capacity=0), r"capacity.*found 0"),
    "too large a capacity": (lambda good: header_with(good, capacity=2**21), r"capacity.*found 2097152"),
    "an absurd capacity": (lambda good: header_with(good, capacity=2**64 - 1), r"capacity.*found 18446744073709551615"),
    "another capacity": (lambda good: header_with(good, capacity=8), r"expected \d+ bytes by its header, found \d+"),
}

RING_DAMAGES = {
    "a capacity that is no power of two": (
        lambda good: header_with(good, capacity=3),
        r"power of two.*found 3; the file is damaged",
    ),
    "too short payloads": (
        lambda good: header_with(good, payload_bytes=7),
        r"payload_bytes: expected 8 to 4088, found 7;",
    ),
    "too long payloads": (
        lambda good: header_with(good, payload_bytes=2**32 - 1),
        r"payload_bytes: .*found 4294967295",
    ),
    "other payloads": (lambda good: header_with(good, payload_bytes=200), r"expected \d+ bytes by its header"),
    "nobody may take part": (lambda good: header_with(good, extra=0), r"participants: expected 1 to 65534, found 0"),
    "everybody may take part": (
        lambda good: header_with(good, extra=2**64 - 1),
        r"participants: .*found 18446744073709551615",
    ),
}

CASES = [
    *(
        (kind, name, *damage)
        for kind in (SharedRing, SharedDeque, SharedHashMap, HeartbeatTable)
        for name, damage in DAMAGES.items()
    ),
    *((kind, name, *damage) for kind in (SharedRing, SharedDeque) for name, damage in RING_DAMAGES.items()),
]


class TestRefusedFiles:
    @pytest.mark.parametrize(
        ("kind", "name", "damage", "text"), CASES, ids=[f"{case[0].__name__}-{case[1]}" for case in CASES]
    )
    def test_a_malformed_file_is_refused_with_what_is_wrong_and_left_alone(self, path, kind, name, damage, text):
        kind.create(path, 4).close()
        bad = damage(path.read_bytes())
        path.write_bytes(bad)
        for attempt in (
            lambda: kind.open(path),
            lambda: kind.open(path, readonly=True),
            lambda: kind.open_or_create(path, 4),
        ):
            with pytest.raises(LayoutMismatch, match=text) as caught:
                attempt()
            assert str(path) in str(caught.value)
        with pytest.raises(FileExistsError):
            kind.create(path, 4)
        assert path.read_bytes() == bad

    @pytest.mark.parametrize("kind", [SharedRing, SharedDeque, SharedHashMap, HeartbeatTable])
    def test_no_bit_of_the_header_can_be_wrong_unnoticed(self, path, kind):
        kind.create(path, 2).close()
        good = path.read_bytes()
        with open(path, "r+b") as file:
            for at in range(HEADER_BYTES):
                file.seek(at)
                file.write(bytes([good[at] ^ 1 << at % 8]))
                file.flush()
                with pytest.raises(LayoutMismatch):
                    kind.open(path)
                file.seek(at)
                file.write(good[at : at + 1])
                file.flush()
        kind.open(path).close()

    def test_one_kind_of_file_is_not_opened_as_another(self, shm):
        SharedRing.create(shm / "ring", 4).close()
        HeartbeatTable.create(shm / "table", 4).close()
        with pytest.raises(LayoutMismatch, match="expected a file of kind RING, found TABLE; open it as what it is"):
            SharedRing.open(shm / "table")
        with pytest.raises(LayoutMismatch, match="expected a file of kind TABLE, found RING"):
            HeartbeatTable.open_or_create(shm / "ring", 4)

    @pytest.mark.parametrize("readonly", [False, True])
    @pytest.mark.parametrize("kind", [SharedRing, SharedHashMap, HeartbeatTable])
    def test_what_is_no_regular_file_is_refused_at_once(self, shm, kind, readonly):
        (shm / "directory").mkdir()
        os.mkfifo(shm / "fifo")
        (shm / "loop").symlink_to(shm / "loop")
        with socket.socket(socket.AF_UNIX) as listener:
            listener.bind(os.fspath(shm / "socket"))
            for name in ("directory", "fifo", "socket", "loop", "fifo/below"):
                with pytest.raises((OSError, LayoutMismatch), match=name):
                    kind.open(shm / name, readonly)
                with pytest.raises((OSError, LayoutMismatch)):
                    kind.open_or_create(shm / name, 4)
            with pytest.raises(LayoutMismatch, match="expected a regular file, found mode p"):
                kind.open(shm / "fifo", readonly)
            with pytest.raises(LayoutMismatch, match="expected a regular file, found mode c"):
                kind.open("/dev/null", readonly)
        assert sorted(os.listdir(shm)) == ["directory", "fifo", "loop", "socket"]


class TestFrozenStates:
    """What deaths leave behind, written by hand; the number 900 is nobody's."""

    DEAD = 900

    @pytest.fixture
    def raw(self, path, ring):
        return RingFile(path)

    def works_with(self, ring, cells):
        """The ring has room for so many messages, and moves them in order."""
        for turn in range(5):
            messages = [b"%d.%d" % (turn, i) for i in range(cells)]
            assert ring.push_many([*messages, b"no room"]) == cells
            with pytest.raises(Full):
                ring.push(b"no room", timeout=0)
            assert drain(ring) == messages

    @pytest.mark.parametrize(
        "state", [state for state in CellState if state not in (CellState.FREE, CellState.READY, CellState.RETRY)]
    )
    def test_a_cell_of_a_dead_owner_is_taken_away_and_blocks_nobody(self, ring, raw, state):
        raw.write_message(1, b"dead hands", state=state, owner=self.DEAD)
        word = int(raw.words[1])
        self.works_with(ring, 3)
        assert ring.repair() == 0
        self.works_with(ring, 3)
        assert int(raw.words[1]) == word

    def test_a_cell_taken_by_a_dead_owner_who_left_its_place_full_delays_nobody(self, ring, raw):
        ring.push_many([b"taken", b"next"])
        raw.words[0] = cell_word(0, CellState.TAKEN, self.DEAD)
        assert ring.try_pop() == b"next"
        self.works_with(ring, 3)

    def test_all_cells_of_dead_owners_make_the_ring_full_and_empty_at_once(self, ring, raw):
        raw.words[:] = cell_word(5, CellState.TAKEN, self.DEAD)
        for _ in range(2):
            with pytest.raises(Full, match="all 4 cells"):
                ring.try_push(b"x")
            with pytest.raises(Empty):
                ring.try_pop()
            with pytest.raises(Full):
                ring.push(b"x", timeout=0.01)
            with pytest.raises(Empty):
                ring.pop(timeout=0.01)
            assert ring.repair() == 0

    def test_a_stale_place_is_freed_by_the_next_one_who_looks(self, ring, raw):
        # popped, and dead before the place was freed
        ring.push_many([b"popped", b"next"])
        raw.words[0] = cell_word(1, CellState.FREE, 0)
        stale = int(raw.places[0])
        assert ring.try_pop() == b"next"
        assert int(raw.places[0]) == raw.empty_place(1) != stale
        self.works_with(ring, 4)

    def test_a_whole_lap_of_stale_places_is_freed_by_a_push_that_needs_one(self, ring, raw):
        for place in range(raw.size):
            raw.places[place] = raw.full_place(0, 3, place % 4)
        raw.tail = raw.size
        ring.try_push(b"through")
        assert drain(ring) == [b"through"]
        self.works_with(ring, 4)

    def test_a_reference_is_found_although_its_publisher_died_before_it_moved_the_tail(self, ring, raw):
        ring.push_many([b"a", b"b"])
        raw.tail = 1
        assert ring.try_pop() == b"a"
        assert ring.try_pop() == b"b"
        self.works_with(ring, 4)

    def test_pushing_goes_on_behind_a_reference_whose_publisher_died_before_it_moved_the_tail(self, ring, raw):
        ring.push_many([b"a", b"b"])
        raw.tail = 1
        ring.try_push(b"c")
        assert drain(ring) == [b"a", b"b", b"c"]

    def test_a_place_freed_by_one_who_died_before_it_moved_the_head_is_stepped_over(self, ring, raw):
        ring.push_many([b"a", b"b"])
        assert ring.try_pop() == b"a"
        raw.head = 0
        assert ring.try_pop() == b"b"
        raw.head = 0
        with pytest.raises(Empty):
            ring.try_pop()
        self.works_with(ring, 4)

    @pytest.mark.parametrize("state", [CellState.READY, CellState.RETRY])
    @pytest.mark.parametrize("owner", [0, 1, DEAD])
    def test_a_message_without_a_reference_is_found_by_repair(self, ring, raw, state, owner):
        ring.push_many([b"a", b"b"])
        raw.write_message(2, b"unreferenced", state=state, owner=owner)
        assert ring.repair() == 1
        assert ring.repair() == 0
        assert drain(ring) == [b"a", b"b", b"unreferenced"]
        self.works_with(ring, 4)

    def test_repair_of_a_sound_ring_changes_nothing(self, ring, raw):
        ring.push_many([b"a", b"b", b"c"])
        claim = ring.try_claim()

        def all_but_the_futex_words():
            contents = raw.contents.copy()
            for name in ("items", "space"):
                at = LINES_OFFSET + RING_LINES.fields[name][1]
                contents[at : at + 4] = 0
            return contents.tobytes()

        before = all_but_the_futex_words()
        assert ring.repair() == 0
        assert all_but_the_futex_words() == before
        claim.ack()

    @pytest.mark.parametrize("state", range(len(CellState), 16))
    def test_repair_frees_a_cell_in_a_state_that_does_not_exist(self, ring, raw, state):
        raw.words[2] = cell_word(7, state, 1)
        self.works_with(ring, 3)
        assert ring.repair() == 0
        assert int(raw.words[2]) == cell_word(8, CellState.FREE, 0)
        self.works_with(ring, 4)

    @pytest.mark.parametrize("owner", [0, RING_PARTICIPANTS + 1, 65535])
    @pytest.mark.parametrize("state", [CellState.WRITING, CellState.TAKEN])
    def test_repair_undoes_a_cell_that_nobody_can_hold(self, ring, raw, state, owner):
        raw.write_message(3, b"nobody's", state=state, owner=owner, version=9)
        self.works_with(ring, 3)
        assert ring.repair() == (state == CellState.TAKEN)
        assert drain(ring) == [b"nobody's"] * (state == CellState.TAKEN)
        self.works_with(ring, 4)

    @pytest.mark.parametrize("owner", [1, RING_PARTICIPANTS])
    def test_repair_leaves_a_claim_alone_whose_owner_is_possible(self, ring, raw, owner):
        raw.write_message(3, b"somebody's", state=CellState.TAKEN, owner=owner)
        assert ring.repair() == 0
        assert raw.state_of(3) == CellState.TAKEN

    @pytest.mark.parametrize("due", [1, 2**32 - 1])
    def test_a_repair_that_was_not_finished_is_done_by_the_next_one_who_looks(self, path, raw, due):
        # the repairer emptied the places and died before it had published all
        for take in (lambda ring: ring.try_pop(), lambda ring: ring.pop(WAIT_S), lambda ring: ring.pop_many(1)[0]):
            with SharedRing.open(path) as ring:
                ring.push_many([b"a", b"b", b"c"])
                raw.set_laps(100)
                raw.lines["due"] = due
                assert sorted([take(ring), *drain(ring)]) == [b"a", b"b", b"c"]
                assert raw.lines["due"][0] & 1 == 0
                ring.push_many([b"a", b"b"])
                raw.set_laps(200)
                raw.lines["due"] = due
                ring.try_push(b"c")
                assert raw.lines["due"][0] & 1 == 0
                assert sorted(drain(ring)) == [b"a", b"b", b"c"]
                self.works_with(ring, 4)

    def test_a_sleeper_notices_that_a_repair_is_due(self, ring, raw, in_threads, eventually):
        def leave_one_unfinished():
            eventually(lambda: raw.lines["items"][0] & 1, "it sleeps")
            raw.write_message(0, b"unpublished")
            raw.lines["due"] = 1

        assert in_threads(lambda: ring.pop(WAIT_S), leave_one_unfinished)[0] == b"unpublished"

    def test_several_may_repair_at_once(self, path, ring, raw, in_threads):
        handles = [SharedRing.open(path) for _ in range(4)]
        for _ in range(30):
            ring.push_many([b"a", b"b", b"c"])
            raw.places[:] = np.random.default_rng(1).integers(0, 2**64, raw.size, np.uint64)
            in_threads(*(handle.repair for handle in handles))
            assert sorted(drain(ring)) == [b"a", b"b", b"c"]
            assert raw.lines["due"][0] & 1 == 0
            self.works_with(ring, 4)
        for handle in handles:
            handle.close()


class TestDamagedMessages:
    TAKES = (
        ("try_pop", lambda ring: ring.try_pop()),
        ("pop", lambda ring: ring.pop(WAIT_S)),
        ("pop_many", lambda ring: ring.pop_many(1)[0]),
        ("try_claim", lambda ring: ring.try_claim()),
        ("claim", lambda ring: ring.claim(WAIT_S)),
    )

    @pytest.mark.parametrize("take", [take for _, take in TAKES], ids=[name for name, _ in TAKES])
    @pytest.mark.parametrize("length", [57, 2**31, 2**32 - 1])
    def test_an_impossible_length_is_an_error_that_drops_that_message_alone(self, path, ring, take, length):
        ring.push_many([b"damaged", b"sound"])
        raw = RingFile(path)
        raw.lengths[0] = length
        with pytest.raises(
            TransportError, match=rf"cell 0 says {length} bytes where at most 56 fit: .*damaged it"
        ) as caught:
            take(ring)
        assert not isinstance(caught.value, Full | Empty)
        assert raw.state_of(0) == CellState.FREE
        assert drain(ring) == [b"sound"]
        assert ring.push_many([b"x"] * 5) == 4

    def test_pop_many_loses_no_message_beside_a_damaged_one(self, path, ring):
        ring.push_many([b"before", b"damaged", b"after"])
        RingFile(path).lengths[1] = 57
        got, errors = [], 0
        for _ in range(4):
            try:
                got += ring.pop_many(4)
            except TransportError:
                errors += 1
        assert got == [b"before", b"after"]
        assert errors <= 1

    @pytest.mark.parametrize(
        "damaged", [[0], [1], [31], [32], [33], [50], [99], [10, 20], [31, 32], [0, 99], [*range(20, 70)]], ids=repr
    )
    def test_pop_many_delivers_everything_around_damaged_ones_and_meets_these_alone(self, path, damaged):
        messages = [payload_of(1, i) for i in range(100)]
        with SharedRing.create(path, 128) as ring:
            ring.push_many(messages)
            raw = RingFile(path)
            raw.lengths[damaged] = 57
            got, met = [], []
            for _ in range(2 * len(damaged) + 100):
                try:
                    got += ring.pop_many(100)
                except TransportError as error:
                    (cell,) = [cell for cell in damaged if f"cell {cell} says 57 bytes" in str(error)]
                    met.append((cell, raw.state_of(cell)))
            assert got == [message for i, message in enumerate(messages) if i not in damaged]
            assert sorted(met) == [(cell, CellState.FREE) for cell in damaged]
            assert raw.states == [CellState.FREE] * 128
            assert ring.push_many(messages + messages) == 128

    def test_messages_that_another_pops_in_the_middle_of_a_repair_are_not_lost(self, path, ring, monkeypatch):
        ring.push_many([b"a", b"b", b"c"])
        raw = RingFile(path)
        zeros, got = np.zeros, []
        with SharedRing.open(path) as other:
            other.pop_many(0)

            def zeros_while_another_pops(*arguments):
                monkeypatch.setattr(np, "zeros", zeros)
                raw.places[1] = raw.full_place(50, 0, 1)
                try:
                    got.extend(other.pop_many(2))
                except TransportError:
                    got.append(None)
                return zeros(*arguments)

            monkeypatch.setattr(np, "zeros", zeros_while_another_pops)
            ring.repair()
            assert got
            assert sorted([*filter(None, got), *drain(other)]) == [b"a", b"b", b"c"]

    def test_a_length_that_changes_while_it_is_read_never_shows_more_than_the_cell(self, run_script, path):
        out = run_script(
            """
            ring = SharedRing.create(sys.argv[1], 2, payload_bytes=8)
            raw = RingFile(sys.argv[1])
            ring.push_many([b"1234", b"1234"])
            vandal = os.fork()
            if vandal == 0:
                lengths = raw.lengths
                while True:
                    lengths[:] = 0x7FFFFFFF
                    lengths[:] = 4
            try:
                taken = refused = 0
                for _ in range(30_000):
                    try:
                        claim = ring.try_claim()
                        assert len(claim.tobytes()) <= 8, claim
                        assert len(claim.payload) <= 8, claim
                        claim.ack()
                        taken += 1
                    except Empty:
                        pass
                    except TransportError as error:
                        assert "damaged" in str(error), error
                        refused += 1
                    try:
                        assert len(ring.try_pop()) <= 8
                    except Empty:
                        pass
                    except TransportError as error:
                        assert "damaged" in str(error), error
                    ring.push_many([b"1234", b"1234"])
            finally:
                os.kill(vandal, signal.SIGKILL)
                os.waitpid(vandal, 0)
            say(taken + refused > 0)
            """,
            path,
        )
        assert out == "True\n"


class TestDamagedHints:
    def aged_ring(self, path, waiting, before):
        ring = SharedRing.create(path, 4)
        for _ in range(before):
            ring.try_push(b"earlier")
            ring.try_pop()
        messages = [b"%d" % i for i in range(waiting)]
        ring.push_many(messages)
        return ring, RingFile(path), messages

    def wrong_positions(self, raw):
        random_ones = random.Random(11)
        here = (raw.head, raw.tail)
        near = {
            (position + delta) & raw.position_mask
            for position in here
            for delta in range(-2 * raw.size - 1, 2 * raw.size + 2)
        }
        return [*sorted(near), *(random_ones.getrandbits(64) for _ in range(20)), 2**64 - 1, raw.position_mask, 1 << 63]

    @pytest.mark.parametrize("hint", ["head", "tail", "both", "each its own"])
    @pytest.mark.parametrize("before", [0, 3, 21])
    @pytest.mark.parametrize("waiting", [0, 1, 3, 4])
    def test_wrong_hints_lose_nothing_and_repair_finds_them_again(self, shm, waiting, before, hint):
        ring, raw, messages = self.aged_ring(shm / "ring", waiting, before)
        sound = raw.contents.copy()
        others = random.Random(before)
        for position in self.wrong_positions(raw):
            raw.contents[:] = sound
            if hint != "tail":
                raw.head = position
            if hint == "each its own":
                raw.tail = others.getrandbits(64)
            elif hint != "head":
                raw.tail = position
            assert len(ring) <= raw.size
            assert ring.repair() == 0
            assert len(ring) == waiting
            assert ring.push_many([b"x"] * 5) == 4 - waiting
            assert drain(ring) == messages + [b"x"] * (4 - waiting)
            assert ring.push_many([b"y"] * 5) == 4
            assert drain(ring) == [b"y"] * 4
        ring.close()

    @pytest.mark.parametrize("hint", ["head", "tail", "both"])
    @pytest.mark.parametrize("before", [0, 3, 21])
    @pytest.mark.parametrize("waiting", [1, 3, 4])
    def test_wrong_hints_do_not_hide_messages_from_a_pop_that_waits(self, shm, waiting, before, hint):
        ring, raw, messages = self.aged_ring(shm / "ring", waiting, before)
        sound = raw.contents.copy()
        for position in self.wrong_positions(raw):
            raw.contents[:] = sound
            if hint != "tail":
                raw.head = position
            if hint != "head":
                raw.tail = position
            got = []
            for _ in messages:
                # a handle looks through the places at its first sleep, and then now and again
                with SharedRing.open(ring.path) as fresh:
                    try:
                        got.append(fresh.pop(timeout=0.01))
                    except Empty:
                        pytest.fail(f"{hint} {position:#x}: {got} of {messages} came, {len(ring)} are said to wait")
            assert sorted(got) == messages
        ring.close()

    def test_a_push_is_not_kept_out_by_wrong_hints(self, shm):
        ring, raw, messages = self.aged_ring(shm / "ring", 2, 9)
        sound = raw.contents.copy()
        for position in self.wrong_positions(raw):
            for hint in ("head", "tail"):
                raw.contents[:] = sound
                setattr(raw, hint, position)
                ring.try_push(b"x")
                ring.push(b"y", timeout=0)
                with pytest.raises(Full):
                    ring.try_push(b"z")
                ring.repair()
                assert sorted(drain(ring)) == [*messages, b"x", b"y"]
        ring.close()

    @pytest.mark.parametrize("word", [0, 1, 2, 0x7FFFFFFF, 0x80000000, 0xFFFFFFFE, 0xFFFFFFFF])
    def test_any_value_in_a_futex_word_still_lets_sleepers_be_woken(self, path, ring, in_threads, word):
        raw = RingFile(path)
        raw.lines["items"], raw.lines["space"] = word, word
        with pytest.raises(Empty):
            ring.pop(timeout=0.001)
        raw.lines["items"] = word
        popped, _ = in_threads(lambda: ring.pop(WAIT_S), lambda: ring.push(b"x"))
        assert popped == b"x"
        ring.push_many([b"x"] * 4)
        raw.lines["space"] = word
        with pytest.raises(Full):
            ring.push(b"y", timeout=0.001)
        in_threads(lambda: ring.push(b"y", WAIT_S), ring.pop)
        assert drain(ring) == [b"x", b"x", b"x", b"y"]


class TestDamagedPlaces:
    def test_every_small_damage_of_a_small_ring_is_repaired_without_loss(self, path):
        """Four places: each in one of three laps, empty or leading to either cell, whatever the hints say."""
        ring = SharedRing.create(path, 2)
        raw = RingFile(path)
        lap, version = 40, 6
        raw.set_laps(lap)
        raw.set_versions(version)
        ring.push_many([b"a", b"b"])
        sound = raw.contents.copy()
        words = [
            word
            for shift in (-1, 0, 1)
            for word in (
                raw.empty_place(lap + shift),
                raw.full_place(lap + shift, version, 0),
                raw.full_place(lap + shift, version, 1),
            )
        ]
        hints = random.Random(3)
        for i, places in enumerate(itertools.product(words, repeat=4)):
            raw.contents[:] = sound
            raw.places[:] = places
            if i % 2:
                raw.head = hints.randrange(lap - 2 << raw.size_bits, lap + 3 << raw.size_bits)
                raw.tail = hints.randrange(lap - 2 << raw.size_bits, lap + 3 << raw.size_bits)
            case = [hex(word) for word in places], raw.head, raw.tail
            ring.repair()
            got = [ring.pop(timeout=0), ring.pop(timeout=0)]
            assert sorted(got) == [b"a", b"b"], case
            # one more lap and a half of ordinary work
            for n in range(3):
                assert ring.push_many([b"%d" % n, b"x", b"no room"]) == 2, case
                assert ring.pop_many(3) == [b"%d" % n, b"x"], case
            with pytest.raises(Empty):
                ring.try_pop()
        ring.close()

    @pytest.mark.parametrize("capacity", [2, 4, 16])
    def test_places_full_of_noise_are_repaired_without_loss(self, path, capacity):
        noise = np.random.default_rng(capacity)
        with SharedRing.create(path, capacity) as ring:
            raw = RingFile(path)
            for _ in range(200):
                messages = [b"%d" % i for i in range(int(noise.integers(1, capacity + 1)))]
                assert ring.push_many(messages) == len(messages)
                hit = noise.random(raw.size) < noise.random()
                raw.places[hit] = noise.integers(0, 2**64, raw.size, np.uint64)[hit]
                raw.head, raw.tail = (int(hint) for hint in noise.integers(0, 2**64, 2, np.uint64))
                ring.repair()
                assert sorted(drain(ring)) == sorted(messages)

    def test_calls_that_meet_places_of_many_laps_mend_them_by_themselves(self, path, ring):
        raw = RingFile(path)
        for take in (ring.try_pop, lambda: ring.pop(WAIT_S), lambda: ring.pop_many(1)[0]):
            ring.push_many([b"a", b"b", b"c"])
            raw.places[:] = np.arange(8, dtype=np.uint64) << np.uint64(40)
            ring.try_push(b"d")
            raw.places[:] = np.arange(8, dtype=np.uint64) << np.uint64(50)
            assert sorted([take(), *drain(ring)]) == [b"a", b"b", b"c", b"d"]

    def test_places_that_agree_with_each_other_but_lead_nowhere_are_found_out_by_repair(self, path, ring):
        raw = RingFile(path)
        ring.push_many([b"a", b"b", b"c"])
        raw.places[:] = 0xFFFFFFFFFFFFFFFF
        drain(ring)
        assert ring.repair() == 3
        assert sorted(drain(ring)) == [b"a", b"b", b"c"]


class TestLiveDamage:
    """In a process of its own with a hard limit, because what goes wrong here is a crash or a spin in compiled code."""

    def test_random_bytes_from_a_peer_neither_crash_nor_stop_those_who_push_and_pop(self, run_script, path):
        out = run_script(
            """
            import queue
            faulthandler.dump_traceback_later(55, exit=True)
            ALLOWED = (SubethaError, ValueError, queue.Full, queue.Empty)

            def call(ring, dice):
                match dice.randrange(9):
                    case 0: ring.try_push(dice.randbytes(dice.randrange(57)))
                    case 1: ring.push(b"x", timeout=0.0005)
                    case 2: ring.push_many([b"y" * 56] * dice.randrange(5))
                    case 3: assert len(ring.try_pop()) <= 56
                    case 4: assert len(ring.pop(timeout=0.0005)) <= 56
                    case 5: assert all(len(one) <= 56 for one in ring.pop_many(dice.randrange(5)))
                    case 6:
                        claim = ring.try_claim()
                        assert len(claim.tobytes()) <= 56
                        dice.choice([claim.ack, claim.release, claim.started])()
                    case 7: assert 0 <= len(ring) <= 32
                    case 8: dice.choice([ring.cells, ring.repair])()

            def damage(raw, dice):
                value = dice.choice([dice.getrandbits(64), dice.getrandbits(64) & 0xFFFFFFFF, 0, 2**64 - 1])
                match dice.randrange(8):
                    case 0: raw.words[dice.randrange(16)] = value
                    # words that look right: any state, any owner
                    case 1:
                        word = dice.randrange(4) << 20 | dice.randrange(16) << 16 | dice.randrange(4)
                        raw.words[dice.randrange(16)] = word
                    case 2: raw.places[dice.randrange(32)] = value
                    case 3: raw.places[dice.randrange(32)] = raw.places[dice.randrange(32)]
                    case 4: raw.lines[dice.choice(["head", "tail"])] = value
                    case 5: raw.lines[dice.choice(["items", "space", "due"])] = value & 0xFFFFFFFF
                    case 6: raw.lengths[dice.randrange(16)] = value & 0xFFFFFFFF
                    case 7: raw.records.view("<u8")[dice.randrange(raw.records.view("<u8").size)] = value

            longest = 0.0
            for seed in range(12):
                path = f"{sys.argv[1]}.{seed}"
                ring = SharedRing.create(path, 16)
                raw = RingFile(path)
                took = call_beside_damage(
                    seed, (700, 1500), ring, lambda dice: SharedRing.open(path), raw, call, damage, ALLOWED
                )
                longest = max(longest, took)
                # whatever it looks like, a scan and a clean set of words make it whole again
                ring.repair()
                for cell, state in enumerate(raw.states):
                    if state not in (CellState.READY, CellState.RETRY):
                        raw.words[cell] = cell_word(raw.version_of(cell) + 1, CellState.FREE, 0)
                for _ in range(16):
                    try:
                        ring.pop_many(16)
                    except TransportError:
                        continue
                assert ring.push_many([b"%d" % i for i in range(17)]) == 16, (seed, raw.states)
                assert ring.pop_many(17) == [b"%d" % i for i in range(16)], seed
                ring.close()
                os.unlink(path)
            say(longest < 20)
            """,
            path,
        )
        assert out == "True\n"

    def test_damaged_places_and_hints_cost_no_message_while_two_processes_push_and_pop(self, run_script, path):
        run_script(
            """
            import json
            import random
            faulthandler.dump_traceback_later(55, exit=True)

            def traffic(ring, me, dice, steps, meddle):
                pushed, popped = [], []
                for step in range(steps):
                    meddle()
                    payload = b"%d.%d" % (me, step)
                    try:
                        match dice.randrange(6):
                            case 0: ring.try_push(payload), pushed.append(payload)
                            case 1 | 2: ring.push(payload, timeout=0.0005), pushed.append(payload)
                            case 3: popped.append(ring.try_pop())
                            case 4: popped.append(ring.pop(timeout=0.0005))
                            case 5:
                                claim = ring.try_claim()
                                if dice.random() < 0.5:
                                    claim.release()
                                else:
                                    payload = claim.tobytes()
                                    claim.ack()
                                    popped.append(payload)
                    except TransportError:
                        continue
                return [[one.decode() for one in pushed], [one.decode() for one in popped]]

            def damage(raw, dice):
                match dice.randrange(7):
                    case 0: raw.places[dice.randrange(raw.size)] = dice.getrandbits(64)
                    case 1: raw.places[dice.randrange(raw.size)] = raw.places[dice.randrange(raw.size)]
                    case 2: raw.places[dice.randrange(raw.size)] ^= np.uint64(1 << dice.randrange(64))
                    case 3: raw.head = dice.getrandbits(64)
                    case 4: raw.tail = dice.getrandbits(64)
                    case 5:
                        raw.head = raw.head + dice.randrange(-9, 9) & 2**64 - 1
                        raw.tail = raw.tail + dice.randrange(-9, 9) & 2**64 - 1
                    case 6: raw.lines[dice.choice(["items", "space", "due"])] = dice.getrandbits(32)

            for seed in range(16):
                path = f"{sys.argv[1]}.{seed}"
                ring = SharedRing.create(path, (2, 4, 16)[seed % 3])
                raw = RingFile(path)
                mate = os.fork()
                if mate == 0:
                    try:
                        with SharedRing.open(path) as own:
                            log = traffic(own, 1, random.Random(seed), 900, lambda: None)
                        with open(path + ".log", "w") as file:
                            json.dump(log, file)
                        os._exit(0)
                    except BaseException:
                        import traceback
                        traceback.print_exc()
                    finally:
                        os._exit(1)
                dice = random.Random(1000 + seed)
                log = traffic(ring, 0, dice, 600, lambda: dice.random() < 0.2 and damage(raw, dice))
                assert os.waitpid(mate, 0)[1] == 0, seed
                with open(path + ".log") as file:
                    theirs = json.load(file)
                ring.repair()
                left = [one.decode() for one in ring.pop_many(99)]
                pushed, got = sorted(log[0] + theirs[0]), sorted(log[1] + theirs[1] + left)
                lost, invented = set(pushed) - set(got), set(got) - set(pushed)
                assert got == pushed, (seed, "lost", lost, "invented", invented, "doubled", len(got) - len(set(got)))
                assert len(pushed) > 50, (seed, len(pushed))
                assert raw.states == [CellState.FREE] * raw.capacity, (seed, raw.states)
                ring.close()
                os.unlink(path)
            """,
            path,
        )

    def test_after_any_damage_repair_gives_back_every_message_whose_own_cell_was_not_hit(self, run_script, path):
        run_script(
            """
            import random
            faulthandler.dump_traceback_later(55, exit=True)
            capacity = 8
            for seed in range(120):
                dice = random.Random(seed)
                path = f"{sys.argv[1]}.{seed}"
                rings = [SharedRing.create(path, capacity), SharedRing.open(path)]
                raw = RingFile(path)
                # message -> the cells that may hold it: one that was given up on the way still has its bytes
                unhit = {}
                for step in range(150):
                    ring = dice.choice(rings)
                    try:
                        match dice.randrange(5):
                            case 0 | 1:
                                message = b"%d.%d" % (seed, step)
                                ring.try_push(message)
                                unhit[message] = {
                                    cell for cell in range(capacity)
                                    if raw.payloads[cell, : len(message)].tobytes() == message
                                }
                                assert unhit[message]
                            case 2:
                                unhit.pop(ring.try_pop(), None)
                            case 3:
                                claim = ring.try_claim()
                                claim.release()
                            case 4:
                                value = dice.choice([dice.getrandbits(64), dice.getrandbits(8), 0, 2**64 - 1])
                                cell = None
                                match dice.randrange(7):
                                    case 0:
                                        cell = dice.randrange(capacity)
                                        raw.words[cell] = value
                                    case 1:
                                        cell = dice.randrange(capacity)
                                        raw.words[cell] ^= np.uint64(1 << dice.randrange(64))
                                    case 2:
                                        cell = dice.randrange(capacity)
                                        raw.lengths[cell] = value & 0xFFFFFFFF
                                    case 3:
                                        raw.places[dice.randrange(raw.size)] = value
                                    case 4:
                                        raw.places[dice.randrange(raw.size)] = raw.places[dice.randrange(raw.size)]
                                    case 5:
                                        raw.head, raw.tail = dice.getrandbits(64), value
                                    case 6:
                                        raw.lines[dice.choice(["items", "space", "due"])] = value & 0xFFFFFFFF
                                unhit = {message: cells for message, cells in unhit.items() if cell not in cells}
                    except (TransportError, TableFull):
                        continue
                rings[0].repair()
                got = []
                while True:
                    try:
                        got.append(rings[1].try_pop())
                    except Empty:
                        break
                    except TransportError as error:
                        assert "damaged" in str(error), error
                missing = unhit.keys() - set(got)
                assert not missing, (seed, missing, [hex(int(word)) for word in raw.words])
                for ring in rings:
                    ring.close()
                os.unlink(path)
            """,
            path,
        )

"""Deques whose bytes somebody damaged: survived when open, no message lost that is whole, and sound after repair()."""

import random

import numpy as np
import pytest

from subetha._core import SharedDeque
from subetha.errors import Empty, Full, NotOwner, TransportError
from subetha.layout import CellState, SlotState, cell_word

from .ring_file import DequeFile

WAIT_S = 30


def drain(deque):
    messages = []
    while True:
        try:
            messages.append(deque.steal())
        except Empty:
            return messages


def works(deque, cells=4):
    """The deque has room for so many messages, and gives them at both ends."""
    for turn in range(4):
        messages = [b"%d.%d" % (turn, i) for i in range(cells)]
        assert deque.push_batch(messages) == cells
        with pytest.raises(Full):
            deque.push(b"no room")
        if turn % 2:
            assert [deque.pop() for _ in messages] == messages[::-1]
        else:
            assert drain(deque) == messages
        with pytest.raises(Empty):
            deque.pop()


@pytest.fixture
def raw(path, deque):
    return DequeFile(path)


class TestWrongEnds:
    def aged(self, path, waiting, before):
        deque = SharedDeque.create(path, 4)
        for n in range(before):
            deque.push(b"before")
            (deque.pop if n % 3 == 2 else deque.steal)()
        messages = [b"%d" % n for n in range(waiting)]
        deque.push_batch(messages)
        return deque, DequeFile(path), messages

    def wrong_positions(self, raw):
        dice = random.Random(7)
        near = {
            (raw.get(name) + delta) % 2**64
            for name in ("top", "bottom")
            for delta in range(-2 * raw.size - 1, 2 * raw.size + 2)
        }
        return [*sorted(near), *(dice.getrandbits(64) for _ in range(12)), 2**64 - 1, 1 << 63, (1 << 63) - 1]

    def damaged(self, path, waiting, before):
        """The deque with each of many wrong ends in turn."""
        deque, raw, messages = self.aged(path, waiting, before)
        sound = raw.contents.copy()
        for position in self.wrong_positions(raw):
            for ends in ({"top": position}, {"bottom": position}, {"top": position, "bottom": position}):
                raw.contents[:] = sound
                raw.put(**ends)
                yield deque, raw, messages, ends
        deque.close()

    @pytest.mark.parametrize("before", [0, 3, 21])
    @pytest.mark.parametrize("waiting", [0, 1, 4])
    def test_repair_finds_every_message(self, path, waiting, before):
        for deque, raw, messages, ends in self.damaged(path, waiting, before):
            assert len(deque) <= raw.size + raw.capacity
            deque.repair()
            assert sorted(drain(deque)) == messages, ends
            works(deque)

    @pytest.mark.parametrize("before", [0, 21])
    @pytest.mark.parametrize("waiting", [1, 4])
    def test_a_steal_that_waits_finds_every_message(self, path, waiting, before):
        for deque, _, messages, ends in self.damaged(path, waiting, before):
            got = []
            for _ in messages:
                # a handle looks through the cells at its first sleep, and then now and again
                with SharedDeque.open_as_thief(deque.path) as fresh:
                    try:
                        got.append(fresh.steal(timeout=0.01))
                    except Empty:
                        pytest.fail(f"{ends}: {got} of {messages} came, {len(deque)} are said to wait")
            assert sorted(got) == messages

    @pytest.mark.parametrize("before", [0, 21])
    @pytest.mark.parametrize("waiting", [0, 2])
    def test_a_push_goes_in_and_comes_out(self, path, waiting, before):
        for deque, _, messages, ends in self.damaged(path, waiting, before):
            deque.push(b"x")
            deque.push_batch([b"y"])
            got = drain(deque)
            # what was hidden by an end that is possible waits for a look or a repair
            assert {b"x", b"y"} <= set(got), ends
            deque.repair()
            assert sorted(got + drain(deque)) == sorted([*messages, b"x", b"y"]), ends
            works(deque)

    @pytest.mark.parametrize("waiting", [1, 4])
    def test_a_pop_ends_and_the_owner_goes_on(self, path, waiting):
        for deque, _, messages, ends in self.damaged(path, waiting, 9):
            got = []
            for _ in range(2):
                try:
                    got.append(deque.pop())
                except Empty:
                    deque.repair()
            deque.repair()
            assert sorted(got + drain(deque)) == messages, ends
            works(deque)

    def test_the_next_owner_finds_ends_that_work(self, path):
        for deque, raw, messages, ends in self.damaged(path, 2, 9):
            raw.put(owner=0)
            with SharedDeque.open(deque.path) as owner:
                owner.push(b"x")
                got = drain(owner)
                assert b"x" in got, ends
                owner.repair()
                assert sorted(got + drain(owner)) == sorted([*messages, b"x"]), ends
                works(owner)


class TestDamagedPlaces:
    @pytest.mark.parametrize("capacity", [2, 4, 16])
    def test_noise_in_every_place_loses_nothing(self, path, capacity):
        noise = np.random.default_rng(capacity)
        with SharedDeque.create(path, capacity) as deque:
            raw = DequeFile(path)
            for _ in range(150):
                messages = [b"%d" % i for i in range(int(noise.integers(1, capacity + 1)))]
                assert deque.push_batch(messages) == len(messages)
                for places in (raw.slots, raw.places):
                    hit = noise.random(raw.size) < noise.random()
                    places[hit] = noise.integers(0, 2**64, raw.size, np.uint64)[hit]
                if noise.random() < 0.5:
                    raw.ends["top"], raw.ends["bottom"] = noise.integers(0, 2**64, 2, np.uint64)
                raw.head, raw.tail = (int(hint) for hint in noise.integers(0, 2**64, 2, np.uint64))
                deque.repair()
                assert sorted(drain(deque)) == sorted(messages)

    def test_a_place_that_leads_to_another_cell_delivers_nothing_twice(self, deque, raw):
        deque.push_batch([b"a", b"b", b"c"])
        top = raw.get("top")
        raw.slots[top + 1] = raw.full_place(0, 0, raw.cell_at(top))
        assert sorted(drain(deque)) == [b"a", b"c"]
        assert deque.repair() == 1
        assert drain(deque) == [b"b"]
        works(deque)

    @pytest.mark.parametrize("word", [0, 2**64 - 1, "another lap", "another version", "empty"])
    def test_a_place_that_leads_nowhere_is_stepped_over_and_its_message_found_by_repair(self, deque, raw, word):
        deque.push_batch([b"a", b"b"])
        top = raw.get("top")
        words = {
            "another lap": raw.full_place(7, 0, raw.cell_at(top)),
            "another version": raw.full_place(0, 3, raw.cell_at(top)),
            "empty": raw.empty_place(0),
        }
        raw.slots[top] = words.get(word, word)
        assert drain(deque) == [b"b"]
        assert deque.repair() == 1
        assert drain(deque) == [b"a"]
        works(deque)

    def test_a_deque_full_of_live_references_and_without_a_place_takes_one_more_message(self, deque, raw):
        # the ends are as far apart as they can be, and what waits is at the top
        deque.push_batch([b"a", b"b"])
        raw.put(bottom=raw.get("top") + raw.size)
        deque.push(b"c")
        # it went on into `back`, and nothing had to be repaired
        assert raw.states[:3] == [CellState.RETRY, CellState.READY, CellState.READY]
        assert len(raw.visible) == raw.size
        deque.push(b"d")
        assert drain(deque) == [b"a", b"b", b"c", b"d"]
        works(deque)

    @pytest.mark.parametrize("length", [57, 2**31, 2**32 - 1])
    @pytest.mark.parametrize("take", ["steal", "pop", "try_claim", "steal_many", "steal waiting"])
    def test_an_impossible_length_is_an_error_that_drops_that_message_alone(self, deque, raw, take, length):
        deque.push_batch([b"a", b"b", b"c"])
        cell = 2 if take == "pop" else 0
        raw.lengths[cell] = length
        call = {"steal_many": lambda: deque.steal_many(1), "steal waiting": lambda: deque.steal(WAIT_S)}.get(
            take, getattr(deque, take, None)
        )
        with pytest.raises(TransportError, match=f"cell {cell} says {length} bytes where at most 56 fit"):
            call()
        assert raw.state_of(cell) == CellState.FREE
        assert len(drain(deque)) == 2
        works(deque)


class TestDamagedWords:
    @pytest.mark.parametrize("pushes", [1, 2, 2**63, 2**64 - 1, 2**64 - 2])
    def test_any_count_of_pushes_lets_everything_go_on(self, deque, raw, pushes):
        raw.put(pushes=pushes)
        deque.push_batch([b"a", b"b"])
        assert raw.get("pushes") % 2 == 0
        assert drain(deque) == [b"a", b"b"]
        works(deque)
        # what the damage hides is found once a push has put that right
        deque.push(b"hidden")
        raw.put(top=raw.get("bottom"), pushes=pushes)
        deque.repair()
        deque.push(b"next")
        deque.repair()
        assert sorted(drain(deque)) == [b"hidden", b"next"]
        works(deque)

    @pytest.mark.parametrize("owner", [1, 1022, 1023, 65535, 2**64 - 1, 5 << 16 | 1, 0])
    def test_an_owner_that_nobody_is_is_replaced_by_the_first_who_pushes(self, path, deque, raw, owner):
        raw.put(owner=owner)
        with SharedDeque.open(path) as other:
            other.push(b"x")
            with pytest.raises(NotOwner):
                deque.push(b"y")
            assert deque.steal() == b"x"

    def test_the_owner_whose_name_was_damaged_takes_it_again(self, deque, raw):
        mine = raw.get("owner")
        raw.put(owner=77 << 16 | 999)
        deque.push(b"x")
        assert raw.get("owner") == mine
        assert deque.pop() == b"x"

    def test_an_owner_whose_rescue_cannot_end_is_not_replaced(self, path, deque, raw):
        # its record says that it is dying, but somebody holds its lock: this handle
        mine = raw.get("owner")
        slot = (mine & 0xFFFF) - 1
        raw.records["status"][slot] = mine >> 16 << 8 | SlotState.DYING
        with SharedDeque.open(path) as other, pytest.raises(NotOwner, match=r"could not be moved on yet.*try again"):
            other.push(b"x")
        raw.records["status"][slot] = mine >> 16 << 8 | SlotState.USED

    @pytest.mark.parametrize("state", [CellState.WRITING, CellState.TAKEN])
    def test_repair_undoes_a_cell_that_nobody_can_hold(self, deque, raw, state):
        raw.write_message(3, b"nobody's", state=state, owner=1023, version=9)
        assert deque.repair() == (state == CellState.TAKEN)
        assert drain(deque) == [b"nobody's"] * (state == CellState.TAKEN)
        works(deque)

    def test_repair_of_a_sound_deque_changes_nothing(self, deque, raw):
        deque.push_batch([b"a", b"b", b"c"])
        deque.try_claim().release()
        claim = deque.try_claim()
        raw.lines["items"] = raw.lines["space"] = 0
        before = raw.contents.tobytes()
        assert deque.repair() == 0
        raw.lines["items"] = 0
        assert raw.contents.tobytes() == before
        claim.ack()

    def test_a_repair_shows_no_part_of_a_push_that_goes_on(self, path, deque, raw):
        deque.push(b"a")
        raw.put(pushes=raw.get("pushes") + 1)
        raw.write_message(2, b"of a batch", owner=1)
        assert deque.repair() == 0
        assert drain(deque) == [b"a"]
        with SharedDeque.open_as_thief(path) as fresh, pytest.raises(Empty):
            # whose first sleep is a look at every cell
            fresh.steal(timeout=0.01)
        raw.words[2] = cell_word(1, CellState.FREE, 0)
        raw.put(pushes=raw.get("pushes") + 1)
        works(deque)


class TestLiveDamage:
    """In a process of its own with a hard limit, because what goes wrong here is a crash or a spin in compiled code."""

    def test_random_bytes_from_a_peer_neither_crash_nor_stop_those_who_push_and_take(self, run_script, path):
        out = run_script(
            """
            import queue
            faulthandler.dump_traceback_later(55, exit=True)
            ALLOWED = (SubethaError, ValueError, queue.Full, queue.Empty)

            def call(deque, dice):
                match dice.randrange(11):
                    case 0: deque.push(dice.randbytes(dice.randrange(57)))
                    case 1: deque.push(b"x", timeout=0.0005)
                    case 2: deque.push_batch([b"y" * 56] * dice.randrange(5))
                    case 3: assert len(deque.steal()) <= 56
                    case 4: assert len(deque.steal(timeout=0.0005)) <= 56
                    case 5: assert all(len(one) <= 56 for one in deque.steal_many(dice.randrange(5)))
                    case 6:
                        claim = deque.try_claim()
                        assert len(claim.tobytes()) <= 56
                        dice.choice([claim.ack, claim.release, claim.started])()
                    case 7: assert 0 <= len(deque) <= 64
                    case 8: dice.choice([deque.cells, deque.repair, deque.own])()
                    case _: assert len(deque.pop()) <= 56

            def damage(raw, dice):
                value = dice.choice([dice.getrandbits(64), dice.getrandbits(64) & 0xFFFFFFFF, 0, 2**64 - 1])
                near = (raw.get("top") + dice.randrange(-40, 40)) % 2**64
                match dice.randrange(11):
                    case 0: raw.words[dice.randrange(16)] = value
                    case 1:
                        word = dice.randrange(4) << 20 | dice.randrange(16) << 16 | dice.randrange(4)
                        raw.words[dice.randrange(16)] = word
                    case 2: raw.places[dice.randrange(32)] = value
                    case 3: raw.slots[dice.randrange(32)] = raw.slots[dice.randrange(32)]
                    case 4: raw.lines[dice.choice(["head", "tail"])] = value
                    case 5: raw.lines[dice.choice(["items", "space", "due"])] = value & 0xFFFFFFFF
                    case 6: raw.lengths[dice.randrange(16)] = value & 0xFFFFFFFF
                    case 7: raw.records.view("<u8")[dice.randrange(raw.records.view("<u8").size)] = value
                    case 8: raw.slots[dice.randrange(32)] = value
                    case 9: raw.ends[dice.choice(["top", "bottom", "owner", "pushes"])] = value
                    case 10: raw.ends[dice.choice(["top", "bottom"])] = near

            for seed in range(10):
                path = f"{sys.argv[1]}.{seed}"
                deque = SharedDeque.create(path, 16)
                raw = DequeFile(path)
                kinds = SharedDeque.open, SharedDeque.open_as_thief
                call_beside_damage(
                    seed, (700, 1500), deque, lambda dice: dice.choice(kinds)(path), raw, call, damage, ALLOWED
                )
                deque.close()
            say("all")
            """,
            path,
        )
        assert out.split() == ["all"]

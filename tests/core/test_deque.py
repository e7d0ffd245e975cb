"""SharedDeque, one process: which end gives what, who may push, what its limits are, and how it says so."""

import array
import contextlib
import copy
import os
import pickle
import queue
import stat

import pytest

from subetha._core import Mapped, SharedDeque, SharedRing
from subetha.errors import (
    Empty,
    Full,
    LayoutMismatch,
    NotOwner,
    PayloadTooLarge,
    TableFull,
    TransportError,
    UnsupportedTransportFamily,
)
from subetha.layout import CellState, SlotState

from .ring_file import DequeFile, asleep_on
from .traffic import payload_of

WAIT_S = 30

OWNER_CALLS = {
    "push": lambda deque: deque.push(b"x"),
    "push waiting": lambda deque: deque.push(b"x", timeout=WAIT_S),
    "try_push": lambda deque: deque.try_push(b"x"),
    "push_batch": lambda deque: deque.push_batch([b"x", b"y"]),
    "pop": lambda deque: deque.pop(),
    "own": lambda deque: deque.own(),
}
THIEF_CALLS = {
    "steal": lambda deque: deque.steal(),
    "steal waiting": lambda deque: deque.steal(timeout=WAIT_S),
    "try_pop": lambda deque: deque.try_pop(),
    "steal_many": lambda deque: deque.steal_many(2),
    "try_claim": lambda deque: deque.try_claim(),
    "claim": lambda deque: deque.claim(timeout=WAIT_S),
    "rescue": lambda deque: deque.rescue(),
    "repair": lambda deque: deque.repair(),
}
LOOKS = {"cells": lambda deque: deque.cells(), "__len__": len, "__enter__": lambda deque: deque.__enter__()}
CALLS = OWNER_CALLS | THIEF_CALLS | LOOKS


@pytest.fixture
def thief(path, deque):
    with SharedDeque.open_as_thief(path) as handle:
        yield handle


def wakes(raw, word):
    """How often somebody was woken: sleepers look by themselves as well, now and again."""
    return int(raw.lines[word][0]) >> 1


def steal_all(deque):
    return deque.steal_many(1000)


class TestCreation:
    @pytest.mark.parametrize("capacity", [2, 4, 1024])
    def test_a_new_deque_is_empty_and_has_the_capacity_asked_for(self, path, capacity):
        with SharedDeque.create(path, capacity) as deque:
            assert (deque.capacity, len(deque), bool(deque)) == (capacity, 0, True)
            for take in (deque.pop, deque.steal, deque.try_claim, deque.try_pop):
                with pytest.raises(Empty, match="no message waits"):
                    take()

    def test_the_default_payload_is_56_bytes_and_the_default_mode_the_owners_alone(self, path, deque):
        assert deque.payload_bytes == 56
        assert stat.S_IMODE(path.stat().st_mode) == 0o600

    @pytest.mark.parametrize("keywords", [False, True])
    def test_payload_bytes_and_mode_are_as_asked_for(self, path, keywords):
        make = SharedDeque.create if keywords else SharedDeque.open_or_create
        with make(path, 4, **{"payload_bytes": 100} if keywords else {}, mode=0o640) as deque:
            assert deque.payload_bytes == (100 if keywords else 56)
            assert stat.S_IMODE(path.stat().st_mode) == 0o640

    @pytest.mark.parametrize("capacity", [0, 1, 3, 2**20 + 1, 2**21, -4])
    def test_a_capacity_outside_its_limits_is_refused(self, path, capacity):
        for make in (SharedDeque.create, SharedDeque.open_or_create):
            with pytest.raises(
                ValueError, match=rf"capacity: expected a power of two from 2 to 1048576, found {capacity}"
            ):
                make(path, capacity)
        assert not path.exists()

    @pytest.mark.parametrize("payload_bytes", [0, 7, 4089])
    def test_a_payload_size_outside_its_limits_is_refused(self, path, payload_bytes):
        with pytest.raises(ValueError, match=rf"payload_bytes: expected 8 to 4088, found {payload_bytes}"):
            SharedDeque.create(path, 4, payload_bytes)
        assert not path.exists()

    def test_an_existing_file_is_never_replaced(self, path, deque):
        deque.push(b"kept")
        with pytest.raises(FileExistsError):
            SharedDeque.create(path, 4)
        assert deque.pop() == b"kept"

    def test_open_or_create_creates_once_and_then_opens(self, path):
        with SharedDeque.open_or_create(path, 4) as first, SharedDeque.open_or_create(path, 4) as second:
            first.push(b"x")
            assert second.steal() == b"x"
        with pytest.raises(LayoutMismatch, match="expected capacity 8 and payload_bytes 56, found 4 and 56"):
            SharedDeque.open_or_create(path, 8)
        with pytest.raises(LayoutMismatch, match="expected capacity 4 and payload_bytes 64, found 4 and 56"):
            SharedDeque.open_or_create(path, 4, 64)

    def test_neither_call_that_opens_makes_a_file(self, path):
        for call in (SharedDeque.open, SharedDeque.open_as_thief):
            with pytest.raises(FileNotFoundError):
                call(path)

    def test_a_ring_is_not_opened_as_a_deque_nor_a_deque_as_a_ring(self, shm, deque, path):
        SharedRing.create(shm / "ring", 4).close()
        with pytest.raises(LayoutMismatch, match="expected a file of kind DEQUE, found RING; open it as what it is"):
            SharedDeque.open(shm / "ring")
        with pytest.raises(LayoutMismatch, match="expected a file of kind RING, found DEQUE"):
            SharedRing.open(path)

    def test_the_constructor_names_what_to_call_instead(self):
        with pytest.raises(TypeError, match=r"SharedDeque\.create.*open_as_thief"):
            SharedDeque()

    def test_a_handle_is_neither_copied_nor_pickled(self, deque):
        for change in (copy.copy, copy.deepcopy, pickle.dumps):
            with pytest.raises(TypeError):
                change(deque)


class TestOrder:
    @pytest.mark.parametrize("capacity", [2, 4, 64])
    def test_the_owner_pops_the_newest_over_many_laps(self, path, capacity):
        with SharedDeque.create(path, capacity) as deque:
            for start in range(0, 10 * capacity, capacity):
                messages = [payload_of(1, start + i) for i in range(capacity)]
                for message in messages:
                    deque.push(message)
                assert [deque.pop() for _ in messages] == messages[::-1]

    @pytest.mark.parametrize("capacity", [2, 4, 64])
    def test_a_thief_steals_the_oldest_over_many_laps(self, path, capacity):
        with SharedDeque.create(path, capacity) as deque, SharedDeque.open_as_thief(path) as thief:
            for start in range(0, 10 * capacity, capacity):
                messages = [payload_of(1, start + i) for i in range(capacity)]
                for message in messages:
                    deque.push(message)
                assert [thief.steal() for _ in messages] == messages

    def test_both_ends_meet(self, deque, thief):
        for n in range(4):
            deque.push(b"%d" % n)
        assert [deque.pop(), thief.steal(), deque.pop(), thief.steal()] == [b"3", b"0", b"2", b"1"]
        for take in (deque.pop, thief.steal):
            with pytest.raises(Empty):
                take()

    def test_the_owner_may_steal_and_claim_too(self, deque):
        deque.push_batch([b"a", b"b", b"c"])
        assert deque.steal() == b"a"
        assert deque.try_claim().tobytes() == b"b"
        assert deque.steal_many(9) == [b"b", b"c"]

    @pytest.mark.parametrize("capacity", [2, 4, 64])
    def test_full_is_said_exactly_at_the_capacity(self, path, capacity):
        with SharedDeque.create(path, capacity) as deque:
            for turn in range(5):
                for n in range(capacity):
                    deque.push(b"%d" % n)
                for push in (deque.push, deque.try_push, lambda m: deque.push_batch([m])):
                    with pytest.raises(Full):
                        push(b"no room")
                assert len(deque) == capacity
                take = deque.pop if turn % 2 else deque.steal
                for _ in range(capacity):
                    take()
                assert len(deque) == 0

    def test_claimed_messages_are_not_counted_but_keep_their_cells(self, deque, thief):
        deque.push_batch([b"a", b"b", b"c", b"d"])
        claims = [thief.try_claim() for _ in range(3)]
        assert len(deque) == 1
        with pytest.raises(Full, match="all 4 cells hold a message that waits or is claimed"):
            deque.push(b"x")
        for claim in claims:
            claim.ack()
        assert deque.push_batch([b"x"] * 3) == 3

    @pytest.mark.parametrize("take", ["pop", "steal", "try_claim"])
    def test_a_message_put_back_comes_before_all_that_wait(self, deque, thief, take):
        deque.push_batch([b"a", b"b", b"c"])
        thief.try_claim().release()
        assert len(deque) == 3
        got = getattr(deque, take)()
        assert (got if take != "try_claim" else got.tobytes()) == b"a"

    def test_put_backs_come_in_the_order_they_were_put_back(self, deque, thief):
        deque.push_batch([b"a", b"b", b"c", b"d"])
        claims = [thief.try_claim() for _ in range(3)]
        for claim in claims[::-1]:
            claim.release()
        assert steal_all(thief) == [b"c", b"b", b"a", b"d"]

    def test_a_message_is_put_back_and_claimed_without_end(self, deque, thief):
        deque.push(b"tough")
        for n in range(100):
            claim = thief.try_claim()
            assert claim.tobytes() == b"tough"
            if n % 2:
                claim.release()
            else:
                del claim
        assert deque.pop() == b"tough"


class TestBatches:
    @pytest.mark.parametrize("count", [0, 1, 2, 3, 4])
    def test_a_batch_goes_in_whole_and_its_last_one_is_the_newest(self, deque, thief, count):
        messages = [b"%d" % n for n in range(count)]
        assert deque.push_batch(messages) == count
        assert len(deque) == count
        if count:
            assert deque.pop() == messages[-1]
        assert steal_all(thief) == messages[:-1]

    def test_a_batch_is_any_iterable_of_any_buffers(self, deque):
        assert deque.push_batch(iter([bytearray(b"a"), memoryview(b"b"), array.array("B", [99])])) == 3
        assert steal_all(deque) == [b"a", b"b", b"c"]

    @pytest.mark.parametrize("waiting", [1, 3, 4])
    def test_a_batch_without_room_for_all_of_it_stays_out_whole(self, path, deque, waiting):
        deque.push_batch([b"w"] * waiting)
        words = DequeFile(path).states
        with pytest.raises(Full, match=f"{4 - waiting} cells are free where a batch of 4 messages needs as many"):
            deque.push_batch([b"a", b"b", b"c", b"d"])
        assert DequeFile(path).states == words
        assert deque.push_batch([b"x"] * (4 - waiting)) == 4 - waiting

    def test_a_batch_larger_than_the_capacity_says_that_it_never_fits(self, path, deque):
        with pytest.raises(Full, match="a batch of 5 messages never fits 4 cells"):
            deque.push_batch([b"x"] * 5)
        assert DequeFile(path).states == [CellState.FREE] * 4

    @pytest.mark.parametrize(("bad", "error"), [(b"x" * 57, PayloadTooLarge), ("text", TypeError), (7, TypeError)])
    def test_one_bad_payload_keeps_the_whole_batch_out(self, path, deque, bad, error):
        with pytest.raises(error):
            deque.push_batch([b"a", b"b", bad])
        assert (len(deque), DequeFile(path).states) == (0, [CellState.FREE] * 4)
        assert deque.push_batch([b"x"] * 4) == 4

    def test_steal_many_gives_what_is_there_up_to_n_oldest_first(self, deque, thief):
        deque.push_batch([b"a", b"b", b"c", b"d"])
        assert thief.steal_many(0) == []
        assert thief.steal_many(3) == [b"a", b"b", b"c"]
        assert thief.steal_many(3) == [b"d"]
        assert thief.steal_many(3) == []
        with pytest.raises(ValueError, match="n: expected 0 or more, found -1"):
            thief.steal_many(-1)

    @pytest.mark.parametrize("count", [31, 32, 33, 100, 128])
    def test_large_batches_come_back_whole(self, path, count):
        messages = [payload_of(3, n) for n in range(count)]
        with SharedDeque.create(path, 128) as deque:
            for _ in range(5):
                assert deque.push_batch(messages) == count
                assert deque.steal_many(200) == messages


class TestPayloads:
    @pytest.mark.parametrize("payload_bytes", [8, 56, 57, 4088])
    def test_every_length_up_to_the_limit_comes_back_exactly(self, path, payload_bytes):
        lengths = {0, 1, 7, 8, payload_bytes // 2, payload_bytes - 1, payload_bytes}
        with SharedDeque.create(path, 4, payload_bytes) as deque:
            for length in sorted(lengths, reverse=True):
                payload = bytes(n % 251 for n in range(length))
                for take in (deque.pop, deque.steal, lambda: deque.try_claim().tobytes()):
                    deque.push(payload)
                    assert take() == payload
                    steal_all(deque)

    def test_a_payload_too_long_is_refused_with_both_lengths(self, path, deque):
        for push in (deque.push, deque.try_push, lambda p: deque.push(p, timeout=1), lambda p: deque.push_batch([p])):
            with pytest.raises(PayloadTooLarge, match="expected at most 56 bytes, found 57"):
                push(bytes(57))
        assert DequeFile(path).states == [CellState.FREE] * 4


class TestOwner:
    @pytest.mark.parametrize("name", OWNER_CALLS)
    def test_a_thief_neither_pushes_nor_pops_and_hears_who_does(self, deque, thief, name):
        deque.push(b"kept")
        with pytest.raises(NotOwner, match=rf"its owner is participant 1 \(process {os.getpid()}\)"):
            OWNER_CALLS[name](thief)
        assert steal_all(thief) == [b"kept"]

    @pytest.mark.parametrize("name", OWNER_CALLS)
    def test_a_second_owner_neither_pushes_nor_pops_and_hears_who_does(self, path, deque, name):
        deque.push(b"kept")
        with SharedDeque.open(path) as second:
            with pytest.raises(NotOwner, match=rf"its owner is participant 1 \(process {os.getpid()}\)") as caught:
                OWNER_CALLS[name](second)
            assert isinstance(caught.value, TransportError)
            assert not isinstance(caught.value, Full | Empty)
            assert second.steal() == b"kept"

    def test_the_maker_is_the_owner_at_once(self, path):
        with SharedDeque.create(path, 4), SharedDeque.open(path) as second, pytest.raises(NotOwner):
            second.push(b"x")

    def test_one_that_opens_is_the_owner_at_its_first_push_or_pop(self, path, deque):
        deque.close()
        with SharedDeque.open(path) as first, SharedDeque.open(path) as second:
            assert DequeFile(path).get("owner") == 0
            with pytest.raises(Empty):
                second.pop()
            with pytest.raises(NotOwner):
                first.push(b"x")
            second.push(b"x")
            assert first.steal() == b"x"

    def test_a_closed_owner_leaves_its_messages_and_its_place_to_the_next(self, path, deque, thief):
        deque.push_batch([b"a", b"b"])
        deque.close()
        with pytest.raises(NotOwner, match=r"nobody owns it at the moment; open it with open\(\)"):
            thief.push(b"x")
        with SharedDeque.open(path) as second:
            second.push(b"c")
            assert [second.pop(), thief.steal(), second.pop()] == [b"c", b"a", b"b"]

    def test_own_is_for_who_wants_to_know_before_the_first_push(self, path, deque):
        with SharedDeque.open(path) as second:
            deque.own()
            with pytest.raises(NotOwner):
                second.own()
            deque.close()
            second.own()
            second.own()
            with SharedDeque.open(path) as third, pytest.raises(NotOwner):
                third.push(b"x")

    def test_owners_that_follow_each_other_with_nothing_left_lose_nothing(self, path, deque, thief):
        deque.close()
        for turn in range(50):
            with SharedDeque.open(path) as owner:
                owner.push_batch([b"%d.%d" % (turn, n) for n in range(turn % 5)])
                if turn % 2 and turn % 5:
                    assert owner.pop() == b"%d.%d" % (turn, turn % 5 - 1)
            left = turn % 5 - (turn % 2 and turn % 5 > 0)
            assert steal_all(thief) == [b"%d.%d" % (turn, n) for n in range(left)]

    def test_a_forked_child_is_not_the_owner_while_its_parent_lives(self, run_script, path):
        out = run_script(
            """
            deque = SharedDeque.create(sys.argv[1], 4)
            deque.push(b"parent's")
            child = os.fork()
            if child == 0:
                try:
                    deque.push(b"child's")
                except NotOwner as error:
                    say(f"(process {os.getppid()})" in str(error), deque.steal())
                deque.close()
                os._exit(0)
            os.waitpid(child, 0)
            deque.push(b"again")
            say(deque.pop(), len(deque))
            """,
            path,
        )
        assert out.splitlines() == ["""True b"parent's\"""", "b'again' 0"]


class TestClaims:
    def test_a_claim_is_held_until_it_is_acknowledged(self, path, deque, thief):
        deque.push(b"job")
        claim = thief.try_claim()
        raw = DequeFile(path)
        assert raw.states[0] == CellState.TAKEN
        assert bytes(claim.payload) == b"job"
        claim.started()
        with pytest.raises(UnsupportedTransportFamily):
            claim.reply(b"result")
        claim.ack()
        assert raw.states == [CellState.FREE] * 4
        with pytest.raises(ValueError, match="this claim is over"):
            claim.ack()

    def test_closing_puts_claims_back(self, deque, thief):
        deque.push_batch([b"a", b"b"])
        claim = thief.try_claim()
        thief.close()
        with pytest.raises(ValueError, match="closed"):
            claim.ack()
        assert steal_all(deque) == [b"a", b"b"]

    def test_a_view_outlives_the_handle(self, path, deque):
        deque.push(b"seen")
        thief = SharedDeque.open_as_thief(path)
        claim = thief.try_claim()
        view = memoryview(claim.payload)
        thief.close()
        assert bytes(view) == b"seen"


class TestTimeouts:
    def test_a_wait_ends_at_its_timeout_and_names_it(self, deque, thief):
        with pytest.raises(Empty, match=r"no message came in 0\.01 s"):
            thief.steal(timeout=0.01)
        with pytest.raises(Empty):
            thief.claim(timeout=0.01)
        deque.push_batch([b"x"] * 4)
        with pytest.raises(Full, match=r"none came free in 0\.01 s"):
            deque.push(b"x", timeout=0.01)

    @pytest.mark.parametrize("timeout", [-1, float("nan")])
    def test_a_timeout_that_is_no_time_to_wait_is_refused(self, deque, timeout):
        for call in (lambda: deque.steal(timeout), lambda: deque.push(b"x", timeout), lambda: deque.claim(timeout)):
            with pytest.raises(ValueError, match="timeout: expected None or seconds >= 0"):
                call()

    @pytest.mark.parametrize("call", ["steal", "claim"])
    @pytest.mark.parametrize("come", ["push", "push_batch", "release"])
    def test_a_sleeping_thief_is_woken(self, path, deque, thief, in_threads, eventually, call, come):
        raw = DequeFile(path)
        held = None
        if come == "release":
            deque.push(b"x")
            held = deque.try_claim()

        def give():
            eventually(lambda: asleep_on(raw.lines["items"]) == 1, "it sleeps")
            before = wakes(raw, "items")
            {"push": lambda: deque.push(b"x"), "push_batch": lambda: deque.push_batch([b"x"])}.get(
                come, lambda: held.release()
            )()
            assert wakes(raw, "items") > before

        got = in_threads(lambda: getattr(thief, call)(timeout=WAIT_S), give)[0]
        assert (got if call == "steal" else got.tobytes()) == b"x"

    def test_a_batch_wakes_as_many_thieves_as_it_has_messages(self, path, deque, in_threads, eventually):
        raw = DequeFile(path)

        def give():
            eventually(lambda: asleep_on(raw.lines["items"]) == 3, "all sleep")
            deque.push_batch([b"a", b"b", b"c"])

        got = in_threads(*[lambda: deque.steal(timeout=WAIT_S)] * 3, give)
        assert sorted(got[:3]) == [b"a", b"b", b"c"]

    @pytest.mark.parametrize("room", ["pop", "steal", "ack", "steal_many"])
    def test_a_sleeping_push_is_woken(self, path, deque, thief, in_threads, eventually, room):
        raw = DequeFile(path)
        deque.push_batch([b"x"] * 4)
        held = thief.try_claim()
        give = {"pop": deque.pop, "steal": thief.steal, "ack": held.ack, "steal_many": lambda: thief.steal_many(1)}[
            room
        ]

        def make_room():
            eventually(lambda: asleep_on(raw.lines["space"]) == 1, "it sleeps")
            before = wakes(raw, "space")
            give()
            assert wakes(raw, "space") > before

        in_threads(lambda: deque.push(b"last", timeout=WAIT_S), make_room)
        assert deque.pop() == b"last"


class TestHandles:
    def test_every_public_call_is_among_those_tested(self):
        properties = {"capacity", "payload_bytes", "path", "closed", "header", "ring"}
        others = {"create", "open", "open_as_thief", "open_or_create", "close", "make_policy", "apply_migration"}
        public = {name for name in dir(SharedDeque) if not name.startswith("_")}
        assert public == {name for name in CALLS if " " not in name and not name.startswith("_")} | properties | others

    @pytest.mark.parametrize("call", CALLS.values(), ids=CALLS)
    def test_a_closed_handle_refuses_every_call(self, path, call):
        deque = SharedDeque.create(path, 4)
        deque.push_batch([b"a", b"b"])
        deque.close()
        deque.close()
        with pytest.raises(ValueError, match="this handle is closed"):
            call(deque)
        with SharedDeque.open_as_thief(path) as other:
            assert other.steal_many(9) == [b"a", b"b"]

    @pytest.mark.parametrize("name", OWNER_CALLS | THIEF_CALLS)
    def test_a_readonly_handle_refuses_to_change_anything(self, path, deque, name):
        deque.push_batch([b"a", b"bc"])
        before = path.read_bytes()
        with SharedDeque.open(path, readonly=True) as looker:
            with pytest.raises(TransportError, match="opened read-only"):
                CALLS[name](looker)
            assert len(looker) == 2
            assert looker.cells()["length"].tolist() == [1, 2, 0, 0]
        assert path.read_bytes() == before

    def test_a_handle_says_what_it_is(self, path, deque):
        assert isinstance(deque, Mapped)
        assert repr(deque) == f"<SharedDeque {str(path)!r} open>"

    def test_a_subclass_is_made_by_its_own_calls(self, path):
        class Deque(SharedDeque):
            pass

        with Deque.create(path, 4) as made, Deque.open(path) as opened, Deque.open_as_thief(path) as thief:
            assert {type(made), type(opened), type(thief)} == {Deque}
            made.push(b"x")
            assert thief.steal() == b"x"

    def test_a_number_is_taken_at_the_first_use_and_given_up_at_the_end(self, path):
        SharedDeque.create(path, 4).close()
        raw = DequeFile(path)
        for name, call in (OWNER_CALLS | THIEF_CALLS).items():
            if "waiting" in name or name == "claim":
                continue
            with SharedDeque.open(path) as deque:
                assert raw.used_slots == []
                with contextlib.suppress(Empty):
                    call(deque)
                assert raw.used_slots == [0], name
                deque.steal_many(9)
            assert raw.used_slots == []
            assert raw.get("owner") == 0

    def test_without_a_free_number_nothing_is_pushed_and_the_deque_is_not_owned(self, path, deque):
        deque.close()
        raw = DequeFile(path)
        with SharedDeque.open(path) as second:
            raw.records["status"] = SlotState.USED
            with raw.all_slots_held():
                for call in (lambda: second.push(b"x"), second.pop, second.steal):
                    with pytest.raises(TableFull):
                        call()
            assert raw.get("owner") == 0
            # all of them are dead now
            second.push(b"x")
            assert second.pop() == b"x"

    def test_full_and_empty_are_what_users_of_queue_catch(self, deque):
        with pytest.raises(queue.Empty):
            deque.steal()
        deque.push_batch([b"x"] * 4)
        with pytest.raises(queue.Full):
            deque.push(b"x")

"""Claims of a ring used alone: a message in the hands of one process, and every way in which that ends."""

import contextlib
import gc
import threading

import numpy as np
import pytest

from subetha._core import Claim, RingClaim, SharedRing
from subetha.errors import Empty, TransportError, UnsupportedTransportFamily
from subetha.layout import CellState, cell_word

from .ring_file import RingFile

ENDS = {"ack": lambda claim: claim.ack(), "release": lambda claim: claim.release()}
CALLS = {
    **ENDS,
    "started": lambda claim: claim.started(),
    "tobytes": lambda claim: claim.tobytes(),
    "payload": lambda claim: claim.payload,
}


@pytest.fixture
def raw(path, ring):
    return RingFile(path)


@pytest.fixture
def claim(ring):
    """A claim on b"message", cell 0."""
    ring.try_push(b"message")
    made = ring.try_claim()
    yield made
    with contextlib.suppress(ValueError, TransportError, BufferError):
        made.release()


class TestHolding:
    def test_a_claimed_message_is_this_handles_alone(self, path, ring, raw, claim):
        assert isinstance(claim, Claim)
        assert raw.state_of(0) == CellState.TAKEN
        assert raw.owner_of(0) == raw.used_slots[0] + 1
        with SharedRing.open(path) as other:
            for take in (other.try_pop, other.try_claim, ring.try_pop, lambda: ring.pop(timeout=0)):
                with pytest.raises(Empty):
                    take()

    def test_the_payload_is_a_readonly_view_of_the_message_where_it_lies(self, raw, claim):
        payload = claim.payload
        assert isinstance(payload, memoryview)
        assert (payload.readonly, payload.format, payload.shape, payload.contiguous) == (True, "B", (7,), True)
        assert payload == b"message"
        assert claim.payload is payload
        with pytest.raises(TypeError, match="cannot modify read-only memory"):
            payload[0] = 0
        raw.payloads[0, 0] = ord("M")
        assert payload == b"Message"

    def test_a_copy_of_the_payload_outlives_the_claim(self, claim):
        copy = claim.tobytes()
        claim.ack()
        assert copy == b"message"

    @pytest.mark.parametrize("length", [0, 1, 55, 56])
    def test_a_claim_shows_the_exact_length(self, ring, length):
        ring.try_push(b"x" * 56)
        ring.try_pop()
        ring.try_push(b"y" * length)
        claim = ring.claim(timeout=0)
        assert claim.tobytes() == bytes(claim.payload) == b"y" * length
        claim.ack()

    def test_starting_counts_nothing_in_a_ring(self, ring, raw, claim):
        before = raw.contents.tobytes()
        claim.started()
        claim.started()
        assert raw.contents.tobytes() == before
        claim.release()
        assert ring.try_pop() == b"message"

    def test_a_claim_says_what_it_is(self, claim):
        assert repr(claim) == "<RingClaim of 7 bytes in cell 0, held>"
        claim.ack()
        assert repr(claim) == "<RingClaim of 7 bytes in cell 0, over>"

    def test_a_claim_is_no_context_manager(self, claim):
        # whether leaving a block means ack or release, only the caller can say
        assert not hasattr(claim, "__enter__")
        assert not hasattr(claim, "__exit__")

    def test_every_public_call_is_among_those_tested(self):
        assert {name for name in dir(RingClaim) if not name.startswith("_")} == {*CALLS, "reply"}

    def test_a_claim_keeps_its_handle(self, ring, path):
        ring.try_push(b"x")
        handle = SharedRing.open(path)
        claim = handle.try_claim()
        del handle
        gc.collect()
        assert claim.payload == b"x"
        claim.ack()
        assert RingFile(path).state_of(0) == CellState.FREE

    def test_a_claim_made_directly_is_refused_or_holds_nothing(self, run_script):
        out = run_script(
            """
            from subetha._core import Claim, RingClaim

            for kind in (Claim, RingClaim):
                try:
                    claim = kind()
                except TypeError as error:
                    say(error)
                    continue
                for use in (claim.tobytes, claim.started, claim.ack, claim.release, lambda: claim.payload):
                    try:
                        use()
                    except (TypeError, ValueError, NotImplementedError, SubethaError):
                        continue
                del claim, use
            say("alive")
            """
        )
        assert out.endswith("alive\n")


class TestEnding:
    def test_acknowledging_frees_the_cell_with_the_next_version(self, ring, raw, claim):
        claim.ack()
        assert int(raw.words[0]) == cell_word(1, CellState.FREE, 0)
        with pytest.raises(Empty):
            ring.try_pop()

    def test_a_released_message_waits_again_behind_the_others_with_the_next_version(self, ring, raw, claim):
        ring.push_many([b"second", b"third"])
        claim.release()
        assert int(raw.words[0]) == cell_word(1, CellState.RETRY, raw.used_slots[0] + 1)
        assert len(ring) == 3
        assert ring.pop_many(9) == [b"second", b"third", b"message"]

    def test_a_message_can_be_released_and_claimed_without_end(self, ring):
        ring.try_push(b"again")
        for _ in range(1000):
            ring.claim(timeout=0).release()
        assert len(ring) == 1
        assert ring.pop_many(9) == [b"again"]

    def test_claims_may_end_in_any_order(self, ring):
        ring.push_many([b"a", b"b", b"c", b"d"])
        claims = [ring.try_claim() for _ in range(4)]
        for i in (2, 0):
            claims[i].ack()
        for i in (3, 1):
            claims[i].release()
        assert ring.pop_many(9) == [b"d", b"b"]
        assert ring.push_many([b"x"] * 5) == 4

    def test_a_claim_may_be_ended_by_another_thread(self, claim, raw, in_threads):
        in_threads(claim.ack)
        assert raw.state_of(0) == CellState.FREE

    def test_one_of_many_threads_ends_a_claim(self, ring, claim, in_threads):
        start = threading.Barrier(8)

        def end(way):
            start.wait(30)
            try:
                way(claim)
            except ValueError:
                return False
            return True

        ended = in_threads(*(lambda way=way: end(way) for way in [*ENDS.values()] * 4))
        assert ended.count(True) == 1
        assert ring.pop_many(9) in ([], [b"message"])

    @pytest.mark.parametrize("end", ENDS.values(), ids=ENDS)
    @pytest.mark.parametrize("call", CALLS.values(), ids=CALLS)
    def test_a_claim_that_is_over_refuses_every_call(self, ring, claim, end, call):
        end(claim)
        waiting = len(ring)
        with pytest.raises(ValueError, match="this claim is over"):
            call(claim)
        assert len(ring) == waiting

    @pytest.mark.parametrize("end", ENDS.values(), ids=ENDS)
    def test_the_view_dies_with_the_claim(self, claim, end):
        payload = claim.payload
        end(claim)
        with pytest.raises(ValueError, match="released memoryview"):
            payload[0]

    @pytest.mark.parametrize("end", ENDS.values(), ids=ENDS)
    @pytest.mark.parametrize(
        "view",
        [lambda claim: np.frombuffer(claim.payload, np.uint8), lambda claim: claim.payload[2:]],
        ids=["numpy", "slice"],
    )
    def test_a_view_in_use_keeps_the_claim_from_ending(self, ring, raw, claim, end, view):
        in_use = view(claim)
        for _ in range(2):
            with pytest.raises(BufferError):
                end(claim)
        assert raw.state_of(0) == CellState.TAKEN
        assert claim.tobytes() == b"message"
        assert bytes(in_use) in b"message"
        del in_use
        end(claim)
        assert raw.state_of(0) != CellState.TAKEN

    def test_an_end_refused_for_a_view_says_what_to_do_and_leaves_the_claim_whole(self, ring, claim):
        view = claim.payload[2:]
        with pytest.raises(
            BufferError, match="views of this claim's payload are still in use; release them before ending it"
        ):
            claim.ack()
        assert claim.payload == b"message"
        claim.started()
        view.release()
        claim.release()
        assert ring.try_pop() == b"message"

    def test_a_ring_has_no_side_for_replies_and_the_claim_goes_on(self, path, ring, claim):
        with pytest.raises(UnsupportedTransportFamily, match="push the reply into another ring, then ack") as caught:
            claim.reply(b"result")
        assert str(path) in str(caught.value)
        claim.release()
        assert ring.try_pop() == b"message"

    def test_acknowledging_a_message_that_was_taken_away_says_so(self, path, raw, claim):
        # what a rescuer does with the claims of one that it holds for dead
        raw.words[0] = cell_word(1, CellState.RETRY, 9)
        with pytest.raises(TransportError, match=r"taken away .* drop the result") as caught:
            claim.ack()
        assert str(path) in str(caught.value)
        assert int(raw.words[0]) == cell_word(1, CellState.RETRY, 9)
        with pytest.raises(ValueError, match="over"):
            claim.ack()

    @pytest.mark.parametrize("state", [CellState.RETRY, CellState.TAKEN])
    def test_releasing_a_message_that_was_taken_away_leaves_it_to_its_new_owner(self, raw, claim, state):
        theirs = cell_word(1, state, 9)
        raw.words[0] = theirs
        with pytest.raises(TransportError, match="taken away"):
            claim.release()
        assert int(raw.words[0]) == theirs
        with pytest.raises(ValueError, match="over"):
            claim.release()

    @pytest.mark.parametrize("end", ENDS.values(), ids=ENDS)
    def test_ending_a_claim_wakes_who_waits_for_it(self, ring, raw, claim, end, in_threads, eventually):
        releases = end is ENDS["release"]
        word = raw.lines["items" if releases else "space"]
        if not releases:
            ring.push_many([b"x"] * 3)

        def end_it():
            eventually(lambda: word[0] & 1, "somebody sleeps")
            end(claim)

        result, _ = in_threads(lambda: ring.pop(30) if releases else ring.push(b"in", 30), end_it)
        assert result == (b"message" if releases else None)


class TestDropping:
    @pytest.mark.parametrize("looked_at", [False, True], ids=["unread", "read"])
    def test_a_dropped_claim_puts_its_message_back(self, ring, looked_at):
        # more than once: the interpreter may make a later claim out of the memory of an earlier one
        for _ in range(3):
            ring.try_push(b"message")
            claim = ring.try_claim()
            if looked_at:
                assert claim.payload == b"message"
            del claim
            gc.collect()
            assert ring.pop_many(9) == [b"message"]

    def test_claims_dropped_together_with_their_handle_put_their_messages_back(self, run_script, path):
        out = run_script(
            """
            with SharedRing.create(sys.argv[1], 4) as ring:
                for i in range(100):
                    ring.try_push(b"message")
                    handle = SharedRing.open(sys.argv[1])
                    claim = handle.try_claim()
                    if i % 2:
                        assert claim.payload == b"message"
                    if i % 4 < 2:
                        del handle, claim
                    else:
                        del claim, handle
                    gc.collect()
                    assert ring.pop_many(9) == [b"message"], i
                    assert RingFile(sys.argv[1]).used_slots == [0], i
            say("done")
            """,
            path,
        )
        assert out == "done\n"

    def test_a_claim_dropped_after_its_end_does_nothing(self, ring):
        ring.push_many([b"a", b"b"])
        ring.try_claim().ack()
        ring.try_claim().release()
        gc.collect()
        assert ring.pop_many(9) == [b"b"]

    def test_a_dropped_claim_that_was_taken_away_is_left_alone(self, ring, raw, recwarn):
        ring.try_push(b"message")
        claim = ring.try_claim()
        theirs = cell_word(1, CellState.TAKEN, 9)
        raw.words[0] = theirs
        del claim
        gc.collect()
        assert int(raw.words[0]) == theirs
        assert len(recwarn) == 0


class TestClosing:
    @pytest.fixture
    def other(self, path, ring):
        with SharedRing.open(path) as handle:
            yield handle

    def test_closing_puts_claims_back_uncharged(self, ring, raw, other):
        ring.push_many([b"a", b"b", b"c"])
        claims = [ring.try_claim(), ring.try_claim()]
        claims[0].started()
        ring.close()
        assert len(other) == 3
        assert raw.used_slots == []
        assert other.pop_many(9) == [b"c", b"a", b"b"]

    def test_closing_leaves_the_claims_of_other_handles_alone(self, ring, raw, other):
        ring.push_many([b"a", b"b"])
        mine, theirs = ring.try_claim(), other.try_claim()
        ring.close()
        assert raw.states[:2] == [CellState.RETRY, CellState.TAKEN]
        theirs.ack()
        assert other.pop_many(9) == [b"a"]
        del mine

    @pytest.mark.parametrize("call", CALLS.values(), ids=CALLS)
    def test_a_claim_of_a_closed_handle_refuses_every_call(self, ring, other, claim, call):
        ring.close()
        with pytest.raises(ValueError, match=r"closed|over"):
            call(claim)
        assert other.pop_many(9) == [b"message"]

    def test_a_view_may_be_read_after_close_and_the_message_is_back_once(self, run_script, path):
        out = run_script(
            """
            views = [
                lambda claim: claim.payload,
                lambda claim: claim.payload[:],
                lambda claim: np.frombuffer(claim.payload, np.uint8),
            ]
            with SharedRing.create(sys.argv[1], 4) as other:
                raw = RingFile(sys.argv[1])
                for i in range(90):
                    other.try_push(b"message")
                    ring = SharedRing.open(sys.argv[1])
                    claim = ring.try_claim()
                    view = views[i % 3](claim)
                    ring.close()
                    assert bytes(view) == b"message", i
                    for call in (claim.ack, claim.release):
                        try:
                            call()
                        except (ValueError, BufferError):
                            continue
                        raise AssertionError("ended after close")
                    if i % 2:
                        del ring, claim, view, call
                        gc.collect()
                    assert other.pop_many(9) == [b"message"], i
                    assert raw.used_slots == [0], i
                    if i % 2 == 0:
                        # what it shows now is somebody else's, but it is there
                        len(bytes(view))
                        del view, call, claim, ring
                        gc.collect()
                    assert raw.states == [CellState.FREE] * 4
            say("done")
            """,
            path,
        )
        assert out == "done\n"

    def test_a_claim_dropped_after_close_puts_nothing_back_twice(self, ring, other, claim):
        ring.close()
        del claim
        gc.collect()
        assert other.pop_many(9) == [b"message"]

    def test_releasing_into_a_ring_whose_places_are_damaged_repairs_it(self, ring, raw, other):
        ring.push_many([b"a", b"b", b"c"])
        claim = ring.try_claim()
        raw.places[:] = np.arange(8, dtype=np.uint64) << np.uint64(50)
        claim.release()
        assert sorted(other.pop_many(9)) == [b"a", b"b", b"c"]


class TestForking:
    @pytest.mark.parametrize("looked_at", [False, True], ids=["unread", "read"])
    def test_a_forked_child_cannot_end_its_parents_claim(self, run_script, path, looked_at):
        out = run_script(
            f"""
            ring = SharedRing.create(sys.argv[1], 4)
            ring.push_many([b"mine", b"next"])
            claim = ring.try_claim()
            {"view = claim.payload[:]" if looked_at else "view = None"}
            raw = RingFile(sys.argv[1])
            before = int(raw.words[0])
            pid = os.fork()
            if pid == 0:
                for call in (claim.ack, claim.release, claim.started, claim.tobytes, lambda: claim.payload):
                    try:
                        call()
                        say("no error")
                    except ValueError as error:
                        say(error)
                say(ring.try_pop())
                del claim, view, call
                gc.collect()
                ring.close()
                assert raw.used_slots == [0], raw.used_slots
                os._exit(0)
            say(os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]))
            say(int(raw.words[0]) == before)
            say(claim.tobytes(), raw.used_slots)
            del view
            claim.ack()
            say(len(ring), ring.push_many([b"x"] * 9))
            """,
            path,
        ).splitlines()
        assert out[:5] == ["this claim belongs to the process that forked this one; only that one can end it"] * 5
        assert out[5:] == ["b'next'", "0", "True", "b'mine' [0]", "0 4"]

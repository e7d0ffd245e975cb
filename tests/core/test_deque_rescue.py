"""What dead owners and thieves leave in a deque: real kills, and frozen states written by hand; rescue, and the next owner."""

import contextlib
import fcntl
import os
import signal
import struct
import threading

import pytest

from subetha._core import SharedDeque
from subetha.errors import Empty, Full, NotOwner
from subetha.layout import CellState, SlotState, cell_word

from .ring_file import DequeFile, asleep_on

WAIT_S = 60
FREE, WRITING, READY, TAKEN, RETRY = (CellState[name] for name in ("FREE", "WRITING", "READY", "TAKEN", "RETRY"))

PARTICIPANT = """
deque = (SharedDeque.open_as_thief if sys.argv[2] == "thief" else SharedDeque.open)(sys.argv[1])
claims = []
while True:
    match heard().split():
        case ["own"]:
            deque.own()
        case ["join"]:
            deque.steal_many(0)
        case ["push", *words]:
            deque.push_batch([word.encode() for word in words])
        case ["claim", count]:
            claims += [deque.try_claim() for _ in range(int(count))]
        case ["ack"]:
            claims.pop(0).ack()
        case ["release"]:
            claims.pop(0).release()
        case ["fork"]:
            if os.fork() == 0:
                say("child", os.getpid())
                heard()
                deque.push(b"child's")
                say("pushed")
                signal.pause()
            continue
    say("done")
"""


class Participant:
    """A process that uses the deque as it is told to."""

    def __init__(self, script):
        self.script = script
        self.pid, self.kill, self.heard, self.tell = script.pid, script.kill, script.heard, script.tell

    def do(self, *words):
        self.tell(" ".join(map(str, words)))
        self.heard("done")


@pytest.fixture
def start(script, path):
    def start(role):
        made = Participant(script(PARTICIPANT, path, role))
        made.do("own" if role == "owner" else "join")
        return made

    return start


@pytest.fixture
def thief(path):
    SharedDeque.create(path, 4).close()
    with SharedDeque.open_as_thief(path) as handle:
        handle.steal_many(0)
        yield handle


@pytest.fixture
def raw(path, thief):
    return DequeFile(path)


def steal_all(deque):
    return [message.decode() for message in deque.steal_many(1000)]


@contextlib.contextmanager
def lock_held(path, byte):
    """Hold the lock that proves the life of a participant."""
    with open(path, "r+b") as file:
        fcntl.fcntl(file, fcntl.F_OFD_SETLK, struct.pack("hhqqi4x", fcntl.F_WRLCK, os.SEEK_SET, byte, 1, 0))
        yield


def records_in_use(raw):
    return [slot for slot, status in enumerate(raw.records["status"]) if int(status) & 0xFF != SlotState.FREE]


def is_whole(path, raw, participants):
    """Nothing waits, and whoever comes next finds the whole capacity at both ends."""
    assert raw.states == [FREE] * 4
    assert len(records_in_use(raw)) == participants
    with SharedDeque.open(path) as owner, SharedDeque.open_as_thief(path) as thief:
        for turn in range(5):
            owner.push_batch([b"0", b"1", b"2", b"3"])
            with pytest.raises(Full):
                owner.push(b"one too many")
            assert [owner.pop(), thief.steal(), owner.pop(), thief.steal()] == [b"3", b"0", b"2", b"1"]
            for take in (owner.pop, thief.steal):
                with pytest.raises(Empty):
                    take()
            if turn % 2:
                owner.push(b"odd")
                assert owner.pop() == b"odd"
        assert owner.repair() == 0


# --- killed owners --------------------------------------------------------------------------------------------------


def test_what_a_dead_owner_had_pushed_is_stolen_in_its_order(path, thief, raw, start):
    owner = start("owner")
    owner.do("push", "a", "b", "c")
    owner.kill()
    assert thief.rescue() == 1
    assert steal_all(thief) == ["a", "b", "c"]
    is_whole(path, raw, 1)


def test_what_a_dead_owner_had_claimed_waits_again_before_the_others(path, thief, raw, start):
    owner = start("owner")
    owner.do("push", "a", "b", "c")
    owner.do("claim", 2)
    owner.kill()
    assert thief.rescue() == 1
    assert raw.states == [RETRY, RETRY, READY, FREE]
    assert steal_all(thief) == ["a", "b", "c"]
    is_whole(path, raw, 1)


def test_a_thief_hears_that_the_owner_is_dead(thief, raw, start):
    owner = start("owner")
    owner.kill()
    with pytest.raises(
        NotOwner, match=rf"its owner, participant 2 \(process {owner.pid}\), is dead; open it with open\(\)"
    ):
        thief.push(b"x")
    thief.rescue()
    with pytest.raises(NotOwner, match="nobody owns it at the moment"):
        thief.push(b"x")


@pytest.mark.parametrize("is_rescued", [False, True])
@pytest.mark.parametrize("call", ["own", "push", "pop", "push_batch"])
def test_the_place_of_a_dead_owner_is_taken_at_the_first_push_or_pop(path, thief, raw, start, call, is_rescued):
    second = SharedDeque.open(path)
    owner = start("owner")
    owner.do("push", "a", "b")
    with pytest.raises(NotOwner, match=rf"\(process {owner.pid}\)"):
        second.push(b"c")
    owner.kill()
    if is_rescued:
        assert thief.rescue() == 1
    match call:
        case "own":
            second.own()
            second.push(b"c")
        case "push":
            second.push(b"c")
        case "push_batch":
            second.push_batch([b"c"])
        case "pop":
            assert second.pop() == b"b"
            second.push_batch([b"b", b"c"])
    assert [second.pop(), thief.steal(), second.pop()] == [b"c", b"a", b"b"]
    second.close()
    is_whole(path, raw, 1)


def test_one_owner_after_the_other_dies_and_nothing_is_lost(path, thief, raw, start):
    for turn in range(5):
        owner = start("owner")
        owner.do("push", f"{turn}a", f"{turn}b")
        if turn % 2:
            owner.do("claim", 1)
        owner.kill()
        if turn % 2:
            assert sorted(steal_all(thief) + (thief.rescue() and steal_all(thief))) == [f"{turn}a", f"{turn}b"]
        else:
            assert steal_all(thief) == [f"{turn}a", f"{turn}b"]
    thief.rescue()
    is_whole(path, raw, 1)


def test_a_stopped_owner_is_not_dead(path, thief, raw, start):
    owner = start("owner")
    owner.do("push", "a", "b")
    os.kill(owner.pid, signal.SIGSTOP)
    os.waitid(os.P_PID, owner.pid, os.WSTOPPED)
    with SharedDeque.open(path) as second:
        with pytest.raises(NotOwner, match=rf"its owner is participant 2 \(process {owner.pid}\)"):
            second.push(b"x")
        assert second.rescue() == 0
    assert thief.steal() == b"a"
    os.kill(owner.pid, signal.SIGCONT)
    owner.do("push", "c")
    assert steal_all(thief) == ["b", "c"]


def test_a_child_takes_the_place_of_its_dead_parent(thief, raw, start):
    owner = start("owner")
    owner.do("push", "parent's")
    owner.tell("fork")
    assert owner.heard().startswith("child")
    owner.kill()
    owner.tell("go")
    owner.heard("pushed")
    assert steal_all(thief) == ["parent's", "child's"]


@pytest.mark.slow
def test_of_many_who_want_the_place_of_a_dead_owner_one_gets_it(path, thief, raw, start, in_threads):
    for _ in range(10):
        owner = start("owner")
        owner.do("push", "a")
        owner.kill()
        handles = [SharedDeque.open(path) for _ in range(6)]

        def take(handle):
            try:
                handle.push(b"b")
            except NotOwner:
                return False
            return True

        assert in_threads(*[lambda handle=handle: take(handle) for handle in handles]).count(True) == 1
        assert steal_all(thief) == ["a", "b"]
        for handle in handles:
            handle.close()
    is_whole(path, raw, 1)


# --- killed thieves -------------------------------------------------------------------------------------------------


def test_what_a_dead_thief_had_claimed_waits_again_whole_before_the_others(path, thief, raw, start):
    with SharedDeque.open(path) as owner:
        owner.push_batch([b"a", b"b", b"c", b"d"])
        victim = start("thief")
        victim.do("claim", 3)
        victim.do("ack")
        victim.do("release")
        victim.kill()
        assert owner.rescue() == 1
        assert steal_all(thief) == ["b", "c", "d"]
    is_whole(path, raw, 1)


def test_a_push_that_finds_every_cell_in_use_looks_for_the_dead(path, thief, raw, start):
    with SharedDeque.open(path) as owner:
        owner.push_batch([b"a", b"b", b"c", b"d"])
        victim = start("thief")
        victim.do("claim", 2)
        victim.kill()
        # what is rescued waits again, so there is no more room than before
        with pytest.raises(Full):
            owner.push(b"x")
        assert owner.steal_many(9) == [b"a", b"b", b"c", b"d"]


@pytest.mark.parametrize("take", ["steal", "try_claim", "pop", "steal_many"])
def test_one_that_finds_nothing_looks_for_the_dead(path, thief, raw, start, take):
    with SharedDeque.open(path) as owner:
        owner.push(b"a")
        victim = start("thief")
        victim.do("claim", 1)
        victim.kill()
        got = {"steal_many": lambda: owner.steal_many(1)[0]}.get(take, getattr(owner, take))()
        assert (got if take != "try_claim" else got.tobytes()) == b"a"


def test_a_blocked_thief_gets_what_one_that_dies_had_claimed(path, thief, raw, start, in_threads, eventually):
    with SharedDeque.open(path) as owner:
        owner.push(b"a")
        victim = start("thief")
        victim.do("claim", 1)

        def die():
            eventually(lambda: asleep_on(raw.lines["items"]) == 1, "it sleeps")
            victim.kill()

        assert in_threads(lambda: thief.steal(timeout=WAIT_S), die)[0] == b"a"


def test_open_rescues(path, thief, raw, start):
    owner = start("owner")
    owner.do("push", "a", "b")
    owner.do("claim", 2)
    owner.kill()
    with SharedDeque.open_as_thief(path) as opened:
        assert raw.states[:2] == [RETRY, RETRY]
        assert steal_all(opened) == ["a", "b"]


# --- frozen states: what deaths between two instructions leave, written by hand ------------------------------------


@pytest.fixture
def dead(raw):
    """The owner's number, 900, which nobody holds any more."""
    raw.records["status"][899] = 7 << 8 | SlotState.USED
    raw.put(owner=7 << 16 | 900)
    raw.set_position(5)
    return 900


def reference(raw, position, cell):
    raw.slots[position % raw.size] = raw.full_place(position >> raw.size_bits, raw.version_of(cell), cell)


def show(raw, *messages, owner=900):
    """Push by hand."""
    for message in messages:
        cell = raw.states.index(FREE)
        raw.write_message(cell, message, owner=owner)
        reference(raw, raw.get("bottom"), cell)
        raw.put(bottom=raw.get("bottom") + 1)
    return cell


@pytest.mark.parametrize("stage", range(5))
def test_a_batch_cut_at_any_step_is_not_there(path, thief, raw, dead, stage):
    show(raw, b"before")
    bottom = raw.get("bottom")
    raw.write_message(1, b"first", state=READY if stage >= 2 else WRITING, owner=dead)
    raw.write_message(2, b"second", state=READY if stage >= 3 else WRITING, owner=dead)
    if stage >= 1:
        raw.put(pushes=1)
    if stage >= 4:
        reference(raw, bottom, 1)
        reference(raw, bottom + 1, 2)
    # neither a repair nor a thief that looks for what damage has hidden shows a part of it
    assert thief.repair() == 0
    assert len(thief) == 1
    assert thief.rescue() == 1
    assert raw.states == [READY, FREE, FREE, FREE]
    with SharedDeque.open(path) as owner:
        owner.push(b"after")
        assert raw.get("pushes") % 2 == 0
        assert [owner.pop(), owner.pop()] == [b"after", b"before"]
    is_whole(path, raw, 1)


def test_the_next_owner_ends_a_push_that_was_cut(path, thief, raw, dead):
    # else a repair would go on leaving alone what waits
    raw.put(pushes=7)
    with SharedDeque.open(path) as owner:
        owner.own()
        assert raw.get("pushes") == 8
        show(raw, b"hidden", owner=1)
        raw.put(top=raw.get("bottom"))
        assert thief.repair() == 1
    assert steal_all(thief) == ["hidden"]
    is_whole(path, raw, 1)


def test_a_batch_shown_before_its_owner_died_is_there(path, thief, raw, dead):
    show(raw, b"a", b"b")
    raw.put(pushes=1)
    assert thief.rescue() == 1
    assert steal_all(thief) == ["a", "b"]
    is_whole(path, raw, 1)


@pytest.mark.parametrize("waiting", [1, 2])
@pytest.mark.parametrize("stage", ["cell", "bottom", "top", "all"])
def test_a_pop_cut_at_any_step_leaves_its_message_and_the_deque(path, thief, raw, dead, waiting, stage):
    cell = show(raw, *[b"older", b"newest"][-waiting:])
    raw.words[cell] = cell_word(0, TAKEN, dead)
    bottom = raw.get("bottom")
    if stage in ("bottom", "top"):
        raw.put(bottom=bottom - 1)
    if stage in ("top", "all") and waiting == 1:
        raw.put(top=bottom)
    if stage == "all":
        raw.put(bottom=bottom if waiting == 1 else bottom - 1)
    with SharedDeque.open(path) as owner:
        owner.push(b"after")
        # the put-back first, then from each end
        assert thief.steal() == b"newest"
        assert owner.pop() == b"after"
        assert steal_all(thief) == ["older"][: waiting - 1]
    is_whole(path, raw, 1)


@pytest.mark.parametrize("behind", [1, 2, 3])
def test_take_overs_that_died_before_they_settled_the_ends_hide_nothing(path, thief, raw, dead, behind):
    raw.put(top=5 + behind)
    with SharedDeque.open(path) as owner:
        owner.push(b"a")
        assert thief.steal() == b"a"
    is_whole(path, raw, 1)


def test_a_late_thief_that_moves_the_top_passes_over_no_message_of_the_next_owner(path, thief, raw, dead):
    # the owner popped its last message and died; a thief had read top before, and moves it when the next one has pushed
    top = raw.get("top")
    with SharedDeque.open(path) as owner:
        owner.push(b"a")
        if raw.get("top") == top:
            raw.put(top=top + 1)
        assert thief.steal() == b"a"
    is_whole(path, raw, 1)


def test_a_late_thief_passes_over_no_message_pushed_after_the_last_one_was_popped(path, thief, raw):
    with SharedDeque.open(path) as owner:
        owner.push(b"popped")
        top = raw.get("top")
        assert owner.pop() == b"popped"
        owner.push(b"next")
        if raw.get("top") == top:
            raw.put(top=top + 1)
        assert thief.steal() == b"next"
    is_whole(path, raw, 1)


@pytest.mark.parametrize("count", [1, 2, 3])
def test_places_of_dead_thieves_at_the_top_are_stepped_over_by_thieves_and_owners(path, thief, raw, dead, count):
    show(raw, b"a", b"b", b"c", b"d")
    for cell in range(count):
        raw.words[cell] = cell_word(0, TAKEN, 901)
    raw.records["status"][900] = 3 << 8 | SlotState.USED
    assert thief.steal() == b"abcd"[count : count + 1]
    with SharedDeque.open(path) as owner:
        left = sorted(owner.steal_many(9))
        assert left == [b"%c" % n for n in b"abcd" if n != b"abcd"[count]]
    is_whole(path, raw, 1)


def test_a_rescuer_that_died_before_it_published_leaves_that_to_the_next(path, thief, raw, dead):
    raw.write_message(2, b"put back", state=RETRY, owner=dead)
    assert thief.rescue() == 1
    assert steal_all(thief) == ["put back"]
    is_whole(path, raw, 1)


def test_a_dead_owner_whose_number_somebody_else_has_got_is_not_there(path, thief, raw, dead):
    raw.records["status"][899] = 8 << 8 | SlotState.USED
    with lock_held(path, len(raw.contents) + 899), SharedDeque.open(path) as owner:
        owner.push(b"x")
        assert raw.get("owner") & 0xFFFF != 900
        assert owner.pop() == b"x"
        with pytest.raises(NotOwner, match=r"its owner is participant 2 "):
            thief.push(b"x")


@pytest.mark.slow
def test_threads_rescue_and_take_over_at_once(path, thief, raw, start, in_threads):
    for turn in range(10):
        owner = start("owner")
        owner.do("push", "a", "b")
        owner.do("claim", 1)
        owner.kill()
        with SharedDeque.open(path) as shared:
            begun = threading.Barrier(2)

            def push(n, shared=shared, begun=begun):
                begun.wait(WAIT_S)
                shared.push(b"%d" % n, timeout=WAIT_S)

            in_threads(lambda push=push: push(0), lambda push=push: push(1), thief.rescue)
            assert sorted(shared.steal_many(9)) == [b"0", b"1", b"a", b"b"], turn
    is_whole(path, raw, 1)

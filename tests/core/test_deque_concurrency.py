"""SharedDeque under many hands: every message exactly once, whoever takes it, and nothing that stops or dies stands in the way."""

import collections
import contextlib
import json
import os
import signal
import threading

import pytest

from subetha._core import SharedDeque
from subetha.errors import Empty, Full, NotOwner
from subetha.layout import CellState, cell_word

from .ring_file import DequeFile, asleep_on
from .traffic import PATIENCE_S, check_each_once, check_order, message, origin_of

WAIT_S = 30

THIEF = """
thief = SharedDeque.open_as_thief(sys.argv[1])
say("ready")
got, turn, over = [], 0, False
while not over:
    turn += 1
    # looked at before the call: what it says then is the last word
    done = os.path.exists(sys.argv[2])
    try:
        if turn % 4 == 0:
            taken = thief.steal_many(5)
        elif turn % 4 == 1:
            claim = thief.try_claim()
            if turn % 8 == 1:
                claim.release()
                continue
            taken = [claim.tobytes()]
            claim.ack()
        elif turn % 4 == 2:
            taken = [thief.steal()]
        else:
            taken = [thief.steal(timeout=0.05)]
    except Empty:
        over, taken = done, []
    got += [origin_of(payload) for payload in taken]
say(*(f"{producer}.{sequence}" for producer, sequence in got))
"""


def push_and_pop(owner, producer, count, *, pops=True):
    """Push `count` messages by every call in turn, and pop some on the way; the origins of those."""
    popped = []
    sequence = turn = 0
    while sequence < count:
        turn += 1
        if turn % 3 == 0:
            batch = [message(producer, n) for n in range(sequence, min(sequence + 4, count))]
            try:
                sequence += owner.push_batch(batch)
                continue
            except Full:
                pass
        if pops and turn % 5 == 0:
            with contextlib.suppress(Empty):
                popped.append(origin_of(owner.pop()))
        owner.push(message(producer, sequence), timeout=PATIENCE_S)
        sequence += 1
    return popped


def origins_said(line):
    return [tuple(map(int, word.split("."))) for word in line.split()]


@pytest.mark.parametrize("capacity", [2, 4, 64])
def test_one_owner_and_one_thief_keep_the_order(path, capacity, in_threads):
    with SharedDeque.create(path, capacity) as owner, SharedDeque.open_as_thief(path) as thief:

        def steal():
            origins = []
            while len(origins) < 3000:
                origins += map(origin_of, [thief.steal(timeout=PATIENCE_S), *thief.steal_many(3)])
            return origins

        _, origins = in_threads(lambda: push_and_pop(owner, 0, 3000, pops=False), steal)
    check_each_once(origins, 1, 3000)
    check_order(origins)


@pytest.mark.parametrize("shared", [False, True], ids=["a handle each", "one handle"])
def test_threads_of_the_owner_and_thieves_take_each_message_once(path, in_threads, shared):
    owners, thieves, count = 3, 3, 1500
    at_work = list(range(owners))
    with SharedDeque.create(path, 16) as owner:
        handles = [owner if shared else SharedDeque.open_as_thief(path) for _ in range(thieves)]

        def own(producer):
            popped = push_and_pop(owner, producer, count)
            at_work.remove(producer)
            return popped

        def steal(handle):
            origins, over = [], False
            while not over:
                done = not at_work
                try:
                    claim = handle.claim(timeout=0.02)
                    if len(origins) % 7 == 3 and not claim.payload[0] % 2:
                        claim.release()
                        claim = handle.claim(timeout=0.02)
                    origins.append(origin_of(claim.tobytes()))
                    claim.ack()
                    origins += map(origin_of, handle.steal_many(2))
                except Empty:
                    over = done
            return origins

        got = in_threads(
            *[lambda producer=producer: own(producer) for producer in range(owners)],
            *[lambda handle=handle: steal(handle) for handle in handles],
        )
        check_each_once([origin for origins in got for origin in origins], owners, count)
        assert set(DequeFile(path).states) == {CellState.FREE}
        for handle in handles:
            handle.close()


@pytest.mark.parametrize("capacity", [2, 8, 256])
def test_an_owner_and_thieves_in_processes_take_each_message_once(shm, path, script, capacity):
    count = 8000
    with SharedDeque.create(path, capacity) as owner:
        thieves = [script(THIEF, path, shm / "done") for _ in range(3)]
        for thief in thieves:
            thief.heard("ready")
        origins = push_and_pop(owner, 0, count)
        while True:
            try:
                origins.append(origin_of(owner.pop()))
            except Empty:
                break
        (shm / "done").touch()
        stolen = [origins_said(thief.heard()) for thief in thieves]
        for thief in thieves:
            thief.end()
        check_each_once([*origins, *(origin for mine in stolen for origin in mine)], 1, count)
        raw = DequeFile(path)
        assert set(raw.states) == {CellState.FREE}
        assert (len(owner), owner.repair()) == (0, 0)


@pytest.mark.parametrize("back", [False, True], ids=["", "with put-backs"])
def test_no_thief_hears_that_it_is_empty_because_others_were_faster(path, script, back):
    # of all that each may take one is always left for it, also while each of the others has one more in hand
    thieves, each, rounds = 3, 40, 12
    text = """
        thief, back = SharedDeque.open_as_thief(sys.argv[1]), sys.argv[2] == "back"
        thief.steal_many(0)
        say("ready")
        while heard() == "go":
            for n in range(40):
                if back:
                    thief.try_claim().release()
                thief.steal()
            say("done")
        """
    with SharedDeque.create(path, 256) as owner:
        scripts = [script(text, path, "back" if back else "") for _ in range(thieves)]
        for one in scripts:
            one.heard("ready")
        for _ in range(rounds):
            owner.push_batch([b"x"] * (thieves * (each + 1)))
            for one in scripts:
                one.tell("go")
            for one in scripts:
                one.heard("done")
            assert len(owner.steal_many(1000)) == thieves


@pytest.mark.slow
def test_a_batch_is_seen_whole_or_not_at_all(shm, path, script):
    text = """
        looker = SharedDeque.open(sys.argv[1], readonly=True)
        say("ready")
        seen = set()
        while not os.path.exists(sys.argv[2]):
            seen.update(len(looker) for _ in range(1000))
        say(sorted(seen))
        """
    with SharedDeque.create(path, 8) as owner:
        looker = script(text, path, shm / "done")
        looker.heard("ready")
        raw = DequeFile(path)
        for _ in range(20_000):
            owner.push_batch([b"a", b"b", b"c"])
            owner.push_batch([b"d", b"e", b"f", b"g"])
            # all gone at once as well, which no call does: the looker must see no number between
            for cell in range(8):
                if raw.states[cell] == CellState.READY:
                    raw.words[cell] = cell_word(raw.version_of(cell) + 1, CellState.FREE, 0)
            raw.put(top=raw.get("bottom"))
        (shm / "done").touch()
        assert set(json.loads(looker.heard())) <= {0, 3, 7}
        looker.end()


@pytest.mark.slow
def test_owners_killed_one_after_the_other_leave_what_they_had_pushed(shm, path, script):
    SharedDeque.create(path, 64).close()
    text = """
        owner = SharedDeque.open(sys.argv[1])
        producer = int(sys.argv[2])
        owner.own()
        say("ready")
        sequence = 0
        while True:
            owner.push(payload_of(producer, sequence), timeout=60)
            say(sequence)
            sequence += 1
            if sequence % 4 == 3:
                owner.push_batch([payload_of(producer, sequence), payload_of(producer, sequence + 1)])
                say(sequence + 1)
                sequence += 2
        """
    thieves = [script(THIEF, path, shm / "done") for _ in range(2)]
    for thief in thieves:
        thief.heard("ready")
    accepted = {}
    for producer in range(6):
        owner = script(text, path, producer)
        owner.heard("ready")
        for _ in range(40):
            accepted[producer] = int(owner.heard())
        os.kill(owner.pid, signal.SIGKILL)
        # what it had said before it died counts as well
        rest, _ = owner.process.communicate()
        said = (owner.unread + rest).split(b"\n")[:-1]
        accepted[producer] = max([accepted[producer], *map(int, said)])
    with SharedDeque.open(path) as last:
        last.own()
        (shm / "done").touch()
        seen = collections.Counter(origin for thief in thieves for origin in origins_said(thief.heard()))
        seen.update(map(origin_of, last.steal_many(1000)))
    assert set(seen.values()) == {1}
    for producer, sequence in accepted.items():
        mine = sorted(n for who, n in seen if who == producer)
        # at most one push, or one batch of two, had not been said yet
        assert mine == list(range(len(mine)))
        assert sequence + 1 <= len(mine) <= sequence + 3


@pytest.mark.slow
def test_thieves_killed_in_the_middle_lose_nothing(shm, path, script):
    count = 3000
    text = """
        thief = SharedDeque.open_as_thief(sys.argv[1])
        say("ready")
        while True:
            claims = [thief.claim(timeout=60) for _ in range(2)]
            for claim in claims:
                claim.release()
        """
    with SharedDeque.create(path, 64) as owner:
        origins, victims = [], []
        for sequence in range(count):
            if sequence % 600 == 0:
                victims.append(script(text, path))
                victims[-1].heard("ready")
            if sequence % 600 == 500:
                victims[-1].kill()
            while True:
                try:
                    owner.push(message(0, sequence), timeout=0.0)
                    break
                except Full:
                    origins.append(origin_of(owner.steal(timeout=WAIT_S)))
            if sequence % 3 == 0:
                with contextlib.suppress(Empty):
                    origins.append(origin_of(owner.pop()))
        owner.rescue()
        origins += map(origin_of, owner.steal_many(1000))
        check_each_once(origins, 1, count)
        assert set(DequeFile(path).states) == {CellState.FREE}


def test_32_processes_open_or_create_one_deque_at_once_and_one_owns_it(path, run_script):
    out = run_script(
        """
        begin, go = os.pipe()
        children = []
        for n in range(32):
            child = os.fork()
            if child == 0:
                os.close(go)
                os.read(begin, 1)
                deque = SharedDeque.open_or_create(sys.argv[1], 64)
                try:
                    deque.push(b"%d" % n)
                    os.write(1, b"pushed\\n")
                except NotOwner:
                    os.write(1, b"not\\n")
                # the owner stays until all have tried
                sys.stdin.readline()
                deque.close()
                os._exit(0)
            children.append(child)
        os.close(go)
        for child in children:
            os.waitpid(child, 0)
        with SharedDeque.open(sys.argv[1]) as deque:
            say("left", len(deque))
        """,
        path,
    ).split()
    assert len(out) == 34
    assert out[-2] == "left"
    # stdin is at its end, so an owner may have gone before the next one tries
    assert out.count("pushed") == int(out[-1]) >= 1
    assert out.count("not") == 32 - int(out[-1])


@pytest.mark.parametrize("call", ["steal", "claim", "push"])
def test_closing_wakes_those_who_sleep_in_it(path, call, in_threads, eventually):
    deque = SharedDeque.create(path, 2)
    raw = DequeFile(path)
    if call == "push":
        deque.push_batch([b"a", b"b"])
    calls = {
        "steal": lambda: deque.steal(timeout=None),
        "claim": deque.claim,
        "push": lambda: deque.push(b"x", timeout=None),
    }

    def wait():
        with pytest.raises(ValueError, match="closed"):
            calls[call]()

    def close():
        word = "space" if call == "push" else "items"
        eventually(lambda: asleep_on(raw.lines[word]) == 1, "it sleeps")
        deque.close()

    in_threads(wait, close)
    assert raw.used_slots == []
    assert raw.get("owner") == 0


def test_threads_that_use_a_handle_first_become_the_owner_together(path, in_threads):
    SharedDeque.create(path, 64).close()
    for _ in range(20):
        with SharedDeque.open(path) as deque:
            begin = threading.Barrier(4)

            def push(n, deque=deque, begin=begin):
                begin.wait(WAIT_S)
                deque.push(b"%d" % n)

            in_threads(*[lambda n=n, push=push: push(n) for n in range(4)])
            assert len(DequeFile(path).used_slots) == 1
            assert sorted(deque.steal_many(9)) == [b"0", b"1", b"2", b"3"]


def test_ctrl_c_interrupts_a_waiting_thief(path, script, eventually):
    with SharedDeque.create(path, 4):
        raw = DequeFile(path)
        waiter = script(
            """
            thief = SharedDeque.open_as_thief(sys.argv[1])
            try:
                thief.steal(timeout=None)
            except KeyboardInterrupt:
                say("interrupted")
            """,
            path,
        )
        eventually(lambda: asleep_on(raw.lines["items"]) == 1, "it sleeps")
        os.kill(waiter.pid, signal.SIGINT)
        waiter.heard("interrupted")
        waiter.end()


def test_a_second_owner_is_refused_while_a_push_of_the_first_waits(path, in_threads, eventually):
    with SharedDeque.create(path, 2) as owner, SharedDeque.open(path) as second:
        raw = DequeFile(path)
        owner.push_batch([b"a", b"b"])

        def try_and_make_room():
            eventually(lambda: asleep_on(raw.lines["space"]) == 1, "it sleeps")
            with pytest.raises(NotOwner):
                second.push(b"x")
            return second.steal()

        assert in_threads(lambda: owner.push(b"c", timeout=WAIT_S), try_and_make_room)[1] == b"a"
        assert owner.steal_many(9) == [b"b", b"c"]

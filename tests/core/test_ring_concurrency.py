"""SharedRing with many threads and processes: each message once, nobody in the way, every wait can be ended."""

import contextlib
import os
import signal
import threading
import time

import pytest

from subetha._core import HeartbeatTable, SharedRing
from subetha.errors import Empty, Full
from subetha.layout import CellState

from . import traffic
from .ring_file import RingFile, asleep_on
from .traffic import payload_of

WAIT_S = 30
ENOUGH_S = 5


class TestEachMessageOnce:
    @pytest.mark.parametrize("capacity", [2, 64])
    def test_one_producer_and_one_consumer_keep_the_order(self, path, capacity, in_threads):
        with SharedRing.create(path, capacity) as ring, SharedRing.open(path) as other:

            def produce():
                traffic.produce(ring, 0, 3000)
                ring.push(traffic.STOP)

            origins, _ = in_threads(lambda: traffic.consume(other), produce)
            assert origins == [(0, sequence) for sequence in range(3000)]

    @pytest.mark.parametrize("shared", [True, False], ids=["one handle", "handles of their own"])
    @pytest.mark.parametrize("release", [False, True], ids=["taken", "sometimes put back"])
    def test_between_threads(self, path, in_threads, shared, release):
        producers, consumers, count = 4, 4, 800
        with SharedRing.create(path, 4) as ring:
            handles = [ring if shared else SharedRing.open(path) for _ in range(producers + consumers)]
            sending = threading.Barrier(producers)

            def produce(i):
                traffic.produce(handles[i], i, count)
                if sending.wait(WAIT_S) == 0:
                    for _ in range(consumers):
                        handles[i].push(traffic.STOP, timeout=WAIT_S)

            results = in_threads(
                *(lambda i=i: produce(i) for i in range(producers)),
                *(lambda handle=handle: traffic.consume(handle, release=release) for handle in handles[producers:]),
            )[producers:]
            if not release:
                for origins in results:
                    traffic.check_order(origins)
            left = [traffic.origin_of(payload) for payload in ring.pop_many(99) if payload != traffic.STOP]
            traffic.check_each_once([origin for origins in results for origin in origins] + left, producers, count)
            for handle in handles:
                handle.close()
            assert RingFile(path).states == [CellState.FREE] * 4

    @pytest.mark.parametrize("capacity", [2, 64])
    def test_between_processes(self, run_script, path, capacity):
        run_script(
            """
            import json
            import traffic
            path, capacity = sys.argv[1], int(sys.argv[2])
            producers, consumers, count = 2, 2, 5000
            ring = SharedRing.create(path, capacity)
            gate, opened = os.pipe()

            def forked(work):
                pid = os.fork()
                if pid:
                    return pid
                code = 1
                try:
                    os.close(opened)
                    os.read(gate, 1)
                    with SharedRing.open(path) as own:
                        work(own)
                    code = 0
                except BaseException:
                    import traceback
                    traceback.print_exc()
                finally:
                    os._exit(code)

            def consumer(i):
                def work(own):
                    origins = traffic.consume(own, release=capacity > 2)
                    if capacity == 2:
                        traffic.check_order(origins)
                    with open(f"{path}.{i}", "w") as file:
                        json.dump(origins, file)
                return work

            def check(pids):
                codes = [os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) for pid in pids]
                assert codes == [0] * len(pids), codes

            sending = [forked(lambda own, i=i: traffic.produce(own, i, count)) for i in range(producers)]
            taking = [forked(consumer(i)) for i in range(consumers)]
            os.close(opened)
            check(sending)
            for _ in range(consumers):
                ring.push(traffic.STOP, timeout=60)
            check(taking)
            origins = [origin_of(payload) for payload in ring.pop_many(99) if payload != traffic.STOP]
            for i in range(consumers):
                with open(f"{path}.{i}") as file:
                    origins += [tuple(origin) for origin in json.load(file)]
            traffic.check_each_once(origins, producers, count)
            assert RingFile(path).states == [CellState.FREE] * capacity
            """,
            path,
            capacity,
        )

    @pytest.mark.parametrize("capacity", [4, 64, 256])
    def test_batches_between_two_processes_keep_the_order(self, script, path, capacity):
        """100 at once: more than a batch, and more than a small ring holds."""
        count = 20_000
        with SharedRing.create(path, capacity) as ring:
            producer = script(
                """
                path, count = sys.argv[1], int(sys.argv[2])
                messages = [payload_of(1, i, 8 + i % 49) for i in range(count)]
                with SharedRing.open(path) as ring:
                    sent = 0
                    while sent < count:
                        went_in = ring.push_many(messages[sent : sent + 100])
                        if went_in == 0:
                            ring.push(messages[sent], timeout=60)
                            went_in = 1
                        sent += went_in
                """,
                path,
                count,
            )
            got = []
            while len(got) < count:
                got += ring.pop_many(100) or [ring.pop(timeout=traffic.PATIENCE_S)]
            producer.end()
            assert [traffic.origin_of(message) for message in got] == [(1, i) for i in range(count)]
            assert RingFile(path).states == [CellState.FREE] * capacity

    def test_eight_threads_on_one_handle_lose_nothing_and_invent_nothing(self, path, in_threads):
        with SharedRing.create(path, 16) as ring:
            start = threading.Barrier(8)

            def work(me):
                start.wait(WAIT_S)
                put, got = [], []
                for step in range(600):
                    payload = payload_of(me, step, 24)
                    try:
                        match (me + step) % 8:
                            case 0 | 1:
                                ring.try_push(payload)
                                put.append(payload)
                            case 2:
                                put += [payload, payload[::-1]][: ring.push_many([payload, payload[::-1]])]
                            case 3 | 4:
                                got.append(ring.try_pop())
                            case 5:
                                got += ring.pop_many(3)
                            case 6:
                                claim = ring.try_claim()
                                payload = bytes(claim.payload)
                                claim.ack()
                                got.append(payload)
                            case 7:
                                claim = ring.try_claim()
                                assert len(ring) <= 16
                                ring.cells()
                                claim.release()
                    except (Full, Empty):
                        continue
                return put, got

            results = in_threads(*(lambda me=me: work(me) for me in range(8)))
            put = [payload for one, _ in results for payload in one]
            got = [payload for _, one in results for payload in one] + ring.pop_many(16)
            assert len(put) > 100
            assert sorted(got) == sorted(put)
            assert len(RingFile(path).used_slots) == 1

    def test_32_processes_open_or_create_one_ring_at_once(self, run_script, path):
        out = run_script(
            """
            gate, opened = os.pipe()
            pids = []
            for i in range(32):
                pid = os.fork()
                if pid == 0:
                    os.close(opened)
                    os.read(gate, 1)
                    with SharedRing.open_or_create(sys.argv[1], 64) as ring:
                        ring.try_push(payload_of(i, 7))
                    os._exit(0)
                pids.append(pid)
            os.close(opened)
            say([os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) for pid in pids] == [0] * 32)
            with SharedRing.open(sys.argv[1]) as ring:
                say(sorted(origin_of(payload) for payload in ring.pop_many(99)) == [(i, 7) for i in range(32)])
            say(os.listdir(os.path.dirname(sys.argv[1])))
            """,
            path,
        )
        assert out.splitlines() == ["True", "True", "['file']"]

    def test_threads_that_use_a_handle_first_take_one_number_together(self, path, monkeypatch, in_threads):
        SharedRing.create(path, 4).close()
        with SharedRing.open(path) as pusher:
            pusher.push_many([b"a", b"b"])
        getpid, both = os.getpid, threading.Barrier(2)

        def getpid_together():
            # whoever takes a number asks for the pid: here both threads have found none before either has one
            with contextlib.suppress(threading.BrokenBarrierError):
                both.wait(1)
            return getpid()

        ring = SharedRing.open(path)
        monkeypatch.setattr(os, "getpid", getpid_together)
        claims = in_threads(ring.try_claim, ring.try_claim)
        monkeypatch.undo()
        raw = RingFile(path)
        assert len(raw.used_slots) == 1
        assert {raw.owner_of(0), raw.owner_of(1)} == {raw.used_slots[0] + 1}
        ring.close()
        del claims
        with SharedRing.open(path) as other:
            assert sorted(other.pop_many(9)) == [b"a", b"b"]


class TestWaking:
    def test_a_push_wakes_a_sleeping_pop_and_a_pop_a_sleeping_push(self, path, in_threads):
        # A lost wake-up shows by the sum: a sleeper looks by itself twice a second, and 300 times that is too long.
        rounds = 150
        with SharedRing.create(path, 2) as ring, SharedRing.open(path) as other:
            about_to_wait = threading.Semaphore(0)

            def sleeper():
                for i in range(rounds):
                    about_to_wait.release()
                    assert ring.pop(WAIT_S) == b"%d" % i
                ring.push_many([b"full", b"full"])
                for i in range(rounds):
                    about_to_wait.release()
                    ring.push(b"%d" % i, WAIT_S)

            def waker():
                for i in range(2 * rounds):
                    assert about_to_wait.acquire(timeout=WAIT_S)
                    # long enough to fall asleep, mostly; where it is not, that round shows nothing
                    time.sleep(0.002)
                    if i < rounds:
                        other.try_push(b"%d" % i)
                    else:
                        other.try_pop()

            in_threads(sleeper, waker, seconds=40)
            assert len(ring) == 2

    def test_each_of_many_sleepers_is_woken(self, path, in_threads, eventually):
        with SharedRing.create(path, 8) as ring:
            arrived = threading.Barrier(7)

            def sleeper():
                arrived.wait(WAIT_S)
                return ring.pop(WAIT_S)

            def waker():
                arrived.wait(WAIT_S)
                eventually(lambda: RingFile(path).lines["items"][0] & 1, "somebody sleeps")
                ring.push_many([b"%d" % i for i in range(6)])

            results = in_threads(*[sleeper] * 6, waker)
            assert sorted(results[:6]) == [b"%d" % i for i in range(6)]

    def test_one_push_many_wakes_as_many_as_it_pushed(self, path, in_threads, eventually):
        with SharedRing.create(path, 8) as ring:
            items = RingFile(path).lines["items"]

            def push():
                eventually(lambda: asleep_on(items) == 8, "all eight sleep")
                assert ring.push_many([b"%d" % i for i in range(8)]) == 8
                # who finds a message does not sleep again, and there is one for each
                return asleep_on(items)

            *popped, still_asleep = in_threads(*[lambda: ring.pop(WAIT_S)] * 8, push)
            assert sorted(popped) == [b"%d" % i for i in range(8)]
            assert still_asleep == 0

    def test_one_pop_many_wakes_as_many_as_it_made_room_for(self, path, in_threads, eventually):
        with SharedRing.create(path, 8) as ring:
            first = [b"first %d" % i for i in range(8)]
            assert ring.push_many(first) == 8
            space = RingFile(path).lines["space"]

            def pop():
                eventually(lambda: asleep_on(space) == 8, "all eight sleep")
                assert ring.pop_many(8) == first
                return asleep_on(space)

            *_, still_asleep = in_threads(*[lambda i=i: ring.push(b"%d" % i, WAIT_S) for i in range(8)], pop)
            assert still_asleep == 0
            assert sorted(ring.pop_many(9)) == [b"%d" % i for i in range(8)]

    @pytest.mark.parametrize("others", [1, 40])
    def test_messages_of_two_batches_wake_the_sleepers_of_both(self, path, in_threads, eventually, others):
        """40 at once, in two batches, for as many threads; or for one that need not wake the rest."""
        with SharedRing.create(path, 64) as ring:
            items = RingFile(path).lines["items"]

            def push():
                eventually(lambda: asleep_on(items) == others, "all sleep")
                assert ring.push_many([payload_of(1, i) for i in range(40)]) == 40
                return asleep_on(items)

            *popped, still_asleep = in_threads(*[lambda: ring.pop(WAIT_S)] * others, push)
            assert still_asleep == 0
            assert sorted(popped + ring.pop_many(99)) == sorted(payload_of(1, i) for i in range(40))


class TestClosing:
    WAITS = (
        ("pop", "items", lambda ring: ring.pop()),
        ("pop with a timeout", "items", lambda ring: ring.pop(WAIT_S)),
        ("claim", "items", lambda ring: ring.claim()),
        ("push", "space", lambda ring: ring.push(b"x")),
    )

    @pytest.mark.parametrize(("word", "call"), [wait[1:] for wait in WAITS], ids=[wait[0] for wait in WAITS])
    def test_closing_wakes_those_who_sleep_in_it(self, path, word, call, in_threads, eventually):
        ring = SharedRing.create(path, 4)
        if word == "space":
            ring.push_many([b"x"] * 4)
        waiting = threading.Barrier(4)

        def wait():
            waiting.wait(WAIT_S)
            with pytest.raises(ValueError, match=r"this handle (was|is) closed") as caught:
                call(ring)
            return "was closed" in str(caught.value)

        def close():
            waiting.wait(WAIT_S)
            eventually(lambda: RingFile(path).lines[word][0] & 1, "somebody sleeps")
            ring.close()

        assert True in in_threads(wait, wait, wait, close)
        assert RingFile(path).used_slots == []
        with SharedRing.open(path) as other:
            assert len(other) == (4 if word == "space" else 0)

    def test_closing_one_handle_leaves_sleepers_of_another_alone(self, path, in_threads, eventually):
        with SharedRing.create(path, 4) as ring:
            closing = SharedRing.open(path)
            word = RingFile(path).lines["items"]

            def close():
                eventually(lambda: word[0] & 1, "somebody sleeps")
                before = int(word[0])
                closing.close()
                assert int(word[0]) != before
                eventually(lambda: word[0] & 1, "it sleeps again")
                ring.try_push(b"still open")

            assert in_threads(lambda: ring.pop(WAIT_S), close)[0] == b"still open"

    def test_closing_ends_every_call_in_other_threads(self, run_script, path):
        # In a process of its own, because what goes wrong here is a crash. Every round ends one call in the middle.
        out = run_script(
            """
            calls = {
                "try_push": lambda ring: ring.try_push(b"x"),
                "push": lambda ring: ring.push(b"x", timeout=0.001),
                "push_many": lambda ring: ring.push_many([b"x", b"y"]),
                "try_pop": lambda ring: ring.try_pop(),
                "pop": lambda ring: ring.pop(timeout=0.001),
                "pop_many": lambda ring: ring.pop_many(2),
                "try_claim": lambda ring: ring.try_claim().ack(),
                "claim": lambda ring: ring.claim(timeout=0.001).release(),
                "payload": lambda ring: bytes(ring.try_claim().payload),
                "cells": lambda ring: int(ring.cells()["word"].sum()),
                "repair": lambda ring: ring.repair(),
                "len": len,
            }
            sys.setswitchinterval(1e-5)

            def keep_calling(ring, call, ends, counts, i):
                try:
                    while True:
                        try:
                            call(ring)
                        except (Full, Empty):
                            pass
                        except TransportError as error:
                            if "repairing" not in str(error):
                                raise
                        counts[i] += 1
                except ValueError as error:
                    ends[i] = str(error)
                except BaseException as error:
                    ends[i] = repr(error)

            other = SharedRing.create(sys.argv[1], 8)
            for name, call in calls.items():
                for _ in range(4):
                    ring = SharedRing.open(sys.argv[1])
                    group = [call, call, calls["try_push"], calls["try_pop"]]
                    ends, counts = [None] * len(group), [0] * len(group)
                    threads = [
                        threading.Thread(target=keep_calling, args=(ring, one, ends, counts, i), daemon=True)
                        for i, one in enumerate(group)
                    ]
                    for thread in threads:
                        thread.start()
                    deadline = time.monotonic() + 20
                    while min(counts) < 5 and time.monotonic() < deadline:
                        time.sleep(0.001)
                    ring.close()
                    for thread in threads:
                        thread.join(20)
                    assert not any(thread.is_alive() for thread in threads), name
                    assert all(end and "closed" in end for end in ends), (name, ends)
                    assert min(counts) >= 5, (name, counts)
                    gc.collect()
                    other.pop_many(99)
                    raw = RingFile(sys.argv[1])
                    assert raw.states == [CellState.FREE] * 8, (name, raw.states)
                    assert raw.used_slots == [0], (name, raw.used_slots)
                say(name)
            """,
            path,
        )
        assert len(out.split()) == 12


class TestSignals:
    def test_ctrl_c_interrupts_every_blocking_call(self, script, path, eventually, record_property):
        with SharedRing.create(path, 4) as ring:
            raw = RingFile(path)
            child = script(
                """
                ring = SharedRing.open(sys.argv[1])
                calls = {
                    "pop": ring.pop,
                    "pop(60)": lambda: ring.pop(60),
                    "claim": ring.claim,
                    "push": lambda: ring.push(b"x"),
                }
                say("ready")
                while (name := heard()) != "end":
                    try:
                        calls[name]()
                        say("it returned")
                    except KeyboardInterrupt:
                        say("interrupted")
                say(ring.pop_many(9))
                """,
                path,
            )
            child.heard("ready")
            for name, word in [("pop", "items"), ("pop(60)", "items"), ("claim", "items"), ("push", "space")]:
                if word == "space":
                    ring.push_many([b"x"] * 4)
                raw.lines[word] = 0
                child.tell(name)
                eventually(lambda word=word: raw.lines[word][0] & 1, "it sleeps")
                sent = time.monotonic()
                os.kill(child.pid, signal.SIGINT)
                child.heard("interrupted", seconds=ENOUGH_S)
                record_property(f"seconds to interrupt {name}", round(time.monotonic() - sent, 4))
            child.tell("end")
            assert child.end().strip() == str([b"x"] * 4)

    def test_a_handler_that_raises_nothing_does_not_end_the_wait(self, script, path, eventually):
        with SharedRing.create(path, 4) as ring:
            raw = RingFile(path)
            child = script(
                """
                signal.signal(signal.SIGUSR1, lambda *_: os.write(1, b"handled" + bytes([10])))
                ring = SharedRing.open(sys.argv[1])
                say(ring.pop(60))
                """,
                path,
            )
            eventually(lambda: raw.lines["items"][0] & 1, "it sleeps", seconds=WAIT_S)
            for _ in range(3):
                os.kill(child.pid, signal.SIGUSR1)
                child.heard("handled", seconds=ENOUGH_S)
            ring.try_push(b"after all")
            assert child.end() == "b'after all'\n"

    def test_a_signal_that_comes_just_before_the_sleep_is_not_slept_through(self, run_script, path):
        out = run_script(
            f"""
            import ctypes
            import functools

            getpid = os.getpid
            other = SharedRing.create(sys.argv[1], 4)
            for call in (lambda ring: ring.pop(), lambda ring: ring.claim(), lambda ring: ring.pop(60)):
                ring = SharedRing.open(sys.argv[1])
                ended, overslept = threading.Event(), threading.Event()

                def rescue(ended=ended, overslept=overslept):
                    if not ended.wait({ENOUGH_S}):
                        overslept.set()
                        other.try_push(b"late")

                rescuer = threading.Thread(target=rescue)
                rescuer.start()
                # The signal comes inside the call, where no Python code runs any more, and before the wait.
                os.getpid = functools.partial(ctypes.PyDLL(None)["raise"], signal.SIGINT)
                try:
                    call(ring)
                except KeyboardInterrupt:
                    ended.set()
                    say("slept through it" if overslept.is_set() else "interrupted")
                os.getpid = getpid
                rescuer.join()
                ring.close()
                other.pop_many(9)
            """,
            path,
        )
        assert out.splitlines() == ["interrupted"] * 3


class TestForking:
    def test_a_forked_child_takes_part_with_a_number_of_its_own(self, run_script, path):
        out = run_script(
            """
            ring = SharedRing.create(sys.argv[1], 4)
            raw = RingFile(sys.argv[1])
            ring.push_many([b"before", b"claimed"])
            popped, claim = ring.try_pop(), ring.try_claim()
            held = raw.states.index(CellState.TAKEN)
            status = int(raw.records["status"][0])
            pid = os.fork()
            if pid == 0:
                ring.push(b"from the child")
                assert raw.used_slots == [0, 1], raw.used_slots
                assert raw.records["pid"][1] == os.getpid()
                own = ring.try_claim()
                assert own.tobytes() == b"from the child"
                assert sorted(raw.owner_of(i) for i in range(4) if raw.state_of(i) == CellState.TAKEN) == [1, 2]
                own.release()
                assert raw.lock_of(0) and raw.lock_of(1)
                ring.close()
                assert raw.used_slots == [0], raw.used_slots
                os._exit(0)
            say(os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]))
            say(int(raw.records["status"][0]) == status, raw.used_slots, raw.lock_of(0), raw.lock_of(1))
            say(raw.state_of(held).name, raw.owner_of(held), claim.tobytes())
            claim.ack()
            say(ring.pop(20))
            """,
            path,
        )
        assert out.splitlines() == ["0", "True [0] True False", "TAKEN 1 b'claimed'", "b'from the child'"]

    def test_a_child_that_only_exits_leaves_its_parents_number_alone(self, run_script, path):
        out = run_script(
            """
            table = HeartbeatTable.create(sys.argv[1], 4)
            slot = table.register(os.getpid(), auto_beat=True)
            for leave in (lambda: os._exit(0), sys.exit, lambda: (table.close(), os._exit(0))):
                pid = os.fork()
                if pid == 0:
                    leave()
                code = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
                say(code, table.is_alive(slot), table.snapshot(slot).pid == os.getpid())
            """,
            path,
        )
        assert out.splitlines() == ["0 True True"] * 3

    def test_a_child_forked_while_a_thread_waits_gives_up_its_number_at_close(self, run_script, path):
        out = run_script(
            """
            ring = SharedRing.create(sys.argv[1], 4)
            raw = RingFile(sys.argv[1])
            waiter = threading.Thread(target=ring.pop, daemon=True)
            waiter.start()
            while not raw.lines["items"][0] & 1:
                time.sleep(0.001)
            pid = os.fork()
            if pid == 0:
                ring.try_push(b"from the child")
                ring.close()
                assert raw.used_slots == [0], raw.used_slots
                os._exit(0)
            say(os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]))
            waiter.join(20)
            say(waiter.is_alive())
            """,
            path,
        )
        assert out.splitlines() == ["0", "False"]

    def test_a_child_forked_in_the_middle_of_a_repair_does_not_keep_others_from_repairing(self, run_script, path):
        out = run_script(
            """
            ring = SharedRing.create(sys.argv[1], 4)
            ring.try_push(b"x")
            zeros = np.zeros
            out, into = os.pipe()
            pids = []

            def zeros_beside_a_fork(*arguments):
                # as another thread might fork while this one repairs
                pids.append(os.fork())
                if pids[-1] == 0:
                    os.close(into)
                    os.read(out, 1)
                    os._exit(0)
                return zeros(*arguments)

            np.zeros = zeros_beside_a_fork
            ring.repair()
            np.zeros = zeros
            assert len(pids) == 1, pids
            with SharedRing.open(sys.argv[1]) as other:
                say(ring.repair(), other.repair())
            os.close(into)
            """,
            path,
        )
        assert out == "0 0\n"

    def test_a_dead_parent_is_dead_although_a_forked_child_sleeps_on(self, script, shm, eventually):
        with HeartbeatTable.create(shm / "table", 4) as table, SharedRing.create(shm / "ring", 4):
            raw = RingFile(shm / "ring")
            parent = script(
                """
                table, ring = HeartbeatTable.open(sys.argv[1] + "/table"), SharedRing.open(sys.argv[1] + "/ring")
                slot = table.register(os.getpid(), auto_beat=True)
                ring.try_push(b"x")
                child = os.fork()
                if child == 0:
                    signal.pause()
                say(slot, child)
                signal.pause()
                """,
                shm,
            )
            slot, child = map(int, parent.heard().split())
            assert table.is_alive(slot)
            assert list(table) == [slot]
            assert raw.lock_of(0)
            parent.kill()
            eventually(
                lambda: not table.is_alive(slot) and not raw.lock_of(0),
                "the kernel drops the locks of a dead process",
                ENOUGH_S,
            )
            os.kill(child, 0)
            assert list(table) == []


class TestDeathsAndStops:
    def test_killed_and_stopped_processes_block_nobody(self, run_script, path):
        out = run_script(
            """
            import random
            random.seed(7)
            rounds, capacity = 25, 64
            ring = SharedRing.create(sys.argv[1], capacity)
            raw = RingFile(sys.argv[1])
            ring.push(payload_of(999, 999_999))  # so that number 1 is this process's

            def work(me):
                with SharedRing.open(sys.argv[1]) as own:
                    sequence = 0
                    while True:
                        try:
                            own.push_many([payload_of(me, sequence + i) for i in range(3)])
                            origin_of(own.pop(1))
                            own.try_claim().release()
                            claim = own.try_claim()
                            origin_of(claim.tobytes())
                            claim.ack()
                            for payload in own.pop_many(9):
                                origin_of(payload)
                        except (Full, Empty):
                            pass
                        sequence += 1

            for n in range(rounds):
                pid = os.fork()
                if pid == 0:
                    try:
                        work(n)
                    except BaseException:
                        import traceback
                        traceback.print_exc()
                    finally:
                        os._exit(1)
                while pid not in raw.records["pid"]:
                    assert os.waitpid(pid, os.WNOHANG) == (0, 0), n
                    time.sleep(0.0005)
                time.sleep(random.random() * 0.005)
                os.kill(pid, signal.SIGSTOP)
                # whatever it was doing, it stands still now
                for payload in ring.pop_many(capacity):
                    origin_of(payload)
                for i in range(100):
                    ring.push(payload_of(999, 1000 * n + i), 10)
                    origin_of(ring.pop(10))
                    claim = ring.claim(10) if i % 2 and len(ring) else None
                    if claim:
                        origin_of(claim.tobytes())
                        claim.release()
                os.kill(pid, signal.SIGKILL)
                assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == -signal.SIGKILL
            left = [origin_of(payload) for payload in ring.pop_many(capacity)]
            assert len(left) == len(set(left))
            # a death takes the cell that it held, and no more
            stuck = [cell for cell in range(capacity) if raw.state_of(cell) != CellState.FREE]
            owners = [raw.owner_of(cell) for cell in stuck]
            say(len(owners) == len(set(owners)), 1 not in owners)
            say(ring.push_many([b"x"] * capacity) == capacity - len(stuck))
            """,
            path,
        )
        assert out.splitlines() == ["True True", "True"]

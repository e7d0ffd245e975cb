"""SharedHashMap with many threads and processes: each call is atomic, no value is torn, nobody is in the way."""

import threading

import pytest

from subetha._core import SharedHashMap
from subetha.layout import CellState

from .ring_file import MapFile

WAIT_S = 30

FORKS = """
path = sys.argv[1]

def forked(work, *arguments):
    pid = os.fork()
    if pid:
        return pid
    code = 1
    try:
        with SharedHashMap.open(path) as own:
            work(own, *arguments)
        code = 0
    except BaseException:
        import traceback
        traceback.print_exc()
    finally:
        os._exit(code)

def check(pids):
    codes = [os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) for pid in pids]
    assert codes == [0] * len(pids), codes

def disturb(own, turns, names=6):
    # neighbours come and go, and with them the generations
    for turn in range(turns):
        name = b"neighbour %d" % (turn % names)
        own[name] = payload_of(9, turn, 8 + turn % 49)
        own.pop(b"neighbour %d" % (turn * 5 % names), None)
        if turn % 50 == 0:
            own.rebuild()
"""


class TestBetweenProcesses:
    def test_counters_by_compare_and_swap_come_to_the_exact_sum(self, run_script, path):
        with SharedHashMap.create(path, 16) as made:
            run_script(
                FORKS
                + """
def count(own, rounds):
    for turn in range(rounds):
        name = b"counter %d" % (turn % 3)
        while True:
            seen = own.get(name)
            if own.compare_and_swap(name, seen, b"%d" % (int(seen or 0) + 1)):
                break

check([forked(count, 3000), forked(count, 3000), forked(count, 3000), forked(disturb, 3000)])
""",
                path,
            )
            assert [int(made[b"counter %d" % n]) for n in range(3)] == [3000] * 3
            assert MapFile(path).faults() == []

    def test_every_setdefault_of_a_key_gives_the_same_value(self, run_script, path):
        out = run_script(
            FORKS
            + """
import json
SharedHashMap.create(path, 1000).close()

def claim(own, me):
    got = [own.setdefault(b"%d" % n, b"%d" % me).decode() for n in range(900)]
    with open(f"{path}.{me}", "w") as file:
        json.dump(got, file)

for _ in range(4):
    check([forked(claim, 1), forked(claim, 2), forked(claim, 3), forked(disturb, 500)])
    answers = [json.load(open(f"{path}.{me}")) for me in (1, 2, 3)]
    assert answers[0] == answers[1] == answers[2]
    with SharedHashMap.open(path) as own:
        assert [own.pop(b"%d" % n).decode() for n in range(900)] == answers[0]
assert MapFile(path).faults() == []
say("done")
""",
            path,
        )
        assert out == "done\n"

    def test_of_several_who_pop_a_key_one_gets_it(self, run_script, path):
        run_script(
            FORKS
            + """
SharedHashMap.create(path, 64).close()
COUNT = 4000
taken = np.memmap(f"{path}.taken", np.uint8, "w+", shape=(3, COUNT))

def take(own, me):
    left = set(range(COUNT))
    while left:
        for n in list(left):
            value = own.pop(b"%d" % n, None)
            if value is not None:
                assert origin_of(value) == (1, n)
                taken[me, n] += 1
            if value is not None or taken[:, n].any():
                left.discard(n)

def bring(own):
    n = 0
    while n < COUNT:
        try:
            own[b"%d" % n] = payload_of(1, n)
            n += 1
        except MapFull:
            time.sleep(0)

check([forked(bring), forked(take, 0), forked(take, 1), forked(take, 2)])
assert (taken.sum(axis=0) == 1).all()
with SharedHashMap.open(path) as own:
    assert len(own) == 0
    own.rebuild()
assert MapFile(path).faults() == []
""",
            path,
        )

    @pytest.mark.parametrize("value_bytes", [56, 4000])
    def test_readers_see_whole_values_that_never_go_back(self, run_script, path, value_bytes):
        """One writer a key; beside it overwrites, deletions and rebuilds of neighbours."""
        SharedHashMap.create(path, 12, value_bytes).close()
        run_script(
            FORKS
            + """
value_bytes = int(sys.argv[2])
names = [b"a", b"second", b"the third key of them"]

def write(own, turns):
    for turn in range(turns):
        for n, name in enumerate(names):
            own[name] = payload_of(n, turn, 8 + turn * 7 % (value_bytes - 7))

def read(own, readonly):
    with SharedHashMap.open(path, readonly) as looking:
        last = [-1] * len(names)
        while last != [TURNS - 1] * len(names):
            for n, name in enumerate(names):
                producer, turn = origin_of(looking[name])
                assert producer == n and turn >= last[n], (producer, n, turn, last[n])
                last[n] = turn
            pairs = looking.items()
            found = [key for key, value in pairs if origin_of(value)]
            assert len(found) == len(set(found)) and set(names) <= set(found), found

TURNS = 3000
with SharedHashMap.open(path) as own:
    for n, name in enumerate(names):
        own[name] = payload_of(n, 0, 8)
check([forked(write, TURNS), forked(read, True), forked(read, False), forked(disturb, 2000)])
assert MapFile(path).faults() == []
""",
            path,
            value_bytes,
        )

    def test_32_processes_open_or_create_one_map_at_once(self, run_script, path):
        run_script(
            """
            gate, opened = os.pipe()
            pids = []
            for i in range(32):
                pid = os.fork()
                if pid == 0:
                    os.close(opened)
                    os.read(gate, 1)
                    with SharedHashMap.open_or_create(sys.argv[1], 64) as own:
                        own[b"%d" % i] = payload_of(i, 7)
                    os._exit(0)
                pids.append(pid)
            os.close(opened)
            assert [os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) for pid in pids] == [0] * 32
            with SharedHashMap.open(sys.argv[1]) as own:
                assert {key: origin_of(value) for key, value in own.items()} == {b"%d" % i: (i, 7) for i in range(32)}
            """,
            path,
        )

    def test_a_forked_child_takes_a_number_of_its_own(self, run_script, path, shared_map):
        shared_map[b"parent"] = b"1"
        run_script(
            """
            own = SharedHashMap.open(sys.argv[1])
            own[b"before"] = b""
            pid = os.fork()
            if pid == 0:
                own[b"child"] = b"2"
                assert own[b"parent"] == b"1"
                os._exit(0 if len(MapFile(sys.argv[1]).used_slots) == 3 else 1)
            assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0
            assert own.rescue() == 1
            own.close()
            """,
            path,
        )
        assert dict(shared_map) == {b"parent": b"1", b"before": b"", b"child": b"2"}
        assert MapFile(path).faults() == []


class TestBetweenThreads:
    @pytest.mark.parametrize("shared", [True, False], ids=["one handle", "handles of their own"])
    def test_eight_threads_count_and_move_keys(self, path, in_threads, shared):
        with SharedHashMap.create(path, 12) as made:
            start = threading.Barrier(8)

            def work(me):
                own = made if shared else SharedHashMap.open(path)
                start.wait(WAIT_S)
                for turn in range(500):
                    while True:
                        seen = own.get(b"sum", b"0")
                        if own.compare_and_swap(b"sum", seen if seen != b"0" else None, b"%d" % (int(seen) + 1)):
                            break
                    mine = b"of %d" % me
                    own[mine] = b"%d" % turn
                    assert own[mine] == own.pop(mine) == b"%d" % turn
                    assert mine not in own
                    if turn % 100 == me:
                        own.rebuild()
                if not shared:
                    own.close()

            in_threads(*(lambda me=me: work(me) for me in range(8)))
            assert dict(made) == {b"sum": b"4000"}
            made.rebuild()
            raw = MapFile(path)
            assert raw.faults() == []
            assert raw.states.count(CellState.READY) == 1

    def test_several_rebuild_at_once(self, path, in_threads):
        with SharedHashMap.create(path, 64) as made:
            handles = [SharedHashMap.open(path) for _ in range(4)]
            expected = {b"%d" % n: b"value %d" % n for n in range(50)}
            made.update(expected)
            for turn in range(50):
                gone = b"%d" % turn
                del made[gone], expected[gone]
                in_threads(*(handle.rebuild for handle in handles))
                assert dict(made) == expected
                assert MapFile(path).faults() == []
            for handle in handles:
                handle.close()

    def test_closing_ends_every_call_in_other_threads(self, run_script, path):
        # in a process of its own, because what goes wrong here is a crash
        run_script(
            """
            calls = [
                lambda own: own.__setitem__(b"a", b"1"), lambda own: own.get(b"a"), lambda own: own.pop(b"a", None),
                lambda own: own.setdefault(b"a", b"2"), lambda own: own.compare_and_swap(b"a", b"1", b"2"), len, list,
                lambda own: own.rebuild(), lambda own: own.repair(), lambda own: own.rescue(),
                lambda own: own.update({b"b": b"1"}), lambda own: list(own.items()), lambda own: own.clear(),
            ]
            sys.setswitchinterval(1e-5)
            SharedHashMap.create(sys.argv[1], 8).close()

            def keep_calling(own, call, ends):
                try:
                    while True:
                        call(own)
                except ValueError as error:
                    assert "closed" in str(error), error
                    ends.append(call)

            for _ in range(10):
                own, ends = SharedHashMap.open(sys.argv[1]), []
                threads = [threading.Thread(target=keep_calling, args=(own, call, ends)) for call in calls]
                for thread in threads:
                    thread.start()
                time.sleep(0.02)
                own.close()
                for thread in threads:
                    thread.join(30)
                assert len(ends) == len(calls), len(ends)
            raw = MapFile(sys.argv[1])
            assert raw.used_slots == []
            assert raw.faults() == [], raw.faults()
            """,
            path,
        )

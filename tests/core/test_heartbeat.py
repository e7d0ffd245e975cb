"""HeartbeatTable: who takes part, who lives, and beats that need no GIL."""

import copy
import gc
import os
import pickle
import signal
import stat
import subprocess
import sys
import threading
import time

import pytest

from subetha._core import HeartbeatTable, Mapped
from subetha.errors import HeartbeatError, LayoutMismatch, SubethaError, TableFull
from subetha.layout import HeartbeatSnapshot, Role, SlotState

from .ring_file import TableFile

WAIT_S = 30
ME = os.getpid()

# Calls on a slot; "looking" ones answer for a slot that nobody holds, the others refuse it.
SLOT_CALLS = {
    "beat": lambda table, i: table.beat(i),
    "mark_in_flight": lambda table, i: table.mark_in_flight(i, 3),
    "clear_in_flight": lambda table, i: table.clear_in_flight(i, 3),
    "in_flight_cell": lambda table, i: table.in_flight_cell(i, 3),
    "add_completed": lambda table, i: table.add_completed(i),
    "completed": lambda table, i: table.completed(i),
}
LOOKING_CALLS = {
    "snapshot": lambda table, i: table.snapshot(i),
    "is_alive": lambda table, i: table.is_alive(i),
}
OTHER_CALLS = {
    "register": lambda table: table.register(ME),
    "unregister": lambda table: table.unregister(0),
    "silent": lambda table: table.silent(0),
    "tick_global_epoch": lambda table: table.tick_global_epoch(),
    "global_epoch": lambda table: table.global_epoch,
    "__iter__": list,
    "__enter__": lambda table: table.__enter__(),
}
CALLS = {
    **{name: lambda table, call=call: call(table, 0) for name, call in (SLOT_CALLS | LOOKING_CALLS).items()},
    **OTHER_CALLS,
}


class TestCreation:
    @pytest.mark.parametrize("capacity", [1, 2, 3, 1000, 65_534])
    def test_a_new_table_is_empty(self, path, capacity):
        with HeartbeatTable.create(path, capacity) as table:
            assert table.capacity == capacity
            assert table.global_epoch == 0
            assert list(table) == []
            assert table.snapshot(0) is table.snapshot(capacity - 1) is None

    @pytest.mark.parametrize("make", [HeartbeatTable.create, HeartbeatTable.open_or_create])
    @pytest.mark.parametrize("capacity", [-1, 0, 65_535, 2**32, 2**70])
    def test_a_capacity_outside_its_limits_is_refused_with_them(self, path, make, capacity):
        with pytest.raises(ValueError, match=f"capacity: expected 1 to 65534, found {capacity}$"):
            make(path, capacity)
        assert not path.exists()

    @pytest.mark.parametrize("make", [HeartbeatTable.create, HeartbeatTable.open_or_create])
    @pytest.mark.parametrize("capacity", [True, 4.0, "4", None])
    def test_a_capacity_that_is_no_int_is_refused(self, path, make, capacity):
        with pytest.raises(
            TypeError, match=f"capacity: expected an int from 1 to 65534, found {type(capacity).__name__}"
        ):
            make(path, capacity)
        assert not path.exists()

    @pytest.mark.parametrize("umask", [0o000, 0o077])
    @pytest.mark.parametrize("mode", [None, 0o640, 0o660])
    def test_the_mode_is_kept_under_any_umask(self, path, umask, mode):
        before = os.umask(umask)
        try:
            HeartbeatTable.create(path, 2, **({} if mode is None else {"mode": mode})).close()
        finally:
            os.umask(before)
        assert stat.S_IMODE(path.stat().st_mode) == (mode or 0o600)

    def test_an_existing_file_is_never_replaced(self, path, table):
        slot = table.register(ME)
        with pytest.raises(FileExistsError):
            HeartbeatTable.create(path, 4)
        with HeartbeatTable.open_or_create(path, 4) as other:
            assert other.snapshot(slot).pid == ME

    def test_open_or_create_refuses_another_capacity(self, path, table):
        with pytest.raises(LayoutMismatch, match=r"expected capacity 8, found 4; open it with open\(\)") as caught:
            HeartbeatTable.open_or_create(path, 8)
        assert str(path) in str(caught.value)

    def test_a_missing_file_is_not_made_by_open(self, path):
        with pytest.raises(FileNotFoundError):
            HeartbeatTable.open(path)
        assert not path.exists()

    def test_the_constructor_names_what_to_call_instead(self):
        with pytest.raises(TypeError, match=r"HeartbeatTable\.create\(path, capacity\)"):
            HeartbeatTable()

    def test_a_handle_is_neither_copied_nor_pickled(self, table):
        for attempt in (copy.copy, pickle.dumps):
            with pytest.raises(TypeError):
                attempt(table)

    def test_32_processes_open_or_create_one_table_and_register_at_once(self, run_script, path):
        out = run_script(
            """
            gate, opened = os.pipe()
            told, tell = os.pipe()
            leave, let_go = os.pipe()
            pids = []
            for i in range(32):
                pid = os.fork()
                if pid == 0:
                    os.close(opened), os.close(let_go)
                    os.read(gate, 1)
                    table = HeartbeatTable.open_or_create(sys.argv[1], 40)
                    os.write(tell, bytes([table.register(os.getpid())]))
                    os.read(leave, 1)
                    os._exit(0)
                pids.append(pid)
            os.close(opened)
            slots = set()
            for _ in pids:
                slots |= set(os.read(told, 1))
            table = HeartbeatTable.open(sys.argv[1])
            say(len(slots), sorted(slots) == list(table), {table.snapshot(i).pid for i in table} == set(pids))
            os.close(let_go)
            for pid in pids:
                assert os.waitpid(pid, 0)[1] == 0
            say(list(table))
            """,
            path,
        )
        assert out.splitlines() == ["32 True True", "[]"]


class TestRegistering:
    def test_the_lowest_free_slot_is_taken(self, table):
        assert [table.register(ME) for _ in range(4)] == [0, 1, 2, 3]
        table.unregister(2)
        table.unregister(1)
        assert [table.register(ME), table.register(ME)] == [1, 2]

    def test_handles_share_the_slots(self, path, table):
        with HeartbeatTable.open(path) as other:
            assert [table.register(ME), other.register(ME), table.register(ME)] == [0, 1, 2]
            assert list(table) == list(other) == [0, 1, 2]

    def test_a_registration_shows_what_it_was_given(self, table):
        for _ in range(3):
            table.tick_global_epoch()
        first, second = table.register(ME), table.register(2**31 - 1, Role.CLIENT)
        assert table.snapshot(first) == HeartbeatSnapshot(ME, 3, 0, Role.WORKER)
        assert table.snapshot(second) == HeartbeatSnapshot(2**31 - 1, 3, 0, Role.CLIENT)
        assert isinstance(table.snapshot(second).role, Role)

    def test_a_role_may_be_its_number(self, table):
        assert table.snapshot(table.register(ME, role=2)).role is Role.CLIENT

    @pytest.mark.parametrize("role", [0, 4, "worker", None])
    def test_an_unknown_role_is_refused(self, table, role):
        with pytest.raises(ValueError, match="is not a valid Role"):
            table.register(ME, role)
        assert list(table) == []

    @pytest.mark.parametrize("pid", [-1, 0, 2**31, 2**64])
    def test_an_impossible_pid_is_refused_with_the_limits(self, table, pid):
        with pytest.raises(ValueError, match=f"pid: expected 1 to 2147483647, found {pid}$"):
            table.register(pid)
        assert list(table) == []

    @pytest.mark.parametrize("pid", ["1", None, 1.5])
    def test_a_pid_that_is_no_int_is_refused(self, table, pid):
        with pytest.raises(TypeError):
            table.register(pid)
        assert table.register(ME) == 0

    def test_a_full_table_says_how_many_slots_it_has(self, path, table):
        for _ in range(4):
            table.register(ME)
        with pytest.raises(
            TableFull, match="all 4 slots are taken; close a handle, or create it with room for more"
        ) as caught:
            table.register(ME)
        assert isinstance(caught.value, HeartbeatError)
        assert str(path) in str(caught.value)
        table.unregister(3)
        assert table.register(ME) == 3

    def test_each_registration_of_a_slot_is_another_incarnation_with_clean_fields(self, path, table):
        raw = TableFile(path)
        for incarnation in range(1, 5):
            slot = table.register(ME + incarnation)
            assert int(raw.records["status"][slot]) == incarnation << 8 | SlotState.USED
            assert table.snapshot(slot) == HeartbeatSnapshot(ME + incarnation, table.global_epoch, 0, Role.WORKER)
            assert table.completed(slot) == 0
            table.mark_in_flight(slot, 5)
            table.add_completed(slot)
            table.tick_global_epoch()
            table.unregister(slot)
            assert int(raw.records["status"][slot]) == incarnation << 8 | SlotState.FREE

    def test_threads_that_register_at_once_get_slots_of_their_own(self, path, in_threads):
        with HeartbeatTable.create(path, 64) as table:
            start = threading.Barrier(8)

            def register():
                start.wait(WAIT_S)
                return [table.register(ME) for _ in range(8)]

            slots = [slot for some in in_threads(*[register] * 8) for slot in some]
            assert sorted(slots) == list(range(64))
            assert list(table) == list(range(64))

    def test_a_slot_is_freed_by_its_handle_alone(self, path, table):
        slot = table.register(ME)
        with HeartbeatTable.open(path) as other:
            for handle, i in [(other, slot), (table, 1), (table, 99), (table, -1), (table, "0")]:
                with pytest.raises(
                    HeartbeatError, match=f"slot {i} was not registered through this handle in this process"
                ):
                    handle.unregister(i)
        assert table.is_alive(slot)
        table.unregister(slot)
        with pytest.raises(HeartbeatError, match="only its holder may end it"):
            table.unregister(slot)

    def test_a_forked_child_ends_only_what_it_registered(self, run_script, path):
        out = run_script(
            """
            table = HeartbeatTable.create(sys.argv[1], 4)
            mine = table.register(os.getpid())
            pid = os.fork()
            if pid == 0:
                try:
                    table.unregister(mine)
                    say("ended its parent's")
                except HeartbeatError as error:
                    say("in this process" in str(error))
                own = table.register(os.getpid(), Role.CLIENT)
                say(own, list(table))
                table.unregister(own)
                table.register(os.getpid())
                table.close()
                os._exit(0)
            say(os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]), list(table))
            table.unregister(mine)
            say(list(table))
            """,
            path,
        )
        assert out.splitlines() == ["True", "1 [0, 1]", "0 [0]", "[]"]

    def test_a_registration_leaves_no_descriptor_when_it_ends(self, table):
        before = set(os.listdir("/proc/self/fd"))
        for _ in range(3):
            slots = [table.register(ME) for _ in range(4)]
            assert len(os.listdir("/proc/self/fd")) == len(before) + 4
            for slot in slots:
                table.unregister(slot)
            assert set(os.listdir("/proc/self/fd")) == before


class TestSlots:
    @pytest.mark.parametrize("call", [*SLOT_CALLS.values(), *LOOKING_CALLS.values()], ids=[*SLOT_CALLS, *LOOKING_CALLS])
    @pytest.mark.parametrize("slot", [-1, 4, 65_535, 2**64, -(2**64)])
    def test_a_slot_that_the_table_does_not_have_is_refused(self, path, table, call, slot):
        with pytest.raises(HeartbeatError, match=f"expected a slot from 0 to 3, found {slot}$") as caught:
            call(table, slot)
        assert str(path) in str(caught.value)

    @pytest.mark.parametrize("call", [*SLOT_CALLS.values(), *LOOKING_CALLS.values()], ids=[*SLOT_CALLS, *LOOKING_CALLS])
    @pytest.mark.parametrize("slot", ["0", None, 0.5])
    def test_a_slot_that_is_no_int_is_refused(self, table, call, slot):
        table.register(ME)
        with pytest.raises(TypeError):
            call(table, slot)

    @pytest.mark.parametrize("call", SLOT_CALLS.values(), ids=SLOT_CALLS)
    @pytest.mark.parametrize("how", ["never registered", "unregistered", "dying"])
    def test_a_slot_that_nobody_holds_is_refused(self, path, table, call, how):
        raw = TableFile(path)
        if how != "never registered":
            table.unregister(table.register(ME))
        if how == "dying":
            raw.records["status"][0] = 1 << 8 | SlotState.DYING
        before = path.read_bytes()
        with pytest.raises(HeartbeatError, match="slot 0 is not registered"):
            call(table, 0)
        assert path.read_bytes() == before
        assert table.snapshot(0) is None
        assert not table.is_alive(0)

    def test_a_beat_writes_the_epoch_of_that_moment(self, table):
        first, second = table.register(ME), table.register(ME)
        assert [table.tick_global_epoch() for _ in range(3)] == [1, 2, 3]
        assert table.global_epoch == 3
        table.beat(first)
        assert (table.snapshot(first).last_seen_epoch, table.snapshot(second).last_seen_epoch) == (3, 0)
        table.tick_global_epoch()
        assert table.snapshot(first).last_seen_epoch == 3

    def test_ticks_and_marks_of_many_processes_do_not_undo_each_other(self, run_script, path):
        out = run_script(
            """
            count = 600_000
            table = HeartbeatTable.create(sys.argv[1], 4)
            slot = table.register(os.getpid())
            gate, opened = os.pipe()
            pids = []
            for bit in range(2):
                pid = os.fork()
                if pid == 0:
                    os.close(opened)
                    os.read(gate, 1)
                    np.save(f"{sys.argv[1]}.{bit}.npy", [table.tick_global_epoch() for _ in range(count)])
                    for _ in range(count // 10):
                        table.clear_in_flight(slot, bit)
                        table.mark_in_flight(slot, bit)
                        table.add_completed(slot)
                        assert table.snapshot(slot).in_flight_bitmap >> bit & 1
                    os._exit(0)
                pids.append(pid)
            os.close(opened)
            say([os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) for pid in pids])
            ticks = np.concatenate([np.load(f"{sys.argv[1]}.{bit}.npy") for bit in range(2)])
            say(table.global_epoch == 2 * count, np.array_equal(np.sort(ticks), np.arange(1, 2 * count + 1)))
            say(table.completed(slot) == count // 5, table.snapshot(slot).in_flight_bitmap)
            """,
            path,
        )
        assert out.splitlines() == ["[0, 0]", "True True", "True 3"]

    def test_each_of_64_bits_is_marked_and_cleared_by_itself(self, table):
        slot, neighbour = table.register(ME), table.register(ME)
        expected = 0
        for bit in [*range(0, 64, 2), *range(63, 0, -2)]:
            table.mark_in_flight(slot, bit, cell=1000 + bit)
            expected |= 1 << bit
            assert table.snapshot(slot).in_flight_bitmap == expected
        assert expected == 2**64 - 1
        assert [table.in_flight_cell(slot, bit) for bit in range(64)] == list(range(1000, 1064))
        for bit in range(64):
            table.clear_in_flight(slot, bit)
            table.clear_in_flight(slot, bit)
            expected &= ~(1 << bit)
            assert table.snapshot(slot).in_flight_bitmap == expected
        assert table.snapshot(neighbour).in_flight_bitmap == 0
        assert table.in_flight_cell(neighbour, 0) == 0

    @pytest.mark.parametrize("bit", [-1, 64, 2**64])
    @pytest.mark.parametrize("name", ["mark_in_flight", "clear_in_flight", "in_flight_cell"])
    def test_a_bit_outside_64_is_refused(self, table, name, bit):
        slot = table.register(ME)
        with pytest.raises(ValueError, match=f"bit: expected 0 to 63, found {bit}"):
            getattr(table, name)(slot, bit)
        assert table.snapshot(slot).in_flight_bitmap == 0

    def test_a_cell_number_is_a_u32(self, table):
        slot = table.register(ME)
        table.mark_in_flight(slot, 1, 2**32 - 1)
        assert table.in_flight_cell(slot, 1) == 2**32 - 1
        for cell in (-1, 2**32):
            with pytest.raises(ValueError, match=f"cell: .* found {cell}"):
                table.mark_in_flight(slot, 0, cell)
        with pytest.raises(TypeError, match="cell"):
            table.mark_in_flight(slot, 0, "1")
        assert table.snapshot(slot).in_flight_bitmap == 2

    def test_completed_jobs_are_counted_slot_by_slot(self, path, table):
        slot, other = table.register(ME), table.register(ME)
        for _ in range(3):
            table.add_completed(slot)
        with HeartbeatTable.open(path, readonly=True) as looker:
            assert (looker.completed(slot), looker.completed(other)) == (3, 0)

    def test_a_role_that_this_release_does_not_know_is_shown_as_its_number(self, path, table):
        slot = table.register(ME)
        TableFile(path).records["role"][slot] = 77
        assert table.snapshot(slot).role == 77


class TestHandles:
    def test_every_public_call_is_among_those_tested(self):
        public = {name for name in dir(HeartbeatTable) if not name.startswith("_")}
        others = {"create", "open", "open_or_create", "close", "capacity", "path", "closed"}
        others |= {"header", "ring", "make_policy", "apply_migration"}
        assert public == {name for name in CALLS if not name.startswith("_")} | others

    @pytest.mark.parametrize("call", CALLS.values(), ids=CALLS)
    def test_a_closed_handle_refuses_every_call(self, path, call):
        table = HeartbeatTable.create(path, 4)
        table.register(ME)
        table.close()
        assert table.closed
        with pytest.raises(ValueError, match="this handle is closed") as caught:
            call(table)
        assert str(path) in str(caught.value)
        assert (table.capacity, table.path) == (4, str(path))

    def test_closing_ends_every_registration_of_the_handle_once(self, path, table):
        with HeartbeatTable.open(path) as other:
            kept = other.register(ME)
            mine = [table.register(ME), table.register(ME)]
            table.close()
            table.close()
            assert list(other) == [kept]
            assert [other.snapshot(slot) for slot in mine] == [None, None]
            assert other.register(ME) == mine[0]
            table.close()
            assert other.is_alive(mine[0])

    def test_a_dropped_handle_ends_its_registrations(self, path, table):
        other = HeartbeatTable.open(path)
        slot = other.register(ME)
        assert table.is_alive(slot)
        del other
        gc.collect()
        assert table.snapshot(slot) is None

    def test_a_handle_says_what_it_is(self, path, table):
        assert isinstance(table, Mapped)
        assert repr(table) == f"<HeartbeatTable {str(path)!r} open>"
        table.close()
        assert repr(table) == f"<HeartbeatTable {str(path)!r} closed>"

    @pytest.mark.parametrize(
        "name",
        ["register", "tick_global_epoch", "beat", "mark_in_flight", "clear_in_flight", "add_completed", "unregister"],
    )
    def test_a_readonly_handle_refuses_to_change_anything(self, path, table, name):
        table.register(ME)
        with HeartbeatTable.open(path, readonly=True) as looker:
            before = path.read_bytes()
            with pytest.raises(SubethaError, match=r"opened read-only|not registered through this handle"):
                CALLS[name](looker)
            assert path.read_bytes() == before

    def test_a_readonly_handle_looks(self, path, table):
        slot = table.register(ME)
        table.mark_in_flight(slot, 9, 99)
        table.tick_global_epoch()
        with HeartbeatTable.open(path, readonly=True) as looker:
            assert list(looker) == [slot]
            assert looker.is_alive(slot)
            assert looker.global_epoch == 1
            assert looker.snapshot(slot) == HeartbeatSnapshot(ME, 0, 1 << 9, Role.WORKER)
            assert looker.in_flight_cell(slot, 9) == 99
            assert repr(looker) == f"<HeartbeatTable {str(path)!r} read-only>"

    def test_closing_ends_every_call_in_other_threads(self, run_script, path):
        # In a process of its own, because what goes wrong here is a crash.
        out = run_script(
            """
            def come_and_go(table):
                table.unregister(table.register(os.getpid(), auto_beat=True))

            calls = {
                "register": come_and_go,
                "beat": lambda table: table.beat(0),
                "tick": lambda table: table.tick_global_epoch(),
                "epoch": lambda table: table.global_epoch,
                "mark": lambda table: table.mark_in_flight(0, 3),
                "clear": lambda table: table.clear_in_flight(0, 3),
                "cell": lambda table: table.in_flight_cell(0, 3),
                "add": lambda table: table.add_completed(0),
                "completed": lambda table: table.completed(0),
                "snapshot": lambda table: table.snapshot(0),
                "alive": lambda table: table.is_alive(0),
                "iteration": list,
            }
            sys.setswitchinterval(1e-5)
            keeper = HeartbeatTable.create(sys.argv[1], 64)
            keeper.register(os.getpid())

            def keep_calling(table, name, ends, counts):
                try:
                    while True:
                        calls[name](table)
                        counts[name] += 1
                except BaseException as error:
                    ends[name] = repr(error)

            for _ in range(5):
                table = HeartbeatTable.open(sys.argv[1])
                ends, counts = {}, dict.fromkeys(calls, 0)
                threads = [
                    threading.Thread(target=keep_calling, args=(table, name, ends, counts), daemon=True)
                    for name in calls
                ]
                for thread in threads:
                    thread.start()
                deadline = time.monotonic() + 20
                while min(counts.values()) < 5 and time.monotonic() < deadline:
                    time.sleep(0.001)
                table.close()
                for thread in threads:
                    thread.join(20)
                assert not any(thread.is_alive() for thread in threads), ends
                # a registration may end with the handle between register and unregister
                assert all("ValueError" in end and "closed" in end for end in ends.values()), ends
                assert min(counts.values()) >= 5, counts
                assert list(keeper) == [0], list(keeper)
            say("done")
            """,
            path,
        )
        assert out == "done\n"


class TestLife:
    def test_the_slot_of_a_killed_process_shows_its_last_words_and_is_not_alive(self, script, path, table, eventually):
        keeper = table.register(ME)
        child = script(
            """
            table = HeartbeatTable.open(sys.argv[1])
            slot = table.register(os.getpid(), Role.CLIENT)
            table.mark_in_flight(slot, 7)
            say(slot)
            signal.pause()
            """,
            path,
        )
        slot = int(child.heard())
        expected = HeartbeatSnapshot(child.pid, 0, 1 << 7, Role.CLIENT)
        assert table.is_alive(slot)
        assert list(table) == [keeper, slot]
        assert table.snapshot(slot) == expected
        child.kill()
        eventually(lambda: not table.is_alive(slot), "the kernel drops the lock of a dead process", seconds=5)
        assert list(table) == [keeper]
        assert table.snapshot(slot) == expected
        # its cells still name it: until somebody has rescued them nobody else may have its number
        assert table.register(ME) == slot + 1

    def test_a_table_full_of_the_dead_makes_room_first_where_nothing_was_in_flight(
        self, script, path, table, eventually
    ):
        assert table.register(ME) == 0
        child = script(
            """
            table = HeartbeatTable.open(sys.argv[1])
            slots = [table.register(os.getpid()) for _ in range(3)]
            table.mark_in_flight(slots[0], 7)
            say("ready")
            signal.pause()
            """,
            path,
        )
        child.heard()
        with pytest.raises(TableFull):
            table.register(ME)
        child.kill()
        eventually(lambda: list(table) == [0], "the kernel drops the locks of a dead process", seconds=5)
        statuses = TableFile(path).records["status"]
        before = [int(status) for status in statuses]
        assert [table.register(ME) for _ in range(3)] == [2, 3, 1]
        with pytest.raises(TableFull):
            table.register(ME)
        assert [int(status) for status in statuses] == [before[0], *(status + (1 << 8) for status in before[1:])]
        assert list(table) == [0, 1, 2, 3]
        assert [table.snapshot(slot).in_flight_bitmap for slot in table] == [0] * 4
        table.unregister(1)
        assert table.register(ME) == 1

    @pytest.mark.slow
    def test_those_who_take_the_slots_of_the_dead_at_once_get_one_each(self, script, path):
        HeartbeatTable.create(path, 32).close()
        for _ in range(5):
            TableFile(path).records["status"] = 1 << 8 | SlotState.USED
            children = [
                script(
                    """
                    table = HeartbeatTable.open(sys.argv[1])
                    say("ready")
                    heard()
                    say(*(table.register(os.getpid()) for _ in range(16)))
                    heard()
                    """,
                    path,
                )
                for _ in range(2)
            ]
            for child in children:
                child.heard()
            for child in children:
                child.tell()
            assert sorted(int(slot) for child in children for slot in child.heard().split()) == list(range(32))
            for child in children:
                child.tell()
                child.end()

    def test_a_stopped_process_is_alive(self, script, path, table):
        child = script(
            """
            table = HeartbeatTable.open(sys.argv[1])
            say(table.register(os.getpid()))
            signal.pause()
            """,
            path,
        )
        slot = int(child.heard())
        os.kill(child.pid, signal.SIGSTOP)
        os.waitpid(child.pid, os.WUNTRACED)
        assert table.is_alive(slot)
        assert table.snapshot(slot).pid == child.pid
        os.kill(child.pid, signal.SIGCONT)

    def test_a_process_does_not_live_on_in_the_program_that_it_started(self, script, path, table, eventually):
        child = script(
            """
            import subprocess
            table = HeartbeatTable.open(sys.argv[1])
            slot = table.register(os.getpid())
            sleeper = subprocess.Popen(["sleep", "100"], close_fds=False)
            say(slot, sleeper.pid)
            signal.pause()
            """,
            path,
        )
        slot, sleeper = map(int, child.heard().split())
        child.kill()
        eventually(lambda: not table.is_alive(slot), "the lock ends at exec", seconds=5)
        os.kill(sleeper, 0)

    def test_a_pid_is_only_a_label(self, table):
        slot = table.register(2**31 - 1)
        assert table.is_alive(slot)
        table.unregister(slot)
        assert not table.is_alive(slot)

    def test_a_record_without_a_lock_is_not_alive(self, path, table):
        raw = TableFile(path)
        raw.records["status"][2] = 5 << 8 | SlotState.USED
        raw.records["pid"][2] = ME
        assert not table.is_alive(2)
        assert list(table) == []
        assert table.snapshot(2).pid == ME

    def test_a_snapshot_is_of_one_registration_while_the_slot_changes_hands(self, script, path):
        with HeartbeatTable.create(path, 1) as table:
            # Written by hand, in the order of a registration: register() takes too long between two incarnations.
            child = script(
                """
                record = TableFile(sys.argv[1]).records[0:1]
                status, pid, role = record["status"], record["pid"], record["role"]
                epoch, bitmap = record["last_seen_epoch"], record["in_flight_bitmap"]
                say("comes and goes")
                for n in range(1, 2**31):
                    status[0] = n << 8
                    pid[0] = n
                    role[0] = 1 + n % 2
                    epoch[0] = n
                    bitmap[0] = n * n
                    status[0] = n + 1 << 8 | 1
                """,
                path,
            )
            child.heard("comes and goes")
            pids, nobody = set(), 0
            deadline = time.monotonic() + WAIT_S
            while (len(pids) < 3000 or not nobody) and time.monotonic() < deadline:
                for _ in range(1000):
                    seen = table.snapshot(0)
                    if seen is None:
                        nobody += 1
                        continue
                    n = seen.pid
                    assert seen == (n, n, n * n, 1 + n % 2)
                    pids.add(n)
            assert len(pids) > 1
            assert nobody

    def test_a_snapshot_does_not_wait_for_a_writer_that_died_half_way(self, path, table):
        raw = TableFile(path)
        raw.records["pid"], raw.records["role"] = 77, 1
        for state in (SlotState.FREE, SlotState.DYING, 3, 255):
            raw.records["status"] = 9 << 8 | state
            assert [table.snapshot(slot) for slot in range(4)] == [None] * 4
            assert list(table) == []

    def test_random_bytes_in_records_give_errors_and_no_crash(self, run_script, path):
        run_script(
            """
            import random
            faulthandler.dump_traceback_later(50, exit=True)
            for seed in range(3):
                dice = random.Random(seed)
                table = HeartbeatTable.create(f"{sys.argv[1]}.{seed}", 4)
                raw = TableFile(f"{sys.argv[1]}.{seed}")
                words = raw.records.view("<u8")
                mine = []
                for _ in range(6000):
                    if dice.random() < 0.3:
                        status = dice.randrange(9) << 8 | dice.randrange(3)
                        value = dice.choice([dice.getrandbits(64), dice.randrange(4), status])
                        words[dice.randrange(words.size)] = value
                    i = dice.randrange(-1, 6)
                    try:
                        match dice.randrange(11):
                            case 0: mine.append(table.register(dice.randrange(1, 99), auto_beat=dice.random() < 0.5))
                            case 1: mine and table.unregister(mine.pop())
                            case 2: table.beat(i)
                            case 3: table.mark_in_flight(i, dice.randrange(64), dice.getrandbits(32))
                            case 4: table.clear_in_flight(i, dice.randrange(64))
                            case 5: table.in_flight_cell(i, dice.randrange(64))
                            case 6: assert (seen := table.snapshot(i)) is None or len(seen) == 4
                            case 7: assert table.is_alive(i) in (True, False)
                            case 8: assert all(0 <= slot < 4 for slot in table)
                            case 9: table.completed(i), table.add_completed(i)
                            case 10: raw.epoch[0] = dice.getrandbits(64); assert table.tick_global_epoch() <= 2**64
                    except HeartbeatError:
                        continue
                table.close()
                raw.records["status"] = 0
                with HeartbeatTable.open(f"{sys.argv[1]}.{seed}") as again:
                    assert [again.register(1) for _ in range(4)] == [0, 1, 2, 3]
            """,
            path,
        )


class TestTimer:
    def test_beats_go_on_while_the_gil_is_held(self, script, path, table, eventually):
        child = script(
            """
            table = HeartbeatTable.open(sys.argv[1])
            native, by_python = table.register(os.getpid(), auto_beat=True), table.register(os.getpid())

            def beat_in_python():
                while True:
                    table.beat(by_python)
                    time.sleep(0.001)

            threading.Thread(target=beat_in_python, daemon=True).start()
            say(native, by_python)
            heard()
            say("holds the GIL")
            3 ** 10**9
            say("let it go")
            """,
            path,
        )
        native, by_python = map(int, child.heard().split())
        for slot in (native, by_python):
            epoch = table.tick_global_epoch()
            eventually(lambda slot=slot, epoch=epoch: table.snapshot(slot).last_seen_epoch == epoch, "both beat")
        child.tell()
        child.heard("holds the GIL")
        for _ in range(3):
            epoch = table.tick_global_epoch()
            eventually(
                lambda epoch=epoch: table.snapshot(native).last_seen_epoch == epoch, "the native beat follows the epoch"
            )
        # the check of the check: no Python ran meanwhile
        assert table.snapshot(by_python).last_seen_epoch < epoch
        assert child.process.poll() is None

    def test_only_slots_that_asked_for_it_are_beaten(self, table, eventually):
        silent, beaten, also = (
            table.register(ME),
            table.register(ME, auto_beat=True),
            table.register(ME, auto_beat=True),
        )
        epoch = table.tick_global_epoch()
        for slot in (beaten, also):
            eventually(
                lambda slot=slot: table.snapshot(slot).last_seen_epoch == epoch, "the native beat follows the epoch"
            )
        assert table.snapshot(silent).last_seen_epoch == 0
        assert not table.snapshot(silent).in_flight_bitmap

    def test_a_slot_that_changed_hands_is_not_beaten_for_its_last_holder(self, path, table, eventually):
        first, clock = table.register(ME, auto_beat=True), table.register(ME, auto_beat=True)
        # as a rescuer does it when it takes this process for dead
        raw = TableFile(path)
        raw.records["status"][first] = 2 << 8 | SlotState.USED
        raw.records["last_seen_epoch"][first] = 0
        for _ in range(2):
            epoch = table.tick_global_epoch()
            eventually(
                lambda epoch=epoch: table.snapshot(clock).last_seen_epoch == epoch, "the native beat follows the epoch"
            )
        assert table.snapshot(first).last_seen_epoch == 0
        table.unregister(first)
        assert int(raw.records["status"][first]) == 2 << 8 | SlotState.USED

    def test_the_timer_thread_is_there_exactly_while_somebody_is_registered(self, run_script, shm):
        out = run_script(
            """
            def timers():
                found = []
                for task in os.listdir("/proc/self/task"):
                    try:
                        with open(f"/proc/self/task/{task}/status") as lines:
                            status = dict(line.split(":", 1) for line in lines)
                        if status["Name"].strip() == "subetha-timer":
                            found.append(int(status["SigBlk"], 16))
                    except (FileNotFoundError, ProcessLookupError):  # it ended before the open, or before the read
                        continue
                return found

            def become(n):
                deadline = time.monotonic() + 20
                while len(timers()) != n and time.monotonic() < deadline:
                    time.sleep(0.005)
                return len(timers()) == n

            table, ring = HeartbeatTable.create(sys.argv[1] + "/table", 4), SharedRing.create(sys.argv[1] + "/ring", 4)
            say("opened", len(timers()))
            slots = [table.register(os.getpid()), table.register(os.getpid(), auto_beat=True)]
            ring.try_push(b"x")
            say("registered", become(1))
            # no signal may land there: the main thread is the one that Python's handlers interrupt
            handled = (signal.SIGINT, signal.SIGTERM, signal.SIGCHLD)
            say("signals blocked", all(timers()[0] >> (number - 1) & 1 for number in handled))
            pid = os.fork()
            if pid == 0:
                assert len(timers()) == 0
                own = table.register(os.getpid(), auto_beat=True)
                assert become(1)
                epoch = table.tick_global_epoch()
                while table.snapshot(own).last_seen_epoch < epoch:
                    time.sleep(0.005)
                table.close()
                assert become(0)
                os._exit(0)
            say("child", os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]))
            table.unregister(slots[0])
            table.close()
            say("one left", become(1))
            ring.close()
            say("none left", become(0))
            with HeartbeatTable.open(sys.argv[1] + "/table") as again:
                again.register(os.getpid())
                say("another", become(1))
            say("end", become(0))
            """,
            shm,
        )
        assert out.splitlines() == [
            "opened 0",
            "registered True",
            "signals blocked True",
            "child 0",
            "one left True",
            "none left True",
            "another True",
            "end True",
        ]

    def test_a_process_that_still_is_registered_ends_at_once(self, path):
        # the timer must not hold up the end of the interpreter
        code = """
import sys
from subetha._core import HeartbeatTable
table = HeartbeatTable.create(sys.argv[1], 2)
table.register(1, auto_beat=True)
"""
        ended = subprocess.run(
            [sys.executable, "-c", code, path],
            env=os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)},
            capture_output=True,
            timeout=WAIT_S,
        )
        assert (ended.returncode, ended.stderr) == (0, b"")
        with HeartbeatTable.open(path) as table:
            assert list(table) == []

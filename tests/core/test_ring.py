"""SharedRing, one process: what goes in comes out, what its limits are, and how it says so."""

import array
import contextlib
import copy
import ctypes
import gc
import math
import os
import pickle
import queue
import stat

import numpy as np
import pytest

from subetha._core import Mapped, SharedRing
from subetha.errors import (
    Empty,
    Full,
    HeartbeatError,
    LayoutMismatch,
    PayloadTooLarge,
    SubethaError,
    TableFull,
    TransportError,
)
from subetha.layout import LINE, RING_PARTICIPANTS, CellState, SlotState

from .ring_file import RingFile, asleep_on
from .traffic import payload_of

WAIT_S = 30

CALLS = {
    "try_push": lambda ring: ring.try_push(b"x"),
    "push": lambda ring: ring.push(b"x", timeout=WAIT_S),
    "push_many": lambda ring: ring.push_many([b"x", b"y"]),
    "rescue": lambda ring: ring.rescue(),
    "try_pop": lambda ring: ring.try_pop(),
    "pop": lambda ring: ring.pop(timeout=WAIT_S),
    "pop_many": lambda ring: ring.pop_many(2),
    "try_claim": lambda ring: ring.try_claim(),
    "claim": lambda ring: ring.claim(timeout=WAIT_S),
    "cells": lambda ring: ring.cells(),
    "repair": lambda ring: ring.repair(),
    "__len__": len,
    "__enter__": lambda ring: ring.__enter__(),
}
WRITING_CALLS = set(CALLS) - {"cells", "__len__", "__enter__"}


def open_descriptors():
    # those of earlier tests' handles go first
    gc.collect()
    return set(os.listdir("/proc/self/fd"))


class TestCreation:
    @pytest.mark.parametrize("capacity", [2, 4, 64, 2**20])
    def test_a_new_ring_is_empty_and_has_the_capacity_asked_for(self, path, capacity):
        with SharedRing.create(path, capacity, payload_bytes=8) as ring:
            assert ring.capacity == capacity
            assert len(ring) == 0
            assert ring.payload_bytes == 8
            assert not ring.closed
            with pytest.raises(Empty):
                ring.try_pop()

    def test_the_largest_ring_takes_as_many_messages_as_it_has_cells(self, path):
        with SharedRing.create(path, 2**20, payload_bytes=8) as ring:
            messages = [b"%d" % i for i in range(2**14)] * 2**6
            assert ring.push_many([*messages, b"no room"]) == len(ring) == 2**20
            with pytest.raises(Full, match="all 1048576 cells"):
                ring.try_push(b"more")
            assert ring.pop_many(2**21) == messages

    def test_the_default_payload_is_56_bytes_and_the_default_mode_the_owners_alone(self, path, ring):
        assert ring.payload_bytes == 56
        assert stat.S_IMODE(path.stat().st_mode) == 0o600

    @pytest.mark.parametrize("make", [SharedRing.create, SharedRing.open_or_create])
    @pytest.mark.parametrize("capacity", [-4, 0, 1, 3, 6, 2**20 - 1, 2**20 + 2, 2**21, 2**70])
    def test_a_capacity_outside_its_limits_is_refused_with_them(self, path, make, capacity):
        with pytest.raises(
            ValueError, match=rf"capacity: expected a power of two from 2 to 1048576, found {capacity}$"
        ):
            make(path, capacity)
        assert not path.exists()

    @pytest.mark.parametrize("make", [SharedRing.create, SharedRing.open_or_create])
    @pytest.mark.parametrize("capacity", [True, 4.0, "4", None, b"4"])
    def test_a_capacity_that_is_no_int_is_refused(self, path, make, capacity):
        with pytest.raises(TypeError, match=rf"capacity: expected an int, found {type(capacity).__name__}"):
            make(path, capacity)
        assert not path.exists()

    @pytest.mark.parametrize("make", [SharedRing.create, SharedRing.open_or_create])
    @pytest.mark.parametrize("payload_bytes", [-8, 0, 7, 4089, 2**40])
    def test_a_payload_size_outside_its_limits_is_refused_with_them(self, path, make, payload_bytes):
        with pytest.raises(ValueError, match=rf"payload_bytes: expected 8 to 4088, found {payload_bytes}$"):
            make(path, 4, payload_bytes=payload_bytes)
        assert not path.exists()

    @pytest.mark.parametrize("make", [SharedRing.create, SharedRing.open_or_create])
    @pytest.mark.parametrize("payload_bytes", [True, 56.0, None, "56"])
    def test_a_payload_size_that_is_no_int_is_refused(self, path, make, payload_bytes):
        with pytest.raises(TypeError, match=rf"payload_bytes: .*found {type(payload_bytes).__name__}"):
            make(path, 4, payload_bytes=payload_bytes)
        assert not path.exists()

    @pytest.mark.parametrize("umask", [0o000, 0o022, 0o077, 0o777])
    @pytest.mark.parametrize("mode", [0o600, 0o640, 0o660, 0o666])
    def test_the_mode_is_kept_under_any_umask(self, path, umask, mode):
        before = os.umask(umask)
        try:
            SharedRing.create(path, 2, mode=mode).close()
        finally:
            os.umask(before)
        assert stat.S_IMODE(path.stat().st_mode) == mode

    def test_an_existing_file_is_never_replaced(self, path, ring):
        ring.try_push(b"kept")
        before = path.read_bytes()
        with pytest.raises(FileExistsError, match="exists; open it, or choose another name") as caught:
            SharedRing.create(path, 2)
        assert caught.value.filename == str(path)
        assert path.read_bytes() == before
        assert ring.try_pop() == b"kept"

    def test_a_link_to_nowhere_is_never_followed(self, shm, path):
        path.symlink_to(shm / "elsewhere")
        with pytest.raises(FileExistsError):
            SharedRing.create(path, 2)
        assert not (shm / "elsewhere").exists()

    @pytest.mark.parametrize("kind", [str, os.fsencode, lambda path: path])
    def test_a_path_may_be_str_bytes_or_pathlike(self, path, kind):
        with SharedRing.create(kind(path), 2) as made, SharedRing.open(kind(path)) as opened:
            assert made.path == opened.path == str(path)
            with SharedRing.open_or_create(kind(path), 2) as again:
                made.try_push(b"one file")
                assert again.try_pop() == b"one file"

    def test_a_path_may_be_any_bytes(self, shm):
        name = os.fsencode(shm) + b"/\xff\xfe ring"
        with SharedRing.create(name, 2) as ring:
            assert os.fsencode(ring.path) == name
            with pytest.raises(Empty, match="no message waits"):
                ring.try_pop()

    def test_a_path_may_be_relative(self, shm, monkeypatch):
        monkeypatch.chdir(shm)
        with SharedRing.create("ring", 2) as made, SharedRing.open("ring") as opened:
            made.try_push(b"here")
            assert opened.try_pop() == b"here"
        assert (shm / "ring").exists()

    def test_neither_a_missing_directory_nor_a_missing_file_is_made(self, shm):
        with pytest.raises(FileNotFoundError):
            SharedRing.create(shm / "no" / "ring", 2)
        with pytest.raises(FileNotFoundError):
            SharedRing.open(shm / "ring")
        assert list(shm.iterdir()) == []

    def test_nothing_but_the_file_itself_is_left_in_the_directory(self, shm, path, ring):
        ring.try_push(b"x")
        assert list(shm.iterdir()) == [path]

    def test_the_constructor_names_what_to_call_instead(self):
        with pytest.raises(TypeError, match=r"SharedRing\.create\(path, capacity\)"):
            SharedRing()

    def test_a_handle_is_neither_copied_nor_pickled(self, ring):
        for attempt in (copy.copy, copy.deepcopy, pickle.dumps):
            with pytest.raises(TypeError):
                attempt(ring)


class TestOpening:
    def test_open_or_create_creates_once_and_then_opens(self, path):
        with SharedRing.open_or_create(path, 4) as made:
            made.try_push(b"first")
            with SharedRing.open_or_create(path, 4) as opened:
                assert opened.try_pop() == b"first"

    def test_open_or_create_refuses_another_capacity_or_payload_size(self, path, ring):
        ring.try_push(b"kept")
        with pytest.raises(
            LayoutMismatch, match="expected capacity 8 and payload_bytes 56, found 4 and 56; open it with open"
        ) as caught:
            SharedRing.open_or_create(path, 8)
        assert str(path) in str(caught.value)
        with pytest.raises(LayoutMismatch, match="expected capacity 4 and payload_bytes 57, found 4 and 56"):
            SharedRing.open_or_create(path, 4, payload_bytes=57)
        assert ring.try_pop() == b"kept"

    def test_open_or_create_keeps_the_mode_asked_for(self, path):
        SharedRing.open_or_create(path, 2, mode=0o660).close()
        assert stat.S_IMODE(path.stat().st_mode) == 0o660

    def test_a_refused_file_leaves_no_descriptor_open(self, shm, path, ring):
        (shm / "text").write_bytes(b"not a ring " * 100)
        before = open_descriptors()
        for _ in range(3):
            with pytest.raises(LayoutMismatch):
                SharedRing.open(shm / "text")
            with pytest.raises(LayoutMismatch):
                SharedRing.open_or_create(path, 8)
            with pytest.raises(FileExistsError):
                SharedRing.create(path, 4)
            gc.collect()
        assert open_descriptors() == before

    def test_a_closed_handle_leaves_no_descriptor_open(self, path, ring):
        before = open_descriptors()
        for _ in range(3):
            with SharedRing.open(path) as other:
                other.try_push(b"x")
                other.try_pop()
        gc.collect()
        assert open_descriptors() == before

    @pytest.mark.skipif(os.geteuid() != 0, reason="only root can give a file away")
    def test_a_file_of_another_user_is_refused_unless_it_was_made_for_a_group(self, shm):
        private, shared = shm / "private", shm / "shared"
        SharedRing.create(private, 2).close()
        SharedRing.create(shared, 2, mode=0o660).close()
        os.chown(private, 12345, -1)
        # what the file is allowed later does not count: its maker did not ask for it
        os.chmod(private, 0o666)
        os.chown(shared, 12345, -1)
        with pytest.raises(
            PermissionError, match=r"belongs to user 12345 .*mode 600.*group mode such as 0o660"
        ) as caught:
            SharedRing.open(private)
        assert caught.value.filename == str(private)
        with pytest.raises(PermissionError):
            SharedRing.open(private, readonly=True)
        with SharedRing.open(shared) as ring:
            ring.try_push(b"welcome")
            assert ring.try_pop() == b"welcome"

    def test_handles_of_one_file_see_each_others_messages(self, path, ring):
        with SharedRing.open(path) as other:
            ring.try_push(b"there")
            assert len(other) == 1
            assert other.try_pop() == b"there"
            other.try_push(b"and back")
            assert ring.try_pop() == b"and back"

    def test_what_was_pushed_outlives_its_handle(self, path, ring):
        with SharedRing.open(path) as other:
            other.push_many([b"a", b"b"])
        assert ring.pop_many(3) == [b"a", b"b"]


class TestOrder:
    def test_one_message_goes_in_and_comes_out(self, ring):
        assert ring.try_push(b"hello") is None
        assert len(ring) == 1
        assert ring.try_pop() == b"hello"
        assert len(ring) == 0

    @pytest.mark.parametrize("capacity", [2, 4, 16])
    def test_first_in_is_first_out_over_many_laps(self, path, capacity):
        with SharedRing.create(path, capacity) as ring:
            pushed = popped = 0
            for step in range(1000):
                for _ in range(step % capacity + 1):
                    if pushed - popped < capacity:
                        ring.try_push(payload_of(1, pushed))
                        pushed += 1
                for _ in range(step * 7 % capacity + 1):
                    if popped < pushed:
                        assert ring.try_pop() == payload_of(1, popped)
                        popped += 1
                assert len(ring) == pushed - popped

    @pytest.mark.parametrize("capacity", [2, 4, 16])
    def test_full_is_said_exactly_at_the_capacity(self, path, capacity):
        with SharedRing.create(path, capacity) as ring:
            for _ in range(3):
                for i in range(capacity):
                    ring.try_push(b"%d" % i)
                with pytest.raises(
                    Full, match=f"all {capacity} cells hold a message that waits or is claimed"
                ) as caught:
                    ring.try_push(b"more")
                assert str(path) in str(caught.value)
                assert len(ring) == capacity
                assert ring.try_pop() == b"0"
                ring.try_push(b"again")
                with pytest.raises(Full):
                    ring.push(b"more", timeout=0)
                assert ring.pop_many(capacity + 1) == [*(b"%d" % i for i in range(1, capacity)), b"again"]
                with pytest.raises(Empty, match="no message waits"):
                    ring.try_pop()

    def test_a_ring_is_true_even_when_it_is_empty(self, ring):
        assert ring

    def test_push_many_says_how_many_went_in(self, ring):
        assert ring.push_many([]) == 0
        assert ring.push_many([b"a", b"b", b"c"]) == 3
        assert ring.push_many([b"d", b"e"]) == 1
        assert ring.push_many([b"f"]) == 0
        assert ring.pop_many(10) == [b"a", b"b", b"c", b"d"]

    def test_push_many_takes_any_iterable(self, ring):
        assert ring.push_many(bytes([i]) for i in range(2)) == 2
        assert ring.push_many((bytearray(b"x"), memoryview(b"y"))) == 2
        assert ring.pop_many(4) == [b"\0", b"\1", b"x", b"y"]

    def test_pop_many_gives_what_is_there_up_to_n(self, ring):
        assert ring.pop_many(3) == []
        ring.push_many([b"a", b"b", b"c"])
        assert ring.pop_many(0) == []
        assert ring.pop_many(2) == [b"a", b"b"]
        assert ring.pop_many(2**62) == [b"c"]

    def test_pop_many_refuses_what_is_no_count(self, ring):
        with pytest.raises(ValueError, match="n: expected 0 or more, found -1"):
            ring.pop_many(-1)
        with pytest.raises(TypeError):
            ring.pop_many("2")
        with pytest.raises(TypeError):
            ring.pop_many(1.5)

    def test_claimed_messages_are_not_counted_but_keep_their_cells(self, ring):
        ring.push_many([b"a", b"b", b"c", b"d"])
        claims = [ring.try_claim(), ring.try_claim()]
        assert len(ring) == 2
        with pytest.raises(Full):
            ring.try_push(b"e")
        claims[0].ack()
        ring.try_push(b"e")
        claims[1].ack()
        assert ring.pop_many(9) == [b"c", b"d", b"e"]

    def test_pops_and_claims_take_from_the_same_end(self, ring):
        ring.push_many([b"a", b"b", b"c", b"d"])
        assert ring.try_pop() == b"a"
        first = ring.try_claim()
        assert ring.pop(timeout=0) == b"c"
        second = ring.claim(timeout=0)
        assert (first.tobytes(), second.tobytes()) == (b"b", b"d")
        second.ack()
        first.ack()


class TestBatches:
    """push_many and pop_many write and take by batches of 32; no edge of one may show."""

    @pytest.mark.parametrize("count", [31, 32, 33, 65, 100])
    def test_any_number_of_messages_comes_back_whole_and_in_order(self, path, count):
        messages = [payload_of(1, i, 8 + i % 49) for i in range(count)]
        with SharedRing.create(path, 128) as ring:
            for taken_at_once in (count, 2**20, 33, 1):
                assert ring.push_many(messages) == len(ring) == count
                got = []
                while len(got) < count:
                    got += ring.pop_many(taken_at_once)
                    assert len(ring) == count - len(got)
                assert got == messages
                assert ring.pop_many(1) == []
            assert RingFile(path).states == [CellState.FREE] * 128

    @pytest.mark.parametrize("n", [31, 32, 33, 64, 65])
    def test_pop_many_takes_no_more_than_it_was_asked_for(self, path, n):
        messages = [payload_of(1, i) for i in range(100)]
        with SharedRing.create(path, 128) as ring:
            ring.push_many(messages)
            assert ring.pop_many(n) == messages[:n]
            assert len(ring) == 100 - n
            assert ring.try_pop() == messages[n]

    @pytest.mark.parametrize(("capacity", "waiting"), [(2, 0), (4, 1), (64, 0), (64, 1), (64, 31), (64, 33), (64, 64)])
    def test_a_ring_that_becomes_full_on_the_way_takes_exactly_what_fits(self, path, capacity, waiting):
        earlier = [payload_of(1, i) for i in range(waiting)]
        messages = [payload_of(2, i) for i in range(100)]
        with SharedRing.create(path, capacity) as ring:
            for _ in range(3):
                assert ring.push_many(earlier) == waiting
                assert ring.push_many(messages) == capacity - waiting
                assert RingFile(path).states == [CellState.READY] * capacity
                assert ring.push_many(messages) == 0
                with pytest.raises(Full):
                    ring.try_push(b"more")
                assert ring.pop_many(200) == earlier + messages[: capacity - waiting]
                assert RingFile(path).states == [CellState.FREE] * capacity

    def test_claimed_cells_in_the_way_are_stepped_over(self, path):
        messages = [payload_of(2, i) for i in range(100)]
        with SharedRing.create(path, 64) as ring:
            ring.push_many([payload_of(1, i) for i in range(64)])
            held = {}
            for i in range(64):
                claim = ring.try_claim()
                if i in {0, 31, 32, 40}:
                    held[i] = claim
                else:
                    claim.ack()
            assert ring.push_many(messages) == 60
            assert ring.pop_many(100) == messages[:60]
            for i, claim in held.items():
                assert claim.tobytes() == payload_of(1, i)
                claim.ack()
            assert ring.push_many(messages) == 64

    @pytest.mark.parametrize("place", [0, 1, 31, 32, 40, 64, 99])
    @pytest.mark.parametrize("spoilt", ["grown", "gone"])
    def test_a_payload_spoilt_after_it_was_checked_stays_out_alone_with_all_behind_it(
        self, path, monkeypatch, place, spoilt
    ):
        buffer = bytearray(payload_of(1, place))
        view = memoryview(buffer) if spoilt == "gone" else buffer
        messages = [payload_of(1, i) for i in range(100)]
        getpid = os.getpid

        def spoil():
            # the first call on a handle asks for the pid to take its number: other threads run meanwhile, too
            view.release() if spoilt == "gone" else buffer.extend(b"\xff" * 244)
            return getpid()

        with SharedRing.create(path, 128) as ring:
            with monkeypatch.context() as patch:
                patch.setattr(os, "getpid", spoil)
                error, text = {
                    "grown": (PayloadTooLarge, "expected at most 56 bytes, found 300; send less"),
                    "gone": (ValueError, "released memoryview"),
                }[spoilt]
                with pytest.raises(error, match=text):
                    ring.push_many([*messages[:place], view, *messages[place + 1 :]])
            buffer.clear()
            raw = RingFile(path)
            assert raw.states == [CellState.READY] * place + [CellState.FREE] * (128 - place)
            assert b"\xff" not in raw.contents[raw.cells_at :].tobytes()
            assert len(ring) == place
            assert ring.pop_many(200) == messages[:place]
            assert ring.push_many(messages + messages) == 128
            assert ring.pop_many(200) == (messages + messages)[:128]

    def test_a_spoilt_payload_does_not_keep_who_sleeps_from_the_messages_before_it(
        self, path, monkeypatch, in_threads, eventually
    ):
        payload = bytearray(b"short")
        getpid = os.getpid
        SharedRing.create(path, 64).close()
        with SharedRing.open(path) as popper, SharedRing.open(path) as pusher:
            assert popper.pop_many(1) == []  # which takes its number
            items = RingFile(path).lines["items"]

            def grow():
                payload.extend(bytes(300))
                return getpid()

            def push():
                eventually(lambda: asleep_on(items) == 2, "both sleep")
                with monkeypatch.context() as patch:
                    patch.setattr(os, "getpid", grow)
                    with pytest.raises(PayloadTooLarge):
                        pusher.push_many([b"a", b"b", payload, b"c"])
                return asleep_on(items)

            *popped, still_asleep = in_threads(lambda: popper.pop(WAIT_S), lambda: popper.pop(WAIT_S), push)
            assert sorted(popped) == [b"a", b"b"]
            assert still_asleep == 0


class TestPayloads:
    @pytest.mark.parametrize("payload_bytes", [8, 9, 56, 64, 1000, 4088])
    def test_every_length_up_to_the_limit_comes_back_exactly(self, path, payload_bytes):
        with SharedRing.create(path, 2, payload_bytes=payload_bytes) as ring:
            for length in {0, 1, 7, 8, payload_bytes // 2, payload_bytes - 1, payload_bytes}:
                payload = os.urandom(length)
                ring.try_push(payload)
                ring.push(payload[::-1])
                assert ring.try_pop() == payload
                assert ring.pop() == payload[::-1]

    def test_a_shorter_payload_brings_nothing_of_the_longer_one_before_it(self, path):
        with SharedRing.create(path, 2) as ring:
            for payload in [b"x" * 56, b"y" * 56, b"", b"a", b"bc"]:
                ring.try_push(payload)
                assert ring.try_pop() == payload

    @pytest.mark.parametrize(
        "payload",
        [
            b"12345678",
            bytearray(b"12345678"),
            memoryview(b"012345678")[1:],
            memoryview(b"12345678").cast("I"),
            array.array("B", b"12345678"),
            np.frombuffer(b"12345678", np.uint8),
            np.frombuffer(b"12345678", "<u4"),
            np.frombuffer(b"12345678", np.uint8).reshape(2, 4),
            (ctypes.c_char * 8).from_buffer_copy(b"12345678"),
            type("Bytes", (bytes,), {})(b"12345678"),
        ],
        ids=lambda payload: type(payload).__name__,
    )
    def test_any_contiguous_buffer_is_a_payload_and_comes_back_as_bytes(self, ring, payload):
        ring.try_push(payload)
        ring.push(payload)
        assert ring.push_many([payload]) == 1
        got = ring.pop_many(3)
        assert got == [b"12345678"] * 3
        assert {type(one) for one in got} == {bytes}

    @pytest.mark.parametrize("call", ["try_push", "push"])
    def test_a_buffer_is_let_go_of_however_the_push_ends(self, ring, call):
        payload = bytearray(b"12345678")
        getattr(ring, call)(payload)
        payload.extend(b"9")
        ring.push_many([payload, payload, payload])
        payload.extend(b"0")
        with pytest.raises(Full):
            ring.push(payload, timeout=0) if call == "push" else ring.try_push(payload)
        payload.extend(bytes(56))
        with pytest.raises(PayloadTooLarge):
            getattr(ring, call)(payload)
        with pytest.raises(PayloadTooLarge):
            ring.push_many([payload])
        payload.clear()

    def test_a_payload_without_one_contiguous_run_of_bytes_is_refused(self, ring):
        for push in (ring.try_push, ring.push, lambda payload: ring.push_many([b"before", payload])):
            with pytest.raises(BufferError, match="not C-contiguous"):
                push(memoryview(b"12345678")[::2])
            # numpy has its own mind about the class
            with pytest.raises((BufferError, ValueError), match="not C-contiguous"):
                push(np.zeros(8, np.uint8)[::2])
            with pytest.raises((BufferError, ValueError), match="not C-contiguous"):
                push(np.asfortranarray(np.zeros((2, 4), np.uint8)))
        assert len(ring) == 0

    @pytest.mark.parametrize("payload", ["text", None, 7, 1.5, ["a"], {}], ids=repr)
    def test_what_is_no_buffer_is_refused(self, ring, payload):
        for push in (ring.try_push, ring.push, lambda payload: ring.push_many([b"before", payload])):
            with pytest.raises(TypeError) as caught:
                push(payload)
            if isinstance(payload, str):
                assert "found str; encode it first" in str(caught.value)
        assert len(ring) == 0

    def test_a_payload_too_long_is_refused_with_both_lengths(self, path, ring):
        for push in (ring.try_push, ring.push, lambda payload: ring.push_many([b"before", payload])):
            with pytest.raises(PayloadTooLarge, match="expected at most 56 bytes, found 57; send less") as caught:
                push(bytes(57))
            assert str(path) in str(caught.value)
            assert isinstance(caught.value, TransportError)
            assert isinstance(caught.value, ValueError)
        assert len(ring) == 0

    def test_a_payload_that_grows_after_it_was_checked_overwrites_nothing(self, path, ring, monkeypatch):
        payload = bytearray(b"short")
        getpid = os.getpid

        def grow():
            # the first call on a handle asks for the pid to take its number: other threads run meanwhile, too
            payload.extend(b"\xff" * 300)
            return getpid()

        monkeypatch.setattr(os, "getpid", grow)
        with contextlib.suppress(PayloadTooLarge, BufferError):
            ring.push_many([payload])
        raw = RingFile(path)
        assert b"\xff" not in raw.contents[raw.cells_at + raw.stride :].tobytes()
        assert ring.pop_many(2) in ([], [b"short"])


class TestTimeouts:
    WAITING_CALLS = (
        ("pop", Empty, lambda ring, timeout: ring.pop(timeout), r"no message came in {} s"),
        ("claim", Empty, lambda ring, timeout: ring.claim(timeout=timeout), r"no message came in {} s"),
        ("push", Full, lambda ring, timeout: ring.push(b"x", timeout), r"none came free in {} s"),
    )

    @pytest.fixture(params=WAITING_CALLS, ids=[name for name, *_ in WAITING_CALLS])
    def waiting(self, request, ring):
        """A call that has to wait, with its error and the text of that."""
        _, error, call, text = request.param
        if error is Full:
            ring.push_many([b"x"] * 4)
        return error, lambda timeout: call(ring, timeout), text

    @pytest.mark.parametrize("timeout", [0, 0.0, 1e-9, 0.01, np.float64(0.01), False])
    def test_a_wait_ends_at_its_timeout_and_names_it(self, waiting, timeout):
        error, call, text = waiting
        with pytest.raises(error, match=text.format(timeout)):
            call(timeout)

    @pytest.mark.parametrize("timeout", [-1, -0.001, -math.inf, math.nan])
    def test_a_timeout_that_is_no_time_to_wait_is_refused(self, waiting, timeout):
        _, call, _ = waiting
        with pytest.raises(ValueError, match=f"timeout: expected None or seconds >= 0, found {timeout}"):
            call(timeout)

    @pytest.mark.parametrize("timeout", ["1", b"1", [], 1j])
    def test_a_timeout_that_is_no_number_is_refused(self, waiting, timeout):
        _, call, _ = waiting
        with pytest.raises(TypeError):
            call(timeout)

    @pytest.mark.parametrize("timeout", [-1, math.nan, "1"])
    def test_a_wrong_timeout_is_refused_also_where_nothing_need_be_waited_for(self, ring, timeout):
        ring.try_push(b"a")
        for call in (ring.pop, ring.claim, lambda timeout: ring.push(b"b", timeout)):
            with pytest.raises((ValueError, TypeError)):
                call(timeout)
        assert ring.pop_many(9) == [b"a"]

    def test_full_and_empty_are_what_users_of_queue_catch(self, ring):
        with pytest.raises(queue.Empty) as empty:
            ring.pop(timeout=0)
        ring.push_many([b"x"] * 4)
        with pytest.raises(queue.Full) as full:
            ring.push(b"x", timeout=0)
        for caught in (empty, full):
            assert isinstance(caught.value, TransportError)
            assert isinstance(caught.value, SubethaError)

    @pytest.mark.parametrize("timeout", [None, 0, 0.5, 1e300, math.inf])
    def test_nothing_is_waited_for_where_nothing_need_be(self, ring, timeout):
        ring.push(b"a", timeout)
        ring.push(b"b", timeout=timeout)
        assert ring.pop(timeout) == b"a"
        claim = ring.claim(timeout)
        assert claim.tobytes() == b"b"
        claim.ack()

    @pytest.mark.parametrize("timeout", [None, WAIT_S, 1e12, math.inf])
    def test_a_wait_ends_when_what_it_waits_for_comes(self, path, ring, timeout, in_threads, eventually):
        lines = RingFile(path).lines

        def give(word, action):
            eventually(lambda: lines[word][0] & 1, "somebody sleeps")
            action()

        popped, _ = in_threads(lambda: ring.pop(timeout), lambda: give("items", lambda: ring.try_push(b"item")))
        assert popped == b"item"
        claim, _ = in_threads(lambda: ring.claim(timeout), lambda: give("items", lambda: ring.push_many([b"job"])))
        assert claim.tobytes() == b"job"
        ring.push_many([b"x"] * 3)
        in_threads(lambda: ring.push(b"last", timeout), lambda: give("space", claim.ack))
        in_threads(lambda: ring.push(b"more", timeout), lambda: give("space", ring.try_pop))
        assert ring.pop_many(9) == [b"x", b"x", b"last", b"more"]


class TestHandles:
    def test_every_public_call_is_among_those_tested(self):
        properties = {"capacity", "payload_bytes", "path", "closed", "header", "ring"}
        others = {"create", "open", "open_or_create", "close", "make_policy", "apply_migration"}
        public = {name for name in dir(SharedRing) if not name.startswith("_")}
        assert public == {name for name in CALLS if not name.startswith("_")} | properties | others

    @pytest.mark.parametrize("call", CALLS.values(), ids=CALLS)
    def test_a_closed_handle_refuses_every_call(self, path, call):
        ring = SharedRing.create(path, 4)
        ring.push_many([b"a", b"b"])
        ring.close()
        assert ring.closed
        with pytest.raises(ValueError, match="this handle is closed") as caught:
            call(ring)
        assert str(path) in str(caught.value)
        with SharedRing.open(path) as other:
            assert other.pop_many(9) == [b"a", b"b"]

    def test_a_closed_handle_still_says_what_it_was(self, path):
        ring = SharedRing.create(path, 4, payload_bytes=99)
        ring.close()
        assert (ring.capacity, ring.payload_bytes, ring.path) == (4, 99, str(path))
        assert ring

    def test_closing_twice_is_closing_once(self, path):
        ring = SharedRing.create(path, 4)
        ring.try_push(b"x")
        ring.close()
        ring.close()
        with SharedRing.open(path) as other:
            # whoever comes next holds the number that the closed handle had
            other.try_push(b"y")
            ring.close()
            assert RingFile(path).used_slots == [0]
            assert other.pop_many(3) == [b"x", b"y"]

    def test_a_with_statement_closes_and_lets_exceptions_through(self, path):
        with SharedRing.create(path, 4) as ring:
            assert isinstance(ring, SharedRing)
        assert ring.closed
        with pytest.raises(ZeroDivisionError), SharedRing.open(path) as ring:
            1 / 0  # noqa: B018
        assert ring.closed

    def test_a_handle_says_what_it_is(self, path):
        ring = SharedRing.create(path, 4)
        assert isinstance(ring, Mapped)
        assert repr(ring) == f"<SharedRing {str(path)!r} open>"
        ring.close()
        assert repr(ring) == f"<SharedRing {str(path)!r} closed>"
        with SharedRing.open(path, readonly=True) as looker:
            assert repr(looker) == f"<SharedRing {str(path)!r} read-only>"

    def test_a_subclass_is_made_by_its_own_calls(self, path):
        class Ring(SharedRing):
            def pop_text(self):
                return self.try_pop().decode()

        with Ring.create(path, 4) as made, Ring.open(path) as opened, Ring.open_or_create(path, 4) as again:
            made.try_push("grün".encode())
            assert opened.pop_text() == "grün"
            assert {type(made), type(opened), type(again)} == {Ring}

    def test_a_number_is_taken_at_the_first_push_pop_or_claim_and_given_up_at_the_end(self, path):
        SharedRing.create(path, 4).close()
        raw = RingFile(path)
        first_uses = {
            "try_push": lambda ring: ring.try_push(b"x"),
            "push_many": lambda ring: ring.push_many([b"x"]),
            "push": lambda ring: ring.push(b"x"),
            "try_pop": lambda ring: ring.try_pop(),
            "pop": lambda ring: ring.pop(),
            "try_claim": lambda ring: ring.try_claim().ack(),
            "pop_many": lambda ring: ring.pop_many(1),
            "repair": lambda ring: ring.repair(),
        }
        for incarnation, use in enumerate(first_uses.values(), 1):
            with SharedRing.open(path) as ring:
                len(ring)
                ring.cells()
                assert raw.used_slots == []
                use(ring)
                assert raw.used_slots == [0]
                assert raw.records["pid"][0] == os.getpid()
                assert int(raw.records["status"][0]) == incarnation << 8 | SlotState.USED
            assert int(raw.records["status"][0]) == incarnation << 8 | SlotState.FREE

    def test_handles_of_one_process_have_numbers_of_their_own(self, path, ring):
        ring.try_push(b"a")
        with SharedRing.open(path) as other:
            other.try_push(b"b")
            raw = RingFile(path)
            assert raw.used_slots == [0, 1]
            assert [raw.owner_of(0), raw.owner_of(1)] == [1, 2]
        assert raw.used_slots == [0]

    def test_a_dropped_handle_gives_up_its_number(self, path):
        ring = SharedRing.create(path, 4)
        ring.try_push(b"x")
        raw = RingFile(path)
        assert raw.used_slots == [0]
        del ring
        gc.collect()
        assert raw.used_slots == []

    def test_without_a_free_number_nothing_is_pushed_and_the_error_says_how_many_there_are(self, path, ring):
        raw = RingFile(path)
        raw.records["status"] = SlotState.USED
        with raw.all_slots_held():
            for call in (lambda: ring.try_push(b"x"), ring.try_pop, ring.try_claim, lambda: ring.push(b"x")):
                with pytest.raises(TableFull, match=f"all {RING_PARTICIPANTS} slots are taken; close a handle"):
                    call()
            raw.records["status"][RING_PARTICIPANTS - 1] = SlotState.FREE
            with pytest.raises(TableFull):
                ring.try_push(b"x")
        ring.try_push(b"x")
        assert raw.owner_of(0) == RING_PARTICIPANTS
        assert ring.try_pop() == b"x"

    def test_a_table_full_of_dead_participants_makes_room_by_itself(self, path, ring):
        ring.close()
        raw = RingFile(path)
        raw.records["status"] = SlotState.USED
        with SharedRing.open(path) as again:
            again.try_push(b"x")
            assert raw.used_slots == [raw.owner_of(0) - 1]
            assert again.try_pop() == b"x"

    def test_a_handle_whose_lock_was_closed_by_other_code_stops_taking_messages(self, run_script, path):
        out = run_script(
            """
            def with_lock():
                for fd in os.listdir("/proc/self/fdinfo"):
                    try:
                        if "OFDLCK" in open(f"/proc/self/fdinfo/{fd}").read():
                            return int(fd)
                    except FileNotFoundError:
                        continue

            ring = SharedRing.create(sys.argv[1], 4)
            ring.push_many([b"a", b"b"])
            os.close(with_lock())
            deadline = time.monotonic() + 30
            try:
                while time.monotonic() < deadline:
                    ring.try_push(ring.try_pop())
            except HeartbeatError as error:
                say(error)
            for call in (ring.try_pop, ring.try_claim, ring.pop, lambda: ring.push(b"x"), lambda: ring.pop_many(1)):
                try:
                    say("no error", call())
                except HeartbeatError:
                    say("refused")
            ring.close()
            with SharedRing.open(sys.argv[1]) as again:
                say(len(again.pop_many(9)) >= 1)
            """,
            path,
        ).splitlines()
        assert "the lock that proves this process alive is gone" in out[0]
        assert out[1:] == ["refused"] * 5 + ["True"]

    def test_errors_of_a_lost_lock_are_heartbeat_errors(self):
        assert issubclass(TableFull, HeartbeatError)
        assert not issubclass(HeartbeatError, TransportError)


class TestReadonly:
    @pytest.fixture
    def looker(self, path, ring):
        ring.push_many([b"a", b"bc"])
        with SharedRing.open(path, readonly=True) as handle:
            yield handle

    @pytest.mark.parametrize("name", sorted(WRITING_CALLS))
    def test_a_readonly_handle_refuses_to_change_anything(self, path, ring, looker, name):
        before = path.read_bytes()
        with pytest.raises(TransportError, match="opened read-only; open it without readonly=True") as caught:
            CALLS[name](looker)
        assert not isinstance(caught.value, queue.Full | queue.Empty)
        assert path.read_bytes() == before
        assert ring.pop_many(9) == [b"a", b"bc"]

    def test_a_readonly_handle_looks(self, ring, looker):
        assert (len(looker), looker.capacity, looker.payload_bytes) == (2, 4, 56)
        assert looker.cells()["length"].tolist()[:2] == [1, 2]
        ring.try_pop()
        assert len(looker) == 1

    def test_a_readonly_handle_leaves_no_trace(self, path, ring):
        ring.try_push(b"x")
        before = path.read_bytes()
        with SharedRing.open(path, readonly=True) as looker, looker:
            len(looker)
            looker.cells()
        looker.close()
        assert path.read_bytes() == before

    def test_a_file_without_write_permission_can_be_looked_at(self, shm):
        path = shm / "readable"
        SharedRing.create(path, 2, mode=0o400).close() if os.geteuid() == 0 else SharedRing.create(path, 2).close()
        path.chmod(0o400)
        with SharedRing.open(path, readonly=True) as looker:
            assert len(looker) == 0


class TestCells:
    def test_cells_shows_every_word_length_and_payload(self, path, ring):
        ring.push_many([b"abc", b""])
        ring.try_push(b"x" * 56)
        claim = ring.try_claim()
        cells = ring.cells()
        assert cells.shape == (4,)
        assert cells.dtype.names == ("word", "length", "payload")
        assert cells.dtype.itemsize % LINE == 0
        raw = RingFile(path)
        assert cells["word"].tolist() == raw.words.tolist()
        assert raw.states == [CellState.TAKEN, CellState.READY, CellState.READY, CellState.FREE]
        assert cells["length"].tolist()[:3] == [3, 0, 56]
        assert cells["payload"][0, :3].tobytes() == b"abc"
        assert cells["payload"].shape == (4, 56)
        claim.ack()
        assert raw.state_of(0) == CellState.FREE
        assert cells["word"].tolist() == raw.words.tolist()

    def test_cells_cannot_be_written_through(self, ring):
        cells = ring.cells()
        assert not cells.flags.writeable
        for change in (
            lambda: cells["word"].__setitem__(0, 1),
            lambda: cells["payload"].__setitem__((0, 0), 1),
            lambda: cells.__setitem__(0, cells[1]),
        ):
            with pytest.raises(ValueError, match="read-only"):
                change()

    def test_cells_stay_readable_after_the_handle_and_the_file_are_gone(self, run_script, path):
        out = run_script(
            """
            ring = SharedRing.create(sys.argv[1], 4)
            ring.try_push(b"still here")
            cells = ring.cells()
            payload = cells["payload"][0]
            ring.close()
            os.unlink(sys.argv[1])
            del ring
            gc.collect()
            say(cells["length"].tolist(), payload[:10].tobytes().decode())
            del cells
            gc.collect()
            say(payload[:10].tobytes().decode())
            """,
            path,
        )
        assert out.splitlines() == ["[10, 0, 0, 0] still here", "still here"]

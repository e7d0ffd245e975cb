"""Long jobs and results that are not copied on their way: handed in in pieces, read where they lie, answered in pieces."""

import contextlib
import gc
import itertools
import os
import warnings

import numpy as np
import pytest

from subetha._core import SubmitOptions, decode_submit, encode_result
from subetha.errors import ArenaFull, ArenaTooSmall, TransportError
from subetha.jobqueue import JobQueue
from subetha.pass_registry import Pass, PassRegistry, Pieces, joined, takes_buffers
from subetha.scheduler import MAPPED_BYTES, WorkerLoop
from subetha.wire import SUBMIT_HEADER_BYTES

WAIT_S = 60
LONG = MAPPED_BYTES + 12_345

PIECES = [b"head", memoryview(b"of it"), bytearray(b"x" * 70_000), np.arange(20_000), b"", b"end"]
WHOLE = b"".join(bytes(memoryview(piece)) for piece in PIECES)


def overwrite_all(handles):
    """Hand jobs in by turns until no block is left."""
    with contextlib.suppress(ArenaFull):
        for handle in itertools.cycle(handles):
            handle.submit(Pass(7, bytes(LONG)), wait=0)


def args_of(claim):
    return bytes(decode_submit(claim.payload)[1].args)


@pytest.mark.parametrize("durability", ["process", "disk"])
def test_what_is_handed_in_or_answered_in_pieces_comes_out_whole(tmp_path, durability):
    try:
        queue = JobQueue.create(tmp_path / "queue", 16, arena_bytes=2**22, durability=durability)
    except OSError as error:
        pytest.skip(str(error))
    with queue:
        for pieces in (PIECES, [b"short", b"ones"], [], [b"x" * 60_000, b"y" * 10_000]):
            whole = b"".join(bytes(memoryview(piece)) for piece in pieces)
            queue._submit(7, pieces, SubmitOptions())
            claim = queue.claim(WAIT_S)
            assert decode_submit(claim.payload)[1].closure_id == 7
            assert args_of(claim) == whole
            claim.reply_in_pieces(pieces)
            assert queue.recv(WAIT_S).result == whole
        assert queue.stats().states == {"FREE": 16}


def test_pieces_that_are_no_buffers_are_refused_and_nothing_changes(make):
    queue = make()
    with pytest.raises(TypeError):
        queue._submit(7, [b"x", 5], SubmitOptions())
    with pytest.raises((BufferError, ValueError)):
        queue._submit(7, [memoryview(b"abcd")[::2]], SubmitOptions())
    queue.submit(Pass(7))
    claim = queue.claim(WAIT_S)
    with pytest.raises(TypeError):
        claim.reply_in_pieces(["text"])
    claim.reply_in_pieces([b"still held"])
    assert queue.recv(WAIT_S).result == b"still held"


def test_pieces_that_no_block_holds_are_refused(make):
    queue = make(arena_bytes=2**20)
    with pytest.raises(ArenaTooSmall):
        queue._submit(7, [bytes(2**20), bytes(2**20)], SubmitOptions())
    queue.submit(Pass(7))
    claim = queue.claim(WAIT_S)
    with pytest.raises(ArenaTooSmall):
        claim.reply_in_pieces([bytes(2**20), bytes(2**20)])
    claim.reply(encode_result(0, b"shorter"))
    assert queue.recv(WAIT_S).result == b"shorter"


def test_a_mapped_payload_is_the_frame_and_cannot_be_written_to(make):
    queue = make()
    queue.submit(Pass(7, os.urandom(LONG)))
    claim = queue.claim(WAIT_S)
    mapped = claim.map_payload()
    view = memoryview(mapped)
    assert (bytes(view), len(mapped), view.readonly) == (bytes(claim.payload), len(claim.payload), True)
    view.release()
    assert mapped.keep() is False
    claim.ack()
    assert len(bytes(mapped)) == len(mapped), "the mapping lives as long as its object"


def test_a_mapping_may_go_with_a_garbage_cycle(make):
    queue = make()
    queue.submit(Pass(7, bytes(LONG)))
    claim = queue.claim(WAIT_S)
    cycle = [claim.map_payload()]
    cycle.append(cycle)
    claim.ack()
    del claim, cycle
    gc.collect()
    queue.submit(Pass(7, b"still here"))
    queue.claim(WAIT_S).ack()


def test_what_lies_in_the_cell_is_not_mapped(make):
    queue = make()
    queue.submit(Pass(7, b"short"))
    claim = queue.claim(WAIT_S)
    assert claim.map_payload() is None
    claim.ack()


def test_what_is_kept_stays_as_it_is_when_the_block_is_another_jobs(make):
    queue = make(arena_bytes=2**20)
    data = os.urandom(LONG)
    queue.submit(Pass(7, data))
    claim = queue.claim(WAIT_S)
    mapped = claim.map_payload()
    kept = np.frombuffer(mapped, np.uint8)[SUBMIT_HEADER_BYTES:]
    assert mapped.keep() is True
    claim.ack()
    for n in range(8):
        # whichever block it takes: all of them have been another job's
        queue.submit(Pass(7, bytes([n]) * LONG))
        queue.claim(WAIT_S).ack()
    assert kept.tobytes() == data
    del kept, mapped


def test_a_claim_that_was_taken_away_maps_and_answers_nothing(make):
    queue = make()
    queue.submit(Pass(7, bytes(LONG)), timeout=0.01)
    claim = queue.claim(WAIT_S)
    claim.started()
    assert "JobTimeout" in repr(queue.recv(WAIT_S))
    with pytest.raises(TransportError, match="taken away"):
        claim.reply_in_pieces([b"late"])
    with pytest.raises(ValueError, match="over"):
        claim.map_payload()


def test_what_a_job_reads_in_place_stays_as_it_is_when_it_hears_that_it_was_taken_away(make):
    queue, worker = make(arena_bytes=2**20), make.open()
    data = os.urandom(LONG)
    queue.submit(Pass(7, data), timeout=0.01)
    claim = worker.claim(WAIT_S)
    claim.started()
    view = memoryview(claim.map_payload())[SUBMIT_HEADER_BYTES:]
    assert "JobTimeout" in repr(queue.recv(WAIT_S))
    with pytest.raises(TransportError, match="taken away"):
        claim.progress(1, 2)
    overwrite_all([queue])
    assert bytes(view) == data
    view.release()


class TestWorkerLoop:
    @pytest.fixture
    def loop(self, make):
        queue, handle = make(64, arena_bytes=2**22), make.open()
        registry = PassRegistry()
        return queue, WorkerLoop(handle.submit_side, registry=registry), registry

    def run(self, queue, loop, args):
        queue.submit(Pass(7, args))
        assert loop.serve_one()
        return queue.recv(WAIT_S).result

    @pytest.mark.parametrize("length", [0, 10, MAPPED_BYTES // 2, LONG])
    def test_a_handler_that_takes_buffers_gets_long_arguments_in_place(self, loop, length):
        queue, worker, registry = loop
        seen = []

        @takes_buffers
        def handler(args):
            seen.append(type(args))
            return bytes(args)

        registry.register(7, handler)
        data = os.urandom(length)
        assert self.run(queue, worker, data) == data
        assert seen == [memoryview if length == LONG else bytes]

    def test_any_other_gets_bytes(self, loop):
        queue, worker, registry = loop
        registry.register(7, lambda args: type(args).__name__.encode())
        assert self.run(queue, worker, bytes(LONG)) == b"bytes"

    def test_a_result_in_pieces_comes_out_whole(self, loop):
        queue, worker, registry = loop
        registry.register(7, lambda _args: Pieces(PIECES))
        assert self.run(queue, worker, b"") == WHOLE
        assert (worker.completed, worker.failed) == (1, 0)

    def test_arguments_may_be_part_of_the_result(self, loop):
        queue, worker, registry = loop
        registry.register(7, takes_buffers(lambda args: Pieces([b"<", args, b">"])))
        data = os.urandom(LONG)
        assert self.run(queue, worker, data) == b"<" + data + b">"

    def test_arguments_that_a_handler_keeps_stay_as_they_were(self, loop):
        queue, worker, registry = loop
        kept = []
        registry.register(7, takes_buffers(lambda args: kept.append(args) or b""))
        sent = [os.urandom(LONG) for _ in range(6)]
        for data in sent:
            assert self.run(queue, worker, data) == b""
        assert [bytes(data) for data in kept] == sent

    def test_the_next_job_in_a_block_is_read_in_the_same_mapping(self, loop):
        queue, worker, registry = loop
        registry.register(7, takes_buffers(lambda args: bytes(args)))

        def mappings():
            with open("/proc/self/maps") as file:
                return sum(f"{queue.path}/arena" in line and "r--p" in line for line in file)

        for n in range(20):
            data = os.urandom(LONG - n)
            assert self.run(queue, worker, data) == data
            assert 1 <= mappings() <= 4
        worker.rest()
        assert mappings() == 0
        assert self.run(queue, worker, bytes(LONG)) == bytes(LONG)

    def test_what_a_job_forks_reads_the_same_arguments_when_the_job_is_over(self, make, loop):
        queue, worker, registry = loop
        data = os.urandom(LONG)
        gate, opens = os.pipe()
        children = []

        @takes_buffers
        def fork(args):
            with warnings.catch_warnings():
                warnings.simplefilter("ignore", DeprecationWarning)
                children.append(os.fork())
            if children[-1] == 0:
                os.close(opens)
                os.read(gate, 1)
                os._exit(0 if args == data else 1)
            return b""

        registry.register(7, fork)
        try:
            assert self.run(queue, worker, data) == b""
            overwrite_all([make.open(), make.open()])
        finally:
            os.close(opens)
            os.close(gate)
        assert os.waitstatus_to_exitcode(os.waitpid(children[0], 0)[1]) == 0

    def test_an_unknown_closure_id_is_answered_as_ever(self, loop):
        queue, worker, _ = loop
        assert "UnknownClosureId" in repr(self.run(queue, worker, bytes(LONG)))

    def test_pieces_are_joined_where_a_transport_takes_one_message(self):
        assert joined(Pieces(PIECES)) == WHOLE
        assert joined(b"as it is") == b"as it is"


@pytest.mark.parametrize("room", [2**25, 3 * 2**25], ids=["to map it", "to copy it"])
def test_a_job_that_finds_no_memory_fails_and_the_next_one_runs(run_script, path, room):
    out = run_script(
        """
        import resource
        from subetha import WorkerLoop
        from subetha.pass_registry import PassRegistry

        path, room = sys.argv[1], int(sys.argv[2])
        registry = PassRegistry()
        registry.register(7, lambda args: b"%d" % len(args))
        with JobQueue.create(path, 16, arena_bytes=2**28) as queue:
            loop = WorkerLoop(queue.submit_side, registry=registry)
            queue.submit(Pass(7, bytes(2**26)))
            queue.submit(Pass(7, bytes(10)))
            with open("/proc/self/statm") as file:
                size = int(file.read().split()[0]) * resource.getpagesize()
            resource.setrlimit(resource.RLIMIT_AS, (size + room, resource.RLIM_INFINITY))
            for _ in range(2):
                assert loop.serve_one()
                print(repr(queue.recv(60).result))
        """,
        path,
        room,
    )
    first, second = out.splitlines()
    assert "MemoryError" in first
    assert second == "b'10'"

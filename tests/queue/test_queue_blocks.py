"""Arguments and results that do not fit a cell: blocks of the arena, from the first byte too many to a full disk."""

import os
import subprocess

import numpy as np
import pytest

from subetha._core import decode_result, decode_submit, encode_result, encode_submit
from subetha.errors import ArenaFull, Full
from subetha.layout import BlockState
from subetha.pass_registry import ExecutionError, Pass

WAIT_S = 30
SUBMIT_HEADER, RESULT_HEADER = 10, 7
EDGES = [4096, 8192, 65_534, 65_535, 65_536, 2**20, 3_000_001]


def data_of(seed, length):
    """Bytes that all follow from the seed and their place."""
    values = (np.arange(length, dtype=np.uint64) + np.uint64(seed * 7919)) * np.uint64(2246822519) >> np.uint64(9)
    return values.astype(np.uint8).tobytes()


def around(*edges):
    return sorted({edge + step for edge in edges for step in (-1, 0, 1)} | {0, 1})


def block_states(files):
    """How many blocks of each class are in which state."""
    states = {}
    for size, *_ in files.arena_classes:
        codes, counts = np.unique(files.block_words(size) & np.uint64(0xF), return_counts=True)
        states[size] = {BlockState(code).name: int(n) for code, n in zip(codes, counts, strict=True)}
    return states


def blocks_in_use(files):
    return sum(
        n for states in block_states(files).values() for state, n in states.items() if not state.startswith("FREE")
    )


def disk_bytes(files):
    """Bytes that the arena's data takes from the disk."""
    words_end = min(at for size, at, count in files.arena_classes) + sum(
        8 * count + 128 for _, _, count in files.arena_classes
    )
    return os.stat(os.path.join(files.path, "arena")).st_blocks * 512 - words_end - 8192


@pytest.mark.parametrize("area", [56, 192, 32_768])
def test_arguments_and_results_of_every_length_come_through_exactly(make, files_of, area):
    client, worker = make(job_bytes=area, result_bytes=area), make.open()
    lengths = around(
        area,
        area - SUBMIT_HEADER,
        area - RESULT_HEADER,
        *EDGES,
        *(edge - SUBMIT_HEADER for edge in EDGES),
        4096 - RESULT_HEADER,
    )
    for seed, (length, back) in enumerate(zip(lengths, reversed(lengths), strict=True)):
        args, answer = data_of(seed, length), data_of(seed + 1000, back)
        job_id = client.submit(Pass(3, args))
        claim = worker.claim(WAIT_S)
        token, pass_ = decode_submit(claim.payload)
        assert pass_.args == args, length
        assert token == job_id & 0xFFFFFFFF
        assert claim.tobytes()[SUBMIT_HEADER:] == args
        claim.reply(encode_result(token, answer))
        result = client.recv(WAIT_S)
        assert result.token == job_id
        assert result.result == answer, back
    assert blocks_in_use(files_of(client.path)) == 0


def test_frames_of_every_length_pass_the_transports(make):
    client, worker = make(), make.open()
    for seed, length in enumerate(around(192, *EDGES[:-1])):
        frame = encode_submit(3, 0, data_of(seed, length))
        job_id = client.submit_side.try_push(frame)
        popped = worker.submit_side.pop(WAIT_S)
        assert decode_submit(popped) == (job_id & 0xFFFFFFFF, Pass(3, data_of(seed, length)))
        job_id = client.submit_side.push(frame, WAIT_S)
        worker.claim(WAIT_S).reply(encode_result(0, data_of(seed, length)))
        result = decode_result(client.result_side.pop(WAIT_S))
        assert (result.token, result.result) == (job_id & 0xFFFFFFFF, data_of(seed, length))


@pytest.mark.parametrize("length", [300, 5000, 65_535, 70_000])
def test_an_error_with_a_long_text_comes_back_whole(make, length):
    client = make()
    client.submit(Pass(1, b""))
    client.claim(WAIT_S).reply(encode_result(0, ExecutionError("x" * length)))
    error = client.recv(WAIT_S).result
    assert isinstance(error, ExecutionError)
    assert str(error) == "x" * length


def test_a_job_of_a_block_is_read_where_it_lies(make):
    client, worker = make(), make.open()
    args = data_of(1, 100_000)
    client.submit(Pass(1, args))
    claim = worker.claim(WAIT_S)
    array = np.frombuffer(claim.payload, np.uint8)
    assert not array.flags.writeable
    assert array[SUBMIT_HEADER:].tobytes() == args
    for n in range(20):
        client.submit(Pass(1, data_of(n, 100_000)))
        worker.claim(WAIT_S).ack()
    assert array[SUBMIT_HEADER:].tobytes() == args
    del array
    claim.ack()


# --- no room --------------------------------------------------------------------------------------------------------


def test_arguments_that_no_block_can_hold_are_refused_with_size_and_limit(make):
    client = make(arena_bytes=2**20)
    client.submit(Pass(1, bytes(2**20 - SUBMIT_HEADER)))
    client.claim(WAIT_S).ack()
    with pytest.raises(ArenaFull) as caught:
        client.submit(Pass(1, bytes(2**20 - SUBMIT_HEADER + 1)))
    assert str(2**20 + 1) in str(caught.value)
    assert str(2**20) + " bytes" in str(caught.value)
    assert client.stats().free == 16


def test_an_arena_that_is_used_up_is_an_error_until_a_job_ends(make):
    client, worker = make(arena_bytes=2**20), make.open()
    for _ in range(40):
        for n in range(2):
            client.submit(Pass(1, data_of(n, 400_000)))
        for _ in range(5):
            with pytest.raises(ArenaFull, match=f"400010 bytes.*arena of {2**20} bytes"):
                client.submit(Pass(1, bytes(400_000)), wait=0)
        client.submit(Pass(1, b"short ones still go in"))
        assert client.stats().waiting == 3
        for n in range(2):
            claim = worker.claim(WAIT_S)
            assert decode_submit(claim.payload)[1].args == data_of(n, 400_000)
            claim.ack()
        worker.claim(WAIT_S).ack()


def test_a_submit_refused_by_the_arena_does_not_count_for_the_quota(make):
    client = make(arena_bytes=4096, quota=3)
    client.submit(Pass(1, bytes(4000)))
    for _ in range(20):
        with pytest.raises(ArenaFull):
            client.submit(Pass(1, bytes(4000)), wait=0)
    client.submit(Pass(1, b""), wait=0)
    client.submit(Pass(1, b""), wait=0)
    with pytest.raises(Full, match="quota of 3"):
        client.submit(Pass(1, b""), wait=0)


def test_a_result_that_finds_no_block_leaves_the_claim_and_its_job_as_they_were(make):
    client, worker = make(arena_bytes=2**16), make.open()
    args = data_of(5, 40_000)
    job_id = client.submit(Pass(1, args))
    claim = worker.claim(WAIT_S)
    for _ in range(3):
        with pytest.raises(ArenaFull, match=rf"20007 bytes.*arena of {2**16} bytes"):
            claim.reply(encode_result(0, bytes(20_000)))
    assert decode_submit(claim.payload)[1].args == args
    assert client.stats().running == 1
    claim.release()
    claim = worker.claim(WAIT_S)
    assert decode_submit(claim.payload)[1].args == args
    with pytest.raises(ArenaFull):
        claim.reply(encode_result(0, bytes(2**16)))
    claim.reply(encode_result(0, b"short"))
    assert [(r.token, r.result) for r in client.recv_many(9)] == [(job_id, b"short")]


def test_a_result_takes_the_room_that_other_jobs_leave(make):
    client, worker = make(arena_bytes=2**16), make.open()
    client.submit(Pass(1, data_of(1, 30_000)))
    client.submit(Pass(2, data_of(2, 30_000)))
    first, second = worker.claim(WAIT_S), worker.claim(WAIT_S)
    with pytest.raises(ArenaFull):
        second.reply(encode_result(0, data_of(3, 30_000)))
    first.ack()
    second.reply(encode_result(0, data_of(3, 30_000)))
    assert client.recv(WAIT_S).result == data_of(3, 30_000)


# --- freed ----------------------------------------------------------------------------------------------------------


def test_blocks_come_free_by_collecting_acknowledging_cancelling_and_leaving(make, files_of):
    client, worker = make(), make.open()
    files = files_of(client.path)

    def submit():
        return client.submit(Pass(1, data_of(1, 9000)))

    def answer():
        worker.claim(WAIT_S).reply(encode_result(0, data_of(2, 20_000)))

    submit()
    assert blocks_in_use(files) == 1
    answer()
    assert blocks_in_use(files) == 2
    client.recv(WAIT_S)
    assert blocks_in_use(files) == 0
    submit()
    answer()
    client.result_side.pop(WAIT_S)
    assert blocks_in_use(files) == 0
    submit()
    worker.claim(WAIT_S).ack()
    assert blocks_in_use(files) == 0
    assert client.cancel(submit())
    assert blocks_in_use(files) == 0
    released = submit()
    worker.claim(WAIT_S).release()
    assert blocks_in_use(files) == 1
    assert client.cancel(released)
    assert blocks_in_use(files) == 0
    submit()
    answer()
    submit()
    late = worker.claim(WAIT_S)
    assert blocks_in_use(files) == 3
    client.close()
    assert blocks_in_use(files) == 1
    late.reply(encode_result(0, data_of(2, 20_000)))
    assert blocks_in_use(files) == 0


def test_a_block_moves_with_its_job_through_every_put_back(make, files_of):
    client = make(arena_bytes=2**16)
    args = data_of(9, 50_000)
    job_id = client.submit(Pass(1, args))
    for n in range(50):
        if n % 10 == 0:
            worker = make.open()
        claim = worker.claim(WAIT_S)
        assert claim.job_id == job_id
        assert decode_submit(claim.payload)[1].args == args
        if n % 10 == 9:
            worker.close()
        else:
            claim.release()
    assert block_states(files_of(client.path))[2**16] == {"LINKED": 1}
    with pytest.raises(ArenaFull):
        client.submit(Pass(1, bytes(50_000)))
    client.claim(WAIT_S).reply(encode_result(0, b""))
    client.recv(WAIT_S)
    client.submit(Pass(1, bytes(50_000)))


def test_thousands_of_jobs_with_blocks_of_all_sizes_leave_no_block_and_stay_within_the_limit(make, files_of):
    limit = 2**20
    client, worker = make(64, arena_bytes=limit), make.open()
    files = files_of(client.path)
    lengths = [5000, 100, 60_000, 12_000, 250_000, 4086, 4087, 30_000, 120_000, 500_000]
    datas = [data_of(n, length) for n, length in enumerate(lengths)]
    waiting, refused = [], 0
    for n in range(900):
        args = n.to_bytes(4, "little") + datas[n % 10][4:]
        try:
            client.submit(Pass(n, args), wait=0)
            waiting.append((n, args))
        except ArenaFull:
            refused += 1
        if len(waiting) > n % 12:
            number, args = waiting.pop(0)
            claim = worker.claim(WAIT_S)
            assert decode_submit(claim.payload)[1] == Pass(number, args)
            answer = n.to_bytes(4, "little") + datas[(3 * n + 1) % 10][4:]
            try:
                claim.reply(encode_result(0, answer))
                assert client.recv(WAIT_S).result == answer
            except ArenaFull:
                refused += 1
                claim.ack()
        if n % 100 == 0:
            assert client.arena_backed_bytes <= limit
            assert disk_bytes(files) <= limit
    assert 0 < refused < 700, "the limit was met, and did not last"
    for _ in waiting:
        worker.claim(WAIT_S).ack()
    assert blocks_in_use(files) == 0
    assert client.stats().free == 64
    client.submit(Pass(1, bytes(limit - SUBMIT_HEADER)))


def test_free_blocks_are_given_back_to_the_disk_when_another_size_needs_the_room(make, files_of):
    limit = 2**20
    client, worker = make(128, arena_bytes=limit), make.open()
    files = files_of(client.path)
    for round_ in range(3):
        for size, n in ((16_384, 64), (2**20, 1), (131_072, 8), (32_768, 32)):
            ids = [client.submit(Pass(k, data_of(k, size - SUBMIT_HEADER)), wait=0) for k in range(n)]
            assert block_states(files)[size] == {
                "LINKED": n,
                **({"FREE_HOLE": limit // size - n} if n < limit // size else {}),
            }
            assert client.arena_backed_bytes == limit, (round_, size)
            assert disk_bytes(files) <= limit
            for k in range(n):
                claim = worker.claim(WAIT_S)
                assert claim.job_id == ids[k]
                assert decode_submit(claim.payload)[1].args == data_of(k, size - SUBMIT_HEADER)
                claim.ack()
            assert block_states(files)[size]["FREE_BACKED"] == n, "kept warm for the next of this size"


def test_a_freed_block_is_used_again_before_a_new_one(make):
    client = make()
    for _ in range(100):
        client.submit(Pass(1, bytes(5000)))
        client.claim(WAIT_S).ack()
    assert client.arena_backed_bytes == 8192


# --- blocks of those who died ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("version", [5, 2**40 + 1, 2**40, 0, 2**44 - 1])
def test_a_block_whose_cell_has_moved_on_is_taken_over_and_no_other(make, files_of, version):
    first = make(arena_bytes=4096)
    first.close()
    files = files_of(first.path)
    files.cells["word"] = np.uint64(version << 20)
    word = files.block_words(4096)
    assert len(word) == 1
    client = make.open()

    def linked(cell, of):
        return np.uint64((of % 2**40) << 24 | cell << 4 | BlockState.LINKED)

    for held in (linked(3, version), linked(3, version + 1), np.uint64(7 << 4 | BlockState.OWNED)):
        word[0] = held
        with pytest.raises(ArenaFull):
            client.submit(Pass(1, bytes(3000)))
        assert word[0] == held
    for passed in (
        linked(3, version - 1),
        linked(3, version - 1000),
        linked(3, version - 2**38),
        linked(2**20 - 1, version),
    ):
        word[0] = passed
        client.submit(Pass(1, data_of(1, 3000)))
        claim = client.claim(WAIT_S)
        assert decode_submit(claim.payload)[1].args == data_of(1, 3000)
        claim.ack()
        files.cells["word"] = np.uint64(version << 20)


def test_wrong_hints_of_an_arena_are_counted_again(make, files_of):
    client = make(arena_bytes=2**16)
    files = files_of(client.path)
    hints = files.bytes("arena")[128:].view("<u8")
    for backed, high in ((2**63, 2**63), (2**64 - 1, 0), (2**16, 2**40), (2**16 + 1, 3)):
        hints[0] = backed
        hints[16 : 16 + 28] = high
        for n in range(15):
            client.submit(Pass(1, data_of(n, 4000)), wait=0)
            claim = client.claim(WAIT_S)
            assert decode_submit(claim.payload)[1].args == data_of(n, 4000)
            claim.reply(encode_result(0, data_of(n, 8000)))
            assert client.recv(WAIT_S).result == data_of(n, 8000)
        assert client.arena_backed_bytes <= 2**16
        files.block_words(4096)[:] = 0
        files.block_words(8192)[:] = 0


# --- a full disk ----------------------------------------------------------------------------------------------------


@pytest.fixture
def small_disk(tmp_path):
    """A tmpfs of 2 MB; skips where nothing may be mounted."""
    point = tmp_path / "disk"
    point.mkdir()
    try:
        done = subprocess.run(
            ["mount", "-t", "tmpfs", "-o", "size=2m", "subetha-test", point],
            capture_output=True,
            text=True,
            check=False,
        )
    except FileNotFoundError as error:
        pytest.skip(f"no tmpfs could be mounted: {error}")
    if done.returncode:
        pytest.skip(f"no tmpfs could be mounted: {done.stderr.strip()}")
    yield point
    subprocess.run(["umount", "-l", point], check=True)


def test_a_full_disk_is_an_error_and_work_goes_on_when_there_is_room(small_disk, run_script):
    run_script(
        """
        folder = sys.argv[1]
        client = JobQueue.create(folder + "/queue", 64, arena_bytes=2**26, participants=8)
        worker = JobQueue.open(folder + "/queue")
        worker.slot

        def disk_full(call):
            try:
                call()
            except ArenaFull as error:
                return str(error)
            return None

        for round_ in range(3):
            waiting = []
            for n in range(40):
                args = pattern(n, 100_000)
                told = disk_full(lambda: client.submit(Pass(n, args), wait=0))
                if told:
                    assert "disk" in told and "100010" in told, told
                    break
                waiting.append(args)
            assert 5 < len(waiting) < 20, len(waiting)
            for length in (40_000, 20_000, 10_000, 5000, 2000, 1000):
                # the rest of the disk, block by block
                for n in range(64):
                    if disk_full(lambda: client.submit(Pass(n, pattern(n, length)), priority=2, wait=0)):
                        break
                else:
                    raise AssertionError("endless room")
            claim = worker.claim(0)
            assert decode_submit(claim.payload)[1].args == waiting[0]
            told = disk_full(lambda: claim.reply(encode_result(0, bytes(90_000))))
            assert told and "disk" in told, told
            assert decode_submit(claim.payload)[1].args == waiting[0]
            worker.claim(0).ack()
            claim.reply(encode_result(0, pattern(99, 90_000)))
            assert client.recv(0).result == pattern(99, 90_000)
            for args in waiting[2:]:
                claim = worker.claim(0)
                assert decode_submit(claim.payload)[1].args == args
                claim.ack()
            while True:
                try:
                    worker.claim(0).ack()
                except Empty:
                    break
            assert client.stats().free == 64

        def fill_disk():
            with open(folder + "/filler", "ab", buffering=0) as filler:
                try:
                    while filler.write(bytes(4096)):
                        pass
                except OSError:
                    pass

        fill_disk()
        assert disk_full(lambda: client.submit(Pass(1, bytes(1_500_000)), wait=0))
        client.submit(Pass(1, pattern(1, 100_000)), wait=0)
        worker.claim(0).ack()
        fill_disk()
        late = JobQueue.open(folder + "/queue")
        try:
            late.submit(Pass(1, b""))
        except OSError as error:
            assert error.errno == 28, error
        else:
            raise AssertionError("a mailbox on a full disk")
        late.close()
        os.unlink(folder + "/filler")
        client.submit(Pass(1, pattern(2, 1_000_000)), wait=0)
        claim = worker.claim(0)
        assert decode_submit(claim.payload)[1].args == pattern(2, 1_000_000)
        """,
        small_disk,
    )

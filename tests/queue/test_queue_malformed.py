"""Malformed files, and bytes that a misbehaving peer writes into live ones: errors, no crash, no spin, no loss."""

import json
import os
import random
import shutil
import zlib

import numpy as np
import pytest

from subetha._core import encode_result
from subetha.errors import Empty, LayoutMismatch, SubethaError, TransportError
from subetha.jobqueue import JobQueue
from subetha.layout import FILE_HEADER, LINE, PARTICIPANT, QUEUE_GEOMETRY, CellState, Kind, cell_word
from subetha.pass_registry import Pass

WAIT_S = 30
FILES = ["arena", "back-0", "back-1", "back-2", "mail", "pool", "submit-0", "submit-1", "submit-2", "table"]
SMALL = {"participants": 16, "arena_bytes": 2**18}


def run_a_job(queue):
    job_id = queue.submit(Pass(1, b"a" * 500))
    claim = queue.claim(WAIT_S)
    assert claim.job_id == job_id
    claim.reply(encode_result(0, b"r" * 500))
    result = queue.recv(WAIT_S)
    assert (result.token, result.result) == (job_id, b"r" * 500)


# --- files ----------------------------------------------------------------------------------------------------------


def with_header(contents, **changed):
    """The same file with other numbers in its header, and a right CRC for them."""
    header = np.frombuffer(bytes(contents[:LINE]), FILE_HEADER).copy()
    for name, value in changed.items():
        header[name] = value
    if "crc32" not in changed:
        header["crc32"] = zlib.crc32(header.tobytes()[:-4])
    return header.tobytes() + contents[LINE:]


MALFORMED = {
    "empty": lambda contents: b"",
    "one byte": lambda contents: contents[:1],
    "a cut header": lambda contents: contents[: LINE - 1],
    "a header alone": lambda contents: contents[:LINE],
    "cut in its lines": lambda contents: contents[:200],
    "cut by a byte": lambda contents: contents[:-1],
    "cut by half": lambda contents: contents[: len(contents) // 2],
    "too long": lambda contents: contents + b"\0",
    "random bytes": lambda contents: random.Random(1).randbytes(len(contents)),
    "zeros": lambda contents: bytes(len(contents)),
    "a wrong magic": lambda contents: b"SUBETHO" + contents[7:],
    "another layout version": lambda contents: with_header(contents, layout_version=2),
    "a wrong CRC": lambda contents: with_header(contents, crc32=12345),
    "a flipped bit in the header": lambda contents: contents[:20] + bytes([contents[20] ^ 4]) + contents[21:],
    "another kind": lambda contents: with_header(contents, kind=Kind.RING),
    "no kind at all": lambda contents: with_header(contents, kind=77),
    "another capacity": lambda contents: with_header(contents, capacity=32),
    "no capacity": lambda contents: with_header(contents, capacity=0),
    "a capacity beyond all limits": lambda contents: with_header(contents, capacity=2**63),
}


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    """A queue that has done a job and is closed; tests copy it."""
    path = tmp_path_factory.mktemp("whole") / "queue"
    with JobQueue.create(path, 16, **SMALL) as queue:
        run_a_job(queue)
    return path


@pytest.fixture
def copied(whole, path):
    shutil.copytree(whole, path)
    return path


@pytest.mark.parametrize("name", FILES)
def test_a_malformed_file_is_an_error_that_names_it_and_leaves_it_alone(copied, name):
    file = os.path.join(copied, name)
    with open(file, "rb") as opened:
        good = opened.read()
    for how, change in MALFORMED.items():
        if "capacity" in how and name not in ("pool", "table"):
            # what these files are made for follows from the pool alone
            continue
        bad = change(good)
        with open(file, "wb") as opened:
            opened.write(bad)
        for call in (
            JobQueue.open,
            lambda path: JobQueue.open(path, readonly=True),
            lambda path: JobQueue.open_or_create(path, 16, **SMALL),
        ):
            with pytest.raises(LayoutMismatch, match=r"(queue|queue/" + name + r"): ") as caught:
                call(copied)
            assert "expected" in str(caught.value), how
        with open(file, "rb") as opened:
            assert opened.read() == bad, how
    with open(file, "wb") as opened:
        opened.write(good)
    with JobQueue.open(copied) as queue:
        run_a_job(queue)


@pytest.mark.parametrize("name", FILES)
def test_a_file_of_another_kind_or_another_queue_is_refused(copied, tmp_path, name):
    file = os.path.join(copied, name)
    JobQueue.create(tmp_path / "other", 32, participants=17, arena_bytes=2**19).close()
    os.replace(file, tmp_path / "kept")
    others = [
        os.path.join(copied, other) for other in FILES if other != name and other.split("-")[0] != name.split("-")[0]
    ]
    if "-" in name:
        others = [other for other in others if "-" not in os.path.basename(other)]
    for other in [*others, tmp_path / "other" / name]:
        shutil.copyfile(other, file)
        with pytest.raises(LayoutMismatch, match="expected"):
            JobQueue.open(copied)
    os.unlink(file)
    os.mkdir(file)
    for readonly in (True, False):
        with pytest.raises((LayoutMismatch, IsADirectoryError)):
            JobQueue.open(copied, readonly)
    os.rmdir(file)
    os.mkfifo(file)
    for readonly in (True, False):
        with pytest.raises(LayoutMismatch, match="regular file"):
            JobQueue.open(copied, readonly)
    os.replace(tmp_path / "kept", file)
    with JobQueue.open(copied) as queue:
        run_a_job(queue)


def set_geometry(path, right_crc=True, **changed):
    pool = np.memmap(os.path.join(path, "pool"), np.uint8, "r+")
    geometry = np.asarray(pool[LINE : 2 * LINE]).view(QUEUE_GEOMETRY)
    for name, value in changed.items():
        geometry[name] = value
    if right_crc:
        geometry["crc32"] = zlib.crc32(geometry.tobytes()[:-4])


GEOMETRIES = [
    {"job_bytes": 0},
    {"job_bytes": 64},
    {"job_bytes": 2**32 - 1},
    {"result_bytes": 2**32 - 64},
    {"job_bytes": 384, "result_bytes": 0},
    {"participants": 0},
    {"participants": 2**32 - 1},
    {"reserve": 16},
    {"reserve": 17},
    {"reserve": 2**32 - 1},
    {"quota": 0},
    {"quota": 2**32 - 1},
    {"arena_bytes": 0},
    {"arena_bytes": 2**17},
    {"arena_bytes": 2**63},
    {"arena_bytes": 2**64 - 1},
]


@pytest.mark.parametrize("changed", GEOMETRIES, ids=str)
def test_a_damaged_geometry_is_refused(copied, changed):
    set_geometry(copied, right_crc=False, **changed)
    for readonly in (True, False):
        with pytest.raises(LayoutMismatch, match=r"geometry|pool"):
            JobQueue.open(copied, readonly)


def test_an_impossible_geometry_is_refused_although_its_checksum_is_right(copied, tmp_path, run_script):
    for n, changed in enumerate(GEOMETRIES):
        shutil.copytree(copied, tmp_path / str(n))
        set_geometry(tmp_path / str(n), **changed)
    told = run_script(
        """
        for n in range(int(sys.argv[2])):
            path = sys.argv[1] + "/" + str(n)
            for readonly in (True, False):
                print(n, flush=True)
                try:
                    queue = JobQueue.open(path, readonly)
                except LayoutMismatch as error:
                    assert "expected" in str(error), error
                else:
                    raise AssertionError(("opened", n))
        """,
        tmp_path,
        len(GEOMETRIES),
    )
    assert told.split()[-1] == str(len(GEOMETRIES) - 1)


@pytest.mark.parametrize("name", [name for name in FILES if name != "pool"])
def test_a_damaged_pool_makes_no_other_file(copied, name):
    """Files are never replaced, so one made from wrong numbers would stay wrong."""
    os.unlink(os.path.join(copied, name))
    with open(os.path.join(copied, "pool"), "rb") as file:
        good = file.read()
    set_geometry(copied, right_crc=False, participants=3, arena_bytes=2**20, job_bytes=1000)
    with pytest.raises(LayoutMismatch):
        JobQueue.open(copied)
    assert name not in os.listdir(copied)
    with open(os.path.join(copied, "pool"), "wb") as file:
        file.write(good)
    with JobQueue.open(copied) as queue:
        run_a_job(queue)


# --- what a peer writes into live files -----------------------------------------------------------------------------


def words_of(files, what):
    """(file, offset, bytes) of every region of one sort in a queue's files."""
    rings = [files.ring_place(name) for name in files.ring_names]
    if what == "places":
        return [(file, places_at, 8 * places) for file, _, places_at, places in rings]
    if what == "hints":
        return [(file, at, places_at - at) for file, at, places_at, _ in rings] + [("pool", 128, 256)]
    if what == "mailboxes":
        made = [("mail", 128, 4 * files.participants)]
        return made + [
            (file, at, places_at + 8 * places - at) for file, at, places_at, places in rings if file == "mail"
        ]
    if what == "cell words":
        return [("pool", files.cells_at + i * files.stride, 8) for i in range(len(files.cells))]
    if what == "cell headers":
        return [("pool", files.cells_at + i * files.stride + 8, 120) for i in range(len(files.cells))]
    if what == "frames":
        return [("pool", files.cells_at + i * files.stride + 128, 64) for i in range(len(files.cells))]
    if what == "arena":
        return [("arena", 128, 352), *(("arena", at, 8 * count) for _, at, count in files.arena_classes)]
    assert what == "table"
    return [("table", 128, 8), ("table", 256, 16 * PARTICIPANT.itemsize)]


POKER = """
import random

path, regions, seeds = sys.argv[1], json.loads(sys.argv[2]), range(*json.loads(sys.argv[3]))
maps = {name: np.memmap(os.path.join(path, name), np.uint8, "r+") for name, *_ in regions}


def poke(dice, most=8):
    for _ in range(dice.choice([1, 1, 2, most])):
        name, at, size = dice.choice(regions)
        offset = at + dice.randrange(max(size // 8, 1)) * 8
        width = dice.choice([8, 8, 8, 4, 2, 1])
        offset += dice.randrange(0, 8, width)
        other, other_at, other_size = dice.choice(regions)
        far = other_at + dice.randrange(max(other_size // 8, 1)) * 8
        here = maps[name][offset : offset + width].tobytes()
        value = dice.choice([
            dice.randbytes(width),
            b"\\xff" * width,
            bytes(width),
            dice.randrange(40).to_bytes(8, "little")[:width],
            maps[other][far : far + width].tobytes(),
            bytes([here[0] ^ 1 << dice.randrange(8)]) + here[1:],
        ])
        maps[name][offset : offset + width] = np.frombuffer(value, np.uint8)


ALLOWED = (SubethaError, ValueError)


def calls(queue, claims, ids):
    # one of everything, in any order; claims end up in `claims`
    def claim():
        claims.append(queue.try_claim())

    def end(how):
        if claims:
            how(claims.pop())

    def submit():
        ids.append(queue.submit(Pass(3, b"y" * dice.choice([1, 100, 300, 5000])), priority=dice.randrange(3), wait=0))

    def look(claim):
        claim.started()
        claim.attempts, claim.max_attempts
        try:
            decode_submit(claim.payload)
        finally:
            claims.append(claim)

    return [
        submit, submit, claim, claim, claim,
        lambda: end(lambda c: c.reply(encode_result(0, b"r" * dice.choice([1, 300, 5000])))),
        lambda: end(lambda c: c.reply(encode_result(0, b"r"))),
        lambda: end(lambda c: c.ack()), lambda: end(lambda c: c.release()), lambda: end(look),
        queue.try_recv, queue.try_recv, lambda: queue.recv_many(4), lambda: queue._pop_frame(0),
        lambda: queue.cancel(ids[-1]), lambda: queue.claim(0.001), lambda: queue.recv(0.001),
        lambda: queue.submit(Pass(3, b""), wait=0.001),
        queue.stats, queue.repair, queue._waiting, lambda: list(queue.heartbeat), lambda: queue.heartbeat.snapshot(1),
    ]
"""


@pytest.mark.parametrize(
    "what", ["places", "hints", "mailboxes", "cell words", "cell headers", "frames", "arena", "table", "everything"]
)
def test_random_bytes_between_calls_are_errors_and_neither_crash_nor_spin(make, files_of, run_script, what):
    queue = make(32, quota=31, **SMALL)
    for _ in range(2):
        make.open().recv_many(1)
    queue.recv_many(1)
    path = queue.path
    files = files_of(path)
    sorts = (
        ["places", "hints", "cell words", "cell headers", "frames", "arena", "table"]
        if what == "everything"
        else [what]
    )
    regions = [region for sort in sorts for region in words_of(files, sort)]
    run_script(
        POKER
        + """
names = [os.path.join(folder, name) for folder, _, files in os.walk(path) for name in files]
everything = {name: np.memmap(name, np.uint8, "r+") for name in names}
arena = [contents for name, contents in everything.items() if name.endswith("arena")][0]

def begin():
    client, worker = JobQueue.open(path), JobQueue.open(path)
    client.recv_many(1), worker.recv_many(1)
    sound = {name: contents.copy() for name, contents in everything.items() if not name.endswith("arena")}
    return client, worker, sound

client, worker, sound = begin()
met = set()
for seed in seeds:
    faulthandler.dump_traceback_later(20, exit=True)
    dice = random.Random(seed)
    claims, ids = [], []
    for n in range(12):
        ids.append(client.submit(Pass(2, b"x" * dice.choice([1, 100, 300, 5000])), priority=dice.randrange(3)))
    for n in range(6):
        claims.append(worker.claim(0))
    for n in range(2):
        claims.pop().reply(encode_result(0, b"r" * dice.choice([1, 300])))
    claims.pop().release()
    poke(dice)
    todo = [(queue, call) for queue in (client, worker) for call in range(23)]
    dice.shuffle(todo)
    for queue, call in todo:
        try:
            calls(queue, claims, ids)[call]()
        except ALLOWED as error:
            met.add(type(error).__name__)
        if dice.random() < 0.1:
            poke(dice)
    for claim in claims:
        try:
            claim.ack()
        except ALLOWED:
            pass
    claim = None
    claims.clear()
    for name, contents in sound.items():
        everything[name][:] = contents
    arena[128:] = 0
    try:
        worker.claim(0)
    except Empty:
        pass
    except HeartbeatError:
        # the timer has seen a job with nonsense for a deadline: this handle claims nothing more
        client.close(), worker.close()
        client, worker, sound = begin()
    if seed % 10 == 0:
        ids = [client.submit(Pass(1, b"x" * length), wait=0) for length in (1, 5000)]
        for job_id in ids:
            claim = worker.claim(0)
            assert claim.job_id == job_id
            claim.reply(encode_result(0, b"r" * 5000))
        assert [(r.token, r.result) for r in client.recv_many(9)] == [(job_id, b"r" * 5000) for job_id in ids]
assert "Empty" in met
""",
        path,
        json.dumps(regions),
        json.dumps([0, 100 if what == "everything" else 40]),
        seconds=50,
    )


@pytest.mark.parametrize("what", ["rings", "cells", "arena and table"])
def test_random_bytes_during_calls_are_errors_and_neither_crash_nor_spin(make, files_of, run_script, what):
    queue = make(32, quota=31, **SMALL)
    for _ in range(3):
        make.open().recv_many(1)
    queue.recv_many(1)
    files = files_of(queue.path)
    sorts = {
        "rings": ["places", "hints"],
        "cells": ["cell words", "cell headers", "frames"],
        "arena and table": ["arena", "table"],
    }[what]
    regions = [region for sort in sorts for region in words_of(files, sort)]
    run_script(
        POKER
        + """
stopping = []
signal.signal(signal.SIGTERM, lambda *_: stopping.append(1))


def spoil():
    dice = random.Random(1)
    while not stopping:
        poke(dice)


def use(seed):
    global dice
    faulthandler.dump_traceback_later(40, exit=True)
    dice = random.Random(seed)
    queue = JobQueue.open(path)
    claims, ids = [], [1]
    mine = calls(queue, claims, ids)
    last = time.monotonic()
    done = 0
    while not stopping:
        try:
            dice.choice(mine)()
            done += 1
        except ALLOWED:
            pass
        if len(claims) > 5:
            claims.pop(0)
    assert done > 0
    del mine[:]
    claims.clear()
    queue.close()


pids = [fork(spoil)] + [fork(use, seed) for seed in range(3)]
time.sleep(1.2)
for pid in pids:
    os.kill(pid, signal.SIGTERM)
wait_for(pids)
""",
        queue.path,
        json.dumps(regions),
        json.dumps([0, 1]),
        seconds=50,
        quiet=False,
    )


def test_cells_in_states_that_do_not_exist_are_all_counted(make, files_of):
    queue = make()
    cells = files_of(queue.path).cells
    for n, state in enumerate((13, 13, 14, 15)):
        cells["word"][n] = cell_word(1, state, 0)
    stats = queue.stats()
    assert stats.states == {"FREE": 12, "UNKNOWN": 4}
    assert (stats.free, stats.other) == (12, 4)


# --- found again ----------------------------------------------------------------------------------------------------


def rings_hit(dice, files, sort):
    """Damage the rings of references in one way."""
    rings = [files.ring(name) for name in files.ring_names]
    if sort == "some places":
        for _, places in rings:
            for _ in range(dice.randrange(1, 6)):
                places[dice.randrange(len(places))] = dice.getrandbits(64)
    elif sort == "swapped places":
        for _, places in rings:
            i, j = dice.randrange(len(places)), dice.randrange(len(places))
            places[i], places[j] = places[j], places[i]
    elif sort == "hints":
        for lines, _ in rings:
            lines["head"], lines["tail"] = dice.getrandbits(64), dice.getrandbits(64)
    elif sort == "one hint":
        for lines, _ in rings:
            lines[dice.choice(["head", "tail"])] += np.uint64(dice.randrange(1, 200))
    elif sort == "zeros":
        for lines, places in rings:
            places[:] = 0
            if dice.random() < 0.5:
                lines["head"] = lines["tail"] = 0
    elif sort == "ones":
        for _, places in rings:
            places[:] = 2**64 - 1
    elif sort == "waiters":
        for lines, _ in rings:
            lines["items"], lines["space"], lines["due"] = (dice.getrandbits(32) for _ in range(3))
        files.bytes("pool")[128:512] = 255
    else:
        assert sort == "all random"
        for name in files.ring_names:
            file, at, places_at, places = files.ring_place(name)
            contents = files.bytes(file)[at : places_at + 8 * places]
            contents[:] = np.frombuffer(dice.randbytes(len(contents)), np.uint8)


SORTS = ["some places", "swapped places", "hints", "one hint", "zeros", "ones", "waiters", "all random"]


@pytest.mark.parametrize("sort", SORTS)
def test_repair_finds_every_job_and_result_again_after_rings_were_damaged(make, files_of, sort):
    client, worker = make(64, quota=60, **SMALL), make.open()
    files = files_of(client.path)
    for seed in range(8):
        dice = random.Random(f"{sort} {seed}")
        sent = {}
        for n in range(30):
            args = b"%d " % n * dice.choice([1, 100])
            sent[client.submit(Pass(1, args), priority=n % 3)] = args
        claims = [worker.claim(WAIT_S) for _ in range(12)]
        for claim in claims[:4]:
            claim.reply(encode_result(0, sent[claim.job_id][::-1]))
        for claim in claims[4:8]:
            claim.release()
        rings_hit(dice, files, sort)
        assert worker.repair() <= 64
        assert worker.repair() == 0, "nothing more to be found"
        for claim in claims[8:]:
            claim.reply(encode_result(0, sent[claim.job_id][::-1]))
        for _ in range(22):
            claim = worker.claim(WAIT_S)
            assert claim.tobytes()[10:] == sent[claim.job_id]
            claim.reply(encode_result(0, sent[claim.job_id][::-1]))
        results = client.recv_many(99)
        assert {result.token: result.result for result in results} == {i: args[::-1] for i, args in sent.items()}
        assert len(results) == 30, "each once"
        assert client.stats().free == 64
        run_a_job(client)


@pytest.mark.parametrize("sort", SORTS)
def test_calls_go_on_after_rings_were_damaged_and_lose_nothing_that_comes_later(make, files_of, sort):
    """Without a word from anybody: a contradiction is mended by whoever meets it, and no wrong Full or Empty lasts."""
    client, worker = make(16, quota=15, **SMALL), make.open()
    client.recv_many(1)
    files = files_of(client.path)
    for seed in range(8):
        rings_hit(random.Random(f"{sort} {seed} later"), files, sort)
        if sort in ("some places", "swapped places", "all random", "ones", "zeros"):
            worker.repair()
        for n in range(40):
            job_id = client.submit(Pass(1, b"%d" % n), priority=n % 3, wait=WAIT_S)
            claim = worker.claim(WAIT_S)
            assert claim.job_id == job_id, (seed, n)
            if n % 4 == 0:
                claim.release()
                claim = worker.claim(WAIT_S)
                assert claim.job_id == job_id
            claim.reply(encode_result(0, b"%d" % n))
            result = client.recv(WAIT_S)
            assert (result.token, result.result) == (job_id, b"%d" % n)


@pytest.mark.parametrize("what", ["cell words", "cell headers", "frames", "arena"])
def test_the_jobs_whose_own_cells_were_not_hit_come_through(make, files_of, what):
    client, worker = make(32, quota=31, **SMALL), make.open()
    files = files_of(client.path)
    sound = files.bytes("pool").copy(), files.bytes("arena").copy()
    for seed in range(12):
        dice = random.Random(f"{what} {seed}")
        sent = {}
        for n in range(20):
            args = b"%d " % n * (1 if what == "arena" else dice.choice([1, 1, 100]))
            sent[client.submit(Pass(1, args), priority=n % 3)] = args
        for _ in range(5):
            claim = worker.claim(WAIT_S)
            claim.reply(encode_result(0, sent[claim.job_id][::-1]))
        cells = files.cells
        before = cells.copy()
        for name, at, size in dice.sample(words_of(files, what), 4):
            region = files.bytes(name)[at : at + size]
            region[:] = np.frombuffer(dice.randbytes(size), np.uint8)
        whole = f"V{files.stride}"
        hit = {int(i) for i in np.flatnonzero(cells.view(whole) != before.view(whole))}
        hit_ids = {int(before["job_id"][i]) for i in hit}
        worker.repair()
        results = {}
        while True:
            try:
                claim = worker.try_claim()
            except SubethaError:
                break
            if claim.job_id in sent and claim.job_id not in hit_ids:
                assert claim.tobytes()[10:] == sent[claim.job_id]
                claim.reply(encode_result(0, sent[claim.job_id][::-1]))
            else:
                claim.ack()
        for result in client.recv_many(99):
            results[result.token] = result.result
        for job_id, args in sent.items():
            if job_id not in hit_ids:
                assert results.get(job_id) == args[::-1], (seed, job_id)
        assert what == "arena" or 0 < len(hit_ids) <= 4
        files.bytes("pool")[512:] = sound[0][512:]
        files.bytes("arena")[:] = sound[1]
        for name in files.ring_names:
            lines, places = files.ring(name)
            places[:] = 0
            lines.view("u1")[:] = 0


def test_repair_undoes_words_that_nobody_can_move_on(make, files_of):
    """Unknown states, and states of owners that no participant can be; those of possible owners are left alone."""
    client, worker = make(64, quota=60, **SMALL), make.open()
    cells = files_of(client.path).cells
    ids = [client.submit(Pass(1, b"%d" % n)) for n in range(22)]
    claims = [worker.claim(WAIT_S) for _ in range(22)]
    words = {job_id: int(cells["word"][cells["job_id"] == job_id][0]) for job_id in ids}
    owned = (CellState.WRITING, CellState.COLLECTED, CellState.FENCED, CellState.OVERDUE)
    nobodys = [
        *((state, owner) for state in (*owned, CellState.KEPT) for owner in (0, 17, 65_535)),
        *((state, 1) for state in range(13, 16)),
    ]
    changed = dict(zip(ids, [*nobodys, (CellState.TAKEN, 0), (CellState.TAKEN, 65_535)], strict=False))
    for job_id, (state, owner) in changed.items():
        cells["word"][cells["job_id"] == job_id] = words[job_id] >> 20 << 20 | int(state) << 16 | owner
    kept = [job_id for job_id in ids if job_id not in changed]
    assert worker.repair() == 2
    assert client.stats().states == {"FREE": 42 + len(nobodys), "RETRY": 2, "TAKEN": len(kept)}
    again = [worker.claim(WAIT_S) for _ in range(2)]
    assert sorted(claim.job_id for claim in again) == list(changed)[-2:]
    for claim in [*again, *(claim for claim in claims if claim.job_id in kept)]:
        claim.reply(encode_result(0, b"r"))
    for claim in claims:
        if claim.job_id in changed:
            with pytest.raises(TransportError, match="taken away"):
                claim.ack()
    assert sorted(result.token for result in client.recv_many(99)) == sorted([*kept, *list(changed)[-2:]])
    assert client.stats().free == 64


@pytest.mark.parametrize("field", ["job_length", "job_block", "result_length", "result_block", "priority", "job_id"])
def test_a_damaged_job_comes_back_as_an_error_or_ends_and_holds_up_nobody(make, files_of, field):
    client, worker = make(64, quota=63, **SMALL), make.open()
    cells = files_of(client.path).cells
    for value in (0, 1, 9, 2**31, 2**32 + 5, 2**44, 2**64 - 1):
        bad = client.submit(Pass(1, b"x" * 300))
        after = client.submit(Pass(1, b"sound"))
        i = int(np.flatnonzero(cells["job_id"] == bad)[0])
        if field.startswith("result"):
            worker.claim(WAIT_S).reply(encode_result(0, b"r" * 300))
        cells[field][i] = value & (0xFF if field == "priority" else 2**64 - 1)
        while True:
            try:
                worker.try_claim().reply(encode_result(0, b"answer"))
            except Empty:
                break
            except SubethaError:
                continue
        seen = {result.token: result.result for result in client.recv_many(9)}
        assert seen[after] == b"answer", value
        if bad in seen and field != "job_id":
            # a length that can be true is believed
            assert seen[bad] in (b"answer", b"r" * 300, b"rr") or "damaged" in str(seen[bad]), value
        run_a_job(client)


@pytest.mark.parametrize("side", ["job", "result"])
def test_a_job_that_names_another_jobs_block_is_damaged_and_never_reads_or_frees_that(make, files_of, side):
    client, worker = make(**SMALL), make.open()
    cells = files_of(client.path).cells
    ids = [client.submit(Pass(1, b"%d" % n * 5000)) for n in range(2)]
    field = f"{side}_block"
    if side == "result":
        for n in range(2):
            worker.claim(WAIT_S).reply(encode_result(0, b"%d" % n * 5000))
    bad, other = (int(np.flatnonzero(cells["job_id"] == job_id)[0]) for job_id in ids)
    cells[field][bad] = cells[field][other]
    if side == "job":
        claim = worker.claim(WAIT_S)
        assert claim.job_id == ids[1], "the damaged one was answered with an error"
        assert claim.tobytes()[10:] == b"1" * 5000
        claim.reply(encode_result(0, b"1" * 5000))
    results = {result.token: result.result for result in client.recv_many(9)}
    assert "damaged" in str(results[ids[0]])
    assert results[ids[1]] == b"1" * 5000
    assert client.stats().free == 16

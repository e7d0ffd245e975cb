"""Jobs with a unique key: there once while they are pending, whoever submits, stops or dies."""

import contextlib
import threading

import pytest

from subetha import once
from subetha._core import SubmitOptions, decode_submit, encode_result
from subetha.errors import ArenaFull, MapFull
from subetha.once import forget_unique, holds
from subetha.pass_registry import Pass
from subetha.routing import Promise, unique_key

from .participants import WAIT_S, eventually, participant

__all__ = ["participant"]  # a fixture


def submit_as(queue, job_id, pass_, due=None):
    queue._submit(pass_.closure_id, pass_.args, SubmitOptions(), due, None, job_id)


def submit_unique(queue, key, pass_, due=None):
    return once.submit_unique(queue, key, lambda job_id: submit_as(queue, job_id, pass_, due))


def args_of(claim):
    return bytes(decode_submit(claim.payload)[1].args)


def entry(queue, key):
    return Promise.read(queue.registrations().map.get(unique_key(key)))


def test_the_second_of_one_key_is_the_first(make):
    queue, other = make(), make.open()
    job_id, is_new = submit_unique(queue, "key", Pass(1, b"first"))
    assert is_new
    assert submit_unique(other, "key", Pass(1, b"second")) == (job_id, False)
    assert submit_unique(queue, "another", Pass(1, b"third"))[1]
    claims = [queue.claim(WAIT_S), queue.claim(WAIT_S)]
    assert sorted(map(args_of, claims)) == [b"first", b"third"]
    assert submit_unique(other, "key", Pass(1, b"while it runs")) == (job_id, False)


@pytest.mark.parametrize("how", ["done", "cancelled", "acknowledged"])
def test_when_the_first_is_over_the_next_one_is_a_job_of_its_own(make, how):
    queue = make()
    job_id, _ = submit_unique(queue, "key", Pass(1, b"first"))
    if how == "cancelled":
        assert queue.cancel(job_id)
    elif how == "done":
        queue.claim(WAIT_S).reply(encode_result(0, b""))
    else:
        queue.claim(WAIT_S).ack()
    other_id, is_new = submit_unique(queue, "key", Pass(1, b"second"))
    assert is_new
    assert other_id != job_id


def test_one_that_waits_for_its_time_or_rests_is_pending(make):
    queue = make()
    job_id, _ = submit_unique(queue, "key", Pass(1), due=4e9)
    assert submit_unique(queue, "key", Pass(1)) == (job_id, False)
    assert holds(queue, job_id)


def test_many_threads_that_submit_one_key_hand_in_one_job(make):
    handles = [make(64)] + [make.open() for _ in range(3)]
    for round_ in range(20):
        start = threading.Barrier(len(handles))
        found = []

        def submit(handle, start=start, found=found, round_=round_):
            start.wait()
            found.append(submit_unique(handle, f"key {round_}", Pass(1, b"x")))

        threads = [threading.Thread(target=submit, args=(handle,)) for handle in handles]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert len({job_id for job_id, _ in found}) == 1
        assert sorted(is_new for _, is_new in found) == [False, False, False, True]
    assert handles[0].stats().waiting == 20


def test_what_was_promised_by_one_that_died_before_it_submitted_is_taken_over(make, participant):
    queue, dying = make(), participant()
    dying.do(
        "from subetha.routing import Promise, unique_key",
        "queue.registrations().map[unique_key('key')] = Promise(False, queue._new_job_id(), 0, *queue.identity).to_bytes()",
    )
    dying.kill()
    _, is_new = submit_unique(queue, "key", Pass(1, b"mine"))
    assert is_new
    assert queue.stats().waiting == 1


def test_what_was_submitted_by_one_that_died_before_it_said_so_is_found(make, participant):
    queue, dying = make(), participant()
    dying.do(
        "from subetha._core import SubmitOptions",
        "from subetha.routing import Promise, unique_key",
        "held.append(queue._new_job_id())",
        "queue.registrations().map[unique_key('key')] = Promise(False, held[0], 0, *queue.identity).to_bytes()",
        "queue._submit(1, b'theirs', SubmitOptions(), job_id=held[0])",
    )
    job_id = dying.get("held[0]")
    dying.kill()
    assert submit_unique(queue, "key", Pass(1, b"mine")) == (job_id, False)
    assert entry(queue, "key").is_there
    assert queue.stats().waiting == 1


def test_one_that_is_stopped_before_it_submits_is_not_waited_for_long_and_takes_its_job_back(make, monkeypatch):
    queue, slow = make(), make.open()
    monkeypatch.setattr(once, "PATIENCE_S", 0.05)
    is_promised, may_go_on = threading.Event(), threading.Event()
    original = slow._submit

    def submit(*args, **how):
        is_promised.set()
        assert may_go_on.wait(WAIT_S)
        return original(*args, **how)

    monkeypatch.setattr(slow, "_submit", submit, raising=False)
    found = []
    thread = threading.Thread(target=lambda: found.append(submit_unique(slow, "key", Pass(1, b"slow"))))
    thread.start()
    assert is_promised.wait(WAIT_S)
    job_id, is_new = submit_unique(queue, "key", Pass(1, b"quick"))
    assert is_new
    may_go_on.set()
    thread.join()
    assert found == [(job_id, False)]
    claim = queue.claim(WAIT_S)
    assert args_of(claim) == b"quick"
    assert queue.stats().waiting == 0
    claim.ack()


def test_a_submit_that_fails_leaves_the_key_free(make):
    queue = make()
    with pytest.raises(ArenaFull):
        submit_unique(queue, "key", Pass(1, bytes(2**25)))
    assert entry(queue, "key") is None
    assert submit_unique(queue, "key", Pass(1))[1]


def test_a_key_is_forgotten_only_for_its_own_job(make):
    queue = make()
    job_id, _ = submit_unique(queue, "key", Pass(1))
    forget_unique(queue, "key", job_id + 1)
    assert entry(queue, "key").job_id == job_id
    forget_unique(queue, "key", job_id)
    assert entry(queue, "key") is None
    forget_unique(queue, "key", job_id)


def test_keys_of_jobs_that_are_over_make_room_for_others(make):
    queue = make(participants=1)
    first, _ = submit_unique(queue, "first", Pass(1))
    map_ = queue.registrations().map
    with contextlib.suppress(MapFull):
        for n in range(1000):
            map_[unique_key(str(n))] = Promise(True, 2**40 + n, 0, 1, 1).to_bytes()
    assert len(map_) < 1000
    assert submit_unique(queue, "second", Pass(1))[1]
    assert submit_unique(queue, "first", Pass(1)) == (first, False)
    eventually(lambda: len(map_) == 2, "the others are gone")


def test_what_another_process_writes_there_is_no_promise(make):
    queue = make()
    queue.registrations().map[unique_key("key")] = b"nonsense"
    assert submit_unique(queue, "key", Pass(1))[1]


def test_one_that_another_meets_before_its_submitter_has_said_that_it_is_there_stays(make, monkeypatch):
    queue, other = make(), make.open()
    met = []

    def submit(*args, **options):
        job_id = type(queue)._submit(queue, *args, **options)
        met.append(submit_unique(other, "key", Pass(1)))
        return job_id

    monkeypatch.setattr(queue, "_submit", submit)
    job_id, is_new = submit_unique(queue, "key", Pass(1))
    assert is_new
    assert met == [(job_id, False)]
    assert holds(queue, job_id)
    assert entry(queue, "key").job_id == job_id


def test_one_that_is_there_when_its_submitter_is_interrupted_has_the_key(make, monkeypatch):
    queue = make()

    def submit(*args, **options):
        type(queue)._submit(queue, *args, **options)
        raise KeyboardInterrupt

    monkeypatch.setattr(queue, "_submit", submit)
    with pytest.raises(KeyboardInterrupt):
        submit_unique(queue, "key", Pass(1))
    monkeypatch.undo()
    assert not submit_unique(queue, "key", Pass(1))[1]
    assert queue.stats().waiting == 1

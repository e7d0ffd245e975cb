"""Many processes and threads on one queue: every result once and at its own client, and nobody in anybody's way."""

import signal
import time

import pytest

from subetha._core import encode_result
from subetha.jobqueue import JobQueue
from subetha.pass_registry import Pass

WAIT_S = 30

WORKER = """
STOP = 0

def answer(pass_):
    # derived from what was asked for, of another length
    seed = int.from_bytes(pass_.args[:8], "little")
    assert pass_.args[8:] == pattern(seed, len(pass_.args) - 8), "torn job"
    return pass_.args[:8] + pattern(seed + 1, (seed * 31) % 2999 if seed % 5 else 20_000)


def ask(seed):
    return seed.to_bytes(8, "little") + pattern(seed, (seed * 17) % 700 if seed % 7 else 9000)


def work(path, seed, releases):
    import random
    dice = random.Random(seed)
    with JobQueue.open(path) as queue:
        while True:
            claim = queue.claim(60)
            if releases and dice.random() < 0.1:
                if dice.random() < 0.5:
                    claim.started()
                claim.release()
                continue
            claim.started()
            token, pass_ = decode_submit(claim.payload)
            if pass_.closure_id == STOP:
                claim.ack()
                return
            assert token == claim.job_id & 0xFFFFFFFF
            assert claim.attempts == 1, claim.attempts
            claim.reply(encode_result(0, answer(pass_)))


def stop_workers(path, n):
    with JobQueue.open(path) as queue:
        for _ in range(n):
            queue.submit(Pass(STOP, b""), priority=2)
        while queue.stats().waiting:
            time.sleep(0.001)


def check(seed, result):
    expected = answer(Pass(1, ask(seed)))
    assert result.result == expected, ("wrong result", seed, result)
"""


def queue_is_empty_and_whole(path):
    with JobQueue.open(path) as queue:
        stats = queue.stats()
        assert stats.states == {"FREE": stats.cells}
        assert stats.participants == 0
        assert queue.repair() == 0
        job_id = queue.submit(Pass(1, b""))
        queue.claim(WAIT_S).reply(encode_result(0, b"fine"))
        assert queue.recv(WAIT_S).token == job_id


# --- processes ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("repairs", [False, True], ids=["alone", "beside repairs"])
def test_clients_and_workers_in_many_processes_lose_double_and_mix_up_nothing(make, files_of, run_script, repairs):
    queue = make(64, quota=14, participants=32, arena_bytes=2**22)
    queue.close()
    run_script(
        WORKER
        + """
path, repairs = sys.argv[1], sys.argv[2] == "True"
jobs = 300 if repairs else 900


def client(number):
    with JobQueue.open(path) as queue:
        expected, cancelled, received = {}, 0, 0
        for n in range(jobs):
            seed = number * 1_000_000 + n
            # at most 12 at a time, so that nobody waits for room that only it could make
            while len(expected) >= 12:
                result = queue.recv(60)
                check(expected.pop(result.token), result)
                received += 1
            expected[queue.submit(Pass(1, ask(seed)), priority=n % 3)] = seed
            if n % 10 == 9:
                job_id = list(expected)[n % len(expected)]
                if queue.cancel(job_id):
                    del expected[job_id]
                    cancelled += 1
        while expected:
            result = queue.recv(60)
            check(expected.pop(result.token), result)
            received += 1
        assert received + cancelled == jobs
        assert queue.recv_many(10) == []


def repair_and_come_again(gate):
    # each time under another number, or another incarnation of it
    os.close(gate.into)
    while not select.select([gate.out], [], [], 0)[0]:
        with JobQueue.open(path) as queue:
            queue.repair()


gate = Gate()
repairers = [fork(repair_and_come_again, gate) for _ in range(2 if repairs else 0)]
workers = [fork(work, path, seed, True) for seed in range(3)]
wait_for([fork(client, number) for number in range(1, 5)])
stop_workers(path, 3)
wait_for(workers)
gate.open()
wait_for(repairers)
""",
        queue.path,
        repairs,
    )
    queue_is_empty_and_whole(queue.path)
    files = files_of(queue.path)
    for size, *_ in files.arena_classes:
        assert (files.block_words(size) & 0xF <= 1).all(), "a block is still in use"


def test_each_submitters_jobs_are_claimed_in_their_order_while_all_submit_at_once(make, run_script):
    queue = make(256, participants=8)
    queue.close()
    run_script(
        """
        path, jobs = sys.argv[1], 700

        def client(number):
            with JobQueue.open(path) as queue:
                gate.wait()
                for n in range(jobs):
                    queue.submit(Pass(number, n.to_bytes(4, "little")), priority=1)

        gate = Gate()
        clients = [fork(client, number) for number in range(3)]
        gate.open()
        with JobQueue.open(path) as worker:
            following = [0, 0, 0]
            for _ in range(3 * jobs):
                claim = worker.claim(50)
                pass_ = decode_submit(claim.payload)[1]
                assert int.from_bytes(pass_.args, "little") == following[pass_.closure_id], (pass_, following)
                following[pass_.closure_id] += 1
                claim.ack()
        wait_for(clients)
        """,
        queue.path,
    )
    queue_is_empty_and_whole(queue.path)


def test_a_stopped_process_stands_in_nobodys_way(make, run_script):
    queue = make(64, participants=16)
    queue.close()
    run_script(
        WORKER
        + """
path = sys.argv[1]


def victim():
    stopping = []
    signal.signal(signal.SIGTERM, lambda *_: stopping.append(1))
    with JobQueue.open(path) as queue:
        n = 0
        while not stopping:
            n += 1
            mine = {queue.submit(Pass(1, ask(seed)), priority=seed % 3): seed for seed in range(n, n + 5)}
            for _ in range(3):
                try:
                    queue.try_claim().release()
                except Empty:
                    pass
            while mine:
                result = queue.recv(60)
                check(mine.pop(result.token), result)


workers = [fork(work, path, seed, False) for seed in range(2)]
victims = [fork(victim) for _ in range(2)]
with JobQueue.open(path) as queue:
    for step in range(40):
        stopped = victims[step % 2]
        os.kill(stopped, signal.SIGSTOP)
        os.waitpid(stopped, os.WUNTRACED)
        held = {queue.submit(Pass(1, ask(seed)), wait=60): seed for seed in range(10)}
        while held:
            try:
                result = queue.recv(0.05)
            except Empty:
                # it may have stopped with one of these jobs in its hands; that one comes when it goes on
                if len(held) <= 1:
                    break
                continue
            check(held.pop(result.token), result)
        os.kill(stopped, signal.SIGCONT)
        while held:
            result = queue.recv(60)
            check(held.pop(result.token), result)
for pid in victims:
    os.kill(pid, signal.SIGTERM)
wait_for(victims)
stop_workers(path, 2)
wait_for(workers)
""",
        queue.path,
    )
    queue_is_empty_and_whole(queue.path)


def test_a_killed_client_stands_in_nobodys_way_and_its_accepted_jobs_still_run(make, run_script):
    queue = make(256, quota=20, participants=40)
    queue.close()
    run_script(
        WORKER
        + """
path = sys.argv[1]


def victim(out):
    with JobQueue.open(path) as queue:
        for n in range(100_000):
            queue.submit(Pass(1, ask(n)))
            os.write(out, b".")
            if n % 3:
                queue.recv(60)


worker = fork(work, path, 1, False)
with JobQueue.open(path) as queue:
    for step in range(10):
        out, into = os.pipe()
        pid = fork(victim, into)
        os.close(into)
        os.read(out, 1)
        time.sleep(step % 5 * 0.003)
        os.kill(pid, signal.SIGKILL)
        os.waitpid(pid, 0)
        os.close(out)
        mine = {queue.submit(Pass(1, ask(seed)), wait=60): seed for seed in range(20)}
        while mine:
            result = queue.recv(60)
            check(mine.pop(result.token), result)
    while queue.stats().waiting:
        time.sleep(0.001)
stop_workers(path, 1)
wait_for([worker])
""",
        queue.path,
    )
    with JobQueue.open(queue.path, readonly=True) as looker:
        stats = looker.stats()
        assert stats.waiting == stats.running == 0
        assert stats.free > 20, "what the dead held is for their rescue"


def test_who_sleeps_in_claim_or_recv_is_woken_by_what_it_waits_for(make, run_script):
    """No message waits for the end of a bounded sleep; of 20 exchanges a few may meet a busy machine."""
    queue = make()
    queue.close()
    run_script(
        """
        path = sys.argv[1]

        def work():
            with JobQueue.open(path) as queue:
                for _ in range(20):
                    queue.claim(60).reply(encode_result(0, b""))

        worker = fork(work)
        slow = 0
        with JobQueue.open(path) as queue:
            for _ in range(20):
                # long after its spinning
                time.sleep(0.01)
                start = time.monotonic()
                queue.submit(Pass(1, b""))
                queue.recv(60)
                slow += time.monotonic() - start > 0.4
        wait_for([worker])
        assert slow < 10, slow
        """,
        queue.path,
    )


def test_who_waits_at_its_quota_goes_on_as_soon_as_a_worker_acknowledges(make, run_script):
    """As above: no submit waits for the end of a bounded sleep where another process frees the cell."""
    queue = make(quota=1)
    queue.close()
    run_script(
        """
        path = sys.argv[1]

        def work():
            with JobQueue.open(path) as queue:
                for _ in range(21):
                    claim = queue.claim(60)
                    # until the client sleeps
                    time.sleep(0.01)
                    claim.ack()

        worker = fork(work)
        slow = 0
        with JobQueue.open(path) as queue:
            queue.submit(Pass(1, b""))
            for _ in range(20):
                start = time.monotonic()
                queue.submit(Pass(1, b""))
                slow += time.monotonic() - start > 0.4
        wait_for([worker])
        assert slow < 10, slow
        """,
        queue.path,
    )


# --- threads --------------------------------------------------------------------------------------------------------


def test_threads_that_start_at_once_on_a_fresh_handle_are_one_participant_and_get_every_result(make, run_script):
    queue = make(64, quota=63)
    queue.close()
    run_script(
        """
        import collections
        path = sys.argv[1]
        worker = JobQueue.open(path)
        worker.slot
        for round_ in range(12):
            client = JobQueue.open(path)
            start = threading.Barrier(8)
            sent, received, failures = collections.deque(), collections.deque(), []

            def run(number):
                try:
                    start.wait()
                    for n in range(6):
                        sent.append(client.submit(Pass(number, b"%d" % n)))
                    for n in range(6):
                        received.append(client.recv(20).token)
                except BaseException as error:
                    failures.append(error)

            threads = [threading.Thread(target=run, args=(number,)) for number in range(8)]
            for thread in threads:
                thread.start()
            for _ in range(48):
                worker.claim(20).reply(encode_result(0, b""))
            for thread in threads:
                thread.join()
            assert not failures, failures
            assert sorted(sent) == sorted(received)
            assert len(set(sent)) == 48
            assert worker.stats().participants == 2
            client.close()
            assert worker.stats().participants == 1
            assert worker.stats().free == 64
        """,
        queue.path,
    )


def test_eight_threads_share_a_handle_within_its_quota(make, run_script):
    queue = make(64, quota=6)
    queue.close()
    run_script(
        WORKER
        + """
import collections
path, jobs = sys.argv[1], 400
worker = fork(work, path, 1, True)
client = JobQueue.open(path)
sent, received, failures = {}, collections.deque(), []
changing = threading.Lock()
left = [4 * jobs]


def submit(number):
    try:
        for n in range(jobs):
            seed = number * 10_000 + n
            job_id = client.submit(Pass(1, ask(seed)))
            with changing:
                assert job_id not in sent
                sent[job_id] = seed
    except BaseException as error:
        failures.append(error)


def receive():
    try:
        while True:
            with changing:
                if left[0] == 0:
                    return
                left[0] -= 1
            received.append(client.recv(50))
    except BaseException as error:
        failures.append(error)


threads = [threading.Thread(target=submit, args=(number,)) for number in range(4)]
threads += [threading.Thread(target=receive) for _ in range(4)]
for thread in threads:
    thread.start()
for thread in threads:
    thread.join()
assert not failures, failures
assert sorted(result.token for result in received) == sorted(sent)
for result in received:
    check(sent[result.token], result)


def fill():
    try:
        while True:
            client.submit(Pass(1, ask(1)), wait=0)
    except Full:
        pass

stop_workers(path, 1)
wait_for([worker])
threads = [threading.Thread(target=fill) for _ in range(8)]
for thread in threads:
    thread.start()
for thread in threads:
    thread.join()
assert client.stats().waiting == 6, client.stats()
while client.stats().waiting:
    client.claim(0).ack()
client.close()
""",
        queue.path,
    )
    queue_is_empty_and_whole(queue.path)


def test_closing_ends_every_call_that_other_threads_are_inside_of(make, run_script):
    queue = make(32, quota=30, participants=16)
    queue.close()
    run_script(
        """
        path = sys.argv[1]
        other = JobQueue.open(path)
        other.slot

        def forever(call):
            # a call that returns at once is made until the handle is closed
            while True:
                call()

        def reply(handle):
            claim = handle.claim()
            claim.started()
            claim.reply(encode_result(0, b"x" * 500))

        def look(handle):
            claim = handle.claim()
            bytes(claim.payload)
            claim.tobytes()
            claim.release()

        def round_trip(handle):
            handle.cancel(handle.submit(Pass(1, b"x" * 500)))

        for delay in (0, 0, 0.001, 0.005, 0.02, 0.02):
            handle = JobQueue.open(path)
            calls = {
                "claim": handle.claim,
                "recv": handle.recv,
                "pop": handle.result_side.pop,
                "try_claim": lambda: handle.try_claim().release(),
                "reply": lambda: reply(handle),
                "look": lambda: look(handle),
                "submit": lambda: handle.submit(Pass(1, b"")),
                "cancel": lambda: round_trip(handle),
                "recv_many": lambda: handle.recv_many(3),
                "stats": handle.stats,
                "cells": handle.cells,
                "repair": handle.repair,
            }
            start = threading.Barrier(len(calls) + 1)
            ended = {}

            def run(name, call):
                start.wait()
                while True:
                    try:
                        call()
                    except (Empty, Full):
                        continue
                    except TransportError as error:
                        # two at once may not repair; a claim put back by close() is over
                        if "repairing" in str(error) or "taken away" in str(error):
                            continue
                        ended[name] = error
                        return
                    except BaseException as error:
                        ended[name] = error
                        return

            threads = [threading.Thread(target=run, args=item, daemon=True) for item in calls.items()]
            for thread in threads:
                thread.start()
            start.wait()
            time.sleep(delay)
            handle.close()
            for thread in threads:
                thread.join(20)
            assert set(ended) == set(calls), ("still inside", set(calls) - set(ended))
            wrong = {name: error for name, error in ended.items() if "closed" not in str(error)}
            wrong |= {name: error for name, error in ended.items() if type(error) is not ValueError}
            assert not wrong, wrong
            gc.collect()
            stats = other.stats()
            assert stats.participants == 1 and stats.running == 0 and stats.done == 0, stats
            while other.stats().waiting:
                other.claim(1).ack()
            assert other.stats().free == 32, other.stats()
        """,
        queue.path,
    )
    queue_is_empty_and_whole(queue.path)


# --- a forked child -------------------------------------------------------------------------------------------------


def test_a_forked_child_is_a_participant_of_its_own_and_cannot_end_its_parents_claims(make, run_script):
    queue = make()
    queue.close()
    run_script(
        """
        queue = JobQueue.open(sys.argv[1])
        mine = queue.submit(Pass(1, b"parent's"))
        other = queue.submit(Pass(1, b"waits"))
        claim = queue.claim(20)
        claim.started()
        view = claim.payload
        slot = queue.slot

        def child():
            global claim, view
            assert bytes(view).endswith(b"parent's")
            stolen = encode_result(0, b"stolen")
            for end in (claim.ack, claim.release, claim.started, claim.tobytes, lambda: claim.reply(stolen)):
                try:
                    end()
                except ValueError as error:
                    assert "process that forked this one" in str(error), error
                else:
                    raise AssertionError(end)
            del claim, view
            gc.collect()
            assert queue.stats().running == 1
            assert queue.recv_many(9) == []
            assert queue.slot != slot
            job_id = queue.submit(Pass(2, b"child's"))
            assert job_id >> 48 == queue.slot + 1 and job_id >> 32 != mine >> 32
            claims = [queue.claim(20), queue.claim(20)]
            assert [c.job_id for c in claims] == [other, job_id]
            claims[1].reply(encode_result(0, b"for the child"))
            result = queue.recv(20)
            assert (result.token, result.result) == (job_id, b"for the child")
            claims[0].reply(encode_result(0, b"from the child"))
            assert queue.stats().participants == 2
            queue.close()

        wait_for([fork(child)])
        assert queue.stats().participants == 1
        assert queue.slot == slot
        claim.reply(encode_result(0, b"from the parent")) if not view.release() else None
        results = {result.token: result.result for result in (queue.recv(20), queue.recv(20))}
        assert results == {mine: b"from the parent", other: b"from the child"}
        assert queue.recv_many(9) == []
        assert queue.stats().states == {"FREE": 16}
        queue.close()
        """,
        queue.path,
    )
    queue_is_empty_and_whole(queue.path)


def test_the_end_of_a_child_leaves_the_parents_claims_results_and_slot_alone(make, run_script):
    queue = make()
    queue.close()
    run_script(
        """
        ends = ["queue.close()", "del queue; gc.collect()", "pass", "os._exit(0)", "os.kill(os.getpid(), 9)"]
        for takes_part, end in [(takes_part, end) for end in ends for takes_part in (True, False)]:
            queue = JobQueue.open(sys.argv[1])
            done, running, waiting = (queue.submit(Pass(1, b"%d" % n)) for n in range(3))
            queue.claim(20).reply(encode_result(0, b"done"))
            claim = queue.claim(20)
            pid = os.fork()
            if pid == 0:
                if takes_part:
                    queue.cancel(queue.submit(Pass(1, b"child's"), priority=2))
                exec(end)
                sys.exit()
            os.waitpid(pid, 0)
            assert queue.heartbeat.is_alive(queue.slot), end
            assert queue.stats().running == 1, end
            assert queue.stats().participants == 1, end
            claim.reply(encode_result(0, b"running"))
            queue.claim(20).reply(encode_result(0, b"waiting"))
            assert [result.token for result in queue.recv_many(9)] == [done, running, waiting], end
            queue.close()
        """,
        queue.path,
    )


def test_a_child_does_not_keep_its_parents_slot_alive(make, run_script):
    queue = make()
    queue.slot  # noqa: B018
    run_script(
        """
        out, into = os.pipe()
        hold, let_go = os.pipe()

        def parent():
            handle = JobQueue.open(sys.argv[1])
            slot = handle.slot
            if os.fork() == 0:
                # lives on, holding every inherited descriptor
                os.close(let_go)
                os.write(into, b"%d" % slot)
                os.read(hold, 1)
                os._exit(0)
            os.read(hold, 1)

        pid = fork(parent)
        slot = int(os.read(out, 10))
        looker = JobQueue.open(sys.argv[1], readonly=True)
        assert looker.heartbeat.is_alive(slot)
        os.kill(pid, 9)
        os.waitpid(pid, 0)
        assert not looker.heartbeat.is_alive(slot)
        os.close(let_go)
        """,
        queue.path,
    )
    assert list(queue.heartbeat) == [0]


def test_a_child_forked_while_threads_were_inside_calls_can_use_and_close_the_handle(make, run_script):
    queue = make()
    queue.close()
    run_script(
        """
        queue = JobQueue.open(sys.argv[1])
        queue.recv_many(1)
        ended = []

        def blocked(call):
            try:
                call()
            except ValueError:
                ended.append(call)

        threads = [threading.Thread(target=blocked, args=(queue.recv,), daemon=True) for _ in range(3)]
        for thread in threads:
            thread.start()

        def state(thread):
            return open(f"/proc/self/task/{thread.native_id}/stat").read().rpartition(")")[2].split()[0]

        while any(state(thread) != "S" for thread in threads):
            time.sleep(0.001)

        def descriptors():
            return len(os.listdir("/proc/self/fd"))

        def child(uses):
            before = descriptors()
            if uses:
                job_id = queue.submit(Pass(1, b""))
                queue.claim(20).reply(encode_result(0, b"child's"))
                assert queue.recv(20).token == job_id
            queue.close()
            assert descriptors() < before, "it was not let go of"

        wait_for([fork(child, True), fork(child, False)])
        assert queue.stats().participants == 1
        queue.close()
        for thread in threads:
            thread.join(20)
        assert len(ended) == 3
        """,
        queue.path,
    )


@pytest.mark.parametrize("uses", [True, False])
def test_a_view_inherited_by_a_child_outlives_the_childs_close(make, run_script, uses):
    queue = make()
    queue.close()
    run_script(
        f"""
        queue = JobQueue.open(sys.argv[1])
        queue.submit(Pass(1, b"looked at"))
        claim = queue.claim(20)
        array = np.frombuffer(claim.payload, np.uint8)

        def child():
            global queue, claim, array
            if {uses}:
                queue.submit(Pass(1, b""))
                queue.claim(20).ack()
            queue.close()
            gc.collect()
            assert array.tobytes().endswith(b"looked at")
            del array
            gc.collect()
            del claim, queue
            gc.collect()

        wait_for([fork(child)])
        assert array.tobytes().endswith(b"looked at")
        assert queue.stats().running == 1
        del array
        claim.reply(encode_result(0, b"fine"))
        assert queue.recv(20).result == b"fine"
        """,
        queue.path,
    )


# --- signals --------------------------------------------------------------------------------------------------------


def test_ctrl_c_ends_a_blocked_call_and_the_handle_works_on(make, start_script):
    queue = make(quota=8)
    queue.close()
    process = start_script(
        """
        path = sys.argv[1]
        first, client = JobQueue.open(path), JobQueue.open(path)
        client.slot

        def at_quota():
            while True:
                client.submit(Pass(1, b"q"))

        def pool_full():
            try:
                while True:
                    first.submit(Pass(1, b"f"), wait=0)
            except Full:
                pass
            while True:
                third.submit(Pass(1, b"f"))

        third = JobQueue.open(path)
        calls = [client.claim, client.recv, client.submit_side.claim, client.result_side.pop, at_quota, pool_full]
        for call in calls:
            print("blocks", flush=True)
            try:
                call()
            except KeyboardInterrupt:
                print("interrupted", flush=True)
        while client.stats().waiting:
            client.claim(0).ack()
        client.submit(Pass(1, b""))
        client.claim(0).reply(encode_result(0, b"fine"))
        assert client.recv(0).result == b"fine"
        assert client.stats().free == 16
        """,
        queue.path,
    )
    interrupted = 0
    for line in process.stdout:
        if line == "blocks\n":
            sleeping(process.pid)
            process.send_signal(signal.SIGINT)
        interrupted += line == "interrupted\n"
    out, err = process.communicate(timeout=WAIT_S)
    assert process.returncode == 0, out + err
    assert interrupted == 6


def sleeping(pid):
    """Wait until the main thread sleeps in the kernel, which it does in nothing but the blocking call here."""
    while True:
        with open(f"/proc/{pid}/stat") as file:
            if file.read().rpartition(")")[2].split()[0] == "S":
                return
        time.sleep(0.001)


def test_a_signal_that_comes_while_a_call_still_spins_is_answered_before_it_sleeps_on(make, run_script):
    queue = make()
    queue.close()
    run_script(
        """
        queue = JobQueue.open(sys.argv[1])
        queue.recv_many(1)

        class Rang(Exception):
            pass

        def ring(*_):
            raise Rang

        signal.signal(signal.SIGALRM, ring)
        for call in (queue.claim, queue.recv):
            for microseconds in range(40, 220, 20):
                start = time.monotonic()
                try:
                    signal.setitimer(signal.ITIMER_REAL, microseconds * 1e-6)
                    call(20)
                except Rang:
                    assert time.monotonic() - start < 10, (microseconds, "answered only at the timeout")
                except Empty:
                    raise AssertionError("the signal was not answered") from None
        """,
        queue.path,
    )


def test_a_handler_that_does_not_raise_lets_the_call_go_on(make, run_script):
    queue = make()
    queue.close()
    run_script(
        """
        queue = JobQueue.open(sys.argv[1])
        rang = []

        def ring(*_):
            rang.append(1)
            if len(rang) == 3:
                queue.submit(Pass(1, b"from the handler"))
            elif len(rang) < 3:
                signal.setitimer(signal.ITIMER_REAL, 0.02)

        signal.signal(signal.SIGALRM, ring)
        signal.setitimer(signal.ITIMER_REAL, 0.02)
        claim = queue.claim(30)
        assert len(rang) == 3
        assert claim.tobytes().endswith(b"from the handler")
        """,
        queue.path,
    )

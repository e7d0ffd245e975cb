"""Executors whose futures are cancelled and whose workers are killed at random moments: every future comes to its one end."""

import os
import signal
import threading
import time
from concurrent.futures import CancelledError, as_completed
from pathlib import Path

import pytest

from subetha import Executor, JobQueue

pytestmark = pytest.mark.slow

WAIT_S = 300


def threads_and_descriptors():
    return threading.active_count(), len(list(Path("/proc/self/fd").iterdir()))


def test_futures_cancelled_at_random_moments_all_end_and_leave_nothing(sized, dice, figures):
    count = sized(5_000, 100_000)
    cancelled = run = told = 0
    before = threads_and_descriptors()

    def tell(_future):
        nonlocal told
        told += 1
        if told % 100 == 0:
            raise RuntimeError("a callback that raises")

    with Executor(2) as executor, JobQueue.open(executor.queue, readonly=True) as queue:
        lately = []
        for n in range(count):
            future = executor.submit(abs, -n)
            if n % 3 == 0:
                future.add_done_callback(tell)
            lately.append((n, future))
            if len(lately) == 200:
                dice.shuffle(lately)
                for _, one in lately[:100]:
                    one.cancel()
                for n_, one in lately[50:]:
                    try:
                        assert one.result(WAIT_S) == n_
                        run += 1
                    except CancelledError:
                        cancelled += 1
                for _, one in lately[:50]:
                    assert one.cancelled() or one.result(WAIT_S) is not None
                    cancelled, run = cancelled + one.cancelled(), run + (not one.cancelled())
                lately.clear()
        assert executor.submit(pow, 2, 2).result(WAIT_S) == 4
        assert cancelled + run == count - count % 200
        deadline = time.monotonic() + WAIT_S
        while queue.stats().free < queue.cells_total or told < count // 3:
            assert time.monotonic() < deadline
            time.sleep(0.01)
        assert told == (count + 2) // 3
    assert threads_and_descriptors() == before
    figures(futures=count, cancelled=cancelled, run=run, callbacks=told)


def test_every_future_gets_its_own_result_while_workers_are_killed(sized, dice, figures):
    count = sized(800, 20_000)
    kills = 0
    before = threads_and_descriptors()

    def work(n):
        # long enough that a kill meets some of them
        time.sleep(0.002)
        return n, os.getpid()

    with Executor(3, max_attempts=1000) as executor:
        pids = {executor.submit(os.getpid).result(WAIT_S)}
        over = threading.Event()

        def kill():
            nonlocal kills
            while not over.wait(0.05):
                victim = dice.choice(sorted(pids))
                pids.discard(victim)
                try:
                    os.kill(victim, signal.SIGKILL)
                    kills += 1
                except ProcessLookupError:
                    pass
                while not pids and not over.is_set():
                    time.sleep(0.001)

        killer = threading.Thread(target=kill)
        killer.start()
        seen = {}
        try:
            futures = {executor.submit(work, n): n for n in range(count)}
            for future in as_completed(futures, WAIT_S):
                n, pid = future.result()
                assert n == futures[future]
                assert n not in seen
                seen[n] = pid
                pids.add(pid)
        finally:
            over.set()
            killer.join()
        assert len(seen) == count
    assert kills > 0
    assert threads_and_descriptors() == before
    figures(jobs=count, kills=kills, workers=len(set(seen.values())))

"""Futures and tasks in event loops."""

import asyncio
import importlib.util
import itertools
import operator
import os
import threading
import time

import pytest

from subetha import Executor, crew

WAIT_S = 60


@pytest.fixture(scope="module")
def two():
    with Executor(2) as found:
        yield found


@pytest.fixture(params=["asyncio", "uvloop"])
def run(request):
    """Runs a coroutine in a new event loop, of each kind there is."""
    if request.param == "asyncio":
        return asyncio.run
    if importlib.util.find_spec("uvloop") is None:
        pytest.skip("uvloop is not installed")
    import uvloop

    return uvloop.run


def test_a_future_is_awaited(two, run):
    async def main():
        return await two.submit(pow, 2, 8)

    assert run(main()) == 256


def test_what_a_job_raises_is_raised_by_await(two, run):
    async def main():
        with pytest.raises(ZeroDivisionError):
            await two.submit(operator.truediv, 1, 0)
        with pytest.raises(ZeroDivisionError):
            await two.asubmit(operator.truediv, 1, 0)

    run(main())


def test_many_are_awaited_without_a_thread_each(two, run):
    async def main():
        futures = [two.asubmit(abs, -n) for n in range(500)]
        gathered = asyncio.gather(*futures)
        await asyncio.sleep(0)
        threads.append(threading.active_count())
        return await gathered

    threads = []
    before = threading.active_count()
    assert run(main()) == list(range(500))
    # the client's one
    assert threads[0] <= before + 1


def test_results_come_in_order_to_an_async_for_and_an_endless_iterable_is_read_bit_by_bit(two, run):
    read = []

    async def main():
        found = []
        results = two.amap(operator.neg, (read.append(n) or n for n in itertools.count()), buffersize=4)
        async for result in results:
            found.append(result)
            if len(found) == 20:
                break
        await results.aclose()
        return found

    assert run(main()) == [-n for n in range(20)]
    assert len(read) <= 25


def test_the_loop_goes_on_while_the_queue_is_full(monkeypatch, run):
    monkeypatch.setattr(crew, "PRIVATE_CELLS", 16)

    async def main(found):
        ticks = 0

        async def tick():
            nonlocal ticks
            while True:
                ticks += 1
                await asyncio.sleep(0)

        ticking = asyncio.ensure_future(tick())
        results = await asyncio.gather(*(found.asubmit(abs, -n) for n in range(200)))
        ticking.cancel()
        return results, ticks

    with Executor(1) as found:
        results, ticks = run(main(found))
    assert results == list(range(200))
    assert ticks > 10


def test_more_long_arguments_than_the_arena_holds_wait_for_room(run):
    async def main(found):
        return await asyncio.gather(*(found.asubmit(len, bytes(200_000)) for _ in range(20)))

    with Executor(1, arena_bytes=1 << 20) as found:
        assert run(main(found)) == [200_000] * 20


def test_arguments_are_pickled_once_however_long_the_queue_is_full(monkeypatch, run):
    class Counted:
        def __reduce__(self):
            nonlocal pickled
            pickled += 1
            return int, ()

    pickled = 0
    monkeypatch.setattr(crew, "PRIVATE_CELLS", 16)
    with Executor(1) as found:
        submits = []
        original = found._client.submit
        monkeypatch.setattr(found._client, "submit", lambda *job, **how: submits.append(job) or original(*job, **how))

        async def main():
            await asyncio.gather(*(found.asubmit(time.sleep, 0.01) for _ in range(30)), found.asubmit(bool, Counted()))

        run(main())
    # by plain pickle, and since the class is local once more by cloudpickle
    assert len(submits) > 31
    assert pickled <= 2


def test_cancelling_the_task_that_awaits_cancels_a_job_that_waits(run, tmp_path):
    started, go = os.fspath(tmp_path / "started"), os.fspath(tmp_path / "go")
    os.mkfifo(started)
    os.mkfifo(go)

    def held():
        with open(started, "w"):
            pass
        with open(go) as fifo:
            return fifo.read()

    async def main(found):
        running = found.submit(held)
        await asyncio.to_thread(lambda: open(started).close())
        waiting = found.submit(pow, 2, 2)
        task = asyncio.ensure_future(asyncio.wait_for(waiting, 0.05))
        with pytest.raises(asyncio.TimeoutError):
            await task
        assert waiting.cancelled()
        with open(go, "w") as fifo:
            fifo.write("gone on")
        return await running

    with Executor(1) as found:
        assert run(main(found)) == "gone on"


def test_two_loops_in_two_threads_share_one_executor(two, run):
    async def main(sign):
        return await asyncio.gather(*(two.asubmit(operator.mul, sign, n) for n in range(200)))

    found = {}
    threads = [threading.Thread(target=lambda sign=sign: found.update({sign: run(main(sign))})) for sign in (1, -1)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(WAIT_S)
    assert found == {sign: [sign * n for n in range(200)] for sign in (1, -1)}


def test_a_future_that_is_done_is_awaited_at_once(two, run):
    future = two.submit(pow, 2, 2)
    future.result(WAIT_S)

    async def main():
        return await future

    assert run(main()) == 4

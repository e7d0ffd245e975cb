"""What workers log reaches the client's logging, or a file."""

import logging
import os
import threading

import pytest

from subetha import Executor, JobQueue, Pass, WorkerPool
from subetha.logging import RECORDS, RecordHandler, RecordReader

WAIT_S = 60


def log(level, text, *args):
    logging.getLogger("far.away").log(level, text, *args)
    return os.getpid()


@pytest.fixture
def by_value(monkeypatch):
    """This module cannot be imported in workers."""
    monkeypatch.setattr(log, "__module__", "__main__")


def test_records_come_with_their_text_level_job_and_worker(caplog, by_value):
    caplog.set_level(logging.INFO)
    with Executor(1) as found:
        future = found.submit(log, logging.INFO, "value %s", object)
        pid = future.result(WAIT_S)
    (record,) = [record for record in caplog.records if record.name == "far.away"]
    assert record.getMessage() == f"value {object}"
    assert record.levelno == logging.INFO
    assert (record.worker, record.job_id) == (pid, future.job_id)
    assert record.process == pid


def test_tracebacks_come_as_text(caplog):
    def fail():
        try:
            1 / 0  # noqa: B018
        except ZeroDivisionError:
            logging.getLogger("far.away").exception("failed")

    with Executor(1) as found:
        found.submit(fail).result(WAIT_S)
    assert "failed\nTraceback (most recent call last):" in caplog.text
    assert "ZeroDivisionError" in caplog.text


def test_the_level_is_this_processs_or_the_one_given(caplog, by_value):
    caplog.set_level(logging.WARNING)
    with Executor(1) as found:
        found.submit(log, logging.INFO, "not here").result(WAIT_S)
        found.submit(log, logging.WARNING, "here").result(WAIT_S)
    assert [record.msg for record in caplog.records if record.name == "far.away"] == ["here"]
    caplog.clear()
    with Executor(1, log_level=logging.ERROR) as found:
        found.submit(log, logging.WARNING, "not here").result(WAIT_S)
    assert caplog.records == []


def test_a_long_text_is_cut_and_a_long_attribute_left_out(caplog, by_value):
    with Executor(1) as found:
        found.submit(log, logging.WARNING, "long " * 10_000).result(WAIT_S)
    (record,) = caplog.records
    assert record.msg.startswith("long long")
    assert record.msg.endswith("... (cut, it had 50000 characters)")


def test_a_full_ring_drops_records_and_says_how_many(shm, caplog):
    reader = RecordReader(shm / "ring")
    handler = RecordHandler(shm / "ring", logging.INFO)
    logger = logging.Logger("full")
    logger.addHandler(handler)
    for n in range(RECORDS + 10):
        logger.warning("record %d", n)
    reader.read()
    assert [record.msg for record in caplog.records] == [f"record {n}" for n in range(RECORDS)]
    caplog.clear()
    logger.warning("the next one")
    reader.read()
    assert [record.msg for record in caplog.records] == [
        "10 records of this worker were dropped: they were not taken from the ring in time",
        "the next one",
    ]
    handler.close()
    reader.close()


def test_a_record_of_many_or_long_attributes_comes_without_them(shm, caplog):
    reader = RecordReader(shm / "ring")
    handler = RecordHandler(shm / "ring", logging.INFO)
    logger = logging.Logger("n" * 5000)
    logger.addHandler(handler)
    logger.warning("many", extra={f"attribute_{n}": n for n in range(1000)})
    logger.warning("long " * 1000, extra={"number": 10**10_000})
    reader.read()
    many, long = caplog.records
    assert (many.msg, many.levelno, many.worker) == ("many", logging.WARNING, os.getpid())
    assert long.msg.endswith("... (cut, it had 5000 characters)")
    handler.close()
    reader.close()


def test_who_logs_without_end_does_not_keep_the_reader(shm):
    class Again(logging.Handler):
        count = 0

        def emit(self, _record):
            self.count += 1
            if self.count < 10 * RECORDS:
                logger.warning("again")

    reader = RecordReader(shm / "ring")
    handler = RecordHandler(shm / "ring", logging.INFO)
    logger = logging.Logger("endless")
    logger.addHandler(handler)
    again = Again()
    logging.getLogger("endless").addHandler(again)
    try:
        logger.warning("first")
        reader.read()
        assert again.count <= RECORDS
    finally:
        logging.getLogger("endless").removeHandler(again)
        handler.close()
        reader.close()


def test_what_a_job_forks_logs_as_well(caplog):
    def fork():
        child = os.fork()
        if child == 0:
            status = 1
            try:
                logging.getLogger("far.away").warning("from the child")
                status = 0
            finally:
                os._exit(status)
        assert os.waitpid(child, 0)[1] == 0
        logging.getLogger("far.away").warning("from its parent")
        return child, os.getpid()

    with Executor(1) as found:
        child, parent = found.submit(fork).result(WAIT_S)
    records = [(record.msg, record.worker) for record in caplog.records if record.name == "far.away"]
    assert records == [("from the child", child), ("from its parent", parent)]


def test_a_record_that_cannot_be_read_is_told_and_the_others_come(shm, caplog):
    reader = RecordReader(shm / "ring")
    handler = RecordHandler(shm / "ring", logging.INFO)
    handler.queue.try_push(b"nonsense")
    logger = logging.Logger("damaged")
    logger.addHandler(handler)
    logger.warning("whole")
    reader.read()
    assert [record.msg for record in caplog.records] == ["a record of a worker could not be handled", "whole"]
    handler.close()
    reader.close()


def test_workers_of_a_shared_queue_log_to_a_file(shm, tmp_path, monkeypatch):
    (tmp_path / "logging_handlers.py").write_text(
        "import logging\nfrom subetha import register\n"
        "@register(1)\ndef note(args):\n    logging.getLogger('far').info('heard %s', args)\n    return b''\n"
    )
    monkeypatch.syspath_prepend(tmp_path)
    log_file = tmp_path / "log"
    with (
        WorkerPool(["logging_handlers"], shm / "queue", 2, log_file=log_file, log_level=logging.INFO) as pool,
        JobQueue.open(shm / "queue") as queue,
    ):
        jobs = {queue.submit(Pass(1, b"%d" % n)) for n in range(20)}
        pids = set(pool.pids)
        for _ in range(20):
            queue.recv(WAIT_S)
    lines = log_file.read_text().splitlines()
    assert len(lines) == 20
    assert {int(line.split(", job ")[1].split("]")[0]) for line in lines} == jobs
    assert {int(line.split("[worker ")[1].split(",")[0]) for line in lines} <= pids
    assert all(" INFO far [worker " in line and "heard b'" in line for line in lines)


def test_workers_start_while_other_threads_log(caplog):
    stop = threading.Event()

    def chatter():
        while not stop.is_set():
            logging.getLogger("near").warning("chatter")

    threads = [threading.Thread(target=chatter) for _ in range(3)]
    for thread in threads:
        thread.start()
    try:
        with Executor(2) as found:
            assert found.submit(pow, 2, 2).result(WAIT_S) == 4
    finally:
        stop.set()
        for thread in threads:
            thread.join()

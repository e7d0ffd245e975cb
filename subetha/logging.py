"""What workers log, in the logging of the process they work for, or in a file.

An executor with a private queue makes a ring beside it. Each worker has a handler at its root logger that puts its records
there; the executor's keeper takes them out, four times a second and once more at its end, and gives each to the logger of the
same name here, whose level, filters and handlers do with it as with its own. Logging never makes a job wait: where the ring is
full a record is dropped, and the next one that goes through is preceded by a warning that says how many were.

A record has two attributes more, for formats and filters:

    worker      pid of the worker
    job_id      number of the job that ran in the thread that logged, or None
"""

import logging
import logging.handlers
import os
import pickle
from typing import Any, Final

from subetha import files
from subetha._core import SharedRing
from subetha.errors import Empty, Full, PayloadTooLarge
from subetha.job import current_job

__all__ = ["RecordHandler", "RecordReader", "add_job", "file_handler"]

FORMAT: Final = "%(asctime)s %(levelname)s %(name)s [worker %(worker)s, job %(job_id)s]: %(message)s"
"""Of a file's lines."""

RECORDS: Final = 256
"""Records that may be on their way at one time."""

RECORD_BYTES: Final = 4088

_LONGEST_TEXT = 900
_LEAST = ("levelno", "created", "process", "worker", "job_id")
_PLAIN = (bool, int, float, str, type(None))
_LOGGER = logging.getLogger("subetha.logging")


def add_job(record: logging.LogRecord) -> bool:
    """Give a record its two attributes; a `logging` filter that lets everything through."""
    job = current_job()
    record.worker = os.getpid()
    record.job_id = None if job is None else job.job_id
    return True


def file_handler(path: files.Path, level: int) -> logging.Handler:
    """Make a handler that appends to a file, to which other workers append, too: a line is one write."""
    handler = logging.FileHandler(os.fsdecode(path), mode="a", encoding="utf-8", errors="backslashreplace")
    handler.setLevel(level)
    handler.addFilter(add_job)
    handler.setFormatter(logging.Formatter(FORMAT))
    return handler


class RecordHandler(logging.handlers.QueueHandler):
    """Puts records into a ring, in a worker.

    Parameters
    ----------
    path : path
        The ring's file.
    level : int
    """

    def __init__(self, path: files.Path, level: int) -> None:
        self._path = path
        super().__init__(self._opened())
        self.setLevel(level)
        self.addFilter(add_job)
        self._dropped = 0

    def _opened(self) -> Any:
        self._pid = os.getpid()
        return SharedRing.open(self._path)

    def enqueue(self, record: logging.LogRecord) -> None:
        """Put a record, whose text `prepare` has made, into the ring; never waits."""
        if os.getpid() != self._pid:
            # forked by a job
            self.queue = self._opened()
        try:
            if self._dropped:
                self._push(self._of_dropped())
                self._dropped = 0
            self._push(record)
        except Full:
            self._dropped += 1

    def _push(self, record: logging.LogRecord) -> None:
        ring: Any = self.queue
        # attributes of other kinds may mean nothing elsewhere
        plain = {name: value for name, value in record.__dict__.items() if isinstance(value, _PLAIN)}
        try:
            ring.try_push(pickle.dumps(plain))
        except PayloadTooLarge:
            short = {name: value for name, value in plain.items() if not isinstance(value, str) or len(value) < 100}
            text = record.msg
            short["msg"] = f"{text[:_LONGEST_TEXT]}... (cut, it had {len(text)} characters)"
            try:
                ring.try_push(pickle.dumps(short))
            except PayloadTooLarge:
                # many attributes, or long numbers
                least = {name: plain[name] for name in _LEAST}
                least["name"] = record.name[:100]
                least["msg"] = text if len(text) <= 100 else f"{text[:100]}... (cut, it had {len(text)} characters)"
                ring.try_push(pickle.dumps(least))

    def _of_dropped(self) -> logging.LogRecord:
        text = f"{self._dropped} records of this worker were dropped: they were not taken from the ring in time"
        record = _LOGGER.makeRecord(_LOGGER.name, logging.WARNING, __file__, 0, text, (), None)
        add_job(record)
        return record

    def close(self) -> None:
        ring: Any = self.queue
        ring.close()
        super().close()


class RecordReader:
    """Takes records out of a ring and gives them to this process's loggers.

    Parameters
    ----------
    path : path
        The ring's file, made here.
    """

    def __init__(self, path: files.Path) -> None:
        self._ring = SharedRing.create(path, RECORDS, payload_bytes=RECORD_BYTES)

    def read(self) -> None:
        """Handle the records that are there, not all that come meanwhile; what a handler raises is logged."""
        for _ in range(RECORDS):
            try:
                found = pickle.loads(self._ring.try_pop())
                record = logging.makeLogRecord(found)
                logger = logging.getLogger(record.name)
                if logger.isEnabledFor(record.levelno):
                    logger.handle(record)
            except Empty:
                return
            except Exception:
                _LOGGER.exception("a record of a worker could not be handled")

    def close(self) -> None:
        self._ring.close()

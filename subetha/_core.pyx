"""The compiled core: shared structures in mapped files, and the messages that travel through them.

Here stand the Python objects: arguments, buffers, codes into exceptions. The algorithms are the nogil functions of the
`.pxd` files. The files themselves are made and checked by `files.py`, after the layouts of `layout.py`.
"""

cimport cython
from cpython.buffer cimport (
    PyBUF_READ, PyBUF_SIMPLE, PyBuffer_FillInfo, PyBuffer_Release, PyObject_GetBuffer,
)
from cpython.bytearray cimport PyByteArray_AS_STRING, PyByteArray_FromStringAndSize
from cpython.bytes cimport PyBytes_AS_STRING, PyBytes_CheckExact, PyBytes_FromStringAndSize, PyBytes_GET_SIZE
from cpython.exc cimport PyErr_CheckSignals
from cpython.memoryview cimport PyMemoryView_FromMemory
from cpython.number cimport PyNumber_AsSsize_t
from cpython.ref cimport PyObject
from libc.math cimport ceil, isnan
from libc.stdint cimport int32_t, int64_t, uint8_t, uint32_t, uint64_t
from libc.stdlib cimport calloc, free, malloc
from libc.string cimport memcpy

from subetha._atomics cimport *
from subetha._blocks cimport *
from subetha._cells cimport *
from subetha._deque cimport *
from subetha._handshake cimport *
from subetha._heartbeat cimport *
from subetha._keep cimport *
from subetha._lapse cimport *
from subetha._layout cimport *
from subetha._map cimport *
from subetha._mapvalues cimport *
from subetha._observation cimport *
from subetha._park cimport *
from subetha._process cimport *
from subetha._queue cimport *
from subetha._recovery cimport *
from subetha._repair cimport *
from subetha._rescue cimport *
from subetha._ring cimport *
from subetha._shareddeque cimport *
from subetha._sharedring cimport *
from subetha._waiting cimport *
from subetha._watch cimport *

import operator
import os
import zlib
from collections.abc import ItemsView, KeysView, Mapping, MutableMapping, ValuesView
from datetime import datetime
from importlib import import_module
from pickle import dumps as pickle_dumps
from pickle import loads as pickle_loads
from threading import Condition
from types import BuiltinFunctionType, FunctionType

import numpy as np

from subetha import errors, files, layout

cdef object Kind = layout.Kind
cdef object Role = layout.Role
cdef uint64_t LINES = layout.LINES_OFFSET
cdef object ZERO = 0

include "_wire.pxi"
include "_adaptive.pxi"
include "_mapped.pxi"
include "_arena.pxi"
include "_messages.pxi"
include "_sharedring.pxi"
include "_shareddeque.pxi"
include "_sharedmap.pxi"
include "_table.pxi"
include "_queue.pxi"
include "_work.pxi"
include "_calls.pxi"
include "_futures.pxi"


def forks():
    """How many forks lie between this process and the one that loaded this module first; cheaper than to ask for the pid."""
    return fork_generation()


def punch_hole(int fd, int64_t offset, int64_t length):
    """Give the disk space of a part of a file back; it reads as zeros. Raises OSError, EOPNOTSUPP where the file system cannot."""
    if fallocate_again(fd, FALLOC_FL_PUNCH_HOLE | FALLOC_FL_KEEP_SIZE, offset, length) != 0:
        raise OSError(errno, os.strerror(errno))


def end_with_parent(pid):
    """Let this process end soon after its parent `pid`: by SIGTERM within half a second, by SIGKILL 3.5 s later where it is stuck.

    It is watched by the native timer, which runs while a heartbeat table, ring, deque or queue of this process holds a number.
    """
    watch_parent(pid)


cdef int check_layout() except -1:
    """The structs compiled here are the dtypes of layout.py, or nothing is mapped at all."""
    cdef RingCell ring
    cdef JobCell job
    cdef RingLines lines
    cdef DequeLines ends
    cdef MapCell map_cell
    cdef MapLines map_lines
    cdef PoolLines pool
    cdef Participant participant
    cdef ArenaLines arena
    cdef Observation observation
    compiled = {
        "RING_CELL": (sizeof(RingCell), {
            "word": <size_t> &ring.word - <size_t> &ring,
            "length": <size_t> &ring.length - <size_t> &ring,
            "reserved": <size_t> &ring.reserved - <size_t> &ring,
        }),
        "JOB_CELL": (sizeof(JobCell), {
            "word": <size_t> &job.word - <size_t> &job,
            "job_id": <size_t> &job.job_id - <size_t> &job,
            "job_length": <size_t> &job.job_length - <size_t> &job,
            "result_length": <size_t> &job.result_length - <size_t> &job,
            "job_block": <size_t> &job.job_block - <size_t> &job,
            "result_block": <size_t> &job.result_block - <size_t> &job,
            "attempts": <size_t> &job.attempts - <size_t> &job,
            "max_attempts": <size_t> &job.max_attempts - <size_t> &job,
            "priority": <size_t> &job.priority - <size_t> &job,
            "doublings": <size_t> &job.doublings - <size_t> &job,
            "reserved": <size_t> &job.reserved - <size_t> &job,
            "timeout_ms": <size_t> &job.timeout_ms - <size_t> &job,
            "keep_s": <size_t> &job.keep_s - <size_t> &job,
            "submitted_ns": <size_t> &job.submitted_ns - <size_t> &job,
            "started_ns": <size_t> &job.started_ns - <size_t> &job,
            "due_ns": <size_t> &job.due_ns - <size_t> &job,
            "deadline_ns": <size_t> &job.deadline_ns - <size_t> &job,
            "progress": <size_t> &job.progress - <size_t> &job,
            "backoff_ms": <size_t> &job.backoff_ms - <size_t> &job,
            "job_crc32": <size_t> &job.job_crc32 - <size_t> &job,
            "result_crc32": <size_t> &job.result_crc32 - <size_t> &job,
            "charged": <size_t> &job.charged - <size_t> &job,
            "unknown_ns": <size_t> &job.unknown_ns - <size_t> &job,
            "causes": <size_t> &job.causes - <size_t> &job,
        }),
        "RING_LINES": (sizeof(RingLines), {
            "tail": <size_t> &lines.tail - <size_t> &lines,
            "head": <size_t> &lines.head - <size_t> &lines,
            "due": <size_t> &lines.due - <size_t> &lines,
            "items": <size_t> &lines.items - <size_t> &lines,
            "space": <size_t> &lines.space - <size_t> &lines,
        }),
        "DEQUE_LINES": (sizeof(DequeLines), {
            "top": <size_t> &ends.top - <size_t> &ends,
            "bottom": <size_t> &ends.bottom - <size_t> &ends,
            "owner": <size_t> &ends.owner - <size_t> &ends,
            "pushes": <size_t> &ends.pushes - <size_t> &ends,
        }),
        "MAP_CELL": (sizeof(MapCell), {
            "word": <size_t> &map_cell.word - <size_t> &map_cell,
            "hash": <size_t> &map_cell.hash - <size_t> &map_cell,
            "key_length": <size_t> &map_cell.key_length - <size_t> &map_cell,
            "value_length": <size_t> &map_cell.value_length - <size_t> &map_cell,
            "key": <size_t> &map_cell.key - <size_t> &map_cell,
        }),
        "MAP_LINES": (sizeof(MapLines), {
            "phase": <size_t> &map_lines.phase - <size_t> &map_lines,
            "absent": <size_t> &map_lines.absent - <size_t> &map_lines,
        }),
        "POOL_LINES": (sizeof(PoolLines), {
            "items": <size_t> &pool.items - <size_t> &pool,
            "space": <size_t> &pool.space - <size_t> &pool,
            "deadline": <size_t> &pool.deadline - <size_t> &pool,
            "boot": <size_t> &pool.boot - <size_t> &pool,
            "due": <size_t> &pool.due - <size_t> &pool,
        }),
        "PARTICIPANT": (sizeof(Participant), {
            "status": <size_t> &participant.status - <size_t> &participant,
            "last_seen_epoch": <size_t> &participant.last_seen_epoch - <size_t> &participant,
            "in_flight_bitmap": <size_t> &participant.in_flight_bitmap - <size_t> &participant,
            "completed": <size_t> &participant.completed - <size_t> &participant,
            "boot_hash": <size_t> &participant.boot_hash - <size_t> &participant,
            "started_ns": <size_t> &participant.started_ns - <size_t> &participant,
            "runs": <size_t> &participant.runs - <size_t> &participant,
            "pid": <size_t> &participant.pid - <size_t> &participant,
            "role": <size_t> &participant.role - <size_t> &participant,
        }),
        "ARENA_LINES": (sizeof(ArenaLines), {
            "backed_bytes": <size_t> &arena.backed_bytes - <size_t> &arena,
            "high": <size_t> &arena.high - <size_t> &arena,
        }),
        "OBSERVATION": (sizeof(Observation), {
            "time_ns": <size_t> &observation.time_ns - <size_t> &observation,
            "value": <size_t> &observation.value - <size_t> &observation,
            "op": <size_t> &observation.op - <size_t> &observation,
            "flags": <size_t> &observation.flags - <size_t> &observation,
            "lap": <size_t> &observation.lap - <size_t> &observation,
        }),
    }
    for name, (size, offsets) in compiled.items():
        kind = getattr(layout, name)
        declared = {field: kind.fields[field][1] for field in kind.names}
        if kind.itemsize != size or declared != offsets:
            raise errors.LayoutMismatch(
                f"{name}: the compiled core has {size} bytes {offsets}, layout.py has {kind.itemsize} bytes {declared}; "
                "build the extension again"
            )
    if (
        SLOT_USED, KEPT, LINKED, LEVELS, MAX_CLASSES, OP_WATCHDOG_SCAN, WAIT_SPIN, MOVING, KEY_BYTES, LOOKING, UNKNOWN_BIT
    ) != (
        layout.SlotState.USED, layout.CellState.KEPT, layout.BlockState.LINKED, layout.PRIORITIES, layout.SIZE_CLASSES,
        layout.Op.WATCHDOG_SCAN, layout.WaitTag.SPIN, layout.MapPhase.MOVING, layout.KEY_BYTES, layout.LOOKING,
        layout.UNKNOWN_BIT,
    ):
        raise errors.LayoutMismatch("states or limits of the compiled core and of layout.py differ; build the extension again")
    return 0


check_layout()

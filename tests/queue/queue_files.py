"""The bytes of a queue's files, for tests that write them by hand or count what is left in them."""

import os

import numpy as np

from subetha.layout import (
    ARENA_LINES,
    HOT_LINE,
    JOB_CELL,
    LINE,
    LINES_OFFSET,
    MIN_BLOCK_BYTES,
    PARTICIPANT,
    POOL_LINES,
    PRIORITIES,
    QUEUE_GEOMETRY,
    RING_LINES,
    SIZE_CLASSES,
    TABLE_LINES,
    align,
)


class QueueFiles:
    """A queue's files as writable structured arrays: the bytes that a misbehaving peer, or a test, may write."""

    def __init__(self, path):
        self.path = os.fspath(path)
        pool = self.bytes("pool")
        geometry = pool[LINE : 2 * LINE].view(QUEUE_GEOMETRY)[0]
        self.job_bytes, self.result_bytes = int(geometry["job_bytes"]), int(geometry["result_bytes"])
        self.participants, self.arena_limit = int(geometry["participants"]), int(geometry["arena_bytes"])
        self.cells_at = LINES_OFFSET + POOL_LINES.itemsize
        self.stride = align(JOB_CELL.itemsize + self.job_bytes + self.result_bytes, LINE)

    def bytes(self, name):
        return np.asarray(np.memmap(os.path.join(self.path, name), np.uint8, "r+"))

    @property
    def cells(self):
        kind = np.dtype(
            {
                "names": [*JOB_CELL.names, "job", "result"],
                "formats": [
                    *(JOB_CELL.fields[name][0] for name in JOB_CELL.names),
                    ("u1", self.job_bytes),
                    ("u1", self.result_bytes),
                ],
                "offsets": [
                    *(JOB_CELL.fields[name][1] for name in JOB_CELL.names),
                    JOB_CELL.itemsize,
                    JOB_CELL.itemsize + self.job_bytes,
                ],
                "itemsize": self.stride,
            }
        )
        return self.bytes("pool")[self.cells_at :].view(kind)

    @property
    def pool_lines(self):
        return self.bytes("pool")[LINES_OFFSET : self.cells_at].view(POOL_LINES)

    def ring_place(self, name):
        """File of a ring of references, offset of its lines, offset and number of its places."""
        places = 2 * len(self.cells)
        file, _, number = name.partition("/")
        at = LINES_OFFSET
        if number:
            first = align(LINES_OFFSET + 4 * self.participants, MIN_BLOCK_BYTES)
            at = first + (int(number) - 1) * align(RING_LINES.itemsize + 8 * places, MIN_BLOCK_BYTES)
        return file, at, at + RING_LINES.itemsize, places

    def ring(self, name):
        """Lines (RING_LINES, shape (1,)) and places (uint64) of a ring of references."""
        file, at, places_at, places = self.ring_place(name)
        contents = self.bytes(file)
        return contents[at:places_at].view(RING_LINES), contents[places_at : places_at + 8 * places].view("<u8")

    @property
    def mailboxes(self):
        """Numbers of the participants whose mailbox is there."""
        made = self.bytes("mail")[LINES_OFFSET : LINES_OFFSET + 4 * self.participants].view("<u4")
        return [int(i) + 1 for i in np.flatnonzero(made)]

    @property
    def ring_names(self):
        return [
            *(f"{kind}-{level}" for level in range(PRIORITIES) for kind in ("back", "submit")),
            *(f"mail/{number}" for number in self.mailboxes),
        ]

    @property
    def records(self):
        start = LINES_OFFSET + TABLE_LINES.itemsize
        return self.bytes("table")[start : start + self.participants * PARTICIPANT.itemsize].view(PARTICIPANT)

    @property
    def arena_classes(self):
        """(block bytes, offset of the class's words, number of blocks) of each size class."""
        classes = []
        at = align(LINES_OFFSET + ARENA_LINES.itemsize, HOT_LINE)
        while len(classes) < SIZE_CLASSES and MIN_BLOCK_BYTES << len(classes) <= self.arena_limit:
            size = MIN_BLOCK_BYTES << len(classes)
            count = self.arena_limit // size
            classes.append((size, at, count))
            at = align(at + 8 * count, HOT_LINE)
        return classes

    def block_words(self, size):
        contents = self.bytes("arena")
        for block_bytes, at, count in self.arena_classes:
            if block_bytes == size:
                return contents[at : at + 8 * count].view("<u8")
        raise ValueError(f"no class of {size} bytes")

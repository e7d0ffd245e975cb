"""Calls of a HeartbeatTable used alone under the stepper: no slot is lost, and none has two holders."""

import os
import shutil

import numpy as np
from census import nothing_left, records_faults
from ring_file import TableFile

from subetha._core import HeartbeatTable
from subetha.errors import TableFull
from subetha.layout import SlotState

CAPACITY = 4
FALLEN = 0
DYING = {}


def make_template(directory):
    """A table that has been in use."""
    with HeartbeatTable.create(os.path.join(directory, "table"), CAPACITY) as table:
        for _ in range(2):
            for slot in [table.register(os.getpid()) for _ in range(CAPACITY)]:
                table.unregister(slot)


class TableStage:
    """The survivor, who holds a slot, and one call of a victim on the same table."""

    dies = ()
    dies_first = False
    lapses = ()

    def __init__(self, directory):
        self.directory = directory
        self.path = os.path.join(directory, "table")

    @classmethod
    def copy(cls, template, directory):
        shutil.copytree(template, directory)
        return cls(directory)

    @property
    def watched(self):
        return [(self.path, 0)]

    def before(self):
        self.table = HeartbeatTable.open(self.path)
        self.slots = {self.table.register(os.getpid())}
        self.records = TableFile(self.path).records

    def setup(self):
        self.table = HeartbeatTable.open(self.path)

    def call(self):
        raise NotImplementedError

    def finish(self, value):
        self.table.close()
        return value

    def look_at_trace(self):
        """Did the call that was stepped through do what it is there for?"""

    def after_kill(self, returned, value):
        assert set(self.table) == self.slots, "the dead hold nothing"
        self.settle()

    def fill(self):
        """Take every slot that is to be had."""
        taken = set()
        try:
            while True:
                slot = self.table.register(os.getpid())
                assert slot not in taken | self.slots, f"slot {slot} has two holders"
                snapshot = self.table.snapshot(slot)
                assert (snapshot.pid, snapshot.in_flight_bitmap) == (os.getpid(), 0)
                taken.add(slot)
        except TableFull:
            return taken

    def settle(self):
        """Everybody else has gone, so there is room for as many as there are slots, and for no more."""
        taken = self.fill()
        assert taken | self.slots == set(range(CAPACITY)), f"slots {taken} were to be had beside {self.slots}"
        nothing_left(records_faults(self.records, taken | self.slots))
        for slot in taken:
            self.table.unregister(slot)
        nothing_left(records_faults(self.records, self.slots))
        self.close()
        nothing_left(records_faults(self.records, set()))

    def close(self):
        self.table.close()

    # ---- the victim is only stopped ----

    def traffic(self):
        """All others come and go, ten times, and then take all that is left."""
        for _ in range(10):
            for slot in self.fill():
                self.table.unregister(slot)
        self.slots |= self.fill()

    def meanwhile(self):
        """Again and again until the victim has ended."""

    def after_stop(self, value):
        assert value not in self.slots, f"slot {value} has two holders"
        for slot in self.slots:
            assert self.table.is_alive(slot)
            self.table.unregister(slot)
        self.slots = set()
        self.settle()


class Register(TableStage):
    def call(self):
        try:
            return self.table.register(os.getpid())
        except TableFull:
            # others were faster while it was stopped
            return None


class RegisterAmongTheDead(Register):
    """Every other slot is a dead one's, and the first of them had something in flight."""

    def before(self):
        super().before()
        self.records["status"][self.records["status"] & 0xFF == SlotState.FREE] |= np.uint64(SlotState.USED)
        self.records["in_flight_bitmap"][1] = 1 << 7


class Unregister(TableStage):
    def setup(self):
        super().setup()
        self.slot = self.table.register(os.getpid())
        self.table.mark_in_flight(self.slot, 7)

    def call(self):
        self.table.unregister(self.slot)


CALLS = {"register": Register, "register_among_the_dead": RegisterAmongTheDead, "unregister": Unregister}

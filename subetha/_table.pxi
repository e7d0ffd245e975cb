# HeartbeatTable: who takes part, in one file (algorithms: _heartbeat.pxd; lock and timer: csrc/process.h).

ctypedef uint32_t[64] CellNumbers


@cython.no_gc_clear
cdef class HeartbeatTable(Mapped):
    """Who takes part: one record a participant, in one mapped file.

    Made by `create`, `open` or `open_or_create`. A slot is held through a lock that the kernel drops when the process dies;
    beats say that it is not stuck. Every call may be made from any thread; none blocks.
    """

    cdef Records records
    cdef uint64_t *epoch
    cdef CellNumbers *in_flight
    cdef dict numbers
    cdef bint is_queues         # a queue's table: it ends with the queue alone
    cdef int64_t queue_slot     # the queue handle's own slot; -1: none

    def __cinit__(self):
        self.queue_slot = -1
        self.numbers = {}

    def __init__(self):
        raise TypeError("use HeartbeatTable.create(path, capacity), .open(path) or .open_or_create(path, capacity)")

    @staticmethod
    def _sizes(capacity):
        """Offsets of the records and of the cell numbers beside them, and size of the file (bytes)."""
        records = LINES + layout.TABLE_LINES.itemsize
        cells = records + capacity * layout.PARTICIPANT.itemsize
        return records, cells, cells + capacity * layout.IN_FLIGHT_CELLS.itemsize

    @classmethod
    def create(cls, path, capacity, *, mode=0o600):
        """Create the file and open it.

        Parameters
        ----------
        path : str, bytes or os.PathLike
        capacity : int
            Participants at one time, from 1 to 65,534.
        mode : int
            Permission bits, kept under any umask.

        Raises
        ------
        ValueError, FileExistsError, OSError
        """
        check_number("capacity", capacity, 1, layout.MAX_PARTICIPANTS)
        files.create(
            path, Kind.TABLE, HeartbeatTable._sizes(capacity)[2], capacity=capacity,
            cell_bytes=layout.PARTICIPANT.itemsize, mode=mode,
        )
        return cls.open(path)

    @classmethod
    def open(cls, path, readonly=False):
        """Open an existing file.

        Raises
        ------
        FileNotFoundError, PermissionError, LayoutMismatch
        """
        cdef HeartbeatTable table = cls.__new__(cls)
        table.map_file(path, Kind.TABLE, readonly)
        try:
            table.attach()
        except BaseException:
            table.close()
            raise
        return table

    @classmethod
    def open_or_create(cls, path, capacity, *, mode=0o600):
        """Open the file, or create it where there is none.

        Raises
        ------
        LayoutMismatch
            It exists with another capacity. Otherwise as `create` and `open`.
        """
        check_number("capacity", capacity, 1, layout.MAX_PARTICIPANTS)
        try:
            table = cls.open(path)
        except FileNotFoundError:
            try:
                return cls.create(path, capacity, mode=mode)
            except FileExistsError:
                table = cls.open(path)
        if table.capacity != capacity:
            found = table.capacity
            table.close()
            raise errors.LayoutMismatch(
                f"{os.fsdecode(path)}: expected capacity {capacity}, found {found}; open it with open(), or choose another path"
            )
        return table

    cdef int attach(self) except -1:
        capacity = int(self.file_header["capacity"])
        if not 1 <= capacity <= layout.MAX_PARTICIPANTS:
            raise errors.LayoutMismatch(
                f"{self.file_path}: expected a capacity from 1 to {layout.MAX_PARTICIPANTS}, found {capacity}; the file is damaged"
            )
        records, cells, size = HeartbeatTable._sizes(capacity)
        files.check_size(self.file_path, size, self.bytes.shape[0])
        self.epoch = <uint64_t *> (self.base + LINES)
        self.records.first = <Participant *> (self.base + <uint64_t> records)
        self.records.count = capacity
        self.in_flight = <CellNumbers *> (self.base + <uint64_t> cells)
        return 0

    def close(self):
        """Close the handle and give up its slots. Idempotent. A queue's table closes with its queue.

        Raises
        ------
        ValueError
            This is a queue's table.
        """
        if self.is_queues:
            raise ValueError(f"{self.file_path}: this is a queue's table; close the queue")
        Mapped.close(self)

    def __del__(self):
        if not self.is_queues:
            Mapped.close(self)

    cdef int give_up(self) except -1:
        cdef Number number
        for number in list(self.numbers.values()):
            number.give_up(True)
        self.numbers.clear()
        return 0

    cdef Participant *record(self, object i) except NULL:
        """The record of slot `i`, which must be in use."""
        return self.used_record(self.any_record(i) - self.records.first)

    @cython.final
    cdef Participant *used_record(self, uint64_t slot) except NULL:
        cdef Participant *found = &self.records.first[slot]
        if status_state(load_acquire_u64(&found.status)) != SLOT_USED:
            raise errors.HeartbeatError(f"{self.file_path}: slot {slot} is not registered")
        return found

    cdef Participant *any_record(self, object i) except NULL:
        cdef Py_ssize_t slot = PyNumber_AsSsize_t(i, <object> NULL)
        if not 0 <= slot < <Py_ssize_t> self.records.count:
            raise errors.HeartbeatError(f"{self.file_path}: expected a slot from 0 to {self.records.count - 1}, found {i}")
        return &self.records.first[slot]

    cdef uint64_t bit(self, object bit) except 0:
        cdef Py_ssize_t n = PyNumber_AsSsize_t(bit, <object> NULL)
        if not 0 <= n <= 63:
            raise ValueError(f"bit: expected 0 to 63, found {bit}")
        return <uint64_t> 1 << n

    @property
    def capacity(self):
        """Participants that may be registered at one time."""
        return self.records.count

    @property
    def global_epoch(self):
        """The epoch that beats are written in."""
        self.enter()
        try:
            return load_acquire_u64(self.epoch)
        finally:
            self.leave()

    cdef Number take_number_of_dead(self, uint32_t pid, uint32_t role, bint auto_beat):
        """The number of a participant that is dead: of one that ran nothing, or else of any. None: all live.

        Not in a queue's table: there what the dead had in hand is moved on before.
        """
        cdef Number number = Number()
        cdef int64_t lock_base = <int64_t> self.bytes.shape[0]
        cdef uint64_t slot, dead
        cdef bint any_of_them
        if self.file_header["extra"] != 0:
            return None
        for any_of_them in (False, True):
            for slot in range(self.records.count):
                if (
                    is_dead(&self.records, self.fd, lock_base, slot, &dead)
                    and (any_of_them or load_acquire_u64(&self.records.first[slot].in_flight_bitmap) == 0)
                    and join_slot(
                        number, &self.records, self.fd, lock_base, slot, dead, pid, role, self.epoch, auto_beat, self.file_path
                    )
                ):
                    return number
        return None

    @cython.binding(True)
    def register(self, pid, role=Role.WORKER, *, auto_beat=False):
        """Take a slot. Where none is free, one whose holder is dead: first of those that had nothing in flight.

        Where all the dead had something in flight, no scan tells any more of what the one had whose slot is taken.

        Parameters
        ----------
        pid : int
            A label for people; the lock, not the pid, says who lives.
        role : Role
        auto_beat : bool
            Let the process's native timer beat for it, twice a second, without the GIL. Else `beat` is the caller's to call.

        Returns
        -------
        int
            The slot. Registering twice gives two.

        Raises
        ------
        TableFull
            Every slot's holder lives.
        ValueError
            No possible pid or role.
        """
        cdef Number number
        self.enter()
        try:
            self.refuse_readonly()
            pid = operator.index(pid)
            if not 0 < pid <= 0x7FFFFFFF:
                raise ValueError(f"pid: expected 1 to {0x7FFFFFFF}, found {pid}")
            role = Role(role)
            try:
                number = take_number(
                    &self.records, self.fd, <int64_t> self.bytes.shape[0], pid, role, self.epoch, auto_beat, self.file_path
                )
            except errors.TableFull:
                number = self.take_number_of_dead(pid, role, auto_beat)
                if number is None:
                    raise
            self.numbers[number.slot] = number
            self.observe(OP_REGISTER, 0, number.slot)
            return number.slot
        finally:
            self.leave()

    cdef Number own(self, object i):
        cdef Number number = self.numbers.get(i)
        if number is None or private_get(&number.kept.inherited):
            raise errors.HeartbeatError(
                f"{self.file_path}: slot {i} was not registered through this handle in this process; only its holder may end it"
            )
        return number

    def unregister(self, i):
        """Give a slot of this handle's up.

        Raises
        ------
        HeartbeatError
            The slot was not registered through this handle.
        """
        self.enter()
        try:
            if self.queue_slot >= 0 and self.queue_slot == i:
                raise errors.HeartbeatError(f"{self.file_path}: slot {i} is its queue's own; close the queue to give it up")
            self.own(i).give_up(True)
            del self.numbers[i]
        finally:
            self.leave()

    def beat(self, i):
        """Write the global epoch as the slot's last seen one.

        Raises
        ------
        HeartbeatError
            The slot is not registered.
        """
        cdef Participant *record
        self.enter()
        try:
            self.refuse_readonly()
            record = self.record(i)
            # T1: pairs with T2
            store_release_u64(&record.last_seen_epoch, load_acquire_u64(self.epoch))
            self.observe(OP_BEAT, 0, <uint64_t> (record - self.records.first))
        finally:
            self.leave()

    def tick_global_epoch(self):
        """Add one to the global epoch.

        Returns
        -------
        int
            The new epoch.
        """
        self.enter()
        try:
            self.refuse_readonly()
            return fetch_add_acq_rel_u64(self.epoch, 1) + 1
        finally:
            self.leave()

    def mark_in_flight(self, i, bit, cell=0):
        """Say that slot `i` runs something.

        Parameters
        ----------
        i : int
            Slot.
        bit : int
            0 to 63.
        cell : int
            Number of the cell it lies in, u32, kept beside the bit.
        """
        cdef Participant *record
        cdef uint64_t mask = self.bit(bit)
        self.enter()
        try:
            self.refuse_readonly()
            record = self.record(i)
            store_relaxed_u32(&self.in_flight[<uint64_t> i][<int> bit], as_u32(cell, "cell"))
            # T3: pairs with T2
            fetch_or_acq_rel_u64(&record.in_flight_bitmap, mask)
            self.observe(OP_MARK, 0, <uint64_t> (record - self.records.first))
        finally:
            self.leave()

    @cython.final
    cdef int begin_job(self, uint64_t slot) except -1:
        """As `mark_in_flight`, for bit 0 of a slot."""
        self.enter()
        try:
            store_relaxed_u32(&self.in_flight[slot][0], 0)
            # T3: pairs with T2
            fetch_or_acq_rel_u64(&self.used_record(slot).in_flight_bitmap, 1)
            self.observe(OP_MARK, 0, slot)
        finally:
            self.leave()
        return 0

    @cython.final
    cdef int end_job(self, uint64_t slot) except -1:
        """As `clear_in_flight`, for bit 0 of a slot, and `add_completed`."""
        cdef Participant *record
        self.enter()
        try:
            record = self.used_record(slot)
            # T3: pairs with T2
            fetch_and_acq_rel_u64(&record.in_flight_bitmap, ~<uint64_t> 1)
            fetch_add_acq_rel_u64(&record.completed, 1)
        finally:
            self.leave()
        return 0

    def clear_in_flight(self, i, bit):
        """Take the bit of `mark_in_flight` away."""
        cdef Participant *record
        cdef uint64_t mask = self.bit(bit)
        self.enter()
        try:
            self.refuse_readonly()
            record = self.record(i)
            # T3: pairs with T2
            fetch_and_acq_rel_u64(&record.in_flight_bitmap, ~mask)
        finally:
            self.leave()

    def in_flight_cell(self, i, bit):
        """The cell number kept beside bit `bit` of slot `i`."""
        self.bit(bit)
        self.enter()
        try:
            self.record(i)
            return load_relaxed_u32(&self.in_flight[<uint64_t> i][<int> bit])
        finally:
            self.leave()

    def add_completed(self, i):
        """Count one more job that slot `i` has ended."""
        self.enter()
        try:
            self.refuse_readonly()
            fetch_add_acq_rel_u64(&self.record(i).completed, 1)
        finally:
            self.leave()

    def completed(self, i):
        """How many jobs slot `i` has ended since it registered."""
        self.enter()
        try:
            return load_acquire_u64(&self.record(i).completed)
        finally:
            self.leave()

    def snapshot(self, i):
        """One registration's fields, all of the same moment of its life.

        Returns
        -------
        HeartbeatSnapshot or None
            None where the slot is free. Never waits for a writer, dead or alive.
        """
        cdef Participant copy
        self.enter()
        try:
            if record_snapshot(self.any_record(i), &copy) != OK:
                return None
            role = copy.role
            return layout.HeartbeatSnapshot(
                copy.pid, copy.last_seen_epoch, copy.in_flight_bitmap, ROLES.get(role, role)
            )
        finally:
            self.leave()

    def silent(self, before_epoch, spared_pid=0):
        """Who has work in hand and has not beaten since an epoch; one pass over the records, without the GIL.

        Parameters
        ----------
        before_epoch : int
            Of it, or of a later one, the last beat of those not told of is.
        spared_pid : int
            The participants of this process are not told of.

        Returns
        -------
        list of int
            Their slots, ascending.
        """
        cdef uint64_t epoch = max(0, before_epoch)
        cdef uint64_t spared = spared_pid
        cdef uint64_t i, bits, first
        cdef list found = []
        self.enter()
        try:
            for first in range(0, self.records.count, 64):
                with nogil:
                    bits = records_silent(&self.records, first, epoch, spared)
                i = first
                while bits:
                    if bits & 1:
                        found.append(i)
                    bits >>= 1
                    i += 1
        finally:
            self.leave()
        return found

    def is_alive(self, i):
        """Does anybody hold slot `i`? The kernel's word, not the pid's."""
        self.enter()
        try:
            self.any_record(i)
            return self.is_locked(i)
        finally:
            self.leave()

    cdef bint is_locked(self, uint64_t i) except -1:
        cdef int held
        if status_state(load_acquire_u64(&self.records.first[i].status)) != SLOT_USED:
            return False
        held = lock_test(self.fd, <int64_t> self.bytes.shape[0] + <int64_t> i)
        if held < 0:
            raise OSError(f"{self.file_path}: the kernel does not tell who holds slot {i}")
        return held

    def __iter__(self):
        """The slots of those alive now (ints, ascending)."""
        cdef uint64_t i
        cdef list alive = []
        self.enter()
        try:
            for i in range(self.records.count):
                if self.is_locked(i):
                    alive.append(i)
        finally:
            self.leave()
        return iter(alive)


cdef dict ROLES = {int(role): role for role in Role}

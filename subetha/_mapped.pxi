# A mapped file and its handle's life; numbers of participants; codes into exceptions.

cdef enum:
    REPAIRS = 8     # before a call gives up: others may damage the file again


cdef object raise_code(Code code, str path, str detail):
    """The one place where codes of the core become exceptions."""
    if code == CORRUPT or code == NO_PLACE:
        raise errors.TransportError(
            f"{path}: places and hints contradict each other and could not be repaired: another process keeps damaging them; "
            "find it, then call repair()"
        )
    if code == FULL or code == QUOTA:
        raise errors.Full(f"{path}: {detail}")
    if code == EMPTY:
        raise errors.Empty(f"{path}: {detail}")
    if code == CLOSED:
        raise ValueError(f"{path}: this handle was closed")
    if code == NO_BLOCK or code == NO_DISK:
        raise errors.ArenaFull(f"{path}: {detail}")
    if code == LOST:
        raise errors.TransportError(f"{path}: this claim was taken away (its job runs elsewhere); drop the result")
    raise errors.TransportError(f"{path}: {detail}")


cdef int64_t deadline_of(object timeout) except -2:
    """Nanoseconds on the monotonic clock; -1 without a timeout."""
    cdef double seconds
    if timeout is None:
        return -1
    seconds = timeout
    if isnan(seconds) or seconds < 0:
        raise ValueError(f"timeout: expected None or seconds >= 0, found {timeout}")
    if seconds > 1e9:
        return -1
    return monotonic_ns() + <int64_t> (seconds * 1e9)


@cython.no_gc_clear
cdef class Mapped:
    """A mapped file: base of every shared structure. Not made directly.

    A handle may be used by several threads. `close` may be called in the middle of their calls: these end with
    ValueError, and the last one to leave gives up what the handle holds. The mapping lives until its last view dies.
    """

    cdef object map
    cdef const uint8_t[::1] bytes
    cdef uint8_t *base
    cdef int fd
    cdef str file_path
    cdef object file_header
    cdef bint is_readonly
    cdef int64_t is_closed
    cdef int64_t is_finished
    cdef int64_t is_unmapped
    cdef int64_t users          # calls under way
    cdef int64_t views          # memoryviews of payloads
    cdef int64_t users_since    # the fork that they are counted since
    cdef HandshakeHeader handshake
    cdef ObservationRing observed
    cdef int64_t *wakes_at      # when a wait has to look again (monotonic ns), set by its check; NULL: none needs that
    cdef int64_t idle_since     # when waits of this handle found nothing for the first time since it took something; 0: not

    def __cinit__(self):
        self.fd = -1
        self.handshake = HandshakeHeader(WAIT_BRIEF)
        self.observed = ObservationRing()
        private_set(&self.is_finished, 1)
        private_set(&self.is_unmapped, 1)
        self.users_since = fork_generation()

    cdef int map_file(self, object path, object kind, bint readonly) except -1:
        self.file_path = os.fsdecode(path)
        self.map, self.file_header, self.fd = files.open_mapped(path, kind, readonly)
        self.bytes = self.map
        self.base = <uint8_t *> &self.bytes[0]
        self.is_readonly = readonly
        private_set(&self.is_finished, 0)
        private_set(&self.is_unmapped, 0)
        return 0

    @cython.final
    cdef int refuse_readonly(self) except -1:
        if self.is_readonly:
            raise errors.TransportError(f"{self.file_path}: opened read-only; open it without readonly=True to change it")
        return 0

    @cython.final
    cdef inline void count_in(self) noexcept:
        if unlikely(self.users_since != fork_generation()):
            # other threads that were inside when this process was forked are not here
            self.users_since = fork_generation()
            private_set(&self.users, 0)
        private_add(&self.users, 1)

    @cython.final
    cdef inline int enter(self) except -1:
        self.count_in()
        if unlikely(private_get(&self.is_closed)):
            self.refuse_closed()
        return 0

    @cython.final
    cdef int refuse_closed(self) except -1:
        self.leave()
        raise ValueError(f"{self.file_path}: this handle is closed")

    @cython.final
    cdef inline int leave(self) except -1:
        if private_add(&self.users, -1) == 0 and unlikely(private_get(&self.is_closed)):
            self.finish()
        return 0

    cdef int finish(self) except -1:
        if private_swap(&self.is_finished, 1):
            return 0
        try:
            self.give_up()
        finally:
            if self.fd >= 0:
                os.close(self.fd)
                self.fd = -1
            if private_get(&self.views) == 0:
                self.unmap()
        return 0

    cdef int unmap(self) except -1:
        """Let the mappings go, after the last call and the last view."""
        if not private_swap(&self.is_unmapped, 1):
            self.bytes = None
            self.map = None
            self.unmap_parts()
        return 0

    cdef int unmap_parts(self) except -1:
        """Let the mappings of further files go."""
        return 0

    cdef int give_up(self) except -1:
        """What the last user does before the mapping goes: claims back, numbers free."""
        return 0

    cdef int wake_all(self) except -1:
        """Wake this handle's waiters, after it was marked closed."""
        return 0

    @cython.final
    cdef inline void observe(self, uint16_t op, uint16_t flags, uint64_t value) noexcept nogil:
        """Record an operation where somebody listens; else one load and a branch."""
        if unlikely(observations_want(&self.observed.state, op)):
            self.put_observation(op, flags, value)

    @cython.final
    cdef void put_observation(self, uint16_t op, uint16_t flags, uint64_t value) noexcept nogil:
        # a function of its own: unrolled into every operation it would cost those that nobody listens to
        observation_put(&self.observed.state, op, flags, value)

    @cython.final
    cdef inline Code wait_for_more(
        self, uint32_t *word, Check check, void *context, int64_t deadline, int *stage
    ) noexcept nogil:
        """One step of a wait for something to take, the first as long as this handle's strategy says."""
        cdef bint is_first = stage[0] == 0
        cdef int64_t late = 0
        cdef Code code = wait_for_more(
            &self.handshake.state, &self.idle_since, word, check, context, &self.is_closed, deadline, self.wakes_at, stage, &late
        )
        if late > LONG_TURN_NS:
            self.observe(OP_YIELD, 0, <uint64_t> late)
        if is_first and code == OK:
            self.end_gap(1)
        return code

    @cython.final
    cdef inline void end_gap(self, uint16_t flags) noexcept nogil:
        """Something could be taken, or is about to be."""
        if private_get(&self.idle_since):
            self.put_gap(flags)

    @cython.final
    cdef void put_gap(self, uint16_t flags) noexcept nogil:
        cdef int64_t since = private_swap(&self.idle_since, 0)
        # 0: another thread was faster
        if since:
            self.observe(OP_WAIT, flags, <uint64_t> (monotonic_ns() - since))

    @property
    def header(self):
        """The strategy of this handle, as a `HandshakeHeader`: its tags are those of `layout.WaitTag`."""
        return self.handshake

    @property
    def ring(self):
        """What is done through this handle, as an `ObservationRing`."""
        return self.observed

    def make_policy(self):
        """What decides about this handle's strategy by default: None, nobody."""
        return None

    def apply_migration(self, new_tag):
        """Change how long calls that take look for something new before they sleep.

        Parameters
        ----------
        new_tag : WaitTag

        Returns
        -------
        bool
            False where calls are under way that began two strategies ago: try again.

        Raises
        ------
        ValueError
            No such tag.
        """
        return self.handshake.migrate(layout.WaitTag(new_tag))

    @property
    def path(self):
        """The file's path, as it was given."""
        return self.file_path

    @property
    def closed(self):
        """True once `close` was called."""
        return bool(private_get(&self.is_closed))

    def close(self):
        """Close the handle: wakes its waiters, puts its claims back uncharged, gives up its number. Idempotent."""
        if private_get(&self.is_closed):
            return
        self.count_in()
        private_set(&self.is_closed, 1)
        try:
            if not private_get(&self.is_finished):
                self.wake_all()
        finally:
            self.leave()

    def __enter__(self):
        if private_get(&self.is_closed):
            raise ValueError(f"{self.file_path}: this handle is closed")
        return self

    def __exit__(self, *exception):
        self.close()

    def __del__(self):
        self.close()

    def __repr__(self):
        state = "closed" if private_get(&self.is_closed) else "read-only" if self.is_readonly else "open"
        return f"<{type(self).__name__} {self.file_path!r} {state}>"


@cython.final
cdef class Number:
    """One participant's number: its locked byte, its record, its place in the timer."""

    cdef registration kept
    cdef Participant *record
    cdef uint64_t status
    cdef uint32_t slot

    def __cinit__(self):
        self.kept.lock_fd = -1

    def __dealloc__(self):
        registration_end(&self.kept)

    cdef int refuse(self, str path) except -1:
        """Raise where the holder of this number may not go on."""
        if private_get(&self.kept.lost):
            raise errors.HeartbeatError(
                f"{path}: the lock that proves this process alive is gone (its descriptor was closed by other code); what it has "
                "claimed may run elsewhere; open it again"
            )
        if private_get(&self.kept.unlinked):
            raise errors.TransportError(
                f"{path}: its file was deleted or replaced while it was in use; nobody will see what is put in, nor answer; "
                "open or create it again"
            )
        return 0

    cdef bint is_mine(self) noexcept:
        """Was it made by this process (and not by the one that forked it), and is its lock still there?"""
        return not private_get(&self.kept.inherited) and not private_get(&self.kept.lost)

    cdef void give_up(self, bint clean) noexcept:
        """Let the lock go; and free the record, unless something was left undone in its name."""
        # without its lock the number may be a rescuer's by now
        if clean and self.is_mine():
            record_leave(self.record, self.status)
        registration_end(&self.kept)


cdef int join_slot(
    Number number, Records *records, int fd, int64_t lock_base, uint64_t slot, uint64_t dead, uint32_t pid, uint32_t role,
    const uint64_t *epoch, bint auto_beat, str path
) except -1:
    """Lock the slot's byte, then write its record, which is free, or shows the status `dead` of one that holds no lock.

    1: it is this process's; 0: somebody was faster. OSError where the kernel gives no lock or descriptor.
    """
    cdef int why = registration_lock(&number.kept, fd, lock_base + <int64_t> slot)
    if why == EAGAIN:
        return 0
    if why != 0:
        raise OSError(why, f"{os.strerror(why)}: no lock for a participant of {path}")
    number.record = &records.first[slot]
    number.slot = <uint32_t> slot
    if dead != 0:
        # nobody can take it in between: the byte is locked
        record_leave(number.record, dead)
    if record_join(
        number.record, pid, role, load_acquire_u64(epoch), files.boot_hash(), <uint64_t> realtime_ns(), &number.status
    ) != OK:
        registration_end(&number.kept)
        return 0
    why = registration_watch(
        &number.kept, &number.record.status, number.status, &number.record.last_seen_epoch, epoch, auto_beat
    )
    if why != 0:
        number.give_up(True)
        raise OSError(why, f"{os.strerror(why)}: no timer thread for a participant of {path}")
    return 1


cdef Number take_number(
    Records *records, int fd, int64_t lock_base, uint32_t pid, uint32_t role, const uint64_t *epoch, bint auto_beat, str path
):
    """A free slot's number.

    Raises TableFull, or OSError where the kernel gives no lock or descriptor.
    """
    cdef Number number = Number()
    cdef uint64_t slot
    for slot in range(records.count):
        if status_state(load_acquire_u64(&records.first[slot].status)) == SLOT_FREE and join_slot(
            number, records, fd, lock_base, slot, 0, pid, role, epoch, auto_beat, path
        ):
            return number
    raise errors.TableFull(
        f"{path}: all {records.count} slots are taken; close a handle, or create it with room for more participants"
    )


@cython.no_gc_clear
cdef class Numbered(Mapped):
    """A structure used alone: its file has the records of those who take part, and a handle takes a number at its first change.

    Not made directly.
    """

    cdef Records records
    cdef Number number
    cdef uint64_t me            # the number; 0: none yet
    cdef int64_t generation
    cdef uint64_t no_epoch
    cdef int64_t rescued_ns     # when the dead were last looked for

    @cython.final
    cdef inline int join(self) except -1:
        """Have a number of this process's own; nearly always it is there already."""
        if likely(self.me != 0 and self.generation == fork_generation() and registration_is_good(&self.number.kept)):
            return 0
        return self.join_anew()

    @cython.final
    cdef int join_anew(self) except -1:
        self.refuse_readonly()
        if self.number is not None and not private_get(&self.number.kept.inherited):
            self.number.refuse(self.file_path)
            return 0
        cdef Number taken = None
        while taken is None:
            try:
                taken = take_number(
                    &self.records, self.fd, <int64_t> self.bytes.shape[0], os.getpid(), Role.WORKER, &self.no_epoch, False,
                    self.file_path,
                )
            except errors.TableFull:
                if not self.make_room():
                    raise
        with cython.critical_section(self):
            if self.number is not None and self.number.is_mine():
                # another thread was faster
                taken.give_up(True)
            else:
                self.number = taken
                self.joined(taken.slot + 1)
                self.me = taken.slot + 1
                # last: it is what the other threads of a forked child go by
                self.generation = fork_generation()
        return 0

    cdef int joined(self, uint64_t number) except -1:
        """This handle has a number now, and is about to use it."""
        return 0

    cdef uint64_t rescue_dead(self) except? 0xFFFFFFFF:
        """Rescue what every dead participant has left; how many of them."""
        raise NotImplementedError

    cdef int rescue_as(self, uint64_t slot, uint64_t status) except -1:
        """Rescue what the dead holder of `slot` has left, in its own name."""
        raise NotImplementedError

    @cython.final
    cdef bint somebody_is_dead(self) noexcept:
        cdef uint64_t slot, status
        for slot in range(self.records.count):
            if slot + 1 != self.me and is_dead(&self.records, self.fd, self.bytes.shape[0], slot, &status):
                return True
        return False

    @cython.final
    cdef bint rescued_by(self, int64_t period_ms) except -1:
        """Rescue, unless that was looked for within the period. True where somebody was dead."""
        cdef int64_t now = monotonic_ns()
        if now - self.rescued_ns < period_ms * 1000000:
            return False
        self.rescued_ns = now
        return self.somebody_is_dead() and self.rescue_dead() > 0

    @cython.final
    cdef bint make_room(self) except -1:
        """Where every number is taken: rescue in the name of a dead one, whose byte this process locks meanwhile."""
        cdef Number number
        cdef uint64_t slot, status
        for slot in range(self.records.count):
            if not is_dead(&self.records, self.fd, self.bytes.shape[0], slot, &status):
                continue
            number = Number()
            if registration_lock(&number.kept, self.fd, <int64_t> self.bytes.shape[0] + <int64_t> slot) != 0:
                continue
            if not death_of_mine(&self.records, slot, &status):
                continue
            self.rescue_as(slot, status)
            return status_state(load_acquire_u64(&self.records.first[slot].status)) == SLOT_FREE
        return False


cdef int check_number(str name, object value, int64_t least, int64_t most) except -1:
    if isinstance(value, bool) or not isinstance(value, int):
        raise TypeError(f"{name}: expected an int from {least} to {most}, found {type(value).__name__}")
    if not least <= value <= most:
        raise ValueError(f"{name}: expected {least} to {most}, found {value}")
    return 0


cdef uint32_t check_cells(str name, object value, int least) except 0:
    """log2 of a capacity; a power of two within the limits."""
    if isinstance(value, bool) or not isinstance(value, int):
        raise TypeError(f"{name}: expected an int, found {type(value).__name__}")
    if not least <= value <= layout.MAX_CELLS or value & (value - 1):
        raise ValueError(f"{name}: expected a power of two from {least} to {layout.MAX_CELLS}, found {value}")
    return value.bit_length() - 1


cdef struct Text:
    # a payload's bytes, valid until text_done
    const uint8_t *data
    Py_ssize_t length
    Py_buffer view
    bint held


cdef inline int text_of(object payload, Text *text) except -1:
    return bytes_like("payload", payload, text)


cdef inline int bytes_like(str name, object given, Text *text) except -1:
    if likely(PyBytes_CheckExact(given)):
        text.data = <const uint8_t *> PyBytes_AS_STRING(given)
        text.length = PyBytes_GET_SIZE(given)
        text.held = False
        return 0
    return other_bytes_like(name, given, text)


cdef int other_bytes_like(str name, object given, Text *text) except -1:
    if isinstance(given, str):
        raise TypeError(f"{name}: expected bytes or another contiguous buffer, found str; encode it first")
    PyObject_GetBuffer(given, &text.view, PyBUF_SIMPLE)
    text.data = <const uint8_t *> text.view.buf
    text.length = text.view.len
    text.held = True
    return 0


cdef inline void text_done(Text *text) noexcept:
    if text.held:
        PyBuffer_Release(&text.view)


@cython.final
@cython.no_gc_clear
cdef class Payload:
    """The bytes of a claim, as memoryviews see them. It keeps the mapping, and knows nothing of the claim."""

    cdef Mapped holder
    cdef uint8_t *data
    cdef uint64_t length
    cdef int64_t exports

    def __init__(self):
        raise TypeError("a payload comes from a claim")

    def __getbuffer__(self, Py_buffer *buffer, int flags):
        if self.holder is None:
            raise BufferError("a payload comes from a claim")
        self.holder.enter()
        try:
            PyBuffer_FillInfo(buffer, self, self.data, self.length, 1, flags)
            private_add(&self.exports, 1)
            private_add(&self.holder.views, 1)
        finally:
            self.holder.leave()

    def __releasebuffer__(self, Py_buffer *buffer):
        private_add(&self.exports, -1)
        if private_add(&self.holder.views, -1) == 0 and private_get(&self.holder.is_finished):
            self.holder.unmap()


@cython.no_gc_clear
cdef class Claim:
    """A job or message that this process holds and must end: `ack`, `release` (or `reply`, from a queue).

    Not made directly. Ending it twice, or after its handle was closed, or in a forked child, raises ValueError.
    A claim that is dropped without an end is put back uncharged.
    """

    cdef Mapped holder
    cdef uint64_t cell
    cdef uint64_t word
    cdef uint8_t *data
    cdef uint64_t length
    cdef int64_t generation
    cdef int64_t is_over
    cdef Payload shown
    cdef object view

    def __cinit__(self):
        # until whoever made it says otherwise
        self.is_over = 1

    def __init__(self):
        raise TypeError("a claim comes from try_claim() or claim()")

    @cython.final
    cdef int check(self) except -1:
        if private_get(&self.is_over):
            raise ValueError("this claim is over: it was acknowledged, answered or put back before")
        if self.generation != fork_generation():
            raise ValueError("this claim belongs to the process that forked this one; only that one can end it")
        return 0

    @cython.final
    cdef int begin_end(self) except -1:
        """Make this thread the one that ends the claim; `is_over` goes back to 0 where that fails."""
        if self.view is not None:
            # raises BufferError where somebody holds a buffer of the view itself
            self.view.release()
            self.view = None
        if self.shown is not None and private_get(&self.shown.exports):
            raise BufferError(
                f"{private_get(&self.shown.exports)} views of this claim's payload are still in use; release them before "
                "ending it"
            )
        if private_swap(&self.is_over, 1):
            raise ValueError("this claim is over: it was acknowledged, answered or put back before")
        return 0

    @property
    def payload(self):
        """Read-only memoryview (uint8, shape (length,)) of the message where it lies; it dies with the claim."""
        cdef Payload shown
        self.check()
        if self.view is None:
            if self.shown is None:
                shown = Payload.__new__(Payload)
                shown.holder = self.holder
                shown.data = self.data
                shown.length = self.length
                self.shown = shown
            self.view = memoryview(self.shown)
        return self.view

    def tobytes(self):
        """A copy of the payload."""
        self.check()
        self.holder.enter()
        try:
            return PyBytes_FromStringAndSize(<const char *> self.data, self.length)
        finally:
            self.holder.leave()

    def started(self):
        """Say that the job is being run: it counts as an attempt from here on."""
        raise NotImplementedError

    def reply(self, payload):
        """Answer: the payload becomes the result, and the claim is over."""
        raise NotImplementedError

    def ack(self):
        """Done, and nobody wants a result: the cell is free again."""
        raise NotImplementedError

    def release(self):
        """Put it back uncharged, for somebody else (or this one) to claim again."""
        raise NotImplementedError

    def __repr__(self):
        state = "over" if private_get(&self.is_over) else "held"
        return f"<{type(self).__name__} of {self.length} bytes in cell {self.cell}, {state}>"

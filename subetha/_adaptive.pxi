# What an adaptive instance consists of: the header of its strategy, and the ring of what was observed (algorithms:
# _handshake.pxd, _observation.pxd). sidecar.py decides.

cdef object Op = layout.Op
cdef uint64_t ALL_OPS = sum(1 << op for op in layout.Op)
cdef object OBSERVATION = layout.OBSERVATION


cdef int see_forks() except -1:
    cdef int why = count_forks()
    if why != 0:
        raise OSError(why, os.strerror(why))
    return 0


@cython.final
cdef class HandshakeHeader:
    """Lets an instance change its strategy while operations are under way.

    An operation asks `enter_op` under which parity it runs, takes the strategy of that parity (`tag_of`), and ends with
    `exit_op`. A migration publishes another tag by `migrate`; after a `drain` nobody uses the one before, so that what belonged
    to it can be dropped. For the threads of one process; an operation does not go on in a forked child.

    Parameters
    ----------
    tag : int
        The strategy to begin with, 0 to 2**32 - 1.

    Source: the two counters of P. McKenney, Sleepable RCU (2006).
    """

    cdef Handshake state
    cdef int64_t never_closed

    def __cinit__(self):
        see_forks()
        handshake_init(&self.state, 0)

    def __init__(self, tag=0):
        handshake_init(&self.state, as_u32(tag, "tag"))

    @property
    def generation(self):
        """How many migrations there were."""
        return load_seq_cst_u64(&self.state.generation)

    @property
    def tag(self):
        """The strategy of operations that begin now."""
        cdef uint64_t generation, tag
        while True:
            # G1: pairs with G2
            generation = load_seq_cst_u64(&self.state.generation)
            tag = handshake_tag_of(&self.state, generation & 1)
            if load_seq_cst_u64(&self.state.generation) == generation:
                return tag

    cdef uint64_t parity(self, object parity) except 2:
        if parity is not True and parity is not False and parity != 0 and parity != 1:
            raise ValueError(f"parity: expected 0 or 1, found {parity!r}")
        return parity

    def tag_of(self, parity):
        """The strategy of the operations that are counted under `parity`; it stays while there is one."""
        return handshake_tag_of(&self.state, self.parity(parity))

    def in_flight(self, parity):
        """How many operations are counted under `parity`."""
        return load_seq_cst_u64(&self.state.in_flight[self.parity(parity)])

    def enter_op(self):
        """Begin an operation. Never blocks.

        Returns
        -------
        int
            The parity (0 or 1) of the generation that it runs under: for `tag_of` and `exit_op`.
        """
        return handshake_enter(&self.state)

    def exit_op(self, parity):
        """End an operation.

        Raises
        ------
        ValueError
            None is counted under this parity.
        """
        if not handshake_exit(&self.state, self.parity(parity)):
            raise ValueError(f"no operation is under way under parity {parity}; each enter_op() is ended once")

    def migrate(self, new_tag):
        """Let operations that begin from now on run under another strategy.

        Parameters
        ----------
        new_tag : int
            0 to 2**32 - 1.

        Returns
        -------
        bool
            False where operations of the generation before the current one are still under way: nothing was changed, `drain`
            waits for them. A generation cannot begin while its parity is in use.
        """
        cdef uint64_t tag = as_u32(new_tag, "new_tag")
        cdef Code code
        with cython.critical_section(self):
            code = handshake_migrate(&self.state, tag)
        return code == OK

    def drain(self, timeout):
        """Wait until no operation of the generation before the current one is under way.

        Parameters
        ----------
        timeout : float
            Seconds on the monotonic clock.

        Returns
        -------
        bool
            False where there still was one at the timeout.

        Raises
        ------
        ValueError
            The timeout is negative or None.
        """
        cdef int64_t deadline
        cdef int stage = 0
        cdef Code code
        if timeout is None:
            raise ValueError("timeout: expected seconds >= 0, found None; an operation may be stopped for ever")
        deadline = deadline_of(timeout)
        handshake_forget_parent(&self.state)
        while True:
            code = handshake_is_drained(&self.state, True)
            if code == EMPTY and timeout > 0:
                with nogil:
                    code = wait_for(
                        &self.state.drained, handshake_is_drained, &self.state, &self.never_closed, deadline, &stage
                    )
            if code == SIGNAL:
                PyErr_CheckSignals()
            else:
                return code == OK

    def _enter_as_of(self, generation):
        """`enter_op` with a look at the generation that lies behind. For tests of what a migration in between does."""
        return handshake_enter_as_of(&self.state, generation)

    def __repr__(self):
        return f"<HandshakeHeader generation {self.generation} tag {self.tag}>"


@cython.final
cdef class ObservationRing:
    """What an instance did, for whoever decides about its strategy: records of 24 bytes, many writers, one reader.

    Disarmed until somebody listens. It is lossy: a record that finds no room is dropped and counted, so that what is kept is all
    that happened from the last `drain` up to the first drop. Every call may be made from any thread; none waits.

    Parameters
    ----------
    capacity : int
        Records: a power of two from 2 to 2**20.
    """

    cdef Observations state

    def __cinit__(self, capacity=4096):
        see_forks()
        self.state.bits = check_cells("capacity", capacity, 2)
        self.state.size = <uint64_t> 1 << self.state.bits

    def __init__(self, capacity=4096):
        pass

    def __dealloc__(self):
        free(self.state.records)

    @property
    def capacity(self):
        """How many records there is room for."""
        return self.state.size

    @property
    def armed(self):
        """Is anything recorded?"""
        return load_acquire_u64(&self.state.armed) != 0 and self.state.since == fork_generation()

    @property
    def dropped(self):
        """How many records found no room, ever."""
        return load_relaxed_u64(&self.state.dropped)

    def arm(self, ops=None):
        """Begin to record.

        Parameters
        ----------
        ops : iterable of Op, optional
            Which operations, in place of those recorded so far; all by default.

        Raises
        ------
        ValueError
            An operation that there is not.
        MemoryError
        """
        cdef uint64_t wanted = 0
        cdef object op
        if ops is None:
            wanted = ALL_OPS
        else:
            for op in ops:
                wanted |= <uint64_t> 1 << <int> int(Op(op))
        with cython.critical_section(self):
            if self.state.records == NULL:
                # kept until the ring goes: a writer may be in it at any moment
                self.state.records = <Observation *> calloc(self.state.size, sizeof(Observation))
                if self.state.records == NULL:
                    raise MemoryError(f"{self.state.size * sizeof(Observation)} bytes are needed for an observation ring")
            observations_arm(&self.state, wanted)

    def disarm(self):
        """Record nothing more; what was recorded stays for `drain`. Idempotent."""
        # Q5: pairs with Q6
        store_release_u64(&self.state.armed, 0)

    def record(self, op, value=0, flags=0):
        """Record an operation, where it is armed for that. For instances that are written in Python.

        Parameters
        ----------
        op : Op
        value : int
            u64.
        flags : int
            u16.

        Returns
        -------
        bool
            False where nothing was recorded: disarmed, or no room.
        """
        cdef uint16_t code = Op(op)
        if not 0 <= flags < 1 << 16:
            raise ValueError(f"flags: expected 0 to 2**16 - 1, found {flags}")
        return observations_want(&self.state, code) and observation_put(&self.state, code, flags, value)

    def drain(self):
        """Take all records out.

        Returns
        -------
        numpy.ndarray, shape (n,), dtype layout.OBSERVATION
            In the order in which their operations took their places.
        """
        cdef uint64_t n = len(self)
        cdef uint8_t[::1] to
        taken = np.empty(n, OBSERVATION)
        if n:
            to = taken.view(np.uint8)
            with cython.critical_section(self):
                # another reader may have come first
                n = min(n, observations_ready(&self.state))
                observations_take(&self.state, <Observation *> &to[0], n)
        return taken[:n]

    def __len__(self):
        """Records that a `drain` would find."""
        if self.state.records == NULL or self.state.since != fork_generation():
            return 0
        return observations_ready(&self.state)

    def __bool__(self):
        return True

    def __repr__(self):
        state = "armed" if self.armed else "disarmed"
        return f"<ObservationRing {len(self)} of {self.state.size} records, {self.dropped} dropped, {state}>"

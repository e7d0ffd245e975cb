# A worker's loop over a queue: claim, call, answer, with no Python in between but the handler. scheduler.py has all that is not
# ordinary, and the loop over other transports.

cdef enum:
    TURN = 64       # after so many jobs other threads get the GIL, if handlers are not Python themselves


@cython.final
cdef class OrdinaryJobs:
    """Runs the jobs of a queue for a `WorkerLoop` as long as nothing is special about them.

    Parameters
    ----------
    queue : JobQueue
    state : WorkState
    registry : PassRegistry
    table : HeartbeatTable, optional
    slot : int
        In `table`.
    most : int
        Longest frame in bytes.
    """

    cdef QueueHandle queue
    cdef WorkState state
    cdef object registry
    cdef dict handlers
    cdef HeartbeatTable table
    cdef uint64_t slot
    cdef uint64_t most

    def __init__(self, QueueHandle queue not None, WorkState state not None, registry, HeartbeatTable table, slot, most):
        self.queue = queue
        self.state = state
        self.registry = registry
        self.handlers = registry.handlers
        self.table = table
        if table is not None:
            # checked once for all jobs
            table.refuse_readonly()
            table.record(slot)
            self.slot = slot
        self.most = most

    def run(self, timeout, between):
        """Claim, run and answer jobs until `state` is to stop, or what the registry has, or the queue, is to be looked at again.

        Parameters
        ----------
        timeout : float
            Seconds to wait for each.
        between : callable, optional
            Called after each.

        Returns
        -------
        JobClaim or None
            One that is not ordinary, claimed and not started: its arguments are longer, or malformed, or have no handler.

        Raises
        ------
        Empty
            At the timeout, or where `state` is to stop while this waits.
        """
        cdef JobClaim claim
        cdef uint64_t n = 0
        cdef object changes = self.registry.changes
        cdef int64_t answered = private_get(&self.queue.answered_unknown)
        while (
            not self.state._stopping and self.registry.changes is changes
            and private_get(&self.queue.answered_unknown) == answered
        ):
            n += 1
            if n % TURN == 0:
                with nogil:
                    pass
            PyErr_CheckSignals()
            claim = self.queue.next_claim(timeout, self.state)
            self.state.claim = claim
            try:
                if not self.run_one(claim):
                    return claim
            finally:
                self.state.claim = None
            # held over the wait for the next one, it would keep its number
            claim = None
            if between is not None:
                between()
        return None

    def wake(self):
        """Let a `run` that waits for a job look whether it is to stop. From any thread, and from a signal's handler."""
        self.queue.count_in()
        try:
            if not private_get(&self.queue.is_closed) and not self.queue.is_readonly:
                wake_some(&self.queue.queue.lines.items, 0x7FFFFFFF)
        finally:
            self.queue.leave()

    def rest(self):
        """Let go what is kept for the next job."""
        self.queue.drop_mappings()

    cdef bint run_one(self, JobClaim claim) except -1:
        """False, and nothing done, where it is no ordinary one."""
        cdef object closure_id, handler, result
        cdef bytes args
        cdef uint64_t length
        self.queue.enter()
        try:
            length = claim.length - SUBMIT_HEADER
            if claim.length > self.most or (get_u16(claim.data + 8) != length and get_u16(claim.data + 8) != REST_OF_FRAME):
                return False
            closure_id = get_u32(claim.data)
            handler = self.handlers.get(closure_id)
            if handler is None:
                return False
            args = PyBytes_FromStringAndSize(<const char *> claim.data + SUBMIT_HEADER, length)
            claim.start(self.queue)
        except errors.TransportError as error:
            self.state._end(claim, 0, None, error)
            return True
        finally:
            self.queue.leave()
        if self.table is not None:
            self.table.begin_job(self.slot)
        try:
            result = handler(args)
        except BaseException as error:
            result = self.registry.failed(error)
        if not PyBytes_CheckExact(result):
            self.state._end(claim, 0, self.registry.checked(closure_id, result))
            return True
        try:
            claim.answer_bytes(result)
        except Exception as error:
            self.state._end(claim, 0, result, error)
            return True
        if self.table is not None:
            self.table.end_job(self.slot)
        self.state.completed += 1
        return True

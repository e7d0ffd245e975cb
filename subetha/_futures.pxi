# What `JobFuture` (futures.py) holds, and how it is settled where nobody waits for it by a lock: most futures live without one.

# As concurrent.futures._base has them, which is too long in importing for whoever uses no futures.
cdef str FUTURE_PENDING = "PENDING"
cdef str FUTURE_FINISHED = "FINISHED"

cdef enum:
    PICKLE_BEGINS = 0x80 - 0x100    # as a char


cdef class FutureState:
    """State of a future: base of `JobFuture`.

    Parameters
    ----------
    client : Client
        Where it is pending; None where it is done from the beginning.
    job_id : int, optional
    """

    cdef public object _client
    cdef public object job_id
    cdef public str _state
    cdef public object _arrived     # what came of the job: bytes, or what to raise
    cdef public object _unique_key
    cdef public object _task
    cdef public double _due         # s since 1970; before, its job is not started
    cdef object condition
    cdef tuple outcome              # value and None, or None and what is raised; made at the first look

    def __init__(self, client, job_id=None):
        self._client = client
        self.job_id = job_id
        self._state = FUTURE_PENDING

    def _own_condition(self):
        """The condition of those who want to be told; made when the first of them asks."""
        if self.condition is None:
            made = Condition()
            with cython.critical_section(self):
                if self.condition is None:
                    self.condition = made
        return self.condition

    def _finish(self, value, raised):
        """Make it one that is done."""
        self.outcome = value, raised
        self._state = FUTURE_FINISHED

    def _outcome(self):
        """What came of the job, unpickled at the first look by whoever looks: value and None, or None and what is raised."""
        cdef object arrived = self._arrived
        if self.outcome is None:
            made = self.read(arrived)
            with cython.critical_section(self):
                # the first of several threads decides, so that all see one object
                if self.outcome is None:
                    self.outcome = made
                    self._arrived = None
        return self.outcome

    cdef tuple read(self, object arrived):
        if PyBytes_CheckExact(arrived) and PyBytes_GET_SIZE(arrived) and PyBytes_AS_STRING(arrived)[0] == PICKLE_BEGINS:
            try:
                return pickle_loads(arrived), None
            except (Exception, SystemExit):
                # once more, for the error that says what it was
                return self._read(arrived)
        if type(arrived) is WholeBytes:
            return (<WholeBytes> arrived).value, None
        return self._read(arrived)

    def _read(self, arrived):
        """What a result comes to, as `_outcome` has it."""
        raise NotImplementedError

    def _settle_alone(self, state, arrived):
        """Set the state, unless it is set. False, and nothing done, where somebody has a condition and is to be told."""
        return self.settle_alone(state, arrived)

    @cython.final
    cdef bint settle_alone(self, str state, object arrived) except -1:
        # Whoever is to be told makes the condition before it looks at the state: either it finds the one set here, or this
        # finds the condition.
        with cython.critical_section(self):
            if self.condition is not None:
                return False
            if self._state == FUTURE_PENDING:
                self._arrived = arrived
                self._state = state
        return True


def submit_ordinary(
    QueueHandle queue not None, uint32_t closure_id, data, SubmitOptions options not None, kind, client, dict pending not None
):
    """Hand a job in that may start at once, and enter its future, where there is room.

    Parameters
    ----------
    queue : JobQueue
    closure_id, data, options
        As `JobQueue._submit` has them.
    kind : type
        Of the future.
    client : Client
    pending : dict of int to FutureState
        By job id.

    Raises
    ------
    Full, ArenaFull
        There is none.
    """
    cdef JobOptions chosen = options.options
    cdef object job_id = queue.submit_data(closure_id, data, &chosen, None, ZERO, 0)
    future = pending[job_id] = kind(client, job_id)
    return future


def settle_ordinary(list taken not None, dict pending not None):
    """Settle the futures of the last results in `taken`, one after the other, and take them out of both.

    Up to the first that is not ordinary: an error, one whose future is not there yet or has a unique key, or of which somebody is
    to be told.

    Parameters
    ----------
    taken : list of SubmittedResult
    pending : dict of int to FutureState
        By job id.
    """
    cdef SubmittedResult result
    cdef FutureState future = None
    cdef object job_id
    while taken:
        result = taken[len(taken) - 1]
        job_id = result.token
        if not isinstance(result.result, (bytes, bytearray, WholeBytes)):
            return
        future = pending.get(job_id)
        if future is None or future._unique_key is not None or not future.settle_alone(FUTURE_FINISHED, result.result):
            return
        # what goes with them, and may run other code in this thread, goes when both are in order
        del pending[job_id]
        taken.pop()

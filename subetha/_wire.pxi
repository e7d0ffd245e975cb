# Passes, results and their wire formats (constants and description: wire.py).

cdef enum:
    SUBMIT_HEADER = 10      # closure_id u32 | token u32 | arg_len u16
    RESULT_HEADER = 7       # token u32 | status u8 | result_len u16
    REST_OF_FRAME = 0xFFFF  # as a length: the data is all that follows
    STATUS_OK = 0
    STATUS_ERROR = 1
    STATUS_PICKLED = 2      # beside STATUS_ERROR: behind the text and a NUL the exception follows, pickled
    STATUS_IN_BLOCK = 0x80
    RESULT_WHOLE = 4        # what the data of a result begin with that are followed by bytes as they are (calls.py)

cdef dict error_classes = {}


cdef uint32_t as_u32(object value, str name) except? 0xFFFFFFFF:
    if isinstance(value, bool) or not isinstance(value, int):
        raise TypeError(f"{name}: expected an int from 0 to {0xFFFFFFFF}, found {type(value).__name__}")
    if not 0 <= value <= 0xFFFFFFFF:
        raise ValueError(f"{name}: expected an int from 0 to {0xFFFFFFFF}, found {value}")
    return <uint32_t> value


cdef bytes as_bytes(object data):
    """A copy of any contiguous buffer; exact bytes are returned as they are."""
    cdef Py_buffer view
    if PyBytes_CheckExact(data):
        return <bytes> data
    PyObject_GetBuffer(data, &view, PyBUF_SIMPLE)
    try:
        return PyBytes_FromStringAndSize(<const char *> view.buf, view.len)
    finally:
        PyBuffer_Release(&view)


@cython.final
@cython.freelist(64)
cdef class Pass:
    """A call to be made: which handler, with which bytes.

    Parameters
    ----------
    closure_id : int
        Id of a registered handler, u32.
    args : contiguous buffer
        Copied into `bytes`.

    Raises
    ------
    TypeError, ValueError
        `closure_id` is no int or no u32; `args` is no buffer.
    """

    cdef readonly uint32_t closure_id
    cdef readonly bytes args

    def __init__(self, closure_id, args=b""):
        self.closure_id = as_u32(closure_id, "closure_id")
        self.args = as_bytes(args)

    def __eq__(self, other):
        if not isinstance(other, Pass):
            return NotImplemented
        return self.closure_id == (<Pass> other).closure_id and self.args == (<Pass> other).args

    def __hash__(self):
        return hash((self.closure_id, self.args))

    def __repr__(self):
        return f"Pass(closure_id={self.closure_id}, args={self.args!r})"

    def __reduce__(self):
        return Pass, (self.closure_id, self.args)


@cython.final
@cython.freelist(64)
cdef class SubmittedResult:
    """What came back for one submitted pass.

    Attributes
    ----------
    token : int
        What `submit` gave back: u32 over rings, the 64-bit job id from a queue.
    result : bytes or PassError
        The handler's bytes, or the error in their place (not raised).
    """

    cdef readonly uint64_t token
    cdef readonly object result

    def __init__(self, token, result):
        self.token = token
        self.result = result

    def __eq__(self, other):
        if not isinstance(other, SubmittedResult):
            return NotImplemented
        return self.token == (<SubmittedResult> other).token and self.result == (<SubmittedResult> other).result

    def __hash__(self):
        return hash((self.token, self.result))

    def __repr__(self):
        return f"SubmittedResult(token={self.token}, result={self.result!r})"

    def __reduce__(self):
        return SubmittedResult, (self.token, self.result)


cdef inline Pass new_pass(uint32_t closure_id, bytes args):
    cdef Pass made = Pass.__new__(Pass)
    made.closure_id = closure_id
    made.args = args
    return made


cdef inline SubmittedResult new_result(uint64_t token, object result):
    cdef SubmittedResult made = SubmittedResult.__new__(SubmittedResult)
    made.token = token
    made.result = result
    return made


cdef inline void put_u16(uint8_t *at, uint32_t value) noexcept nogil:
    at[0] = value & 0xFF
    at[1] = value >> 8 & 0xFF


cdef inline void put_u32(uint8_t *at, uint32_t value) noexcept nogil:
    put_u16(at, value)
    put_u16(at + 2, value >> 16)


cdef inline uint32_t get_u16(const uint8_t *at) noexcept nogil:
    return at[0] | <uint32_t> at[1] << 8


cdef inline uint32_t get_u32(const uint8_t *at) noexcept nogil:
    return get_u16(at) | get_u16(at + 2) << 16


cdef inline void put_submit_header(uint8_t *at, uint32_t closure_id, uint32_t token, Py_ssize_t length) noexcept nogil:
    put_u32(at, closure_id)
    put_u32(at + 4, token)
    put_u16(at + 8, REST_OF_FRAME if length >= REST_OF_FRAME else <uint32_t> length)


cdef inline void put_result_header(uint8_t *at, uint32_t token, uint32_t status, Py_ssize_t length) noexcept nogil:
    if length >= REST_OF_FRAME:
        status |= STATUS_IN_BLOCK
        length = REST_OF_FRAME
    put_u32(at, token)
    at[4] = status
    put_u16(at + 5, <uint32_t> length)


def encode_submit(closure_id, token, args, limit=None):
    """Make the frame of a pass.

    Parameters
    ----------
    closure_id, token : int
        u32 each.
    args : contiguous buffer
    limit : int, optional
        Longest frame in bytes that the transport takes; default: none.

    Returns
    -------
    bytes

    Raises
    ------
    ArgsTooLarge
        The frame would be longer than `limit`.
    """
    cdef uint32_t closure = as_u32(closure_id, "closure_id")
    cdef uint32_t number = as_u32(token, "token")
    cdef bytes data = as_bytes(args)
    cdef Py_ssize_t n = PyBytes_GET_SIZE(data)
    if limit is not None and n + SUBMIT_HEADER > limit:
        raise errors.ArgsTooLarge(
            f"expected at most {max(limit - SUBMIT_HEADER, 0)} bytes of arguments (frames of {limit}), found {n}; "
            "send less, or use a transport with a larger payload"
        )
    cdef bytes frame = PyBytes_FromStringAndSize(NULL, n + SUBMIT_HEADER)
    cdef uint8_t *at = <uint8_t *> PyBytes_AS_STRING(frame)
    put_submit_header(at, closure, number, n)
    memcpy(at + SUBMIT_HEADER, PyBytes_AS_STRING(data), n)
    return frame


def decode_submit(frame):
    """Read the frame of a pass.

    Returns
    -------
    token : int
    pass_ : Pass

    Raises
    ------
    TransportError
        The frame is cut, or says another length than it has.
    """
    cdef Py_buffer view
    cdef Py_ssize_t n
    cdef const uint8_t *at
    PyObject_GetBuffer(frame, &view, PyBUF_SIMPLE)
    try:
        at = <const uint8_t *> view.buf
        n = view.len - SUBMIT_HEADER
        if n < 0 or (get_u16(at + 8) != n and get_u16(at + 8) != REST_OF_FRAME):
            raise errors.TransportError(
                f"malformed submit frame of {view.len} bytes: expected {SUBMIT_HEADER} of header"
                + ("" if n < 0 else f" and {get_u16(at + 8)} of arguments")
            )
        return get_u32(at + 4), new_pass(get_u32(at), PyBytes_FromStringAndSize(<const char *> at + SUBMIT_HEADER, n))
    finally:
        PyBuffer_Release(&view)


cdef bytes error_text(object error, object most):
    """Class name and message as UTF-8, cut between two characters where it is longer than `most` bytes."""
    cdef bytes text = f"{type(error).__name__}: {error}".encode("utf-8", "backslashreplace")
    if most is not None and len(text) > most:
        text = text[:most].decode("utf-8", "ignore").encode("utf-8")
    return text


cdef bytes call_failed_data(object error, object most):
    """Text, NUL and the pickled exception of a CallFailed; None where that is longer than `most` bytes."""
    cdef bytes text = str(error).replace("\0", "\\0").encode("utf-8", "backslashreplace")
    if most is not None and len(text) + 1 + len(error.data) > most:
        return None
    return text + b"\0" + error.data


cdef object error_from_text(str text):
    """The PassError whose class the text begins with; one that nobody knows becomes an ExecutionError with the whole text."""
    name, found, message = text.partition(": ")
    if not error_classes:
        error_classes.update(
            (kind.__name__, kind)
            for kind in vars(errors).values()
            if isinstance(kind, type) and issubclass(kind, errors.PassError)
        )
    if found and name in error_classes:
        return error_classes[name](message)
    return errors.ExecutionError(text)


def encode_result(token, result, limit=None):
    """Make the frame of a result.

    Parameters
    ----------
    token : int
        The pass's token, u32.
    result : contiguous buffer or PassError
    limit : int, optional
        Longest frame in bytes that the transport takes; default: none. Longer data becomes a ResultTooLarge error; the
        text of an error is cut between two characters.

    Returns
    -------
    bytes
    """
    cdef uint32_t number = as_u32(token, "token")
    cdef uint32_t status = 0
    cdef bytes data
    cdef bint failed = not PyBytes_CheckExact(result) and isinstance(result, errors.PassError)
    most = None if limit is None else max(limit - RESULT_HEADER, 0)
    if not failed:
        data = as_bytes(result)
        if most is not None and PyBytes_GET_SIZE(data) > most:
            failed = True
            result = errors.ResultTooLarge(f"found {PyBytes_GET_SIZE(data)} bytes, at most {most}")
    if failed:
        data = None
        status = STATUS_ERROR
        if isinstance(result, errors.CallFailed):
            data = call_failed_data(result, most)
            if data is None:
                result = errors.ExecutionError(result)
            else:
                status |= STATUS_PICKLED
        if data is None:
            data = error_text(result, most)
    cdef Py_ssize_t n = PyBytes_GET_SIZE(data)
    cdef bytes frame = PyBytes_FromStringAndSize(NULL, n + RESULT_HEADER)
    cdef uint8_t *at = <uint8_t *> PyBytes_AS_STRING(frame)
    put_result_header(at, number, status, n)
    memcpy(at + RESULT_HEADER, PyBytes_AS_STRING(data), n)
    return frame


cdef object result_from(const uint8_t *at, object data):
    """The result of a frame whose header is at `at`, its data already copied."""
    if at[4] & ~STATUS_IN_BLOCK == 0:
        return data
    if at[4] & STATUS_PICKLED:
        text, _, pickled = data.partition(b"\0")
        return errors.CallFailed(text.decode("utf-8", "replace"), bytes(pickled))
    return error_from_text(data.decode("utf-8", "replace"))


cdef inline bint result_is_well_formed(const uint8_t *at, Py_ssize_t length) noexcept nogil:
    return (
        length >= RESULT_HEADER
        and (at[4] & ~STATUS_IN_BLOCK == 0 or at[4] & ~(STATUS_IN_BLOCK | STATUS_PICKLED) == STATUS_ERROR)
        and (at[4] & STATUS_IN_BLOCK or get_u16(at + 5) == length - RESULT_HEADER)
    )


def decode_result(frame):
    """Read the frame of a result.

    Returns
    -------
    SubmittedResult
        Its `result` is bytes, or a PassError of the class that the text names (ExecutionError where nobody knows it).

    Raises
    ------
    TransportError
        The frame is cut, says another length than it has, or has an unknown status.
    """
    cdef Py_buffer view
    cdef const uint8_t *at
    PyObject_GetBuffer(frame, &view, PyBUF_SIMPLE)
    try:
        at = <const uint8_t *> view.buf
        if not result_is_well_formed(at, view.len):
            raise errors.TransportError(
                f"malformed result frame of {view.len} bytes: expected token u32, status 0, 1 or 3, length u16 and as much data"
            )
        data = PyBytes_FromStringAndSize(<const char *> at + RESULT_HEADER, view.len - RESULT_HEADER)
        return new_result(get_u32(at), result_from(at, data))
    finally:
        PyBuffer_Release(&view)

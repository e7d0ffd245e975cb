"""The two message formats, little-endian, and the numbers that belong to them.

::

    submit : closure_id u32 | result_token u32 | arg_len u16    | args
    result : result_token u32 | status u8      | result_len u16 | data

``status`` is `STATUS_OK` (data = the bytes the handler returned) or `STATUS_ERROR` (data = UTF-8 text that begins with
the name of the error's class, by which `decode_result` finds the class again), or `STATUS_ERROR` and `STATUS_PICKLED`
together (data = UTF-8 text, NUL, and an exception as `calls.py` pickles it: a `CallFailed`). An ``arg_len`` of
`IN_BLOCK_LEN`, or the bit `STATUS_IN_BLOCK` in ``status``, says that the data is all the rest of the frame: in a queue
directory it lies in a block, whose exact length stands in the cell.

A ring of `PAYLOAD_BYTES` leaves `MAX_ARG_LEN` bytes for arguments and `MAX_RESULT_LEN` for a result. Arguments that do
not fit are refused where they are submitted (`ArgsTooLarge`). A result that does not fit becomes a `ResultTooLarge`
error, never a cut result; only the text of an error may be shortened, at a character boundary.
"""

import struct
from typing import Self

from subetha._core import Pass, SubmittedResult, decode_result, decode_submit, encode_result, encode_submit
from subetha.errors import PassError, PayloadTooLarge

__all__ = [
    "IN_BLOCK_LEN",
    "MAX_ARG_LEN",
    "MAX_RESULT_LEN",
    "PAYLOAD_BYTES",
    "RESULT_HEADER_BYTES",
    "STATUS_ERROR",
    "STATUS_IN_BLOCK",
    "STATUS_OK",
    "STATUS_PICKLED",
    "SUBMIT_HEADER_BYTES",
    "PassSlot",
    "SubmittedResult",
    "decode_result",
    "decode_submit",
    "encode_result",
    "encode_submit",
    "submit_token",
]

PAYLOAD_BYTES = 56
SUBMIT_HEADER_BYTES = 10
RESULT_HEADER_BYTES = 7
MAX_ARG_LEN = PAYLOAD_BYTES - SUBMIT_HEADER_BYTES
MAX_RESULT_LEN = PAYLOAD_BYTES - RESULT_HEADER_BYTES
STATUS_OK = 0
STATUS_ERROR = 1
STATUS_PICKLED = 2
IN_BLOCK_LEN = 0xFFFF
STATUS_IN_BLOCK = 0x80

_TOKEN = struct.Struct("<4xI")


class PassSlot(bytes):
    """A payload of at most `PAYLOAD_BYTES` (56) bytes: what rings and deques of the default size carry.

    It is the bytes of one frame, so any transport takes it, and what comes out of one can be made a `PassSlot` again.

    Parameters
    ----------
    frame : bytes-like
        Copied.

    Raises
    ------
    PayloadTooLarge
        It is longer than `PAYLOAD_BYTES`.
    """

    __slots__ = ()

    def __new__(cls, frame: bytes | bytearray | memoryview = b"") -> Self:
        made = super().__new__(cls, memoryview(frame))
        if len(made) > PAYLOAD_BYTES:
            raise PayloadTooLarge(
                f"expected at most {PAYLOAD_BYTES} bytes, found {len(made)}; use a transport with longer payloads"
            )
        return made

    @classmethod
    def of_pass(cls, token: int, pass_: Pass) -> Self:
        """Make the submit frame of a pass; `ArgsTooLarge` where its arguments are longer than `MAX_ARG_LEN`."""
        return cls(encode_submit(pass_.closure_id, token, pass_.args, PAYLOAD_BYTES))

    @classmethod
    def of_result(cls, token: int, result: bytes | PassError) -> Self:
        """Make the frame of a result; one longer than `MAX_RESULT_LEN` becomes a `ResultTooLarge` error."""
        return cls(encode_result(token, result, PAYLOAD_BYTES))

    def as_pass(self) -> tuple[int, Pass]:
        """Read it as a submit frame: token and pass; `TransportError` where it is none."""
        return decode_submit(self)

    def as_result(self) -> SubmittedResult:
        """Read it as the frame of a result; `TransportError` where it is none."""
        return decode_result(self)


def submit_token(frame: bytes | bytearray | memoryview) -> int | None:
    """Read the token of a submit frame that `decode_submit` refused.

    Parameters
    ----------
    frame : bytes-like
        The frame as it came out of the transport.

    Returns
    -------
    int or None
        The token, so that the submitter can be told, or None where the frame ends before it.
    """
    if len(frame) < _TOKEN.size:
        return None
    token: int = _TOKEN.unpack_from(frame)[0]
    return token

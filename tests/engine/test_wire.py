"""The wire formats, byte for byte, and what comes back from frames of any content."""

import pickle
import struct

import pytest
from hypothesis import given
from hypothesis import strategies as st

from subetha import wire
from subetha._core import SharedDeque, SharedRing
from subetha.errors import (
    ArgsTooLarge,
    CallFailed,
    ExecutionError,
    PassError,
    PayloadTooLarge,
    ResultTooLarge,
    TransportError,
    UnknownClosureId,
)
from subetha.pass_registry import Pass

u32 = st.integers(0, 2**32 - 1)
short_bytes = st.binary(max_size=200)
# Where only the length matters, it is drawn evenly: binary() prefers short ones.
lengths = st.integers(0, 200)
error_classes = st.sampled_from([UnknownClosureId, ExecutionError, ResultTooLarge, PassError])
# Around the length from which on the data is "all the rest of the frame".
long_lengths = st.integers(0xFFFF - 3, 0xFFFF + 3)


def test_the_constants_are_those_of_the_formats():
    assert struct.calcsize("<IIH") == wire.SUBMIT_HEADER_BYTES
    assert struct.calcsize("<IBH") == wire.RESULT_HEADER_BYTES
    assert (wire.PAYLOAD_BYTES, wire.MAX_ARG_LEN, wire.MAX_RESULT_LEN) == (56, 46, 49)
    assert (wire.STATUS_OK, wire.STATUS_ERROR, wire.STATUS_IN_BLOCK, wire.IN_BLOCK_LEN) == (0, 1, 0x80, 0xFFFF)


# --- submit ---------------------------------------------------------------------------------------------------------


@given(u32, u32, short_bytes)
def test_a_submit_frame_is_its_header_and_the_arguments(closure_id, token, args):
    assert wire.encode_submit(closure_id, token, args) == struct.pack("<IIH", closure_id, token, len(args)) + args


@given(u32, u32, short_bytes)
def test_a_submit_frame_decodes_to_what_was_encoded(closure_id, token, args):
    assert wire.decode_submit(wire.encode_submit(closure_id, token, args)) == (token, Pass(closure_id, args))


@given(long_lengths)
def test_arguments_that_outgrow_the_length_field_are_the_rest_of_the_frame(length):
    args = bytes(length)
    frame = wire.encode_submit(1, 2, args)
    assert struct.unpack_from("<IIH", frame) == (1, 2, min(length, wire.IN_BLOCK_LEN))
    assert wire.decode_submit(frame) == (2, Pass(1, args))


@given(short_bytes)
def test_a_length_that_says_in_block_takes_the_rest_of_a_short_frame_too(args):
    frame = struct.pack("<IIH", 1, 2, wire.IN_BLOCK_LEN) + args
    assert wire.decode_submit(frame) == (2, Pass(1, args))


@given(lengths, st.integers(wire.SUBMIT_HEADER_BYTES, 250))
def test_arguments_are_refused_exactly_where_the_frame_would_pass_the_limit(length, limit):
    args = bytes(length)
    if wire.SUBMIT_HEADER_BYTES + len(args) <= limit:
        assert len(wire.encode_submit(1, 2, args, limit)) <= limit
    else:
        with pytest.raises(ArgsTooLarge, match=rf"\b{len(args)}\b"):
            wire.encode_submit(1, 2, args, limit)


def test_a_ring_of_the_default_size_takes_46_bytes_of_arguments():
    assert len(wire.encode_submit(1, 2, bytes(wire.MAX_ARG_LEN), wire.PAYLOAD_BYTES)) == wire.PAYLOAD_BYTES
    with pytest.raises(ArgsTooLarge, match=r"\b46\b.*\b47\b"):
        wire.encode_submit(1, 2, bytes(wire.MAX_ARG_LEN + 1), wire.PAYLOAD_BYTES)


@pytest.mark.parametrize("number", [-1, 2**32])
def test_a_closure_id_or_token_that_is_no_u32_is_not_encoded(number):
    with pytest.raises((ValueError, OverflowError)):
        wire.encode_submit(number, 0, b"")
    with pytest.raises((ValueError, OverflowError)):
        wire.encode_submit(0, number, b"")
    with pytest.raises((ValueError, OverflowError)):
        wire.encode_result(number, b"")


@given(short_bytes, st.data())
def test_a_submit_frame_cut_anywhere_is_malformed(args, data):
    frame = wire.encode_submit(1, 2, args)
    end = data.draw(st.integers(0, len(frame) - 1))
    with pytest.raises(TransportError):
        wire.decode_submit(frame[:end])


@given(short_bytes)
def test_any_bytes_decode_as_a_submit_frame_or_are_malformed_and_nothing_else(frame):
    try:
        token, pass_ = wire.decode_submit(frame)
    except TransportError:
        return
    assert struct.unpack_from("<II", frame) == (pass_.closure_id, token)
    assert frame[wire.SUBMIT_HEADER_BYTES :].startswith(pass_.args)


@given(short_bytes)
def test_the_token_of_a_refused_frame_is_read_wherever_it_is_whole(frame):
    assert wire.submit_token(frame) == (struct.unpack_from("<I", frame, 4)[0] if len(frame) >= 8 else None)


# --- result ---------------------------------------------------------------------------------------------------------


@given(u32, short_bytes)
def test_a_result_frame_is_its_header_and_the_result(token, result):
    assert wire.encode_result(token, result) == struct.pack("<IBH", token, wire.STATUS_OK, len(result)) + result


@given(u32, short_bytes)
def test_a_result_frame_decodes_to_what_was_encoded(token, result):
    decoded = wire.decode_result(wire.encode_result(token, result))
    assert (decoded.token, decoded.result) == (token, result)


@given(long_lengths)
def test_a_result_that_outgrows_the_length_field_is_the_rest_of_the_frame(length):
    result = bytes(length)
    frame = wire.encode_result(7, result)
    token, status, said = struct.unpack_from("<IBH", frame)
    assert token == 7
    if length < 0xFFFF:
        assert (status, said) == (wire.STATUS_OK, length)
    else:
        assert status == wire.STATUS_OK | wire.STATUS_IN_BLOCK
    assert wire.decode_result(frame).result == result


@given(u32, error_classes, st.text(max_size=100))
def test_an_error_comes_back_as_its_class_with_its_text(token, error_class, text):
    decoded = wire.decode_result(wire.encode_result(token, error_class(text)))
    assert (decoded.token, type(decoded.result)) == (token, error_class)
    assert text in str(decoded.result)


@given(error_classes, st.text(max_size=100))
def test_an_error_frame_carries_utf8_text_that_begins_with_the_class_name(error_class, text):
    frame = wire.encode_result(7, error_class(text))
    token, status, length = struct.unpack_from("<IBH", frame)
    assert (token, status, length) == (7, wire.STATUS_ERROR, len(frame) - wire.RESULT_HEADER_BYTES)
    assert frame[wire.RESULT_HEADER_BYTES :].decode("utf-8").startswith(error_class.__name__)


@given(error_classes, st.text(st.characters(max_codepoint=0x1F600), max_size=100), st.integers(30, 120))
def test_an_error_text_is_shortened_at_a_character_boundary_and_keeps_its_class(error_class, text, limit):
    frame = wire.encode_result(7, error_class(text), limit)
    whole = wire.encode_result(7, error_class(text))
    said = frame[wire.RESULT_HEADER_BYTES :].decode("utf-8")
    assert len(frame) <= limit
    assert whole[wire.RESULT_HEADER_BYTES :].decode("utf-8").startswith(said)
    # Nothing but a character that does not fit may be left out.
    assert len(whole) <= limit or len(frame) > limit - 4
    assert type(wire.decode_result(frame).result) is error_class


@given(st.text(st.characters(categories=["Cs"]), min_size=1, max_size=5))
def test_an_error_text_with_lone_surrogates_still_makes_a_frame(text):
    decoded = wire.decode_result(wire.encode_result(7, ExecutionError(f"OSError: {text}")))
    assert type(decoded.result) is ExecutionError
    assert str(decoded.result).startswith("OSError: ")


def test_a_subclass_of_an_error_comes_back_as_a_pass_error():
    class OwnError(ExecutionError):
        pass

    decoded = wire.decode_result(wire.encode_result(7, OwnError("its text")))
    assert isinstance(decoded.result, PassError)
    assert "its text" in str(decoded.result)


def test_an_error_of_an_unknown_class_is_a_pass_error_with_the_whole_text():
    data = b"FarAwayError: its text"
    decoded = wire.decode_result(struct.pack("<IBH", 7, wire.STATUS_ERROR, len(data)) + data)
    assert isinstance(decoded.result, PassError)
    assert "FarAwayError" in str(decoded.result)
    assert "its text" in str(decoded.result)


@given(lengths, st.integers(wire.PAYLOAD_BYTES, 250))
def test_a_result_past_the_limit_becomes_an_error_and_is_never_cut(length, limit):
    result = bytes(length)
    frame = wire.encode_result(7, result, limit)
    assert len(frame) <= limit
    decoded = wire.decode_result(frame).result
    if wire.RESULT_HEADER_BYTES + len(result) <= limit:
        assert decoded == result
    else:
        assert type(decoded) is ResultTooLarge
        assert str(length) in str(decoded)


def test_a_ring_of_the_default_size_takes_49_bytes_of_result():
    largest = bytes(wire.MAX_RESULT_LEN)
    assert wire.decode_result(wire.encode_result(7, largest, wire.PAYLOAD_BYTES)).result == largest
    too_long = wire.decode_result(wire.encode_result(7, largest + b"x", wire.PAYLOAD_BYTES)).result
    assert type(too_long) is ResultTooLarge


@given(short_bytes, st.data())
def test_a_result_frame_cut_anywhere_is_malformed(result, data):
    frame = wire.encode_result(7, result)
    end = data.draw(st.integers(0, len(frame) - 1))
    with pytest.raises(TransportError):
        wire.decode_result(frame[:end])


@given(short_bytes)
def test_any_bytes_decode_as_a_result_frame_or_are_malformed_and_nothing_else(frame):
    try:
        decoded = wire.decode_result(frame)
    except TransportError:
        return
    token, status, _ = struct.unpack_from("<IBH", frame)
    assert decoded.token == token
    assert isinstance(decoded.result, PassError if status & ~wire.STATUS_IN_BLOCK else bytes)


def test_a_call_that_failed_travels_with_its_text_and_its_pickled_exception():
    sent = CallFailed("ValueError: b\u00e4h \0 \udcff", b"\x80\0pickle\0")
    frame = wire.encode_result(7, sent)
    assert frame[4] == wire.STATUS_ERROR | wire.STATUS_PICKLED
    found = wire.decode_result(frame).result
    assert type(found) is CallFailed
    assert (str(found), found.data) == ("ValueError: b\u00e4h \\0 \\udcff", sent.data)


def test_where_the_pickled_exception_has_no_room_its_text_goes_alone():
    frame = wire.encode_result(7, CallFailed("ValueError: boo", bytes(100)), wire.PAYLOAD_BYTES)
    assert frame[4] == wire.STATUS_ERROR
    found = wire.decode_result(frame).result
    assert (type(found), str(found)) == (ExecutionError, "ValueError: boo")


def test_a_call_that_failed_can_be_pickled_itself():
    found = pickle.loads(pickle.dumps(CallFailed("text", b"data")))
    assert (str(found), found.data) == ("text", b"data")


@pytest.mark.parametrize("status", [2, 4, 0x40, 0x7F, 0x82])
def test_a_status_that_does_not_exist_is_malformed(status):
    with pytest.raises(TransportError):
        wire.decode_result(struct.pack("<IBH", 7, status, 0))


@pytest.mark.parametrize("wrap", [bytes, bytearray, memoryview])
def test_every_buffer_type_is_encoded_and_decoded(wrap):
    assert wire.decode_submit(wrap(wire.encode_submit(1, 2, wrap(b"args")))) == (2, Pass(1, b"args"))
    assert wire.decode_result(wrap(wire.encode_result(7, b"data"))).result == b"data"


# --- slots ----------------------------------------------------------------------------------------------------------


@given(u32, u32, st.binary(max_size=wire.MAX_ARG_LEN))
def test_a_slot_carries_a_pass(closure_id, token, args):
    slot = wire.PassSlot.of_pass(token, Pass(closure_id, args))
    assert slot == wire.encode_submit(closure_id, token, args)
    assert wire.PassSlot(bytes(slot)).as_pass() == (token, Pass(closure_id, args))


@given(u32, st.binary(max_size=80))
def test_a_slot_carries_a_result_or_says_that_it_is_too_large(token, result):
    answer = wire.PassSlot.of_result(token, result).as_result()
    assert answer.token == token
    if len(result) <= wire.MAX_RESULT_LEN:
        assert answer.result == result
    else:
        assert isinstance(answer.result, ResultTooLarge)


@pytest.mark.parametrize("wrap", [bytes, bytearray, memoryview])
def test_a_slot_is_at_most_56_bytes_of_anything(wrap):
    slot = wire.PassSlot(wrap(b"x" * wire.PAYLOAD_BYTES))
    assert isinstance(slot, bytes)
    assert (type(slot), len(slot), slot) == (wire.PassSlot, 56, b"x" * 56)
    with pytest.raises(PayloadTooLarge, match="expected at most 56 bytes, found 57"):
        wire.PassSlot(wrap(b"x" * 57))
    assert wire.PassSlot() == b""


def test_a_slot_takes_no_number_for_bytes_and_no_arguments_that_do_not_fit():
    with pytest.raises(TypeError):
        wire.PassSlot(7)
    with pytest.raises(ArgsTooLarge):
        wire.PassSlot.of_pass(1, Pass(1, bytes(wire.MAX_ARG_LEN + 1)))
    for read in (wire.PassSlot(b"cut").as_pass, wire.PassSlot(b"cut").as_result):
        with pytest.raises(TransportError):
            read()


@pytest.mark.parametrize("kind", [SharedRing, SharedDeque])
def test_rings_and_deques_carry_slots(tmp_path, kind):
    slot = wire.PassSlot.of_pass(3, Pass(9, b"a" * wire.MAX_ARG_LEN))
    with kind.create(tmp_path / "file", 2) as transport:
        transport.try_push(slot)
        assert wire.PassSlot(transport.try_pop()) == slot

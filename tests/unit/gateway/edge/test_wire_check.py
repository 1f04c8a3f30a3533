"""What a message holds is known before it is parsed: against real messages, made and broken by hypothesis."""

from __future__ import annotations

import time
from typing import Any

import pytest
from google.protobuf.descriptor import FieldDescriptor
from google.protobuf.message import DecodeError, Message
from google.protobuf.unknown_fields import UnknownFieldSet
from hypothesis import given, settings
from hypothesis import strategies as st

from services.common.contract.errors import InvalidRequest, TinsmithError, TooLarge
from services.gateway.access.limits import Limits
from services.gateway.edge.wire_check import check, parsed
from tinsmith.internal.v1 import tinker_pb2
from tinsmith.v1 import models_pb2, sampling_pb2, sessions_pb2, training_pb2, types_pb2

WIDE = Limits(message_entries=10**6, message_fields=10**6)
KINDS = (
    tinker_pb2.TinkerForwardBackwardRequest,
    training_pb2.ForwardBackwardRequest,
    sampling_pb2.SampleRequest,
    sessions_pb2.SearchSessionsRequest,
    models_pb2.CreateModelRequest,
)
SCALARS = {
    FieldDescriptor.CPPTYPE_INT32: st.integers(-(2**31), 2**31 - 1),
    FieldDescriptor.CPPTYPE_INT64: st.integers(-(2**63), 2**63 - 1),
    FieldDescriptor.CPPTYPE_UINT32: st.integers(0, 2**32 - 1),
    FieldDescriptor.CPPTYPE_UINT64: st.integers(0, 2**64 - 1),
    FieldDescriptor.CPPTYPE_DOUBLE: st.floats(),
    FieldDescriptor.CPPTYPE_FLOAT: st.floats(width=32),
    FieldDescriptor.CPPTYPE_BOOL: st.booleans(),
    FieldDescriptor.CPPTYPE_ENUM: st.integers(-3, 300),
    FieldDescriptor.CPPTYPE_STRING: st.text(max_size=4) | st.just("x" * 200),
}


def scalars(field: FieldDescriptor) -> st.SearchStrategy[Any]:
    if field.type == FieldDescriptor.TYPE_BYTES:
        return st.binary(max_size=4) | st.just(bytes(300))
    return SCALARS[field.cpp_type]


def fill(draw: st.DrawFn, message: Message) -> None:
    """Sets any fields of a message, at all depths."""
    for field in message.DESCRIPTOR.fields:
        times = draw(st.integers(0, 2))
        value = getattr(message, field.name)
        for _ in range(times if field.is_repeated else min(times, 1)):
            if field.message_type is None:
                one = draw(scalars(field))
                value.append(one) if field.is_repeated else setattr(message, field.name, one)
            elif field.message_type.GetOptions().map_entry:
                key, inner = field.message_type.fields
                if inner.message_type is None:
                    value[draw(scalars(key))] = draw(scalars(inner))
                else:
                    fill(draw, value[draw(scalars(key))])
            elif field.is_repeated:
                fill(draw, value.add())
            else:
                value.SetInParent()
                fill(draw, value)


@st.composite
def messages(draw: st.DrawFn) -> Message:
    message = draw(st.sampled_from(KINDS))()
    fill(draw, message)
    return message


def has_unknown(message: Message) -> bool:
    """What the parser itself found that it does not know."""
    if len(UnknownFieldSet(message)):
        return True
    for field, value in message.ListFields():
        if field.message_type is None:
            continue
        if field.message_type.GetOptions().map_entry:
            inner = value.values() if field.message_type.fields_by_name["value"].message_type else ()
        else:
            inner = value if field.is_repeated else [value]
        if any(has_unknown(one) for one in inner):
            return True
    return False


@settings(max_examples=50, deadline=None)
@given(messages())
def test_every_message_that_can_be_made_passes_and_is_parsed_as_it_was(message: Message) -> None:
    data = message.SerializeToString(deterministic=True)
    # Compared as bytes: a NaN is unequal to itself.
    assert parsed(type(message), data, WIDE).SerializeToString(deterministic=True) == data


@settings(max_examples=50, deadline=None)
@given(messages(), st.data())
def test_the_beginning_of_a_message_passes_wherever_it_ends(message: Message, data: st.DataObject) -> None:
    raw = message.SerializeToString()
    cut = raw[: data.draw(st.integers(0, len(raw)))]
    check(message.DESCRIPTOR, cut, WIDE, whole=False)


@settings(max_examples=100, deadline=None)
@given(messages(), st.data())
def test_what_passes_is_what_the_parser_reads_without_anything_unknown(
    message: Message, data: st.DataObject
) -> None:
    raw = bytearray(message.SerializeToString())
    for _ in range(data.draw(st.integers(1, 3))):
        place = data.draw(st.integers(0, len(raw)))
        raw[place : place + data.draw(st.integers(0, 2))] = data.draw(st.binary(max_size=3))
    try:
        understood = not has_unknown(type(message).FromString(bytes(raw)))
    except DecodeError:
        understood = False
    try:
        parsed(type(message), bytes(raw), WIDE)
    except TinsmithError:
        assert not understood
    else:
        assert understood


def number(value: int) -> bytes:
    """A varint."""
    out = bytearray()
    while value > 0x7F:
        out.append(value & 0x7F | 0x80)
        value >>= 7
    return bytes([*out, value])


def nested(tag: int, inner: bytes) -> bytes:
    return number(tag << 3 | 2) + number(len(inner)) + inner


DATUM, CHUNK, INPUTS, CONFIG = 3, 1, 2, 5
BOMBS = {
    "empty datums": nested(DATUM, b"") * 2_000_000,
    "empty chunks of one datum": nested(DATUM, nested(CHUNK, b"") * 2_000_000),
    "inputs of one datum": nested(DATUM, nested(INPUTS, b"") * 2_000_000),
    "dimensions of one tensor": nested(
        DATUM, nested(INPUTS, nested(2, b"\x08\x01" + nested(4, b"\x01" * 2_000_000)))
    ),
    "dimensions one by one": nested(DATUM, nested(INPUTS, nested(2, b"\x20\x01" * 2_000_000))),
    "settings of the loss": nested(CONFIG, b"") * 2_000_000,
    "the same setting again and again": nested(1, b"") * 2_000_000,
    "fields that nobody knows": b"\xf8\x07\x01" * 2_000_000,
    "a number that never ends": b"\x08" + b"\xff" * 4_000_000,
    "many chunks in many datums": nested(DATUM, nested(CHUNK, b"") * 4000) * 500,
}


@pytest.mark.parametrize("bomb", BOMBS)
def test_a_message_of_countless_parts_is_refused_before_they_are_made(bomb: str) -> None:
    started = time.process_time()
    with pytest.raises((TooLarge, InvalidRequest)):
        check(tinker_pb2.TinkerForwardBackwardRequest.DESCRIPTOR, BOMBS[bomb], Limits())
    # 2**18 fields at most are looked at, wherever they are.
    assert time.process_time() - started < 4


def test_the_limits_are_exact() -> None:
    limits = Limits(message_entries=3, message_fields=8)
    kind = tinker_pb2.TinkerForwardBackwardRequest
    for datums in (3, 4):
        message = kind(data=[tinker_pb2.TinkerDatum()] * datums)
        if datums == 3:
            check(kind.DESCRIPTOR, message.SerializeToString(), limits)
        else:
            with pytest.raises(TooLarge, match=r"TinkerForwardBackwardRequest.data has more than 3 entries"):
                check(kind.DESCRIPTOR, message.SerializeToString(), limits)
    for strings in (8, 9):
        data = nested(4, b"loss") * strings
        if strings == 8:
            check(kind.DESCRIPTOR, data, limits)
        else:
            with pytest.raises(TooLarge, match="more than 8 protobuf fields"):
                check(kind.DESCRIPTOR, data, limits)


def test_packed_numbers_are_counted_by_their_bytes() -> None:
    limits = Limits(message_entries=4)
    for size in (4, 5):
        tensor = types_pb2.Tensor(shape=[1] * size)
        if size == 4:
            check(types_pb2.Tensor.DESCRIPTOR, tensor.SerializeToString(), limits)
        else:
            with pytest.raises(TooLarge, match=r"Tensor.shape"):
                check(types_pb2.Tensor.DESCRIPTOR, tensor.SerializeToString(), limits)


def test_an_unknown_field_of_a_repeated_message_is_refused_by_its_number() -> None:
    request = training_pb2.ForwardBackwardRequest(model_id="s:train:0", seq_id=1)
    request.forward_backward.data.add().tokens.MergeFromString(b"\xf8\x07\x01")
    with pytest.raises(InvalidRequest, match="Tensor has a protobuf field 127") as caught:
        parsed(training_pb2.ForwardBackwardRequest, request.SerializeToString(), Limits())
    assert caught.value.code == "unknown_field"

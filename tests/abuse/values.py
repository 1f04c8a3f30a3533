"""Hostile values, and messages made of them: any type of protobuf, any JSON.

Everything is drawn by hypothesis from one seed, so a run can be repeated.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, TypeVar

import hypothesis
from google.protobuf import message_factory
from google.protobuf.descriptor import Descriptor, FieldDescriptor
from google.protobuf.message import Message
from hypothesis import strategies as st

T = TypeVar("T")

_DEPTH = 4

TEXTS = [
    *(
        "",
        " ",
        "\x00",
        "\n",
        "a\r\nx-api-key: b",
        "../../etc/passwd",
        "..",
        "/",
        "%2e%2e%2f",
        "${x}",
        "'; --",
    ),
    *("\u202e", "\u0663", "\ud7ff", "\U0010ffff", "a" * 300, "b" * 5_000, "c" * 70_000, "{" * 400, "[" * 400),
    *("tinker://", "tinker://x/weights/y", "tinker://../weights/..", "s3://bucket/key", "file:///etc/passwd"),
    *("null", "NaN", "-0", "1e999", "0x10", "true", "*", "key:*", "train:0", ":", "::::", "s:train:-1"),
]
INTEGERS = [0, 1, -1, 2, 7, 512, 513, 2**15, 2**31 - 1, 2**31, -(2**31), 2**53, 2**62, 2**63 - 1, -(2**63)]
FLOATS = [0.0, -0.0, 1.0, -1.0, 1e-308, 1e308, 3.5, float("inf"), float("-inf"), float("nan")]

_ranges = {
    FieldDescriptor.CPPTYPE_INT32: (-(2**31), 2**31 - 1),
    FieldDescriptor.CPPTYPE_INT64: (-(2**63), 2**63 - 1),
    FieldDescriptor.CPPTYPE_UINT32: (0, 2**32 - 1),
    FieldDescriptor.CPPTYPE_UINT64: (0, 2**64 - 1),
    FieldDescriptor.CPPTYPE_ENUM: (-1, 12),
}


def drawn(strategy: st.SearchStrategy[T], count: int, seed: int) -> list[T]:
    """`count` values of a strategy, the same ones for the same seed."""
    found: list[T] = []

    @hypothesis.seed(seed)
    @hypothesis.settings(
        max_examples=count,
        database=None,
        deadline=None,
        phases=[hypothesis.Phase.generate],
        suppress_health_check=list(hypothesis.HealthCheck),
    )
    @hypothesis.given(strategy)
    def collect(value: T) -> None:
        found.append(value)

    collect()
    # A strategy with few values ends early; they are sent again.
    return [found[place % len(found)] for place in range(count)]


def texts(known: list[str]) -> st.SearchStrategy[str]:
    """Strings: some that name what exists, the hostile ones, and any."""
    return st.one_of(st.sampled_from([*known, *known, *TEXTS]), st.text(max_size=40))


def json_values(known: list[str]) -> st.SearchStrategy[Any]:
    """Anything that JSON can say, and what Python's encoder says beside it (NaN, infinities)."""
    scalars = st.one_of(
        st.none(), st.booleans(), st.sampled_from(INTEGERS), st.sampled_from(FLOATS), texts(known)
    )
    return st.recursive(
        scalars,
        lambda inner: st.one_of(
            st.lists(inner, max_size=6), st.dictionaries(st.sampled_from(TEXTS[:12]), inner, max_size=4)
        ),
        max_leaves=12,
    )


def objects(valid: dict[str, Any], known: list[str]) -> st.SearchStrategy[dict[str, Any]]:
    """A valid JSON object with one to three fields taken away, replaced or added."""

    @st.composite
    def changed(draw: st.DrawFn) -> dict[str, Any]:
        body = dict(valid)
        for _ in range(draw(st.integers(1, 3))):
            name = draw(st.sampled_from([*valid, "no_such_field"] if valid else ["no_such_field"]))
            if draw(st.integers(0, 4)) == 0:
                body.pop(name, None)
            else:
                body[name] = draw(json_values(known))
        return body

    return changed()


def messages(descriptor: Descriptor, known: list[str], depth: int = 0) -> st.SearchStrategy[Message]:
    """Messages of a type with hostile values in some of its fields."""

    @st.composite
    def filled(draw: st.DrawFn) -> Message:
        message = message_factory.GetMessageClass(descriptor)()
        for field in descriptor.fields:
            if draw(st.integers(0, 3)) > 0:
                _fill(draw, message, field, known, depth)
        return message

    return filled()


def _fill(draw: st.DrawFn, message: Message, field: FieldDescriptor, known: list[str], depth: int) -> None:
    if field.message_type is not None and field.message_type.GetOptions().map_entry:
        _fill_map(draw, getattr(message, field.name), field, known, depth)
    elif field.message_type is not None:
        if depth >= _DEPTH:
            return
        inner = messages(field.message_type, known, depth + 1)
        if field.is_repeated:
            getattr(message, field.name).extend(draw(st.lists(inner, max_size=3)))
        else:
            getattr(message, field.name).CopyFrom(draw(inner))
    elif field.is_repeated:
        getattr(message, field.name).extend(draw(st.lists(_scalar(field, known), max_size=5)))
    else:
        setattr(message, field.name, draw(_scalar(field, known)))


def _fill_map(draw: st.DrawFn, target: Any, field: FieldDescriptor, known: list[str], depth: int) -> None:
    entry = field.message_type.fields_by_name
    for _ in range(draw(st.integers(0, 3))):
        key = draw(_scalar(entry["key"], known))
        if entry["value"].message_type is None:
            target[key] = draw(_scalar(entry["value"], known))
        elif depth < _DEPTH:
            target[key].CopyFrom(draw(messages(entry["value"].message_type, known, depth + 1)))


def _scalar(field: FieldDescriptor, known: list[str]) -> st.SearchStrategy[Any]:
    kind = field.cpp_type
    if kind == FieldDescriptor.CPPTYPE_STRING:
        if field.type == FieldDescriptor.TYPE_BYTES:
            return st.one_of(st.binary(max_size=64), st.sampled_from([b"", b"\0" * 65_536]))
        return texts(known)
    if kind == FieldDescriptor.CPPTYPE_BOOL:
        return st.booleans()
    if kind in (FieldDescriptor.CPPTYPE_FLOAT, FieldDescriptor.CPPTYPE_DOUBLE):
        return st.sampled_from(FLOATS)
    low, high = _ranges[kind]
    return st.one_of(
        st.sampled_from([number for number in INTEGERS if low <= number <= high]), st.integers(low, high)
    )


def damaged(data: bytes) -> st.SearchStrategy[bytes]:
    """The bytes with some changed, cut off, repeated or put in."""

    @st.composite
    def changed(draw: st.DrawFn) -> bytes:
        out = bytearray(data)
        for _ in range(draw(st.integers(1, 4))):
            place = draw(st.integers(0, len(out)))
            how = draw(st.integers(0, 3))
            if how == 0 and place < len(out):
                out[place] ^= draw(st.integers(1, 255))
            elif how == 1:
                del out[place:]
            elif how == 2:
                out[place:place] = draw(st.binary(min_size=1, max_size=16))
            else:
                out += out[place : place + 64]
        return bytes(out)

    return changed()


def varint(number: int) -> bytes:
    """A number as protobuf writes it."""
    out = bytearray()
    while number > 0x7F:
        out.append(number & 0x7F | 0x80)
        number >>= 7
    out.append(number)
    return bytes(out)


def field(number: int, payload: bytes) -> bytes:
    """A length-delimited protobuf field."""
    return varint(number << 3 | 2) + varint(len(payload)) + payload


def nested(depth: int) -> Iterator[bytes]:
    """JSON that is as deep as this, in three shapes."""
    yield b"[" * depth + b"]" * depth
    yield b'{"a":' * depth + b"1" + b"}" * depth
    yield b'{"model_id":' + b"[" * depth

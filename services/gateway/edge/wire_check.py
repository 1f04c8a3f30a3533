"""Protobuf messages from outside, looked at before they are parsed.

A few kilobytes may be millions of empty messages, and a parser passes over fields that this service does not
know, so that a client with a newer contract would believe that they took effect.

Invariant: a message that passed `check` has no unknown field at any depth, and parsing it makes no more
objects than the limits say. Looking takes as many steps as there are fields, and ends at the limits.
"""

from __future__ import annotations

from functools import cache
from typing import NamedTuple, NoReturn, TypeVar, cast

from google.protobuf.descriptor import Descriptor, FieldDescriptor
from google.protobuf.message import DecodeError, Message

from services.common.contract.errors import InvalidRequest, TooLarge
from services.gateway.access.limits import Limits

M = TypeVar("M", bound=Message)

_VARINT, _FIXED64, _LENGTH, _FIXED32 = 0, 1, 2, 5
_WIRE_TYPES = {
    FieldDescriptor.TYPE_DOUBLE: _FIXED64,
    FieldDescriptor.TYPE_FIXED64: _FIXED64,
    FieldDescriptor.TYPE_SFIXED64: _FIXED64,
    FieldDescriptor.TYPE_FLOAT: _FIXED32,
    FieldDescriptor.TYPE_FIXED32: _FIXED32,
    FieldDescriptor.TYPE_SFIXED32: _FIXED32,
    FieldDescriptor.TYPE_STRING: _LENGTH,
    FieldDescriptor.TYPE_BYTES: _LENGTH,
    FieldDescriptor.TYPE_MESSAGE: _LENGTH,
}
_VARINT_BYTES = 10


class _Field(NamedTuple):
    """A field as it may come: `packed` numbers, a `message`, or neither."""

    name: str
    repeated: bool
    packed: bool
    message: Descriptor | None


def parsed(kind: type[M], data: bytes, limits: Limits) -> M:
    """The message, which passed `check`. Raises as that does."""
    descriptor = cast(Descriptor, kind.DESCRIPTOR)
    check(descriptor, data, limits)
    try:
        return kind.FromString(data)
    except DecodeError as error:
        raise _malformed(descriptor) from error


def check(descriptor: Descriptor, data: bytes, limits: Limits, *, whole: bool = True) -> None:
    """Looks at a serialized message.

    Args:
        whole: False: the data may end anywhere, as the beginning of a message does.

    Raises:
        InvalidRequest: there is a field that is not in the contract, or the bytes are no message.
        TooLarge: it holds more than `limits.message_entries` or `limits.message_fields` allow.
    """
    scan = _Scan(data, limits, whole)
    try:
        scan.message(descriptor, 0, len(data))
    except IndexError:
        if whole:
            raise _malformed(descriptor) from None


class _Scan:
    """One look at one message."""

    def __init__(self, data: bytes, limits: Limits, whole: bool) -> None:
        self._data = data
        self._limits = limits
        self._left = limits.message_fields
        self._whole = whole

    def message(self, descriptor: Descriptor, at: int, end: int) -> None:
        """Looks at the message between two places. IndexError where the data ends within a field."""
        data, known = self._data, _fields(descriptor)
        counts: dict[int, int] = {}
        while at < end:
            tag = data[at]
            at += 1
            if tag >= 0x80:
                tag, at = self._varint(descriptor, at - 1)
            field = known.get(tag)
            if field is None:
                _refuse_tag(descriptor, tag)
            name, repeated, packed, inner = field
            entries, wire_type = 1, tag & 7
            if wire_type == _LENGTH:
                size = data[at]
                at += 1
                if size >= 0x80:
                    size, at = self._varint(descriptor, at - 1)
                if packed:
                    entries = size
                stop = at + size
                if stop > end:
                    stop = self._cut(descriptor, end)
                if inner is not None:
                    self.message(inner, at, stop)
                at = stop
            elif wire_type == _VARINT:
                at += 1
                if data[at - 1] >= 0x80:
                    _, at = self._varint(descriptor, at - 1)
            else:
                at += 8 if wire_type == _FIXED64 else 4
            self._left -= 1
            if self._left < 0:
                raise TooLarge(
                    f"the request has more than {self._limits.message_fields} protobuf fields; send less at "
                    "once"
                )
            if repeated:
                counts[tag] = total = counts.get(tag, 0) + entries
                if total > self._limits.message_entries:
                    raise TooLarge(
                        f"{name} has more than {self._limits.message_entries} entries; send fewer at once"
                    )
        if at > end:
            raise IndexError

    def _cut(self, descriptor: Descriptor, end: int) -> int:
        """Where a field ends that claims to end after its message, which ends at `end`."""
        if self._whole or end < len(self._data):
            raise _malformed(descriptor)
        return end

    def _varint(self, descriptor: Descriptor, at: int) -> tuple[int, int]:
        """A number, and where it ends."""
        value = 0
        for shift in range(0, 7 * _VARINT_BYTES, 7):
            byte = self._data[at]
            at += 1
            value |= (byte & 0x7F) << shift
            if byte < 0x80:
                return value, at
        raise _malformed(descriptor)


@cache
def _fields(descriptor: Descriptor) -> dict[int, _Field]:
    """The fields of a message by their tags."""
    found = {}
    for field in descriptor.fields:
        wire_type = _WIRE_TYPES.get(field.type, _VARINT)
        name = f"{descriptor.name}.{field.name}"
        found[field.number << 3 | wire_type] = _Field(name, field.is_repeated, False, field.message_type)
        if field.is_repeated and wire_type != _LENGTH:
            found[field.number << 3 | _LENGTH] = _Field(name, True, True, None)
    return found


def _refuse_tag(descriptor: Descriptor, tag: int) -> NoReturn:
    raise InvalidRequest(
        f"{descriptor.name} has a protobuf field {tag >> 3} (of wire type {tag & 7}) that this service does "
        "not know; it is older than its client",
        "unknown_field",
    )


def _malformed(descriptor: Descriptor) -> InvalidRequest:
    return InvalidRequest(f"the bytes cannot be read as a {descriptor.name}", "bad_body")

"""Whose request it is, read from the beginning, or the end, of a body that cannot be read as a whole.

Invariant: what is found is what the whole body would say, so far as it is well formed; nothing is guessed
from a value that may be cut off.
"""

from __future__ import annotations

import re
from typing import NamedTuple

HEAD_BYTES = 1024
"""The SDK's messages name model and number within the first of these, or the last."""

_TOKEN = re.compile(rb'"(?:[^"\\]|\\.)*"|[{}\[\]:,]|[^\s{}\[\]:,"]+')
_NAME = re.compile(rb'"([0-9A-Za-z:_-]{1,200})"')
_NUMBER = re.compile(rb"-?[0-9]{1,18}")
_LAST = re.compile(
    rb"""[{,]\s*"(model_id|seq_id)"\s*:\s*("[0-9A-Za-z:_-]{1,200}"|-?[0-9]{1,18})\s*"""
    rb"""(?=(?:,\s*"[0-9A-Za-z_]{1,50}"\s*:\s*(?:"[0-9A-Za-z:_-]{0,200}"|-?[0-9]{1,18}|true|false|null)\s*)*\}\s*\Z)"""
)
"""Model or number as a member of the object that ends the body, with nothing but plain members after it. A
quote that follows a comma or brace begins a name: within a string there would be a backslash between."""


class Place(NamedTuple):
    """Which seq_id of which model a request uses up."""

    model_id: str
    seq_id: int


def in_json(body: bytes, end: bytes = b"") -> Place | None:
    """From `model_id` and `seq_id` of the outermost object.

    Args:
        body: its beginning.
        end: its last bytes, when all of it came.
    """
    tokens = _TOKEN.findall(body[:HEAD_BYTES])
    found: dict[bytes, bytes] = {}
    depth = 0
    # The last token may be cut off: a value counts only when something follows it.
    for name, colon, value, _ in zip(tokens, tokens[1:], tokens[2:], tokens[3:], strict=False):
        depth += (name in (b"{", b"[")) - (name in (b"}", b"]"))
        if depth == 1 and colon == b":" and name in (b'"model_id"', b'"seq_id"'):
            found[name] = value
    for name, value in _LAST.findall(end[-HEAD_BYTES:]):
        found[b'"' + name + b'"'] = value
    model, number = _NAME.fullmatch(found.get(b'"model_id"', b"")), found.get(b'"seq_id"', b"")
    if model is None or _NUMBER.fullmatch(number) is None:
        return None
    return Place(model[1].decode(), int(number))


def in_message(body: bytes) -> Place | None:
    """From fields 1 and 2 of a protobuf message."""
    data, at = body[:HEAD_BYTES], 0
    model: bytes | None = None
    number: int | None = None
    try:
        while model is None or number is None:
            tag, at = _varint(data, at)
            if tag & 7 not in (0, 2):
                return None
            value, at = _varint(data, at)
            if tag == 1 << 3 | 2:
                model = data[at : at + value]
                if len(model) < value:
                    return None
            elif tag == 2 << 3:
                number = value
            at += value if tag & 7 == 2 else 0
    except IndexError:
        return None
    name = _NAME.fullmatch(b'"' + model + b'"')
    return None if name is None else Place(name[1].decode(), number)


def _varint(data: bytes, at: int) -> tuple[int, int]:
    value = 0
    for shift in range(0, 70, 7):
        byte = data[at]
        at += 1
        value |= (byte & 0x7F) << shift
        if byte < 0x80:
            break
    return value, at

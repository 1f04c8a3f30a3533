"""Long lists of integers in a JSON body, read straight into arrays.

A parser makes an object of every number, of ten times its bytes in the body, and lets nothing else run
meanwhile. Invariants: an integer of a long list takes 4 or 8 bytes; what is left of the body is small; and no
step is long, so that other threads have their turns.
"""

from __future__ import annotations

import secrets
from array import array

import msgspec

from services.common.contract.errors import InvalidRequest

MOST_REST_BYTES = 1024 * 1024
"""Bytes of a body besides its long lists, which are parsed in one step: no more than of any other body."""

_INTEGERS = b"0123456789,- \t\r\n"
_WINDOW = 256
_PIECE = 32 * 1024
_WIDENED_AT_ONCE = 64 * 1024
"""Integers."""


class LongLists:
    """A JSON body in which a string stands for every long list of integers (those of `2 * _WINDOW` bytes and
    more, and some shorter ones).

    Attributes:
        rest: the body with the strings.
    """

    def __init__(self, body: bytes) -> None:
        """Proportional to the body: one of more than some 100 KB is for a thread.

        Raises:
            InvalidRequest: a list cannot be read, or too much else is in the body.
        """
        self._mark = ""
        self._lists: list[array[int]] = []
        self._taken = 0
        self.rest = self._cut(body)
        if len(self.rest) > MOST_REST_BYTES:
            raise InvalidRequest(
                f"the JSON body has {len(self.rest)} bytes besides its long lists of integers; send at most "
                f"{MOST_REST_BYTES}, in fewer and longer chunks"
            )

    @property
    def nbytes(self) -> int:
        """Bytes of all lists."""
        return sum(len(values) * values.itemsize for values in self._lists)

    def is_mark(self, text: str) -> bool:
        """Whether a string of the parsed body stands for a list."""
        return bool(self._mark) and text.startswith(self._mark)

    def take(self, given: str | list[int]) -> array[int]:
        """The integers of a field of the parsed body.

        Args:
            given: the list itself, or the string that stands for it.

        Raises:
            InvalidRequest: it is another string, or a number is no signed 64-bit integer.
        """
        if isinstance(given, list):
            return _extended(array("i"), given)
        if not self.is_mark(given):
            raise InvalidRequest("the JSON body cannot be read: a list of integers is text", "bad_body")
        self._taken += 1
        return self._lists[int(given.rpartition(":")[2])]

    def check_all_taken(self) -> None:
        """Refuses a body with a long list of integers where none belongs.

        Raises:
            InvalidRequest: there is one.
        """
        if self._taken != len(self._lists):
            raise InvalidRequest(
                "the JSON body cannot be read: a list of integers is where none belongs", "bad_body"
            )

    def _cut(self, body: bytes) -> bytes:
        parts: list[bytes] = []
        kept, at = 0, _WINDOW
        while at + _WINDOW <= len(body):
            start = body.rfind(b"[", max(kept, at - _WINDOW), at)
            if start < 0 or not _only_integers(body, start + 1, at + _WINDOW):
                at += _WINDOW
                continue
            end = _end_of_integers(body, at + _WINDOW)
            if body[end : end + 1] == b"]":
                # No client can write such a string, so none can mean another list than its own.
                self._mark = self._mark or secrets.token_hex(16)
                parts += [body[kept:start], b'"%s:%d"' % (self._mark.encode(), len(self._lists))]
                self._lists.append(_integers(body, start + 1, end))
                kept = end + 1
            at = end + _WINDOW
        parts.append(body[kept:])
        return b"".join(parts)


def _only_integers(body: bytes, start: int, stop: int) -> bool:
    return not body[start:stop].translate(None, _INTEGERS)


def _end_of_integers(body: bytes, at: int) -> int:
    """The first place from `at` on that holds no part of a list of integers."""
    while at < len(body):
        window = body[at : at + _WINDOW]
        others = window.translate(None, _INTEGERS)
        if others:
            return at + window.index(others[:1])
        at += len(window)
    return at


def _integers(body: bytes, start: int, stop: int) -> array[int]:
    """The list that is between two places."""
    values, first = array("i"), start
    while True:
        cut = stop if stop - start <= _PIECE else body.rfind(b",", start, start + _PIECE)
        try:
            piece = msgspec.json.decode(b"[%s]" % body[start : max(cut, start)], type=list[int])
        except msgspec.DecodeError as error:
            raise InvalidRequest(f"the JSON body cannot be read: {error}", "bad_body") from error
        if not piece and (start, cut) != (first, stop):
            raise InvalidRequest("the JSON body cannot be read: a number is missing in a list", "bad_body")
        values = _extended(values, piece)
        if cut == stop:
            return values
        start = cut + 1


def widened(values: array[int]) -> array[int]:
    """The same integers, of 8 bytes each."""
    wide = array("q")
    for start in range(0, len(values), _WIDENED_AT_ONCE):
        wide.extend(array("q", values[start : start + _WIDENED_AT_ONCE]))
    return wide


def _extended(values: array[int], more: list[int]) -> array[int]:
    """The integers with more at their end, each of 4 bytes if all of them have room in that, else of 8."""
    try:
        added = array(values.typecode, more)
    except OverflowError:
        try:
            values, added = widened(values), array("q", more)
        except OverflowError as error:
            raise InvalidRequest(
                "a number in the JSON body is no signed 64-bit integer", "token_out_of_range"
            ) from error
    values.extend(added)
    return values

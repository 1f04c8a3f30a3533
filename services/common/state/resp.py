"""Commands as Redis reads them.

redis-py does it piece by piece, through a call for each argument, and takes as long for that as a gateway
does for the whole of what it checks about a sample.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

Argument = bytes | str | int | float

_APART_BYTES = 6000
"""An argument that is larger is passed on as it is, and not copied into one piece with the others."""


def packed(commands: Iterable[Sequence[Argument]]) -> list[bytes]:
    """The commands in a few pieces, to be sent one after the other.

    Raises:
        TypeError: an argument is of another type; a bool is one that Redis knows no form of.
    """
    pieces: list[bytes] = []
    parts: list[bytes] = []
    for name, *arguments in commands:
        # "SCRIPT LOAD" is two words to Redis.
        words: list[Argument] = [*_bytes(name).split(), *arguments]
        parts.append(b"*%d\r\n" % len(words))
        for word in words:
            # Nearly all are one of the two.
            data = word if type(word) is bytes else word.encode() if type(word) is str else _bytes(word)
            if len(data) > _APART_BYTES:
                parts.append(b"$%d\r\n" % len(data))
                pieces += [b"".join(parts), data]
                parts = [b"\r\n"]
            else:
                parts.append(b"$%d\r\n%b\r\n" % (len(data), data))
    if parts:
        pieces.append(b"".join(parts))
    return pieces


def _bytes(value: Argument) -> bytes:
    if isinstance(value, str):
        return value.encode()
    if isinstance(value, bytes):
        return value
    if isinstance(value, int | float) and not isinstance(value, bool):
        return repr(value).encode()
    raise TypeError(f"Redis takes no {type(value).__name__}; make it text, bytes or a number")

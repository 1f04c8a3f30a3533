"""Names of owners.

Invariant: no two who are let in share an owner by chance. The subjects of an identity provider are owners
whose names no API key can have, and two subjects never have one name.
"""

from __future__ import annotations

import re
from base64 import urlsafe_b64encode
from hashlib import sha256

from services.common.contract.errors import InvalidRequest

_MOST_CHARS = 64
_OF_KEY = re.compile(rf"[0-9A-Za-z][0-9A-Za-z._@-]{{0,{_MOST_CHARS - 1}}}")

_OF_SUBJECT = "oidc~"
"""Begins the name of a subject. No key's owner has a ~, and none of what follows but that of a long one."""
_MOST_WRITTEN = _MOST_CHARS - len(_OF_SUBJECT)
_KNOWN = re.compile(rf"{_OF_SUBJECT}(?:[0-9A-Za-z._@%-]{{1,{_MOST_WRITTEN}}}|~[0-9A-Za-z_-]{{43}})")
_PLAIN = frozenset(b"0123456789ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz._@-")


def check(name: str) -> None:
    """Refuses what no API key's owner can be called.

    Raises:
        InvalidRequest: it is such a name.
    """
    if _OF_KEY.fullmatch(name) is None:
        raise InvalidRequest(
            f"{name[:80]!r} cannot be an owner's name: that of an API key takes letters, digits and . _ @ - "
            f"and begins with a letter or digit; it has at most {_MOST_CHARS} characters",
            field="owner",
        )


def of_subject(subject: str) -> str:
    """The owner that a subject of the identity provider is: what it is called, with what no name has as %
    and two digits; of one that is too long its SHA-256.

    Raises:
        InvalidRequest: it is empty.
    """
    if not subject:
        raise InvalidRequest("it is empty", field="owner")
    # JSON may hold halves of characters, which are none: each is told apart all the same.
    raw = subject.encode(errors="surrogatepass")
    if len(raw) <= _MOST_WRITTEN:
        written = "".join(chr(byte) if byte in _PLAIN else f"%{byte:02X}" for byte in raw)
        if len(written) <= _MOST_WRITTEN:
            return f"{_OF_SUBJECT}{written}"
    return f"{_OF_SUBJECT}~{urlsafe_b64encode(sha256(raw).digest()).rstrip(b'=').decode()}"


def named(name: str, field: str = "owner") -> str:
    """A name that somebody asks about, which an owner can have.

    Raises:
        InvalidRequest: none can, so nothing could be told of it.
    """
    if _OF_KEY.fullmatch(name) is None and _KNOWN.fullmatch(name) is None:
        raise InvalidRequest(
            f"{name[:80]!r} is no owner's name: write it as `tinsmith keys list` or `tinsmith admin owners` "
            "does",
            field=field,
        )
    return name

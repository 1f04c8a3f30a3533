"""What makes two requests the same: what was asked for, never what it came to.

Invariant: a request that is repeated has the same digest, although the checkpoint that it names is another
one by then, or is gone, or the limits have changed.
"""

from __future__ import annotations

import hashlib

import msgspec
from google.protobuf.message import Message


def digest(kind: str, *asked: object) -> bytes:
    """SHA-256 of a request: which it is, and all that its sender chose, as plain data."""
    return hashlib.sha256(msgspec.msgpack.encode([kind, *asked], order="deterministic")).digest()


def message_digest(message: Message) -> bytes:
    """SHA-256 of a request that is a message. Proportional to its size."""
    return hashlib.sha256(message.SerializeToString(deterministic=True)).digest()

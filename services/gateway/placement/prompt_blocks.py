"""A prompt as a chain of blocks: what two prompts have in common is how far their chains agree.

Invariant: a block's name depends on all tokens up to its end and on what the chain begins with, so equal
names mean equal beginnings (but for one chance in 2**64).
"""

from __future__ import annotations

import hashlib
import struct

TOKEN_BYTES = 4
BLOCK_TOKENS = 64
MOST_BLOCKS = 2048
"""Of one prompt: its first 131,072 tokens. What is beyond goes where these go."""


def chain(root: bytes, prompt: bytes) -> tuple[int, ...]:
    """Names of `root` alone and of every whole block of int32 tokens after it, in order: signed 64-bit."""
    size = BLOCK_TOKENS * TOKEN_BYTES
    hasher = hashlib.blake2b(root, digest_size=8)
    names = [_name(hasher.digest())]
    whole = min(len(prompt) // size, MOST_BLOCKS)
    for start in range(0, whole * size, size):
        hasher.update(prompt[start : start + size])
        names.append(_name(hasher.digest()))
    return tuple(names)


def _name(digest: bytes) -> int:
    name: int = struct.unpack("<q", digest)[0]
    return name

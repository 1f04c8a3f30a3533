"""Which sampler replica a sample goes to: a pure decision.

Invariant: requests for the same snapshot and prompt beginning prefer the same replica (its adapter is
resident, its prefix cache warm) as long as that replica is not much busier than the idlest.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass

PREFIX_BYTES = 256
"""Bytes of the prompt's int32 tokens that decide affinity: the first 64 tokens."""
SLACK = 8
"""Sequences by which the preferred replica may be ahead of the idlest one."""


@dataclass(frozen=True)
class Replica:
    """A live sampler. `in_flight`: sequences this gateway has it generate."""

    id: str
    in_flight: int


def affinity_key(model_id: str, version: int, prompt: bytes) -> bytes:
    """What requests that share an adapter and a cached prompt prefix have in common."""
    text = f"{model_id}\0{version}\0".encode()
    return hashlib.blake2b(text + prompt[:PREFIX_BYTES], digest_size=16).digest()


def choose(replicas: Sequence[Replica], key: bytes) -> Replica | None:
    """The replica to use; None when there is none.

    Rendezvous hashing: when a replica comes or goes, only the keys it wins or loses move.
    """
    if not replicas:
        return None

    def weight(replica: Replica) -> bytes:
        return hashlib.blake2b(replica.id.encode(), key=key, digest_size=8).digest()

    favourite = max(replicas, key=weight)
    idlest = min(replicas, key=lambda replica: (replica.in_flight, weight(replica)))
    return favourite if favourite.in_flight <= idlest.in_flight + SLACK else idlest

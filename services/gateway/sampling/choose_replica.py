"""Which sampler replica a sample goes to: a pure decision.

Invariants: requests for the same snapshot and prompt beginning prefer the same replica (its adapter is
resident, its prefix cache warm) as long as that replica is not much busier than the idlest. Requests prefer
replicas whose engine has their weights: swapping them in elsewhere takes long, and stops what runs there.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass

PREFIX_BYTES = 256
"""Bytes of the prompt's int32 tokens that decide affinity: the first 64 tokens."""
SLACK = 8
"""Sequences by which the preferred replica may be ahead of the idlest one."""
SWAP_SLACK = 64
"""The same, when the idlest one would have to swap its engine's weights."""


@dataclass(frozen=True)
class Replica:
    """A live sampler.

    Attributes:
        in_flight: sequences this gateway has it generate.
        weights: full snapshot in its engine; "" = the base model, which adapters need too.
    """

    id: str
    in_flight: int
    weights: str = ""


@dataclass(frozen=True)
class Affinity:
    """What decides where a request had best go.

    Attributes:
        weights: as Replica.weights: what the request needs in the engine.
        home: shared by requests that had best share a replica when none has their weights.
        key: shared by requests that share an adapter and a cached prompt prefix.
    """

    weights: str
    home: bytes
    key: bytes


def affinity(model_id: str, version: int, full: bool, prompt: bytes) -> Affinity:
    """Affinity of a request for a snapshot; model_id "" = the base model.

    Versions of one full model share a home, so that a new one takes the place of the one before.
    """
    key = _digest(f"{model_id}\0{version}\0".encode() + prompt[:PREFIX_BYTES])
    return (
        Affinity(f"{model_id}@{version}", _digest(model_id.encode()), key) if full else Affinity("", key, key)
    )


def choose(replicas: Sequence[Replica], wanted: Affinity) -> Replica | None:
    """The replica to use; None when there is none.

    Rendezvous hashing: when a replica comes or goes, only the keys it wins or loses move.
    """
    if not replicas:
        return None
    at_hand = [replica for replica in replicas if replica.weights == wanted.weights]
    if not at_hand:
        return _idlest_unless(_favourite(replicas, wanted.home), replicas, wanted.home, SWAP_SLACK)
    best = _idlest_unless(_favourite(at_hand, wanted.key), at_hand, wanted.key, SLACK)
    return _idlest_unless(best, replicas, wanted.key, SWAP_SLACK)


def _favourite(replicas: Sequence[Replica], key: bytes) -> Replica:
    return max(replicas, key=lambda replica: _weight(replica, key))


def _idlest_unless(best: Replica, replicas: Sequence[Replica], key: bytes, slack: int) -> Replica:
    """`best` unless it is ahead of the idlest replica by more than `slack`."""
    idlest = min(replicas, key=lambda replica: (replica.in_flight, _weight(replica, key)))
    return best if best.in_flight <= idlest.in_flight + slack else idlest


def _weight(replica: Replica, key: bytes) -> bytes:
    return _digest(replica.id.encode(), key)


def _digest(data: bytes, key: bytes = b"") -> bytes:
    return hashlib.blake2b(data, key=key, digest_size=16).digest()

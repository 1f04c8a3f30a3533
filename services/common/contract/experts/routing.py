"""Which experts the routed layers of a model give tokens to: what a sampler tells and a trainer replays.

Invariant: ids that passed `check` are those of experts that the model has, as many for each token and layer
as its routers choose, none twice: the model can compute with them.
"""

from __future__ import annotations

import math

import msgspec
import numpy as np

from services.common.contract.errors import InvalidRequest

MAX_BYTES = 2**26
"""Most bytes of ids that one sample may be answered with: they are in one message."""

DIMENSIONS = 3
"""Of ids: tokens, layers, top_k."""

_BYTE = 256


class Routing(msgspec.Struct, frozen=True):
    """How a model routes. `layers`: those that do, without the others; each gives a token to `top_k` of its
    `experts`."""

    layers: int
    top_k: int
    experts: int

    @property
    def dtype(self) -> np.dtype[np.uint8] | np.dtype[np.uint16]:
        """Of ids, little-endian."""
        return np.dtype("<u1") if self.experts <= _BYTE else np.dtype("<u2")

    def nbytes(self, tokens: int) -> int:
        """Bytes of the ids of so many tokens."""
        return tokens * self.layers * self.top_k * self.dtype.itemsize


class RoutedExperts(msgspec.Struct, frozen=True):
    """Ids of the experts of tokens, as bytes of a Routing's `dtype`. `shape`: [tokens, layers, top_k]."""

    shape: tuple[int, ...]
    ids: bytes

    def values(self) -> np.ndarray:
        """Read-only view of the ids of at least one token, which passed `check`, in their shape."""
        return np.frombuffer(self.ids, f"<u{len(self.ids) // math.prod(self.shape)}").reshape(self.shape)


def ids_of(routed: RoutedExperts | None) -> bytes:
    """The ids, nothing where none are given."""
    return b"" if routed is None else routed.ids


def check(routed: RoutedExperts, routing: Routing, tokens: int, name: str) -> None:
    """Refuses ids that are not those of so many tokens, at least one, of a model.

    Raises:
        InvalidRequest: with what to change.
    """
    expected = (tokens, routing.layers, routing.top_k)
    if routed.shape != expected:
        shown = [int(size) for size in routed.shape[: DIMENSIONS + 1]]
        raise InvalidRequest(
            f"{name} has the shape {shown}; the model has {routing.layers} routed layers with "
            f"{routing.top_k} experts a token, so for {tokens} tokens it must be {list(expected)}",
            "wrong_shape",
        )
    size = routing.dtype.itemsize
    if len(routed.ids) != math.prod(expected) * size:
        raise InvalidRequest(
            f"{name} has {len(routed.ids)} bytes; {list(expected)} ids of {routing.experts} experts are "
            f"{math.prod(expected) * size}, as each takes {size}",
            "length_mismatch",
        )
    ids = routed.values()
    if (largest := int(ids.max())) >= routing.experts:
        raise InvalidRequest(
            f"{name} has expert {largest}; the model's are 0 to {routing.experts - 1}", "expert_out_of_range"
        )
    ordered = np.sort(ids, axis=-1)
    if (ordered[..., 1:] == ordered[..., :-1]).any():
        raise InvalidRequest(
            f"{name} has an expert twice for a token of a layer; a router chooses {routing.top_k} "
            "different ones",
            "expert_repeated",
        )

"""What names a set of weights: a snapshot, the weights below every adapter, an adapter in the engine.

Invariant: a name never changes its meaning. A snapshot is immutable, and an adapter's number is never given
twice.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class SnapshotKey:
    """An immutable snapshot, adapter or full model: the model that was saved and the seq_id of the save."""

    model_id: str
    version: int

    def __str__(self) -> str:
        return f"{self.model_id}@{self.version}"


Weights = SnapshotKey | None
"""What the weights below every adapter are of: a full snapshot, or None = the base model."""


@dataclass(frozen=True)
class Adapter:
    """A snapshot that every worker of the engine holds.

    Attributes:
        id: the engine's own number, never reused.
        name: unique per snapshot; it keys the prefix cache, so cached keys and values never cross
            from one version to another.
        directory: the snapshot in the store.
    """

    id: int
    name: str
    directory: str

"""A snapshot that a trainer is about to broadcast: plain data, no protobuf."""

from __future__ import annotations

from dataclasses import dataclass

from services.common.contract.tensors import TensorSpec
from services.sampler.engine.snapshot_key import SnapshotKey


@dataclass(frozen=True)
class IncomingSnapshot:
    """What arrives, and how its arrival is checked.

    Attributes:
        epoch: weight group that it comes over.
        rank: of the adapter; None = a full model.
        specs: its tensors, in the order of the packed buffer.
        checksum: of the packed buffer's bytes.
        timeout: seconds that the transfer may take.
    """

    epoch: int
    key: SnapshotKey
    rank: int | None
    specs: tuple[TensorSpec, ...]
    checksum: int
    timeout: float

    @property
    def layout(self) -> list[list[object]]:
        """[name, dtype, shape] of each tensor, in order."""
        return [[spec.name, spec.dtype, list(spec.shape)] for spec in self.specs]

    @property
    def nbytes(self) -> int:
        """Bytes of its tensors."""
        return sum(spec.nbytes for spec in self.specs)

"""Publishes adapter snapshots: to the store, and over the wire to every live sampler of the base model.

Invariants: a snapshot, once stored, never changes, and what goes over the wire is what is stored. The
wire is an optimisation: a sampler that misses a broadcast loads the snapshot from the store, so no failure
of a sampler fails a publish.
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from services.common.paths import DataDir
from services.common.storage.directory import publish_directory
from services.trainer.broadcast import Broadcaster
from services.trainer.export_format import adapter_files, read_adapter
from services.trainer.plan import HostArray, LoraSpec


@dataclass(frozen=True)
class Published:
    """What became of a publish. `receivers`: sampler workers that have it from the wire."""

    wire_bytes: int
    receivers: int


class Publisher:
    """Stores and broadcasts snapshots of one base model's adapters."""

    def __init__(self, data: DataDir, base_model: str, broadcaster: Broadcaster) -> None:
        self._data = data
        self._base_model = base_model
        self._broadcaster = broadcaster

    async def publish(
        self, model_id: str, version: int, lora: LoraSpec, adapter: Mapping[str, HostArray]
    ) -> Published:
        """Returns when the snapshot is stored and every live sampler has it or was given up.

        Args:
            adapter: `<module>.lora_A` and `<module>.lora_B`, float32 on the host.

        Raises:
            OSError: it could not be stored.
        """
        target = self._data.snapshot(model_id, version)
        stored = await asyncio.to_thread(read_snapshot, target)
        if stored is not None:
            # Executed again after a restart: the first one stands, somebody may sample from it.
            adapter = stored
        sent = asyncio.ensure_future(self._broadcaster.send(model_id, version, lora, adapter))
        if stored is None:
            try:
                await asyncio.to_thread(write_snapshot, target, self._base_model, lora, adapter)
            except BaseException:
                await asyncio.gather(sent, return_exceptions=True)
                raise
        return Published(*await sent)


def write_snapshot(target: Path, base_model: str, lora: LoraSpec, adapter: Mapping[str, HostArray]) -> None:
    """Writes an adapter in PEFT's format. Blocking."""
    publish_directory(target, adapter_files(base_model, lora, adapter), replace=False)


def read_snapshot(target: Path) -> dict[str, HostArray] | None:
    """Tensors of a stored snapshot by their adapter names; None when there is none. Blocking."""
    if not target.is_dir():
        return None
    return read_adapter(target)

"""Snapshots around an engine that records what is asked of it."""

from __future__ import annotations

import asyncio
from pathlib import Path

from services.common.contract.tensors import TensorSpec
from services.common.storage.data_dir import DataDir
from services.sampler.engine.snapshot_key import SnapshotKey, Weights
from services.sampler.snapshots.adapter_slots import AdapterSlots
from services.sampler.snapshots.full_snapshots import FullSnapshots
from services.sampler.snapshots.incoming import IncomingSnapshot
from services.sampler.snapshots.residency import Residency
from services.sampler.snapshots.snapshots import Snapshots

KEY = SnapshotKey("session:train:0", 3)
OTHER = SnapshotKey("session:train:0", 4)
THIRD = SnapshotKey("session:train:0", 5)
INCOMING = IncomingSnapshot(1, KEY, 4, (TensorSpec("lm_head.lora_A", "float32", (4, 8)),), 7, 5.0)


class Engine:
    """Records what is asked of it; `gate` holds transfers back, `failure` fails them."""

    def __init__(self) -> None:
        self.gate = asyncio.Event()
        self.gate.set()
        self.failure: Exception | None = None
        self.loads: list[int] = []
        self.receives: list[int] = []
        self.dropped: list[int] = []
        self.left = 0
        self.staged: list[int | None] = []
        self.dropped_staged: list[int] = []
        self.checks: list[int | str] = []
        self.unfit: Exception | None = None
        self.swap_failures: list[Exception] = []
        self.swaps: list[tuple[Weights, int | str | None]] = []
        self.updates: list[tuple[Weights, int | str | None]] = []
        self.update_failures: list[Exception] = []

    async def join_group(
        self, epoch: int, first_rank: int, world_size: int, medium: str, seconds: float
    ) -> None:
        await self._transfer()

    async def leave_group(self) -> None:
        self.left += 1

    async def receive_adapter(
        self, adapter_id: int, epoch: int, rank: int, specs: list[list[object]], checksum: int, seconds: float
    ) -> int:
        self.receives.append(adapter_id)
        return await self._transfer()

    async def load_adapter(self, adapter_id: int, directory: str, seconds: float) -> int:
        self.loads.append(adapter_id)
        return await self._transfer()

    async def drop_adapters(self, adapter_ids: list[int]) -> None:
        self.dropped += adapter_ids

    async def stage(
        self, stage_id: int | None, epoch: int, specs: list[list[object]], checksum: int, seconds: float
    ) -> None:
        self.staged.append(stage_id)
        await self._transfer()

    async def drop_staged(self, stage_ids: list[int]) -> None:
        self.dropped_staged += stage_ids

    async def check(self, source: int | str, seconds: float) -> None:
        self.checks.append(source)
        if self.unfit is not None:
            raise self.unfit

    async def swap(self, weights: Weights, source: int | str | None, seconds: float) -> None:
        self.swaps.append((weights, source))
        await self._transfer()
        if self.swap_failures:
            raise self.swap_failures.pop(0)

    async def update(self, weights: Weights, source: int | str | None, seconds: float) -> None:
        self.updates.append((weights, source))
        await self._transfer()
        if self.update_failures:
            raise self.update_failures.pop(0)

    async def _transfer(self) -> int:
        await self.gate.wait()
        if self.failure is not None:
            raise self.failure
        return 10


def around(engine: Engine, directory: Path, full: FullSnapshots, **more: bool) -> Snapshots:
    """Three adapters lie in the store; there is room for one in memory.

    Args:
        more: as of `Snapshots`.
    """
    data_dir = DataDir(directory)
    for key in (KEY, OTHER, THIRD):
        stored = data_dir.snapshot(key.model_id, key.version)
        stored.mkdir(parents=True)
        (stored / "adapter_model.safetensors").write_bytes(bytes(10))
    residency = Residency(10, first_adapter_id=100, copies=1)
    return Snapshots(engine, data_dir, residency, AdapterSlots(2), full, **more)

"""A durable store whose pointers are in memory, and a model for it to write."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from pathlib import Path

from prometheus_client import REGISTRY

from services.common.storage.data_dir import DataDir
from services.trainer.compute.data import ModelState
from services.trainer.files.checkpoints import Meta, SavedState
from services.trainer.files.durable import DurableSnapshot, DurableStore
from tinsmith.v1 import checkpoints_pb2, results_pb2

MODEL = "s:train:0"
RESULT = results_pb2.OperationResult(load_state=checkpoints_pb2.LoadStateResult(path="p"))


class PointersInMemory:
    """The journal's pointer of one model, with a fencing epoch."""

    def __init__(self) -> None:
        self.epoch = 1
        self.pointer: tuple[int, str] | None = None
        self.marked: list[int] = []
        self.closed = False
        self.half_full = False

    async def mark_durable(self, model_id: str, epoch: int, seq_id: int, location: str) -> bool:
        if epoch != self.epoch:
            return False
        self.pointer = (seq_id, location)
        self.marked.append(seq_id)
        return True

    async def durable(self, model_id: str) -> tuple[int, str] | None:
        return self.pointer

    async def is_closed(self, model_id: str) -> bool:
        return self.closed

    async def is_half_full(self, model_id: str) -> bool:
        return self.half_full


class Trained:
    """A model whose newest state is of operation `seq_id`."""

    def __init__(self, state: ModelState) -> None:
        self.state = state
        self.seq_id = 0
        self.gone = False

    async def take(self, model_id: str) -> DurableSnapshot | None:
        await asyncio.sleep(0)
        if self.gone:
            return None
        meta = Meta("org/base", "org/base", model_id, self.seq_id, self.state.step, self.state.lora)
        return DurableSnapshot(SavedState(meta, self.state), {self.seq_id: RESULT})


async def answered(model_id: str) -> None:
    """All there is has its results."""


def make(
    tmp_path: Path,
    pointers: PointersInMemory,
    take: Callable[[str], Awaitable[DurableSnapshot | None]],
    strayed: Callable[[str], bool] = lambda _: False,
) -> tuple[DurableStore, list[tuple[str, int]]]:
    told: list[tuple[str, int]] = []
    store = DurableStore(
        DataDir(tmp_path),
        tmp_path / "staging",
        pointers,
        answered,
        take,
        lambda _: 1,
        strayed,
        lambda model, seq: told.append((model, seq)),
    )
    return store, told


def blocked(tmp_path: Path) -> Path:
    """What keeps snapshots of the model from being written, until it is taken away."""
    blocker = DataDir(tmp_path).state(MODEL)
    blocker.parent.mkdir(parents=True)
    blocker.write_text("in the way")
    return blocker


def failures() -> float:
    return REGISTRY.get_sample_value("tinsmith_durable_snapshot_failures_total") or 0.0

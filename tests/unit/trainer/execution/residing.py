"""Residency over an engine that does nothing, for tests."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any, cast

from services.common.contract import ids
from services.common.process.crashes import CrashLedger
from services.common.storage.data_dir import DataDir
from services.trainer.compute.data import ModelState
from services.trainer.execution.residency import Residency, Restores
from services.trainer.execution.resident_models import Model
from services.trainer.execution.states import States
from services.trainer.files import durable
from services.trainer.files.base import Base
from services.trainer.files.checkpoints import Meta, SavedState
from services.trainer.files.copy_room import LoadRoom
from services.trainer.files.durable import DurableSnapshot
from services.trainer.files.volume import Volume
from services.trainer.world.commands import CreateModel, DropModel
from services.trainer.world.world import World
from tests.unit.trainer.files.durable_snapshots import RESULT, PointersInMemory

MODEL = ids.model_id("s", 0)
SEQ_ID = 3


class Engine:
    """Does commands once `gate` is open."""

    def __init__(self, state: ModelState) -> None:
        self._state = state
        self.gate = asyncio.Event()
        self.gate.set()
        self.waiting = 0
        self.done: list[str] = []

    async def call(self, command: Any) -> None:
        assert isinstance(command, CreateModel | DropModel)
        self.waiting += 1
        await self.gate.wait()
        self.waiting -= 1
        self.done.append(type(command).__name__)

    async def state(self, model_id: str) -> tuple[int, ModelState]:
        return SEQ_ID, self._state

    async def write_state(self, model_id: str, directory: str) -> tuple[int, int]:
        return SEQ_ID, self._state.step


class Trainer:
    """Residency over an engine that does nothing, and models that have a snapshot on disk."""

    def __init__(self, data: DataDir, state: ModelState, loads: int = 2**40) -> None:
        self.models: dict[str, Model] = {}
        self.pointers = PointersInMemory()
        self.engine = Engine(state)
        base = Base("org/base", "org/base")
        world, staging = cast(World, self.engine), data.staging / "trainer-0"
        states = States(world, base, Volume(data), staging)
        self.crashes = CrashLedger[tuple[str, int]](
            data.run / "trainer-0.executing", tuple[str, int], "trainer"
        )
        self.loads = LoadRoom(loads, lambda _: 1)
        self.residency = Residency(
            world,
            self.models,
            states,
            data,
            staging,
            self.pointers,
            1,
            2**30,
            lambda _: 1,
            0,
            lambda _: 1,
            Restores(self.crashes, self.loads),
        )
        self._data = data
        self._state = state

    def stored(self, model_id: str, seq_id: int = SEQ_ID) -> str:
        meta = Meta("org/base", "org/base", model_id, seq_id, self._state.step, self._state.lora)
        snapshot = DurableSnapshot(SavedState(meta, self._state), {seq_id: RESULT})
        target = self._data.state(model_id) / f"{seq_id}-1"
        durable._write_files(target, snapshot, Volume(self._data))
        self.pointers.pointer = (seq_id, f"{seq_id}-1")
        return model_id

    async def restore(self, model_id: str, epoch: int, moved: int = 0) -> int:
        self.pointers.epoch = epoch
        return await self.residency.restore(model_id, epoch, moved, self._evict)

    async def park(self, model_id: str, epoch: int, moved: int = 0) -> None:
        self.pointers.epoch = epoch
        await self.residency.park(model_id, epoch, moved, self._evict)

    def _evict(self, model: Model, error: Exception) -> None:
        del self.models[model.model_id]


async def until(holds: Callable[[], bool]) -> None:
    async with asyncio.timeout(60):
        while not holds():  # noqa: ASYNC110
            await asyncio.sleep(0.01)

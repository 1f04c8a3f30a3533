"""Copies of models on their way to a storage, or to samplers, are no more than the host has room for."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncIterator, Callable, Iterator, Mapping
from contextlib import asynccontextmanager, contextmanager
from pathlib import Path
from typing import Any

import pytest

from services.common.contract import ids
from services.common.contract.errors import StorageAway
from services.common.storage.base import Key, Writer
from services.common.storage.data_dir import DataDir
from services.trainer.compute.data import LoraSpec, ModelState
from services.trainer.execution import control_ops
from services.trainer.execution.states import States
from services.trainer.files.base import Base
from services.trainer.files.checkpoints import CheckpointStore
from services.trainer.files.copy_room import CopyRoom
from services.trainer.files.volume import Volume
from services.trainer.publish.publisher import Published
from tests.unit.trainer.execution import executing
from tests.unit.trainer.execution.executing import resident, step
from tests.unit.trainer.execution.test_saves_away import export, save
from tests.unit.trainer.execution.test_storage_away import Loading, Outage
from tinsmith.internal.v1 import operation_pb2

pytestmark = pytest.mark.usefixtures("soon")

MODELS = [ids.model_id("s", number) for number in range(5)]
ROOM = 2
"""Models whose copies have room at once, of each way."""


class Slow(Outage):
    """A storage to which files go when a test says so."""

    def __init__(self, root: Path) -> None:
        super().__init__(root)
        self.goes = threading.Event()
        self.written = 0

    def publish(self, key: Key, files: Mapping[str, Writer]) -> int:
        self.written += 1
        assert self.goes.wait(60)
        return super().publish(key, files)


class Copied(Loading):
    """An engine that counts the models of which it makes copies."""

    lora = LoraSpec(8)

    def unload(self, also: Callable[[Any], object]) -> tuple[ModelState, object]:
        return self.state(), None

    @property
    def copies(self) -> int:
        return sum(what == "snapshot" for what, _ in self.commands)


class Samplers:
    """A publisher to nobody."""

    async def answers(self) -> None:
        pass

    @contextmanager
    def packing(self, nbytes: int) -> Iterator[Callable[..., None]]:
        yield lambda *_: None

    async def publish(self, *snapshot: object) -> Published:
        return Published(1, 1, 1)


class Trainer(executing.Trainer):
    engine: Copied

    def __init__(self, directory: Path) -> None:
        self.storage, self.copies = Slow(directory / "checkpoints"), CopyRoom(ROOM, lambda *_: 1)
        self._directory = directory
        super().__init__(Copied(), directory, *map(resident, MODELS))

    def parts(self) -> dict[str, Any]:
        base, staging = Base("org/base", "/models/base"), self._directory / "staging"
        return {
            "base": base,
            "checkpoints": CheckpointStore(self.storage, base, staging),
            "states": States(self.world, base, Volume(DataDir(self._directory)), staging),
            "publisher": Samplers(),
            "copies": self.copies,
        }

    async def all_begins(self, operations: list[operation_pb2.Operation]) -> list[asyncio.Future[Any]]:
        """The results of operations of which as many have begun as can."""
        before = self.engine.copies
        results = [await self.ask(operation) for operation in operations]
        async with asyncio.timeout(60):
            while self.engine.copies < before + ROOM or self.storage.written < before + ROOM:  # noqa: ASYNC110
                await asyncio.sleep(0.01)
        # Whoever begins besides has done so by then.
        await asyncio.sleep(0.2)
        return results


@asynccontextmanager
async def running(directory: Path) -> AsyncIterator[Trainer]:
    """With models that have made a step."""
    trainer = Trainer(directory)
    async with trainer.executes():
        try:
            await asyncio.gather(*[await trainer.ask(step(name, 1)) for name in MODELS])
            yield trainer
        finally:
            trainer.storage.goes.set()


def publish(model_id: str, seq_id: int) -> operation_pb2.Operation:
    made = operation_pb2.SaveForSampler(checkpoint_id="sampler_weights/v")
    return operation_pb2.Operation(model_id=model_id, seq_id=seq_id, save_for_sampler=made)


@pytest.mark.parametrize("operation", [save, export])
async def test_models_that_save_at_once_are_copied_as_there_is_room_and_all_are_saved(
    operation: Callable[[str, int], operation_pb2.Operation], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(control_ops, "weight_files", lambda *_: {"x": lambda path: path.write_text("one")})
    async with running(tmp_path) as trainer:
        results = await trainer.all_begins([operation(name, 2) for name in MODELS])
        assert trainer.engine.copies == ROOM
        assert trainer.copies.used() == {"samplers": 0, "storage": ROOM}
        trainer.storage.goes.set()
        assert not any(result.HasField("error") for result in await asyncio.gather(*results))
    assert trainer.engine.copies == len(MODELS)
    assert trainer.copies.used() == {"samplers": 0, "storage": 0}


async def test_what_goes_to_samplers_and_what_trains_waits_for_no_storage(tmp_path: Path) -> None:
    async with running(tmp_path) as trainer:
        results = await trainer.all_begins([save(name, 2) for name in MODELS[1:]])
        assert not (await (await trainer.ask(step(MODELS[0], 2)))).HasField("error")
        assert (await (await trainer.ask(publish(MODELS[0], 3)))).HasField("save_for_sampler")
        assert not any(result.done() for result in results)
        assert trainer.copies.used()["samplers"] == 0


async def test_nothing_is_copied_for_a_storage_that_went_away_while_there_was_no_room(tmp_path: Path) -> None:
    async with running(tmp_path) as trainer:
        results = await trainer.all_begins([save(name, 2) for name in MODELS[: ROOM + 1]])
        trainer.storage.away = True
        trainer.storage.goes.set()
        # Who has looked whether the storage answers first is the first to be copied.
        found = await asyncio.gather(*results, return_exceptions=True)
        assert any(isinstance(each, StorageAway) for each in found)
        assert trainer.engine.copies == ROOM
        trainer.storage.away = False

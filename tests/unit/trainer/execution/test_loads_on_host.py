"""Saved states that are loaded take no more of the host than there is for them, from before they are read."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncIterator, Collection, Iterator
from contextlib import asynccontextmanager, contextmanager
from pathlib import Path
from typing import Any

import pytest

from services.common.contract import ids
from services.common.contract.errors import InvalidRequest, Overloaded, StorageAway
from services.common.storage.base import Key
from services.common.storage.data_dir import DataDir
from services.trainer.compute.data import LoraSpec, ModelState
from services.trainer.execution.residency import AT_ONCE
from services.trainer.files import copy_room
from services.trainer.files.base import Base
from services.trainer.files.checkpoints import CheckpointStore
from services.trainer.files.copy_room import LoadRoom
from tests.unit.trainer.execution import executing, residing
from tests.unit.trainer.execution.executing import resident, step
from tests.unit.trainer.execution.residing import SEQ_ID, until
from tests.unit.trainer.execution.test_storage_away import SAVED, Loading, Outage, create_from_it, load

pytestmark = pytest.mark.usefixtures("soon")

MODELS = [ids.model_id("s", number) for number in range(6)]
ROOM = 2
"""States that have room at once, of each way."""


class Counted(Outage):
    """A storage that counts the states that are read from it."""

    read = 0

    @contextmanager
    def local(self, key: Key, only: Collection[str] | None = None) -> Iterator[Path | None]:
        self.read += only is None
        with super().local(key, only) as directory:
            yield directory


class Busy(Loading):
    """An engine that takes states when a test says so."""

    def __init__(self) -> None:
        super().__init__()
        self.goes_on = threading.Event()
        self.refuses = False

    def load_state(self, model_id: str, state: ModelState, optimizer: bool) -> None:
        assert self.goes_on.wait(60)
        if self.refuses:
            raise InvalidRequest("of another shape")
        super().load_state(model_id, state, optimizer)

    def drop_model(self, model_id: str) -> None:
        pass


class Trainer(executing.Trainer):
    engine: Busy

    def __init__(self, directory: Path, saved: ModelState) -> None:
        base = Base("org/base", "/models/base")
        self.storage, self.loads = Counted(directory / "checkpoints"), LoadRoom(ROOM, lambda _: 1)
        self.checkpoints = CheckpointStore(self.storage, base, directory / "staging")
        self.checkpoints.save(SAVED, 1, "weights/best", False, saved)
        self.room_in_engine = asyncio.Event()
        self.room_in_engine.set()
        super().__init__(Busy(), directory, *map(resident, MODELS))

    def parts(self) -> dict[str, Any]:
        return {"checkpoints": self.checkpoints, "loads": self.loads, "durable": self._durable}

    async def _durable(self, model_id: str) -> int | None:
        return None

    @asynccontextmanager
    async def room(self, model_id: str, lora: LoraSpec) -> AsyncIterator[int]:
        await self.room_in_engine.wait()
        yield 1

    async def all_begin(self, models: list[str]) -> list[asyncio.Future[Any]]:
        """The results of loads of which as many have begun as can."""
        results = [await self.ask(load(name, 1)) for name in models]
        await until(lambda: self.loads.of_checkpoints.used == self.storage.read == ROOM)
        # Whoever begins besides has done so by then.
        await asyncio.sleep(0.2)
        return results


@asynccontextmanager
async def running(directory: Path, saved: ModelState) -> AsyncIterator[Trainer]:
    trainer = Trainer(directory, saved)
    async with trainer.executes():
        try:
            yield trainer
        finally:
            trainer.engine.goes_on.set()
    assert trainer.loads.used() == {"checkpoint": 0, "snapshot": 0}, "room was lost, or given back twice"


async def test_models_that_load_at_once_are_read_for_as_there_is_room_and_all_are_loaded(
    tmp_path: Path, model_state: ModelState
) -> None:
    async with running(tmp_path, model_state) as trainer:
        results = [*await trainer.all_begin(MODELS[1:]), await trainer.ask(create_from_it())]
        await asyncio.sleep(0.1)
        assert trainer.storage.read == ROOM
        assert trainer.loads.used() == {"checkpoint": ROOM, "snapshot": 0}
        trainer.engine.goes_on.set()
        assert not any(result.HasField("error") for result in await asyncio.gather(*results))
        assert trainer.storage.read == len(MODELS)


async def test_who_waits_for_room_in_the_engine_keeps_none_on_the_host_from_those_that_have_it(
    tmp_path: Path, model_state: ModelState
) -> None:
    async with running(tmp_path, model_state) as trainer:
        trainer.loads.bytes_of = lambda _: ROOM
        trainer.engine.goes_on.set()
        trainer.room_in_engine.clear()
        created = await trainer.ask(create_from_it())
        # It has begun by then.
        await asyncio.sleep(0.1)
        results = [await trainer.ask(load(name, 1)) for name in MODELS[1:]]
        async with asyncio.timeout(10):
            assert not any(result.HasField("error") for result in await asyncio.gather(*results))
        assert not created.done() and trainer.storage.read == len(MODELS) - 1
        trainer.room_in_engine.set()
        assert not (await created).HasField("error")


async def test_a_state_that_is_larger_than_all_room_is_loaded_alone(
    tmp_path: Path, model_state: ModelState
) -> None:
    async with running(tmp_path, model_state) as trainer:
        trainer.loads.bytes_of = lambda _: 10 * ROOM
        results = [await trainer.ask(load(name, 1)) for name in MODELS]
        await until(lambda: trainer.storage.read == 1)
        await asyncio.sleep(0.2)
        assert trainer.storage.read == 1
        trainer.engine.goes_on.set()
        assert not any(result.HasField("error") for result in await asyncio.gather(*results))


async def test_states_that_the_engine_refuses_leave_their_room_to_others(
    tmp_path: Path, model_state: ModelState
) -> None:
    async with running(tmp_path, model_state) as trainer:
        results = await trainer.all_begin(MODELS)
        trainer.engine.refuses = True
        trainer.engine.goes_on.set()
        assert all("another shape" in result.error.message for result in await asyncio.gather(*results))
        trainer.engine.refuses = False
        assert (await (await trainer.ask(load(MODELS[0], 2)))).HasField("load_state")


async def test_nothing_is_read_of_a_storage_that_went_away_while_there_was_no_room(
    tmp_path: Path, model_state: ModelState
) -> None:
    async with running(tmp_path, model_state) as trainer:
        results = await trainer.all_begin(MODELS[: ROOM + 1])
        trainer.storage.away = True
        trainer.engine.goes_on.set()
        done, _ = await asyncio.wait(results, return_when=asyncio.FIRST_EXCEPTION)
        assert any(isinstance(each.exception(), StorageAway) for each in done)
        assert trainer.storage.read == ROOM
        trainer.storage.away = False


async def test_a_load_that_waits_in_vain_is_told_so_and_keeps_nothing_else_from_training(
    tmp_path: Path, model_state: ModelState, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with running(tmp_path, model_state) as trainer:
        results = await trainer.all_begin(MODELS[:ROOM])
        monkeypatch.setattr(copy_room, "WAIT_S", 0.01)
        told = (await (await trainer.ask(load(MODELS[-1], 1)))).error
        assert told.code == Overloaded("").code and told.message.startswith("the saved state takes")
        assert trainer.storage.read == ROOM
        trainer.engine.goes_on.set()
        await asyncio.gather(*results)
        assert not (await (await trainer.ask(step(MODELS[-1], 2)))).HasField("error")


async def test_models_come_back_as_there_is_room_for_their_states(
    tmp_path: Path, model_state: ModelState, monkeypatch: pytest.MonkeyPatch
) -> None:
    trainer, read = residing.Trainer(DataDir(tmp_path), model_state, loads=ROOM), []
    found = trainer.residency.durable.read

    async def counts(model_id: str) -> Any:
        read.append(model_id)
        return await found(model_id)

    monkeypatch.setattr(trainer.residency.durable, "read", counts)
    models = [trainer.stored(name) for name in MODELS]
    trainer.engine.gate.clear()
    restores = [asyncio.create_task(trainer.restore(name, 1)) for name in models]
    await until(lambda: trainer.engine.waiting == ROOM)
    await asyncio.sleep(0.1)
    assert len(read) == ROOM < AT_ONCE
    assert trainer.loads.used() == {"checkpoint": 0, "snapshot": ROOM}
    # One of those that wait, and one that was read, are given up.
    under_way = {name: task for name, (_, task) in trainer.residency._restoring.items()}
    given_up = [read[0], next(name for name in models if name not in read)]
    for name in given_up:
        under_way[name].cancel()
    trainer.engine.gate.set()
    came = await asyncio.gather(*restores, return_exceptions=True)
    assert came.count(SEQ_ID) == len(MODELS) - len(given_up)
    assert trainer.loads.used() == {"checkpoint": 0, "snapshot": 0}

"""What is loaded from a storage that is away waits for it, and nobody else does."""

from __future__ import annotations

import asyncio
import errno
import threading
from collections.abc import AsyncIterator, Collection, Iterator, Mapping
from contextlib import asynccontextmanager, contextmanager
from pathlib import Path
from typing import Any, cast

import pytest
from prometheus_client import REGISTRY

from services.common.contract import ids
from services.common.contract.errors import ModelNotResident, StorageAway
from services.common.storage.base import Key, Writer
from services.common.storage.data_dir import DataDir
from services.common.storage.directory import DirectoryStorage
from services.trainer.compute.data import LoraSpec, ModelState
from services.trainer.execution import held_up
from services.trainer.execution.resident_models import OperationResult
from services.trainer.execution.states import States
from services.trainer.files.base import Base
from services.trainer.files.checkpoints import CheckpointStore
from services.trainer.files.volume import Volume
from services.trainer.publish.broadcast import Broadcaster
from services.trainer.publish.publisher import Publisher
from tests.unit.trainer.execution import executing
from tests.unit.trainer.execution.executing import Recorded, ledger, resident, step
from tinsmith.internal.v1 import operation_pb2

pytestmark = pytest.mark.usefixtures("soon")

SAVED = ids.model_id("s", 9)
"""The model whose checkpoint is loaded."""
MINE = ids.model_id("s", 1)
"""One that saves."""


class Outage(DirectoryStorage):
    """A storage that can be away."""

    def __init__(self, root: Path) -> None:
        super().__init__(root)
        self.away = False
        self.asked = 0
        self.takes = True
        self.hangs: threading.Event | None = None

    def versions(self, model_id: str, checkpoint_id: str) -> list[int]:
        if self.hangs is not None:
            assert self.hangs.wait(60)
        if self.away:
            self.asked += 1
            raise OSError(errno.EIO, "the object store failed: Connection refused")
        return super().versions(model_id, checkpoint_id)

    def publish(self, key: Key, files: Mapping[str, Writer]) -> int:
        if not self.takes:
            raise OSError(errno.EIO, "the object store failed: Broken pipe")
        return super().publish(key, files)

    @contextmanager
    def local(self, key: Key, only: Collection[str] | None = None) -> Iterator[Path | None]:
        self.asked += 1
        with super().local(key, only) as directory:
            yield directory


class Loading(Recorded):
    """An engine that takes states as well."""

    def load_state(self, model_id: str, state: ModelState, optimizer: bool) -> None:
        self.commands.append(("load", (model_id,)))

    def create_model(self, model_id: str, *_: object, **__: object) -> None:
        self.commands.append(("create", (model_id,)))

    def drop_model(self, model_id: str) -> None:
        self.commands.append(("drop", (model_id,)))

    def gathers(self, model_id: str, *, optimizer: bool) -> bool:
        return False

    def snapshot(self, model_id: str, *, optimizer: bool) -> Loading:
        self.commands.append(("snapshot", (model_id,)))
        return self

    @property
    def role(self) -> str:
        return "policy"

    def state(self) -> ModelState:
        """Of a model that is saved: its step is the number of those that were taken."""
        steps = sum(models.count(MINE) for what, models in self.commands if what == "steps")
        return ModelState(LoraSpec(8), {}, {}, steps)


class Trainer(executing.Trainer):
    """One with the models "a", "b" and MINE, and a checkpoint whose storage is away."""

    def __init__(self, directory: Path, saved: ModelState) -> None:
        self._base, self._staging = Base("org/base", "/models/base"), directory / "staging"
        self.storage = Outage(directory / "checkpoints")
        self.checkpoints = CheckpointStore(self.storage, self._base, self._staging)
        self.checkpoints.save(SAVED, 1, "weights/best", False, saved)
        self.storage.away = True
        super().__init__(Loading(), directory, *map(resident, ("a", "b", MINE)))

    def parts(self) -> dict[str, Any]:
        return {
            "checkpoints": self.checkpoints,
            "publisher": Publisher(DataDir(self._staging.parent), self._base, cast(Broadcaster, None)),
            "base": self._base,
            "states": States(self.world, self._base, Volume(DataDir(self._staging.parent)), self._staging),
            "durable": self._durable,
        }

    async def _durable(self, model_id: str) -> int | None:
        return None

    @asynccontextmanager
    async def room(self, model_id: str, lora: LoraSpec) -> AsyncIterator[int]:
        yield 1

    async def puts_off(self, operation: operation_pb2.Operation, match: str | None = None) -> None:
        """Who asks for it is told that the storage is away."""
        with pytest.raises(StorageAway, match=match):
            await (await self.ask(operation))

    async def comes_to(self, operation: operation_pb2.Operation) -> OperationResult:
        """The result for a caller that asks again whenever it is told that the storage is away."""
        while True:
            try:
                return await (await self.ask(operation))
            except StorageAway:
                continue

    async def was_asked(self, times: int) -> None:
        while self.storage.asked < times:  # noqa: ASYNC110
            await asyncio.sleep(0.001)


@asynccontextmanager
async def running(directory: Path, saved: ModelState) -> AsyncIterator[Trainer]:
    trainer = Trainer(directory, saved)
    async with trainer.executes():
        yield trainer


def load(model_id: str, seq_id: int, checkpoint_id: str = "weights/best") -> operation_pb2.Operation:
    made = operation_pb2.LoadState(source_model_id=SAVED, checkpoint_id=checkpoint_id, version=1)
    return operation_pb2.Operation(model_id=model_id, seq_id=seq_id, load_state=made)


def create_from_it() -> operation_pb2.Operation:
    made = operation_pb2.CreateModel(base_model="org/base")
    made.from_state.CopyFrom(load("c", 0).load_state)
    return operation_pb2.Operation(model_id="c", seq_id=0, create_model=made)


async def test_a_load_waits_for_its_storage_and_whoever_asks_is_told_so(
    tmp_path: Path, model_state: ModelState
) -> None:
    async with running(tmp_path, model_state) as trainer:
        loading, then = await trainer.ask(load("a", 1)), await trainer.ask(step("a", 2))
        with pytest.raises(StorageAway, match=r"weights/best does not answer.*Connection refused"):
            await loading
        assert not (await (await trainer.ask(step("b", 1)))).HasField("error")
        await trainer.was_asked(4)
        assert not then.done()
        trainer.storage.away = False
        assert (await trainer.comes_to(load("a", 1))).HasField("load_state")
        assert not (await then).HasField("error")
    assert trainer.engine.commands == [("steps", ("b",)), ("load", ("a",)), ("steps", ("a",))]


async def test_however_often_a_load_is_tried_it_has_begun_once(
    tmp_path: Path, model_state: ModelState
) -> None:
    def begun() -> float:
        labels = {"kind": "load", "owner_class": "light"}
        return REGISTRY.get_sample_value("tinsmith_operation_wait_seconds_count", labels) or 0.0

    before = begun()
    async with running(tmp_path, model_state) as trainer:
        await trainer.puts_off(load("a", 1))
        await trainer.was_asked(4)
        trainer.storage.away = False
        assert (await trainer.comes_to(load("a", 1))).HasField("load_state")
    assert begun() - before == 1


async def test_a_creation_from_a_state_waits_for_it_too(tmp_path: Path, model_state: ModelState) -> None:
    async with running(tmp_path, model_state) as trainer:
        await trainer.puts_off(create_from_it())
        await trainer.was_asked(4)
        trainer.storage.away = False
        assert (await trainer.comes_to(create_from_it())).HasField("create_model")
        assert not (await (await trainer.ask(step("c", 1)))).HasField("error")


async def test_a_snapshot_for_samplers_waits_for_the_volume_before_anything_of_it_is_made(
    tmp_path: Path, model_state: ModelState
) -> None:
    async with running(tmp_path, model_state) as trainer:
        DataDir(tmp_path).volume_id.unlink()
        saving = operation_pb2.SaveForSampler(checkpoint_id="sampler_weights/a")
        publish = operation_pb2.Operation(model_id=MINE, seq_id=1, save_for_sampler=saving)
        await trainer.puts_off(publish, match="not the volume any more")
        assert trainer.engine.commands == []


async def test_what_waits_for_its_storage_is_not_blamed_when_the_trainer_dies(
    tmp_path: Path, model_state: ModelState
) -> None:
    async with running(tmp_path, model_state) as trainer:
        held_up.FIRST_PAUSE_S = held_up.LONGEST_PAUSE_S = 60.0
        await trainer.puts_off(load("a", 1))
        # As when it is killed now.
        successor = tmp_path / "successor"
        successor.write_bytes(trainer.ledger.read_bytes())
        assert not ledger(successor).is_suspect(("a", 1))


async def test_a_load_is_given_up_after_minutes_and_may_be_sent_again(
    tmp_path: Path, model_state: ModelState, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(held_up, "AWAY_S", 1.0)
    async with running(tmp_path, model_state) as trainer:
        told = (await trainer.comes_to(load("a", 1))).error
        assert told.code == "storage_away" and "again when the storage is back" in told.message
        assert trainer.storage.asked > 2
        trainer.storage.away = False
        assert (await (await trainer.ask(load("a", 2)))).HasField("load_state")


async def test_a_model_whose_state_stays_away_is_not_created_and_what_follows_says_why(
    tmp_path: Path, model_state: ModelState, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(held_up, "AWAY_S", 0.05)
    async with running(tmp_path, model_state) as trainer:
        assert (await trainer.comes_to(create_from_it())).error.code == "storage_away"
        told = (await (await trainer.ask(step("c", 1)))).error
        assert told.code == "storage_away" and told.message.startswith("the model was not created")


async def test_a_checkpoint_that_is_not_there_is_refused_at_once(
    tmp_path: Path, model_state: ModelState
) -> None:
    async with running(tmp_path, model_state) as trainer:
        trainer.storage.away = False
        told = (await (await trainer.ask(load("a", 1, "weights/other")))).error
        assert (told.code, trainer.storage.asked) == ("checkpoint_not_found", 1)


async def test_a_model_that_moves_meanwhile_is_let_go_at_once(
    tmp_path: Path, model_state: ModelState
) -> None:
    async with running(tmp_path, model_state) as trainer:
        held_up.FIRST_PAUSE_S = held_up.LONGEST_PAUSE_S = 60.0
        await trainer.puts_off(load("a", 1))
        again = await trainer.ask(load("a", 1))
        gone = trainer.models["a"]
        trainer.executor.evict(gone, ModelNotResident("another trainer went on with it"))
        with pytest.raises(ModelNotResident):
            await again
        assert not gone.held


async def test_the_log_says_once_that_it_waits_and_once_that_it_goes_on(
    tmp_path: Path, model_state: ModelState, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO")
    async with running(tmp_path, model_state) as trainer:
        await trainer.puts_off(load("a", 1))
        await trainer.was_asked(6)
        trainer.storage.away = False
        await trainer.comes_to(load("a", 1))
    said = [one for one in caplog.messages if one.startswith("a checkpoint is waited for")]
    assert len(said) == 2 and "Connection refused" in said[0] and "no more of a, after" in said[1]

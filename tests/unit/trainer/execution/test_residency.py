"""Models come back from their snapshots, a few at a time, and copies from before a move do not stay."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Callable
from contextlib import AbstractAsyncContextManager
from pathlib import Path
from typing import Any, cast

import msgspec
import pytest
from prometheus_client import REGISTRY

from services.common.contract import ids
from services.common.contract.errors import ModelBusy, Overloaded, StorageAway
from services.common.process.crashes import CrashLedger
from services.common.storage.data_dir import DataDir
from services.trainer.compute.data import LoraSpec, ModelState
from services.trainer.execution import room
from services.trainer.execution.residency import AT_ONCE, Residency, Restores
from services.trainer.execution.resident_models import Model, Operation, new_sequence
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


@pytest.fixture
def trainer(tmp_path: Path, model_state: ModelState) -> Trainer:
    return Trainer(DataDir(tmp_path), model_state)


async def until(holds: Callable[[], bool]) -> None:
    async with asyncio.timeout(60):
        while not holds():  # noqa: ASYNC110
            await asyncio.sleep(0.01)


async def test_of_a_thousand_models_that_are_asked_for_together_few_are_read_at_once(
    trainer: Trainer,
) -> None:
    models = [trainer.stored(ids.model_id("s", number)) for number in range(20)]
    trainer.engine.gate.clear()
    restores = [asyncio.create_task(trainer.restore(model_id, 1)) for model_id in models]
    await until(lambda: trainer.engine.waiting == AT_ONCE)
    await asyncio.sleep(0.1)
    assert trainer.engine.waiting == AT_ONCE
    trainer.engine.gate.set()
    assert await asyncio.gather(*restores) == [SEQ_ID] * 20
    assert trainer.models.keys() == set(models)


async def test_a_model_whose_snapshot_hangs_in_its_writer_says_so_and_is_here_once_it_is_written(
    trainer: Trainer, monkeypatch: pytest.MonkeyPatch
) -> None:
    trainer.stored(MODEL)
    hangs, store = asyncio.Event(), trainer.residency.durable

    async def take(model_id: str) -> DurableSnapshot | None:
        await hangs.wait()
        return None

    monkeypatch.setattr(store, "_take", take)
    monkeypatch.setattr(durable, "_SETTLED_S", 0.1)
    store.changed(MODEL)
    async with asyncio.timeout(60):
        with pytest.raises(ModelBusy, match=MODEL):
            await trainer.restore(MODEL, 1)
    assert MODEL not in trainer.models
    hangs.set()
    monkeypatch.setattr(durable, "_SETTLED_S", 60.0)
    assert await trainer.restore(MODEL, 1) == SEQ_ID


async def test_those_that_wait_for_room_keep_no_other_from_being_read(trainer: Trainer) -> None:
    bytes_of = {2: 2**20, 3: 1}
    large = [trainer.stored(ids.model_id("s", number)) for number in range(2 * AT_ONCE)]
    trainer.residency.adapters._room.most = 10
    trainer.residency.adapters._bytes_of = lambda spec: bytes_of[spec.rank]
    trainer.models["busy"] = Model("busy", created=True, adapter_bytes=5, held=True)
    waiting = [asyncio.create_task(trainer.restore(model_id, 1)) for model_id in large]
    await asyncio.sleep(0.1)
    lora = trainer._state.lora
    assert lora is not None
    trainer._state = msgspec.structs.replace(trainer._state, lora=msgspec.structs.replace(lora, rank=3))
    small = trainer.stored(ids.model_id("s", 100))
    async with asyncio.timeout(60):
        assert await trainer.restore(small, 1) == SEQ_ID
    assert not any(task.done() for task in waiting)
    for task in waiting:
        task.cancel()
    for task in (under_way := [task for _, task in trainer.residency._restoring.values()]):
        task.cancel()
    await asyncio.gather(*waiting, *under_way, return_exceptions=True)


async def test_who_knows_of_a_move_does_not_get_what_one_who_does_not_has_read(trainer: Trainer) -> None:
    trainer.stored(MODEL)
    trainer.engine.gate.clear()
    first = asyncio.create_task(trainer.restore(MODEL, epoch=1))
    await until(lambda: trainer.engine.waiting == 1)
    # Its gateway gave up. Another trainer had the model, and took it further.
    trainer.stored(MODEL, seq_id=9)
    second = asyncio.create_task(trainer.restore(MODEL, epoch=3, moved=3))
    await asyncio.sleep(0.05)
    trainer.engine.gate.set()
    assert await first == SEQ_ID
    assert await second == 9


async def test_exports_that_take_long_keep_no_other_models_snapshot_from_being_written(
    trainer: Trainer,
) -> None:
    names = [ids.model_id("s", number) for number in range(durable._CONCURRENT_WRITES + 1)]
    lora, result = trainer._state.lora, asyncio.get_running_loop().create_future
    for name in names:
        trainer.models[name] = Model(name, new_sequence(SEQ_ID), created=True, lora=lora)
        # What `_make_way` is asked of the last one: it has nothing that runs.
        if name != names[-1]:
            export = Operation(
                seq_id=2, units=None, model_id=name, work=cast(Any, None), size=1, result=result()
            )
            trainer.models[name].sequence.unfinished[2] = export
        trainer.residency.durable.changed(name)
    trainer.pointers.epoch = 0
    async with asyncio.timeout(60):
        assert await trainer.residency._make_way(trainer.models[names[-1]])
    for writer in (writers := list(trainer.residency.durable._writers.values())):
        writer.cancel()
    await asyncio.gather(*writers, return_exceptions=True)


@pytest.mark.parametrize("lora", [None, LoraSpec(1)], ids=["full", "adapter"])
async def test_who_waits_for_room_does_not_wait_longer_for_those_who_write_snapshots(
    trainer: Trainer, monkeypatch: pytest.MonkeyPatch, lora: LoraSpec | None
) -> None:
    def one_more() -> AbstractAsyncContextManager[object]:
        return trainer.residency.adapters.room("new", lora) if lora else trainer.residency.full.room("new")

    monkeypatch.setattr(room, "_WAIT_S", 0.3)
    idle = Model(MODEL, new_sequence(SEQ_ID), created=True, lora=lora, unsaved_steps=1)
    idle.adapter_bytes, idle.last_used = 2**30 if lora else 0, time.monotonic() - room.IDLE_S
    trainer.models[MODEL] = idle
    # What is written here never ends.
    for _ in range(durable._CONCURRENT_WRITES):
        await trainer.residency.durable._slots.acquire()
    for _ in range(2):
        async with asyncio.timeout(30):
            with pytest.raises(Overloaded, match="try again later"):
                async with one_more():
                    pass
    assert trainer.models == {MODEL: idle}, "it is not dropped before it is durable"
    monkeypatch.setattr(room, "_WAIT_S", 60.0)
    trainer.pointers.epoch = 0
    trainer.residency.durable._slots.release()
    async with asyncio.timeout(30), one_more():
        assert (trainer.models, trainer.pointers.marked) == ({}, [SEQ_ID])


async def test_a_copy_from_before_the_models_last_move_is_dropped_and_read_anew(trainer: Trainer) -> None:
    trainer.stored(MODEL)
    await trainer.restore(MODEL, epoch=4)
    copy = trainer.models[MODEL]
    assert await trainer.restore(MODEL, epoch=6, moved=3) == SEQ_ID
    assert trainer.models[MODEL] is copy, "it came after that move"
    assert await trainer.restore(MODEL, epoch=9, moved=8) == SEQ_ID
    assert trainer.models[MODEL] is not copy
    assert trainer.engine.done == ["CreateModel", "DropModel", "CreateModel"]


async def writing(trainer: Trainer, monkeypatch: pytest.MonkeyPatch) -> threading.Event:
    """A snapshot of the model is being written, and is written when this is set."""
    begun, may_end, write = threading.Event(), threading.Event(), durable._write_files

    def slowly(target: Path, snapshot: DurableSnapshot, volume: Volume) -> None:
        begun.set()
        assert may_end.wait(60)
        write(target, snapshot, volume)

    monkeypatch.setattr(durable, "_write_files", slowly)
    trainer.residency.durable.changed(MODEL)
    await until(begun.is_set)
    return may_end


async def test_a_snapshot_becomes_durable_that_is_written_while_a_gateway_takes_the_lease_anew(
    trainer: Trainer, monkeypatch: pytest.MonkeyPatch
) -> None:
    trainer.stored(MODEL)
    await trainer.restore(MODEL, epoch=4)
    may_write = await writing(trainer, monkeypatch)
    async with asyncio.timeout(30):
        assert await trainer.restore(MODEL, epoch=6) == SEQ_ID, "it is here, and waits for no disk"
    may_write.set()
    assert await trainer.residency.durable.settle(MODEL)
    assert trainer.pointers.marked == [SEQ_ID]


async def test_a_gateway_that_takes_over_a_model_does_not_wait_for_what_it_exports(trainer: Trainer) -> None:
    trainer.stored(MODEL)
    await trainer.restore(MODEL, epoch=4)
    written = asyncio.get_running_loop().create_future()
    export = Operation(seq_id=2, units=None, model_id=MODEL, work=cast(Any, None), size=1, result=written)
    trainer.models[MODEL].sequence.unfinished[2] = export
    # A step after it: its snapshot is due once the export has its result.
    trainer.residency.durable.changed(MODEL)
    async with asyncio.timeout(30):
        assert await trainer.restore(MODEL, epoch=6) == SEQ_ID
    assert trainer.pointers.marked == []
    del trainer.models[MODEL].sequence.unfinished[2]
    written.set_result(RESULT)
    assert await trainer.residency.durable.settle(MODEL)
    assert trainer.pointers.marked == [SEQ_ID]


async def test_what_a_copy_from_before_a_move_still_writes_does_not_become_durable(
    trainer: Trainer, monkeypatch: pytest.MonkeyPatch
) -> None:
    trainer.stored(MODEL)
    await trainer.restore(MODEL, epoch=4)
    may_write = await writing(trainer, monkeypatch)
    restoring = asyncio.create_task(trainer.restore(MODEL, epoch=6, moved=6))
    await asyncio.sleep(0.05)
    may_write.set()
    assert await restoring == SEQ_ID
    assert trainer.pointers.marked == []


async def test_a_copy_that_has_strayed_from_the_journal_is_dropped_and_read_anew(trainer: Trainer) -> None:
    trainer.stored(MODEL)
    await trainer.restore(MODEL, epoch=4)
    copy = trainer.models[MODEL]
    copy.sequence.strayed = True
    trainer.residency.durable.changed(MODEL)
    assert await trainer.restore(MODEL, epoch=4) == SEQ_ID
    assert trainer.models[MODEL] is not copy
    assert trainer.engine.done == ["CreateModel", "DropModel", "CreateModel"]
    assert trainer.pointers.marked == [], "what it went on to became durable"


async def test_nothing_of_a_model_that_trains_all_weights_is_written_below_a_volume_that_went_away(
    tmp_path: Path, model_state: ModelState
) -> None:
    data = DataDir(tmp_path / "mounted")
    world = cast(World, Engine(model_state))
    states = States(world, Base("org/base", "org/base"), Volume(data), data.staging / "trainer-0")
    data.root.rename(tmp_path / "away")
    with pytest.raises(StorageAway, match="mount that one there again"):
        await states.take(Model(MODEL, created=True))
    assert not data.root.exists()


async def test_a_model_whose_restore_nobody_waited_for_is_of_after_the_move(trainer: Trainer) -> None:
    trainer.stored(MODEL)
    trainer.engine.gate.clear()
    first = asyncio.create_task(trainer.restore(MODEL, epoch=9, moved=8))
    await until(lambda: trainer.engine.waiting == 1)
    first.cancel()
    trainer.engine.gate.set()
    await until(lambda: MODEL in trainer.models)
    await trainer.restore(MODEL, epoch=9, moved=8)
    assert trainer.engine.done == ["CreateModel"]


async def test_a_copy_from_before_a_move_is_parked_without_becoming_durable(trainer: Trainer) -> None:
    trainer.stored(MODEL)
    await trainer.restore(MODEL, epoch=4)
    trainer.models[MODEL].unsaved_steps = 1
    await trainer.park(MODEL, epoch=9, moved=8)
    assert trainer.models == {}
    assert trainer.pointers.marked == []


async def test_a_model_that_is_parked_where_it_is_becomes_durable_first(trainer: Trainer) -> None:
    trainer.stored(MODEL)
    await trainer.restore(MODEL, epoch=9, moved=8)
    trainer.models[MODEL].unsaved_steps = 1
    await trainer.park(MODEL, epoch=10, moved=8)
    assert trainer.models == {}
    assert trainer.pointers.marked == [SEQ_ID]


async def test_models_that_leave_the_memory_and_come_back_are_counted(trainer: Trainer) -> None:
    def counted() -> list[float]:
        names = ("tinsmith_models_evicted_total", "tinsmith_models_reloaded_total")
        return [REGISTRY.get_sample_value(name) or 0.0 for name in names]

    evicted, reloaded = counted()
    trainer.stored(MODEL)
    await trainer.restore(MODEL, epoch=9)
    await trainer.restore(MODEL, epoch=9)
    assert counted() == [evicted, reloaded + 1]
    await trainer.park(MODEL, epoch=10)
    assert counted() == [evicted + 1, reloaded + 1]
    await trainer.park(MODEL, epoch=10)
    assert counted() == [evicted + 1, reloaded + 1]


async def test_a_model_whose_snapshot_cannot_be_written_stays_and_another_one_makes_room(
    trainer: Trainer,
) -> None:
    names = [ids.model_id("s", number) for number in range(2)]
    for age, name in zip((60, 30), names, strict=True):
        trainer.models[name] = Model(
            name,
            new_sequence(SEQ_ID),
            created=True,
            lora=trainer._state.lora,
            adapter_bytes=5,
            unsaved_steps=1,
        )
        trainer.models[name].last_used = time.monotonic() - age
    blocker = trainer._data.state(names[0])
    blocker.parent.mkdir(parents=True)
    blocker.write_text("in the way")
    trainer.pointers.epoch = 0
    adapters = trainer.residency.adapters._room
    assert not await adapters.make_way(lambda: True), "what is not on disk may not leave the memory"
    assert trainer.models.keys() == set(names)
    assert await adapters.make_way(lambda: True)
    assert trainer.models.keys() == {names[0]}
    with pytest.raises(ModelBusy, match="has space and takes writes"):
        await trainer.park(names[0], 0)
    blocker.unlink()
    await trainer.park(names[0], 0)
    assert not trainer.models

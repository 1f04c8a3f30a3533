"""Models come back from their snapshots, a few at a time, and copies from before a move do not stay."""

from __future__ import annotations

import asyncio
import time
from contextlib import AbstractAsyncContextManager
from pathlib import Path
from typing import Any, cast

import msgspec
import pytest
from prometheus_client import REGISTRY

from services.common.contract import ids
from services.common.contract.errors import ModelBusy, Overloaded, StorageAway
from services.common.storage.data_dir import DataDir
from services.trainer.compute.data import LoraSpec, ModelState
from services.trainer.execution import room
from services.trainer.execution.residency import AT_ONCE
from services.trainer.execution.resident_models import Model, Operation, new_sequence
from services.trainer.execution.states import States
from services.trainer.files import durable
from services.trainer.files.base import Base
from services.trainer.files.durable import DurableSnapshot
from services.trainer.files.volume import Volume
from services.trainer.world.world import World
from tests.unit.trainer.execution.residing import MODEL, SEQ_ID, Engine, Trainer, until


@pytest.fixture
def trainer(tmp_path: Path, model_state: ModelState) -> Trainer:
    return Trainer(DataDir(tmp_path), model_state)


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

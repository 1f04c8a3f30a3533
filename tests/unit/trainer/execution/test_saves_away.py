"""What is saved to a storage that is away waits for it, and nobody else does."""

from __future__ import annotations

import asyncio
import threading
import time
from pathlib import Path

import pytest
from prometheus_client import REGISTRY

from services.common.contract.errors import StorageAway
from services.common.process.pools import Pool
from services.trainer.compute.data import ModelState
from services.trainer.execution import control_ops, held_up
from services.trainer.files import transfers
from tests.unit.trainer.execution.executing import step
from tests.unit.trainer.execution.test_storage_away import MINE, Trainer, load, running
from tinsmith.internal.v1 import operation_pb2

pytestmark = pytest.mark.usefixtures("soon")


def save(model_id: str, seq_id: int) -> operation_pb2.Operation:
    made = operation_pb2.SaveState(checkpoint_id="weights/mine")
    return operation_pb2.Operation(model_id=model_id, seq_id=seq_id, save_state=made)


def export(model_id: str, seq_id: int) -> operation_pb2.Operation:
    made = operation_pb2.SaveExternal(checkpoint_id=f"external_weights/mine-{seq_id}")
    return operation_pb2.Operation(model_id=model_id, seq_id=seq_id, save_external=made)


def writes_failed() -> float:
    return REGISTRY.get_sample_value("tinsmith_checkpoint_writes_failed_total") or 0.0


async def stepped(trainer: Trainer) -> None:
    assert not (await (await trainer.ask(step(MINE, 1)))).HasField("error")


async def test_a_save_waits_for_its_storage_and_has_its_place_in_the_order(
    tmp_path: Path, model_state: ModelState
) -> None:
    before = writes_failed()
    async with running(tmp_path, model_state) as trainer:
        operations = [step(MINE, 1), save(MINE, 2), step(MINE, 3)]
        first, saving, then = [await trainer.ask(operation) for operation in operations]
        assert not (await first).HasField("error")
        with pytest.raises(StorageAway, match=r"weights/mine does not answer.*Connection refused"):
            await saving
        assert not (await (await trainer.ask(step("b", 1)))).HasField("error")
        await trainer.was_asked(4)
        assert not then.done()
        assert ("snapshot", (MINE,)) not in trainer.engine.commands, "nothing is copied in vain"
        trainer.storage.away = False
        assert (await trainer.comes_to(save(MINE, 2))).save_state.size_bytes > 0
        assert not (await then).HasField("error")
        assert trainer.checkpoints.load(MINE, "weights/mine").state.step == 1
    assert trainer.engine.commands == [
        ("steps", (MINE,)),
        ("steps", ("b",)),
        ("snapshot", (MINE,)),
        ("steps", (MINE,)),
    ]
    assert writes_failed() - before >= 4


async def test_a_save_whose_storage_goes_away_in_the_middle_waits_too(
    tmp_path: Path, model_state: ModelState
) -> None:
    async with running(tmp_path, model_state) as trainer:
        await stepped(trainer)
        trainer.storage.away, trainer.storage.takes = False, False
        await trainer.puts_off(save(MINE, 2), r"weights/mine cannot be saved at present.*Broken pipe")
        trainer.storage.takes = True
        assert (await trainer.comes_to(save(MINE, 2))).HasField("save_state")


async def test_a_save_is_given_up_after_minutes_and_may_be_sent_again(
    tmp_path: Path, model_state: ModelState, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(held_up, "AWAY_S", 1.0)
    async with running(tmp_path, model_state) as trainer:
        await stepped(trainer)
        told = (await trainer.comes_to(save(MINE, 2))).error
        assert told.code == "storage_away" and "again when the storage is back" in told.message
        trainer.storage.away = False
        assert (await (await trainer.ask(save(MINE, 3)))).HasField("save_state")


async def test_a_model_whose_saves_fail_one_like_the_other_is_one_line(
    tmp_path: Path, model_state: ModelState, caplog: pytest.LogCaptureFixture
) -> None:
    async with running(tmp_path, model_state) as trainer:
        trainer.storage.away = False
        await stepped(trainer)
        for seq_id in range(2, 12):
            told = await (await trainer.ask(save(MINE, seq_id)))
            assert told.HasField("error") == (seq_id > 2), "the name is taken since the first"
    said = [message for message in caplog.messages if "failed" in message]
    assert len(said) == 1 and said[0].startswith(f"operations of a model failed: {MINE}: checkpoint ")


async def test_an_export_waits_for_its_storage_before_it_lets_others_pass_and_fails_after_that(
    tmp_path: Path, model_state: ModelState, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(control_ops, "weight_files", lambda *_: {"x": lambda path: path.write_text("one")})
    async with running(tmp_path, model_state) as trainer:
        await stepped(trainer)
        await trainer.puts_off(export(MINE, 2), r"external_weights/mine-2 does not answer")
        trainer.storage.away = False
        assert (await trainer.comes_to(export(MINE, 2))).HasField("save_external")
        trainer.storage.takes = False
        told = (await (await trainer.ask(export(MINE, 3)))).error
        assert told.code == "storage_away" and "Broken pipe; send the request again when" in told.message
        assert not (await (await trainer.ask(step(MINE, 4)))).HasField("error")


async def test_an_export_that_the_host_has_no_memory_for_fails_alone(
    tmp_path: Path, model_state: ModelState, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(control_ops, "weight_files", lambda *_: {"x": lambda path: bytearray(2**62)})
    async with running(tmp_path, model_state) as trainer:
        trainer.storage.away = False
        await stepped(trainer)
        assert (await (await trainer.ask(export(MINE, 2)))).error.code == "out_of_memory"
        assert not (await (await trainer.ask(step("b", 1)))).HasField("error")


async def test_a_model_is_unloaded_when_what_it_exports_is_written(
    tmp_path: Path, model_state: ModelState, monkeypatch: pytest.MonkeyPatch
) -> None:
    may_write = threading.Event()

    def write(path: Path) -> None:
        assert may_write.wait(60)
        path.write_text("one")

    monkeypatch.setattr(control_ops, "weight_files", lambda *_: {"x": write})
    unload = operation_pb2.Operation(model_id=MINE, seq_id=3, unload_model=operation_pb2.UnloadModel())
    async with running(tmp_path, model_state) as trainer:
        trainer.storage.away = False
        await stepped(trainer)
        exporting, unloading = await trainer.ask(export(MINE, 2)), await trainer.ask(unload)
        while ("snapshot", (MINE,)) not in trainer.engine.commands:  # noqa: ASYNC110
            await asyncio.sleep(0.001)
        assert not (await (await trainer.ask(step("b", 1)))).HasField("error")
        assert not unloading.done()
        may_write.set()
        assert (await exporting).HasField("save_external")
        assert (await unloading).HasField("unload_model")


async def test_a_storage_that_hangs_is_away_and_takes_no_thread_from_other_work(
    tmp_path: Path, model_state: ModelState, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(transfers, "LOOKS", Pool("answer of the checkpoints' storage", 2, 0.05))
    async with running(tmp_path, model_state) as trainer:
        await stepped(trainer)
        trainer.storage.away, trainer.storage.hangs = False, threading.Event()
        try:
            for operation in (save(MINE, 2), load("a", 1)):
                await trainer.puts_off(operation, r"hangs: no answer of the checkpoints' storage within")
            # More than hang, of those that everything else shares.
            together = [asyncio.to_thread(time.sleep, 0.0) for _ in range(64)]
            await asyncio.gather(*together)
        finally:
            trainer.storage.hangs.set()
        assert (await trainer.comes_to(save(MINE, 2))).HasField("save_state")
        assert (await trainer.comes_to(load("a", 1))).HasField("load_state")

"""What was under way when the trainer died runs alone, and others wait for that no longer than a moment."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest

from services.trainer.compute.data import ModelState
from services.trainer.execution import executor
from tests.unit.trainer.execution.executing import batch, ledger, step
from tests.unit.trainer.execution.test_saves_away import save
from tests.unit.trainer.execution.test_storage_away import MINE, Trainer
from tinsmith.internal.v1 import operation_pb2


@asynccontextmanager
async def died_of(
    model_id: str, seq_id: int, directory: Path, state: ModelState
) -> AsyncIterator[tuple[Trainer, threading.Event]]:
    """A trainer whose predecessor died of an operation; its storage hangs until it is let go on."""
    ledger(directory / "executing").begin([(model_id, seq_id)])
    trainer = Trainer(directory, state)
    trainer.storage.away, trainer.storage.hangs = False, threading.Event()
    async with trainer.executes():
        try:
            yield trainer, trainer.storage.hangs
        finally:
            trainer.storage.hangs.set()


async def comes(trainer: Trainer, operation: operation_pb2.Operation, seconds: float) -> None:
    result = await trainer.ask(operation)
    assert not (await asyncio.wait_for(asyncio.shield(result), seconds)).HasField("error")


async def test_others_wait_a_moment_only_for_a_save_that_was_under_way_and_whose_storage_hangs(
    tmp_path: Path, model_state: ModelState, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(executor, "ALONE_S", 1.0)
    async with died_of(MINE, 2, tmp_path, model_state) as (trainer, may_go_on):
        await comes(trainer, step(MINE, 1), 10.0)
        saving, waiting = await trainer.ask(save(MINE, 2)), await trainer.ask(step("a", 1))
        await asyncio.sleep(0.2)
        assert not waiting.done(), "what it was under way with when the trainer died may be what it died of"
        assert not (await asyncio.wait_for(waiting, 10.0)).HasField("error")
        assert not saving.done()
        # The trainer dies of it, or of another operation beside it.
        written = (tmp_path / "executing").read_text()
        (tmp_path / "then").write_text(written + '{"begun": [["a", 2]]}\n')
        successor = ledger(tmp_path / "then")
        assert successor.deaths(("a", 2)) == 1
        assert successor.deaths((MINE, 2)) == 2, "what goes on for long may kill a trainer late"
        may_go_on.set()
        assert (await saving).HasField("save_state")


async def test_what_waits_to_run_alone_and_all_others_wait_a_moment_only_for_a_save_that_hangs(
    tmp_path: Path, model_state: ModelState, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(executor, "ALONE_S", 0.2)
    async with died_of("a", 1, tmp_path, model_state) as (trainer, may_go_on):
        await comes(trainer, step(MINE, 1), 10.0)
        saving = await trainer.ask(save(MINE, 2))
        await comes(trainer, step("b", 1), 10.0)
        suspect = await trainer.ask(batch("a", 1))
        await comes(trainer, step("b", 2), 10.0)
        assert not (await suspect).HasField("error") and not saving.done()
        may_go_on.set()
        assert (await saving).HasField("save_state")
    order = [("steps", (MINE,)), ("steps", ("b",)), ("pass", ("a",)), ("steps", ("b",))]
    assert trainer.engine.commands[:4] == order

"""What asks for a model that is on the host waits until it is back, and nobody else does."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path

import pytest

from services.common.contract.errors import Internal, NotFound, Overloaded, TinsmithError
from services.trainer.execution.resident_models import Model, OperationResult
from tests.unit.trainer.execution import executing
from tests.unit.trainer.execution.executing import Recorded, batch, resident, step
from tinsmith.internal.v1 import operation_pb2


class Dropping(Recorded):
    def drop_model(self, model_id: str) -> None:
        self.commands.append(("drop", (model_id,)))


class Trainer(executing.Trainer):
    """Two models, of which one is on the host; it comes back as the test says."""

    def __init__(self, directory: Path) -> None:
        super().__init__(Dropping(), directory, resident("away", host_bytes=1), resident("here"))
        self.may_come = asyncio.Event()
        self.may_come.set()
        self.refusals: list[TinsmithError] = []
        self.asked = 0

    async def bring_back(self, model: Model, wanted: Callable[[], bool]) -> None:
        assert model.model_id == "away" and model.held
        self.asked += 1
        while wanted() and not self.may_come.is_set():  # noqa: ASYNC110
            await asyncio.sleep(0)
        if not wanted():
            return
        if self.refusals:
            raise self.refusals.pop(0)
        model.host_bytes = 0

    async def held_up(self) -> asyncio.Future[OperationResult]:
        """Something waits for the one on the host, which was asked for and does not come yet."""
        self.may_come.clear()
        waiting = await self.ask(batch("away", 1))
        while not self.asked:  # noqa: ASYNC110
            await asyncio.sleep(0)
        return waiting


@asynccontextmanager
async def running(directory: Path) -> AsyncIterator[Trainer]:
    trainer = Trainer(directory)
    async with trainer.executes():
        yield trainer


async def test_others_go_on_while_one_comes_back_and_then_it_runs_in_order(tmp_path: Path) -> None:
    async with running(tmp_path) as trainer:
        trainer.may_come.clear()
        first, then = await trainer.ask(batch("away", 1)), await trainer.ask(step("away", 2))
        assert not (await (await trainer.ask(batch("here", 1)))).HasField("error")
        assert not (await (await trainer.ask(step("here", 2)))).HasField("error")
        assert not first.done() and trainer.asked == 1
        trainer.may_come.set()
        assert not (await first).HasField("error") and not (await then).HasField("error")
        assert trainer.asked == 1 and not trainer.models["away"].held
        told = trainer.engine.commands
    assert told == [("pass", ("here",)), ("steps", ("here",)), ("pass", ("away",)), ("steps", ("away",))]


async def test_without_memory_its_next_operation_fails_and_the_one_after_tries_again(tmp_path: Path) -> None:
    async with running(tmp_path) as trainer:
        trainer.refusals = [Internal("out of device memory", "out_of_memory")]
        first, then = await trainer.ask(batch("away", 1)), await trainer.ask(batch("away", 2))
        assert (await first).error.code == "out_of_memory"
        assert not (await then).HasField("error")
        assert trainer.asked == 2
        told = trainer.engine.commands
    assert told == [("pass", ("away",))]


async def test_while_all_others_are_in_use_it_goes_on_waiting(tmp_path: Path) -> None:
    async with running(tmp_path) as trainer:
        trainer.refusals = [Overloaded("all are in use") for _ in range(3)]
        assert not (await (await trainer.ask(batch("away", 1)))).HasField("error")
        assert trainer.asked == 4


async def test_a_model_on_the_host_is_unloaded_from_there(tmp_path: Path) -> None:
    async with running(tmp_path) as trainer:
        unload = operation_pb2.Operation(model_id="away", seq_id=1, unload_model={})
        assert (await (await trainer.ask(unload))).HasField("unload_model")
        assert trainer.asked == 0 and "away" not in trainer.models
        told = trainer.engine.commands
    assert told == [("drop", ("away",))]


async def test_what_waits_for_a_model_that_went_meanwhile_is_told_so_once(tmp_path: Path) -> None:
    async with running(tmp_path) as trainer:
        trainer.refusals = [NotFound("it is gone")]
        waiting = await trainer.held_up()
        trainer.executor.evict(trainer.models["away"], NotFound("another trainer has it"))
        trainer.may_come.set()
        with pytest.raises(NotFound, match="another trainer"):
            await waiting


async def test_nothing_comes_back_to_a_trainer_that_stops(tmp_path: Path) -> None:
    async with running(tmp_path) as trainer:
        waiting = await trainer.held_up()
    assert trainer.models["away"].host_bytes and not trainer.models["away"].held
    assert not waiting.done(), "it runs after the restart"


async def test_a_model_that_is_gone_is_not_held_by_what_waited_for_it(tmp_path: Path) -> None:
    async with running(tmp_path) as trainer:
        waiting = await trainer.held_up()
        gone = trainer.models["away"]
        trainer.executor.evict(gone, NotFound("another trainer has it"))
        while gone.held:  # noqa: ASYNC110
            await asyncio.sleep(0)
        with pytest.raises(NotFound, match="another trainer"):
            await waiting

"""What may be read from a trainer world, and until when."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Iterator
from datetime import timedelta
from typing import cast

import pytest

from services.trainer.compute.data import AdamSpec, ModelState
from services.trainer.compute.engine import Engine
from services.trainer.world.commands import DropModel, OptimStep
from services.trainer.world.threads import WorkerThread
from services.trainer.world.world import Channel, World, WorldFailure

STEP = OptimStep("m", 7, AdamSpec())


class Rank0:
    """An engine whose weights are the number of its steps."""

    steps = 0

    def optim_step(self, model_id: str, adam: AdamSpec) -> dict[str, float]:
        self.steps += 1
        return {}

    def drop_model(self, model_id: str) -> None:
        pass

    def gathers_state(self, model_id: str) -> bool:
        return False

    def state(self, model_id: str, *, optimizer: bool) -> ModelState:
        return ModelState(lora=None, adapter={}, optimizer={}, step=self.steps)


class MortalPeer(Channel):
    """The other rank: it follows until it dies, and rank 0 hears of that when both should agree."""

    def __init__(self) -> None:
        super().__init__(0, 1, timedelta(seconds=1))
        self.dead = False

    def agree(self, error: Exception | None) -> None:
        if self.dead:
            raise RuntimeError("Connection closed by peer")
        super().agree(error)


class Broken(Rank0):
    """An engine that gives out in the middle of a step."""

    def optim_step(self, model_id: str, adam: AdamSpec) -> dict[str, float]:
        super().optim_step(model_id, adam)
        raise MemoryError


@pytest.fixture
def thread() -> Iterator[WorkerThread]:
    thread = WorkerThread("engine")
    yield thread
    thread.close()


async def test_a_state_is_told_with_the_step_that_made_it(thread: WorkerThread) -> None:
    world = World(thread, cast(Engine, Rank0()), MortalPeer(), 5)
    await world.call(STEP)
    seq_id, state = await world.state("m")
    assert (seq_id, state.step) == (7, 1)


async def test_what_half_a_world_did_is_never_read(thread: WorkerThread) -> None:
    peer = MortalPeer()
    world = World(thread, cast(Engine, Rank0()), peer, 5)
    await world.call(STEP)
    peer.dead = True
    # Rank 0 has taken the second step when it hears that the other rank is gone. A snapshot that was asked
    # for before that, and waits for its turn, would be of two steps under the name of the first.
    step, snapshot = (
        asyncio.create_task(asked) for asked in (world.call(OptimStep("m", 9, AdamSpec())), world.state("m"))
    )
    for asked in (step, snapshot):
        with pytest.raises(WorldFailure, match="closed by peer"):
            await asked
    with pytest.raises(WorldFailure):
        await world.watch()


async def test_a_step_that_broke_off_ends_the_world(thread: WorkerThread) -> None:
    world = World(thread, cast(Engine, Broken()), MortalPeer(), 5)
    for asked in (world.call(STEP), world.state("m")):
        with pytest.raises(WorldFailure, match="half changed"):
            await asked


class Slow(Rank0):
    """An engine whose steps take a while."""

    def optim_step(self, model_id: str, adam: AdamSpec) -> dict[str, float]:
        time.sleep(0.1)
        return super().optim_step(model_id, adam)


async def test_the_deadline_of_a_command_does_not_count_its_wait_for_those_before_it(
    thread: WorkerThread,
) -> None:
    world = World(thread, cast(Engine, Slow()), MortalPeer(), 0.5)
    steps = [world.call(OptimStep("m", number, AdamSpec())) for number in range(10)]
    await asyncio.gather(*steps)
    assert (await world.state("m"))[1].step == 10


async def test_a_command_that_takes_too_long_fails_itself_and_those_that_wait_for_it(
    thread: WorkerThread,
) -> None:
    world = World(thread, cast(Engine, Slow()), MortalPeer(), 0.02)
    stuck, waiting = (asyncio.create_task(asked) for asked in (world.call(STEP), world.state("m")))
    with pytest.raises(WorldFailure, match="OptimStep did not finish"):
        await stuck
    with pytest.raises(WorldFailure, match="OptimStep"):
        await waiting


async def test_a_dropped_model_is_forgotten(thread: WorkerThread) -> None:
    world = World(thread, cast(Engine, Rank0()), MortalPeer(), 5)
    for number in range(100):
        await world.call(OptimStep(f"m{number}", 1, AdamSpec()))
        await world.call(DropModel(f"m{number}"))
    assert not world._changed_by

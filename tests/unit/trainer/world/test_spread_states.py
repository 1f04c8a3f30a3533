"""States that are spread over the ranks are read by all of them together, and no rank is left waiting."""

from __future__ import annotations

import asyncio
import gc
from datetime import timedelta
from typing import cast

import pytest

from services.common.contract.errors import Internal, ModelNotResident
from services.common.process.threads import WorkerThread
from services.trainer.compute.data import AdamSpec, LoraSpec, ModelState, Pass, ShardedState
from services.trainer.compute.engine import Engine
from services.trainer.compute.lora.snapshot import NoSnapshot
from services.trainer.compute.memory.failures import NoMemory
from services.trainer.world.channel import Channel, WorldFailure, execute
from services.trainer.world.commands import (
    Command,
    CreateModel,
    DropModel,
    LoadState,
    ModelStep,
    OptimSteps,
    ReadState,
    RunPass,
    leaves_others_waiting,
)
from services.trainer.world.world import World


class Spread:
    """Rank 0 of an engine whose moments are spread over the ranks."""

    broken = False

    def optim_steps(self, due: list[tuple[str, AdamSpec]]) -> list[dict[str, float]]:
        return [{} for _ in due]

    def gathers(self, model_id: str, *, optimizer: bool) -> bool:
        return optimizer

    def snapshot(self, model_id: str, *, optimizer: bool) -> NoSnapshot:
        if self.broken:
            raise MemoryError
        return NoSnapshot(ModelState(lora=None, adapter={}, optimizer={}, step=int(optimizer)))


class Told(Channel):
    """A channel that keeps what the other ranks are told, and whether they were asked what came of it."""

    def __init__(self) -> None:
        super().__init__(1, timedelta(seconds=1))
        self.told: list[Command] = []
        self.agreed = 0

    def send(self, command: Command) -> None:
        self.told.append(command)

    def agree(self, error: Exception | None, refused: str = "") -> None:
        self.agreed += 1
        super().agree(error, refused)


async def test_what_all_ranks_have_a_part_of_is_a_command_to_them_and_the_rest_is_not(
    thread: WorkerThread,
) -> None:
    channel = Told()
    world = World(thread, cast(Engine, Spread()), channel, 5)
    await world.step(ModelStep("m", 7, AdamSpec()))
    channel.told.clear()
    async with world.snapshot("m", optimizer=False) as (_, snapshot):
        assert snapshot.state().step == 0
    assert channel.told == []
    seq_id, state = await world.state("m")
    assert channel.told == [ReadState("m", optimizer=True)]
    assert (seq_id, state.step) == (7, 1)


async def test_a_rank_that_cannot_gather_ends_and_asks_nobody_first(thread: WorkerThread) -> None:
    engine, channel = Spread(), Told()
    world = World(thread, cast(Engine, engine), channel, 5)
    await world.step(ModelStep("m", 7, AdamSpec()))
    engine.broken, before = True, channel.agreed
    with pytest.raises(WorldFailure, match="ReadState broke off"):
        await world.state("m")
    assert channel.agreed == before, "the others are in a collective"


async def test_a_world_that_failed_and_is_forgotten_leaves_no_complaint(thread: WorkerThread) -> None:
    """Else the interpreter tells of it whenever it collects garbage, also in the middle of something else."""
    complaints: list[dict[str, object]] = []
    asyncio.get_running_loop().set_exception_handler(lambda _, about: complaints.append(about))
    engine = Spread()
    engine.broken = True
    with pytest.raises(WorldFailure):
        await World(thread, cast(Engine, engine), Told(), 5).state("m")
    await asyncio.sleep(0)
    gc.collect()
    assert complaints == []


@pytest.mark.parametrize(
    "command",
    [
        RunPass(Pass([], [])),
        OptimSteps([]),
        LoadState("m", 1, ModelState(None, {}, {}, 0), optimizer=True),
        ReadState("m", optimizer=True),
        CreateModel("m", 1, None, ShardedState("files", 1), optimizer=True),
    ],
)
def test_commands_with_collectives_leave_others_waiting_unless_all_refuse_them(command: Command) -> None:
    assert leaves_others_waiting(command, MemoryError(), 2)
    assert leaves_others_waiting(command, ModelNotResident("m"), 2) == isinstance(command, RunPass)
    assert not leaves_others_waiting(DropModel("m"), MemoryError(), 2)


def test_a_rank_that_lacks_memory_in_the_middle_of_making_a_full_model_ends_and_asks_nobody_first() -> None:
    class Lacks:
        def create_model(self, model_id: str, lora: LoraSpec | None, *, drawn: bool) -> None:
            raise MemoryError

    channel = Told()
    channel.ranks = 2
    with pytest.raises(WorldFailure, match="CreateModel broke off"):
        execute(cast(Engine, Lacks()), channel, CreateModel("m", 1, None))
    assert channel.agreed == 0, "the others are in a collective"
    channel.ranks = 1
    for lora in (None, LoraSpec(4)):
        with pytest.raises(Internal):
            execute(cast(Engine, Lacks()), channel, CreateModel("m", 1, lora))


def test_a_model_that_lacks_memory_while_it_is_made_leaves_others_waiting_if_it_trains_all_weights() -> None:
    full, adapter = CreateModel("m", 1, None), CreateModel("m", 1, LoraSpec(4))
    assert leaves_others_waiting(full, MemoryError(), 2)
    assert not leaves_others_waiting(full, MemoryError(), 1), "there are none"
    assert not leaves_others_waiting(full, NoMemory("out of memory on a new model"), 2), "all know of it"
    assert not leaves_others_waiting(full, ValueError("no such architecture"), 2), "all run into it"
    assert not leaves_others_waiting(adapter, MemoryError(), 2)

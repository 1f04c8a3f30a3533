"""States that a world gives, reads and writes while it trains."""

from __future__ import annotations

import asyncio
import errno
import threading
from concurrent.futures import Future
from datetime import timedelta
from pathlib import Path
from typing import cast

import pytest
import torch

from services.common.contract.errors import Internal
from services.common.process.threads import WorkerThread
from services.trainer.compute.data import AdamSpec, LoraSpec, ModelState, ShardedState
from services.trainer.compute.engine import Engine
from services.trainer.compute.full.shards import Writing
from services.trainer.compute.full.snapshot import FullSnapshot
from services.trainer.compute.memory.transfer import Copies
from services.trainer.world import world as world_module
from services.trainer.world.channel import Channel, WorldFailure
from services.trainer.world.commands import CreateModel, LoadState, ModelStep
from services.trainer.world.world import SNAPSHOTS, World
from tests.unit.trainer.world.engines import STEP, MortalPeer, Rank0, Sizes


async def test_a_state_is_told_with_the_step_that_made_it(thread: WorkerThread) -> None:
    world = World(thread, cast(Engine, Rank0()), MortalPeer(), 5)
    await world.step(STEP)
    seq_id, state = await world.state("m")
    assert (seq_id, state.step) == (7, 1)


class Kept(FullSnapshot):
    """A snapshot that comes to the host when the test says so."""

    def __init__(self, steps: int) -> None:
        super().__init__([], Copies([], torch.device("cpu")), steps)
        self.may_go = threading.Event()

    def state(self) -> ModelState:
        assert self.may_go.wait(30)
        return super().state()


class Keeps(Rank0):
    """An engine whose snapshots take their time to come to the host."""

    def __init__(self) -> None:
        super().__init__()
        self.kept: list[Kept] = []

    def snapshot(self, model_id: str, *, optimizer: bool) -> FullSnapshot:
        self.kept.append(Kept(self.steps))
        return self.kept[-1]


async def test_steps_go_on_while_a_state_comes_to_the_host_and_only_so_many_are_on_the_device(
    thread: WorkerThread,
) -> None:
    engine = Keeps()
    world = World(thread, cast(Engine, engine), MortalPeer(), 30)
    await world.step(STEP)
    states = [asyncio.create_task(world.state("m")) for _ in range(SNAPSHOTS + 1)]
    async with asyncio.timeout(20):
        while len(engine.kept) < SNAPSHOTS:  # noqa: ASYNC110
            await asyncio.sleep(0.001)
        await world.step(ModelStep("m", 9, AdamSpec()))
    assert len(engine.kept) == SNAPSHOTS
    for kept in engine.kept:
        kept.may_go.set()
    taken = ModelState(lora=None, adapter={}, optimizer={}, step=1)
    assert [await state for state in states[:-1]] == [(7, taken)] * SNAPSHOTS
    async with asyncio.timeout(20):
        while len(engine.kept) == SNAPSHOTS:  # noqa: ASYNC110
            await asyncio.sleep(0.001)
    engine.kept[-1].may_go.set()
    seq_id, state = await states[-1]
    assert (seq_id, state.step) == (9, 2)


async def test_a_snapshot_without_memory_fails_alone(
    thread: WorkerThread, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = Rank0()
    world = World(thread, cast(Engine, engine), Channel(1, timedelta(seconds=5)), 60)

    def full(*_: object, **__: object) -> FullSnapshot:
        raise RuntimeError("can't allocate memory: a copy takes 5 bytes of the host that has 1")

    await world.step(STEP)
    with pytest.raises(Internal, match="can't allocate memory"):
        await world.beside(full)
    with monkeypatch.context() as patched, pytest.raises(Internal, match="can't allocate memory"):
        patched.setattr(engine, "snapshot", full)
        async with world.snapshot("m"):
            pass
    with pytest.raises(Internal, match="no memory for a copy of the model"):
        await world.beside(lambda: bytearray(2**62))
    async with world.snapshot("m") as (seq_id, _):
        assert seq_id == 7


async def test_a_snapshot_that_does_not_come_to_the_host_ends_the_world(thread: WorkerThread) -> None:
    engine = Keeps()
    world = World(thread, cast(Engine, engine), MortalPeer(), 0.1)
    await world.step(STEP)
    with pytest.raises(WorldFailure, match="a snapshot did not finish"):
        await world.state("m")
    with pytest.raises(WorldFailure):
        await world.watch()
    engine.kept[0].may_go.set()


class Reads(Rank0):
    """An engine that reads a state until the test says that it has."""

    def __init__(self) -> None:
        super().__init__()
        self.has_read = threading.Event()

    def load_state(self, model_id: str, state: ShardedState, optimizer: bool) -> None:
        self.has_read.wait(20)


async def test_a_state_is_read_for_as_long_as_its_size_says(
    thread: WorkerThread, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "1.safetensors").write_bytes(bytes(1000))
    monkeypatch.setattr(world_module, "SLOWEST_READ", 50)
    engine = Reads()
    world = World(thread, cast(Engine, engine), MortalPeer(), 0.02)
    load = LoadState("m", 3, ShardedState(str(tmp_path), 1), True)
    read = asyncio.create_task(world.call(load))
    # Many times what a command may take that reads nothing.
    await asyncio.sleep(0.2)
    engine.has_read.set()
    await read


class Makes(Reads):
    """An engine that makes a full model until the test says that its files are read."""

    def __init__(self) -> None:
        super().__init__()
        self.sizes = Sizes()
        self.sizes.base = 1000

    def create_model(self, model_id: str, lora: LoraSpec | None, *, drawn: bool) -> None:
        self.has_read.wait(20)


@pytest.mark.parametrize("lora", [None, LoraSpec(8)], ids=["full", "adapter"])
async def test_a_full_model_is_made_for_as_long_as_the_files_of_its_base_say(
    lora: LoraSpec | None, thread: WorkerThread, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(world_module, "SLOWEST_READ", 50)
    engine = Makes()
    world = World(thread, cast(Engine, engine), MortalPeer(), 0.02)
    making = asyncio.create_task(world.call(CreateModel("m", 0, lora)))
    await asyncio.sleep(0.2)
    engine.has_read.set()
    if lora is None:
        await making
    else:
        with pytest.raises(WorldFailure, match="CreateModel did not finish"):
            await making


async def test_a_state_that_is_not_read_in_that_time_ends_the_world(
    thread: WorkerThread, tmp_path: Path
) -> None:
    engine = Reads()
    world = World(thread, cast(Engine, engine), MortalPeer(), 0.02)
    with pytest.raises(WorldFailure, match="LoadState did not finish"):
        await world.call(LoadState("m", 3, ShardedState(str(tmp_path), 1), True))
    engine.has_read.set()


class Writes(Rank0):
    """An engine whose states are written when the test says so."""

    def __init__(self) -> None:
        super().__init__()
        self.under_way: list[Future[None]] = []

    def write_state(self, model_id: str, directory: str) -> Writing:
        self.under_way.append(Future())
        return Writing(self.steps, 0, self.under_way[-1])

    async def begun(self, count: int) -> None:
        async with asyncio.timeout(60):
            while len(self.under_way) < count:  # noqa: ASYNC110
                await asyncio.sleep(0.001)


async def test_training_goes_on_while_a_state_is_written_and_the_next_write_waits(
    thread: WorkerThread,
) -> None:
    engine = Writes()
    world = World(thread, cast(Engine, engine), MortalPeer(), 5)
    await world.step(STEP)
    first, second = (asyncio.create_task(world.write_state("m", name)) for name in "ab")
    await engine.begun(1)
    await world.step(ModelStep("m", 9, AdamSpec()))
    assert len(engine.under_way) == 1
    engine.under_way[0].set_result(None)
    assert await first == (7, 1)
    await engine.begun(2)
    engine.under_way[1].set_result(None)
    assert await second == (9, 2)


async def test_a_disk_that_is_full_fails_the_write_and_nothing_else(thread: WorkerThread) -> None:
    engine = Writes()
    world = World(thread, cast(Engine, engine), MortalPeer(), 5)
    await world.step(STEP)
    written = asyncio.create_task(world.write_state("m", "a"))
    await engine.begun(1)
    engine.under_way[0].set_exception(OSError(errno.ENOSPC, "rank 1 could not write"))
    with pytest.raises(OSError, match="rank 1"):
        await written
    assert (await world.state("m"))[0] == 7


@pytest.mark.parametrize("lost", [True, False], ids=["ranks lose each other", "a rank hangs"])
async def test_ranks_that_do_not_write_together_end_the_world(thread: WorkerThread, lost: bool) -> None:
    engine = Writes()
    world = World(thread, cast(Engine, engine), MortalPeer(), 5)
    await world.step(STEP)
    if not lost:
        world._timeout = 0.1
    written = asyncio.create_task(world.write_state("m", "a"))
    await engine.begun(1)
    if lost:
        engine.under_way[0].set_exception(RuntimeError("Connection closed by peer"))
    with pytest.raises(WorldFailure):
        await written
    with pytest.raises(WorldFailure, match="closed by peer" if lost else "in 0.1 s"):
        await world.watch()

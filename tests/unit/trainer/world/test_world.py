"""What may be read from a trainer world, and until when."""

from __future__ import annotations

import asyncio
import errno
import threading
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import Future
from datetime import timedelta
from pathlib import Path
from typing import cast

import pytest
import torch

from services.common.contract.errors import Internal, InvalidRequest, ModelNotResident, TinsmithError
from services.common.process.threads import WorkerThread
from services.trainer.compute.data import (
    AdamSpec,
    MicroBatch,
    ModelState,
    Pass,
    PassOp,
    Row,
    RowResult,
    ShardedState,
)
from services.trainer.compute.engine import Engine
from services.trainer.compute.exchange import SLOWEST, SLOWEST_SPLIT
from services.trainer.compute.full.shards import Writing
from services.trainer.compute.full.snapshot import FullSnapshot
from services.trainer.compute.memory.transfer import Copies
from services.trainer.world import world as world_module
from services.trainer.world.channel import Channel, WorldFailure
from services.trainer.world.commands import CreateModel, DropModel, LoadState, ModelStep, RunPass
from services.trainer.world.world import SNAPSHOTS, World

STEP = ModelStep("m", 7, AdamSpec())


class Rank0:
    """An engine whose weights are the number of its steps."""

    def __init__(self) -> None:
        self.steps = 0
        self.commands: list[list[str]] = []
        self.refused: dict[str, TinsmithError] = {}

    def optim_steps(self, due: Sequence[tuple[str, AdamSpec]]) -> list[dict[str, float] | TinsmithError]:
        self.steps += len(due)
        self.commands.append([model_id for model_id, _ in due])
        return [self.refused.get(model_id, {"learning_rate": adam.learning_rate}) for model_id, adam in due]

    def drop_model(self, model_id: str) -> None:
        pass

    def gathers(self, model_id: str, *, optimizer: bool) -> bool:
        return False

    def snapshot(self, model_id: str, *, optimizer: bool) -> FullSnapshot:
        return FullSnapshot([], Copies([], torch.device("cpu")), self.steps)


class MortalPeer(Channel):
    """The other rank: it follows until it dies, and rank 0 hears of that when both should agree."""

    def __init__(self) -> None:
        super().__init__(0, 1, timedelta(seconds=1))
        self.dead = False

    def agree(self, error: Exception | None, refused: str = "") -> None:
        if self.dead:
            raise RuntimeError("Connection closed by peer")
        super().agree(error, refused)


@pytest.mark.parametrize(
    ("error", "code"),
    [
        (torch.OutOfMemoryError("CUDA out of memory"), "out_of_memory"),
        (RuntimeError("[enforce fail] DefaultCPUAllocator: can't allocate memory"), "out_of_memory"),
        (RuntimeError("something else"), "internal"),
    ],
)
def test_a_command_that_fails_for_want_of_memory_on_every_rank_says_so(error: Exception, code: str) -> None:
    with pytest.raises(Internal) as failed:
        Channel(0, 1, timedelta(seconds=1)).agree(error)
    assert failed.value.code == code


class Broken(Rank0):
    """An engine that gives out in the middle of a step."""

    def optim_steps(self, due: Sequence[tuple[str, AdamSpec]]) -> list[dict[str, float] | TinsmithError]:
        super().optim_steps(due)
        raise MemoryError


@pytest.fixture
def thread() -> Iterator[WorkerThread]:
    thread = WorkerThread("engine")
    yield thread
    thread.close()


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
    world = World(thread, cast(Engine, engine), Channel(0, 1, timedelta(seconds=5)), 60)

    def full(*_: object, **__: object) -> FullSnapshot:
        raise RuntimeError("can't allocate memory: a copy takes 5 bytes of the host that has 1")

    await world.step(STEP)
    with pytest.raises(Internal, match="can't allocate memory"):
        await world.beside(full)
    with monkeypatch.context() as patched, pytest.raises(Internal, match="can't allocate memory"):
        patched.setattr(engine, "snapshot", full)
        async with world.snapshot("m"):
            pass
    async with world.snapshot("m") as (seq_id, _):
        assert seq_id == 7


async def test_a_device_that_fails_ends_the_world_whatever_it_was_asked(
    thread: WorkerThread, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fails(*_: object, **__: object) -> None:
        raise torch.AcceleratorError("CUDA error: an illegal memory access was encountered")

    for method, ask in (
        ("create_model", lambda world: world.call(CreateModel("m", 0, None))),
        ("snapshot", lambda world: world.state("m")),
    ):
        engine = Rank0()
        world = World(thread, cast(Engine, engine), Channel(0, 1, timedelta(seconds=5)), 60)
        await world.step(STEP)
        monkeypatch.setattr(engine, method, fails, raising=False)
        with pytest.raises(WorldFailure, match="illegal memory access"):
            await ask(world)
        with pytest.raises(WorldFailure):
            await world.watch()


async def test_a_snapshot_that_does_not_come_to_the_host_ends_the_world(thread: WorkerThread) -> None:
    engine = Keeps()
    world = World(thread, cast(Engine, engine), MortalPeer(), 0.1)
    await world.step(STEP)
    with pytest.raises(WorldFailure, match="a snapshot did not finish"):
        await world.state("m")
    with pytest.raises(WorldFailure):
        await world.watch()
    engine.kept[0].may_go.set()


async def test_what_half_a_world_did_is_never_read(thread: WorkerThread) -> None:
    peer = MortalPeer()
    world = World(thread, cast(Engine, Rank0()), peer, 5)
    await world.step(STEP)
    peer.dead = True
    # Rank 0 has taken the second step when it hears that the other rank is gone. A snapshot that was asked
    # for before that, and waits for its turn, would be of two steps under the name of the first.
    step, snapshot = (
        asyncio.create_task(asked) for asked in (world.step(ModelStep("m", 9, AdamSpec())), world.state("m"))
    )
    for asked in (step, snapshot):
        with pytest.raises(WorldFailure, match="closed by peer"):
            await asked
    with pytest.raises(WorldFailure):
        await world.watch()


async def test_a_step_that_broke_off_ends_the_world(thread: WorkerThread) -> None:
    world = World(thread, cast(Engine, Broken()), MortalPeer(), 5)
    for asked in (world.step(STEP), world.state("m")):
        with pytest.raises(WorldFailure, match="OptimSteps broke off"):
            await asked


class Slow(Rank0):
    """An engine that takes its time."""

    def drop_model(self, model_id: str) -> None:
        time.sleep(0.1)

    def optim_steps(self, due: Sequence[tuple[str, AdamSpec]]) -> list[dict[str, float] | TinsmithError]:
        time.sleep(0.1)
        return super().optim_steps(due)


async def test_the_deadline_of_a_command_does_not_count_its_wait_for_those_before_it(
    thread: WorkerThread,
) -> None:
    world = World(thread, cast(Engine, Slow()), MortalPeer(), 0.5)
    drops = [world.call(DropModel(f"m{number}")) for number in range(10)]
    await asyncio.gather(*drops, world.step(STEP))
    assert (await world.state("m"))[1].step == 1


def plan(*sizes: tuple[int, bool]) -> Pass:
    """Micro-batches of one sequence of so many tokens, which all ranks compute together or one."""
    rows = [(Row("m", 0, index, bytes(4 * size), {}), split) for index, (size, split) in enumerate(sizes)]
    return Pass([PassOp("m", 1, "cross_entropy")], [MicroBatch([row], split) for row, split in rows])


async def test_the_deadline_of_a_pass_follows_its_tokens(thread: WorkerThread) -> None:
    class Passes(Rank0):
        world_size, device = 2, "cpu"

        def run_pass(self, work: Pass) -> list[RowResult]:
            time.sleep(0.5)
            return []

    world = World(thread, cast(Engine, Passes()), MortalPeer(), 0.05)
    assert await world.call(RunPass(plan((20 * SLOWEST_SPLIT, True)))) == []
    assert await world.call(RunPass(plan((10 * SLOWEST["cpu"], False)))) == []
    with pytest.raises(WorldFailure, match="RunPass did not finish"):
        await world.call(RunPass(plan((SLOWEST["cpu"] // 5, False))))


async def test_steps_that_are_due_together_are_one_command_and_each_has_its_own_answer(
    thread: WorkerThread,
) -> None:
    engine = Rank0()
    engine.refused["b"] = InvalidRequest("not finite")
    world = World(thread, cast(Engine, engine), MortalPeer(), 5)
    busy = threading.Event()
    thread.submit(busy.wait)
    steps = [
        asyncio.create_task(world.step(ModelStep(name, number, AdamSpec(learning_rate=number))))
        for number, name in enumerate("abc")
    ]
    await asyncio.sleep(0)
    busy.set()
    first, refused, last = await asyncio.gather(*steps, return_exceptions=True)
    assert engine.commands == [["a", "b", "c"]]
    assert (first, last) == ({"learning_rate": 0}, {"learning_rate": 2})
    assert refused is engine.refused["b"]
    assert [(await world.state(name))[0] for name in "abc"] == [0, 1, 2]


async def test_a_model_that_is_not_there_leaves_no_trace(thread: WorkerThread) -> None:
    engine = Rank0()
    engine.refused["m"] = ModelNotResident("not here")
    world = World(thread, cast(Engine, engine), MortalPeer(), 5)
    with pytest.raises(ModelNotResident):
        await world.step(STEP)
    assert not world._changed_by


async def test_a_command_that_takes_too_long_fails_itself_and_those_that_wait_for_it(
    thread: WorkerThread,
) -> None:
    world = World(thread, cast(Engine, Slow()), MortalPeer(), 0.02)
    stuck, waiting = (asyncio.create_task(asked) for asked in (world.step(STEP), world.state("m")))
    with pytest.raises(WorldFailure, match="optimizer steps did not finish"):
        await stuck
    with pytest.raises(WorldFailure, match="optimizer steps"):
        await waiting


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


async def test_a_state_that_is_not_read_in_that_time_ends_the_world(
    thread: WorkerThread, tmp_path: Path
) -> None:
    engine = Reads()
    world = World(thread, cast(Engine, engine), MortalPeer(), 0.02)
    with pytest.raises(WorldFailure, match="LoadState did not finish"):
        await world.call(LoadState("m", 3, ShardedState(str(tmp_path), 1), True))
    engine.has_read.set()


async def test_a_dropped_model_is_forgotten(thread: WorkerThread) -> None:
    world = World(thread, cast(Engine, Rank0()), MortalPeer(), 5)
    for number in range(100):
        await world.step(ModelStep(f"m{number}", 1, AdamSpec()))
        await world.call(DropModel(f"m{number}"))
    assert not world._changed_by


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

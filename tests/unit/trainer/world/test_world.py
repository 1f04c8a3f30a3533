"""What a trainer world was asked for, until when, and what ends it."""

from __future__ import annotations

import asyncio
import threading
import time
import tracemalloc
from collections.abc import Sequence
from datetime import timedelta
from typing import cast

import msgspec
import pytest
import torch
import torch.distributed as dist

from services.common.contract.errors import Internal, InvalidRequest, ModelNotResident, TinsmithError
from services.common.contract.tensors import HostTensor
from services.common.process.threads import WorkerThread
from services.trainer.compute.data import (
    AdamSpec,
    LoraSpec,
    MicroBatch,
    ModelState,
    Pass,
    PassOp,
    Row,
    RowResult,
)
from services.trainer.compute.engine import Engine
from services.trainer.compute.exchange import SLOWEST, SLOWEST_SPLIT
from services.trainer.compute.memory.failures import LacksMemory, NoMemory
from services.trainer.world.channel import Channel, WorldFailure, execute
from services.trainer.world.commands import (
    Command,
    CreateModel,
    DropModel,
    LoadState,
    ModelStep,
    OptimSteps,
    RunPass,
    apply,
)
from services.trainer.world.world import World
from tests.unit.trainer.world.engines import STEP, MortalPeer, Rank0


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
        Channel(1, timedelta(seconds=1)).agree(error)
    assert failed.value.code == code


class Broken(Rank0):
    """An engine that gives out in the middle of a step."""

    def optim_steps(self, due: Sequence[tuple[str, AdamSpec]]) -> list[dict[str, float] | TinsmithError]:
        super().optim_steps(due)
        raise MemoryError


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
        world = World(thread, cast(Engine, engine), Channel(1, timedelta(seconds=5)), 60)
        await world.step(STEP)
        monkeypatch.setattr(engine, method, fails, raising=False)
        with pytest.raises(WorldFailure, match="illegal memory access"):
            await ask(world)
        with pytest.raises(WorldFailure):
            await world.watch()


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
    rows = [(Row(0, index, bytes(4 * size), {}), split) for index, (size, split) in enumerate(sizes)]
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


async def test_a_dropped_model_is_forgotten(thread: WorkerThread) -> None:
    world = World(thread, cast(Engine, Rank0()), MortalPeer(), 5)
    for number in range(100):
        await world.step(ModelStep(f"m{number}", 1, AdamSpec()))
        await world.call(DropModel(f"m{number}"))
    assert not world._changed_by


async def test_a_step_without_memory_leaves_the_state_that_of_the_operation_before(
    thread: WorkerThread,
) -> None:
    engine = Rank0()
    world = World(thread, cast(Engine, engine), MortalPeer(), 5)
    await world.step(STEP)
    engine.refused["m"] = NoMemory("out of memory on the optimizer step")
    with pytest.raises(NoMemory):
        await world.step(ModelStep("m", 9, AdamSpec()))
    assert (await world.state("m"))[0] == STEP.seq_id


async def test_a_state_that_finds_no_memory_is_refused_and_one_that_broke_off_ends_the_world(
    thread: WorkerThread,
) -> None:
    class Loads(Rank0):
        error: Exception = NoMemory("out of memory on the state")

        def load_state(self, model_id: str, saved: ModelState, optimizer: bool) -> None:
            raise self.error

    engine = Loads()
    world = World(thread, cast(Engine, engine), MortalPeer(), 5)
    load = LoadState("m", 8, ModelState(LoraSpec(1), {}, {}, 0), False)
    with pytest.raises(NoMemory):
        await world.call(load)
    await world.step(STEP)
    engine.error = RuntimeError("in the middle")
    with pytest.raises(WorldFailure, match="LoadState broke off"):
        await world.call(load)


def test_a_load_that_breaks_off_for_want_of_memory_is_blamed_alone() -> None:
    class Loads(Rank0):
        def load_state(self, model_id: str, saved: ModelState, optimizer: bool) -> None:
            raise torch.OutOfMemoryError("in the middle")

    told: list[LacksMemory] = []
    channel = Channel(1, timedelta(seconds=5), told.append)
    load = LoadState("m", 8, ModelState(LoraSpec(1), {}, {}, 0), False)
    with pytest.raises(WorldFailure, match="LoadState broke off"):
        execute(cast(Engine, Loads()), channel, load)
    assert [lack.operation for lack in told] == [("m", 8)]


async def test_a_step_that_breaks_off_for_want_of_memory_is_told_of_where_it_was_taken_alone(
    thread: WorkerThread,
) -> None:
    told: list[LacksMemory] = []
    for steps, blamed in (([STEP], [("m", STEP.seq_id)]), ([STEP, ModelStep("n", 1, AdamSpec())], [])):
        told.clear()
        channel = Channel(1, timedelta(seconds=5), told.append)
        with pytest.raises(WorldFailure, match="OptimSteps broke off"):
            execute(cast(Engine, Broken()), channel, OptimSteps(steps))
        assert [lack.operation for lack in told] == blamed


class Making:
    """An engine that writes down how models are made."""

    def __init__(self) -> None:
        self.told: list[str] = []

    def create_model(self, model_id: str, lora: LoraSpec | None, *, drawn: bool = True) -> None:
        self.told.append("made with its first values" if drawn else "made")

    def load_state(self, model_id: str, state: ModelState, optimizer: bool) -> None:
        self.told.append("loaded")


@pytest.mark.parametrize(
    ("saved", "told"),
    [
        (None, ["made with its first values"]),
        (ModelState(LoraSpec(8), {}, {}, 3), ["made", "loaded"]),
    ],
    ids=["fresh", "saved"],
)
def test_first_values_are_drawn_for_models_that_have_no_others(
    saved: ModelState | None, told: list[str]
) -> None:
    engine = Making()
    apply(cast(Engine, engine), CreateModel("m", 0, LoraSpec(8), saved))
    assert engine.told == told


def test_a_large_state_is_not_copied_twice_on_its_way_to_the_ranks(monkeypatch: pytest.MonkeyPatch) -> None:
    nbytes = 2**24
    matrix = HostTensor("float32", (nbytes // 4,), bytes(nbytes))
    command = CreateModel("m", 0, LoraSpec(8), ModelState(LoraSpec(8), {"a": matrix}, {}, 3))
    channel, sent = Channel(1, timedelta(seconds=5)), []
    monkeypatch.setattr(channel, "_group", object())
    monkeypatch.setattr(dist, "broadcast", lambda tensor, *_: sent.append(tensor))
    tracemalloc.start()
    channel.send(command)
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert msgspec.msgpack.decode(sent[1].numpy().data, type=Command) == command
    assert peak < 1.9 * nbytes

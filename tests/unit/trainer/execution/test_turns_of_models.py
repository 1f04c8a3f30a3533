"""In which order the executor has the world do what several models ask for at once."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Callable, Iterable, Sequence
from contextlib import asynccontextmanager
from datetime import timedelta
from pathlib import Path
from typing import Any

import numpy as np

from services.common.contract.errors import TinsmithError
from services.common.contract.tensors import from_values
from services.common.process.crashes import CrashLedger
from services.common.process.threads import WorkerThread
from services.trainer.compute.data import AdamSpec, LoraSpec, Pass, RowResult
from services.trainer.compute.memory.failures import NoMemory
from services.trainer.convert import Target
from services.trainer.execution.control_ops import ControlOps
from services.trainer.execution.executor import Executor
from services.trainer.execution.resident_models import Model, OperationResult, new_sequence
from services.trainer.order.scheduler import Limits
from services.trainer.world.channel import Channel
from services.trainer.world.world import World
from tests.unit.gateway.tensors import tensor
from tests.unit.trainer.execution.roomy import Roomy
from tinsmith.internal.v1 import operation_pb2

TOKENS = 4


class Recorded:
    """An engine that writes down what it is told, and comes to nothing."""

    world_size, device = 1, "cpu"

    def __init__(self, pass_seconds: float = 0.0) -> None:
        self.commands: list[tuple[str, tuple[str, ...]]] = []
        self.refused: dict[str, TinsmithError] = {}
        self._pass_seconds = pass_seconds

    def run_pass(self, work: Pass) -> list[RowResult]:
        time.sleep(self._pass_seconds)
        self.commands.append(("pass", tuple(op.model_id for op in work.ops)))
        rows = sorted((row.op, row.index) for batch in work.micro_batches for row in batch.rows)
        scored = {"logprobs": from_values(np.zeros(TOKENS, "float32"))}
        return [RowResult(*row, scored, {"loss:sum": 0.0}) for row in rows]

    def optim_steps(self, due: Sequence[tuple[str, AdamSpec]]) -> list[dict[str, float] | TinsmithError]:
        self.commands.append(("steps", tuple(model for model, _ in due)))
        return [self.refused.get(model, {}) for model, _ in due]


def batch(model_id: str, seq_id: int) -> operation_pb2.Operation:
    made = operation_pb2.Operation(model_id=model_id, seq_id=seq_id)
    made.forward_backward.loss_fn = "cross_entropy"
    datum = made.forward_backward.data.add(tokens=tensor([1] * TOKENS, "<i4"))
    datum.loss_inputs["target_tokens"].CopyFrom(tensor([1] * TOKENS, "<i8"))
    datum.loss_inputs["weights"].CopyFrom(tensor([1.0] * TOKENS, "<f4"))
    return made


def step(model_id: str, seq_id: int) -> operation_pb2.Operation:
    made = operation_pb2.Operation(model_id=model_id, seq_id=seq_id)
    made.optim_step.adam.learning_rate = 1e-4
    return made


@asynccontextmanager
async def executing(
    tmp_path: Path,
    recorded: Recorded,
    model_ids: Iterable[str],
    changed: Callable[[str], None] = lambda _: None,
) -> AsyncIterator[Executor]:
    """An executor that runs, of models that are there."""
    engine: Any = recorded
    unused: Any = None
    adapters: Any = Roomy()
    thread = WorkerThread("engine")
    world = World(thread, engine, Channel(0, 1, timedelta(seconds=5)), 5)
    control = ControlOps(
        world,
        checkpoints=unused,
        publisher=unused,
        base=unused,
        states=unused,
        changed=changed,
        durable=unused,
        full=unused,
        adapters=adapters,
        snapshot_steps=1,
    )
    crashes = CrashLedger[tuple[str, int]](tmp_path / "executing", tuple[str, int], "trainer")
    models = {name: Model(name, new_sequence(0), created=True, lora=LoraSpec(8)) for name in model_ids}
    executor = Executor(world, models, control, Target("org/base", 64, True), Limits(1, 1024), crashes)
    async with asyncio.TaskGroup() as group:
        running = group.create_task(executor.run())
        yield executor
        executor.stop()
        await running
    thread.close()


async def send(executor: Executor, operation: operation_pb2.Operation) -> asyncio.Future[OperationResult]:
    """Has the executor take in an operation."""
    work = await executor.read(operation)
    result = executor.submit(operation, work, operation.seq_id - 1, epoch=1)
    assert not isinstance(result, OperationResult)
    return result


async def told(
    tmp_path: Path, operations: Sequence[operation_pb2.Operation]
) -> list[tuple[str, tuple[str, ...]]]:
    """What the engine is told when these operations of several models are there at once."""
    recorded = Recorded()
    model_ids = dict.fromkeys(operation.model_id for operation in operations)
    async with executing(tmp_path, recorded, model_ids) as executor:
        for result in [await send(executor, operation) for operation in operations]:
            assert not (await result).HasField("error")
    return recorded.commands


async def test_steps_that_are_due_come_before_the_pass_of_another_model_and_together(tmp_path: Path) -> None:
    operations = [step("a", 1), batch("b", 1), step("c", 1), step("d", 1)]
    assert await told(tmp_path, operations) == [("steps", ("a", "c", "d")), ("pass", ("b",))]


async def test_models_whose_steps_were_taken_have_their_next_batch_in_one_pass(tmp_path: Path) -> None:
    operations = [made(model, seq) for model in "abc" for seq, made in ((1, batch), (2, step), (3, batch))]
    assert await told(tmp_path, operations) == [
        ("pass", ("a", "b", "c")),
        ("steps", ("a", "b", "c")),
        ("pass", ("a", "b", "c")),
    ]


async def test_models_that_train_in_small_steps_and_began_apart_come_to_share_their_passes(
    tmp_path: Path,
) -> None:
    recorded = Recorded(pass_seconds=0.2)

    async def train(executor: Executor, model_id: str, begin: float) -> None:
        await asyncio.sleep(begin)
        for seq_id in range(1, 17, 2):
            passed = await send(executor, batch(model_id, seq_id))
            stepped = await send(executor, step(model_id, seq_id + 1))
            await asyncio.wait([passed, stepped])
            # What a client does before its next step.
            await asyncio.sleep(0.02)

    async with executing(tmp_path, recorded, "abc") as executor, asyncio.TaskGroup() as clients:
        for number, model_id in enumerate("abc"):
            clients.create_task(train(executor, model_id, 0.1 * number))
    passes = [models for what, models in recorded.commands if what == "pass"]
    assert passes[0] == ("a",)
    assert ("a", "b", "c") in [tuple(sorted(models)) for models in passes[:-1]]


async def test_a_step_without_memory_fails_alone_and_nothing_of_its_model_becomes_durable(
    tmp_path: Path,
) -> None:
    recorded, changed = Recorded(), list[str]()
    recorded.refused["a"] = NoMemory("out of memory on the optimizer step")
    async with executing(tmp_path, recorded, "ab", changed.append) as executor:
        steps = [await send(executor, step(name, 1)) for name in "ab"]
        results = [await answer for answer in steps]
        assert results[0].error.code == "out_of_memory" and not results[1].HasField("error")
        assert changed == ["b"]
        recorded.refused.clear()
        assert not (await (await send(executor, step("a", 2)))).HasField("error")
    assert changed == ["b", "a"]

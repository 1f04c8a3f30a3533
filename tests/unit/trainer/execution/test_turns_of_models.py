"""In which order the executor has the world do what several models ask for at once."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from datetime import timedelta
from pathlib import Path
from typing import Any

import numpy as np

from services.common.contract.tensors import from_values
from services.common.process.crashes import CrashLedger
from services.common.process.threads import WorkerThread
from services.trainer.compute.data import AdamSpec, LoraSpec, Pass, RowResult
from services.trainer.convert import Target
from services.trainer.execution.control_ops import ControlOps
from services.trainer.execution.executor import Executor
from services.trainer.execution.resident_models import Model, OperationResult, new_sequence
from services.trainer.order.scheduler import Limits
from services.trainer.world.channel import Channel
from services.trainer.world.world import World
from tests.unit.gateway.tensors import tensor
from tinsmith.internal.v1 import operation_pb2

TOKENS = 4


class Recorded:
    """An engine that writes down what it is told, and comes to nothing."""

    world_size, device = 1, "cpu"

    def __init__(self) -> None:
        self.commands: list[tuple[str, tuple[str, ...]]] = []

    def run_pass(self, work: Pass) -> list[RowResult]:
        self.commands.append(("pass", tuple(op.model_id for op in work.ops)))
        rows = sorted((row.op, row.index) for batch in work.micro_batches for row in batch.rows)
        scored = {"logprobs": from_values(np.zeros(TOKENS, "float32"))}
        return [RowResult(*row, scored, {"loss:sum": 0.0}) for row in rows]

    def optim_steps(self, due: Sequence[tuple[str, AdamSpec]]) -> list[dict[str, float]]:
        self.commands.append(("steps", tuple(model for model, _ in due)))
        return [{} for _ in due]


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


async def told(
    tmp_path: Path, operations: Sequence[operation_pb2.Operation]
) -> list[tuple[str, tuple[str, ...]]]:
    """What the engine is told when these operations of several models are there at once."""
    engine: Any = Recorded()
    unused: Any = None
    thread = WorkerThread("engine")
    world = World(thread, engine, Channel(0, 1, timedelta(seconds=5)), 5)
    control = ControlOps(
        world,
        checkpoints=unused,
        publisher=unused,
        base=unused,
        states=unused,
        changed=lambda _: None,
        durable=unused,
        full=unused,
        adapters=unused,
        snapshot_steps=1,
    )
    crashes = CrashLedger[tuple[str, int]](tmp_path / "executing", tuple[str, int], "trainer")
    models = {
        model_id: Model(model_id, new_sequence(0), created=True, lora=LoraSpec(8))
        for model_id in dict.fromkeys(operation.model_id for operation in operations)
    }
    executor = Executor(world, models, control, Target("org/base", 64, True), Limits(1, 64), crashes)
    results = []
    for operation in operations:
        work = await executor.read(operation)
        results.append(executor.submit(operation, work, operation.seq_id - 1, epoch=1))
    async with asyncio.TaskGroup() as group:
        group.create_task(executor.run())
        for result in results:
            assert not isinstance(result, OperationResult)
            assert not (await result).HasField("error")
        executor.stop()
    thread.close()
    commands: list[tuple[str, tuple[str, ...]]] = engine.commands
    return commands


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

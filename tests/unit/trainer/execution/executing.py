"""An executor over an engine that writes down what it is told, for tests of what is done in which order."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import asynccontextmanager
from datetime import timedelta
from pathlib import Path
from typing import Any, TypeVar

import numpy as np

from services.common.contract.errors import TinsmithError
from services.common.contract.tensors import from_values
from services.common.process.crashes import CrashLedger
from services.common.process.threads import WorkerThread
from services.trainer.compute.data import AdamSpec, LoraSpec, Pass, RowResult
from services.trainer.convert import Target
from services.trainer.execution.control_ops import ControlOps
from services.trainer.execution.executor import Executor
from services.trainer.execution.resident_models import Model, OperationResult, new_sequence
from services.trainer.files.copy_room import CopyRoom, LoadRoom
from services.trainer.order.scheduler import Limits
from services.trainer.world.channel import Channel
from services.trainer.world.world import World
from tests.unit.gateway.tensors import tensor
from tinsmith.internal.v1 import operation_pb2

TOKENS = 4
TARGET, LIMITS = Target("org/base", 64, True), Limits(1, 1024)

T = TypeVar("T")


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


class Roomy:
    """Room for adapters on a device that has memory for all that it is asked for."""

    async def with_memory(self, mine: int, attempt: Callable[[], Awaitable[T]], *, patient: bool = True) -> T:
        return await attempt()


def ledger(path: Path) -> CrashLedger[tuple[str, int]]:
    return CrashLedger[tuple[str, int]](path, tuple[str, int], "trainer")


def executor_of(
    world: World | None,
    models: dict[str, Model],
    crashes: CrashLedger[tuple[str, int]],
    target: Target = TARGET,
    limits: Limits = LIMITS,
    **parts: Any,
) -> Executor:
    """parts: of `ControlOps`, where they are used."""
    unused = ("checkpoints", "publisher", "base", "states", "durable", "full", "adapters")
    copies, loads = CopyRoom(2**40, lambda lora, moments: 1), LoadRoom(2**40, lambda lora: 1)
    given = {
        **dict.fromkeys(unused),
        "copies": copies,
        "loads": loads,
        "changed": lambda _: None,
        "snapshot_steps": 1,
        **parts,
    }
    any_world: Any = world
    return Executor(any_world, models, ControlOps(any_world, **given), target, limits, crashes)


def resident(name: str, **state: Any) -> Model:
    """An adapter that was created by its operation 0."""
    return Model(name, new_sequence(0), created=True, lora=LoraSpec(8), **state)


class Trainer(Roomy):
    """An executor of models that are there, and its own room for them."""

    def __init__(self, engine: Any, directory: Path, *models: Model) -> None:
        self.engine = engine
        self.changed: list[str] = []
        """Models whose state is to become durable."""
        self.thread = WorkerThread("engine")
        self.world = World(self.thread, engine, Channel(1, timedelta(seconds=5)), 5)
        self.models = {model.model_id: model for model in models}
        self.ledger = directory / "executing"
        parts = {"changed": self.changed.append, "adapters": self, **self.parts()}
        self.executor = executor_of(self.world, self.models, ledger(self.ledger), **parts)

    def parts(self) -> dict[str, Any]:
        """More of `ControlOps`."""
        return {}

    async def ask(self, operation: operation_pb2.Operation) -> asyncio.Future[OperationResult]:
        """Has the executor take in an operation."""
        work = await self.executor.read(operation)
        found = self.executor.submit(operation, work, operation.seq_id - 1, epoch=1)
        if isinstance(found, asyncio.Future):
            return found
        done: asyncio.Future[OperationResult] = asyncio.get_running_loop().create_future()
        done.set_result(found)
        return done

    @asynccontextmanager
    async def executes(self, seconds: float = 60.0) -> AsyncIterator[None]:
        """Executes within the context, and ends what has begun."""
        async with asyncio.timeout(seconds), asyncio.TaskGroup() as group:
            group.create_task(self.executor.run())
            yield
            self.executor.stop()
        self.thread.close()


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

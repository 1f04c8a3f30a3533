"""What the executor takes in, and what it counts."""

from __future__ import annotations

import asyncio
import threading
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import redis.exceptions
from prometheus_client import REGISTRY

from services.common.contract.errors import InvalidRequest, ModelNotResident, Unavailable
from services.common.contract.tensors import from_values
from services.trainer import convert
from services.trainer.compute.data import MicroBatch, Pass, PassOp, Row
from services.trainer.convert import Forward, Target
from services.trainer.execution import executor as module
from services.trainer.execution import measures
from services.trainer.execution.executor import READ_ASIDE_BYTES, Executor
from services.trainer.execution.resident_models import Model, Rejected
from tests.unit.gateway.tensors import tensor
from tests.unit.trainer.execution.executing import (
    Recorded,
    Trainer,
    batch,
    executor_of,
    ledger,
    resident,
)
from tinsmith.internal.v1 import operation_pb2


def executor() -> Executor:
    """One that has no world yet."""
    nothing: Any = None
    return executor_of(None, {}, nothing)


def operation(tokens: int) -> operation_pb2.Operation:
    made = operation_pb2.Operation(model_id="s:train:0", seq_id=1)
    made.forward_backward.loss_fn = "cross_entropy"
    datum = made.forward_backward.data.add(tokens=tensor([1] * tokens, "<i4"))
    datum.loss_inputs["target_tokens"].CopyFrom(tensor([1] * tokens, "<i8"))
    return made


async def test_a_large_operation_is_read_in_a_thread_and_a_small_one_at_once(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    threads = []

    def read(asked: operation_pb2.Operation, target: Target) -> convert.Work:
        threads.append(threading.current_thread())
        return convert.from_pb(asked, target)

    monkeypatch.setattr(module, "convert", _Instead(read))
    small, large = operation(4), operation(READ_ASIDE_BYTES)
    for asked in (small, large):
        work = await executor().read(asked)
        assert isinstance(work, Forward)
        assert work.data[0].tokens == asked.forward_backward.data[0].tokens.data
    assert threads[0] is threading.main_thread()
    assert threads[1] is not threading.main_thread()


async def test_what_waits_is_known_by_the_class_of_its_owner_until_it_has_its_result(tmp_path: Path) -> None:
    queues: dict[str, Model] = {}
    taking = executor_of(None, queues, ledger(tmp_path / "crashes"))

    def send(owner: str, count: int) -> None:
        model_id = f"{owner}:train:0"
        created = operation_pb2.Operation(model_id=model_id, create_model=operation_pb2.CreateModel())
        for seq_id in range(count):
            asked = created if seq_id == 0 else operation_pb2.Operation(optim_step=operation_pb2.OptimStep())
            asked.model_id, asked.seq_id, asked.origin.owner = model_id, seq_id, owner
            taking.submit(asked, Rejected(InvalidRequest("no")), seq_id - 1, 1)

    send("ann", 5)
    assert taking.queued_by_class() == {"light": 5, "heavy": 0}
    send("bob", 1)
    assert taking.queued_by_class() == {"light": 1, "heavy": 5}
    taking.evict(queues["ann:train:0"], ModelNotResident("gone"))
    assert taking.queued_by_class() == {"light": 1, "heavy": 0}
    assert taking.queued_bytes > 0
    taking.abandon(Unavailable("stopping"))
    assert (taking.queued_by_class(), taking.queued_bytes) == ({"light": 0, "heavy": 0}, 0)


async def test_a_creation_that_meets_redis_away_is_asked_for_again_and_the_trainer_goes_on(
    tmp_path: Path,
) -> None:
    async def durable(model_id: str) -> int | None:
        raise redis.exceptions.ConnectionError("refused")

    models: dict[str, Model] = {}
    executing = executor_of(None, models, ledger(tmp_path / "crashes"), durable=durable)
    running = asyncio.create_task(executing.run())
    asked = operation_pb2.Operation(model_id="s:train:0", seq_id=0)
    asked.create_model.base_model, asked.create_model.lora.rank = "org/base", 8
    result = executing.submit(asked, await executing.read(asked), -1, 1)
    assert isinstance(result, asyncio.Future)
    with pytest.raises(ModelNotResident, match="refused"):
        await asyncio.wait_for(result, 60)
    assert not models and not running.done()
    executing.stop()
    await running


class _Instead:
    def __init__(self, read: Any) -> None:
        self.from_pb = read


async def test_the_loop_goes_on_while_a_large_operation_is_read(monkeypatch: pytest.MonkeyPatch) -> None:
    goes_on = threading.Event()

    def read(asked: operation_pb2.Operation, target: Target) -> convert.Work:
        # Without the loop this would be waited for in vain.
        assert goes_on.wait(20)
        raise InvalidRequest("after all")

    monkeypatch.setattr(module, "convert", _Instead(read))
    reading = asyncio.create_task(executor().read(operation(READ_ASIDE_BYTES)))
    await asyncio.sleep(0)
    goes_on.set()
    work = await reading
    assert isinstance(work, Rejected) and work.error.message == "after all"


def counted(name: str, **labels: str) -> float:
    return REGISTRY.get_sample_value(name, labels) or 0.0


def test_a_pass_counts_its_time_what_each_batch_computes_and_all_that_was_sent(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def row(op: int, tokens: int) -> Row:
        inputs = {"target_tokens": from_values(np.zeros(tokens, "int64"))}
        return Row(op, 0, np.zeros(tokens, "<i4").tobytes(), inputs)

    ops = [PassOp("m", 1, "cross_entropy"), PassOp("n", 1, "cross_entropy", forward_only=True)]
    plan = Pass(ops, [MicroBatch([row(0, 100), row(0, 60)]), MicroBatch([row(1, 7)])])
    names = {
        "tinsmith_pass_seconds_count": {},
        "tinsmith_pass_seconds_sum": {},
        "tinsmith_micro_batch_tokens_count": {},
        "tinsmith_micro_batch_tokens_sum": {},
        "tinsmith_passed_tokens_total": {"direction": "forward_backward"},
    }
    before = {name: counted(name, **labels) for name, labels in names.items()}
    forward = counted("tinsmith_passed_tokens_total", direction="forward")
    # Of the first batch's 160 tokens 60 are a prefix that is computed once.
    monkeypatch.setattr(measures, "time", SimpleNamespace(monotonic=lambda: 10.5))
    measures.passed([], plan, [100, 7], since=10.0)
    grown = {name: counted(name, **labels) - before[name] for name, labels in names.items()}
    assert grown == pytest.approx(
        {
            "tinsmith_pass_seconds_count": 1,
            "tinsmith_pass_seconds_sum": 0.5,
            "tinsmith_micro_batch_tokens_count": 2,
            "tinsmith_micro_batch_tokens_sum": 107,
            "tinsmith_passed_tokens_total": 160,
        }
    )
    assert counted("tinsmith_passed_tokens_total", direction="forward") - forward == 7


async def test_another_operation_under_a_number_that_ran_is_not_answered_with_what_that_came_to(
    tmp_path: Path,
) -> None:
    trainer = Trainer(Recorded(), tmp_path, resident("s:train:0"))
    lost, instead = batch("s:train:0", 1), batch("s:train:0", 1)
    lost.origin.accepted_at, instead.origin.accepted_at = 1.5, 2.5
    lost_again = operation_pb2.Operation.FromString(lost.SerializeToString())
    lost_again.origin.handed_at = 9.0
    async with trainer.executes():
        result = await (await trainer.ask(lost))
        assert await (await trainer.ask(lost_again)) == result
        with pytest.raises(ModelNotResident):
            await trainer.ask(instead)
    assert trainer.models["s:train:0"].is_outdated(0)

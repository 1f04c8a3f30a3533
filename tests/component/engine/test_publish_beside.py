"""A publish takes a snapshot on the engine's thread, and does all else beside the work."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from datetime import timedelta
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import redis.asyncio
import torch
from safetensors.numpy import load_file
from torch import Tensor

from services.common.process.threads import WorkerThread
from services.common.storage.data_dir import DataDir
from services.trainer.compute.data import LoraSpec, ModelState
from services.trainer.compute.engine import Engine
from services.trainer.convert import Target
from services.trainer.execution.resident_models import Model, OperationResult, new_sequence
from services.trainer.files.base import Base
from services.trainer.order.scheduler import Limits
from services.trainer.publish import publisher
from services.trainer.publish.broadcast import Broadcaster
from services.trainer.publish.cargo import Cargo
from services.trainer.publish.publisher import Publisher
from services.trainer.world.channel import Channel
from services.trainer.world.commands import CreateModel
from services.trainer.world.world import World
from tests.component.engine.data import LORA, trained_looking
from tests.component.trainer.receiver import Receiver
from tests.component.trainer.world import BASE_MODEL, batch, forward_backward, logprobs, step
from tests.unit.trainer.execution.executing import Roomy, executor_of, ledger
from tinsmith.internal.v1 import operation_pb2

pytestmark = pytest.mark.heavy

TOKENS = 256
PUBLISHED, BESIDE, ALONE = "s:train:0", "s:train:1", "s:train:2"


class Held:
    """Packing that goes on when a test says so."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.begun, self.may_go_on = threading.Event(), threading.Event()
        self.threads: list[str] = []
        pack = Broadcaster.pack

        def held(sender: Broadcaster, lora: LoraSpec | None, tensors: Mapping[str, Tensor]) -> Cargo | None:
            self.threads.append(threading.current_thread().name)
            self.begun.set()
            assert self.may_go_on.wait(60), "the work did not go on"
            return pack(sender, lora, tensors)

        monkeypatch.setattr(Broadcaster, "pack", held)


class Trainer:
    """Rank 0's parts that execute and publish, over an engine of this process."""

    def __init__(self, engine: Engine, client: redis.asyncio.Redis, url: str, base: Path, data: Path) -> None:
        self.engine = engine
        self.thread = WorkerThread("engine")
        self.world = World(self.thread, engine, Channel(1, timedelta(seconds=60)), 60)
        self.sender = Broadcaster(client, url, BASE_MODEL, "cpu", torch.float32)
        self.models: dict[str, Model] = {}
        self._executor = executor_of(
            self.world,
            self.models,
            ledger(data / "executing"),
            Target(BASE_MODEL, TOKENS, True),
            Limits(1, TOKENS),
            publisher=Publisher(DataDir(data), Base(BASE_MODEL, str(base)), self.sender),
            adapters=Roomy(),
        )

    @asynccontextmanager
    async def running(self) -> AsyncIterator[None]:
        async with asyncio.TaskGroup() as group:
            group.create_task(self._executor.run())
            yield
            self._executor.stop()
        await self.sender.close()
        self.thread.close()

    async def create(self, model_id: str) -> None:
        """A model whose adapter looks trained, the same one for each id."""
        self.engine.create_model("fresh", LORA)
        state = trained_looking(self.engine.state("fresh"), 5)
        self.engine.drop_model("fresh")
        await self.world.call(CreateModel(model_id, 0, LORA, state, False))
        self.models[model_id] = Model(model_id, new_sequence(0), created=True, lora=LORA)

    async def create_full(self, model_id: str) -> None:
        """A model that trains all weights."""
        await self.world.call(CreateModel(model_id, 0, None))
        self.models[model_id] = Model(model_id, new_sequence(0), created=True, lora=None)

    async def ask(self, model_id: str, seq_id: int, **kind: Any) -> asyncio.Future[OperationResult]:
        """Admits an operation."""
        operation = operation_pb2.Operation(model_id=model_id, seq_id=seq_id, **kind)
        result = self._executor.submit(operation, await self._executor.read(operation), seq_id - 1, epoch=1)
        assert isinstance(result, asyncio.Future)
        return result

    async def full_step(self, model_id: str, seq_id: int) -> None:
        """A batch and a step of a model that trains all weights."""
        await (await self.ask(model_id, seq_id, forward_backward=forward_backward(batch(3))))
        stepped = await (await self.ask(model_id, seq_id + 1, optim_step=step(1e-2)))
        assert stepped.optim_step.metrics["update_norm"] > 0

    async def train(self, model_id: str, seq_id: int) -> tuple[list[np.ndarray], float, ModelState]:
        """A batch and a step; what they came to."""
        batched = await (await self.ask(model_id, seq_id, forward_backward=forward_backward(batch(3))))
        stepped = await (await self.ask(model_id, seq_id + 1, optim_step=step(1e-2)))
        _, state = await self.world.state(model_id)
        return logprobs(batched), stepped.optim_step.metrics["grad_norm"], state


@pytest.fixture
async def trainer(
    engine: Engine, redis_client: redis.asyncio.Redis, redis_url: str, directory: Path, tmp_path: Path
) -> Trainer:
    return Trainer(engine, redis_client, redis_url, directory, tmp_path)


def save(name: str = "v") -> dict[str, operation_pb2.SaveForSampler]:
    return {"save_for_sampler": operation_pb2.SaveForSampler(checkpoint_id=f"sampler_weights/{name}")}


async def test_models_train_while_a_publish_packs_and_it_has_the_bits_of_its_place_in_the_order(
    trainer: Trainer, redis_url: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    held = Held(monkeypatch)
    async with trainer.running():
        for model_id in (PUBLISHED, BESIDE, ALONE):
            await trainer.create(model_id)
        _, before = await trainer.world.state(PUBLISHED, optimizer=False)
        alone = await trainer.train(ALONE, 1)
        with Receiver(redis_url, "one") as one:
            try:
                publish = await trainer.ask(PUBLISHED, 1, **save())
                assert await asyncio.to_thread(held.begun.wait, 60)
                # Another model, and the published one itself: its snapshot is taken.
                beside = await asyncio.wait_for(trainer.train(BESIDE, 1), 50)
                itself = await asyncio.wait_for(trainer.train(PUBLISHED, 2), 50)
                assert not publish.done() and "engine" not in held.threads
            finally:
                held.may_go_on.set()
            assert (await publish).save_for_sampler.receivers == 1
            received = one.snapshots[PUBLISHED, 1]
    stored = load_file(DataDir(tmp_path).snapshot(PUBLISHED, 1) / "adapter_model.safetensors")
    assert {f"base_model.model.{name}.weight" for name in before.adapter} == stored.keys()
    assert received.keys() == before.adapter.keys()
    for name, array in before.adapter.items():
        np.testing.assert_array_equal(received[name], array.values())
        np.testing.assert_array_equal(stored[f"base_model.model.{name}.weight"], array.values())
    for rows, norm, state in (beside, itself):
        for row, expected in zip(rows, alone[0], strict=True):
            np.testing.assert_array_equal(row, expected)
        assert (norm, state) == (alone[1], alone[2])
    assert state.step == 1 and state.adapter != before.adapter


async def test_a_full_model_trains_while_its_publish_is_packed_and_the_publish_has_its_place_in_the_order(
    trainer: Trainer, redis_url: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    held = Held(monkeypatch)
    async with trainer.running():
        await trainer.create_full(PUBLISHED)
        await trainer.full_step(PUBLISHED, 1)
        _, before = await trainer.world.state(PUBLISHED, optimizer=False)
        copies = {name: bytes(array.data) for name, array in before.adapter.items()}
        with Receiver(redis_url, "one") as one:
            try:
                publish = await trainer.ask(PUBLISHED, 3, **save())
                assert await asyncio.to_thread(held.begun.wait, 60)
                await asyncio.wait_for(trainer.full_step(PUBLISHED, 4), 50)
                assert not publish.done() and "engine" not in held.threads
            finally:
                held.may_go_on.set()
            assert (await publish).save_for_sampler.receivers == 1
            received = one.snapshots[PUBLISHED, 3]
        _, after = await trainer.world.state(PUBLISHED, optimizer=False)
    stored = load_file(DataDir(tmp_path).snapshot(PUBLISHED, 3) / "model.safetensors")
    assert stored.keys() == received.keys() == copies.keys()
    for name, expected in copies.items():
        assert received[name].tobytes() == stored[name].tobytes() == expected, name
    assert after.step == 2 and after.adapter != before.adapter


async def test_a_publish_packs_ahead_and_those_that_find_no_room_beside_it_go_from_the_host(
    trainer: Trainer, redis_url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    # A copy counts as one byte.
    monkeypatch.setattr(publisher, "PACKED_BYTES", 1)
    held = Held(monkeypatch)
    names = [f"s:train:{number}" for number in range(4)]
    async with trainer.running():
        for name in names:
            await trainer.create(name)
            await trainer.train(name, 1)
        _, expected = await trainer.world.state(names[0], optimizer=False)
        with Receiver(redis_url, "one") as one:
            try:
                first = await trainer.ask(names[0], 3, **save())
                assert await asyncio.to_thread(held.begun.wait, 60)
                others = [await trainer.ask(name, 3, **save()) for name in names[1:]]
                async with asyncio.timeout(50):
                    for publish in others:
                        assert (await publish).save_for_sampler.receivers == 1
                assert not first.done()
            finally:
                held.may_go_on.set()
            assert (await first).save_for_sampler.receivers == 1
            assert len(held.threads) == 1
            for name in names:
                received = one.snapshots[name, 3]
                for matrix, array in expected.adapter.items():
                    np.testing.assert_array_equal(received[matrix], array.values())


async def test_a_state_on_its_way_to_the_host_stays_what_it_was(trainer: Trainer) -> None:
    async with trainer.running():
        await trainer.create("m")
        _, before = await trainer.world.state("m")
        async with trainer.world.snapshot("m") as (seq_id, snapshot):
            await trainer.train("m", 1)
            late = await trainer.world.beside(snapshot.state)
        assert (seq_id, late) == (0, before)
        changed_by, after = await trainer.world.state("m")
        assert (changed_by, after.step) == (2, 1) and after.adapter != before.adapter

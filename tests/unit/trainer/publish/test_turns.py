"""Two trainers of one base model send to one sampler, of which all is real but vLLM."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import redis.asyncio
import torch

from services.common import weights
from services.common.contract.errors import DataLoss
from services.common.contract.tensors import HostTensor, TensorSpec
from services.common.process import rpc
from services.common.state import keys
from services.common.state.registry import Registry, ServiceRecord
from services.common.storage.data_dir import DataDir
from services.sampler.service import SamplerService
from services.sampler.snapshots.adapter_slots import AdapterSlots
from services.sampler.snapshots.full_snapshots import FullSnapshots
from services.sampler.snapshots.residency import Residency
from services.sampler.snapshots.snapshots import Snapshots
from services.sampler.snapshots.staging import Staging
from services.trainer.compute.data import LoraSpec
from services.trainer.publish.broadcast import LEFT_OUT, Broadcaster
from services.trainer.publish.turn import Turn
from tinsmith.internal.v1 import sampler_pb2_grpc

BASE = "org/base"
ARRAYS = {"a.lora_A": HostTensor("float32", (4, 8), np.arange(32, dtype="<f4").tobytes())}


class WireEngine:
    """The one worker of a sampler, as far as the weight wire goes. `receiving` holds transfers back."""

    def __init__(self, redis_url: str) -> None:
        self._redis_url = redis_url
        self._group: weights.WeightGroup | None = None
        self.receiving = asyncio.Event()
        self.receiving.set()
        self.begun = asyncio.Event()

    async def join_group(
        self, epoch: int, first_rank: int, world_size: int, medium: str, seconds: float
    ) -> None:
        await self.leave_group()
        url = self._redis_url
        self._group = await asyncio.to_thread(
            weights.join, BASE, epoch, first_rank, world_size, "cpu", url, seconds
        )

    async def leave_group(self) -> None:
        group, self._group = self._group, None
        if group is not None:
            await asyncio.to_thread(group.abort)

    async def receive_adapter(
        self, adapter_id: int, epoch: int, rank: int, specs: list[list[Any]], checksum: int, seconds: float
    ) -> int:
        self.begun.set()
        await self.receiving.wait()
        size = weights.nbytes([TensorSpec(name, dtype, tuple(shape)) for name, dtype, shape in specs])
        assert self._group is not None
        _, arrived = await asyncio.to_thread(self._group.receive, size, seconds)
        if arrived != checksum:
            raise DataLoss("checksum")
        return size

    async def drop_adapters(self, adapter_ids: list[int]) -> None:
        pass


class Wire:
    """A sampler and the trainers that send to it."""

    def __init__(self, client: redis.asyncio.Redis, redis_url: str, directory: Path) -> None:
        self.engine = WireEngine(redis_url)
        data: Any = DataDir(directory)
        engine: Any = self.engine
        full = FullSnapshots(engine, data, Staging(1 << 20, copies=1))
        self.snapshots = Snapshots(engine, data, Residency(1 << 20, 100, copies=1), AdapterSlots(8), full)
        self.trainers = [Broadcaster(client, redis_url, BASE, "cpu", torch.float32) for _ in range(2)]

    async def send(self, trainer: int, version: int) -> int:
        """How many workers got it."""
        return (await self.trainers[trainer].send(f"s:train:{trainer}", version, LoraSpec(1), ARRAYS))[1]

    @property
    def resident(self) -> set[str]:
        return {str(key) for key in self.snapshots.resident()}


@pytest.fixture
async def wire(redis_client: redis.asyncio.Redis, redis_url: str, tmp_path: Path) -> AsyncIterator[Wire]:
    async with running(redis_client, redis_url, tmp_path) as wire:
        yield wire


@asynccontextmanager
async def running(client: redis.asyncio.Redis, redis_url: str, directory: Path) -> AsyncIterator[Wire]:
    wire = Wire(client, redis_url, directory)
    nothing: Any = None
    service = SamplerService(nothing, nothing, nothing, nothing, wire.snapshots)
    add = sampler_pb2_grpc.add_SamplerServiceServicer_to_server
    server = await rpc.serve([(add, service, "sampler")], "127.0.0.1:0")
    address = f"127.0.0.1:{server.port}"
    await Registry(client).announce(
        ServiceRecord(kind="sampler", id="s", address=address, base_model=BASE, state="ready", world_size=1)
    )
    try:
        yield wire
    finally:
        await wire.engine.leave_group()
        for trainer in wire.trainers:
            await trainer.close()
        await server.drain(1)


async def test_trainers_that_send_in_turn_never_leave_the_sampler_out(wire: Wire) -> None:
    before = LEFT_OUT._value.get()
    for version in range(1, 4):
        for trainer in range(2):
            assert await wire.send(trainer, version) == 1
    assert wire.resident == {
        f"s:train:{trainer}@{version}" for trainer in range(2) for version in range(1, 4)
    }
    assert LEFT_OUT._value.get() == before


async def test_trainers_that_send_at_once_both_arrive(wire: Wire) -> None:
    before = LEFT_OUT._value.get()
    sent = [wire.send(trainer, version) for version in range(1, 4) for trainer in range(2)]
    assert await asyncio.gather(*sent) == [1] * 6
    assert LEFT_OUT._value.get() == before


async def test_what_a_sampler_receives_arrives_before_it_joins_another_group(wire: Wire) -> None:
    assert await wire.send(0, 1) == 1
    epoch = wire.snapshots.group_epoch
    wire.engine.begun.clear()
    wire.engine.receiving.clear()
    first = asyncio.create_task(wire.send(0, 2))
    await wire.engine.begun.wait()
    # A trainer that does not wait for its turn, as after an outage of Redis.
    joining = asyncio.create_task(wire.snapshots.join_group(epoch + 1, 1, 2, "gloo", 1.0))
    await asyncio.sleep(0.05)
    assert wire.snapshots.group_epoch == epoch
    wire.engine.receiving.set()
    assert await first == 1
    with pytest.raises(Exception, match=r"."):
        # Nobody else comes to that group.
        await joining


async def test_a_trainer_that_waits_for_its_turn_in_vain_does_without(
    wire: Wire, redis_client: redis.asyncio.Redis
) -> None:
    await redis_client.set(keys.weight_turn(BASE), "another")
    wire.trainers[0]._turn = Turn(redis_client, BASE, patience=0.1)
    assert await wire.send(0, 1) == 0
    await redis_client.delete(keys.weight_turn(BASE))
    assert await wire.send(0, 1) == 1
    assert not await redis_client.exists(keys.weight_turn(BASE))

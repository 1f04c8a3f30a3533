"""The trainer's end of the weight wire where no sampler answers."""

from __future__ import annotations

import asyncio

import pytest
import redis.asyncio
import torch

from services.common.contract.tensors import HostTensor
from services.common.state.registry import Registry, ServiceRecord
from services.trainer.compute.data import LoraSpec
from services.trainer.publish import broadcast
from services.trainer.publish.broadcast import Broadcaster

ARRAYS = {"a.lora_A": HostTensor("float32", (1, 1), b"\0" * 4)}


async def test_connections_to_samplers_that_are_gone_are_closed(
    redis_client: redis.asyncio.Redis, redis_url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(broadcast, "_ANSWER_S", 0.2)
    monkeypatch.setattr(broadcast, "JOIN_TIMEOUT_S", 1.0)
    registry = Registry(redis_client)
    sender = Broadcaster(redis_client, redis_url, "org/base", "cpu", torch.float32)
    for number in range(3):
        # Every restart of a pod gives it another address. Nobody listens there.
        record = ServiceRecord(
            kind="sampler", id=f"s-{number}", address=f"127.0.0.{number + 2}:9", base_model="org/base"
        )
        await registry.announce(record)
        assert await sender.send("s:train:0", number, LoraSpec(1), ARRAYS) == (0, 0)
        assert [address for address, _ in sender._channels] == [record.address]
        await registry.withdraw("sampler", record.id)
    # A thread that still joins when the interpreter ends would take it down.
    await asyncio.wait(set(sender._abandoned), timeout=20)
    await sender.close()
    assert not sender._channels


async def test_weights_go_from_the_device_only_where_every_sampler_has_a_gpu_of_its_own(
    redis_client: redis.asyncio.Redis, redis_url: str
) -> None:
    registry = Registry(redis_client)

    async def announce(name: str, *gpus: str) -> None:
        record = ServiceRecord(
            kind="sampler", id=name, address="127.0.0.2:9", base_model="org/base", gpus=gpus
        )
        await registry.announce(record)

    sender = Broadcaster(redis_client, redis_url, "org/base", "cpu", torch.float32)
    sender._gpu = "GPU-0"
    assert not await sender.sends_from_device(), "there is nobody to send to"
    await announce("s-0", "GPU-1")
    assert await sender.sends_from_device()
    await announce("s-1", "GPU-0")
    assert not await sender.sends_from_device(), "one shares the trainer's GPU"
    await announce("s-1", "GPU-2")
    assert await sender.sends_from_device()
    sender._gpu = ""
    assert not await sender.sends_from_device(), "the trainer has none"
    await sender.close()

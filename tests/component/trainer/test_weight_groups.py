"""The trainer's end of the weight wire, with receivers that answer."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncIterator
from typing import Any

import grpc
import pytest
import redis.asyncio
import torch

from services.common import weights
from services.common.contract.tensors import from_values
from services.common.weights import base
from services.common.weights.gloo import GlooGroup
from services.trainer.compute.data import LoraSpec
from services.trainer.publish import broadcast
from services.trainer.publish.broadcast import Broadcaster
from tests.component.trainer.receiver import Receiver
from tests.component.trainer.world import BASE_MODEL
from tinsmith.internal.v1 import sampler_pb2

ARRAYS = {
    f"linear.lora_{part}": from_values(
        torch.randn(*shape, generator=torch.Generator().manual_seed(1)).numpy()
    )
    for part, shape in (("A", (2, 8)), ("B", (16, 2)))
}


@pytest.fixture
async def sender(redis_client: redis.asyncio.Redis, redis_url: str) -> AsyncIterator[Broadcaster]:
    sender = Broadcaster(redis_client, redis_url, BASE_MODEL, "cpu", torch.float32)
    yield sender
    await sender.close()


async def sent(sender: Broadcaster, version: int) -> int:
    """To how many samplers a snapshot went."""
    return (await sender.send("s:train:0", version, LoraSpec(2), ARRAYS))[1]


async def test_a_group_whose_end_blocks_holds_up_neither_the_loop_nor_the_next_group(
    sender: Broadcaster, redis_url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    begun, may_end = threading.Event(), threading.Event()
    abort = GlooGroup._abort_medium

    def held(group: GlooGroup) -> None:
        # The receivers' own ends go their way.
        if group.rank == 0 and not begun.is_set():
            begun.set()
            assert may_end.wait(60), "the loop did not go on"
        abort(group)

    monkeypatch.setattr(GlooGroup, "_abort_medium", held)
    try:
        with Receiver(redis_url, "one") as one:
            assert await sent(sender, 1) == 1
            with Receiver(redis_url, "two") as two:
                # The samplers changed, so the first group is left, and never is.
                assert await sent(sender, 2) == 2
                assert begun.is_set() and not may_end.is_set()
                assert one.snapshots.keys() == {("s:train:0", 1), ("s:train:0", 2)}
                assert two.snapshots.keys() == {("s:train:0", 2)}
    finally:
        may_end.set()


class Hanging(Receiver):
    """A receiver that takes a call and does nothing, until it may."""

    def __init__(self, redis_url: str, name: str, *, joins: bool) -> None:
        super().__init__(redis_url, name)
        self.may_go_on = threading.Event()
        self._joins = joins

    def JoinGroup(self, request: sampler_pb2.JoinGroupRequest, context: Any) -> sampler_pb2.JoinGroupResponse:
        if not self._joins:
            self.may_go_on.wait(60)
            context.abort(grpc.StatusCode.CANCELLED, "too late")
        return super().JoinGroup(request, context)

    def ReceiveSnapshot(
        self, request: sampler_pb2.ReceiveSnapshotRequest, context: Any
    ) -> sampler_pb2.ReceiveSnapshotResponse:
        self.may_go_on.wait(60)
        context.abort(grpc.StatusCode.CANCELLED, "too late")
        raise AssertionError


@pytest.mark.parametrize(
    ("joins", "bytes_per_s"),
    [(False, 20e6), (True, 20e6), (True, 4.0)],
    ids=["joining", "receiving", "receiving the first of many buckets"],
)
async def test_a_member_that_hangs_is_left_out_and_nobody_else(
    sender: Broadcaster, redis_url: str, monkeypatch: pytest.MonkeyPatch, joins: bool, bytes_per_s: float
) -> None:
    monkeypatch.setattr(broadcast, "JOIN_TIMEOUT_S", 3.0)
    monkeypatch.setattr(base, "_MEMBER_S", 2.0)
    monkeypatch.setattr(base, "SLOWEST_BYTES_PER_S", bytes_per_s)
    if bytes_per_s == 4.0:
        # Of 192 bytes in all.
        for module in (base, weights):
            monkeypatch.setattr(module, "BUCKET_BYTES", 4)
    monkeypatch.setattr(broadcast, "_ANSWER_S", 1.0)
    hanging = Hanging(redis_url, "b", joins=joins)
    with Receiver(redis_url, "a") as a, hanging, Receiver(redis_url, "c") as c:
        try:
            await sent(sender, 1)
            assert {member for member, _ in sender._left_out} == {"b"}
            assert await sent(sender, 2) == 2
            for receiver in (a, c):
                assert ("s:train:0", 2) in receiver.snapshots
            assert {member for member, _ in sender._left_out} == {"b"}
        finally:
            hanging.may_go_on.set()
            if sender._abandoned:
                await asyncio.wait(set(sender._abandoned), timeout=30)

"""What operations used is counted by whoever writes their results down."""

from __future__ import annotations

import time

import redis.asyncio

from services.common.state.journal import Journal
from services.gateway.records.usage import UsageStore, day_of
from tests.unit.gateway.dispatching import MODEL, GatewayFactory, batch, create
from tests.unit.gateway.scripted_services import BASE, ScriptedTrainer, serving
from tinsmith.internal.v1 import operation_pb2


def of_ann(seq_id: int, tokens: int) -> operation_pb2.Operation:
    made = batch(seq_id)
    made.origin.owner = "ann"
    made.forward_backward.data.add().tokens.data = bytes(4 * tokens)
    return made


async def test_an_operation_that_a_restarted_trainer_replays_is_counted_once(
    redis_client: redis.asyncio.Redis, gateway_on: GatewayFactory, trainer: ScriptedTrainer
) -> None:
    gateway = await gateway_on()
    began = time.time()
    async with serving(redis_client, trainer, "trainer-0"):
        await gateway.accept(create(), of_ann(1, 3))
        assert (await gateway.result(1)).HasField("forward_backward")
    restarted = ScriptedTrainer(Journal(redis_client), {})
    async with serving(redis_client, restarted, "trainer-0"):
        await gateway.accept(of_ann(2, 4))
        assert (await gateway.result(2)).HasField("forward_backward")
    assert restarted.order(MODEL) == [0, 1, 2]
    found = await UsageStore(redis_client).used("ann", sorted({day_of(began), day_of(time.time())}))
    assert sum(one.amount for one in found) == 7
    assert {(one.kind, one.base_model, one.run) for one in found} == {("trained", BASE, MODEL)}

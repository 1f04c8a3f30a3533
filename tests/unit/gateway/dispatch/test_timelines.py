"""What became of operations is told once to the timelines of their sessions."""

from __future__ import annotations

import time

import redis.asyncio

from services.common.contract.errors import InvalidRequest
from services.common.state.journal import Journal
from services.gateway.timelines.event import Event
from tests.unit.gateway.dispatching import MODEL, GatewayFactory, batch, create, step
from tests.unit.gateway.scripted_services import ScriptedTrainer, serving


def summary(event: Event) -> tuple[str, int, str, str]:
    return event.object_id, event.seq_id, event.kind, event.outcome


async def test_an_operation_is_told_of_once_however_often_a_trainer_repeats_it(
    redis_client: redis.asyncio.Redis, gateway_on: GatewayFactory, trainer: ScriptedTrainer
) -> None:
    gateway, began = await gateway_on(), time.time()
    trainer.fail[2] = InvalidRequest("no such thing", "odd")
    first = batch(1)
    first.origin.accepted_at = began - 1
    made, second, last = create(), batch(2, forward_only=True), step(3)
    for operation in (made, first, second, last):
        operation.origin.owner = "ann"
    first.origin.traceparent = f"00-{'ab' * 16}-{'cd' * 8}-01"
    async with serving(redis_client, trainer, "trainer-0"):
        await gateway.accept(made, first, second)
        await gateway.result(2)
    restarted = ScriptedTrainer(Journal(redis_client), {})
    async with serving(redis_client, restarted, "trainer-0"):
        await gateway.accept(last)
        await gateway.result(3)
    assert restarted.order(MODEL) == [0, 1, 3]
    await gateway.timelines.flush()
    told = {one.seq_id: one for one in await gateway.timelines.of("s")}
    assert [summary(told[number]) for number in sorted(told)] == [
        (MODEL, 0, "create_model", "done"),
        (MODEL, 1, "forward_backward", "done"),
        (MODEL, 2, "forward", "odd"),
        (MODEL, 3, "optim_step", "done"),
    ]
    assert (told[1].accepted, told[1].trace_id) == (began - 1, "ab" * 16)
    assert began <= told[1].began <= told[1].ended <= time.time()

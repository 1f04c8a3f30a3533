"""What is counted for an operation under way to a trainer is what it takes.

    python -m tests.unit.gateway.dispatch.test_send_memory REDIS_URL TRAINER OPERATIONS

is the gateway's side, in a process of its own: it sends what the journal has and prints the peak of its
memory, in times of the payload.
"""

from __future__ import annotations

import asyncio
import json
import sys
from asyncio.subprocess import PIPE

import pytest
import redis.asyncio

from services.common.process import rpc
from services.common.process.carrier.asking import Link
from services.common.state import redis_client, registry
from services.common.state.journal import Journal
from services.gateway.dispatch.calls import Calls
from services.gateway.dispatch.plan import Send
from services.gateway.dispatch.send_room import COPIES, SendRoom
from tests.unit.gateway.dispatching import MODEL, batch, create
from tests.unit.gateway.edge.peak_memory import Peak
from tests.unit.gateway.scripted_services import ScriptedTrainer, serving
from tinsmith.v1 import types_pb2

TENSORS, TENSOR_BYTES = 512, 64 * 1024


@pytest.mark.parametrize("operations", [pytest.param(8, id="large"), pytest.param(64, id="carried")])
async def test_operations_under_way_take_no_more_than_is_counted(
    redis_client: redis.asyncio.Redis, redis_url: str, trainer: ScriptedTrainer, operations: int
) -> None:
    journal = Journal(redis_client)
    await journal.accept(create(), "ann")
    for seq_id in range(1, operations + 1):
        operation = batch(seq_id)
        for number in range(TENSORS // operations):
            data = bytes([seq_id, number]) * (TENSOR_BYTES // 2)
            operation.forward_backward.data.add().tokens.CopyFrom(types_pb2.Tensor(data=data))
        await journal.accept(operation, "ann")
    async with serving(redis_client, trainer, "trainer-0"):
        (record,) = await registry.live(redis_client, "trainer")
        command = (
            "-m",
            "tests.unit.gateway.dispatch.test_send_memory",
            redis_url,
            record.address,
            str(operations),
        )
        process = await asyncio.create_subprocess_exec(sys.executable, *command, stdout=PIPE)
        told, _ = await asyncio.wait_for(process.communicate(), 60)
    assert 1 < json.loads(told) <= COPIES


async def send(redis_url: str, trainer: str, number_of: int) -> None:
    client = redis_client.connect(redis_url)
    journal = Journal(client)
    calls = Calls(60, _nothing, _nothing, lambda: None, SendRoom(1 << 40), _Nobody())
    async with rpc.channel(trainer) as channel:
        link = Link(channel)
        await channel.channel_ready()
        await journal.operations(MODEL, [0])
        peak = Peak()
        peak.forget()
        operations = await journal.operations(MODEL, list(range(1, number_of + 1)))
        size = 0
        for number, operation in enumerate(operations):
            assert operation is not None
            size += operation.ByteSize()
            # Nothing comes after them: they wait for one that never comes.
            calls.start("trainer-0", link, Send(number + 1, number, 0, False), operation, 1)
        del operations, operation
        await asyncio.sleep(3)
        print(json.dumps(peak.of(size)))
        await calls.end(())
    await client.aclose()


class _Nobody:
    """Waits for no result."""

    def expect(self, seq_id: int) -> None:
        pass

    def expect_no_longer(self, seq_id: int) -> None:
        pass


async def _nothing(*_: object) -> bool:
    return False


if __name__ == "__main__":
    asyncio.run(send(sys.argv[1], sys.argv[2], int(sys.argv[3])))

"""One stream of all samples of a client, while gateways go: nothing is lost, nothing is told twice."""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterator, Sequence
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Any

import grpc
import grpc.aio
import pytest

from services.common.state import redis_client
from tests.component.gateway.process import ALICE, BOB, GatewayProcess, launch
from tests.component.own_redis import redis_server
from tests.unit.gateway.scripted_services import BASE, ScriptedSampler, serving
from tests.unit.gateway.tensors import tensor
from tinsmith.internal.v1 import sampler_pb2
from tinsmith.v1 import results_pb2, sampling_pb2, service_pb2_grpc, sessions_pb2

METADATA = (("x-api-key", ALICE),)
MANY = 200


def named(request: sampler_pb2.SampleRequest) -> sampler_pb2.SampleResponse:
    """A result that says whose it is."""
    reply = sampler_pb2.SampleResponse()
    reply.result.sequences.add().tokens.data = request.request_id.encode()
    return reply


@pytest.fixture
def own_redis(tmp_path: Path) -> Iterator[str]:
    with redis_server(tmp_path) as url:
        yield url


@pytest.fixture
async def sampler(own_redis: str) -> AsyncIterator[ScriptedSampler]:
    made, client = ScriptedSampler("a"), redis_client.connect(own_redis)
    made.answer = named
    async with serving(client, made, "sampler-0", vocab_size=512, context_length=64):
        yield made
        made.gate.set()
    await client.aclose()


@pytest.fixture
def gateways(own_redis: str, tmp_path: Path, sampler: ScriptedSampler) -> Iterator[Sequence[GatewayProcess]]:
    started = [launch(own_redis, tmp_path, f"gateway-{index}") for index in range(2)]
    try:
        yield [one.wait_ready() for one in started]
    finally:
        for one in started:
            one.process.kill()
            one.process.communicate(timeout=10)


async def new_session(stub: Any) -> str:
    made = await stub.CreateSession(sessions_pb2.CreateSessionRequest(), timeout=20, metadata=METADATA)
    asked = sampling_pb2.CreateSamplingSessionRequest(session_id=made.session_id, base_model=BASE)
    return (await stub.CreateSamplingSession(asked, timeout=20, metadata=METADATA)).sampling_session_id


async def sample(stub: Any, session: str, seq_id: int) -> str:
    params = sampling_pb2.SamplingParams(max_tokens=4, temperature=1, top_k=-1, top_p=1)
    params.stop.never.SetInParent()
    request = sampling_pb2.SampleRequest(
        sampling_session_id=session, seq_id=seq_id, prompt=tensor([1], "<i4"), num_samples=1, params=params
    )
    return (await stub.Sample(request, timeout=20, metadata=METADATA)).request_id


def watch(stub: Any, session: str, cursor: int = 0, key: str = ALICE) -> Any:
    request = results_pb2.WatchSamplesRequest(sampling_session_id=session, cursor=cursor)
    return stub.WatchSamples(request, timeout=120, metadata=(("x-api-key", key),))


async def told(call: Any, count: int) -> list[tuple[str, int]]:
    """The next samples of a stream, each with its own result, and their cursors."""
    found = []
    for _ in range(count):
        one = await call.read()
        assert one is not grpc.aio.EOF
        whole = results_pb2.OperationResult.FromString(one.piece.data)
        assert whole.sample.sequences[0].tokens.data.decode() == one.request_id
        found.append((one.request_id, one.cursor))
    return found


async def test_a_client_goes_on_at_another_gateway_with_its_cursor_and_misses_nothing(
    gateways: Sequence[GatewayProcess], sampler: ScriptedSampler
) -> None:
    async with AsyncExitStack() as channels:
        stubs = []
        for gateway in gateways:
            channel = grpc.aio.insecure_channel(f"127.0.0.1:{gateway.grpc_port}")
            stubs.append(service_pb2_grpc.TinsmithServiceStub(await channels.enter_async_context(channel)))
        session = await new_session(stubs[0])

        # What ends at either gateway comes to a stream at one, also while it goes on.
        call = watch(stubs[0], session)
        names = [await sample(stubs[number % 2], session, number) for number in range(MANY // 2)]
        found = await told(call, len(names))
        call.cancel()
        names += [await sample(stubs[number % 2], session, number) for number in range(MANY // 2, MANY)]

        # It breaks off in the middle, and the other gateway goes on.
        call = watch(stubs[1], session, found[len(names) // 4][1])
        found = found[: len(names) // 4 + 1] + await told(call, len(names) // 2)
        call.cancel()

        # One gateway dies, with samples of its own and a stream that waits for them.
        sampler.gate.clear()
        late = [await sample(stubs[number % 2], session, MANY + number) for number in range(20)]
        call = watch(stubs[0], session, found[-1][1])
        found += await told(call, len(names) - len(found))
        gateways[0].process.kill()
        with pytest.raises(grpc.aio.AioRpcError) as broken:
            await call.read()
        assert broken.value.code() is grpc.StatusCode.UNAVAILABLE
        sampler.gate.set()
        call = watch(stubs[1], session, found[-1][1])
        found += await told(call, len(late))
        call.cancel()

        assert sorted(name for name, _ in found) == sorted(names + late)
        assert [cursor for _, cursor in found] == sorted({cursor for _, cursor in found})
        # Nothing was said to be there: all of it is told again, in the same order.
        call = watch(stubs[1], session)
        assert await told(call, len(found)) == found
        call.cancel()

        with pytest.raises(grpc.aio.AioRpcError) as refused:
            await watch(stubs[1], session, key=BOB).read()
        assert refused.value.code() is grpc.StatusCode.NOT_FOUND

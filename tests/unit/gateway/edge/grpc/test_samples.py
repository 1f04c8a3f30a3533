"""gRPC: samples, and the sessions that they are asked of."""

import asyncio
from collections.abc import AsyncIterator
from typing import Any

import grpc
import grpc.aio
import msgspec
from redis.asyncio.client import PubSub

from services.common.contract.experts.routing import Routing
from services.common.state import keys
from tests.unit.gateway.edge.grpc.calls import Client, create, int32, status
from tests.unit.gateway.edges import ALICE, BASE, BOB, Edges
from tinsmith.v1 import (
    checkpoints_pb2,
    models_pb2,
    results_pb2,
    sampling_pb2,
    sessions_pb2,
)


async def test_a_named_save_opens_a_sampling_session(edges: Edges, channel: grpc.aio.Channel) -> None:
    alice = Client(channel, ALICE)
    model = await create(edges, alice)
    named = checkpoints_pb2.SaveForSamplerRequest(model_id=model, seq_id=1, name="a")
    assert (await alice("SaveForSampler", named)).sampling_session_id == ""
    path = f"tinker://{model}/sampler_weights/a"
    await edges.answer(model, 1, save_for_sampler=checkpoints_pb2.SaveForSamplerResult(path=path, version=1))
    opened = await alice(
        "CreateSamplingSession",
        sampling_pb2.CreateSamplingSessionRequest(session_id=model.split(":")[0], model_path=path),
    )
    assert opened.sampling_session_id == f"{model.split(':')[0]}:sample:0"
    asked = sampling_pb2.GetSamplingSessionRequest(sampling_session_id=opened.sampling_session_id)
    assert await alice("GetSamplingSession", asked) == sampling_pb2.GetSamplingSessionResponse(
        base_model=BASE, model_id=model, model_path=path
    )
    stranger = Client(channel, BOB)("GetSamplingSession", asked)
    assert await status(stranger) is grpc.StatusCode.NOT_FOUND


async def sampling_of(alice: Client) -> sampling_pb2.SampleRequest:
    """A sample of a new sampling session of the base model."""
    session = (await alice("CreateSession", sessions_pb2.CreateSessionRequest())).session_id
    opened = await alice(
        "CreateSamplingSession",
        sampling_pb2.CreateSamplingSessionRequest(session_id=session, base_model=BASE),
    )
    params = sampling_pb2.SamplingParams(max_tokens=4, temperature=1, top_k=-1, top_p=1)
    params.stop.never.SetInParent()
    return sampling_pb2.SampleRequest(
        sampling_session_id=opened.sampling_session_id, prompt=int32([1]), num_samples=1, params=params
    )


async def test_experts_are_asked_of_weights_that_a_sampler_runs_that_tells_them(
    edges: Edges, channel: grpc.aio.Channel
) -> None:
    alice = Client(channel, ALICE)
    sampler, trainer = (edges.announcers[kind] for kind in ("sampler", "trainer"))
    base = await sampling_of(alice)
    base.routed_experts = True
    assert await status(alice("Sample", base)) is grpc.StatusCode.INVALID_ARGUMENT
    (listed,) = (await alice("ListModels", models_pb2.ListModelsRequest())).models
    assert not listed.tells_routed_experts and not listed.replays_routed_experts
    model = await create(edges, alice)
    save = checkpoints_pb2.SaveForSamplerRequest(model_id=model, seq_id=1)
    session = (await alice("SaveForSampler", save)).sampling_session_id
    saved = checkpoints_pb2.SaveForSamplerResult(sampling_session_id=session, version=1)
    await edges.answer(model, 1, save_for_sampler=saved)
    routing = Routing(layers=2, top_k=2, experts=8)
    for announcer in (sampler, trainer):
        await announcer.update(msgspec.structs.replace(announcer.record, routing=routing, adapts=False))
    await edges.discovery.refresh()
    (listed,) = (await alice("ListModels", models_pb2.ListModelsRequest())).models
    assert listed.tells_routed_experts and listed.replays_routed_experts
    await alice("Sample", base)
    adapter = sampling_pb2.SampleRequest()
    adapter.CopyFrom(base)
    adapter.sampling_session_id = session
    assert await status(alice("Sample", adapter)) is grpc.StatusCode.INVALID_ARGUMENT
    await sampler.update(msgspec.structs.replace(sampler.record, adapts=True))
    await edges.discovery.refresh()
    await alice("Sample", adapter)


async def test_a_sample_is_given_up(edges: Edges, channel: grpc.aio.Channel) -> None:
    alice = Client(channel, ALICE)
    request_id = (await alice("Sample", await sampling_of(alice))).request_id
    cancel = sampling_pb2.CancelSampleRequest(request_id=request_id)
    assert await status(Client(channel, BOB)("CancelSample", cancel)) is grpc.StatusCode.NOT_FOUND
    await alice("CancelSample", cancel)
    found = await alice("GetResult", results_pb2.GetResultRequest(request_id=request_id))
    assert found.result.error.code == "cancelled"


async def test_a_request_has_one_name_by_which_it_is_given_up_and_waited_for(
    edges: Edges, channel: grpc.aio.Channel
) -> None:
    alice = Client(channel, ALICE)
    request_id = (await alice("Sample", await sampling_of(alice))).request_id
    session, _, number = request_id.rpartition(":")
    other = f"{session}:0{number}"
    cancel = sampling_pb2.CancelSampleRequest(request_id=other)
    assert await status(alice("CancelSample", cancel)) is grpc.StatusCode.INVALID_ARGUMENT
    asked = results_pb2.GetResultRequest(request_id=other)
    assert await status(alice("GetResult", asked)) is grpc.StatusCode.NOT_FOUND
    assert await edges.samples.samples_of("gateway-0") == {request_id}
    await alice("CancelSample", sampling_pb2.CancelSampleRequest(request_id=request_id))
    assert await edges.samples.samples_of("gateway-0") == set()


async def test_who_keeps_a_sample_is_answered_when_its_result_is_there(
    edges: Edges, channel: grpc.aio.Channel
) -> None:
    alice = Client(channel, ALICE)
    request_id = (await alice("Sample", await sampling_of(alice))).request_id
    keep = sampling_pb2.CancelSampleRequest(request_id=request_id, keep=True)
    assert await status(Client(channel, BOB)("CancelSample", keep)) is grpc.StatusCode.NOT_FOUND
    async with edges.redis.pubsub() as listener:
        await listener.subscribe(keys.SAMPLE_CHANNEL)
        ending = asyncio.create_task(alice("CancelSample", keep))
        words = [message["data"] async for message in _some(listener, 3)]
    assert all(request_id.encode() in word for word in words), "it is said until somebody has heard it"
    assert not ending.done()
    await edges.answer_sample(request_id, sampling_pb2.SampleResult())
    await ending
    await alice("CancelSample", keep)


async def _some(listener: PubSub, count: int) -> AsyncIterator[dict[str, Any]]:
    async with asyncio.timeout(60):
        while count:
            message = await listener.get_message(ignore_subscribe_messages=True, timeout=1)
            if message is not None:
                count -= 1
                yield message


async def test_a_sample_of_a_snapshot_cannot_go_on_with_newer_weights(
    edges: Edges, channel: grpc.aio.Channel
) -> None:
    alice = Client(channel, ALICE)
    sample = await sampling_of(alice)
    sample.on_update = sampling_pb2.ON_UPDATE_CONTINUE
    assert await status(alice("Sample", sample)) is grpc.StatusCode.INVALID_ARGUMENT

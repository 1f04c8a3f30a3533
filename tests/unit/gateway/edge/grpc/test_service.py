"""gRPC: the public service, with the same keys and the same application as HTTP."""

import dataclasses
import importlib.metadata
import subprocess
import sys

import grpc
import grpc.aio
import numpy as np
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection_pb2, reflection_pb2_grpc

from services.common.process import rpc
from services.gateway.edge.grpc import convert
from tests.unit.gateway.edge.grpc.calls import Client, create, int32, status
from tests.unit.gateway.edges import ALICE, BASE, BOB, Edges
from tinsmith.v1 import (
    checkpoints_pb2,
    models_pb2,
    results_pb2,
    sampling_pb2,
    server_pb2,
    sessions_pb2,
    training_pb2,
    types_pb2,
)


async def test_a_client_trains_saves_and_samples(edges: Edges, channel: grpc.aio.Channel) -> None:
    alice = Client(channel, ALICE)
    models = await alice("ListModels", models_pb2.ListModelsRequest())
    assert [(model.name, model.trainable, model.sampleable) for model in models.models] == [
        (BASE, True, True)
    ]
    model = await create(edges, alice)
    batch = training_pb2.ForwardBackward(loss_fn="cross_entropy")
    datum = batch.data.add(tokens=int32([1, 2]))
    datum.loss_inputs["target_tokens"].MergeFrom(
        types_pb2.Tensor(dtype=types_pb2.DATA_TYPE_INT64, shape=[2], data=np.array([2, 3], "<i8").tobytes())
    )
    datum.loss_inputs["weights"].MergeFrom(
        types_pb2.Tensor(dtype=types_pb2.DATA_TYPE_FLOAT32, shape=[2], data=np.array([0, 1], "<f4").tobytes())
    )
    sent = training_pb2.ForwardBackwardRequest(model_id=model, seq_id=1, forward_backward=batch)
    assert (await alice("ForwardBackward", sent)).request_id == f"{model}:1"
    journaled = await edges.operation(model, 1)
    assert journaled is not None and journaled.forward_backward == batch
    adam = training_pb2.AdamParams(learning_rate=0.1, beta1=0.9, beta2=0.95, eps=1e-8)
    await alice("OptimStep", training_pb2.OptimStepRequest(model_id=model, seq_id=2, adam=adam))
    waiting = results_pb2.GetResultRequest(request_id=f"{model}:2", timeout_seconds=0.1)
    assert not (await alice("GetResult", waiting)).HasField("result")
    stepped = training_pb2.OptimStepResult(metrics={"grad_norm": 1.0})
    await edges.answer(model, 2, optim_step=stepped)
    assert (await alice("GetResult", waiting)).result.optim_step == stepped
    saved = await alice("SaveForSampler", checkpoints_pb2.SaveForSamplerRequest(model_id=model, seq_id=3))
    done = checkpoints_pb2.SaveForSamplerResult(sampling_session_id=saved.sampling_session_id, version=3)
    await edges.answer(model, 3, save_for_sampler=done)
    params = sampling_pb2.SamplingParams(max_tokens=4, temperature=1, top_k=-1, top_p=1)
    params.stop.never.SetInParent()
    sample = sampling_pb2.SampleRequest(
        sampling_session_id=saved.sampling_session_id, prompt=int32([1]), num_samples=1, params=params
    )
    accepted = await alice("Sample", sample)
    request = await edges.sample(accepted.request_id)
    assert (request.snapshot.model_id, request.snapshot.version) == (model, 3)


async def test_a_field_of_a_newer_contract_is_refused_and_not_passed_over(
    edges: Edges, channel: grpc.aio.Channel
) -> None:
    alice = Client(channel, ALICE)
    model = await create(edges, alice)
    unknown = b"\xf8\x07\x01"  # Field 127, the number 1.
    step = training_pb2.OptimStepRequest(model_id=model, seq_id=1)
    outer = training_pb2.OptimStepRequest.FromString(step.SerializeToString() + unknown)
    step.adam.ParseFromString(unknown)
    for request in (outer, step):
        with pytest.raises(grpc.aio.AioRpcError, match="127") as caught:
            await alice("OptimStep", request)
        assert caught.value.code() is grpc.StatusCode.INVALID_ARGUMENT
    assert await edges.operation(model, 1) is None


async def test_a_session_lives_by_heartbeats_until_it_is_finished(
    edges: Edges, channel: grpc.aio.Channel
) -> None:
    alice, bob = Client(channel, ALICE), Client(channel, BOB)
    new = sessions_pb2.CreateSessionRequest(idempotency_key="once", display_name="mine")
    session = (await alice("CreateSession", new)).session_id
    assert (await alice("CreateSession", new)).session_id == session
    beat = sessions_pb2.HeartbeatRequest(session_id=session)
    await alice("Heartbeat", beat)
    assert await status(bob("Heartbeat", beat)) is grpc.StatusCode.NOT_FOUND
    finish = sessions_pb2.FinishSessionRequest(
        session_id=session, reason=sessions_pb2.FINISH_REASON_ERRORED, detail="out of cookies"
    )
    assert await status(bob("FinishSession", finish)) is grpc.StatusCode.NOT_FOUND
    for _ in range(2):
        await alice("FinishSession", finish)
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await alice("Heartbeat", beat)
    assert caught.value.code() is grpc.StatusCode.NOT_FOUND
    assert dict(caught.value.trailing_metadata() or ())[rpc.CODE_METADATA] == "session_finished"


async def test_keys_and_owners_hold_as_over_http(edges: Edges, channel: grpc.aio.Channel) -> None:
    alice, bob = Client(channel, ALICE), Client(channel, BOB)
    for key in ("", "tml-wrong"):
        call = Client(channel, key)("ListModels", models_pb2.ListModelsRequest())
        assert await status(call) is grpc.StatusCode.UNAUTHENTICATED
    model = await create(edges, alice)
    step = training_pb2.OptimStepRequest(model_id=model, seq_id=1)
    assert await status(bob("OptimStep", step)) is grpc.StatusCode.NOT_FOUND
    step.model_id = "nobody:train:0"
    assert await status(alice("OptimStep", step)) is grpc.StatusCode.NOT_FOUND


async def test_a_refused_request_uses_up_its_seq_id(edges: Edges, channel: grpc.aio.Channel) -> None:
    alice = Client(channel, ALICE)
    model = await create(edges, alice)
    empty = training_pb2.ForwardBackwardRequest(model_id=model, seq_id=1)
    request_id = (await alice("ForwardBackward", empty)).request_id
    found = await alice("GetResult", results_pb2.GetResultRequest(request_id=request_id))
    assert found.result.error.category == types_pb2.ERROR_CATEGORY_USER
    step = training_pb2.OptimStepRequest(model_id=model, seq_id=1, adam=training_pb2.AdamParams(eps=1))
    assert await status(alice("OptimStep", step)) is grpc.StatusCode.ALREADY_EXISTS


async def test_health_and_reflection_are_on(edges: Edges, channel: grpc.aio.Channel) -> None:
    stub = health_pb2_grpc.HealthStub(channel)
    request = health_pb2.HealthCheckRequest(service="tinsmith.v1.TinsmithService")
    answer = await stub.Check(request, timeout=60)
    assert answer.status == health_pb2.HealthCheckResponse.SERVING
    watch = stub.Watch(request, timeout=60)
    assert (await watch.read()).status == health_pb2.HealthCheckResponse.SERVING
    watch.cancel()
    ask = reflection_pb2_grpc.ServerReflectionStub(channel).ServerReflectionInfo
    asked = [reflection_pb2.ServerReflectionRequest(list_services="")] * 2
    listed = [answer async for answer in ask(iter(asked), timeout=60, metadata=(("x-api-key", ALICE),))]
    names = [{service.name for service in answer.list_services_response.service} for answer in listed]
    assert ["tinsmith.v1.TinsmithService" in found for found in names] == [True, True]
    assert await status(ask(timeout=60).read()) is grpc.StatusCode.UNAUTHENTICATED


def test_the_gateway_runs_without_torch_vllm_and_deepspeed() -> None:
    program = """
import sys
class Blocker:
    def find_spec(self, name, path=None, target=None):
        if name.split('.')[0] in ('torch', 'vllm', 'deepspeed', 'transformers'):
            raise ImportError(name + ' must not be needed')
sys.meta_path.insert(0, Blocker())
import services.gateway.__main__
"""
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr


async def test_both_edges_share_one_budget_of_bytes_and_other_keys_have_theirs(
    edges: Edges, channel: grpc.aio.Channel
) -> None:
    alice, bob = Client(channel, ALICE), Client(channel, BOB)
    budget = edges.app.budget
    large = sessions_pb2.CreateSessionRequest(tags=["x" * 100_000])
    with budget.account("alice") as held:
        held.hold(budget.largest)
        assert await status(alice("CreateSession", large)) is grpc.StatusCode.RESOURCE_EXHAUSTED
        body = {"tags": list(large.tags), "sdk_version": "0.38.0"}
        async with edges.http() as client, edges.http(BOB) as other:
            assert (await client.post("create_session", json=body)).status_code == 429
            # The tag is too long, which is found out by reading it.
            assert (await other.post("create_session", json=body)).status_code == 400
        assert await status(bob("CreateSession", large)) is grpc.StatusCode.INVALID_ARGUMENT
        await alice("CreateSession", sessions_pb2.CreateSessionRequest())
    assert await status(alice("CreateSession", large)) is grpc.StatusCode.INVALID_ARGUMENT


async def test_a_message_that_cannot_be_read_is_the_callers_error(
    edges: Edges, channel: grpc.aio.Channel
) -> None:
    call = channel.unary_unary("/tinsmith.v1.TinsmithService/CreateSession")
    broken = call(b"\xff\xff", timeout=10, metadata=(("x-api-key", ALICE),))
    assert await status(broken) is grpc.StatusCode.INVALID_ARGUMENT


async def test_the_service_says_what_it_takes(edges: Edges, channel: grpc.aio.Channel) -> None:
    info = await Client(channel, ALICE)("GetServerInfo", server_pb2.GetServerInfoRequest())
    assert info.version == importlib.metadata.version("tinsmith")
    assert info.limits.message_bytes == edges.app.limits.grpc_message_bytes
    assert (info.limits.datums, info.limits.result_seconds) == (4096, 60)
    assert "cross_entropy" in info.losses and "stable_reinforce" not in info.losses
    stand_in = dataclasses.replace(edges.app.limits, stable_reinforce_as="ppo")
    assert {*convert.server_info([], stand_in).losses} == {*info.losses, "stable_reinforce"}
    assert [model.name for model in info.models] == [BASE]
    anybody = Client(channel, "")("GetServerInfo", server_pb2.GetServerInfoRequest())
    assert await status(anybody) is grpc.StatusCode.UNAUTHENTICATED

"""gRPC: the public service, with the same keys and the same application as HTTP."""

import asyncio
import dataclasses
import importlib.metadata
import subprocess
import sys
import time
from collections.abc import AsyncIterator
from typing import Any

import grpc
import grpc.aio
import numpy as np
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection_pb2, reflection_pb2_grpc
from redis.asyncio.client import PubSub

from services.common.process import rpc
from services.common.state import keys
from services.gateway.edge.grpc import convert
from tests.unit.gateway.edges import ALICE, BASE, BOB, LORA, VOCAB, Edges
from tinsmith.internal.v1 import operation_pb2
from tinsmith.v1 import (
    checkpoints_pb2,
    models_pb2,
    results_pb2,
    sampling_pb2,
    server_pb2,
    service_pb2_grpc,
    sessions_pb2,
    training_pb2,
    types_pb2,
)


class Client:
    """Calls methods with a key and a deadline."""

    def __init__(self, channel: grpc.aio.Channel, key: str) -> None:
        self._stub = service_pb2_grpc.TinsmithServiceStub(channel)
        self._key = key

    async def __call__(self, method: str, request: object) -> object:
        metadata = (("x-api-key", self._key),) if self._key else ()
        return await getattr(self._stub, method)(request, timeout=10, metadata=metadata)


@pytest.fixture
async def channel(edges: Edges) -> AsyncIterator[grpc.aio.Channel]:
    async with rpc.channel(edges.grpc_address) as found:
        yield found


async def status(call: object) -> grpc.StatusCode:
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await call  # type: ignore[misc]
    return caught.value.code()


def int32(values: list[int]) -> types_pb2.Tensor:
    data = np.array(values, "<i4").tobytes()
    return types_pb2.Tensor(dtype=types_pb2.DATA_TYPE_INT32, shape=[len(values)], data=data)


async def create(edges: Edges, alice: Client) -> str:
    session = (await alice("CreateSession", sessions_pb2.CreateSessionRequest(tags=["t"]))).session_id
    made = await alice(
        "CreateModel",
        models_pb2.CreateModelRequest(
            session_id=session, base_model=BASE, lora=LORA, user_metadata={"run": "one"}
        ),
    )
    assert made.request_id == f"{made.model_id}:0"
    await edges.answer(made.model_id, 0, create_model=models_pb2.CreateModelResult(lora=LORA))
    return made.model_id


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


async def test_a_model_tells_what_it_is(edges: Edges, channel: grpc.aio.Channel) -> None:
    alice = Client(channel, ALICE)
    models = (await alice("ListModels", models_pb2.ListModelsRequest())).models
    assert (models[0].vocab_size, models[0].architecture) == (VOCAB, "Qwen3ForCausalLM")
    # The scripted sampler takes 64.
    assert models[0].max_lora_rank == 64
    model_id = await create(edges, alice)
    asked = models_pb2.GetModelInfoRequest(model_id=model_id)
    model = (await alice("GetModelInfo", asked)).model
    assert (model.model_id, model.base_model, model.lora) == (model_id, BASE, LORA)
    assert model.status == models_pb2.MODEL_STATUS_READY
    assert model.user_metadata == {"run": "one"}
    assert time.time() - model.created_at.ToSeconds() < 60
    # A directory of this machine.
    assert model.tokenizer == ""
    assert (await alice("GetModelInfo", asked)).last_seq_id == 0
    unload = models_pb2.UnloadModelRequest(model_id=model_id, seq_id=1)
    assert (await alice("UnloadModel", unload)).request_id == f"{model_id}:1"
    assert (await alice("GetModelInfo", asked)).last_seq_id == 1
    await edges.answer(model_id, 1, unload_model=models_pb2.UnloadModelResult())
    assert (await alice("GetModelInfo", asked)).model.status == models_pb2.MODEL_STATUS_UNLOADED
    stranger = Client(channel, BOB)("GetModelInfo", asked)
    assert await status(stranger) is grpc.StatusCode.NOT_FOUND


async def test_state_is_saved_loaded_and_continued_from(edges: Edges, channel: grpc.aio.Channel) -> None:
    alice = Client(channel, ALICE)
    model = await create(edges, alice)
    save = checkpoints_pb2.SaveStateRequest(
        model_id=model, seq_id=1, name="a", overwrite=True, ttl_seconds=7200, user_metadata={"k": "v"}
    )
    assert (await alice("SaveState", save)).request_id == f"{model}:1"
    journaled = await edges.operation(model, 1)
    assert journaled is not None
    assert journaled.save_state == operation_pb2.SaveState(
        checkpoint_id="weights/a", overwrite=True, ttl_seconds=7200, user_metadata={"k": "v"}
    )
    path = f"tinker://{model}/weights/a"
    await edges.answer(model, 1, save_state=checkpoints_pb2.SaveStateResult(path=path))
    await alice("SaveState", checkpoints_pb2.SaveStateRequest(model_id=model, seq_id=2))
    unnamed = await edges.operation(model, 2)
    assert unnamed is not None and unnamed.save_state.checkpoint_id == "weights/000002"
    load = checkpoints_pb2.LoadStateRequest(model_id=model, seq_id=3, path=path, optimizer=True)
    await alice("LoadState", load)
    loading = await edges.operation(model, 3)
    assert loading is not None
    expected = operation_pb2.LoadState(
        source_model_id=model, checkpoint_id="weights/a", optimizer=True, version=1
    )
    assert loading.load_state == expected
    session = model.split(":")[0]
    again = models_pb2.CreateModelFromStateRequest(
        session_id=session, model_seq_id=1, path=path, optimizer=True, user_metadata={"run": "two"}
    )
    again.base_model = f"{BASE}:peft:8"
    made = await alice("CreateModelFromState", again)
    assert (made.model_id, made.request_id) == (f"{session}:train:1", f"{session}:train:1:0")
    creation = await edges.operation(made.model_id, 0)
    assert creation is not None and creation.create_model.from_state == expected
    assert creation.create_model.base_model == BASE
    again.base_model, again.model_seq_id = "org/other", 2
    with pytest.raises(grpc.aio.AioRpcError, match="not served here"):
        await alice("CreateModelFromState", again)


async def refusal(alice: Client, request: checkpoints_pb2.SaveForSamplerRequest) -> str:
    """Why a save was refused; its seq_id is used up."""
    request_id = (await alice("SaveForSampler", request)).request_id
    found = await alice("GetResult", results_pb2.GetResultRequest(request_id=request_id))
    assert found.result.error.category == types_pb2.ERROR_CATEGORY_USER
    return found.result.error.message


async def test_every_field_of_a_save_is_honoured_or_refused(edges: Edges, channel: grpc.aio.Channel) -> None:
    alice = Client(channel, ALICE)
    model = await create(edges, alice)
    request = checkpoints_pb2.SaveForSamplerRequest
    named = request(model_id=model, seq_id=1, name="a", ttl_seconds=7200, user_metadata={"k": "v"})
    await alice("SaveForSampler", named)
    journaled = await edges.operation(model, 1)
    assert journaled is not None
    assert journaled.save_for_sampler == operation_pb2.SaveForSampler(
        checkpoint_id="sampler_weights/a", ttl_seconds=7200, user_metadata={"k": "v"}
    )
    assert "name" in await refusal(alice, request(model_id=model, seq_id=2, ttl_seconds=7200))
    assert "name" in await refusal(alice, request(model_id=model, seq_id=3, user_metadata={"k": "v"}))
    both = request(model_id=model, seq_id=4, name="b", sampling_session_seq_id=1)
    assert "either" in await refusal(alice, both)
    moving = request(model_id=model, seq_id=6, name="b", inflight=True)
    assert "inflight" in await refusal(alice, moving)
    await alice("SaveForSampler", request(model_id=model, seq_id=7, inflight=True))
    following = await edges.operation(model, 7)
    assert following is not None and following.save_for_sampler.inflight
    short = request(model_id=model, seq_id=5, name="b", ttl_seconds=1)
    assert "ttl" in await refusal(alice, short)


async def test_a_save_sent_again_must_name_the_session_that_its_caller_was_told(
    edges: Edges, channel: grpc.aio.Channel
) -> None:
    alice = Client(channel, ALICE)
    model = await create(edges, alice)
    save = checkpoints_pb2.SaveForSamplerRequest(model_id=model, seq_id=1, sampling_session_seq_id=0)
    assert await alice("SaveForSampler", save) == await alice("SaveForSampler", save)
    save.sampling_session_seq_id = 1
    with pytest.raises(grpc.aio.AioRpcError) as refused:
        await alice("SaveForSampler", save)
    assert refused.value.code() == grpc.StatusCode.ALREADY_EXISTS


async def test_what_a_model_cannot_be_is_refused(edges: Edges, channel: grpc.aio.Channel) -> None:
    alice = Client(channel, ALICE)
    session = (await alice("CreateSession", sessions_pb2.CreateSessionRequest())).session_id
    nothing = models_pb2.CreateModelRequest(session_id=session, base_model=BASE)
    assert await status(alice("CreateModel", nothing)) is grpc.StatusCode.INVALID_ARGUMENT


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


async def test_a_sample_is_given_up(edges: Edges, channel: grpc.aio.Channel) -> None:
    alice = Client(channel, ALICE)
    request_id = (await alice("Sample", await sampling_of(alice))).request_id
    cancel = sampling_pb2.CancelSampleRequest(request_id=request_id)
    assert await status(Client(channel, BOB)("CancelSample", cancel)) is grpc.StatusCode.NOT_FOUND
    await alice("CancelSample", cancel)
    found = await alice("GetResult", results_pb2.GetResultRequest(request_id=request_id))
    assert found.result.error.code == "cancelled"


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
    async with asyncio.timeout(5):
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
    answer = await stub.Check(request, timeout=5)
    assert answer.status == health_pb2.HealthCheckResponse.SERVING
    watch = stub.Watch(request, timeout=5)
    assert (await watch.read()).status == health_pb2.HealthCheckResponse.SERVING
    watch.cancel()
    ask = reflection_pb2_grpc.ServerReflectionStub(channel).ServerReflectionInfo
    asked = [reflection_pb2.ServerReflectionRequest(list_services="")] * 2
    listed = [answer async for answer in ask(iter(asked), timeout=5, metadata=(("x-api-key", ALICE),))]
    names = [{service.name for service in answer.list_services_response.service} for answer in listed]
    assert ["tinsmith.v1.TinsmithService" in found for found in names] == [True, True]
    assert await status(ask(timeout=5).read()) is grpc.StatusCode.UNAUTHENTICATED


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


async def test_the_role_of_a_model_is_a_field(edges: Edges, channel: grpc.aio.Channel) -> None:
    alice = Client(channel, ALICE)
    session = (await alice("CreateSession", sessions_pb2.CreateSessionRequest())).session_id
    request = models_pb2.CreateModelRequest(
        session_id=session, base_model=BASE, lora=LORA, role=models_pb2.MODEL_ROLE_CRITIC
    )
    made = await alice("CreateModel", request)
    operation = await edges.operation(made.model_id, 0)
    assert operation is not None
    assert operation.create_model.role == models_pb2.MODEL_ROLE_CRITIC
    request.user_metadata["model_role"] = "policy"
    assert await status(alice("CreateModel", request)) is grpc.StatusCode.INVALID_ARGUMENT


async def test_a_model_trains_an_adapter_or_all_its_weights(edges: Edges, channel: grpc.aio.Channel) -> None:
    alice = Client(channel, ALICE)
    session = (await alice("CreateSession", sessions_pb2.CreateSessionRequest())).session_id
    full = models_pb2.FullFineTuning()
    both = models_pb2.CreateModelRequest(session_id=session, base_model=BASE, lora=LORA, full=full)
    assert await status(alice("CreateModel", both)) is grpc.StatusCode.INVALID_ARGUMENT
    request = models_pb2.CreateModelRequest(session_id=session, base_model=BASE, full=full)
    made = await alice("CreateModel", request)
    operation = await edges.operation(made.model_id, 0)
    assert operation is not None
    assert operation.create_model.HasField("full") and not operation.create_model.HasField("lora")


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

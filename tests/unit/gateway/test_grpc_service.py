"""gRPC: the public service, with the same keys and the same application as HTTP."""

import subprocess
import sys
from collections.abc import AsyncIterator
from pathlib import Path

import grpc
import grpc.aio
import numpy as np
import pytest
from edges import ALICE, BASE, BOB, LORA, Edges, running
from grpc_health.v1 import health_pb2, health_pb2_grpc

from services.common import rpc
from tinsmith.v1 import operation_pb2, tinsmith_pb2, tinsmith_pb2_grpc, types_pb2


@pytest.fixture
async def edges(redis_url: str, tmp_path: Path) -> AsyncIterator[Edges]:
    async with running(redis_url, tmp_path) as found:
        yield found


class Client:
    """Calls methods with a key and a deadline."""

    def __init__(self, channel: grpc.aio.Channel, key: str) -> None:
        self._stub = tinsmith_pb2_grpc.TinsmithServiceStub(channel)
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
    session = (await alice("CreateSession", tinsmith_pb2.CreateSessionRequest(tags=["t"]))).session_id
    made = await alice(
        "CreateModel", tinsmith_pb2.CreateModelRequest(session_id=session, base_model=BASE, lora=LORA)
    )
    assert made.request_id == f"{made.model_id}:0"
    await edges.answer(made.model_id, 0, create_model=operation_pb2.CreateModelResult(lora=LORA))
    return made.model_id


async def test_a_client_trains_saves_and_samples(edges: Edges, channel: grpc.aio.Channel) -> None:
    alice = Client(channel, ALICE)
    models = await alice("ListModels", tinsmith_pb2.ListModelsRequest())
    assert [(model.name, model.trainable, model.sampleable) for model in models.models] == [
        (BASE, True, True)
    ]
    model = await create(edges, alice)
    batch = operation_pb2.ForwardBackward(loss_fn="cross_entropy")
    datum = batch.data.add(tokens=int32([1, 2]))
    datum.loss_inputs["target_tokens"].MergeFrom(
        types_pb2.Tensor(dtype=types_pb2.DATA_TYPE_INT64, shape=[2], data=np.array([2, 3], "<i8").tobytes())
    )
    datum.loss_inputs["weights"].MergeFrom(
        types_pb2.Tensor(dtype=types_pb2.DATA_TYPE_FLOAT32, shape=[2], data=np.array([0, 1], "<f4").tobytes())
    )
    sent = tinsmith_pb2.ForwardBackwardRequest(model_id=model, seq_id=1, forward_backward=batch)
    assert (await alice("ForwardBackward", sent)).request_id == f"{model}:1"
    journaled = await edges.operation(model, 1)
    assert journaled is not None and journaled.forward_backward == batch
    adam = types_pb2.AdamParams(learning_rate=0.1, beta1=0.9, beta2=0.95, eps=1e-8)
    await alice("OptimStep", tinsmith_pb2.OptimStepRequest(model_id=model, seq_id=2, adam=adam))
    waiting = tinsmith_pb2.GetResultRequest(request_id=f"{model}:2", timeout_seconds=0.1)
    assert not (await alice("GetResult", waiting)).HasField("result")
    stepped = operation_pb2.OptimStepResult(metrics={"grad_norm": 1.0})
    await edges.answer(model, 2, optim_step=stepped)
    assert (await alice("GetResult", waiting)).result.optim_step == stepped
    saved = await alice("SaveForSampler", tinsmith_pb2.SaveForSamplerRequest(model_id=model, seq_id=3))
    done = operation_pb2.SaveForSamplerResult(sampling_session_id=saved.sampling_session_id, version=3)
    await edges.answer(model, 3, save_for_sampler=done)
    params = operation_pb2.SamplingParams(max_tokens=4, temperature=1, top_k=-1, top_p=1)
    params.stop.never.SetInParent()
    sample = tinsmith_pb2.TinsmithServiceSampleRequest(
        sampling_session_id=saved.sampling_session_id, prompt=int32([1]), num_samples=1, params=params
    )
    accepted = await alice("Sample", sample)
    request = await edges.sample(accepted.request_id)
    assert (request.snapshot.model_id, request.snapshot.version) == (model, 3)


async def test_a_named_save_opens_a_sampling_session(edges: Edges, channel: grpc.aio.Channel) -> None:
    alice = Client(channel, ALICE)
    model = await create(edges, alice)
    named = tinsmith_pb2.SaveForSamplerRequest(model_id=model, seq_id=1, name="a")
    assert (await alice("SaveForSampler", named)).sampling_session_id == ""
    path = f"tinker://{model}/sampler_weights/a"
    await edges.answer(model, 1, save_for_sampler=operation_pb2.SaveForSamplerResult(path=path, version=1))
    opened = await alice(
        "CreateSamplingSession",
        tinsmith_pb2.CreateSamplingSessionRequest(session_id=model.split(":")[0], model_path=path),
    )
    assert opened.sampling_session_id == f"{model.split(':')[0]}:sample:0"


async def test_keys_and_owners_hold_as_over_http(edges: Edges, channel: grpc.aio.Channel) -> None:
    alice, bob = Client(channel, ALICE), Client(channel, BOB)
    for key in ("", "tml-wrong"):
        call = Client(channel, key)("ListModels", tinsmith_pb2.ListModelsRequest())
        assert await status(call) is grpc.StatusCode.UNAUTHENTICATED
    model = await create(edges, alice)
    step = tinsmith_pb2.OptimStepRequest(model_id=model, seq_id=1)
    assert await status(bob("OptimStep", step)) is grpc.StatusCode.PERMISSION_DENIED
    step.model_id = "nobody:train:0"
    assert await status(alice("OptimStep", step)) is grpc.StatusCode.NOT_FOUND


async def test_a_refused_request_uses_up_its_seq_id(edges: Edges, channel: grpc.aio.Channel) -> None:
    alice = Client(channel, ALICE)
    model = await create(edges, alice)
    empty = tinsmith_pb2.ForwardBackwardRequest(model_id=model, seq_id=1)
    request_id = (await alice("ForwardBackward", empty)).request_id
    found = await alice("GetResult", tinsmith_pb2.GetResultRequest(request_id=request_id))
    assert found.result.error.category == types_pb2.ERROR_CATEGORY_USER
    step = tinsmith_pb2.OptimStepRequest(model_id=model, seq_id=1, adam=types_pb2.AdamParams(eps=1))
    assert await status(alice("OptimStep", step)) is grpc.StatusCode.ALREADY_EXISTS


async def test_health_and_reflection_are_on(edges: Edges, channel: grpc.aio.Channel) -> None:
    stub = health_pb2_grpc.HealthStub(channel)
    request = health_pb2.HealthCheckRequest(service="tinsmith.v1.TinsmithService")
    answer = await stub.Check(request, timeout=5)
    assert answer.status == health_pb2.HealthCheckResponse.SERVING


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

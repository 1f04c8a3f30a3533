"""gRPC: what a model is, and its saved state."""

import time

import grpc
import grpc.aio
import pytest

from tests.unit.gateway.edge.grpc.calls import Client, create, status
from tests.unit.gateway.edges import ALICE, BASE, BOB, LORA, VOCAB, Edges
from tinsmith.internal.v1 import operation_pb2
from tinsmith.v1 import (
    checkpoints_pb2,
    models_pb2,
    results_pb2,
    sessions_pb2,
    types_pb2,
)


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

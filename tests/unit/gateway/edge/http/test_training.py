"""HTTP: models, training requests and their futures."""

import asyncio
import json
import re
from collections.abc import Awaitable, Callable
from pathlib import Path

import numpy as np
import pytest
import tinker
import torch
import zstandard
from redis.exceptions import ConnectionError as RedisConnectionError

from services.common.contract.errors import Unavailable
from services.common.state import keys
from services.gateway.access.limits import Limits
from services.gateway.edge.http.codec import forward_backward_in
from tests.unit.gateway.edges import ALICE, BASE, BOB, LORA, VOCAB, Edges, new_model, new_session
from tinsmith.internal.v1 import tinker_pb2
from tinsmith.v1 import models_pb2, training_pb2, types_pb2

PROTO = {"content-type": "application/x-protobuf"}


def batch(model_id: str, seq_id: int, tokens: list[int], loss: str = "cross_entropy") -> bytes:
    message = tinker_pb2.TinkerForwardBackwardRequest(model_id=model_id, seq_id=seq_id, loss_fn=loss)
    datum = message.data.add()
    datum.model_input.add().encoded_text.tokens = np.array(tokens, "<i4").tobytes()
    for name, dtype, kind in (
        ("target_tokens", "<i8", tinker_pb2.TINKER_DATA_TYPE_INT64),
        ("weights", "<f4", tinker_pb2.TINKER_DATA_TYPE_FLOAT32),
    ):
        tensor = datum.loss_fn_inputs[name]
        tensor.dense, tensor.dtype = np.ones(len(tokens), dtype).tobytes(), kind
        tensor.shape.append(len(tokens))
    return message.SerializeToString()


async def failure(client, request_id: str) -> str:
    """The message of a future that failed by the user's fault."""
    response = await client.post("retrieve_future", json={"request_id": request_id})
    assert response.status_code == 200, response.text
    answer = response.json()
    assert answer["category"] == "user"
    return answer["error"]


async def test_a_model_is_created_once_however_often_it_is_asked_for(edges: Edges) -> None:
    async with edges.http() as client:
        session = await new_session(client)
        body = {
            "session_id": session,
            "model_seq_id": 3,
            "base_model": BASE,
            "lora_config": {"rank": 4, "seed": 7, "train_mlp": False},
            "optimizer_config": {"type": "adamw"},
            "type": "create_model",
        }
        first = await client.post("create_model", json=body)
        again = await client.post("create_model", json=body)
        other = await client.post("create_model", json={**body, "lora_config": {"rank": 8}})
        named = await client.post("create_model", json={**body, "user_metadata": {"run": "two"}})
    assert first.json() == again.json() == {"request_id": f"{session}:train:3:0"}
    assert other.status_code == named.status_code == 409
    operation = await edges.operation(f"{session}:train:3", 0)
    assert operation is not None
    expected = models_pb2.LoraConfig(rank=4, seed=7, train_attn=True, train_unembed=True)
    assert operation.create_model.lora == expected
    assert operation.create_model.base_model == BASE


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({"base_model": "org/other"}, BASE),
        ({"lora_config": {"rank": -1}}, "rank"),
        ({"lora_config": {"rank": 0, "train_mlp": False}}, "rank 0 trains all weights"),
        ({"lora_config": {"rank": 0}, "user_metadata": {"model_role": "critic"}}, "trains an adapter"),
        ({"lora_config": {"rank": 128}}, "--max-lora-rank"),
        ({"lora_config": {"rank": 4, "alpha": 3}}, "alpha"),
        ({"lora_config": None}, "lora_config"),
        ({"optimizer_config": {"type": "dimuon", "version": 1}}, "dimuon"),
        ({"user_metadata": {"a": "b" * 70_000}}, "user_metadata"),
        ({"user_metadata": {"model_role": "reward"}}, "'policy' or 'critic'"),
        (
            {"user_metadata": {"model_role": "critic"}, "lora_config": {"rank": 4, "train_unembed": False}},
            "train_unembed",
        ),
        ({"model_seq_id": -1}, "model_seq_id"),
    ],
)
async def test_a_model_that_cannot_be_had_is_400_with_what_to_change(
    edges: Edges, change: dict, says: str
) -> None:
    async with edges.http() as client:
        body = {
            "session_id": await new_session(client),
            "model_seq_id": 0,
            "base_model": BASE,
            "lora_config": {"rank": 4},
        }
        response = await client.post("create_model", json={**body, **change})
    assert response.status_code == 400
    assert says in response.json()["detail"]


async def test_a_batch_of_other_numeric_types_is_journaled_in_those_of_its_loss(edges: Edges) -> None:
    async with edges.http() as client:
        model = await new_model(edges, client)
        message = tinker_pb2.TinkerForwardBackwardRequest.FromString(batch(model, 1, [1, 2, 3]))
        inputs = message.data[0].loss_fn_inputs
        expected = {name: tensor.dense for name, tensor in inputs.items()}
        inputs["weights"].dense = np.ones(3, "<i8").tobytes()
        inputs["weights"].dtype = tinker_pb2.TINKER_DATA_TYPE_INT64
        inputs["target_tokens"].dense = np.ones(3, "<f4").tobytes()
        inputs["target_tokens"].dtype = tinker_pb2.TINKER_DATA_TYPE_FLOAT32
        response = await client.post("forward_backward", content=message.SerializeToString(), headers=PROTO)
        assert response.status_code == 200, response.text
        operation = await edges.operation(model, 1)
    assert operation is not None
    taken = operation.forward_backward.data[0].loss_inputs
    assert {name: tensor.data for name, tensor in taken.items()} == expected
    assert taken["weights"].dtype == types_pb2.DATA_TYPE_FLOAT32
    assert taken["target_tokens"].dtype == types_pb2.DATA_TYPE_INT64


async def test_somebody_elses_model_is_as_one_that_does_not_exist(edges: Edges) -> None:
    async with edges.http() as client, edges.http(BOB) as other:
        model = await new_model(edges, client)
        step = {"model_id": model, "seq_id": 1, "adam_params": {}}
        for path, body in (
            ("optim_step", step),
            ("get_info", {"model_id": model}),
            ("retrieve_future", {"request_id": f"{model}:0"}),
            ("save_weights", {"model_id": model, "seq_id": 1, "path": "a"}),
        ):
            assert (await other.post(path, json=body)).status_code == 404, path
        data = batch(model, 1, [1])
        assert (await other.post("forward_backward", content=data, headers=PROTO)).status_code == 404
        absent = {**step, "model_id": "nobody:train:0"}
        assert (await client.post("optim_step", json=absent)).status_code == 404
        assert (await client.post("optim_step", json={**step, "model_id": "../x"})).status_code == 404


async def test_get_info_tells_model_tokenizer_and_rank(edges: Edges, tmp_path: Path) -> None:
    async with edges.http() as client:
        model = await new_model(edges, client)
        info = (await client.post("get_info", json={"model_id": model, "type": "get_info"})).json()
    assert info["model_data"] == {
        "arch": "Qwen3ForCausalLM",
        "model_name": BASE,
        "tokenizer_id": str(tmp_path),
    }
    assert (info["is_lora"], info["lora_rank"], info["model_id"]) == (True, 4, model)


async def test_a_container_does_not_take_who_connects_over_loopback_for_one_that_has_its_files(
    edges: Edges, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(vars(edges.app), "near_clients", False)
    async with edges.http() as client:
        model = await new_model(edges, client)
        info = (await client.post("get_info", json={"model_id": model, "type": "get_info"})).json()
    assert info["model_data"] == {"arch": "Qwen3ForCausalLM", "model_name": BASE}


async def test_a_batch_is_journaled_and_its_repetition_is_the_same_request(edges: Edges) -> None:
    async with edges.http() as client:
        model = await new_model(edges, client)
        data = batch(model, 1, [1, 2, 3])
        replies = [await client.post("forward_backward", content=data, headers=PROTO) for _ in range(2)]
        packed = await client.post(
            "forward_backward",
            content=zstandard.compress(data),
            headers={**PROTO, "content-encoding": "zstd"},
        )
        changed = await client.post("forward_backward", content=batch(model, 1, [3]), headers=PROTO)
    for response in (*replies, packed):
        assert response.json() == {"request_id": f"{model}:1", "model_id": model}
    assert changed.status_code == 409
    operation = await edges.operation(model, 1)
    assert operation is not None
    message = forward_backward_in.parse_request(data, Limits())
    expected = forward_backward_in.forward_backward(message, VOCAB)
    assert operation.forward_backward == expected


@pytest.mark.parametrize(
    ("tokens", "loss", "says"),
    [
        ([1, 100], "cross_entropy", "vocabulary"),
        ([], "cross_entropy", "empty"),
        ([1] * 65, "cross_entropy", "context"),
        ([1, 2], "stable_reinforce", "importance_sampling"),
    ],
)
async def test_a_bad_batch_uses_up_its_seq_id_and_its_future_fails(
    edges: Edges, tokens: list[int], loss: str, says: str
) -> None:
    async with edges.http() as client:
        model = await new_model(edges, client)
        data = batch(model, 1, tokens, loss)
        response = await client.post("forward_backward", content=data, headers=PROTO)
        assert response.status_code == 200
        assert says in await failure(client, response.json()["request_id"])
        step = await client.post("optim_step", json={"model_id": model, "seq_id": 2, "adam_params": {}})
        assert step.json()["request_id"] == f"{model}:2"


async def test_a_body_that_is_no_batch_is_400(edges: Edges) -> None:
    async with edges.http() as client:
        garbage = await client.post("forward_backward", content=b"\xff\xff", headers=PROTO)
        json = await client.post("forward_backward", json={"model_id": "x"})
    assert garbage.status_code == json.status_code == 400
    assert "x-protobuf" in json.json()["detail"]


async def test_every_adam_field_arrives(edges: Edges) -> None:
    given = {
        "learning_rate": 0.5,
        "beta1": 0.1,
        "beta2": 0.2,
        "eps": 0.3,
        "weight_decay": 0.4,
        "grad_clip_norm": 2.0,
    }
    async with edges.http() as client:
        model = await new_model(edges, client)
        body = {"model_id": model, "seq_id": 1, "adam_params": given, "type": "optim_step"}
        await client.post("optim_step", json=body)
        await client.post("optim_step", json={"model_id": model, "seq_id": 2, "adam_params": {}})
    first, second = await edges.operation(model, 1), await edges.operation(model, 2)
    assert first is not None and second is not None
    assert first.optim_step.adam == training_pb2.AdamParams(**given)
    defaults = training_pb2.AdamParams(learning_rate=1e-4, beta1=0.9, beta2=0.95, eps=1e-12)
    assert second.optim_step.adam == defaults


@pytest.mark.parametrize(
    ("path", "body", "says"),
    [
        ("optim_step", {"adam_params": {"learning_rate": -1}}, "learning_rate"),
        ("optim_step", {"adam_params": {"learning_rate": "fast"}}, "learning_rate"),
        ("optim_step", {"adam_params": {"momentum": 1}}, "momentum"),
        ("optim_step", {"optimizer_params": {"type": "dimuon", "learning_rate": 0.1}}, "dimuon"),
        ("save_weights", {"path": "a/b"}, "checkpoint name"),
        ("save_weights", {"path": "../a"}, "checkpoint name"),
        ("save_weights", {"path": "a", "ttl_seconds": 10}, "ttl_seconds"),
        ("save_weights", {"path": "a", "ttl_seconds": 0}, "ttl_seconds"),
        ("save_weights_for_sampler", {"path": "a", "ttl_seconds": 0}, "ttl_seconds"),
        ("save_weights_for_sampler", {}, "sampling_session_seq_id"),
        ("save_weights_for_sampler", {"path": "a", "kind": "inflight"}, "never changes"),
        ("save_weights_for_sampler", {"sampling_session_seq_id": 0, "ttl_seconds": 3600}, "path"),
        ("load_weights", {"path": "tinker://x", "optimizer": True}, "tinker://"),
        ("load_weights", {"path": "x", "optimizer": True, "weights_access_token": "t"}, "no API key"),
    ],
)
async def test_a_bad_request_with_a_seq_id_uses_it_up_and_its_future_says_why(
    edges: Edges, path: str, body: dict, says: str
) -> None:
    async with edges.http() as client:
        model = await new_model(edges, client)
        response = await client.post(path, json={"model_id": model, "seq_id": 1, **body})
        assert response.status_code == 200, response.text
        assert says in await failure(client, f"{model}:1")


async def test_a_seq_id_that_no_model_has_is_400(edges: Edges) -> None:
    async with edges.http() as client:
        model = await new_model(edges, client)
        for seq_id in (0, -1, 2**31):
            body = {"model_id": model, "seq_id": seq_id, "adam_params": {}}
            assert (await client.post("optim_step", json=body)).status_code == 400


async def test_a_poll_returns_as_soon_as_the_result_is_there_and_again_later(edges: Edges) -> None:
    async with edges.http() as client:
        model = await new_model(edges, client)
        await client.post("optim_step", json={"model_id": model, "seq_id": 1, "adam_params": {}})
        poll = {"request_id": f"{model}:1", "allow_metadata_only": True}
        waiting = asyncio.create_task(client.post("retrieve_future", json=poll))
        await asyncio.sleep(0.2)
        assert not waiting.done()
        metrics = {"grad_norm": 1.5}
        await edges.answer(model, 1, optim_step=training_pb2.OptimStepResult(metrics=metrics))
        first = await asyncio.wait_for(waiting, 5)
        again = await client.post("retrieve_future", json=poll)
    assert first.json() == again.json() == {"metrics": metrics}


async def test_a_result_that_was_fetched_goes_soon_and_one_that_was_not_stays(edges: Edges) -> None:
    async with edges.http() as client:
        model = await new_model(edges, client)
        for seq_id in (1, 2):
            await client.post("optim_step", json={"model_id": model, "seq_id": seq_id, "adam_params": {}})
            await edges.answer(model, seq_id, optim_step=training_pb2.OptimStepResult())
        poll = {"request_id": f"{model}:1", "allow_metadata_only": True}
        assert (await client.post("retrieve_future", json=poll)).status_code == 200
    await edges.app.fetched.start()
    async with asyncio.timeout(20):
        while await edges.redis.ttl(keys.future(model, 1)) > 600:  # noqa: ASYNC110
            await asyncio.sleep(0.05)
    await edges.app.fetched.stop()
    assert await edges.redis.ttl(keys.future(model, 2)) > 23 * 3600


async def test_trouble_of_the_service_during_a_poll_is_429_which_the_sdk_waits_after(
    edges: Edges, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with edges.http() as client:
        model = await new_model(edges, client)
        for trouble in (Unavailable("the state store has just restarted"), RedisConnectionError("gone")):
            monkeypatch.setattr(edges.app.futures, "wait", raising(trouble))
            response = await client.post("retrieve_future", json={"request_id": f"{model}:0"})
            assert response.status_code == 429
            assert response.headers["retry-after"] == "1"


def raising(error: Exception) -> Callable[..., Awaitable[None]]:
    async def fail(*arguments: object) -> None:
        raise error

    return fail


async def test_an_unknown_request_of_a_model_is_404(edges: Edges) -> None:
    async with edges.http() as client:
        model = await new_model(edges, client)
        for request_id in (f"{model}:9", "nobody:train:0:1", "garbage", ""):
            response = await client.post("retrieve_future", json={"request_id": request_id})
            assert response.status_code == 404, request_id


async def test_the_sdk_trains_through_the_edge(edges: Edges) -> None:
    """create_model, get_info, forward_backward and optim_step by the real SDK; the test is the trainer."""

    def train(loop: asyncio.AbstractEventLoop) -> tuple:
        def answer(model: str, seq_id: int, **result: object) -> None:
            async def when_journaled() -> None:
                while await edges.operation(model, seq_id) is None:  # noqa: ASYNC110
                    await asyncio.sleep(0.02)
                await edges.answer(model, seq_id, **result)

            asyncio.run_coroutine_threadsafe(when_journaled(), loop).result(20)

        service = tinker.ServiceClient(base_url=edges.base_url, api_key=ALICE)
        future = service.create_lora_training_client(base_model=BASE, rank=4)
        model = f"{service.holder.get_session_id()}:train:0"
        answer(model, 0, create_model=models_pb2.CreateModelResult(lora=LORA))
        client = future.result(20)
        inputs = {"target_tokens": torch.tensor([2, 3]), "weights": torch.tensor([0.0, 1.0])}
        datum = tinker.Datum(model_input=tinker.ModelInput.from_ints([1, 2]), loss_fn_inputs=inputs)
        batch_future = client.forward_backward([datum], "cross_entropy")
        step_future = client.optim_step(tinker.AdamParams(learning_rate=0.1))
        result = training_pb2.ForwardBackwardResult(metrics={"loss:sum": 2.0})
        result.outputs["logprobs"].MergeFrom(
            training_pb2.BatchedTensor(
                dtype=types_pb2.DATA_TYPE_FLOAT32,
                data=np.array([-1, -2], "<f4").tobytes(),
                offsets=[0, 8],
            )
        )
        answer(model, 1, forward_backward=result)
        answer(model, 2, optim_step=training_pb2.OptimStepResult(metrics={"grad_norm": 1.0}))
        bad = client.forward_backward(
            [tinker.Datum(model_input=tinker.ModelInput.from_ints([999, 2]), loss_fn_inputs=inputs)],
            "cross_entropy",
        )
        with pytest.raises(tinker.RequestFailedError, match="vocabulary"):
            bad.result(20)
        outputs = batch_future.result(20), step_future.result(20), client.get_info()
        service.close("success").result(20)
        return outputs

    output, step, info = await asyncio.to_thread(train, asyncio.get_running_loop())
    assert output.metrics == {"loss:sum": 2.0}
    assert output.loss_fn_outputs[0]["logprobs"].tolist() == [-1.0, -2.0]
    assert step.metrics == {"grad_norm": 1.0}
    assert info.lora_rank == 4


async def test_a_critic_is_made_by_its_metadata_and_keeps_to_its_role(edges: Edges) -> None:
    async with edges.http() as client:
        model = await new_model(edges, client, metadata={"model_role": "critic"})
        operation = await edges.operation(model, 0)
        assert operation is not None
        assert operation.create_model.role == models_pb2.MODEL_ROLE_CRITIC
        await client.post("forward_backward", content=batch(model, 1, [1, 2]), headers=PROTO)
        assert "use ppo_critic" in await failure(client, f"{model}:1")
        for seq_id, save in ((2, {"path": "x"}), (3, {"sampling_session_seq_id": 0})):
            await client.post("save_weights_for_sampler", json={"model_id": model, "seq_id": seq_id, **save})
            assert "critic" in await failure(client, f"{model}:{seq_id}")


def as_json(model: str, seq_id: int, tokens: list[int], **inputs: object) -> dict[str, object]:
    """The body of a forward of SDKs before 0.22."""
    targets = {"data": tokens, "dtype": "int64", "shape": [len(tokens)]}
    datum = {
        "model_input": {"chunks": [{"tokens": tokens, "type": "encoded_text"}]},
        "loss_fn_inputs": {"target_tokens": targets, **inputs},
    }
    forward = {"data": [datum], "loss_fn": "cross_entropy"}
    return {"model_id": model, "seq_id": seq_id, "forward_input": forward}


@pytest.mark.parametrize("comma", [",", "," + 12 * " "])
async def test_a_forward_of_an_old_sdk_is_what_a_later_one_sends(edges: Edges, comma: str) -> None:
    tokens = [index % 90 for index in range(50)]
    weights = {"data": [0.5, *[1.0] * 49], "dtype": "float32", "shape": [50]}
    async with edges.http() as client:
        model = await new_model(edges, client)
        # With white space the lists count as long ones.
        body = json.dumps(as_json(model, 1, tokens, weights=weights), separators=(comma, ":"))
        sent = await client.post("forward", content=body)
        assert sent.json() == {"request_id": f"{model}:1", "model_id": model}, sent.text
        operation = await edges.operation(model, 1)
    assert operation is not None
    forward = operation.forward_backward
    assert forward.forward_only and forward.loss_fn == "cross_entropy"
    (datum,) = forward.data
    assert np.frombuffer(datum.tokens.data, "<i4").tolist() == tokens
    assert np.frombuffer(datum.loss_inputs["target_tokens"].data, "<i8").tolist() == tokens
    assert np.frombuffer(datum.loss_inputs["weights"].data, "<f4").tolist() == weights["data"]


@pytest.mark.parametrize(
    ("weights", "says"),
    [
        ({"data": [1.5, 1], "dtype": "int64"}, "no integer"),
        ({"data": [1.0], "dtype": "float32", "sparse_crow_indices": [0, 1]}, "needs both"),
        ({"data": [1.0, 10**400], "dtype": "float32"}, "no float|cannot be read|out of range"),
        ({"data": "text", "dtype": "float32"}, "is text"),
    ],
)
async def test_a_forward_of_an_old_sdk_that_cannot_be_read_says_why(
    edges: Edges, weights: dict[str, object], says: str
) -> None:
    async with edges.http() as client:
        model = await new_model(edges, client)
        sent = await client.post("forward", json=as_json(model, 1, [1, 2], weights=weights))
        assert sent.status_code == 200, sent.text
        assert re.search(says, await failure(client, f"{model}:1"))

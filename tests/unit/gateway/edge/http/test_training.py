"""HTTP: training requests and their futures."""

import asyncio
import json
import re

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
from tests.unit.gateway.edge.http.batches import PROTO, batch, failure, raising
from tests.unit.gateway.edges import ALICE, BASE, LORA, VOCAB, Edges, new_model
from tinsmith.internal.v1 import tinker_pb2
from tinsmith.v1 import models_pb2, training_pb2, types_pb2


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
        first = await asyncio.wait_for(waiting, 30)
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
    async with asyncio.timeout(60):
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

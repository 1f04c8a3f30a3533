"""HTTP: the loss that an operator has run in place of stable_reinforce."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from services.common.contract.stand_ins import STABLE_REINFORCE, STAND_INS
from services.gateway.access.limits import Limits
from tests.unit.gateway.edges import Edges, new_model, new_session
from tinsmith.internal.v1 import tinker_pb2
from tinsmith.v1 import results_pb2, training_pb2

PROTO = {"content-type": "application/x-protobuf"}
PARAMS: dict[str, Any] = {
    "prompt": {"chunks": [{"type": "encoded_text", "tokens": [1]}]},
    "sampling_params": {},
}


@pytest.fixture(params=STAND_INS)
def stand_in(request: pytest.FixtureRequest) -> str:
    return request.param


@pytest.fixture
def limits(stand_in: str) -> Limits:
    return Limits(stable_reinforce_as=stand_in)


def batch(model_id: str, seq_id: int, **config: float) -> bytes:
    """What the cookbook's loops send for stable_reinforce, but for its spans."""
    message = tinker_pb2.TinkerForwardBackwardRequest(
        model_id=model_id, seq_id=seq_id, loss_fn=STABLE_REINFORCE, loss_fn_config=config
    )
    datum = message.data.add()
    datum.model_input.add().encoded_text.tokens = np.array([1, 2, 3], "<i4").tobytes()
    for name, values in (
        ("target_tokens", np.array([0, 3, 4], "<i8")),
        ("logprobs", np.array([0.0, -1.0, -2.0], "<f4")),
        ("advantages", np.array([0.0, 0.5, 0.5], "<f4")),
    ):
        tensor = datum.loss_fn_inputs[name]
        integer = values.dtype.kind == "i"
        tensor.dtype = tinker_pb2.TINKER_DATA_TYPE_INT64 if integer else tinker_pb2.TINKER_DATA_TYPE_FLOAT32
        tensor.dense = values.tobytes()
        tensor.shape.append(3)
    return message.SerializeToString()


async def test_the_loss_runs_under_its_own_name_and_results_tell(edges: Edges, stand_in: str) -> None:
    async with edges.http() as client:
        model = await new_model(edges, client)
        sent = await client.post("forward_backward", content=batch(model, 1), headers=PROTO)
        assert sent.status_code == 200, sent.text
        operation = await edges.operation(model, 1)
        assert operation is not None
        assert (operation.forward_backward.loss_fn, operation.asked_loss) == (stand_in, STABLE_REINFORCE)
        result = training_pb2.ForwardBackwardResult(metrics={"loss:sum": 2.0})
        await edges.answer(model, 1, forward_backward=result)
        answer = await client.post("retrieve_future", json={"request_id": f"{model}:1"})
        told = tinker_pb2.TinkerForwardBackwardOutput.FromString(answer.content)
        assert dict(told.metrics) == {"loss:sum": 2.0, f"stable_reinforce_as_{stand_in}:max": 1.0}
        capabilities = (await client.get("get_server_capabilities")).json()
        assert capabilities["stable_reinforce_as"] == stand_in


async def test_a_setting_that_the_loss_in_its_place_does_not_have_is_refused(edges: Edges) -> None:
    async with edges.http() as client:
        model = await new_model(edges, client)
        await client.post("forward_backward", content=batch(model, 1, kl_coeff=0.01), headers=PROTO)
        answer = await client.post("retrieve_future", json={"request_id": f"{model}:1"})
        assert "kl_coeff" in answer.json()["error"]


@pytest.mark.parametrize("text", ["high", None])
async def test_a_setting_that_is_text_is_refused_by_its_name(edges: Edges, text: str | None) -> None:
    async with edges.http() as client:
        model = await new_model(edges, client)
        message = tinker_pb2.TinkerForwardBackwardRequest.FromString(batch(model, 1))
        message.loss_fn_config_v2["stability_mode"].SetInParent()
        if text is not None:
            message.loss_fn_config_v2["stability_mode"].text = text
        sent = await client.post("forward_backward", content=message.SerializeToString(), headers=PROTO)
        assert sent.status_code == 200, sent.text
        answer = (await client.post("retrieve_future", json={"request_id": f"{model}:1"})).json()
        assert "'stability_mode' must be a number" in answer["error"]
        assert answer["category"] == "user"


async def test_samples_that_record_stability_are_taken(edges: Edges) -> None:
    async with edges.http() as client:
        session = await new_session(client)
        opened = {"session_id": session, "sampling_session_seq_id": 0, "base_model": "org/tiny"}
        sampler = (await client.post("create_sampling_session", json=opened)).json()["sampling_session_id"]
        body = {**PARAMS, "sampling_session_id": sampler, "seq_id": 0, "record_stability_info": True}
        assert (await client.post("asample", json=body)).status_code == 200


@pytest.mark.parametrize("loss", ["ppo", "cross_entropy"])
async def test_results_of_other_losses_say_nothing_of_it(edges: Edges, loss: str) -> None:
    async with edges.http() as client:
        model = await new_model(edges, client)
        message = tinker_pb2.TinkerForwardBackwardRequest.FromString(batch(model, 1))
        message.loss_fn = loss
        if loss == "cross_entropy":
            message.data[0].loss_fn_inputs["weights"].CopyFrom(message.data[0].loss_fn_inputs["logprobs"])
            for name in ("logprobs", "advantages"):
                del message.data[0].loss_fn_inputs[name]
        await client.post("forward_backward", content=message.SerializeToString(), headers=PROTO)
        operation = await edges.operation(model, 1)
        assert operation is not None and operation.forward_backward.loss_fn == loss
        assert operation.asked_loss == ""
        outcome = results_pb2.OperationResult(forward_backward=training_pb2.ForwardBackwardResult())
        assert not (await edges.recorder.record(operation, outcome)).forward_backward.metrics

"""How soon new weights answer, what they weigh on the wire, and how soon a training request is accepted."""

from __future__ import annotations

import statistics
from typing import Any

import grpc
import httpx
import numpy as np
import tinker
from tinker import types

from tinsmith.v1 import tinker_pb2, tinsmith_pb2, tinsmith_pb2_grpc

from .exactness import newest_snapshot
from .stack import BASE_MODEL, RANK, Row, Stack, alternate, next_token_datum, random_tokens, seconds, train

REPETITIONS = 9
ACCEPTS = 60
PROMPT_TOKENS = 32
RESULT_SECONDS = 60.0


def publishing(stack: Stack) -> Row:
    """save_weights_and_get_sampling_client to the first sampled token, over one token from old weights."""
    rng = np.random.default_rng(5)
    data = [next_token_datum(random_tokens(rng, stack.vocab, 1, 64)[0])]
    model = stack.new_model()
    train(model, data, 1e-4)
    old = model.save_weights_and_get_sampling_client().result()

    def publish(_: int) -> float:
        train(model, data, 1e-4)
        prompt = random_tokens(rng, stack.vocab, 1, PROMPT_TOKENS)[0]
        return seconds(lambda: _one_token(model.save_weights_and_get_sampling_client().result(), prompt))

    def sample(_: int) -> float:
        prompt = random_tokens(rng, stack.vocab, 1, PROMPT_TOKENS)[0]
        return seconds(lambda: _one_token(old, prompt))

    alternate(2, publish, sample)
    published, sampled = alternate(REPETITIONS, publish, sample)
    saved = _last_save(stack, str(model.model_id))
    return Row(
        "publishing: save to first token / one token from old weights",
        statistics.median(published) / statistics.median(sampled),
        "x time",
        details={
            "save_to_first_token_ms": round(1e3 * statistics.median(published), 1),
            "one_token_ms": round(1e3 * statistics.median(sampled), 1),
            "wire_bytes": int(saved.wire_bytes),
            "receivers": int(saved.receivers),
            "lora_rank": RANK,
            "repetitions": REPETITIONS,
        },
    )


def _one_token(client: tinker.SamplingClient, prompt: list[int]) -> None:
    params = types.SamplingParams(max_tokens=1, temperature=1.0, stop=[])
    client.sample(types.ModelInput.from_ints(prompt), 1, params).result()


def _last_save(stack: Stack, model_id: str) -> Any:
    """What the newest save came to; the SDK drops these figures, the gRPC service has them."""
    version = newest_snapshot(stack.data_dir, model_id).name
    request = tinsmith_pb2.GetResultRequest(
        request_id=f"{model_id}:{version}", timeout_seconds=RESULT_SECONDS
    )
    with grpc.insecure_channel(stack.grpc_address) as channel:
        service = tinsmith_pb2_grpc.TinsmithServiceStub(channel)
        answer = service.GetResult(
            request, timeout=RESULT_SECONDS + 5, metadata=(("x-api-key", stack.api_key),)
        )
    return answer.result.save_for_sampler


def accepting(stack: Stack) -> Row:
    """From POST forward_backward to its request id (journaled in Redis), over a request that does nothing.

    The result is waited for before the next POST, so the trainer is idle when it is sent.
    """
    tokens = np.array(random_tokens(np.random.default_rng(6), stack.vocab, 1, 129)[0], dtype=np.int32)
    headers = {"X-API-Key": stack.api_key}
    with httpx.Client(base_url=f"{stack.base_url}/api/v1/", headers=headers, timeout=60.0) as http:
        session = _post(http, "create_session", {"tags": [], "sdk_version": tinker.__version__})["session_id"]
        lora = {"rank": RANK, "seed": 0, "train_attn": True, "train_mlp": True, "train_unembed": True}
        model = {"session_id": session, "model_seq_id": 0, "base_model": BASE_MODEL, "lora_config": lora}
        _result(http, _post(http, "create_model", model)["request_id"])

        def accept(number: int) -> float:
            body = _forward_backward(f"{session}:train:0", number + 1, tokens)
            answers: list[httpx.Response] = []
            headers = {"Content-Type": "application/x-protobuf"}
            elapsed = seconds(
                lambda: answers.append(http.post("forward_backward", content=body, headers=headers))
            )
            _result(http, answers[0].raise_for_status().json()["request_id"])
            return elapsed

        accepted, idle = alternate(
            ACCEPTS, accept, lambda _: seconds(lambda: http.get("healthz").raise_for_status())
        )
    return Row(
        "accepting: POST forward_backward / GET healthz",
        statistics.median(accepted) / statistics.median(idle),
        "x time",
        details={
            "accept_p50_ms": round(1e3 * statistics.median(accepted), 2),
            "accept_p90_ms": round(1e3 * statistics.quantiles(accepted, n=10)[-1], 2),
            "healthz_p50_ms": round(1e3 * statistics.median(idle), 2),
            "tokens": len(tokens) - 1,
            "repetitions": ACCEPTS,
        },
    )


def _forward_backward(model_id: str, seq_id: int, tokens: np.ndarray) -> bytes:
    """The SDK's message for one datum of cross_entropy."""
    count = len(tokens) - 1
    targets = tinker_pb2.TinkerTensor(
        dense=tokens[1:].astype("<i8").tobytes(), dtype=tinker_pb2.TINKER_DATA_TYPE_INT64, shape=[count]
    )
    weights = tinker_pb2.TinkerTensor(
        dense=np.ones(count, "<f4").tobytes(), dtype=tinker_pb2.TINKER_DATA_TYPE_FLOAT32, shape=[count]
    )
    text = tinker_pb2.TinkerEncodedText(tokens=tokens[:-1].astype("<i4").tobytes())
    datum = tinker_pb2.TinkerDatum(
        model_input=[tinker_pb2.TinkerChunk(encoded_text=text)],
        loss_fn_inputs={"target_tokens": targets, "weights": weights},
    )
    message = tinker_pb2.TinkerForwardBackwardRequest(
        model_id=model_id, seq_id=seq_id, data=[datum], loss_fn="cross_entropy"
    )
    return message.SerializeToString()


def _post(http: httpx.Client, path: str, body: dict[str, Any]) -> dict[str, Any]:
    answer: dict[str, Any] = http.post(path, json=body).raise_for_status().json()
    return answer


def _result(http: httpx.Client, request_id: str) -> None:
    """Waits until the operation is done."""
    while True:
        answer = http.post("retrieve_future", json={"request_id": request_id})
        if answer.status_code != 408:
            answer.raise_for_status()
            return

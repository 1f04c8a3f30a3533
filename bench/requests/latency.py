"""How soon a training request is accepted, and what the stack adds to a small one."""

from __future__ import annotations

import statistics
from typing import Any

import httpx
import numpy as np
import tinker

from bench.rows import Row, added_row, alternate, milliseconds, seconds
from bench.stack import BASE_MODEL, RANK, Stack, random_tokens
from bench.training.bare_engine import BareEngine
from bench.training.exactness import trainer_logprobs
from tinsmith.internal.v1 import tinker_pb2

ACCEPTS = 60
FORWARDS, FORWARD_TOKENS = 60, 16


def small_forward(stack: Stack) -> list[Row]:
    """One forward of 16 tokens through the SDK, against the same in the trainer's engine alone."""
    model = stack.new_model()
    engine = BareEngine(stack.model_dir, stack.threads, stack.scratch / "bare-engine.log")
    batch = random_tokens(np.random.default_rng(10), stack.vocab, 1, FORWARD_TOKENS + 1)
    sides = (lambda _: seconds(lambda: trainer_logprobs(model, batch)), lambda _: engine.forward(batch))
    try:
        alternate(3, *sides)
        ours, alone = alternate(FORWARDS, *sides)
    finally:
        engine.close()
    return [small_forward_row(ours, alone)]


def small_forward_row(ours: list[float], alone: list[float]) -> Row:
    """Median of the round trip minus that of the model."""
    name = "forward of 16 tokens: round trip - the model's own time"
    return added_row(name, ours, alone, ("round_trip", "model"), at_most=10.0)


def accepting(stack: Stack) -> list[Row]:
    """From POST forward_backward to its request id (journaled in Redis), beside a request that does nothing.

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
    return [
        Row(
            "accepting: POST forward_backward to its request id, p50",
            milliseconds(accepted),
            "ms",
            at_most=5.0,
            details={
                "accept_p90_ms": round(1e3 * statistics.quantiles(accepted, n=10)[-1], 2),
                "healthz_p50_ms": milliseconds(idle),
                "tokens": len(tokens) - 1,
                "repetitions": ACCEPTS,
            },
        )
    ]


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

"""The wire itself: order, repetition, ownership, malformed bodies; over raw HTTP."""

from __future__ import annotations

import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import httpx
import pytest

from tests.cluster import batches
from tests.cluster.conftest import BASE_MODEL, Cluster
from tinsmith.internal.v1 import tinker_pb2


@pytest.fixture
def http(cluster: Cluster) -> Iterator[httpx.Client]:
    with httpx.Client(
        base_url=f"{cluster.base_url}/api/v1/", headers={"X-API-Key": cluster.api_key}, timeout=60
    ) as client:
        yield client


def post(http: httpx.Client, path: str, body: dict[str, object]) -> dict[str, object]:
    reply = http.post(path, json=body)
    assert reply.status_code == 200, reply.text
    return reply.json()


def resolve(http: httpx.Client, request_id: object) -> httpx.Response:
    for _ in range(5):
        reply = http.post("retrieve_future", json={"request_id": request_id, "allow_metadata_only": False})
        if reply.status_code != 408:
            return reply
    raise AssertionError(f"{request_id} never resolved")


@pytest.fixture
def model_id(http: httpx.Client) -> str:
    session = post(http, "create_session", {"tags": [], "user_metadata": {}, "sdk_version": "0.38.0"})
    created = post(
        http,
        "create_model",
        {
            "session_id": session["session_id"],
            "model_seq_id": 0,
            "base_model": BASE_MODEL,
            "lora_config": {"rank": 4, "seed": 1},
            "type": "create_model",
        },
    )
    return resolve(http, created["request_id"]).json()["model_id"]


def batch(model_id: str, seq_id: int, seed: int = 0) -> bytes:
    sequence = batches.tokens(seed, 9)
    message = tinker_pb2.TinkerForwardBackwardRequest(
        model_id=model_id, seq_id=seq_id, loss_fn="cross_entropy"
    )
    datum = message.data.add()
    datum.model_input.add().encoded_text.tokens = ints(sequence[:-1], 4)
    targets = datum.loss_fn_inputs["target_tokens"]
    targets.dense, targets.dtype = ints(sequence[1:], 8), tinker_pb2.TINKER_DATA_TYPE_INT64
    weights = datum.loss_fn_inputs["weights"]
    weights.dense, weights.dtype = b"\x00\x00\x80\x3f" * 8, tinker_pb2.TINKER_DATA_TYPE_FLOAT32
    return message.SerializeToString()


def ints(values: list[int], size: int) -> bytes:
    return b"".join(value.to_bytes(size, "little") for value in values)


def send(http: httpx.Client, body: bytes) -> httpx.Response:
    return http.post("forward_backward", content=body, headers={"Content-Type": "application/x-protobuf"})


def step(model_id: str, seq_id: int) -> dict[str, object]:
    return {
        "model_id": model_id,
        "seq_id": seq_id,
        "adam_params": {"learning_rate": 0.01},
        "type": "optim_step",
    }


def test_requests_that_arrive_out_of_order_run_in_order(http: httpx.Client, model_id: str) -> None:
    last = post(http, "optim_step", step(model_id, 3))
    second = send(http, batch(model_id, 2, seed=1)).json()
    first = send(http, batch(model_id, 1)).json()
    for accepted in (first, second):
        assert "application/x-protobuf" in resolve(http, accepted["request_id"]).headers["content-type"]
    metrics = resolve(http, last["request_id"]).json()["metrics"]
    assert metrics.get("skipped", 0) == 0
    assert metrics["grad_norm"] > 0


def test_a_repeated_request_is_the_same_request(http: httpx.Client, model_id: str) -> None:
    body = batch(model_id, 1)
    with ThreadPoolExecutor(8) as pool:
        replies = list(pool.map(lambda _: send(http, body).json()["request_id"], range(8)))
    assert len(set(replies)) == 1
    once = resolve(http, post(http, "optim_step", step(model_id, 2))["request_id"]).json()["metrics"]
    other = send(http, batch(model_id, 3)).json()["request_id"]
    assert other not in replies
    assert once["grad_norm"] > 0


def test_another_payload_under_a_used_number_is_a_conflict(http: httpx.Client, model_id: str) -> None:
    assert send(http, batch(model_id, 1)).status_code == 200
    reply = send(http, batch(model_id, 1, seed=2))
    assert reply.status_code == 409
    assert "seq_id" in reply.json()["detail"]


def test_a_result_can_be_fetched_again(http: httpx.Client, model_id: str) -> None:
    request_id = send(http, batch(model_id, 1)).json()["request_id"]
    assert resolve(http, request_id).content == resolve(http, request_id).content


def test_an_empty_batch_is_refused_and_uses_up_its_number(http: httpx.Client, model_id: str) -> None:
    empty = tinker_pb2.TinkerForwardBackwardRequest(model_id=model_id, seq_id=1, loss_fn="cross_entropy")
    accepted = send(http, empty.SerializeToString())
    failed = resolve(http, accepted.json()["request_id"]).json()
    assert failed["category"] == "user"
    assert "data" in failed["error"]
    assert (
        resolve(http, post(http, "optim_step", step(model_id, 2))["request_id"]).json()["metrics"]["skipped"]
        == 1
    )


def test_a_body_that_is_no_protobuf_is_refused_with_a_sentence(http: httpx.Client) -> None:
    reply = send(http, b"\xff\xff\xff\xff")
    assert reply.status_code == 400
    assert reply.json()["detail"]


@pytest.mark.parametrize("path", ["optim_step", "create_model", "asample", "save_weights", "retrieve_future"])
@pytest.mark.parametrize("body", [b"", b"{", b"[]", b'{"model_id": 3}', b'{"surprise": 1}'])
def test_a_malformed_json_body_is_the_clients_error(http: httpx.Client, path: str, body: bytes) -> None:
    reply = http.post(path, content=body, headers={"Content-Type": "application/json"})
    assert 400 <= reply.status_code < 500
    assert reply.json()["detail"]


def test_an_unknown_request_is_not_found(http: httpx.Client, model_id: str) -> None:
    reply = http.post("retrieve_future", json={"request_id": f"{model_id}:999", "allow_metadata_only": False})
    assert reply.status_code == 404


def test_a_path_that_is_not_served_says_so(http: httpx.Client) -> None:
    reply = http.post("no_such_call", json={})
    assert reply.status_code == 404
    assert "no_such_call" in reply.json()["detail"]


def test_another_users_model_is_out_of_reach(cluster: Cluster, http: httpx.Client, model_id: str) -> None:
    with (cluster.data_dir / "api_key").open("a") as keys:
        keys.write("tml-second-key second\n")
    with httpx.Client(
        base_url=f"{cluster.base_url}/api/v1/", headers={"X-API-Key": "tml-second-key"}, timeout=60
    ) as other:
        # Each gateway reads the file again within a few seconds; so many answers are hardly of one alone.
        deadline = time.monotonic() + 120
        known = 0
        while known < 32 and time.monotonic() < deadline:
            reply = other.post("get_info", json={"model_id": model_id}, headers={"Connection": "close"})
            known = known + 1 if reply.status_code != 401 else 0
            time.sleep(0.05)
        assert reply.status_code == 404, reply.text
        assert send(other, batch(model_id, 1)).status_code == 404
        request_id = send(http, batch(model_id, 1)).json()["request_id"]
        stolen = other.post("retrieve_future", json={"request_id": request_id, "allow_metadata_only": False})
        assert stolen.status_code == 404

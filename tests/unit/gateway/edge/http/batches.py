"""Batches as the SDK sends them, and the futures of those that fail."""

from collections.abc import Awaitable, Callable

import numpy as np

from tinsmith.internal.v1 import tinker_pb2

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


def raising(error: Exception) -> Callable[..., Awaitable[None]]:
    async def fail(*arguments: object) -> None:
        raise error

    return fail

"""Calls of the public service, as its tests make them."""

import grpc
import grpc.aio
import numpy as np
import pytest

from tests.unit.gateway.edges import BASE, LORA, Edges
from tinsmith.v1 import (
    models_pb2,
    service_pb2_grpc,
    sessions_pb2,
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

"""Small messages that would unfold to something enormous are refused while they are still small."""

from __future__ import annotations

import time

import grpc
import pytest
import zstandard

from services.common.process import rpc
from tests.unit.gateway.edge.http.batches import PROTO, batch, failure
from tests.unit.gateway.edges import ALICE, Edges, new_model
from tinsmith.internal.v1 import tinker_pb2
from tinsmith.v1 import service_pb2_grpc, training_pb2

EMPTY_DATUM = b"\x1a\x00"
SECONDS = 3.0
"""A loaded machine is slow; what is meant is tens of milliseconds, where it used to be minutes."""


def head(model: str) -> bytes:
    """A request of the model up to its data."""
    return tinker_pb2.TinkerForwardBackwardRequest(model_id=model, seq_id=1).SerializeToString()


@pytest.mark.parametrize("encoding", ["zstd", "identity"])
async def test_a_body_of_countless_empty_datums_is_refused_at_once(edges: Edges, encoding: str) -> None:
    async with edges.http() as client:
        model = await new_model(edges, client)
        if encoding == "zstd":
            content = zstandard.compress(head(model) + EMPTY_DATUM * 90_000_000)
            assert len(content) < 20_000
        else:
            content = head(model) + EMPTY_DATUM * 1_000_000
        headers = {**PROTO, "content-encoding": encoding}
        started = time.process_time()
        response = await client.post("forward_backward", content=content, headers=headers)
        assert time.process_time() - started < SECONDS
        assert "data has more than 4096 entries" in await failure(client, response.json()["request_id"])


async def test_a_tensor_of_countless_dimensions_is_refused_at_once(edges: Edges) -> None:
    async with edges.http() as client:
        model = await new_model(edges, client)
        message = tinker_pb2.TinkerForwardBackwardRequest.FromString(batch(model, 1, [1, 2]))
        message.data[0].loss_fn_inputs["weights"].shape[:] = [2**62] * 60_000
        started = time.process_time()
        response = await client.post("forward_backward", content=message.SerializeToString(), headers=PROTO)
        assert time.process_time() - started < SECONDS
        assert "shape" in await failure(client, response.json()["request_id"])


async def test_grpc_refuses_countless_parts_before_it_reads_them(edges: Edges) -> None:
    async with edges.http() as client:
        model = await new_model(edges, client)
    request = training_pb2.ForwardBackwardRequest(model_id=model, seq_id=1)
    for _ in range(100_000):
        request.forward_backward.data.add()
    async with rpc.channel(edges.grpc_address) as channel:
        stub = service_pb2_grpc.TinsmithServiceStub(channel)
        started = time.process_time()
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await stub.ForwardBackward(request, timeout=20, metadata=(("x-api-key", ALICE),))
        assert time.process_time() - started < SECONDS
    assert caught.value.code() is grpc.StatusCode.INVALID_ARGUMENT
    assert "ForwardBackward.data has more than 4096 entries" in (caught.value.details() or "")


async def test_grpc_refuses_a_field_that_it_does_not_know_inside_a_list(edges: Edges) -> None:
    request = training_pb2.ForwardBackwardRequest(model_id="s:train:0", seq_id=1)
    request.forward_backward.data.add().loss_inputs["weights"].MergeFromString(b"\xf8\x07\x01")
    async with rpc.channel(edges.grpc_address) as channel:
        stub = service_pb2_grpc.TinsmithServiceStub(channel)
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await stub.ForwardBackward(request, timeout=20, metadata=(("x-api-key", ALICE),))
    assert caught.value.code() is grpc.StatusCode.INVALID_ARGUMENT
    assert "Tensor has a protobuf field 127" in (caught.value.details() or "")

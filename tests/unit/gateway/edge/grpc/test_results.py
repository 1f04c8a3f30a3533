"""gRPC: waiting for results, within the time that a call has."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from typing import Any

import pytest

from services.common.contract.errors import InvalidRequest
from services.common.process import rpc
from services.gateway.edge.grpc.results import patience
from tests.unit.gateway.edges import ALICE, Edges, new_model
from tinsmith.v1 import results_pb2, service_pb2_grpc, training_pb2

METADATA = (("x-api-key", ALICE),)
ADAM = training_pb2.AdamParams(learning_rate=0.1, beta1=0.9, beta2=0.95, eps=1e-8)


@pytest.fixture
async def stub(edges: Edges) -> AsyncIterator[service_pb2_grpc.TinsmithServiceStub]:
    async with rpc.channel(edges.grpc_address) as channel:
        yield service_pb2_grpc.TinsmithServiceStub(channel)


@pytest.fixture
async def model(edges: Edges) -> str:
    async with edges.http() as http:
        return await new_model(edges, http)


async def step(stub: Any, model: str, seq_id: int = 1) -> str:
    """An operation that is accepted and not run."""
    request = training_pb2.OptimStepRequest(model_id=model, seq_id=seq_id, adam=ADAM)
    return (await stub.OptimStep(request, timeout=10, metadata=METADATA)).request_id


def test_a_wait_ends_before_its_call_does() -> None:
    assert patience(None, None) == 60
    assert patience(5, None) == 5
    assert patience(None, 600) == 60
    assert patience(20, 10) == 9
    assert patience(None, 0.1) == pytest.approx(0.09)
    assert patience(60, 0) == 0
    for wrong in (-1, 61, float("nan")):
        with pytest.raises(InvalidRequest):
            patience(wrong, 10)


async def test_a_call_whose_time_is_nearly_over_hears_that_there_is_no_result_yet(
    stub: Any, model: str
) -> None:
    request = results_pb2.GetResultRequest(request_id=await step(stub, model))
    found = await stub.GetResult(request, timeout=1, metadata=METADATA)
    assert not found.HasField("result")


async def test_a_call_that_is_given_up_waits_no_longer(edges: Edges, stub: Any, model: str) -> None:
    request_id = await step(stub, model)
    call = stub.GetResult(results_pb2.GetResultRequest(request_id=request_id), timeout=60, metadata=METADATA)
    waiters = edges.app.futures._waiters
    await holds(lambda: request_id in waiters)
    call.cancel()
    await holds(lambda: request_id not in waiters)
    with pytest.raises(asyncio.CancelledError):
        await call


async def holds(condition: Any) -> None:
    async with asyncio.timeout(10):
        while not condition():  # noqa: ASYNC110
            await asyncio.sleep(0.02)

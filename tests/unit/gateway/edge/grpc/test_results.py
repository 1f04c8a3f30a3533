"""gRPC: waiting for results, within the time that a call has."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from typing import Any

import grpc
import grpc.aio
import pytest

from services.common.contract.errors import InvalidRequest
from services.common.process import rpc
from services.common.state import keys
from services.gateway import application
from services.gateway.access.answer_room import AnswerRoom
from services.gateway.access.limits import MIB
from services.gateway.edge.grpc.results import patience
from tests.unit.gateway.edges import ALICE, BOB, Edges, new_model
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
    found = await stub.GetResult(request, timeout=4, metadata=METADATA)
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
    async with asyncio.timeout(60):
        while not condition():  # noqa: ASYNC110
            await asyncio.sleep(0.02)


async def test_many_results_come_with_one_call_each_as_soon_as_it_is_there(
    edges: Edges, stub: Any, model: str
) -> None:
    first, second, third = [await step(stub, model, seq_id) for seq_id in (1, 2, 3)]
    await edges.answer(model, 2, optim_step=training_pb2.OptimStepResult(metrics={"grad_norm": 2.0}))
    nobodys = f"{model.split(':')[0]}:train:9:1"
    ids = [first, second, third, nobodys]
    request = results_pb2.ReadResultsRequest(request_ids=ids)
    found: dict[str, results_pb2.ReadResultsResponse] = {}
    async for answer in stub.ReadResults(request, timeout=20, metadata=METADATA):
        found[answer.request_id] = answer
        if len(found) == 2:
            await edges.answer(model, 1, optim_step=training_pb2.OptimStepResult(metrics={"grad_norm": 1.0}))
            await edges.answer(model, 3, optim_step=training_pb2.OptimStepResult(metrics={"grad_norm": 3.0}))
    assert list(found)[:2] == [nobodys, second]
    assert found[nobodys].error.code == "not_found"
    for request_id, norm in ((first, 1.0), (second, 2.0), (third, 3.0)):
        result = results_pb2.OperationResult.FromString(found[request_id].piece.data)
        assert result.optim_step.metrics["grad_norm"] == norm
    assert not edges.app.several._watches


async def test_a_result_that_is_larger_than_a_message_comes_in_pieces(
    edges: Edges, stub: Any, model: str
) -> None:
    request_id = await step(stub, model)
    output = training_pb2.BatchedTensor(dtype=1, data=bytes(range(256)) * 20_000)
    result = training_pb2.ForwardBackwardResult(outputs={"logprobs": output})
    await edges.answer(model, 1, forward_backward=result)
    request = results_pb2.ReadResultsRequest(request_ids=[request_id])
    pieces = [answer.piece async for answer in stub.ReadResults(request, timeout=20, metadata=METADATA)]
    assert len(pieces) == 5 and {piece.total_bytes for piece in pieces} == {sum(len(p.data) for p in pieces)}
    whole = results_pb2.OperationResult.FromString(b"".join(piece.data for piece in pieces))
    assert whole.forward_backward == result


async def test_a_read_of_results_ends_before_its_call_with_those_that_are_there(
    edges: Edges, stub: Any, model: str
) -> None:
    ids = [await step(stub, model, seq_id) for seq_id in (1, 2)]
    await edges.answer(model, 1, optim_step=training_pb2.OptimStepResult())
    request = results_pb2.ReadResultsRequest(request_ids=ids)
    found = [answer async for answer in stub.ReadResults(request, timeout=4, metadata=METADATA)]
    assert [answer.request_id for answer in found] == ids[:1]
    for wrong in ([], ["x"] * 1025):
        refused = stub.ReadResults(
            results_pb2.ReadResultsRequest(request_ids=wrong), timeout=60, metadata=METADATA
        )
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await refused.read()
        assert caught.value.code() is grpc.StatusCode.INVALID_ARGUMENT


async def test_what_is_acknowledged_goes_in_a_minute(edges: Edges, stub: Any, model: str) -> None:
    done, pending = [await step(stub, model, seq_id) for seq_id in (1, 2)]
    await edges.answer(model, 1, optim_step=training_pb2.OptimStepResult())
    request = results_pb2.AcknowledgeResultsRequest(request_ids=[done, pending])
    for _ in range(2):
        await stub.AcknowledgeResults(request, timeout=10, metadata=METADATA)
    assert 0 < await edges.redis.ttl(keys.future(model, 1)) <= 60
    assert await edges.redis.ttl(keys.future(model, 2)) == -1
    other = results_pb2.AcknowledgeResultsRequest(request_ids=[done])
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await stub.AcknowledgeResults(other, timeout=10, metadata=(("x-api-key", BOB),))
    assert caught.value.code() is grpc.StatusCode.NOT_FOUND


async def test_a_result_counts_until_its_client_has_it_and_waits_for_room(
    edges: Edges, stub: Any, model: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(application, "_ROOM_S", 0.1)
    request_id, answers = await step(stub, model), edges.app.answers
    # More than gRPC takes ahead of its reader.
    output = training_pb2.BatchedTensor(dtype=1, data=bytes(8 * MIB), offsets=[0, 8 * MIB])
    await edges.answer(
        model, 1, forward_backward=training_pb2.ForwardBackwardResult(outputs={"logprobs": output})
    )
    one = results_pb2.GetResultRequest(request_id=request_id)
    many = results_pb2.ReadResultsRequest(request_ids=[request_id])

    call = stub.ReadResults(many, timeout=20, metadata=METADATA)
    assert (await call.read()).piece.total_bytes > 8 * MIB
    assert answers.held == answers.of_result(8 * MIB) == 16 * MIB
    while await call.read() is not grpc.aio.EOF:
        pass
    await holds(lambda: answers.held == 0)
    assert (await stub.GetResult(one, timeout=20, metadata=METADATA)).result.HasField("forward_backward")
    await holds(lambda: answers.held == 0)

    with answers.account("alice") as account:
        assert account.take_now(answers.largest)
        for refused in (
            stub.GetResult(one, timeout=10, metadata=METADATA),
            stub.ReadResults(many, timeout=10, metadata=METADATA).read(),
        ):
            with pytest.raises(grpc.aio.AioRpcError) as caught:
                await refused
            assert caught.value.code() is grpc.StatusCode.RESOURCE_EXHAUSTED
        async with edges.http() as http:
            later = await http.post("retrieve_future", json={"request_id": request_id})
            assert later.status_code == 429 and "--memory-mib" in later.json()["detail"]
        assert answers.held == account.held

        monkeypatch.setattr(application, "_ROOM_S", 10)
        async with edges.http() as http:
            waiting = asyncio.create_task(http.post("retrieve_future", json={"request_id": request_id}))
            await holds(lambda: answers._waiting)
            account.give(account.held)
            answer = await waiting
            assert answer.status_code == 200 and len(answer.content) > 8 * MIB
    await holds(lambda: answers.held == 0)


async def test_a_result_that_is_larger_than_its_room_is_given_all_the_same(
    edges: Edges, stub: Any, model: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    request_id = await step(stub, model)
    output = training_pb2.BatchedTensor(dtype=1, data=bytes(MIB))
    await edges.answer(
        model, 1, forward_backward=training_pb2.ForwardBackwardResult(outputs={"logprobs": output})
    )
    room = AnswerRoom(1000)
    object.__setattr__(edges.app, "answers", room)
    many = results_pb2.ReadResultsRequest(request_ids=[request_id])
    found = [answer.piece async for answer in stub.ReadResults(many, timeout=20, metadata=METADATA)]
    assert sum(len(piece.data) for piece in found) > MIB
    await holds(lambda: room.held == 0)

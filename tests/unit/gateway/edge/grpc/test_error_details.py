"""What a program reads from a refused call: google.rpc's details, with gRPC's own library."""

from __future__ import annotations

from collections.abc import AsyncIterator
from dataclasses import replace
from pathlib import Path

import grpc
import grpc.aio
import pytest
from google.rpc import error_details_pb2
from grpc_status import rpc_status

from services.common.process import rpc
from services.gateway.access.limits import Limits, OwnerLimits
from tests.unit.gateway.edges import ALICE, BASE, LORA, Edges, running
from tinsmith.v1 import (
    checkpoints_pb2,
    models_pb2,
    results_pb2,
    sampling_pb2,
    service_pb2_grpc,
    sessions_pb2,
    types_pb2,
)


@pytest.fixture
async def edges(redis_url: str, tmp_path: Path) -> AsyncIterator[Edges]:
    limits = Limits(owners=replace(OwnerLimits(), sessions=1))
    async with running(redis_url, tmp_path, limits) as found:
        yield found


class Refusal:
    """A failed call, read as a client reads it."""

    def __init__(self, error: grpc.aio.AioRpcError) -> None:
        status = rpc_status.from_call(error)  # It checks that code and message agree with the call's.
        assert status is not None
        self.kinds = [detail.type_url for detail in status.details]
        self.info = error_details_pb2.ErrorInfo()
        self.bad = error_details_pb2.BadRequest()
        self.retry = error_details_pb2.RetryInfo()
        for detail in status.details:
            for message in (self.info, self.bad, self.retry):
                detail.Unpack(message)

    @property
    def fields(self) -> list[str]:
        return [violation.field for violation in self.bad.field_violations]


async def refusal(edges: Edges, method: str, request: object, key: str = ALICE) -> Refusal:
    async with rpc.channel(edges.grpc_address) as channel:
        call = getattr(service_pb2_grpc.TinsmithServiceStub(channel), method)
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await call(request, timeout=10, metadata=(("x-api-key", key),))
    return Refusal(caught.value)


async def session(edges: Edges) -> str:
    async with rpc.channel(edges.grpc_address) as channel:
        create = service_pb2_grpc.TinsmithServiceStub(channel).CreateSession
        made = await create(sessions_pb2.CreateSessionRequest(), timeout=10, metadata=(("x-api-key", ALICE),))
        return made.session_id


async def test_every_refusal_has_a_reason_in_one_domain(edges: Edges) -> None:
    unknown = await refusal(edges, "ListModels", models_pb2.ListModelsRequest(), key="tml-wrong")
    assert (unknown.info.reason, unknown.info.domain) == ("UNAUTHENTICATED", "tinsmith")
    missing = await refusal(edges, "Heartbeat", sessions_pb2.HeartbeatRequest(session_id="none"))
    assert (missing.info.reason, missing.info.domain) == ("NOT_FOUND", "tinsmith")
    assert (len(unknown.kinds), len(missing.kinds)) == (1, 1)


async def test_a_limit_is_named_and_says_when_to_try_again(edges: Edges) -> None:
    await session(edges)
    refused = await refusal(edges, "CreateSession", sessions_pb2.CreateSessionRequest())
    assert refused.info.reason == "LIMIT_REACHED"
    assert dict(refused.info.metadata) == {"limit": "--max-sessions"}
    assert refused.retry.retry_delay.ToMilliseconds() >= 1000
    assert not refused.fields


async def test_a_field_that_is_at_fault_is_named(edges: Edges) -> None:
    owner = await session(edges)
    model = models_pb2.CreateModelRequest(session_id=owner, base_model="other", lora=LORA)
    unknown = await refusal(edges, "CreateModel", model)
    assert (unknown.info.reason, unknown.fields) == ("UNKNOWN_BASE_MODEL", ["base_model"])
    assert unknown.bad.field_violations[0].description.startswith("base model 'other' is not served")
    model = models_pb2.CreateModelRequest(session_id=owner, base_model=BASE, lora=LORA)
    model.lora.rank = 4000
    assert (await refusal(edges, "CreateModel", model)).fields == ["lora.rank"]
    path = checkpoints_pb2.GetCheckpointRequest(path="tinker://nowhere")
    assert (await refusal(edges, "GetCheckpoint", path)).fields == ["path"]
    wait = results_pb2.GetResultRequest(request_id="a:1", timeout_seconds=99)
    assert (await refusal(edges, "GetResult", wait)).fields == ["timeout_seconds"]
    tags = sessions_pb2.CreateSessionRequest(tags=["t" * 300])
    assert (await refusal(edges, "CreateSession", tags)).fields == ["tags"]


async def test_the_fields_of_a_sample_are_named_down_to_its_parameters(edges: Edges) -> None:
    owner = await session(edges)
    async with rpc.channel(edges.grpc_address) as channel:
        opened = await service_pb2_grpc.TinsmithServiceStub(channel).CreateSamplingSession(
            sampling_pb2.CreateSamplingSessionRequest(session_id=owner, base_model=BASE),
            timeout=10,
            metadata=(("x-api-key", ALICE),),
        )
    sample = sampling_pb2.SampleRequest(
        sampling_session_id=opened.sampling_session_id,
        prompt=types_pb2.Tensor(dtype=types_pb2.DATA_TYPE_INT32, shape=[1], data=bytes(4)),
        num_samples=1,
        params=sampling_pb2.SamplingParams(max_tokens=4, temperature=9, top_k=-1, top_p=1),
    )
    assert (await refusal(edges, "Sample", sample)).fields == ["params.temperature"]
    sample.params.temperature = 1
    assert (await refusal(edges, "Sample", sample)).fields == ["params.stop"]
    sample.params.stop.never.SetInParent()
    sample.prompt.data = b"\xff\xff\xff\x7f"
    outside = await refusal(edges, "Sample", sample)
    assert (outside.info.reason, outside.fields) == ("TOKEN_OUT_OF_RANGE", ["prompt"])


async def test_the_longest_message_in_any_script_arrives(edges: Edges) -> None:
    for text in ("%" * 900, "語" * 900, "x" * 9000):
        missing = models_pb2.CreateModelFromStateRequest(session_id=text)
        refused = await refusal(edges, "CreateModelFromState", missing)
        assert refused.info.reason == "NOT_FOUND"

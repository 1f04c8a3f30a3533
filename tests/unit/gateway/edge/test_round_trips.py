"""How often a gateway goes to Redis for one sample, from its acceptance until its client has it."""

from __future__ import annotations

import asyncio
import hashlib
import time
from collections import Counter
from collections.abc import Awaitable, Callable
from typing import Any

import httpx
import pytest

from services.common.contract import ids
from services.common.process import rpc
from services.common.state.scripts import _source
from services.gateway.edge.grpc import service
from services.gateway.placement.news import TELL_S
from services.gateway.records.sampling_session import SamplingSessionRecord
from tests.unit.gateway.edge.talking import Talking
from tests.unit.gateway.edges import ALICE
from tests.unit.gateway.redis_calls import counted
from tests.unit.gateway.scripted_services import BASE
from tinsmith.v1 import results_pb2, sampling_pb2, service_pb2_grpc, types_pb2

METADATA = (("x-api-key", ALICE),)
SAMPLES = 40
SCRIPTS = ("accept_sample", "publish_sample", "read_version")
"""The last for inflight sessions."""
A_SECOND = 5 + 1 / TELL_S
"""What there is besides in a second, at most: a session's record, its sign of life, a record of its calls,
and what gateways tell each other of their load."""


def client(talks: Talking) -> httpx.AsyncClient:
    return httpx.AsyncClient(base_url=talks.url, headers={"x-api-key": ALICE}, timeout=20)


async def open_session(talks: Talking, store: Any, inflight: bool) -> tuple[str, str]:
    async with client(talks) as http:
        created = await http.post("/api/v1/create_session", json={"tags": [], "sdk_version": "0"})
    session_id = created.json()["session_id"]
    opened = ids.sampling_session_id(session_id, 0)
    record = SamplingSessionRecord(
        sampling_session_id=opened,
        session_id=session_id,
        owner="alice",
        base_model=BASE,
        model_id=ids.model_id(session_id, 1) if inflight else "",
        version=3 if inflight else 0,
        inflight=inflight,
    )
    await store.create_if_absent(record)
    return session_id, opened


def over_http(talks: Talking, opened: str) -> Callable[[int], Awaitable[None]]:
    async def sample(number: int) -> None:
        asked = {
            "sampling_session_id": opened,
            "seq_id": number,
            "num_samples": 1,
            "prompt": {"chunks": [{"type": "encoded_text", "tokens": [1, 2, 3]}]},
            "sampling_params": {"max_tokens": 4},
        }
        async with client(talks) as http:
            accepted = await http.post("/api/v1/asample", json=asked)
            told = {"request_id": accepted.json()["request_id"]}
            answer = await http.post("/api/v1/retrieve_future", json=told)
        assert answer.status_code == 200, answer.text

    return sample


def over_grpc(stub: service_pb2_grpc.TinsmithServiceStub, opened: str) -> Callable[[int], Awaitable[None]]:
    params = sampling_pb2.SamplingParams(max_tokens=4, temperature=1, top_k=-1, top_p=1)
    params.stop.never.SetInParent()
    prompt = types_pb2.Tensor(dtype=types_pb2.DATA_TYPE_INT32, shape=[1], data=bytes(4))

    async def sample(number: int) -> None:
        asked = sampling_pb2.SampleRequest(
            sampling_session_id=opened, seq_id=number, prompt=prompt, num_samples=1, params=params
        )
        accepted = await stub.Sample(asked, timeout=20, metadata=METADATA)
        wanted = results_pb2.GetResultRequest(request_id=accepted.request_id, timeout_seconds=20)
        answer = await stub.GetResult(wanted, timeout=30, metadata=METADATA)
        assert answer.result.HasField("sample"), answer

    return sample


def of_samples(seen: Counter[str], seconds: float) -> dict[str, int]:
    """How often each script of samples ran. Besides there is what the session costs meanwhile, and nobody
    looks at a result: it is handed to who waits for it."""
    shas = {hashlib.sha1(_source(name).encode()).hexdigest(): name for name in SCRIPTS}
    found = {name: seen[words] for words in seen for sha, name in shas.items() if sha in words}
    others = {words: times for words, times in seen.items() if not any(sha in words for sha in shas)}
    assert not any("tinsmith:future" in words for words in others), others
    assert sum(others.values()) <= A_SECOND * (1 + int(seconds)), others
    return found


@pytest.mark.parametrize("way", ["http", "grpc"])
@pytest.mark.parametrize("inflight", [False, True], ids=["snapshot", "inflight"])
async def test_a_sample_is_accepted_and_resolved_and_is_no_more_to_redis(
    talks: Talking, way: str, inflight: bool
) -> None:
    store = talks.gateway.stores.sampling_sessions
    session_id, opened = await open_session(talks, store, inflight)
    server = await service.serve(talks.gateway.application, "127.0.0.1:0")
    each, futures = SCRIPTS if inflight else SCRIPTS[:2], talks.gateway.application.futures
    try:
        async with rpc.channel(f"127.0.0.1:{server.port}") as channel:
            stub = service_pb2_grpc.TinsmithServiceStub(channel)
            sample = over_http(talks, opened) if way == "http" else over_grpc(stub, opened)

            async def sampled(*numbers: int) -> dict[str, int]:
                talks.sampler.gate.clear()
                began = time.monotonic()
                with counted(session_id) as seen:
                    asked = asyncio.gather(*(sample(number) for number in numbers))
                    # Until the sampler has all, and their clients wait for them.
                    while min(talks.sampler.waiting, futures.waited_for) < len(numbers):  # noqa: ASYNC110
                        await asyncio.sleep(0.01)
                    talks.sampler.gate.set()
                    await asked
                return of_samples(seen, time.monotonic() - began)

            # What a session costs once.
            await sample(1)
            many = await sampled(*range(2, 2 + SAMPLES))
            assert many.keys() == set(each)
            assert all(times <= SAMPLES for times in many.values()), many
            # They end at once, and go together.
            assert many["publish_sample"] < SAMPLES / 4
            # One that shares its way with no other.
            assert await sampled(2 + SAMPLES) == dict.fromkeys(each, 1)
    finally:
        await server.drain(1)

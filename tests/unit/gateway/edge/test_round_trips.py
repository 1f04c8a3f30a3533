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
OF_POLLS = ("completions", "shorten")
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
        async with client(talks) as http:
            accepted = await http.post("/api/v1/asample", json=asked_of(opened, number))
            told = {"request_id": accepted.json()["request_id"]}
            answer = await http.post("/api/v1/retrieve_future", json=told)
        assert answer.status_code == 200, answer.text

    return sample


def as_the_sdk(talks: Talking, opened: str) -> Callable[[int], Awaitable[None]]:
    """As the SDK's poller waits: it acknowledges a cursor at once, and a result when it has that."""
    target = {"type": "sampling_session", "sampling_session_id": opened, "cloned_sampler_id": 0}
    cursor = 0

    async def sample(number: int) -> None:
        nonlocal cursor
        async with client(talks) as http:

            async def poll(*retrieved: str, **wait: float) -> Any:
                asked = {"target": target, "prev_cursor": cursor, "retrieved_request_ids": retrieved}
                return (await http.post("/api/v1/retrieve_futures", json={**asked, **wait})).json()

            accepted = await http.post("/api/v1/asample", json=asked_of(opened, number))
            told = {"request_id": accepted.json()["request_id"]}
            page = await poll()
            assert [one["request_id"] for one in page["completions"]] == [told["request_id"]], page
            cursor = page["cursor"]
            fetched = http.post("/api/v1/retrieve_future", json=told)
            answer, nothing = await asyncio.gather(fetched, poll(timeout=0))
            assert (answer.status_code, nothing) == (200, {"completions": [], "cursor": cursor})
            assert await poll(told["request_id"], timeout=0) == nothing

    return sample


def asked_of(opened: str, number: int) -> dict[str, Any]:
    return {
        "sampling_session_id": opened,
        "seq_id": number,
        "num_samples": 1,
        "prompt": {"chunks": [{"type": "encoded_text", "tokens": [1, 2, 3]}]},
        "sampling_params": {"max_tokens": 4},
    }


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


def of_samples(seen: Counter[str], seconds: float, scripts: tuple[str, ...] = SCRIPTS) -> dict[str, int]:
    """How often each script of samples ran. Besides there is what the session costs meanwhile, and nobody
    looks at a result: it is handed to who waits for it."""
    shas = {hashlib.sha1(_source(name).encode()).hexdigest(): name for name in scripts}
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


async def test_a_sample_of_the_sdk_is_besides_looked_for_once_and_let_go(talks: Talking) -> None:
    session_id, opened = await open_session(talks, talks.gateway.stores.sampling_sessions, inflight=False)
    sample = as_the_sdk(talks, opened)

    async def sampled(number: int) -> dict[str, int]:
        talks.sampler.gate.clear()
        began = time.monotonic()
        with counted(session_id) as seen:
            asked = asyncio.create_task(sample(number))
            # Until the sampler has it, and its client polls.
            while not talks.sampler.waiting:  # noqa: ASYNC110
                await asyncio.sleep(0.01)
            await asyncio.sleep(0.2)
            talks.sampler.gate.set()
            await asked
        return of_samples(seen, time.monotonic() - began, SCRIPTS + OF_POLLS)

    # What a session costs once: its first poll cannot know what there is.
    await sampled(1)
    for number in range(2, 5):
        # Of what was fetched and not yet acknowledged, all is let go together once a second.
        assert (found := await sampled(number)).pop("shorten") <= 2
        assert found == {"accept_sample": 1, "publish_sample": 1, "completions": 1}

"""HTTP: one poll for all samples of a client, and giving samples up."""

from __future__ import annotations

import asyncio
import sys
import time
from contextlib import ExitStack
from typing import Any

import httpx
import pytest
import tinker

from services.common.state import keys
from services.gateway.application import Application
from services.gateway.edge.http import futures
from tests.unit.gateway.edges import ALICE, BASE, BOB, Edges, new_model, new_session
from tinsmith.v1 import results_pb2, sampling_pb2, types_pb2

RESULT = sampling_pb2.SampleResult()
MANY = 16_000


async def sampling_session(client: httpx.AsyncClient) -> str:
    body = {"session_id": await new_session(client), "sampling_session_seq_id": 0, "base_model": BASE}
    return (await client.post("create_sampling_session", json=body)).json()["sampling_session_id"]


async def sample(client: httpx.AsyncClient, session: str, seq_id: int = 0) -> str:
    body = {
        "sampling_session_id": session,
        "seq_id": seq_id,
        "prompt": {"chunks": [{"tokens": [1], "type": "encoded_text"}]},
        "sampling_params": {"max_tokens": 5},
    }
    response = await client.post("asample", json=body)
    assert response.status_code == 200, response.text
    return response.json()["request_id"]


async def poll(client: httpx.AsyncClient, session: str, **fields: object) -> httpx.Response:
    target = {"type": "sampling_session", "sampling_session_id": session, "cloned_sampler_id": 0}
    return await client.post("retrieve_futures", json={"target": target, "prev_cursor": 0, **fields})


async def test_a_poll_ends_without_completions_when_the_gateway_drains(edges: Edges) -> None:
    async with edges.http() as client:
        session = await sampling_session(client)
        await sample(client, session)
        waiting = asyncio.create_task(poll(client, session))
        await asyncio.sleep(0.2)
        assert not waiting.done()
        edges.app.drain()
        response = await asyncio.wait_for(waiting, 30)
        assert (response.status_code, response.json()) == (200, {"completions": [], "cursor": 0})


async def test_a_sample_of_the_second_that_redis_lost_is_accepted_again(edges: Edges) -> None:
    """Who waits for completions does not ask for it by its name, and would wait for ever."""
    async with edges.http() as client:
        session = await sampling_session(client)
        request_id = await sample(client, session)
        lost = [keys.future(session, 0), keys.pending_samples(session), keys.gateway_samples("gateway-0")]
        assert await edges.redis.delete(*lost) == len(lost)
        await edges.app.redo_log._repeat()
        assert (await edges.sample(request_id)).request_id == request_id
        waiting = asyncio.create_task(poll(client, session))
        await edges.answer_sample(request_id, RESULT)
        (told,) = (await waiting).json()["completions"]
        assert (told["request_id"], told["state"]) == (request_id, "finished")


async def test_a_poll_ends_with_the_first_completion_and_goes_on_from_its_cursor(edges: Edges) -> None:
    async with edges.http() as client:
        session = await sampling_session(client)
        first, second = await sample(client, session, 0), await sample(client, session, 1)
        waiting = asyncio.create_task(poll(client, session))
        await asyncio.sleep(0.2)
        assert not waiting.done()
        await edges.answer_sample(second, RESULT)
        answer = (await waiting).json()
        size = results_pb2.OperationResult(sample=RESULT).ByteSize()
        assert answer["completions"] == [
            {"state": "finished", "request_id": second, "response_payload_uncompressed_size": size}
        ]
        waiting = asyncio.create_task(poll(client, session, prev_cursor=answer["cursor"]))
        await asyncio.sleep(0.2)
        assert not waiting.done()
        failure = types_pb2.Error(category=types_pb2.ERROR_CATEGORY_USER, message="too long")
        await edges.samples.publish(first, results_pb2.OperationResult(error=failure))
        later = (await waiting).json()
        assert later["completions"] == [{"state": "failed", "request_id": first}]
        assert later["cursor"] > answer["cursor"]
        result = (await client.post("retrieve_future", json={"request_id": first})).json()
        assert result["error"] == "too long"


async def test_timeout_0_waits_a_moment_and_a_longer_one_as_long(edges: Edges) -> None:
    async with edges.http() as client:
        session = await sampling_session(client)
        await sample(client, session)
        start = time.monotonic()
        assert (await poll(client, session, timeout=0)).json() == {"completions": [], "cursor": 0}
        # A poll that waits does for 40 s.
        assert 0.05 <= time.monotonic() - start < 20
        answer = await poll(client, session, timeout=0.5, prev_cursor=17)
        assert answer.json() == {"completions": [], "cursor": 17}
        assert time.monotonic() - start >= 0.5


async def test_a_poll_that_acknowledges_lets_go_at_once_and_tells_what_is_resolved_in_its_moment(
    edges: Edges, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(futures, "ACKNOWLEDGING_POLL_SECONDS", 30.0)
    async with edges.http() as client:
        session = await sampling_session(client)
        first, second = await sample(client, session, 0), await sample(client, session, 1)
        await edges.answer_sample(first, RESULT)
        told = (await poll(client, session, timeout=0)).json()
        assert [each["request_id"] for each in told["completions"]] == [first]
        asked = waits_are_noted(monkeypatch)
        fields = {"prev_cursor": told["cursor"], "retrieved_request_ids": [first]}
        waiting = asyncio.create_task(poll(client, session, timeout=0, **fields))
        async with asyncio.timeout(25):
            await asked.wait()
            assert 0 < await edges.redis.ttl(f"tinsmith:future:{{{session}}}:0") <= 60
            assert not waiting.done()
            await edges.answer_sample(second, RESULT)
            later = (await waiting).json()
        assert [each["request_id"] for each in later["completions"]] == [second]


def waits_are_noted(monkeypatch: pytest.MonkeyPatch) -> asyncio.Event:
    """Set when a poll begins to wait."""
    asked, wait_completions = asyncio.Event(), Application.wait_completions

    def waits(*args: Any) -> Any:
        asked.set()
        return wait_completions(*args)

    monkeypatch.setattr(Application, "wait_completions", waits)
    return asked


async def test_fetched_results_may_go_and_only_the_targets_own(edges: Edges) -> None:
    async with edges.http() as client:
        session, other = await sampling_session(client), await sampling_session(client)
        request_id, foreign = await sample(client, session), await sample(client, other)
        await edges.answer_sample(request_id, RESULT)
        answer = await poll(client, session, timeout=0, retrieved_request_ids=[request_id])
        assert answer.status_code == 200
        assert 0 < await edges.redis.ttl(f"tinsmith:future:{{{session}}}:0") <= 60
        for wrong in (foreign, f"{session}:1000000000", "nonsense"):
            answer = await poll(client, session, timeout=0, retrieved_request_ids=[wrong])
            assert answer.status_code == 400


async def test_a_poll_that_waits_holds_nothing_of_the_results_that_it_says_were_fetched(
    edges: Edges, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with edges.http() as client:
        session = await sampling_session(client)
        await sample(client, session)
        fetched = [f"{session}:{number}" for number in range(1, MANY)]
        # What is remembered of the last requests is remembered after the first poll.
        await poll(client, session, retrieved_request_ids=fetched, timeout=0)
        asked = waits_are_noted(monkeypatch)
        before = sys.getallocatedblocks()
        waiting = asyncio.create_task(poll(client, session, retrieved_request_ids=fetched, timeout=30))
        async with asyncio.timeout(25):
            await asked.wait()
            await asyncio.sleep(1.0)
        assert not waiting.done()
        assert sys.getallocatedblocks() - before < MANY // 4
        assert edges.app.budget.used == 0
        edges.app.drain()
        await waiting


async def test_polls_and_cancellations_belong_to_their_owner(edges: Edges) -> None:
    async with edges.http() as client, edges.http(BOB) as other:
        session = await sampling_session(client)
        request_id = await sample(client, session)
        assert (await poll(other, session, timeout=0)).status_code == 404
        assert (await poll(client, "nobody:sample:0", timeout=0)).status_code == 404
        refused = await other.post("cancel_future", json={"request_id": request_id})
        assert refused.status_code == 404
        assert await edges.samples.samples_of("gateway-0") == {request_id}


async def test_a_cancelled_sample_fails_for_whoever_waits_for_it(edges: Edges) -> None:
    async with edges.http() as client:
        session = await sampling_session(client)
        request_id = await sample(client, session)
        cancel = {"request_id": request_id}
        waiting = asyncio.create_task(client.post("retrieve_future", json=cancel))
        await asyncio.sleep(0.1)
        for _ in range(2):
            assert (await client.post("cancel_future", json=cancel)).status_code == 200
        assert "cancelled" in (await waiting).json()["error"]
        assert (await poll(client, session)).json()["completions"] == [
            {"state": "failed", "request_id": request_id}
        ]
        unknown = await client.post("cancel_future", json={"request_id": f"{session}:5"})
        assert unknown.status_code == 410


async def test_an_operation_of_a_model_cannot_be_cancelled(edges: Edges) -> None:
    async with edges.http() as client:
        model = await new_model(edges, client)
        await client.post("optim_step", json={"model_id": model, "seq_id": 1, "adam_params": {}})
        refused = await client.post("cancel_future", json={"request_id": f"{model}:1"})
        assert refused.status_code == 400
        assert "takes effect" in refused.json()["detail"]
        assert (await edges.operation(model, 1)) is not None


async def test_the_samples_of_a_finished_session_are_given_up_on_all_gateways(edges: Edges) -> None:
    async with edges.http() as client:
        session, other = await sampling_session(client), await sampling_session(client)
        mine = [await sample(client, session, seq_id) for seq_id in range(3)]
        kept = await sample(client, other)
        await edges.redis.sadd("tinsmith:sample-gateways", "gateway-0", "gateway-1")
        await edges.samples.claim(mine[2], "gateway-0", "gateway-1")
        finish = {"reason": {"type": "success"}, "detail": None}
        await client.post(f"sessions/{session.split(':')[0]}/finish", json=finish)
        for request_id in mine:
            with ExitStack() as held:
                view = await edges.app.wait_result("alice", request_id, 0, held)
            assert b"was finished" in (view.result or b"")
        assert await edges.samples.samples_of("gateway-0") == {kept}
        assert await edges.samples.samples_of("gateway-1") == set()


async def test_finishing_a_session_costs_nothing_for_the_samples_of_others(edges: Edges) -> None:
    async with edges.http() as client:
        session, other = await sampling_session(client), await sampling_session(client)
        mine = await sample(client, session)
        # As many as a busy gateway has, on its list and pending.
        numbers = range(100, 5100)
        pipeline = edges.redis.pipeline(transaction=False)
        pipeline.sadd(keys.gateway_samples("gateway-0"), *(f"{other}:{number}" for number in numbers))
        pipeline.sadd(keys.pending_samples(other), *numbers)
        await pipeline.execute()
        before = await edges.redis.info("commandstats")
        finish = {"reason": {"type": "success"}, "detail": None}
        await client.post(f"sessions/{session.split(':')[0]}/finish", json=finish)
        after = await edges.redis.info("commandstats")
    with ExitStack() as held:
        view = await edges.app.wait_result("alice", mine, 0, held)
    assert b"was finished" in (view.result or b"")
    # One set of sampling sessions, and of each the set of what is pending.
    reads = ("cmdstat_sscan", "cmdstat_smembers")
    none = {"calls": 0}
    assert [after[name]["calls"] - before.get(name, none)["calls"] for name in reads] == [1, 1]
    assert len(await edges.samples.samples_of("gateway-0")) == 5000


async def test_the_sdk_waits_with_one_poll_and_cancels_what_it_abandons(edges: Edges) -> None:
    """50 samples by the real SDK; the test answers all but one, which the SDK gives up."""
    polls: list[str] = []
    wait, wait_all = edges.app.futures.wait, edges.app.completions.wait

    async def counted(request_id: str, seconds: float) -> object:
        polls.append("one" if seconds else "now")
        return await wait(request_id, seconds)

    async def counted_all(*args: object) -> object:
        polls.append("all")
        return await wait_all(*args)  # type: ignore[arg-type]

    edges.app.futures.wait = counted  # type: ignore[method-assign, assignment]
    edges.app.completions.wait = counted_all  # type: ignore[method-assign, assignment]
    loop = asyncio.get_running_loop()

    def use() -> None:
        service = tinker.ServiceClient(base_url=edges.base_url, api_key=ALICE)
        client = service.create_sampling_client(base_model=BASE).result()
        prompt, params = tinker.ModelInput.from_ints([1, 2]), tinker.SamplingParams(max_tokens=4)
        futures = [client.sample(prompt, 1, params) for _ in range(50)]
        session = client._sampling_session_id

        async def answer() -> None:
            while len(await edges.samples.samples_of("gateway-0")) < 50:  # noqa: ASYNC110
                await asyncio.sleep(0.02)
            while not {"one", "all"} & {*polls}:  # noqa: ASYNC110
                await asyncio.sleep(0.02)
            await asyncio.sleep(0.2)
            assert "one" not in polls, "no sample polls for itself"
            assert polls.count("all") == 1
            sequence = sampling_pb2.SampledSequence(stop_reason=sampling_pb2.STOP_REASON_STOP)
            for seq_id in range(49):
                await edges.answer_sample(
                    f"{session}:{seq_id}", sampling_pb2.SampleResult(sequences=[sequence])
                )

        asyncio.run_coroutine_threadsafe(answer(), loop).result(20)
        for future in futures[:49]:
            assert len(future.result(20).sequences) == 1
        futures[49].future().cancel()

        async def given_up() -> None:
            async with asyncio.timeout(60):
                while await edges.samples.samples_of("gateway-0"):  # noqa: ASYNC110
                    await asyncio.sleep(0.02)

        asyncio.run_coroutine_threadsafe(given_up(), loop).result(30)
        service.close("success").result(20)

    await asyncio.to_thread(use)

"""gRPC: one stream of all samples of a sampling client."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from typing import Any
from unittest.mock import AsyncMock

import grpc
import grpc.aio
import pytest

from services.common.process import rpc
from services.common.state import keys
from services.gateway import application
from services.gateway.access.limits import MIB
from services.gateway.edge.grpc.results import before_end
from tests.unit.gateway.edges import ALICE, BASE, BOB, Edges
from tests.unit.gateway.tensors import tensor
from tinsmith.v1 import (
    admin_pb2,
    admin_pb2_grpc,
    results_pb2,
    sampling_pb2,
    service_pb2_grpc,
    sessions_pb2,
)

METADATA = (("x-api-key", ALICE),)
CLONE = 1_000_000_000


@pytest.fixture
async def stub(edges: Edges) -> AsyncIterator[service_pb2_grpc.TinsmithServiceStub]:
    async with rpc.channel(edges.grpc_address) as channel:
        yield service_pb2_grpc.TinsmithServiceStub(channel)


@pytest.fixture
async def session(stub: Any) -> str:
    made = await stub.CreateSession(sessions_pb2.CreateSessionRequest(), timeout=10, metadata=METADATA)
    asked = sampling_pb2.CreateSamplingSessionRequest(session_id=made.session_id, base_model=BASE)
    return (await stub.CreateSamplingSession(asked, timeout=10, metadata=METADATA)).sampling_session_id


async def sample(stub: Any, session: str, seq_id: int) -> str:
    """One that is accepted and not run."""
    params = sampling_pb2.SamplingParams(max_tokens=4, temperature=1, top_k=-1, top_p=1)
    params.stop.never.SetInParent()
    request = sampling_pb2.SampleRequest(
        sampling_session_id=session, seq_id=seq_id, prompt=tensor([1], "<i4"), num_samples=1, params=params
    )
    return (await stub.Sample(request, timeout=10, metadata=METADATA)).request_id


def result(hits: int, nbytes: int = 0) -> sampling_pb2.SampleResult:
    made = sampling_pb2.SampleResult(prompt_cache_hit_tokens=hits)
    made.prompt_logprobs.data = bytes(nbytes)
    return made


def watch(
    stub: Any, session: str, cursor: int = 0, clone: int = 0, key: str = ALICE, seconds: float = 20
) -> Any:
    request = results_pb2.WatchSamplesRequest(sampling_session_id=session, clone=clone, cursor=cursor)
    return stub.WatchSamples(request, timeout=seconds, metadata=(("x-api-key", key),))


async def next_of(call: Any) -> tuple[str, int, results_pb2.OperationResult]:
    """The next sample that a stream tells, its cursor and result."""
    data = b""
    while True:
        told = await call.read()
        assert told is not grpc.aio.EOF
        data += told.piece.data
        if told.cursor:
            assert len(data) == told.piece.total_bytes
            return told.request_id, told.cursor, results_pb2.OperationResult.FromString(data)


async def ended(call: Any) -> tuple[grpc.StatusCode, str]:
    """How a stream ended that told nothing more."""
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await call.read()
    return caught.value.code(), dict(caught.value.trailing_metadata() or ())[rpc.CODE_METADATA]


async def holds(condition: Any) -> None:
    async with asyncio.timeout(60):
        while not condition():  # noqa: ASYNC110
            await asyncio.sleep(0.02)


def test_a_stream_ends_before_its_call_does() -> None:
    assert before_end(600, None) == 600
    assert before_end(600, 60) == 57
    assert before_end(600, 1) == pytest.approx(0.9)
    assert before_end(600, 3600) == 600
    assert before_end(600, 0) == 0


async def test_samples_are_told_in_the_order_in_which_they_end_and_later_ones_as_they_do(
    edges: Edges, stub: Any, session: str
) -> None:
    first, second, third = [await sample(stub, session, seq_id) for seq_id in range(3)]
    await edges.answer_sample(second, result(2))
    call = watch(stub, session)
    assert (await next_of(call))[0] == second
    await holds(lambda: edges.app.completions._waiters)
    await edges.answer_sample(third, result(3))
    request_id, cursor, told = await next_of(call)
    assert (request_id, told.sample.prompt_cache_hit_tokens) == (third, 3)
    cancelled = sampling_pb2.CancelSampleRequest(request_id=first)
    await stub.CancelSample(cancelled, timeout=10, metadata=METADATA)
    request_id, later, told = await next_of(call)
    assert (request_id, told.error.code) == (first, "cancelled")
    assert later > cursor
    call.cancel()
    await holds(lambda: not edges.app.completions._waiters)


async def test_who_comes_again_with_a_cursor_is_told_what_follows_it_as_often_as_it_comes(
    edges: Edges, stub: Any, session: str
) -> None:
    names = [await sample(stub, session, seq_id) for seq_id in range(150)]
    for number, name in enumerate(names):
        await edges.answer_sample(name, result(number))
    cursors = []
    call = watch(stub, session)
    for number, name in enumerate(names):
        request_id, cursor, told = await next_of(call)
        assert (request_id, told.sample.prompt_cache_hit_tokens) == (name, number)
        cursors.append(cursor)
    assert cursors == sorted(set(cursors))
    call.cancel()
    for after in (99, 17, 99):
        call = watch(stub, session, cursors[after])
        assert [(await next_of(call))[0] for _ in names[after + 1 :]] == names[after + 1 :]
        call.cancel()


async def test_what_is_acknowledged_or_fetched_otherwise_is_told_no_more(
    edges: Edges, stub: Any, session: str
) -> None:
    names = [await sample(stub, session, seq_id) for seq_id in range(3)]
    for name in names:
        await edges.answer_sample(name, result(0))
    got = results_pb2.AcknowledgeResultsRequest(request_ids=names[:1])
    await stub.AcknowledgeResults(got, timeout=10, metadata=METADATA)
    fetched = results_pb2.GetResultRequest(request_id=names[1])
    await stub.GetResult(fetched, timeout=10, metadata=METADATA)
    await edges.app.fetched._flush()
    call = watch(stub, session)
    assert (await next_of(call))[0] == names[2]
    # Watching it shortened nothing.
    await edges.app.fetched._flush()
    assert await edges.redis.ttl(keys.future(session, 2)) > 3600
    call.cancel()


async def test_each_client_of_a_sampling_session_watches_its_own_samples(
    edges: Edges, stub: Any, session: str
) -> None:
    mine, other = await sample(stub, session, 1), await sample(stub, session, 7 * CLONE + 1)
    for name in (mine, other):
        await edges.answer_sample(name, result(0))
    for clone, name in ((0, mine), (7, other)):
        call = watch(stub, session, clone=clone, seconds=1)
        assert (await next_of(call))[0] == name
        assert await call.read() is grpc.aio.EOF


async def test_a_stream_is_its_owners_and_takes_no_number_that_cannot_be(stub: Any, session: str) -> None:
    assert await ended(watch(stub, session, key=BOB)) == (grpc.StatusCode.NOT_FOUND, "not_found")
    assert (await ended(watch(stub, f"{session}9")))[0] is grpc.StatusCode.NOT_FOUND
    for wrong in ({"cursor": -1}, {"clone": -1}):
        assert (await ended(watch(stub, session, **wrong)))[0] is grpc.StatusCode.INVALID_ARGUMENT


async def test_a_stream_without_samples_ends_in_order_before_its_call(stub: Any, session: str) -> None:
    call = watch(stub, session, seconds=1)
    assert await call.read() is grpc.aio.EOF
    assert await call.code() is grpc.StatusCode.OK


async def test_a_cursor_from_before_what_is_kept_is_refused(edges: Edges, stub: Any, session: str) -> None:
    await edges.answer_sample(await sample(stub, session, 0), result(0))
    kept = await edges.app.completions._journal.kept_since()
    assert await ended(watch(stub, session, kept)) == (grpc.StatusCode.NOT_FOUND, "cursor_expired")
    call = watch(stub, session, kept + 60_000_000)
    assert (await next_of(call))[0] == f"{session}:0"
    call.cancel()


async def test_a_result_that_expired_is_told_as_that_and_one_that_is_asked_for_anew_when_it_is_there(
    edges: Edges, stub: Any, session: str
) -> None:
    names = [await sample(stub, session, seq_id) for seq_id in range(2)]
    for name in names:
        await edges.answer_sample(name, result(1))
    await edges.redis.delete(keys.future(session, 0), keys.future(session, 1))
    await sample(stub, session, 1)
    call = watch(stub, session)
    told = await call.read()
    assert (told.request_id, told.error.code) == (names[0], "gone")
    assert told.cursor
    await edges.answer_sample(names[1], result(2))
    request_id, cursor, again = await next_of(call)
    assert (request_id, again.sample.prompt_cache_hit_tokens) == (names[1], 2)
    assert cursor > told.cursor
    call.cancel()


async def test_a_stream_of_a_session_that_is_over_tells_all_and_says_so(
    edges: Edges, stub: Any, session: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(application, "_LOOK_S", 0.2)
    done, given_up = [await sample(stub, session, seq_id) for seq_id in range(2)]
    await edges.answer_sample(done, result(0))
    call = watch(stub, session)
    assert (await next_of(call))[0] == done
    over = sessions_pb2.FinishSessionRequest(session_id=session.split(":")[0])
    over.reason = sessions_pb2.FINISH_REASON_SUCCESS
    await stub.FinishSession(over, timeout=10, metadata=METADATA)
    request_id, _, told = await next_of(call)
    assert (request_id, told.error.code) == (given_up, "cancelled")
    assert await ended(call) == (grpc.StatusCode.NOT_FOUND, "session_finished")
    again = watch(stub, session)
    assert [(await next_of(again))[0] for _ in range(2)] == [done, given_up]
    assert await ended(again) == (grpc.StatusCode.NOT_FOUND, "session_finished")


async def test_a_stream_ends_when_its_gateway_does_so_that_another_one_goes_on(
    edges: Edges, stub: Any, session: str
) -> None:
    name = await sample(stub, session, 0)
    call = watch(stub, session)
    await holds(lambda: edges.app.completions._waiters)
    edges.app.drain()
    assert await ended(call) == (grpc.StatusCode.UNAVAILABLE, "draining")
    await edges.answer_sample(name, result(0))
    assert await ended(watch(stub, session)) == (grpc.StatusCode.UNAVAILABLE, "draining")


async def test_a_key_that_ends_is_told_nothing_more(edges: Edges, stub: Any, session: str) -> None:
    async with rpc.channel(edges.grpc_address) as channel:
        admin, root = admin_pb2_grpc.AdminServiceStub(channel), (("x-api-key", "tml-root"),)
        made = await admin.CreateKey(admin_pb2.CreateKeyRequest(owner="alice"), timeout=10, metadata=root)
        await edges.app.keys.look()
        names = [await sample(stub, session, seq_id) for seq_id in range(2)]
        await edges.answer_sample(names[0], result(0))
        call = watch(stub, session, key=made.key)
        assert (await next_of(call))[0] == names[0]
        await admin.RevokeKey(admin_pb2.RevokeKeyRequest(id=made.api_key.id), timeout=10, metadata=root)
        await edges.app.keys.look()
    await edges.answer_sample(names[1], result(0))
    assert (await ended(call))[0] is grpc.StatusCode.UNAUTHENTICATED


async def test_a_slow_reader_has_one_result_at_a_time_read_for_it(
    edges: Edges, stub: Any, session: str
) -> None:
    answers, large = edges.app.answers, 8 * MIB
    names = [await sample(stub, session, seq_id) for seq_id in range(4)]
    for number, name in enumerate(names):
        await edges.answer_sample(name, result(number, large))
    call = watch(stub, session)
    for number, name in enumerate(names):
        told = await call.read()
        assert told.request_id == name
        assert told.piece.total_bytes > large
        # More than gRPC takes ahead of its reader is left of it: the next one is not read yet.
        assert answers.held == answers.of_result(large)
        data = told.piece.data
        while not told.cursor:
            told = await call.read()
            data += told.piece.data
        whole = results_pb2.OperationResult.FromString(data)
        assert whole.sample.prompt_cache_hit_tokens == number
    await holds(lambda: answers.held == 0)
    call.cancel()


async def test_what_expires_before_a_slow_reader_has_come_to_it_is_said_too(
    edges: Edges, stub: Any, session: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    await edges.answer_sample(await sample(stub, session, 0), result(0))
    call = watch(stub, session, seconds=20)
    _, cursor, _ = await next_of(call)
    journal = edges.app.completions._journal
    monkeypatch.setattr(journal, "kept_since", AsyncMock(return_value=cursor))
    assert await ended(call) == (grpc.StatusCode.NOT_FOUND, "cursor_expired")

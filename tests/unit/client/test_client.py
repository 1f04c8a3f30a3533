"""The Python client: what it needs, what it says of refusals, and how it numbers what it sends."""

from __future__ import annotations

import asyncio
import subprocess
import sys
from concurrent import futures
from typing import Any

import grpc
import pytest

from services.common.contract import ids
from services.common.state import keys
from tests.unit.client.models import model_of, waiting
from tests.unit.gateway.edges import ALICE, BASE, Edges
from tinsmith.v1 import checkpoints_pb2, sampling_pb2, service_pb2_grpc, training_pb2
from tinsmith_client import (
    Changed,
    Client,
    Model,
    Refused,
    RequestFailed,
    Span,
    Unreachable,
    as_completed,
    datum,
    floats,
    ints,
    versions,
    watching,
)
from tinsmith_client import results as client_results
from tinsmith_client.calls import Calls
from tinsmith_client.sampling import Sampler, _fresh
from tinsmith_client.tensors import tensor


def test_it_needs_neither_torch_nor_numpy_nor_the_services() -> None:
    program = (
        "import sys, tinsmith_client; loaded = {name.split('.')[0] for name in sys.modules}; "
        "print(sorted(loaded & {'torch', 'numpy', 'services', 'tinker', 'vllm'}))"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=60)
    assert (done.returncode, done.stdout.strip()) == (0, "[]"), done.stderr


def test_numbers_become_tensors_and_come_back() -> None:
    made = datum([1, 2], [2, 300], weights=[0.5, 1.0])
    assert ints(made.tokens.data) == [1, 2]
    assert list(made.loss_inputs["target_tokens"].shape) == [2]
    assert made.loss_inputs["target_tokens"].data == (2).to_bytes(8, "little") + (300).to_bytes(8, "little")
    assert floats(made.loss_inputs["weights"].data) == [0.5, 1.0]
    with pytest.raises(OverflowError):
        tensor("i", [2**31])


def test_a_stream_that_is_told_again_goes_on_after_what_was_told_or_fails() -> None:
    assert _fresh([], [1, 2], 0) == [1, 2]
    assert _fresh([1, 2], [3], 2) == [3]
    assert _fresh([1, 2], [1, 2, 3], 0) == [3]
    assert _fresh([1, 2, 3], [1, 2], 0) == []
    assert _fresh([1, 2, 3], [3, 4], 2) == [4]
    for told, tokens, start in (([1, 2], [1, 3, 4], 0), ([1, 2, 3], [9], 1), ([1], [2], 0)):
        with pytest.raises(Changed):
            _fresh(told, tokens, start)


class _Lost(service_pb2_grpc.TinsmithServiceServicer):
    """A service whose samplers do not go on with the same tokens."""

    def StreamSample(self, request: Any, context: Any) -> Any:
        yield sampling_pb2.StreamSampleResponse(request_id="r")
        context.abort(grpc.StatusCode.DATA_LOSS, "send this as a new sample")


def test_a_stream_that_the_service_cannot_go_on_with_has_changed() -> None:
    server = grpc.server(futures.ThreadPoolExecutor(1))
    service_pb2_grpc.add_TinsmithServiceServicer_to_server(_Lost(), server)
    port = server.add_insecure_port("127.0.0.1:0")
    server.start()
    calls = Calls(f"127.0.0.1:{port}", ALICE, 5, None)
    try:
        with pytest.raises(Changed, match="new sample"):
            list(Sampler(calls, "s:sample:0").stream([1]))
    finally:
        calls.close()
        server.stop(None)


async def test_a_refusal_says_what_to_change_and_is_not_repeated(edges: Edges) -> None:
    with Client(edges.grpc_address, ALICE) as client:
        session = await waiting(client.create_session)
        with pytest.raises(Refused) as caught:
            await waiting(session.create_model, "other")
        error = caught.value
        assert (error.status, error.reason) == ("INVALID_ARGUMENT", "UNKNOWN_BASE_MODEL")
        assert list(error.fields) == ["base_model"]
        session.leave()
    with Client(edges.grpc_address, "tml-wrong") as stranger, pytest.raises(Refused, match="UNAUTHENTICATED"):
        await waiting(stranger.server_info)


def test_a_service_that_is_away_is_asked_for_as_long_as_the_client_is_patient() -> None:
    with (
        Client("127.0.0.1:1", ALICE, patience=0.5) as client,
        pytest.raises(Unreachable, match="UNAVAILABLE"),
    ):
        client.server_info()


async def test_operations_are_numbered_and_a_second_process_goes_on(edges: Edges) -> None:
    with Client(edges.grpc_address, ALICE) as client:
        session, model = await model_of(edges, client)
        first = await waiting(model.forward_backward, [datum([1, 2], [2, 3], weights=[1.0, 1.0])])
        second = await waiting(model.optim_step, 0.1)
        assert (first.request_id, second.request_id) == (f"{model.model_id}:1", f"{model.model_id}:2")
        with Client(edges.grpc_address, ALICE) as another:
            again = await waiting(another.open_session, session.session_id)
            going_on = await waiting(again.model, model.model_id)
            third = await waiting(going_on.optim_step, 0.1)
            assert third.request_id == f"{model.model_id}:3"
            again.leave()
        # The first process does not know of that number yet.
        with pytest.raises(Refused) as caught:
            await waiting(model.save_state, "a")
        assert caught.value.status == "ALREADY_EXISTS"
        assert (await waiting(model.save_state, "a")).request_id == f"{model.model_id}:4"
        with pytest.raises(TimeoutError):
            await waiting(second.result, timeout=0.1)
        await edges.answer(
            model.model_id, 2, optim_step=training_pb2.OptimStepResult(metrics={"grad_norm": 1.0})
        )
        assert (await waiting(second.result)).metrics["grad_norm"] == 1.0
        assert (await waiting(client.pending(second.request_id).result)).metrics["grad_norm"] == 1.0
        session.leave()


async def test_work_that_fails_says_who_can_mend_it(edges: Edges) -> None:
    with Client(edges.grpc_address, ALICE) as client:
        session, model = await model_of(edges, client)
        work = await waiting(model.forward_backward, [])
        with pytest.raises(RequestFailed) as caught:
            await waiting(work.result)
        assert caught.value.mine
        missing = client.pending(f"{model.model_id}:77")
        with pytest.raises(RequestFailed) as caught:
            await waiting(missing.result)
        assert caught.value.code == "not_found"
        session.leave()


async def moving_sampler(edges: Edges, model: Model, seq_id: int) -> Sampler:
    saving = asyncio.create_task(waiting(model.sampler, inflight=True))
    async with asyncio.timeout(60):
        while (saved := await edges.operation(model.model_id, seq_id)) is None:  # noqa: ASYNC110
            await asyncio.sleep(0.05)
    session_id = saved.save_for_sampler.sampling_session_id
    assert saved.save_for_sampler.inflight
    result = checkpoints_pb2.SaveForSamplerResult(sampling_session_id=session_id, version=seq_id)
    await edges.answer(model.model_id, seq_id, save_for_sampler=result)
    return await saving


def half_done() -> sampling_pb2.SampleResult:
    spans = [
        sampling_pb2.VersionSpan(version=1, tokens=2),
        sampling_pb2.VersionSpan(version=2, tokens=1, kv_kept=True),
    ]
    part = sampling_pb2.SampledSequence(
        tokens=tensor("i", [7, 8, 9]),
        logprobs=tensor("f", [-1.0, -2.0, -3.0]),
        stop_reason=sampling_pb2.STOP_REASON_CANCELLED,
        versions=spans,
    )
    return sampling_pb2.SampleResult(sequences=[part])


async def test_a_sample_that_goes_on_with_newer_weights_and_is_kept_says_which_made_its_tokens(
    edges: Edges,
) -> None:
    with Client(edges.grpc_address, ALICE) as client:
        session, model = await model_of(edges, client)
        sampler = await moving_sampler(edges, model, 1)
        work = await waiting(sampler.sample, [1, 2], max_tokens=9, on_update="continue")
        asked = await edges.sample(work.request_id)
        assert (asked.moves, asked.keeps_kv) == (True, False)
        keeping = asyncio.create_task(waiting(work.keep))
        await asyncio.sleep(0.1)
        assert not keeping.done(), "it returns when the result is there"
        await edges.answer_sample(work.request_id, half_done())
        (sequence,) = (await keeping).sequences
        assert ints(sequence.tokens.data) == [7, 8, 9]
        assert versions(sequence) == [Span(1, 2), Span(2, 1, kv_kept=True)]
        assert await waiting(work.keep) == await waiting(work.result), "it may be kept again"
        with pytest.raises(Refused) as caught:
            await waiting(sampler.sample, [1, 2], stop=["."], on_update="continue")
        assert caught.value.status == "INVALID_ARGUMENT"
        work = await waiting(sampler.sample, [1, 2], stop=["."], on_update="continue_keep_kv")
        asked = await edges.sample(work.request_id)
        assert (asked.moves, asked.keeps_kv) == (True, True)
        await waiting(work.cancel)
        session.leave()


async def test_a_stream_that_is_kept_ends_with_what_there_is(edges: Edges) -> None:
    with Client(edges.grpc_address, ALICE) as client:
        session, model = await model_of(edges, client)
        sampler = await moving_sampler(edges, model, 1)
        streaming = asyncio.create_task(waiting(lambda: list(sampler.stream([1, 2], max_tokens=9))))
        async with asyncio.timeout(60):
            while not (pending := await edges.samples.samples_of("gateway-0")):  # noqa: ASYNC110
                await asyncio.sleep(0.05)
        (request_id,) = pending
        keeping = asyncio.create_task(waiting(sampler.keep, request_id))
        await edges.answer_sample(request_id, half_done())
        await keeping
        *parts, last = await streaming
        assert [(part.tokens, part.versions) for part in parts] == [
            ([7, 8], [Span(1, 2)]),
            ([9], [Span(2, 1)]),
        ]
        assert {part.request_id for part in [*parts, last]} == {request_id}
        assert (last.stopped, last.kept, last.versions) == (False, True, [Span(1, 2), Span(2, 1, True)])
        session.leave()


async def test_a_sample_that_is_given_up_fails_and_only_inflight_samplers_go_on_with_newer_weights(
    edges: Edges,
) -> None:
    with Client(edges.grpc_address, ALICE) as client:
        session = await waiting(client.create_session)
        sampler = await waiting(session.sampler, base_model=BASE)
        work = await waiting(sampler.sample, [1, 2], max_tokens=9)
        assert not (await edges.sample(work.request_id)).moves
        await waiting(work.cancel)
        with pytest.raises(RequestFailed) as caught:
            await waiting(work.result)
        assert caught.value.code == "cancelled"
        with pytest.raises(Refused) as refused:
            await waiting(sampler.sample, [1, 2], on_update="continue")
        assert refused.value.status == "INVALID_ARGUMENT"
        with pytest.raises(Refused) as unknown:
            await waiting(sampler.keep, f"{sampler.sampling_session_id}:5")
        assert unknown.value.status == "NOT_FOUND"
        session.leave()


@pytest.mark.parametrize("at_once", [2, 1024])
async def test_many_samples_are_waited_for_with_one_call_and_let_go_when_they_were_read(
    edges: Edges, monkeypatch: pytest.MonkeyPatch, at_once: int
) -> None:
    monkeypatch.setattr(client_results, "_AT_ONCE", at_once)
    monkeypatch.setattr(client_results, "_TURN_S", 0.05)
    with Client(edges.grpc_address, ALICE) as client:
        session = await waiting(client.create_session)
        sampler = await waiting(session.sampler, base_model=BASE)
        works = [await waiting(sampler.sample, [1, number], max_tokens=4) for number in range(5)]
        completed = as_completed([*works, works[0]])
        order = [works[number] for number in (3, 1, 0)]
        for work in order:
            await edges.answer_sample(work.request_id, half_done())
            again = 2 if work is works[0] else 1
            for _ in range(again):
                assert await waiting(next, completed) is work
        await waiting(works[2].cancel)
        failed = await waiting(next, completed)
        assert failed is works[2]
        with pytest.raises(RequestFailed, match="cancelled"):
            failed.result()
        await waiting(completed.close)
        for work in [*order, works[2]]:
            future = keys.future(*ids.parse_request_id(work.request_id))
            assert 0 < await edges.redis.ttl(future) <= 60
        with pytest.raises(TimeoutError, match="1 requests"):
            await waiting(lambda: list(as_completed(works, timeout=2.0)))
        await edges.answer_sample(works[4].request_id, half_done())
        assert set(await waiting(lambda: list(as_completed(works)))) == set(works)
        assert (await waiting(works[4].result)) == half_done()
        session.leave()


async def test_a_sampler_is_watched_with_one_call_and_what_was_told_is_let_go(edges: Edges) -> None:
    with Client(edges.grpc_address, ALICE) as client:
        session = await waiting(client.create_session)
        sampler = await waiting(session.sampler, base_model=BASE)
        works = [await waiting(sampler.sample, [1, number], max_tokens=4) for number in range(4)]
        await edges.answer_sample(works[2].request_id, half_done())
        told = sampler.watch()
        first = await waiting(next, told)
        assert (first.request_id, first.result()) == (works[2].request_id, half_done())
        await waiting(works[0].cancel)
        failed = await waiting(next, told)
        assert failed.request_id == works[0].request_id
        with pytest.raises(RequestFailed, match="cancelled"):
            failed.result()
        await waiting(told.close)
        for work in (works[0], works[2]):
            assert 0 < await edges.redis.ttl(keys.future(*ids.parse_request_id(work.request_id))) <= 60
        await edges.answer_sample(works[1].request_id, half_done())
        again = sampler.watch(timeout=4.0)
        assert (await waiting(next, again)).request_id == works[1].request_id
        with pytest.raises(TimeoutError, match="no sample"):
            await waiting(next, again)
        await waiting(again.close)
        over = sampler.watch()
        await waiting(session.finish)
        assert (await waiting(next, over)).request_id == works[3].request_id
        with pytest.raises(Refused, match="finished"):
            await waiting(next, over)


async def test_a_watch_goes_on_behind_what_it_told_when_its_stream_ends(
    edges: Edges, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(watching, "_STREAM_S", 1.0)
    monkeypatch.setattr(watching, "let_go", lambda calls, request_ids: None)
    with Client(edges.grpc_address, ALICE) as client:
        session = await waiting(client.create_session)
        sampler = await waiting(session.sampler, base_model=BASE)
        told = sampler.watch()
        for number in range(3):
            work = await waiting(sampler.sample, [1, number], max_tokens=4)
            coming = asyncio.create_task(waiting(next, told))
            await asyncio.sleep(1.1)
            await edges.answer_sample(work.request_id, half_done())
            assert (await coming).request_id == work.request_id
        await waiting(told.close)
        session.leave()


async def test_a_watch_whose_cursor_is_too_old_begins_with_what_is_kept(
    edges: Edges, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(watching, "_STREAM_S", 1.0)
    with Client(edges.grpc_address, ALICE) as client:
        session = await waiting(client.create_session)
        sampler = await waiting(session.sampler, base_model=BASE)
        works = [await waiting(sampler.sample, [1, number], max_tokens=4) for number in range(2)]
        told = sampler.watch()
        await edges.answer_sample(works[0].request_id, half_done())
        assert (await waiting(next, told)).request_id == works[0].request_id

        async def now() -> int:
            return 2**60

        monkeypatch.setattr(edges.samples, "kept_since", now)
        coming = asyncio.create_task(waiting(next, told))
        await asyncio.sleep(1.5)
        await edges.answer_sample(works[1].request_id, half_done())
        assert (await coming).request_id == works[1].request_id
        await waiting(told.close)
        session.leave()

"""gRPC: samples told as they are generated, and the tokenizer that goes with them."""

from __future__ import annotations

import asyncio
import sys
from collections import defaultdict
from collections.abc import AsyncIterator
from typing import Any

import grpc
import grpc.aio
import numpy as np
import pytest
import tokenizers

from services.common.process import rpc
from services.gateway.access.body_budget import Account
from services.gateway.edge import wire_check
from services.gateway.edge.grpc import service
from tests.unit.gateway.edge.talking import END, Says, Talking
from tests.unit.gateway.edges import ALICE, BOB
from tests.unit.gateway.scripted_services import BASE
from tinsmith.v1 import models_pb2, results_pb2, sampling_pb2, service_pb2_grpc, sessions_pb2, types_pb2

METADATA = (("x-api-key", ALICE),)


@pytest.fixture
async def stub(talks: Talking) -> AsyncIterator[service_pb2_grpc.TinsmithServiceStub]:
    server = await service.serve(talks.gateway.application, "127.0.0.1:0")
    async with rpc.channel(f"127.0.0.1:{server.port}") as channel:
        yield service_pb2_grpc.TinsmithServiceStub(channel)
    await server.drain(1)


async def asking(stub: Any, num_samples: int = 1) -> sampling_pb2.StreamSampleRequest:
    session = await stub.CreateSession(sessions_pb2.CreateSessionRequest(), timeout=10, metadata=METADATA)
    opened = await stub.CreateSamplingSession(
        sampling_pb2.CreateSamplingSessionRequest(session_id=session.session_id, base_model=BASE),
        timeout=10,
        metadata=METADATA,
    )
    params = sampling_pb2.SamplingParams(max_tokens=20, temperature=1, top_k=-1, top_p=1)
    params.stop.never.SetInParent()
    sample = sampling_pb2.SampleRequest(
        sampling_session_id=opened.sampling_session_id,
        prompt=types_pb2.Tensor(dtype=types_pb2.DATA_TYPE_INT32, shape=[1], data=bytes(4)),
        num_samples=num_samples,
        params=params,
    )
    return sampling_pb2.StreamSampleRequest(sample=sample)


class Read:
    """What a stream told."""

    def __init__(self) -> None:
        self.request_id = ""
        self.tokens: defaultdict[int, list[int]] = defaultdict(list)
        self.logprobs: defaultdict[int, list[float]] = defaultdict(list)
        self.reasons: dict[int, int] = {}
        self.versions: set[int] = set()

    def add(self, answer: sampling_pb2.StreamSampleResponse) -> None:
        kind = answer.WhichOneof("kind")
        if kind == "request_id":
            self.request_id = answer.request_id
        elif kind == "end":
            self.reasons[answer.end.index] = answer.end.stop_reason
        else:
            new = answer.new_tokens
            self.versions.add(new.version)
            assert new.start == len(self.tokens[new.index])
            self.tokens[new.index] += np.frombuffer(new.tokens.data, "<i4").tolist()
            self.logprobs[new.index] += np.frombuffer(new.logprobs.data, "<f4").tolist()


async def read(stub: Any, request: sampling_pb2.StreamSampleRequest) -> Read:
    found = Read()
    async for answer in stub.StreamSample(request, timeout=20, metadata=METADATA):
        found.add(answer)
    return found


async def test_tokens_are_told_while_the_sample_runs_and_come_to_its_result(
    talks: Talking, stub: Any
) -> None:
    talks.sampler.script = lambda request: [Says(f"hello there {END}"), Says("good", stopped=False)]
    talks.sampler.half.clear()
    request = await asking(stub, num_samples=2)
    found = Read()
    async for answer in stub.StreamSample(request, timeout=20, metadata=METADATA):
        found.add(answer)
        if found.tokens:
            # The second half is generated once a first token was heard of.
            talks.sampler.half.set()
    result = await stub.GetResult(
        results_pb2.GetResultRequest(request_id=found.request_id), timeout=10, metadata=METADATA
    )
    for index, sequence in enumerate(result.result.sample.sequences):
        assert found.tokens[index] == np.frombuffer(sequence.tokens.data, "<i4").tolist()
        assert found.logprobs[index] == np.frombuffer(sequence.logprobs.data, "<f4").tolist()
        assert found.reasons[index] == sequence.stop_reason


async def test_whose_log_probabilities_are_asked_for_reaches_the_sampler(talks: Talking, stub: Any) -> None:
    for asked, expected in (
        (sampling_pb2.LOGPROBS_OF_SAMPLED, True),
        (sampling_pb2.LOGPROBS_OF_MODEL, False),
    ):
        request = await asking(stub)
        request.sample.logprobs_of = asked
        await read(stub, request)
        assert talks.sampler.asked[-1].sampled_logprobs is expected


async def test_that_experts_are_asked_for_reaches_the_sampler(talks: Talking, stub: Any) -> None:
    request = await asking(stub)
    request.sample.routed_experts = True
    await read(stub, request)
    assert talks.sampler.asked[-1].routed_experts


async def test_the_priority_of_a_sample_is_accepted_with_it(talks: Talking, stub: Any) -> None:
    request = await asking(stub)
    request.sample.priority = -7
    await read(stub, request)
    assert talks.sampler.asked[-1].priority == -7


async def test_a_stream_that_is_asked_for_again_is_told_from_its_beginning(talks: Talking, stub: Any) -> None:
    talks.sampler.half.clear()
    request = await asking(stub)
    call = stub.StreamSample(request, timeout=20, metadata=METADATA)
    assert (await call.read()).request_id
    assert (await call.read()).HasField("new_tokens")
    call.cancel()
    talks.sampler.half.set()
    again = await read(stub, request)
    assert again.tokens[0] == talks.sampler.tokenizer.tokens(f"hello {END}", special=False)
    assert len(talks.sampler.asked) == 1


async def test_every_stream_of_a_sample_is_told_its_tokens_from_the_beginning_while_it_runs(
    talks: Talking, stub: Any
) -> None:
    talks.sampler.script = lambda request: [Says("hello there you")]
    talks.sampler.half.clear()
    request = await asking(stub)
    first = stub.StreamSample(request, timeout=20, metadata=METADATA)
    assert (await first.read()).request_id
    assert (await first.read()).HasField("new_tokens")
    second, found = stub.StreamSample(request, timeout=20, metadata=METADATA), Read()
    found.add(await second.read())
    found.add(await second.read())
    assert found.tokens[0]
    first.cancel()
    other = sampling_pb2.StreamSampleRequest()
    other.CopyFrom(request)
    other.sample.num_samples = 3
    refused = stub.StreamSample(other, timeout=20, metadata=METADATA)
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await refused.read()
    assert caught.value.code() is grpc.StatusCode.ALREADY_EXISTS
    # The sample does not end before the second stream has heard of its second half.
    talks.sampler.gate.clear()
    talks.sampler.half.set()
    whole = talks.sampler.tokenizer.tokens("hello there you", special=False)
    while found.tokens[0] != whole:
        found.add(await second.read())
    talks.sampler.gate.set()
    found.add(await second.read())
    assert list(found.reasons) == [0]


async def test_a_sampler_that_is_lost_is_followed_by_one_that_goes_on(talks: Talking, stub: Any) -> None:
    talks.sampler.breaks = 1
    found = await read(stub, await asking(stub))
    assert found.tokens[0] == talks.sampler.tokenizer.tokens(f"hello {END}", special=False)
    first, second = talks.sampler.asked
    assert first.params.seed == second.params.seed != 0


async def test_a_stream_that_another_sampler_would_change_fails(talks: Talking, stub: Any) -> None:
    talks.sampler.breaks = 1
    said = iter([[Says("hello there you")], [Says("good day you")]])
    talks.sampler.script = lambda request: next(said)
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await read(stub, await asking(stub))
    # No client takes this for a call to repeat.
    assert caught.value.code() is grpc.StatusCode.DATA_LOSS


async def test_a_stream_is_its_owners(talks: Talking, stub: Any) -> None:
    request = await asking(stub)
    call = stub.StreamSample(request, timeout=10, metadata=(("x-api-key", BOB),))
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await call.read()
    assert caught.value.code() is grpc.StatusCode.NOT_FOUND
    assert not talks.sampler.asked


async def test_the_tokenizer_of_a_base_model_comes_as_files(talks: Talking, stub: Any) -> None:
    files: defaultdict[str, bytes] = defaultdict(bytes)
    request = models_pb2.GetTokenizerRequest(base_model=BASE)
    async for piece in stub.GetTokenizer(request, timeout=10, metadata=METADATA):
        files[piece.file] += piece.data
        assert len(files[piece.file]) <= piece.file_bytes
    assert sorted(files) == ["tokenizer.json", "tokenizer_config.json"]
    tokenizer = tokenizers.Tokenizer.from_str(files["tokenizer.json"].decode())
    text = "hello there"
    assert tokenizer.encode(text).ids == talks.sampler.tokenizer.tokens(text, special=True)
    assert END.encode() in files["tokenizer_config.json"]
    unknown = stub.GetTokenizer(models_pb2.GetTokenizerRequest(base_model="x"), timeout=10, metadata=METADATA)
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await unknown.read()
    assert caught.value.code() is grpc.StatusCode.INVALID_ARGUMENT


async def test_a_stream_keeps_nothing_of_its_request_once_it_answers(
    talks: Talking, stub: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    received: list[Any] = []
    parsed = wire_check.parsed

    def noted(kind: Any, *args: Any) -> Any:
        message = parsed(kind, *args)
        if kind is sampling_pb2.StreamSampleRequest:
            received.append(message)
        return message

    request = await asking(stub)
    monkeypatch.setattr(wire_check, "parsed", noted)
    talks.sampler.half.clear()
    app = talks.gateway.application
    call = stub.StreamSample(request, timeout=20, metadata=METADATA)
    assert (await call.read()).request_id
    assert (await call.read()).HasField("new_tokens")
    assert app.budget.used == 0
    fresh = [sampling_pb2.StreamSampleRequest.FromString(received[0].SerializeToString())]
    assert sys.getrefcount(received[0]) == sys.getrefcount(fresh[0])
    assert sys.getrefcount(received[0].sample) == sys.getrefcount(fresh[0].sample)
    talks.sampler.half.set()
    while await call.read() is not grpc.aio.EOF:
        pass
    async with asyncio.timeout(60):
        while app.answers.held:  # noqa: ASYNC110
            await asyncio.sleep(0.02)


async def test_a_tokenizer_on_its_way_counts_in_the_share_of_its_key(
    talks: Talking, stub: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    held: list[int] = []
    hold = Account.hold
    monkeypatch.setattr(Account, "hold", lambda self, nbytes: held.append(nbytes) or hold(self, nbytes))
    sent = 0
    async for piece in stub.GetTokenizer(
        models_pb2.GetTokenizerRequest(base_model=BASE), timeout=10, metadata=METADATA
    ):
        sent += len(piece.data)
    # The first is the request.
    assert held[1:] == [sent]
    assert talks.gateway.application.budget.used == 0

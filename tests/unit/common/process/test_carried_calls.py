"""Calls that one stream carries, over real gRPC."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import aclosing, asynccontextmanager
from typing import cast

import grpc.aio
import pytest

from services.common.contract import errors
from services.common.contract.errors import InvalidRequest, Overloaded, TinsmithError, TooLarge, Unavailable
from services.common.process import rpc
from services.common.process.carrier import answering, asking
from services.common.process.carrier.answering import TOGETHER_BYTES, Carrier
from services.common.process.carrier.asking import Link
from services.common.telemetry import subject
from services.gateway.cluster.discovery import call_error
from tinsmith.internal.v1 import sampler_pb2, sampler_pb2_grpc
from tinsmith.internal.v1.carrier_pb2 import CarriedCall, CarryRequest
from tinsmith.internal.v1.sampler_pb2 import (
    FindSampleRequest,
    FindSampleResponse,
    GetTokenizerRequest,
    GetTokenizerResponse,
    NewTokens,
    SampleRequest,
    StreamSampleRequest,
    StreamSampleResponse,
)

NAME = sampler_pb2.DESCRIPTOR.services_by_name["SamplerService"].full_name
FIND, STREAM, TOKENIZER = (f"/{NAME}/{method}" for method in ("FindSample", "StreamSample", "GetTokenizer"))
DEADLINE_S = 20.0


class Scripted(sampler_pb2_grpc.SamplerServiceServicer):
    """Does what the name of the sample says; whatever is not named is answered at once.

    Attributes:
        gate: lets calls that wait go on; `begun`: one waits.
        streams: what carried the calls, by identity.
        traces: trace id of each.
        left: a call was cancelled, or answered its last.
        told: answers that were made of calls with several.
    """

    def __init__(self) -> None:
        self.gate, self.begun, self.left = asyncio.Event(), asyncio.Event(), asyncio.Event()
        self.streams: dict[int, grpc.aio.ServicerContext] = {}
        self.traces: dict[str, str] = {}
        self.told = 0

    async def FindSample(
        self, request: FindSampleRequest, context: grpc.aio.ServicerContext
    ) -> FindSampleResponse:
        name = request.request_id
        self.streams[id(context)] = context
        about = subject.current()
        self.traces[name] = about.trace_id if about else ""
        if name == "full":
            raise Overloaded("no more")
        if name == "broken":
            raise ZeroDivisionError("by what")
        if name == "waits":
            self.begun.set()
            try:
                await self.gate.wait()
            except asyncio.CancelledError:
                self.left.set()
                raise
        return FindSampleResponse(known=True)

    async def StreamSample(
        self, request: StreamSampleRequest, context: grpc.aio.ServicerContext
    ) -> AsyncIterator[StreamSampleResponse]:
        try:
            for index in range(request.sample.num_samples):
                self.told += 1
                parts = [sampler_pb2.SequenceDelta(index=index)]
                yield StreamSampleResponse(new_tokens=NewTokens(sequences=parts))
        finally:
            self.left.set()
        if request.sample.request_id == "full":
            raise Overloaded("no more")

    async def GetTokenizer(
        self, request: GetTokenizerRequest, context: grpc.aio.ServicerContext
    ) -> GetTokenizerResponse:
        return GetTokenizerResponse(tokenizer_json="x" * 4 * TOGETHER_BYTES)


class Carried:
    """A server, and a link to it."""

    def __init__(self, servicer: Scripted, carrier: Carrier, server: rpc.RpcServer, link: Link) -> None:
        self.servicer, self.carrier, self.server, self.link = servicer, carrier, server, link

    async def find(self, name: str, seconds: float = DEADLINE_S) -> bool:
        return (
            await self.link.ask(FIND, FindSampleRequest(request_id=name), FindSampleResponse, seconds)
        ).known

    def begin(self, name: str) -> asyncio.Task[bool]:
        return asyncio.create_task(self.find(name))

    async def error(self, call: asyncio.Task[bool]) -> TinsmithError:
        """What a call fails with, as a gateway takes it."""
        try:
            await call
        except grpc.aio.AioRpcError as error:
            return call_error(error)
        except TinsmithError as error:
            return error
        raise AssertionError("it was answered")

    async def several(self, name: str, count: int) -> list[int]:
        request = StreamSampleRequest(sample=SampleRequest(request_id=name, num_samples=count))
        found: list[int] = []
        with self.link.several(STREAM, request, StreamSampleResponse) as answers:
            while (answer := await answers.read(DEADLINE_S)) is not None:
                found += [part.index for part in answer.new_tokens.sequences]
        return found


async def serve(servicer: Scripted, port: int = 0) -> tuple[Carrier, rpc.RpcServer]:
    add = sampler_pb2_grpc.add_SamplerServiceServicer_to_server
    carrier = Carrier(add, servicer)
    return carrier, await rpc.serve([(add, servicer, NAME), carrier.service], f"127.0.0.1:{port}")


@asynccontextmanager
async def carried() -> AsyncIterator[Carried]:
    servicer = Scripted()
    carrier, server = await serve(servicer)
    async with asyncio.timeout(60), rpc.channel(f"127.0.0.1:{server.port}") as channel:
        link = Link(channel)
        try:
            yield Carried(servicer, carrier, server, link)
        finally:
            await link.close()
            await server.drain(0)


async def test_thousands_of_calls_are_answered_over_one_stream_and_none_waits_for_another() -> None:
    async with carried() as made:
        waits = made.begin("waits")
        await made.servicer.begun.wait()
        assert all(await asyncio.gather(*(made.find(str(number)) for number in range(3000))))
        assert not waits.done()
        made.servicer.gate.set()
        assert await waits
        assert len(made.servicer.streams) == 1


async def test_each_call_fails_with_its_own_error_and_leaves_the_others_alone() -> None:
    async with carried() as made:
        calls = [made.begin(name) for name in ("full", "a", "broken", "b")]
        full, broken = await made.error(calls[0]), await made.error(calls[2])
        assert (type(full), full.message) == (Overloaded, "no more")
        assert (type(broken), "ZeroDivisionError" in broken.message) == (errors.Internal, True)
        assert await calls[1]
        assert await calls[3]


async def test_what_is_no_method_is_refused() -> None:
    async with carried() as made:
        with pytest.raises(InvalidRequest, match="no method"):
            await made.link.ask("/a.B/C", FindSampleRequest(), FindSampleResponse, DEADLINE_S)
        assert await made.find("a")


async def test_a_call_that_takes_too_long_is_left_by_both_sides() -> None:
    async with carried() as made:
        with pytest.raises(TimeoutError):
            await made.find("waits", 0.2)
        await made.servicer.left.wait()
        assert await made.find("a")


async def test_a_call_whose_caller_goes_away_is_cancelled_at_the_other_side() -> None:
    async with carried() as made:
        waits = made.begin("waits")
        await made.servicer.begun.wait()
        waits.cancel()
        await made.servicer.left.wait()
        assert await made.find("a")


async def test_each_call_belongs_to_the_trace_of_its_caller() -> None:
    async with carried() as made:
        callers = {name: subject.Subject() for name in ("a", "b")}

        async def find(name: str) -> None:
            subject.begin(callers[name])
            await made.find(name)

        await asyncio.gather(*map(find, callers))
        assert made.servicer.traces == {name: caller.trace_id for name, caller in callers.items()}


async def test_a_method_may_answer_several_times_and_then_fail() -> None:
    async with carried() as made:
        assert await made.several("a", 5) == [0, 1, 2, 3, 4]
        assert await made.several("a", 0) == []
        with pytest.raises(Overloaded):
            await made.several("full", 2)


async def test_answers_that_nobody_asks_for_any_more_are_not_made() -> None:
    async with carried() as made:
        request = StreamSampleRequest(sample=SampleRequest(num_samples=2**31 - 1))
        with made.link.several(STREAM, request, StreamSampleResponse) as answers:
            for _ in range(3):
                assert await answers.read(DEADLINE_S)
        await made.servicer.left.wait()
        assert await made.find("a")


async def test_of_a_call_that_answers_several_times_one_answer_waits_at_most() -> None:
    class Context:
        def add_done_callback(self, callback: object) -> None: ...

    async def requests() -> AsyncIterator[CarryRequest]:
        asked = StreamSampleRequest(sample=SampleRequest(num_samples=3)).SerializeToString()
        yield CarryRequest(calls=[CarriedCall(number=1, method=STREAM, request=asked)])
        await asyncio.Event().wait()

    servicer = Scripted()
    carrier = Carrier(sampler_pb2_grpc.add_SamplerServiceServicer_to_server, servicer)
    async with aclosing(carrier.Carry(requests(), cast(grpc.aio.ServicerContext, Context()))) as answers:
        for count in range(1, 4):
            assert (await anext(answers)).answers[0].WhichOneof("kind") == "more"
            # It is being sent, however long that takes.
            for _ in range(100):
                await asyncio.sleep(0)
            assert servicer.told == count
        assert (await anext(answers)).answers[0].ended


@pytest.mark.parametrize("large", [False, True], ids=["carried", "alone"])
async def test_large_requests_and_answers_get_through_beside_small_ones(large: bool) -> None:
    async with carried() as made:
        name = "x" * (TOGETHER_BYTES + 1 if large else TOGETHER_BYTES - 1000)
        found = await asyncio.gather(*(made.find(name) for _ in range(4)), *map(made.find, "abc"))
        assert found == [True] * 7
        assert len(made.servicer.streams) == (5 if large else 1)
        assert await made.several(name, 3) == [0, 1, 2]
        tokenizers = await asyncio.gather(
            *(
                made.link.ask(TOKENIZER, GetTokenizerRequest(), GetTokenizerResponse, DEADLINE_S)
                for _ in range(3)
            )
        )
        assert {len(found.tokenizer_json) for found in tokenizers} == {4 * TOGETHER_BYTES}


@pytest.mark.parametrize("name", ["full", "broken"])
async def test_a_call_of_its_own_fails_with_the_same_errors(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with carried() as made:
        as_carried = await made.error(made.begin(name))
        monkeypatch.setattr(asking, "TOGETHER_BYTES", 0)
        alone = await made.error(made.begin(name))
        assert (type(alone), alone.message) == (type(as_carried), as_carried.message)
        with pytest.raises(TimeoutError):
            await made.find("waits", 0.2)
        await made.servicer.left.wait()


async def test_an_answer_that_no_message_holds_fails_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(answering, "_MOST_BYTES", TOGETHER_BYTES)
    async with carried() as made:
        with pytest.raises(TooLarge):
            await made.link.ask(TOKENIZER, GetTokenizerRequest(), GetTokenizerResponse, DEADLINE_S)
        assert await made.find("a")


async def test_more_calls_than_a_stream_carries_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(answering, "_MOST_CALLS", 2)
    async with carried() as made:
        calls = [made.begin("waits") for _ in range(3)]
        assert isinstance(await made.error(calls[2]), Overloaded)
        made.servicer.gate.set()
        assert await asyncio.gather(*calls[:2]) == [True, True]
        assert await made.find("a")


async def test_all_that_a_stream_carries_breaks_off_with_it_and_the_next_call_opens_another() -> None:
    async with carried() as made:
        calls = [made.begin("waits") for _ in range(3)]
        await made.servicer.begun.wait()
        await made.server.drain(0)
        assert [type(await made.error(call)) for call in calls] == [Unavailable] * 3
        assert type(await made.error(made.begin("a"))) is Unavailable
        await made.servicer.left.wait()
        _, again = await serve(Scripted(), made.server.port)
        while True:
            try:
                assert await made.find("a")
                break
            except grpc.aio.AioRpcError as error:
                assert type(call_error(error)) is Unavailable
                await asyncio.sleep(0.05)
        await again.drain(0)


async def test_a_server_that_drains_answers_what_it_has_and_takes_no_more() -> None:
    async with carried() as made:
        waits = made.begin("waits")
        await made.servicer.begun.wait()
        made.carrier.close()
        assert type(await made.error(made.begin("a"))) is Unavailable
        draining = asyncio.create_task(made.server.drain(60))
        made.servicer.gate.set()
        assert await waits
        # It waits for no stream that carries nothing.
        async with asyncio.timeout(20):
            await draining


async def test_a_link_that_is_not_used_any_more_ends_when_its_calls_have() -> None:
    async with carried() as made:
        waits = made.begin("waits")
        await made.servicer.begun.wait()
        made.link.finish()
        made.servicer.gate.set()
        assert await waits
        async with asyncio.timeout(20):
            await made.server.drain(60)

"""What a gateway asks its replicas about samples, against scripted ones over real gRPC."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import grpc.aio
import pytest

from services.common.contract.experts.routing import Routing
from services.common.process import rpc
from services.common.process.carrier.answering import Carrier
from services.common.state.known_models import Configured, KnownModel
from services.common.state.registry import ServiceRecord
from services.gateway.access.answer_room import AnswerRoom
from services.gateway.cluster.discovery import Services
from services.gateway.placement.choose_replica import wanted
from services.gateway.placement.placements import Load, Placements
from services.gateway.sampling import replicas as module
from services.gateway.sampling.replicas import Replicas
from tests.unit.gateway.scripted_services import BASE, ScriptedSampler
from tinsmith.internal.v1 import sampler_pb2, sampler_pb2_grpc

KNOWN = {BASE: KnownModel(BASE, configured=Configured(name=BASE))}


class Asked(ScriptedSampler):
    """Counts who asks it for samples. It takes a while to answer, or for ever."""

    def __init__(self, seconds: float) -> None:
        super().__init__("a")
        self.seconds = seconds
        self.asking = self.most = self.times = 0

    async def FindSample(
        self, request: sampler_pb2.FindSampleRequest, context: grpc.aio.ServicerContext
    ) -> sampler_pb2.FindSampleResponse:
        self.times += 1
        self.asking += 1
        self.most = max(self.most, self.asking)
        try:
            await asyncio.sleep(self.seconds)
            return await super().FindSample(request, context)
        finally:
            self.asking -= 1


@asynccontextmanager
async def served(sampler: ScriptedSampler, name: str) -> AsyncIterator[ServiceRecord]:
    add, service = (
        sampler_pb2_grpc.add_SamplerServiceServicer_to_server,
        "tinsmith.internal.v1.SamplerService",
    )
    server = await rpc.serve([(add, sampler, service), Carrier(add, sampler).service], "127.0.0.1:0")
    try:
        yield ServiceRecord(kind="sampler", id=name, address=f"127.0.0.1:{server.port}", base_model=BASE)
    finally:
        await server.drain(0)


@asynccontextmanager
async def services(*records: ServiceRecord) -> AsyncIterator[Services]:
    found = Services("sampler")
    found.update(records, KNOWN)
    try:
        yield found
    finally:
        await found.close()


def over(found: Services, stall: float = 60.0) -> Replicas:
    return Replicas(found, Placements("gateway-0", time.monotonic), AnswerRoom(2**20), stall, ask_again=0.02)


async def test_of_many_samples_that_are_taken_over_at_once_a_replica_is_asked_for_few_at_a_time() -> None:
    sampler, names = Asked(0.3), [f"s:sample:0:{number}" for number in range(150)]
    sampler.known = set(names)
    async with served(sampler, "sampler-0") as record, services(record) as found:
        replicas = over(found)
        has_it = await asyncio.gather(*(replicas.find(BASE, name) for name in names))
    assert has_it == [record] * 150
    assert (sampler.times, sampler.most <= 32) == (150, True), sampler.most


async def test_a_sample_that_waits_until_it_is_asked_for_loses_none_of_its_patience(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(module, "_KEPT_S", 1.5)
    monkeypatch.setattr(module, "_FIND_S", 60.0)
    monkeypatch.setattr(module, "_ASKED_FOR_AT_ONCE", 1)
    slow, names = Asked(1.0), [f"s:sample:0:{number}" for number in range(3)]
    slow.known = {names[-1]}
    async with served(slow, "sampler-0") as record, services(record) as found:
        replicas = over(found)
        looking = [asyncio.create_task(replicas.find(BASE, name)) for name in names]
        await asyncio.gather(*looking[:2])
        slow.mute, slow.seconds = 1, 0.0
        assert await looking[-1] == record


async def test_a_replica_that_does_not_answer_keeps_no_samples_from_being_asked_for_at_others(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(module, "_FIND_S", 1.5)
    monkeypatch.setattr(module, "_KEPT_S", 4.0)
    silent, other = Asked(3600), Asked(0)
    names = [f"s:sample:0:{number}" for number in range(300)]
    other.known = set(names[::2])
    async with (
        served(silent, "sampler-0") as first,
        served(other, "sampler-1") as second,
        services(first, second) as found,
    ):
        replicas = over(found)
        has_it = await asyncio.gather(*(replicas.find(BASE, name) for name in names))
    assert has_it == [second, None] * 150
    assert silent.times < 64, "a few find out, and then one at a time"


async def test_a_sample_is_looked_for_while_no_replica_is_announced() -> None:
    sampler = ScriptedSampler("a")
    sampler.known = {"s:sample:0:0"}
    async with served(sampler, "sampler-0") as record, services() as found:
        replicas = over(found)
        looking = asyncio.create_task(replicas.find(BASE, "s:sample:0:0"))
        await asyncio.sleep(0.2)
        assert not looking.done()
        found.update([record], KNOWN)
        assert await looking == record


@pytest.mark.parametrize("known", [{}, {BASE: KnownModel(BASE, retired=True)}], ids=["unknown", "retired"])
async def test_a_sample_of_a_base_model_that_no_replica_will_serve_is_not_looked_for(
    known: dict[str, KnownModel],
) -> None:
    async with services() as found:
        found.update([], known)
        async with asyncio.timeout(60):
            assert await over(found).find(BASE, "s:sample:0:0") is None


class Joined(ScriptedSampler):
    """Generates what an earlier call began: a stream is told nothing of it before its end.

    Attributes:
        reached: tokens so far; None = so many as it was asked how many there are.
        times: how often it says that there is nothing new.
    """

    def __init__(self, reached: int | None, times: int) -> None:
        super().__init__("a")
        self.reached, self.times, self.asked = reached, times, 0

    async def Sample(
        self, request: sampler_pb2.SampleRequest, context: grpc.aio.ServicerContext
    ) -> sampler_pb2.SampleResponse:
        assert request.wait_seconds > 0
        self.asked += 1
        tokens = self.asked if self.reached is None else self.reached
        return sampler_pb2.SampleResponse(progress=sampler_pb2.SampleProgress(tokens=tokens))

    async def StreamSample(
        self, request: sampler_pb2.StreamSampleRequest, context: grpc.aio.ServicerContext
    ) -> AsyncIterator[sampler_pb2.StreamSampleResponse]:
        for _ in range(self.times):
            await asyncio.sleep(request.sample.wait_seconds)
            yield sampler_pb2.StreamSampleResponse(new_tokens=sampler_pb2.NewTokens())
        last = sampler_pb2.SampleResponse()
        last.result.sequences.add().tokens.data = b"a"
        yield sampler_pb2.StreamSampleResponse(last=last)


async def streamed(sampler: ScriptedSampler, stall: float) -> bytes:
    request = sampler_pb2.SampleRequest(request_id="s:sample:0:0", num_samples=1)
    async with served(sampler, "sampler-0") as record, services(record) as found:
        replicas = over(found, stall)
        replicas.follow(request.request_id, lambda parts: None)
        wanted = module.wanted_by(request, full=False)
        try:
            return (await replicas.call(record, request, wanted, "ann")).sample.sequences[0].tokens.data
        finally:
            await replicas.stop()


async def test_a_stream_that_joined_what_runs_takes_as_long_as_it_takes_while_tokens_come() -> None:
    assert await streamed(Joined(None, 40), stall=0.2) == b"a"


async def test_a_stream_that_joined_what_runs_without_progress_is_ended() -> None:
    sampler = Joined(7, 10_000)
    with pytest.raises(module.Stalled, match="after 7 tokens"):
        await streamed(sampler, stall=0.3)
    assert sampler.ended == ["s:sample:0:0"]


@asynccontextmanager
async def being_called(sampler: ScriptedSampler) -> AsyncIterator[tuple[Replicas, str]]:
    """The id of a sample that a replica is called for, until the context ends."""
    request = sampler_pb2.SampleRequest(request_id="s:sample:0:0", num_samples=1)
    wanted = module.wanted_by(request, full=False)
    sampler.gate.clear()
    async with served(sampler, "sampler-0") as record, services(record) as found:
        replicas = over(found)
        calling = asyncio.create_task(replicas.call(record, request, wanted, "ann"))
        await sampler.arrived.wait()
        yield replicas, request.request_id
        calling.cancel()
        await replicas.stop()


async def test_the_end_of_a_sample_that_is_yet_to_reach_its_replica_is_said_until_it_is_known_there() -> None:
    sampler = ScriptedSampler("a")
    sampler.early = 4
    async with being_called(sampler) as (replicas, name):
        assert replicas.end(name)
    assert sampler.ended == [name]


async def test_the_end_of_a_sample_that_its_replica_never_knows_is_said_for_a_few_seconds(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(module, "COMES_S", 0.3)
    sampler = ScriptedSampler("a")
    sampler.early = 1000
    async with being_called(sampler) as (replicas, name):
        assert replicas.end(name)
        async with asyncio.timeout(5):
            await replicas._words.stop()
        assert not replicas._words.says("end at sampler-0", name)
    assert 1 < 1000 - sampler.early < 8


def of_each_kind(able: str) -> tuple[ServiceRecord, ServiceRecord]:
    """A replica that runs the base model alone, and one that runs this besides."""
    restricted = {"adapts": False, "full_models": False}
    alone, more = (
        ServiceRecord(kind="sampler", id=name, address="", base_model=BASE, **{**restricted, **besides})
        for name, besides in (("alone", {}), ("more", {able: True}))
    )
    return alone, more


@pytest.mark.parametrize(("able", "full"), [("adapts", False), ("full_models", True)])
async def test_samples_of_adapters_and_full_models_go_where_these_run_and_wait_while_that_is_away(
    able: str, full: bool
) -> None:
    alone, more = of_each_kind(able)
    asked = wanted("m", 1, full, "", bytes(40), 1, 8, "first")
    base = wanted("", 0, False, "", bytes(40), 1, 8, "second")
    async with services(alone, more) as found:
        replicas = over(found)
        assert replicas.choose(BASE, asked, set()) == more
        assert replicas.choose(BASE, asked, {more.incarnation}) is None
        assert replicas.choose(BASE, base, {more.incarnation}) == alone
        found.update([alone], {})
        assert replicas.choose(BASE, asked, set()) is None
        assert replicas.choose(BASE, base, set()) == alone


async def test_samples_whose_experts_are_asked_for_go_where_they_are_told() -> None:
    alone, more = (
        ServiceRecord(kind="sampler", id=name, address="", base_model=BASE, routing=routing)
        for name, routing in (("alone", None), ("more", Routing(1, 2, 4)))
    )
    asked = [
        wanted("m", 1, full, "", bytes(40), 1, 8, "first", routed_experts=True) for full in (False, True)
    ]
    async with services(alone, more) as found:
        replicas = over(found)
        for each in asked:
            assert replicas.choose(BASE, each, set()) == more
            assert replicas.choose(BASE, each, {more.incarnation}) is None


@pytest.mark.parametrize("full", [False, True])
async def test_where_none_runs_them_one_is_asked_that_says_why(full: bool) -> None:
    alone, _ = of_each_kind("adapts")
    async with services(alone) as found:
        assert over(found).choose(BASE, wanted("m", 1, full, "", bytes(40), 1, 8, "first"), set()) == alone


async def test_an_adapter_more_than_a_replica_has_slots_for_goes_to_another_with_more_to_do() -> None:
    two_slots = {"kind": "sampler", "address": "", "base_model": BASE, "adapter_slots": 2}
    busy, idle = (ServiceRecord(id=name, **two_slots) for name in ("busy", "idle"))  # type: ignore[arg-type]
    asked = wanted("m", 1, False, "", bytes(40), 1, 8, "first")
    placements = Placements("gateway-0", time.monotonic)
    async with services(busy, idle) as found:
        replicas = Replicas(found, placements, AnswerRoom(2**20))
        placements.begin(busy.incarnation, (1,), Load(1000, 8))
        placements.begin(idle.incarnation, (1,), Load(10, 1), "other@1")
        assert replicas.choose(BASE, asked, set()) == idle
        placements.begin(idle.incarnation, (1,), Load(10, 1), "other@2")
        assert replicas.choose(BASE, asked, set()) == busy
        placements.end(idle.incarnation, Load(10, 1), "other@1")
        assert replicas.choose(BASE, asked, set()) == idle

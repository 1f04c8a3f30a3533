"""Streams of samples, whose readers come and go while the generation goes on."""

from __future__ import annotations

import asyncio
import weakref
from collections.abc import Awaitable, Callable
from types import SimpleNamespace
from typing import Any

import pytest

from services.sampler.convert import Answer
from services.sampler.engine.sampling import NewTokens, SampleJob, SampleOutput, Sequence, Tell
from services.sampler.requests.generations import Generations
from services.sampler.service import SamplerService
from tinsmith.internal.v1 import sampler_pb2
from tinsmith.v1 import types_pb2


class Samples:
    """Generates when it is told to."""

    def __init__(self) -> None:
        self.tells: list[Tell | None] = []
        self.ended = asyncio.Event()

    def move(self, request_id: str, weights: Any) -> bool:
        return False

    async def run(self, job: SampleJob, tell: Tell | None = None) -> SampleOutput:
        self.tells.append(tell)
        await self.ended.wait()
        return SampleOutput([Sequence("length", [0, 1], [-1.0, -1.0])], 0)

    def tell(self, start: int) -> weakref.ref[NewTokens]:
        """Tells a token as the engine does, which keeps nothing of it."""
        (tell,) = self.tells
        assert tell is not None
        told = NewTokens(0, start, 0, [start], [-1.0])
        tell(told)
        return weakref.ref(told)


@pytest.fixture
async def samples() -> Samples:
    return Samples()


@pytest.fixture
async def service(samples: Samples) -> SamplerService:
    generations: Generations[Answer] = Generations(lambda answer: answer.bytes_to_keep)
    nothing: Any = SimpleNamespace(tokens_of=lambda request_id: 0)
    running: Any = samples
    return SamplerService(nothing, generations, running, nothing, nothing)


def asked() -> sampler_pb2.StreamSampleRequest:
    sample = sampler_pb2.SampleRequest(request_id="one", num_samples=1)
    sample.prompt.CopyFrom(types_pb2.Tensor(dtype=types_pb2.DATA_TYPE_INT32, shape=[1], data=bytes(4)))
    sample.params.temperature, sample.params.top_p = 1, 1
    sample.params.stop.never.SetInParent()
    return sampler_pb2.StreamSampleRequest(sample=sample)


async def begun(service: SamplerService, samples: Samples) -> Any:
    """A stream that has told its first token."""
    stream: Any = service.StreamSample(asked(), None)
    first = asyncio.create_task(anext(stream))
    while not samples.tells:  # noqa: ASYNC110
        await asyncio.sleep(0)
    samples.tell(0)
    assert [part.start for part in (await first).new_tokens.sequences] == [0]
    return stream


async def while_it_sends(stream: Any) -> None:
    await stream.aclose()


async def while_it_waits(stream: Any) -> None:
    waiting = asyncio.create_task(anext(stream))
    await asyncio.sleep(0.01)
    waiting.cancel()
    await asyncio.wait([waiting])


@pytest.mark.parametrize("broken_off", [while_it_sends, while_it_waits])
async def test_of_a_stream_that_broke_off_no_token_is_kept_while_its_sample_goes_on(
    service: SamplerService, samples: Samples, broken_off: Callable[[Any], Awaitable[None]]
) -> None:
    stream = await begun(service, samples)
    await broken_off(stream)
    again = asyncio.create_task(service.Sample(asked().sample, None))
    await asyncio.sleep(0.01)
    assert samples.tell(1)() is None, "a token is kept that nobody reads any more"
    samples.ended.set()
    assert (await again).result.sequences[0].tokens.shape == [2]
    assert len(samples.tells) == 1


async def test_of_a_stream_that_broke_off_nothing_that_was_unread_is_kept(
    service: SamplerService, samples: Samples
) -> None:
    stream = await begun(service, samples)
    unread = samples.tell(1)
    await stream.aclose()
    assert unread() is None

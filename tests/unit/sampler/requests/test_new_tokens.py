"""Tokens on their way from the engine to their reader."""

from __future__ import annotations

import asyncio

from services.sampler.engine.sampling import NewTokens
from services.sampler.requests.new_tokens import TokenStream


def new(start: int) -> NewTokens:
    return NewTokens(0, start, 1, [start], [-1.0])


async def test_what_is_told_is_read_once_in_order_and_to_the_end() -> None:
    stream, end = TokenStream(), asyncio.get_running_loop().create_future()
    stream.tell(new(0))
    stream.tell(new(1))
    reading = stream.until(end, None)
    assert await anext(reading) == [new(0), new(1)]
    stream.tell(new(2))
    assert await anext(reading) == [new(2)]
    stream.tell(new(3))
    end.set_result(None)
    assert [part async for part in reading] == [[new(3)]]


async def test_a_reader_hears_of_nothing_new_every_so_often() -> None:
    stream, end = TokenStream(), asyncio.get_running_loop().create_future()
    reading = stream.until(end, 0.01)
    assert await anext(reading) == []
    assert await anext(reading) == []
    end.set_result(None)
    assert [part async for part in reading] == []

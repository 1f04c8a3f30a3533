"""What cannot be read is counted where an operator sees it, and costs a bounded amount of memory."""

from __future__ import annotations

import time

import msgspec
import pytest
import redis.asyncio

from services.common.state import keys, poison
from services.common.state.poison import Poison, Unreadable


async def test_what_cannot_be_decoded_is_an_error_that_names_it_and_is_noted(
    any_redis: redis.asyncio.Redis,
) -> None:
    found = Poison(any_redis)
    for raw in (b"{", b"[]", b"\xff"):
        with pytest.raises(Unreadable, match="tinsmith:a cannot be read"), found.reading("tinsmith:a"):
            msgspec.json.decode(raw, type=dict)
    with found.reading("tinsmith:b"):
        msgspec.json.decode(b"{}", type=dict)
    await found.write()
    (met,) = await found.listed()
    assert (met.name, met.count) == ("tinsmith:a", 3)
    assert abs(met.last - time.time()) < 60


async def test_several_gateways_count_together_and_the_last_reason_is_kept(
    any_redis: redis.asyncio.Redis,
) -> None:
    first, second = Poison(any_redis), Poison(any_redis)
    first.note("a", "one reason")
    first.note("a", "one reason")
    await first.write()
    second.note("a", "another reason")
    await second.write()
    await second.write()
    (met,) = await first.listed()
    assert (met.name, met.reason, met.count) == ("a", "another reason", 3)
    assert 0 < await any_redis.ttl(keys.POISON) <= 24 * 3600


async def test_the_one_met_longest_ago_makes_room(
    any_redis: redis.asyncio.Redis, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(poison, "_MOST", 3)
    for at, name in enumerate("abcd"):
        monkeypatch.setattr(time, "time", lambda at=at: 1000.0 + at)
        one = Poison(any_redis)
        one.note(name, "x" * 1000)
        await one.write()
    met = await Poison(any_redis).listed()
    assert [one.name for one in met] == ["b", "c", "d"]
    assert max(len(one.reason) for one in met) == 300


async def test_a_process_keeps_a_bounded_number_of_names(
    any_redis: redis.asyncio.Redis, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(poison, "_MOST", 3)
    found = Poison(any_redis)
    for number in range(10):
        found.note(f"name {number}", "reason")
    await found.write()
    assert len(await found.listed()) == 3


async def test_notes_that_could_not_be_written_are_written_later(any_redis: redis.asyncio.Redis) -> None:
    found = Poison(any_redis)
    await any_redis.set(keys.POISON, "no hash")
    found.note("a", "reason")
    with pytest.raises(redis.ResponseError):
        await found.write()
    await any_redis.delete(keys.POISON)
    await found.write()
    assert [met.count for met in await found.listed()] == [1]

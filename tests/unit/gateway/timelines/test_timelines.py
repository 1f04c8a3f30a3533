"""Timelines in Redis, and their bounds."""

from __future__ import annotations

import pytest
import redis.asyncio

from services.common.state import keys
from services.common.state.room import Room
from services.gateway.timelines import timelines as module
from services.gateway.timelines.event import Event
from services.gateway.timelines.timelines import DROPPED, Timelines


def event(session: str, seq_id: int) -> Event:
    return Event(f"{session}:train:0", seq_id, "optim_step", 1.0, 2.0, 3.0, "done", "0" * 32)


@pytest.fixture
def timelines(redis_client: redis.asyncio.Redis) -> Timelines:
    return Timelines(redis_client, Room())


async def test_what_was_noted_is_handed_out_by_every_gateway(
    timelines: Timelines, redis_client: redis.asyncio.Redis
) -> None:
    for number in (1, 2):
        timelines.note("alice", event("s", number))
    timelines.note("alice", event("t", 1))
    await timelines.flush()
    assert await Timelines(redis_client, Room()).of("s") == [event("s", 1), event("s", 2)]
    assert await timelines.of("unheard-of") == []


async def test_of_a_session_the_last_requests_are_kept_for_a_while(
    timelines: Timelines, redis_client: redis.asyncio.Redis, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "MOST_EVENTS", 3)
    for number in range(5):
        timelines.note("alice", event("s", number))
        await timelines.flush()
    assert [one.seq_id for one in await timelines.of("s")] == [2, 3, 4]
    for name in (keys.timeline("s"), keys.timelines_of("alice")):
        assert 0 < await redis_client.ttl(name) <= module.LIFE_S


async def test_an_owner_has_timelines_of_the_sessions_that_did_something_last_and_takes_nobody_elses(
    redis_client: redis.asyncio.Redis, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "MOST_SESSIONS", 2)
    now = [0.0]
    timelines = Timelines(redis_client, Room(), lambda: now[0])
    for owner, session in (("bob", "b"), ("alice", "s"), ("alice", "t"), ("alice", "s"), ("alice", "u")):
        now[0] += 1
        timelines.note(owner, event(session, 1))
        await timelines.flush()
    assert [bool(await timelines.of(session)) for session in "bstu"] == [True, True, False, True]
    assert await redis_client.zcard(keys.timelines_of("alice")) == 2


async def test_a_redis_that_is_half_full_is_left_to_requests_and_results(
    redis_client: redis.asyncio.Redis,
) -> None:
    room = Room()
    timelines, before = Timelines(redis_client, room), DROPPED._value.get()
    room.note_memory(60, 100)
    timelines.note("alice", event("s", 1))
    await timelines.flush()
    assert (await timelines.of("s"), DROPPED._value.get() - before) == ([], 1)
    room.note_memory(40, 100)
    timelines.note("alice", event("s", 2))
    await timelines.flush()
    assert [one.seq_id for one in await timelines.of("s")] == [2]


async def test_while_redis_is_away_a_bounded_number_waits(
    timelines: Timelines, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "_MOST_WAITING", 2)
    before = DROPPED._value.get()
    for number in range(5):
        timelines.note("alice", event("s", number))
    assert DROPPED._value.get() - before == 3
    await timelines.flush()
    assert [one.seq_id for one in await timelines.of("s")] == [0, 1]

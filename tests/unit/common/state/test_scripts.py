"""Runs of one script that share round trips: each has its own reply or error, whatever the others come to."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import redis.asyncio
from redis.asyncio.connection import AbstractConnection
from redis.exceptions import RedisError, ResponseError

from services.common.state import redis_client as connecting
from services.common.state.scripts import SharedScript

# `raise_version` keeps the largest number that a key was given, and refuses what is no number.
NAME = "raise_version"


@contextmanager
def trips() -> Iterator[list[bytes]]:
    """The runs that are sent to Redis at once meanwhile."""
    seen: list[bytes] = []
    send = AbstractConnection._send_packed_command

    async def note(self: AbstractConnection, command: Any, *args: Any, **kwargs: Any) -> None:
        sent = command if isinstance(command, bytes) else b"".join(command)
        if b"EVALSHA" in sent:
            seen.append(sent)
        await send(self, command, *args, **kwargs)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(AbstractConnection, "_send_packed_command", note)
        yield seen


async def test_runs_that_are_wanted_at_once_share_round_trips(redis_client: redis.asyncio.Redis) -> None:
    script = SharedScript(redis_client, NAME)
    await script(["version:0"], 1)
    with trips() as seen:
        assert await asyncio.gather(*(script([f"version:{n}"], n) for n in range(100))) == [1] * 100
    assert len(seen) == 1
    assert [await redis_client.get(f"version:{n}") for n in (1, 50, 99)] == [b"1", b"50", b"99"]


async def test_what_is_wanted_meanwhile_goes_in_the_next_round_trip(
    redis_client: redis.asyncio.Redis,
) -> None:
    script = SharedScript(redis_client, NAME)

    async def later(number: int) -> None:
        # After the first is sent, and before it is answered.
        await asyncio.sleep(0)
        await asyncio.sleep(0)
        await script(["version"], number)

    await script(["version"], 0)
    with trips() as seen:
        await asyncio.gather(script(["version"], 1), *(later(number) for number in range(2, 50)))
    assert len(seen) == 2
    assert await redis_client.get("version") == b"49"


async def test_a_run_that_fails_fails_alone(redis_client: redis.asyncio.Redis) -> None:
    script = SharedScript(redis_client, NAME)
    await redis_client.rpush("list", "no number")
    done = await asyncio.gather(
        script(["before"], 1), script(["list"], 1), script(["after"], 1), return_exceptions=True
    )
    assert (done[0], done[2]) == (1, 1)
    assert isinstance(done[1], ResponseError)
    assert await redis_client.get("after") == b"1"


async def test_a_redis_that_does_not_know_the_script_is_given_it(redis_client: redis.asyncio.Redis) -> None:
    script = SharedScript(redis_client, NAME)
    for number in (1, 2):
        await redis_client.script_flush()
        names = [f"version:{each}" for each in range(20)]
        assert await asyncio.gather(*(script([name], number) for name in names)) == [1] * 20
        assert await redis_client.mget(names) == [str(number).encode()] * 20


async def test_a_large_run_goes_by_itself_and_the_others_do_not_wait_for_it(
    redis_client: redis.asyncio.Redis,
) -> None:
    script = SharedScript(redis_client, "note_waiting")
    await script(["future"], "")
    with trips() as seen:
        await asyncio.gather(
            script(["future"], b"x" * 70_000), *(script(["future"], b"small") for _ in range(20))
        )
    assert sorted(len(sent) > 70_000 for sent in seen) == [False, True]


async def test_who_has_gone_changes_nothing_for_the_others(redis_client: redis.asyncio.Redis) -> None:
    script = SharedScript(redis_client, NAME)
    runs = [asyncio.create_task(script([f"version:{n}"], n)) for n in range(10)]
    await asyncio.sleep(0)
    runs[3].cancel()
    done = await asyncio.gather(*runs, return_exceptions=True)
    assert [one for one in done if one != 1] == [done[3]]
    assert isinstance(done[3], asyncio.CancelledError)


async def test_when_redis_is_away_all_that_wait_are_told_and_later_ones_are_run_when_it_is_back(
    redis_url: str, redis_client: redis.asyncio.Redis
) -> None:
    client = connecting.connect(redis_url)
    try:
        script = SharedScript(client, NAME)
        options = client.connection_pool.connection_kwargs
        there, options["path"] = options["path"], f"{options['path']}.none"
        started = asyncio.get_running_loop().time()
        done = await asyncio.gather(
            *(script([f"version:{n}"], n) for n in range(300)), return_exceptions=True
        )
        assert {isinstance(one, RedisError) for one in done} == {True}
        # Not one round trip after the other.
        assert asyncio.get_running_loop().time() - started < 20
        await client.connection_pool.disconnect()
        client.connection_pool.reset()
        options["path"] = there
        assert await script(["version:7"], 7) == 1
    finally:
        await client.aclose()

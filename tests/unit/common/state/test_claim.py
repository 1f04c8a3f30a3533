"""Two processes never run under one id, and a restart does not wait longer than it must."""

from __future__ import annotations

import asyncio
import os
import signal
import time
from collections.abc import Callable

import msgspec
import pytest
import redis.asyncio

from services.common.contract.errors import Conflict
from services.common.state import claim as module
from services.common.state import keys, versions
from services.common.state.claim import Claim, Process, claimed, is_gone, this_process

KEY = keys.claim("gateway", "gateway-0")


def claim(client: redis.asyncio.Redis, ttl: float = 2.0, lost: Callable[[], None] = lambda: None) -> Claim:
    """A claim that a machine which is busy for longer than its life may lose, but not end the tests over."""
    return Claim(client, "gateway", "gateway-0", ttl, lost)


async def test_a_second_process_is_refused_for_as_long_as_the_first_runs(
    any_redis: redis.asyncio.Redis,
) -> None:
    first = claim(any_redis)
    await first.take()
    began = time.monotonic()
    with pytest.raises(Conflict, match="give this one another") as refused:
        await claim(any_redis).take()
    assert f"as gateway 'gateway-0' (pid {os.getpid()})" in refused.value.message
    assert time.monotonic() - began > 2, "it may have been killed just now"
    await first.give_back()
    assert await any_redis.get(KEY) is None
    second = claim(any_redis)
    await second.take()
    await second.give_back()


async def test_an_id_is_free_again_when_its_service_ends_however_it_does(
    redis_url: str, redis_client: redis.asyncio.Redis
) -> None:
    async with claimed(redis_url, "gateway", "gateway-0") as client:
        assert await client.get(KEY) is not None
    assert await redis_client.get(KEY) is None
    with pytest.raises(OSError, match="no port is free"):
        async with claimed(redis_url, "gateway", "gateway-0"):
            raise OSError("no port is free")
    assert await redis_client.get(KEY) is None


async def test_a_release_that_cannot_read_what_is_there_keeps_no_id(
    redis_url: str, redis_client: redis.asyncio.Redis
) -> None:
    await versions.join(redis_client, versions.Range(versions.CONTRACT + 2, versions.CONTRACT + 2))
    with pytest.raises(Conflict, match="start a newer release"):
        async with claimed(redis_url, "gateway", "gateway-0"):
            pytest.fail("it has started")
    assert await redis_client.get(KEY) is None


async def test_another_id_is_another_process(redis_client: redis.asyncio.Redis) -> None:
    claims = [claim(redis_client), Claim(redis_client, "trainer", "gateway-0", 0.6, lambda: None)]
    for one in claims:
        await one.take()
    for one in claims:
        await one.give_back()


async def test_what_was_killed_elsewhere_is_waited_for_no_longer_than_its_claim_lives(
    redis_client: redis.asyncio.Redis,
) -> None:
    killed = Process(machine="another", pid=1, started=1)
    await redis_client.set(KEY, msgspec.json.encode(killed), px=500)
    began = time.monotonic()
    restarted = claim(redis_client)
    await restarted.take()
    assert time.monotonic() - began < 60
    await restarted.give_back()


async def test_one_that_drains_on_another_machine_is_waited_for_until_it_is_gone(
    redis_client: redis.asyncio.Redis, caplog: pytest.LogCaptureFixture
) -> None:
    other = msgspec.json.encode(Process(machine="another", pid=7, started=1))
    await redis_client.set(KEY, other)
    next_one = claim(redis_client, ttl=0.1)
    taking = asyncio.create_task(next_one.take())
    # Much longer than a claim lives.
    done, _ = await asyncio.wait([taking], timeout=0.6)
    assert not done
    assert "of another machine to end (pid 7)" in caplog.text
    await redis_client.delete(KEY)
    async with asyncio.timeout(60):
        await taking
    await next_one.give_back()


async def test_one_that_does_not_end_on_another_machine_is_not_waited_for_for_ever(
    redis_client: redis.asyncio.Redis,
) -> None:
    await redis_client.set(KEY, msgspec.json.encode(Process(machine="another", pid=7, started=1)))
    with pytest.raises(Conflict, match="pid 7"):
        await Claim(redis_client, "gateway", "gateway-0", 0.1, lambda: None, elsewhere=0.3).take()


async def test_what_was_killed_on_this_machine_is_not_waited_for(redis_client: redis.asyncio.Redis) -> None:
    process = await asyncio.create_subprocess_exec("sleep", "60")
    me = this_process()
    started = module._started(process.pid)
    assert started is not None
    killed = msgspec.structs.replace(me, pid=process.pid, started=started)
    assert not is_gone(killed)
    await redis_client.set(KEY, msgspec.json.encode(killed), px=60_000)
    process.kill()
    await process.wait()
    restarted = claim(redis_client)
    async with asyncio.timeout(30):
        await restarted.take()
    await restarted.give_back()


def test_a_process_of_another_machine_or_before_a_reboot_is_not_known_to_be_gone() -> None:
    me = this_process()
    assert not is_gone(me)
    assert is_gone(msgspec.structs.replace(me, started=me.started + 1)), "its pid is another process's now"
    assert not is_gone(msgspec.structs.replace(me, machine="other", started=1))
    assert not is_gone(msgspec.structs.replace(me, machine="", started=1))


async def test_of_many_that_start_at_once_one_gets_the_id(redis_client: redis.asyncio.Redis) -> None:
    claims = [claim(redis_client, 2) for _ in range(8)]
    outcomes = await asyncio.gather(*(one.take() for one in claims), return_exceptions=True)
    assert [type(outcome) for outcome in outcomes].count(Conflict) == 7
    for one in claims:
        await one.give_back()


async def test_a_process_that_was_stopped_past_its_claim_ends_when_the_id_is_anothers(
    redis_client: redis.asyncio.Redis, monkeypatch: pytest.MonkeyPatch
) -> None:
    ended = asyncio.Event()
    monkeypatch.setattr(os, "kill", lambda pid, number: ended.set() if number == signal.SIGTERM else None)
    stopped = Claim(redis_client, "gateway", "gateway-0", 0.6)
    await stopped.take()
    # Redis lost the claim, or it ran out: it is made again as long as nobody took the id.
    await redis_client.delete(KEY)
    async with asyncio.timeout(60):
        while await redis_client.get(KEY) is None:  # noqa: ASYNC110
            await asyncio.sleep(0.02)
    assert not ended.is_set()
    other = msgspec.json.encode(Process(machine="another", pid=1, started=1))
    await redis_client.set(KEY, other)
    async with asyncio.timeout(60):
        await ended.wait()
    await stopped.give_back()
    assert await redis_client.get(KEY) == other

"""Services announce themselves in Redis, and what they say of their base model stays known."""

from __future__ import annotations

import asyncio
import time

import msgspec
import pytest
import redis.asyncio

from services.common.contract.errors import InvalidRequest
from services.common.state import keys, known_models, registry
from services.common.state.known_models import Configured, Facts
from services.common.state.registry import Announcer, Registry, ServiceRecord


def record(kind: str = "trainer", name: str = "one", **fields: object) -> ServiceRecord:
    given: dict = {"address": "127.0.0.1:1", "base_model": "a/b", "vocab_size": 9, **fields}
    return ServiceRecord(kind=kind, id=name, **given)


async def test_an_announced_service_is_live_until_it_stops(any_redis: redis.asyncio.Redis) -> None:
    announcer = Announcer(any_redis, record())
    await announcer.start()
    assert await registry.live(any_redis, "trainer") == [announcer.record]
    assert await registry.live(any_redis, "sampler") == []
    await announcer.stop()
    assert await registry.live(any_redis, "trainer") == []


async def test_a_service_that_is_silent_is_gone_and_leaves_redis_when_another_speaks(
    any_redis: redis.asyncio.Redis, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(registry, "TTL_S", 0.2)
    services = Registry(any_redis)
    await services.announce(record(name="silent"))
    await asyncio.sleep(0.3)
    assert await registry.live(any_redis, "trainer") == []
    await services.announce(record(name="loud"))
    assert await any_redis.hkeys(keys.services("trainer")) == [b"loud"]
    assert await any_redis.zrange(keys.services_seen("trainer"), 0, -1) == [b"loud"]


async def test_an_update_is_seen_at_once(redis_client: redis.asyncio.Redis) -> None:
    announcer = Announcer(redis_client, record())
    await announcer.start()
    draining = msgspec.structs.replace(announcer.record, state="draining")
    await announcer.update(draining)
    assert await registry.live(redis_client, "trainer") == [draining]
    await announcer.stop()


async def test_each_announcement_tells_the_load_of_its_time(
    redis_client: redis.asyncio.Redis, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(registry, "REFRESH_S", 0.02)
    load = {"models": 0, "queued": 0}
    announcer = registry.Announcer(redis_client, record(), lambda: load)
    await announcer.start()
    try:
        for load in ({"models": 3, "queued": 0}, {"models": 3, "queued": 7}):
            async with asyncio.timeout(60):
                while True:
                    (found,) = await registry.live(redis_client, "trainer")
                    if (found.models, found.queued) == (load["models"], load["queued"]):
                        break
                    await asyncio.sleep(0.01)
    finally:
        await announcer.stop()


async def test_one_look_finds_all_kinds_by_id_in_one_round_trip(redis_client: redis.asyncio.Redis) -> None:
    services = Registry(redis_client)
    for kind, name in (("sampler", "b"), ("sampler", "a"), ("trainer", "c")):
        await services.announce(record(kind, name))
    await services.announce(ServiceRecord(kind="gateway", id="g", address="h:1"))
    await services.look()
    before = (await redis_client.info("commandstats"))["cmdstat_evalsha"]["calls"]
    view = await services.look()
    assert (await redis_client.info("commandstats"))["cmdstat_evalsha"]["calls"] == before + 1
    assert {kind: [one.id for one in found] for kind, found in view.services.items()} == {
        "gateway": ["g"],
        "trainer": ["c"],
        "sampler": ["a", "b"],
    }


async def test_a_record_of_another_version_is_passed_over_and_counted(
    redis_client: redis.asyncio.Redis,
) -> None:
    services = Registry(redis_client)
    await services.announce(record())
    await redis_client.hset(keys.services("trainer"), "other", b'{"kind": 7}')
    await redis_client.zadd(keys.services_seen("trainer"), {"other": 1e15})
    await redis_client.hset(keys.BASE_MODELS, mapping={"trainer:c/d": b"{}", "owner:c/d": b"x"})
    view = await services.look("trainer")
    assert [one.id for one in view.services["trainer"]] == ["one"]
    assert (set(view.base_models), view.undecodable) == ({"a/b"}, 3)


def test_every_start_of_a_service_is_another_incarnation() -> None:
    assert record().incarnation != record().incarnation


async def test_what_was_announced_once_stays_known(any_redis: redis.asyncio.Redis) -> None:
    for kind, rank in (("trainer", 256), ("sampler", 64)):
        announcer = Announcer(any_redis, record(kind, max_lora_rank=rank))
        await announcer.start()
        await announcer.stop()
    known = (await Registry(any_redis).look()).base_models["a/b"]
    assert (known.trained, known.sampled, known.retired) == (True, True, False)
    assert known.trainer == Facts(vocab_size=9, context_length=0, max_lora_rank=256)
    assert known.sampler is not None and known.sampler.max_lora_rank == 64


async def test_the_operators_word_counts_before_what_was_announced(redis_client: redis.asyncio.Redis) -> None:
    services = Registry(redis_client)
    await services.announce(record("sampler"))
    configured = [Configured(name="a/b", sampled=False), Configured(name="c/d")]
    await known_models.configure(redis_client, configured)
    known = (await services.look()).base_models
    assert (known["a/b"].trained, known["a/b"].sampled) == (True, False)
    assert (known["c/d"].trained, known["c/d"].sampled, known["c/d"].trainer) == (True, True, None)


async def test_a_retired_model_is_forgotten_until_it_is_configured_or_announced(
    redis_client: redis.asyncio.Redis,
) -> None:
    services = Registry(redis_client)
    for comes_back in (
        lambda: known_models.configure(redis_client, [Configured(name="a/b")]),
        lambda: services.announce(record()),
    ):
        await known_models.retire(redis_client, "a/b")
        known = (await services.look()).base_models["a/b"]
        assert (known.retired, known.trained, known.sampled) == (True, False, False)
        await comes_back()
        assert not (await services.look()).base_models["a/b"].retired


@pytest.mark.parametrize(
    "text",
    [
        "org/model",
        "{}",
        '[{"trained": true}]',
        '[{"name": ""}]',
        '[{"name": "a/b"}, {"name": "a/b"}]',
        '[{"name": "a/b", "sample": true}]',
    ],
)
def test_base_models_in_another_form_are_refused(text: str) -> None:
    with pytest.raises(InvalidRequest, match="base model"):
        known_models.parse_configured(text)


def test_base_models_are_a_json_list() -> None:
    assert known_models.parse_configured("") == ()
    parsed = known_models.parse_configured('[{"name": "a/b"}, {"name": "c/d", "trained": false}]')
    assert parsed == (Configured(name="a/b"), Configured(name="c/d", trained=False))


async def test_who_is_drained_is_so_while_it_is_heard_of_and_for_a_while_after_that(
    any_redis: redis.asyncio.Redis,
) -> None:
    services = Registry(any_redis)
    for name in ("running", "gone", "away"):
        await services.announce(record(name=name))
        await services.drain("trainer", name)
    long_ago = time.time() - registry.DRAINED_S
    seen = {"trainer:running": long_ago - 60, "trainer:gone": long_ago - 60, "trainer:away": long_ago + 600}
    await any_redis.zadd(keys.DRAINED, seen)
    # The one that runs was drained long ago, and has been heard of since then.
    await services.announce(record(name="running"))
    assert (await services.look()).drained == {("trainer", "running"), ("trainer", "away")}
    await services.announce(record(name="never drained"))
    assert (await services.look()).drained == {("trainer", "running"), ("trainer", "away")}
    assert await services.undrain("trainer", "running")
    assert not await services.undrain("trainer", "gone")


async def test_however_often_a_service_is_not_announced_the_log_has_the_first_time_and_the_end(
    redis_client: redis.asyncio.Redis, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO")
    monkeypatch.setattr(registry, "REFRESH_S", 0.01)
    announcer = Announcer(redis_client, record())
    await announcer.start()
    announce, tries, done = announcer._registry.announce, 0, asyncio.Event()

    async def fails(told: ServiceRecord) -> None:
        nonlocal tries
        tries += 1
        if tries <= 3:
            raise redis.exceptions.ConnectionError("Redis is away")
        await announce(told)
        done.set()

    monkeypatch.setattr(announcer._registry, "announce", fails)
    try:
        async with asyncio.timeout(60):
            await done.wait()
            await asyncio.sleep(0)
    finally:
        await announcer.stop()
    assert [one for one in caplog.messages if "announced" in one] == [
        "a service could not be announced: one: Redis is away",
        "a service could not be announced: no more of one, after 3 failures",
    ]

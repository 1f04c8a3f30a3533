"""One look at the registry serves a whole gateway."""

from __future__ import annotations

from typing import Any

import pytest
import redis.asyncio

from services.common.contract.errors import InvalidRequest
from services.common.process.tasks import cancel_all
from services.common.state import keys, known_models, registry, versions
from services.common.state.poison import Poison
from services.common.state.registry import Announcer, Registry, ServiceRecord
from services.common.state.versions import Range
from services.gateway.cluster.base_models import BaseModels
from services.gateway.cluster.discovery import Discovery

BASE = "a/b"


def announcer(client: redis.asyncio.Redis, kind: str = "trainer", name: str = "one") -> Announcer:
    fields: Any = {"base_model": BASE, "vocab_size": 9, "context_length": 9}
    return Announcer(client, ServiceRecord(kind=kind, id=name, address="127.0.0.1:1", **fields))


async def commands(client: redis.asyncio.Redis) -> int:
    stats = await client.info("commandstats")
    return sum(stats.get(f"cmdstat_{name}", {"calls": 0})["calls"] for name in ("evalsha", "hgetall", "get"))


async def test_whoever_asks_the_registry_is_read_once(redis_client: redis.asyncio.Redis) -> None:
    await announcer(redis_client).start()
    discovery = Discovery(redis_client, Poison(redis_client))
    base_models = BaseModels(discovery)
    await discovery.refresh()
    before = await commands(redis_client)
    await discovery.refresh()
    # The script's own HGETALL counts too.
    assert await commands(redis_client) == before + 2
    for _ in range(100):
        await base_models.trainable(BASE)
        assert discovery.trainers.serving(BASE)
        assert not discovery.samplers.serving(BASE)
    assert await commands(redis_client) == before + 2


async def test_who_listens_hears_of_changes_only(redis_client: redis.asyncio.Redis) -> None:
    heard: list[str] = []
    discovery = Discovery(redis_client, Poison(redis_client))
    discovery.trainers.listen(lambda: heard.append("change"))
    service = announcer(redis_client)
    await service.start()
    for expected in (1, 1):
        await discovery.refresh()
        assert len(heard) == expected
    await service.stop()
    await discovery.refresh()
    assert len(heard) == 2
    await known_models.retire(redis_client, BASE)
    await discovery.refresh()
    assert len(heard) == 3
    assert discovery.trainers.retired(BASE)
    assert not discovery.trainers.retired("c/d")


async def test_a_channel_is_for_one_incarnation(redis_client: redis.asyncio.Redis) -> None:
    discovery = Discovery(redis_client, Poison(redis_client))
    first = announcer(redis_client)
    await first.start()
    await discovery.refresh()
    (record,) = discovery.trainers.all()
    opened = discovery.trainers.channel(record)
    assert discovery.trainers.channel(record) is opened
    await first.stop()
    await announcer(redis_client).start()
    await discovery.refresh()
    (restarted,) = discovery.trainers.all()
    assert discovery.trainers.channel(restarted) is not opened
    await discovery.stop()


async def test_who_stops_in_order_is_no_warning_and_who_is_gone_without_a_word_is_one(
    redis_client: redis.asyncio.Redis, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    caplog.set_level("INFO")
    discovery = Discovery(redis_client, Poison(redis_client))
    services = {
        name: Announcer(redis_client, ServiceRecord(kind="trainer", id=name, address="h:1"))
        for name in ("hangs", "fails", "stops")
    }
    for service in services.values():
        await service.start()
    for _ in range(3):
        await discovery.refresh()
    assert sorted(caplog.messages) == [f"trainer {name} is announced" for name in sorted(services)]
    caplog.clear()
    await services["stops"].stop()
    await services["fails"].stop(in_order=False)
    await cancel_all([services["hangs"]._task])
    await discovery.refresh()
    assert [record.id for record in discovery.trainers.all()] == ["hangs"]
    monkeypatch.setattr(registry, "TTL_S", 0.0)
    await discovery.refresh()
    assert discovery.trainers.all() == []
    said = {record.getMessage().split()[1]: record for record in caplog.records}
    assert {name: record.levelname for name, record in said.items()} == {
        "hangs": "WARNING",
        "fails": "WARNING",
        "stops": "INFO",
    }
    assert said["stops"].getMessage() == "trainer stops was stopped in order"


async def test_a_record_of_another_version_hides_nothing_else(
    redis_client: redis.asyncio.Redis, caplog: pytest.LogCaptureFixture
) -> None:
    poison = Poison(redis_client)
    discovery = Discovery(redis_client, poison)
    await announcer(redis_client).start()
    await redis_client.hset(keys.services("trainer"), "other", b"\x00")
    await redis_client.zadd(keys.services_seen("trainer"), {"other": 1e15})
    for _ in range(2):
        await discovery.refresh()
    assert [record.id for record in discovery.trainers.all()] == ["one"]
    said = [record.message for record in caplog.records if "records in the registry" in record.message]
    assert len(said) == 1
    await poison.write()
    (met,) = await poison.listed()
    assert (met.name, met.reason, met.count) == ("records in the registry", "1 are of another version", 2)


async def test_a_base_model_that_has_just_come_is_found_at_once(redis_client: redis.asyncio.Redis) -> None:
    discovery = Discovery(redis_client, Poison(redis_client))
    base_models = BaseModels(discovery)
    await announcer(redis_client, "sampler").start()
    await discovery.refresh()
    with pytest.raises(InvalidRequest, match="has no trainer"):
        await base_models.trainable(BASE)
    await announcer(redis_client).start()
    discovery._looked_at -= 0.2
    assert (await base_models.trainable(BASE)).trainer_seen


async def test_a_service_of_a_release_too_far_away_gets_no_work_and_that_is_said(
    redis_client: redis.asyncio.Redis, caplog: pytest.LogCaptureFixture
) -> None:
    fields: Any = {"address": "127.0.0.1:1", "base_model": BASE, "vocab_size": 9, "context_length": 9}
    registry = Registry(redis_client)
    next_one = Range(versions.CONTRACT + 1, versions.CONTRACT)
    later = Range(versions.CONTRACT + 2, versions.CONTRACT + 1)
    for name, speaks in (("same", Range()), ("next", next_one), ("later", later)):
        await registry.announce(ServiceRecord(kind="trainer", id=name, versions=speaks, **fields))
    discovery = Discovery(redis_client, Poison(redis_client))
    await discovery.refresh()
    await discovery.refresh()
    assert [record.id for record in discovery.trainers.serving(BASE)] == ["next", "same"]
    (told,) = [entry.getMessage() for entry in caplog.records if "contract" in entry.getMessage()]
    assert told.startswith(f"trainer later speaks contract {later}, this gateway {Range()}: it gets no work")
    fields["versions"] = later
    await registry.announce(ServiceRecord(kind="trainer", id="same", **fields))
    await discovery.refresh()
    assert [record.id for record in discovery.trainers.serving(BASE)] == ["next"]
    assert "not announced any more" not in caplog.text

"""Services announce themselves in Redis."""

from __future__ import annotations

from services.common.state import keys, registry
from services.common.state.redis_client import connect


async def test_an_announced_service_is_live_until_it_stops(redis_url: str) -> None:
    client = connect(redis_url)
    record = registry.ServiceRecord(
        kind="trainer", id="trainer-test", address="127.0.0.1:1", base_model="a/b"
    )
    announcer = registry.Announcer(client, record)
    await announcer.start()
    assert record in await registry.live(client, "trainer")
    assert 0 < await client.ttl(keys.service("trainer", "trainer-test")) <= registry.TTL_S
    await announcer.stop()
    assert record not in await registry.live(client, "trainer")
    await client.aclose()


async def test_an_update_is_seen_at_once(redis_url: str) -> None:
    client = connect(redis_url)
    record = registry.ServiceRecord(kind="sampler", id="sampler-test", address="127.0.0.1:1")
    announcer = registry.Announcer(client, record)
    await announcer.start()
    draining = registry.ServiceRecord(
        kind="sampler",
        id="sampler-test",
        address="127.0.0.1:1",
        incarnation=record.incarnation,
        state="draining",
    )
    await announcer.update(draining)
    assert draining in await registry.live(client, "sampler")
    await announcer.stop()
    await client.aclose()


def test_every_start_of_a_service_is_another_incarnation() -> None:
    first, second = (registry.ServiceRecord(kind="sampler", id="s", address="a") for _ in range(2))
    assert first.incarnation != second.incarnation

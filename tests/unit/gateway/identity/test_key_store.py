"""Changes of keys in Redis, by several at once and without memory."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest
import redis.asyncio
from redis.exceptions import OutOfMemoryError

from services.common.contract.errors import Conflict, LimitReached, NotFound
from services.common.state import keys
from services.gateway.identity import key_store as module
from services.gateway.identity.key import Rights
from services.gateway.identity.key_store import KeyStore


@pytest.fixture
def store(any_redis: redis.asyncio.Redis) -> KeyStore:
    return KeyStore(any_redis)


def meanwhile(store: KeyStore, monkeypatch: pytest.MonkeyPatch, what: str, *arguments: object) -> None:
    """Does something else after the store has read a key and before it writes."""
    raw, other = store._raw, KeyStore(store._redis)

    async def read(key_id: str) -> bytes:
        found = await raw(key_id)
        await getattr(other, what)(*arguments)
        return found

    monkeypatch.setattr(store, "_raw", read)


@pytest.mark.parametrize("keep", [0.0, 60.0])
async def test_a_key_that_is_revoked_while_it_is_rotated_stays_so_and_has_no_successor(
    store: KeyStore, monkeypatch: pytest.MonkeyPatch, keep: float
) -> None:
    record, _ = await store.create(Rights("carol"))
    meanwhile(store, monkeypatch, "revoke", record.id)
    with pytest.raises(Conflict, match="was changed or revoked"):
        await store.rotate(record.id, keep)
    assert await store.all() == []


@pytest.mark.parametrize("keep", [0.0, 60.0])
async def test_a_key_that_two_rotate_at_once_has_one_successor(
    store: KeyStore, monkeypatch: pytest.MonkeyPatch, keep: float
) -> None:
    record, _ = await store.create(Rights("carol"))
    meanwhile(store, monkeypatch, "rotate", record.id, keep)
    with pytest.raises(Conflict):
        await store.rotate(record.id, keep)
    assert len([one for one in await store.all() if one.id != record.id]) == 1


async def test_there_are_never_more_keys_than_the_most(
    store: KeyStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "MOST_KEYS", 3)
    made = await asyncio.gather(*(store.create(Rights("carol")) for _ in range(8)), return_exceptions=True)
    assert len([one for one in made if isinstance(one, LimitReached)]) == 5
    first = (await store.all())[0]
    with pytest.raises(LimitReached):
        await store.rotate(first.id, 60)
    assert (await store.get(first.id)).expires_at is None
    # One in the place of another takes no more room.
    await store.rotate(first.id, 0)
    assert len(await store.all()) == 3


async def test_keys_that_ended_long_ago_make_room(store: KeyStore, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "MOST_KEYS", 2)
    old, _ = await store.create(Rights("carol"))
    kept, _ = await store.create(Rights("carol"))
    await store.rotate(kept.id, 0)
    monkeypatch.setattr(module, "MOST_KEYS", 3)
    await store.rotate(old.id, 60)
    monkeypatch.setattr(module, "_EXPIRED_KEPT_S", -120.0)
    await store.create(Rights("dora"))
    with pytest.raises(NotFound):
        await store.get(old.id)


async def test_without_memory_a_key_is_revoked_and_none_is_made(
    store: KeyStore, any_redis: redis.asyncio.Redis
) -> None:
    record, _ = await store.create(Rights("carol"))
    version = await store.version()
    await any_redis.config_set("maxmemory", 1)
    try:
        with pytest.raises(OutOfMemoryError):
            await store.create(Rights("dora"))
        await store.revoke(record.id)
        assert await store.all() == []
        assert await store.version() not in ("", version)
    finally:
        await any_redis.config_set("maxmemory", 0)


async def test_the_answer_to_a_change_can_be_lost_and_the_change_tried_again(
    store: KeyStore, any_redis: redis.asyncio.Redis
) -> None:
    record, _ = await store.create(Rights("carol"))
    raw: Any = await any_redis.hget(keys.KEYS, record.id)
    again = await store._put_key(module._KEYS, "v", 10, record.id, raw, "gone", b"{}", b"")
    assert again == b"kept"
    assert await store.all() == [record]

"""Who is let in, and since when not any more."""

from __future__ import annotations

import asyncio
import itertools
import threading
import time
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any

import pytest
import redis.asyncio
from redis.exceptions import ConnectionError as RedisConnectionError

from services.common.contract.errors import InvalidRequest, NotFound, Unauthenticated, Unavailable
from services.common.process.pools import READS
from services.common.state import keys
from services.gateway.identity.key import Rights
from services.gateway.identity.key_store import KeyStore
from services.gateway.identity.ring import KeyRing


class Clock:
    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def path(tmp_path: Path) -> Path:
    found = tmp_path / "keys"
    found.write_text("tml-one alice\n")
    return found


@pytest.fixture
def store(redis_client: redis.asyncio.Redis) -> KeyStore:
    return KeyStore(redis_client)


@pytest.fixture
async def ring(path: Path, store: KeyStore) -> AsyncIterator[KeyRing]:
    """One that looks by itself."""
    made = KeyRing(path, store)
    await made.start()
    yield made
    await made.stop()


def write(path: Path, text: str) -> None:
    path.write_text(text)


def lets_in(ring: KeyRing, key: str) -> bool:
    try:
        ring.caller_of(key)
    except (Unauthenticated, Unavailable):
        return False
    return True


async def soon(holds: Callable[[], bool]) -> None:
    async with asyncio.timeout(60):
        while True:
            if holds():
                return
            await asyncio.sleep(0.02)


async def test_who_sends_the_whole_line_of_a_file_of_keys_is_told_what_of_it_is_the_key(
    ring: KeyRing,
) -> None:
    with pytest.raises(Unauthenticated, match="first word"):
        ring.caller_of("tml-one alice role=admin")


async def test_a_key_of_redis_is_known_by_what_it_may_until_it_is_revoked(
    ring: KeyRing, store: KeyStore
) -> None:
    record, key = await store.create(Rights("carol", "read", ("train",)))
    await soon(lambda: lets_in(ring, key))
    caller = ring.caller_of(key)
    assert (caller.owner, caller.role, caller.scopes) == ("carol", "read", ("train",))
    assert caller.key_id == record.id
    await store.revoke(record.id)
    await soon(lambda: not lets_in(ring, key))
    assert lets_in(ring, "tml-one")


async def test_a_key_is_in_and_out_on_every_gateway_without_anybody_doing_anything(
    path: Path, store: KeyStore
) -> None:
    rings = [KeyRing(path, store) for _ in range(3)]

    async def until(are_in: bool) -> None:
        async with asyncio.timeout(60):
            while True:
                if all(lets_in(ring, key) is are_in for ring in rings):
                    return
                await asyncio.sleep(0.05)

    for ring in rings:
        await ring.start()
    try:
        record, key = await store.create(Rights("carol"))
        await until(are_in=True)
        await store.revoke(record.id)
        await until(are_in=False)
    finally:
        for ring in rings:
            await ring.stop()


async def test_nothing_in_redis_is_a_key(store: KeyStore, redis_client: redis.asyncio.Redis) -> None:
    _, key = await store.create(Rights("carol"))
    # It may have a "-" itself.
    secret = key.split("-", 2)[2]
    for name in await redis_client.keys("*"):
        kind = await redis_client.type(name)
        held: Any = await (redis_client.hgetall(name) if kind == b"hash" else redis_client.get(name))
        assert secret not in repr(held)


async def test_a_rotated_key_has_its_owner_and_the_old_one_ends_when_it_was_told_to(
    path: Path, store: KeyStore
) -> None:
    ring = KeyRing(path, store)
    old, old_key = await store.create(Rights("carol", "read", ("train",), note="ci"))
    new, new_key = await store.rotate(old.id, 0)
    await ring.look()
    assert ring.caller_of(new_key).owner == "carol"
    assert new.rights == old.rights
    assert not lets_in(ring, old_key)
    with pytest.raises(NotFound):
        await store.rotate(old.id, 0)
    _, newer_key = await store.rotate(new.id, 3600)
    await ring.look()
    assert lets_in(ring, new_key)
    assert lets_in(ring, newer_key)
    kept = await store.get(new.id)
    assert kept.expires_at is not None
    assert kept.expires_at < time.time() + 3601
    # Rotating an ending key does not give it more time.
    await store.rotate(new.id, 1e9)
    assert (await store.get(new.id)).expires_at == kept.expires_at


async def test_a_key_ends_at_its_time_without_anybody_doing_anything(
    path: Path, store: KeyStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    write(path, "tml-one alice expires=2027-01-31\n")
    ring = KeyRing(path, store)
    now = time.time()
    _, key = await store.create(Rights("carol", expires_at=now + 60))
    await ring.look()
    assert lets_in(ring, key)
    monkeypatch.setattr(time, "time", lambda: now + 60)
    with pytest.raises(Unauthenticated, match="expired"):
        ring.caller_of(key)
    monkeypatch.setattr(time, "time", lambda: 1.9e9)
    with pytest.raises(Unauthenticated, match="expired"):
        ring.caller_of("tml-one")
    with pytest.raises(InvalidRequest):
        await store.create(Rights("carol", expires_at=5.0))


async def test_without_redis_known_keys_are_known_for_a_while_and_then_nobody_can_tell(
    path: Path, store: KeyStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    clock = Clock()
    ring = KeyRing(path, store, clock)
    _, key = await store.create(Rights("carol"))
    # Nobody knows yet whether this is a key; it is not told to be none.
    with pytest.raises(Unavailable):
        ring.caller_of(key)
    await ring.look()

    async def away() -> str:
        raise RedisConnectionError("away")

    monkeypatch.setattr(store, "version", away)
    clock.now += 29
    with pytest.raises(RedisConnectionError):
        await ring.look()
    assert lets_in(ring, key)
    clock.now += 2
    with pytest.raises(Unavailable):
        ring.caller_of(key)
    monkeypatch.undo()
    await ring.look()
    assert lets_in(ring, key)


async def test_a_record_that_cannot_be_read_lets_nobody_in_and_the_others_do(
    path: Path, store: KeyStore, redis_client: redis.asyncio.Redis
) -> None:
    broken, broken_key = await store.create(Rights("carol"))
    await redis_client.hset(keys.KEYS, broken.id, "{")
    _, key = await store.create(Rights("dora"))
    ring = KeyRing(path, store)
    await ring.look()
    assert lets_in(ring, key)
    assert not lets_in(ring, broken_key)


async def test_when_a_key_was_used_is_written_once_a_minute(path: Path, store: KeyStore) -> None:
    clock = Clock()
    ring = KeyRing(path, store, clock)
    record, key = await store.create(Rights("carol"))
    await ring.look()
    for _ in range(3):
        ring.caller_of(key)
    clock.now += 59
    await ring.look()
    assert await store.used() == {}
    clock.now += 2
    await ring.look()
    assert record.id in await store.used()
    await store.revoke(record.id)
    assert await store.used() == {}


async def test_keys_added_to_the_file_and_taken_out_of_it_take_effect_by_themselves(
    ring: KeyRing, path: Path
) -> None:
    write(path, "tml-three carol\n")
    await soon(lambda: lets_in(ring, "tml-three") and not lets_in(ring, "tml-one"))


def test_a_key_that_is_taken_out_is_out_although_another_line_is_mistyped(
    path: Path, store: KeyStore
) -> None:
    path.write_text("tml-one alice\ntml-two bob\n")
    ring = KeyRing(path, store)
    path.write_text("tml-one alice\ntml-new too many words\n")
    ring.look_at_file()
    assert lets_in(ring, "tml-one")
    assert not lets_in(ring, "tml-two")
    assert not lets_in(ring, "tml-new")
    assert ring.trouble == 1


def test_a_file_that_is_gone_lets_nobody_in_after_a_minute_and_comes_back(
    path: Path, store: KeyStore
) -> None:
    clock = Clock()
    ring = KeyRing(path, store, clock)
    path.unlink()
    clock.now += 59
    with pytest.raises(OSError):
        ring.look_at_file()
    assert lets_in(ring, "tml-one")
    clock.now += 2
    # Nor is it told to be wrong: nobody can tell.
    with pytest.raises(Unavailable, match="file of API keys"):
        ring.caller_of("tml-one")
    with pytest.raises(Unavailable, match="file of API keys"):
        ring.caller_of("tml-other")
    path.write_text("tml-one alice\n")
    ring.look_at_file()
    assert lets_in(ring, "tml-one")


def test_an_edit_that_is_not_done_is_not_taken_over(
    path: Path, store: KeyStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    path.write_text("tml-one alice role=read\n")
    ring = KeyRing(path, store)
    path.write_text("")

    def goes_on(seconds: float) -> None:
        path.write_text("tml-one alice role=rea")

    monkeypatch.setattr(time, "sleep", goes_on)
    with pytest.raises(OSError, match="being written"):
        ring.look_at_file()
    assert ring.caller_of("tml-one").role == "read"
    path.write_text("tml-one bob\n")
    monkeypatch.setattr(time, "sleep", lambda seconds: None)
    ring.look_at_file()
    assert ring.caller_of("tml-one").owner == "bob"


def test_a_file_that_is_written_for_ever_lets_nobody_in_after_a_minute(
    path: Path, store: KeyStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    clock = Clock()
    ring = KeyRing(path, store, clock)
    stamps = itertools.count()
    monkeypatch.setattr(ring, "_file_stamp", lambda: (next(stamps), 0, 0))
    monkeypatch.setattr(time, "sleep", lambda seconds: None)
    clock.now += 61
    with pytest.raises(OSError):
        ring.look_at_file()
    with pytest.raises(Unavailable, match="file of API keys"):
        ring.caller_of("tml-one")


@pytest.mark.parametrize("text", ["", "\n"])
def test_a_file_that_became_empty_counts_as_one_that_cannot_be_read(
    path: Path, store: KeyStore, text: str
) -> None:
    clock = Clock()
    ring = KeyRing(path, store, clock)
    path.write_text(text)
    with pytest.raises(OSError, match="empty"):
        ring.look_at_file()
    assert lets_in(ring, "tml-one")
    clock.now += 61
    with pytest.raises(OSError, match="empty"):
        ring.look_at_file()
    with pytest.raises(Unavailable, match="file of API keys"):
        ring.caller_of("tml-one")
    # Whoever wants no key in it says so.
    path.write_text("# none\n")
    ring.look_at_file()
    with pytest.raises(Unauthenticated):
        ring.caller_of("tml-one")


def test_a_file_that_was_always_empty_is_one_without_keys(path: Path, store: KeyStore) -> None:
    path.write_text("")
    ring = KeyRing(path, store)
    path.write_text("\n")
    ring.look_at_file()
    with pytest.raises(Unauthenticated):
        ring.caller_of("tml-one")


async def test_without_the_file_a_key_of_redis_is_let_in_and_no_other_is_told_to_be_gone(
    path: Path, store: KeyStore
) -> None:
    clock = Clock()
    ring = KeyRing(path, store, clock)
    _, key = await store.create(Rights("carol"))
    clock.now += 61
    await ring.look()
    assert ring.caller_of(key).owner == "carol"
    of_alice = next(record.id for record in ring.of_file if record.owner == "alice")
    with pytest.raises(Unavailable):
        ring.owner_by_id(of_alice)
    ring.look_at_file()
    assert ring.owner_by_id(of_alice) == "alice"
    assert ring.owner_by_id("file:bob") is None


async def test_reads_that_hang_do_not_hold_up_the_look_at_the_file(ring: KeyRing, path: Path) -> None:
    release = threading.Event()
    hanging = [asyncio.create_task(READS.run(release.wait, 30)) for _ in range(40)]
    try:
        await asyncio.sleep(0)
        write(path, "tml-three carol\n")
        await soon(lambda: lets_in(ring, "tml-three"))
    finally:
        release.set()
        await asyncio.gather(*hanging)


def test_a_look_that_took_long_tells_what_was_so_when_it_began(
    path: Path, store: KeyStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    clock = Clock()
    ring = KeyRing(path, store, clock)
    stamp = ring._file_stamp

    def slow() -> tuple[int, int, int]:
        found = stamp()
        clock.now += 61
        return found

    monkeypatch.setattr(ring, "_file_stamp", slow)
    ring.look_at_file()
    assert not lets_in(ring, "tml-one")


def test_a_gateway_does_not_start_on_a_file_with_a_mistake(path: Path, store: KeyStore) -> None:
    path.write_text("tml-one alice\ntml-two\n")
    with pytest.raises(ValueError, match="line 2: the owner's name is missing"):
        KeyRing(path, store)


@pytest.mark.parametrize("key", [None, "", "tml-on", "tml-onee", "alice", "tml-é\udcff"])
async def test_anything_but_a_key_is_refused(ring: KeyRing, key: str | None) -> None:
    with pytest.raises(Unauthenticated):
        ring.caller_of(key)

"""Short-lived tokens that stand for an API key."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import AsyncIterator
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import jwt
import pytest
import redis.asyncio

from services.common.contract.errors import Unauthenticated, Unavailable
from services.common.state import keys
from services.gateway.identity import tokens
from services.gateway.identity.key import Caller, Rights
from services.gateway.identity.key_store import KeyStore
from services.gateway.identity.provider import Provider, ProviderSettings
from services.gateway.identity.ring import KeyRing


@pytest.fixture
def path(tmp_path: Path) -> Path:
    (tmp_path / "keys").write_text("tml-of-file bob role=read\n")
    return tmp_path / "keys"


@pytest.fixture
async def store(redis_client: redis.asyncio.Redis) -> AsyncIterator[KeyStore]:
    await redis_client.flushall()
    yield KeyStore(redis_client)


@pytest.fixture
async def ring(path: Path, store: KeyStore) -> KeyRing:
    made = KeyRing(path, store)
    await made.look()
    return made


async def test_a_token_gives_what_its_key_gives_and_no_more(ring: KeyRing, store: KeyStore) -> None:
    record, key = await store.create(Rights("alice", scopes=("train", "sample")))
    await ring.look()
    of_key = ring.caller_of(key)
    for caller in (of_key, ring.caller_of("tml-of-file")):
        token = ring.token_for(caller)
        found = ring.caller_of(token)
        assert (found.owner, found.role, found.scopes, found.key_id) == (
            caller.owner,
            caller.role,
            caller.scopes,
            caller.key_id,
        )
    claims = jwt.decode(ring.token_for(of_key), options={"verify_signature": False})
    assert claims["exp"] - claims["iat"] == tokens.LIFE_S
    assert (claims["sub"], claims["org_id"], claims["email"]) == ("tinsmith:user:alice", "tinsmith", "alice")
    assert record.digest not in str(claims)


async def test_a_token_ends_with_its_key(ring: KeyRing, store: KeyStore, path: Path) -> None:
    record, key = await store.create(Rights("alice"))
    await ring.look()
    of_key, of_file = ring.token_for(ring.caller_of(key)), ring.token_for(ring.caller_of("tml-of-file"))
    assert [ring.caller_of(token).owner for token in (of_key, of_file)] == ["alice", "bob"]
    await store.revoke(record.id)
    # As the operator is told to replace it: another key, the same owner.
    await asyncio.to_thread(path.write_text, "tml-another bob role=read\n")
    await ring.look()
    ring.look_at_file()
    for token in (of_key, of_file):
        with pytest.raises(Unauthenticated) as caught:
            ring.caller_of(token)
        assert caught.value.code == "invalid_token"


async def test_a_key_that_is_taken_out_while_its_token_is_looked_up_lets_it_in_once_at_most(
    ring: KeyRing, path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    token = ring.token_for(ring.caller_of("tml-of-file"))
    looked_up = ring._looked_up

    def meanwhile(token: str) -> tuple[Caller, float]:
        found = looked_up(token)
        path.write_text("tml-another bob role=read\n")
        reader = threading.Thread(target=ring.look_at_file)
        reader.start()
        reader.join()
        return found

    monkeypatch.setattr(ring, "_looked_up", meanwhile)
    ring.caller_of(token)
    monkeypatch.undo()
    with pytest.raises(Unauthenticated):
        ring.caller_of(token)


async def test_a_token_that_was_taken_ends_when_its_key_is_given_an_end(ring: KeyRing, path: Path) -> None:
    token = ring.token_for(ring.caller_of("tml-of-file"))
    assert ring.caller_of(token).owner == "bob"
    await asyncio.to_thread(path.write_text, "tml-of-file bob role=read expires=2020-01-31\n")
    ring.look_at_file()
    with pytest.raises(Unauthenticated):
        ring.caller_of(token)


async def test_a_token_that_was_taken_is_not_while_redis_is_away(store: KeyStore, path: Path) -> None:
    now = 0.0
    ring = KeyRing(path, store, clock=lambda: now)
    await ring.look()
    token = ring.token_for(ring.caller_of("tml-of-file"))
    assert ring.caller_of(token).owner == "bob"
    now = 40.0
    with pytest.raises(Unavailable):
        ring.caller_of(token)


async def test_a_token_lasts_no_longer_than_what_it_was_made_for(ring: KeyRing) -> None:
    until = int(time.time()) + 100
    of_file = ring.caller_of("tml-of-file")
    token = ring.token_for(replace(of_file, until=until))
    assert ring.caller_of(token).until == until
    # Nor is it made to last longer by another one.
    assert ring.caller_of(ring.token_for(ring.caller_of(token))).until == until
    with pytest.raises(Unauthenticated, match="expired"):
        ring.token_for(replace(of_file, until=time.time() - 10))


def test_a_long_word_is_no_token_and_is_not_read(ring: KeyRing) -> None:
    with pytest.raises(Unauthenticated, match="characters"):
        ring.caller_of("eyJ" * 10_000)


async def test_what_the_gateways_did_not_sign_is_no_token(
    ring: KeyRing, redis_client: redis.asyncio.Redis
) -> None:
    token = ring.token_for(ring.caller_of("tml-of-file"))
    claims = jwt.decode(token, options={"verify_signature": False})
    head, body, signature = token.split(".")
    raised = jwt.encode({**claims, "role": "admin"}, "x" * 32, "HS256").split(".")[1]
    forged = [
        jwt.encode(claims, "x" * 32, "HS256"),
        jwt.encode(claims, None, "none"),
        f"{head}.{raised}.{signature}",
        f"{head}.{body}.",
        f"{head}.{body}",
        "eyJ",
    ]
    for wrong in forged:
        with pytest.raises(Unauthenticated):
            ring.caller_of(wrong)
    # Another secret ends all tokens.
    await redis_client.delete(keys.TOKEN_SECRET)
    await ring.look()
    with pytest.raises(Unauthenticated):
        ring.caller_of(token)
    assert ring.caller_of("tml-of-file").owner == "bob"


async def test_gateways_take_each_others_tokens(ring: KeyRing, store: KeyStore, path: Path) -> None:
    other = KeyRing(path, store)
    token = ring.token_for(ring.caller_of("tml-of-file"))
    with pytest.raises(Unavailable):
        other.caller_of(token)
    await other.look()
    assert other.caller_of(token).owner == "bob"


async def test_tokens_of_a_provider_are_taken_where_one_is_set(
    ring: KeyRing, store: KeyStore, path: Path
) -> None:
    theirs = jwt.encode({"sub": "alice"}, "x" * 48, "HS384")
    with pytest.raises(Unauthenticated, match="takes no tokens"):
        ring.caller_of(theirs)
    settings = ProviderSettings("https://i", "a", "http://127.0.0.1:1/")
    having = KeyRing(path, store, provider=Provider(settings))
    await having.look()
    # What it is exchanged for stands while the provider does.
    own = having.token_for(Caller("alice", "user", (), "provider:alice", time.time() + 60))
    assert having.caller_of(own).owner == "alice"
    assert having.owner_by_id("provider:alice") == "alice"
    with pytest.raises(Unauthenticated):
        ring.caller_of(own)
    assert ring.owner_by_id(ring.caller_of("tml-of-file").key_id) == "bob"


async def test_without_memory_in_redis_keys_are_let_in_and_no_token_is_made(
    path: Path, store: KeyStore, redis_client: redis.asyncio.Redis
) -> None:
    ring = KeyRing(path, store)
    await redis_client.config_set("maxmemory", "1")
    try:
        await ring.look()
        with pytest.raises(Unavailable, match="memory"):
            ring.token_for(ring.caller_of("tml-of-file"))
    finally:
        await redis_client.config_set("maxmemory", "0")


def test_a_token_that_was_taken_once_is_not_taken_after_its_end(
    ring: KeyRing, monkeypatch: pytest.MonkeyPatch
) -> None:
    token = ring.token_for(ring.caller_of("tml-of-file"))
    assert ring.caller_of(token).owner == ring.caller_of(token).owner == "bob"
    later = time.time() + tokens.LIFE_S
    monkeypatch.setattr(tokens, "time", SimpleNamespace(time=lambda: later))
    with pytest.raises(Unauthenticated, match="expired"):
        ring.caller_of(token)

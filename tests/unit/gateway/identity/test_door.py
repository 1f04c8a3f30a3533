"""Refusals: counted, logged without the key, and slowed by address."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

import pytest
import redis.asyncio

from services.common.contract.errors import Overloaded, PermissionDenied, Unauthenticated, Unavailable
from services.gateway.identity import door as doors
from services.gateway.identity.door import REFUSALS, Door, address_of
from services.gateway.identity.key_store import KeyStore
from services.gateway.identity.ring import KeyRing


@pytest.fixture
def pauses(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """How long refusals waited; nothing really waits."""
    found: list[float] = []

    async def pause(seconds: float) -> None:
        found.append(seconds)

    monkeypatch.setattr(doors.asyncio, "sleep", pause)
    return found


@pytest.fixture
def door(tmp_path: Path, redis_client: redis.asyncio.Redis, pauses: list[float]) -> Door:
    path = tmp_path / "keys"
    path.write_text("tml-one-that-is-right alice\ntml-read alice role=read\n")
    return Door(KeyRing(path, KeyStore(redis_client)), lambda *refusal: None, clock=lambda: 0.0)


async def refused(door: Door, address: str, key: str = "tml-wrong-and-secret") -> None:
    with pytest.raises(Unauthenticated):
        await door.enter(key, "ListModels", address)


def count(code: str) -> float:
    return REFUSALS.labels(code)._value.get()


async def test_a_wrong_key_is_counted_and_not_written_down(
    door: Door, caplog: pytest.LogCaptureFixture
) -> None:
    before = count("unauthenticated")
    with caplog.at_level(logging.WARNING):
        await refused(door, "10.0.0.1")
    assert count("unauthenticated") == before + 1
    assert "10.0.0.1" in caplog.text
    assert "tml-wro" in caplog.text
    assert "secret" not in caplog.text


async def test_a_key_that_may_not_is_told_what_it_lacks_and_counted(door: Door) -> None:
    before = count("role_missing")
    with pytest.raises(PermissionDenied, match="role user or admin"):
        await door.enter("tml-read", "OptimStep", "10.0.0.1")
    assert count("role_missing") == before + 1


async def test_a_token_that_nobody_can_look_at_is_slowed_as_one_that_is_made_up_and_is_no_refusal(
    door: Door, pauses: list[float], caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    told: list[str] = []
    monkeypatch.setattr(door, "_refused", lambda error, *_: told.append(error.code))
    before = count("unavailable")
    with caplog.at_level(logging.WARNING):
        for _ in range(12):
            with pytest.raises(Unavailable):
                await door.enter("eyJhbGciOiJIUzI1NiIsInR5cCI6IkpXVCJ9.e30.x", "ListModels", "10.0.0.1")
    assert (len(pauses), told, caplog.messages) == (2, [], [])
    assert count("unavailable") == before


async def test_an_address_that_sends_wrong_keys_waits_and_others_do_not(
    door: Door, pauses: list[float]
) -> None:
    for _ in range(12):
        await refused(door, "10.0.0.1")
    assert len(pauses) == 2
    await refused(door, "10.0.0.2")
    assert len(pauses) == 2
    assert (await door.enter("tml-one-that-is-right", "ListModels", "10.0.0.1")).owner == "alice"
    assert len(pauses) == 2


async def test_a_right_key_that_may_not_is_never_slowed_and_logged_a_few_times(
    door: Door, pauses: list[float], caplog: pytest.LogCaptureFixture
) -> None:
    before = count("role_missing")
    with caplog.at_level(logging.WARNING):
        for _ in range(30):
            with pytest.raises(PermissionDenied):
                await door.enter("tml-read", "OptimStep", "10.0.0.1")
    assert pauses == []
    assert count("role_missing") == before + 30
    assert len(caplog.records) == 10
    # Nor did it use up what wrong keys get at its address.
    for _ in range(10):
        await refused(door, "10.0.0.1")
    assert pauses == []


async def test_all_addresses_of_one_client_of_ipv6_are_one(door: Door, pauses: list[float]) -> None:
    for last in range(12):
        await refused(door, f"2001:db8::{last:x}")
    assert len(pauses) == 2


async def test_what_is_remembered_of_addresses_is_bounded(door: Door, monkeypatch: Any) -> None:
    monkeypatch.setattr(doors, "_ADDRESSES", 3)
    for last in range(20):
        await refused(door, f"10.0.0.{last}")
    assert len(door._left) == 3


async def test_only_so_many_wait(door: Door, monkeypatch: Any) -> None:
    monkeypatch.setattr(doors, "_WAITING", 0)
    for _ in range(10):
        await refused(door, "10.0.0.1")
    with pytest.raises(Overloaded):
        await door.enter("tml-wrong", "ListModels", "10.0.0.1")


def test_the_address_of_a_peer_of_grpc() -> None:
    assert address_of("ipv4:10.0.0.1:4321") == "10.0.0.1"
    assert address_of("ipv6:%5B::1%5D:4321") == "::1"
    assert address_of("unix:/run/x") == "unix:/run/x"

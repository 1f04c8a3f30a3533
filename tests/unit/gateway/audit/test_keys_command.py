"""What `tinsmith keys` does is written down too, by whom and of which key."""

from __future__ import annotations

import argparse
import asyncio

import pytest

from services.common.state import redis_client
from services.gateway import keys_command
from services.gateway.audit.pages import Window
from services.gateway.audit.record import AuditRecord, of_type
from services.gateway.audit.store import AuditStore


async def kept(url: str) -> list[AuditRecord]:
    client = redis_client.connect(url)
    try:
        return (await AuditStore(client).page(None, Window(), 10, None, of_type("all"), False)).records
    finally:
        await client.aclose()


async def emptied(url: str) -> None:
    client = redis_client.connect(url)
    await client.flushall()
    await client.aclose()


def test_keys_that_a_command_makes_and_ends_are_written_down_without_the_key(
    redis_url: str, capsys: pytest.CaptureFixture[str]
) -> None:
    asyncio.run(emptied(redis_url))
    parser = argparse.ArgumentParser()
    keys_command.add_commands(parser)

    def run(*words: str) -> str:
        keys_command.run(parser.parse_args(words), redis_url)
        return capsys.readouterr().out.strip()

    first = run("create", "alice", "--role", "read")
    first_id = first.split("-")[1]
    second = run("rotate", first_id)
    run("revoke", second.split("-")[1])
    run("list")
    found = asyncio.run(kept(redis_url))
    assert [(one.event, one.object) for one in found] == [
        ("key_create", first_id),
        ("key_rotate", first_id),
        ("key_revoke", second.split("-")[1]),
    ]
    assert {(one.owner, one.outcome) for one in found} == {("operator", "ok")}
    assert found[0].details["role"] == "read" and found[0].details["user"]
    assert first not in repr(found) and second not in repr(found)

"""The embedded Redis does what its options say."""

from __future__ import annotations

import re
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
import redis

from services.common.state import keys
from services.launcher import machine, redis_server


@pytest.mark.parametrize("appendfsync", ["always", "everysec"])
def test_the_server_syncs_its_file_as_asked_and_keeps_to_its_memory(tmp_path: Path, appendfsync: str) -> None:
    process, urls = redis_server.prepare(tmp_path, machine.free_port(), appendfsync, 700 << 20)
    server = subprocess.Popen(process.argv, stdout=subprocess.DEVNULL)
    try:
        with redis.Redis.from_url(urls["operator"]) as client:
            deadline = time.monotonic() + 60
            while True:
                try:
                    asked = {"appendfsync": appendfsync, "maxmemory": str(700 << 20)}
                    wanted = {**asked, "maxmemory-policy": "noeviction"}
                    assert client.config_get(*wanted) == wanted
                    return
                except redis.ConnectionError:
                    assert time.monotonic() < deadline
                    time.sleep(0.02)
    finally:
        server.terminate()
        server.wait(60)


@pytest.fixture
def users(tmp_path: Path) -> Iterator[dict[str, redis.Redis]]:
    """A client of each user of a running server."""
    process, urls = redis_server.prepare(tmp_path, machine.free_port(), "everysec", 700 << 20)
    server = subprocess.Popen(process.argv, stdout=subprocess.DEVNULL)
    clients = {role: redis.Redis.from_url(url) for role, url in urls.items()}
    try:
        deadline = time.monotonic() + 60
        while True:
            try:
                clients["operator"].ping()
                break
            except redis.ConnectionError:
                assert time.monotonic() < deadline
                time.sleep(0.02)
        yield {str(role): client for role, client in clients.items()}
    finally:
        for client in clients.values():
            client.close()
        server.terminate()
        server.wait(60)


def test_who_has_no_password_is_nobody(users: dict[str, redis.Redis]) -> None:
    address = users["operator"].connection_pool.connection_kwargs
    for name, password in ((None, None), ("default", ""), ("default", "guess"), ("gateway", "guess")):
        nobody = redis.Redis(host="127.0.0.1", port=address["port"], username=name, password=password)
        with nobody, pytest.raises((redis.AuthenticationError, redis.ResponseError)):
            nobody.get("tinsmith:x")


SHARED = (
    keys.CONTRACT,
    keys.POISON,
    keys.BASE_MODELS,
    keys.weight_turn("org/base"),
    keys.weight_epoch("org/base"),
)


@pytest.mark.parametrize(
    ("user", "key", "may"),
    [
        ("gateway", keys.session("s"), True),
        ("gateway", "other:s", False),
        ("trainer", keys.journal("s:train:0"), True),
        ("trainer", keys.HELD_BYTES, True),
        ("trainer", keys.session("s"), False),
        ("trainer", keys.DOWNLOAD_SECRET, False),
        *((user, key, True) for user in ("trainer", "sampler") for key in SHARED),
        ("sampler", keys.services("sampler"), True),
        ("sampler", keys.weight_store("org/base", 3), True),
        ("sampler", keys.claim("sampler", "sampler-0"), True),
        ("sampler", keys.journal("s:train:0"), False),
        ("sampler", keys.claim("gateway", "gateway-0"), False),
        ("operator", "anything", True),
    ],
)
def test_a_service_has_the_keys_that_it_needs(
    users: dict[str, redis.Redis], user: str, key: str, may: bool
) -> None:
    if may:
        users[user].hset(key, "field", "value")
        assert users[user].hget(key, "field") == b"value"
    else:
        with pytest.raises(redis.exceptions.NoPermissionError):
            users[user].hget(key, "field")


@pytest.mark.parametrize("user", ["gateway", "trainer", "sampler"])
@pytest.mark.parametrize(
    "command",
    ["FLUSHALL", "KEYS *", "CONFIG GET dir", "ACL LIST", "SHUTDOWN", "BGREWRITEAOF", "SCRIPT FLUSH"],
)
def test_no_service_may_what_is_the_operators(users: dict[str, redis.Redis], user: str, command: str) -> None:
    with pytest.raises(redis.exceptions.NoPermissionError):
        users[user].execute_command(*command.split())


COMMANDS = re.compile(r"redis\.p?call\('([A-Za-z]+)'")


def test_every_command_of_a_script_is_allowed_to_those_who_run_scripts(users: dict[str, redis.Redis]) -> None:
    """A dry run asks the rules alone."""
    scripts = (Path(keys.__file__).parent / "lua").glob("*.lua")
    used = {name.upper() for script in scripts for name in COMMANDS.findall(script.read_text())}
    assert {"HSET", "TIME", "PUBLISH"} <= used
    categories = {
        name: {category.decode() for category in users["operator"].execute_command("ACL", "CAT", name)}
        for name in ("dangerous", "read", "write", "pubsub")
    }
    for command in used - {"TIME"}:
        name = command.lower()
        assert name not in categories["dangerous"], command
        assert any(name in categories[one] for one in ("read", "write", "pubsub")), command


def test_the_server_takes_a_quarter_of_the_memory_there_is() -> None:
    assert redis_server.memory_share(64 << 30) == 16 << 30
    assert redis_server.memory_share(1 << 30) == 512 << 20

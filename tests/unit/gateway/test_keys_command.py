"""`tinsmith keys`: keys from the command line."""

from __future__ import annotations

import asyncio
import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from services.common.state import redis_client
from services.gateway.identity import keys_file
from services.gateway.identity.key_store import KeyStore
from services.gateway.identity.ring import KeyRing
from services.launcher import cli

Tinsmith = Callable[..., tuple[int, str, str]]


@pytest.fixture
def tinsmith(redis_url: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Tinsmith:
    """Runs a command: status, output, errors."""
    monkeypatch.setenv("TINSMITH_REDIS_URL", redis_url)

    async def flush() -> None:
        client = redis_client.connect(redis_url)
        await client.flushall()
        await client.aclose()

    asyncio.run(flush())

    def run(*arguments: str) -> tuple[int, str, str]:
        status = cli.main(["keys", *arguments])
        said = capsys.readouterr()
        return status, said.out, said.err

    return run


def owner_of(redis_url: str, directory: Path, key: str) -> str:
    async def ask() -> str:
        (directory / "keys").touch()
        client = redis_client.connect(redis_url)
        try:
            ring = KeyRing(directory / "keys", KeyStore(client))
            await ring.look()
            return ring.caller_of(key).owner
        finally:
            await client.aclose()

    return asyncio.run(ask())


def test_a_key_is_printed_once_and_lets_its_owner_in(
    tinsmith: Tinsmith, redis_url: str, tmp_path: Path
) -> None:
    status, out, said = tinsmith("create", "carol", "--role", "read", "--scope", "train", "--note", "ci")
    assert status == 0
    key = out.strip()
    assert key not in said
    assert owner_of(redis_url, tmp_path, key) == "carol"
    status, out, _ = tinsmith("list")
    assert status == 0
    assert "carol" in out
    assert key not in out


def test_a_key_is_rotated_and_revoked_by_its_id(tinsmith: Tinsmith, redis_url: str, tmp_path: Path) -> None:
    tinsmith("create", "carol", "--expires-in", "90d")
    (row,) = json.loads(tinsmith("list", "--json")[1])
    assert row["expires_at"] - row["created_at"] == pytest.approx(90 * 86400, abs=5)
    _, out, _ = tinsmith("rotate", row["id"])
    assert owner_of(redis_url, tmp_path, out.strip()) == "carol"
    (row,) = json.loads(tinsmith("list", "--json")[1])
    assert tinsmith("revoke", row["id"])[0] == 0
    assert json.loads(tinsmith("list", "--json")[1]) == []
    status, _, said = tinsmith("revoke", row["id"])
    assert status == 1
    assert "no API key has the id" in said


def test_a_line_for_a_file_lets_its_key_in_and_does_not_hold_it(tinsmith: Tinsmith) -> None:
    status, out, said = tinsmith("create", "carol", "--for-file")
    assert status == 0
    key, line = out.strip(), said.splitlines()[-1]
    assert key not in said
    found = keys_file.parse(line).find(key)
    assert found is not None
    assert found.owner == "carol"
    assert json.loads(tinsmith("list", "--json")[1]) == []


@pytest.mark.parametrize("time", ["90", "0d", "d", "-1h", "1w"])
def test_a_time_that_cannot_be_read_is_refused(tinsmith: Tinsmith, time: str) -> None:
    with pytest.raises(SystemExit) as ended:
        tinsmith("create", "carol", f"--expires-in={time}")
    assert ended.value.code == 2


def test_an_owner_that_cannot_be_is_refused(tinsmith: Tinsmith) -> None:
    status, out, said = tinsmith("create", "a b")
    assert (status, out) == (2, "")
    assert "cannot be an owner's name" in said


def test_the_command_needs_nothing_of_a_gateway_to_start() -> None:
    """`tinsmith` also runs where only its clients are installed."""
    missing = "import sys; sys.modules.update(dict.fromkeys(['uvicorn', 'starlette', 'cachetools', 'numpy']))"
    done = subprocess.run([sys.executable, "-c", f"{missing}; import services.launcher.cli"], timeout=120)
    assert done.returncode == 0

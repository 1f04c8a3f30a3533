"""Commands as Redis reads them."""

from __future__ import annotations

import pytest
import redis.asyncio
from redis.asyncio.connection import Connection
from redis.exceptions import ResponseError

from services.common.state.redis_client import Argument, packed, round_trip


@pytest.mark.parametrize(
    "command",
    [
        ("GET", "key"),
        ("SCRIPT LOAD", "return 1"),
        (b"CONFIG GET", "maxmemory"),
        ("SET", "käy", b"\x00\r\n\xff", "EX", 3, 0.25, -1),
        ("SET", "", b""),
        ("SET", 1e-7, 2**70, 1e22, 123456789.123),
    ],
)
def test_a_command_is_the_bytes_that_the_client_library_makes(command: tuple[Argument, ...]) -> None:
    assert packed(command) == b"".join(Connection().pack_command(*command))


@pytest.mark.parametrize("wrong", [True, None, ["a"]])
def test_what_redis_has_no_form_of_is_refused(wrong: object) -> None:
    with pytest.raises(TypeError):
        packed(("SET", "a", wrong))  # type: ignore[arg-type]


async def test_redis_reads_them(redis_client: redis.asyncio.Redis) -> None:
    pipeline = redis_client.pipeline(transaction=False)
    pipeline.set("a", bytes(100_000))
    pipeline.set("b", "ü", ex=60)
    pipeline.strlen("a")
    pipeline.get("b")
    assert (await pipeline.execute())[2:] == [100_000, "ü".encode()]


async def test_a_large_argument_is_not_copied(redis_client: redis.asyncio.Redis) -> None:
    connection = await redis_client.connection_pool.get_connection()
    large = bytes(10_000)
    pieces = connection.pack_commands([("GET", "a"), ("SET", "a", large)])
    assert any(piece is large for piece in pieces)
    assert b"".join(pieces) == b"".join(Connection().pack_commands([("GET", "a"), ("SET", "a", large)]))
    await redis_client.connection_pool.release(connection)


async def test_commands_of_one_round_trip_have_their_own_replies_and_errors(
    any_redis: redis.asyncio.Redis,
) -> None:
    commands: list[tuple[Argument, ...]] = [("SET", "a", "text"), ("INCR", "a"), ("GET", "a"), ("GET", "b")]
    done, refused, found, nothing = await round_trip(any_redis, [packed(one) for one in commands])
    assert (done, found, nothing) == (b"OK", b"text", None)
    assert isinstance(refused, ResponseError)
    assert await any_redis.get("a") == b"text"


async def test_replies_that_come_together_and_apart_are_all_read(redis_client: redis.asyncio.Redis) -> None:
    await redis_client.set("a", bytes(100_000))
    many = [packed(("GET", "a")), *(packed(("ECHO", str(number))) for number in range(1000))] * 3
    found = await round_trip(redis_client, many)
    assert found == [bytes(100_000), *(str(number).encode() for number in range(1000))] * 3

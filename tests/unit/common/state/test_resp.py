"""Commands as Redis reads them."""

from __future__ import annotations

import pytest
import redis.asyncio
from redis.asyncio.connection import Connection

from services.common.state.resp import Argument, packed


@pytest.mark.parametrize(
    "command",
    [
        ("GET", "key"),
        ("SCRIPT LOAD", "return 1"),
        (b"CONFIG GET", "maxmemory"),
        ("SET", "käy", b"\x00\r\n\xff", "EX", 3, 0.25, -1),
        ("SET", "", b""),
        ("SET", "large", bytes(20_000), "after", bytes(6000), bytes(6001)),
    ],
)
def test_a_command_is_the_bytes_that_the_client_library_makes(command: tuple[Argument, ...]) -> None:
    assert b"".join(packed([command])) == b"".join(Connection().pack_command(*command))


def test_commands_go_one_after_the_other() -> None:
    commands = [("GET", "a"), ("SET", "b", bytes(7000)), ("GET", "c")]
    assert b"".join(packed(commands)) == b"".join(Connection().pack_commands(commands))
    assert packed([]) == []


def test_a_large_argument_is_not_copied() -> None:
    large = bytes(10_000)
    assert any(piece is large for piece in packed([("SET", "a", large)]))


@pytest.mark.parametrize("wrong", [True, None, ["a"]])
def test_what_redis_has_no_form_of_is_refused(wrong: object) -> None:
    with pytest.raises(TypeError, match="Redis takes no"):
        packed([("SET", "a", wrong)])  # type: ignore[list-item]


async def test_redis_reads_them(redis_client: redis.asyncio.Redis) -> None:
    pipeline = redis_client.pipeline(transaction=False)
    pipeline.set("a", bytes(100_000))
    pipeline.set("b", "ü", ex=60)
    pipeline.strlen("a")
    pipeline.get("b")
    assert (await pipeline.execute())[2:] == [100_000, "ü".encode()]

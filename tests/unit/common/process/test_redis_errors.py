"""Failures of Redis, told to who asked for something."""

from __future__ import annotations

import pytest
from redis.exceptions import ConnectionError as NoConnection
from redis.exceptions import OutOfMemoryError, RedisError, ResponseError

from services.common.contract.errors import Overloaded, TinsmithError, Unavailable
from services.common.process.redis_errors import typed


@pytest.mark.parametrize(
    "error, kind, told",
    [
        (OutOfMemoryError("command not allowed"), Overloaded, "memory of the state store is used up"),
        (ResponseError("MISCONF Errors writing to the AOF file: No space"), Unavailable, "write to its disk"),
        (NoConnection("Error 111 connecting to 10.0.0.1:6379"), Unavailable, "cannot be reached"),
    ],
)
def test_what_redis_lacks_is_told_and_not_where_it_is(
    error: RedisError, kind: type[TinsmithError], told: str
) -> None:
    found = typed(error)
    assert type(found) is kind
    assert told in found.message and "10.0.0.1" not in found.message

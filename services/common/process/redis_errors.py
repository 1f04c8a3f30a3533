"""What a failure of Redis is to who asked for something. The one mapping, for both edges."""

from __future__ import annotations

from redis.exceptions import OutOfMemoryError, RedisError

from services.common.contract.errors import Overloaded, TinsmithError, Unavailable


def typed(error: RedisError) -> TinsmithError:
    """The error to answer with. Its text says nothing of addresses."""
    if isinstance(error, OutOfMemoryError):
        return Overloaded(
            "the memory of the state store is used up; send this again later, or have the operator raise "
            "maxmemory of Redis"
        )
    if "MISCONF" in str(error):
        return Unavailable("the state store cannot write to its disk, which may be full; try again later")
    return Unavailable("the state store cannot be reached; try again in a moment")

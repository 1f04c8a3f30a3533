"""A Redis that has no memory left."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import pytest
import redis.asyncio
from redis.exceptions import OutOfMemoryError


@asynccontextmanager
async def full(client: redis.asyncio.Redis) -> AsyncIterator[None]:
    """Without memory for anything new."""
    await client.config_set("maxmemory", 1)
    try:
        with pytest.raises(OutOfMemoryError):
            await client.set("new", "")
        yield
    finally:
        await client.config_set("maxmemory", 0)

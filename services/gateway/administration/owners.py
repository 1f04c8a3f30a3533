"""What each owner has of a cluster.

Invariant: what is counted here is what the limits are compared with.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import redis.asyncio

from services.common.state import keys


@dataclass(frozen=True)
class Use:
    """What an owner has. Bytes are those that the limits count.

    Attributes:
        waiting_operations: that are accepted and not done.
        state_bytes: requests, results and records in Redis.
        snapshot_bytes: sampler snapshots without a name.
    """

    owner: str
    sessions: int
    models: int
    checkpoints: int
    checkpoint_bytes: int
    waiting_operations: int
    state_bytes: int
    snapshot_bytes: int


async def page(client: redis.asyncio.Redis, entries: int, after: str) -> tuple[list[Use], bool]:
    """What owners have, by name, from a name on; whether there are more."""
    found: Any = await client.smembers(keys.OWNERS)
    later = sorted(name for name in (raw.decode() for raw in found) if name > after)
    return await of(client, later[:entries]), len(later) > entries


async def of(client: redis.asyncio.Redis, names: Sequence[str]) -> list[Use]:
    """What these owners have, in one round trip."""
    pipeline = client.pipeline(transaction=False)
    for owner in names:
        pipeline.zcard(keys.owner_sessions(owner))
        pipeline.zcard(keys.owner_models(owner))
        pipeline.zcard(keys.owner_checkpoints(owner))
        pipeline.hget(keys.owner_checkpoint_bytes(owner), "total")
        pipeline.hget(keys.WAITING_OPERATIONS, owner)
        pipeline.hget(keys.HELD_BYTES, owner)
        pipeline.hget(keys.SNAPSHOT_BYTES, owner)
    replies: Any = await pipeline.execute()
    each = len(replies) // len(names) if names else 0
    rows = [replies[start : start + each] for start in range(0, len(replies), each or 1)]
    return [Use(owner, *(int(value or 0) for value in row)) for owner, row in zip(names, rows, strict=True)]

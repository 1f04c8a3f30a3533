"""The registry as tests without an event loop read and write it."""

from __future__ import annotations

import time
from typing import Any

import msgspec
import redis

from services.common.state import keys
from services.common.state.registry import TTL_S, ServiceRecord


def announced(client: redis.Redis, kind: str) -> list[ServiceRecord]:
    """Records of the live services of a kind."""
    now: Any = client.time()
    since = (now[0] + now[1] / 1e6 - TTL_S) * 1000
    ids: Any = client.zrangebyscore(keys.services_seen(kind), since, "+inf")
    found: Any = client.hmget(keys.services(kind), ids) if ids else []
    records = [msgspec.json.decode(raw, type=ServiceRecord) for raw in found if raw is not None]
    return [record for record in records if record.state != "stopped"]


def find(client: redis.Redis, kind: str, name: str) -> ServiceRecord | None:
    """The record of one service while it is live."""
    return next((record for record in announced(client, kind) if record.id == name), None)


def announce(client: redis.Redis, record: ServiceRecord, seconds: float) -> None:
    """Has a service be live for so long."""
    client.hset(keys.services(record.kind), record.id, msgspec.json.encode(record))
    until = (time.time() + seconds - TTL_S) * 1000
    client.zadd(keys.services_seen(record.kind), {record.id: until})


def withdraw(client: redis.Redis, kind: str, name: str) -> None:
    """Has a service be live no more."""
    client.zrem(keys.services_seen(kind), name)
    client.hdel(keys.services(kind), name)

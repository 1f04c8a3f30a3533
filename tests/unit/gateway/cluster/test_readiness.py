"""A gateway is ready when its requests can come to something."""

from __future__ import annotations

import pytest
import redis.asyncio

from services.common.contract.errors import Unavailable
from services.common.state import keys
from services.common.state import redis_client as clients
from services.gateway.cluster.readiness import Readiness


async def test_a_gateway_is_ready_while_redis_takes_writes(redis_client: redis.asyncio.Redis) -> None:
    await Readiness(redis_client, "gateway-0", lambda: "").check()
    assert await redis_client.get(keys.gateway_probe("gateway-0")) == b"1"


async def test_a_gateway_without_redis_is_not_ready() -> None:
    client = clients.connect("redis://127.0.0.1:1/0")
    with pytest.raises(Unavailable, match="takes no writes"):
        await Readiness(client, "gateway-0", lambda: "").check()
    await client.aclose()


async def test_a_gateway_that_cannot_lead_models_is_not_ready(redis_client: redis.asyncio.Redis) -> None:
    troubles = ["leases were not renewed for 20 s"]
    readiness = Readiness(redis_client, "gateway-0", lambda: troubles[0])
    with pytest.raises(Unavailable, match="leases were not renewed"):
        await readiness.check()
    troubles[0] = ""
    await readiness.check()

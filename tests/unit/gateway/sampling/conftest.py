"""Gateways that dispatch samples."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import AsyncExitStack
from typing import Any

import pytest
import redis.asyncio

from services.gateway.records.sampling_session import SamplingSessionRecord
from services.gateway.records.stores import Stores
from services.gateway.sampling import dispatcher as module
from tests.unit.gateway.sampling.dispatching import (
    SESSION,
    Gateway,
    GatewayFactory,
    started,
)
from tests.unit.gateway.scripted_services import BASE


@pytest.fixture
async def gateway_on(
    redis_client: redis.asyncio.Redis, monkeypatch: pytest.MonkeyPatch
) -> AsyncIterator[GatewayFactory]:
    """Starts gateways, and stops them after the test."""
    monkeypatch.setattr(module, "_AUDIT_S", 0.1)
    await Stores.over(redis_client).sampling_sessions.create_if_absent(
        SamplingSessionRecord(sampling_session_id=SESSION, session_id="s", owner="ann", base_model=BASE)
    )
    async with AsyncExitStack() as running:

        async def start(name: str = "gateway-0", **settings: Any) -> Gateway:
            return await running.enter_async_context(started(redis_client, name, **settings))

        yield start

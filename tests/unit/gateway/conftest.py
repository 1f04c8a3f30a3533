"""What the gateway's tests share: both edges over a real Redis, and gateways that dispatch."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import AsyncExitStack
from pathlib import Path

import pytest
import redis.asyncio

from services.common.state import registry
from services.common.state.journal import Journal
from services.gateway.access.limits import Limits
from services.gateway.dispatch.plan import DispatchSettings
from tests.unit.gateway import dispatching
from tests.unit.gateway.dispatching import SETTINGS, GatewayFactory, started
from tests.unit.gateway.edges import Edges, running
from tests.unit.gateway.scripted_services import ScriptedTrainer


@pytest.fixture(autouse=True)
def announced_for_long(monkeypatch: pytest.MonkeyPatch) -> None:
    """A service of these tests announces itself in the loop of all else. It is not gone when a loaded machine
    has that stand still for as long as a record lives."""
    monkeypatch.setattr(registry, "TTL_S", 300.0)


@pytest.fixture
def limits() -> Limits:
    """Of the edges; a module that needs others defines its own."""
    return Limits()


@pytest.fixture
async def edges(redis_url: str, tmp_path: Path, limits: Limits) -> AsyncIterator[Edges]:
    async with running(redis_url, tmp_path, limits) as found:
        yield found


@pytest.fixture
async def gateway_on(redis_client: redis.asyncio.Redis) -> AsyncIterator[GatewayFactory]:
    """Starts gateways, and stops them after the test."""
    async with AsyncExitStack() as running:

        async def start(
            name: str = "gateway-0", settings: DispatchSettings = SETTINGS, ttl: float = 6.0
        ) -> dispatching.Gateway:
            return await running.enter_async_context(started(redis_client, name, settings, ttl))

        yield start


@pytest.fixture
async def gateway(gateway_on: GatewayFactory) -> dispatching.Gateway:
    """One that runs."""
    return await gateway_on()


@pytest.fixture
def trainer(redis_client: redis.asyncio.Redis) -> ScriptedTrainer:
    return ScriptedTrainer(Journal(redis_client), {})

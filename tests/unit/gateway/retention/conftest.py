"""What the tests of retention share."""

from __future__ import annotations

from collections.abc import AsyncIterator
from pathlib import Path

import pytest
import redis.asyncio

from services.common.state.journal import Journal
from services.common.storage.data_dir import DataDir
from tests.unit.gateway.retention.stage import Stage
from tests.unit.gateway.scripted_services import ScriptedTrainer, serving


@pytest.fixture
def data(tmp_path: Path) -> DataDir:
    return DataDir(tmp_path)


@pytest.fixture
async def stage(redis_client: redis.asyncio.Redis, data: DataDir) -> AsyncIterator[Stage]:
    trainer = ScriptedTrainer(Journal(redis_client), {})
    async with serving(redis_client, trainer, "trainer-0"):
        made = Stage(redis_client, trainer, data)
        parts = (made.futures, made.discovery, made.dispatcher)
        for part in parts:
            await part.start()
        yield made
        for part in reversed(parts):
            await part.stop()

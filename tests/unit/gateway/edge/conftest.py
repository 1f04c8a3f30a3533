"""A gateway whose sampler says what a test has it say."""

from __future__ import annotations

from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from tests.unit.gateway.edge.talking import Talking, talking


@pytest.fixture
async def talks(redis_url: str, tmp_path: Path) -> AsyncIterator[Talking]:
    async with talking(redis_url, tmp_path) as found:
        yield found

"""A gateway for the Python client."""

from __future__ import annotations

from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from tests.unit.gateway.edges import Edges, running


@pytest.fixture
async def edges(redis_url: str, tmp_path: Path) -> AsyncIterator[Edges]:
    async with running(redis_url, tmp_path) as found:
        yield found

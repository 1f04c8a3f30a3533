"""Snapshots around an engine that records what is asked of it."""

from __future__ import annotations

from pathlib import Path

import pytest

from services.sampler.snapshots.snapshots import Snapshots
from tests.unit.sampler.snapshots.recorded import Engine, around


@pytest.fixture
def engine() -> Engine:
    return Engine()


@pytest.fixture
def snapshots(engine: Engine, tmp_path: Path) -> Snapshots:
    return around(engine, tmp_path)

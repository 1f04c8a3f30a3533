"""Snapshots around an engine that records what is asked of it."""

from __future__ import annotations

from pathlib import Path

import pytest

from services.common.storage.data_dir import DataDir
from services.sampler.snapshots.full_snapshots import FullSnapshots
from services.sampler.snapshots.snapshots import Snapshots
from services.sampler.snapshots.staging import Staging
from tests.unit.sampler.snapshots.recorded import Engine, around


@pytest.fixture
def engine() -> Engine:
    return Engine()


@pytest.fixture
def full_snapshots(engine: Engine, tmp_path: Path) -> FullSnapshots:
    """With room for 20 bytes."""
    return FullSnapshots(engine, DataDir(tmp_path), Staging(20, copies=1))


@pytest.fixture
def snapshots(engine: Engine, tmp_path: Path, full_snapshots: FullSnapshots) -> Snapshots:
    return around(engine, tmp_path, full_snapshots)

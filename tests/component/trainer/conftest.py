"""A Redis and a tiny base model for the tests of each file, which start the worlds that they need."""

from __future__ import annotations

from pathlib import Path

import pytest

from services.common.process import failpoints
from tests.component.own_redis import started_redis
from tests.component.trainer.world import made_model

redis_url = pytest.fixture(started_redis, scope="module", name="redis_url")
model_dir = pytest.fixture(made_model, scope="module", name="model_dir")


@pytest.fixture
def faults(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Where faults are armed for the worlds that a test starts."""
    directory = tmp_path / "faults"
    directory.mkdir()
    monkeypatch.setenv(failpoints.VARIABLE, f"dir:{directory}")
    return directory

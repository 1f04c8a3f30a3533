"""A model for a durable store to write."""

from __future__ import annotations

import pytest

from services.trainer.compute.data import ModelState
from tests.unit.trainer.files.durable_snapshots import Trained


@pytest.fixture
def trained(model_state: ModelState) -> Trained:
    return Trained(model_state)

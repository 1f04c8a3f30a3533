"""A sampler to move samples with."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.unit.sampler.requests.moved import Sampler


@pytest.fixture
def sampler(tmp_path: Path) -> Sampler:
    return Sampler(tmp_path)

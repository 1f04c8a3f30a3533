"""A trainer tells that it loads, before it has."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.component.loading import Scraped
from tests.component.trainer.world import TrainerWorld, make_model

pytestmark = pytest.mark.heavy


def test_metrics_are_served_while_it_loads(redis_url: str, tmp_path: Path) -> None:
    model_dir = make_model(tmp_path / "model")
    with Scraped() as scraped:
        world = TrainerWorld(
            redis_url, model_dir, tmp_path / "data", 1, 0, "--metrics-port", str(scraped.port)
        )
    try:
        assert (scraped.loaded[0], scraped.loaded[-1]) == (0, 1)
        assert world.stop() == 0
    finally:
        world.kill()

"""One rank of a world that plays all scenarios of adapters, one after another; see engine_process."""

from __future__ import annotations

import msgspec

from services.trainer.compute.engine import Engine
from tests.component import (
    engine_slow_rank,
    engine_split,
    engine_split_bfloat16,
    engine_split_memory,
    engine_split_models,
    engine_steps,
    engine_world,
)
from tests.component.engine_process import run_rank

WORLDS = {"1 rank": (1, 0), "2 ranks": (2, 0), "2 ranks ZeRO-3": (2, 3)}
"""Ranks and ZeRO stage of each."""


class Reports(msgspec.Struct):
    """Of one rank."""

    steps: engine_steps.Report
    world: engine_world.Report
    split: engine_split.Report
    models: engine_split_models.Report | None = None
    memory: engine_split_memory.Report | None = None
    bfloat16: engine_split_bfloat16.Report | None = None
    slow: engine_slow_rank.Report | None = None


def scenario(engine: Engine) -> Reports:
    several = engine.world_size > 1 and not engine.collective
    return Reports(
        engine_steps.scenario(engine),
        engine_world.scenario(engine),
        engine_split.scenario(engine),
        engine_split_models.scenario() if several else None,
        engine_split_memory.scenario(engine) if several else None,
        engine_split_bfloat16.scenario(engine) if several else None,
        engine_slow_rank.scenario(engine) if several else None,
    )


if __name__ == "__main__":
    run_rank(scenario)

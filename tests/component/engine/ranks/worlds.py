"""One rank of a world that plays all scenarios of adapters, one after another; see engine/process.py."""

from __future__ import annotations

import msgspec

from services.trainer.compute.engine import Engine
from tests.component.engine.ranks import slow_rank, steps, world
from tests.component.engine.split import bfloat16, memory, models, operations

WORLDS = {"1 rank": (1, 0), "2 ranks": (2, 0), "2 ranks ZeRO-3": (2, 3)}
"""Ranks and ZeRO stage of each."""


class Reports(msgspec.Struct):
    """Of one rank."""

    steps: steps.Report
    world: world.Report
    split: operations.Report
    models: models.Report | None = None
    memory: memory.Report | None = None
    bfloat16: bfloat16.Report | None = None
    slow: slow_rank.Report | None = None


def scenario(engine: Engine) -> Reports:
    several = engine.world_size > 1 and not engine.collective
    return Reports(
        steps.scenario(engine),
        world.scenario(engine),
        operations.scenario(engine),
        models.scenario() if several else None,
        memory.scenario(engine) if several else None,
        bfloat16.scenario(engine) if several else None,
        slow_rank.scenario(engine) if several else None,
    )

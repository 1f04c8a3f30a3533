"""What every rank of a world plays for test_world; see ranks/worlds.py.

The last rank takes longer for its part of a pass than ranks wait for each other otherwise.
"""

from __future__ import annotations

import time
from collections.abc import Mapping
from datetime import timedelta

import msgspec
import torch.distributed as dist

from services.trainer.compute import exchange
from services.trainer.compute.data import Failure, Pass, RowResult
from services.trainer.compute.engine import Engine
from tests.component.engine.data import ce_row, op, trained_model, work

USUAL_S, SLOW_S = 6, 8
LONG = [ce_row(40, 200)]


class Report(msgspec.Struct):
    results: list[RowResult]


def scenario(engine: Engine) -> Report:
    trained_model(engine, "slow")
    usual, run = exchange.COLLECTIVE_TIMEOUT, engine._rounds.run
    group = dist.group.WORLD
    assert group is not None
    dist.barrier()
    exchange.COLLECTIVE_TIMEOUT = timedelta(seconds=USUAL_S)
    group.set_timeout(exchange.COLLECTIVE_TIMEOUT)
    if dist.get_rank() == dist.get_world_size() - 1:

        def slowly(plan: Pass, refused: Mapping[int, Failure]) -> tuple[list[RowResult], dict[int, Failure]]:
            time.sleep(SLOW_S)
            return run(plan, refused)

        engine._rounds.run = slowly  # type: ignore[method-assign,assignment]
    try:
        results = engine.run_pass(work((op("slow"), LONG)))
    finally:
        exchange.COLLECTIVE_TIMEOUT, engine._rounds.run = usual, run  # type: ignore[method-assign]
        group.set_timeout(usual)
    engine.drop_model("slow")
    return Report(results)

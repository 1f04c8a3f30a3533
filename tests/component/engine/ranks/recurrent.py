"""One rank of a world that plays the scenario of test_recurrent; see engine/process.py."""

from __future__ import annotations

import msgspec

from services.trainer.compute.data import LoraSpec, ModelState, RowResult
from services.trainer.compute.engine import Engine
from tests.component.engine.data import ADAM, ce_row, trained_model
from tests.component.engine.full.world import ADAM_FULL, Player

ADAPTER, FULL = "adapter", "full"
ROWS = [ce_row(1, 20), ce_row(2, 7), ce_row(3, 12)]
STEPS = 2


class Report(msgspec.Struct):
    results: dict[str, list[list[RowResult]]] = {}
    trained: ModelState | None = None


def scenario(engine: Engine) -> Report:
    """A model that trains everything an adapter can, and one that trains all weights."""
    player, report = Player(engine, engine.world_size), Report()
    trained_model(engine, ADAPTER, LoraSpec(4, seed=3))
    engine.create_model(FULL, None)
    for name, adam in ((ADAPTER, ADAM), (FULL, ADAM_FULL)):
        results = report.results[name] = []
        for number in range(STEPS):
            results.append(player.run(name, number, "cross_entropy", ROWS))
            (step,) = engine.optim_steps([(name, adam)])
            assert isinstance(step, dict), step
    report.trained = engine.state(ADAPTER)
    return report

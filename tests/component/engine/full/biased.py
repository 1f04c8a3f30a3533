"""One rank of a world that trains models whose output head has a bias; see test_biased."""

from __future__ import annotations

import msgspec

from services.trainer.compute.data import ModelState
from services.trainer.compute.engine import Engine
from tests.component.engine.data import ce_row
from tests.component.engine.engines import heads_in_chunks
from tests.component.engine.full.world import ADAM_FULL, Player, state_of

ROW = ce_row(0, 40)
CHUNKS = {"whole": 1000, "in chunks": 7}


class Report(msgspec.Struct):
    steps: dict[str, dict[str, float]] = {}
    states: dict[str, ModelState] = {}


def scenario(engine: Engine) -> Report:
    player, report = Player(engine, engine.world_size), Report()
    for name, positions in CHUNKS.items():
        engine.create_model(name, None)
        # The other rank has none of it.
        with heads_in_chunks(positions):
            player.run(name, 1, "cross_entropy", [ROW])
        report.steps[name] = engine.optim_step(name, ADAM_FULL)
        report.states[name] = state_of(engine, name)
        engine.drop_model(name)
    return report

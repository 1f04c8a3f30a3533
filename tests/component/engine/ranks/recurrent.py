"""One rank of a world that plays the scenario of test_recurrent; see engine/process.py."""

from __future__ import annotations

import msgspec

from services.trainer.compute.data import LoraSpec, ModelState, RowResult
from services.trainer.compute.engine import Engine
from tests.component.engine.data import ADAM, ce_row, op, trained_model, work
from tests.component.engine.full.world import ADAM_FULL, Player
from tests.component.engine.split.operations import together

ADAPTER, FULL = "adapter", "full"
ROWS = [ce_row(1, 20), ce_row(2, 7), ce_row(3, 12)]
STEPS = 2


class Report(msgspec.Struct):
    """What a rank found.

    Attributes:
        together: what all rows came to as one micro-batch, before anything was trained.
        forwards: of the frozen base, which it took.
        long: what the longest row came to, computed by all ranks together, by what is trained.
        norms: of its gradient.
    """

    results: dict[str, list[list[RowResult]]] = {}
    trained: ModelState | None = None
    together: list[RowResult] = []
    forwards: int = 0
    long: dict[str, list[RowResult]] = {}
    norms: dict[str, float] = {}


def scenario(engine: Engine) -> Report:
    """A model that trains everything an adapter can, and one that trains all weights."""
    player, report = Player(engine, engine.world_size), Report()
    trained_model(engine, ADAPTER, LoraSpec(4, seed=3))
    ran: list[None] = []
    counting = engine._base._scorer.register_forward_hook(lambda *_: ran.append(None))
    report.together = engine.run_pass(work((op(ADAPTER, STEPS, forward_only=True), ROWS)))
    report.forwards = len(ran)
    counting.remove()
    engine.create_model(FULL, None)
    for name, adam in ((ADAPTER, ADAM), (FULL, ADAM_FULL)):
        results = report.results[name] = []
        for number in range(STEPS):
            results.append(player.run(name, number, "cross_entropy", ROWS))
            (step,) = engine.optim_steps([(name, adam)])
            assert isinstance(step, dict), step
    report.trained = engine.state(ADAPTER)
    for name, adam in ((ADAPTER, ADAM), (FULL, ADAM_FULL)):
        report.long[name] = engine.run_pass(together(engine, op(name), ROWS, 0))
        (step,) = engine.optim_steps([(name, adam)])
        assert isinstance(step, dict), step
        report.norms[name] = step["grad_norm"]
    return report

"""One rank of a world that plays the scenario of test_experts; see engine/process.py."""

from __future__ import annotations

import msgspec
import torch.distributed as dist

from services.common.contract.experts.routing import Routing
from services.trainer.compute.data import LoraSpec, ModelState, RowResult
from services.trainer.compute.engine import Engine
from tests.component.engine.data import ADAM, ce_row, given_experts, op, trained_model, work

WHOLE, WITHOUT = LoraSpec(8, seed=3), LoraSpec(4, seed=5, train_mlp=False)
ROUTING = Routing(layers=2, top_k=2, experts=4)
ROWS = {
    "whole": [given_experts(ce_row(1, 20), ROUTING), ce_row(2, 7)],
    "without": [ce_row(3, 12), given_experts(ce_row(4, 9), ROUTING)],
}
"""Half of them say which experts their tokens go to."""
STEPS = 2


class Report(msgspec.Struct):
    results: list[list[RowResult]] = []
    steps: list[dict[str, float]] = []
    trained: dict[str, ModelState] = {}


def scenario(engine: Engine) -> Report:
    """Two models in the same passes, one of which trains the experts; the first goes on from its state."""
    report = Report()
    trained_model(engine, "whole", WHOLE)
    trained_model(engine, "without", WITHOUT)
    for number in range(STEPS):
        placed = [(op(name, number), rows) for name, rows in ROWS.items()]
        # A micro-batch with one row of each.
        report.results.append(engine.run_pass(work(*placed, cut=[[(0, 0), (1, 0)], [(0, 1), (1, 1)]])))
        report.steps += [
            step for step in engine.optim_steps([(name, ADAM) for name in ROWS]) if is_step(step)
        ]
        state = everywhere(engine.state("whole"))
        engine.drop_model("whole")
        engine.create_model("whole", WHOLE)
        engine.load_state("whole", state, optimizer=True)
    report.trained = {name: engine.state(name) for name in ROWS}
    return report


def everywhere(state: ModelState) -> ModelState:
    """Rank 0's, which alone has what was spread over the ranks."""
    held = [msgspec.msgpack.encode(state)]
    dist.broadcast_object_list(held, src=0)
    return msgspec.msgpack.decode(held[0], type=ModelState)


def is_step(found: object) -> bool:
    assert isinstance(found, dict), found
    return True

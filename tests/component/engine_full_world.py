"""One rank of a world that plays the scenario of test_engine_full; see engine_process."""

from __future__ import annotations

from collections.abc import Sequence

import msgspec
import numpy as np
import torch.distributed as dist

from services.common.contract.errors import InvalidRequest
from services.trainer.compute.data import ModelState, Pass, Row, RowResult
from services.trainer.compute.engine import Engine
from tests.component.engine_data import ADAM, LORA, ce_row, is_row, op, with_input, work
from tests.component.engine_process import run_rank

ADAM_FULL = msgspec.structs.replace(ADAM, learning_rate=0.05)
STEPS: list[tuple[str, list[Row]]] = [
    ("cross_entropy", [ce_row(1, 20), ce_row(2, 7), ce_row(3, 12, columns=2)]),
    ("importance_sampling", [is_row(4, 30), is_row(5, 9), is_row(6, 16)]),
    ("cross_entropy", [ce_row(7, 11), ce_row(8, 25), ce_row(9, 4)]),
]
PROBE = [ce_row(10, 15)]


class Report(msgspec.Struct):
    results: list[list[RowResult]] = []
    steps: list[dict[str, float]] = []
    states: dict[str, ModelState] = {}
    probes: dict[str, list[RowResult]] = {}
    skipped: dict[str, float] = {}
    refusals: dict[str, str] = {}


class Player:
    """An engine that runs passes as the scheduler cuts them: a round of one operation at a time."""

    def __init__(self, engine: Engine, ranks: int) -> None:
        self.engine, self.ranks = engine, ranks

    def run(
        self, model_id: str, seq_id: int, loss_fn: str, rows: Sequence[Row], forward_only: bool = False
    ) -> list[RowResult]:
        placed = (op(model_id, seq_id, loss_fn, forward_only), rows)
        results: list[RowResult] = []
        for start in range(0, len(rows), self.ranks):
            stop = min(start + self.ranks, len(rows))
            results += self.engine.run_pass(self.cut(placed, range(start, stop)))
        return results

    @staticmethod
    def cut(placed: tuple, indices: Sequence[int]) -> Pass:
        return work(placed, cut=[[(0, index)] for index in indices])

    def refusal(self, name: str, *arguments: object) -> str:
        try:
            getattr(self.engine, name)(*arguments)
        except InvalidRequest as error:
            return error.code
        return ""


def scenario(engine: Engine) -> Report:
    report, player = Report(), Player(engine, dist.get_world_size())
    engine.create_model("lora", LORA)
    engine.create_model("full", None)
    report.states["fresh"] = engine.state("full")
    for number, (loss_fn, rows) in enumerate(STEPS):
        # The last step's gradient comes in two operations.
        parts = [rows] if number < 2 else [rows[:2], rows[2:]]
        results = [
            result
            for part, some in enumerate(parts)
            for result in player.run("full", 10 * number + part, loss_fn, some)
        ]
        report.results.append(results)
        report.steps.append(engine.optim_step("full", ADAM_FULL))
        report.states[f"step{number}"] = engine.state("full")
    trained = report.states["step2"]

    # The base model, which adapters share, is what it was.
    report.probes["lora"] = player.run("lora", 1, "cross_entropy", PROBE, forward_only=True)
    report.probes["full"] = player.run("full", 40, "cross_entropy", PROBE, forward_only=True)
    report.skipped = engine.optim_step("full", ADAM_FULL)

    engine.create_model("again", None)
    player.run("again", 1, "cross_entropy", PROBE)
    engine.load_state("again", trained, True)
    report.states["loaded"] = engine.state("again")
    for model_id in ("full", "again"):
        player.run(model_id, 50, *STEPS[0])
        engine.optim_step(model_id, ADAM_FULL)
        report.states[f"{model_id} resumed"] = engine.state(model_id)

    bad = with_input(is_row(11, 8), "logprobs", np.full(8, -1e30, np.float32))
    player.run("full", 60, "importance_sampling", [bad])
    report.refusals["non-finite"] = player.refusal("optim_step", "full", ADAM_FULL)
    report.states["after non-finite"] = engine.state("full")
    player.run("full", 61, *STEPS[0])
    report.states["no pending gradient"] = engine.state("full")

    wrong = {name: array for name, array in trained.adapter.items() if not name.endswith("norm.weight")}
    report.refusals["tensor missing"] = player.refusal(
        "load_state", "full", msgspec.structs.replace(trained, adapter=wrong), True
    )
    report.refusals["adapter"] = player.refusal("load_state", "full", engine.state("lora"), True)
    report.refusals["not an adapter"] = player.refusal("load_state", "lora", trained, True)
    engine.load_state("full", trained, False)
    report.states["without optimizer"] = engine.state("full")
    engine.drop_model("again")
    report.probes["reloaded"] = player.run("full", 70, "cross_entropy", PROBE, forward_only=True)
    return report


if __name__ == "__main__":
    run_rank(scenario)

"""What every rank of a world plays for test_world; see ranks/worlds.py."""

from __future__ import annotations

import msgspec
import numpy as np

from services.common.contract.errors import InvalidRequest
from services.trainer.compute.data import AdamSpec, LoraSpec, ModelState, Pass, RowResult
from services.trainer.compute.engine import Engine
from tests.component.engine.data import (
    ADAM,
    VOCAB,
    ce_row,
    critic_row,
    is_row,
    op,
    trained_looking,
    with_input,
    work,
)
from tests.component.engine.engines import heads_in_chunks

LORAS = {
    "a": LoraSpec(8, 1),
    "b": LoraSpec(3, 2, train_mlp=False, train_unembed=False),
    "c": LoraSpec(4),
    "v": LoraSpec(5, 3, role="critic"),
}
ROWS_A = [ce_row(1, 20), ce_row(2, 7), ce_row(3, 12, columns=2)]
ROWS_B = [is_row(4, 30), is_row(5, 9)]
ROWS_C = [ce_row(6, 11)]
ROWS_V = [critic_row(8, 14), critic_row(9, 25)]


class Report(msgspec.Struct):
    passes: list[list[RowResult]] = []
    steps: dict[str, dict[str, float]] = {}
    states: dict[str, ModelState] = {}
    weights_of: dict[str, ModelState] = {}
    initial: dict[str, ModelState] = {}
    non_finite: str = ""
    head: int = 0
    """Positions that this rank's output head computed in the first pass, in chunks."""
    weights: int = 0
    weights_here: int = 0


def scenario(engine: Engine) -> Report:
    report = Report()

    def run(work: Pass) -> None:
        report.passes.append(engine.run_pass(work))

    def step(model_id: str, adam: AdamSpec = ADAM) -> None:
        report.steps[f"{model_id}{len(report.passes)}"] = engine.optim_step(model_id, adam)

    for number, (model_id, lora) in enumerate(LORAS.items()):
        engine.create_model(model_id, lora)
        report.initial[model_id] = trained_looking(engine.state(model_id), number)
        engine.load_state(model_id, report.initial[model_id], optimizer=False)

    # Two ranks have uneven work, and one of them only a critic's rows in its last batch. Losses, roles,
    # ranks, targets and forward-only are mixed.
    placed = [
        (op("a"), ROWS_A),
        (op("b", 1, "importance_sampling"), ROWS_B),
        (op("c", forward_only=True), ROWS_C),
        (op("v", 1, "ppo_critic"), ROWS_V),
    ]
    with heads_in_chunks(6) as computed:
        run(work(*placed, cut=[[(0, 0), (1, 0), (3, 0)], [(0, 1), (2, 0)], [(0, 2), (1, 1)], [(3, 1)]]))
    report.head = sum(computed)
    for model_id in LORAS:
        step(model_id)

    # A pass without gradients, one of whose operations is refused.
    beyond = with_input(ce_row(1, 5), "target_tokens", np.full(5, VOCAB))
    run(work((op("a", 3, forward_only=True), ROWS_A), (op("b", 3), [ROWS_C[0], beyond])))

    # An operation in two passes, next to a model whose gradient overflows.
    bad = with_input(is_row(7, 8), "logprobs", np.full(8, -1e30, np.float32))
    first = (op("a", 4), ROWS_A)
    run(work(first, (op("c", 4, "importance_sampling"), [bad]), cut=[[(0, 1), (1, 0)], [(0, 0)]]))
    run(work(first, cut=[[(0, 2)]]))
    step("a")
    try:
        step("c")
    except InvalidRequest as error:
        report.non_finite = error.code

    _replay(engine)
    for model_id in (*LORAS, "r0", "r1"):
        report.states[model_id] = engine.state(model_id)
        report.weights_of[model_id] = engine.state(model_id, optimizer=False)
    parameters = list(engine._base._scorer.parameters())
    report.weights = sum(getattr(p, "ds_numel", p.numel()) for p in parameters)
    report.weights_here = sum(p.numel() for p in parameters)
    return report


def _replay(engine: Engine) -> None:
    """The same operations twice, each time alone but in other passes."""
    one = (op("", 1), [ce_row(seed, 9 + seed) for seed in range(3)])
    two = (op("", 2), [ce_row(seed, 5 + seed) for seed in range(2)])
    compositions = [
        [work(one, two, cut=[[(0, 0)], [(0, 1)], [(0, 2)], [(1, 0)], [(1, 1)]])],
        [
            work(one, cut=[[(0, 0)]]),
            work(one, two, cut=[[(0, 1)], [(0, 2)], [(1, 0)]]),
            work(two, cut=[[(0, 1)]]),
        ],
    ]
    for number, passes in enumerate(compositions):
        model_id = f"r{number}"
        engine.create_model(model_id, LORAS["a"])
        for each in passes:
            ops = [msgspec.structs.replace(item, model_id=model_id) for item in each.ops]
            engine.run_pass(msgspec.structs.replace(each, ops=ops))
        engine.optim_step(model_id, ADAM)

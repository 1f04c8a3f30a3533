"""One rank of a world that plays the scenario of test_bfloat16; see engine/process.py."""

from __future__ import annotations

import msgspec

from services.trainer.compute.data import LoraSpec, ModelState, RowResult
from services.trainer.compute.engine import Engine
from tests.component.engine import process
from tests.component.engine.data import ADAM, ce_row, is_row, op, trained_model, work
from tests.component.engine.engines import engine_of

LORAS = {"a": LoraSpec(8, 1), "b": LoraSpec(3, 2, train_mlp=False)}
ROWS = {"a": [ce_row(1, 20), ce_row(2, 7), ce_row(3, 12, columns=2)], "b": [is_row(4, 30), is_row(5, 9)]}
LOSSES = {"a": "cross_entropy", "b": "importance_sampling"}
STEPS = 2


class Played(msgspec.Struct):
    """What a pass came to, and the step after it; then what the models had become."""

    results: list[list[RowResult]] = []
    steps: list[list[dict[str, float]]] = []
    initial: dict[str, ModelState] = {}
    trained: dict[str, ModelState] = {}


class Report(msgspec.Struct):
    found: Played
    exact: Played | None
    """In float32, of a world of one rank."""
    held: int
    """Bytes that this rank has of the base model's weights."""
    dtypes: list[str]
    """Their element types."""


def train(engine: Engine) -> Played:
    """Two models in the same passes, whose micro-batches are one row each or one of each model."""
    played = Played()
    played.initial = {name: trained_model(engine, name, lora) for name, lora in LORAS.items()}
    cut = [[(0, 0), (1, 0)], [(0, 1)], [(0, 2), (1, 1)]]
    for number in range(1, STEPS + 1):
        placed = [(op(name, number, LOSSES[name]), rows) for name, rows in ROWS.items()]
        played.results.append(engine.run_pass(work(*placed, cut=cut)))
        played.steps.append([engine.optim_step(name, ADAM) for name in LORAS])
    played.trained = {name: engine.state(name) for name in LORAS}
    return played


def scenario(engine: Engine) -> Report:
    """In a world whose engine computes in bfloat16."""
    exact = train(engine_of(process.here.directory)) if engine.world_size == 1 else None
    weights = list(engine._base._scorer.parameters())
    held = sum(getattr(each, "ds_tensor", each).nbytes for each in weights)
    return Report(train(engine), exact, held, sorted({str(each.dtype) for each in weights}))

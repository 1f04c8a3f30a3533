"""One rank of a world that plays the scenario of test_sharding; see engine/process.py."""

from __future__ import annotations

from typing import Any

import msgspec
import torch.distributed as dist
from torch import Tensor

from services.common.worlds.sharding import Sharding
from services.trainer.compute.data import ModelState, RowResult
from services.trainer.compute.engine import Engine
from services.trainer.compute.full.model import FullModel
from tests.component.engine import process
from tests.component.engine.data import ADAM, LORA, NO_CLIP, ce_row, op, trained_model, work
from tests.component.engine.engines import engine_of

RANKS = 4
WAYS = {
    "nothing": Sharding(),
    "no prefetch": Sharding(prefetch_elements=0),
    "replicas": Sharding(replica_ranks=2),
    "int8": Sharding(quantized_base=True),
    "int8 replicas": Sharding(replica_ranks=2, quantized_base=True),
}
ROWS = [ce_row(1, 20), ce_row(2, 7), ce_row(3, 12, columns=2), ce_row(4, 9)]
FULL_ADAM = msgspec.structs.replace(NO_CLIP, learning_rate=0.05)


class Gather(msgspec.Struct):
    """A collective that put together weights, or scales of quantised ones."""

    ranks: int
    dtype: str
    bytes: int


class Report(msgspec.Struct):
    initial: ModelState | None = None
    results: list[list[RowResult]] = []
    steps: list[dict[str, float]] = []
    trained: ModelState | None = None
    gathers: list[Gather] = []
    """Of a pass whose like was seen before."""
    weights: int = 0
    full_results: list[list[RowResult]] = []
    full_steps: list[dict[str, float]] = []
    full: dict[str, ModelState] = {}
    full_gathers: dict[str, list[Gather]] = {}
    """Of the first pass after a step, and of the one after that."""


class Reports(msgspec.Struct):
    ways: dict[str, Report]


def listen() -> list[Gather]:
    """What is gathered from now on."""
    from deepspeed.runtime.zero import partition_parameters

    gather: Any = partition_parameters._dist_allgather_fn
    heard: list[Gather] = []

    def listening(part: Tensor, whole: Tensor, group: Any = None) -> Any:
        heard.append(Gather(dist.get_world_size(group), str(whole.dtype), whole.nbytes))
        return gather(part, whole, group)

    vars(partition_parameters)["_dist_allgather_fn"] = listening
    return heard


def play_one(engine: Engine, heard: list[Gather]) -> Report:
    report = Report(weights=engine.footprint.weights)
    cut = [[(0, index)] for index in range(len(ROWS))]

    def run(model_id: str, number: int, forward_only: bool = False) -> list[RowResult]:
        heard.clear()
        return engine.run_pass(work((op(model_id, number, forward_only=forward_only), ROWS), cut=cut))

    report.initial = trained_model(engine, "m", LORA)
    for number in range(3):
        report.results.append(run("m", number))
        report.gathers = list(heard)
        report.steps.append(engine.optim_step("m", ADAM))
    report.trained = engine.state("m")

    # Two, one after the other: what DeepSpeed makes for the first must do for the second.
    for model_id in ("one", "two"):
        engine.create_model(model_id, None)
        for number in range(3):
            report.full_results.append(run(model_id, number))
            report.full_steps.append(engine.optim_step(model_id, FULL_ADAM))
        for number, name in enumerate(("after a step", "again")):
            run(model_id, 3 + number, forward_only=True)
            report.full_gathers[name] = list(heard)
            _let_go(engine, model_id)
        report.full[model_id] = engine.state(model_id, optimizer=False)
        engine.drop_model(model_id)
    return report


def _let_go(engine: Engine, model_id: str) -> None:
    """What of a small model stays gathered, as it would not of a large one."""
    tenant = engine._tenants[model_id]
    assert isinstance(tenant, FullModel)
    tenant._engine.optimizer._partition_all_parameters()


def scenario(engine: Engine) -> Reports:
    """The same with engines that share weights in all ways; the world starts once."""
    heard = listen()
    found = {}
    for name, sharding in WAYS.items():
        first = sharding == Sharding()
        made = engine if first else engine_of(process.here.directory, stage=3, sharding=sharding)
        found[name] = play_one(made, heard)
    return Reports(found)

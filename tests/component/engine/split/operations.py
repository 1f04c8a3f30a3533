"""What every rank of a world plays for test_operations; see ranks/worlds.py.

A world of several ranks computes each sequence together, a world of one by itself.
"""

from __future__ import annotations

import msgspec
import numpy as np
import torch.distributed as dist

from services.common.contract.tensors import HostTensor, from_values
from services.trainer.compute.data import LoraSpec, Pass, PassOp, Row, RowResult
from services.trainer.compute.engine import Engine
from services.trainer.compute.tenant import LoraTenant
from tests.component.engine.data import (
    NO_CLIP,
    ce_row,
    critic_row,
    flat,
    is_row,
    op,
    trained_model,
    with_input,
    work,
)
from tests.component.engine.engines import heads_in_chunks

LENGTHS = (41, 24, 1)
"""One that two ranks cannot cut evenly, one that they can, and one of which a rank has nothing."""
POLICY = LoraSpec(8, 1)
HEAD_ALONE = LoraSpec(4, 2, train_attn=False, train_mlp=False)
CRITIC = LoraSpec(5, 3, role="critic")


def policy_row(seed: int, length: int) -> Row:
    """Importance sampling's inputs, of which one token at least was sampled."""
    row = is_row(seed, length)
    return with_input(row, "advantages", row.loss_inputs["advantages"].values() + np.float32(0.5))


CASES: dict[str, tuple[str, LoraSpec, list[Row]]] = {
    "cross_entropy": ("cross_entropy", POLICY, [ce_row(seed, length) for seed, length in enumerate(LENGTHS)]),
    "many targets": ("cross_entropy", POLICY, [ce_row(4, 23, columns=3)]),
    "head alone": ("cross_entropy", HEAD_ALONE, [ce_row(5, 30)]),
    **{
        loss: (loss, POLICY, [policy_row(seed, length) for seed, length in enumerate(LENGTHS[:2])])
        for loss in ("importance_sampling", "ppo", "cispo", "dro", "gspo")
    },
    "ppo_critic": ("ppo_critic", CRITIC, [critic_row(seed, length) for seed, length in enumerate(LENGTHS)]),
}
"""By name the loss, what is trained, and sequences that follow each other."""
SHORT = [ce_row(20, 9), ce_row(21, 5)]
"""Trained in the same operation, one rank each."""
FULL = [ce_row(22, 31), ce_row(23, 8)]


class Report(msgspec.Struct):
    results: dict[str, list[RowResult]] = {}
    gradients: dict[str, HostTensor] = {}
    steps: dict[str, dict[str, float]] = {}
    states: dict[str, HostTensor] = {}
    replayed: dict[str, HostTensor] = {}
    splits: bool = False
    heads: dict[str, int] = {}
    """Positions that output heads computed in a forward_backward."""


def together(engine: Engine, placed: PassOp, rows: list[Row], index: int) -> Pass:
    """A pass of one row of an operation, on all ranks."""
    whole = work((placed, rows), cut=[[(0, index)]])
    (batch,) = whole.micro_batches
    return msgspec.structs.replace(
        whole, micro_batches=[msgspec.structs.replace(batch, split=engine.world_size > 1)]
    )


def trained(engine: Engine, name: str, loss: str, rows: list[Row]) -> list[RowResult]:
    """A forward_backward of these rows, those of `SHORT` behind them where they are of its loss."""
    short = SHORT if loss == "cross_entropy" else []
    placed = PassOp(name, 1, loss, {"beta": 0.1} if loss == "dro" else {})
    results = [
        result
        for index in range(len(rows))
        for result in engine.run_pass(together(engine, placed, rows, index))
    ]
    if short:
        cut = [[(0, len(rows) + number)] for number in range(len(short))]
        results += engine.run_pass(work((placed, [*rows, *short]), cut=cut))
    return results


def gradient(engine: Engine, name: str) -> HostTensor:
    """An adapter's, summed over the ranks. It is taken out of the model."""
    tenant = engine._tenants[name]
    assert isinstance(tenant, LoraTenant)
    taken = tenant.take_gradient()[: tenant.adapter.part.size]
    if dist.get_world_size() > 1:
        dist.all_reduce(taken)
    return from_values(taken.numpy().copy())


def scenario(engine: Engine) -> Report:
    report = Report(splits=engine.splits)
    for chunk, positions in (("whole", 1000), ("chunks", 7)):
        for case, (loss, spec, rows) in CASES.items():
            name = f"{case}, {chunk}"
            trained_model(engine, name, spec)
            with heads_in_chunks(positions) as computed:
                report.results[name] = trained(engine, name, loss, rows)
            report.heads[name] = sum(computed)
            report.gradients[name] = gradient(engine, name)
            trained(engine, name, loss, rows)
            report.steps[name] = engine.optim_step(name, NO_CLIP)
            report.states[name] = from_values(flat(engine.state(name, optimizer=False)))
            engine.drop_model(name)
    for name in ("first", "again"):
        trained_model(engine, name, POLICY)
        trained(engine, name, *CASES["cross_entropy"][::2])
        engine.optim_step(name, NO_CLIP)
        report.replayed[name] = from_values(flat(engine.state(name, optimizer=False)))
        engine.drop_model(name)
    _full(engine, report)
    return report


def _full(engine: Engine, report: Report) -> None:
    """A model that trains all weights."""
    engine.create_model("full", None)
    placed = op("full", 1)
    with heads_in_chunks(7):
        report.results["full"] = [
            result
            for index in range(len(FULL))
            for result in engine.run_pass(together(engine, placed, FULL, index))
        ]
    report.steps["full"] = engine.optim_step("full", NO_CLIP)
    after = engine.run_pass(work((op("full", 3, forward_only=True), SHORT), cut=[[(0, 0)], [(0, 1)]]))
    report.results["full, stepped"] = after
    engine.drop_model("full")

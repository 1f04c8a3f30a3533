"""What every rank of a world plays for test_bfloat16; see ranks/worlds.py.

The same sequences in bfloat16 by all ranks together and each by one rank, and in float32 by one rank.
"""

from __future__ import annotations

import msgspec

from services.common.contract.tensors import HostTensor
from services.trainer.compute.data import PassOp, RowResult
from services.trainer.compute.engine import Engine
from tests.component.engine import process
from tests.component.engine.data import trained_model, work
from tests.component.engine.engines import engine_of
from tests.component.engine.split.operations import CASES, gradient, together

LOSSES = ("cross_entropy", "gspo", "ppo_critic")


class Numbers(msgspec.Struct):
    results: list[RowResult]
    gradient: HostTensor


class Report(msgspec.Struct):
    """By loss: in float32, in bfloat16 on one rank and on all."""

    exact: dict[str, Numbers] = {}
    alone: dict[str, Numbers] = {}
    all: dict[str, Numbers] = {}


def numbers(engine: Engine, case: str, *, split: bool) -> Numbers:
    loss, spec, rows = CASES[case]
    trained_model(engine, case, spec)
    placed = PassOp(case, 1, loss)
    passes = [
        together(engine, placed, rows, index) if split else work((placed, rows), cut=[[(0, index)]])
        for index in range(len(rows))
    ]
    results = [result for each in passes for result in engine.run_pass(each)]
    found = Numbers(results, gradient(engine, case))
    engine.drop_model(case)
    return found


def scenario(exact: Engine) -> Report:
    """In a world whose engine computes in float32."""
    engine = engine_of(process.here.directory, dtype="bfloat16")
    return Report(
        {case: numbers(exact, case, split=False) for case in LOSSES},
        {case: numbers(engine, case, split=False) for case in LOSSES},
        {case: numbers(engine, case, split=True) for case in LOSSES},
    )

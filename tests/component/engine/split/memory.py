"""What every rank of a world plays for test_memory; see ranks/worlds.py.

The last rank has no memory for a sequence that all compute together, while another model has a gradient.
Were the ranks to decide differently they would wait for each other in vain, so that is looked at before.
"""

from __future__ import annotations

import msgspec
import torch.distributed as dist

from services.common.contract.tensors import HostTensor, from_values
from services.trainer.compute.data import RowResult
from services.trainer.compute.engine import Engine
from services.trainer.compute.exchange import any_rank
from services.trainer.compute.memory import room
from tests.component.engine.data import LORA, NO_CLIP, ce_row, flat, op, trained_model, work
from tests.component.engine.split.operations import SHORT, together

LONG = [ce_row(30, 40)]


class Played(msgspec.Struct):
    """What became of a model whose sequence all ranks compute, and of one beside it."""

    results: list[RowResult]
    step: dict[str, float]
    beside: HostTensor


class Report(msgspec.Struct):
    """Of kinds of models, without memory and with it."""

    without: dict[str, Played] = {}
    enough: dict[str, Played] = {}


def played(engine: Engine, kind: str) -> Played:
    trained_model(engine, "beside")
    engine.run_pass(work((op("beside"), SHORT), cut=[[(0, 0)], [(0, 1)]]))
    if kind == "full":
        engine.create_model(kind, None)
    else:
        trained_model(engine, kind, LORA, seed=1)
    work_of_all = together(engine, op(kind), LONG, 0)
    refused = bool(room.without_room(work_of_all, {}, engine.footprint, engine.vocab_size, engine.device))
    assert any_rank([refused, not refused], engine.device) == [refused, not refused], "the ranks disagree"
    results = engine.run_pass(work_of_all)
    step = engine.optim_step(kind, NO_CLIP)
    engine.optim_step("beside", NO_CLIP)
    found = Played(results, step, from_values(flat(engine.state("beside", optimizer=False))))
    engine.drop_model(kind)
    engine.drop_model("beside")
    return found


def scenario(engine: Engine) -> Report:
    report, free_memory = Report(), room.free_memory
    if dist.get_rank() == dist.get_world_size() - 1:
        room.free_memory = lambda device: 0
    report.without = {kind: played(engine, kind) for kind in ("adapter", "full")}
    room.free_memory = free_memory
    report.enough = {kind: played(engine, kind) for kind in ("adapter", "full")}
    return report

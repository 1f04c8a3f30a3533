"""One rank of a world whose full models find no memory, or have theirs measured; see test_full_memory."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence

import msgspec
import pytest
import torch
import torch.distributed as dist
from torch.autograd.profiler import profile

from services.common.process import failpoints
from services.trainer.compute import optimizer
from services.trainer.compute.data import ModelState
from services.trainer.compute.engine import Engine
from services.trainer.compute.full import config, memory, model
from services.trainer.compute.full.memory import step_pieces
from services.trainer.compute.full.model import FullModel
from tests.component.engine.full.world import ADAM_FULL, STEPS, Player, saved, state_of

KINDS = [
    (1, torch.float32, False),
    (2, torch.float32, False),
    (3, torch.float32, False),
    (2, torch.bfloat16, False),
    (3, torch.bfloat16, False),
    (1, torch.float32, True),
    (2, torch.bfloat16, True),
    (3, torch.bfloat16, True),
]
"""ZeRO stage, element type, and whether the optimizer is on the CPU."""
POINT = "trainer.before_step_memory"


class Taken(msgspec.Struct):
    """Bytes: most at once, and what was taken before."""

    most: int
    before: int


class Report(msgspec.Struct):
    """Of one rank.

    Attributes:
        steps: of each of KINDS, a first one and a second one.
        refused: codes of a model, a step and a load for which the last rank had no memory.
        models: that were there after the first of these.
        states: by name.
        skipped: the step that was refused found no gradient when it was sent again.
    """

    steps: list[list[Taken]] = []
    refused: dict[str, str] = {}
    models: list[str] = []
    states: dict[str, ModelState] = {}
    skipped: bool = False


def scenario(engine: Engine) -> Report:
    report, player = Report(), Player(engine, engine.world_size)
    lack_memory(engine, player, report)
    # So that what is large in a model is large here, and a rank's part is of several blocks.
    config.BUCKET = memory.BUCKET = 1 << 12
    optimizer.STEP_BLOCK = memory.STEP_BLOCK = 1 << 14
    # Beside what is small on a device, a CPU has scratch for norms: of blocks, 256 KiB at most.
    memory._SMALL = (1 << 18) + (1 << 16) + (1 << 12)
    for kind in KINDS:
        measure(engine, player, report, *kind)
    return report


def lack_memory(engine: Engine, player: Player, report: Report) -> None:
    """A model, a step and a load for which the last rank has no memory: on all of them nothing changes."""

    def refused(name: str, *arguments: object) -> None:
        hit = failpoints.hit
        if dist.get_rank() == dist.get_world_size() - 1:
            failpoints.hit = lacks
        report.refused[name] = player.refusal(name, *arguments)
        failpoints.hit = hit

    refused("create_model", "full", None)
    report.models = list(engine._tenants)
    for model_id in ("full", "twin"):
        engine.create_model(model_id, None)
        player.run(model_id, 1, *STEPS[0])
    report.states["fresh"] = state_of(engine, "full")
    refused("optim_step", "full", ADAM_FULL)
    report.states["after a step"] = state_of(engine, "full")
    for model_id in ("full", "twin"):
        player.run(model_id, 3, *STEPS[1])
        report.skipped |= "skipped" in engine.optim_step(model_id, ADAM_FULL)
        report.states[model_id] = state_of(engine, model_id)
        player.run(model_id, 5, *STEPS[2])
    refused("load_state", "full", saved(report.states["fresh"]), True)
    report.states["after a load"] = state_of(engine, "full")
    for model_id in ("full", "twin"):
        engine.optim_step(model_id, ADAM_FULL)
        report.states[f"{model_id} at last"] = state_of(engine, model_id)
        engine.drop_model(model_id)


def lacks(point: str) -> None:
    if point == POINT:
        raise torch.OutOfMemoryError("no memory")


def measure(
    engine: Engine, player: Player, report: Report, stage: int, dtype: torch.dtype, offload: bool
) -> None:
    """What DeepSpeed takes in a step, and what is taken before it begins."""
    engine._full = dataclasses.replace(engine._full, zero_stage=stage, dtype=dtype, offload=offload)
    engine.create_model("full", None)
    full = engine._tenants["full"]
    assert isinstance(full, FullModel)
    asked: list[Sequence[int]] = []

    def taken_before(pieces: Sequence[int], *_: object) -> bool:
        asked.append(pieces)
        return True

    steps: list[Taken] = []
    with pytest.MonkeyPatch.context() as patched:
        # What is taken before would pass for what is taken then.
        patched.setattr(model, "taken_before", taken_before)
        for number in range(2):
            player.run("full", number, *STEPS[number])
            pieces = step_pieces(full._config, full._sizes)
            steps.append(Taken(most(lambda: engine.optim_step("full", ADAM_FULL)), sum(pieces)))
            assert len(asked) == 1 and asked.pop() == pieces
    report.steps.append(steps)
    engine.drop_model("full")


def most(work: Callable[[], object]) -> int:
    """Bytes that tensors take at most at once while something works, beside those that are there before."""
    with profile(profile_memory=True, use_kineto=True) as profiled:
        work()
    results = profiled.kineto_results
    assert results is not None
    taken: Sequence[int] = [each.nbytes() for each in results.events() if each.name() == "[memory]"]
    now = found = 0
    for size in taken:
        now += size
        found = max(found, now)
    return found

"""One rank of a world whose full models compute in bfloat16, under ZeRO 2 and 3; see test_full."""

from __future__ import annotations

import dataclasses

import msgspec
import numpy as np

from services.trainer.compute.data import ModelState, RowResult
from services.trainer.compute.engine import Engine
from tests.component.engine.data import is_row, with_input
from tests.component.engine.engines import heads_in_chunks
from tests.component.engine.full.world import ADAM_FULL, PROBE, STEPS, Player, saved, state_of

STAGES = (2, 3)


class Played(msgspec.Struct):
    steps: list[dict[str, float]] = []
    heads: list[int] = []
    states: list[ModelState] = []
    probe: list[RowResult] = []
    refusal: str = ""
    weights: ModelState | None = None


class Report(msgspec.Struct):
    played: dict[int, Played] = {}


def scenario(engine: Engine) -> Report:
    player, report = Player(engine, engine.world_size), Report()
    for stage in STAGES:
        engine._full = dataclasses.replace(engine._full, zero_stage=stage)
        engine.create_model("full", None)
        played = report.played[stage] = Played(states=[state_of(engine, "full")])
        for number, (loss_fn, rows) in enumerate(STEPS):
            with heads_in_chunks(6) as computed:
                player.run("full", 10 * number, loss_fn, rows)
            played.heads.append(sum(computed))
            played.steps.append(engine.optim_step("full", ADAM_FULL))
        played.states.append(state_of(engine, "full"))
        played.weights = engine.state("full", optimizer=False)
        played.probe = player.run("full", 40, "cross_entropy", PROBE, forward_only=True)
        bad = with_input(is_row(11, 8), "logprobs", np.full(8, -1e30, np.float32))
        player.run("full", 60, "importance_sampling", [bad])
        played.refusal = player.refusal("optim_step", "full", ADAM_FULL)
        # A gradient that nobody steps is dropped with the weights that are loaded.
        player.run("full", 61, *STEPS[0])
        engine.load_state("full", saved(played.states[1]), True)
        played.states.append(state_of(engine, "full"))
        engine.drop_model("full")
    return report

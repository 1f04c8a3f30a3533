"""What every rank of a world plays for test_steps; see ranks/worlds.py."""

from __future__ import annotations

from collections.abc import Callable

import msgspec
import numpy as np

from services.common.contract.errors import TinsmithError
from services.trainer.compute.data import AdamSpec, LoraSpec, ModelState
from services.trainer.compute.engine import Engine
from services.trainer.compute.memory.dry_run import find_capacity, one_sequence, token_bytes
from tests.component.engine.data import ADAM, ce_row, op, trained_looking, with_input, work

ROWS = [ce_row(1, 20), ce_row(2, 7), ce_row(3, 12, columns=2)]
OVERFLOWING = with_input(ce_row(4, 5), "weights", np.full(5, 1e38, np.float32))
DUE = [("a", ADAM), ("c", ADAM), ("b", AdamSpec(0.1)), ("nobody", ADAM)]
GIB = 2**30


class Played(msgspec.Struct):
    """What two steps of each model came to: metrics or the code of an error, and the states after them, of
    which ranks other than 0 have the weights alone."""

    steps: list[dict[str, float] | str] = []
    states: dict[str, ModelState] = {}
    weights: dict[str, ModelState] = {}


class Report(msgspec.Struct):
    initial: ModelState
    together: Played
    alone: Played
    capacity: list[int]
    left: list[str]


def no_peak(run: Callable[[], None]) -> int:
    """What is measured on a GPU."""
    run()
    return 1


def played(engine: Engine, together: bool) -> tuple[dict[str, ModelState], Played]:
    found = Played()
    for number, model_id in enumerate("abc"):
        engine.create_model(model_id, LoraSpec(8, number))
        fresh = trained_looking(engine.state(model_id), number)
        engine.load_state(model_id, fresh, optimizer=False)
    initial = {model_id: engine.state(model_id) for model_id in "abc"}
    for seq_id in (1, 3):
        placed = [(op("a", seq_id), ROWS), (op("b", seq_id), ROWS[:2]), (op("c", seq_id), [OVERFLOWING])]
        results = engine.run_pass(work(*placed, cut=[[(0, 0), (1, 0)], [(0, 1)], [(0, 2), (1, 1)], [(2, 0)]]))
        assert all(result.failure is None for result in results)
        answers = engine.optim_steps(DUE) if together else [engine.optim_steps([each])[0] for each in DUE]
        found.steps += [each.code if isinstance(each, TinsmithError) else each for each in answers]
    found.states = {model_id: engine.state(model_id) for model_id in "abc"}
    found.weights = {model_id: engine.state(model_id, optimizer=False) for model_id in "abc"}
    for model_id in "abc":
        engine.drop_model(model_id)
    return initial, found


def scenario(engine: Engine) -> Report:
    # Rank 0 has the least memory.
    found = find_capacity(engine, (engine._rank + 1) * GIB, 1024)
    token_bytes(engine, no_peak, one_sequence)
    left = list(engine._tenants)
    initial, together = played(engine, together=True)
    _, alone = played(engine, together=False)
    capacity = [
        found.one_rank_tokens,
        found.sequence_tokens,
        found.forward_tokens,
        found.operation_tokens,
        found.adapter_bytes,
    ]
    return Report(initial["a"], together, alone, capacity, left)

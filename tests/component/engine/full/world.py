"""One rank of a world that plays the scenario of test_full; see engine/process.py."""

from __future__ import annotations

import json
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path

import msgspec
import numpy as np
import torch
import torch.distributed as dist
from safetensors import safe_open
from safetensors.torch import save_file

from services.common.contract.errors import TinsmithError
from services.common.contract.tensors import HostTensor, from_values
from services.trainer.compute.data import ModelState, Pass, Row, RowResult, ShardedState
from services.trainer.compute.engine import Engine
from services.trainer.compute.full.model import FullModel
from tests.component.engine import process
from tests.component.engine.data import ADAM, LORA, ce_row, is_row, op, with_input, work
from tests.component.engine.engines import heads_in_chunks

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
    heads: list[int] = []
    """Positions that this rank's output head computed for each step, in chunks."""


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
        except TinsmithError as error:
            return error.code
        return ""


def shared_directory() -> str:
    """A new one, the same on all ranks."""
    name = [tempfile.mkdtemp(dir=process.here.out) if dist.get_rank() == 0 else ""]
    dist.broadcast_object_list(name)
    return name[0]


def state_of(engine: Engine, model_id: str) -> ModelState:
    """What all ranks together write of a full model, put together on rank 0; no tensors elsewhere."""
    directory = shared_directory()
    writing = engine.write_state(model_id, directory)
    writing.done.result()
    tenant = engine._tenants[model_id]
    assert isinstance(tenant, FullModel)
    shapes = {name: getattr(each, "ds_shape", each.shape) for name, each in tenant._parameters.items()}
    weights: dict[str, HostTensor] = {}
    moments: dict[str, HostTensor] = {}
    for name, flat in _put_together(directory).items() if dist.get_rank() == 0 else ():
        parameter = name if name in shapes else name.rpartition(".")[0]
        values = from_values(flat.view(tuple(shapes[parameter])).numpy())
        (weights if name in shapes else moments)[name] = values
    in_order = {name: weights[name] for name in shapes if weights}
    return ModelState(lora=None, adapter=in_order, optimizer=moments, step=writing.step)


def _put_together(directory: str) -> dict[str, torch.Tensor]:
    found: dict[str, list[tuple[int, torch.Tensor]]] = {}
    for path in Path(directory).iterdir():
        with safe_open(path, framework="pt") as file:
            offsets = json.loads(file.metadata()["DCP_SHARDING_INFO"])
            for name in file.keys():  # noqa: SIM118
                found.setdefault(name, []).append((*offsets[name]["saved_offsets"], file.get_tensor(name)))
    parts = {name: sorted(each, key=lambda part: part[0]) for name, each in found.items()}
    return {name: torch.cat([values for _, values in each]) for name, each in parts.items()}


def saved(state: ModelState) -> ShardedState:
    """The state in files as a world of two ranks, which are not alike, would have written them."""
    directory = shared_directory()
    files: list[tuple[dict[str, torch.Tensor], dict[str, Mapping[str, list[int]]]]] = [({}, {}), ({}, {})]
    for name, array in (*state.adapter.items(), *state.optimizer.items()):
        flat = torch.from_numpy(array.values().copy()).flatten()
        cut = flat.numel() // 3
        for start, part, (tensors, offsets) in zip((0, cut), (flat[:cut], flat[cut:]), files, strict=True):
            tensors[name], offsets[name] = part.clone(), {"saved_offsets": [start]}
    for number, (tensors, offsets) in enumerate(files if dist.get_rank() == 0 else ()):
        path = Path(directory) / f"{number}.safetensors"
        save_file(tensors, path, {"DCP_SHARDING_INFO": json.dumps(offsets)})
    dist.barrier()
    return ShardedState(directory, state.step)


def scenario(engine: Engine) -> Report:
    report, player = Report(), Player(engine, dist.get_world_size())
    engine.create_model("lora", LORA)
    engine.create_model("full", None)
    report.states["fresh"] = state_of(engine, "full")
    for number, (loss_fn, rows) in enumerate(STEPS):
        # The last step's gradient comes in two operations.
        parts = [rows] if number < 2 else [rows[:2], rows[2:]]
        with heads_in_chunks(6) as computed:
            results = [
                result
                for part, some in enumerate(parts)
                for result in player.run("full", 10 * number + part, loss_fn, some)
            ]
        report.heads.append(sum(computed))
        report.results.append(results)
        report.steps.append(engine.optim_step("full", ADAM_FULL))
        report.states[f"step{number}"] = state_of(engine, "full")
    trained = report.states["step2"]
    report.states["weights"] = engine.state("full", optimizer=False)

    # The base model, which adapters share, is what it was.
    report.probes["lora"] = player.run("lora", 1, "cross_entropy", PROBE, forward_only=True)
    report.probes["full"] = player.run("full", 40, "cross_entropy", PROBE, forward_only=True)
    report.skipped = engine.optim_step("full", ADAM_FULL)

    engine.create_model("again", None)
    player.run("again", 1, "cross_entropy", PROBE)
    engine.load_state("again", saved(trained), True)
    report.states["loaded"] = state_of(engine, "again")
    for model_id in ("full", "again"):
        player.run(model_id, 50, *STEPS[0])
        engine.optim_step(model_id, ADAM_FULL)
        report.states[f"{model_id} resumed"] = state_of(engine, model_id)

    bad = with_input(is_row(11, 8), "logprobs", np.full(8, -1e30, np.float32))
    player.run("full", 60, "importance_sampling", [bad])
    report.refusals["non-finite"] = player.refusal("optim_step", "full", ADAM_FULL)
    report.states["after non-finite"] = state_of(engine, "full")
    player.run("full", 61, *STEPS[0])
    report.states["no pending gradient"] = state_of(engine, "full")

    wrong = {name: array for name, array in trained.adapter.items() if not name.endswith("norm.weight")}
    report.refusals["tensor missing"] = player.refusal(
        "load_state", "full", saved(msgspec.structs.replace(trained, adapter=wrong)), True
    )
    damaged = ShardedState(shared_directory(), trained.step)
    (Path(damaged.directory) / "0.safetensors").write_bytes(b"no tensors")
    whole, last = saved(trained), dist.get_rank() == dist.get_world_size() - 1
    seen = damaged if last else whole
    report.refusals["damaged on one rank"] = player.refusal("load_state", "full", seen, True)
    report.states["after damaged"] = state_of(engine, "full")
    report.refusals["adapter"] = player.refusal("load_state", "full", engine.state("lora"), True)
    report.refusals["not an adapter"] = player.refusal("load_state", "lora", saved(trained), True)
    engine.load_state("full", saved(trained), False)
    report.states["without optimizer"] = state_of(engine, "full")
    engine.drop_model("again")
    report.probes["reloaded"] = player.run("full", 70, "cross_entropy", PROBE, forward_only=True)
    return report

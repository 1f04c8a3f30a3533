"""What copies and saved states of models take of the host, against those that are there."""

from __future__ import annotations

import tracemalloc
from pathlib import Path
from typing import Any

import pytest
import torch

from services.trainer.compute.data import AdamSpec, LoraSpec, ModelState
from services.trainer.compute.lora.adapter import HEAD, Adapter, LinearShape, select_targets
from services.trainer.compute.memory.buffers import FlatBuffers
from services.trainer.compute.memory.sizes import ModelSizes
from services.trainer.compute.tenant import LoraTenant
from services.trainer.files.checkpoints import Meta, SavedState, read_state, state_files

LINEARS = {
    "layers.0.self_attn.q_proj": LinearShape(48, 32),
    "layers.0.mlp.up_proj": LinearShape(48, 64),
    HEAD: LinearShape(48, 100),
}


def sizes(*, on_device: bool) -> ModelSizes:
    return ModelSizes(LINEARS, (), 1000, 2, 1, on_device=on_device)


def state_of(spec: LoraSpec, moments: bool) -> ModelState:
    targets = select_targets(LINEARS, spec)
    tenant = LoraTenant(Adapter(spec, targets, "m", "cpu", 48, torch.bfloat16), FlatBuffers())
    tenant.due(tenant.take_gradient(), AdamSpec()).optimizer.start()
    state: ModelState = tenant.snapshot(moments).state()
    return state


@pytest.mark.parametrize("role", ["policy", "critic"])
@pytest.mark.parametrize("moments", [False, True])
def test_a_copy_takes_what_the_state_that_is_written_takes(role: Any, moments: bool) -> None:
    spec = LoraSpec(3, role=role)
    assert sizes(on_device=False).copy(spec, moments) == state_of(spec, moments).nbytes


def test_page_locked_copies_come_in_powers_of_two() -> None:
    spec = LoraSpec(3)
    exact = sizes(on_device=False).copy(spec, False)
    assert exact < sizes(on_device=True).copy(spec, False) < 2 * exact
    assert sizes(on_device=True).copy(spec, True) == 3 * sizes(on_device=True).copy(spec, False)
    assert sizes(on_device=True).copy(spec, False).bit_count() == 1


def test_of_a_full_model_weights_are_copied_as_they_compute_and_moments_never_are_in_one_place() -> None:
    assert [sizes(on_device=on_device).copy(None, False) for on_device in (False, True)] == [2000, 4000]
    assert sizes(on_device=True).copy(None, True) == 0


def test_a_saved_state_takes_what_it_does_while_it_is_read(tmp_path: Path) -> None:
    # So large that nothing else counts.
    spec = LoraSpec(256)
    meta = Meta("org/base", "org/base", "m", 1, 1, spec)
    for name, write in state_files(SavedState(meta, state_of(spec, True))).items():
        write(tmp_path / name)
    tracemalloc.start()
    try:
        assert read_state(tmp_path, tmp_path) is not None
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert peak == pytest.approx(sizes(on_device=True).loaded(spec), rel=0.05)
    assert sizes(on_device=True).loaded(None) == 0

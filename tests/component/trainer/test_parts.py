"""A trainer of two ranks with a base in bfloat16, each of which has a part of masters and moments."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file

from tests.component.trainer.world import BASE_MODEL, TrainedModel, TrainerWorld, batch, make_model
from tinsmith.internal.v1 import operation_pb2

pytestmark = pytest.mark.heavy

FLAGS = ("--micro-batch-tokens", "64", "--dtype", "bfloat16")
DATA = batch(31)


def published(model: TrainedModel, name: str) -> dict[str, torch.Tensor]:
    """What a sampler would get, by name."""
    asked = operation_pb2.SaveForSampler(checkpoint_id=f"sampler_weights/{name}")
    version = model.run(save_for_sampler=asked).save_for_sampler.version
    directory = model.world.data_dir / "snapshots" / model.model_id / str(version)
    return dict(load_file(directory / "adapter_model.safetensors"))


def trained_on(model: TrainedModel, name: str) -> dict[str, torch.Tensor]:
    """What the model is after one more step."""
    model.forward_backward(DATA)
    model.step()
    return published(model, name)


def test_ranks_save_publish_and_restore_what_each_has_a_part_of_and_one_rank_goes_on_with_it(
    redis_url: str, tmp_path: Path
) -> None:
    directory = make_model(tmp_path / "tiny")
    two = TrainerWorld(redis_url, directory, tmp_path / "data", 2, 0, *FLAGS)
    try:
        model = TrainedModel(two)
        model.create()
        model.forward_backward(DATA)
        model.step()
        saved = operation_pb2.SaveState(checkpoint_id="weights/here")
        model.run(save_state=saved)
        before = published(model, "before")
        assert {tensor.dtype for tensor in before.values()} == {torch.float32}
        assert any(not torch.equal(tensor, tensor.bfloat16().float()) for tensor in before.values())
        two.wait_durable(model.model_id, 2)

        gone_on = trained_on(model, "on")
        load = operation_pb2.LoadState(
            source_model_id=model.model_id, checkpoint_id="weights/here", optimizer=True
        )
        model.run(load_state=load)
        back = published(model, "back")
        assert all(torch.equal(tensor, back[name]) for name, tensor in before.items())
        again = trained_on(model, "again")
        assert all(torch.equal(tensor, again[name]) for name, tensor in gone_on.items())
        assert two.stop() == 0
    finally:
        two.kill()

    one = TrainerWorld(redis_url, directory, tmp_path / "data", 1, 0, *FLAGS)
    try:
        resumed = TrainedModel(one)
        create = operation_pb2.CreateModel(base_model=BASE_MODEL, from_state=load)
        resumed.run(create_model=create)
        same = published(resumed, "same")
        assert all(torch.equal(tensor, same[name]) for name, tensor in before.items())
        alone = trained_on(resumed, "alone")
        for name, tensor in gone_on.items():
            # Gradients were summed in another order; moments that were lost would show at once.
            moved = (tensor - before[name]).abs().mean()
            assert (alone[name] - tensor).abs().mean() < 1e-2 * moved, name
            assert np.isfinite(tensor.numpy()).all()
        assert one.stop() == 0
    finally:
        one.kill()

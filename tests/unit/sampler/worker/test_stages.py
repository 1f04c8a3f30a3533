"""A pipeline stage takes of an adapter what is for its own layers."""

from __future__ import annotations

import torch
from vllm.lora.lora_model import LoRAModel
from vllm.lora.lora_weights import LoRALayerWeights
from vllm.model_executor.models.utils import PPMissingLayer

from services.sampler.worker.extension import _leave_to_other_stages


class LastOfTwo(torch.nn.Module):
    """Has the second of two layers, and the head."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = PPMissingLayer()
        self.layers = torch.nn.ModuleList([PPMissingLayer(), torch.nn.Linear(2, 2)])
        self.lm_head = torch.nn.Linear(2, 2)


def test_what_is_for_another_stage_is_left_to_it_and_what_is_for_none_stays_to_be_refused() -> None:
    own = ["layers.1.q_proj", "lm_head"]
    others = ["layers.0.q_proj", "layers.0.mlp.up_proj", "embed"]
    nobodys = ["layers.2.q_proj", "layers.00.q_proj", "embedding"]
    pair = torch.zeros(1, 2)
    loras = {name: LoRALayerWeights(name, 1, 1, pair, pair.T) for name in [*own, *others, *nobodys]}
    adapter = LoRAModel(1, 1, loras)
    _leave_to_other_stages(adapter, LastOfTwo())
    assert sorted(adapter.loras) == sorted([*own, *nobodys])

"""An adapter of routed experts as the trainer has it is what vLLM takes for one that shares outer factors.

The layers that compute with it need a GPU's kernels, and are not run here; that it goes into their slots is.
"""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import AutoConfig
from transformers.models.qwen3_moe.modeling_qwen3_moe import Qwen3MoeExperts
from vllm.lora.layers.fused_moe import FusedMoEWithLoRA
from vllm.lora.lora_model import LoRAModel
from vllm.lora.lora_weights import PackedLoRALayerWeights
from vllm.lora.peft_helper import PEFTHelper
from vllm.lora.utils import is_in_target_modules

from services.common.contract.adapters import LORA_ALPHA
from services.sampler.engine.settings import LORA_TARGETS
from services.sampler.worker.extension import _check_slots
from services.trainer.compute.data import LoraSpec
from services.trainer.compute.lora.adapter import Adapter
from services.trainer.compute.lora.experts import shapes_of

NAME, RANK, HIDDEN, INNER, EXPERTS = "model.layers.0.mlp.experts", 8, 16, 24, 6


def trained() -> Adapter:
    config = AutoConfig.for_model(
        "qwen3_moe", num_experts=EXPERTS, moe_intermediate_size=INNER, hidden_size=HIDDEN
    )
    targets = {f"{NAME}.{part}": shape for part, shape in shapes_of(Qwen3MoeExperts(config)).items()}
    adapter = Adapter(LoraSpec(RANK), targets, "m", "cpu", HIDDEN)
    adapter.flat.normal_(generator=torch.Generator().manual_seed(1))
    return adapter


def test_vllm_packs_what_the_trainer_has() -> None:
    adapter = trained()
    views = adapter.views(adapter.flat)
    loaded = LoRAModel.from_lora_tensors(
        1,
        {f"base_model.model.{name}.weight": view.clone() for name, view in views.items()},
        PEFTHelper(r=RANK, lora_alpha=LORA_ALPHA, target_modules=[]),
        device="cpu",
    )
    parts = [f"{NAME}.{part}" for part in ("w1", "w2", "w3")]
    packed = PackedLoRALayerWeights.pack_moe_stacked([loaded.loras[part] for part in parts], NAME).optimize()
    # As FusedMoEWithLoRA has its buffers: [experts or 1, rank, in] and [experts or 1, out, rank].
    assert [tuple(a.shape) for a in packed.lora_a if a is not None] == [
        (1, RANK, HIDDEN),
        (EXPERTS, RANK, INNER),
        (1, RANK, HIDDEN),
    ]
    assert [tuple(b.shape) for b in packed.lora_b if b is not None] == [
        (EXPERTS, INNER, RANK),
        (1, HIDDEN, RANK),
        (EXPERTS, INNER, RANK),
    ]
    for part, a, b in zip(parts, packed.lora_a, packed.lora_b, strict=True):
        expected = views[f"{part}.lora_B"] @ views[f"{part}.lora_A"] * adapter.scale
        torch.testing.assert_close(b @ a, expected)


def test_experts_are_among_what_vllm_adapts() -> None:
    assert is_in_target_modules(NAME, LORA_TARGETS)


class Operations(TorchDispatchMode):
    """Counts what PyTorch does."""

    def __init__(self) -> None:
        super().__init__()
        self.count = 0

    def __torch_dispatch__(self, operation: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.count += 1
        return operation(*args, **(kwargs or {}))


def layer_of(experts: int) -> FusedMoEWithLoRA:
    """vLLM's layer with two slots, of a model that is not there."""
    layer = FusedMoEWithLoRA.__new__(FusedMoEWithLoRA)
    torch.nn.Module.__init__(layer)
    layer.moe_config = SimpleNamespace(
        hidden_dim=HIDDEN,
        num_local_experts=experts,
        intermediate_size_per_partition=INNER,
        moe_parallel_config=SimpleNamespace(use_ep=False),
    )
    layer._w13_slices, layer.device, layer.tp_size, layer.tp_rank = 2, torch.device("cpu"), 1, 0
    lora = SimpleNamespace(
        max_loras=2,
        max_lora_rank=2 * RANK,
        lora_dtype=torch.float32,
        fully_sharded_loras=False,
        enable_moe_shared_loras=True,
    )
    layer.create_lora_weights(2, lora)
    return layer


def check(layer: FusedMoEWithLoRA, experts: int, inner: int = INNER) -> None:
    """Checks an adapter of so many experts with so many features against the layer's slots."""
    ends = (torch.ones(1, RANK, HIDDEN), torch.ones(1, HIDDEN, RANK))
    inners = (torch.ones(experts, RANK, inner), torch.ones(experts, inner, RANK))
    parts = SimpleNamespace(lora_a=[ends[0], inners[0], ends[0]], lora_b=[inners[1], ends[1], inners[1]])
    manager = SimpleNamespace(modules={NAME: layer}, _get_lora_layer_weights=lambda adapter, name: parts)
    _check_slots(manager, LoRAModel(1, RANK, {}))


def test_whether_an_adapter_fits_its_slots_is_found_out_without_a_look_at_each_expert() -> None:
    counts = []
    for experts in (2, 64):
        layer = layer_of(experts)
        with Operations() as operations:
            check(layer, experts)
        counts.append(operations.count)
        assert not any(slots.any() for slots in (*layer.w13_lora_b_stacked, *layer.w2_lora_a_stacked))
    assert counts[0] == counts[1]


def test_an_adapter_whose_experts_are_others_does_not_fit() -> None:
    with pytest.raises(AssertionError, match="expert-dim mismatch"):
        check(layer_of(EXPERTS), EXPERTS + 1)
    with pytest.raises(RuntimeError, match="must match"):
        check(layer_of(EXPERTS), EXPERTS, INNER + 1)

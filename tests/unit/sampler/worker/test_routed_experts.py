"""An adapter of routed experts as the trainer has it is what vLLM takes for one that shares outer factors.

The layers that compute with it need a GPU's kernels, and are not run here; test_adapter_slots.py has that it
goes into their slots.
"""

from __future__ import annotations

import torch
from transformers import AutoConfig
from transformers.models.qwen3_moe.modeling_qwen3_moe import Qwen3MoeExperts
from vllm.lora.lora_model import LoRAModel
from vllm.lora.lora_weights import PackedLoRALayerWeights
from vllm.lora.peft_helper import PEFTHelper
from vllm.lora.utils import is_in_target_modules

from services.common.contract.adapters import LORA_ALPHA
from services.sampler.engine.settings.arguments import LORA_TARGETS
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

"""Of architectures whose layers have other names, no flag trains a part without a word."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from services.common.contract.errors import InvalidRequest
from services.trainer.compute.data import LoraSpec
from services.trainer.compute.lora.adapter import largest, select_targets
from services.trainer.compute.lora.targets import find_linears, find_unadapted
from tests.unit.trainer.compute.architectures import LATENT, config_of, random_model

_MAMBA = {"mamba_n_heads": 4, "mamba_d_head": 16, "mamba_d_state": 8, "mamba_chunk_size": 8}
_HYBRID = {**_MAMBA, "layer_types": ["mamba", "attention"]}
LEFT: dict[str, tuple[dict[str, Any], dict[str, str]]] = {
    "jamba": (
        {"attn_layer_period": 2, "attn_layer_offset": 1, "expert_layer_period": 4, "mamba_dt_rank": 4},
        {"train_attn": "mamba."},
    ),
    "bamba": ({**_MAMBA, "attn_layer_indices": [1]}, {"train_attn": "mamba.in_proj"}),
    "falcon_h1": ({**_MAMBA, "mamba_d_ssm": 64}, {"train_attn": "mamba.in_proj"}),
    "lfm2": ({"layer_types": ["conv", "full_attention"]}, {"train_attn": "conv.in_proj"}),
    "granitemoehybrid": (
        {**_HYBRID, "num_local_experts": 0, "shared_intermediate_size": 48},
        {"train_attn": "mamba.in_proj", "train_mlp": "shared_mlp.input_linear"},
    ),
    "granitemoeshared": ({"shared_intermediate_size": 48}, {"train_mlp": "shared_mlp.input_linear"}),
    "opt": ({"ffn_dim": 48, "word_embed_proj_dim": 32}, {"train_mlp": "fc1"}),
    "gpt2": ({}, {"train_attn": "attn.c_attn", "train_mlp": "mlp.c_fc"}),
    "gemma3n_text": (
        {"hidden_size_per_layer_input": 8, "vocab_size_per_layer_input": 64, "num_kv_shared_layers": 0},
        {"train_attn": "altup.", "train_mlp": "altup."},
    ),
}
"""Of an architecture its settings, and what is named of the flags that would train a part."""


def spec_of(*flags: str) -> LoraSpec:
    return LoraSpec(4, **{flag: flag in flags for flag in ("train_attn", "train_mlp", "train_unembed")})


@pytest.mark.parametrize("model_type", LEFT)
def test_a_flag_that_would_train_a_part_is_refused_and_the_part_named(model_type: str) -> None:
    settings, refused = LEFT[model_type]
    model = random_model(config_of(model_type, settings), "eager")
    linears, unadapted = find_linears(model), find_unadapted(model)
    for flag in ("train_attn", "train_mlp"):
        if flag not in refused:
            assert select_targets(linears, spec_of(flag), unadapted)
            continue
        with pytest.raises(InvalidRequest) as found:
            select_targets(linears, spec_of(flag, "train_unembed"), unadapted)
        assert f".{refused[flag]}" in found.value.message
        assert f"set {flag} to false. Adapters can train " in found.value.message
        assert flag not in found.value.message.rpartition("can train ")[2]
    whole = largest(linears, 4, unadapted)
    assert select_targets(linears, whole, unadapted)
    assert (whole.train_attn, whole.train_mlp) == ("train_attn" not in refused, "train_mlp" not in refused)


def test_what_scales_each_head_is_no_matrix() -> None:
    model = random_model(config_of("llama", {}), "eager")
    block = model.model.layers[0].self_attn
    block.decay = nn.Parameter(torch.ones(1, 1, 4, 1))
    assert find_unadapted(model) == []
    block.mix = nn.Parameter(torch.ones(1, 4, 8))
    assert find_unadapted(model) == ["model.layers.0.self_attn.mix"]


@pytest.mark.parametrize("model_type", ["deepseek_v32", "glm_moe_dsa"])
def test_what_chooses_the_tokens_that_are_seen_has_no_adapter_as_it_never_has_a_gradient(
    model_type: str,
) -> None:
    sparse = {"index_n_heads": 2, "index_head_dim": 16, "index_topk": 4}
    layers = {"mlp_layer_types": ["dense", "sparse"], "indexer_types": ["full", "full"]}
    model = random_model(config_of(model_type, {**LATENT, **sparse, **layers}), "eager")
    model(input_ids=torch.arange(1, 13)[None], use_cache=False).logits.sum().backward()
    linears = find_linears(model)
    adapted = {name for name in linears if "experts." not in name}
    assert [name for name in adapted if model.get_submodule(name).weight.grad is None] == []
    assert "model.layers.0.self_attn.q_a_proj" in select_targets(
        linears, spec_of("train_attn"), find_unadapted(model)
    )

"""Tiny random models of the architectures that the trainer is tested with."""

from __future__ import annotations

import copy
from typing import Any

import torch

from services.trainer.compute.attention import FLAT_ATTENTION
from services.trainer.compute.recurrent.layers import begin_anew

_SIZES: dict[str, Any] = {
    "vocab_size": 64,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "max_position_embeddings": 64,
    "pad_token_id": 0,
}
_EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16}
_SLIDING = {"sliding_window": 5}
_MIXED = {**_SLIDING, "layer_types": ["sliding_attention", "full_attention"]}
_LINEAR = {"layer_types": ["linear_attention", "full_attention"]}
LATENT = {
    "q_lora_rank": 16,
    "kv_lora_rank": 16,
    "qk_nope_head_dim": 8,
    "qk_rope_head_dim": 8,
    "v_head_dim": 12,
    "n_routed_experts": 4,
    "num_experts_per_tok": 2,
    "n_group": 1,
    "topk_group": 1,
    "moe_intermediate_size": 16,
    "num_key_value_heads": 4,
    "first_k_dense_replace": 1,
}

HYBRID: dict[str, dict[str, Any]] = {
    "qwen3_next": {**_EXPERTS, **_LINEAR},
    "qwen3_5_text": _LINEAR,
    "qwen3_5_moe_text": {**_EXPERTS, "shared_expert_intermediate_size": 16, **_LINEAR},
}
"""Those with layers of linear attention beside full attention."""

FLAT: dict[str, dict[str, Any]] = {
    "llama": {},
    "mistral": _SLIDING,
    "qwen2": {},
    "qwen3": {**_MIXED, "use_sliding_window": True},
    "phi3": _SLIDING,
    "gemma2": {**_MIXED, "attn_logit_softcapping": 2.0, "query_pre_attn_scalar": 8},
    "gemma3_text": _MIXED,
    "qwen2_moe": {**_EXPERTS, "shared_expert_intermediate_size": 16},
    "qwen3_moe": _EXPERTS,
    "mixtral": {"num_local_experts": 4, **_SLIDING},
    "gpt_oss": {"num_local_experts": 4, "num_experts_per_tok": 2, **_MIXED},
    "glm4_moe": {"n_routed_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16},
    "deepseek_v3": LATENT,
    # Its attention gives the mask by name.
    "afmoe": {**_EXPERTS, "num_dense_layers": 1, **_MIXED},
    **HYBRID,
}
"""transformers' model types that take several sequences at once, with what their configuration needs."""

SINGLE: dict[str, dict[str, Any]] = {
    "falcon_h1": {
        "mamba_d_ssm": 32,
        "mamba_n_heads": 4,
        "mamba_d_head": 8,
        "mamba_d_state": 8,
        "mamba_chunk_size": 8,
    },
    "recurrent_gemma": {
        "lru_width": 32,
        "attention_window_size": 8,
        "block_types": ["recurrent", "attention"],
    },
    "llama4_text": {"num_local_experts": 2, "intermediate_size_mlp": 48},
    "phi3": {
        "original_max_position_embeddings": 16,
        "rope_parameters": {
            "rope_type": "longrope",
            "rope_theta": 10_000.0,
            "long_factor": [2.0] * 4,
            "short_factor": [1.0] * 4,
            "original_max_position_embeddings": 16,
        },
    },
}
"""Those that compute one sequence at a time."""


def config_of(model_type: str, settings: dict[str, Any]) -> Any:
    """The configuration of a tiny model."""
    from transformers import AutoConfig

    return AutoConfig.for_model(model_type, **{**_SIZES, **settings})


def with_pictures(text: Any) -> Any:
    """A model that reads pictures too, in which this one, Gemma 3's or Qwen3.5's, is the text model."""
    from transformers import AutoConfig, AutoModelForImageTextToText

    kind = text.config.model_type.removesuffix("_text")
    small = {"num_hidden_layers": 1, "num_attention_heads": 2, "image_size": 28}
    if kind.startswith("qwen3_5"):
        small = {"depth": 1, "num_heads": 2, "out_hidden_size": text.config.hidden_size}
    vision = {"hidden_size": 32, "intermediate_size": 32, **small}
    both = AutoModelForImageTextToText.from_config(
        AutoConfig.for_model(kind, text_config=text.config.to_dict(), vision_config=vision)
    )
    both.model.language_model.load_state_dict(text.model.state_dict())
    both.lm_head.load_state_dict(text.lm_head.state_dict())
    return both


def random_model(config: Any, attention: str) -> Any:
    """A causal language model with weights that make everything in it matter, in evaluation mode."""
    from transformers import AutoModelForCausalLM

    torch.manual_seed(0)
    # The model notes its attention in the configuration.
    model = AutoModelForCausalLM.from_config(
        copy.deepcopy(config), attn_implementation=attention, dtype=torch.float32
    )
    for parameter in model.parameters():
        if parameter.dim() > 1:
            torch.nn.init.normal_(parameter, std=0.2)
    for name, buffer in model.named_buffers():
        # Of routers: what is added to scores while experts are chosen.
        if name.endswith("e_score_correction_bias"):
            torch.nn.init.normal_(buffer, std=0.2)
    if attention == FLAT_ATTENTION:
        begin_anew(model)
    return model.eval()

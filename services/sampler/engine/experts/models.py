"""Of which models a sampler can tell the experts of tokens, before it starts.

Invariant: one that is to tell them and cannot does not start.
"""

from __future__ import annotations

from vllm.config import ModelConfig

from services.common.contract.errors import InvalidRequest
from services.sampler.config import SamplerConfig


def check(config: SamplerConfig, model: ModelConfig, *, noted: bool) -> None:
    """Refuses a model whose experts cannot be told.

    Args:
        noted: vLLM notes those of all tokens.

    Raises:
        InvalidRequest: with what to change.
    """
    name = model.architectures[0]
    if not (model.is_moe and model.get_num_experts_per_tok()):
        raise InvalidRequest(
            f"--routed-experts is for models with routed experts, and {name} has none; leave it out"
        )
    if not noted:
        return
    # vLLM has room for those of as many tokens as there are keys and values of, keeps those of all tokens of
    # a sequence until it ends, and ends the engine where they are more.
    if model.is_attention_free:
        raise InvalidRequest(
            "--routed-experts is for models with attention, as vLLM has room for the experts of as many "
            f"tokens as it has keys and values of, and {name} has none; leave it out"
        )
    if (window := _window(model)) is None:
        return
    layers = set(getattr(model.hf_text_config, "layer_types", None) or ["sliding_attention"])
    if "full_attention" in layers:
        return
    if others := sorted(layers - {"sliding_attention", "linear_attention"}):
        raise InvalidRequest(
            f"layers of {config.base_model} attend by {' and '.join(others)}, and vLLM's room for experts is "
            "for tokens of which a layer keeps all keys and values, or as many as a window has; leave "
            "--routed-experts out"
        )
    if window < model.max_model_len:
        raise InvalidRequest(
            f"all layers of {config.base_model} have windows, and vLLM has no room for the experts of tokens "
            f"whose keys and values it has let go; give --max-context {window}, with which there are none, "
            "or leave --routed-experts out"
        )


def _window(model: ModelConfig) -> int | None:
    """The tokens that a sequence may have before keys and values of one are let go, in layers with a window;
    None: no layer has one."""
    text = model.hf_text_config
    return getattr(text, "sliding_window", None) if getattr(text, "use_sliding_window", True) else None

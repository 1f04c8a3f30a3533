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
    if noted and _windows_alone(model):
        # It has room for those of as many tokens as there are keys and values of, keeps those of all tokens
        # of a sequence until it ends, and ends the engine where they are more.
        raise InvalidRequest(
            f"all layers of {config.base_model} have windows, and vLLM has no room for the experts of tokens "
            "whose keys and values it has let go; leave --routed-experts out"
        )


def _windows_alone(model: ModelConfig) -> bool:
    text = model.hf_text_config
    if not (getattr(text, "sliding_window", None) and getattr(text, "use_sliding_window", True)):
        return False
    layers = getattr(text, "layer_types", None) or ["sliding_attention"]
    return "full_attention" not in layers

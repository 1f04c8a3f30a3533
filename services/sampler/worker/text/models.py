"""Which text models of vLLM are taken in a form of ours.

Published models of some families read pictures, and what is trained and sampled here is the text model in
them. vLLM's text models refuse the weights of what reads pictures (no upstream report found); its models of
both call their layers otherwise than the text model, and so than adapters that were trained of it.

Invariant: they are so in every process that asks vLLM's registry for them: the front end before it reads a
model's configuration, a worker before it loads a model.
"""

from __future__ import annotations

import importlib.util

from vllm import ModelRegistry

OF_BOTH = {
    "gemma3": "Gemma3ForCausalLM",
    "qwen3_5": "Qwen3_5ForCausalLM",
    "qwen3_5_moe": "Qwen3_5MoeForCausalLM",
}
"""By the type of models that read pictures too, the text model in them."""
_FILES = {"gemma3": "gemma3", "qwen3_5": "qwen3_5", "qwen3_5_moe": "qwen3_5"}


def complete() -> bool:
    """Whether all that vLLM imports for pictures is there."""
    return importlib.util.find_spec("torchvision") is not None


def register() -> None:
    """Tells this process's registry where the text models are. Nothing of them is imported yet."""
    for kind, name in OF_BOTH.items():
        ModelRegistry.register_model(name, f"{__package__}.{_FILES[kind]}:{name}")

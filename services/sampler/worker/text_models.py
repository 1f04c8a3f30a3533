"""vLLM's text models whose files begin with imports for pictures, where those cannot be made.

Invariant: where torchvision is installed nothing is changed. Where it is not, such a text model is vLLM's own
class (see qwen3_5.py), in every process that asks vLLM's registry for it: the front end before it reads a
model's configuration, a worker before it loads a model.
"""

from __future__ import annotations

import importlib.util

from vllm import ModelRegistry

_MODELS = ("Qwen3_5ForCausalLM", "Qwen3_5MoeForCausalLM")


def complete() -> bool:
    """Whether all that vLLM imports for pictures is there."""
    return importlib.util.find_spec("torchvision") is not None


def register() -> None:
    """Tells this process's registry where the text models are. Nothing of them is imported yet."""
    if complete():
        return
    for name in _MODELS:
        ModelRegistry.register_model(name, f"services.sampler.worker.qwen3_5:{name}")

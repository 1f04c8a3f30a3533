"""What the engine's settings depend on of a model, read from its configuration.

Invariant: it is read as vLLM reads it, and no code that comes with a model is run.
"""

from __future__ import annotations

import os
import shutil
import sysconfig
from pathlib import Path
from typing import Any

from vllm.transformers_utils.config import get_config
from vllm.transformers_utils.model_arch_config_convertor import ModelArchConfigConvertorBase

from services.common.contract.errors import InvalidRequest
from services.sampler.config import SamplerConfig

# Names of the number of experts in models' configurations.
_EXPERTS = ("num_experts", "num_local_experts", "n_routed_experts")
# Whose weights vLLM writes in part past the loaders that it replaces weights by.
PAST_LOADERS = ("GptOssForCausalLM",)


def text_config(config: SamplerConfig) -> Any:
    """That of what makes text, of a model that does other things too; as `hf_config`."""
    return hf_config(config).get_text_config()


def hf_config(config: SamplerConfig) -> Any:
    """The model's configuration as vLLM reads it, which knows models that transformers does not.

    Raises:
        InvalidRequest: it cannot be read.
    """
    try:
        return get_config(config.model_path, trust_remote_code=False)
    except (ValueError, OSError) as error:
        raise InvalidRequest(
            f"vLLM cannot read what kind of model {config.base_model} is: "
            f"{str(error).splitlines()[0].rstrip(' .')}; mend its config.json, or serve a model whose "
            "model_type the installed vLLM or transformers knows: code that comes with a model is not run"
        ) from error


def text_alone(architecture: str, settings: dict[str, Any], both: Any) -> Any:
    """The configuration of the text model in one that reads pictures too, as of a model of its own.

    Args:
        architecture: vLLM's name of it.
        settings: what it is told besides.
        both: the configuration of both.
    """
    text = both.get_text_config()
    quantised = getattr(both, "quantization_config", None)
    text.update({"architectures": [architecture], **settings})
    if quantised is not None:
        text.quantization_config = quantised
    return text


def is_quantised(config: SamplerConfig) -> bool:
    """Whether the model's files say that they are. Older ones of compressed-tensors have another word."""
    model = hf_config(config)
    return any(getattr(model, name, None) for name in ("quantization_config", "compression_config"))


def latent_attention(model: Any) -> tuple[int, int] | None:
    """What latent attention keeps of a token in a layer, without and with its position; None of a model with
    keys and values, also one that makes them of few numbers and keeps them whole."""
    rank = getattr(model, "kv_lora_rank", None)
    return (rank, model.qk_rope_head_dim) if rank and model.model_type != "minicpm3" else None


def most_tokens(model: Any) -> int | None:
    """The context that a model's configuration names, which families call otherwise; None: it names none, as
    of BLOOM, whose positions have no end."""
    found, named = ModelArchConfigConvertorBase(model, model).derive_max_model_len_and_key()
    return int(found) if named else None


def adapts(config: SamplerConfig, device: str) -> bool:
    """Whether the engine can run adapters, and is to.

    On a CPU it cannot for a model with routed experts: with adapters enabled vLLM takes its Triton kernels
    for them, which a CPU does not have, and the first request, of the base model too, ends the engine. Nor
    for one whose files are quantised: its CPU kernels let go of weights whose place its adapters ask for.
    """
    if config.max_loras == 0:
        return False
    if device != "cpu":
        return True
    if is_quantised(config):
        return False
    return not _has_experts(config)


def compiles(config: SamplerConfig, device: str) -> bool:
    """Whether the engine compiles the model, as vLLM does where nothing is said.

    On a CPU vLLM does so only where adapters are off. It needs a C++ compiler then, which not every machine
    has that samples. Models with routed experts are left out there: what notes whom a token was given to
    (worker/v1) is called by Python, and a model that was compiled does not call it. So are quantised ones.
    """
    if config.enforce_eager:
        return False
    if device != "cpu":
        return True
    return config.max_loras == 0 and not (is_quantised(config) or _has_experts(config)) and _has_compiler()


def _has_experts(config: SamplerConfig) -> bool:
    return any(getattr(text_config(config), name, None) for name in _EXPERTS)


def _has_compiler() -> bool:
    """Whether torch's inductor finds what it makes functions for CPUs with."""
    header = Path(sysconfig.get_path("include"), "Python.h")
    return shutil.which(os.environ.get("CXX", "g++")) is not None and header.exists()

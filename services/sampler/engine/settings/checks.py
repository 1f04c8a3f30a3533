"""What is refused before an engine starts: models, and settings of them, that vLLM does not run here.

Invariant: what is refused is refused with what to change, and nothing is left out in silence.
"""

from __future__ import annotations

import torch
from vllm.config import LoadConfig, ModelConfig, VllmConfig
from vllm.engine.arg_utils import AsyncEngineArgs

from services.common.contract.errors import InvalidRequest
from services.sampler.config import SamplerConfig
from services.sampler.engine.experts import models as with_experts
from services.sampler.engine.settings.models import hf_config, is_quantised, latent_attention, text_config
from services.sampler.worker.text.models import OF_BOTH

# Whose layers have one window or none in vLLM, and windows of their own in transformers.
_ONE_WINDOW = ("qwen2", "qwen3", "qwen2_moe")
# Latent attention and the part of it with positions, of a token: vLLM's kernel on CPUs is for no others.
_CPU_LATENT = (512, 64)


def check_model(config: SamplerConfig, arguments: AsyncEngineArgs) -> None:
    """Refuses what was asked for and the model cannot do, or vLLM with it.

    Raises:
        InvalidRequest: with what to change.
    """
    if config.quantization != "auto" and is_quantised(config):
        raise InvalidRequest(
            f"the files of {config.base_model} are quantised already: leave out --quantization "
            f"{config.quantization}"
        )
    model = arguments.create_model_config()
    name = model.architectures[0]
    # Whether recurrent state comes back to where it was before a draft that did not hold, nothing here has
    # tested.
    if config.speculative_ngram_tokens and (model.is_hybrid or model.is_attention_free):
        raise InvalidRequest(
            f"--speculative-ngram-tokens is for models of attention alone, and {name} has recurrent layers; "
            "leave it out"
        )
    stages, layers = config.pipeline_parallel_size, model.get_total_num_hidden_layers()
    if stages > layers:
        raise InvalidRequest(
            f"--pipeline-parallel-size is {stages}, and {config.base_model} has {layers} layers; give no more"
        )
    if stages > 1 and not model.registry.is_pp_supported_model(model.architectures, model):
        raise InvalidRequest(f"vLLM runs {name} in one stage only; leave out --pipeline-parallel-size")
    if model.quantization is not None:
        _check_quantised(config, model)
    if config.routed_experts:
        with_experts.check(config, model, noted=arguments.enable_return_routed_experts)


def _check_quantised(config: SamplerConfig, model: ModelConfig) -> None:
    try:
        VllmConfig.get_quantization_config(model, LoadConfig())
    except ValueError as error:
        cure = "leave out --quantization" if config.quantization != "auto" else "serve files of another kind"
        if model.dtype == torch.float32 and "torch.bfloat16" in str(error):
            cure = "give --dtype bfloat16"
        raise InvalidRequest(
            f"vLLM does not run the quantised weights of {config.base_model} so: {error}; {cure}"
        ) from error


def check_text(config: SamplerConfig) -> None:
    """Refuses a model that reads pictures too, or hears, whose text model is not served alone: the trainer
    trains that, whose layers have other names in vLLM's code for both, so that no adapter would fit.

    Raises:
        InvalidRequest: with what to change.
    """
    both = hf_config(config)
    if both.get_text_config() is not both and both.model_type not in OF_BOTH:
        raise InvalidRequest(
            f"{config.base_model} ({both.model_type}) is not of text alone, and of such a model the text "
            f"model is sampled here, which is known of {', '.join(OF_BOTH)} only: serve a model of text"
        )


def check_attention(config: SamplerConfig, device: str) -> None:
    """Refuses attention that vLLM does not compute, computes otherwise than transformers, or on a CPU in
    bfloat16 only.

    Raises:
        InvalidRequest: with what to change.
    """
    model = text_config(config)
    layers = set(getattr(model, "layer_types", None) or ())
    if model.model_type in _ONE_WINDOW and len(layers) > 1:
        raise InvalidRequest(
            f"{config.base_model} has a window in some of its layers, and vLLM has one for all or none: for "
            f"contexts up to {model.sliding_window} tokens (--max-context) the window changes nothing, and "
            '"use_sliding_window": false in config.json, without "layer_types", leaves it out'
        )
    if model.model_type == "deepseek_v3" and not getattr(model, "rope_interleave", True):
        raise InvalidRequest(
            f"{config.base_model} has rope_interleave false, and vLLM rotates pairs of neighbours: bring "
            "the rows of its weights that are rotated (of q_b_proj, or q_proj, and of kv_a_proj_with_mqa) "
            "into that order, and set rope_interleave to true in config.json"
        )
    if device != "cpu":
        return
    if "linear_attention" in layers and config.dtype != "bfloat16":
        raise InvalidRequest(
            f"{config.base_model} has linear attention, which vLLM computes on a CPU in bfloat16 only: give "
            "--dtype bfloat16, or use a GPU"
        )
    latent = latent_attention(model)
    if latent and latent != _CPU_LATENT:
        raise InvalidRequest(
            f"{config.base_model} has latent attention with {latent[0]} + {latent[1]} numbers a token "
            f"(kv_lora_rank, qk_rope_head_dim), and vLLM's for CPUs takes {_CPU_LATENT[0]} + "
            f"{_CPU_LATENT[1]} only: use a GPU"
        )

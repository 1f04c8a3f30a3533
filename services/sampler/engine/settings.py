"""The settings of vLLM's engine that follow from a sampler's.

Invariant: what decides the answers is set here and not left to vLLM's defaults: log-probabilities are the
raw model's, a request without a seed gets another stream on every replica, and vLLM itself evicts no adapter.
"""

from __future__ import annotations

import logging
import os
import secrets
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from pydantic import ValidationError
from vllm.config import LoadConfig, ModelConfig, StructuredOutputsConfig, VllmConfig
from vllm.engine.arg_utils import AsyncEngineArgs
from vllm.envs import disable_envs_cache
from vllm.transformers_utils.config import get_config
from vllm.triton_utils import HAS_TRITON
from vllm.usage.usage_lib import UsageContext
from vllm.v1.engine.async_llm import AsyncLLM

from services.common.contract.errors import InvalidRequest
from services.common.process.process import machine_memory
from services.sampler.config import GIB, SamplerConfig, device_environment, notes_experts
from services.sampler.engine import cpu_cache
from services.sampler.engine.calls import asked
from services.sampler.engine.engine_stats import EngineStats
from services.sampler.engine.experts import models as with_experts
from services.sampler.engine.grammars.checking import BACKEND
from services.sampler.engine.grammars.core import SECONDS_KEY
from services.sampler.worker import head_slots, text_models

log = logging.getLogger(__name__)

# What train_attn, train_mlp and train_unembed adapt, as architectures call it: apart or fused, of full
# attention or linear; and routed experts.
LORA_TARGETS = [
    *("q_proj", "k_proj", "v_proj", "qkv_proj", "o_proj"),
    *("in_proj_qkvz", "in_proj_ba", "in_proj_qkv", "in_proj_z", "in_proj_b", "in_proj_a", "out_proj"),
    *("gate_proj", "up_proj", "gate_up_proj", "down_proj", "experts"),
    "lm_head",
]
# Names of the number of experts in models' configurations.
_EXPERTS = ("num_experts", "num_local_experts", "n_routed_experts")
# How a model chooses experts where transformers, with which models are trained, has one way whatever the
# configuration says, and writes none; vLLM reads it from the configuration, and else takes another.
_ROUTING = {"deepseek_v3": {"scoring_func": "sigmoid", "topk_method": "noaux_tc"}}
# Whose layers have one window or none in vLLM, and windows of their own in transformers.
_ONE_WINDOW = ("qwen2", "qwen3", "qwen2_moe")
# Latent attention and the part of it with positions, of a token: vLLM's kernel on CPUs is for no others.
_CPU_LATENT = (512, 64)
# Whose weights vLLM writes in part past the loaders that it replaces weights by.
PAST_LOADERS = ("GptOssForCausalLM",)
# Of text and pictures; what they are without pictures has a type of its own.
_PICTURES = ("qwen3_5", "qwen3_5_moe")
# What vLLM takes for LLM.generate on a CPU. For a server it takes half as many, with which 1,024 at once take
# a tenth longer.
_CPU_SEQUENCES = 256
# More than the largest that people send take, with the vocabularies of large models.
_GRAMMAR_S = 60.0
# Residency decides what is resident; vLLM's own cache must never evict by itself.
_UNLIMITED_ADAPTERS = 1_000_000


def started(config: SamplerConfig, device: str) -> AsyncLLM:
    """vLLM's front end on "cpu" or "cuda", with its engine. Blocks until the model is loaded.

    Raises:
        InvalidRequest: with what to change.
    """
    # An engine that this process had before has kept the environment as it was then.
    disable_envs_cache()
    os.environ.update(device_environment(config, device, triton=HAS_TRITON))
    arguments = checked_args(config, device)
    # vLLM's defaults for a server: 1024 sequences in steps of 8192 tokens on a large GPU. Without a usage
    # context it takes 128 and 2048 on any.
    context = UsageContext.OPENAI_API_SERVER
    loggers: Any = [EngineStats] if config.metrics_port else None
    with refusals(config):
        llm = AsyncLLM.from_engine_args(arguments, usage_context=context, stat_loggers=loggers)
    asked.spare(llm)
    return llm


def checked_args(config: SamplerConfig, device: str) -> AsyncEngineArgs:
    """What vLLM is started with on "cpu" or "cuda", of a model that it computes there.

    Raises:
        InvalidRequest: with what to change.
    """
    check_text(config)
    check_attention(config, device)
    if device == "cuda" and adapts(config, device):
        head_slots.check(config, _text_config(config).vocab_size)
    text_models.register()
    with refusals(config):
        arguments = engine_args(config, device)
        check_model(config, arguments)
    return arguments


def engine_args(config: SamplerConfig, device: str) -> AsyncEngineArgs:
    """What vLLM is started with on "cpu" or "cuda"."""
    on_cpu = device == "cpu"
    cache = _cpu_cache(config) if on_cpu else None
    arguments: dict[str, Any] = {
        "model": config.model_path,
        # Of a model without such files nothing is loaded: those of PyTorch's own format would be unpickled.
        "load_format": "safetensors",
        "dtype": _dtype(config, on_cpu),
        "tensor_parallel_size": config.tensor_parallel_size,
        "pipeline_parallel_size": config.pipeline_parallel_size,
        "gpu_memory_utilization": config.gpu_memory_utilization,
        # On CUDA without a given size vLLM measures what the GPU has left.
        "kv_cache_memory_bytes": cache.kv_bytes if cache else int(config.kv_cache_gib * GIB) or None,
        # -1: what the model takes, or fewer, as many as there is room for.
        "max_model_len": cache.context if cache else config.max_context or -1,
        "kv_cache_dtype": config.kv_cache_dtype,
        "enforce_eager": on_cpu,
        "enable_prefix_caching": True,
        "logprobs_mode": "raw_logprobs",
        "max_logprobs": -1,
        "structured_outputs_config": StructuredOutputsConfig(backend=BACKEND),
        "additional_config": {SECONDS_KEY: min(_GRAMMAR_S, config.stall_seconds / 2)},
        # Requests without a seed differ between replicas and after a restart.
        "seed": secrets.randbits(31),
        "scheduler_cls": "services.sampler.engine.scheduler.make_scheduler",
        "worker_extension_cls": "services.sampler.worker.extension.WorkerExtension",
        # vLLM's own measurements stand beside ours.
        "disable_log_stats": not config.metrics_port,
        # A supervisor that signals every process must not cut off what is being drained.
        "shutdown_timeout": int(config.drain_seconds),
    }
    if adapts(config, device):
        arguments |= {
            "enable_lora": True,
            "max_loras": config.max_loras,
            "max_lora_rank": config.max_lora_rank,
            "max_cpu_loras": _UNLIMITED_ADAPTERS,
            "lora_target_modules": LORA_TARGETS,
            # Experts' adapters share what is beside the model's width. Without experts it means nothing.
            "enable_moe_shared_loras": True,
        }
    if config.quantization != "auto":
        arguments["quantization"] = config.quantization
    overrides = _routing(config)
    if config.head_dtype == "float32":
        overrides["head_dtype"] = "float32"
    if overrides:
        arguments["hf_overrides"] = overrides
    if drafts := config.speculative_ngram_tokens:
        arguments["speculative_config"] = {"method": "ngram", "num_speculative_tokens": drafts}
    if notes_experts(config, device):
        arguments["enable_return_routed_experts"] = True
    if config.max_sequences:
        arguments["max_num_seqs"] = config.max_sequences
    elif on_cpu:
        most = _CPU_SEQUENCES * config.workers
        # A step has a token of each.
        arguments["max_num_seqs"] = min(most, config.max_batched_tokens or most)
    if config.max_batched_tokens:
        arguments["max_num_batched_tokens"] = config.max_batched_tokens
    elif on_cpu:
        arguments["max_num_batched_tokens"] = max(2048 * config.workers, config.max_sequences)
    if on_cpu and _latent(_text_config(config)):
        # On CPUs with AMX vLLM would take another one, for bfloat16 only.
        arguments["attention_backend"] = "CPU_MLA"
    if on_cpu and config.workers == 1:
        arguments["distributed_executor_backend"] = "uni"
    return AsyncEngineArgs(**arguments)


def _dtype(config: SamplerConfig, on_cpu: bool) -> str:
    """What the engine computes in, which is what a trainer does that is left to itself too."""
    if config.dtype != "auto" or (not on_cpu and _is_quantised(config)):
        return config.dtype
    return "float32" if on_cpu else "bfloat16"


def check_model(config: SamplerConfig, arguments: AsyncEngineArgs) -> None:
    """Refuses what was asked for and the model cannot do, or vLLM with it.

    Raises:
        InvalidRequest: with what to change.
    """
    if config.quantization != "auto" and _is_quantised(config):
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
    """Refuses a model that reads pictures too: the trainer trains the text model in it, whose layers have
    other names in vLLM's code for both, so that no adapter and no full model would fit.

    Raises:
        InvalidRequest: with what to change.
    """
    if _hf_config(config).model_type in _PICTURES:
        raise InvalidRequest(
            f"{config.base_model} reads pictures too, and what is trained and sampled here is the text model "
            "alone: save it (transformers: AutoModelForCausalLM.from_pretrained(...).save_pretrained"
            "(DIRECTORY), and the tokenizer beside it) and serve that"
        )


def check_attention(config: SamplerConfig, device: str) -> None:
    """Refuses attention that vLLM does not compute, computes otherwise than transformers, or on a CPU in
    bfloat16 only.

    Raises:
        InvalidRequest: with what to change.
    """
    model = _text_config(config)
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
    latent = _latent(model)
    if latent and latent != _CPU_LATENT:
        raise InvalidRequest(
            f"{config.base_model} has latent attention with {latent[0]} + {latent[1]} numbers a token "
            f"(kv_lora_rank, qk_rope_head_dim), and vLLM's for CPUs takes {_CPU_LATENT[0]} + "
            f"{_CPU_LATENT[1]} only: use a GPU"
        )


def _latent(model: Any) -> tuple[int, int] | None:
    """What latent attention keeps of a token in a layer, without and with its position; None of a model with
    keys and values, also one that makes them of few numbers and keeps them whole."""
    rank = getattr(model, "kv_lora_rank", None)
    return (rank, model.qk_rope_head_dim) if rank and model.model_type != "minicpm3" else None


def _routing(config: SamplerConfig) -> dict[str, Any]:
    """Settings of the model that are not in its configuration.

    Raises:
        InvalidRequest: its configuration says otherwise.
    """
    model = _text_config(config)
    wanted = _ROUTING.get(model.model_type, {})
    for name, value in wanted.items():
        if getattr(model, name, value) != value:
            raise InvalidRequest(
                f"{config.base_model} has {name} {getattr(model, name)!r} in config.json, and transformers, "
                f"with which it is trained, computes {value!r}: say that there, or leave {name} out"
            )
    return dict(wanted)


@contextmanager
def refusals(config: SamplerConfig) -> Iterator[None]:
    """What vLLM says against a model or its settings before it starts anything, as one sentence.

    Raises:
        InvalidRequest: vLLM raised a ValueError.
    """
    try:
        yield
    except ValidationError as error:
        # Its own text goes on with links and the whole input.
        raise InvalidRequest(_refused(config, error.errors()[0]["msg"])) from error
    except ValueError as error:
        raise InvalidRequest(_refused(config, str(error))) from error


def _refused(config: SamplerConfig, words: str) -> str:
    return f"vLLM does not take {config.base_model} with these settings: {words}"


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
    if _is_quantised(config):
        return False
    return not any(getattr(_text_config(config), name, None) for name in _EXPERTS)


def _text_config(config: SamplerConfig) -> Any:
    return _hf_config(config).get_text_config()


def _hf_config(config: SamplerConfig) -> Any:
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


def _is_quantised(config: SamplerConfig) -> bool:
    """Whether the model's files say that they are. Older ones of compressed-tensors have another word."""
    model = _hf_config(config)
    return any(getattr(model, name, None) for name in ("quantization_config", "compression_config"))


def _cpu_cache(config: SamplerConfig) -> cpu_cache.CpuCache:
    """Keys and values of one worker on CPU, where vLLM does not measure what there is room for."""
    model = _text_config(config)
    cache = cpu_cache.choose(
        token_bytes=_token_bytes(config, model),
        model_context=model.max_position_embeddings,
        wanted_context=config.max_context,
        given_bytes=int(config.kv_cache_gib * GIB),
        memory=machine_memory() // (config.machine_samplers * config.workers),
    )
    if cache.context < (config.max_context or model.max_position_embeddings):
        log.warning(
            "this machine has room for %.1f GiB of keys and values of each of %d samplers: contexts end at "
            "%d tokens, and the model takes %d (--kv-cache-gib gives more, --max-context fewer)",
            cache.kv_bytes / GIB,
            config.machine_samplers,
            cache.context,
            model.max_position_embeddings,
        )
    return cache


def _token_bytes(config: SamplerConfig, model: Any) -> int:
    """Keys and values of a token in the worker that has most of them: of the layers of its stage, and there
    of its share of the heads, or of one head, which workers then have several times, or of what latent
    attention keeps in one piece."""
    head = getattr(model, "head_dim", None) or model.hidden_size // model.num_attention_heads
    heads = getattr(model, "num_key_value_heads", None) or model.num_attention_heads
    latent = _latent(model)
    numbers = sum(latent) if latent else 2 * max(1, heads // config.tensor_parallel_size) * head
    layers = -(-model.num_hidden_layers // config.pipeline_parallel_size)
    return layers * numbers * (2 if config.dtype == "bfloat16" else 4)

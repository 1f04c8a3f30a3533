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
from functools import partial
from typing import Any

from pydantic import ValidationError
from vllm.config import StructuredOutputsConfig
from vllm.engine.arg_utils import AsyncEngineArgs
from vllm.envs import disable_envs_cache
from vllm.triton_utils import HAS_TRITON
from vllm.usage.usage_lib import UsageContext
from vllm.v1.engine.async_llm import AsyncLLM

from services.common.contract.errors import InvalidRequest
from services.common.process.process import machine_memory
from services.sampler.config import GIB, SamplerConfig, device_environment, notes_experts
from services.sampler.engine.calls import asked
from services.sampler.engine.engine_stats import EngineStats
from services.sampler.engine.grammars.checking import BACKEND
from services.sampler.engine.grammars.core import SECONDS_KEY
from services.sampler.engine.settings import cpu_cache
from services.sampler.engine.settings.checks import check_attention, check_model, check_text
from services.sampler.engine.settings.models import (
    adapts,
    compiles,
    hf_config,
    is_quantised,
    latent_attention,
    most_tokens,
    text_alone,
    text_config,
)
from services.sampler.worker import head_slots
from services.sampler.worker.text import models as text_models

log = logging.getLogger(__name__)

# What train_attn, train_mlp and train_unembed adapt, as architectures call it: apart or fused, of full
# attention or linear; and routed experts.
LORA_TARGETS = [
    *("q_proj", "k_proj", "v_proj", "qkv_proj", "o_proj"),
    *("in_proj_qkvz", "in_proj_ba", "in_proj_qkv", "in_proj_z", "in_proj_b", "in_proj_a", "out_proj"),
    *("gate_proj", "up_proj", "gate_up_proj", "down_proj", "experts"),
    "lm_head",
]
# How a model chooses experts where transformers, with which models are trained, has one way whatever the
# configuration says, and writes none; vLLM reads it from the configuration, and else takes another.
_ROUTING = {"deepseek_v3": {"scoring_func": "sigmoid", "topk_method": "noaux_tc"}}
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
    compiled = compiles(config, device)
    os.environ.update(device_environment(config, device, triton=HAS_TRITON, compiles=compiled))
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
        head_slots.check(config, text_config(config).vocab_size)
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
        "enforce_eager": not compiles(config, device),
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
    if architecture := text_models.OF_BOTH.get(hf_config(config).model_type):
        arguments["hf_overrides"] = partial(text_alone, architecture, overrides)
    elif overrides:
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
    if on_cpu and latent_attention(text_config(config)):
        # On CPUs with AMX vLLM would take another one, for bfloat16 only.
        arguments["attention_backend"] = "CPU_MLA"
    if on_cpu and config.workers == 1:
        arguments["distributed_executor_backend"] = "uni"
    return AsyncEngineArgs(**arguments)


def _dtype(config: SamplerConfig, on_cpu: bool) -> str:
    """What the engine computes in, which is what a trainer does that is left to itself too."""
    if config.dtype != "auto" or (not on_cpu and is_quantised(config)):
        return config.dtype
    return "float32" if on_cpu else "bfloat16"


def _routing(config: SamplerConfig) -> dict[str, Any]:
    """Settings of the model that are not in its configuration.

    Raises:
        InvalidRequest: its configuration says otherwise.
    """
    model = text_config(config)
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


def _cpu_cache(config: SamplerConfig) -> cpu_cache.CpuCache:
    """Keys and values of one worker on CPU, where vLLM does not measure what there is room for.

    Raises:
        InvalidRequest: the model's configuration does not say what they follow from.
    """
    model = text_config(config)
    context = most_tokens(model) or config.max_context
    if not context:
        raise InvalidRequest(
            f"the config.json of {config.base_model} does not say how many tokens the model takes: give "
            "--max-context"
        )
    try:
        token_bytes = _token_bytes(config, model)
    except AttributeError as error:
        raise InvalidRequest(
            f"the config.json of {config.base_model} does not say how large the keys and values of a token "
            f"are ({error}), of which a sampler on a CPU chooses how many it keeps: use a GPU"
        ) from error
    cache = cpu_cache.choose(
        token_bytes=token_bytes,
        model_context=context,
        wanted_context=config.max_context,
        given_bytes=int(config.kv_cache_gib * GIB),
        memory=machine_memory() // (config.machine_samplers * config.workers),
    )
    if cache.context < (config.max_context or context):
        log.warning(
            "this machine has room for %.1f GiB of keys and values of each of %d samplers: contexts end at "
            "%d tokens, and the model takes %d (--kv-cache-gib gives more, --max-context fewer)",
            cache.kv_bytes / GIB,
            config.machine_samplers,
            cache.context,
            context,
        )
    return cache


def _token_bytes(config: SamplerConfig, model: Any) -> int:
    """Keys and values of a token in the worker that has most of them: of the layers of its stage, and there
    of its share of the heads, or of one head, which workers then have several times, or of what latent
    attention keeps in one piece."""
    head = getattr(model, "head_dim", None) or model.hidden_size // model.num_attention_heads
    heads = getattr(model, "num_key_value_heads", None) or model.num_attention_heads
    latent = latent_attention(model)
    numbers = sum(latent) if latent else 2 * max(1, heads // config.tensor_parallel_size) * head
    layers = -(-model.num_hidden_layers // config.pipeline_parallel_size)
    return layers * numbers * (2 if config.dtype == "bfloat16" else 4)

"""Settings of a sampler process: the command line, with an environment variable behind each flag.

Invariant: secrets come from the environment only (the Redis URL may hold a password).
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Literal, get_args

from services.common.contract.errors import InvalidRequest
from services.common.process import flags
from services.common.process.flags import (
    MODEL,
    PATH,
    PORT,
    SWITCH,
    TEXT,
    Flag,
    Kind,
    decimal,
    number,
    one_of,
)
from services.common.telemetry import logs

Device = Literal["auto", "cpu", "cuda"]
Dtype = Literal["auto", "float32", "bfloat16"]
KvCacheDtype = Literal["auto", "fp8"]
HeadDtype = Literal["auto", "float32"]
Quantization = Literal["auto", "fp8_per_tensor", "fp8_per_channel", "fp8_per_block"]
ModelRunner = Literal["auto", "v1", "v2"]

REDIS_URL_VARIABLE = "TINSMITH_REDIS_URL"
GIB = 1 << 30
MAX_DRAFT = 128
"""Most drafted tokens of a sequence in one step: vLLM takes no more."""
MAX_BAD_WORD_TOKENS = 8192
"""Tokens of all bad words of a request: vLLM's V2 model runner has room for so many of each sequence."""
LORA_RANKS = (1, 8, 16, 32, 64, 128, 256)


@dataclass(frozen=True)
class SamplerConfig:
    """One sampler replica.

    Attributes:
        id: name of the process, stable over restarts.
        base_model: name SDK users pass.
        model_path: directory or hub id of weights and tokenizer.
        device: "auto" takes what the installed vLLM runs on.
        dtype: "auto" is float32 on CPU, and on CUDA bfloat16, or of quantised files what goes with them.
            float32 on CUDA is for samplers without adapters.
        host, port, advertise_host: where gRPC listens (0 = a free port), and the name others use.
        identity: directory of ca.crt, tls.crt and tls.key, for mutual TLS; empty: in the clear.
        metrics_port: of Prometheus' /metrics; 0 = none.
        log_format: of the log, "text" or "json".
        access_log: whether each call is a line of the log.
        data_dir: shared directory with the snapshots.
        redis_url: of the cluster's Redis.
        max_context: most tokens of a prompt and its answer; 0 = as many as the model takes, or as many as the
            memory for keys and values holds.
        max_loras: adapters in one engine step; requests for more take turns. 0 = none at all: only the base
            model and full models are sampled, and the engine spends nothing on adapters.
        max_lora_rank: largest adapter rank.
        snapshot_cache_gib: host memory, of all workers together, for adapters that may be sampled from
            without a reload.
        full_snapshot_cache_gib: host memory, of all workers together, for snapshots of full models; others
            are read from the store when their weights go into the engine.
        kv_cache_gib: memory of each worker for keys and values; 0 = from the model and what the machine has
            on CPU, from gpu_memory_utilization on CUDA.
        machine_samplers: that share this machine's memory, this one included: where kv_cache_gib is chosen on
            a CPU, each counts with an equal part of it.
        gpu_memory_utilization: fraction of the GPU's memory for this engine.
        kv_cache_dtype: of keys and values; "auto" is the model's. "fp8" has room for twice as many, and
            changes log-probabilities; CUDA only.
        head_dtype: in which the output head computes logits; "auto" is the model's. "float32" of a bfloat16
            model brings its log-probabilities nearer to the trainer's, whose head computes in float32.
        quantization: in which weights are held; "auto" is what the model's files say. Others quantise a
            model of bfloat16 or float16 while it is loaded, on CUDA: fp8 with a scale for each matrix, each
            of its outputs, or each 128 x 128 of it. It changes log-probabilities, and runs no full models.
        model_runner: which of vLLM's two computes the steps; "auto" is V1 on a CPU and where tokens are
            drafted, else what vLLM itself would take.
        speculative_ngram_tokens: most tokens that a step drafts for each sequence, from what followed its
            last ones when they came before; 0 = none. Drafts change how many tokens a step makes, and none.
        enforce_eager: nothing is compiled, and on a GPU nothing captured: it starts sooner, needs less memory
            and is slower. Else vLLM compiles what it does on this device: on a CPU models without adapters.
        routed_experts: the experts of a sample's tokens are told if it asks for them, or this does not start.
            vLLM then notes those of every token, on its V2 model runner. On a CPU V1 tells them in any case,
            and notes them where they are asked for.
        tensor_parallel_size: workers (and GPUs) that share each layer.
        pipeline_parallel_size: stages, each with a part of the layers and `tensor_parallel_size` workers.
        max_sequences: sequences that the engine generates at once; 0 = what vLLM takes on this device.
        max_batched_tokens: tokens of prompts and sequences that one engine step computes; 0 = what vLLM takes
            on this device.
        drain_seconds: how long running requests may take after SIGTERM.
        stall_seconds: an engine that finishes no step for this long while requests run, or answers nothing,
            is stuck, and this process ends to be started again.
    """

    id: str = ""
    base_model: str = ""
    model_path: str = ""
    data_dir: Path = Path()
    redis_url: str = ""
    device: Device = "auto"
    dtype: Dtype = "auto"
    host: str = "127.0.0.1"
    port: int = 0
    identity: Path = Path()
    metrics_port: int = 0
    log_format: str = "text"
    access_log: bool = False
    advertise_host: str = "127.0.0.1"
    max_context: int = 0
    max_loras: int = 8
    max_lora_rank: int = 128
    snapshot_cache_gib: float = 4.0
    full_snapshot_cache_gib: float = 16.0
    kv_cache_gib: float = 0.0
    machine_samplers: int = 1
    kv_cache_dtype: KvCacheDtype = "auto"
    head_dtype: HeadDtype = "auto"
    quantization: Quantization = "auto"
    model_runner: ModelRunner = "auto"
    speculative_ngram_tokens: int = 0
    enforce_eager: bool = False
    routed_experts: bool = False
    gpu_memory_utilization: float = 0.4
    tensor_parallel_size: int = 1
    pipeline_parallel_size: int = 1
    max_sequences: int = 0
    max_batched_tokens: int = 0
    drain_seconds: float = 60.0
    stall_seconds: float = 300.0

    @property
    def workers(self) -> int:
        """Workers (and GPUs) of this replica."""
        return self.tensor_parallel_size * self.pipeline_parallel_size


@dataclass(frozen=True)
class _Asked:
    model: tuple[str, ...] = ()


def _given(text: str) -> str:
    if not text:
        raise ValueError
    return text


def _rank(text: str) -> int:
    return LORA_RANKS[[str(rank) for rank in LORA_RANKS].index(text)]


_ABOUT = "Serves one base model and any number of its adapters with vLLM."
_MOST = 10**9
_COUNT, _COUNT_OR_0 = number(1, _MOST), number(0, _MOST)
_GIB, _SECONDS = decimal(0, 10**6, "GiB"), decimal(0, _MOST, "seconds")

# One row a flag, so that what goes together is read together.
# fmt: off
FLAGS: dict[str, tuple[Flag, ...]] = {
    "this process": (
        Flag("--id", Kind("a name", "TEXT", _given), SamplerConfig, "id",
             "name of this process, for example sampler-0; must be given"),
        Flag("--host", TEXT, SamplerConfig, "host", "address to listen on"),
        Flag("--port", PORT, SamplerConfig, "port", "port to listen on, 0 = a free one"),
        Flag("--advertise-host", TEXT, SamplerConfig, "advertise_host",
             "name under which others reach this host"),
        Flag("--identity", PATH, SamplerConfig, "identity",
             "directory of ca.crt, tls.crt and tls.key: who this sampler is; only the cluster's gateways and "
             "trainers may call it then. Empty: in the clear, for everybody who reaches it"),
        Flag("--metrics-port", PORT, SamplerConfig, "metrics_port",
             "port of Prometheus' /metrics; 0 = none"),
        Flag("--log-format", one_of(logs.FORMATS), SamplerConfig, "log_format",
             "lines to read, or JSON objects to search"),
        Flag("--access-log", SWITCH, SamplerConfig, "access_log", "yes: a line in the log for every call"),
        Flag("--drain-seconds", _SECONDS, SamplerConfig, "drain_seconds",
             "time for running requests after SIGTERM"),
        Flag("--stall-seconds", decimal(1, _MOST, "seconds"), SamplerConfig, "stall_seconds",
             "time without progress after which a stuck engine ends"),
    ),
    "models and files": (
        Flag("--model", MODEL, _Asked, "model",
             "name SDK users pass, and directory or hub id; must be given"),
        Flag("--data-dir", Kind("a directory", "PATH", lambda text: Path(_given(text))), SamplerConfig,
             "data_dir",
             "directory shared with gateway and trainer; must be given"),
        Flag("--max-loras", _COUNT_OR_0, SamplerConfig, "max_loras",
             "adapters in one engine step; 0 = adapters are not sampled"),
        Flag("--max-lora-rank", Kind(f"one of {LORA_RANKS}", "N", _rank), SamplerConfig, "max_lora_rank",
             f"largest adapter rank: one of {LORA_RANKS}"),
        Flag("--snapshot-cache-gib", _GIB, SamplerConfig, "snapshot_cache_gib",
             "host memory for adapter snapshots"),
        Flag("--full-snapshot-cache-gib", _GIB, SamplerConfig, "full_snapshot_cache_gib",
             "host memory for snapshots of full models"),
    ),
    "how it computes": (
        Flag("--device", one_of(get_args(Device)), SamplerConfig, "device", "where to run"),
        Flag("--dtype", one_of(get_args(Dtype)), SamplerConfig, "dtype",
             "auto: bfloat16 on CUDA, float32 on CPU"),
        Flag("--head-dtype", one_of(get_args(HeadDtype)), SamplerConfig, "head_dtype",
             "float32: logits of any model"),
        Flag("--quantization", one_of(get_args(Quantization)), SamplerConfig, "quantization",
             "of weights; auto: as the model's files are"),
        Flag("--model-runner", one_of(get_args(ModelRunner)), SamplerConfig, "model_runner",
             "of vLLM; auto: v1 on a CPU or with drafts alone, else vLLM's choice"),
        Flag("--speculative-ngram-tokens", number(0, MAX_DRAFT), SamplerConfig, "speculative_ngram_tokens",
             "tokens drafted for each sequence and step; 0 = none"),
        Flag("--enforce-eager", SWITCH, SamplerConfig, "enforce_eager", "yes: the model is not compiled"),
        Flag("--routed-experts", SWITCH, SamplerConfig, "routed_experts",
             "yes: samples may ask for them on a GPU, too, where those of all tokens are noted"),
        Flag("--tensor-parallel-size", _COUNT, SamplerConfig, "tensor_parallel_size",
             "GPUs that share each layer"),
        Flag("--pipeline-parallel-size", _COUNT, SamplerConfig, "pipeline_parallel_size",
             "stages of GPUs that share the layers among them"),
    ),
    "lengths and memory": (
        Flag("--max-context", _COUNT_OR_0, SamplerConfig, "max_context",
             "most tokens of prompt and answer; 0 = choose"),
        Flag("--max-sequences", _COUNT_OR_0, SamplerConfig, "max_sequences",
             "sequences generated at once; 0 = choose"),
        Flag("--max-batched-tokens", _COUNT_OR_0, SamplerConfig, "max_batched_tokens",
             "tokens of one engine step; 0 = choose"),
        Flag("--kv-cache-gib", _GIB, SamplerConfig, "kv_cache_gib",
             "memory of each worker for keys and values; 0 = choose"),
        Flag("--machine-samplers", _COUNT, SamplerConfig, "machine_samplers",
             "that share the memory, where that is chosen on a CPU"),
        Flag("--kv-cache-dtype", one_of(get_args(KvCacheDtype)), SamplerConfig, "kv_cache_dtype",
             "fp8: on CUDA, twice the room"),
        Flag("--gpu-memory-utilization", decimal(0.01, 1), SamplerConfig, "gpu_memory_utilization",
             "fraction of GPU memory to use"),
    ),
}
# fmt: on


def parse(argv: Sequence[str], environment: Mapping[str, str] = os.environ) -> SamplerConfig:
    """Settings from the command line and the environment.

    Raises:
        SystemExit: a flag has no value (argparse).
        InvalidRequest: with all that is wrong, a line each.
    """
    parser = flags.parser("python -m services.sampler", _ABOUT, FLAGS, environment)
    given = flags.given(parser, FLAGS, argv)
    config = given.of(SamplerConfig, redis_url=environment.get(REDIS_URL_VARIABLE, ""))
    found = [*given.mistakes, *_mistakes(config)]
    if found:
        raise InvalidRequest("\n  ".join(found))
    base_model, model_path = given.of(_Asked).model
    config = replace(config, base_model=base_model, model_path=model_path)
    check_device(config, config.device)
    return config


def _mistakes(config: SamplerConfig) -> Iterator[str]:
    """What is wrong although each flag is right."""
    if not config.redis_url:
        yield f"set {REDIS_URL_VARIABLE}, for example redis://127.0.0.1:6379/0"
    if config.max_context == 1:
        yield "--max-context is 1; a prompt and its answer are 2 tokens at least, so give more"
    step, sequences = config.max_batched_tokens, config.max_sequences
    if step and step < sequences:
        yield (
            f"--max-batched-tokens is {step} and --max-sequences {sequences}; a step computes a token of "
            "each sequence, so give the first at least the second"
        )
    if config.speculative_ngram_tokens and config.pipeline_parallel_size > 1:
        # vLLM 0.32 would schedule the drafts of a request before it has the token that they follow.
        yield (
            "--speculative-ngram-tokens does not go with --pipeline-parallel-size above 1; leave one of them "
            "out"
        )
    if config.routed_experts and config.pipeline_parallel_size > 1:
        yield (
            "--routed-experts does not go with --pipeline-parallel-size above 1, as a stage knows those of "
            "its own layers; leave one of them out"
        )
    if config.quantization != "auto" and config.dtype == "float32":
        yield (
            f"--quantization {config.quantization} is for models in bfloat16 or float16, and --dtype says "
            "float32; leave one of them out"
        )


def check_device(config: SamplerConfig, device: str) -> None:
    """Refuses what a device cannot do; of "auto" that is known when vLLM says what it runs on.

    Raises:
        InvalidRequest: with what to change.
    """
    if config.kv_cache_dtype == "fp8" and device == "cpu":
        raise InvalidRequest("--kv-cache-dtype fp8 is for CUDA; leave it out on a CPU")
    if config.quantization != "auto" and device == "cpu":
        raise InvalidRequest(f"--quantization {config.quantization} is for CUDA; leave it out on a CPU")
    if config.routed_experts and config.model_runner == "v1" and device == "cuda":
        raise InvalidRequest(
            "--routed-experts on CUDA needs vLLM's V2 model runner, and --model-runner says v1; leave one of "
            "them out"
        )
    if config.dtype == "float32" and config.max_loras and device == "cuda":
        # Its Triton kernels for adapters assert it.
        raise InvalidRequest(
            "vLLM computes adapters on CUDA in bfloat16 or float16 only, and --dtype says float32: leave it "
            "out (--head-dtype float32 has logits in float32), or give --max-loras 0"
        )


def engine_environment(config: SamplerConfig) -> dict[str, str]:
    """Environment that must stand before vLLM is imported, here and in its processes."""
    environment = {
        # A forked child would inherit gRPC's threads.
        "VLLM_WORKER_MULTIPROC_METHOD": "spawn",
        "VLLM_LOGGING_STREAM": "ext://sys.stderr",
        "VLLM_NO_USAGE_STATS": "1",
        "VLLM_MAX_BAD_WORDS_TOTAL_TOKENS": str(MAX_BAD_WORD_TOKENS),
        # It would leave a thread behind for each; see `engine.grammars`.
        "VLLM_REGEX_COMPILATION_TIMEOUT_S": "0",
        # On cores that others use too, threads that spin at each barrier take the core from the thread that
        # they wait for, and a step with its hundreds of barriers takes seconds. With GNU's OpenMP they spin
        # for some microseconds and then sleep: shorter than that, waking them costs more than it saves.
        "OMP_WAIT_POLICY": os.environ.get("OMP_WAIT_POLICY", "passive"),
        "GOMP_SPINCOUNT": os.environ.get("GOMP_SPINCOUNT", "2000"),
        REDIS_URL_VARIABLE: config.redis_url,
        # For the engine's processes, which are not given flags.
        **{"TINSMITH_ID": config.id, "TINSMITH_LOG_FORMAT": config.log_format},
    }
    if config.log_format == "json":
        # vLLM's loggers have no handlers of their own then.
        environment["VLLM_CONFIGURE_LOGGING"] = "0"
    if config.workers == 1:
        # On CPU the engine core then runs the model itself instead of in one more process. The
        # core is a process of its own either way.
        environment["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"
    else:
        # Left to itself, vLLM on CPU binds each worker to a NUMA node of its own, and does not start where
        # there are fewer.
        environment["VLLM_CPU_OMP_THREADS_BIND"] = os.environ.get("VLLM_CPU_OMP_THREADS_BIND", "nobind")
    return environment


def notes_experts(config: SamplerConfig, device: str) -> bool:
    """Whether vLLM is to note the experts of all tokens, which its V2 model runner does. With V1 on a CPU
    those that are asked for are noted here."""
    return config.routed_experts and (device != "cpu" or config.model_runner == "v2")


def device_environment(config: SamplerConfig, device: str, *, triton: bool, compiles: bool) -> dict[str, str]:
    """Environment of vLLM that depends on what it runs on, above all which of its two model runners computes
    the steps. Without a word of it vLLM chooses.

    Args:
        triton: whether vLLM has Triton here, in which the kernels of its V2 model runner are written.
        compiles: whether the model is compiled.

    Raises:
        InvalidRequest: V2 is asked for where it cannot run.
    """
    runner = config.model_runner
    if runner == "v2" or notes_experts(config, device):
        if not triton:
            flag = "--model-runner v2" if runner == "v2" else "--routed-experts"
            raise InvalidRequest(f"{flag} needs Triton, and vLLM has none on this {device}; leave it out")
        runner = "v2"
    if device == "cpu":
        # Compiling the sampler's helpers alone only costs start-up.
        environment = {"TORCH_COMPILE_DISABLE": "0" if compiles else "1"}
    else:
        # Else vLLM has FlashInfer draw under top-k and top-p, in its warm-up already. FlashInfer compiles
        # that with a CUDA toolkit, which nothing else here needs: without one the engine ends at its start.
        environment = {"VLLM_USE_FLASHINFER_SAMPLER": os.environ.get("VLLM_USE_FLASHINFER_SAMPLER", "0")}
    if runner == "auto" and (device == "cpu" or config.speculative_ngram_tokens):
        runner = "v1"
    if runner != "auto":
        environment["VLLM_USE_V2_MODEL_RUNNER"] = {"v1": "0", "v2": "1"}[runner]
    return environment

"""Which processes a local cluster is made of: a pure function of the options.

Invariant: process names are unique and stable, so a restart of the cluster finds the same pid and
log files; no secret is in any argv.
"""

from __future__ import annotations

import shlex
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

import msgspec

from services.common.state.known_models import Configured
from services.common.storage.data_dir import DataDir
from services.common.tls.wires import Role
from services.common.worlds.nodes import Nodes
from services.launcher.placement import Place, left_to_trainers, places

_LOOPBACK = "127.0.0.1"
_KV_SHARE = 25
"""Percent of a machine's memory that its samplers on the CPU take for keys and values at most, together;
engine/settings/cpu_cache.py of a sampler divides it."""

_TRAINER_GRACE_S = 90.0
"""An agent kills ranks after 30 s, and may wait as long again for their end."""

TrainerCommand = Callable[[int, list[str]], list[str]]
"""(ranks, arguments of services.trainer) -> argv."""


@dataclass(frozen=True)
class Model:
    """A base model: the name SDK users pass, and the directory or hub id it is loaded from."""

    name: str
    source: str


@dataclass(frozen=True)
class Options:
    """What `tinsmith up` was asked for; services/launcher/settings/table.py says what each setting means.

    Attributes:
        data_dir: absolute.
        checkpoint_store: empty = in data_dir.
        device: "cpu" or "cuda".
        trainer_ranks, samplers: of each base model on this machine, as placement.counts decides.
        cores: CPUs to share out.
        gpus: GPUs to share out on "cuda".

    None = the service that it is a setting of decides.
    """

    models: tuple[Model, ...]
    data_dir: Path
    host: str = "127.0.0.1"
    port: int = 8000
    grpc_port: int = 8001
    public_url: str | None = None
    stable_reinforce_as: str | None = None
    metrics_port: int | None = None
    log_format: str = "text"
    access_log: str = "no"
    max_context: int | None = None
    max_lora_rank: int = 128
    dtype: str = "auto"
    device: str = "cpu"
    gateways: int = 1
    trainer_ranks: int = 1
    trainer_nodes: int = 1
    trainer_rendezvous: tuple[str, int] | None = None
    trainer_interface: str | None = None
    samplers: int = 1
    sampler_tp: int = 1
    sampler_pp: int = 1
    sampler_memory: float | None = None
    zero_stage: int = 0
    zero_replica_ranks: int = 1
    zero_prefetch_elements: int | None = None
    zero_quantized_base: str = "no"
    micro_batch_tokens: int | None = None
    offload_optimizer: str = "none"
    max_full_models: int = 1
    full_snapshot_steps: int = 10
    kv_cache_gib: float | None = None
    max_loras: int = 8
    max_sequences: int | None = None
    max_batched_tokens: int | None = None
    kv_cache_dtype: str = "auto"
    head_dtype: str = "auto"
    quantization: str = "auto"
    model_runner: str = "auto"
    speculative_ngram_tokens: int = 0
    routed_experts: str = "no"
    enforce_eager: str = "no"
    checkpoint_store: str = ""
    redis_appendfsync: str = "everysec"
    mtls: str = "on"
    tls_cert: str | None = None
    tls_key: str | None = None
    trusted_proxy: str | None = None
    cores: tuple[int, ...] = (0, 1)
    gpus: tuple[str, ...] = ()


@dataclass(frozen=True)
class Process:
    """One process to keep running.

    Attributes:
        name: of its log file, and of its pid file unless it starts several processes.
        argv: command line.
        env: variables added to the environment.
        stop_order: processes with a lower number are stopped first.
        grace: seconds between SIGTERM and SIGKILL.
        announces: (kind, id) under which it appears in the registry when it is ready.
        cores: CPUs it is bound to; empty = any.
        computes: on what, in words; empty = on nothing to speak of.
        alone: it is started when all others are ready, and no other with it: it measures the memory of a GPU
            that it shares, and others need what they have while they load.
    """

    name: str
    argv: tuple[str, ...]
    env: dict[str, str] = field(default_factory=dict)
    stop_order: int = 0
    grace: float = 30.0
    announces: tuple[str, str] | None = None
    cores: tuple[int, ...] = ()
    computes: str = ""
    alone: bool = False


@dataclass(frozen=True)
class Listener:
    """A port that was asked for; all others are free ones, found at the start.

    Attributes:
        flag: which asked for it.
    """

    flag: str
    host: str
    port: int


def listeners(options: Options) -> list[Listener]:
    """The ports that were asked for. Gateways share theirs; every process has one for its metrics."""
    found = [
        Listener("--port", options.host, options.port),
        Listener("--grpc-port", options.host, options.grpc_port),
    ]
    if options.metrics_port is not None:
        models = max(1, len(options.models))  # Where none is named, the default one is served.
        hosts = [options.host] * options.gateways + [_LOOPBACK] * (models * (1 + options.samplers))
        for index, host in enumerate(hosts):
            found.append(Listener("--metrics-port", host, options.metrics_port + index))
    return found


def nodes(options: Options) -> Nodes | None:
    """The machines of the trainer, of which this one is the head; None = this one alone."""
    if options.trainer_rendezvous is None or options.trainer_interface is None:
        return None
    host, port = options.trainer_rendezvous
    return Nodes(options.trainer_nodes, 0, host, port, options.trainer_interface)


def followers(options: Options, planned: Sequence[Process]) -> list[str]:
    """What is to be started on the trainer's other machines."""
    if nodes(options) is None:
        return []
    last = options.trainer_nodes - 1
    (trainer,) = (process for process in planned if process.announces and process.announces[0] == "trainer")
    argv = list(trainer.argv)
    argv[argv.index("--node-rank") + 1] = "1"
    if "--gpu-memory-share" in argv:
        # There is no sampler.
        at = argv.index("--gpu-memory-share")
        del argv[at : at + 2]
    which = "the other machine" if last == 1 else f"the others, with --node-rank 1 to {last}"
    return [
        f"the trainer waits for {last} more of its {options.trainer_nodes} nodes. On {which} and with the "
        "TINSMITH_ variables of this one:",
        shlex.join(argv),
    ]


def aliases(options: Options) -> list[str]:
    """What users of names that are not their weights' own need to know."""
    return [
        f"{model.name} is {model.source}. Clients that load its tokenizer by name need it from here: in "
        f"their directory, `tinsmith tokenizer {model.name}`"
        for model in options.models
        if model.source != model.name
    ]


def from_hub(options: Options) -> list[str]:
    """Ids of the models that are loaded from the Hugging Face hub. A path of this machine is absolute."""
    return [model.source for model in options.models if not Path(model.source).is_absolute()]


def processes(options: Options, launch_trainer: TrainerCommand) -> list[Process]:
    """All processes but Redis.

    Args:
        launch_trainer: services.trainer.world.launch.launch_command, or node_command of `nodes`.
    """
    trainers, samplers = _places(options)
    shares = trainer_shares(options)
    planned = [_gateway(options, index) for index in range(options.gateways)]
    for number, model in enumerate(options.models):
        trainer = _trainer(options, number, model, trainers[number], shares[number], launch_trainer)
        planned.append(trainer)
        for replica in range(options.samplers):
            index = number * options.samplers + replica
            planned.append(_sampler(options, index, model, samplers[index]))
    return [_measured(options, index, process) for index, process in enumerate(planned)]


def stages(planned: Sequence[Process]) -> list[list[Process]]:
    """What is started at once, one after the other: each when all before it are ready."""
    # Gateways are of the first: they tell clients what is awaited.
    together = [process for process in planned if not process.alone]
    return [together, *([process] for process in planned if process.alone)]


def trainer_shares(options: Options) -> list[float | None]:
    """Fraction of its GPUs' memory for each model's trainer; None = it shares none."""
    trainers, samplers = _places(options)
    return left_to_trainers(trainers, [(place, _sampler_memory(options, place)) for place in samplers])


def _places(options: Options) -> tuple[list[Place], list[Place]]:
    """Of the trainers, and of the samplers."""
    gpus = options.gpus if options.device == "cuda" else ()
    count = max(1, len(options.models))  # Where none is named, the default one is served.
    sampler = options.sampler_tp * options.sampler_pp
    ranks = [options.trainer_ranks] * count + [sampler] * (count * options.samplers)
    placed = places(ranks, options.cores, gpus)
    return placed[:count], placed[count:]


def _sampler_memory(options: Options, place: Place) -> float:
    return place.gpu_memory if options.sampler_memory is None else options.sampler_memory


def _measured(options: Options, index: int, process: Process) -> Process:
    """The process with its log, and a port of its own for metrics or none, whatever the environment says."""
    port = 0 if options.metrics_port is None else options.metrics_port + index
    told = ("--log-format", options.log_format, "--access-log", options.access_log)
    return replace(process, argv=(*process.argv, "--metrics-port", str(port), *told))


def _gateway(options: Options, index: int) -> Process:
    name = f"gateway-{index}"
    argv = (
        *(sys.executable, "-m", "services.gateway", "--id", name, "--host", options.host),
        *("--port", str(options.port), "--grpc-port", str(options.grpc_port)),
        *("--data-dir", str(options.data_dir)),
        *("--base-models", _base_models(options)),
        *_identity(options, "gateway"),
        *_store(options),
        *_given("--public-url", options.public_url),
        *_given("--tls-cert", options.tls_cert),
        *_given("--tls-key", options.tls_key),
        *_given("--trusted-proxy", options.trusted_proxy),
        *_given("--stable-reinforce-as", options.stable_reinforce_as),
    )
    return Process(name, argv, announces=("gateway", name))


def _base_models(options: Options) -> str:
    """What gateways wait for, also while it loads for the first time."""
    sampled = options.samplers > 0
    models = [Configured(name=model.name, sampled=sampled) for model in options.models]
    return msgspec.json.encode(models).decode()


def _trainer(
    options: Options,
    number: int,
    model: Model,
    place: Place,
    share: float | None,
    launch: TrainerCommand,
) -> Process:
    first = number * options.trainer_ranks
    name = f"trainer-{first}"
    arguments = [
        *("--id", name, "--first-process-index", str(first)),
        *("--zero-stage", str(options.zero_stage)),
        *("--zero-replica-ranks", str(options.zero_replica_ranks)),
        *_given("--zero-prefetch-elements", options.zero_prefetch_elements),
        *("--zero-quantized-base", options.zero_quantized_base),
        *("--offload-optimizer", options.offload_optimizer),
        *("--max-full-models", str(options.max_full_models)),
        *("--full-snapshot-steps", str(options.full_snapshot_steps)),
        *_given("--micro-batch-tokens", options.micro_batch_tokens),
        *_given("--gpu-memory-share", share),
        *_common(options, model),
        *_identity(options, "trainer"),
        *_store(options),
    ]
    argv = launch(options.trainer_ranks, arguments)
    announced = ("trainer", name)
    computes = _on(place) if share is None else f"{_on(place)}, {share:.0%} of its memory"
    return Process(
        name, tuple(argv), _environment(place), 1, _TRAINER_GRACE_S, announced, place.cores, computes
    )


def _sampler(options: Options, index: int, model: Model, place: Place) -> Process:
    name = f"sampler-{index}"
    argv = [sys.executable, "-m", "services.sampler", "--id", name, *_common(options, model)]
    argv += _identity(options, "sampler")
    argv += ["--max-lora-rank", str(options.max_lora_rank), "--max-loras", str(options.max_loras)]
    argv += _given("--kv-cache-gib", options.kv_cache_gib)
    argv += _given("--max-sequences", options.max_sequences)
    argv += _given("--max-batched-tokens", options.max_batched_tokens)
    argv += ["--kv-cache-dtype", options.kv_cache_dtype, "--head-dtype", options.head_dtype]
    argv += ["--quantization", options.quantization, "--model-runner", options.model_runner]
    argv += ["--speculative-ngram-tokens", str(options.speculative_ngram_tokens)]
    argv += ["--routed-experts", options.routed_experts, "--enforce-eager", options.enforce_eager]
    computes = _on(place)
    together = len(options.models) * options.samplers
    if not place.gpus and options.kv_cache_gib is None:
        argv += ["--machine-samplers", str(together)]
        computes += f", up to {_KV_SHARE / together:.3g}% of its memory for keys and values"
    if place.gpus:
        memory = _sampler_memory(options, place)
        argv += ["--gpu-memory-utilization", str(memory), "--tensor-parallel-size", str(options.sampler_tp)]
        argv += ["--pipeline-parallel-size", str(options.sampler_pp)]
        computes += f", {memory:.0%} of its memory"
    announced = ("sampler", name)
    environment = _environment(place)
    return Process(
        name, tuple(argv), environment, 1, 75.0, announced, place.cores, computes, alone=place.shared
    )


def _on(place: Place) -> str:
    """Where a process computes, in words."""
    if place.gpus:
        shared = " (shared)" if place.shared else ""
        return f"GPU {', '.join(place.gpus)}{shared}"
    cores = f"cores {', '.join(map(str, place.cores))}" if place.cores else "any core"
    return f"CPU, {place.threads} thread{'s' * (place.threads > 1)} a rank on {cores}"


def _given(flag: str, value: object) -> tuple[str, ...]:
    """The flag, when there is a value; else the service decides."""
    return () if value is None else (flag, str(value))


def _environment(place: Place) -> dict[str, str]:
    environment = {
        "OMP_NUM_THREADS": str(place.threads),
        # Ranks and workers of one machine have no business on its networks.
        "GLOO_SOCKET_IFNAME": "lo",
        "NCCL_SOCKET_IFNAME": "lo",
        "VLLM_HOST_IP": "127.0.0.1",
    }
    if place.gpus:
        environment["CUDA_VISIBLE_DEVICES"] = ",".join(place.gpus)
    return environment


def _store(options: Options) -> tuple[str, ...]:
    return ("--checkpoint-store", options.checkpoint_store) if options.checkpoint_store else ()


def _identity(options: Options, role: Role) -> tuple[str, ...]:
    """Who a process is to the others. Given either way, so that no variable decides it for all of them."""
    return ("--identity", str(DataDir(options.data_dir).tls / role) if options.mtls == "on" else "")


def _common(options: Options, model: Model) -> tuple[str, ...]:
    return (
        *("--model", f"{model.name}={model.source}", "--data-dir", str(options.data_dir)),
        *("--device", options.device, "--dtype", options.dtype),
        *_given("--max-context", options.max_context),
        # Given, so that a TINSMITH_PORT or TINSMITH_HOST in the environment is not every process's.
        *("--port", "0", "--host", _LOOPBACK),
    )

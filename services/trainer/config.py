"""Settings of a trainer process: flags, each with an environment fallback TINSMITH_<FLAG>.

Invariant: everything a rank needs to know is decided here once and passed on as plain values.
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

from services.common.process import flags
from services.common.process.flags import MODEL, PATH, PORT, SWITCH, TEXT, Flag, Kind, decimal, number, one_of
from services.common.storage.location import check_location
from services.common.telemetry import logs
from services.common.worlds.sharding import Sharding, mistakes

_AUTO_TOKENS = {"cuda": 8192, "cpu": 1024}
_MOST_TOKENS = 10_000_000
_ABOUT = "One rank of a trainer world; services.trainer.world.launch starts it."


@dataclass(frozen=True)
class TrainerConfig:
    """Settings common to all ranks of a world.

    Attributes:
        id: name of the trainer in the registry.
        first_process_index: rank r writes the pid file trainer-<first_process_index + r>.
        base_model: name SDK users pass; `model_path` is its directory or hub id.
        zero_stage: ZeRO stage of the frozen base, 0..3; of full models at least 1.
        sharding: how ZeRO-3 shares weights.
        offload_optimizer: where full models hold optimizer state and step: "none" = on the device, or "cpu".
        max_full_models: models that train all weights which are held at once.
        full_snapshot_steps: optimizer steps between durable snapshots of a full model.
        device: "cpu" or "cuda".
        dtype: element type of the base, "float32" or "bfloat16".
        identity: directory of ca.crt, tls.crt and tls.key, for mutual TLS; empty: in the clear.
        metrics_port: of Prometheus' /metrics of the first rank; 0 = none.
        log_format: of the log, "text" or "json".
        access_log: whether each call is a line of the log.
        checkpoint_store: where named checkpoints and exports are kept: a directory or a URL such as
            s3://bucket/prefix; empty = in the data directory.
        micro_batch_tokens: tokens of one micro-batch.
        activation_checkpointing: blocks compute their activations again in the backward pass; `keeps_blocks`:
            but for those whose activations there is room for.
        max_context: most tokens of an example; 0 = as many as the base model takes.
        memory_bytes: that each rank may take of its device; 0 = what its GPU has free at the start, or its
            share of three quarters of the machine's.
        adapter_host_bytes: that adapters which are idle may take of each rank's host; None = a quarter of the
            machine's memory, shared by its ranks, and on CPU none.
        gpu_memory_share: fraction of its GPU's memory that each rank keeps to; 0 = it takes what is free.
        redis_url: from TINSMITH_REDIS_URL, never from a flag: it may hold a password. Only rank 0 needs one.
    """

    id: str = "trainer-0"
    first_process_index: int = 0
    base_model: str = ""
    model_path: str = ""
    zero_stage: int = 0
    sharding: Sharding = field(default_factory=Sharding)
    offload_optimizer: str = "none"
    max_full_models: int = 1
    full_snapshot_steps: int = 10
    device: str = "cpu"
    dtype: str = "float32"
    host: str = "127.0.0.1"
    port: int = 0
    metrics_port: int = 0
    log_format: str = "text"
    access_log: bool = False
    advertise_host: str = "127.0.0.1"
    data_dir: Path = Path()
    checkpoint_store: str = ""
    micro_batch_tokens: int = _AUTO_TOKENS["cpu"]
    activation_checkpointing: bool = False
    keeps_blocks: bool = False
    max_context: int = 0
    memory_bytes: int = 0
    adapter_host_bytes: int | None = None
    gpu_memory_share: float = 0.0
    redis_url: str = ""
    identity: Path = Path()


@dataclass(frozen=True)
class _Asked:
    """What settings follow from; None, or "auto": from the device too."""

    model: tuple[str, ...] = ()
    device: str = "auto"
    dtype: str = "auto"
    micro_batch_tokens: int | None = None
    activation_checkpointing: str = "auto"


@dataclass(frozen=True)
class Place:
    """Where this process stands in its world; who started it says so in the environment.

    Attributes:
        with_head: on the machine, or the node, of rank 0.
    """

    rank: int
    world_size: int
    with_head: bool = True

    @classmethod
    def from_environment(cls) -> Place:
        rank, world_size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
        # The agent of a node says which one it is.
        return cls(rank, world_size, with_head=os.environ.get("GROUP_RANK", "0") == "0")


def _directory(text: str) -> Path:
    if not text:
        raise ValueError
    return Path(text).resolve()


def _auto(kind: Kind) -> Kind:
    """The same, or that it is left to the trainer: None."""
    return replace(
        kind, says=f"auto, or {kind.says}", parse=lambda text: None if text == "auto" else kind.parse(text)
    )


_COUNT = number(1, 10**9)
_GIB = decimal(0, 10**6, "GiB")
_BYTES = replace(_GIB, parse=lambda text: int(_GIB.parse(text) * 2**30))

# One row a flag, so that what goes together is read together.
# fmt: off
FLAGS: dict[str, tuple[Flag, ...]] = {
    "this process": (
        Flag("--id", TEXT, TrainerConfig, "id", "name of this trainer in the registry"),
        Flag("--first-process-index", number(0, 10**6), TrainerConfig, "first_process_index",
             "rank r is called trainer-<this + r>"),
        Flag("--host", TEXT, TrainerConfig, "host", "address to serve gRPC on"),
        Flag("--port", PORT, TrainerConfig, "port", "port to serve gRPC on; 0 takes a free one"),
        Flag("--advertise-host", TEXT, TrainerConfig, "advertise_host",
             "host name under which gateways reach this trainer"),
        Flag("--identity", PATH, TrainerConfig, "identity",
             "directory of ca.crt, tls.crt and tls.key: who this trainer is to gateways and samplers; only "
             "the cluster's gateways may call it then. Empty: in the clear, for everybody who reaches it"),
        Flag("--metrics-port", PORT, TrainerConfig, "metrics_port",
             "port of Prometheus' /metrics of the first rank; 0 = none"),
        Flag("--log-format", one_of(logs.FORMATS), TrainerConfig, "log_format",
             "lines to read, or JSON objects to search"),
        Flag("--access-log", SWITCH, TrainerConfig, "access_log", "yes: a line in the log for every call"),
    ),
    "models and files": (
        Flag("--model", MODEL, _Asked, "model",
             "the base model; must be given"),
        Flag("--data-dir", Kind("a directory", "PATH", _directory), TrainerConfig, "data_dir",
             "directory shared with gateways and samplers; must be given"),
        Flag("--checkpoint-store", Kind("a directory or a URL", "URL", check_location), TrainerConfig,
             "checkpoint_store",
             "directory or URL for named checkpoints and exports; empty: in DATA_DIR"),
        Flag("--max-full-models", _COUNT, TrainerConfig, "max_full_models",
             "models that train all weights which are held at once; idle ones make room for others"),
        Flag("--full-snapshot-steps", _COUNT, TrainerConfig, "full_snapshot_steps",
             "optimizer steps of such a model that a restart may have to repeat"),
    ),
    "how it computes": (
        Flag("--device", one_of(("auto", "cpu", "cuda")), _Asked, "device", "where to compute"),
        Flag("--dtype", one_of(("auto", "float32", "bfloat16")), _Asked, "dtype",
             "auto = bfloat16 on CUDA, float32 on CPU"),
        Flag("--zero-stage", number(0, 3), TrainerConfig, "zero_stage",
             "ZeRO stage of the frozen base, and of models that train all weights (those have at least 1)"),
        Flag("--zero-replica-ranks", number(1, 10**6), Sharding, "replica_ranks",
             "with ZeRO-3: ranks in a row that hold all weights once more among themselves and gather them "
             "from each other (hpZ), so best those of one machine; 1 = none do"),
        Flag("--zero-prefetch-elements", _auto(number(0, 10**12)), Sharding, "prefetch_elements",
             "with ZeRO-3: elements of weights that are gathered before they are needed; 0 = none; auto = as "
             "many as DeepSpeed takes, 50 million"),
        Flag("--zero-quantized-base", SWITCH, Sharding, "quantized_base",
             "yes: with ZeRO-3, ranks hold and gather the frozen base as int8, which changes "
             "log-probabilities"),
        Flag("--offload-optimizer", one_of(("none", "cpu")), TrainerConfig, "offload_optimizer",
             "cpu: models that train all weights hold their optimizer state, and step, on the CPU"),
        Flag("--activation-checkpointing", one_of(("auto", "on", "off")), _Asked, "activation_checkpointing",
             "on: of each block only the input is kept for the backward pass, and the rest computed again "
             "there: the same numbers, a twentieth of the memory, up to half as much time again; auto = so "
             "with CUDA, but for blocks whose activations find room, and off on CPU"),
    ),
    "lengths and memory": (
        Flag("--micro-batch-tokens", _auto(number(1, _MOST_TOKENS)), _Asked, "micro_batch_tokens",
             "tokens that a rank computes at once, and so what a small request may have to wait for; "
             f"auto = {_AUTO_TOKENS['cuda']} on CUDA, {_AUTO_TOKENS['cpu']} on CPU"),
        Flag("--max-context", number(0, 10**9), TrainerConfig, "max_context",
             "most tokens of an example; 0 = as many as the base model takes"),
        Flag("--memory-gib", _BYTES, TrainerConfig, "memory_bytes",
             "memory of its device that each rank may take, by which the trainer says how long examples may "
             "be and how many adapters it holds; 0 = what the GPU has free, or its share of 3/4 of the "
             "machine's, where on CPU a micro-batch's tokens in one example and one adapter are always let "
             "in"),
        Flag("--adapter-host-gib", _auto(_BYTES), TrainerConfig, "adapter_host_bytes",
             "memory of the host that each rank may take for adapters which are idle and make room for "
             "others on the device, before they go to the disk; 0 = none; auto = a quarter of the machine's, "
             "shared by the ranks on it, and none on CPU"),
        Flag("--gpu-memory-share", decimal(0, 1), TrainerConfig, "gpu_memory_share",
             "fraction of its GPU's memory that each rank keeps to, where others are on that GPU; 0 = it "
             "takes what is free"),
    ),
}
# fmt: on


def parse(argv: Sequence[str], environment: Mapping[str, str] = os.environ) -> TrainerConfig:
    """Reads flags and environment; exits with a message that tells all that is wrong."""
    parser = flags.parser("python -m services.trainer", _ABOUT, FLAGS, environment)
    given = flags.given(parser, FLAGS, argv)
    asked, redis_url = given.of(_Asked), environment.get("TINSMITH_REDIS_URL", "")
    config = given.of(TrainerConfig, sharding=given.of(Sharding), redis_url=redis_url)
    found = [*given.mistakes, *mistakes(config.sharding, config.zero_stage)]
    if not redis_url and environment.get("RANK", "0") == "0":
        found.append("TINSMITH_REDIS_URL is not set")
    device = _resolve_device(asked.device)
    if config.gpu_memory_share and device == "cpu":
        found.append("--gpu-memory-share is for GPUs, and this trainer computes on the CPU")
    flags.refuse(parser, found)
    on_gpus, checkpointing = device == "cuda", asked.activation_checkpointing
    keeps_blocks = checkpointing == "auto" and on_gpus
    return replace(
        config,
        base_model=asked.model[0],
        model_path=asked.model[1],
        device=device,
        dtype=("bfloat16" if on_gpus else "float32") if asked.dtype == "auto" else asked.dtype,
        micro_batch_tokens=asked.micro_batch_tokens or _AUTO_TOKENS[device],
        activation_checkpointing=checkpointing == "on" or keeps_blocks,
        keeps_blocks=keeps_blocks,
    )


def _resolve_device(wanted: str) -> str:
    if wanted != "auto":
        return wanted
    import torch

    return "cuda" if torch.cuda.is_available() else "cpu"

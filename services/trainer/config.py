"""Settings of a trainer process: flags, each with an environment fallback TINSMITH_<FLAG>.

Invariant: everything a rank needs to know is decided here once and passed on as plain values.
"""

from __future__ import annotations

import argparse
import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from services.common.contract.errors import InvalidRequest
from services.common.storage.location import check_location
from services.common.telemetry import logs
from services.common.worlds.sharding import Sharding, mistakes

_AUTO_TOKENS = {"cuda": 8192, "cpu": 1024}
_MOST_TOKENS = 10_000_000


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

    id: str
    first_process_index: int
    base_model: str
    model_path: str
    zero_stage: int
    sharding: Sharding
    offload_optimizer: str
    max_full_models: int
    full_snapshot_steps: int
    device: str
    dtype: str
    host: str
    port: int
    metrics_port: int
    log_format: str
    access_log: bool
    advertise_host: str
    data_dir: Path
    checkpoint_store: str
    micro_batch_tokens: int
    activation_checkpointing: bool
    keeps_blocks: bool
    max_context: int
    memory_bytes: int
    adapter_host_bytes: int | None
    gpu_memory_share: float
    redis_url: str
    identity: Path = Path()


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


def parse(argv: list[str]) -> TrainerConfig:
    """Reads flags and environment; exits with a usage message when they do not make sense."""
    parser = argparse.ArgumentParser(
        prog="python -m services.trainer",
        description="One rank of a trainer world; services.trainer.world.launch starts it.",
    )

    from_environment: list[str] = []

    def flag(name: str, default: str | None, help_text: str, **options: Any) -> None:
        value = os.environ.get("TINSMITH_" + name.upper().replace("-", "_"))
        if value is not None:
            # Passed as a flag, so that it is checked like one; a flag given later wins.
            from_environment.extend((f"--{name}", value))
        parser.add_argument(f"--{name}", default=default, required=default is None, help=help_text, **options)

    flag("id", "trainer-0", "name of this trainer in the registry")
    flag("first-process-index", "0", "rank r is called trainer-<this + r>", type=int)
    flag("model", None, "NAME=PATH_OR_HUB_ID of the base model")
    flag(
        "zero-stage",
        "0",
        "ZeRO stage of the frozen base, and of models that train all weights (those have at least 1)",
        type=int,
        choices=(0, 1, 2, 3),
    )
    flag(
        "zero-replica-ranks",
        "1",
        "with ZeRO-3: ranks in a row that hold all weights once more among themselves and gather them from "
        "each other (hpZ), so best those of one machine; 1 = none do",
        type=int,
    )
    flag(
        "zero-prefetch-elements",
        "auto",
        "with ZeRO-3: elements of weights that are gathered before they are needed; 0 = none; "
        "auto = as many as DeepSpeed takes, 50 million",
    )
    flag(
        "zero-quantized-base",
        "no",
        "yes: with ZeRO-3, ranks hold and gather the frozen base as int8, which changes log-probabilities",
        choices=("yes", "no"),
    )
    flag(
        "offload-optimizer",
        "none",
        "cpu: models that train all weights hold their optimizer state, and step, on the CPU",
        choices=("none", "cpu"),
    )
    flag(
        "max-full-models",
        "1",
        "models that train all weights which are held at once; idle ones make room for others",
        type=int,
    )
    flag(
        "full-snapshot-steps",
        "10",
        "optimizer steps of such a model that a restart may have to repeat",
        type=int,
    )
    flag("device", "auto", "where to compute", choices=("auto", "cpu", "cuda"))
    flag("dtype", "auto", "auto = bfloat16 on CUDA, float32 on CPU", choices=("auto", "float32", "bfloat16"))
    flag("host", "127.0.0.1", "address to serve gRPC on")
    flag("port", "0", "port to serve gRPC on; 0 takes a free one", type=int)
    flag(
        "identity",
        "",
        "directory of ca.crt, tls.crt and tls.key: who this trainer is to gateways and samplers; only the "
        "cluster's gateways may call it then. Empty: in the clear, for everybody who reaches it",
    )
    flag("metrics-port", "0", "port of Prometheus' /metrics of the first rank; 0 = none", type=int)
    flag("log-format", "text", "lines to read, or JSON objects to search", choices=logs.FORMATS)
    flag("access-log", "no", "yes: a line in the log for every call", choices=("yes", "no"))
    flag("advertise-host", "127.0.0.1", "host name under which gateways reach this trainer")
    flag("data-dir", None, "directory shared with gateways and samplers", type=Path)
    flag("checkpoint-store", "", "directory or URL for named checkpoints and exports; empty: in DATA_DIR")
    flag(
        "micro-batch-tokens",
        "auto",
        "tokens that a rank computes at once, and so what a small request may have to wait for; "
        f"auto = {_AUTO_TOKENS['cuda']} on CUDA, {_AUTO_TOKENS['cpu']} on CPU",
    )
    flag("max-context", "0", "most tokens of an example; 0 = as many as the base model takes", type=int)
    flag(
        "memory-gib",
        "0",
        "memory of its device that each rank may take, by which the trainer says how long examples may be "
        "and how many adapters it holds; 0 = what the GPU has free, or its share of 3/4 of the machine's, "
        "where on CPU a micro-batch's tokens in one example and one adapter are always let in",
        type=float,
    )
    flag(
        "adapter-host-gib",
        "auto",
        "memory of the host that each rank may take for adapters which are idle and make room for others on "
        "the device, before they go to the disk; 0 = none; auto = a quarter of the machine's, shared by the "
        "ranks on it, and none on CPU",
    )
    flag(
        "gpu-memory-share",
        "0",
        "fraction of its GPU's memory that each rank keeps to, where others are on that GPU; 0 = it takes "
        "what is free",
        type=float,
    )
    flag(
        "activation-checkpointing",
        "auto",
        "on: of each block only the input is kept for the backward pass, and the rest computed again there: "
        "the same numbers, a twentieth of the memory, up to half as much time again; auto = so with CUDA, "
        "but for blocks whose activations find room, and off on CPU",
        choices=("auto", "on", "off"),
    )
    args = parser.parse_args([*from_environment, *argv])

    name, separator, path = args.model.partition("=")
    if not (name and separator and path):
        parser.error(f"--model {args.model!r} is not NAME=PATH_OR_HUB_ID")
    tokens = args.micro_batch_tokens
    if tokens != "auto" and not (tokens.isdecimal() and 1 <= int(tokens) <= _MOST_TOKENS):
        parser.error(
            f"--micro-batch-tokens must be auto or a whole number from 1 to {_MOST_TOKENS}, not {tokens!r}"
        )
    try:
        check_location(args.checkpoint_store)
    except InvalidRequest as error:
        parser.error(f"--checkpoint-store: {error.message}")
    prefetch = args.zero_prefetch_elements
    if prefetch != "auto" and not prefetch.isdecimal():
        parser.error(f"--zero-prefetch-elements must be auto or a whole number, not {prefetch!r}")
    if args.zero_replica_ranks < 1:
        parser.error(f"--zero-replica-ranks must be at least 1, not {args.zero_replica_ranks}")
    sharding = Sharding(
        args.zero_replica_ranks,
        None if prefetch == "auto" else int(prefetch),
        args.zero_quantized_base == "yes",
    )
    for mistake in mistakes(sharding, args.zero_stage):
        parser.error(mistake)
    if args.max_full_models < 1 or args.full_snapshot_steps < 1:
        parser.error("--max-full-models and --full-snapshot-steps must be at least 1")
    if args.max_context < 0:
        parser.error(f"--max-context must be 0 or a number of tokens, not {args.max_context}")
    if not 0 <= args.memory_gib <= 1e6:
        parser.error(f"--memory-gib must be 0 or a number of GiB, not {args.memory_gib}")
    on_host = None if args.adapter_host_gib == "auto" else _number(args.adapter_host_gib)
    if on_host is not None and not 0 <= on_host <= 1e6:
        parser.error(f"--adapter-host-gib must be auto, 0 or a number of GiB, not {args.adapter_host_gib}")
    if not 0 <= args.gpu_memory_share <= 1:
        parser.error(f"--gpu-memory-share must be a fraction, or 0, not {args.gpu_memory_share}")
    redis_url = os.environ.get("TINSMITH_REDIS_URL", "")
    if not redis_url and os.environ.get("RANK", "0") == "0":
        parser.error("TINSMITH_REDIS_URL is not set")
    device = _resolve_device(args.device)
    if args.gpu_memory_share and device == "cpu":
        parser.error("--gpu-memory-share is for GPUs, and this trainer computes on the CPU")
    return TrainerConfig(
        id=args.id,
        first_process_index=args.first_process_index,
        base_model=name,
        model_path=path,
        zero_stage=args.zero_stage,
        sharding=sharding,
        offload_optimizer=args.offload_optimizer,
        max_full_models=args.max_full_models,
        full_snapshot_steps=args.full_snapshot_steps,
        device=device,
        dtype=("bfloat16" if device == "cuda" else "float32") if args.dtype == "auto" else args.dtype,
        host=args.host,
        port=args.port,
        metrics_port=args.metrics_port,
        log_format=args.log_format,
        access_log=args.access_log == "yes",
        advertise_host=args.advertise_host,
        data_dir=args.data_dir.resolve(),
        checkpoint_store=args.checkpoint_store,
        micro_batch_tokens=_AUTO_TOKENS[device] if tokens == "auto" else int(tokens),
        activation_checkpointing=args.activation_checkpointing == "on"
        or (args.activation_checkpointing == "auto" and device == "cuda"),
        keeps_blocks=args.activation_checkpointing == "auto" and device == "cuda",
        max_context=args.max_context,
        memory_bytes=int(args.memory_gib * 2**30),
        adapter_host_bytes=None if on_host is None else int(on_host * 2**30),
        gpu_memory_share=args.gpu_memory_share,
        redis_url=redis_url,
        identity=Path(args.identity),
    )


def _number(text: str) -> float:
    """What a text says, or a number that no setting takes."""
    try:
        return float(text)
    except ValueError:
        return -1.0


def _resolve_device(wanted: str) -> str:
    if wanted != "auto":
        return wanted
    import torch

    return "cuda" if torch.cuda.is_available() else "cpu"

"""Which processes a local cluster is made of: a pure function of the options.

Invariant: process names are unique and stable, so a restart of the cluster finds the same pid and
log files; no secret is in any argv.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import msgspec

from services.common.contract.errors import InvalidRequest
from services.common.state.known_models import Configured
from services.common.storage.location import check_location
from services.launcher.placement import Place, places

TrainerCommand = Callable[[int, int, list[str], Sequence[str]], list[str]]
"""(ranks, master port, arguments of services.trainer, GPUs) -> argv."""


@dataclass(frozen=True)
class Model:
    """A base model: the name SDK users pass, and the directory or hub id it is loaded from."""

    name: str
    source: str


@dataclass(frozen=True)
class Options:
    """What `tinsmith up` was asked for.

    Attributes:
        trainer_ranks: data-parallel ranks of each base model's trainer.
        samplers: sampler replicas of each base model; 0 = train only.
        checkpoint_store: directory or URL for named checkpoints and exports; empty = in data_dir.
        offload_optimizer: "cpu" or "none", for models that train all weights.
        max_full_models: such models that a trainer holds at once.
        full_snapshot_steps: optimizer steps between durable snapshots of one.
        device: "cpu" or "cuda".
        cores: CPUs to share out.
        gpus: GPUs to share out on "cuda".
        redis_appendfsync: when the embedded Redis syncs its file, "always" or "everysec".
    """

    models: tuple[Model, ...]
    data_dir: Path
    port: int = 8000
    grpc_port: int = 8001
    gateways: int = 1
    trainer_ranks: int = 1
    zero_stage: int = 0
    samplers: int = 1
    checkpoint_store: str = ""
    offload_optimizer: str = "none"
    max_full_models: int = 1
    full_snapshot_steps: int = 10
    device: str = "cpu"
    dtype: str = "auto"
    cores: tuple[int, ...] = (0, 1)
    gpus: tuple[str, ...] = ()
    redis_appendfsync: str = "everysec"


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
    """

    name: str
    argv: tuple[str, ...]
    env: dict[str, str] = field(default_factory=dict)
    stop_order: int = 0
    grace: float = 30.0
    announces: tuple[str, str] | None = None
    cores: tuple[int, ...] = ()


def parse_model(text: str) -> Model:
    """ "NAME=PATH_OR_HUB_ID"; a path is made absolute.

    Raises:
        InvalidRequest: another form, or a path where nothing is.
    """
    name, separator, source = text.partition("=")
    if not (name and separator and source):
        raise InvalidRequest(f"--model {text!r} is not NAME=PATH_OR_HUB_ID, for example my/model=./model-dir")
    path = Path(source).expanduser()
    if path.is_dir():
        return Model(name, str(path.resolve()))
    if source.startswith(("/", ".", "~")) or source.count("/") > 1:
        raise InvalidRequest(f"--model {text!r}: there is no directory {path}")
    return Model(name, source)


def check(options: Options) -> None:
    """Refuses options that no cluster can have.

    Raises:
        InvalidRequest: with a sentence that says what to change.
    """
    if not options.models:
        raise InvalidRequest("name at least one model, for example --model my/model=./model-dir")
    names = [model.name for model in options.models]
    for name in names:
        if names.count(name) > 1:
            raise InvalidRequest(f"--model {name} is given twice; every base model needs a name of its own")
    for flag, value, least in (
        ("--gateways", options.gateways, 1),
        ("--trainer-ranks", options.trainer_ranks, 1),
        ("--samplers", options.samplers, 0),
        ("--max-full-models", options.max_full_models, 1),
        ("--full-snapshot-steps", options.full_snapshot_steps, 1),
    ):
        if value < least:
            raise InvalidRequest(f"{flag} must be {least} or more, not {value}")
    check_location(options.checkpoint_store)
    if options.port == options.grpc_port:
        raise InvalidRequest("--port and --grpc-port must differ")
    for flag, value in (("--port", options.port), ("--grpc-port", options.grpc_port)):
        if not 1 <= value <= 65535:
            raise InvalidRequest(f"{flag} must be a port number from 1 to 65535, not {value}")
    if options.device == "cuda" and options.trainer_ranks > len(options.gpus):
        raise InvalidRequest(
            f"--trainer-ranks {options.trainer_ranks} needs as many GPUs, and here are {len(options.gpus)}"
        )


def processes(options: Options, master_ports: list[int], launch_trainer: TrainerCommand) -> list[Process]:
    """All processes but Redis.

    Args:
        master_ports: a free port per model, for the rendezvous of its trainer's ranks.
        launch_trainer: services.trainer.world.launch.launch_command.
    """
    gpus = options.gpus if options.device == "cuda" else ()
    count = len(options.models)
    ranks = [options.trainer_ranks] * count + [1] * (count * options.samplers)
    placed = places(ranks, options.cores, gpus)
    planned = [_gateway(options, index) for index in range(options.gateways)]
    for number, model in enumerate(options.models):
        port = master_ports[number]
        planned.append(_trainer(options, number, model, port, placed[number], launch_trainer))
        for replica in range(options.samplers):
            index = number * options.samplers + replica
            planned.append(_sampler(options, index, model, placed[count + index]))
    return planned


def _gateway(options: Options, index: int) -> Process:
    name = f"gateway-{index}"
    argv = (
        *(sys.executable, "-m", "services.gateway", "--id", name, "--host", "127.0.0.1"),
        *("--port", str(options.port), "--grpc-port", str(options.grpc_port)),
        *("--data-dir", str(options.data_dir)),
        *("--base-models", _base_models(options)),
        *_store(options),
    )
    return Process(name, argv, announces=("gateway", name))


def _base_models(options: Options) -> str:
    """What gateways wait for, also while it loads for the first time."""
    sampled = options.samplers > 0
    models = [Configured(name=model.name, sampled=sampled) for model in options.models]
    return msgspec.json.encode(models).decode()


def _trainer(
    options: Options, number: int, model: Model, master_port: int, place: Place, launch: TrainerCommand
) -> Process:
    first = number * options.trainer_ranks
    name = f"trainer-{first}"
    arguments = [
        *("--id", name, "--first-process-index", str(first)),
        *("--zero-stage", str(options.zero_stage)),
        *("--offload-optimizer", options.offload_optimizer),
        *("--max-full-models", str(options.max_full_models)),
        *("--full-snapshot-steps", str(options.full_snapshot_steps)),
        *_common(options, model),
        *_store(options),
    ]
    argv = launch(options.trainer_ranks, master_port, arguments, place.gpus)
    # The launcher stops its ranks one after the other.
    grace = 60.0 + 30.0 * options.trainer_ranks
    return Process(name, tuple(argv), _environment(place), 1, grace, ("trainer", name), place.cores)


def _sampler(options: Options, index: int, model: Model, place: Place) -> Process:
    name = f"sampler-{index}"
    argv = [sys.executable, "-m", "services.sampler", "--id", name, *_common(options, model)]
    if place.gpus:
        argv += ["--gpu-memory-utilization", str(place.gpu_memory)]
    return Process(name, tuple(argv), _environment(place), 1, 75.0, ("sampler", name), place.cores)


def _environment(place: Place) -> dict[str, str]:
    environment = {"OMP_NUM_THREADS": str(place.threads)}
    if place.gpus:
        environment["CUDA_VISIBLE_DEVICES"] = ",".join(place.gpus)
    return environment


def _store(options: Options) -> tuple[str, ...]:
    return ("--checkpoint-store", options.checkpoint_store) if options.checkpoint_store else ()


def _common(options: Options, model: Model) -> tuple[str, ...]:
    return (
        *("--model", f"{model.name}={model.source}", "--data-dir", str(options.data_dir)),
        *("--device", options.device, "--dtype", options.dtype),
        # Given, so that a TINSMITH_PORT in the environment is not every process's.
        *("--port", "0"),
    )

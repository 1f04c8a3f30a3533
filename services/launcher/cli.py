"""The `tinsmith` command."""

from __future__ import annotations

import argparse
import importlib.metadata
import os
import sys
from pathlib import Path

from services.common.contract.errors import InvalidRequest, TinsmithError, Unavailable
from services.common.storage.data_dir import DataDir

_DESCRIPTION = """\
Tinsmith is the self-hosted Tinker: the unmodified tinker SDK trains and samples on your own machines.

  tinsmith models tiny ./tiny                    make a tiny random model to try things with
  tinsmith up --model my/tiny=./tiny             start a cluster on this machine
  tinsmith status                                look at it from another terminal
"""

_UP = """\
Starts Redis, gateways, a DeepSpeed trainer and vLLM samplers for every model, keeps them running, and
prints the base URL and API key to export. Ctrl-C finishes what was accepted and stops everything.

examples:
  tinsmith up --model my/tiny=./tiny
  tinsmith up --model Qwen/Qwen3-0.6B=Qwen/Qwen3-0.6B --samplers 2
  tinsmith up --model Qwen/Qwen3-8B=/models/qwen3-8b --device cuda --trainer-ranks 4 --zero-stage 3
  tinsmith up --model a/one=./one --model b/two=./two --redis-url redis://10.0.0.5:6379/0
"""

_DATA_DIR = Path("data")


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="tinsmith", description=_DESCRIPTION, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--version", action="version", version=f"tinsmith {_version()}")
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")
    _add_up(
        commands.add_parser(
            "up",
            help="start a cluster on this machine",
            description=_UP,
            formatter_class=argparse.RawDescriptionHelpFormatter,
        )
    )
    status = commands.add_parser("status", help="processes, models, versions and queue depths of a cluster")
    _add_cluster(status)
    status.add_argument("--json", action="store_true", help="print JSON")
    models = commands.add_parser("models", help="make models, and end serving one").add_subparsers(
        dest="kind", required=True, metavar="KIND"
    )
    _add_tiny(models.add_parser("tiny", help="a tiny random Qwen3 with tokenizer and chat template"))
    retire = models.add_parser("retire", help="a base model is served no more: what waits for it fails")
    retire.add_argument("name", metavar="NAME", help="what SDK users pass as base_model")
    _add_cluster(retire)
    return parser


def _version() -> str:
    try:
        return importlib.metadata.version("tinsmith")
    except importlib.metadata.PackageNotFoundError:
        return "(a source tree that is not installed)"


def _add_cluster(command: argparse.ArgumentParser) -> None:
    command.add_argument(
        "--data-dir", type=Path, default=_DATA_DIR, help="as given to `up` (default: ./data)"
    )
    command.add_argument("--redis-url", help="ask this Redis instead of the data directory's")


def _add_up(up: argparse.ArgumentParser) -> None:
    up.add_argument(
        "--model",
        action="append",
        default=[],
        metavar="NAME=PATH_OR_HUB_ID",
        help="serve this model; NAME is what SDK users pass as base_model, any org/name. Repeat for several",
    )
    up.add_argument("--port", type=int, default=8000, help="HTTP port for the SDK (default: 8000)")
    up.add_argument("--grpc-port", type=int, default=8001, help="port of the gRPC service (default: 8001)")
    up.add_argument(
        "--gateways", type=int, default=1, metavar="N", help="gateways sharing both ports (default: 1)"
    )
    up.add_argument(
        "--trainer-ranks",
        type=int,
        default=1,
        metavar="N",
        help="data-parallel ranks of each model's trainer, one GPU each (default: 1)",
    )
    up.add_argument(
        "--zero-stage",
        type=int,
        default=0,
        choices=(0, 1, 2, 3),
        help="ZeRO stage of the frozen base: 3 shards it over the ranks, else each has it all; and of models "
        "that train all weights, whose optimizer state is always sharded (default: 0)",
    )
    up.add_argument(
        "--offload-optimizer",
        choices=("none", "cpu"),
        default="none",
        help="cpu: models that train all weights hold their optimizer state, and step, on the CPU",
    )
    up.add_argument(
        "--max-full-models",
        type=int,
        default=1,
        metavar="N",
        help="models that train all weights which a trainer holds at once; idle ones make room for others "
        "(default: 1)",
    )
    up.add_argument(
        "--full-snapshot-steps",
        type=int,
        default=10,
        metavar="N",
        help="optimizer steps of such a model that a restart may have to repeat (default: 10)",
    )
    up.add_argument(
        "--samplers",
        type=int,
        default=1,
        metavar="N",
        help="vLLM replicas of each model; 0 = only train and save (default: 1)",
    )
    up.add_argument(
        "--device", choices=("auto", "cpu", "cuda"), default="auto", help="default: CUDA when there is one"
    )
    up.add_argument(
        "--dtype",
        choices=("auto", "float32", "bfloat16"),
        default="auto",
        help="of the base model; default: bfloat16 on CUDA, float32 on CPU. Adapters are always float32",
    )
    up.add_argument(
        "--data-dir",
        type=Path,
        default=_DATA_DIR,
        help="checkpoints, snapshots, logs, pid files and API keys (default: ./data)",
    )
    up.add_argument(
        "--checkpoint-store",
        default=os.environ.get("TINSMITH_CHECKPOINT_STORE", ""),
        metavar="DIR_OR_URL",
        help="keep named checkpoints and exports here: a directory, or a URL such as s3://bucket/prefix with "
        "credentials in the environment (default: in the data directory; TINSMITH_CHECKPOINT_STORE)",
    )
    up.add_argument(
        "--redis-url",
        help="use this Redis, not the embedded one; give a URL with a password as TINSMITH_REDIS_URL",
    )
    up.add_argument(
        "--redis-appendfsync",
        choices=("always", "everysec"),
        help="when the embedded Redis syncs its file: `always` keeps every acknowledged request even when "
        "the machine loses power, `everysec` all but the last second, and is faster (default: everysec)",
    )
    up.add_argument("-v", "--verbose", action="store_true", help="print all logs, not only warnings")


def _add_tiny(tiny: argparse.ArgumentParser) -> None:
    tiny.add_argument("directory", type=Path, metavar="DIR")
    for name, default, what in (
        ("vocab", 512, "tokens of the tokenizer"),
        ("hidden", 128, "hidden size"),
        ("layers", 4, "layers"),
        ("heads", 4, "attention heads"),
        ("kv-heads", 2, "key and value heads"),
        ("intermediate", 384, "feed-forward size"),
        ("context", 2048, "context length in tokens"),
        ("seed", 0, "seed of the random weights"),
    ):
        tiny.add_argument(f"--{name}", type=int, default=default, help=f"{what} (default: {default})")


def _up(args: argparse.Namespace) -> int:
    from services.launcher import machine, plan
    from services.launcher.up import up

    if not args.model:
        print(
            "tinsmith up: name a model to serve, for example\n\n"
            "    tinsmith models tiny ./tiny && tinsmith up --model my/tiny=./tiny",
            file=sys.stderr,
        )
        return 2
    redis_url = args.redis_url or os.environ.get("TINSMITH_REDIS_URL")
    if redis_url and args.redis_appendfsync:
        raise InvalidRequest("--redis-appendfsync is for the embedded Redis; set appendfsync in your own")
    options = plan.Options(
        models=tuple(plan.parse_model(text) for text in args.model),
        data_dir=args.data_dir.resolve(),
        port=args.port,
        grpc_port=args.grpc_port,
        gateways=args.gateways,
        trainer_ranks=args.trainer_ranks,
        zero_stage=args.zero_stage,
        samplers=args.samplers,
        checkpoint_store=_absolute(args.checkpoint_store),
        offload_optimizer=args.offload_optimizer,
        max_full_models=args.max_full_models,
        full_snapshot_steps=args.full_snapshot_steps,
        device=machine.choose_device(args.device),
        dtype=args.dtype,
        cores=machine.cores(),
        gpus=machine.gpus(),
        redis_appendfsync=args.redis_appendfsync or "everysec",
    )
    plan.check(options)
    return up(options, redis_url, args.verbose)


def _absolute(location: str) -> str:
    """A location of checkpoints as seen from any directory."""
    return location if not location or "://" in location else str(Path(location).expanduser().resolve())


def _status(args: argparse.Namespace) -> int:
    from services.launcher import status

    return status.main(DataDir(args.data_dir.resolve()), args.redis_url, args.json)


def _models(args: argparse.Namespace) -> int:
    return {"tiny": _tiny, "retire": _retire}[args.kind](args)


def _retire(args: argparse.Namespace) -> int:
    from services.gateway import retire

    data = DataDir(args.data_dir.resolve())
    url = args.redis_url or os.environ.get("TINSMITH_REDIS_URL")
    if not url:
        if not data.redis_url.exists():
            raise Unavailable(f"no cluster runs on {data.root} (no {data.redis_url}); use --redis-url")
        url = data.redis_url.read_text()
    retire.run(url, args.name)
    return 0


def _tiny(args: argparse.Namespace) -> int:
    # transformers imports DeepSpeed, which would otherwise warn that there is no GPU.
    os.environ.setdefault("DS_ACCELERATOR", "cpu")
    from transformers.utils import logging

    from services.launcher.tiny_model import make_tiny_model

    logging.disable_progress_bar()
    sizes = ("vocab", "hidden", "layers", "heads", "kv_heads", "intermediate", "context", "seed")
    try:
        make_tiny_model(args.directory, **{name: getattr(args, name) for name in sizes})
    except ValueError as error:
        raise InvalidRequest(str(error)) from error
    print(f"wrote a model to {args.directory}; serve it with: tinsmith up --model my/tiny={args.directory}")
    return 0


def main(argv: list[str] | None = None) -> int:
    """Runs the command; the exit status (2 for wrong usage, 1 for what could not be done)."""
    args = _parser().parse_args(argv)
    try:
        return {"up": _up, "status": _status, "models": _models}[args.command](args)
    except InvalidRequest as error:
        print(f"tinsmith: {error.message}", file=sys.stderr)
        return 2
    except TinsmithError as error:
        print(f"tinsmith: {error.message}", file=sys.stderr)
        return 1
    except ModuleNotFoundError as error:
        if (error.name or "").partition(".")[0] in ("services", "tinsmith"):
            raise
        print(
            f"tinsmith: the package {error.name} is not installed; `tinsmith {args.command}` needs\n"
            "    pip install 'tinsmith[gateway,trainer,sampler,local]'",
            file=sys.stderr,
        )
        return 1


if __name__ == "__main__":
    sys.exit(main())

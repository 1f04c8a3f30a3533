"""The `tinsmith` command."""

from __future__ import annotations

import argparse
import importlib.metadata
import os
import sys
from pathlib import Path

from services.common.contract.errors import InvalidRequest, TinsmithError, Unavailable
from services.common.storage.data_dir import DataDir
from services.gateway import keys_command
from services.launcher import default_model
from services.launcher.clients import admin_verbs
from services.launcher.settings.read import add_flags

_DESCRIPTION = """\
Tinsmith is the self-hosted Tinker: the unmodified tinker SDK trains and samples on your own machines.

  tinsmith up                                    start a cluster on this machine, with a small model
  tinsmith up --model my/name=./model-dir        with yours
  tinsmith status                                look at it from another terminal
  tinsmith doctor                                what this machine can run
  tinsmith admin services                        what a running cluster has, and more, for its operator
"""

_UP = """\
Starts Redis, gateways, a DeepSpeed trainer and vLLM samplers for every model, keeps them running, and
prints what to paste into another terminal. Ctrl-C finishes what was accepted and stops everything.

examples:
  tinsmith up
  tinsmith up --model Qwen/Qwen3-0.6B=Qwen/Qwen3-0.6B --max-context 4096
  tinsmith up --model Qwen/Qwen3-8B=/models/qwen3-8b --trainer-ranks 4 --zero-stage 3 --host 0.0.0.0
  tinsmith up -f cluster.toml --dry-run

Every setting is a flag, a key of a TOML file, or a variable TINSMITH_<FLAG>; the first of these counts.
Those of the services that are not here are variables too: python -m services.gateway --help
A variable TINSMITH_... that is none of them is refused.
"""


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
            allow_abbrev=False,
            formatter_class=argparse.RawDescriptionHelpFormatter,
        )
    )
    status = commands.add_parser(
        "status",
        help="processes, models, versions and queue depths of a cluster",
        description="Says which processes of a cluster run, which models it trains and samples, in which "
        "version, how much waits, and what cannot be read. Run it where `up` was started, or with the same "
        "--data-dir.",
    )
    _add_cluster(status)
    status.add_argument("--json", action="store_true", help="print JSON")
    doctor = commands.add_parser(
        "doctor",
        help="what this machine can run, and what a model needs",
        description="Says what this machine has and lacks, which models it can train and sample and with "
        "which flags of `up`; with a MODEL, where its memory goes. Starts nothing. The exit status is 1 when "
        "no cluster can run here.",
    )
    doctor.add_argument(
        "model",
        nargs="?",
        metavar="MODEL",
        help="say where the memory goes for a size (8B), a directory with a config.json, or a known name",
    )
    _add_data_dir(doctor)
    tokenizer = commands.add_parser(
        "tokenizer",
        help="put a served tokenizer where the SDK looks for it",
        description="Fetches the tokenizer of a served base model to DIR/NAME. The SDK and tinker-cookbook "
        "load tokenizers by name, and find it there when they run in DIR. Reads TINKER_BASE_URL and "
        "TINKER_API_KEY.",
    )
    tokenizer.add_argument("name", metavar="NAME", help="what SDK users pass as base_model")
    tokenizer.add_argument(
        "directory", type=Path, nargs="?", default=Path(), metavar="DIR", help="default: the current one"
    )
    models = commands.add_parser("models", help="make models, and end serving one").add_subparsers(
        dest="kind", required=True, metavar="KIND"
    )
    _add_tiny(models.add_parser("tiny", help="a tiny random Qwen3 with tokenizer and chat template"))
    retire = models.add_parser("retire", help="a base model is served no more: what waits for it fails")
    retire.add_argument("name", metavar="NAME", help="what SDK users pass as base_model")
    _add_cluster(retire)
    operating = commands.add_parser(
        "admin",
        help="everybody's sessions, services, owners: what an operator looks at and does",
        description="Asks a gateway that runs, over gRPC, with the API key of role admin in TINKER_API_KEY.",
    )
    admin_verbs.add_commands(operating)
    keys = commands.add_parser(
        "keys",
        help="API keys: who may use a cluster, and for what",
        description="Makes and ends the API keys of a cluster, for example: tinsmith keys create alice. Run "
        "it where `up` was started, or with the same --data-dir.",
    )
    for verb in keys_command.add_commands(keys):
        _add_cluster(verb)
    return parser


def _version() -> str:
    try:
        return importlib.metadata.version("tinsmith")
    except importlib.metadata.PackageNotFoundError:
        return "(a source tree that is not installed)"


def _add_data_dir(command: argparse.ArgumentParser) -> None:
    command.add_argument(
        "--data-dir",
        type=Path,
        default=Path(os.environ.get("TINSMITH_DATA_DIR") or "data"),
        help="as given to `up`, which reads the same variable (default: TINSMITH_DATA_DIR, else ./data)",
    )


def _add_cluster(command: argparse.ArgumentParser) -> None:
    _add_data_dir(command)
    command.add_argument("--redis-url", help="ask this Redis instead of the data directory's")


def _add_up(up: argparse.ArgumentParser) -> None:
    up.add_argument(
        "--model",
        action="append",
        default=[],
        metavar="NAME=PATH_OR_HUB_ID",
        help="serve this model; NAME is what SDK users pass as base_model, any org/name. Repeat for several; "
        "TINSMITH_MODEL has several with commas or spaces between, so no path in it has either "
        f"(default: {default_model.NAME}, which installs from a package)",
    )
    up.add_argument(
        "-f",
        "--file",
        type=Path,
        metavar="FILE.toml",
        help="settings: a key for each flag below, without dashes before it, and a table [models] of "
        "NAME = SOURCE. Flags come before it",
    )
    up.add_argument(
        "--dry-run", action="store_true", help="check everything, say what would run where, and end"
    )
    up.add_argument("-v", "--verbose", action="store_true", help="print all logs, not only warnings")
    add_flags(up)


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
    from services.launcher import machine
    from services.launcher.settings import options
    from services.launcher.up import show, up
    from services.trainer.world.launch import addresses

    here = options.Machine(machine.cores(), machine.gpus(), options.cuda_build(), addresses())
    looked_at = machine.in_use if args.dry_run else None
    chosen, redis_url = options.options(args, here, in_use=looked_at)
    if args.dry_run:
        print(show(chosen))
        return 0
    return up(chosen, redis_url, args.verbose)


def _no_password(redis_url: str | None) -> None:
    from services.launcher.settings.options import told_in_argv

    for mistake in told_in_argv(redis_url):
        raise InvalidRequest(mistake)


def _status(args: argparse.Namespace) -> int:
    from services.launcher import status

    _no_password(args.redis_url)
    return status.main(DataDir(args.data_dir.resolve()), args.redis_url, args.json)


def _doctor(args: argparse.Namespace) -> int:
    from services.launcher.doctor.command import doctor

    return doctor(args.data_dir.resolve(), args.model)


def _tokenizer(args: argparse.Namespace) -> int:
    from services.launcher.clients import tokenizer

    environment = os.environ
    url, key = environment.get("TINKER_BASE_URL"), environment.get("TINKER_API_KEY")
    print(tokenizer.run(url, key, args.name, args.directory))
    return 0


def _models(args: argparse.Namespace) -> int:
    return {"tiny": _tiny, "retire": _retire}[args.kind](args)


def _retire(args: argparse.Namespace) -> int:
    from services.gateway import retire

    retire.run(_redis_url(args), args.name)
    return 0


def _keys(args: argparse.Namespace) -> int:
    keys_command.run(args, _redis_url(args) if keys_command.needs_redis(args) else "")
    return 0


def _admin(args: argparse.Namespace) -> int:
    from services.launcher.clients import admin

    admin.run(args, os.environ.get("TINKER_API_KEY"))
    return 0


def _redis_url(args: argparse.Namespace) -> str:
    """Of the cluster that a command is for."""
    _no_password(args.redis_url)
    data = DataDir(args.data_dir.resolve())
    url: str | None = args.redis_url or os.environ.get("TINSMITH_REDIS_URL")
    if url:
        return url
    if not data.redis_url.exists():
        raise Unavailable(
            f"no cluster runs on {data.root} (no {data.redis_url}); use --redis-url, or on Kubernetes ask "
            "beside a gateway, as deploy/README.md says"
        )
    return data.redis_url.read_text()


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
    """Runs the command; its exit status: 2 = wrong usage, 1 = could not be done, 130 = Ctrl-C."""
    parser = _parser()
    args, unknown = parser.parse_known_args(argv)
    if unknown and args.command != "up":
        parser.error(f"unrecognized arguments: {' '.join(unknown)}")
    args.unknown = unknown
    try:
        commands = {"up": _up, "status": _status, "doctor": _doctor, "models": _models, "keys": _keys}
        return {**commands, "tokenizer": _tokenizer, "admin": _admin}[args.command](args)
    except InvalidRequest as error:
        print(f"tinsmith: {error.message}", file=sys.stderr)
        return 2
    except TinsmithError as error:
        print(f"tinsmith: {error.message}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        print("tinsmith: interrupted", file=sys.stderr)
        return 130
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

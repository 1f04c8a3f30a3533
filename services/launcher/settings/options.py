"""From what was asked for to a cluster that this machine can run, or to everything that is wrong with it.

Invariant: all mistakes of all settings are told in one answer, before anything is started or written.
"""

from __future__ import annotations

import argparse
import importlib.metadata
import os
from collections.abc import Callable, Mapping, Sequence, Set
from dataclasses import dataclass
from pathlib import Path
from urllib.parse import parse_qsl, urlsplit

from services.common.contract.errors import InvalidRequest, Unavailable
from services.common.state import redis_client
from services.launcher import placement, plan
from services.launcher.settings import mistakes, read
from services.launcher.settings.models import parse_model

_OF_NODES = {"trainer-nodes": 1, "trainer-rendezvous": None, "trainer-interface": None}


@dataclass(frozen=True)
class Machine:
    """What there is to compute on.

    Attributes:
        cores: CPUs that may be used.
        gpus: visible GPUs, as CUDA_VISIBLE_DEVICES names them.
        cuda_build: the installed PyTorch can use them.
        addresses: by network interface.
    """

    cores: tuple[int, ...]
    gpus: tuple[str, ...]
    cuda_build: bool
    addresses: Mapping[str, list[str]]


def cuda_build() -> bool:
    """Whether the installed PyTorch is a build for CUDA. Does not import it, which takes seconds."""
    return "+cpu" not in importlib.metadata.version("torch")


InUse = Callable[[Sequence[plan.Listener]], Mapping[str, str]]
"""What is said of each flag that asks for a port which something listens on; Unavailable for an address that
this machine does not have."""


def options(
    flags: argparse.Namespace,
    machine: Machine,
    environment: Mapping[str, str] = os.environ,
    in_use: InUse | None = None,
) -> tuple[plan.Options, str | None]:
    """The cluster that `tinsmith up` is asked for, and the URL of its own Redis if it has one.

    Args:
        in_use: looks at the ports. None: nobody does, as a cluster that is still ending may have them.

    Raises:
        InvalidRequest: with every mistake, a line each.
    """
    given = read.read(flags, flags.model, flags.file, environment)
    found = list(given.mistakes)
    models = []
    for text in given.models:
        try:
            models.append(parse_model(text, given.models_from))
        except InvalidRequest as error:
            found.append(error.message)
    values = dict(given.values)
    redis_url, fsync = values.pop("redis-url"), values.pop("redis-appendfsync")
    found += told_in_argv(getattr(flags, "redis_url", None)) or _no_redis(redis_url)
    if redis_url and fsync:
        found.append("--redis-appendfsync is for the embedded Redis; set appendfsync in your own")
    device = _device(values["device"], machine, found)
    gpus = machine.gpus if device == "cuda" else ()
    counts = placement.counts(
        models=max(1, len(models)),
        gpus=len(gpus),
        sampler_gpus=values["sampler-tp"] * values["sampler-pp"],
        ranks=values["trainer-ranks"],
        samplers=values["samplers"],
    )
    values |= {
        "data-dir": Path(values["data-dir"]).expanduser().resolve(),
        "checkpoint-store": _absolute(values["checkpoint-store"]),
        "tls-cert": _file(values["tls-cert"]),
        "tls-key": _file(values["tls-key"]),
        "device": device,
        "trainer-ranks": counts.ranks,
        "samplers": counts.samplers,
        "redis-appendfsync": fsync or "everysec",
    }
    if given.wrong & _OF_NODES.keys():
        # What is wrong with them is said; what it would mean for the others is not known.
        values |= _OF_NODES
    chosen = plan.Options(
        models=tuple(models),
        cores=machine.cores,
        gpus=gpus,
        **{name.replace("-", "_"): value for name, value in values.items()},
    )
    found += mistakes.mistakes(chosen, machine.addresses)
    if in_use is not None and "host" not in given.wrong:
        found += _taken(chosen, given.wrong, in_use)
    if found:
        raise InvalidRequest(_told(found))
    return chosen, redis_url


def told_in_argv(redis_url: str | None) -> list[str]:
    """What is wrong with the value of the flag --redis-url, which everybody on this machine can read."""
    if not redis_url:
        return []
    parts = urlsplit(redis_url)
    named = parse_qsl(parts.query, keep_blank_values=True)
    if parts.password is not None or any(name.lower().endswith("password") for name, _ in named):
        return ["a --redis-url with a password can be read by every user here: give it as TINSMITH_REDIS_URL"]
    return []


def _no_redis(url: str | None) -> list[str]:
    """What is wrong with the URL of a Redis, whose password it does not tell."""
    try:
        if url:
            redis_client.parse(url)
    except InvalidRequest as error:
        return [f"--redis-url: {error.message}"]
    return []


def _told(mistakes: list[str]) -> str:
    if len(mistakes) == 1:
        return mistakes[0]
    return "\n  ".join([f"{len(mistakes)} things are to be changed:", *mistakes])


def _taken(chosen: plan.Options, wrong: Set[str], in_use: InUse) -> list[str]:
    """What is wrong with the ports on this machine, but those whose setting was mistaken already."""
    wanted = [each for each in plan.listeners(chosen) if each.flag.removeprefix("--") not in wrong]
    try:
        return list(in_use(wanted).values())
    except Unavailable as error:
        return [error.message]


def _device(wanted: str, machine: Machine, found: list[str]) -> str:
    """ "cpu" or "cuda"; what stands against it joins `found`."""
    if wanted == "auto":
        return "cuda" if machine.gpus and machine.cuda_build else "cpu"
    if wanted == "cuda" and not machine.gpus:
        found.append("--device cuda: this machine shows no NVIDIA GPU (see CUDA_VISIBLE_DEVICES)")
        return "cpu"
    if wanted == "cuda" and not machine.cuda_build:
        found.append("--device cuda: the CPU build of PyTorch is installed; run make setup DEVICE=cuda")
    return wanted


def _file(path: str | None) -> str | None:
    return None if path is None else str(Path(path).expanduser().resolve())


def _absolute(location: str) -> str:
    """A location of checkpoints as seen from any directory."""
    return location if not location or "://" in location else str(Path(location).expanduser().resolve())

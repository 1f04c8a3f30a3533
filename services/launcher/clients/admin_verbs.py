"""The verbs of `tinsmith admin`. Invariant: this loads nothing that only some installations have."""

from __future__ import annotations

import argparse
import os
from pathlib import Path

_ADDRESS = "127.0.0.1:8001"


def add_commands(parser: argparse.ArgumentParser) -> None:
    """Adds the verbs."""
    verbs = parser.add_subparsers(dest="verb", required=True, metavar="VERB")

    def verb(name: str, help: str) -> argparse.ArgumentParser:
        made = verbs.add_parser(name, help=help)
        made.add_argument(
            "--address",
            default=os.environ.get("TINSMITH_ADDRESS", _ADDRESS),
            metavar="HOST:PORT",
            help=f"of a gateway's gRPC port (default: TINSMITH_ADDRESS, or {_ADDRESS})",
        )
        made.add_argument(
            "--ca", type=Path, metavar="FILE", help="speak TLS, and believe these authorities (PEM)"
        )
        return made

    def listing(name: str, help: str) -> argparse.ArgumentParser:
        made = verb(name, help)
        made.add_argument(
            "--most", type=_count, default=200, metavar="N", help="lines at most (default: 200)"
        )
        return made

    sessions = listing("sessions", "everybody's sessions that are not over, last heard of first")
    sessions.add_argument("--owner", default="", help="all of this owner's, newest first")
    end = verb("end-session", "end anybody's session for good; what it saved under a name stays")
    end.add_argument("session", metavar="SESSION")
    end.add_argument("--why", default="", metavar="TEXT", help="for the log and for its owner")
    listing("services", "gateways, trainers and samplers, and which are drained")
    for name, help in (
        ("drain", "give a trainer or sampler nothing new, until undrain; its models move to another one"),
        ("undrain", "give it work again"),
    ):
        verb(name, help).add_argument("id", metavar="ID", help="as `tinsmith admin services` lists it")
    retire = verb("retire", "end the serving of a base model: what waits for it fails")
    retire.add_argument("name", metavar="NAME", help="what SDK users pass as base_model")
    listing("unreadable", "what was met in Redis and cannot be read")
    drop = verb("drop", "forget something of it, and take it out of the list where it was met")
    drop.add_argument("name", metavar="NAME", help="as `tinsmith admin unreadable` lists it, in quotes")
    listing("owners", "what every owner has, and what each may have")


def _count(text: str) -> int:
    found = int(text)
    if found < 1:
        raise argparse.ArgumentTypeError(f"expected 1 or more, not {text}")
    return found

"""Command line of the gateway.

Every flag `--some-flag` may be given as TINSMITH_SOME_FLAG instead. The Redis URL may hold a
password, so it comes only from TINSMITH_REDIS_URL and never shows in a process list.
"""

from __future__ import annotations

import argparse
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from services.common.contract.errors import InvalidRequest
from services.common.state.journal_records import JournalLimits
from services.common.state.known_models import EXAMPLE, Configured, parse_configured
from services.common.state.room import RoomLimits
from services.common.storage.location import check_location
from services.gateway.access.limits import MIB, Limits
from services.gateway.retention.plan import RetentionSettings

REDIS_URL_VARIABLE = "TINSMITH_REDIS_URL"


@dataclass(frozen=True)
class GatewayConfig:
    """Settings of one gateway process.

    Attributes:
        id: name of the process, stable over restarts.
        host: address that both ports listen on.
        port: HTTP port; 0 takes a free one.
        grpc_port: gRPC port; 0 takes a free one.
        data_dir: directory for the pid file and the default keys file.
        checkpoint_store: where named checkpoints and exports are kept: a directory or a URL such as
            s3://bucket/prefix; empty = in the data directory.
        api_keys_file: one key per line, optionally followed by a space and the owner's name.
        redis_url: where all state is.
        retention: when silent sessions let go of what they hold.
        journal: bounds of each model's journal in Redis.
        room: bounds of what all of them and all results take there, and how long results stay.
        base_models: those that are to be waited for, also before anything of them was ever there.
        memory_mib: most memory that requests take while they are received, checked and journaled.
        snapshot_bytes: most bytes of unnamed sampler snapshots; 0 = a share of their volume.
        snapshot_owner_bytes: the same of one owner.
    """

    id: str
    host: str
    port: int
    grpc_port: int
    data_dir: Path
    checkpoint_store: str
    api_keys_file: Path
    redis_url: str
    retention: RetentionSettings
    journal: JournalLimits
    room: RoomLimits
    memory_mib: int
    snapshot_bytes: int = 0
    snapshot_owner_bytes: int = 0
    base_models: tuple[Configured, ...] = ()


def parse(argv: Sequence[str], environment: Mapping[str, str] = os.environ) -> GatewayConfig:
    """The configuration; exits with a message when it is wrong."""
    parser = argparse.ArgumentParser(prog="python -m services.gateway", description=__doc__)

    def add(flag: str, default: str | None, text: str) -> None:
        variable = "TINSMITH_" + flag.removeprefix("--").replace("-", "_").upper()
        value = environment.get(variable, default)
        parser.add_argument(
            flag, default=value, required=value is None, help=f"{text} (default: {default}; {variable})"
        )

    add("--id", "gateway-0", "name of this process")
    add("--host", "127.0.0.1", "address to listen on")
    add("--port", "8000", "HTTP port, shared with other gateways of this machine")
    add("--grpc-port", "8001", "gRPC port, shared with other gateways of this machine")
    add("--data-dir", None, "data directory of the cluster")
    add("--checkpoint-store", "", "directory or URL of checkpoints and exports; empty: in DATA_DIR")
    add("--api-keys-file", "", "file of API keys; empty: DATA_DIR/api_key")
    add("--session-park-after", "1800", "seconds of silence after which a session's models are parked")
    add("--session-end-after", "604800", "seconds of silence after which a session is over")
    add("--snapshot-grace", "600", "seconds for which unnamed snapshots outlive their session")
    add("--forget-after", "2592000", "seconds after its end for which a session's records stay")
    limits = JournalLimits()
    add("--pending-bytes", str(limits.pending_bytes), "most bytes of a model's requests that wait to run")
    add("--journal-bytes", str(limits.journal_bytes), "most bytes of a model's requests kept for a replay")
    add(
        "--base-models", "", f"base models to wait for, also before they loaded for the first time: {EXAMPLE}"
    )
    room = RoomLimits()
    memory_mib = Limits().request_memory_bytes // MIB
    add("--memory-mib", str(memory_mib), "most memory that requests take until they are journaled, in MiB")
    add("--state-bytes", "0", "most bytes of requests and results in Redis; 0: half of its maxmemory")
    add("--owner-bytes", "0", "most of those of one API key; 0: as many as are left for others")
    add("--result-life", str(room.result_life), "seconds that a result stays which nobody fetches")
    add("--fetched-result-life", str(room.fetched_life), "seconds that a result stays after it was fetched")
    add("--snapshot-bytes", "0", "most bytes of unnamed sampler snapshots; 0: half of their volume")
    add("--snapshot-owner-bytes", "0", "the same of one owner; 0: half of that")
    options = parser.parse_args(argv)
    redis_url = environment.get(REDIS_URL_VARIABLE, "")
    if not redis_url:
        parser.error(f"set {REDIS_URL_VARIABLE}, for example redis://127.0.0.1:6379/0")
    ports = {}
    for name in ("port", "grpc_port"):
        text = getattr(options, name)
        if not text.isdigit() or int(text) > 65535:
            parser.error(f"--{name.replace('_', '-')} must be a port number, not {text!r}")
        ports[name] = int(text)
    times = {}
    for name in (
        "session_park_after",
        "session_end_after",
        "snapshot_grace",
        "forget_after",
        "result_life",
        "fetched_result_life",
    ):
        text = getattr(options, name)
        if not text.isdigit() or int(text) < 1:
            parser.error(
                f"--{name.replace('_', '-')} must be a whole number of seconds, at least 1, not {text!r}"
            )
        times[name] = int(text)
    try:
        check_location(options.checkpoint_store)
    except InvalidRequest as error:
        parser.error(f"--checkpoint-store: {error.message}")
    sizes = {}
    for name in ("pending_bytes", "journal_bytes"):
        text = getattr(options, name)
        if not text.isdigit() or int(text) < 1:
            parser.error(f"--{name.replace('_', '-')} must be a number of bytes, at least 1, not {text!r}")
        sizes[name] = int(text)
    try:
        base_models = parse_configured(options.base_models)
    except InvalidRequest as error:
        parser.error(f"--base-models: {error.message}")
    if not options.memory_mib.isdigit() or int(options.memory_mib) < 1:
        parser.error(f"--memory-mib must be a whole number, at least 1, not {options.memory_mib!r}")
    shares = {}
    for name in ("state_bytes", "owner_bytes"):
        text = getattr(options, name)
        if not text.isdigit():
            parser.error(f"--{name.replace('_', '-')} must be a number of bytes, or 0, not {text!r}")
        shares[name] = int(text)
    for name in ("snapshot_bytes", "snapshot_owner_bytes"):
        if not getattr(options, name).isdigit():
            parser.error(f"--{name.replace('_', '-')} must be a number of bytes, 0 for a share of the volume")
    data_dir = Path(options.data_dir)
    return GatewayConfig(
        id=options.id,
        host=options.host,
        data_dir=data_dir,
        checkpoint_store=options.checkpoint_store,
        api_keys_file=Path(options.api_keys_file) if options.api_keys_file else data_dir / "api_key",
        redis_url=redis_url,
        retention=RetentionSettings(
            park_after=times["session_park_after"],
            end_after=times["session_end_after"],
            snapshot_grace=times["snapshot_grace"],
            forget_after=times["forget_after"],
        ),
        journal=JournalLimits(**sizes),
        base_models=base_models,
        room=RoomLimits(
            total_bytes=shares["state_bytes"],
            owner_bytes=shares["owner_bytes"],
            result_life=times["result_life"],
            fetched_life=times["fetched_result_life"],
        ),
        memory_mib=int(options.memory_mib),
        snapshot_bytes=int(options.snapshot_bytes),
        snapshot_owner_bytes=int(options.snapshot_owner_bytes),
        **ports,
    )

"""Command line of the gateway.

Every flag `--some-flag` may be given as TINSMITH_SOME_FLAG instead. The Redis URL may hold a
password, so it comes only from TINSMITH_REDIS_URL and never shows in a process list.
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

from services.common.contract.errors import InvalidRequest
from services.common.contract.sample_schema import MAX_SAMPLES
from services.common.contract.stand_ins import STAND_INS
from services.common.process import flags
from services.common.process.flags import (
    BYTES,
    BYTES_OR_0,
    HTTP_URL,
    PATH,
    PORT,
    PROXIES,
    SECONDS,
    SWITCH,
    TEXT,
    Flag,
    Kind,
    number,
    one_of,
)
from services.common.state.journal_records import JournalLimits
from services.common.state.known_models import EXAMPLE, Configured, parse_configured
from services.common.state.room import RoomLimits
from services.common.storage.location import check_location
from services.common.telemetry import logs
from services.gateway.access.limits import MIB, Limits, OwnerLimits
from services.gateway.access.memory import DEFAULT_MIB, LEAST_MIB, Memory
from services.gateway.dispatch.plan import DispatchSettings, Window
from services.gateway.edge.http.wire.connection import ConnectionLimits
from services.gateway.identity.provider import ProviderSettings
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
        identity: directory of ca.crt, tls.crt and tls.key, for mutual TLS with trainers and samplers;
            empty: in the clear.
        metrics_port: port of Prometheus' /metrics, of this process alone; 0 = none.
        log_format: of what it logs: "text", lines to read, or "json", objects to search.
        access_log: whether each request is a line of the log.
        grpc_connections: gRPC connections at once.
        public_url: what clients reach the gateways as; empty: as each request names them.
        tls_cert, tls_key: PEM files of the certificate of both public ports; empty: in the clear.
        trusted_proxies: addresses and networks whose forwarded headers are believed.
        near_clients: whether a client that connects over loopback has the files of this machine.
        data_dir: directory for the pid file and the default keys file.
        checkpoint_store: where named checkpoints and exports are kept: a directory or a URL such as
            s3://bucket/prefix; empty = in the data directory.
        api_keys_file: API keys and their owners, a line each (`identity/keys_file.py`).
        base_models: those that are to be waited for, also before anything of them was ever there.
        redis_url: where all state is.
        memory_mib: what requests, samples and operations in flight may take.
        snapshot_bytes: most bytes of unnamed sampler snapshots; 0 = a share of their volume.
        snapshot_owner_bytes: the same of one owner.
        limits: bounds of one request, and of what one API key may have.
        connections: bounds of HTTP connections.
        oidc: whose tokens are let in where API keys are.
        retention: when silent sessions let go of what they hold.
        journal: bounds of each model's journal in Redis.
        room: bounds of what all of them and all results take there, and how long results stay.
        dispatch: how operations are sent to trainers.
        samples: how samples are sent to samplers.
    """

    id: str = "gateway-0"
    host: str = "127.0.0.1"
    port: int = 8000
    grpc_port: int = 8001
    identity: Path = Path()
    metrics_port: int = 0
    log_format: str = "text"
    access_log: bool = False
    grpc_connections: int = 2048
    data_dir: Path = Path()
    checkpoint_store: str = ""
    public_url: str = ""
    tls_cert: Path = Path()
    tls_key: Path = Path()
    trusted_proxies: tuple[str, ...] = ()
    near_clients: bool = True
    api_keys_file: Path = Path()
    base_models: tuple[Configured, ...] = ()
    redis_url: str = ""
    memory_mib: int = DEFAULT_MIB
    snapshot_bytes: int = 0
    snapshot_owner_bytes: int = 0
    limits: Limits = field(default_factory=Limits)
    connections: ConnectionLimits = field(default_factory=ConnectionLimits)
    retention: RetentionSettings = field(default_factory=RetentionSettings)
    journal: JournalLimits = field(default_factory=JournalLimits)
    room: RoomLimits = field(default_factory=RoomLimits)
    oidc: ProviderSettings = field(default_factory=ProviderSettings)
    dispatch: DispatchSettings = field(default_factory=DispatchSettings)


_LOCATION = Kind("a directory or a URL", "URL", check_location)
_STAND_IN = Kind(f"one of {', '.join(STAND_INS)}, or empty", "LOSS", lambda text: _stand_in(text))
_MODELS = Kind(f"JSON like {EXAMPLE}", "JSON", parse_configured)
_FORMAT = one_of(logs.FORMATS)
_MEMORY = number(LEAST_MIB, 1 << 20, "MiB")
_MESSAGE = number(1, 192 * MIB, "bytes")
_COUNT = number(1, 10**9)

# One row a flag, so that what goes together is read together.
# fmt: off
FLAGS: dict[str, tuple[Flag, ...]] = {
    "this process": (
        Flag("--id", TEXT, GatewayConfig, "id", "name of this process"),
        Flag("--host", TEXT, GatewayConfig, "host", "address to listen on"),
        Flag("--port", PORT, GatewayConfig, "port", "HTTP port, shared with other gateways of this machine"),
        Flag("--grpc-port", PORT, GatewayConfig, "grpc_port", "gRPC port, shared in the same way"),
        Flag("--identity", PATH, GatewayConfig, "identity",
             "directory of ca.crt, tls.crt and tls.key: who this gateway is to trainers and samplers, which "
             "it then calls by mutual TLS; empty: in the clear"),
        Flag("--metrics-port", PORT, GatewayConfig, "metrics_port", "port of Prometheus' /metrics, 0 = none"),
        Flag("--log-format", _FORMAT, GatewayConfig, "log_format",
             "of the log: lines to read, or JSON objects to search"),
        Flag("--access-log", SWITCH, GatewayConfig, "access_log", "log a line for every request"),
        Flag("--public-url", HTTP_URL, GatewayConfig, "public_url",
             "what clients reach the gateways as, for download links; empty: as their requests name them"),
        Flag("--tls-cert", PATH, GatewayConfig, "tls_cert",
             "PEM certificate, with its chain, of the HTTP and the gRPC port; read again when it rotates; "
             "empty: in the clear"),
        Flag("--tls-key", PATH, GatewayConfig, "tls_key", "PEM key of that certificate"),
        Flag("--trusted-proxy", PROXIES, GatewayConfig, "trusted_proxies",
             "addresses and networks, with commas between, of proxies whose X-Forwarded-For and "
             "X-Forwarded-Proto are believed"),
        Flag("--near-clients", SWITCH, GatewayConfig, "near_clients",
             "who connects over loopback has this machine's files, and is told where a tokenizer lies; not "
             "so in a container"),
        Flag("--data-dir", PATH, GatewayConfig, "data_dir", "data directory of the cluster; must be given"),
        Flag("--api-keys-file", PATH, GatewayConfig, "api_keys_file", "API keys; empty: DATA_DIR/api_key"),
        Flag("--memory-mib", _MEMORY, GatewayConfig, "memory_mib",
             "memory for all requests, samples and operations in flight; the process takes about 200 MiB "
             "besides"),
    ),
    "an identity provider (OpenID Connect)": (
        Flag("--oidc-issuer", TEXT, ProviderSettings, "issuer",
             "claim iss of tokens that are let in where API keys are; empty: none are"),
        Flag("--oidc-audience", TEXT, ProviderSettings, "audience", "what their claim aud must have"),
        Flag("--oidc-jwks-url", HTTP_URL, ProviderSettings, "jwks_url",
             "where the provider publishes the keys that it signs with"),
        Flag("--oidc-owner-claim", TEXT, ProviderSettings, "owner_claim", "claim that names the owner"),
        Flag("--oidc-role-claim", TEXT, ProviderSettings, "role_claim",
             "claim that is, or lists, admin, user or read; empty: all have role user"),
    ),
    "models and files": (
        Flag("--base-models", _MODELS, GatewayConfig, "base_models",
             f"base models to wait for, also before they loaded for the first time: {EXAMPLE}"),
        Flag("--checkpoint-store", _LOCATION, GatewayConfig, "checkpoint_store",
             "directory or URL of checkpoints and exports; empty: in DATA_DIR"),
        Flag("--stable-reinforce-as", _STAND_IN, Limits, "stable_reinforce_as",
             "loss that runs where a client asks for stable_reinforce, whose formula is not public; empty: "
             "such requests are refused"),
        Flag("--snapshot-bytes", BYTES_OR_0, GatewayConfig, "snapshot_bytes",
             "most bytes of unnamed sampler snapshots; 0: half of their volume"),
        Flag("--snapshot-owner-bytes", BYTES_OR_0, GatewayConfig, "snapshot_owner_bytes",
             "the same of one API key, which may save no more beyond it; 0: half of that"),
    ),
    "sessions": (
        Flag("--session-park-after", SECONDS, RetentionSettings, "park_after",
             "silence after which a session's models are parked"),
        Flag("--session-end-after", SECONDS, RetentionSettings, "end_after",
             "silence after which a session is over"),
        Flag("--snapshot-grace", SECONDS, RetentionSettings, "snapshot_grace",
             "time for which unnamed snapshots outlive their session"),
        Flag("--forget-after", SECONDS, RetentionSettings, "forget_after",
             "time after its end for which a session's records stay"),
    ),
    "requests, results and records in Redis": (
        Flag("--pending-operations", number(16, 10**6), JournalLimits, "entries",
             "operations of a model that wait, and operations kept for a replay"),
        Flag("--pending-bytes", BYTES, JournalLimits, "pending_bytes",
             "most bytes of a model's requests that wait to run"),
        Flag("--journal-bytes", BYTES, JournalLimits, "journal_bytes",
             "most bytes of a model's requests kept for a replay"),
        Flag("--state-bytes", BYTES_OR_0, RoomLimits, "total_bytes",
             "most bytes of requests, results and records in Redis; 0: half of its maxmemory"),
        Flag("--owner-bytes", BYTES_OR_0, RoomLimits, "owner_bytes",
             "most of those of one API key; 0: as many as are left for others"),
        Flag("--owner-operations", number(16, 10**8), RoomLimits, "owner_operations",
             "most operations of one API key that wait to run, over all its models"),
        Flag("--result-life", SECONDS, RoomLimits, "result_life",
             "time that a result stays which nobody fetches"),
        Flag("--fetched-result-life", SECONDS, RoomLimits, "fetched_life",
             "time that a result stays after it was fetched"),
    ),
    "what one API key may have": (
        Flag("--max-sessions", _COUNT, OwnerLimits, "sessions", "sessions whose records are kept"),
        Flag("--max-models", _COUNT, OwnerLimits, "models", "models whose records are kept"),
        Flag("--max-samplers", _COUNT, OwnerLimits, "samplers", "sampling clients of one session"),
        Flag("--max-checkpoints", _COUNT, OwnerLimits, "checkpoints", "named checkpoints and exports"),
        Flag("--max-checkpoint-bytes", BYTES_OR_0, OwnerLimits, "checkpoint_bytes",
             "bytes of their files; 0: half of the volume, and no bound in an object store"),
        Flag("--requests-per-second", number(1, 10**6), OwnerLimits, "requests_per_second",
             "requests to this gateway, over a while"),
        Flag("--burst-seconds", number(1, 3600, "seconds"), OwnerLimits, "burst_seconds",
             "for so long a key may send what it has not sent before"),
        Flag("--max-calls", number(8, 10**6), OwnerLimits, "calls",
             "calls at once of all keys; one never holds more than is left for others"),
        Flag("--max-downloads", number(2, 10**4), OwnerLimits, "downloads", "the same of downloads"),
        Flag("--waiting-sequences", number(2, 10**8), Limits, "waiting_sequences",
             "sequences of all unfinished samples of this gateway; one key never holds more than is left for "
             "others"),
    ),
    "one request": (
        Flag("--max-json-bytes", BYTES, Limits, "json_body_bytes", "JSON body, but of a sample"),
        Flag("--max-sample-bytes", BYTES, Limits, "sample_body_bytes", "JSON body of a sample"),
        Flag("--max-batch-bytes", BYTES, Limits, "training_body_bytes",
             "body of a forward_backward over HTTP as it is sent"),
        Flag("--max-inflated-bytes", _MESSAGE, Limits, "inflated_body_bytes",
             "the same after decompression, with sparse tensors made dense"),
        Flag("--max-message-bytes", _MESSAGE, Limits, "grpc_message_bytes", "gRPC message"),
        Flag("--max-datums", _COUNT, Limits, "datums", "training examples"),
        Flag("--max-samples", number(1, MAX_SAMPLES), Limits, "samples", "sequences of one sample request"),
        Flag("--max-lora-rank", number(1, 4096), Limits, "lora_rank", "rank of an adapter"),
        Flag("--max-metadata-bytes", BYTES, Limits, "metadata_bytes", "user_metadata of one object as JSON"),
    ),
    "connections": (
        Flag("--max-http-connections", number(1, 10**6), ConnectionLimits, "connections",
             "HTTP connections; beyond it one that only waits gives way"),
        Flag("--max-grpc-connections", number(1, 10**6), GatewayConfig, "grpc_connections",
             "gRPC connections; further ones are closed"),
    ),
    "sending work on": (
        Flag("--window-operations", number(1, 64), Window, "operations",
             "operations of one model that are sent to its trainer ahead of their results"),
        Flag("--window-bytes", BYTES, Window, "bytes", "bytes of those"),
        Flag("--execute-timeout", SECONDS, DispatchSettings, "execute_timeout",
             "time after which an operation's call to its trainer is made again"),
        Flag("--trainer-patience", SECONDS, DispatchSettings, "trainer_patience",
             "time that a model's trainer is waited for while another one of its base model is there"),
        Flag("--gap-timeout", SECONDS, DispatchSettings, "gap_timeout",
             "time that later operations wait for one that was numbered and not sent"),
    ),
}
# fmt: on


def _stand_in(text: str) -> str:
    if text not in ("", *STAND_INS):
        raise ValueError
    return text


def parse(argv: Sequence[str], environment: Mapping[str, str] = os.environ) -> GatewayConfig:
    """The configuration; exits with a message that tells all that is wrong."""
    parser = flags.parser("python -m services.gateway", __doc__, FLAGS, environment)
    given = flags.given(parser, FLAGS, argv)
    config = given.of(
        GatewayConfig,
        redis_url=environment.get(REDIS_URL_VARIABLE, ""),
        limits=given.of(Limits, owners=given.of(OwnerLimits)),
        connections=given.of(ConnectionLimits),
        retention=given.of(RetentionSettings),
        journal=given.of(JournalLimits),
        room=given.of(RoomLimits),
        oidc=given.of(ProviderSettings),
        dispatch=given.of(DispatchSettings, window=given.of(Window)),
    )
    flags.refuse(parser, [*given.mistakes, *_mistakes(config)])
    if config.api_keys_file == Path():
        return replace(config, api_keys_file=config.data_dir / "api_key")
    return config


def _mistakes(config: GatewayConfig) -> list[str]:
    """What is wrong although each flag is right."""
    found = []
    if not config.redis_url:
        found.append(f"set {REDIS_URL_VARIABLE}, for example redis://127.0.0.1:6379/0")
    if (config.tls_cert == Path()) != (config.tls_key == Path()):
        found.append("--tls-cert and --tls-key go together")
    try:
        config.oidc.check()
    except InvalidRequest as error:
        found.append(error.message)
    if config.data_dir == Path():
        found.append("--data-dir must be given (or TINSMITH_DATA_DIR)")
    memory = Memory.of(config.memory_mib * MIB)
    if config.limits.grpc_message_bytes > memory.largest_message:
        found.append(
            f"--max-message-bytes must be at most {memory.largest_message} with a --memory-mib of "
            f"{config.memory_mib}"
        )
    calls, connections = config.limits.owners.calls, config.connections.connections
    if connections <= calls // 2:
        # Each long poll over HTTP has one of its own, and one API key may hold half of all calls.
        found.append(
            f"--max-http-connections must be more than half of --max-calls, {calls // 2 + 1} or more, or one "
            f"API key could hold all {connections}"
        )
    if config.retention.end_after < config.retention.park_after:
        found.append("--session-end-after must be at least --session-park-after")
    return found


_STATED = ("requests, results and records in Redis", "what one API key may have")
_STATED_TOO = ("--memory-mib", "--snapshot-bytes", "--snapshot-owner-bytes", "--forget-after")


def stated(config: GatewayConfig) -> dict[str, int]:
    """The limits that an operator looks for, by their flags."""
    settings = {
        GatewayConfig: config,
        RetentionSettings: config.retention,
        Limits: config.limits,
        OwnerLimits: config.limits.owners,
        RoomLimits: config.room,
        JournalLimits: config.journal,
    }
    found = [flag for group in _STATED for flag in FLAGS[group]]
    found += [flag for flag in flags.rows_of(FLAGS) if flag.name in _STATED_TOO]
    return {flag.name: int(getattr(settings[flag.settings], flag.field)) for flag in found}

"""What a key must be allowed for each method of each protocol.

Invariant: a method that has no row here is not served, so nothing new is open before somebody has decided who
may call it.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from services.common.contract.errors import PermissionDenied
from services.gateway.identity.key import ADMIN, CHECKPOINTS, READ, SAMPLE, TRAIN, Caller, described


@dataclass(frozen=True)
class Need:
    """What a method takes.

    Attributes:
        writes: it makes, changes or ends something, or has work done. Role `read` may not.
        scope: that a limited key must have; "": any key may.
        admin: only role `admin` may.
    """

    writes: bool = False
    scope: str = ""
    admin: bool = False


_LOOKS, _WRITES = Need(), Need(writes=True)
_TRAINS = Need(writes=True, scope=TRAIN)
_SAMPLES = Need(writes=True, scope=SAMPLE)
_READS_FILES = Need(scope=CHECKPOINTS)
_CHANGES_FILES = Need(writes=True, scope=CHECKPOINTS)
_ADMINISTERS = Need(writes=True, admin=True)

_RUN = "training_runs/{training_run_id}"
_CHECKPOINT = f"{_RUN}/checkpoints/{{kind}}/{{name}}"

# Needs, and the methods of gRPC and HTTP that have them.
_ROWS: tuple[tuple[Need, str, str], ...] = (
    # What the cluster is and has.
    (_LOOKS, "GetServerInfo ListModels", "GET get_server_capabilities|GET models|GET models/{model:path}"),
    (_LOOKS, "GetTokenizer ServerReflectionInfo", "GET tokenizers/{base_model:path}"),
    (_LOOKS, "", "POST client/config|POST client/dynamic_config|POST telemetry|POST messages/count_tokens"),
    # Who one is.
    (_LOOKS, "", "GET auth/apikey/me|DELETE auth/apikey/me|POST auth/token"),
    # Sessions.
    (_WRITES, "CreateSession Heartbeat FinishSession SetSessionProject", "POST create_session"),
    (_WRITES, "", "POST session_heartbeat|POST sessions/{session_id}/finish"),
    (_WRITES, "", "PUT sessions/{session_id}/project"),
    (_LOOKS, "GetSession ListSessions SearchSessions", "GET sessions|POST sessions/search"),
    (_LOOKS, "", "GET sessions/{session_id}|GET sessions/{session_id}/trace_export"),
    # Models and their training.
    (_TRAINS, "CreateModel CreateModelFromState UnloadModel", "POST create_model|POST unload_model"),
    (_TRAINS, "ForwardBackward OptimStep LoadState", "POST forward_backward|POST forward|POST optim_step"),
    (_TRAINS, "SaveState SaveExternal SaveForSampler", "POST load_weights|POST save_weights"),
    (_TRAINS, "", "POST save_weights_external|POST save_weights_for_sampler"),
    (_LOOKS, "GetModelInfo GetTrainingRun ListTrainingRuns", f"POST get_info|GET training_runs|GET {_RUN}"),
    # Samples.
    (_SAMPLES, "CreateSamplingSession Sample StreamSample", "POST create_sampling_session|POST asample"),
    (_SAMPLES, "CancelSample", "POST cancel_future|POST completions|POST chat/completions|POST messages"),
    (_LOOKS, "GetSamplingSession", "GET samplers/{sampling_session_id}"),
    # Results, of training and of samples. One that was fetched stays for minutes only.
    (_WRITES, "GetResult ReadResults WatchSamples", "POST retrieve_future|POST retrieve_futures"),
    (_WRITES, "AcknowledgeResults", ""),
    # Checkpoints.
    (_LOOKS, "ListCheckpoints GetCheckpoint", f"GET checkpoints|GET {_RUN}/checkpoints|POST weights_info"),
    (_READS_FILES, "ReadExternalWeights", f"GET {_CHECKPOINT}/external_weights_urls"),
    (_CHANGES_FILES, "DeleteCheckpoint SetCheckpointTtl", f"DELETE {_CHECKPOINT}|PUT {_CHECKPOINT}/ttl"),
    (_CHANGES_FILES, "PublishCheckpoint UnpublishCheckpoint", f"POST {_CHECKPOINT}/publish"),
    (_CHANGES_FILES, "", f"DELETE {_CHECKPOINT}/publish|POST copy_weights"),
    # What was done and used.
    (_LOOKS, "ListAuditRecords", "GET audit|GET billing/usage/events|GET billing/usage/checkpoints/current"),
    # The administration.
    (_ADMINISTERS, "CreateKey ListKeys RevokeKey RotateKey", ""),
    (_ADMINISTERS, "ListClusterSessions EndSession ListOwners ListUnreadable DropUnreadable", ""),
    (_ADMINISTERS, "ListServices DrainService UndrainService RetireBaseModel", ""),
)


def _table() -> Mapping[str, Need]:
    found: dict[str, Need] = {}
    for need, grpc, http in _ROWS:
        for method in [*grpc.split(), *filter(None, http.split("|"))]:
            assert method not in found, f"two rows for {method}"
            found[method] = need
    return found


NEEDS: Mapping[str, Need] = _table()
"""Needs by the name of a gRPC method, and by verb and path of an HTTP route."""


def check(caller: Caller, method: str) -> None:
    """Refuses who may not call a method of NEEDS.

    Raises:
        PermissionDenied: the key lacks something; the message says what.
    """
    need = NEEDS[method]
    if need.admin and caller.role != ADMIN:
        raise PermissionDenied(
            f"{method} takes an API key of role admin, and this one has role {caller.role}", "role_missing"
        )
    if need.writes and caller.role == READ:
        raise PermissionDenied(
            f"{method} takes an API key of role user or admin, and this one has role read", "role_missing"
        )
    if need.scope and caller.scopes and need.scope not in caller.scopes:
        raise PermissionDenied(
            f"{method} takes an API key with the scope {need.scope}, and this one is limited to "
            f"{described(caller.scopes)}",
            "scope_missing",
        )

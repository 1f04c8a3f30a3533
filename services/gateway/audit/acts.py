"""What is written down of a call, for each method of each protocol.

Invariant: a method that has no row here is not served, so nothing new goes unrecorded before somebody has
decided that it may. Recorded is what makes, changes, publishes, reads out or ends something, and what
administers. What only looks is not, nor is work that is counted as use: training steps, samples, snapshots
without a name.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass

from services.gateway.audit.record import cut

Source = Callable[[str], object]
"""Values of a request or an answer by name; None or empty: it has none."""


@dataclass(frozen=True)
class Recorded:
    """What is written down of a method's calls.

    Attributes:
        event: "<resource>_<action>".
        objects: names of what it is done to, with values of the call in braces: the first that has them all.
        details: values of the call that are written down too.
        later: the call only accepts it.
        unless_without: a value without which a call is none of these.
    """

    event: str
    objects: tuple[str, ...]
    details: tuple[str, ...] = ()
    later: bool = False
    unless_without: str = ""

    @property
    def values(self) -> set[str]:
        """Names of all values that are asked for."""
        found = {name for text in self.objects for name in _VALUE.findall(text)}
        return found.union(self.details, filter(None, [self.unless_without]))


_VALUE = re.compile(r"{([a-z_.]+)}")

_SESSION = ("{session_id}",)
_MODEL = ("{model_id}",)
_CHECKPOINT = ("tinker://{training_run_id}/{kind}/{name}", "{path}")
_RUN = "training_runs/{training_run_id}"
_OF_RUN = f"{_RUN}/checkpoints/{{kind}}/{{name}}"


def _save(kind: str, unless_without: str = "") -> Recorded:
    """A save under a name; one without is told by its request, as its result has the name."""
    named = tuple(f"tinker://{{model_id}}/{kind}/{{{name}}}" for name in ("path", "name"))
    return Recorded(
        "checkpoint_save",
        (*named, "{request_id}"),
        ("ttl_seconds",),
        later=True,
        unless_without=unless_without,
    )


_ROWS: tuple[tuple[Recorded | None, str, str], ...] = (
    (Recorded("session_create", _SESSION, ("project_id",)), "CreateSession", "POST create_session"),
    (Recorded("session_finish", _SESSION), "FinishSession", "POST sessions/{session_id}/finish"),
    (
        Recorded("project_assign", _SESSION, ("project_id",)),
        "SetSessionProject",
        "PUT sessions/{session_id}/project",
    ),
    (
        Recorded("model_create", _MODEL, ("base_model", "path"), later=True),
        "CreateModel CreateModelFromState",
        "POST create_model",
    ),
    (Recorded("model_load", _MODEL, ("path",), later=True), "LoadState", "POST load_weights"),
    (Recorded("model_unload", _MODEL, later=True), "UnloadModel", "POST unload_model"),
    (_save("weights"), "SaveState", "POST save_weights"),
    (_save("external_weights"), "SaveExternal", "POST save_weights_external"),
    (_save("sampler_weights", "name"), "SaveForSampler", ""),
    (_save("sampler_weights", "path"), "", "POST save_weights_for_sampler"),
    (
        Recorded(
            "sampler_create",
            ("{sampling_session_id}", "{session_id}"),
            ("base_model", "model_path"),
        ),
        "CreateSamplingSession",
        "POST create_sampling_session",
    ),
    (
        Recorded("checkpoint_read", _CHECKPOINT),
        "ReadExternalWeights",
        f"GET {_OF_RUN}/external_weights_urls",
    ),
    (Recorded("checkpoint_delete", _CHECKPOINT), "DeleteCheckpoint", f"DELETE {_OF_RUN}"),
    (
        Recorded("checkpoint_ttl_set", _CHECKPOINT, ("ttl_seconds",)),
        "SetCheckpointTtl",
        f"PUT {_OF_RUN}/ttl",
    ),
    (Recorded("checkpoint_publish", _CHECKPOINT), "PublishCheckpoint", f"POST {_OF_RUN}/publish"),
    (Recorded("checkpoint_unpublish", _CHECKPOINT), "UnpublishCheckpoint", f"DELETE {_OF_RUN}/publish"),
    (
        Recorded("checkpoint_copy", ("{tinker_path}", "{source_path}"), ("source_path",)),
        "",
        "POST copy_weights",
    ),
    (
        Recorded("key_create", ("{api_key.id}", "{owner}"), ("owner", "role", "note")),
        "CreateKey",
        "",
    ),
    (Recorded("key_list", ("all",)), "ListKeys", ""),
    (Recorded("key_revoke", ("{id}",)), "RevokeKey", "DELETE auth/apikey/me"),
    (Recorded("key_rotate", ("{id}",), ("api_key.id", "api_key.owner")), "RotateKey", ""),
    # The administration: also what only looks, as it looks at everybody's.
    (Recorded("admin_session_list", ("{owner}", "all")), "ListClusterSessions", ""),
    (Recorded("admin_session_end", _SESSION, ("detail",)), "EndSession", ""),
    (Recorded("admin_service_list", ("all",)), "ListServices", ""),
    (Recorded("admin_service_drain", ("{id}",)), "DrainService", ""),
    (Recorded("admin_service_undrain", ("{id}",)), "UndrainService", ""),
    (Recorded("admin_base_model_retire", ("{base_model}",)), "RetireBaseModel", ""),
    (Recorded("admin_unreadable_list", ("all",)), "ListUnreadable", ""),
    (Recorded("admin_unreadable_drop", ("{name}",)), "DropUnreadable", ""),
    (Recorded("admin_owner_list", ("all",)), "ListOwners", ""),
    # Looks.
    (
        None,
        "GetServerInfo ListModels GetTokenizer ServerReflectionInfo GetSession ListSessions SearchSessions "
        "GetModelInfo GetTrainingRun ListTrainingRuns GetSamplingSession ListCheckpoints GetCheckpoint "
        "ListAuditRecords",
        "GET get_server_capabilities|GET models|GET models/{model:path}|GET tokenizers/{base_model:path}|"
        "POST client/config|POST client/dynamic_config|POST messages/count_tokens|GET auth/apikey/me|"
        "POST auth/token|"
        "GET sessions|POST sessions/search|GET sessions/{session_id}|GET sessions/{session_id}/trace_export|"
        f"POST get_info|GET training_runs|GET {_RUN}|GET samplers/{{sampling_session_id}}|GET checkpoints|"
        f"GET {_RUN}/checkpoints|POST weights_info|GET audit|GET billing/usage/events|"
        "GET billing/usage/checkpoints/current",
    ),
    # Work, its results, and signs of life.
    (
        None,
        "Heartbeat ForwardBackward OptimStep Sample StreamSample CancelSample GetResult ReadResults "
        "WatchSamples AcknowledgeResults",
        "POST session_heartbeat|POST forward_backward|POST forward|POST optim_step|POST asample|"
        "POST cancel_future|POST completions|POST chat/completions|POST messages|POST retrieve_future|"
        "POST retrieve_futures|POST telemetry",
    ),
)


def _table() -> Mapping[str, Recorded | None]:
    found: dict[str, Recorded | None] = {}
    for recorded, grpc, http in _ROWS:
        for method in [*grpc.split(), *filter(None, http.split("|"))]:
            assert method not in found, f"two rows for {method}"
            found[method] = recorded
    return found


ACTS: Mapping[str, Recorded | None] = _table()
"""What is written down, by the name of a gRPC method, and by verb and path of a route; None: nothing."""


def value_of(name: str, sources: Iterable[Source]) -> str:
    """The value of a name, of the first source that has one; empty: none has."""
    for source in sources:
        found = source(name)
        if found is not None and found != "":
            return cut(found)
    return ""


def object_of(recorded: Recorded, sources: Iterable[Source]) -> str:
    """What a call was about; empty: it does not say."""
    known = list(sources)
    for text in recorded.objects:
        values = {name: value_of(name, known) for name in _VALUE.findall(text)}
        if all(values.values()):
            parts = _VALUE.split(text)
            return cut("".join(values[part] if index % 2 else part for index, part in enumerate(parts)))
    return ""

"""Probes of the RestClient and the AdminClient."""

from __future__ import annotations

import time
from datetime import UTC, date, datetime, timedelta

from tinker import types

from tests.cluster.conftest import BASE_MODEL
from tests.cluster.contract.compatibility.walk import Walk, probe, window


def _split(path: str) -> tuple[str, str]:
    run, _, checkpoint = path.removeprefix("tinker://").partition("/")
    return run, checkpoint


@probe("RestClient.get_server_capabilities")
def get_server_capabilities(walk: Walk) -> None:
    assert walk.call(walk.rest, "get_server_capabilities").supported_models


@probe("RestClient.get_telemetry")
def get_telemetry(walk: Walk) -> None:
    walk.call(walk.rest, "get_telemetry")


@probe("RestClient.get_training_run")
def get_training_run(walk: Walk) -> None:
    run = walk.call(
        walk.rest, "get_training_run", training_run_id=walk.training.model_id, access_scope="accessible"
    )
    assert (run.base_model, run.lora_rank) == (BASE_MODEL, 8)


@probe("RestClient.get_training_run_by_tinker_path")
def get_training_run_by_tinker_path(walk: Walk) -> None:
    run = walk.call(
        walk.rest, "get_training_run_by_tinker_path", tinker_path=walk.state, access_scope="owned"
    )
    assert run.training_run_id == walk.training.model_id


@probe("RestClient.get_weights_info_by_tinker_path")
def get_weights_info_by_tinker_path(walk: Walk) -> None:
    info = walk.call(walk.rest, "get_weights_info_by_tinker_path", tinker_path=walk.state)
    assert (info.base_model, info.lora_rank) == (BASE_MODEL, 8)


@probe("RestClient.list_training_runs")
def list_training_runs(walk: Walk) -> None:
    runs = walk.call(
        walk.rest, "list_training_runs", limit=50, offset=0, access_scope="owned", project_id="walk"
    )
    assert walk.training.model_id in [run.training_run_id for run in runs.training_runs]


@probe("RestClient.list_checkpoints")
def list_checkpoints(walk: Walk) -> None:
    run, checkpoint = _split(walk.state)
    found = walk.call(walk.rest, "list_checkpoints", training_run_id=run).checkpoints
    assert checkpoint in [one.checkpoint_id for one in found]


@probe("RestClient.list_user_checkpoints")
def list_user_checkpoints(walk: Walk) -> None:
    path = walk.new_state()
    found = walk.call(walk.rest, "list_user_checkpoints", limit=1, offset=0)
    assert [one.tinker_path for one in found.checkpoints] == [path] and found.cursor.total_count > 0


@probe("RestClient.get_external_weights_urls")
def get_external_weights_urls(walk: Walk) -> None:
    path = walk.training.save_weights_external(walk.name()).result().path
    urls = walk.call(walk.rest, "get_external_weights_urls", tinker_path=path).urls
    assert sorted(urls) == ["adapter_config.json", "adapter_model.safetensors"]


@probe("RestClient.delete_checkpoint")
def delete_checkpoint(walk: Walk) -> None:
    run, checkpoint = _split(walk.new_state())
    walk.call(walk.rest, "delete_checkpoint", training_run_id=run, checkpoint_id=checkpoint)
    left = walk.rest.list_checkpoints(run).result().checkpoints
    assert checkpoint not in [one.checkpoint_id for one in left]


@probe("RestClient.delete_checkpoint_from_tinker_path")
def delete_checkpoint_from_tinker_path(walk: Walk) -> None:
    path = walk.new_state()
    walk.call(walk.rest, "delete_checkpoint_from_tinker_path", tinker_path=path)
    left = walk.rest.list_checkpoints(walk.training.model_id).result().checkpoints
    assert path not in [one.tinker_path for one in left]


@probe("RestClient.copy_weights")
def copy_weights(walk: Walk) -> None:
    copied = walk.call(
        walk.rest,
        "copy_weights",
        path=walk.state,
        destination_project_id="an archive",
        ttl_seconds=7200,
        weights_access_token=walk.cluster.api_key,
    )
    run = walk.rest.get_training_run_by_tinker_path(copied).result()
    assert run.training_run_id != walk.training.model_id and run.lora_rank == 8
    runs = walk.rest.list_training_runs(project_id="an archive").result().training_runs
    assert run.training_run_id in [one.training_run_id for one in runs]
    assert walk.service.create_training_client_from_state(copied).result().get_info().lora_rank == 8


def _checkpoint(walk: Walk, path: str) -> types.Checkpoint:
    found = walk.rest.list_checkpoints(walk.training.model_id).result().checkpoints
    return next(one for one in found if one.tinker_path == path)


@probe("RestClient.publish_checkpoint_from_tinker_path")
def publish_checkpoint(walk: Walk) -> None:
    path = walk.new_state()
    walk.call(walk.rest, "publish_checkpoint_from_tinker_path", tinker_path=path)
    assert _checkpoint(walk, path).public


@probe("RestClient.unpublish_checkpoint_from_tinker_path")
def unpublish_checkpoint(walk: Walk) -> None:
    path = walk.new_state()
    walk.rest.publish_checkpoint_from_tinker_path(path).result()
    walk.call(walk.rest, "unpublish_checkpoint_from_tinker_path", tinker_path=path)
    assert not _checkpoint(walk, path).public


@probe("RestClient.set_checkpoint_ttl_from_tinker_path")
def set_checkpoint_ttl(walk: Walk) -> None:
    path = walk.new_state()
    walk.call(walk.rest, "set_checkpoint_ttl_from_tinker_path", tinker_path=path, ttl_seconds=7200)
    assert _checkpoint(walk, path).expires_at is not None


@probe("RestClient.get_session")
def get_session(walk: Walk) -> None:
    found = walk.call(walk.rest, "get_session", session_id=walk.session_id, access_scope="owned")
    assert walk.training.model_id in found.training_run_ids


@probe("RestClient.list_sessions")
def list_sessions(walk: Walk) -> None:
    found = walk.call(walk.rest, "list_sessions", limit=20, offset=0, access_scope="accessible")
    assert walk.session_id in found.sessions


@probe("RestClient.search_sessions")
def search_sessions(walk: Walk) -> None:
    request = types.SessionSearchRequest(session_id=walk.session_id, display_name="walk", limit=5)
    found = walk.call(walk.rest, "search_sessions", request=request).sessions
    assert walk.session_id in [one.session_id for one in found]


@probe("RestClient.assign_session_project")
def assign_session_project(walk: Walk) -> None:
    walk.call(walk.rest, "assign_session_project", session_id=walk.session_id, project_id="walk")
    request = types.SessionSearchRequest(project_ids=["walk"])
    found = walk.rest.search_sessions(request).result().sessions
    assert walk.session_id in [one.session_id for one in found]


@probe("RestClient.get_sampler")
def get_sampler(walk: Walk) -> None:
    client = walk.service.create_sampling_client(model_path=walk.weights).result()
    sampler_id = client._sampling_session_id
    found = walk.call(walk.rest, "get_sampler", sampler_id=sampler_id)
    assert (found.base_model, found.model_path) == (BASE_MODEL, walk.weights)


@probe("RestClient.export_session_trace")
def export_session_trace(walk: Walk) -> None:
    walk.call(walk.rest, "export_session_trace", session_id=walk.session_id)


@probe("RestClient.whoami")
def whoami(walk: Walk) -> None:
    walk.call(walk.rest, "whoami")


def _check_audit(walk: Walk, client: object) -> None:
    """The walk's session is among what was done; a day before there was a cluster has nothing."""
    past = date(2025, 1, 1)
    assert walk.call(client, "get_audit_log", event_type="all", day=past).entries == []
    # The walk may have begun before midnight.
    today = datetime.now(UTC).date()
    deadline = time.monotonic() + 120
    while time.monotonic() < deadline:
        days = (today - timedelta(days=1), today)
        found = [entry for day in days for entry in walk.admin.get_audit_log("all", day).result().entries]
        if walk.session_id in [entry.event_details["object"] for entry in found]:
            return
        time.sleep(0.1)
    raise AssertionError("the audit log does not have the session")


@probe("RestClient.get_audit_log")
def get_audit_log(walk: Walk) -> None:
    _check_audit(walk, walk.rest)


def _check_usage(walk: Walk, client: object) -> None:
    """The walk's session saved a checkpoint."""
    assert walk.state
    found = walk.call(client, "get_billing_usage", **window())
    kinds = {one.event_info.type for one in found.data if one.session_id == walk.session_id}
    assert "checkpoint" in kinds
    assert walk.session_id in found.sessions


def _check_stored(walk: Walk, client: object) -> None:
    """The walk's checkpoints, of which another project has none."""
    assert walk.state
    found = walk.call(client, "get_current_checkpoint_storage_usage", project_id="nothing is in it")
    assert found.data == []
    rows = walk.admin.get_current_checkpoint_storage_usage().result().data
    assert sum(row.checkpoint_count for row in rows) > 0 and sum(row.size_bytes for row in rows) > 0


@probe("RestClient.get_billing_usage")
def get_billing_usage(walk: Walk) -> None:
    _check_usage(walk, walk.rest)


@probe("RestClient.get_current_checkpoint_storage_usage")
def get_storage(walk: Walk) -> None:
    _check_stored(walk, walk.rest)


@probe("AdminClient.get_telemetry")
def get_telemetry_of_admin(walk: Walk) -> None:
    walk.call(walk.admin, "get_telemetry")


@probe("AdminClient.get_audit_log")
def get_audit_log_of_admin(walk: Walk) -> None:
    _check_audit(walk, walk.admin)


@probe("AdminClient.get_billing_usage")
def get_billing_usage_of_admin(walk: Walk) -> None:
    _check_usage(walk, walk.admin)


@probe("AdminClient.get_current_checkpoint_storage_usage")
def get_storage_of_admin(walk: Walk) -> None:
    _check_stored(walk, walk.admin)

"""Probes of the `tinker` command line and of the environment variables that the SDK reads."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from typing import Any
from unittest import mock

import tinker

from tests.cluster.conftest import BASE_MODEL
from tests.cluster.contract.compatibility.walk import ClientOnly, Walk, probe, window

NOT_CALLED = {"checkpoint push-hf"}
"""Commands whose other end is not this cluster."""


def _json(text: str) -> Any:
    return json.loads(text[text.index("{") :])


@probe("tinker auth login")
def auth_login(walk: Walk) -> None:
    said = walk.cli("auth login", answers=f"{walk.cluster.api_key}\n")
    assert "Logged in" in said
    walk.cli("auth logout")


@probe("tinker auth logout")
def auth_logout(walk: Walk) -> None:
    folder = walk.directory / ".tinker"
    folder.mkdir(exist_ok=True)
    key = {"type": "manual", "key": walk.cluster.api_key, "name": "k"}
    stored = {"version": 1, "default": "1", "keys": {"1": key}}
    (folder / "credentials.json").write_text(json.dumps(stored))
    assert "Removed" in walk.cli("auth logout")
    raise ClientOnly("forgets the stored key")


@probe("tinker auth status")
def auth_status(walk: Walk) -> None:
    assert "accessible: yes" in walk.cli("auth status")


@probe("tinker auth whoami")
def auth_whoami(walk: Walk) -> None:
    walk.cli("auth whoami")


@probe("tinker billing usage")
def billing_usage(walk: Walk) -> None:
    assert walk.state
    walk.cli(
        "billing usage",
        **window(),
        csv_path=walk.directory / "a.csv",
        sessions_csv_path=walk.directory / "b.csv",
    )
    assert "checkpoint" in (walk.directory / "a.csv").read_text()
    assert walk.session_id in (walk.directory / "b.csv").read_text()


@probe("tinker billing checkpoint-storage")
def billing_storage(walk: Walk) -> None:
    walk.cli("billing checkpoint-storage", project_id="walk", csv_path=walk.directory / "c.csv")
    assert (walk.directory / "c.csv").exists()


@probe("tinker checkpoint list")
def checkpoint_list(walk: Walk) -> None:
    assert walk.state in walk.cli("checkpoint list", run_id=walk.training.model_id)
    assert len(_json(walk.cli("checkpoint list", limit=1))["checkpoints"]) == 1


@probe("tinker checkpoint info")
def checkpoint_info(walk: Walk) -> None:
    assert walk.state in walk.cli("checkpoint info", checkpoint_path=walk.state)


@probe("tinker checkpoint publish")
def checkpoint_publish(walk: Walk) -> None:
    path = walk.new_state()
    walk.cli("checkpoint publish", checkpoint_path=path)
    assert _json(walk.cli("checkpoint info", checkpoint_path=path))["public"] is True


@probe("tinker checkpoint unpublish")
def checkpoint_unpublish(walk: Walk) -> None:
    path = walk.new_state()
    walk.rest.publish_checkpoint_from_tinker_path(path).result()
    walk.cli("checkpoint unpublish", checkpoint_path=path)
    assert _json(walk.cli("checkpoint info", checkpoint_path=path))["public"] is False


@probe("tinker checkpoint set-ttl")
def checkpoint_set_ttl(walk: Walk) -> None:
    path = walk.new_state()
    walk.cli("checkpoint set-ttl", checkpoint_path=path, ttl=7200)
    walk.cli("checkpoint set-ttl", checkpoint_path=path, remove=True)


@probe("tinker checkpoint delete")
def checkpoint_delete(walk: Walk) -> None:
    path = walk.new_state()
    walk.cli("checkpoint delete", checkpoint_paths=[path], yes=True)
    other = walk.service.create_lora_training_client(BASE_MODEL, rank=4).result()
    other.save_state("a").result()
    walk.cli(
        "checkpoint delete",
        run_id=other.model_id,
        checkpoint_type="training",
        after="2020-01-01",
        before="2100-01-01",
        yes=True,
    )
    assert walk.rest.list_checkpoints(other.model_id).result().checkpoints == []


@probe("tinker checkpoint download")
def checkpoint_download(walk: Walk) -> None:
    for _ in range(2):
        walk.cli("checkpoint download", checkpoint_path=walk.state, output=walk.directory, force=True)
    assert list(walk.directory.rglob("adapter_model.safetensors"))


@probe("tinker checkpoint push-hf")
def checkpoint_push(walk: Walk) -> None:
    raise ClientOnly(
        "not called by the test: fetches what `checkpoint download` does and sends it to the hub"
    )


@probe("tinker model list")
def model_list(walk: Walk) -> None:
    assert BASE_MODEL in walk.cli("model list", substring="TINY")


@probe("tinker model list", "SUBSTRING that no name has")
def model_list_of_nothing(walk: Walk) -> None:
    walk.cli("model list", substring="nothing")


@probe("tinker run list")
def run_list(walk: Walk) -> None:
    assert walk.training.model_id in walk.cli("run list", limit=100, columns="id,model")


@probe("tinker run info")
def run_info(walk: Walk) -> None:
    assert walk.training.model_id in walk.cli("run info", run_id=walk.training.model_id)


@probe("tinker session export-trace")
def session_export_trace(walk: Walk) -> None:
    trace = walk.directory / "trace"
    assert "http" in walk.cli("session export-trace", session_id=walk.session_id, url_only=True)
    walk.cli("session export-trace", session_id=walk.session_id, output=trace)
    assert walk.training.model_id.encode() in trace.read_bytes()


@probe("tinker version")
def version(walk: Walk) -> None:
    assert walk.cli("version")
    raise ClientOnly("the SDK's own version")


def _in(walk: Walk, **variables: str) -> Any:
    kept = {name: value for name, value in os.environ.items() if not name.startswith("TINKER_")}
    return mock.patch.dict(os.environ, {**kept, **walk.environment, **variables}, clear=True)


def _client(walk: Walk) -> tinker.ServiceClient:
    client = tinker.ServiceClient()
    walk.cluster.clients.append(client)
    return client


@probe("TINKER_BASE_URL")
def base_url(walk: Walk) -> None:
    with _in(walk):
        assert tinker.RestClient().get_server_capabilities().result().supported_models


@probe("TINKER_API_KEY")
def api_key(walk: Walk) -> None:
    with _in(walk):
        assert _client(walk).create_sampling_client(base_model=BASE_MODEL).result()


@probe("TINKER_PROJECT_ID")
def project_id(walk: Walk) -> None:
    with _in(walk, TINKER_PROJECT_ID="of the environment"):
        session = _client(walk).holder.get_session_id()
    request = tinker.types.SessionSearchRequest(project_ids=["of the environment"])
    assert session in [one.session_id for one in walk.rest.search_sessions(request).result().sessions]


@probe("TINKER_TAGS")
def tags(walk: Walk) -> str:
    with _in(walk, TINKER_TAGS="a,b"):
        assert _client(walk).holder.get_session_id()
    return "kept with the session; the SDK has no method that reads them"


@probe("TINKER_CREDENTIAL_CMD")
def credential_cmd(walk: Walk) -> None:
    with _in(walk, TINKER_CREDENTIAL_CMD=f"echo {walk.cluster.api_key}"):
        del os.environ["TINKER_API_KEY"]
        assert _client(walk).create_sampling_client(base_model=BASE_MODEL).result()


def _client_only(name: str, value: str, note: str) -> Callable[[Walk], None]:
    def run(walk: Walk) -> None:
        with _in(walk, **{name: value}):
            assert tinker.RestClient().get_server_capabilities().result().supported_models
        raise ClientOnly(note)

    return run


_HEADER = "sent as a header, for a proxy in between; the cluster does not look at it"
for _name, _value, _note in (
    ("TINKER_TELEMETRY", "0", "no events are sent; those that are sent are taken and dropped"),
    ("TINKER_LOG", "info", "what the SDK logs"),
    ("TINKER_FEATURE_GATES", "async_sampling", "read by the SDK, which does nothing with it"),
    ("CLOUDFLARE_ACCESS_CLIENT_ID", "a", _HEADER),
    ("CLOUDFLARE_ACCESS_CLIENT_SECRET", "b", _HEADER),
):
    probe(_name)(_client_only(_name, _value, _note))

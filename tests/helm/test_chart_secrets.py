"""Secrets of ones own: helm, with a cluster to ask, refuses one that lacks what the chart needs of it."""

from __future__ import annotations

import base64
import json
import threading
from collections.abc import Callable, Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import pytest

from tests.helm.rendered import CHART, Values, helm

Asked = Callable[[Values], str]

GROUPS = {
    "/version": {"major": "1", "minor": "32", "gitVersion": "v1.32.0"},
    "/api": {"kind": "APIVersions", "versions": ["v1"]},
    "/apis": {"kind": "APIGroupList", "apiVersion": "v1", "groups": []},
    "/api/v1": {
        "kind": "APIResourceList",
        "groupVersion": "v1",
        "resources": [
            {
                "name": "secrets",
                "singularName": "secret",
                "namespaced": True,
                "kind": "Secret",
                "verbs": ["get"],
            }
        ],
    },
}
ENTRIES = {
    "apiKeys.existingSecret": ("api-keys",),
    "huggingFace.existingSecret": ("token",),
    "gateway.tls.existingSecret": ("tls.crt", "tls.key"),
    "redis.externalSecret": ("url",),
    "redis.existingSecret": ("password", "gateway", "trainer", "sampler"),
    "mtls.existingSecrets.trainer": ("ca.crt", "tls.crt", "tls.key"),
}


@pytest.fixture
def secrets() -> dict[str, dict[str, str]]:
    """Those that the cluster has, with their entries."""
    return {}


@pytest.fixture
def rendered(secrets: dict[str, dict[str, str]]) -> Iterator[Asked]:
    """What helm says to values while a cluster has these Secrets; empty: it takes them."""

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            path = self.path.partition("?")[0]
            found: dict[str, Any] | None = GROUPS.get(path)
            name = path.removeprefix("/api/v1/namespaces/default/secrets/")
            if name in secrets:
                data = {
                    entry: base64.b64encode(text.encode()).decode() for entry, text in secrets[name].items()
                }
                found = {"apiVersion": "v1", "kind": "Secret", "metadata": {"name": name}, "data": data}
            gone = {
                "kind": "Status",
                "apiVersion": "v1",
                "status": "Failure",
                "reason": "NotFound",
                "code": 404,
            }
            body = json.dumps(found or gone).encode()
            self.send_response(200 if found else 404)
            self.send_header("content-type", "application/json")
            self.send_header("content-length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, *_: Any) -> None:
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    serving = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
    serving.start()
    cluster = ["--kube-apiserver", f"http://127.0.0.1:{server.server_port}", "--kube-token", "any"]

    def ask(values: Values) -> str:
        command = ("template", "tinsmith", str(CHART), "--namespace", "default", "--dry-run=server", *cluster)
        done = helm(*command, values=values)
        assert done.returncode in (0, 1)
        return done.stderr if done.returncode else ""

    yield ask
    server.shutdown()
    serving.join()
    server.server_close()


def naming(value: str) -> Values:
    """Values in which one names the Secret "mine"."""
    made: Values = {"mtls": {"enabled": True, "issuerRef": {"name": "ca"}}} if "mtls" in value else {}
    at = made
    *path, last = value.split(".")
    for part in path:
        at = at.setdefault(part, {})
    at[last] = "mine"
    return made


@pytest.mark.parametrize("value", ENTRIES)
def test_a_secret_without_an_entry_that_is_needed_is_refused_and_the_entry_named(
    rendered: Asked, secrets: dict[str, dict[str, str]], value: str
) -> None:
    whole = dict.fromkeys(ENTRIES[value], "x")
    for entry in ENTRIES[value]:
        for lacking in ({name: text for name, text in whole.items() if name != entry}, {**whole, entry: ""}):
            # A file without a key is one: keys are made with `tinsmith keys`.
            if value == "apiKeys.existingSecret" and lacking:
                continue
            secrets["mine"] = lacking
            assert f'Secret "mine" ({value}) has no entry "{entry}"' in rendered(naming(value))
    secrets["mine"] = {**whole, "another": "y"}
    assert rendered(naming(value)) == ""


def test_a_secret_that_is_not_there_yet_is_for_somebody_else_to_make(rendered: Asked) -> None:
    for value in ENTRIES:
        assert rendered(naming(value)) == ""

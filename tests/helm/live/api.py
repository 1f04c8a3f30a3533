"""As much of a Kubernetes API as helm asks for when a chart looks objects up."""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

from tests.helm.rendered import CHART, Values, helm

KINDS = {
    "v1": {"secrets": "Secret", "persistentvolumeclaims": "PersistentVolumeClaim"},
    "apps/v1": {"statefulsets": "StatefulSet", "deployments": "Deployment"},
}
_NOT_FOUND = {"kind": "Status", "apiVersion": "v1", "status": "Failure", "reason": "NotFound", "code": 404}


class Cluster:
    """Objects of the namespace `default`, by kind and name, and helm that sees them."""

    def __init__(self, address: str) -> None:
        self.objects: dict[str, dict[str, Any]] = {kind: {} for kinds in KINDS.values() for kind in kinds}
        self._address = address

    def refusal(self, values: Values) -> str:
        """What helm says to the values; "" = it takes them."""
        asked = ["--dry-run=server", "--kube-apiserver", self._address, "--kube-token", "any"]
        done = helm("template", "tinsmith", str(CHART), "--namespace", "default", *asked, values=values)
        assert done.returncode in (0, 1)
        return done.stderr if done.returncode else ""

    def answer(self, path: str) -> dict[str, Any] | None:
        """Of a GET."""
        if path == "/version":
            return {"major": "1", "minor": "32", "gitVersion": "v1.32.0"}
        if path == "/api":
            return {"kind": "APIVersions", "versions": ["v1"]}
        if path == "/apis":
            apps = {"groupVersion": "apps/v1", "version": "v1"}
            group = {"name": "apps", "versions": [apps], "preferredVersion": apps}
            return {"kind": "APIGroupList", "apiVersion": "v1", "groups": [group]}
        for version, kinds in KINDS.items():
            root = f"/api/{version}" if version == "v1" else f"/apis/{version}"
            if path == root:
                found = [
                    {
                        "name": plural,
                        "singularName": "",
                        "namespaced": True,
                        "kind": kind,
                        "verbs": ["get", "list"],
                    }
                    for plural, kind in kinds.items()
                ]
                return {"kind": "APIResourceList", "groupVersion": version, "resources": found}
            plural, _, name = path.removeprefix(f"{root}/namespaces/default/").partition("/")
            if plural in kinds:
                return self._objects(version, plural, kinds[plural], name)
        return None

    def _objects(self, version: str, plural: str, kind: str, name: str) -> dict[str, Any] | None:
        every = [
            {"apiVersion": version, "kind": kind, **one, "metadata": {"name": key, **one.get("metadata", {})}}
            for key, one in self.objects[plural].items()
        ]
        if not name:
            return {"apiVersion": version, "kind": f"{kind}List", "metadata": {}, "items": every}
        return next((one for one in every if one["metadata"]["name"] == name), None)


@contextmanager
def cluster() -> Iterator[Cluster]:
    """One without an object, while the context lasts."""

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            found = held.answer(self.path.partition("?")[0])
            body = json.dumps(found or _NOT_FOUND).encode()
            self.send_response(200 if found else 404)
            self.send_header("content-type", "application/json")
            self.send_header("content-length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, *_: Any) -> None:
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    held = Cluster(f"http://127.0.0.1:{server.server_port}")
    serving = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
    serving.start()
    try:
        yield held
    finally:
        server.shutdown()
        serving.join()
        server.server_close()

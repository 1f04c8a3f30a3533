"""A client in a pod, what it told, and how long it waited."""

from __future__ import annotations

import itertools
import json
from pathlib import Path
from typing import Any

from tests.k8s.cluster import MODEL, RELEASE, image, kubectl, wait_until

SCRIPT = Path(__file__).with_name("load.py")


def manifest(name: str, **environment: str) -> dict[str, Any]:
    keys = {"secretKeyRef": {"name": f"{RELEASE}-api-keys", "key": "api-keys"}}
    variables = [
        {"name": "TINKER_BASE_URL", "value": f"http://{RELEASE}-gateway:8000"},
        {"name": "API_KEYS", "valueFrom": keys},
        {"name": "MODEL", "value": MODEL},
        {"name": "HOME", "value": "/tmp"},
        *({"name": key, "value": value} for key, value in environment.items()),
    ]
    container = {
        "name": "client",
        "image": image("client"),
        "imagePullPolicy": "IfNotPresent",
        "command": ["tini", "--", "python", "-c", SCRIPT.read_text()],
        "env": variables,
        "resources": {"requests": {"cpu": "50m", "memory": "256Mi"}},
    }
    spec = {"restartPolicy": "Never", "terminationGracePeriodSeconds": 1, "containers": [container]}
    return {"apiVersion": "v1", "kind": "Pod", "metadata": {"name": name}, "spec": spec}


class Client:
    """A pod that runs load.py."""

    def __init__(self, name: str, **environment: str) -> None:
        self.name = name
        kubectl("apply", "-f", "-", input=json.dumps(manifest(name, **environment)))

    def told(self) -> list[dict[str, Any]]:
        """Everything that it told so far. Fails the test when it told of an error."""
        text = kubectl("logs", self.name)
        lines = [json.loads(line) for line in text.splitlines() if line.startswith("{")]
        errors = [line for line in lines if line["what"] == "error"]
        assert not errors, f"{errors[0]['error']}\n{errors[0]['trace']}"
        return lines

    def wait_running(self) -> None:
        def running() -> bool:
            phase = kubectl("get", "pod", self.name, "-o", "jsonpath={.status.phase}")
            return phase not in ("", "Pending") and bool(self.told())

        wait_until(running, f"{self.name} to tell something")

    def wait_for(self, what: str, seconds: float = 600) -> dict[str, Any]:
        """The first line of that kind."""
        wait_until(
            lambda: any(line["what"] == what for line in self.told()), f"{what} of {self.name}", seconds
        )
        return next(line for line in self.told() if line["what"] == what)

    def wait_progress(self, since: float, steps: int = 3, samples: int = 3) -> None:
        """Waits for so many steps and samples after a time."""

        def progressed() -> bool:
            new = [line["what"] for line in self.told() if line["at"] > since]
            return new.count("step") >= steps and new.count("sample") >= samples

        wait_until(progressed, f"{steps} more steps and {samples} more samples of {self.name}")

    def longest(self, what: str, since: float) -> float:
        """Most seconds between two of that kind, from the last one before a time on."""
        times = [line["at"] for line in self.told() if line["what"] == what]
        begin = max((at for at in times if at <= since), default=since)
        after = [begin, *(at for at in times if at > since)]
        return round(max((b - a for a, b in itertools.pairwise(after)), default=0.0), 1)

    def stop(self) -> dict[str, Any]:
        """Has it end; what it told last."""
        kubectl("exec", self.name, "--", "touch", "/tmp/stop")
        return self.wait_for("done")

    def delete(self) -> None:
        kubectl("delete", "pod", self.name, "--wait=true")

"""The Kubernetes of the current context, and how images get there.

Environment, each with the default of a docker engine and kind:

    K8S_BUILD     "docker build -f {file} -t {image} ."
    K8S_LOAD      "kind load docker-image {images}"
    K8S_REGISTRY  ""       put before the images' names
    K8S_KUBECTL   "kubectl", or the pinned one
    K8S_HELM      "helm", or the pinned one
    K8S_REDIS     the chart's image of Redis
    K8S_VALUES    ""       a file of values of one's own, such as a storage class
    K8S_BUILT     "1": the images are there already
    K8S_SLOW      1.0      times as long as usual before something is given up
"""

from __future__ import annotations

import json
import os
import shlex
import subprocess
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from tests.helm.rendered import CHART, ROOT, tool

NAMESPACE = "tinsmith-test"
RELEASE = "tinsmith"
MODEL = "org/tiny"
IMAGES = ("gateway", "trainer", "sampler", "client")
OLD, NEW = "0.1.0", "0.1.0-next"
SLOW = float(os.environ.get("K8S_SLOW", "1"))
BUILT = os.environ.get("K8S_BUILT") == "1"


def run(command: Sequence[str], *, seconds: float = 120, **more: Any) -> str:
    """Output of a command. Fails the test with what it said when it fails."""
    done = subprocess.run(command, capture_output=True, text=True, timeout=seconds * SLOW, cwd=ROOT, **more)
    assert done.returncode == 0, f"{shlex.join(command)}: {done.stdout[-2000:]}{done.stderr[-2000:]}"
    return done.stdout


def kubectl_command() -> list[str]:
    program = shlex.split(os.environ.get("K8S_KUBECTL", "")) or [tool("kubectl")]
    return [*program, "--namespace", NAMESPACE]


def kubectl(*args: str, seconds: float = 120, **more: Any) -> str:
    return run([*kubectl_command(), *args], seconds=seconds, **more)


def helm(*args: str, seconds: float = 1000) -> str:
    """Helm's own --timeout is shorter, so that it says what it waited for."""
    program = shlex.split(os.environ.get("K8S_HELM", "")) or [tool("helm")]
    return run([*program, "--namespace", NAMESPACE, *args], seconds=seconds)


def image(component: str, tag: str = OLD) -> str:
    registry = os.environ.get("K8S_REGISTRY", "")
    return f"{registry}{'/' if registry else ''}tinsmith-{component}:{tag}"


def build_and_load() -> None:
    """Every image under both tags, on the nodes. The new one differs in its tag only."""
    build = os.environ.get("K8S_BUILD", "docker build -f {file} -t {image} .")
    load = os.environ.get("K8S_LOAD", "kind load docker-image {images}")
    for component in IMAGES:
        file = f"deploy/docker/{component}.Dockerfile"
        for tag in (OLD, NEW):
            command = build.format(file=file, image=image(component, tag))
            run(["bash", "-c", command], seconds=3600)
    everything = " ".join(image(component, tag) for component in IMAGES for tag in (OLD, NEW))
    run(["bash", "-c", load.format(images=everything)], seconds=3600)


def values(directory: Path, **more: Any) -> list[str]:
    """Arguments of helm: a cluster that takes little, with the model that the tests put on its volume."""
    small = {"requests": {"cpu": "50m", "memory": "256Mi"}, "limits": {"memory": "1Gi"}}
    found: dict[str, Any] = {
        "image": {"registry": os.environ.get("K8S_REGISTRY", "")},
        "models": [{"name": MODEL, "path": "/data/models/tiny"}],
        "gateway": {"replicas": 2, "memoryMiB": 600, "resources": small},
        "trainer": {"sharedMemory": "256Mi", "resources": _larger(small, "4Gi")},
        "sampler": {
            **{"kvCacheGiB": 0.25, "snapshotCacheGiB": 0.25, "fullSnapshotCacheGiB": 0.25},
            **{"maxLoras": 2, "maxLoraRank": 8, "maxSequences": 8, "sharedMemory": "256Mi"},
            **{"drainSeconds": 20, "resources": _larger(small, "6Gi")},
        },
        "test": {"seconds": round(600 * SLOW)},
        "data": {"size": "2Gi"},
        "redis": {"maxmemory": "300mb", "storage": {"size": "1Gi"}, "resources": small},
    }
    if "K8S_REDIS" in os.environ:
        found["redis"]["image"] = os.environ["K8S_REDIS"]
    file = directory / "values.yaml"
    file.write_text(yaml.safe_dump(found))
    sets = [part for name, value in more.items() for part in ("--set", f"{name.replace('__', '.')}={value}")]
    own = ["--values", os.environ["K8S_VALUES"]] if os.environ.get("K8S_VALUES") else []
    return ["--values", str(file), *own, *sets]


def _larger(resources: dict[str, Any], memory: str) -> dict[str, Any]:
    return {**resources, "limits": {"memory": memory}}


def install(directory: Path, **more: Any) -> None:
    helm("install", RELEASE, str(CHART), *values(directory, **more))


def selector(component: str) -> str:
    return f"app.kubernetes.io/instance={RELEASE},app.kubernetes.io/component={component}"


@dataclass(frozen=True)
class Pod:
    """A pod of the release. `uid` tells it from the next one of its name; `going`: it was asked to end."""

    name: str
    uid: str
    ready: bool
    going: bool
    restarts: int


def pods(component: str) -> list[Pod]:
    listed = json.loads(kubectl("get", "pods", "-l", selector(component), "-o", "json"))["items"]
    return [_pod(one) for one in listed]


def _pod(one: dict[str, Any]) -> Pod:
    conditions = one["status"].get("conditions", ())
    return Pod(
        one["metadata"]["name"],
        one["metadata"]["uid"],
        any(entry["type"] == "Ready" and entry["status"] == "True" for entry in conditions),
        "deletionTimestamp" in one["metadata"],
        sum(entry["restartCount"] for entry in one["status"].get("containerStatuses", ())),
    )


def wait_ready(component: str, count: int, but: Sequence[Pod] = (), seconds: float = 600) -> None:
    """Waits until so many pods are ready and none other is there, none of which is one of `but`."""
    before = {one.uid for one in but}

    def ready() -> bool:
        found = pods(component)
        return len(found) == count and all(
            one.ready and not one.going and one.uid not in before for one in found
        )

    wait_until(ready, f"{count} {component} pods to be ready", seconds)


def wait_until(holds: Callable[[], bool], what: str, seconds: float = 600) -> None:
    deadline = time.monotonic() + seconds * SLOW
    while not holds():
        assert time.monotonic() < deadline, f"waited in vain for {what}"
        time.sleep(1)


def place_model(directory: Path) -> None:
    """The documented way: through a gateway, which has the volume mounted."""
    wait_until(lambda: any(one.ready for one in pods("gateway")), "a gateway")
    gateway = next(one.name for one in pods("gateway") if one.ready)
    kubectl("exec", f"deployment/{RELEASE}-gateway", "--", "mkdir", "-p", "/data/models")
    kubectl("cp", str(directory), f"{gateway}:/data/models/tiny")

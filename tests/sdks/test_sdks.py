"""Versions of the tinker SDK against one cluster: which steps each can do stands in docs/compatibility.md.

`make test-sdks` runs it, and no other verb: it installs every version, without its dependencies, which are
those of the project's own environment. `make test-sdks WRITE=1` writes the table anew.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path

import pytest

from tests.cluster.compatibility import page
from tests.cluster.conftest import BASE_MODEL, Cluster, model_dir, start_cluster, stop_cluster
from tests.sdks import table

ROOT = Path(__file__).parents[2]
KEPT = ROOT / ".cache" / "sdk"
VERSIONS = (
    "0.19.0",
    "0.20.0",
    "0.22.7",
    "0.24.1",
    "0.25.0",
    "0.28.1",
    "0.30.4",
    "0.34.0",
    "0.36.0",
    "0.38.0",
)
WRITE = "TINSMITH_WRITE_COMPATIBILITY"

__all__ = ["model_dir"]


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory, model_dir: Path) -> Iterator[Cluster]:
    running = start_cluster(tmp_path_factory.mktemp("sdks"), model_dir)
    yield running
    stop_cluster(running)


def installed(version: str) -> Path:
    """A directory with this version of the SDK and nothing else."""
    directory = KEPT / version
    if not (directory / "tinker" / "_version.py").exists():
        command = [sys.executable, "-m", "pip", "install", "--quiet", "--no-deps"]
        command += ["--target", str(directory), f"tinker=={version}"]
        subprocess.run(command, check=True, timeout=300)
    return directory


def steps(cluster: Cluster, version: str) -> Mapping[str, str]:
    """What came of each step."""
    paths = f"{installed(version)}{os.pathsep}{ROOT}"
    command = [sys.executable, "-m", "tests.sdks.steps", cluster.base_url, cluster.api_key, BASE_MODEL]
    environment = {**os.environ, "PYTHONPATH": paths, "TINKER_TELEMETRY": "0"}
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=300)
    assert done.stdout, done.stderr[-3000:]
    told: dict[str, str] = json.loads(done.stdout)
    assert told.pop("version") == version, "another version was imported"
    return told


@pytest.mark.timeout(1800)
def test_every_version_does_what_the_table_says(cluster: Cluster) -> None:
    found = {version: steps(cluster, version) for version in VERSIONS}
    assert set(found[VERSIONS[-1]].values()) == {"works"}
    written = page.PAGE.read_text()
    new = page.with_tables(written, "sdks", table.table(found))
    if os.environ.get(WRITE):
        page.PAGE.write_text(new)
    else:
        assert new == written, "docs/compatibility.md is stale; run make test-sdks WRITE=1"

"""Releases of the tinker SDK, each in a directory of its own, and what comes of the steps of one."""

from __future__ import annotations

import importlib.metadata
import json
import os
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path

from tests.cluster.conftest import BASE_MODEL, Cluster

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
SOME = ("0.19.0", "0.20.0", "0.28.1", "0.38.0")
"""The refused one, the oldest, one between and the newest."""


class Unavailable(Exception):
    """pip cannot install a release; the text is what it said."""


def installed(version: str) -> Path | None:
    """A directory with this release of the SDK and nothing else; None: it is the one of this environment.

    Raises:
        Unavailable: it cannot be installed.
    """
    if importlib.metadata.version("tinker") == version:
        return None
    directory = KEPT / version
    if not (directory / "tinker" / "_version.py").exists():
        command = [sys.executable, "-m", "pip", "install", "--quiet", "--no-deps"]
        command += ["--target", str(directory), f"tinker=={version}"]
        done = subprocess.run(command, capture_output=True, text=True, timeout=300, check=False)
        if done.returncode != 0:
            raise Unavailable(done.stderr[-2000:])
    return directory


def steps(cluster: Cluster, version: str) -> Mapping[str, str]:
    """What came of each step.

    Raises:
        Unavailable: this release cannot be installed.
    """
    paths = [str(path) for path in (installed(version), ROOT) if path is not None]
    command = [sys.executable, "-m", "tests.sdks.steps", cluster.base_url, cluster.api_key, BASE_MODEL]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(paths), "TINKER_TELEMETRY": "0"}
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=300)
    assert done.stdout, done.stderr[-3000:]
    told: dict[str, str] = json.loads(done.stdout)
    assert told.pop("version") == version, "another version was imported"
    return told

"""What a newcomer pastes and runs works on a running cluster."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from tests.cluster.conftest import BASE_MODEL, Cluster
from tests.node_example import node_example

ROOT = Path(__file__).resolve().parents[2]


def run(cluster: Cluster, *command: str, seconds: float = 120) -> str:
    """The output of a command that was told where the cluster is."""
    environment = {
        **os.environ,
        "TINKER_BASE_URL": cluster.base_url,
        "TINKER_API_KEY": cluster.api_key,
        "TINSMITH_GRPC": f"127.0.0.1:{cluster.grpc_port}",
    }
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=seconds)
    assert done.returncode == 0, f"{done.stdout}\n{done.stderr}"
    return done.stdout


def losses(output: str) -> list[float]:
    return [float(loss) for loss in re.findall(r"^(?:step )?\d+ (?:loss )?([\d.]+)$", output, re.MULTILINE)]


def test_what_up_says_to_paste_trains_and_speaks(cluster: Cluster) -> None:
    said = cluster.log.read_text()
    pasted = said[said.index("    export TINKER_BASE_URL") : said.index("\nEND\n") + len("\nEND\n")]
    output = run(cluster, "bash", "-c", f"set -eu\n{pasted}")
    seen = losses(output)
    assert len(seen) == 8
    assert seen[-1] < seen[0]
    assert output.splitlines()[-1].startswith("A tin")


def test_the_quickstart_teaches_a_sentence(cluster: Cluster) -> None:
    output = run(cluster, sys.executable, "examples/quickstart.py")
    seen = losses(output)
    assert len(seen) == 10
    assert seen[-1] < seen[0]


@pytest.mark.skipif(shutil.which("npm") is None, reason="Node's npm is not installed")
def test_the_node_example_trains_and_says_its_sequence(cluster: Cluster, tmp_path: Path) -> None:
    train = node_example(tmp_path)
    output = run(cluster, "node", str(train), seconds=240)
    assert f"training {BASE_MODEL}" in output
    seen = [float(loss) for loss in re.findall(r"^step \d+ loss ([\d.]+)$", output, re.MULTILINE)]
    assert seen[-1] < seen[0]
    assert re.search(r"^said \d+ of 20 tokens by heart$", output, re.MULTILINE)

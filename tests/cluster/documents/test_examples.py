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
from tests.go_example import can_be_built, go_example
from tests.node_example import node_example

ROOT = Path(__file__).resolve().parents[3]


def told(cluster: Cluster) -> dict[str, str]:
    """An environment that says where the cluster is."""
    return {
        **os.environ,
        "PYTHONPATH": str(ROOT),
        "TINKER_BASE_URL": cluster.base_url,
        "TINKER_API_KEY": cluster.api_key,
        "TINSMITH_GRPC": f"127.0.0.1:{cluster.grpc_port}",
    }


def run(cluster: Cluster, *command: str, seconds: float = 300, **variables: str) -> str:
    """The output of a command that was told where the cluster is."""
    environment = {**told(cluster), **variables}
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
    # What is sampled may have any character in it, also one that ends a line.
    assert re.search(r"^step 7 loss .*\nA tin", output, re.MULTILINE), output


def test_the_quickstart_teaches_a_sentence(cluster: Cluster) -> None:
    output = run(cluster, sys.executable, "examples/quickstart.py")
    seen = losses(output)
    assert len(seen) == 10
    assert seen[-1] < seen[0]


def killed_and_started_again(cluster: Cluster, kept: Path, *command: str, seconds: float = 400) -> str:
    """The output of a program that is killed after its first step, and of the run that goes on from there."""
    environment = {**told(cluster), "TINSMITH_STATE": str(kept)}
    first = subprocess.Popen(command, cwd=ROOT, env=environment, stdout=subprocess.PIPE, text=True)
    assert first.stdout is not None
    begun = ""
    for line in first.stdout:
        begun += line
        if line.startswith("step "):
            break
    first.kill()
    first.wait(timeout=30)
    assert re.search(r"^step \d+ loss", begun, re.MULTILINE), begun
    rest = run(cluster, *command, seconds=seconds, TINSMITH_STATE=str(kept))
    assert not kept.exists(), "a run that is done would be gone on with"
    return begun + rest


def check_journey(output: str) -> None:
    """A model was trained by two processes, saved, and sampled with a stream."""
    assert f"training {BASE_MODEL}" in output
    going_on = re.search(r"^going on after request (\d+)$", output, re.MULTILINE)
    assert going_on is not None and int(going_on[1]) >= 2, output
    seen = [float(loss) for loss in re.findall(r"^step \d+ loss ([\d.]+)$", output, re.MULTILINE)]
    assert seen[-1] < seen[0]
    assert re.search(r"^saved tinker://\S+/weights/by-heart$", output, re.MULTILINE)
    assert re.search(r"^said \[?[\d, ]+\]?$", output, re.MULTILINE), "no token came with the stream"
    assert re.search(r"^said \d+ of 20 tokens by heart", output, re.MULTILINE)


def test_the_python_example_trains_in_two_processes_and_streams(cluster: Cluster, tmp_path: Path) -> None:
    command = (sys.executable, "examples/python/train.py")
    check_journey(killed_and_started_again(cluster, tmp_path / "state.json", *command))


@pytest.mark.skipif(shutil.which("npm") is None, reason="Node's npm is not installed")
def test_the_node_example_trains_in_two_processes_and_streams(cluster: Cluster, tmp_path: Path) -> None:
    train = node_example(tmp_path)
    check_journey(killed_and_started_again(cluster, tmp_path / "state.json", "node", str(train)))


@pytest.mark.skipif(not can_be_built(), reason="Go, protoc or Debian's packages for Go are missing")
def test_the_go_example_trains_in_two_processes_and_streams(cluster: Cluster, tmp_path: Path) -> None:
    program = go_example(tmp_path)
    check_journey(killed_and_started_again(cluster, tmp_path / "state.json", str(program)))

"""Frameworks for agents use chat completions with tools as they use OpenAI's.

The framework is installed into a directory of its own with all that it needs, because it asks for other
versions than the project.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.ecosystem.recipes import POLICY, Kitchen

ROOT = Path(__file__).parents[2]
VERSION = "0.24.0"
KEPT = ROOT / ".cache" / "agents" / VERSION

# The first test of a session waits for the cluster, and the framework has to be installed once.
pytestmark = [pytest.mark.timeout(1800), pytest.mark.long]


@pytest.fixture(scope="module")
def framework() -> Path:
    """A directory with the framework."""
    if not (KEPT / "agents" / "__init__.py").exists():
        command = [sys.executable, "-m", "pip", "install", "--quiet", "--target", str(KEPT)]
        subprocess.run([*command, f"openai-agents=={VERSION}"], check=True, timeout=900)
    return KEPT


def test_an_agent_calls_its_tool_is_told_and_goes_on(kitchen: Kitchen, framework: Path) -> None:
    cluster = kitchen.cluster
    training = cluster.service_client().create_lora_training_client(POLICY, rank=8).result()
    checkpoint = training.save_weights_for_sampler("agent").result().path
    for model in (POLICY, checkpoint):
        told = an_agent(kitchen, framework, model)
        # Once as a whole and once as a stream, and each time it had to.
        assert len(told["asked"]) == 2, told
        assert all(asked in ({"city": "Paris"}, {"city": "Rome"}) for asked in told["asked"])
        assert told["shown"] == ["It rains tin."]
        assert told["said"] == told["streamed"]
        assert told["tokens"] > 0


def an_agent(kitchen: Kitchen, framework: Path, model: str) -> dict[str, Any]:
    """What tests.ecosystem.agent prints, in a process of its own."""
    address = (f"{kitchen.cluster.base_url}/v1", kitchen.cluster.api_key, model)
    done = subprocess.run(
        [sys.executable, "-m", "tests.ecosystem.agent", *address],
        cwd=ROOT,
        env={**os.environ, "PYTHONPATH": f"{framework}{os.pathsep}{ROOT}"},
        capture_output=True,
        text=True,
        timeout=600,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-4000:]
    told: dict[str, Any] = json.loads(done.stdout)
    return told

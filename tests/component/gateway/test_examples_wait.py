"""An example that is run before the models are there says what it waits for, and goes on waiting."""

from __future__ import annotations

import os
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.component.gateway.process import ALICE, launch
from tests.component.own_redis import redis_server
from tests.node_example import node_example

LOADING = '[{"name": "org/model"}]'


@pytest.fixture
def own_redis_url(tmp_path: Path) -> Iterator[str]:
    """One that knows of no base model."""
    with redis_server(tmp_path) as url:
        yield url


@pytest.mark.skipif(shutil.which("npm") is None, reason="Node's npm is not installed")
@pytest.mark.parametrize(
    ("configured", "awaited"),
    [
        ("[]", "waiting for a base model with a trainer and a sampler (here: none)"),
        (LOADING, "waiting for a trainer or sampler of org/model, which still loads"),
    ],
)
def test_the_node_example_says_what_it_waits_for(
    own_redis_url: str, tmp_path: Path, configured: str, awaited: str
) -> None:
    train = node_example(tmp_path / "here")
    (tmp_path / "data").mkdir()
    gateway = launch(own_redis_url, tmp_path / "data", "gateway-0", "--base-models", configured)
    environment = {**os.environ, "TINSMITH_GRPC": f"127.0.0.1:{gateway.grpc_port}", "TINKER_API_KEY": ALICE}
    try:
        gateway.wait_ready()
        running = subprocess.Popen(
            ["node", str(train)], env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
        )
        try:
            assert running.stdout is not None
            assert running.stdout.readline().strip() == awaited
            assert running.poll() is None
        finally:
            running.kill()
            running.communicate(timeout=60)
    finally:
        gateway.process.kill()
        gateway.process.communicate(timeout=60)

"""A sampler that starts, as a process of its own."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path


def test_a_model_that_is_not_there_is_named_before_the_engine_starts(redis_url: str, tmp_path: Path) -> None:
    missing = tmp_path / "missing"
    flags = [
        "--id",
        "sampler-0",
        "--model",
        f"org/name={missing}",
        "--data-dir",
        str(tmp_path),
        "--port",
        "0",
    ]
    ended = subprocess.run(
        [sys.executable, "-m", "services.sampler", "--id", "sampler-0", *flags],
        env={**os.environ, "TINSMITH_REDIS_URL": redis_url},
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert ended.returncode != 0
    assert f"there is no {missing}: put the model's files into {missing}" in ended.stderr.splitlines()[-1]
    assert "EngineCore" not in ended.stderr

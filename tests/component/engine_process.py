"""Runs a script of this folder as every rank of a world, under DeepSpeed's launcher."""

from __future__ import annotations

import base64
import json
import os
import socket
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]


def run_world(script: str, ranks: int, *arguments: str) -> None:
    """Returns when all ranks have ended well; fails with what they printed otherwise."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    world = base64.urlsafe_b64encode(json.dumps({"localhost": list(range(ranks))}).encode()).decode()
    command = [
        *(sys.executable, "-m", "deepspeed.launcher.launch", f"--world_info={world}", "--no_local_rank"),
        *("--master_addr=127.0.0.1", f"--master_port={port}"),
        *(str(Path(__file__).with_name(script)), *arguments),
    ]
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", "DS_ACCELERATOR": "cpu"}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 0, done.stdout + done.stderr

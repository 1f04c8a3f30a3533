"""A trainer that is killed leaves nothing behind that its successor could stumble over."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

from scripts import compile_ops
from services.launcher.machine import free_port

_RANK = """
import sys
from services.trainer.compute.base_model import init_distributed
init_distributed("cpu")
print("joined")
"""


def test_a_rank_that_was_killed_while_it_compiled_does_not_hold_its_successor_up(tmp_path: Path) -> None:
    # What PyTorch leaves behind when the process dies.
    built = shutil.copytree(compile_ops.build_folder(), tmp_path / compile_ops.NAME)
    (built / "lock").touch()
    world = {
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(free_port()),
        "WORLD_SIZE": "1",
        "LOCAL_SIZE": "1",
    }
    rank = subprocess.run(
        [sys.executable, "-c", _RANK],
        env={
            **os.environ,
            **world,
            "LOCAL_SIZE": "1",
            "RANK": "0",
            "LOCAL_RANK": "0",
            "TORCH_EXTENSIONS_DIR": str(tmp_path),
        },
        stdout=subprocess.PIPE,
        text=True,
        timeout=240,
    )
    assert rank.stdout.splitlines()[-1] == "joined"


def test_the_ranks_of_a_world_that_runs_have_no_named_segment() -> None:
    port = str(free_port())
    world = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port, "WORLD_SIZE": "2", "LOCAL_SIZE": "2"}
    ranks = [
        subprocess.Popen(
            [sys.executable, "-c", _RANK],
            env={**os.environ, **world, "RANK": str(rank), "LOCAL_RANK": str(rank)},
            stdout=subprocess.PIPE,
            text=True,
        )
        for rank in range(2)
    ]
    assert [rank.communicate(timeout=240)[0].splitlines()[-1] for rank in ranks] == ["joined", "joined"]
    # Ended without any clean-up of DeepSpeed's, as one that is killed would be.
    assert [path.name for path in Path("/dev/shm").iterdir() if f"_{port}_" in path.name] == []

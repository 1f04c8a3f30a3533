"""A trainer leaves nothing in shared memory."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

from tests.component.trainer_world import free_port

_RANK = """
import sys
from services.trainer.base_model import init_distributed
init_distributed("cpu")
print("joined")
"""


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

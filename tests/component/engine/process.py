"""Plays a scenario on every rank of a world under DeepSpeed's launcher, and collects the reports."""

from __future__ import annotations

import base64
import json
import os
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import TypeVar

import msgspec

from services.launcher.machine import free_port
from services.trainer.compute.base_model import init_distributed
from services.trainer.compute.engine import Engine

ROOT = Path(__file__).parents[3]

R = TypeVar("R", bound=msgspec.Struct)


def play(
    module: str,
    directory: Path,
    out: Path,
    kind: type[R],
    ranks: int,
    stage: int,
    offload: bool = False,
    dtype: str = "float32",
) -> list[R]:
    """The reports of all ranks that ran a module of this package; fails with what they printed otherwise.

    Args:
        directory: of the model.
        out: a directory for the reports.
        kind: of the reports.
        stage: ZeRO stage.
        offload: full models hold their optimizer on the CPU.
        dtype: element type that models compute in.
    """
    world = base64.urlsafe_b64encode(json.dumps({"localhost": list(range(ranks))}).encode()).decode()
    command = [
        *(sys.executable, "-m", "deepspeed.launcher.launch", f"--world_info={world}", "--no_local_rank"),
        *("--master_addr=127.0.0.1", f"--master_port={free_port()}", "--module"),
        *(f"{__package__}.{module}", str(directory), str(stage), str(int(offload)), str(out)),
        dtype,
    ]
    environment = {
        **os.environ,
        "PYTHONPATH": str(ROOT),
        "OMP_NUM_THREADS": "1",
        "DS_ACCELERATOR": "cpu",
    }
    with subprocess.Popen(
        command,
        env=environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,
    ) as launched:
        try:
            printed, _ = launched.communicate(timeout=500)
        except BaseException:
            # With the launcher alone its ranks would go on.
            os.killpg(launched.pid, signal.SIGKILL)
            raise
    assert launched.returncode == 0, printed
    files = [out / f"rank{rank}.msgpack" for rank in range(ranks)]
    return [msgspec.msgpack.decode(file.read_bytes(), type=kind) for file in files]


def run_rank(scenario: Callable[[Engine], msgspec.Struct]) -> None:
    """What a module that `play` starts does: the scenario on this rank's engine, then its report."""
    directory, stage, offload, out, dtype = sys.argv[1:6]
    rank, world_size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    init_distributed("cpu")
    engine = Engine(
        model_path=directory,
        device="cpu",
        dtype=dtype,
        zero_stage=int(stage),
        rank=rank,
        world_size=world_size,
        offload_optimizer=bool(int(offload)),
    )
    (Path(out) / f"rank{rank}.msgpack").write_bytes(msgspec.msgpack.encode(scenario(engine)))

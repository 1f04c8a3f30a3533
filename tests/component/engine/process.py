"""Plays a scenario on every rank of a world, in processes of its own, and collects the reports.

What ranks import takes longer than most of what they play. So a process imports it once, and each rank is a
fork of that one, which has computed nothing and has no threads.
"""

from __future__ import annotations

import importlib
import multiprocessing
import os
import time
import traceback
from collections.abc import Callable
from multiprocessing import connection, forkserver
from multiprocessing.context import ForkServerContext
from pathlib import Path
from typing import TypeVar

import msgspec
import pytest

from services.launcher.machine import free_port
from services.trainer.compute.base_model import init_distributed
from tests.component.engine.engines import engine_of

IMPORTED = [__name__, "deepspeed", "transformers.models.qwen3.modeling_qwen3"]
_TIMEOUT_S = 500

R = TypeVar("R", bound=msgspec.Struct)


class World(msgspec.Struct):
    """What the ranks of a world are told."""

    module: str
    """Of this package; its `scenario` is what they play."""
    directory: Path
    """Of the model."""
    out: Path
    """A directory for the reports, which all ranks see."""
    stage: int
    offload: bool
    dtype: str


here: World
"""The world of this process, in those that `play` starts."""


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
    run_ranks(_play, ranks, out, World(module, directory, out, stage, offload, dtype))
    files = [out / f"rank{rank}.msgpack" for rank in range(ranks)]
    return [msgspec.msgpack.decode(file.read_bytes(), type=kind) for file in files]


def run_ranks(work: Callable[..., None], ranks: int, out: Path, *args: object) -> None:
    """Runs `work(*args)` on every rank of a world that torch.distributed finds by the environment. Fails with
    what the first that failed has printed, and ends the others."""
    port = free_port()
    processes = [
        _context().Process(target=_run, args=(rank, ranks, port, out / f"rank{rank}.log", work, args))
        for rank in range(ranks)
    ]
    for process in processes:
        process.start()
    deadline = time.monotonic() + _TIMEOUT_S
    bad: list[int] = []
    try:
        while not bad and any(process.exitcode is None for process in processes):
            connection.wait([each.sentinel for each in processes if each.exitcode is None], timeout=1)
            bad = [rank for rank, process in enumerate(processes) if process.exitcode]
            if not bad and time.monotonic() > deadline:
                bad = [rank for rank, process in enumerate(processes) if process.exitcode is None]
    finally:
        for process in processes:
            process.kill()
            process.join()
    if bad:
        log = out / f"rank{bad[0]}.log"
        printed = log.read_text(errors="replace") if log.exists() else "(it ended before it had a log)"
        pytest.fail(f"rank {bad[0]} of {ranks} failed, or took more than {_TIMEOUT_S} s:\n{printed}")


def _context() -> ForkServerContext:
    """Whose processes are forks of one that has imported what they use."""
    context = multiprocessing.get_context("forkserver")
    with pytest.MonkeyPatch.context() as environment:
        # What is imported looks at them then.
        environment.setenv("OMP_NUM_THREADS", "1")
        environment.setenv("DS_ACCELERATOR", "cpu")
        context.set_forkserver_preload(IMPORTED)
        forkserver.ensure_running()
    return context


def _run(
    rank: int, ranks: int, port: int, log: Path, work: Callable[..., None], args: tuple[object, ...]
) -> None:
    with log.open("wb") as printed:
        for descriptor in (1, 2):
            os.dup2(printed.fileno(), descriptor)
    os.environ |= {
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
        "WORLD_SIZE": str(ranks),
        "RANK": str(rank),
        "LOCAL_RANK": str(rank),
    }
    status = 1
    try:
        work(*args)
        status = 0
    except BaseException:
        traceback.print_exc()
    finally:
        # Threads of a world whose others failed may not end.
        os._exit(status)


def _play(world: World) -> None:
    """What a rank does: the scenario on its engine, then its report."""
    global here
    here = world
    rank = int(os.environ["RANK"])
    init_distributed("cpu")
    engine = engine_of(world.directory, dtype=world.dtype, stage=world.stage, offload_optimizer=world.offload)
    scenario = importlib.import_module(f"{__package__}.{world.module}").scenario
    (world.out / f"rank{rank}.msgpack").write_bytes(msgspec.msgpack.encode(scenario(engine)))

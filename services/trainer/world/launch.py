"""How a trainer world is started: one rank in this very process, several on this machine with the DeepSpeed
launcher, or a node of several machines.

Invariant: the world lives and ends as one. A rank that dies takes the others with it (the launcher
ends them); SIGTERM drains rank 0, which dismisses the others; and when this process is killed
outright every rank is told by the kernel and ends too. What a rank refuses this process ends with,
whichever rank that is.
"""

from __future__ import annotations

import base64
import json
import logging
import os
import signal
import socket
import sys
from collections.abc import Sequence
from typing import NoReturn

import psutil

from services.common.worlds.nodes import Nodes

log = logging.getLogger("services.trainer.world.launch")

_HOST = "127.0.0.1"
_TRAINER = "services.trainer"


def launch_command(ranks: int, master_port: int, args: list[str], gpus: Sequence[str] = ()) -> list[str]:
    """Command line of a world of `ranks` processes of `python -m services.trainer ARGS` on this machine.

    Send it SIGTERM to stop: it exits 0 once all ranks have ended (of several, at most 30 s for each). It
    exits with a rank's status when that rank failed, and with REFUSED and its sentence when it refused its
    settings. `master_port` must be free; it is only bound on
    127.0.0.1. OMP_NUM_THREADS is set to an equal share of the cores unless the environment sets it. `gpus`
    names the GPU of each rank; without it a CUDA_VISIBLE_DEVICES in the environment chooses them.
    """
    world = base64.urlsafe_b64encode(json.dumps({"localhost": _devices(ranks, gpus)}).encode()).decode()
    return [
        sys.executable,
        "-m",
        "services.trainer.world.launch",
        f"--world_info={world}",
        f"--master_port={master_port}",
        f"--master_addr={_HOST}",
        "--no_local_rank",
        "--log_level=warning",
        "--module",
        _TRAINER,
        *args,
    ]


def node_command(nodes: Nodes, ranks: int, args: list[str]) -> list[str]:
    """Command line of a node with `ranks` processes of `python -m services.trainer ARGS`.

    Send it SIGTERM to stop: the head dismisses all nodes and exits 0.
    """
    host = f"[{nodes.host}]" if ":" in nodes.host else nodes.host
    return [
        *(sys.executable, "-m", "services.trainer.world.node"),
        *("--nodes", str(nodes.count), "--node-rank", str(nodes.rank)),
        *("--rendezvous", f"{host}:{nodes.port}", "--interface", nodes.interface),
        *("--wait", f"{nodes.wait_s:g}", "--ranks", str(ranks)),
        "--",
        *args,
    ]


def addresses() -> dict[str, list[str]]:
    """Of this machine, by interface."""
    return {
        name: [each.address for each in found if each.family in (socket.AF_INET, socket.AF_INET6)]
        for name, found in psutil.net_if_addrs().items()
    }


def _devices(ranks: int, gpus: Sequence[str]) -> list[int] | list[str]:
    """Device of each rank; the launcher would otherwise ignore CUDA_VISIBLE_DEVICES."""
    visible = list(gpus) or [name for name in os.environ.get("CUDA_VISIBLE_DEVICES", "").split(",") if name]
    if not visible:
        return list(range(ranks))
    if len(visible) < ranks:
        raise ValueError(f"{ranks} trainer ranks need {ranks} GPUs, and {', '.join(visible)} are given")
    return visible[:ranks]


def main() -> None:
    """With the arguments of `launch_command`: this process is the only rank, or the DeepSpeed launcher."""
    from services.common.process.process import REFUSED, die_with_parent

    if os.getppid() != 0 and os.getpid() != 1:
        # The rank that this becomes keeps it.
        die_with_parent(signal.SIGTERM)
    world, port = (word.partition("=")[2] for word in sys.argv[1:3])
    devices = json.loads(base64.urlsafe_b64decode(world))["localhost"]
    os.environ.setdefault("OMP_NUM_THREADS", str(max(1, len(os.sched_getaffinity(0)) // len(devices))))
    # Ranks take it for their agent's word, and it would be of whoever started this.
    os.environ.pop("LOCAL_WORLD_SIZE", None)
    if len(devices) == 1:
        _become_the_rank(str(devices[0]), port, sys.argv[sys.argv.index(_TRAINER) + 1 :])

    # The launcher exits 1 when it is asked to stop; the signals seen here tell that from a failed rank.
    seen, notify = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)
    signal.set_wakeup_fd(notify, warn_on_full_buffer=False)
    from deepspeed.launcher import launch

    from services.common.telemetry import logs
    from services.trainer.world import refusals

    store = refusals.listen(_HOST)
    try:
        launch.main()
    except SystemExit:
        if _stop_was_asked(seen):
            return
        if refusal := refusals.heard(store):
            # The last line, below what the others said when it was gone.
            logs.configure("trainer", os.environ.get("TINSMITH_LOG_FORMAT", "text"))
            log.critical("%s", refusal)
            sys.exit(REFUSED)
        raise


def _become_the_rank(device: str, port: str, args: list[str]) -> NoReturn:
    """A launcher would be half a gigabyte and some seconds, and one rank has nobody to end with."""
    os.environ |= {
        "MASTER_ADDR": _HOST,
        "MASTER_PORT": port,
        "RANK": "0",
        "LOCAL_RANK": "0",
        "WORLD_SIZE": "1",
        "CUDA_VISIBLE_DEVICES": device,
    }
    os.execv(sys.executable, [sys.executable, "-u", "-m", _TRAINER, *args])


def _stop_was_asked(seen: int) -> bool:
    try:
        numbers = os.read(seen, 1024)
    except BlockingIOError:
        return False
    return signal.SIGTERM in numbers or signal.SIGINT in numbers


if __name__ == "__main__":
    main()

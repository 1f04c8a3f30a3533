"""How a trainer world is started: one rank on this machine is the process itself, several are those of an
agent (`node.py`), as they are of each node of several machines.

Invariant: a rank is tied to whoever started it before it imports anything. One that is alone drains when that
ends; those of an agent are killed with it, and so never meet those of the agent that comes after it.
"""

from __future__ import annotations

import argparse
import os
import signal
import socket
import sys
from typing import NoReturn

import psutil

from services.common.process.process import die_with_parent, end_with_parent
from services.common.worlds.nodes import LOOPBACK_ADDRESS, Nodes, on_loopback

_LAUNCH = "services.trainer.world.launch"
_NODE = "services.trainer.world.node"
_TRAINER = "services.trainer"

_ALONE = {
    "MASTER_ADDR": LOOPBACK_ADDRESS,
    # Any that is free.
    "MASTER_PORT": "0",
    "RANK": "0",
    "LOCAL_RANK": "0",
    "WORLD_SIZE": "1",
    "LOCAL_WORLD_SIZE": "1",
    "GROUP_RANK": "0",
}
"""What an agent tells its ranks, of one that has none: what is in the environment may be of another world."""


def launch_command(ranks: int, args: list[str]) -> list[str]:
    """Command line of a world of `ranks` processes of `python -m services.trainer ARGS` on this machine, who
    meet on 127.0.0.1 and on no other address.

    Send it SIGTERM to stop: it exits 0 once all ranks have ended; several are killed after 30 s. Before there
    are any it ends of the signal. It exits
    with REFUSED and its sentence when a rank refused its settings, with 2 when ranks do not take their flags,
    and with another status when a rank failed. OMP_NUM_THREADS is set to an equal share of the cores unless
    the environment sets it. Of the GPUs of CUDA_VISIBLE_DEVICES, or of this machine, each rank has one.
    """
    return [sys.executable, "-m", _LAUNCH, f"--ranks={ranks}", "--", *args]


def node_command(nodes: Nodes, ranks: int, args: list[str]) -> list[str]:
    """Command line of a node with `ranks` processes of `python -m services.trainer ARGS`.

    Send it SIGTERM to stop: the head dismisses all nodes and exits 0.
    """
    host = f"[{nodes.host}]" if ":" in nodes.host else nodes.host
    return [
        *(sys.executable, "-m", _NODE),
        *("--nodes", str(nodes.count), "--node-rank", str(nodes.rank)),
        *("--rendezvous", f"{host}:{nodes.port}", "--interface", nodes.interface),
        *("--wait", f"{nodes.wait_s:g}", "--ranks", str(ranks)),
        "--",
        *args,
    ]


def rank_arguments(args: list[str]) -> list[str]:
    """What an interpreter is given to be a rank of this process, which is an agent."""
    return ["-m", _LAUNCH, "--agent", str(os.getpid()), "--", *args]


def addresses() -> dict[str, list[str]]:
    """Of this machine, by interface."""
    return {
        name: [each.address for each in found if each.family in (socket.AF_INET, socket.AF_INET6)]
        for name, found in psutil.net_if_addrs().items()
    }


def main() -> NoReturn:
    """Becomes a rank, or the agent of several."""
    parser = argparse.ArgumentParser(
        prog=f"python -m {_LAUNCH}",
        description="A trainer on this machine. After -- come the flags of services.trainer.",
    )
    parser.add_argument("--ranks", type=int, default=1, help="of the trainer, each with a GPU of its own")
    parser.add_argument("--agent", type=int, help=argparse.SUPPRESS)
    parser.add_argument("args", nargs="*", metavar="ARGS", help="flags of services.trainer")
    found = parser.parse_args()
    if found.ranks < 1:
        parser.error("--ranks must be above 0")
    if found.agent is not None:
        die_with_parent(signal.SIGKILL, found.agent)
        _become("-u", "-m", _TRAINER, *found.args)
    end_with_parent()
    if found.ranks > 1:
        _become("-m", _NODE, "--ranks", str(found.ranks), "--", *found.args)
    os.environ |= {**_ALONE, **on_loopback(os.environ)}
    os.environ.pop("LOCAL_SIZE", None)
    os.environ.setdefault("OMP_NUM_THREADS", str(len(os.sched_getaffinity(0))))
    # An agent would be a quarter of a gigabyte and some seconds, and one rank has nobody to end with.
    _become("-u", "-m", _TRAINER, *found.args)


def _become(*arguments: str) -> NoReturn:
    os.execv(sys.executable, [sys.executable, *arguments])


if __name__ == "__main__":
    main()

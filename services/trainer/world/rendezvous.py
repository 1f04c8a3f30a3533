"""Where the agents of a trainer's nodes meet: torchrun's rendezvous, of which the head is always the first.

PyTorch's own handlers listen on all interfaces, and the one that lets agents come and go (c10d) may make any
of them the first. This one is for a fixed number of nodes that know their ranks.

Invariant: the store listens on the head's address and on no other. Every start of the head is a meeting of
its own, to which each node comes once: one that comes back waits for the head's next start. Whoever waits
for the others does it for as long as was said, and then says who is not there. A follower hears what the head
refused before the head ends, and that it has ended; one that cannot hear it ends with the reason.
"""

from __future__ import annotations

import logging
import math
import socket
import threading
import time
from contextlib import suppress
from datetime import timedelta

import torch.distributed as dist
from torch.distributed.elastic.rendezvous import (
    RendezvousHandler,
    RendezvousInfo,
    RendezvousStoreInfo,
)

from services.common.contract.errors import Internal, Unavailable
from services.common.weights.rendezvous import meeting_store
from services.common.worlds.nodes import Nodes
from services.trainer.world import refusals

log = logging.getLogger(__name__)

_AGAIN_S = 1.0
_CONNECT_S = 5.0
_REACHED_S = 60.0
_ENDS_S = 20.0
"""In which ranks see by themselves that the head's have ended, and tell what they refuse themselves."""
_SILENT = 3
"""A head that takes no connection so often has ended."""
_LOOK_S = 0.1
_HEARD_S = 5.0
"""In which followers hear what ends the head."""


class Rendezvous(RendezvousHandler):
    """torch's RendezvousHandler over one store of the head."""

    def __init__(self, nodes: Nodes) -> None:
        self._nodes = nodes
        self._store: dist.TCPStore | None = None
        self._said = ""
        self._head_ended = math.inf
        """When a follower heard it, in seconds of the monotonic clock."""
        self._deaf: Exception | None = None
        """Why a follower hears nothing any more."""

    def get_backend(self) -> str:
        return "tinsmith"

    @property
    def use_agent_store(self) -> bool:
        """Ranks meet in the head's store too: a port of their own might be taken before rank 0 has it."""
        return True

    def next_rendezvous(self) -> RendezvousInfo:
        """Meets the other nodes; the ranks that are started from here on tell the head what they refuse.

        Raises:
            Unavailable: not all were there in time.
            OSError: the head cannot listen there.
        """
        nodes = self._nodes
        deadline = time.monotonic() + nodes.wait_s
        self._store = store = self._joined(deadline)
        refusals.announce(nodes.host, store.port)
        for rank in range(nodes.count):
            try:
                store.wait([_came(rank)], timedelta(seconds=max(0.1, deadline - time.monotonic())))
            except dist.DistError as error:
                raise Unavailable(
                    f"of {nodes.count} nodes, node {rank} did not come to {nodes.host}:{nodes.port} within "
                    f"{nodes.wait_s:g} s: start it, or see why it ended"
                ) from error
        if nodes.count > 1:
            log.info("node %d of %d met the others at %s:%d", nodes.rank, nodes.count, nodes.host, nodes.port)
        if nodes.rank != 0:
            threading.Thread(target=self._hear_the_head, name="what the head says", daemon=True).start()
        where = RendezvousStoreInfo.build(nodes.rank, store, nodes.host, server_port=store.port)
        return RendezvousInfo(store, nodes.rank, nodes.count, where)

    def _joined(self, deadline: float) -> dist.TCPStore:
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
        """What a rank of any node has against its settings, as far as this node knows; empty = nothing."""
        if self._store is None or self._nodes.rank != 0:
            return self._said
        return refusals.heard(self._store)

    def is_over(self) -> bool:
        """Whether this node's ranks, which live, wait for a world that there will not be.

        Raises:
            Internal: this node cannot find out any more. It would wait for ever.
        """
        if self._nodes.rank == 0:
            return bool(self.refusal())
        if self._deaf is not None:
            why = f"{type(self._deaf).__name__}: {self._deaf}"
            raise Internal(
                f"node {self._nodes.rank} does not hear the head any more, and ends: {why}"
            ) from self._deaf
        return time.monotonic() - self._head_ended > _ENDS_S

    def until_heard(self) -> None:
        """Of the head, before it ends: returns when the other nodes know what was refused, or soon."""
        deadline = time.monotonic() + _HEARD_S
        others = [_heard(rank) for rank in range(1, self._nodes.count)]
        while self._store is not None and not self._store.check(others) and time.monotonic() < deadline:
            time.sleep(_LOOK_S)

    def _hear_the_head(self) -> None:
        """Of a follower, on a connection of its own: nobody else waits on it where a machine is lost."""
        try:
            self._listen()
        except Exception as error:
            log.exception("the head cannot be heard any more")
            self._deaf = error

    def _listen(self) -> None:
        """Returns once the head has ended."""
        nodes, silent = self._nodes, 0
        while silent < _SILENT:
            address = _answering(nodes.host, nodes.port)
            silent = 0 if address else silent + 1
            with suppress(dist.DistError):
                if address and self._hears_its_end(address):
                    break
            time.sleep(_AGAIN_S)
        self._head_ended = time.monotonic()

    def _hears_its_end(self, address: str) -> bool:
        """Returns when the head refused something, or is another start, to which this node did not come."""
        rank = self._nodes.rank
        store = meeting_store(address, self._nodes.port, False, timedelta(seconds=_CONNECT_S))
        while store.check([_came(rank)]):
            if said := refusals.heard(store):
                self._said = said
                store.set(_heard(rank), "")
                return True
            time.sleep(_AGAIN_S)
        return True

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


def _heard(rank: int) -> str:
    return f"heard/{rank}"

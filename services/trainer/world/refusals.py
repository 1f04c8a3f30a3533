"""What a rank has against its settings or its model, told to whoever started its world.

A rank that ends closes its connections, which ends the others with errors of the network, and an agent sees
whichever exit status it happens to look at first, and not that of another node's rank at all.

Invariant: a refusal is told before its rank ends, so whoever started the world and sees an end that came of
it sees the refusal too.
"""

from __future__ import annotations

import logging
import os
from datetime import timedelta

import torch.distributed as dist

from services.common.contract import variables
from services.common.process.process import REFUSED, status_of
from services.common.weights.rendezvous import meeting_store
from services.common.worlds.nodes import endpoint

log = logging.getLogger(__name__)

VARIABLE = variables.PREFIX + "REFUSALS"
"""HOST:PORT of the store that hears of refusals; unset where a rank has no agent."""
STATUSES = (2, REFUSED)
"""Of a process that does not take its flags, or its settings."""
_KEY = "refused"
_TOLD_S = timedelta(seconds=10)


def announce(host: str, port: int) -> None:
    """Has the ranks that are started from here on tell a store that there is."""
    os.environ[VARIABLE] = f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


def ends_with(error: BaseException, who: str) -> int:
    """The exit status of a rank that ends with an error before it serves; a refusal is told."""
    status = status_of(error)
    if status == REFUSED:
        tell(f"{who}: {error}")
    return status


def tell(sentence: str) -> None:
    """Tells a refusal; the first one of a world is kept. Blocking, seconds where nobody hears it."""
    where = os.environ.get(VARIABLE)
    if not where:
        return
    host, port = endpoint(where)
    try:
        meeting_store(host, port, False, _TOLD_S).compare_set(_KEY, "", sentence)
    except dist.DistError as error:
        # Whoever would have heard it has ended, of the same most likely.
        log.warning("could not tell the agent why this ends: %s", error)


def heard(store: dist.Store) -> str:
    """What was refused first; empty = nothing was.

    Raises:
        torch.distributed.DistError: whoever served the store has ended.
    """
    return store.get(_KEY).decode() if store.check([_KEY]) else ""

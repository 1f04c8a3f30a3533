"""Who may have a page of a list made.

Invariant: no more than a few pages are in the making at once, whoever asks for them. Nothing tells before it
is read how much memory one takes (a thousand entries may have labels of 64 KiB each); afterwards it counts as
an answer. API keys take turns.
"""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from services.gateway.access.fair_slots import FairSlots

LISTS = frozenset(
    (
        *("GetSession", "SearchSessions", "ListTrainingRuns", "ListCheckpoints", "ListAuditRecords"),
        *("ListClusterSessions", "ListOwners", "ListUnreadable"),
        *("GET sessions/{session_id}", "GET training_runs", "GET checkpoints"),
        *("GET training_runs/{training_run_id}/checkpoints", "GET audit"),
        *("GET billing/usage/events", "GET billing/usage/checkpoints/current"),
    )
)
"""Methods of `rights.NEEDS` that take a turn as soon as they are called. (POST sessions/search takes one when
its body is there: a slow sender keeps nobody waiting.)"""

AT_ONCE = 2
"""More would not come sooner: making them is work of the one loop."""


class PageTurns:
    """Turns of API keys at the making of pages."""

    def __init__(self) -> None:
        self._slots = FairSlots(AT_ONCE)

    @asynccontextmanager
    async def held(self, owner: str) -> AsyncIterator[None]:
        """Waits for the owner's turn; within it one page may be made."""
        async with self._slots.held(owner, 1):
            yield

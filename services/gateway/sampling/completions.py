"""Waiting for any sample of a sampling client, with one poll for all of them.

Invariant: as in `futures`, a waiter first is listed and then looks; when the subscription was interrupted
every waiter looks again. Who was told all that there is need not look before something is resolved, and does
so now and then all the same. A completion is told at least until a poll names a cursor at or after it, or its
result was fetched; so an answer that was lost on its way is told again, by any gateway.
"""

from __future__ import annotations

import asyncio
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass

from cachetools import TTLCache

from services.common.contract import ids
from services.common.contract.errors import Gone, InvalidRequest
from services.gateway.records.sample_journal import MOST_COMPLETIONS, Completion, SampleJournal
from services.gateway.results.fetched import FetchedResults
from services.gateway.results.futures import Futures

_FETCHED_S = 60
"""A result that its client says it has may be asked for so much longer."""

_TOLD_S = 30.0
_MOST_TOLD = 10_000
"""For so long, and of so many clients, it is known that they were told all."""


@dataclass(frozen=True)
class Target:
    """A sampling client: one of the copies that share a sampling session. `clone` 0 is the original."""

    sampling_session_id: str
    clone: int

    def holds(self, request_id: str) -> bool:
        """Whether a request is this client's.

        Raises:
            InvalidRequest: the text is no request id.
        """
        object_id, seq_id = ids.parse_request_id(request_id)
        return object_id == self.sampling_session_id and seq_id // ids.CLONE_SEQ_IDS == self.clone


@dataclass(frozen=True)
class Page:
    """Completions in order, and the cursor to ask for the next ones with."""

    completions: Sequence[Completion]
    cursor: int


class Completions:
    """Lets any number of callers wait for completions over the subscription of `futures`."""

    def __init__(self, journal: SampleJournal, futures: Futures, fetched: FetchedResults) -> None:
        self._journal = journal
        self._futures = futures
        self._fetched = fetched
        self._waiters: defaultdict[Target, set[asyncio.Event]] = defaultdict(set)
        # After which cursor there was nothing when this looked, and nothing has been resolved since.
        self._told_to: TTLCache[Target, int] = TTLCache(_MOST_TOLD, _TOLD_S)
        futures.listen(self._wake, self._wake_all)

    async def wait(self, target: Target, cursor: int, seconds: float, forgets: bool = True) -> Page:
        """The completions after a cursor, as soon as there are any, else none after `seconds` (0 = now), or
        when `futures` drains.

        Args:
            forgets: those at or before the cursor need not be told any more.
        """
        loop = asyncio.get_running_loop()
        deadline = loop.time() + seconds
        changed = asyncio.Event()
        self._waiters[target].add(changed)
        looks = not forgets or self._told_to.get(target) != cursor
        try:
            while True:
                if looks:
                    changed.clear()
                    found, newest = await self._journal.completions(
                        target.sampling_session_id, target.clone, cursor, forgets
                    )
                    if len(found) < MOST_COMPLETIONS and forgets and not changed.is_set():
                        self._told_to[target] = newest
                    if found or deadline <= loop.time() or self._futures.draining:
                        return Page(found, newest)
                looks = True
                if self._futures.draining:
                    return Page((), cursor)
                try:
                    async with asyncio.timeout_at(deadline):
                        await changed.wait()
                except TimeoutError:
                    return Page((), cursor)
                if self._futures.draining:
                    return Page((), cursor)
        finally:
            waiters = self._waiters[target]
            waiters.discard(changed)
            if not waiters:
                del self._waiters[target]

    async def check_kept(self, cursor: int) -> None:
        """Refuses a cursor after which there may be completions that are kept no longer.

        Raises:
            Gone: with the code "cursor_expired".
        """
        if 0 < cursor <= await self._journal.kept_since():
            raise Gone(
                "some of what was resolved after this cursor may be kept no longer; begin at 0, and ask for "
                "what is missing by its request id",
                "cursor_expired",
            )

    async def none_pending(self, target: Target) -> bool:
        """Whether every accepted sample of the sampling session is resolved."""
        return not await self._journal.pending([target.sampling_session_id])

    async def free(self, target: Target, request_ids: Sequence[str]) -> None:
        """Lets results go that the client says it has.

        Raises:
            InvalidRequest: one is not a request of this client.
        """
        for request_id in request_ids:
            if not target.holds(request_id):
                raise InvalidRequest(
                    f"{request_id} is no request of clone {target.clone} of {target.sampling_session_id}"
                )
        await self._fetched.let_go(request_ids, _FETCHED_S)

    def _wake(self, request_id: str) -> None:
        if not self._waiters and not self._told_to:
            return
        object_id, seq_id = ids.parse_request_id(request_id)
        target = Target(object_id, seq_id // ids.CLONE_SEQ_IDS)
        self._told_to.pop(target, None)
        for waiter in self._waiters.get(target, ()):
            waiter.set()

    def _wake_all(self) -> None:
        self._told_to.clear()
        for waiters in self._waiters.values():
            for waiter in waiters:
                waiter.set()

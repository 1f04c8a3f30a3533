"""Waiting for any of several results.

Invariant: as in `futures`, who waits is listed first and looks then; when the subscription was interrupted
all look again. Results are read one at a time, when their reader is ready for them.
"""

from __future__ import annotations

import asyncio
from collections import defaultdict
from collections.abc import AsyncGenerator, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field

from services.gateway.results.futures import Futures, FutureView


@dataclass(eq=False)
class _Watch:
    """Futures that one reader waits for, and those of them to look at."""

    left: set[str]
    due: set[str] = field(default_factory=set)
    changed: asyncio.Event = field(default_factory=asyncio.Event)

    def look(self, request_ids: set[str]) -> None:
        self.due |= request_ids & self.left
        self.changed.set()


class Several:
    """Lets any number of callers wait for many futures each, over the subscription of `futures`."""

    def __init__(self, futures: Futures) -> None:
        self._futures = futures
        self._watches: defaultdict[str, set[_Watch]] = defaultdict(set)
        futures.listen(self._wake, self._wake_all)

    async def resolved(
        self, request_ids: Sequence[str], seconds: float
    ) -> AsyncGenerator[tuple[str, FutureView]]:
        """Each future once it is not pending any more, in the order in which they come to be so; ends when
        all were told, after `seconds` (0 = what is there now), or when `futures` drains.

        Raises:
            InvalidRequest: a text is no request id.
        """
        loop = asyncio.get_running_loop()
        deadline = loop.time() + seconds
        with self._watch(set(request_ids)) as watch:
            watch.due = set(watch.left)
            while watch.left:
                watch.changed.clear()
                for request_id in [one for one in request_ids if one in watch.due]:
                    watch.due.discard(request_id)
                    # Nothing of it is kept here while its reader has it.
                    found = [await self._futures.wait(request_id, 0)]
                    if found[0].state != "pending" and request_id in watch.left:
                        watch.left.discard(request_id)
                        yield request_id, found.pop()
                left = deadline - loop.time()
                if not watch.left or left <= 0 or self._futures.draining:
                    return
                with suppress(TimeoutError):
                    async with asyncio.timeout(left):
                        await watch.changed.wait()

    @contextmanager
    def _watch(self, request_ids: set[str]) -> Iterator[_Watch]:
        watch = _Watch(set(request_ids))
        for request_id in request_ids:
            self._watches[request_id].add(watch)
        try:
            yield watch
        finally:
            for request_id in request_ids:
                watches = self._watches[request_id]
                watches.discard(watch)
                if not watches:
                    del self._watches[request_id]

    def _wake(self, request_id: str) -> None:
        for watch in self._watches.get(request_id, ()):
            watch.look({request_id})

    def _wake_all(self) -> None:
        for watch in {watch for watches in self._watches.values() for watch in watches}:
            watch.look(watch.left)

"""Letting go of results that were fetched.

Invariants: a result that was fetched stays long enough to be asked for again, as its answer may have been
lost on the way; and one that its client had before it was written, once it is. When the process that sent
it ends at that moment, it stays as long as one that nobody fetched.
"""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import Callable, Iterable

import redis.asyncio

from services.common.contract import ids
from services.common.process.periodic import Periodic
from services.common.state import keys
from services.common.state.room import ACCOUNT, Room
from services.common.state.scripts import Script

_EVERY_S = 1.0
_DEADLINE_S = 60.0
_AT_ONCE = 256
_MOST_NOTED = 100_000


class FetchedResults:
    """Shortens the life of results, many in one step.

    Args:
        is_unwritten: whether a result that clients may have is still being written.
    """

    def __init__(
        self,
        client: redis.asyncio.Redis,
        room: Room,
        is_unwritten: Callable[[str], bool] = lambda _: False,
    ) -> None:
        self._room = room
        self._is_unwritten = is_unwritten
        self._shorten = Script(client, "shorten")
        self._noted: set[str] = set()
        self._flushes = Periodic("letting fetched results go", _EVERY_S, self._flush, _DEADLINE_S)

    async def start(self) -> None:
        self._flushes.start()

    async def stop(self) -> None:
        await self._flushes.stop()

    def note(self, request_id: str) -> None:
        """A result is on its way to its client."""
        if len(self._noted) < _MOST_NOTED:
            self._noted.add(request_id)

    async def let_go(self, request_ids: Iterable[str], seconds: int) -> None:
        """Has results go so many seconds from now. What is pending is left alone; what is being written goes
        as if it had been noted.

        Raises:
            redis.exceptions.RedisError: Redis does not answer.
        """
        written = []
        for request_id in request_ids:
            if self._is_unwritten(request_id):
                self.note(request_id)
            else:
                written.append(request_id)
        left = iter(written)
        while some := list(itertools.islice(left, _AT_ONCE)):
            names: list[str] = []
            numbers: list[str] = []
            for object_id, seq_id in map(ids.parse_request_id, some):
                future = keys.future(object_id, seq_id)
                sample = ids.is_sampling_session_id(object_id)
                clone = seq_id // ids.CLONE_SEQ_IDS
                names += [future, keys.completions(object_id, clone) if sample else future]
                numbers.append(str(seq_id) if sample else "")
            await self._shorten([*names, *ACCOUNT], seconds, *numbers)
        if seconds <= self._room.limits.fetched_life:
            self._noted.difference_update(written)

    async def _flush(self) -> None:
        noted, self._noted = self._noted, set()
        try:
            await self.let_go(noted, self._room.limits.fetched_life)
        except (redis.ConnectionError, redis.TimeoutError, OSError, asyncio.CancelledError):
            # Redis is away, or slow: they go with the next step. What it refuses, it may refuse for ever.
            for request_id in noted:
                self.note(request_id)
            raise

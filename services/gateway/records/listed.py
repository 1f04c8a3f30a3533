"""Pages of what is listed by its creation, newest first.

Invariant: a page begins after the place where the one before ended, whatever was made or is gone since.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import redis.asyncio

from services.common.state.scripts import Script


@dataclass(frozen=True, order=True)
class Cursor:
    """Where a page ended: the creation (Unix time) and the name of its last entry."""

    created_at: float
    name: str


@dataclass(frozen=True)
class Listed:
    """A page of names. `next` None = there are no more; `total` counts all."""

    names: Sequence[str]
    total: int
    next: Cursor | None


class Pages:
    """Reads pages of sorted sets whose scores are times of creation."""

    def __init__(self, client: redis.asyncio.Redis) -> None:
        self._page = Script(client, "page")

    async def read(self, key: str, entries: int, after: Cursor | None) -> Listed:
        """At most so many names, the first ones or those after a cursor."""
        score, member = ("", "") if after is None else (repr(after.created_at), after.name)
        # One more tells whether there are more.
        total, flat = await self._page([key], entries + 1, score, member)
        found = [Cursor(float(flat[i + 1]), flat[i].decode()) for i in range(0, len(flat), 2)]
        shown: list[Cursor] = found[:entries]
        more = shown[-1] if shown and len(found) > entries else None
        return Listed([entry.name for entry in shown], int(total), more)

"""Lists of names by a time: when something was of use, or is to be looked at because it may go.

Invariant: they are written also while Redis has no memory left, since what makes room is found by them; so
only names of what is there already are written.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Literal

import redis.asyncio

from services.common.state.scripts import Script


class Times:
    """The sorted sets of one Redis."""

    def __init__(self, client: redis.asyncio.Redis) -> None:
        self._note = Script(client, "note_times")

    async def note(
        self,
        lists: str | Sequence[str],
        times: Mapping[str, float] | Mapping[bytes, float],
        only: Literal["", "new", "known"] = "",
    ) -> None:
        """Notes times of names, in seconds since the epoch.

        Args:
            lists: their keys.
            only: names that a list does not have yet, or has.
        """
        names = [lists] if isinstance(lists, str) else lists
        option = {"": "", "new": "NX", "known": "XX"}[only]
        await self._note(names, option, *(part for name, at in times.items() for part in (repr(at), name)))

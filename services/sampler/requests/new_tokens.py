"""Tokens on their way from the engine to one reader.

Invariant: what was told is read once, in order; what a slow reader has not read is bounded by the sample's
answer. Of a stream whose reader has gone nothing is kept, however long its generation goes on.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from typing import Any

from services.sampler.engine.sampling import NewTokens


class TokenStream:
    """The new tokens of one sample."""

    def __init__(self) -> None:
        self._unread: list[NewTokens] = []
        self._told = asyncio.Event()
        self._closed = False

    def tell(self, new: NewTokens) -> None:
        if not self._closed:
            self._unread.append(new)
            self._told.set()

    def close(self) -> None:
        """Nobody reads any more."""
        self._closed = True
        self._unread.clear()

    async def until(self, end: asyncio.Future[Any], seconds: float | None) -> AsyncIterator[list[NewTokens]]:
        """What is new, as soon as anything is; nothing (an empty list) every so many seconds; all there is
        left when `end` is done."""
        ended = False
        while not ended:
            if not end.done():
                told = asyncio.ensure_future(self._told.wait())
                try:
                    await asyncio.wait({end, told}, timeout=seconds, return_when=asyncio.FIRST_COMPLETED)
                finally:
                    told.cancel()
            ended = end.done()
            self._told.clear()
            unread, self._unread = self._unread, []
            if unread or not ended:
                yield unread

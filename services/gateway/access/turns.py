"""Computing for API keys in the threads that all of them share.

Invariants: no more of it is ever handed to the threads than they do at once, so what else needs them waits
for no queue of it; a thread that comes free takes the work of the waiting key that holds the least of them.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import TypeVar

from services.common.process.pools import COMPUTE, COMPUTE_THREADS, Pool
from services.gateway.access.fair_slots import FairSlots

T = TypeVar("T")


class Turns:
    """Turns of API keys at a pool.

    Args:
        threads: how many of its threads they may have at once.
    """

    def __init__(self, pool: Pool = COMPUTE, threads: int = COMPUTE_THREADS) -> None:
        self._pool = pool
        self._slots = FairSlots(threads)

    async def run(self, owner: str, work: Callable[..., T], *args: object) -> T:
        """What the work comes to in a thread, once it is the owner's turn. Who gives up before never begins;
        afterwards it keeps its place until the thread is free."""
        async with self._slots.held(owner, 1):
            running = asyncio.ensure_future(self._pool.run(work, *args))
            try:
                return await asyncio.shield(running)
            finally:
                if not running.done():
                    await asyncio.gather(running, return_exceptions=True)

"""Who may run next when not all can: slots dealt to API keys in turn.

Invariant: a slot goes to the waiting key that holds the least, and within a key to the request that waits
longest; so a key with one request waits for no more than what is running, however many others wait.
"""

from __future__ import annotations

import asyncio
from collections import Counter, OrderedDict, deque
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager


class FairSlots:
    """Counted slots. A request takes as many as it has sequences, and runs alone when it has more."""

    def __init__(self, capacity: int) -> None:
        self._capacity = capacity
        self._used = 0
        self._used_by: Counter[str] = Counter()
        # Keys in the order in which they were last dealt to.
        self._waiting: OrderedDict[str, deque[tuple[int, asyncio.Future[None]]]] = OrderedDict()

    def resize(self, capacity: int) -> None:
        """Changes how many there are. What is held stays."""
        self._capacity = capacity
        self._deal()

    @asynccontextmanager
    async def held(self, owner: str, slots: int) -> AsyncIterator[None]:
        """Waits for its turn and holds the slots until the context ends."""
        granted: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._waiting.setdefault(owner, deque()).append((slots, granted))
        self._deal()
        try:
            await granted
            yield
        finally:
            if granted.done() and not granted.cancelled():
                self._used -= slots
                self._used_by[owner] -= slots
                if not self._used_by[owner]:
                    del self._used_by[owner]
            self._deal()

    def _deal(self) -> None:
        while self._waiting:
            owner = min(self._waiting, key=lambda name: self._used_by[name])
            queue = self._waiting[owner]
            slots, granted = queue[0]
            if not granted.done() and self._used and self._used + slots > self._capacity:
                return
            queue.popleft()
            if queue:
                self._waiting.move_to_end(owner)
            else:
                del self._waiting[owner]
            # Whoever was cancelled while waiting takes none.
            if not granted.done():
                self._used += slots
                self._used_by[owner] += slots
                granted.set_result(None)

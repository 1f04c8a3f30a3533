"""Who may run next when not all can: slots dealt to API keys in turn.

Invariant: a slot goes to the waiting key that holds the least, and within a key to the request of the highest
priority, of several to the one that waits longest; so a key with one request waits for no more than what is
running, however many others wait, and however urgent theirs are. No slot is free while somebody waits: who
takes several is not split, so one request at most has more than are left.
"""

from __future__ import annotations

import asyncio
import heapq
import itertools
from collections import Counter, OrderedDict


class _Queue:
    """What waits of one key. It holds no more of what was cancelled than of what waits."""

    def __init__(self) -> None:
        self._heap: list[tuple[int, int, int, asyncio.Future[None]]] = []
        self._numbers = itertools.count()
        self._gone = 0

    def __len__(self) -> int:
        return len(self._heap)

    def add(self, priority: int, slots: int, granted: asyncio.Future[None]) -> None:
        """One more waits."""
        if self._gone > len(self._heap) // 2:
            self._heap = [one for one in self._heap if not one[-1].done()]
            heapq.heapify(self._heap)
            self._gone = 0
        heapq.heappush(self._heap, (-priority, next(self._numbers), slots, granted))

    def note_gone(self) -> None:
        """One was cancelled."""
        self._gone += 1

    def first(self) -> tuple[int, asyncio.Future[None]]:
        """The next one: its slots, and what it waits for."""
        _, _, slots, granted = self._heap[0]
        return slots, granted

    def take(self) -> None:
        """The next one waits no more."""
        heapq.heappop(self._heap)


class FairSlots:
    """Counted slots. A request takes as many as it has sequences, also more than are free, if one is."""

    def __init__(self, capacity: int) -> None:
        self._capacity = capacity
        self._used = 0
        self._used_by: Counter[str] = Counter()
        # Keys in the order in which they were last dealt to.
        self._waiting: OrderedDict[str, _Queue] = OrderedDict()

    def resize(self, capacity: int) -> None:
        """Changes how many there are. What is held stays."""
        self._capacity = capacity
        self._deal()

    def held(self, owner: str, slots: int, priority: int = 0) -> _Held:
        """A context that waits for its turn and holds the slots until it ends.

        Args:
            priority: among the owner's own; higher ones go first.
        """
        return _Held(self, owner, slots, priority)

    def _ask(self, owner: str, slots: int, priority: int) -> tuple[_Queue, asyncio.Future[None]]:
        granted: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        queue = self._waiting.setdefault(owner, _Queue())
        queue.add(priority, slots, granted)
        self._deal()
        return queue, granted

    def _give_back(self, owner: str, slots: int, queue: _Queue, granted: asyncio.Future[None]) -> None:
        if granted.cancelled():
            queue.note_gone()
        elif granted.done():
            self._used -= slots
            self._used_by[owner] -= slots
            if not self._used_by[owner]:
                del self._used_by[owner]
        self._deal()

    def _deal(self) -> None:
        while self._waiting:
            owner = min(self._waiting, key=lambda name: self._used_by[name])
            queue = self._waiting[owner]
            slots, granted = queue.first()
            # One that takes more than are free does not wait for the others: what computes would run empty
            # meanwhile.
            if not granted.done() and self._used >= self._capacity:
                return
            queue.take()
            if queue:
                self._waiting.move_to_end(owner)
            else:
                del self._waiting[owner]
            # Whoever was cancelled while waiting takes none.
            if not granted.done():
                self._used += slots
                self._used_by[owner] += slots
                granted.set_result(None)


class _Held:
    """Slots that a request waits for, then holds. Not a generator: asyncio keeps a list of those that run."""

    def __init__(self, slots: FairSlots, owner: str, count: int, priority: int) -> None:
        self._slots = slots
        self._owner = owner
        self._count = count
        self._priority = priority

    async def __aenter__(self) -> None:
        self._queue, self._granted = self._slots._ask(self._owner, self._count, self._priority)
        try:
            await self._granted
        except BaseException:
            self._slots._give_back(self._owner, self._count, self._queue, self._granted)
            raise

    async def __aexit__(self, *error: object) -> None:
        self._slots._give_back(self._owner, self._count, self._queue, self._granted)

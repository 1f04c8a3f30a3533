"""A small bounded cache of records that may be a moment old.

Invariant: nothing older than its time to live comes out, and at most `capacity` entries are held.
"""

from __future__ import annotations

import time
from collections import OrderedDict
from collections.abc import Callable
from typing import Generic, TypeVar

V = TypeVar("V")


class Recent(Generic[V]):
    """Values by key for `ttl` seconds, the least recently added dropped first."""

    def __init__(self, ttl: float, capacity: int, clock: Callable[[], float] = time.monotonic) -> None:
        self._ttl = ttl
        self._capacity = capacity
        self._clock = clock
        self._entries: OrderedDict[str, tuple[float, V]] = OrderedDict()

    def get(self, key: str) -> V | None:
        """The value put less than `ttl` seconds ago, else None."""
        entry = self._entries.get(key)
        if entry is None or self._clock() - entry[0] >= self._ttl:
            return None
        return entry[1]

    def put(self, key: str, value: V) -> None:
        self._entries[key] = (self._clock(), value)
        self._entries.move_to_end(key)
        while len(self._entries) > self._capacity:
            self._entries.popitem(last=False)

    def drop(self, key: str) -> None:
        self._entries.pop(key, None)

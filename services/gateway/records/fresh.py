"""Records, or what was done about them, that are known without another look for a while.

Invariant: at most so many are kept, and the oldest go first. Every sample asks several times: to ask is one
look into a dictionary.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Generic, TypeVar

V = TypeVar("V")


class Fresh(Generic[V]):
    """By name.

    Args:
        most: that are kept.
        seconds: how long each is known.
        clock: seconds, monotonic.
    """

    def __init__(self, most: int, seconds: float, clock: Callable[[], float] = time.monotonic) -> None:
        self._most = most
        self._seconds = seconds
        self._clock = clock
        # In the order in which they end.
        self._kept: dict[str, tuple[float, V]] = {}

    def get(self, name: str) -> V | None:
        """What is known; None: nothing, or no longer."""
        found = self._kept.get(name)
        return found[1] if found is not None and self._clock() < found[0] else None

    def put(self, name: str, value: V) -> None:
        """This is known from now on."""
        self._kept.pop(name, None)
        now = self._clock()
        self._kept[name] = now + self._seconds, value
        while len(self._kept) > self._most or next(iter(self._kept.values()))[0] <= now:
            del self._kept[next(iter(self._kept))]

    def drop(self, name: str) -> None:
        """Nothing is known any more."""
        self._kept.pop(name, None)

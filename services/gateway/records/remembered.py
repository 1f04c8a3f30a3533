"""Records that are remembered for a while, so that not every request reads them.

Invariant: nothing is remembered for longer than it was put there for, and no more than there is room for.
"""

from __future__ import annotations

from typing import Generic, TypeVar

from cachetools import TTLCache

V = TypeVar("V")


class Remembered(TTLCache[str, V], Generic[V]):
    """What is looked up by an id several times for every sample: cachetools' own `get` looks three times."""

    def get(self, key: str, default: V | None = None) -> V | None:  # type: ignore[override]
        try:
            return self[key]
        except KeyError:
            return default

"""Results that this process resolved futures with a moment ago, for who asks for them next.

Invariants: a result here is the one that its future has, and that never changes. Each is handed out once, and
not for long; who asks again, or later, asks Redis. What is kept is bounded in bytes and in time.
"""

from __future__ import annotations

import time
from collections import OrderedDict
from collections.abc import Callable

KEPT_S = 30.0
KEPT_BYTES = 8 << 20
LARGEST_BYTES = 64 << 10
"""Of one result. A larger one costs so much else that to read it again hardly counts."""

_OVERHEAD_BYTES = 256
"""Of an entry besides the result, so that small ones are bounded, too."""


class RecentResults:
    """Of one process.

    Args:
        clock: seconds, monotonic.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._kept: OrderedDict[str, tuple[float, bytes]] = OrderedDict()
        self._bytes = 0

    def keep(self, request_id: str, result: bytes) -> None:
        """A future was resolved with this."""
        if len(result) > LARGEST_BYTES:
            return
        self.take(request_id)
        now = self._clock()
        self._kept[request_id] = now, result
        self._bytes += _size(result)
        while self._bytes > KEPT_BYTES or next(iter(self._kept.values()))[0] <= now - KEPT_S:
            _, (_, oldest) = self._kept.popitem(last=False)
            self._bytes -= _size(oldest)

    def take(self, request_id: str) -> bytes | None:
        """What a future was resolved with, if that is kept; it is no longer."""
        found = self._kept.pop(request_id, None)
        if found is None:
            return None
        since, result = found
        self._bytes -= _size(result)
        return result if since > self._clock() - KEPT_S else None


def _size(result: bytes) -> int:
    return len(result) + _OVERHEAD_BYTES

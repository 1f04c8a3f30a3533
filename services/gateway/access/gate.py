"""What API keys may do at once, and how fast.

Invariants: no key holds more of a gateway's calls or downloads than is left for the others. What a key sends
is bounded over a while, so that none keeps a gateway busy with refusals of it; the bound is per gateway. Of a
key that has sent nothing for that while nothing is kept.
"""

from __future__ import annotations

import time
from collections import OrderedDict
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from services.common.contract.errors import LimitReached
from services.gateway.access.limits import OwnerLimits
from services.gateway.access.shares import Shares


class Gate:
    """Counts the calls of one gateway."""

    def __init__(self, limits: OwnerLimits, clock: Callable[[], float] = time.monotonic) -> None:
        self._limits = limits
        self._clock = clock
        self._calls = Shares(limits.calls)
        self._downloads = Shares(limits.downloads)
        # What each key has left and since when, in the order of when; who is not here has all of it.
        self._allowances: OrderedDict[str, tuple[float, float]] = OrderedDict()

    @property
    def calls(self) -> int:
        """Calls that are under way."""
        return self._calls.room - self._calls.free

    @contextmanager
    def call(self, owner: str) -> Iterator[None]:
        """Lets a call in, and counts it until the context ends.

        Raises:
            LimitReached: the key has too many under way, or sends too fast.
        """
        self._pace(owner)
        with _taken(self._calls, owner, "calls", "--max-calls"):
            yield

    @contextmanager
    def download(self, owner: str) -> Iterator[None]:
        """Counts a download until the context ends.

        Raises:
            LimitReached: the key has too many under way.
        """
        with _taken(self._downloads, owner, "downloads", "--max-downloads"):
            yield

    def _pace(self, owner: str) -> None:
        """Takes one from the owner's allowance, which fills up again with time."""
        rate, now = self._limits.requests_per_second, self._clock()
        most = float(rate * self._limits.burst_seconds)
        self._forget_full(now)
        left, at = self._allowances.get(owner, (most, now))
        left = min(most, left + (now - at) * rate)
        self._allowances[owner] = (left - 1 if left >= 1 else left, now)
        self._allowances.move_to_end(owner)
        if left < 1:
            raise LimitReached(
                f"this API key sends this gateway more than {rate} requests a second "
                "(--requests-per-second); send fewer",
                about={"limit": "--requests-per-second"},
            )

    def _forget_full(self, now: float) -> None:
        """An allowance is full again after a burst's time."""
        while self._allowances:
            owner, (_, at) = next(iter(self._allowances.items()))
            if now - at < self._limits.burst_seconds:
                return
            del self._allowances[owner]


@contextmanager
def _taken(room: Shares, owner: str, what: str, flag: str) -> Iterator[None]:
    if not room.take(owner, 1):
        raise LimitReached(
            f"this API key has {room.held_by(owner)} {what} under way at this gateway, which has {room.free} "
            f"of {room.room} left for all keys ({flag}); send this again when one has ended",
            about={"limit": flag},
        )
    try:
        yield
    finally:
        room.add(owner, -1)

"""What API keys may do at once, and how fast.

Invariants: no key holds more of a gateway's calls or downloads than is left for the others. What a key sends
is bounded over a while, so that none keeps a gateway busy with refusals of it; the bound is per gateway. Of a
key that has sent nothing for that while nothing is kept.
"""

from __future__ import annotations

import time
from collections import OrderedDict
from collections.abc import Callable

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

    def call(self, owner: str) -> Taken:
        """Lets a call in, and counts it until the context ends.

        Raises:
            LimitReached: the key has too many under way, or sends too fast.
        """
        self._pace(owner)
        return Taken(self._calls, owner, "calls", "--max-calls")

    def download(self, owner: str) -> Taken:
        """Counts a download until the context ends.

        Raises:
            LimitReached: the key has too many under way.
        """
        return Taken(self._downloads, owner, "downloads", "--max-downloads")

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


class Taken:
    """A context in which one of a room is an owner's."""

    def __init__(self, room: Shares, owner: str, what: str, flag: str) -> None:
        self._room = room
        self._owner = owner
        self._what = what
        self._flag = flag

    def __enter__(self) -> None:
        room = self._room
        if not room.take(self._owner, 1):
            raise LimitReached(
                f"this API key has {room.held_by(self._owner)} {self._what} under way at this gateway, which "
                f"has {room.free} of {room.room} left for all keys ({self._flag}); send this again when one "
                "has ended",
                about={"limit": self._flag},
            )

    def __exit__(self, *error: object) -> None:
        self._room.add(self._owner, -1)

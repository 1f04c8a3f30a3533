"""A room that API keys share: a pure account of how much of it each of them holds.

Invariant: by `take` a key never comes to hold more than is still free for others (the dynamic threshold of
shared-memory switches), so one key alone gets half of the room, n busy keys get 1/(n+1) each, and there is
always room left for a key that holds nothing.
"""

from __future__ import annotations

from collections import Counter

from services.common.telemetry import owner_class


class Shares:
    """So much of something (bytes, calls, sequences), and who holds it."""

    def __init__(self, room: int) -> None:
        self.room = room
        self._used = 0
        self._used_by: Counter[str] = Counter()

    @property
    def used(self) -> int:
        """What is held by all."""
        return self._used

    @property
    def free(self) -> int:
        """What nobody holds; negative when more was added than there is room for."""
        return self.room - self._used

    def held_by(self, owner: str) -> int:
        return self._used_by[owner]

    def class_of(self, owner: str) -> str:
        """The class of an owner, by what it holds (`owner_class`)."""
        return owner_class.class_of(owner, self._used_by, self._used)

    def by_class(self) -> dict[str, float]:
        """What the owners of each class hold."""
        return owner_class.by_class(self._used_by)

    def fits(self, owner: str, amount: int) -> bool:
        """Whether the owner may take so much now."""
        return self._used_by[owner] + amount <= self.free - amount

    def ever_fits(self, amount: int) -> bool:
        """Whether somebody may take so much when nobody holds anything."""
        return 2 * amount <= self.room

    def take(self, owner: str, amount: int) -> bool:
        """Takes so much for an owner, unless that is more than its share; whether it did."""
        fits = self.fits(owner, amount)
        if fits:
            self.add(owner, amount)
        return fits

    def add(self, owner: str, amount: int) -> None:
        """Counts what an owner holds in any case. What is less than nothing is given back."""
        self._used += amount
        self._used_by[owner] += amount
        if not self._used_by[owner]:
            del self._used_by[owner]

"""How many samples a gateway takes before it says "later": a pure account of what waits or runs.

Invariant: by `admit` an API key never comes to hold more than its share of the room (`access.shares`), so
there is always room left for a key that has nothing waiting.
"""

from __future__ import annotations

import msgspec

from services.common.contract.errors import LimitReached
from services.gateway.access.shares import Shares


class _Held(msgspec.Struct, frozen=True):
    owner: str
    sequences: int
    nbytes: int


class Admission:
    """Unfinished samples of one gateway.

    Args:
        sequences: sequences to generate.
        nbytes: bytes of the requests.
    """

    def __init__(self, sequences: int, nbytes: int) -> None:
        self._sequences = Shares(sequences)
        self._bytes = Shares(nbytes)
        self._held: dict[str, _Held] = {}

    def class_of(self, owner: str) -> str:
        """The class of an owner, by its sequences (`owner_class`)."""
        return self._sequences.class_of(owner)

    def by_class(self) -> dict[str, float]:
        """Sequences of the owners of each class."""
        return self._sequences.by_class()

    @property
    def nbytes(self) -> int:
        """Bytes of the requests of samples that wait or run."""
        return self._bytes.used

    @property
    def is_full(self) -> bool:
        """Whether nothing more should be taken over from others."""
        return self._sequences.free <= 0 or self._bytes.free <= 0

    def check(self, owner: str) -> None:
        """Refuses what could not be admitted whatever its size.

        Raises:
            LimitReached: too much of this key waits.
        """
        self._check(owner, 1, 1)

    def admit(self, request_id: str, owner: str, sequences: int, nbytes: int) -> bool:
        """Counts a sample until `release`; False when it is counted already.

        Raises:
            LimitReached: too much of this key waits. Nothing is counted.
        """
        if request_id in self._held:
            return False
        self._check(owner, sequences, nbytes)
        self.hold(request_id, owner, sequences, nbytes)
        return True

    def holds(self, request_id: str, owner: str) -> bool:
        """Whether a sample is counted as this owner's."""
        held = self._held.get(request_id)
        return held is not None and held.owner == owner

    def hold(self, request_id: str, owner: str, sequences: int, nbytes: int) -> None:
        """Counts a sample that was accepted elsewhere or earlier, however much there is, once."""
        self.release(request_id)
        self._held[request_id] = _Held(owner, sequences, nbytes)
        self._count(self._held[request_id], 1)

    def release(self, request_id: str) -> None:
        """The sample is done, or with another gateway. Repeating changes nothing."""
        held = self._held.pop(request_id, None)
        if held is not None:
            self._count(held, -1)

    def _check(self, owner: str, sequences: int, nbytes: int) -> None:
        rooms = (
            ("sequences", "--waiting-sequences", self._sequences, sequences),
            ("bytes", "--memory-mib", self._bytes, nbytes),
        )
        for what, flag, room, wanted in rooms:
            if not room.fits(owner, wanted):
                raise LimitReached(
                    f"{room.held_by(owner)} {what} of this API key's samples wait on this gateway, which has "
                    f"{room.free} left for all keys ({flag}); send this again later",
                    about={"limit": flag},
                )

    def _count(self, held: _Held, sign: int) -> None:
        self._sequences.add(held.owner, sign * held.sequences)
        self._bytes.add(held.owner, sign * held.nbytes)

"""Room on the first rank's host for copies of models that leave the trainer: to samplers, or to a storage.

Invariants: a copy has its room from before it is taken until it was sent or written, or given up, and those
of one way never take more than there is; one that takes more than all of it goes alone. Who comes first goes
first, however small the next ones are. What hangs on its way to a storage keeps no room from what goes to
samplers. Durable snapshots take none: two at a time are written, which wait for nobody here.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import AsyncIterator, Callable, Iterable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field

from services.common.contract.errors import Overloaded
from services.trainer.compute.data import LoraSpec

WAIT_S = 1800.0
"""As long as a transfer may stand still: then it is given up, and its copy goes."""

_MIB = 2**20


@dataclass(eq=False)
class _Place:
    """Of a copy of so many bytes; `has_room` when it was let in, also where nobody waits any more."""

    nbytes: int
    has_room: asyncio.Event = field(default_factory=asyncio.Event)


def let_in(waiting: Iterable[int], used: int, most: int) -> int:
    """How many of those that wait have room now, from the first one on. Pure.

    Args:
        waiting: bytes of each, in order.
        used: bytes that are taken, of `most`.
    """
    count = 0
    for nbytes in waiting:
        if used and used + nbytes > most:
            break
        used, count = used + nbytes, count + 1
    return count


class Way:
    """Copies that go the same way, in order. Of each model there is one at a time, so no more wait than there
    are models.

    Args:
        most: bytes that they may take.
    """

    def __init__(self, most: int) -> None:
        self._most = most
        self._waiting: deque[_Place] = deque()
        self.used = 0

    @asynccontextmanager
    async def hold(self, nbytes: int) -> AsyncIterator[bool]:
        """Holds room for a copy; whether others had to leave first.

        Raises:
            Overloaded: they did not for WAIT_S.
        """
        place = _Place(nbytes)
        self._waiting.append(place)
        self._let_in()
        waits = not place.has_room.is_set()
        try:
            await self._comes(place)
            yield waits
        finally:
            self._leave(place)

    async def _comes(self, place: _Place) -> None:
        try:
            async with asyncio.timeout(WAIT_S):
                await place.has_room.wait()
        except TimeoutError as error:
            raise self._full(place.nbytes) from error

    def _let_in(self) -> None:
        for _ in range(let_in((place.nbytes for place in self._waiting), self.used, self._most)):
            place = self._waiting.popleft()
            self.used += place.nbytes
            place.has_room.set()

    def _leave(self, place: _Place) -> None:
        """Whoever held room, or waited for it, does not any more."""
        if place.has_room.is_set():
            self.used -= place.nbytes
        else:
            self._waiting.remove(place)
        self._let_in()

    def _full(self, nbytes: int) -> Overloaded:
        return Overloaded(
            f"a copy of the model takes {nbytes / _MIB:.0f} MiB of the trainer's host, and those of others, "
            f"which may take {self._most / _MIB:.0f}, did not leave it for {WAIT_S / 60:.0f} minutes; "
            "send the request again later, or have the operator look whether the storage is slow"
        )


class CopyRoom:
    """What copies may take of the host.

    Args:
        most: bytes for each of both ways.
        bytes_of: what a copy of an adapter, or without one of a model that trains all weights, takes with its
            moments or without; 0: it is never on the host as a whole.
    """

    def __init__(self, most: int, bytes_of: Callable[[LoraSpec | None, bool], int]) -> None:
        self.to_samplers, self.to_storage = Way(most), Way(most)
        self.bytes_of = bytes_of

    def used(self) -> dict[str, float]:
        """Bytes that copies have, by where they go."""
        return {"samplers": self.to_samplers.used, "storage": self.to_storage.used}

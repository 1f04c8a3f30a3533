"""Room on the first rank's host for models on their way out of the trainer, or into it.

Copies leave it, to samplers or to a storage; states come, from a checkpoint or a durable snapshot.

Invariants: a copy has its room from before it is taken until it was sent or written, or given up; a state has
it from before its files are read until the engine has it, or it is given up. Those of one way never take more
than there is; one that takes more than all of it goes alone. Who comes first goes first, however small the
next ones are. What hangs on its way to or from a storage keeps no room from what goes to samplers, nor from
models that come back. Durable snapshots take none when they are written: two at a time are, which wait for
nobody here.
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
    """Copies, or states, that go the same way, in order. Of each model there is one at a time, so no more
    wait than there are models.

    Args:
        most: bytes that they may take.
        what: names one of them, for the beginning of a sentence.
    """

    def __init__(self, most: int, what: str) -> None:
        self._most = most
        self._what = what
        self._waiting: deque[_Place] = deque()
        self.used = 0

    @asynccontextmanager
    async def hold(self, nbytes: int) -> AsyncIterator[bool]:
        """Holds room for one; whether others had to leave first. One that takes none waits for nobody.

        Raises:
            Overloaded: they did not for WAIT_S.
        """
        if not nbytes:
            yield False
            return
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
            f"{self._what} takes {nbytes / _MIB:.0f} MiB of the trainer's host, and those of others, "
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
        what = "a copy of the model"
        self.to_samplers, self.to_storage = Way(most, what), Way(most, what)
        self.bytes_of = bytes_of

    def used(self) -> dict[str, float]:
        """Bytes that copies have, by where they go."""
        return {"samplers": self.to_samplers.used, "storage": self.to_storage.used}


class LoadRoom:
    """What states that are loaded may take of the host.

    Args:
        most: bytes for each of both ways.
        bytes_of: what the state of an adapter takes while it is read, or of a model that trains all weights;
            0: it is never on the host as a whole.
    """

    def __init__(self, most: int, bytes_of: Callable[[LoraSpec | None], int]) -> None:
        what = "the saved state"
        self.of_checkpoints, self.of_snapshots = Way(most, what), Way(most, what)
        self.bytes_of = bytes_of

    def used(self) -> dict[str, float]:
        """Bytes that states have, by what they are loaded from."""
        return {"checkpoint": self.of_checkpoints.used, "snapshot": self.of_snapshots.used}

"""How many adapters stay on the trainer, by the memory that they take.

Of every rank an adapter takes what computes and its gradient, and an equal part of what the optimizer keeps.

Invariant: what is in memory, and what is being made, never takes more than the world has for adapters.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from typing import TypeVar

from services.common.contract.errors import Internal, InvalidRequest, Overloaded
from services.trainer.compute.data import LoraSpec
from services.trainer.compute.memory.failures import OUT_OF_MEMORY, NoMemory
from services.trainer.execution.host_room import HostRoom, Way
from services.trainer.execution.resident_models import Model
from services.trainer.execution.room import IDLE_S, Leave, Room, deadline

_MIB = 2**20
_HOST_IDLE_S = 0.5
"""The same as `IDLE_S` of one that only goes to the host, from where it is back soon."""

_LEAVING_S = 0.05
_TRY_AGAIN_S = 1.0
"""A device that has no memory is asked again after this: ranks empty their caches each time."""

_ADVICE = "send it again later, or have the operator give adapters less of the memory (--memory-gib)"

T = TypeVar("T")


class AdapterRoom:
    """Makes room for adapters.

    Args:
        models: the trainer's models by id.
        most: bytes that adapters may take of each rank.
        bytes_of: what an adapter takes; raises InvalidRequest when there can be none of that shape.
        host: where idle ones go first.
        save: brings a model's durable snapshot up to date; whether it is, and the model is idle and still
            here.
        drop: takes a model out of `models` and off the engine.
    """

    def __init__(
        self,
        models: dict[str, Model],
        most: int,
        bytes_of: Callable[[LoraSpec], int],
        host: HostRoom,
        save: Leave,
        drop: Callable[[Model], Awaitable[None]],
    ) -> None:
        idle_s = _HOST_IDLE_S if host.most else IDLE_S
        self._room = Room(models, most, _taken_by, self._leave, idle_s)
        self._bytes_of = bytes_of
        self._save = save
        self._drop = drop
        self.host = host

    @property
    def most(self) -> int:
        """Bytes that adapters may take of each rank."""
        return self._room.most

    def used(self) -> int:
        """Bytes of each rank that adapters take at present."""
        return self._room.used()

    @asynccontextmanager
    async def room(self, model_id: str, spec: LoraSpec, *, had_before: bool = False) -> AsyncIterator[int]:
        """Holds room for an adapter that is made within the context; its bytes, which its model is to keep.

        Args:
            had_before: it had room on this trainer or another; now it may take all that there is.

        Raises:
            InvalidRequest: the base model has no such adapter, or it takes more than there ever is.
            Overloaded: the others stayed in use for a minute.
        """
        size = self._bytes_of(spec)
        if had_before:
            size = min(size, self.most)
        if size > self.most:
            raise InvalidRequest(
                f"the adapter takes {size / _MIB:.0f} MiB of memory with its gradient and moments, and this "
                f"trainer has {self.most / _MIB:.0f} MiB for adapters; use a smaller rank, or have the "
                "operator give the trainer more memory (--memory-gib)",
                "beyond_trainer_memory",
            )
        async with self._room.hold(model_id, size, lambda: self._all_in_use(size)):
            yield size

    async def bring_back(self, model: Model, wanted: Callable[[], bool]) -> None:
        """Has an adapter come back from the host, which is held meanwhile. Others make room for it.

        Args:
            wanted: whether it still is to come back; where not, or where it is on the device after all,
                nothing more is done.

        Raises:
            Overloaded: the others stayed in use for a minute.
            Internal: a rank's device has no memory for it; the others stayed in use, or there are none.
        """
        size, until = model.adapter_bytes, deadline()

        def is_away() -> bool:
            return model.host_bytes > 0 and wanted()

        def waits() -> bool:
            return is_away() and time.monotonic() < until

        # Its room on the device may be its own yet.
        while model.leaving:  # noqa: ASYNC110
            await asyncio.sleep(_LEAVING_S)
        async with self._room.hold(model.model_id, size, lambda: self._all_in_use(size), is_away) as held:
            while held and is_away() and not await self.host.bring_back(model):
                if await self._room.make_way(waits):
                    continue
                others = self.used() - size
                if others <= 0 or time.monotonic() >= until:
                    raise _out_of_memory(size, others)
                await asyncio.sleep(_TRY_AGAIN_S)

    async def with_memory(self, mine: int, attempt: Callable[[], Awaitable[T]], *, patient: bool = True) -> T:
        """What an attempt comes to, for whose memory there is room as that is counted. Where a rank's device
        has none all the same, others leave it that are idle, one after the other.

        Args:
            mine: bytes of the room that the model has for which it is made.
            attempt: changes nothing where it finds no memory.
            patient: waits for others to become idle, a minute at most.

        Raises:
            NoMemory: it found none, and no other leaves.
        """
        until = deadline()
        while True:
            try:
                return await attempt()
            except NoMemory as error:
                lack = error.message
            if await self._room.make_way(lambda: time.monotonic() < until):
                continue
            others = self.used() - mine
            if others <= 0 or not patient or time.monotonic() >= until:
                raise NoMemory(f"{lack}, and no other adapter could leave the device; {_ADVICE}")
            await asyncio.sleep(_TRY_AGAIN_S)

    async def _leave(self, model: Model, wanted: Callable[[], bool]) -> bool:
        """Whether an idle adapter is off the device."""
        if not await self._save(model, wanted):
            return False
        if model.host_bytes:
            # It made room for somebody else meanwhile.
            return True
        now = time.monotonic()
        way = await self.host.take_in(model, now) if self.host.most else Way.DISK
        if way is Way.DISK:
            await self._drop(model)
        return way is not Way.STAY

    def _all_in_use(self, size: int) -> Overloaded:
        return Overloaded(
            f"the adapter takes {size / _MIB:.0f} MiB, and of the {self.most / _MIB:.0f} MiB that "
            f"this trainer has for adapters {self.used() / _MIB:.0f} MiB are in use; unload a model, "
            "try again later, or have the operator give the trainer more memory (--memory-gib)",
            "adapters_in_use",
        )


def _out_of_memory(size: int, others: int) -> Internal:
    stayed = (
        f"while the others, of {others / _MIB:.0f} MiB, stayed for a minute"
        if others > 0
        else "with no other there"
    )
    return Internal(
        f"out of device memory on an adapter of {size / _MIB:.0f} MiB that comes back from the host, "
        f"{stayed}; {_ADVICE}",
        OUT_OF_MEMORY,
    )


def _taken_by(model: Model) -> int:
    return 0 if model.host_bytes and not model.leaving else model.adapter_bytes

"""How many adapters stay on the trainer, by the memory that they take.

Of every rank an adapter takes what computes and its gradient, and an equal part of what the optimizer keeps.

Invariant: what is in memory, and what is being made, never takes more than the world has for adapters.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager

from services.common.contract.errors import InvalidRequest, Overloaded
from services.trainer.compute.data import LoraSpec
from services.trainer.execution.resident_models import Model
from services.trainer.execution.room import Room

_MIB = 2**20


class AdapterRoom:
    """Makes room for adapters.

    Args:
        models: the trainer's models by id.
        most: bytes that adapters may take of each rank.
        bytes_of: what an adapter takes; raises InvalidRequest when there can be none of that shape.
        save: brings a model's durable snapshot up to date.
        drop: takes a model out of `models` and off the engine.
    """

    def __init__(
        self,
        models: dict[str, Model],
        most: int,
        bytes_of: Callable[[LoraSpec], int],
        save: Callable[[Model], Awaitable[None]],
        drop: Callable[[Model], Awaitable[None]],
    ) -> None:
        self._room = Room(models, most, lambda model: model.adapter_bytes, save, drop)
        self._bytes_of = bytes_of

    @property
    def most(self) -> int:
        """Bytes that adapters may take of each rank."""
        return self._room.most

    def used(self) -> int:
        """Bytes of each rank that adapters take at present."""
        return self._room.used()

    @asynccontextmanager
    async def room(self, spec: LoraSpec, *, had_before: bool = False) -> AsyncIterator[int]:
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
        async with self._room.hold(size, lambda: self._all_in_use(size)):
            yield size

    def _all_in_use(self, size: int) -> Overloaded:
        return Overloaded(
            f"the adapter takes {size / _MIB:.0f} MiB, and of the {self.most / _MIB:.0f} MiB that "
            f"this trainer has for adapters {self.used() / _MIB:.0f} MiB are in use; unload a model, "
            "try again later, or have the operator give the trainer more memory (--memory-gib)",
            "adapters_in_use",
        )

"""Checkpoints and exports on their way to and from their storage, in threads of their own.

Invariant: a storage that hangs takes no thread from durable snapshots or anything else of the trainer.
Whoever asks for something when it hangs already is told that it is away within a minute, before anything of a
model is copied for it, or read of it. What it hangs in the middle of is given up after half an hour at a
standstill; what goes on has as long as a terabyte may take.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import TypeVar

from services.common.contract import ids
from services.common.contract.errors import StorageAway, Unavailable
from services.common.process.pools import LOOKS, TRANSFERS, Pool
from services.trainer.files.checkpoints import CheckpointStore, Found, SavedState

T = TypeVar("T")


class Transfers:
    """A `CheckpointStore` for the event loop."""

    def __init__(self, checkpoints: CheckpointStore) -> None:
        self._checkpoints = checkpoints

    async def answers(self, model_id: str, checkpoint_id: str) -> None:
        """Returns when the storage has said what it has under a name.

        Raises:
            StorageAway: it does not.
        """
        await _run(LOOKS, model_id, checkpoint_id, lambda: self._checkpoints.look(model_id, checkpoint_id))

    async def write(self, model_id: str, checkpoint_id: str, work: Callable[[CheckpointStore], T]) -> T:
        """What saving or exporting something comes to, which raises as these do. For one that `answers`.

        Raises:
            StorageAway: besides, it took too long.
        """
        return await _run(TRANSFERS, model_id, checkpoint_id, lambda: work(self._checkpoints))

    async def find(self, model_id: str, checkpoint_id: str, version: int) -> Found:
        """As `CheckpointStore.find`."""
        await self.answers(model_id, checkpoint_id)
        find = partial(self._checkpoints.find, model_id, checkpoint_id, version)
        return await _run(LOOKS, model_id, checkpoint_id, find)

    async def load(self, model_id: str, checkpoint_id: str, version: int) -> SavedState:
        """As `CheckpointStore.load`. For one that `answers`."""
        load = partial(self._checkpoints.load, model_id, checkpoint_id, version)
        # What comes when it was given up lies in memory, or on a disk of this machine.
        return await _run(TRANSFERS, model_id, checkpoint_id, load, SavedState.release)


async def _run(
    pool: Pool,
    model_id: str,
    checkpoint_id: str,
    work: Callable[[], T],
    late: Callable[[T], object] | None = None,
) -> T:
    try:
        return await pool.run(work, late=late)
    except Unavailable as error:
        path = ids.tinker_path(model_id, checkpoint_id)
        raise StorageAway(f"the storage of checkpoint {path} hangs: {error.message}") from error

"""Checkpoints and exports on their way to and from their storage, in threads of their own.

Invariant: a storage that hangs takes no thread from durable snapshots or anything else of the trainer.
Whoever asks for something when it hangs already is told that it is away within a minute, before anything of a
model is copied for it. What it hangs in the middle of waits for as long as a terabyte may take.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

from services.common.contract import ids
from services.common.contract.errors import StorageAway, Unavailable
from services.common.process.pools import LOOKS, TRANSFERS, Pool
from services.trainer.compute.data import ModelState, ShardedState
from services.trainer.files.checkpoints import CheckpointStore, Files, SavedState

T = TypeVar("T")


class Transfers:
    """As `CheckpointStore`, for the event loop."""

    def __init__(self, checkpoints: CheckpointStore) -> None:
        self._checkpoints = checkpoints

    async def answers(self, model_id: str, checkpoint_id: str) -> None:
        """Returns when the storage has said what it has under a name.

        Raises:
            StorageAway: it does not.
        """
        await _run(LOOKS, model_id, checkpoint_id, lambda: self._checkpoints.look(model_id, checkpoint_id))

    async def save(
        self,
        model_id: str,
        seq_id: int,
        checkpoint_id: str,
        overwrite: bool,
        state: ModelState | ShardedState,
    ) -> int:
        """As `CheckpointStore.save`."""

        def save() -> int:
            return self._checkpoints.save(model_id, seq_id, checkpoint_id, overwrite, state)

        return await _run(TRANSFERS, model_id, checkpoint_id, save)

    async def export(self, model_id: str, seq_id: int, checkpoint_id: str, files: Files) -> int:
        """As `CheckpointStore.export`."""

        def export() -> int:
            return self._checkpoints.export(model_id, seq_id, checkpoint_id, files)

        return await _run(TRANSFERS, model_id, checkpoint_id, export)

    async def load(self, model_id: str, checkpoint_id: str, version: int = 0) -> SavedState:
        """As `CheckpointStore.load`."""
        await self.answers(model_id, checkpoint_id)

        def load() -> SavedState:
            return self._checkpoints.load(model_id, checkpoint_id, version)

        return await _run(TRANSFERS, model_id, checkpoint_id, load)


async def _run(pool: Pool, model_id: str, checkpoint_id: str, work: Callable[[], T]) -> T:
    try:
        return await pool.run(work)
    except Unavailable as error:
        path = ids.tinker_path(model_id, checkpoint_id)
        raise StorageAway(f"the storage of checkpoint {path} hangs: {error.message}") from error

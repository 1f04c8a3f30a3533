"""Copies of models' states, to be written down.

Invariant: a state is the one at the moment of asking, whatever the model does meanwhile; files that are made
for it are below this trainer's own staging directory until it is released.
"""

from __future__ import annotations

import asyncio
import shutil
import tempfile
from pathlib import Path

from services.common.storage.directory import check_reserve
from services.trainer.compute.data import ModelState, ShardedState
from services.trainer.execution.resident_models import Model
from services.trainer.files.base import Base
from services.trainer.files.checkpoints import Meta, SavedState
from services.trainer.files.volume import Volume
from services.trainer.world.world import World


class States:
    """Takes states of models.

    Args:
        volume: of the staging directory.
        staging: this trainer's, where its ranks write and read states; what a predecessor left goes with
            `clean`.
    """

    def __init__(self, world: World, base: Base, volume: Volume, staging: Path) -> None:
        self._world = world
        self._base = base
        self._volume = volume
        self._staging = staging

    async def clean(self) -> None:
        """Deletes what a predecessor left behind."""
        await asyncio.to_thread(shutil.rmtree, self._staging, ignore_errors=True)

    async def take(self, model: Model, *, leave_reserve: bool = False) -> SavedState:
        """The model's state with its moments, which the caller releases; `meta.seq_id` is the last step, load
        or creation.

        Args:
            leave_reserve: as of `publish_directory`.

        Raises:
            ModelNotResident: the engine does not have the model.
            StorageAway: it would be written below a volume that is not there any more.
            OSError: it could not be written.
        """
        state: ModelState | ShardedState
        if model.is_full:
            await self._volume.answers()
            directory = await asyncio.to_thread(self._directory, leave_reserve)
            try:
                seq_id, step = await self._world.write_state(model.model_id, str(directory))
            except BaseException:
                await asyncio.to_thread(shutil.rmtree, directory, ignore_errors=True)
                raise
            state = ShardedState(str(directory), step)
        else:
            seq_id, state = await self._world.state(model.model_id)
        meta = Meta(self._base.name, self._base.weights, model.model_id, seq_id, state.step, state.lora)
        return SavedState(meta, state)

    def _directory(self, leave_reserve: bool) -> Path:
        self._staging.mkdir(parents=True, exist_ok=True)
        if leave_reserve:
            check_reserve(self._staging)
        return Path(tempfile.mkdtemp(dir=self._staging))

"""What each kind of barrier operation does: create, step, save, load, publish, export, unload.

Invariant: when a barrier raises, the model is as it was (a creation leaves no model behind). Files are
read and written in threads beside the engine, so one tenant's disk never stops another's training.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Mapping

from services.common import failpoints, roles
from services.common.age import encrypted
from services.common.errors import Internal, InvalidRequest, ModelNotResident, TinsmithError
from services.common.storage.base import Writer
from services.trainer import convert
from services.trainer.checkpoints import CheckpointStore, Files
from services.trainer.commands import CreateModel, DropModel, LoadState, OptimStep
from services.trainer.convert import Create, Export, Load, Publish, Save, Step, Unload
from services.trainer.export_format import Base, weight_files
from services.trainer.models import Model, Operation, OperationResult, Rejected
from services.trainer.plan import ModelState
from services.trainer.publisher import Publisher
from services.trainer.world import World

Release = Callable[[], None]
"""Tells that the operation has taken effect and the model's next one may run; its result follows."""


class Barriers:
    """Executes one barrier operation at a time per model.

    Args:
        changed: told the id of a model whose state is new and should become durable.
        durable: operation in a model's durable snapshot, None when it has none.
    """

    def __init__(
        self,
        world: World,
        checkpoints: CheckpointStore,
        publisher: Publisher,
        base: Base,
        changed: Callable[[str], None],
        durable: Callable[[str], Awaitable[int | None]],
    ) -> None:
        self._world = world
        self._checkpoints = checkpoints
        self._publisher = publisher
        self._base = base
        self._changed = changed
        self._durable = durable

    async def run(self, model: Model, operation: Operation, release: Release) -> OperationResult:
        """The result of an operation.

        Raises:
            ModelNotResident: it is to be restored before it can be created.
            TinsmithError, OSError: the operation failed.
        """
        work, seq_id = operation.work, operation.seq_id
        if isinstance(work, Rejected) and model.lora is None:
            model.broken = work.error
        match work:
            case Rejected():
                raise work.error
            case Create():
                return await self._create(model, seq_id, work)
            case Step():
                return await self._step(model, seq_id, work)
            case Save():
                return await self._save(model, seq_id, work)
            case Load():
                return await self._load(model, seq_id, work)
            case Publish():
                return await self._publish(model, seq_id, work, release)
            case Export():
                return await self._export(model, seq_id, work, release)
            case Unload():
                await self._world.call(DropModel(model.model_id))
                model.lora = None
                return convert.unloaded()
            case _:
                raise TypeError(f"{type(work).__name__} is not a barrier")

    async def _create(self, model: Model, seq_id: int, work: Create) -> OperationResult:
        if model.lora is not None:
            raise InvalidRequest(f"model {model.model_id} exists already")
        if await self._durable(model.model_id) is not None:
            # Made afresh it would lack everything up to its snapshot, which the journal no longer has.
            raise ModelNotResident(f"model {model.model_id} exists; restore it")
        lora, saved, optimizer = work.lora, None, False
        try:
            if work.from_state is not None:
                load, optimizer = work.from_state, work.from_state.optimizer
                found = await asyncio.to_thread(
                    self._checkpoints.load, load.source_model_id, load.checkpoint_id, load.version
                )
                lora, saved = found.meta.lora, found.state
            assert lora is not None
            await self._world.call(CreateModel(model.model_id, seq_id, lora, saved, optimizer))
        except (TinsmithError, OSError) as error:
            model.broken = error if isinstance(error, TinsmithError) else Internal(str(error))
            raise
        model.lora = lora
        self._changed(model.model_id)
        return convert.created(lora)

    async def _step(self, model: Model, seq_id: int, work: Step) -> OperationResult:
        try:
            metrics = await self._world.call(OptimStep(model.model_id, seq_id, work.adam))
        except Internal as error:
            # Weights may be half changed. A restart brings the model back from its durable snapshot.
            raise RuntimeError(f"optim_step {model.model_id}:{seq_id}: {error}") from error
        finally:
            # A step that was refused has dropped the gradient: that too is to be kept.
            self._changed(model.model_id)
        await failpoints.reach("trainer.before_step_reply")
        return convert.stepped(metrics)

    async def _save(self, model: Model, seq_id: int, work: Save) -> OperationResult:
        _, state = await self._world.state(model.model_id)
        size = await asyncio.to_thread(
            self._checkpoints.save, model.model_id, seq_id, work.checkpoint_id, work.overwrite, state
        )
        return convert.saved(model.model_id, work, size)

    async def _load(self, model: Model, seq_id: int, work: Load) -> OperationResult:
        found = await asyncio.to_thread(
            self._checkpoints.load, work.source_model_id, work.checkpoint_id, work.version
        )
        await self._world.call(LoadState(model.model_id, seq_id, found.state, work.optimizer))
        self._changed(model.model_id)
        return convert.loaded(work)

    async def _publish(self, model: Model, seq_id: int, work: Publish, release: Release) -> OperationResult:
        _, state = await self._world.state(model.model_id, optimizer=False)
        roles.check_samples(state.lora.role)
        model.publishing = True
        release()
        try:
            published = await self._publisher.publish(model.model_id, seq_id, state.lora, state.adapter)
        finally:
            model.publishing = False
        return convert.published(model.model_id, seq_id, work, published.wire_bytes, published.receivers)

    async def _export(self, model: Model, seq_id: int, work: Export, release: Release) -> OperationResult:
        _, state = await self._world.state(model.model_id, optimizer=False)
        roles.check_exports(state.lora.role)
        model.publishing = True
        release()
        try:
            size = await asyncio.to_thread(
                self._checkpoints.export,
                model.model_id,
                seq_id,
                work.checkpoint_id,
                self._export_files(state, work),
            )
        finally:
            model.publishing = False
        return convert.exported(model.model_id, work, size)

    def _export_files(self, state: ModelState, work: Export) -> Files:
        def make() -> Mapping[str, Writer]:
            files = weight_files(self._base, state.lora, state.adapter)
            return encrypted(files, work.age_recipients) if work.age_recipients else files

        return make

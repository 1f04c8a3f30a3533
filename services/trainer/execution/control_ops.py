"""What each kind of control operation does: create, step, save, load, publish, export, unload.

Invariant: when one raises, the model is as it was (a creation leaves no model behind). Files are read and
written in threads beside the engine, so one tenant's disk never stops another's training.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from contextlib import AbstractAsyncContextManager, AsyncExitStack, asynccontextmanager
from functools import partial

from redis.exceptions import RedisError

from services.common.contract import roles
from services.common.contract.errors import (
    Internal,
    InvalidRequest,
    ModelNotResident,
    StorageAway,
    TinsmithError,
)
from services.common.process import failpoints
from services.common.storage.base import Writer
from services.common.storage.encryption import encrypted
from services.trainer import convert
from services.trainer.compute.data import ModelState
from services.trainer.compute.memory.failures import OUT_OF_MEMORY, NoMemory, is_out_of_memory
from services.trainer.convert import Create, Export, Load, Publish, Save, Step, Unload
from services.trainer.execution.adapter_room import AdapterRoom
from services.trainer.execution.full_models import FullModels, snapshot_due
from services.trainer.execution.resident_models import Model, Operation, OperationResult, Rejected
from services.trainer.execution.states import States
from services.trainer.files.base import Base
from services.trainer.files.checkpoints import CheckpointStore, Files, Found, SavedState
from services.trainer.files.copy_room import CopyRoom, LoadRoom, Way
from services.trainer.files.export_format import weight_files
from services.trainer.files.transfers import Transfers
from services.trainer.publish.publisher import Publisher
from services.trainer.world.commands import CreateModel, DropModel, LoadState, ModelStep
from services.trainer.world.world import World

Release = Callable[[], None]
"""Tells that the operation has taken effect and the model's next one may run; its result follows."""


class ControlOps:
    """Executes one control operation at a time per model.

    Args:
        changed: told the id of a model whose state is new and should become durable.
        durable: operation in a model's durable snapshot, None when it has none.
        full: makes room for models that train all weights, `adapters` for adapters, `copies` on the host
            for what is published, saved or exported of either, `loads` for what is loaded.
        snapshot_steps: optimizer steps between durable snapshots of a full model.
    """

    def __init__(
        self,
        world: World,
        checkpoints: CheckpointStore,
        publisher: Publisher,
        base: Base,
        states: States,
        changed: Callable[[str], None],
        durable: Callable[[str], Awaitable[int | None]],
        full: FullModels,
        adapters: AdapterRoom,
        copies: CopyRoom,
        loads: LoadRoom,
        snapshot_steps: int,
    ) -> None:
        self._world = world
        self._transfers = Transfers(checkpoints)
        self._publisher = publisher
        self._base = base
        self._states = states
        self._changed = changed
        self._durable = durable
        self._full = full
        self._adapters = adapters
        self._copies = copies
        self._loads = loads
        self._snapshot_steps = snapshot_steps

    async def run(self, model: Model, operation: Operation, release: Release) -> OperationResult:
        """The result of an operation.

        Raises:
            ModelNotResident: it is to be restored before it can be created, or nobody knows whether it is.
            StorageAway: what it loads cannot be read at present, or what it saves not be written. Nothing was
                done, unless it was released.
            TinsmithError, OSError: the operation failed.
        """
        try:
            return await self._run(model, operation, release)
        except (RuntimeError, MemoryError) as error:
            # Of files that are read or written beside the engine: what that lacks memory for it says itself.
            if not is_out_of_memory(error):
                raise
            failed = Internal(f"the trainer's host has no memory for it: {error or 'refused'}", OUT_OF_MEMORY)
            if not model.created:
                model.broken = failed
            raise failed from error

    async def _run(self, model: Model, operation: Operation, release: Release) -> OperationResult:
        work, seq_id = operation.work, operation.seq_id
        if isinstance(work, Rejected) and not model.created:
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
                model.created = False
                return convert.unloaded()
            case _:
                raise TypeError(f"{type(work).__name__} is no control operation")

    async def bring_back(self, model: Model, wanted: Callable[[], bool]) -> None:
        """Has a model come back from the host; as `AdapterRoom.bring_back`."""
        await self._adapters.bring_back(model, wanted)

    async def _create(self, model: Model, seq_id: int, work: Create) -> OperationResult:
        if model.created:
            raise InvalidRequest(f"model {model.model_id} exists already")
        try:
            exists = await self._durable(model.model_id) is not None
        except (RedisError, OSError) as error:
            # Whoever sent it looks for it, as long as that takes, and sends it again.
            raise ModelNotResident(f"whether model {model.model_id} exists is not known: {error}") from error
        if exists:
            # Made afresh it would lack everything up to its snapshot, which the journal no longer has.
            raise ModelNotResident(f"model {model.model_id} exists; restore it")
        saved, optimizer = None, False
        try:
            found = None if work.from_state is None else await self._find(work.from_state)
            lora, name = found.meta.lora if found else work.lora, model.model_id
            async with AsyncExitStack() as here:
                # The engine's room before the host's, as every other load has it by then: who waited for it
                # with room on the host would keep that from those who are to leave.
                room = self._full.room(name) if lora is None else self._adapters.room(name, lora)
                size = await here.enter_async_context(room)
                if work.from_state is not None and found is not None:
                    loaded = await here.enter_async_context(self._loaded(work.from_state, found))
                    saved, optimizer = loaded.state, work.from_state.optimizer
                create = CreateModel(model.model_id, seq_id, lora, saved, optimizer)
                await self._adapters.with_memory(size or 0, lambda: self._world.call(create))
                model.created, model.lora, model.adapter_bytes = True, lora, size or 0
        except StorageAway:
            raise
        except (TinsmithError, OSError) as error:
            model.broken = error if isinstance(error, TinsmithError) else Internal(str(error))
            raise
        self._replaced(model)
        return convert.created(lora)

    async def _step(self, model: Model, seq_id: int, work: Step) -> OperationResult:
        step, changed = ModelStep(model.model_id, seq_id, work.adam), True
        try:
            metrics = await self._adapters.with_memory(model.adapter_bytes, lambda: self._world.step(step))
        except NoMemory:
            changed = False
            raise
        finally:
            # A step that was refused has dropped the gradient: that too is to be kept.
            model.unsaved_steps += changed
            if changed and snapshot_due(model, self._snapshot_steps):
                self._replaced(model)
        await failpoints.reach("trainer.before_step_reply")
        return convert.stepped(metrics)

    async def _save(self, model: Model, seq_id: int, work: Save) -> OperationResult:
        model_id, checkpoint_id = model.model_id, work.checkpoint_id
        async with self._copy_to_storage(model, checkpoint_id, moments=True):
            taken = await self._states.take(model, leave_reserve=True)
            try:
                size = await self._transfers.write(
                    model_id,
                    checkpoint_id,
                    lambda store: store.save(model_id, seq_id, checkpoint_id, work.overwrite, taken.state),
                )
            finally:
                await asyncio.to_thread(taken.release)
        return convert.saved(model_id, work, size)

    async def _load(self, model: Model, seq_id: int, work: Load) -> OperationResult:
        async with self._loaded(work, await self._find(work)) as saved:
            load = LoadState(model.model_id, seq_id, saved.state, work.optimizer)
            await self._adapters.with_memory(model.adapter_bytes, lambda: self._world.call(load))
        self._replaced(model)
        return convert.loaded(work)

    async def _publish(self, model: Model, seq_id: int, work: Publish, release: Release) -> OperationResult:
        nbytes = self._copies.bytes_of(model.lora, False)
        try:
            async with self._room(self._copies.to_samplers, nbytes, self._publisher.answers):
                with self._publisher.packing(nbytes) as pack:
                    async with self._world.snapshot(model.model_id, optimizer=False) as (_, snapshot):
                        roles.check_samples(snapshot.role)
                        model.publishing = True
                        release()
                        packed = partial(pack, snapshot.lora)
                        state, cargo = await self._world.beside(lambda: snapshot.unload(packed))
                    published = await self._publisher.publish(
                        model.model_id, seq_id, state.lora, state.adapter, cargo
                    )
        finally:
            model.publishing = False
        return convert.published(
            model.model_id, seq_id, work, published.size_bytes, published.wire_bytes, published.receivers
        )

    async def _export(self, model: Model, seq_id: int, work: Export, release: Release) -> OperationResult:
        model_id, checkpoint_id = model.model_id, work.checkpoint_id
        try:
            async with self._copy_to_storage(model, checkpoint_id, moments=False):
                async with self._world.snapshot(model_id, optimizer=False) as (_, snapshot):
                    roles.check_exports(snapshot.role)
                    model.publishing = True
                    release()
                    state = await self._world.beside(snapshot.state)
                files = self._export_files(state, work)
                size = await self._transfers.write(
                    model_id,
                    checkpoint_id,
                    lambda store: store.export(model_id, seq_id, checkpoint_id, files),
                )
        finally:
            model.publishing = False
        return convert.exported(model_id, work, size)

    def _copy_to_storage(
        self, model: Model, checkpoint_id: str, *, moments: bool
    ) -> AbstractAsyncContextManager[None]:
        """As `_room`, of a copy that becomes a checkpoint or an export."""
        nbytes = self._copies.bytes_of(model.lora, moments)
        answers = partial(self._transfers.answers, model.model_id, checkpoint_id)
        return self._room(self._copies.to_storage, nbytes, answers)

    @asynccontextmanager
    async def _room(
        self, way: Way, nbytes: int, answers: Callable[[], Awaitable[None]]
    ) -> AsyncIterator[None]:
        """Within it there is room on the host for a copy, and where that goes answered just before: nothing
        is copied in vain, nor does what is away keep room.

        Raises:
            StorageAway: it did not answer.
            Overloaded: other models' copies stayed on the host for too long.
        """
        await answers()
        async with way.hold(nbytes) as waited:
            if waited:
                await answers()
            yield

    async def _find(self, work: Load) -> Found:
        return await self._transfers.find(work.source_model_id, work.checkpoint_id, work.version)

    @asynccontextmanager
    async def _loaded(self, work: Load, found: Found) -> AsyncIterator[SavedState]:
        """Within it a saved state is here, and there is room on the host for it, from before it is read.

        Raises:
            StorageAway: it cannot be read at present.
            Overloaded: states of other models stayed on the host for too long.
            TinsmithError: besides, as `CheckpointStore.load`.
        """
        model_id, checkpoint_id = work.source_model_id, work.checkpoint_id
        async with self._loads.of_checkpoints.hold(self._loads.bytes_of(found.meta.lora)) as waited:
            if waited:
                await self._transfers.answers(model_id, checkpoint_id)
            saved = await self._transfers.load(model_id, checkpoint_id, found.version)
            try:
                yield saved
            finally:
                await asyncio.to_thread(saved.release)

    def _export_files(self, state: ModelState, work: Export) -> Files:
        def make() -> Mapping[str, Writer]:
            files = weight_files(self._base, state.lora, state.adapter)
            return encrypted(files, work.age_recipients) if work.age_recipients else files

        return make

    def _replaced(self, model: Model) -> None:
        """The model's state is to become durable as it is now."""
        model.unsaved_steps = model.unsaved_bytes = 0
        self._changed(model.model_id)

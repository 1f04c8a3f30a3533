"""Accepts saving and loading: training state, named snapshots, and the snapshots of sampling sessions."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Protocol

from services.common.contract import ids, roles
from services.common.contract.errors import InvalidRequest
from services.gateway.access.limits import Limits
from services.gateway.checkpoints.checkpoints import Checkpoints
from services.gateway.cluster.base_models import BaseModels
from services.gateway.records.model import ModelRecord
from services.gateway.records.sampling_session import SamplingSessionStore
from services.gateway.training import adapter_shape
from services.gateway.training.accept import Models
from services.gateway.training.request_digest import digest
from tinsmith.internal.v1 import operation_pb2


@dataclass(frozen=True)
class SaveOptions:
    """How long a named checkpoint lives and what is remembered with it."""

    ttl_seconds: int | None
    user_metadata: Mapping[str, str] | None


class SnapshotParts(Protocol):
    """The parts that unnamed snapshots have of what their owners may have."""

    async def check(self, owner: str, model_id: str, version: int) -> bool: ...

    async def give_back(self, owner: str, model_id: str, version: int) -> None: ...


def _plain(options: SaveOptions) -> tuple[object, ...]:
    return options.ttl_seconds, dict(options.user_metadata or {})


class Saves:
    """Operations between a model and what is kept of it. All raise as `Models.submit`.

    Args:
        snapshots: refuses a version of a model as an unnamed snapshot of an owner who has as much of them as
            it may.
    """

    def __init__(
        self,
        models: Models,
        checkpoints: Checkpoints,
        base_models: BaseModels,
        sampling_sessions: SamplingSessionStore,
        limits: Limits,
        snapshots: SnapshotParts,
    ) -> None:
        self._models = models
        self._checkpoints = checkpoints
        self._base_models = base_models
        self._sampling_sessions = sampling_sessions
        self._limits = limits
        self._snapshots = snapshots

    async def save_state(
        self, owner: str, model_id: str, seq_id: int, name: str | None, overwrite: bool, options: SaveOptions
    ) -> str:
        """Accepts saving of adapter and optimizer as tinker://<model_id>/weights/<name>.

        Args:
            name: None: the place in the model's order is the name.
        """

        async def fill(operation: operation_pb2.Operation, record: ModelRecord) -> None:
            save = operation_pb2.SaveState(
                checkpoint_id=ids.checkpoint_id("weights", f"{seq_id:06d}" if name is None else name),
                overwrite=overwrite,
            )
            self._set_options(save, options)
            if not overwrite:
                await self._checkpoints.refuse_taken(model_id, save.checkpoint_id, seq_id)
            await self._checkpoints.check_room(owner)
            operation.save_state.CopyFrom(save)

        asked = digest("save_state", name, overwrite, *_plain(options))
        return await self._models.submit(owner, model_id, seq_id, asked, fill)

    async def load_state(
        self,
        owner: str,
        model_id: str,
        seq_id: int,
        path: str,
        optimizer: bool,
        reader: str | None = None,
    ) -> str:
        """Accepts loading of a checkpoint into an existing model of the same base and adapter shape.

        Args:
            reader: whose checkpoint it may be, if not the owner's.
        """

        async def fill(operation: operation_pb2.Operation, record: ModelRecord) -> None:
            source, checkpoint = await self._checkpoints.training(reader or owner, path)
            same = await self._base_models.may_share_weights(checkpoint.base_model, record.base_model)
            if not same or adapter_shape.shape(checkpoint) != adapter_shape.shape(record):
                raise InvalidRequest(
                    f"{path} holds another kind of model (a {checkpoint.role} "
                    f"{adapter_shape.kind_of(checkpoint)} on {checkpoint.base_model}) than {model_id}; "
                    "create a model from it instead"
                )
            operation.load_state.source_model_id = source
            operation.load_state.checkpoint_id = checkpoint.checkpoint_id
            operation.load_state.optimizer = optimizer
            operation.load_state.version = checkpoint.version

        asked = digest("load_state", path, optimizer, reader)
        return await self._models.submit(owner, model_id, seq_id, asked, fill)

    async def save_for_sampler(
        self, owner: str, model_id: str, seq_id: int, name: str, options: SaveOptions
    ) -> str:
        """Accepts a named snapshot, tinker://<model_id>/sampler_weights/<name>."""

        async def fill(operation: operation_pb2.Operation, record: ModelRecord) -> None:
            await self._check_sampled(record)
            save = operation_pb2.SaveForSampler(checkpoint_id=ids.checkpoint_id("sampler_weights", name))
            self._set_options(save, options)
            await self._checkpoints.refuse_taken(model_id, save.checkpoint_id, seq_id)
            await self._checkpoints.check_room(owner)
            operation.save_for_sampler.CopyFrom(save)

        asked = digest("save_for_sampler", name, *_plain(options))
        return await self._models.submit(owner, model_id, seq_id, asked, fill)

    async def save_for_sampling_session(
        self,
        owner: str,
        model_id: str,
        seq_id: int,
        sampling_session_seq_id: int,
        inflight: bool,
        told: bool = False,
    ) -> tuple[str, str]:
        """Accepts a snapshot that a new sampling session answers from; (request id, its session id).

        Args:
            inflight: the session goes on to the snapshot of every later inflight save of the model, and so do
                those of the earlier ones.
            told: the caller learns the session id now, and not from the result: a repetition must name the
                same. Otherwise one that names another is answered with the first.
        """
        session = ids.sampling_session_id(ids.session_of(model_id), sampling_session_seq_id)
        new = False

        async def fill(operation: operation_pb2.Operation, record: ModelRecord) -> None:
            nonlocal new
            await self._check_sampled(record)
            taken = await self._sampling_sessions.get(session)
            if taken is not None and (taken.model_id, taken.version) != (model_id, seq_id):
                raise InvalidRequest(
                    f"sampling session {session} exists; use the next sampling_session_seq_id"
                )
            if taken is None:
                have = await self._sampling_sessions.count(record.session_id)
                self._limits.owners.check_samplers(have)
                new = await self._snapshots.check(owner, model_id, seq_id)
            operation.save_for_sampler.sampling_session_id = session
            operation.save_for_sampler.inflight = inflight

        async def give_back() -> None:
            if new:
                await self._snapshots.give_back(owner, model_id, seq_id)

        # The SDK numbers the session anew each time that it sends a save again.
        asked = digest("save_for_sampling_session", session if told else None, inflight)
        return await self._models.submit(owner, model_id, seq_id, asked, fill, give_back), session

    async def _check_sampled(self, record: ModelRecord) -> None:
        """Refuses to publish what no sampler could answer from."""
        roles.check_samples(record.role)
        base = await self._models.base_of(record)
        if record.lora_rank and not base.samples_adapters:
            raise InvalidRequest(
                f"no sampler of {record.base_model} here runs adapters: each was started with --max-loras 0, "
                "or is on a CPU with a model that has routed experts or quantised files; train on and keep "
                "the model with save_state, or have the operator run a sampler that does",
                "adapters_not_supported",
            )
        if not record.lora_rank and not base.samples_full_models:
            raise InvalidRequest(
                f"no sampler of {record.base_model} here runs models that train all weights: the weights of "
                "each are quantised, or vLLM cannot replace all of them (GPT-OSS); train on and keep the "
                "model with save_state, or, where it is the former, have the operator run a sampler without "
                "--quantization, of files that are not quantised",
                "full_models_not_supported",
            )

    def _set_options(
        self, save: operation_pb2.SaveState | operation_pb2.SaveForSampler, options: SaveOptions
    ) -> None:
        self._limits.check_ttl(options.ttl_seconds)
        self._limits.check_metadata(options.user_metadata or {})
        save.ttl_seconds = options.ttl_seconds or 0
        save.user_metadata.update(options.user_metadata or {})

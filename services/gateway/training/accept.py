"""Training: models and the operations that their journals hold.

Invariant: once (model_id, seq_id) of a request is known and the model is the caller's, the
seq_id is used up: the request is journaled as what it asks for, or as refused. A caller never
waits for a seq_id that nobody can send again.
"""

from __future__ import annotations

import time
from collections.abc import Awaitable, Callable, Mapping
from pathlib import Path
from typing import TypeVar

import msgspec
from cachetools import TTLCache
from google.protobuf.message import Message

from services.common.contract import errors, ids, roles, stand_ins
from services.common.contract.errors import (
    Conflict,
    InvalidRequest,
    NotFound,
    TinsmithError,
)
from services.common.contract.roles import Role
from services.common.process import failpoints
from services.common.process.pools import COMPUTE
from services.common.process.tasks import give_way
from services.common.state.journal import Journal
from services.common.state.journal_records import Accepted
from services.common.telemetry import subject
from services.gateway.access.limits import THREAD_ABOVE_BYTES, Limits
from services.gateway.checkpoints.checkpoints import Checkpoints
from services.gateway.cluster.base_models import BaseModel, BaseModels
from services.gateway.cluster.redis_restart import RedoLog
from services.gateway.records.model import ModelRecord, ModelStore
from services.gateway.sessions.sessions import Sessions
from services.gateway.training import adapter_shape, validate
from services.gateway.training.coerce import coerce
from services.gateway.training.request_digest import digest, message_digest
from tinsmith.internal.v1 import operation_pb2
from tinsmith.v1 import models_pb2, training_pb2

_CACHE_S = 3600.0
_CACHED = 4096
_MAX_SEQ_ID = 2**31 - 1
_TURNS_TO_SEND = 2
"""Of the loop: one for the call, one for the stream that carries it."""


T = TypeVar("T")
Wake = Callable[[str, operation_pb2.Operation | None], None]


async def _nothing() -> None:
    """There is nothing to take back."""


class Models:
    """Accepts training operations.

    Args:
        wake: tells the dispatcher that a model has work, and the operation if it was journaled just now.
    """

    def __init__(
        self,
        journal: Journal,
        sessions: Sessions,
        models: ModelStore,
        checkpoints: Checkpoints,
        base_models: BaseModels,
        wake: Wake,
        limits: Limits,
        redo_log: RedoLog,
    ) -> None:
        self._redo_log = redo_log
        self._journal = journal
        self._sessions = sessions
        self._models = models
        self._checkpoints = checkpoints
        self._base_models = base_models
        self._wake = wake
        self._limits = limits
        self._ready: TTLCache[str, ModelRecord] = TTLCache(_CACHED, _CACHE_S)

    async def get(self, owner: str, model_id: str) -> ModelRecord:
        """A model of the caller.

        Raises:
            NotFound: no such model of the caller's.
        """
        record = self._ready.get(model_id)
        if record is None:
            record = await self._models.get(model_id) if ids.is_model_id(model_id) else None
            if record is not None and record.status == "ready":
                # From now on nothing in the record changes but the status.
                self._ready[model_id] = record
        if record is None or record.owner != owner:
            await self._redo_log.refuse_while_restoring()
            raise NotFound(f"model {model_id[:100]!r} does not exist; create one first")
        return record

    async def current(self, owner: str, model_id: str) -> ModelRecord:
        """A model of the caller with its newest status. Raises as `get`."""
        record = await self.get(owner, model_id)
        return await self._models.get(model_id) or record

    async def base_of(self, record: ModelRecord) -> BaseModel:
        """What is known of the base model that a model adapts."""
        return await self._base_models.get(record.base_model)

    async def tokenizer_of(self, record: ModelRecord) -> str:
        """What AutoTokenizer.from_pretrained takes on any machine; empty when only this cluster has it, or
        the base model is not served at present."""
        try:
            tokenizer = (await self._base_models.get(record.base_model)).tokenizer_id
        except TinsmithError:
            return ""
        return "" if Path(tokenizer).is_absolute() else tokenizer

    async def last_seq_id(self, record: ModelRecord) -> int:
        """The highest seq_id that operations of a model used so far; 0 = none."""
        return max(0, await self._journal.last_seq_id(record.model_id))

    async def create(
        self,
        owner: str,
        session_id: str,
        model_seq_id: int,
        base_model: str,
        lora: models_pb2.LoraConfig | None,
        user_metadata: Mapping[str, str] | None = None,
        role: Role | None = None,
    ) -> str:
        """Creates a fresh model; the request id. Nothing is used up when it is refused.

        Args:
            lora: shape of its adapter; None: all its weights are trained.
            role: None: what user_metadata["model_role"] says, else a policy.

        Raises:
            InvalidRequest: the base model is not trained here, or the adapter cannot be had.
            NotFound, Gone: the session is not the caller's, or finished.
            Conflict: model_seq_id was used for another model.
        """
        await self._sessions.open_for_more(owner, session_id)
        role = roles.asked_for(user_metadata or {}, role) or "policy"
        shape = lora and lora.SerializeToString(deterministic=True)
        asked = digest("create_model", base_model, shape, role, user_metadata or {})
        model_id = ids.model_id(session_id, model_seq_id)
        if await self._journal.is_accepted(model_id, 0, asked):
            return ids.request_id(model_id, 0)
        base = await self._base_models.trainable(base_model)
        self._check_kind(lora, role, base)
        full = models_pb2.FullFineTuning() if lora is None else None
        create = operation_pb2.CreateModel(base_model=base.name, lora=lora, full=full, role=roles.to_pb(role))
        return await self._create(owner, model_id, asked, create, lora, role, user_metadata)

    async def create_from_state(
        self,
        owner: str,
        session_id: str,
        model_seq_id: int,
        path: str,
        optimizer: bool,
        base_model: str | None,
        user_metadata: Mapping[str, str] | None,
        reader: str | None = None,
    ) -> str:
        """Creates a model that continues from a saved one; the request id. Raises as `create`, and
        NotFound when there is no such checkpoint.

        Args:
            base_model: the name to train it under: the checkpoint's, or another one of the same weights.
            reader: whose checkpoint it may be, if not the owner's.
        """
        await self._sessions.open_for_more(owner, session_id)
        asked = digest("create_from_state", path, optimizer, base_model, user_metadata or {}, reader)
        model_id = ids.model_id(session_id, model_seq_id)
        if await self._journal.is_accepted(model_id, 0, asked):
            return ids.request_id(model_id, 0)
        source, checkpoint = await self._checkpoints.training(reader or owner, path)
        trained_on = checkpoint.base_model
        name = trained_on if base_model is None else (await self._base_models.get(base_model)).name
        if not await self._base_models.may_share_weights(name, trained_on):
            raise InvalidRequest(
                f"{path} was trained on {trained_on}, which has other weights than {name}; leave base_model "
                "out or pass a name of the same weights",
                field="base_model",
            )
        if roles.asked_for(user_metadata or {}) not in (None, checkpoint.role):
            raise InvalidRequest(
                f"{path} is of a {checkpoint.role}; leave {roles.METADATA_KEY} out of user_metadata or say so"
            )
        base = await self._base_models.trainable(name)
        lora = adapter_shape.lora_of(checkpoint)
        self._check_kind(lora, checkpoint.role, base)
        state = operation_pb2.LoadState(
            source_model_id=source,
            checkpoint_id=checkpoint.checkpoint_id,
            optimizer=optimizer,
            version=checkpoint.version,
        )
        create = operation_pb2.CreateModel(base_model=name, from_state=state)
        return await self._create(owner, model_id, asked, create, lora, checkpoint.role, user_metadata)

    async def _create(
        self,
        owner: str,
        model_id: str,
        asked: bytes,
        create: operation_pb2.CreateModel,
        lora: models_pb2.LoraConfig | None,
        role: Role,
        user_metadata: Mapping[str, str] | None,
    ) -> str:
        self._limits.check_metadata(user_metadata or {})
        lora = lora or models_pb2.LoraConfig(rank=0, train_attn=True, train_mlp=True, train_unembed=True)
        record = ModelRecord(
            model_id=model_id,
            session_id=ids.session_of(model_id),
            owner=owner,
            base_model=create.base_model,
            lora_rank=lora.rank,
            lora_seed=lora.seed if lora.HasField("seed") else None,
            train_attn=lora.train_attn,
            train_mlp=lora.train_mlp,
            train_unembed=lora.train_unembed,
            role=role,
            user_metadata=dict(user_metadata or {}),
            created_at=time.time(),
            status="creating",
        )
        if await self._models.get(model_id) is None:
            self._limits.owners.check_models(await self._models.count(owner))
            await self._sessions.check_room(owner, record)
        stored = await self._redo_log.perform(lambda: self._models.create_if_absent(record))
        if stored != msgspec.structs.replace(record, created_at=stored.created_at, status=stored.status):
            raise Conflict(f"model {model_id} exists with other settings; use the next model_seq_id")
        operation = operation_pb2.Operation(model_id=model_id, seq_id=0, create_model=create)
        return (await self._accept(operation, owner, asked)).request_id

    def _check_kind(self, lora: models_pb2.LoraConfig | None, role: Role, base: BaseModel) -> None:
        if lora is None:
            validate.check_full(role)
        else:
            validate.check_lora(lora, role, base, self._limits)

    async def forward_backward(
        self,
        owner: str,
        model_id: str,
        seq_id: int,
        size: int,
        request: Message,
        build: Callable[[BaseModel], training_pb2.ForwardBackward],
    ) -> str:
        """Accepts a forward_backward; the request id.

        Args:
            size: bytes of the request, which decides whether what is proportional to it runs in a thread.
            request: as it was sent, to tell a repetition by.
            build: makes the operation for a base model; a TinsmithError it raises refuses the request.
        """

        async def fill(operation: operation_pb2.Operation, record: ModelRecord) -> None:
            base = await self._base_models.in_training(record.base_model)

            def make() -> None:
                built = build(base)
                asked_loss = built.loss_fn
                built.loss_fn = stand_ins.that_runs(asked_loss, self._limits.stable_reinforce_as)
                if built.loss_fn != asked_loss:
                    operation.asked_loss = asked_loss
                coerce(built)
                validate.check_forward_backward(built, record.role, base, self._limits)
                operation.forward_backward.CopyFrom(built)
                operation.ranks = base.trainer_ranks
                operation.one_rank_tokens = base.one_rank_tokens
                operation.micro_batch_tokens = base.micro_batch_tokens

            await _run(make, size)

        return await self.submit(
            owner, model_id, seq_id, await _run(lambda: message_digest(request), size), fill
        )

    async def optim_step(self, owner: str, model_id: str, seq_id: int, adam: training_pb2.AdamParams) -> str:
        """Accepts an AdamW step; the request id."""

        async def fill(operation: operation_pb2.Operation, record: ModelRecord) -> None:
            validate.check_adam(adam)
            operation.optim_step.adam.CopyFrom(adam)

        asked = digest("optim_step", adam.SerializeToString(deterministic=True))
        return await self.submit(owner, model_id, seq_id, asked, fill)

    async def unload(self, owner: str, model_id: str, seq_id: int) -> str:
        """Accepts the end of a model; every later operation of it fails."""

        async def fill(operation: operation_pb2.Operation, record: ModelRecord) -> None:
            operation.unload_model.SetInParent()

        return await self.submit(owner, model_id, seq_id, digest("unload_model"), fill)

    async def refuse(self, owner: str, model_id: str, seq_id: int, error: TinsmithError) -> str:
        """Uses up a seq_id for a request that cannot be understood; the request id of its failure."""

        async def fill(operation: operation_pb2.Operation, record: ModelRecord) -> None:
            raise error

        return await self.submit(owner, model_id, seq_id, digest("refused", error.code, error.message), fill)

    async def submit(
        self,
        owner: str,
        model_id: str,
        seq_id: int,
        asked: bytes,
        fill: Callable[[operation_pb2.Operation, ModelRecord], Awaitable[None]],
        take_back: Callable[[], Awaitable[None]] = _nothing,
    ) -> str:
        """Journals what `fill` makes of an operation, or its refusal.

        Args:
            asked: digest of the request: what `fill` makes of its repetition may be something else.
            take_back: called where the operation is not to be run by this request: undoes what `fill` did.

        Raises:
            NotFound, Gone: the model is not the caller's, or its session is finished.
            InvalidRequest: seq_id is not one that a model has.
            Conflict: the seq_id was used for another request.
            Overloaded: the model's journal is full.
        """
        record = await self.get(owner, model_id)
        await self._sessions.open(owner, record.session_id)
        if record.copy_of:
            raise InvalidRequest(
                f"{model_id} holds a copy of a checkpoint and cannot be trained; create a model from it",
                "copy_of_checkpoint",
            )
        if not 1 <= seq_id <= _MAX_SEQ_ID:
            raise InvalidRequest(f"seq_id must be 1 to {_MAX_SEQ_ID}, not {seq_id}", field="seq_id")
        operation = operation_pb2.Operation(model_id=model_id, seq_id=seq_id)
        try:
            await fill(operation, record)
            self._journal.room.check_fits(operation.ByteSize())
        except TinsmithError as error:
            if error.category != "user":
                raise
            operation = operation_pb2.Operation(model_id=model_id, seq_id=seq_id, refused=errors.to_pb(error))
        try:
            accepted = await self._accept(operation, owner, asked)
        except TinsmithError:
            # Of any other failure it is not known whether it is in the journal.
            await take_back()
            raise
        if not accepted.to_run:
            await take_back()
        return accepted.request_id

    async def _accept(self, operation: operation_pb2.Operation, owner: str, asked: bytes) -> Accepted:
        accepted = None
        operation.origin.traceparent, operation.origin.owner = subject.traceparent(), owner
        operation.origin.accepted_at = time.time()
        request_id = ids.request_id(operation.model_id, operation.seq_id)
        subject.note(owner, operation.model_id, request_id, operation.refused.code)
        to_run = False

        async def accept(before: bool) -> Accepted:
            nonlocal to_run
            made = await self._journal.accept(operation, owner, accepted_before=before, digest=asked)
            # Written again, as Redis was started anew meanwhile, it may have been there from the first time.
            to_run |= made.to_run
            return Accepted(made.request_id, to_run)

        try:
            size = operation.ByteSize()
            accepted = await self._redo_log.perform(lambda: accept(False), size, lambda: accept(True))
            await failpoints.reach("gateway.after_accept")
        finally:
            # Also when the caller has gone: the operation may be in the journal.
            self._wake(operation.model_id, operation if accepted is not None and accepted.to_run else None)
        # It is on its way to the trainer before its client's answer takes any time.
        await give_way(_TURNS_TO_SEND)
        return accepted


async def _run(work: Callable[[], T], size: int) -> T:
    """The outcome of work that is proportional to a request of so many bytes."""
    return await COMPUTE.run(work) if size > THREAD_ABOVE_BYTES else work()

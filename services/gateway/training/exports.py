"""Accepts exports of weights, and unloading of models."""

from __future__ import annotations

from collections.abc import Sequence

from services.common.contract import ids
from services.common.contract.errors import Conflict, InvalidRequest, Unavailable
from services.common.state.journal import Journal
from services.common.storage.encryption import parse_recipients
from services.gateway.access.limits import Limits
from services.gateway.checkpoints.checkpoints import Checkpoints
from services.gateway.records.model import ModelRecord
from services.gateway.training.accept import Models
from tinsmith.internal.v1 import operation_pb2

_MOST_CONFLICTS = 8


class Exports:
    """Operations that the SDK sends beside training."""

    def __init__(self, models: Models, checkpoints: Checkpoints, journal: Journal, limits: Limits) -> None:
        self._models = models
        self._checkpoints = checkpoints
        self._journal = journal
        self._limits = limits

    async def save(
        self,
        owner: str,
        model_id: str,
        seq_id: int,
        name: str | None = None,
        ttl_seconds: int | None = None,
        age_recipients: Sequence[str] = (),
    ) -> str:
        """Accepts an export to tinker://<model_id>/external_weights/<name>; the request id.

        Args:
            name: None: the seq_id.
            age_recipients: public keys that every file is encrypted to.

        Raises:
            NotFound, PermissionDenied, Gone, Conflict, Overloaded: as Models.submit.
        """

        async def fill(operation: operation_pb2.Operation, record: ModelRecord) -> None:
            chosen = f"{seq_id:06d}" if name is None else name
            save = operation_pb2.SaveExternal(checkpoint_id=ids.checkpoint_id("external_weights", chosen))
            self._limits.check_ttl(ttl_seconds)
            parse_recipients(age_recipients)
            save.ttl_seconds = ttl_seconds or 0
            save.age_recipients.extend(age_recipients)
            await self._checkpoints.refuse_taken(model_id, save.checkpoint_id, seq_id)
            operation.save_external.CopyFrom(save)

        return await self._models.submit(owner, model_id, seq_id, fill)

    async def unload(self, owner: str, model_id: str) -> str:
        """Accepts unloading of a model after all operations so far; the request id.

        The request has no seq_id of its own, so it takes the next one. Later requests of the model fail.

        Raises:
            NotFound, PermissionDenied, Gone, Overloaded: as Models.submit.
            Unavailable: the model's client goes on sending at the same time.
        """
        if (await self._models.current(owner, model_id)).status == "unloaded":
            raise InvalidRequest(f"model {model_id} is unloaded already", "model_unloaded")
        for _ in range(_MOST_CONFLICTS):
            seq_id = await self._journal.last_seq_id(model_id) + 1
            if seq_id < 1:
                raise InvalidRequest(f"model {model_id} is not created yet")
            try:
                return await self._models.unload(owner, model_id, seq_id)
            except Conflict:
                continue
        raise Unavailable(f"model {model_id} is in use; unload it when nothing is sent to it any more")

"""Accepts exports of weights, and unloading of models."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import count

from services.common.contract import ids
from services.common.contract.errors import Conflict, InvalidRequest, Unavailable
from services.common.state.journal import Journal
from services.common.storage.encryption import parse_recipients
from services.gateway.access.limits import Limits
from services.gateway.checkpoints.checkpoints import Checkpoints
from services.gateway.records.model import ModelRecord, ModelStore
from services.gateway.training.accept import Models
from services.gateway.training.request_digest import digest
from tinsmith.internal.v1 import operation_pb2

_MOST_CLAIMS = 8
"""Seq_ids that one call tries to take before others do."""


class Exports:
    """Operations that the SDK sends beside training."""

    def __init__(
        self, models: Models, checkpoints: Checkpoints, journal: Journal, store: ModelStore, limits: Limits
    ) -> None:
        self._models = models
        self._store = store
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
            NotFound, Gone, Conflict, Overloaded: as Models.submit.
        """

        async def fill(operation: operation_pb2.Operation, record: ModelRecord) -> None:
            chosen = f"{seq_id:06d}" if name is None else name
            save = operation_pb2.SaveExternal(checkpoint_id=ids.checkpoint_id("external_weights", chosen))
            self._limits.check_ttl(ttl_seconds)
            parse_recipients(age_recipients)
            save.ttl_seconds = ttl_seconds or 0
            save.age_recipients.extend(age_recipients)
            await self._checkpoints.refuse_taken(model_id, save.checkpoint_id, seq_id)
            await self._checkpoints.check_room(owner)
            operation.save_external.CopyFrom(save)

        asked = digest("save_external", name, ttl_seconds, list(age_recipients))
        return await self._models.submit(owner, model_id, seq_id, asked, fill)

    async def unload(self, owner: str, model_id: str) -> str:
        """Accepts unloading of a model after all operations so far; the request id. Repeating gives the same.

        The request has no seq_id of its own, so it takes the next one, which is noted before it is used: the
        repetition of a request whose answer was lost finds it. Later requests of the model fail.

        Raises:
            NotFound, Gone, Overloaded: as Models.submit.
            InvalidRequest: it is unloaded already, by a request with a seq_id, or not created yet.
            Unavailable: the model's client goes on sending at the same time.
        """
        unloaded = (await self._models.current(owner, model_id)).status == "unloaded"
        claimed = 0
        for attempt in count():
            seq_id = await self._store.unload_seq_id(model_id, attempt)
            if seq_id is None:
                if unloaded:
                    raise InvalidRequest(f"model {model_id} is unloaded already", "model_unloaded")
                if claimed == _MOST_CLAIMS:
                    break
                top = await self._journal.last_seq_id(model_id)
                if top < 0:
                    raise InvalidRequest(f"model {model_id} is not created yet")
                seq_id = await self._store.claim_unload(model_id, attempt, top + 1)
                claimed += 1
            try:
                return await self._models.unload(owner, model_id, seq_id)
            except Conflict:
                # Another operation took it between the two.
                continue
        raise Unavailable(f"model {model_id} is in use; unload it when nothing is sent to it any more")

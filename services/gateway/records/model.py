"""Records of models in training in Redis.

Invariant: every record carries its owner; `create_if_absent` never replaces a record that is there, so a
repeated request finds what the first one made.
"""

from __future__ import annotations

from typing import Any, Literal

import msgspec
import redis.asyncio

from services.common.contract.errors import Gone
from services.common.contract.roles import Role
from services.common.process import clock
from services.common.state import keys
from services.common.state.poison import Poison
from services.common.state.room import ACCOUNT
from services.common.state.scripts import Script
from services.gateway.records.listed import Cursor, Listed, Pages
from services.gateway.records.times import Times

ModelStatus = Literal["creating", "ready", "failed", "unloaded"]


class ModelRecord(msgspec.Struct, frozen=True, kw_only=True):
    """A model in training. `lora_rank` 0: all its weights are trained. `lora_seed` None: not chosen by the
    client. `copy_of`: path of the checkpoint that it holds a copy of; nothing can be trained there."""

    model_id: str
    session_id: str
    owner: str
    base_model: str
    lora_rank: int
    lora_seed: int | None = None
    train_attn: bool = True
    train_mlp: bool = True
    train_unembed: bool = True
    role: Role = "policy"
    user_metadata: dict[str, str] = {}
    created_at: float
    copy_of: str = ""
    status: ModelStatus = "creating"


class ModelStore:
    """Models: a hash each, with the status in a field of its own."""

    def __init__(self, client: redis.asyncio.Redis, poison: Poison) -> None:
        self._redis = client
        self._poison = poison
        self._put = Script(client, "put_record")
        self._drop = Script(client, "drop_record")
        self._list_model = Script(client, "list_model")
        self._note = Script(client, "note_field")
        self._times = Times(client)
        self._pages = Pages(client)

    async def create_if_absent(self, record: ModelRecord) -> ModelRecord:
        """Stores a model unless its id is taken; what is stored.

        Raises:
            Gone: its session has ended meanwhile.
        """
        name = keys.model(record.model_id)
        # Listed first: a model that exists is always found by the end of its session.
        session = [keys.session(record.session_id), keys.session_models(record.session_id)]
        if not await self._list_model(session, record.model_id):
            raise Gone(f"session {record.session_id} was finished; create a new one", "session_finished")
        if await self._put([name, *ACCOUNT], record.owner, msgspec.json.encode(record)):
            await self._redis.zadd(keys.owner_models(record.owner), {record.model_id: record.created_at})
            return record
        return await self.get(record.model_id) or record

    async def get(self, model_id: str) -> ModelRecord | None:
        """The model as it is now. Raises Unreadable."""
        raw: Any
        status: Any
        raw, status = await self._redis.hmget(keys.model(model_id), ["record", "status"])
        if raw is None:
            return None
        with self._poison.reading(keys.model(model_id)):
            record = msgspec.json.decode(raw, type=ModelRecord)
            if status is None:
                return record
            return msgspec.structs.replace(record, status=msgspec.convert(status.decode(), ModelStatus))

    async def count(self, owner: str) -> int:
        """How many models an owner has, gone or not."""
        found: int = await self._redis.zcard(keys.owner_models(owner))
        return found

    async def page(self, owner: str, offset: int, limit: int) -> tuple[int, list[str]]:
        """How many models an owner has, and the ids of some of them, newest first."""
        name = keys.owner_models(owner)
        total: int = await self._redis.zcard(name)
        found: Any = await self._redis.zrevrange(name, offset, offset + limit - 1) if limit else []
        return total, [raw.decode() for raw in found]

    async def after(self, owner: str, entries: int, cursor: Cursor | None) -> Listed:
        """Ids of an owner's models, newest first, from a cursor on."""
        return await self._pages.read(keys.owner_models(owner), entries, cursor)

    async def drop(self, record: ModelRecord) -> None:
        """Forgets a model of which nothing else is left; its number can be used again."""
        lists = [keys.owner_models(record.owner), keys.session_models(record.session_id)]
        await self._drop([keys.model(record.model_id), *lists, *ACCOUNT], record.owner, record.model_id)

    async def set_status(self, model_id: str, status: ModelStatus) -> None:
        """Changes the status of an existing model."""
        await self._note([keys.model(model_id)], "status", status, 0, 0)

    async def unload_seq_id(self, model_id: str, attempt: int) -> int | None:
        """The seq_id that this attempt to unload an existing model takes, if there was one."""
        raw: Any = await self._redis.hget(keys.model(model_id), f"unload:{attempt}")
        return None if raw is None else int(raw)

    async def claim_unload(self, model_id: str, attempt: int, seq_id: int) -> int:
        """Notes the seq_id that an attempt to unload an existing model takes; the one that is noted."""
        return int(await self._note([keys.model(model_id)], f"unload:{attempt}", seq_id, 1, 0))

    async def note_unloaded(self, model_id: str) -> None:
        """Notes that an existing model was unloaded, for its durable state to be deleted."""
        await self._times.note(keys.ENDED_MODELS, {model_id: clock.to_note()})
        await self.set_status(model_id, "unloaded")

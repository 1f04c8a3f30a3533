"""Records of named checkpoints in Redis, and the indexes over them.

A record is in a hash of its model; an owner's checkpoints are in two sorted sets, by creation and by expiry;
and one sorted set of the whole cluster says when which version has to be looked at, because it expires or its
files have to go. All of these name a version, never a mere name.

Invariants: a record that expired is in no answer. Whatever is about to lose its record is in the set of the
due before, so that its files are found whoever dies in between.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any, Literal

import msgspec
import redis.asyncio

from services.common.contract import ids
from services.common.contract.errors import InvalidRequest, TooLarge
from services.common.contract.roles import Role
from services.common.process import clock
from services.common.state import keys
from services.common.state.poison import Poison, Unreadable
from services.common.state.room import ACCOUNT
from services.common.state.scripts import Script
from services.common.storage.base import Key
from services.gateway.records.listed import Cursor, Pages
from services.gateway.records.times import Times

_SETTLE_S = 60.0
"""A version that is losing its record is looked at this much later; longer than any removal can take."""
_UNREADABLE_AGAIN_S = 24 * 3600.0
_AT_ONCE = 200
_MOST_CHARS = 2**26
"""As much as a page of a thousand may have."""


class CheckpointRecord(msgspec.Struct, frozen=True, kw_only=True):
    """A named checkpoint. `version` is the seq_id of the save; `expires_at` None = kept; `public`: others may
    read it, too. `lora_rank` 0: of a model whose weights are all trained."""

    model_id: str
    checkpoint_id: str
    owner: str
    kind: Literal["training", "sampler", "external"]
    version: int
    size_bytes: int
    created_at: float
    expires_at: float | None = None
    public: bool = False
    user_metadata: dict[str, str] = {}
    base_model: str
    lora_rank: int
    train_attn: bool = True
    train_mlp: bool = True
    train_unembed: bool = True
    role: Role = "policy"


@dataclass(frozen=True)
class CheckpointPage:
    """Some checkpoints, newest first. `total` counts all; `next` is where a page of a cursor ended, None =
    there are no more."""

    records: Sequence[CheckpointRecord]
    total: int
    next: Cursor | None = None


class CheckpointStore:
    """Named checkpoints."""

    def __init__(self, client: redis.asyncio.Redis, poison: Poison) -> None:
        self._redis = client
        self._poison = poison
        self._put = Script(client, "put_checkpoint")
        self._swap = Script(client, "swap_checkpoint")
        self._page = Script(client, "page_checkpoints")
        self._list_one = Script(client, "list_checkpoint")
        self._unlist_one = Script(client, "unlist_checkpoint")
        self._pages = Pages(client)
        self._times = Times(client)

    async def put(self, record: CheckpointRecord) -> bool:
        """Stores a checkpoint in place of an earlier one of the same name. A later one stays, and so does
        this one when it is there already, with what was changed about it since.

        What samplers answer from is never replaced: False when another one of its name is there, and the
        files of this one are due.
        """
        name, field = keys.checkpoints(record.model_id), record.checkpoint_id
        replaces = record.kind != "sampler"
        found = await self._raw(record.model_id, record.checkpoint_id)
        earlier = None if found is None or found[1].version >= record.version else found[1]
        if earlier is not None:
            # Looked at without need when it stays.
            await self.look_again(key_of(earlier), clock.to_note() + _SETTLE_S)
        if record.expires_at is not None:
            await self.look_again(key_of(record), record.expires_at)
        raw, now = msgspec.json.encode(record), clock.to_judge()
        arguments = (field, raw, record.version, int(replaces), repr(now), record.owner)
        stored = await self._put([name, *ACCOUNT], *arguments)
        if stored < 0:
            if not replaces:
                await self.look_again(key_of(record), now)
            return replaces
        if earlier is not None:
            await self._unlist(earlier)
        known = await self._raw(record.model_id, record.checkpoint_id)
        if known is not None:
            await self._list(known[1])
        return True

    async def get(self, model_id: str, checkpoint_id: str) -> CheckpointRecord | None:
        """The checkpoint, unless it expired."""
        found = await self._raw(model_id, checkpoint_id)
        return None if found is None or has_expired(found[1]) else found[1]

    async def each_of_model(self, model_id: str) -> AsyncIterator[CheckpointRecord]:
        """A model's checkpoints that have not expired, as they come. They are read in parts, and one that
        changes meanwhile may come twice."""
        async for name, raw in self._redis.hscan_iter(keys.checkpoints(model_id), count=_AT_ONCE):
            record = self._decode(model_id, name.decode(), raw)
            if not has_expired(record):
                yield record

    async def any_of_model(self, model_id: str) -> bool:
        """Whether a model has a checkpoint that has not expired."""
        async for _ in self.each_of_model(model_id):
            return True
        return False

    async def of_model(self, model_id: str) -> list[CheckpointRecord]:
        """A model's checkpoints that have not expired, oldest first.

        Raises:
            TooLarge: what they say about themselves is too much for one answer.
        """
        kept, taken = {}, 0
        async for record in self.each_of_model(model_id):
            kept[record.checkpoint_id] = record
            taken += sum(len(name) + len(value) for name, value in record.user_metadata.items())
            if taken > _MOST_CHARS:
                raise TooLarge(
                    f"the user_metadata of the checkpoints of {model_id} has more than {_MOST_CHARS} "
                    "characters, which is too much for one answer; list the checkpoints of all runs by pages"
                )
        return sorted(kept.values(), key=lambda record: (record.version, record.checkpoint_id))

    async def page(self, owner: str, offset: int, limit: int) -> CheckpointPage:
        """Some of an owner's checkpoints, newest first."""
        total, members = await self._page(_lists(owner), repr(clock.to_judge()), offset, limit)
        return CheckpointPage(await self._members(owner, [member.decode() for member in members]), total)

    async def after(self, owner: str, limit: int, cursor: Cursor | None) -> CheckpointPage:
        """Some of an owner's checkpoints, newest first, from a cursor on."""
        await self.unlist_expired(owner)
        listed = await self._pages.read(keys.owner_checkpoints(owner), limit, cursor)
        return CheckpointPage(await self._members(owner, listed.names), listed.total, listed.next)

    async def unlist_expired(self, owner: str) -> None:
        """Has those of an owner that have expired leave the lists, and their bytes the sums."""
        await self._page(_lists(owner), repr(clock.to_judge()), 0, 0)

    async def _members(self, owner: str, members: Sequence[str]) -> list[CheckpointRecord]:
        """The records of members of an owner's list, without those that are gone or cannot be read."""
        found = [parse_member(member) for member in members]
        pipeline = self._redis.pipeline(transaction=False)
        for key in found:
            pipeline.hget(keys.checkpoints(key.model_id), key.checkpoint_id)
        records = []
        for key, raw in zip(found, await pipeline.execute(), strict=True):
            with suppress(Unreadable):
                record = None if raw is None else self._decode(key.model_id, key.checkpoint_id, raw)
                if record is None or record.version != key.version:
                    # A removal broke off half-way.
                    await self._unlist_key(owner, key)
                elif not has_expired(record):
                    records.append(record)
        return records

    async def totals(self, owner: str) -> tuple[int, int]:
        """How many checkpoints an owner has, and their bytes. Those that have just expired may be among
        them."""
        found: Any = await self._redis.zcard(keys.owner_checkpoints(owner))
        total: Any = await self._redis.hget(keys.owner_checkpoint_bytes(owner), "total")
        return int(found), int(total or 0)

    async def change(self, before: CheckpointRecord, after: CheckpointRecord) -> bool:
        """Replaces a record by another of the same version; False when it was changed meanwhile."""
        found = await self._raw(before.model_id, before.checkpoint_id)
        if found is None or found[1] != before:
            return False
        if after.expires_at is not None:
            await self.look_again(key_of(after), after.expires_at)
        if not await self._replace(before, found[0], msgspec.json.encode(after)):
            return False
        await self._list(after)
        return True

    async def remove(self, record: CheckpointRecord) -> bool:
        """Removes a record; False when it was changed meanwhile. Its files are due now."""
        found = await self._raw(record.model_id, record.checkpoint_id)
        if found is None or found[1] != record:
            return False
        await self.look_again(key_of(record), clock.to_note() + _SETTLE_S)
        if not await self._replace(record, found[0], b""):
            return False
        await self._unlist(record)
        return True

    async def _replace(self, record: CheckpointRecord, seen: bytes, raw: bytes) -> bool:
        names = [keys.checkpoints(record.model_id), *ACCOUNT]
        return bool(await self._swap(names, record.checkpoint_id, seen, raw, record.owner))

    async def expired(self, model_id: str, checkpoint_id: str) -> CheckpointRecord | None:
        """The record of this name if it has expired and is still there."""
        found = await self._raw(model_id, checkpoint_id)
        return found[1] if found is not None and has_expired(found[1]) else None

    async def due(self, limit: int) -> list[Key]:
        """Versions to look at now."""
        found: Any = await self._redis.zrangebyscore(keys.CHECKPOINTS_DUE, "-inf", clock.to_judge(), 0, limit)
        due = []
        for member in found:
            try:
                due.append(parse_member(member.decode()))
            except (ValueError, InvalidRequest) as error:
                self._poison.note(f"{keys.CHECKPOINTS_DUE} {member.decode(errors='replace')}", str(error))
                await self._times.note(keys.CHECKPOINTS_DUE, {member: clock.to_note() + _UNREADABLE_AGAIN_S})
        return due

    async def look_again(self, key: Key, at: float) -> None:
        """Has a version looked at (again) at a time."""
        await self._times.note(keys.CHECKPOINTS_DUE, {member_of(key): at})

    async def settle(self, key: Key) -> None:
        """Nothing is left to do about a version."""
        await self._redis.zrem(keys.CHECKPOINTS_DUE, member_of(key))

    async def _raw(self, model_id: str, checkpoint_id: str) -> tuple[bytes, CheckpointRecord] | None:
        raw: Any = await self._redis.hget(keys.checkpoints(model_id), checkpoint_id)
        return None if raw is None else (raw, self._decode(model_id, checkpoint_id, raw))

    def _decode(self, model_id: str, checkpoint_id: str, raw: bytes) -> CheckpointRecord:
        with self._poison.reading(f"{keys.checkpoints(model_id)} {checkpoint_id}"):
            return msgspec.json.decode(raw, type=CheckpointRecord)

    async def _list(self, record: CheckpointRecord) -> None:
        expires = "" if record.expires_at is None else repr(record.expires_at)
        member, created = member_of(key_of(record)), repr(record.created_at)
        await self._list_one(_lists(record.owner), member, created, expires, record.size_bytes)

    async def _unlist(self, record: CheckpointRecord) -> None:
        await self._unlist_key(record.owner, key_of(record))

    async def _unlist_key(self, owner: str, key: Key) -> None:
        await self._unlist_one(_lists(owner), member_of(key))


def _lists(owner: str) -> list[str]:
    return [keys.owner_checkpoints(owner), keys.owner_expiring(owner), keys.owner_checkpoint_bytes(owner)]


def has_expired(record: CheckpointRecord) -> bool:
    """Whether a checkpoint's time is over."""
    return record.expires_at is not None and record.expires_at <= clock.to_judge()


def key_of(record: CheckpointRecord) -> Key:
    """Where a checkpoint's files are kept."""
    return Key(record.model_id, record.checkpoint_id, record.version)


def member_of(key: Key) -> str:
    """A version in the indexes."""
    return f"{ids.tinker_path(key.model_id, key.checkpoint_id)}@{key.version}"


def parse_member(member: str) -> Key:
    """The version of an index's member."""
    path, _, version = member.rpartition("@")
    return Key(*ids.parse_tinker_path(path), int(version))

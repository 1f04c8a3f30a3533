"""The API keys in Redis.

Invariants: every change of a key gives the whole a new version in the same step, so who knows the version of
what it read knows whether it is still so. A key that was revoked stays so: nothing is written that goes by
what somebody else has changed since it was read. There are never more keys than one gateway can hold in
memory.
"""

from __future__ import annotations

import secrets
import time
from collections.abc import Collection
from contextlib import suppress
from typing import Any

import msgspec
import redis.asyncio
from redis.exceptions import ResponseError

from services.common.contract.errors import Conflict, InvalidRequest, LimitReached, NotFound
from services.common.process import clock
from services.common.state import keys
from services.common.state.scripts import Script
from services.gateway.identity.key import KeyRecord, Rights, mint

MOST_KEYS = 10_000
_EXPIRED_KEPT_S = 30 * 24 * 3600.0
"""So long a key that has ended is still listed."""

_KEYS = (keys.KEYS, keys.KEYS_USED, keys.KEYS_VERSION)


class KeyStore:
    """The keys of all owners."""

    def __init__(self, client: redis.asyncio.Redis) -> None:
        self._redis = client
        self._put_key = Script(client, "put_key")
        self._drop_keys = Script(client, "drop_keys")

    async def version(self) -> str:
        """Changes with every key."""
        found: Any = await self._redis.get(keys.KEYS_VERSION)
        return found.decode() if found else ""

    async def token_secret(self) -> str:
        """What tokens are signed with; empty: there is none, and Redis takes none for lack of memory."""
        found: Any = await self._redis.get(keys.TOKEN_SECRET)
        if found is None:
            with suppress(ResponseError):
                await self._redis.set(keys.TOKEN_SECRET, secrets.token_hex(32), nx=True)
            found = await self._redis.get(keys.TOKEN_SECRET)
        return found.decode() if found else ""

    async def all(self) -> list[KeyRecord]:
        """All keys, oldest first. One that cannot be read lets nobody in, and is not among them."""
        found: Any = await self._redis.hgetall(keys.KEYS)
        records = []
        for raw in found.values():
            try:
                records.append(msgspec.json.decode(raw, type=KeyRecord))
            except msgspec.DecodeError:
                continue
        return sorted(records, key=lambda record: (record.created_at, record.id))

    async def used(self) -> dict[str, float]:
        """When keys were last used, in seconds since 1970, to a minute or so."""
        found: Any = await self._redis.hgetall(keys.KEYS_USED)
        return {key_id.decode(): float(at) for key_id, at in found.items()}

    async def note_used(self, key_ids: Collection[str], now: float) -> None:
        """Notes that keys were used."""
        if key_ids:
            await self._redis.hset(keys.KEYS_USED, mapping=dict.fromkeys(key_ids, str(int(now))))

    async def create(self, rights: Rights) -> tuple[KeyRecord, str]:
        """Makes a key: its record, and the key, which is not kept.

        Raises:
            InvalidRequest: no key can be so.
            LimitReached: there are too many.
        """
        now = time.time()
        record, key = mint(rights, now)
        if rights.expires_at is not None and rights.expires_at <= now:
            raise InvalidRequest("the key would have ended before it was made", field="expires_at")
        await self._put(record)
        return record, key

    async def revoke(self, key_id: str) -> KeyRecord:
        """Ends a key, also while Redis has no memory left; what it was. Raises NotFound."""
        record = await self.get(key_id)
        await self._drop([key_id])
        return record

    async def rotate(self, key_id: str, keep_seconds: float) -> tuple[KeyRecord, str]:
        """Makes a key with the rights of another one, which ends after so long.

        Raises:
            NotFound: there is no such key, or it has ended.
            Conflict: somebody changed it meanwhile.
            LimitReached: there are too many.
        """
        now = time.time()
        raw = await self._raw(key_id)
        old = msgspec.json.decode(raw, type=KeyRecord)
        if old.expires_at is not None and old.expires_at <= now:
            raise NotFound(f"key {key_id[:40]!r} has ended; create a new one")
        record, key = mint(old.rights, now)
        then = b""
        if keep_seconds > 0:
            until = min(now + keep_seconds, old.expires_at or float("inf"))
            then = msgspec.json.encode(msgspec.structs.replace(old, expires_at=until))
        await self._put(record, key_id, raw, then)
        return record, key

    async def get(self, key_id: str) -> KeyRecord:
        """One key. Raises NotFound."""
        return msgspec.json.decode(await self._raw(key_id), type=KeyRecord)

    async def _raw(self, key_id: str) -> bytes:
        raw: Any = await self._redis.hget(keys.KEYS, key_id)
        if raw is None:
            raise NotFound(f"no API key has the id {key_id[:40]!r}; `tinsmith keys list` tells them")
        return bytes(raw)

    async def _put(self, record: KeyRecord, other: str = "", as_read: bytes = b"", then: bytes = b"") -> None:
        """Keeps a new key, and changes another one from what was read to what it is then; empty: it goes."""
        await self._drop_ended(clock.to_judge())
        raw = msgspec.json.encode(record)
        found = await self._put_key(_KEYS, _version(), MOST_KEYS, record.id, raw, other, as_read, then)
        if found == b"full":
            raise LimitReached(f"there are {MOST_KEYS} API keys; revoke some")
        if found == b"changed":
            raise Conflict(
                f"key {other[:40]!r} was changed or revoked meanwhile, and no key was made; see "
                "`tinsmith keys list`",
                "key_changed",
            )

    async def _drop_ended(self, now: float) -> None:
        ended = [
            record.id
            for record in await self.all()
            if record.expires_at is not None and record.expires_at < now - _EXPIRED_KEPT_S
        ]
        if ended:
            await self._drop(ended)

    async def _drop(self, key_ids: Collection[str]) -> None:
        await self._drop_keys(_KEYS, _version(), *key_ids)


def _version() -> str:
    return secrets.token_hex(8)

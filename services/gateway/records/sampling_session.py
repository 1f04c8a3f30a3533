"""Records of sampling sessions in Redis, and the snapshot that a model's inflight ones share.

Invariant: every record carries its owner and never changes; `create_if_absent` never replaces one that is
there, so a repeated request finds what the first one made.
"""

from __future__ import annotations

from typing import Any

import msgspec
import redis.asyncio

from services.common.state import keys
from services.common.state.poison import Poison
from services.common.state.room import ACCOUNT
from services.common.state.scripts import Script, SharedScript
from services.gateway.records.remembered import Remembered
from services.gateway.records.sample_news import Moved

_AT_ONCE = 500
_KNOWN_S = 3600.0
_KNOWN = 16_384


class SamplingSessionRecord(msgspec.Struct, frozen=True, kw_only=True):
    """What a sampling session answers from. `model_id` empty = the base model itself.

    Attributes:
        version: the snapshot, for ever; of an inflight session the first one, which later inflight saves of
            the model replace.
        full: the snapshot is all weights of a model, not an adapter.
    """

    sampling_session_id: str
    session_id: str
    owner: str
    base_model: str
    model_id: str = ""
    version: int = 0
    model_path: str = ""
    full: bool = False
    inflight: bool = False


class SamplingSessionStore:
    """Sampling sessions: one immutable record each."""

    def __init__(self, client: redis.asyncio.Redis, poison: Poison) -> None:
        self._redis = client
        self._poison = poison
        self._put = Script(client, "put_sampler")
        self._bind = Script(client, "bind_sampler")
        self._known: Remembered[SamplingSessionRecord] = Remembered(_KNOWN, _KNOWN_S)

    async def create_if_absent(
        self, record: SamplingSessionRecord, *, saved: bool = False
    ) -> SamplingSessionRecord:
        """Stores a sampling session unless its id is taken; what is stored.

        Args:
            saved: by a save that was accepted, so it is stored also while Redis has no memory left.
        """
        names = [
            keys.sampling_session(record.sampling_session_id),
            keys.session(record.session_id),
            keys.session_samplers(record.session_id),
            keys.model_samplers(record.model_id),
            *ACCOUNT,
        ]
        version = record.version if record.model_id else ""
        put = self._bind if saved else self._put
        raw = msgspec.json.encode(record)
        first = await put(names, record.owner, raw, record.sampling_session_id, version)
        return record if first is None else self._decode(record.sampling_session_id, first)

    async def get(self, sampling_session_id: str) -> SamplingSessionRecord | None:
        """The sampling session. Raises Unreadable."""
        raw: Any = await self._redis.get(keys.sampling_session(sampling_session_id))
        return None if raw is None else self._decode(sampling_session_id, raw)

    async def known(self, sampling_session_id: str) -> SamplingSessionRecord | None:
        """The same for who asks with each sample: as a record never changes, it is read once."""
        record = self._known.get(sampling_session_id)
        if record is None:
            record = await self.get(sampling_session_id)
            if record is not None:
                self._known[sampling_session_id] = record
        return record

    def _decode(self, sampling_session_id: str, raw: bytes) -> SamplingSessionRecord:
        with self._poison.reading(keys.sampling_session(sampling_session_id)):
            return msgspec.json.decode(raw, type=SamplingSessionRecord)

    async def count(self, session_id: str) -> int:
        """How many sampling sessions a session has, some perhaps never made."""
        found: Any = await self._redis.scard(keys.session_samplers(session_id))
        return int(found)

    async def of_session(self, session_id: str) -> list[str]:
        """Ids of a session's sampling sessions, some perhaps never made."""
        # There may be very many: they are read in parts.
        found = self._redis.sscan_iter(keys.session_samplers(session_id), count=_AT_ONCE)
        return list({raw.decode(): None async for raw in found})

    async def of_model(self, model_id: str, version: int | None) -> list[tuple[str, int]]:
        """(id, version) of every sampling session on a model's snapshots, or on one of them; some perhaps
        never made."""
        low, high = ("-inf", "+inf") if version is None else (version, version)
        name = keys.model_samplers(model_id)
        found: Any = await self._redis.zrangebyscore(name, low, high, withscores=True)
        return [(member.decode(), int(version)) for member, version in found]


class InflightStore:
    """The snapshot that each model's inflight sampling sessions share: it moves forward only."""

    def __init__(self, client: redis.asyncio.Redis) -> None:
        self._redis = client
        self._raise = Script(client, "raise_version")
        # Every sample of an inflight session asks.
        self._read = SharedScript(client, "read_version")

    async def move(self, model_id: str, version: int) -> None:
        """Has the model's inflight sessions answer from this version, unless they do from a newer one, and
        their samples that run hear of it."""
        await self._raise([keys.inflight_version(model_id)], version)
        await self._redis.publish(keys.SAMPLE_CHANNEL, msgspec.json.encode(Moved(model_id, version)))

    async def current(self, model_id: str) -> int | None:
        """The version that the model's inflight sessions answer from now; None before the first."""
        raw = await self._read([keys.inflight_version(model_id)])
        return None if raw is None else int(raw)

    async def version(self, record: SamplingSessionRecord) -> int:
        """The version that a request of an inflight session answers from now."""
        return max(record.version, await self.current(record.model_id) or 0)

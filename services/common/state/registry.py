"""Which services are alive: each announces itself in Redis under a key that expires.

Invariant: a service that stopped refreshing its record is gone from `live` after TTL_S seconds.
"""

from __future__ import annotations

import asyncio
import logging
import uuid

import msgspec
import redis.asyncio
from redis.exceptions import RedisError

from services.common.process.tasks import cancel_all, keep_running
from services.common.state import keys

log = logging.getLogger(__name__)

KINDS = ("gateway", "trainer", "sampler")
TTL_S = 10
REFRESH_S = 3.0


class ServiceRecord(msgspec.Struct, frozen=True, kw_only=True):
    """What a gateway, trainer or sampler tells the others about itself.

    Attributes:
        kind: "gateway", "trainer" or "sampler".
        id: name of the process, stable over restarts ("sampler-0").
        incarnation: differs after every start.
        address: host:port of its gRPC server.
        state: "ready" or "draining".
        base_model: name SDK users pass; empty for gateways, as are all below.
        model_path: directory or hub id the weights and tokenizer come from.
        arch: model architecture ("Qwen3ForCausalLM").
        vocab_size: token ids are 0 .. vocab_size - 1.
        context_length: most tokens of a sequence.
        world_size: ranks of a trainer, tensor-parallel workers of a sampler.
        max_lora_rank: largest adapter rank it accepts; 0 = no limit of its own.
        max_sequences: most sequences that a sampler has running or waiting; 0 = no limit of its own.
        weights: full snapshot in a sampler's engine ("<model_id>@<version>"); empty = the base model.
        gpus: UUID of the GPU of each member of the weight group; empty on CPU.
    """

    kind: str
    id: str
    address: str
    incarnation: str = msgspec.field(default_factory=lambda: uuid.uuid4().hex)
    state: str = "ready"
    base_model: str = ""
    model_path: str = ""
    arch: str = ""
    vocab_size: int = 0
    context_length: int = 0
    device: str = ""
    dtype: str = ""
    world_size: int = 1
    max_lora_rank: int = 0
    max_sequences: int = 0
    weights: str = ""
    gpus: tuple[str, ...] = ()


class Announcer:
    """Keeps one service's record alive."""

    def __init__(self, client: redis.asyncio.Redis, record: ServiceRecord) -> None:
        self._redis = client
        self.record = record
        self._task: asyncio.Task[None] | None = None

    async def start(self) -> None:
        """Announces and keeps announcing. The first announcement must succeed."""
        await self._announce()
        self._task = keep_running(self._keep_announcing(), name="announcer")

    async def update(self, record: ServiceRecord) -> None:
        """Replaces the record at once (for example by one whose state is "draining")."""
        self.record = record
        await self._announce()

    async def stop(self) -> None:
        """Takes the record away."""
        await cancel_all([self._task])
        await self._redis.delete(keys.service(self.record.kind, self.record.id))

    async def _announce(self) -> None:
        record = self.record
        await self._redis.set(keys.service(record.kind, record.id), msgspec.json.encode(record), ex=TTL_S)
        await self._redis.sadd(keys.services(record.kind), record.id)

    async def _keep_announcing(self) -> None:
        while True:
            await asyncio.sleep(REFRESH_S)
            try:
                await self._announce()
            except RedisError as error:
                # The record expires meanwhile, which is what others should see.
                log.warning("could not announce %s, trying again: %s", self.record.id, error)


async def live(client: redis.asyncio.Redis, kind: str) -> list[ServiceRecord]:
    """Records of the live services of a kind, by id."""
    members = sorted(_text(member) for member in await client.smembers(keys.services(kind)))
    found = [await client.get(keys.service(kind, member)) for member in members]
    return [msgspec.json.decode(raw, type=ServiceRecord) for raw in found if raw is not None]


def _text(value: bytes | str) -> str:
    return value if isinstance(value, str) else value.decode()

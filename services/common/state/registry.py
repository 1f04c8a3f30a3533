"""Which services are alive: each announces itself in Redis again and again.

Invariants: a service that stopped announcing itself is in no answer after TTL_S seconds, and leaves Redis
when another one of its kind announces itself. One that ends in order says so with its last word, which others
hear for TTL_S seconds, and is in no answer from then on. What a trainer or sampler says of its base model
stays known. A record that another version of this program wrote is passed over, and counted. Whom an operator
drained is seen as draining by all, whatever it says of itself, until the operator takes that back, or it was
silent for DRAINED_S.
"""

from __future__ import annotations

import asyncio
import logging
import uuid
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import msgspec
import redis.asyncio
from redis.exceptions import RedisError

from services.common.contract.errors import LimitReached
from services.common.contract.experts.routing import Routing
from services.common.process import clock
from services.common.process.tasks import cancel_all, keep_running
from services.common.state import keys, known_models
from services.common.state.known_models import Facts, KnownModel
from services.common.state.scripts import Script
from services.common.state.versions import Range
from services.common.telemetry.repeats import Repeats

log = logging.getLogger(__name__)

KINDS = ("gateway", "trainer", "sampler")
TTL_S = 10.0
REFRESH_S = 3.0
DRAINED_S = 30 * 24 * 3600
_MOST_DRAINED = 1000
_STOPPED = "stopped"


class ServiceRecord(msgspec.Struct, frozen=True, kw_only=True):
    """What a gateway, trainer or sampler tells the others about itself.

    Attributes:
        kind: "gateway", "trainer" or "sampler".
        id: name of the process, stable over restarts ("sampler-0").
        incarnation: differs after every start.
        address: host:port of its gRPC server.
        state: "ready" or "draining"; "stopped" as the last word of one that ended in order.
        base_model: name SDK users pass; empty for gateways, as are all below.
        model_path: directory or hub id the weights and tokenizer come from.
        arch: model architecture ("Qwen3ForCausalLM").
        vocab_size: token ids are 0 .. vocab_size - 1.
        context_length: most tokens of a sequence.
        max_sequence_tokens: of the longest sequence that a trainer's memory holds in training,
            `max_forward_tokens`: of the longest that only runs forward, `max_operation_tokens`: of all
            sequences of one operation; 0 = not said.
        one_rank_tokens: of the longest that one rank of a trainer holds, where all compute longer ones
            together; 0 = they do not.
        micro_batch_tokens: that a trainer computes several sequences of at once; 0 = not said.
        world_size: ranks of a trainer, workers of a sampler in all `pipeline_stages`.
        max_lora_rank: largest adapter rank it accepts; 0 = no limit of its own.
        max_sequences: sequences that a sampler's engine generates at once; 0 = no
            limit of its own.
        queued_sequences: sequences that a sampler takes on beside them, over all gateways, so that its engine
            never runs dry. It refuses more (RESOURCE_EXHAUSTED): they wait in the gateways, where API keys
            take turns.
        kv_tokens: tokens of prompts and outputs whose keys and values fit into a sampler's memory at once, a
            prefix that requests share counted once; what exceeds it waits in the engine, whose turn it is or
            not, and when that is more than queued_sequences the sampler refuses more. 0 = not known.
        adapts: whether a sampler can run adapters; on a CPU not those of a model with routed experts, or with
            quantised files.
        full_models: whether a sampler can run fully fine-tuned models; not where its weights are
            quantised, or where vLLM cannot replace all of them.
        routing: how the model routes tokens to experts, where a sampler tells which have a sample's tokens,
            or a trainer computes with those that it is given; None = it does not, or routes nothing.
        batched_tokens: tokens of prompts and sequences that one step of a sampler computes; 0 = not said.
        adapter_slots: adapters in one step of a sampler, requests for more wait; 0 = none, or not said.
        kv_cache_dtype: of a sampler's keys and values, and `head_dtype`: in which its output head computes;
            "auto" = `dtype`, empty = not said.
        quantization: of a sampler's weights, as vLLM calls it; "none", empty = not said.
        model_runner: of vLLM in a sampler, "v1" or "v2": a seed gives other tokens; empty = not said.
        speculative_ngram_tokens: that a sampler drafts for each sequence in a step; 0 = none.
        weights: full snapshot in a sampler's engine ("<model_id>@<version>"); empty = the base model.
        gpus: UUID of the GPU of each member of the weight group; empty on CPU.
        models: models that a trainer has in memory.
        queued: operations that wait or run on a trainer.
        limits: what one API key, one model and all requests in flight may take of a gateway, by its flags.
        versions: of what it writes and reads; who does not get along with it leaves it alone.
        stalls: times that a gateway's event loop stood still, and `longest_stall_ms`: for how long at most.
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
    max_sequence_tokens: int = 0
    max_forward_tokens: int = 0
    one_rank_tokens: int = 0
    micro_batch_tokens: int = 0
    max_operation_tokens: int = 0
    device: str = ""
    dtype: str = ""
    world_size: int = 1
    max_lora_rank: int = 0
    max_sequences: int = 0
    queued_sequences: int = 0
    adapts: bool = True
    full_models: bool = True
    routing: Routing | None = None
    kv_tokens: int = 0
    batched_tokens: int = 0
    adapter_slots: int = 0
    kv_cache_dtype: str = ""
    head_dtype: str = ""
    quantization: str = ""
    model_runner: str = ""
    pipeline_stages: int = 1
    speculative_ngram_tokens: int = 0
    weights: str = ""
    gpus: tuple[str, ...] = ()
    models: int = 0
    queued: int = 0
    limits: dict[str, int] = msgspec.field(default_factory=dict)
    versions: Range = Range()
    stalls: int = 0
    longest_stall_ms: int = 0


@dataclass(frozen=True)
class View:
    """What is announced at one moment.

    Attributes:
        services: the live services of each kind that was asked for, by id.
        base_models: every base model that is known, also retired ones, by name.
        drained: (kind, id) of those that an operator took out of service, alive or not.
        stopped: (kind, id) of those that ended in order a moment ago.
        undecodable: records that another version wrote.
    """

    services: Mapping[str, Sequence[ServiceRecord]]
    base_models: Mapping[str, KnownModel]
    drained: frozenset[tuple[str, str]] = frozenset()
    stopped: frozenset[tuple[str, str]] = frozenset()
    undecodable: int = 0


class Registry:
    """The services and base models of one Redis."""

    def __init__(self, client: redis.asyncio.Redis) -> None:
        self._redis = client
        self._announce = Script(client, "announce")
        self._look = Script(client, "look_services")
        self._note_times = Script(client, "note_times")

    async def announce(self, record: ServiceRecord) -> None:
        """Has a service be alive for TTL_S seconds from now."""
        kind, name = record.kind, record.base_model
        await self._announce(
            [keys.services(kind), keys.services_seen(kind), keys.BASE_MODELS, keys.DRAINED],
            record.id,
            msgspec.json.encode(record),
            round(TTL_S * 1000),
            known_models.field(kind, name) if name else "",
            msgspec.json.encode(facts(record)),
            known_models.retired_field(name),
            _drained(kind, record.id),
            DRAINED_S,
        )

    async def withdraw(self, kind: str, service_id: str) -> None:
        """Has a service be alive no more."""
        async with self._redis.pipeline(transaction=True) as pipeline:
            pipeline.hdel(keys.services(kind), service_id)
            pipeline.zrem(keys.services_seen(kind), service_id)
            await pipeline.execute()

    async def look(self, *kinds: str) -> View:
        """What is announced now, of these kinds or of all. One round trip."""
        kinds = kinds or KINDS
        names = [name for kind in kinds for name in (keys.services(kind), keys.services_seen(kind))]
        flat: list[bytes]
        raw: list[list[bytes]]
        flat, out, *raw = await self._look([keys.BASE_MODELS, keys.DRAINED, *names], round(TTL_S * 1000))
        drained = frozenset(_place(field.decode()) for field in out)
        base_models, undecodable = known_models.parse(dict(zip(flat[::2], flat[1::2], strict=True)))
        services: dict[str, list[ServiceRecord]] = {}
        stopped: set[tuple[str, str]] = set()
        for kind, found in zip(kinds, raw, strict=True):
            decoded = [_decode(one) for one in found]
            records = [record for record in decoded if record is not None]
            alive = [_as_told(record, drained) for record in records if record.state != _STOPPED]
            services[kind] = sorted(alive, key=lambda record: record.id)
            stopped |= {(kind, record.id) for record in records if record.state == _STOPPED}
            undecodable += len(decoded) - len(records)
        return View(services, base_models, drained, frozenset(stopped), undecodable)

    async def drain(self, kind: str, service_id: str) -> None:
        """Has a service be seen as draining until `undrain`, also when it starts anew, unless that is after
        DRAINED_S.

        Raises:
            LimitReached: too many are.
        """
        name = _drained(kind, service_id)
        count: Any = await self._redis.zcard(keys.DRAINED)
        if count >= _MOST_DRAINED and await self._redis.zscore(keys.DRAINED, name) is None:
            raise LimitReached(f"{count} services are drained; undrain those that are gone for good")
        await self._note_times([keys.DRAINED], "", repr(clock.to_note()), name)

    async def undrain(self, kind: str, service_id: str) -> bool:
        """Ends that; whether the service was drained."""
        return bool(await self._redis.zrem(keys.DRAINED, _drained(kind, service_id)))


def _drained(kind: str, service_id: str) -> str:
    return f"{kind}:{service_id}"


def facts(record: ServiceRecord) -> Facts:
    """What a trainer or sampler says that stays known."""
    return msgspec.convert(record, Facts, from_attributes=True)


class Announcer:
    """Keeps one service's record alive.

    Args:
        load: fields of the record that change all the time; each announcement has them as they are then.
    """

    def __init__(
        self,
        client: redis.asyncio.Redis,
        record: ServiceRecord,
        load: Callable[[], Mapping[str, int]] = dict,
    ) -> None:
        self._load = load
        self._registry = Registry(client)
        self._silent = Repeats(log, "a service could not be announced")
        self.record = record
        self._task: asyncio.Task[None] | None = None

    async def start(self) -> None:
        """Announces and keeps announcing. The first announcement must succeed."""
        await self._registry.announce(self.record)
        self._task = keep_running(self._keep_announcing(), name="announcer")

    async def update(self, record: ServiceRecord) -> None:
        """Replaces the record at once (for example by one whose state is "draining")."""
        self.record = record
        await self._registry.announce(record)

    async def stop(self, in_order: bool = True) -> None:
        """Has the service be alive no more.

        Args:
            in_order: it was asked to; else others warn of it as of one that vanished.
        """
        await cancel_all([self._task])
        if in_order:
            await self._registry.announce(msgspec.structs.replace(self.record, state=_STOPPED))
        else:
            await self._registry.withdraw(self.record.kind, self.record.id)

    async def _keep_announcing(self) -> None:
        while True:
            await asyncio.sleep(REFRESH_S)
            self.record = msgspec.structs.replace(self.record, **self._load())
            try:
                await self._registry.announce(self.record)
            except RedisError as error:
                # The record grows old meanwhile, which is what others should see.
                self._silent.failed(self.record.id, error)
            else:
                self._silent.over(self.record.id)


async def live(client: redis.asyncio.Redis, kind: str) -> Sequence[ServiceRecord]:
    """Records of the live services of a kind, by id."""
    return (await Registry(client).look(kind)).services[kind]


def _place(field: str) -> tuple[str, str]:
    kind, _, service_id = field.partition(":")
    return kind, service_id


def _as_told(record: ServiceRecord, drained: Collection[tuple[str, str]]) -> ServiceRecord:
    if (record.kind, record.id) not in drained:
        return record
    return msgspec.structs.replace(record, state="draining")


def _decode(raw: bytes) -> ServiceRecord | None:
    try:
        return msgspec.json.decode(raw, type=ServiceRecord)
    except msgspec.MsgspecError:
        return None

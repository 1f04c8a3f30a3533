"""The base models that this cluster is known to have, whether or not a trainer or sampler of them is alive.

Invariant: a base model that an operator configured, or that a trainer or sampler ever announced, stays known
until an operator retires it. A retired one is known as such until it is configured or announced anew.
"""

from __future__ import annotations

import time
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from typing import Any

import msgspec
import redis.asyncio

from services.common.contract.errors import InvalidRequest
from services.common.contract.experts.routing import Routing
from services.common.state import keys
from services.common.state.scripts import Script

EXAMPLE = '[{"name": "org/model", "trained": true, "sampled": true}]'
"""What `parse_configured` reads."""

_RETIRED = "retired"
_CONFIGURED = "configured"


class Facts(msgspec.Struct, frozen=True, kw_only=True):
    """What the trainers or samplers of a base model say of it and of themselves; as in ServiceRecord."""

    model_path: str = ""
    arch: str = ""
    vocab_size: int
    context_length: int
    max_sequence_tokens: int = 0
    max_forward_tokens: int = 0
    one_rank_tokens: int = 0
    micro_batch_tokens: int = 0
    max_operation_tokens: int = 0
    world_size: int = 1
    max_lora_rank: int = 0
    adapts: bool = True
    full_models: bool = True
    routing: Routing | None = None


class Configured(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What an operator says of a base model. `trained`, `sampled`: it has trainers, samplers."""

    name: str
    trained: bool = True
    sampled: bool = True


@dataclass(frozen=True)
class KnownModel:
    """A base model.

    Attributes:
        trainer: what a trainer of it announced last; None = none ever did. `sampler`: the same.
        configured: what the operator says of it, if anything.
        retired: it is served no more.
    """

    name: str
    trainer: Facts | None = None
    sampler: Facts | None = None
    configured: Configured | None = None
    retired: bool = False

    @property
    def trained(self) -> bool:
        """A trainer is there, or is to be waited for. The operator's word counts first."""
        return self.configured.trained if self.configured is not None else self.trainer is not None

    @property
    def sampled(self) -> bool:
        """A sampler is there, or is to be waited for."""
        return self.configured.sampled if self.configured is not None else self.sampler is not None


def field(part: str, name: str) -> str:
    """Field of keys.BASE_MODELS; `part`: "trainer" or "sampler" for its Facts."""
    return f"{part}:{name}"


def retired_field(name: str) -> str:
    """Field of keys.BASE_MODELS that says that a base model was retired, and when (s)."""
    return field(_RETIRED, name)


def parse(fields: Mapping[bytes, bytes]) -> tuple[dict[str, KnownModel], int]:
    """The base models in the fields of keys.BASE_MODELS, by name; how many fields another version wrote."""
    found: dict[str, KnownModel] = {}
    undecodable = 0
    for key, value in fields.items():
        part, _, name = key.decode().partition(":")
        known = found.get(name) or KnownModel(name)
        try:
            if part == "trainer":
                known = replace(known, trainer=msgspec.json.decode(value, type=Facts))
            elif part == "sampler":
                known = replace(known, sampler=msgspec.json.decode(value, type=Facts))
            elif part == _CONFIGURED:
                known = replace(known, configured=msgspec.json.decode(value, type=Configured))
            elif part == _RETIRED:
                known = replace(known, retired=True)
            else:
                undecodable += 1
                continue
        except msgspec.MsgspecError:
            undecodable += 1
            continue
        found[name] = known
    return found, undecodable


def parse_configured(text: str) -> tuple[Configured, ...]:
    """The base models of a JSON list like EXAMPLE.

    Raises:
        InvalidRequest: the text is something else, or names a model twice.
    """
    try:
        models = tuple(msgspec.json.decode(text or "[]", type=list[Configured]))
    except msgspec.MsgspecError as error:
        raise InvalidRequest(f"base models must be JSON like {EXAMPLE}, but: {error}") from error
    names = [model.name for model in models]
    for name in names:
        if not name or names.count(name) > 1:
            raise InvalidRequest(f"base model {name!r} is named twice, or has no name")
    return models


async def configure(client: redis.asyncio.Redis, models: Iterable[Configured]) -> None:
    """Makes base models known as the operator says. Ends their retirement.

    What is known so already is not written: a gateway starts also with a Redis that has no memory left.
    """
    wanted = {field(_CONFIGURED, model.name): (model.name, msgspec.json.encode(model)) for model in models}
    if not wanted:
        return
    known: Any = await client.hmget(keys.BASE_MODELS, list(wanted))
    async with client.pipeline(transaction=True) as pipeline:
        for (configured, (name, told)), before in zip(wanted.items(), known, strict=True):
            if before != told:
                pipeline.hset(keys.BASE_MODELS, configured, told)
            pipeline.hdel(keys.BASE_MODELS, retired_field(name))
        await pipeline.execute()


async def retire(client: redis.asyncio.Redis, name: str) -> None:
    """Forgets what is known of a base model but that it is retired."""
    parts = [field(part, name) for part in ("trainer", "sampler", _CONFIGURED)]
    script = Script(client, "retire_model")
    await script([keys.BASE_MODELS], retired_field(name), repr(time.time()), *parts)

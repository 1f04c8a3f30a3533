"""The base models this cluster serves, as trainers and samplers announce them.

Invariant: limits of a base model that was ever seen stay known, so a request is judged the same
way while a trainer or sampler restarts.
"""

from __future__ import annotations

import asyncio
import re
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from pathlib import PurePath

import redis.asyncio

from services.common.contract.errors import InvalidRequest, Unavailable
from services.common.state import registry
from services.common.state.registry import ServiceRecord

_FRESH_S = 1.0
_HUB_CACHE = re.compile(r"models--(?P<org>[^/]+?)--(?P<name>[^/]+)")


@dataclass(frozen=True)
class BaseModel:
    """What the gateway knows of a base model.

    Attributes:
        name: what users pass as base_model.
        model_path: directory or hub id of weights and tokenizer.
        arch: architecture name.
        vocab_size: token ids are 0 .. vocab_size - 1.
        context_length: most tokens of a sequence.
        max_train_rank: largest LoRA rank its trainers take; 0 = no limit of their own.
        max_sample_rank: largest LoRA rank its samplers take; 0 = no limit of their own.
        max_samples: most sequences of one request that its samplers take; 0 = no limit of their own.
        trainable: a trainer is alive.
        sampleable: a sampler is alive.
    """

    name: str
    model_path: str
    arch: str
    vocab_size: int
    context_length: int
    max_train_rank: int = 0
    max_sample_rank: int = 0
    max_samples: int = 0
    trainable: bool = False
    sampleable: bool = False

    @property
    def tokenizer_id(self) -> str:
        """What AutoTokenizer.from_pretrained takes: the hub id, also for a directory of the hub's
        local cache, else the local directory."""
        for part in PurePath(self.model_path).parts:
            match = _HUB_CACHE.fullmatch(part)
            if match is not None:
                return f"{match['org']}/{match['name']}"
        return self.model_path


def merge(trainers: Iterable[ServiceRecord], samplers: Iterable[ServiceRecord]) -> dict[str, BaseModel]:
    """Base models by name. Where processes differ in a limit, the smallest holds."""
    found: dict[str, BaseModel] = {}

    def smallest(first: int, second: int) -> int:
        return min(value for value in (first, second) if value) if first or second else 0

    def add(record: ServiceRecord, trainer: bool) -> None:
        model = found.get(record.base_model) or BaseModel(
            record.base_model, record.model_path, record.arch, record.vocab_size, record.context_length
        )
        model = replace(
            model,
            vocab_size=min(model.vocab_size, record.vocab_size),
            context_length=min(model.context_length, record.context_length),
        )
        if trainer:
            rank = smallest(model.max_train_rank, record.max_lora_rank)
            model = replace(model, trainable=True, max_train_rank=rank)
        else:
            rank = smallest(model.max_sample_rank, record.max_lora_rank)
            samples = smallest(model.max_samples, record.max_sequences)
            model = replace(model, sampleable=True, max_sample_rank=rank, max_samples=samples)
        found[record.base_model] = model

    for record in trainers:
        add(record, trainer=True)
    for record in samplers:
        add(record, trainer=False)
    return found


class BaseModels:
    """Base models by name, read from the registry at most once a second."""

    def __init__(self, client: redis.asyncio.Redis, clock: Callable[[], float] = time.monotonic) -> None:
        self._redis = client
        self._clock = clock
        self._live: dict[str, BaseModel] = {}
        self._known: dict[str, BaseModel] = {}
        self._read_at = float("-inf")
        self._reading = asyncio.Lock()

    async def live(self) -> list[BaseModel]:
        """Base models with a live trainer or sampler, by name."""
        await self._refresh()
        return [self._live[name] for name in sorted(self._live)]

    async def get(self, name: str) -> BaseModel:
        """Limits of a base model, alive or only seen before.

        Raises:
            InvalidRequest: this cluster does not serve the name; names those it does.
            Unavailable: no trainer or sampler has announced itself yet.
        """
        await self._refresh()
        model = self._live.get(name) or self._known.get(name)
        if model is not None:
            return model
        if not self._known:
            raise Unavailable("no trainer or sampler is ready yet; try again in a moment")
        served = ", ".join(sorted(self._known))
        raise InvalidRequest(
            f"base model {name[:200]!r} is not served here; use one of: {served}", "unknown_base_model"
        )

    async def trainable(self, name: str) -> BaseModel:
        """A base model that adapters can be trained on. Raises as `get`, and when it is only sampled."""
        model = await self.get(name)
        if not model.trainable:
            names = _names(known for known in self._known.values() if known.trainable)
            raise InvalidRequest(
                f"base model {name!r} has no trainer here; trainable base models: {names}", "not_trainable"
            )
        return model

    async def sampleable(self, name: str) -> BaseModel:
        """A base model that can be sampled. Raises as `get`, and when it is only trained."""
        model = await self.get(name)
        if not model.sampleable:
            names = _names(known for known in self._known.values() if known.sampleable)
            raise InvalidRequest(
                f"base model {name!r} has no sampler here; sampleable base models: {names}", "not_sampleable"
            )
        return model

    async def _refresh(self) -> None:
        if self._clock() - self._read_at < _FRESH_S:
            return
        async with self._reading:
            if self._clock() - self._read_at < _FRESH_S:
                return
            trainers = await registry.live(self._redis, "trainer")
            samplers = await registry.live(self._redis, "sampler")
            self._live = merge(trainers, samplers)
            for name, model in self._live.items():
                self._known[name] = _remember(self._known.get(name), model)
            self._read_at = self._clock()


def _names(models: Iterable[BaseModel]) -> str:
    return ", ".join(sorted(model.name for model in models)) or "none at present"


def _remember(before: BaseModel | None, now: BaseModel) -> BaseModel:
    """The newest limits, with what only a service that is away at present told."""
    if before is None:
        return now
    return replace(
        now,
        trainable=now.trainable or before.trainable,
        sampleable=now.sampleable or before.sampleable,
        max_train_rank=now.max_train_rank or before.max_train_rank,
        max_sample_rank=now.max_sample_rank or before.max_sample_rank,
        max_samples=now.max_samples or before.max_samples,
    )

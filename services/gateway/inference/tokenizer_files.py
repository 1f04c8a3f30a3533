"""The tokenizer of a served base model as the files that Hugging Face's libraries load.

Invariant: what is made of the files encodes and decodes as the engine does: they hold the sampler's own
tokenizer. However many ask, few of them are in memory at once.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import Awaitable, Callable, Mapping
from typing import cast

from services.gateway.cluster.base_models import BaseModels
from services.gateway.inference.tokenizers import Told

_AT_ONCE = 2


class TokenizerFiles:
    """Fetches tokenizers from samplers, and lays them out.

    Args:
        fetch: asks a sampler of a base model.
    """

    def __init__(self, base_models: BaseModels, fetch: Callable[[str], Awaitable[Told]]) -> None:
        self._base_models = base_models
        self._fetch = fetch
        self._slots = asyncio.Semaphore(_AT_ONCE)

    async def of(self, base_model: str) -> dict[str, str]:
        """The content of every file by its name.

        Raises:
            InvalidRequest: the base model is not sampled here, or its tokenizer has no such form.
            Starting: no sampler is there to ask.
        """
        base = await self._base_models.sampleable(base_model)
        async with self._slots:
            return files(await self._fetch(base.name))


def files(told: Told) -> dict[str, str]:
    """What a sampler tells of its tokenizer, as files."""
    config: dict[str, str] = {"tokenizer_class": "PreTrainedTokenizerFast"}
    config.update(cast(Mapping[str, str], told.special_tokens))
    if told.chat_template:
        config["chat_template"] = told.chat_template
    return {"tokenizer.json": told.tokenizer_json, "tokenizer_config.json": json.dumps(config, indent=2)}

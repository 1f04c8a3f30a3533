"""The tokenizers of the served base models, fetched from their samplers.

Invariant: one that is known is used while it is fresh; who needs one that is not waits for the fetch that
is under way, and no longer than for that.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import Protocol

from cachetools import TTLCache

from services.common.contract.errors import Internal
from services.common.process.pools import COMPUTE
from services.gateway.text.tokenizer import Tokenizer

_FRESH_S = 3600.0
_MOST = 64


class Told(Protocol):
    """What a sampler tells of its tokenizer; see GetTokenizerResponse in sampler.proto."""

    @property
    def tokenizer_json(self) -> str: ...

    @property
    def chat_template(self) -> str: ...

    @property
    def special_tokens(self) -> object: ...


class Tokenizers:
    """The tokenizers of base models.

    Args:
        fetch: asks a sampler of a base model.
    """

    def __init__(self, fetch: Callable[[str], Awaitable[Told]]) -> None:
        self._fetch = fetch
        self._known: TTLCache[str, Tokenizer] = TTLCache(_MOST, _FRESH_S)
        self._fetches: dict[str, asyncio.Task[Tokenizer]] = {}

    async def of(self, base_model: str) -> Tokenizer:
        """The tokenizer of a base model that is served here.

        Raises:
            Starting: it is not known, and no sampler is there to ask.
            InvalidRequest: it cannot be had.
        """
        known = self._known.get(base_model)
        if known is not None:
            return known
        fetch = self._fetches.get(base_model)
        if fetch is None:
            fetch = asyncio.create_task(self._fetched(base_model), name=f"tokenizer of {base_model}")
            self._fetches[base_model] = fetch
        return await asyncio.shield(fetch)

    async def _fetched(self, base_model: str) -> Tokenizer:
        try:
            made = await COMPUTE.run(_made, await self._fetch(base_model))
            self._known[base_model] = made
            return made
        finally:
            del self._fetches[base_model]


def _made(told: Told) -> Tokenizer:
    try:
        return Tokenizer(told.tokenizer_json, told.chat_template, dict(told.special_tokens))  # type: ignore[call-overload]
    except ValueError as error:
        raise Internal(f"a sampler told a tokenizer that cannot be read: {error}") from error

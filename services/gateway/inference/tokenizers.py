"""The tokenizers of the served base models, fetched from their samplers.

Invariant: one that is known is used while it is fresh; nobody waits for a sampler twice at once.
"""

from __future__ import annotations

import asyncio
from collections import defaultdict
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
        self._locks: defaultdict[str, asyncio.Lock] = defaultdict(asyncio.Lock)

    async def of(self, base_model: str) -> Tokenizer:
        """The tokenizer of a base model that is served here.

        Raises:
            Starting: it is not known, and no sampler is there to ask.
            InvalidRequest: it cannot be had.
        """
        async with self._locks[base_model]:
            known = self._known.get(base_model)
            if known is None:
                told = await self._fetch(base_model)
                known = self._known[base_model] = await COMPUTE.run(_made, told)
            return known


def _made(told: Told) -> Tokenizer:
    try:
        return Tokenizer(told.tokenizer_json, told.chat_template, dict(told.special_tokens))  # type: ignore[call-overload]
    except ValueError as error:
        raise Internal(f"a sampler told a tokenizer that cannot be read: {error}") from error

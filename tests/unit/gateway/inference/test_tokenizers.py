"""A base model's tokenizer is fetched once for all who wait for it."""

from __future__ import annotations

import asyncio
from pathlib import Path
from types import SimpleNamespace

import pytest

from services.common.contract.errors import Starting
from services.gateway.inference.tokenizers import Tokenizers
from services.launcher.tiny_model import write_tokenizer


class Sampler:
    """Tells its tokenizer, or fails, when it is let."""

    def __init__(self, tokenizer_json: str = "", error: Exception | None = None) -> None:
        self.asked = 0
        self._tokenizer_json = tokenizer_json
        self.may_answer = asyncio.Event()
        self._error = error

    async def tell(self, base_model: str) -> SimpleNamespace:
        self.asked += 1
        await self.may_answer.wait()
        if self._error is not None:
            raise self._error
        return SimpleNamespace(tokenizer_json=self._tokenizer_json, chat_template="", special_tokens={})


async def test_those_who_ask_at_once_share_one_fetch(tmp_path: Path) -> None:
    write_tokenizer(tmp_path, 512, 512)
    sampler = Sampler((tmp_path / "tokenizer.json").read_text())
    tokenizers = Tokenizers(sampler.tell)
    asking = [asyncio.create_task(tokenizers.of("base")) for _ in range(5)]
    await asyncio.sleep(0)
    asking[0].cancel()
    sampler.may_answer.set()
    first, *others = await asyncio.gather(*asking, return_exceptions=True)
    assert isinstance(first, asyncio.CancelledError)
    assert len({id(other) for other in others}) == 1
    assert await tokenizers.of("base") is others[0]
    assert sampler.asked == 1


async def test_a_fetch_that_fails_fails_for_all_who_wait_and_is_made_again() -> None:
    sampler = Sampler(error=Starting("the sampler still loads"))
    sampler.may_answer.set()
    tokenizers = Tokenizers(sampler.tell)
    outcomes = await asyncio.gather(*(tokenizers.of("base") for _ in range(3)), return_exceptions=True)
    assert [type(outcome) for outcome in outcomes] == [Starting] * 3
    assert sampler.asked == 1
    with pytest.raises(Starting):
        await tokenizers.of("base")
    assert sampler.asked == 2

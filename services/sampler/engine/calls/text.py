"""The text of what a sequence comes to, in which vLLM's front end looks for stop strings.

vLLM has it of a stream of the tokenizers library, which begins with the prompt. That decodes all of the
prompt with the first token; where the prompt ends within a character, with every token until a character is
whole, and then it gives the prompt for text that was sampled: stop strings are found in it. And tokens that
never come to a character it decodes all anew with each (huggingface/tokenizers, `step_decode_stream`).

Invariants: a text is of sampled tokens alone, and what a token takes does not grow with those before it.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from tokenizers import Tokenizer
from tokenizers.decoders import DecodeStream
from vllm.v1.engine.detokenizer import FastIncrementalDetokenizer

_BEFORE = 16
"""Tokens of the prompt that the text goes on from: whether it begins with a space depends on them."""
_HELD = 16
_CHARACTER = 3
"""Tokens that may be the beginning of one character: each has at least one of its up to four bytes."""
_NONE = "\ufffd"
"""Stands for bytes that are no character."""


def of_sampled_alone(detokenizer: Any, prompt: Sequence[int]) -> None:
    """Has vLLM's detokenizer of a sequence that has no token yet make text of sampled tokens alone. One that
    is not of the tokenizers library does, or makes none."""
    if isinstance(detokenizer, FastIncrementalDetokenizer):
        stream: Any = SampledText(detokenizer.tokenizer, prompt)
        detokenizer.stream = stream


class SampledText:
    """In the place of a DecodeStream, of which it has one."""

    def __init__(self, tokenizer: Tokenizer, prompt: Sequence[int]) -> None:
        self._before = _whole(tokenizer, prompt)
        self._held: list[int] = []
        self._stream = self._begun()

    def _begun(self) -> DecodeStream:
        return DecodeStream(ids=self._before, skip_special_tokens=False)

    def step(self, tokenizer: Tokenizer, token: int) -> str | None:
        """The text that a token completes; None: it may be the beginning of a character, or has no text."""
        text = self._stream.step(tokenizer, token)
        if text is not None:
            self._held.clear()
            return text
        self._held.append(token)
        if len(self._held) < _HELD:
            return None
        # A character that has begun is among the last of them.
        text = _decoded(tokenizer, self._held[:-_CHARACTER])
        del self._held[:-_CHARACTER]
        self._stream = self._begun()
        for one in self._held:
            self._stream.step(tokenizer, one)
        return text


def _whole(tokenizer: Tokenizer, prompt: Sequence[int]) -> list[int]:
    """The prompt's last tokens, without those of a character that it begins and a sampled token ends: of that
    there is no text. Some tokenizers have no text of any byte of a run that begins within a character, so
    the first of them may be one of several."""
    for more in range(_CHARACTER + 1):
        tokens = list(prompt[-_BEFORE - more :])
        while tokens and _decoded(tokenizer, tokens).endswith(_NONE):
            del tokens[-1]
        if tokens:
            return tokens
    return []


def _decoded(tokenizer: Tokenizer, tokens: list[int]) -> str:
    text: str = tokenizer.decode(tokens, skip_special_tokens=False)
    return text

"""Stop strings are looked for in the text of sampled tokens, whatever the prompt ends with, and a token takes
no longer for the text of those before it."""

from __future__ import annotations

import random

import pytest
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from tokenizers.decoders import DecodeStream
from transformers import PreTrainedTokenizerFast
from vllm import SamplingParams
from vllm.v1.engine import EngineCoreRequest
from vllm.v1.engine.detokenizer import FastIncrementalDetokenizer, IncrementalDetokenizer

from services.sampler.engine.calls.text import SampledText, of_sampled_alone


def of_bytes() -> Tokenizer:
    """A token for each byte."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(models.BPE({char: place for place, char in enumerate(alphabet)}, []))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    return tokenizer


def of_words() -> Tokenizer:
    """A token for each word, which begins with its space; at the beginning of a text that is left out."""
    words = ["none", *(f"▁{word}" for word in ("one", "two", "three", "four"))]
    tokenizer = Tokenizer(models.WordLevel({word: place for place, word in enumerate(words)}, "none"))
    tokenizer.decoder = decoders.Metaspace()
    return tokenizer


def of_words_and_bytes() -> Tokenizer:
    """A token for a word and for each byte. Bytes that are no text together have none at all."""
    vocabulary = {"none": 0, "▁one": 1} | {f"<0x{byte:02X}>": 2 + byte for byte in range(256)}
    tokenizer = Tokenizer(models.BPE(vocabulary, [], byte_fallback=True, unk_token="none"))
    strip = decoders.Strip(" ", 1, 0)
    tokenizer.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), strip]
    )
    return tokenizer


TOKENIZER = of_bytes()


def ids(text: str) -> list[int]:
    return list(TOKENIZER.encode(text).ids)


def of_vllm(prompt: list[int], stop: str) -> IncrementalDetokenizer:
    params = SamplingParams(stop=[stop], include_stop_str_in_output=True, skip_special_tokens=False)
    request = EngineCoreRequest("name", prompt, None, params, None, 0.0, None, None, None)
    made = IncrementalDetokenizer.from_new_request(
        PreTrainedTokenizerFast(tokenizer_object=TOKENIZER), request
    )
    assert isinstance(made, FastIncrementalDetokenizer)
    return made


PROMPT = ids("User: wait é")
"""Its last token is the second one of a character."""


@pytest.mark.parametrize("prompt", [PROMPT, PROMPT[:-1], PROMPT[-2:-1] * 40])
def test_a_stop_string_of_the_prompt_ends_nothing_wherever_that_ends(prompt: list[int]) -> None:
    detokenizer = of_vllm(prompt, "User:")
    of_sampled_alone(detokenizer, prompt)
    found = [detokenizer.update([token], False) for token in ids("Agent: no, User:")]
    assert found == [None] * 15 + ["User:"]


def test_by_itself_vllm_finds_it_where_the_prompt_ends_within_a_character() -> None:
    assert of_vllm(PROMPT, "User:").update(ids("A"), False) is None
    assert of_vllm(PROMPT[:-1], "User:").update(ids("A"), False) == "User:"


@pytest.mark.parametrize("seed", range(20))
def test_the_text_is_what_the_tokenizers_library_has(seed: int) -> None:
    draw = random.Random(seed)
    characters = [draw.choice("ab é世🙂") for _ in range(60)]
    prompt, sampled = ids("".join(characters[:30])), ids("".join(characters[30:]))
    ours, theirs = SampledText(TOKENIZER, prompt), DecodeStream(ids=prompt, skip_special_tokens=False)
    told = [ours.step(TOKENIZER, token) for token in sampled]
    assert told == [theirs.step(TOKENIZER, token) for token in sampled]
    assert "".join(text or "" for text in told) == "".join(characters[30:])


def test_a_word_after_the_prompt_has_the_space_that_it_begins_with() -> None:
    words = of_words()
    text = SampledText(words, [1, 2])
    assert [text.step(words, token) for token in (3, 4)] == [" three", " four"]


@pytest.mark.parametrize("character", ["é", "世", "🙂"])
def test_a_word_after_many_bytes_has_its_space_wherever_the_last_of_them_begin(character: str) -> None:
    tokenizer = of_words_and_bytes()
    for before in range(4):
        held = [2 + byte for byte in (character * 20 + "a" * before).encode()]
        assert SampledText(tokenizer, [1, *held]).step(tokenizer, 1) == " one"


def test_bytes_that_are_no_character_are_not_kept_until_there_is_one() -> None:
    text = SampledText(TOKENIZER, PROMPT)
    broken, face = ids("é")[:1], ids("🙂")
    told = [text.step(TOKENIZER, token) for token in broken * 1000]
    assert sum(part is not None for part in told) > 50
    rest = [text.step(TOKENIZER, token) for token in face + ids("stop")]
    assert "".join(part or "" for part in told + rest).replace("\ufffd", "") == "🙂stop"

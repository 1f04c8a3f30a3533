"""How much memory a sampler on CPU gives to keys and values."""

from __future__ import annotations

import re

import pytest

from services.sampler.config import GIB
from services.sampler.engine.settings.cpu_cache import CpuCache, choose

# 28 layers, 8 heads of 128 for keys and as many for values, float32: the shape of Qwen3-0.6B.
QWEN = {"token_bytes": 2 * 28 * 8 * 128 * 4, "model_context": 40960}


def test_a_small_model_has_room_for_two_whole_contexts() -> None:
    cache = choose(token_bytes=46_080, model_context=8192, wanted_context=0, given_bytes=0, memory=16 * GIB)
    assert cache == CpuCache(GIB, 8192)


def test_a_model_that_wants_more_than_a_quarter_of_the_machine_gets_a_shorter_context() -> None:
    cache = choose(**QWEN, wanted_context=0, given_bytes=0, memory=16 * GIB)
    assert cache.kv_bytes == 4 * GIB
    assert cache.context == 18432
    assert cache.context * QWEN["token_bytes"] <= cache.kv_bytes
    assert choose(**QWEN, wanted_context=0, given_bytes=0, memory=128 * GIB).context == 40960


def test_what_the_operator_gives_is_used_whole() -> None:
    cache = choose(**QWEN, wanted_context=4096, given_bytes=20 * GIB, memory=16 * GIB)
    assert cache == CpuCache(20 * GIB, 4096)


def test_a_shorter_context_needs_less() -> None:
    assert choose(**QWEN, wanted_context=2048, given_bytes=0, memory=16 * GIB) == CpuCache(GIB, 2048)


@pytest.mark.parametrize("memory", [16 * GIB, 16 * GIB + 300_000_000, 20 * GIB, 23 * GIB])
def test_what_is_chosen_fits_into_the_blocks_that_vllm_does_not_keep_for_itself(memory: int) -> None:
    cache = choose(**QWEN, wanted_context=0, given_bytes=0, memory=memory)
    blocks = cache.kv_bytes // (128 * QWEN["token_bytes"])
    assert cache.context <= (blocks - 1) * 128 < cache.context + 256


def test_a_context_that_does_not_fit_is_refused_with_one_that_does() -> None:
    with pytest.raises(ValueError, match="lower --max-context to 18560, or raise"):
        choose(**QWEN, wanted_context=40960, given_bytes=0, memory=16 * GIB)
    choose(**QWEN, wanted_context=18560, given_bytes=0, memory=16 * GIB)
    with pytest.raises(ValueError, match="lower --max-context to 18560, or raise"):
        choose(**QWEN, wanted_context=18561, given_bytes=0, memory=16 * GIB)


@pytest.mark.parametrize(
    ("wanted", "given", "said"),
    [
        (18561, 4 * GIB, "of 18561 tokens take 4.02 GiB, and 4.00 GiB are set"),
        (40960, 4 * GIB, "of 40960 tokens take 8.78 GiB, and 4.00 GiB are set"),
        (40960, 2**20, "of 40960 tokens take 8.78 GiB, and 0.000976 GiB are set"),
        (10**6, 213 * GIB + 1, "of 1000000 tokens take 214 GiB, and 213 GiB are set"),
        (10**8, 213 * GIB, "of 100000000 tokens take 21363 GiB, and 213 GiB are set"),
    ],
)
def test_a_refusal_says_what_is_there_and_more_that_would_do(wanted: int, given: int, said: str) -> None:
    with pytest.raises(ValueError, match=re.escape(said)) as refused:
        choose(**QWEN, wanted_context=wanted, given_bytes=given, memory=16 * GIB)
    told = re.search(r"take (\S+) GiB", str(refused.value))
    assert told is not None
    enough = int(float(told[1]) * GIB)
    assert choose(**QWEN, wanted_context=wanted, given_bytes=enough, memory=GIB).context == wanted


def test_memory_that_holds_hardly_any_token_is_refused() -> None:
    for wanted in (0, 16):
        with pytest.raises(ValueError, match="are set aside for them: raise --kv-cache-gib"):
            choose(**QWEN, wanted_context=wanted, given_bytes=2**20, memory=16 * GIB)

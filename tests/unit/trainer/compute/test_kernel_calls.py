"""What a micro-batch costs by its adapters, counted on tensors without values."""

from __future__ import annotations

import pytest

from bench.counted import counts


@pytest.mark.parametrize("ranks", [[32] * 64, [8, 16, 32, 5] * 2], ids=["64 of one rank", "of several ranks"])
def test_many_adapters_cost_about_as_many_kernels_as_one(ranks: list[int]) -> None:
    many, one = counts.kernel_calls(ranks), counts.kernel_calls([32])
    # Two products forward and four backward of each layer's 7 linears, and of the head; but nobody wants the
    # gradient below the first three.
    assert many["_grouped_mm"] == 6 * (7 * counts.LAYERS + 1) - 3
    assert not one["_grouped_mm"]
    assert many.total() <= 1.3 * one.total()


def test_what_many_adapters_add_is_no_more_than_twice_what_one_adds() -> None:
    none, one, many = (counts.kernel_calls([32] * count).total() for count in (0, 1, 64))
    assert 0 < many - none <= 2 * (one - none)


def test_where_logits_take_chunks_each_has_kernels_for_the_adapters_of_its_tokens_alone() -> None:
    asked = {"tokens": 8192, "vocabulary": counts.QWEN3_8B["vocab_size"]}
    many, one = (counts.kernel_calls([32] * count, **asked) for count in (64, 1))
    assert many["zero_"] <= one["zero_"] + 2
    assert many.total() <= 1.3 * one.total()

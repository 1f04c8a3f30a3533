"""What a token keeps in memory for the backward pass, counted on tensors without values."""

from __future__ import annotations

from bench.counted import counts


def test_a_checkpointed_qwen3_8b_keeps_at_most_half_a_megabyte_a_token() -> None:
    assert counts.kept_per_token(checkpointing=True) <= 0.5e6


def test_without_checkpointing_it_keeps_many_times_that() -> None:
    assert counts.kept_per_token(checkpointing=False) >= 4e6

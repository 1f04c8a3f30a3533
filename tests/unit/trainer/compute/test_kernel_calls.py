"""What a micro-batch costs by its adapters, counted on tensors without values."""

from __future__ import annotations

import pytest

from bench.counted import counts


@pytest.mark.parametrize("ranks", [[32] * 64, [8, 16, 32, 5] * 2], ids=["64 of one rank", "of several ranks"])
def test_many_adapters_cost_about_as_many_kernels_as_one(ranks: list[int]) -> None:
    assert counts.kernel_calls(ranks) <= 1.3 * counts.kernel_calls([32])

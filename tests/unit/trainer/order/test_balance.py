"""Every rank has as much to do, whoever the work is of: from operations to what each rank computes."""

from __future__ import annotations

import pytest

from bench.counted import structure
from bench.counted.balance import busy, loads, passes

RANKS, TOKENS = 8, 8192


@pytest.mark.parametrize(
    "tenants",
    [
        [[1000]] * 8,
        [[100] * 10] * 8,
        [[125] * 8] * 8,
        [[128] * 64],
        [[1024] * 32],
        [[128] * 512] * 3,
    ],
    ids=["8 x 1000", "8 x 10 x 100", "8 x 8 x 125", "64 x 128", "32 x 1024", "3 x 512 x 128"],
)
def test_all_ranks_are_loaded_within_a_tenth(tenants: list[list[int]]) -> None:
    found = loads(passes(tenants, RANKS, TOKENS))
    assert sum(found) == sum(map(sum, tenants))
    assert max(found) <= 1.1 * min(found)


@pytest.mark.parametrize("ranks", [2, 4, 8])
@pytest.mark.parametrize("tenants", structure.MANY.values(), ids=structure.MANY)
def test_ranks_wait_little_for_each_other_while_there_is_more_to_do(
    tenants: list[list[int]], ranks: int
) -> None:
    found = passes(tenants, ranks, TOKENS)
    assert sum(loads(found)) == sum(map(sum, tenants))
    assert busy(found) >= 0.85

"""When ZeRO-3 can share weights as it is asked to."""

from __future__ import annotations

import pytest

from services.common.worlds.sharding import Sharding, mistakes


@pytest.mark.parametrize(
    ("sharding", "flag"),
    [
        (Sharding(replica_ranks=2), "--zero-replica-ranks 2"),
        (Sharding(prefetch_elements=0), "--zero-prefetch-elements 0"),
        (Sharding(quantized_base=True), "--zero-quantized-base yes"),
    ],
)
def test_what_is_for_stage_3_is_refused_below_it(sharding: Sharding, flag: str) -> None:
    for stage in (0, 1, 2):
        (sentence,) = mistakes(sharding, stage, 4)
        assert sentence.startswith(f"{flag} says how ZeRO-3 shares weights")
        assert "give --zero-stage 3" in sentence
    assert mistakes(sharding, 3, 4) == []
    assert mistakes(Sharding(), 0, 4) == []


@pytest.mark.parametrize(
    ("ranks", "size", "choices"),
    [(4, 3, "1 or 2"), (4, 4, "1 or 2"), (4, 8, "1 or 2"), (2, 2, "1"), (1, 2, "1"), (6, 4, "1 or 2 or 3")],
)
def test_replicas_are_of_equal_groups_of_which_there_are_several(ranks: int, size: int, choices: str) -> None:
    (sentence,) = mistakes(Sharding(replica_ranks=size), 3, ranks)
    assert sentence.startswith(f"--zero-replica-ranks {size}: a trainer of {ranks} ranks")
    assert sentence.endswith(f"give {choices}")
    assert mistakes(Sharding(replica_ranks=size), 3) == []


@pytest.mark.parametrize(("ranks", "size"), [(4, 2), (6, 3), (8, 4), (16, 8), (1, 1)])
def test_a_divisor_of_the_ranks_is_taken(ranks: int, size: int) -> None:
    assert mistakes(Sharding(replica_ranks=size), 3, ranks) == []

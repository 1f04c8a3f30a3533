"""Which experts leave with which tokens: of steps without a token, drafts, and sequences begun again."""

from __future__ import annotations

import numpy as np

from services.sampler.engine.experts.routed_rows import RoutedRows


def rows(*values: int) -> np.ndarray:
    return np.array(values, np.uint8)[:, None, None]


def values(taken: np.ndarray | None) -> list[int] | None:
    return None if taken is None else taken[:, 0, 0].tolist()


def test_a_prompt_that_is_read_in_parts_leaves_whole_with_the_first_token() -> None:
    of = RoutedRows()
    of.add(0, rows(1, 2))
    of.add(2, rows(3, 4))
    assert values(of.take(4)) == [1, 2, 3, 4]
    of.add(4, rows(5))
    assert values(of.take(5)) == [5]


def test_drafts_that_did_not_hold_stay_behind() -> None:
    of = RoutedRows()
    of.add(0, rows(1))
    of.take(1)
    of.add(1, rows(2, 3, 90, 91))
    assert values(of.take(3)) == [2, 3]
    of.add(3, rows(4))
    assert values(of.take(4)) == [4]


def test_what_is_computed_again_replaces_only_what_has_not_left() -> None:
    of = RoutedRows()
    of.add(0, rows(1, 2, 3))
    of.take(3)
    # It was given up with a step under way, and begins anew in parts.
    of.add(3, rows(90))
    of.add(0, rows(91, 92))
    of.add(2, rows(93, 4))
    assert values(of.take(4)) == [4]


def test_a_first_part_that_is_computed_again_is_taken_from_the_second_time() -> None:
    of = RoutedRows()
    of.add(0, rows(90, 91))
    of.add(0, rows(1, 2, 3))
    assert values(of.take(3)) == [1, 2, 3]


def test_between_tokens_of_which_one_is_missing_nothing_leaves() -> None:
    of = RoutedRows()
    of.add(0, rows(1))
    of.add(2, rows(3))
    assert of.take(3) is None
    of.add(0, rows(1, 2, 3))
    assert of.take(3) is None


def test_of_nothing_nothing_leaves() -> None:
    of = RoutedRows()
    assert of.take(0) is None
    of.add(0, rows(1))
    assert of.take(2) is None

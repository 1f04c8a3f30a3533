"""Operations are cut into units of bounded size, and batches are dealt evenly."""

import random

import pytest

from services.trainer.order.microbatch import deal, split_operation


def test_every_datum_is_in_exactly_one_unit() -> None:
    lengths = [random.Random(1).randint(1, 50) for _ in range(97)]
    units = split_operation(lengths, 128)
    assert sorted(index for unit in units for index in unit) == list(range(97))


def test_the_tokens_of_a_unit_stay_within_the_budget() -> None:
    lengths = [random.Random(2).randint(1, 64) for _ in range(200)]
    for unit in split_operation(lengths, 256):
        assert sum(lengths[index] for index in unit) <= 256


def test_a_datum_longer_than_the_budget_is_alone() -> None:
    assert split_operation([5, 100, 5], 20) == [[1], [0, 2]]


def test_datums_of_similar_length_share_a_unit() -> None:
    assert split_operation([1, 30, 2, 31, 1, 29], 90) == [[3, 1, 5], [2, 0, 4]]


def test_the_split_depends_on_nothing_but_lengths_and_budget() -> None:
    assert split_operation([7, 7, 7, 3], 14) == split_operation([7, 7, 7, 3], 14) == [[0, 1], [2, 3]]


def test_no_datums_make_no_units() -> None:
    assert split_operation([], 10) == []


def test_a_budget_below_one_token_is_refused() -> None:
    with pytest.raises(ValueError, match="at least 1"):
        split_operation([1], 0)


def test_batches_are_dealt_evenly_and_dealing_can_go_on_where_it_ended() -> None:
    assert deal(5, 2, 0) == [[0, 2, 4], [1, 3]]
    whole, first, rest = deal(5, 2, 0), deal(3, 2, 0), deal(2, 2, 3)
    assert whole == [first[rank] + [batch + 3 for batch in rest[rank]] for rank in range(2)]

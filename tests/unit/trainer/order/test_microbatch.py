"""Operations are cut into units of bounded size, and batches are dealt evenly."""

import random

import numpy as np
import pytest

from services.trainer.order.microbatch import SENT, Unit, deal, split_operation
from services.trainer.order.prefixes import BLOCK, shared_tree


def sequences(lengths: list[int]) -> list[bytes]:
    """Sequences of these lengths, none of which begins like another."""
    return [np.full(length, number, "<i4").tobytes() for number, length in enumerate(lengths)]


def group(seed: int, prefix: int, lengths: list[int]) -> list[bytes]:
    """Answers of these lengths to one prompt of `prefix` tokens."""
    rng = np.random.default_rng(seed)
    prompt = rng.integers(0, 1000, prefix)
    answers = [rng.integers(0, 1000, length) for length in lengths]
    return [np.concatenate([prompt, answer]).astype("<i4").tobytes() for answer in answers]


def cut(lengths: list[int], budget: int) -> list[list[int]]:
    return [list(unit.datums) for unit in split_operation(sequences(lengths), budget, shared=True)]


def test_every_datum_is_in_exactly_one_unit() -> None:
    lengths = [random.Random(1).randint(1, 50) for _ in range(97)]
    assert sorted(index for unit in cut(lengths, 128) for index in unit) == list(range(97))


def test_the_tokens_of_a_unit_stay_within_the_budget() -> None:
    lengths = [random.Random(2).randint(1, 64) for _ in range(200)]
    for unit in cut(lengths, 256):
        assert sum(lengths[index] for index in unit) <= 256


def test_a_datum_longer_than_the_budget_is_alone() -> None:
    assert cut([5, 100, 5], 20) == [[1], [0, 2]]


def test_datums_of_similar_length_share_a_unit() -> None:
    assert cut([1, 30, 2, 31, 1, 29], 90) == [[3, 1, 5], [2, 0, 4]]


def test_the_split_depends_on_nothing_but_the_tokens_and_the_budget() -> None:
    assert cut([7, 7, 7, 3], 14) == cut([7, 7, 7, 3], 14) == [[0, 1], [2, 3]]


def test_no_datums_make_no_units() -> None:
    assert cut([], 10) == []


def test_a_budget_below_one_token_is_refused() -> None:
    with pytest.raises(ValueError, match="at least 1"):
        cut([1], 0)


def test_a_prefix_counts_once_in_a_unit_and_again_in_the_next() -> None:
    answers = group(1, 64, [16] * 6)
    # The prompt and two answers, thrice.
    assert split_operation(answers, 64 + 2 * 16, shared=True) == [
        Unit((first, first + 1), 96) for first in (0, 2, 4)
    ]
    assert split_operation(answers, 64 + 2 * 16, shared=False) == [Unit((index,), 80) for index in range(6)]


def test_answers_to_one_prompt_stay_together_wherever_they_stand_in_the_request() -> None:
    one, other = group(1, 64, [32] * 3), group(2, 64, [32] * 3)
    mixed = [each for pair in zip(one, other, strict=True) for each in pair]
    assert split_operation(mixed, 64 + 3 * 32, shared=True) == [Unit((0, 2, 4), 160), Unit((1, 3, 5), 160)]


def test_a_unit_counts_what_the_tree_of_its_own_datums_has() -> None:
    rng = random.Random(3)
    data = [
        each
        for seed in range(8)
        for each in group(seed, rng.randint(0, 5 * BLOCK), [rng.randint(1, 70) for _ in range(6)])
    ]
    data += [each + data[0] for each in data[:10]] + data[:3]
    for budget in (1, 100, 300, 5000):
        units = split_operation(data, budget, shared=True)
        assert sorted(index for unit in units for index in unit.datums) == list(range(len(data)))
        for unit in units:
            assert unit.tokens == shared_tree([data[index] for index in unit.datums]).tokens
            assert unit.tokens <= budget or len(unit.datums) == 1


def test_a_header_that_all_begin_with_counts_for_each() -> None:
    assert split_operation(group(1, 16, [84] * 4), 200, shared=True) == [
        Unit((0, 1), 200),
        Unit((2, 3), 200),
    ]


def test_the_longest_datum_comes_first_at_every_fork() -> None:
    prompt, short, long = [1] * 64, [2] * 16, [3] * 32
    data = [
        prompt + short,
        prompt,
        prompt + long,
        prompt + long + [4] * 16,
        prompt + long + [5] * 48,
        [6] * 9,
    ]
    units = split_operation([np.array(each, "<i4").tobytes() for each in data], 1000, shared=True)
    assert [unit.datums for unit in units] == [(4, 3, 2, 0, 1, 5)]


def test_a_unit_has_a_bound_however_much_its_datums_share() -> None:
    equal = [np.full(16, 7, "<i4").tobytes()] * 10_000
    units = split_operation(equal, 100, shared=True)
    assert {(len(unit.datums), unit.tokens) for unit in units} == {(SENT * 100 // 16, 16)}
    assert sum(len(unit.datums) for unit in units) == 10_000


def test_batches_are_dealt_evenly_and_dealing_can_go_on_where_it_ended() -> None:
    assert deal(5, 2, 0) == [[0, 2, 4], [1, 3]]
    whole, first, rest = deal(5, 2, 0), deal(3, 2, 0), deal(2, 2, 3)
    assert whole == [first[rank] + [batch + 3 for batch in rest[rank]] for rank in range(2)]

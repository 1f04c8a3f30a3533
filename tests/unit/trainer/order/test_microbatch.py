"""Operations are cut into units of bounded size, and batches are dealt evenly."""

import random

import numpy as np
import pytest

from services.trainer.order.microbatch import SENT, Unit, deal, deals_on, split_operation
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
        [6] * 100,
    ]
    units = split_operation([np.array(each, "<i4").tobytes() for each in data], 1000, shared=True)
    assert [unit.datums for unit in units] == [(4, 3, 2, 0, 1, 5)]


def test_a_unit_has_a_bound_however_much_its_datums_share() -> None:
    equal = [np.full(16, 7, "<i4").tobytes()] * 10_000
    units = split_operation(equal, 100, shared=True)
    assert {(len(unit.datums), unit.tokens) for unit in units} == {(SENT * 100 // 16, 16)}
    assert sum(len(unit.datums) for unit in units) == 10_000


def test_only_a_model_that_trains_alone_goes_on_where_its_last_pass_ended() -> None:
    assert deals_on({"a"}, trains=True) == "a"
    assert deals_on({"a"}, trains=False) is None
    assert deals_on({"a", "b"}, trains=True) is None
    assert deals_on(set(), trains=True) is None


def test_batches_go_to_the_rank_that_has_least_and_dealing_can_go_on_where_it_ended() -> None:
    assert deal([1] * 5, [0, 0]) == [[0, 2, 4], [1, 3]]
    assert deal([5, 1, 1, 3], [0, 0]) == [[0], [1, 2, 3]]
    loads = [0, 0]
    whole = deal([3, 1, 4, 1, 5], [0, 0])
    first, rest = deal([3, 1, 4], loads), deal([1, 5], loads)
    assert whole == [first[rank] + [batch + 3 for batch in rest[rank]] for rank in range(2)]
    assert sum(loads) == 14


@pytest.mark.parametrize(
    ("lengths", "ranks", "units"),
    [
        ([128] * 64, 8, [1024] * 8),
        ([128] * 64, 1, [8192]),
        ([1000], 8, [1000]),
        ([100] * 10, 8, [400, 400, 200]),
        ([16] * 8, 8, [128]),
        ([128] * 256, 8, [4096] * 8),
        ([128] * 768, 8, [6144] * 16),
    ],
)
def test_an_operation_is_cut_for_all_ranks_where_that_is_worth_it(
    lengths: list[int], ranks: int, units: list[int]
) -> None:
    made = split_operation(sequences(lengths), 8192, shared=True, ranks=ranks)
    assert [unit.tokens for unit in made] == units
    assert sorted(index for unit in made for index in unit.datums) == list(range(len(lengths)))


def test_answers_to_one_prompt_are_not_cut_apart_for_more_ranks_than_that_is_worth() -> None:
    answers = group(1, 2048, [64] * 16)
    (alone,) = split_operation(answers, 8192, shared=True, ranks=8)
    assert alone.tokens == 2048 + 16 * 64
    several = [datum for seed in range(8) for datum in group(seed, 2048, [64] * 16)]
    made = split_operation(several, 65536, shared=True, ranks=8)
    assert [unit.tokens for unit in made] == [2048 + 16 * 64] * 8


def test_answers_are_cut_apart_for_as_many_ranks_as_compute_hardly_more_tokens_for_it() -> None:
    # With a prompt for each of two ranks a sixteenth more, of four a sixth.
    made = split_operation(group(1, 1024, [1024] * 16), 65536, shared=True, ranks=8)
    assert [unit.tokens for unit in made] == [1024 + 8 * 1024] * 2


def test_uneven_datums_are_cut_evenly() -> None:
    lengths = np.random.default_rng(0).lognormal(5, 0.8, 512).clip(16, 1024).astype(int).tolist()
    made = split_operation(sequences(lengths), 65536, shared=True, ranks=8)
    sizes = [unit.tokens for unit in made]
    assert len(sizes) == 8
    assert max(sizes) <= 1.1 * sum(lengths) / 8


@pytest.mark.parametrize("shared", [True, False])
def test_datums_that_no_rank_holds_are_units_of_all_ranks_and_come_first(shared: bool) -> None:
    found = split_operation(sequences([5, 101, 7, 300, 100]), 128, shared=shared, one_rank=100)
    assert found[:2] == [Unit((3,), 300, split=True), Unit((1,), 101, split=True)]
    assert not any(unit.split for unit in found[2:])
    assert sorted(index for unit in found[2:] for index in unit.datums) == [0, 2, 4]


def test_what_each_rank_holds_is_cut_as_if_the_others_were_not_there() -> None:
    lengths = [300, 5, 7, 9, 4, 8]
    with_long = split_operation(sequences(lengths), 16, shared=True, ranks=2, one_rank=100)
    without = split_operation(sequences(lengths)[1:], 16, shared=True, ranks=2)
    moved = [Unit(tuple(index + 1 for index in unit.datums), unit.tokens) for unit in without]
    assert with_long == [Unit((0,), 300, split=True), *moved]


def test_without_a_bound_no_datum_is_of_all_ranks() -> None:
    assert not any(unit.split for unit in split_operation(sequences([5, 10**5]), 16, shared=True, ranks=2))

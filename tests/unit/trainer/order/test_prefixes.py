"""What sequences begin with alike is found once, however they are nested, at a bounded cost."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from services.trainer.order import prefixes
from services.trainer.order.prefixes import (
    Piece,
    PrefixTree,
    computed_tokens,
    prefix_tree,
    shared_tree,
    told_apart,
    unshared,
)

# Few tokens, so that sequences begin alike, are equal, and are prefixes of each other.
NESTED = st.lists(st.lists(st.integers(0, 2), min_size=1, max_size=12), max_size=14)


def packed(sequences: list[list[int]]) -> list[bytes]:
    return [np.array(each, "<i4").tobytes() for each in sequences]


def path(tree: PrefixTree, number: int) -> list[Piece]:
    """The pieces of a sequence from its start."""
    found, piece = [], tree.last[number]
    while piece >= 0:
        found.append(tree.pieces[piece])
        piece = tree.pieces[piece].parent
    return found[::-1]


@settings(deadline=None)
@given(NESTED, st.integers(1, 4))
def test_every_sequence_is_the_pieces_on_its_path(sequences: list[list[int]], block: int) -> None:
    tree = prefix_tree(packed(sequences), block)
    for number, sequence in enumerate(sequences):
        read: list[int] = []
        for piece in path(tree, number):
            assert piece.start == len(read) < piece.stop
            assert piece.sequence <= number
            read += sequences[piece.sequence][piece.start : piece.stop]
        assert read == sequence


@settings(deadline=None)
@given(NESTED, st.integers(1, 4))
def test_whole_blocks_that_begin_sequences_are_there_once(sequences: list[list[int]], block: int) -> None:
    whole = {tuple(each[:stop]) for each in sequences for stop in range(block, len(each) + 1, block)}
    rests = sum(len(each) % block for each in sequences)
    assert prefix_tree(packed(sequences), block).tokens == block * len(whole) + rests


@settings(deadline=None)
@given(NESTED, st.integers(1, 4))
def test_pieces_come_before_what_continues_them_and_nothing_comes_between(
    sequences: list[list[int]], block: int
) -> None:
    pieces = prefix_tree(packed(sequences), block).pieces
    ancestors: list[int] = []
    for number, piece in enumerate(pieces):
        while ancestors and ancestors[-1] != piece.parent:
            ancestors.pop()
        assert ancestors or piece.parent == -1
        assert piece.start == (pieces[piece.parent].stop if piece.parent >= 0 else 0)
        ancestors.append(number)
    for parent in range(-1, len(pieces)):
        firsts = [piece.sequence for piece in pieces if piece.parent == parent]
        assert firsts == sorted(firsts)
    assert len(pieces) < max(1, 2 * len(sequences))


@settings(deadline=None)
@given(NESTED, st.sets(st.integers(0, 13)), st.integers(1, 4))
def test_what_some_share_does_not_depend_on_the_rest(
    sequences: list[list[int]], chosen: set[int], block: int
) -> None:
    some = sorted(number for number in chosen if number < len(sequences))
    tree = prefix_tree(packed(sequences), block)
    counted = {piece for number in some for piece in path(tree, number)}
    part = prefix_tree(packed([sequences[number] for number in some]), block)
    assert part.tokens == sum(piece.tokens for piece in counted)


def test_sequences_that_begin_alike_for_less_than_a_block_are_kept_as_they_came() -> None:
    sequences = packed([[7] * 15 + [number] for number in (3, 1, 2)])
    assert prefix_tree(sequences) == unshared(sequences)


def test_a_header_that_all_begin_with_is_computed_for_each() -> None:
    sequences = packed([[7] * 16 + [number] * 100 for number in range(50)])
    assert prefix_tree(sequences).tokens == 16 + 50 * 100
    assert shared_tree(sequences) == unshared(sequences)


def test_a_tree_is_computed_where_it_saves_a_quarter() -> None:
    assert computed_tokens(400, 300) == 300
    assert computed_tokens(400, 301) == 400
    # 64 of 256 tokens, and 64 of 258.
    for length, tokens in ((64, 192), (65, 258)):
        assert shared_tree(packed([[7] * 64 + [number] * length for number in (1, 2)])).tokens == tokens


def test_whether_a_tree_is_worth_it_is_asked_of_each_by_itself() -> None:
    answers = [[5] * 64 + [number] * 8 for number in range(3)]
    headed = [[6] * 16 + [number] * 90 for number in range(3)]
    sequences = packed([each for pair in zip(headed, answers, strict=True) for each in pair])
    assert shared_tree(sequences) == PrefixTree(
        (
            Piece(-1, 0, 106, 0),
            Piece(-1, 0, 64, 1),
            Piece(1, 64, 72, 1),
            Piece(1, 64, 72, 3),
            Piece(1, 64, 72, 5),
            Piece(-1, 0, 106, 2),
            Piece(-1, 0, 106, 4),
        ),
        (0, 2, 5, 3, 6, 4),
    )


@settings(deadline=None)
@given(NESTED, st.integers(1, 4))
def test_what_is_computed_has_each_sequence_and_is_what_is_counted(
    sequences: list[list[int]], block: int
) -> None:
    tree, shared = prefix_tree(packed(sequences), block), shared_tree(packed(sequences), block)
    for number, sequence in enumerate(sequences):
        assert shared.pieces[shared.last[number]].stop == len(sequence)
    expected = 0
    for root in set(tree.roots()):
        sent = sum(
            len(sequence)
            for number, sequence in enumerate(sequences)
            if tree.roots()[tree.last[number]] == root
        )
        mine = (piece.tokens for piece, above in zip(tree.pieces, tree.roots(), strict=True) if above == root)
        expected += computed_tokens(sent, sum(mine))
    assert shared.tokens == expected


@pytest.mark.parametrize(
    "sequences",
    [
        [[5] * 512 + [number] for number in range(10_000)],
        [[5] * 512] * 10_000,
        [[5] * (1 + number) for number in range(1500)],
        [[5] * (1500 - number) + [6] * number for number in range(1500)],
    ],
    ids=["of one prefix", "equal", "each a prefix of the next", "long and nearly alike"],
)
def test_each_sequence_is_compared_with_one_other(
    sequences: list[list[int]], monkeypatch: pytest.MonkeyPatch
) -> None:
    compared: list[int] = []
    original = prefixes._alike

    def counted(one: bytes, other: bytes, block: int) -> int:
        compared.append(min(len(one), len(other)) // 4)
        return original(one, other, block)

    monkeypatch.setattr(prefixes, "_alike", counted)
    tree = prefix_tree(packed(sequences))
    assert len(compared) == len(sequences)
    assert sum(compared) <= sum(map(len, sequences))
    assert len(tree.pieces) < 2 * len(sequences)
    assert tree.tokens <= sum(map(len, sequences))


@settings(deadline=None)
@given(
    NESTED,
    st.lists(st.lists(st.integers(0, 1), min_size=12, max_size=12), min_size=14, max_size=14),
    st.data(),
)
def test_numbers_are_equal_where_tokens_and_what_belongs_to_them_are(
    sequences: list[list[int]], beside: list[list[int]], data: st.DataObject
) -> None:
    given_any = [data.draw(st.booleans()) for _ in sequences]
    ids = [
        bytes(value for each in more[: len(sequence)] for value in (each, 3)) if some else b""
        for sequence, more, some in zip(sequences, beside, given_any, strict=False)
    ]
    made = [np.frombuffer(each, "<i4").tolist() for each in told_apart(packed(sequences), ids)]
    meant = [
        [(token, ids[number][2 * place : 2 * place + 2]) for place, token in enumerate(sequence)]
        for number, sequence in enumerate(sequences)
    ]
    assert [len(each) for each in made] == [len(each) for each in sequences]
    numbers = [number for each in made for number in each]
    meanings = [meaning for each in meant for meaning in each]
    assert len(set(numbers)) == len(set(meanings)) == len(set(zip(numbers, meanings, strict=True)))


def test_sequences_beside_which_there_is_nothing_stay_what_they_are() -> None:
    sequences = packed([[5, 6], [5]])
    assert told_apart(sequences, [b"", b""]) == sequences


def test_rows_that_hash_alike_are_told_apart(monkeypatch: pytest.MonkeyPatch) -> None:
    class Even:
        def integers(self, *_: object, **__: object) -> np.ndarray:
            return np.full(2, 2**63, np.uint64)

    # Odd factors of which the upper bits are nothing: words that change places change no sum.
    monkeypatch.setattr(prefixes.np.random, "default_rng", lambda _: Even())
    one, other = (np.array(words, "<u8").view(np.uint8)[None] for words in ([1, 2], [2, 1]))
    rows = np.concatenate([one, other, one])
    first, second, third = prefixes._numbered(rows).tolist()
    assert first == third != second

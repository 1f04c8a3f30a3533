"""A micro-batch of rows holds what the rows hold, end to end, and nothing else."""

import msgspec
import numpy as np
import torch

from services.common.contract.experts.routing import RoutedExperts
from services.trainer.compute.collate import collate, in_order, row_output
from services.trainer.compute.data import Row
from services.trainer.compute.split.exchange import Exchange
from services.trainer.compute.split.share import Share
from tests.component.engine.data import ce_row, critic_row


def test_a_row_with_many_targets_costs_the_rows_beside_it_nothing() -> None:
    rows = [ce_row(1, 1, columns=300), *(ce_row(seed, 1) for seed in range(2, 50)), ce_row(60, 3, columns=2)]
    batch = collate(rows, "cpu", shared=True)
    assert batch.targets.ids.shape == (300 + 48 + 6,)
    assert batch.targets.widths == ((1, 300), (48, 1), (3, 2))
    assert batch.targets.positions == batch.tokens.numel() == 52


def test_every_row_gets_what_belongs_to_its_targets_in_their_shape() -> None:
    rows = in_order([ce_row(1, 4, columns=3), critic_row(2, 5), ce_row(3, 2), ce_row(4, 2, columns=1)])
    batch = collate(rows, "cpu", shared=True)
    scores = torch.arange(5.0) + 0.5
    for number in (0, 1, 2):
        output = row_output(batch.targets.ids.float(), scores, batch, number, rows[number])
        targets = rows[number].loss_inputs["target_tokens"].values()
        np.testing.assert_array_equal(output.numpy(), targets.astype(np.float32))
    assert row_output(batch.targets.ids.float(), scores, batch, 3, rows[3]).tolist() == scores.tolist()


def test_the_targets_of_some_positions_are_those_positions_targets() -> None:
    rows = [ce_row(1, 4, columns=3), ce_row(2, 3), ce_row(3, 2, columns=2)]
    targets = collate(rows, "cpu", shared=True).targets
    per_position = [
        list(position)
        for row in rows
        for position in row.loss_inputs["target_tokens"].values().reshape(row.length, -1)
    ]
    for start in range(10):
        for stop in range(start, 10):
            part = targets[start:stop]
            assert part.positions == stop - start
            assert part.ids.tolist() == [target for each in per_position[start:stop] for target in each]


def test_a_batch_has_no_token_but_those_of_its_rows_in_their_order() -> None:
    rows = in_order([critic_row(2, 5), ce_row(3, 2), ce_row(4, 9)])
    batch = collate(rows, "cpu", shared=True)
    assert batch.tokens.int().numpy().tobytes() == b"".join(row.tokens for row in rows)
    assert batch.sequences.lengths == (2, 9, 5)
    assert batch.targets.positions == 11


def routed(row: Row, *experts: int) -> Row:
    """One layer, one expert a token; the last one for the rest."""
    ids = [*experts, *[experts[-1]] * (row.length - len(experts))]
    return msgspec.structs.replace(row, routed=RoutedExperts((row.length, 1, 1), bytes(ids)))


def test_every_token_has_the_experts_that_its_row_is_given() -> None:
    rows = in_order([routed(ce_row(1, 3), 4, 5, 6), ce_row(2, 2), routed(ce_row(3, 2), 200)])
    assert collate(rows[1:2], "cpu", shared=True).chosen is None
    batch = collate(rows, "cpu", shared=True)
    assert batch.chosen is not None
    assert batch.chosen[:, 0, 0].tolist() == [4, 5, 6, -1, -1, 200, 200]


def test_what_rows_begin_with_is_there_once_only_as_far_as_they_are_given_the_same_experts() -> None:
    alike = [msgspec.structs.replace(ce_row(1, 64), index=index) for index in range(3)]
    shared = collate([routed(row, 7) for row in alike], "cpu", shared=True)
    assert (shared.tokens.numel(), shared.sequences.lengths) == (64, (64,))
    # From token 40 on, in the middle of a block.
    late = [routed(alike[0], 7), routed(alike[1], *[7] * 40, 8), routed(alike[2], 7)]
    batch = collate(late, "cpu", shared=True)
    assert batch.tokens.numel() == 64 + (64 - 32)
    assert batch.chosen is not None
    assert batch.chosen[:, 0, 0].tolist() == [7] * 64 + [7] * 8 + [8] * 24
    mixed = collate([routed(alike[0], 7), alike[1], alike[2]], "cpu", shared=True)
    assert mixed.tokens.numel() == 128


def test_a_ranks_part_of_a_row_has_the_experts_of_its_tokens_and_chooses_for_what_fills_it_up() -> None:
    batch = collate([routed(ce_row(1, 5), 1, 2, 3, 4, 5)], "cpu", shared=False)
    # Which connects ranks when it is made, and nothing is exchanged here.
    unused = Exchange.__new__(Exchange)
    parts = [batch.part(Share(rank, 2, 5), unused).chosen for rank in (0, 1)]
    assert [part[:, 0, 0].tolist() for part in parts if part is not None] == [[1, 2, 3], [4, 5, -1]]

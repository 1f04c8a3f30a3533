"""A micro-batch of rows holds what the rows hold, end to end, and nothing else."""

import numpy as np
import torch

from services.trainer.compute.collate import collate, in_order, row_output
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

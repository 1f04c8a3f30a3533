"""All rows of a micro-batch in one call per loss come to what each comes to alone."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import pytest
import torch

from services.trainer.compute.batch_losses import BatchLosses
from services.trainer.compute.collate import Collated, collate, idle_batch, in_order
from services.trainer.compute.data import PassOp, Row, RowResult
from services.trainer.compute.losses import LOSSES
from tests.component.engine.data import ce_row, critic_row, is_row, with_input, work

OPS = [
    PassOp("a", 1, "gspo", {"clip_low_threshold": 0.9}),
    PassOp("b", 1, "cross_entropy"),
    PassOp("c", 1, "ppo", {"clip_high_threshold": 1.05}),
    PassOp("d", 1, "ppo_critic", {"value_clip": 0.1}),
    PassOp("e", 1, "ppo"),
    PassOp("f", 1, "dro", {"beta": 0.5}),
    PassOp("g", 1, "dro", {"beta": 0.0}),
    PassOp("h", 1, "cispo", {"clip_high_threshold": 1.01}),
    PassOp("i", 1, "importance_sampling"),
    PassOp("j", 1, "ppo_critic"),
    PassOp("k", 1, "gspo"),
]
MASK = (np.arange(30) >= 20).astype(np.float32)
ROWS = [
    [is_row(1, 12), with_input(is_row(2, 30), "sequence_ratio_mask", MASK)],
    [ce_row(3, 7), ce_row(4, 3, columns=5)],
    [is_row(5, 9), with_input(is_row(6, 14), "clip_low_threshold", np.full(14, 0.95, np.float32))],
    [critic_row(7, 8), critic_row(8, 5, weighted=False)],
    [is_row(9, 9), is_row(10, 1)],
    [is_row(11, 6)],
    [is_row(12, 6), is_row(13, 4)],
    [is_row(14, 25)],
    [is_row(15, 10)],
    [critic_row(16, 11)],
    [is_row(17, 13)],
]


def computed(rows: Sequence[Row]) -> tuple[list[RowResult], list[np.ndarray]]:
    """The rows' results and the gradients of their outputs, which depend on the row alone."""
    batch = collate(rows, "cpu", shared=True)
    outputs = [torch.zeros(batch.targets.ids.shape[0]), torch.zeros(batch.tokens.numel())]
    outputs[1] = outputs[1][batch.targets.positions :]
    for number, row in enumerate(rows):
        made = np.random.default_rng([row.op, row.index]).normal(-6, 0.5, len(batch.places[number]))
        outputs[_kind(row)][batch.places[number]] = torch.from_numpy(made).float()
    logprobs, values = (output.requires_grad_() for output in outputs)
    losses = BatchLosses(OPS, rows, batch, "cpu").compute(logprobs, values)
    losses.total(collective=False).backward()
    return losses.leave().results(), _gradients(rows, batch, (logprobs, values))


def _kind(row: Row) -> int:
    return "target_tokens" not in row.loss_inputs


def _gradients(
    rows: Sequence[Row], batch: Collated, outputs: tuple[torch.Tensor, torch.Tensor]
) -> list[np.ndarray]:
    found = []
    for number, row in enumerate(rows):
        grad = outputs[_kind(row)].grad
        assert grad is not None
        found.append(grad[batch.places[number]].numpy())
    return found


def placed() -> list[Row]:
    made = work(*zip(OPS, ROWS, strict=True))
    return in_order(row for batch in made.micro_batches for row in batch.rows)


def test_rows_of_every_loss_come_to_what_each_comes_to_alone() -> None:
    rows = placed()
    assert {op.loss_fn for op in OPS} == LOSSES.keys()
    results, gradients = computed(rows)
    assert [(result.op, result.index) for result in results] == [(row.op, row.index) for row in rows]
    for row, result, gradient in zip(rows, results, gradients, strict=True):
        (alone,), (own,) = computed([row])
        assert result.outputs == alone.outputs
        assert result.metrics == pytest.approx(alone.metrics, rel=1e-12)
        np.testing.assert_array_equal(gradient, own)
    assert sum(bool(gradient.any()) for gradient in gradients) >= len(rows) - 1


def test_a_row_that_is_not_finite_leaves_the_rows_of_its_loss_as_they_are() -> None:
    rows = placed()
    for number, row in enumerate(rows):
        name = "returns" if _kind(row) else "logprobs"
        if name not in row.loss_inputs:
            continue
        bad = with_input(row, name, np.full(row.length, -3e38, np.float32))
        results, gradients = computed([*rows[:number], bad, *rows[number + 1 :]])
        expected, wanted = computed(rows)
        for other in range(len(rows)):
            if other != number:
                assert results[other] == expected[other]
                np.testing.assert_array_equal(gradients[other], wanted[other])


def test_one_loss_is_one_call_however_many_rows_it_has(monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[int] = []
    original = torch.segment_reduce

    def counted(values: torch.Tensor, *args: object, **options: object) -> torch.Tensor:
        calls.append(values.shape[0])
        return original(values, *args, **options)

    monkeypatch.setattr(torch, "segment_reduce", counted)
    op = [PassOp("i", 1, "importance_sampling")]
    for count in (1, 40):
        calls.clear()
        made = work((op[0], [is_row(seed, 5) for seed in range(count)]))
        rows = in_order(made.micro_batches[0].rows)
        batch = collate(rows, "cpu", shared=True)
        BatchLosses(op, rows, batch, "cpu").compute(torch.zeros(5 * count), torch.zeros(0))
        assert calls == [5 * count] * 5


def test_a_rank_without_rows_has_a_loss_that_is_zero_and_of_the_whole_graph() -> None:
    logprobs, values = torch.ones(1, requires_grad=True), torch.ones(0, requires_grad=True)
    batch = idle_batch("cpu")
    losses = BatchLosses([], [], batch, "cpu").compute(logprobs, values)
    total = losses.total(collective=True)
    total.backward()
    assert total.item() == 0
    assert logprobs.grad is not None
    assert logprobs.grad.tolist() == [0.0]
    assert values.grad is not None


def test_the_slope_of_some_outputs_is_the_gradient_of_the_total() -> None:
    rows = [row for row in placed() if OPS[row.op].loss_fn != "gspo"]
    batch = collate(rows, "cpu", shared=True)
    count = batch.targets.ids.shape[0]
    logprobs = (torch.randn(count, generator=torch.Generator().manual_seed(1)) / 2 - 6).requires_grad_()
    losses = BatchLosses(OPS, rows, batch, "cpu")
    computed = losses.compute(logprobs, torch.zeros(batch.tokens.numel() - batch.targets.positions))
    (gradient,) = torch.autograd.grad(computed.total(collective=False), logprobs)
    slope = losses.slope()
    assert slope is not None
    assert gradient.any()
    for parts in (1, 7, count):
        cuts = [slice(low, min(low + parts, count)) for low in range(0, count, parts)]
        found = torch.cat([slope(logprobs.detach()[cut], cut) for cut in cuts])
        assert torch.equal(found, gradient)


def test_a_batch_with_a_sequences_ratio_has_no_slope() -> None:
    rows = placed()
    assert BatchLosses(OPS, rows, collate(rows, "cpu", shared=True), "cpu").slope() is None

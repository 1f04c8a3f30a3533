"""Blocks that compute their activations again compute the same."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers.modeling_layers import GradientCheckpointingLayer

from services.common.contract.errors import InvalidRequest
from services.trainer.compute.blocks.checkpointing import checkpoint_blocks


class Block(GradientCheckpointingLayer):
    """Drops out by itself, as OPT's blocks do."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(8, 8)

    def forward(self, hidden: Tensor) -> Tensor:
        return hidden + F.dropout(torch.tanh(self.linear(hidden)), 0.5, training=self.training)


def test_a_block_that_drops_out_by_itself_is_evaluated() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(Block(), Block()).eval()
    given = torch.randn(5, 8, requires_grad=True)
    expected = model(given)
    (gradient,) = torch.autograd.grad(expected.sum(), given)
    checkpoint_blocks(model)
    assert torch.equal(model(given), expected)
    assert torch.equal(torch.autograd.grad(model(given).sum(), given)[0], gradient)
    with torch.no_grad():
        assert torch.equal(model(given), expected)


def test_a_model_without_such_blocks_is_refused_with_what_to_do() -> None:
    with pytest.raises(InvalidRequest, match="start the trainer with --activation-checkpointing off"):
        checkpoint_blocks(nn.Linear(1, 1))

"""Blocks that keep only their input for the backward pass and compute the rest again there.

Invariant: it is the same computation, so the numbers do not depend on which blocks do so.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch.utils.checkpoint import checkpoint

from services.common.contract.errors import InvalidRequest


@dataclass
class Blocks:
    """A model's blocks.

    Attributes:
        count: how many there are.
        kept: of the last ones, how many keep all that their backward pass needs, in forward passes that run
            from now on.
    """

    count: int
    kept: int = 0


def checkpoint_blocks(model: Any) -> Blocks:
    """Makes each block compute its activations again in the backward pass instead of keeping them.

    Raises:
        InvalidRequest: the architecture has no blocks that could.
    """
    from transformers.modeling_layers import GradientCheckpointingLayer

    blocks = [module for module in model.modules() if isinstance(module, GradientCheckpointingLayer)]
    if not blocks:
        raise InvalidRequest(
            f"{type(model).__name__} cannot checkpoint its activations; start the trainer with "
            "--activation-checkpointing off"
        )
    found = Blocks(len(blocks))
    for number, block in enumerate(blocks):
        block.gradient_checkpointing = True
        block._gradient_checkpointing_func = partial(_computed, found, number)
        # transformers asks for it; what is in the block stays in evaluation mode.
        block.training = True
    return found


def _computed(blocks: Blocks, number: int, block: Any, *inputs: Any) -> Any:
    layer = block.func.__self__

    def run(*given: Any) -> Any:
        # A block that drops out by itself must see that it is evaluated.
        layer.training = False
        try:
            return block(*given)
        finally:
            layer.training = True

    # The last ones are done with first in the backward pass, before any is computed again.
    if not torch.is_grad_enabled() or number >= blocks.count - blocks.kept:
        return run(*inputs)
    # Under ZeRO-3 a weight is saved while it is here, and is gone when what was saved is compared.
    return checkpoint(run, *inputs, use_reentrant=False, preserve_rng_state=False, determinism_check="none")

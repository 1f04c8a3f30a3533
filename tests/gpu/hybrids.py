"""Models with linear attention on a device. On a CPU the same code computes the same."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from services.trainer.compute.attention import FLAT_ATTENTION, Sequences, register
from services.trainer.compute.prefix.layout import Layout, lay_out
from services.trainer.order.prefixes import PrefixTree, prefix_tree, unshared
from tests.unit.trainer.compute.architectures import HYBRID, config_of, random_model

ANSWERS = (40, 1, 70)
"""To one prompt of 96 tokens, which is more than a chunk."""


def linear_attention(device: str, directory: Path) -> None:
    """Sequences come in float32 to what they come to on a CPU, their gradients too, and where a state goes on
    in several of them."""
    del directory
    register()
    rng = np.random.default_rng(3)
    prompt = rng.integers(0, 60, 96)
    answers = [np.concatenate([prompt, rng.integers(0, 60, length)]) for length in ANSWERS]
    sequences = [tokens.astype("<i4").tobytes() for tokens in (*answers, rng.integers(0, 60, 33))]
    for name in HYBRID:
        # All experts are chosen: rounding has no token meet others.
        settings = HYBRID[name]
        if "num_experts" in settings:
            settings = {**settings, "num_experts_per_tok": settings["num_experts"]}
        model = random_model(config_of(name, settings), FLAT_ATTENTION).requires_grad_(False)
        for tree in (prefix_tree(sequences), unshared(sequences)):
            found, expected = (_computed(model, sequences, tree, where) for where in (device, "cpu"))
            for one, other in zip(found, expected, strict=True):
                assert float((one - other).norm() / other.norm()) < 1e-4


def _computed(model: Any, sequences: list[bytes], tree: PrefixTree, where: str) -> list[Tensor]:
    """Logits, and the gradient of a sum of them with different weights."""
    model = copy.deepcopy(model).to(where)
    layout: Layout = lay_out([(sequences, tree)])
    cut = Sequences.laid_out(layout, where)
    tokens = torch.from_numpy(layout.tokens)[None].to(where)
    embedded = model.get_input_embeddings()(tokens).detach().requires_grad_()
    options = {"use_cache": False, "position_ids": cut.positions, "sequences": cut}
    logits = model(inputs_embeds=embedded, **options).logits[0]
    weights = torch.linspace(-1, 1, logits.numel(), device=where).view_as(logits)
    (gradient,) = torch.autograd.grad((logits * weights).sum(), embedded)
    return [logits.detach().cpu(), gradient.cpu()]

"""Gradients of adapters."""

from __future__ import annotations

import numpy as np
import torch

from services.trainer.compute.tenant import LoraTenant


def give_gradient(tenant: LoraTenant, seq_id: int) -> None:
    """A random one, of an operation that is begun with it."""
    tenant.begin(seq_id)
    gradient, _ = tenant.gradient(seq_id)
    gradient.copy_(torch.from_numpy(np.random.default_rng(seq_id).normal(size=gradient.numel())))
    tenant.note_added(seq_id)

"""One model on the trainer: its adapter, its optimizer, and the gradient since its last step.

Invariant: the gradient is kept per operation until a later operation begins, so that one that fails in any
of its micro-batches leaves nothing behind; the total is always added up in seq_id order. All but the
gradient's values is equal on every rank.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

import torch
from torch import Tensor

from services.trainer.lora import Adapter, LoraPair
from services.trainer.optimizer import AdapterOptimizer
from services.trainer.plan import Failure


@dataclass
class Tenant:
    """Attributes:
    adapter: the masters.
    optimizer: over the masters.
    batches: physical batches dealt to ranks since the last step, of passes the model had for itself.
    """

    adapter: Adapter
    optimizer: AdapterOptimizer
    batches: int = 0
    _total: Tensor | None = None
    _closed: bool = False
    _open: dict[int, Tensor | None] = field(default_factory=dict)
    _failures: dict[int, Failure] = field(default_factory=dict)

    @property
    def has_gradient(self) -> bool:
        """Whether any operation since the last step added to the gradient, on any rank."""
        return self._closed or bool(self._open)

    def begin(self, seq_id: int) -> None:
        """A forward_backward has work in the coming pass (perhaps not its first)."""
        self._open.setdefault(seq_id, None)

    def pairs(self, seq_id: int | None) -> Mapping[str, LoraPair]:
        """The adapter's matrices, collecting the gradient of a begun operation; None = no gradient."""
        if seq_id is None:
            return self.adapter.pairs()
        gradient = self._open[seq_id]
        if gradient is None:
            gradient = self._open[seq_id] = torch.zeros_like(self.adapter.flat)
        return self.adapter.pairs(gradient)

    def failure(self, seq_id: int) -> Failure | None:
        """Why an earlier part of the operation failed."""
        return self._failures.get(seq_id)

    def fail(self, seq_id: int, failure: Failure) -> None:
        """The operation failed: its gradient is dropped, and what is left of it will fail too."""
        self._failures[seq_id] = failure
        self._open.pop(seq_id, None)

    def close_before(self, seq_id: int) -> None:
        """Operations before `seq_id` are complete: their gradients join the total."""
        for done in sorted(number for number in self._open if number < seq_id):
            gradient = self._open.pop(done)
            self._closed = True
            if gradient is not None:
                self._total = gradient if self._total is None else self._total.add_(gradient)

    def take_gradient(self) -> Tensor:
        """This rank's total, flat; zeros when the rank had no rows. Clears the gradient."""
        if self._open:
            self.close_before(max(self._open) + 1)
        total = self._total if self._total is not None else torch.zeros_like(self.adapter.flat)
        self.clear_gradient()
        return total

    def clear_gradient(self) -> None:
        """Forgets the gradient and the failures since the last step."""
        self._total, self._closed, self.batches = None, False, 0
        self._open.clear()
        self._failures.clear()

"""Log-probabilities under a constraint, with the V2 model runner of vLLM 0.32.

It writes the grammar's mask into the logits before its sampler takes "raw" log-probabilities of them, so
these are of what the grammar leaves (no upstream report found). Here the mask goes into a copy, which is what
is sampled from.

Invariant: the logits of which log-probabilities are taken are the model's own.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch


class GrammarMask:
    """Corrects a worker.

    Args:
        sampler: its V2 Sampler.
        masks: its StructuredOutputsWorker.
    """

    def __init__(self, sampler: Any, masks: Any) -> None:
        for part, name in ((sampler, "apply_sampling_params"), (masks, "apply_grammar_bitmask")):
            if not hasattr(part, name):
                raise RuntimeError(f"this vLLM's {type(part).__name__} has no {name}; check {__name__}")
        self._mask = masks.apply_grammar_bitmask
        self._settings = sampler.apply_sampling_params
        self._logits: torch.Tensor | None = None
        self._apply: Callable[[torch.Tensor], None] = lambda copy: None
        masks.apply_grammar_bitmask = self._later
        sampler.apply_sampling_params = self._with_settings

    def masked(self, logits: torch.Tensor) -> torch.Tensor:
        """What to sample from in this step: these logits, or a copy of what the grammar leaves."""
        # Others are of a step that failed before it came to sampling.
        mine = self._logits is logits
        self._logits = None
        if mine:
            logits = logits.clone()
            self._apply(logits)
        return logits

    def _later(self, logits: torch.Tensor, *args: Any, **kwargs: Any) -> None:
        self._logits = logits
        self._apply = lambda copy: self._mask(copy, *args, **kwargs)

    def _with_settings(self, logits: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
        made: torch.Tensor = self._settings(self.masked(logits), *args, **kwargs)
        return made

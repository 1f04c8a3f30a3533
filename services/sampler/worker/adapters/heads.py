"""Lets adapters of an output head be of any vocabulary (`LogitsProcessorWithLoRA` of vLLM 0.32).

vLLM refuses them above 258,048 tokens, which kernels that it no longer has could not do
(vllm-project/vllm#34773), and an engine of such a model, of Gemma 3 for one, ends at its start, for the sake
of adapters that nobody may ever ask it for.

Invariant: after `correct`, a head has slots for all rows of its vocabulary, as it has them of a smaller one.
"""

from __future__ import annotations

import functools
from typing import Any

from vllm.lora.layers.logits_processor import LogitsProcessorWithLoRA


def correct() -> None:
    """Has the workers of this process make them so."""
    create = LogitsProcessorWithLoRA.create_lora_weights

    @functools.wraps(create)
    def created(self: Any, *arguments: Any, **named: Any) -> None:
        base, vocabulary = self.base_layer, self.base_layer.vocab_size
        base.vocab_size = 0
        try:
            create(self, *arguments, **named)
        finally:
            base.vocab_size = vocabulary
        slots, one, _, rank = self.lora_b_stacked.shape
        self.lora_b_stacked = self.lora_b_stacked.new_zeros(slots, one, vocabulary, rank)

    LogitsProcessorWithLoRA.create_lora_weights = created

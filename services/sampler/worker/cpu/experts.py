"""Corrects how vLLM 0.32 loads weights of routed experts anew on a CPU (`UnquantizedFusedMoEMethod`).

Its kernel for CPUs has them filled up and packed. That is done when a model is loaded for the first time;
when weights are replaced, what comes from the files takes the place of what was packed: of some sizes it
does not fit, and of others every answer is wrong, as it was on GPUs too (vllm-project/vllm#42821). Here they
are packed each time.

Invariant: after `apply`, the same tensors give the same bits whenever they are loaded.
"""

from __future__ import annotations

from typing import Any

from vllm.model_executor.layers.fused_moe.unquantized_fused_moe_method import UnquantizedFusedMoEMethod


def apply() -> None:
    """Puts the corrected method in place."""
    setup = UnquantizedFusedMoEMethod._setup_kernel

    def packed(self: Any, layer: Any, *weights: Any, **named: Any) -> None:
        again = self.moe_kernel is not None
        setup(self, layer, *weights, **named)
        if again:
            self.moe_kernel.fused_experts.process_weights_after_loading(layer)

    UnquantizedFusedMoEMethod._setup_kernel = packed

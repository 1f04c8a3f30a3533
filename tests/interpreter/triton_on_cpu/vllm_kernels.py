"""vLLM's kernels that the interpreter cannot run, by what vLLM itself does without Triton.

Invariant: only these are replaced; a kernel that is not named here is the one that a GPU runs.

`apply_top_k_top_p_triton` (top-k and top-p, the same for both model runners): it asks the index of a loop for
`.to`, and in the interpreter that is Python's.
"""

from __future__ import annotations

import torch


def register() -> None:
    """A plugin of vLLM: it is called in every process before anything runs."""
    from vllm.v1.sample.ops import topk_topp_sampler

    def by_pytorch(logits: torch.Tensor, k: torch.Tensor | None, p: torch.Tensor | None) -> torch.Tensor:
        return topk_topp_sampler.apply_top_k_top_p_pytorch(logits, k, p, allow_cpu_sync=True)

    topk_topp_sampler.apply_top_k_top_p_triton = by_pytorch

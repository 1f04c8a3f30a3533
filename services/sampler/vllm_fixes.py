"""Corrections of faults of vLLM 0.32 in multi-LoRA, applied inside each vLLM worker.

Invariant: after `apply`, every row of every matrix product uses the adapter of its own request, and
a row of a base-model request uses none.

1. Prompt log-probabilities (`_get_prompt_logprobs_dict` of the V1 model runner). It sends a
   prompt's rows through the LoRA logits processor, which picks adapters by the rows that are
   *sampled* in this step, one per request. The row counts differ, so two such requests in one step
   crash the engine on CPU, and on a GPU rows are scored with another request's adapter. Here each
   request is scored alone, with all rows mapped to its own adapter.

2. LoRA on CPU (`vllm.lora.ops.torch_ops`). "No adapter" is index -1, and the CPU functions index
   the stacked weights with it: base-model rows get whatever is (or was) in the *last* adapter slot.
   The functions here skip such rows. They also run one matrix product per run of equal adapters
   instead of gathering a copy of the weights for every row, which for the output head is the
   vocabulary times the rank per token.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from vllm.lora.layers import LoRAMapping
from vllm.lora.punica_wrapper import punica_cpu

Run = tuple[int, int, int]
"""Rows [start, end) use adapter slot `slot`."""


def apply(runner: Any) -> None:
    """Corrects this worker. `runner`: its V1 GPUModelRunner or CPUModelRunner with LoRA enabled."""
    _score_prompts_one_at_a_time(runner)
    if runner.device.type == "cpu":
        for name, function in _CPU_FUNCTIONS.items():
            if not hasattr(punica_cpu, name):
                raise RuntimeError(
                    f"this vLLM has no punica_cpu.{name}; check services/sampler/vllm_fixes.py"
                )
            setattr(punica_cpu, name, function)


def _score_prompts_one_at_a_time(runner: Any) -> None:
    score_all = runner._get_prompt_logprobs_dict

    def score(hidden_states: torch.Tensor, num_scheduled_tokens: dict[str, int]) -> dict[str, Any]:
        pending: dict[str, int] = runner.num_prompt_logprobs
        if not pending:
            return {}
        scores: dict[str, Any] = {}
        try:
            for request_id in list(pending):
                rows = _prompt_rows(runner, request_id, num_scheduled_tokens)
                runner.num_prompt_logprobs = {request_id: pending[request_id]}
                with _all_rows_use(runner, _adapter_id(runner, request_id), rows):
                    scores.update(score_all(hidden_states, num_scheduled_tokens))
                if not runner.num_prompt_logprobs:
                    del pending[request_id]
        finally:
            runner.num_prompt_logprobs = pending
        return scores

    runner._get_prompt_logprobs_dict = score


def _prompt_rows(runner: Any, request_id: str, num_scheduled_tokens: dict[str, int]) -> int:
    """Rows of this step whose next token is also of the prompt."""
    request = runner.requests[request_id]
    scheduled = num_scheduled_tokens.get(request_id, 0)
    left = len(request.prompt_token_ids or ()) - request.num_computed_tokens - 1
    return max(0, min(scheduled, left))


def _adapter_id(runner: Any, request_id: str) -> int:
    lora_request = runner.requests[request_id].lora_request
    return 0 if lora_request is None else lora_request.lora_int_id


@contextmanager
def _all_rows_use(runner: Any, adapter_id: int, rows: int) -> Iterator[None]:
    manager = runner.lora_manager._adapter_manager
    step_mapping = manager._last_mapping
    if rows:
        ids = (adapter_id,) * rows
        manager._set_adapter_mapping(LoRAMapping(ids, ids, is_prefill=True))
    try:
        yield
    finally:
        if rows:
            manager._set_adapter_mapping(step_mapping)


def _runs(indices: torch.Tensor, lengths: torch.Tensor | None = None) -> list[Run]:
    if lengths is None:
        indices, lengths = torch.unique_consecutive(indices, return_counts=True)
    runs, start = [], 0
    for slot, length in zip(indices.tolist(), lengths.tolist(), strict=True):
        if slot >= 0:
            runs.append((start, start + length, slot))
        start += length
    return runs


def _shrink(x: torch.Tensor, stacked: torch.Tensor, out: torch.Tensor, runs: list[Run], scale: float) -> None:
    """out[rows, :r] = scale * x[rows] A^T for each run; other rows 0. stacked: [slots, 1, r, in]."""
    out.zero_()
    for start, end, slot in runs:
        a = stacked[slot].flatten(0, -2).to(out.dtype)
        out[start:end, : a.shape[0]] = scale * (x[start:end].to(out.dtype) @ a.T)


def _expand(
    x: torch.Tensor, stacked: torch.Tensor, out: torch.Tensor, runs: list[Run], offset: int, add: bool
) -> None:
    """out[rows, offset:] += x[rows] B^T for each run. stacked: [slots, 1, width, r]."""
    for start, end, slot in runs:
        b = stacked[slot].flatten(0, -2).to(out.dtype)
        target = out[start:end, offset : offset + b.shape[0]]
        # The stacked output head may be padded beyond the logits.
        delta = x[start:end].to(out.dtype) @ b[: target.shape[1]].T
        target.add_(delta) if add else target.copy_(delta)


def _sgmv_shrink(x: Any, w: Any, out: Any, starts: Any, lengths: Any, slots: Any, *rest: Any) -> None:
    _shrink(x, w, out, _runs(slots, lengths), rest[-1])


def _sgmv_expand(x: Any, w: Any, out: Any, starts: Any, lengths: Any, slots: Any, *rest: Any) -> None:
    _expand(x, w, out, _runs(slots, lengths), 0, rest[-1])


def _sgmv_expand_slice(x: Any, w: Any, out: Any, starts: Any, lengths: Any, slots: Any, *rest: Any) -> None:
    offset, _, add = rest[-3:]
    _expand(x, w, out, _runs(slots, lengths), offset, add)


def _bgmv_shrink(x: Any, w: Any, out: Any, slots: Any, scaling: float = 1.0) -> None:
    _shrink(x, w, out, _runs(slots), scaling)


def _bgmv_expand(x: Any, w: Any, out: Any, slots: Any, add_inputs: bool = True) -> None:
    _expand(x, w, out, _runs(slots), 0, add_inputs)


def _bgmv_expand_slice(
    x: Any, w: Any, out: Any, slots: Any, slice_offset: int, slice_size: int, add_inputs: bool = True
) -> None:
    _expand(x, w, out, _runs(slots), slice_offset, add_inputs)


_CPU_FUNCTIONS = {
    "sgmv_shrink": _sgmv_shrink,
    "sgmv_expand": _sgmv_expand,
    "sgmv_expand_slice": _sgmv_expand_slice,
    "bgmv_shrink": _bgmv_shrink,
    "bgmv_expand": _bgmv_expand,
    "bgmv_expand_slice": _bgmv_expand_slice,
}

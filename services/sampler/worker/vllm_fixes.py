"""Corrections of faults of vLLM 0.32, applied inside each vLLM worker.

Invariant: after `apply`, every row of every matrix product uses the adapter of its own request, and
a row of a base-model request uses none (for rows of prompts that are scored, see prompt_scorer.py);
and the random numbers of a seeded request are used for its own tokens alone; and log-probabilities are the
model's own, whatever constrains what is sampled.

1. LoRA on CPU (`vllm.lora.ops.torch_ops`). "No adapter" is index -1, and the CPU functions index the
   stacked weights with it: base-model rows get whatever is (or was) in the *last* adapter slot. The
   functions here skip such rows. They also run one matrix product per run of equal adapters instead
   of gathering a copy of the weights for every row, which for the output head is the vocabulary
   times the rank per token.

2. Seeds (`sample_tokens` of the V1 model runner). A request whose prompt is prefilled in several
   steps is sampled in each of them; the token is thrown away and the request's generator is set back
   by a fixed offset. Generators on CPU have no offset, so a seeded request in a busy batch ends the
   engine. Here such a request has no generator in that step.

3. Log-probabilities under a constraint (`sample_tokens` of the V1 model runner). It writes the grammar's mask
   into the logits before its sampler takes "raw" log-probabilities of them, so these are of what the grammar
   leaves. Here they are taken before the mask.

4. Rotations on CPU (`vllm._custom_ops.rotary_embedding`). The kernel counts heads by the last dimension. The
   queries of latent attention have heads on a dimension of their own: of each token it rotates the first
   head alone, and looks for it as if all were contiguous. Here it is given a token's heads in one row.
"""

from __future__ import annotations

from typing import Any

import torch
from vllm import _custom_ops
from vllm.lora.punica_wrapper import punica_cpu
from vllm.v1.worker import gpu_model_runner

Run = tuple[int, int, int]
"""Rows [start, end) use adapter slot `slot`."""


def apply(runner: Any) -> None:
    """Corrects this worker. `runner`: its V1 GPUModelRunner or CPUModelRunner with LoRA enabled."""
    _keep_generators_of_unfinished_prefills(runner)
    _take_logprobs_before_the_grammar(runner)
    if runner.device.type == "cpu":
        for name, function in _CPU_FUNCTIONS.items():
            if not hasattr(punica_cpu, name):
                raise RuntimeError(
                    f"this vLLM has no punica_cpu.{name}; check services/sampler/worker/vllm_fixes.py"
                )
            setattr(punica_cpu, name, function)
        _rotate_all_heads()


def _rotate_all_heads() -> None:
    rotate = _custom_ops.rotary_embedding

    def in_rows(
        positions: torch.Tensor, query: torch.Tensor, key: torch.Tensor | None, *rest: Any, **options: Any
    ) -> None:
        given = [heads for heads in (query, key) if heads is not None]
        rows = [heads.flatten(1) if heads.dim() == 3 else heads for heads in given]
        rotate(positions, rows[0], rows[1] if key is not None else None, *rest, **options)
        for heads, row in zip(given, rows, strict=True):
            # It works in place, and rows that are not together in memory were copied.
            if row.data_ptr() != heads.data_ptr():
                heads.copy_(row.view_as(heads))

    _custom_ops.rotary_embedding = in_rows


def _keep_generators_of_unfinished_prefills(runner: Any) -> None:
    sample_tokens = runner.sample_tokens

    def sample(*args: Any, **kwargs: Any) -> Any:
        generators = runner.input_batch.generators
        unfinished = runner.discard_request_mask.np[: runner.input_batch.num_reqs].nonzero()[0].tolist()
        held = {index: generators.pop(index) for index in unfinished if index in generators}
        try:
            return sample_tokens(*args, **kwargs)
        finally:
            generators.update(held)

    runner.sample_tokens = sample


def _take_logprobs_before_the_grammar(runner: Any) -> None:
    mask, sampler, sample_tokens = (
        gpu_model_runner.apply_grammar_bitmask,
        runner.sampler,
        runner.sample_tokens,
    )
    compute = sampler.compute_logprobs
    own: list[torch.Tensor] = []

    def masked(scheduled: Any, grammar: Any, batch: Any, logits: torch.Tensor) -> None:
        own.append(compute(logits))
        mask(scheduled, grammar, batch, logits)

    def sample(*args: Any, **kwargs: Any) -> Any:
        try:
            return sample_tokens(*args, **kwargs)
        finally:
            own.clear()

    gpu_model_runner.apply_grammar_bitmask = masked
    sampler.compute_logprobs = lambda logits: own.pop() if own else compute(logits)
    runner.sample_tokens = sample


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

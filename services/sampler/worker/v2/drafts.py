"""Checks drafted tokens inside a vLLM worker (V2 model runner), in place of vLLM's own rejection sampler.

A step computes the logits behind several drafted tokens of a request. vLLM's own check accepts them by
chance, so that a seed gives other tokens than without drafts (since vllm-project/vllm#40651). Here the
token at each place is sampled as without drafts, by vLLM's own sampler, whose random numbers are of seed and
position; a draft only says what was sampled before the next place, and counts for nothing when it says
something else.

Invariant: a request's tokens, their distribution and their log-probabilities are those that it has without
drafts. Every place has the adapter of its request.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from vllm.v1.outputs import LogprobsTensors
from vllm.v1.worker.gpu.input_batch import InputBatch, get_num_sampled_and_rejected
from vllm.v1.worker.gpu.sample.output import SamplerOutput
from vllm.v1.worker.gpu.sample.states import NO_LOGPROBS
from vllm.v1.worker.gpu.spec_decode.rejection_sampler import (
    _iter_request_chunks,
    gather_draft_sampled,
    get_max_chunk_logits,
)

from services.sampler.worker.adapter_rows import adapter_rows

_REFUSED = -1
"""In place of a draft that cannot hold."""


def install(
    runner: Any, masked: Callable[[torch.Tensor], torch.Tensor], scores: Callable[..., LogprobsTensors]
) -> None:
    """Has a worker whose engine drafts check drafts here.

    Args:
        runner: its V2 GPUModelRunner.
        masked: logits -> what to sample from.
        scores: as vLLM's compute_topk_scores, of the rows that were sampled last.
    """
    sample = runner.sample

    def with_adapters(hidden_states: torch.Tensor, input_batch: InputBatch, *args: Any) -> Any:
        if not input_batch.num_draft_tokens:
            return sample(hidden_states, input_batch, *args)
        # vLLM maps one row of each request, as if there were no drafts. In V1 vllm-project/vllm#21068 mended
        # that; of V2 no upstream report was found.
        ids = runner.lora_state.lora_ids[input_batch.idx_mapping_np]
        with adapter_rows(runner) as use:
            use(ids.repeat(np.diff(input_batch.cu_num_logits_np)).tolist())
            return sample(hidden_states, input_batch, *args)

    runner.sample = with_adapters
    runner.rejection_sampler = DraftCheck(runner.sampler, masked, scores, runner.num_speculative_steps)


class DraftCheck:
    """Samples behind drafts.

    Args:
        sampler: vLLM's V2 Sampler.
        masked: logits -> what to sample from.
        scores: as vLLM's compute_topk_scores, of the rows that were sampled last.
        most: drafts of a request.
    """

    def __init__(
        self,
        sampler: Any,
        masked: Callable[[torch.Tensor], torch.Tensor],
        scores: Callable[..., LogprobsTensors],
        most: int,
    ) -> None:
        self._sampler = sampler
        self._masked = masked
        self._scores = scores
        self._most = most

    def __call__(
        self,
        logits: torch.Tensor,
        input_batch: InputBatch,
        draft_logits: torch.Tensor | None = None,
        invalid_drafts: torch.Tensor | None = None,
    ) -> SamplerOutput:
        """The tokens of one step: of each request as many as it has made, out of [requests, most drafts + 1].

        Args:
            logits: of each request's places in order, one more than it has drafts.
            draft_logits: None, as drafts are looked up and not sampled.
            invalid_drafts: those that the request's grammar does not take.
        """
        batch, prefill = input_batch, self._sampler.req_states.prefill_len.gpu
        drafted, positions = gather_draft_sampled(
            batch.input_ids,
            batch.positions,
            batch.logits_indices,
            batch.expanded_idx_mapping,
            batch.expanded_local_pos,
            prefill,
        )
        sampled, told = self._sampled(logits, batch, drafted, positions)
        if invalid_drafts is not None:
            drafted = drafted.masked_fill(invalid_drafts, _REFUSED)
        tokens, made = kept(sampled, drafted, batch.cu_num_logits, self._most + 1)
        made, rejected = get_num_sampled_and_rejected(
            made, batch.seq_lens, batch.cu_num_logits, batch.idx_mapping, prefill
        )
        return SamplerOutput(tokens, told, None, made, rejected)

    def _sampled(
        self, logits: torch.Tensor, batch: InputBatch, drafted: torch.Tensor, positions: torch.Tensor
    ) -> tuple[torch.Tensor, LogprobsTensors | None]:
        """A token for each place, as if what was drafted before had been sampled, with its
        log-probabilities."""
        likely = self._sampler.sampling_states.max_num_logprobs(batch.idx_mapping_np)
        masked, told = self._masked(logits), []
        most, ends, parts = get_max_chunk_logits(logits.shape[1]), batch.cu_num_logits_np, []
        bounds = batch.seq_lens_cpu_upper_bound.numpy()
        # In float32 logits take room, so vLLM's own check takes them in parts as well.
        for start, stop in _iter_request_chunks(ends, most):
            rows = slice(int(ends[start]), int(ends[stop]))
            sampled, _ = self._sampler.sample(
                masked[rows],
                batch.expanded_idx_mapping[rows],
                batch.idx_mapping[start:stop],
                batch.idx_mapping_np[start:stop],
                positions[rows],
                drafted[rows],
                batch.expanded_local_pos[rows],
                bounds[start:stop],
            )
            parts.append(sampled)
            if likely != NO_LOGPROBS:
                told.append(self._scores(logits[rows], likely, sampled))
        return torch.cat(parts), LogprobsTensors.cat(told, ends.tolist()) if told else None


def kept(
    sampled: torch.Tensor, drafted: torch.Tensor, starts: torch.Tensor, width: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """The sampled tokens of each request [requests, width], and how many of them count.

    Args:
        sampled: at each place, request by request.
        drafted: what each place follows; of a request's first place, no draft.
        starts: of each request's places, and behind the last one. int32 [requests + 1].
        width: most places of a request.
    """
    places = starts[:-1, None] + torch.arange(width, device=starts.device)
    there = places < starts[1:, None]
    places = places.clamp(max=sampled.shape[0] - 1)
    tokens = sampled[places]
    # A place counts while what it follows is what was sampled before it.
    held = there[:, 1:] & (tokens[:, :-1] == drafted[places[:, 1:]])
    return tokens, (1 + held.cumprod(dim=1).sum(dim=1)).int()

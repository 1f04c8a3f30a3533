"""Log-probabilities of what tokens were drawn from, for requests that ask for them (V2 model runner).

vLLM has them as a setting of the engine (`logprobs_mode`, vllm-project/vllm#21398), for all requests or none.
Here both are computed in a step with a request that asks, and each row has those of its request. A step
without one computes nothing of it.

Invariant: which tokens are sampled, and what rows of other requests are told, is the same bits with such a
request in the batch as without it, but where a fused kernel would draw: that shows no distribution, so a step
with such a request draws without it.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from vllm.sampling_params import SamplingParams
from vllm.v1.outputs import LogprobsTensors
from vllm.v1.worker.gpu.sample import sampler as vllm_sampler
from vllm.v1.worker.gpu.sample.logprob import compute_topk_scores

from services.sampler.worker.prompt_scores import SAMPLED_KEY, asked
from services.sampler.worker.row_scores import on


class SampledLogprobs:
    """Corrects a worker.

    Args:
        sampler: its V2 Sampler.
    """

    def __init__(self, sampler: Any) -> None:
        if not hasattr(vllm_sampler, "compute_topk_scores"):
            raise RuntimeError(f"this vLLM's V2 sampler has no compute_topk_scores; check {__name__}")
        self._sampler = sampler
        self._sample, self._add = sampler.sample, sampler.add_request
        sampler.sample, sampler.add_request = self._sampled, self._added
        vllm_sampler.compute_topk_scores = self.scores
        self._asks = np.zeros(len(sampler.needs_logits_processing), dtype=bool)
        self._drawn_from: tuple[torch.Tensor, torch.Tensor] | None = None
        """What was drawn from [rows, vocabulary], and which rows ask."""

    def scores(self, logits: torch.Tensor, likely: int, *args: Any, **kwargs: Any) -> LogprobsTensors:
        """Of each row that was just sampled the log-probabilities of its token and of the `likely` most
        likely ones, as its request wants them. Arguments as of vLLM's compute_topk_scores.

        Args:
            logits: the model's own [rows, vocabulary].
        """
        told = compute_topk_scores(logits, likely, *args, **kwargs)
        if self._drawn_from is None:
            return told
        (processed, asking), self._drawn_from = self._drawn_from, None
        other = compute_topk_scores(processed, likely, *args, **kwargs)
        return told._replace(
            logprob_token_ids=torch.where(asking[:, None], other.logprob_token_ids, told.logprob_token_ids),
            logprobs=torch.where(asking[:, None], other.logprobs, told.logprobs),
            selected_token_ranks=torch.where(asking, other.selected_token_ranks, told.selected_token_ranks),
        )

    def _added(self, req_idx: int, sampling_params: SamplingParams) -> None:
        self._asks[req_idx] = bool(asked(sampling_params, SAMPLED_KEY))
        self._add(req_idx, sampling_params)

    def _sampled(
        self,
        logits: torch.Tensor,
        expanded_idx_mapping: torch.Tensor,
        idx_mapping: torch.Tensor,
        idx_mapping_np: npt.NDArray[np.int32],
        *args: Any,
        **kwargs: Any,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        self._drawn_from = None
        of, batch = self._sampler, (logits, expanded_idx_mapping, idx_mapping, idx_mapping_np)
        if not self._asks[idx_mapping_np].any():
            made: tuple[torch.Tensor, torch.Tensor] = self._sample(*batch, *args, **kwargs)
            return made
        fused = of.use_flashinfer, of.use_xpu_sampler
        of.use_flashinfer = of.use_xpu_sampler = False
        try:
            tokens, processed = self._sample(*batch, *args, **kwargs)
        finally:
            of.use_flashinfer, of.use_xpu_sampler = fused
        self._drawn_from = processed, on(logits.device, self._asks)[expanded_idx_mapping]
        return tokens, processed

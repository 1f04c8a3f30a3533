"""Log-probabilities of what tokens were drawn from, for requests that ask for them (V1 model runner).

vLLM has them as a setting of the engine (`logprobs_mode`, vllm-project/vllm#21398), for all requests or none.
Here its sampler takes those of the model for all rows of a step; in the rows of requests that ask, those of
what was drawn from are written over them. A step without such a request computes nothing of it.

Invariant: which tokens are sampled, and what rows of other requests are told, is the same bits with such a
request in the batch as without it, but where FlashInfer would draw: that shows no distribution, so a step
with such a request draws by PyTorch.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from vllm.v1.sample.logits_processor import LogitsProcessor
from vllm.v1.sample.logits_processor.builtin import process_dict_updates
from vllm.v1.sample.logits_processor.interface import BatchUpdate
from vllm.v1.sample.metadata import SamplingMetadata
from vllm.v1.sample.ops.topk_topp_sampler import apply_top_k_top_p

from services.sampler.worker.prompt_scores import SAMPLED_KEY, asked


class SampledLogprobs(LogitsProcessor):
    """Corrects a sampler. As a processor of logits, which it leaves as they are, it is told which request has
    which row.

    Args:
        sampler: vLLM's V1 Sampler.
    """

    def __init__(self, sampler: Any) -> None:
        draws = sampler.topk_topp_sampler
        self._compute, self._sample, self._draw = sampler.compute_logprobs, sampler.sample, draws.forward
        sampler.compute_logprobs, sampler.sample, draws.forward = self._own, self._sampled, self._drawn
        self._asks: dict[int, bool] = {}
        self._into: torch.Tensor | None = None
        self._places: Mapping[int, int] = {}
        self._rows: list[int] = []

    def is_argmax_invariant(self) -> bool:
        return True

    def update_state(self, batch_update: BatchUpdate | None) -> None:
        process_dict_updates(self._asks, batch_update, lambda params, *_: asked(params, SAMPLED_KEY))

    def apply(self, logits: torch.Tensor) -> torch.Tensor:
        return logits

    def write(self, into: torch.Tensor, places: Mapping[int, int]) -> None:
        """Has the sampling that comes next write what it draws from.

        Args:
            into: log-probabilities [places, vocabulary].
            places: of rows of the batch; the others are not written.
        """
        self._into, self._places = into, places

    def _own(self, logits: torch.Tensor) -> torch.Tensor:
        made: torch.Tensor = self._compute(logits)
        self.write(made, {row: row for row in self._asks})
        return made

    def _sampled(self, logits: torch.Tensor, sampling: SamplingMetadata, *args: Any) -> Any:
        self._rows = [] if self._into is None else [row for row in self._asks if row in self._places]
        try:
            if self._rows and sampling.all_greedy:
                self._fill(logits)
            return self._sample(logits, sampling, *args)
        finally:
            self._into, self._rows = None, []

    def _drawn(
        self,
        logits: torch.Tensor,
        generators: dict[int, torch.Generator],
        k: torch.Tensor | None,
        p: torch.Tensor | None,
    ) -> Any:
        if self._rows:
            logits, k, p = apply_top_k_top_p(logits, k, p), None, None
            self._fill(logits)
        return self._draw(logits, generators, k, p)

    def _fill(self, logits: torch.Tensor) -> None:
        assert self._into is not None
        places = [self._places[row] for row in self._rows]
        self._into[places] = logits[self._rows].log_softmax(dim=-1, dtype=torch.float32)


def install(runner: Any) -> SampledLogprobs:
    """Corrects a worker. `runner`: its V1 GPUModelRunner or CPUModelRunner, which has no requests yet."""
    made = SampledLogprobs(runner.sampler)
    runner.input_batch.logitsprocs.argmax_invariant.append(made)
    return made

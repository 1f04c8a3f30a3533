"""Scores prompts inside a vLLM worker (V2 model runner), in the place of vLLM's PromptLogprobsWorker.

The log-probabilities are of vLLM's own kernel, which computes the wanted cells alone, and leave the device
with the step's other results, so that a step waits for none of them.

Invariant: an answer leaves with the request's first token.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from vllm.sampling_params import SamplingParams
from vllm.v1.worker.gpu.input_batch import InputBatch
from vllm.v1.worker.gpu.sample.logprob import compute_token_logprobs

from services.sampler.worker.prompt_scores import REQUEST_KEY, ScorePlan, asked
from services.sampler.worker.row_scores import LogprobsAt, Rows, RowScores, on
from services.sampler.worker.step_scores import Part, score

LogitsOf = Callable[[torch.Tensor], torch.Tensor]


class PromptScorer:
    """Has the methods that a V2 GPUModelRunner calls of its PromptLogprobsWorker.

    Args:
        runner: the runner.
    """

    def __init__(self, runner: Any) -> None:
        self._runner = runner
        self._open: dict[str, RowScores] = {}

    def add_request(self, req_id: str, req_idx: int, sampling_params: SamplingParams) -> None:
        """A request begins, or begins anew after a preemption."""
        if (wire := asked(sampling_params, REQUEST_KEY)) is not None:
            self._open[req_id] = RowScores(ScorePlan.from_wire(wire), self._runner.device, cells)

    def remove_request(self, req_id: str) -> None:
        """A request has ended, or was preempted."""
        self._open.pop(req_id, None)

    def compute_prompt_logprobs(self, *_: Any) -> dict[str, Any]:
        """vLLM's own, which no request asks for."""
        return {}

    def compute_prompt_token_id_logprobs(
        self,
        logits_fn: LogitsOf,
        hidden_states: torch.Tensor,
        input_batch: InputBatch,
        prompt_lens: npt.NDArray[np.int32],
    ) -> dict[str, torch.Tensor]:
        """Scores the rows of one step; the answers of prompts that it ends."""
        if not self._open:
            return {}
        parts, ends = [], []
        for place, request_id in enumerate(input_batch.req_ids):
            if (scores := self._open.get(request_id)) is None:
                continue
            index = int(input_batch.idx_mapping_np[place])
            length = int(prompt_lens[index])
            if length < input_batch.prefill_len_np[place]:
                # It was preempted after its first token, with which the answer went.
                del self._open[request_id]
                continue
            start = int(input_batch.num_computed_prefill_tokens_np[place])
            stop = start + int(input_batch.num_scheduled_tokens[place])
            parts.append(self._part(index, scores, start, stop, int(input_batch.query_start_loc_np[place])))
            if stop >= length:
                del self._open[request_id]
                ends.append((request_id, scores.answer, stop))
        score(self._runner, parts, hidden_states, logits_fn, int(self._runner.vocab_size))
        found = ((request_id, answer(stop)) for request_id, answer, stop in ends)
        return {request_id: answer for request_id, answer in found if answer is not None}

    def _part(self, index: int, scores: RowScores, start: int, stop: int, first: int) -> Part:
        adapter = int(self._runner.lora_state.lora_ids[index])

        def behind(rows: Rows) -> torch.Tensor:
            prompt = self._runner.req_states.all_token_ids.gpu[index]
            return prompt[on(prompt.device, rows + 1)].long()

        return Part(scores, scores.rows(start, stop), first - start, adapter, behind)


def cells(logits: torch.Tensor) -> LogprobsAt:
    """Log-probabilities by vLLM's kernel, of the tokens that are asked for alone."""
    return partial(compute_token_logprobs, logits)

"""Scores prompts inside a vLLM worker (V1 model runner), in place of vLLM's own prompt log-probabilities.

Invariant: an answer leaves with the request's first token, once.
"""

from __future__ import annotations

from typing import Any

import torch

from services.sampler.worker.prompt_scores import REQUEST_KEY, ScorePlan, asked
from services.sampler.worker.row_scores import LogprobsAt, Rows, RowScores
from services.sampler.worker.step_scores import Part, score


class _Progress:
    """A request's scores, until they have left. Kept on vLLM's own record of the request."""

    def __init__(self, scores: RowScores) -> None:
        self.scores: RowScores | None = scores


class PromptScorer:
    """Hooks into a worker's V1 GPUModelRunner or CPUModelRunner."""

    def __init__(self, runner: Any) -> None:
        self._runner = runner
        self._sample_tokens = runner.sample_tokens
        self._answers: dict[str, torch.Tensor] = {}
        # vLLM calls the first within the second, with this step's hidden states.
        runner._get_prompt_logprobs_dict = self._score_step
        runner.sample_tokens = self._sample_and_answer

    def _sample_and_answer(self, *args: Any, **kwargs: Any) -> Any:
        output = self._sample_tokens(*args, **kwargs)
        if self._answers:
            # With asynchronous scheduling the output is wrapped until its tokens are on the host.
            result = getattr(output, "_model_runner_output", output)
            result.prompt_token_id_logprobs_dict, self._answers = self._answers, {}
        return output

    def _score_step(
        self, hidden_states: torch.Tensor, num_scheduled_tokens: dict[str, int]
    ) -> dict[str, Any]:
        parts, ends = [], []
        for request_id, scheduled in num_scheduled_tokens.items():
            request = self._runner.requests[request_id]
            progress = _progress(request, hidden_states.device)
            if progress is None or progress.scores is None:
                continue
            start = request.num_computed_tokens
            stop = start + scheduled
            parts.append(self._part(request_id, request, progress.scores, start, stop))
            if stop >= len(request.prompt_token_ids):
                ends.append((request_id, progress.scores, stop))
                # The request goes on for long, and the device's memory is not counted.
                progress.scores = None
        model, vocabulary = self._runner.model, int(self._runner.input_batch.vocab_size)
        score(self._runner, parts, hidden_states, model.compute_logits, vocabulary)
        for request_id, scores, stop in ends:
            if (answer := scores.answer(stop)) is not None:
                self._answers[request_id] = answer.cpu()
        return {}

    def _part(self, request_id: str, request: Any, scores: RowScores, start: int, stop: int) -> Part:
        index = self._runner.input_batch.req_id_to_index[request_id]
        offset = int(self._runner.query_start_loc.np[index]) - start
        adapter = 0 if request.lora_request is None else request.lora_request.lora_int_id

        def behind(rows: Rows) -> torch.Tensor:
            tokens = [request.prompt_token_ids[row + 1] for row in rows.tolist()]
            return torch.tensor(tokens, device=self._runner.device)

        return Part(scores, scores.rows(start, stop), offset, adapter, behind)


def _progress(request: Any, device: torch.device) -> _Progress | None:
    """The progress of a request that asked for scores."""
    if (wire := asked(request.sampling_params, REQUEST_KEY)) is None:
        return None
    # This field of vLLM's record holds its own prompt scores, which no request asks for; it dies with
    # the request, however that ends.
    progress: _Progress | None = request.in_progress_prompt_logprobs_cpu
    if progress is None:
        progress = _Progress(RowScores(ScorePlan.from_wire(wire), device, log_softmax))
        request.in_progress_prompt_logprobs_cpu = progress
    return progress


def log_softmax(logits: torch.Tensor) -> LogprobsAt:
    """Log-probabilities by PyTorch, of all tokens at once."""
    logprobs = logits.log_softmax(dim=-1, dtype=torch.float32)
    return lambda ids: logprobs.gather(1, ids)

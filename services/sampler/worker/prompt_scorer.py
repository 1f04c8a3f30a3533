"""Scores prompts inside a vLLM worker (V1 model runner), in place of vLLM's own prompt log-probabilities.

vLLM 0.32's own cannot score given tokens (its V1 runner), draws nothing, holds the logits of a whole
prefill chunk at once, and sends a prompt's rows through the LoRA logits processor, which picks
adapters by the rows that are *sampled* in this step, one per request: two such requests in one step
crash the engine on CPU, and on a GPU rows are scored with another request's adapter.

Invariant: every row is scored with the adapter of its own request, from hidden states of this very
prefill, whatever else is in the batch and however the prefill is cut into chunks; an answer leaves
with the request's first token, once.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from vllm.lora.layers import LoRAMapping

from services.sampler.worker.prompt_scores import REQUEST_KEY, Buffers, ScorePlan, uniforms

# Cells of the logits held at once: 128 MiB of float32.
_CELLS = 2**25

Rows = npt.NDArray[np.int64]


class _Progress:
    """A request's plan and what is computed of it. Kept on vLLM's own record of the request."""

    def __init__(self, plan: ScorePlan) -> None:
        self.plan = plan
        self.needed = plan.needed()
        self.buffers = Buffers(plan)
        self.scored = 0
        """Needed rows that are scored, in order."""
        self.done = False


class PromptScorer:
    """Hooks into a worker's V1 GPUModelRunner or CPUModelRunner."""

    def __init__(self, runner: Any) -> None:
        for name in ("_get_prompt_logprobs_dict", "sample_tokens", "requests", "query_start_loc"):
            if not hasattr(runner, name):
                raise RuntimeError(
                    f"this vLLM's model runner has no {name}; check services/sampler/worker/prompt_scorer.py"
                )
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
        for request_id, scheduled in num_scheduled_tokens.items():
            request = self._runner.requests[request_id]
            progress = _progress(request)
            if progress is None or progress.done:
                continue
            start = request.num_computed_tokens
            stop = start + scheduled
            self._score(request_id, request, progress, hidden_states, start, stop)
            if stop > progress.plan.rows:
                progress.done = True
                # Without all of them there is no answer, and the front end reports an error.
                if progress.scored == progress.needed.size:
                    self._answers[request_id] = torch.from_numpy(progress.buffers.vector)
        return {}

    def _score(
        self,
        request_id: str,
        request: Any,
        progress: _Progress,
        hidden_states: torch.Tensor,
        start: int,
        stop: int,
    ) -> None:
        """Scores the needed ones of rows start .. stop - 1, whose hidden states are of this step."""
        first, last = np.searchsorted(progress.needed, [start, stop])
        rows = progress.needed[first:last]
        if not rows.size or first > progress.scored:
            return
        # A prefill that was preempted begins anew.
        progress.scored = max(progress.scored, int(last))
        index = self._runner.input_batch.req_id_to_index[request_id]
        offset = int(self._runner.query_start_loc.np[index]) - start
        step = max(1, _CELLS // int(self._runner.input_batch.vocab_size))
        adapter_id = 0 if request.lora_request is None else request.lora_request.lora_int_id
        with self._adapter(adapter_id) as use_for:
            for begin in range(0, rows.size, step):
                part = rows[begin : begin + step]
                use_for(part.size)
                where = torch.from_numpy(part + offset).to(hidden_states.device)
                logits = self._runner.model.compute_logits(hidden_states[where])
                _fill(progress.plan, progress.buffers, part, request.prompt_token_ids, logits)

    @contextmanager
    def _adapter(self, adapter_id: int) -> Iterator[Callable[[int], None]]:
        """Gives a function that maps a number of rows to the adapter; the step's mapping comes back."""
        if not getattr(self._runner, "lora_config", None):
            yield lambda rows: None
            return
        manager = self._runner.lora_manager._adapter_manager
        step_mapping = manager._last_mapping
        mapped = 0

        def use_for(rows: int) -> None:
            nonlocal mapped
            if rows != mapped:
                ids = (adapter_id,) * rows
                manager._set_adapter_mapping(LoRAMapping(ids, ids, is_prefill=True))
                mapped = rows

        try:
            yield use_for
        finally:
            manager._set_adapter_mapping(step_mapping)


def _progress(request: Any) -> _Progress | None:
    """The progress of a request that asked for scores."""
    arguments = request.sampling_params.extra_args
    if not arguments or REQUEST_KEY not in arguments:
        return None
    # This field of vLLM's record holds its own prompt scores, which no request asks for; it dies with
    # the request, however that ends.
    progress: _Progress | None = request.in_progress_prompt_logprobs_cpu
    if progress is None:
        progress = _Progress(ScorePlan.from_wire(arguments[REQUEST_KEY]))
        request.in_progress_prompt_logprobs_cpu = progress
    return progress


def _fill(plan: ScorePlan, out: Buffers, rows: Rows, prompt: list[int], logits: torch.Tensor) -> None:
    """Writes what the plan wants of `rows` (ascending). logits: [len(rows), vocab]."""
    logprobs = logits.log_softmax(dim=-1, dtype=torch.float32)
    begin = int(np.searchsorted(rows, plan.first))
    if plan.own and begin < rows.size:
        tokens = torch.tensor([prompt[row + 1] for row in rows[begin:].tolist()], device=logits.device)
        out.own[rows[begin:] - plan.first] = _host(logprobs[begin:].gather(1, tokens[:, None])[:, 0])
    if plan.topk and begin < rows.size:
        values, ids = logprobs[begin:].topk(plan.topk, dim=-1)
        out.topk_ids[rows[begin:] - plan.first] = _host(ids)
        out.topk_logprobs[rows[begin:] - plan.first] = _host(values)
    cells = slice(int(plan.target_starts[rows[0]]), int(plan.target_starts[rows[-1] + 1]))
    if cells.start < cells.stop:
        # Rows between these have no targets, or they would be needed: the cells are contiguous.
        counts = plan.target_starts[rows + 1] - plan.target_starts[rows]
        row_of_cell = torch.from_numpy(np.repeat(np.arange(rows.size), counts)).to(logits.device)
        ids = torch.from_numpy(plan.target_ids[cells].astype(np.int64)).to(logits.device)
        out.targets[cells] = _host(logprobs[row_of_cell, ids])
    if plan.draws:
        drawn = _draw(plan, rows, logits)
        out.drawn_ids[rows] = _host(drawn)
        out.drawn_logprobs[rows] = _host(logprobs.gather(1, drawn))


def _draw(plan: ScorePlan, rows: Rows, logits: torch.Tensor) -> torch.Tensor:
    """Independent draws from softmax(logits / temperature): int64 [len(rows), draws]."""
    if plan.temperature == 0.0:
        return logits.argmax(dim=-1, keepdim=True).expand(-1, plan.draws)
    cumulative = (logits.float() / plan.temperature).softmax(dim=-1).double().cumsum(dim=-1)
    points = torch.from_numpy(uniforms(plan.seed, rows, plan.draws)).to(logits.device)
    # The first token whose cumulative probability exceeds the point; never one of probability 0.
    drawn = torch.searchsorted(cumulative, points * cumulative[:, -1:], right=True)
    return drawn.clamp(max=logits.shape[-1] - 1)


def _host(values: torch.Tensor) -> npt.NDArray[Any]:
    return values.cpu().numpy()

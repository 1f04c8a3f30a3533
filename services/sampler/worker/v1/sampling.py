"""Corrections of how the V1 model runner of vLLM 0.32 samples, in each worker.

Invariant: the random numbers of a seeded request are used for its own tokens alone; and what the sampler
takes for the model's log-probabilities is its own, whatever constrains what is sampled.

1. Seeds (`sample_tokens`). A request whose prompt is prefilled in several steps is sampled in each of them;
   the token is thrown away and the request's generator is set back by a fixed offset. Generators on CPU
   have no offset, so a seeded request in a busy batch ends the engine (no upstream report found). Here such a
   request has no generator in that step.

2. Log-probabilities under a constraint (`sample_tokens`). It writes the grammar's mask into the logits
   before its sampler takes "raw" log-probabilities of them, so these are of what the grammar leaves (no
   upstream report found). Here they are taken before the mask.
"""

from __future__ import annotations

from typing import Any

import torch
from vllm.v1.worker import gpu_model_runner


def correct(runner: Any) -> None:
    """Corrects this worker. `runner`: its V1 GPUModelRunner or CPUModelRunner."""
    _keep_generators_of_unfinished_prefills(runner)
    _take_logprobs_before_the_grammar(runner)


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

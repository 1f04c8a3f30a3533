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

3. Bad words (`Sampler.apply_logits_processors`). It writes each of a sequence into the logits by itself: of
   128 of each of 256 sequences that takes a tenth of a second on a CPU, and a kernel for each on a GPU, for
   all who share the step (no upstream report found). Here one write has all of them.
"""

from __future__ import annotations

from typing import Any

import torch
from vllm.v1.sample import sampler as vllm_sampler
from vllm.v1.worker import gpu_model_runner


def correct(runner: Any) -> None:
    """Corrects this worker. `runner`: its V1 GPUModelRunner or CPUModelRunner."""
    _keep_generators_of_unfinished_prefills(runner)
    _take_logprobs_before_the_grammar(runner)
    vllm_sampler.apply_bad_words = leave_out


def leave_out(logits: torch.Tensor, bad_words: dict[int, list[list[int]]], before: list[list[int]]) -> None:
    """Has no sequence go on with the last token of one of its bad words that it has come to otherwise.

    Args:
        logits: [sequences, vocabulary].
        bad_words: the tokens of each, by sequence.
        before: what each sequence has sampled.
    """
    rows, tokens = list[int](), list[int]()
    for row, words in bad_words.items():
        sampled, known = before[row], len(rows)
        last = sampled[-1] if sampled else None
        for word in words:
            # Most differ in the last one.
            others = len(word) - 1
            if word[-1] >= logits.shape[1]:
                # Of a tokenizer that knows more tokens than the model.
                continue
            if not others or (word[-2] == last and sampled[-others:] == word[:-1]):
                tokens.append(word[-1])
        rows += [row] * (len(tokens) - known)
    if rows:
        where = torch.tensor([rows, tokens]).to(logits.device, non_blocking=True)
        logits[where[0], where[1]] = -torch.inf


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

"""What a token is drawn from, in plain PyTorch: an independent account of docs/sampling.md."""

from __future__ import annotations

from collections.abc import Collection, Sequence

import torch

from tinsmith.v1 import sampling_pb2

NEVER = float("-inf")


def drawn_from(
    logits: torch.Tensor,
    params: sampling_pb2.SamplingParams,
    prompt: Sequence[int],
    before: Sequence[int],
    allowed: Collection[int] | None = None,
    bad_words: Sequence[Sequence[int]] = (),
) -> torch.Tensor:
    """Log-probabilities float32 [vocabulary].

    Args:
        logits: the model's own behind prompt and `before`, float32 [vocabulary].
        before: tokens of the sequence.
        allowed: tokens that a constraint leaves.
        bad_words: the tokens of each.
    """
    logits = logits.clone()
    if allowed is not None:
        others = torch.ones_like(logits, dtype=torch.bool)
        others[list(allowed)] = False
        logits[others] = NEVER
    for word in bad_words:
        if len(word) == 1 or list(before[1 - len(word) :]) == list(word[:-1]):
            logits[word[-1]] = NEVER
    for one in params.logit_bias:
        logits[one.token_id] += one.bias
    if params.HasField("repetition_penalty"):
        seen = sorted({*prompt, *before})
        of = logits[seen]
        logits[seen] = torch.where(of > 0, of / params.repetition_penalty, of * params.repetition_penalty)
    for token in set(before):
        logits[token] -= params.frequency_penalty * list(before).count(token) + params.presence_penalty
    if params.temperature:
        logits = _left(logits / params.temperature, params)
    return logits.log_softmax(-1)


def _left(logits: torch.Tensor, params: sampling_pb2.SamplingParams) -> torch.Tensor:
    """What min_p, top_k and top_p leave."""
    chances = logits.softmax(-1)
    logits = logits.masked_fill(chances < params.min_p * chances.max(), NEVER)
    if params.top_k > 0:
        logits = logits.masked_fill(logits < logits.topk(params.top_k).values[-1], NEVER)
    chances, order = logits.softmax(-1).sort(descending=True)
    enough = chances.cumsum(-1) - chances >= params.top_p
    left = logits.clone()
    left[order[enough]] = NEVER
    return left

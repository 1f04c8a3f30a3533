"""What a generation that moved with its keys and values must have come to, by the independent judge."""

from __future__ import annotations

from collections.abc import Callable

import torch

from tests.component.sampler.process import floats, int32, ints
from tests.reference import KeptReference, Reference, check_logprobs
from tinsmith.v1 import sampling_pb2

Judge = Callable[[int], Reference]


def computed(judge: Judge, sequence: sampling_pb2.SampledSequence, tokens: list[int]) -> torch.Tensor:
    """Log-probabilities of every next token, with keys and values as the spans say that they were kept."""
    versions, starts = list[Reference](), list[int]()
    place = len(tokens)
    for span in sequence.versions:
        if not span.kv_kept:
            versions, starts = [], []
        versions.append(judge(span.version))
        # The last token before a span has not been computed when its weights come.
        starts.append(place - 1 if span.kv_kept else 0)
        place += span.tokens
    return KeptReference(versions).distribution(tokens + ints(sequence.tokens), starts)


def check_kept(judge: Judge, tokens: list[int], sequence: sampling_pb2.SampledSequence, k: int = 0) -> None:
    """Every token has the log-probability that the weights of its span give it over kept keys and values."""
    sampled, found, end = ints(sequence.tokens), floats(sequence.logprobs), 0
    for count in range(1, len(sequence.versions) + 1):
        start, end = end, end + sequence.versions[count - 1].tokens
        # As far as it was known then: keys and values that were computed anew later are of no concern to it.
        known = sampling_pb2.SampledSequence(tokens=int32(sampled[:end]), versions=sequence.versions[:count])
        rows = computed(judge, known, tokens)[len(tokens) - 1 + start : len(tokens) - 1 + end]
        own = torch.tensor(sampled[start:end]).unsqueeze(1)
        check_logprobs(found[start:end], rows.gather(1, own).squeeze(1))
        if k:
            likely = floats(sequence.topk_logprobs.logprobs).view(len(sampled), k)[start:end]
            check_logprobs(likely, rows.topk(k).values)
    assert end == len(sampled) == len(found)

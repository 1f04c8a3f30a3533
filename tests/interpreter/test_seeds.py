"""The random numbers of vLLM's V2 model runner, for seeds as the sampler gives them."""

from __future__ import annotations

import torch
from vllm.v1.worker.gpu.sample.gumbel import gumbel_sample

from services.sampler.engine.sampling import sequence_seed

VOCAB, MANY = 12, 1200
LOGITS = 2 * torch.randn(VOCAB, generator=torch.Generator().manual_seed(1))


def sampled(seeds: list[int], positions: list[int], temperature: float = 1.0) -> torch.Tensor:
    """A token of each of the requests with these seeds, behind these positions of theirs."""
    return gumbel_sample(
        LOGITS.repeat(len(seeds), 1),
        torch.arange(len(seeds)),
        torch.full((len(seeds),), temperature),
        torch.tensor(seeds),
        torch.tensor(positions),
        apply_temperature=True,
        is_drafting=False,
    )


def seeds(first: int = 0) -> list[int]:
    """Of the sequences of one request."""
    return [seed for index in range(MANY) if (seed := sequence_seed(first, index)) is not None]


def far(counted: torch.Tensor, expected: torch.Tensor) -> float:
    """How many standard deviations a chi-square of counts is above what is to be expected."""
    common = expected > 5
    degrees = int(common.sum()) - 1
    chi = float(((counted - expected) ** 2 / expected)[common].sum())
    return (chi - degrees) / (2 * degrees) ** 0.5


def test_sequences_of_one_request_are_draws_from_the_distribution() -> None:
    for temperature in (1.0, 0.7):
        found = torch.bincount(sampled(seeds(), [7] * MANY, temperature), minlength=VOCAB)
        assert far(found, MANY * (LOGITS / temperature).softmax(-1)) < 5


def test_places_of_one_sequence_are_independent_draws() -> None:
    found = sampled([seeds()[0]] * MANY, list(range(MANY)))
    chances = LOGITS.softmax(-1)
    assert far(torch.bincount(found, minlength=VOCAB), MANY * chances) < 5
    pairs = torch.bincount(found[:-1] * VOCAB + found[1:], minlength=VOCAB**2)
    assert far(pairs, (MANY - 1) * (chances[:, None] * chances).flatten()) < 5


def test_neighbouring_sequences_are_independent_draws() -> None:
    found = sampled(seeds(), [7] * MANY)
    chances = LOGITS.softmax(-1)
    pairs = torch.bincount(found[:-1] * VOCAB + found[1:], minlength=VOCAB**2)
    assert far(pairs, (MANY - 1) * (chances[:, None] * chances).flatten()) < 5


def test_a_draw_is_of_seed_and_place_alone() -> None:
    alone = [int(sampled([seed], [place])) for seed, place in zip(seeds()[:20], range(20), strict=True)]
    assert sampled(seeds()[:20], list(range(20))).tolist() == alone
    assert sampled(seeds(1)[:20], list(range(20))).tolist() != alone

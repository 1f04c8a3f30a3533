"""What is computed of all sequences at once is what the library computes of each alone."""

from __future__ import annotations

import importlib
from collections.abc import Callable, Sequence
from inspect import unwrap
from itertools import pairwise
from typing import Any

import pytest
import torch
from torch import Tensor

from services.trainer.compute.attention import Sequences
from services.trainer.compute.recurrent.chunks import LONGEST, Chunks, size_for
from services.trainer.compute.recurrent.convolution import causal_convolution
from services.trainer.compute.recurrent.delta_rule import gated_delta_rule
from services.trainer.compute.recurrent.layers import CONVOLUTION, RULE

FAMILIES = ("qwen3_next", "qwen3_5", "qwen3_5_moe")
MIXED = (65, 1, 130, 2, 64, 63, 64)
LENGTHS = [(1,), (2,), (63,), (64,), (65,), (130,), (3, 3, 3), (1, 200, 1), MIXED]
HEADS, KEYS, VALUES = 3, 8, 12


def of_library(family: str, name: str) -> Callable[..., Any]:
    """A function of an architecture in plain PyTorch."""
    return unwrap(getattr(importlib.import_module(f"transformers.models.{family}.modeling_{family}"), name))


def drawn(*shapes: tuple[int, ...]) -> list[Tensor]:
    generator = torch.Generator().manual_seed(sum(shapes[0]))
    return [torch.randn(shape, generator=generator) for shape in shapes]


def same(
    together: Callable[..., Tensor], alone: Callable[..., Tensor], given: Sequence[Tensor], error: float
) -> None:
    """Outputs, and gradients of a sum of them with different weights."""
    found = []
    for compute in (together, alone):
        own = [each.clone().requires_grad_() for each in given]
        made = compute(*own)
        (weights,) = drawn(tuple(made.shape))
        found.append([made.detach(), *torch.autograd.grad((made * weights).sum(), own)])
    for one, other in zip(*found, strict=True):
        torch.testing.assert_close(one, other, rtol=error, atol=error * max(1.0, float(other.abs().max())))


@pytest.mark.parametrize("lengths", LENGTHS, ids=str)
@pytest.mark.parametrize("taps", [1, 2, 4])
@pytest.mark.parametrize("biased", [False, True])
def test_a_convolution_reaches_over_no_boundary(lengths: tuple[int, ...], taps: int, biased: bool) -> None:
    library = of_library("qwen3_next", CONVOLUTION)
    positions = Sequences.of(lengths, "cpu").positions

    def together(x: Tensor, weight: Tensor, *bias: Tensor) -> Tensor:
        return causal_convolution(x.mT, weight, bias[0] if bias else None, positions, len(lengths))

    def alone(x: Tensor, weight: Tensor, *bias: Tensor) -> Tensor:
        return torch.cat([library(part, weight, *bias) for part in x.mT.split(lengths, dim=2)], dim=2)

    same(together, alone, drawn((1, sum(lengths), 6), (6, taps), *[(6,)] * biased), 2e-6)


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("lengths", LENGTHS, ids=str)
def test_the_rule_begins_anew_with_each_sequence(lengths: tuple[int, ...], family: str) -> None:
    rule_comes_to_the_same(family, Chunks.of(lengths, "cpu"), lengths, normed=True)


@pytest.mark.parametrize("size", [1, 2, 16, 64])
def test_the_rule_is_the_same_in_chunks_of_any_size(size: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("services.trainer.compute.recurrent.chunks.size_for", lambda lengths: size)
    chunks = Chunks.of(MIXED, "cpu")
    assert chunks.size == size
    rule_comes_to_the_same("qwen3_next", chunks, MIXED, normed=True)


def test_keys_that_are_not_to_be_of_length_1_stay_as_long_as_they_are() -> None:
    rule_comes_to_the_same("qwen3_next", Chunks.of(MIXED, "cpu"), MIXED, normed=False)


def rule_comes_to_the_same(family: str, chunks: Chunks, lengths: tuple[int, ...], *, normed: bool) -> None:
    library, tokens = of_library(family, RULE), sum(lengths)

    def together(*given: Tensor) -> Tensor:
        return gated_delta_rule(*_signed(*given), chunks, normed=normed)

    def alone(*given: Tensor) -> Tensor:
        made = []
        for q, k, v, g, beta in zip(*(each.split(lengths) for each in _signed(*given)), strict=True):
            options = {"g": g[None], "beta": beta[None], "use_qk_l2norm_in_kernel": normed}
            made.append(library(q[None], k[None], v[None], **options)[0][0])
        return torch.cat(made)

    keys, values, numbers = (tokens, HEADS, KEYS), (tokens, HEADS, VALUES), (tokens, HEADS)
    given = drawn(keys, keys, values, numbers, numbers)
    # Without that, keys much longer than 1 would let the state grow.
    given[1] *= 1 if normed else 0.2
    same(together, alone, given, 5e-6)


def _signed(q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor) -> list[Tensor]:
    """Decays of 0 or less, some of which leave much, and rates of 0 to 1."""
    return [q, k, v, -0.3 * torch.nn.functional.softplus(g), beta.sigmoid()]


def test_a_strong_decay_is_no_infinity() -> None:
    """exp of what a later token decays by, from an earlier one's place, would be."""
    lengths = (64, 64)
    query, key, value = drawn(*[(128, HEADS, KEYS)] * 3)
    given = [each.requires_grad_() for each in (query, key, value, torch.full((128, HEADS), -20.0))]
    made = gated_delta_rule(*given, torch.full((128, HEADS), 0.5), Chunks.of(lengths, "cpu"), normed=True)
    gradients = torch.autograd.grad(made.sum(), given)
    assert all(bool(each.isfinite().all()) for each in (made, *gradients))


def test_it_computes_in_float32_and_gives_what_it_was_given() -> None:
    given = [each.bfloat16() for each in drawn(*[(10, HEADS, KEYS)] * 3, (10, HEADS), (10, HEADS))]
    chunks = Chunks.of((7, 3), "cpu")
    found = gated_delta_rule(*_signed(*given), chunks, normed=True)
    exact = gated_delta_rule(*(each.float() for each in _signed(*given)), chunks, normed=True)
    assert found.dtype == torch.bfloat16 and torch.equal(found, exact.bfloat16())


@pytest.mark.parametrize("lengths", LENGTHS, ids=str)
def test_a_chunk_is_of_one_sequence_and_those_that_go_on_are_the_first(lengths: tuple[int, ...]) -> None:
    chunks = Chunks.of(lengths, "cpu")
    numbers = [-(-length // chunks.size) for length in lengths]
    assert chunks.counts == tuple(sum(own > step for own in numbers) for step in range(max(numbers)))
    own = torch.arange(len(lengths)).repeat_interleave(torch.tensor(lengths))
    cut = chunks.cut((own + 1)[:, None].float())[:, 0]
    assert cut.shape == (sum(numbers), chunks.size)
    assert all(len(set(chunk.tolist()) - {0.0}) == 1 for chunk in cut)
    steps = cut[:, 0].split(chunks.counts)
    assert all(torch.equal(later, before[: len(later)]) for before, later in pairwise(steps))
    values = torch.arange(2.0 * len(own)).view(-1, 2)
    assert torch.equal(chunks.joined(chunks.cut(values)), values)


@pytest.mark.parametrize(
    ("lengths", "size"),
    [
        ((LONGEST,), 64),
        ((8192,), 64),
        ((64,) * 16, 64),
        ((33,) * 8, 64),
        ((8,) * 9, 8),
        ((65,) * 8, 32),
        ((1,), 1),
    ],
    ids=str,
)
def test_short_sequences_have_short_chunks(lengths: tuple[int, ...], size: int) -> None:
    assert size_for(lengths) == size

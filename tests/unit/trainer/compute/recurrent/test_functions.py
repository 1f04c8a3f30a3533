"""What is computed of all sequences at once is what the library computes of each alone."""

from __future__ import annotations

import importlib
from collections.abc import Callable, Sequence
from inspect import unwrap
from itertools import pairwise
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from services.trainer.compute.prefix.layout import TreeRun, Trees, parents
from services.trainer.compute.recurrent.chunks import LONGEST, Chunks, Levels, alike, size_for
from services.trainer.compute.recurrent.convolution import Reach, causal_convolution
from services.trainer.compute.recurrent.delta_rule import gated_delta_rule
from services.trainer.compute.recurrent.layers import CONVOLUTION, RULE

FAMILIES = ("qwen3_next", "qwen3_5", "qwen3_5_moe")
MIXED = (65, 1, 130, 2, 64, 63, 64)
LENGTHS = [(1,), (2,), (63,), (64,), (65,), (130,), (3, 3, 3), (1, 200, 1), MIXED]
HEADS, KEYS, VALUES = 3, 8, 12
# One prompt, of more than a chunk; and two trees among sequences, in which pieces stand above one another
# that are shorter than a convolution reaches, and several of one level are continued.
GROUP: tuple[tuple[int, ...], Trees] = ((70, 5, 130, 1), [(0, TreeRun((70, 5, 130, 1), (-1, 0, 0, 0)))])
NESTED: tuple[tuple[int, ...], Trees] = (
    (9, 16, 130, 1, 1, 64, 17, 80, 3, 2, 65, 200, 40, 41, 1),
    [
        (1, TreeRun((16, 130, 1, 1, 64, 17, 80, 3, 2), (-1, 0, 1, 2, 1, 4, 0, 6, 6))),
        (11, TreeRun((200, 40, 41), (-1, 0, 0))),
    ],
)


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


def paths(lengths: tuple[int, ...], trees: Trees) -> list[Tensor]:
    """Of each piece its tokens in the flat batch, after those that it continues."""
    own = torch.arange(sum(lengths)).split(lengths)
    found: list[Tensor] = []
    for tokens, above in zip(own, parents(len(lengths), trees), strict=True):
        found.append(tokens if above < 0 else torch.cat([found[above], tokens]))
    return found


@pytest.mark.parametrize("lengths", LENGTHS, ids=str)
@pytest.mark.parametrize("taps", [1, 2, 4])
@pytest.mark.parametrize("biased", [False, True])
def test_a_convolution_reaches_over_no_boundary(lengths: tuple[int, ...], taps: int, biased: bool) -> None:
    library = of_library("qwen3_next", CONVOLUTION)
    reach = Reach.of(taps - 1, lengths, (), "cpu")

    def together(x: Tensor, weight: Tensor, *bias: Tensor) -> Tensor:
        return causal_convolution(x.mT, weight, bias[0] if bias else None, reach)

    def alone(x: Tensor, weight: Tensor, *bias: Tensor) -> Tensor:
        return torch.cat([library(part, weight, *bias) for part in x.mT.split(lengths, dim=2)], dim=2)

    same(together, alone, drawn((1, sum(lengths), 6), (6, taps), *[(6,)] * biased), 2e-6)


@pytest.mark.parametrize(("lengths", "trees"), [GROUP, NESTED], ids=["a group", "nested"])
@pytest.mark.parametrize("taps", [1, 2, 4, 20])
def test_a_convolution_reaches_back_to_what_a_piece_continues(
    lengths: tuple[int, ...], trees: Trees, taps: int
) -> None:
    library, reach = of_library("qwen3_next", CONVOLUTION), Reach.of(taps - 1, lengths, trees, "cpu")

    def together(x: Tensor, weight: Tensor) -> Tensor:
        return causal_convolution(x.mT, weight, None, reach)

    def alone(x: Tensor, weight: Tensor) -> Tensor:
        made = [library(x.mT[..., path], weight) for path in paths(lengths, trees)]
        return torch.cat([each[..., -own:] for each, own in zip(made, lengths, strict=True)], dim=2)

    same(together, alone, drawn((1, sum(lengths), 6), (6, taps)), 5e-6)


@pytest.mark.parametrize(("lengths", "trees"), [GROUP, NESTED], ids=["a group", "nested"])
@pytest.mark.parametrize("size", [None, 1, 16, 64])
def test_the_rule_goes_on_where_what_a_piece_continues_ends(
    lengths: tuple[int, ...], trees: Trees, size: int | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    if size is not None:
        monkeypatch.setattr("services.trainer.compute.recurrent.chunks.size_for", lambda lengths: size)
    library, levels = of_library("qwen3_next", RULE), Levels.of(lengths, trees, "cpu")

    def together(*given: Tensor) -> Tensor:
        return gated_delta_rule(*_signed(*given), levels, normed=True)

    def alone(*given: Tensor) -> Tensor:
        made = []
        for path, own in zip(paths(lengths, trees), lengths, strict=True):
            q, k, v, g, beta = (each[path][None] for each in _signed(*given))
            made.append(library(q, k, v, g=g, beta=beta, use_qk_l2norm_in_kernel=True)[0][0, -own:])
        return torch.cat(made)

    keys, values, numbers = ((sum(lengths), HEADS, *size) for size in ((KEYS,), (VALUES,), ()))
    same(together, alone, drawn(keys, keys, values, numbers, numbers), 1e-5)


def test_only_a_state_that_is_continued_is_left() -> None:
    found = Levels.of(*NESTED, "cpu")
    assert [sum(sum(part.chunks.leave) for part in level) for level in found.levels] == [2, 2, 2, 0]
    begun = [[part.begins.counts for part in level if part.begins] for level in found.levels]
    assert [np.sum(counts, axis=0).tolist() for counts in begun if counts] == [[2, 2], [2, 2], [1, 1]]
    lengths = torch.tensor(NESTED[0])
    assert sum(part.tokens for part in found.levels[0]) == int(lengths[[0, 1, 10, 11, 14]].sum())


@pytest.mark.parametrize(
    ("lengths", "parts"),
    [
        ((*(1,) * 60, 1000), [tuple(range(60)), (60,)]),
        ((1000, *(16, 3) * 40, 800), [tuple(range(1, 81)), (0, 81)]),
        ((17, 1000), [(0, 1)]),
        ((3, 7), [(0, 1)]),
        ((1, 1, 1000), [(0, 1, 2)]),
    ],
    ids=["short ones beside a long one", "mixed", "none is short", "all are short", "hardly worth it"],
)
def test_short_pieces_are_cut_by_themselves_where_that_is_worth_it(
    lengths: tuple[int, ...], parts: list[tuple[int, ...]]
) -> None:
    assert [tuple(each) for each in alike(range(len(lengths)), lengths)] == parts
    found = Levels.of(lengths, (), "cpu")
    ((*made,),) = found.levels
    assert [part.tokens for part in made] == [sum(lengths[piece] for piece in each) for each in parts]
    if len(parts) == 1:
        assert found.order is None and found.places is None


def chain(pieces: int) -> tuple[tuple[int, ...], Trees]:
    """Each continues the one before."""
    return (16,) * pieces, [(0, TreeRun((16,) * pieces, tuple(range(-1, pieces - 1))))]


def groups(count: int) -> tuple[tuple[int, ...], Trees]:
    """Prompts with two answers each."""
    tree = TreeRun((16, 16, 16), (-1, 0, 0))
    return (16,) * (3 * count), [(3 * number, tree) for number in range(count)]


@pytest.mark.parametrize("of", [chain, groups])
def test_twice_as_many_pieces_cost_twice_as_much_and_no_more(
    of: Callable[[int], tuple[tuple[int, ...], Trees]],
) -> None:
    """Forward and backward, in elements that are made."""
    made = []
    for count in (24, 48):
        lengths, trees = of(count)
        levels, tokens = Levels.of(lengths, trees, "cpu"), sum(lengths)
        given = [each.requires_grad_() for each in drawn(*[(tokens, 1, 8)] * 3, (tokens, 1), (tokens, 1))]
        with Elements() as elements:
            gated_delta_rule(*_signed(*given), levels, normed=True).sum().backward()
        made.append(elements.count)
    assert made[1] < 2.2 * made[0]


class Elements(TorchDispatchMode):
    """Those of all tensors that are made."""

    def __init__(self) -> None:
        super().__init__()
        self.count = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        found = func(*args, **(kwargs or {}))
        if not func.is_view:
            results = found if isinstance(found, tuple | list) else (found,)
            self.count += sum(each.numel() for each in results if isinstance(each, Tensor))
        return found


def test_no_state_is_copied_for_those_who_only_read_it() -> None:
    """Of a hundred short answers to a prompt it would be more than all else."""
    lengths, answers = (64, *[2] * 100), 100
    levels = Levels.of(lengths, [(0, TreeRun(lengths, (-1, *[0] * answers)))], "cpu")
    given = [each.requires_grad_() for each in drawn(*[(264, 1, 64)] * 3, (264, 1), (264, 1))]
    kept: list[int] = []

    def keep(tensor: Tensor) -> Tensor:
        kept.append(tensor.numel())
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        gated_delta_rule(*_signed(*given), levels, normed=True)
    assert max(kept) < answers * 64 * 64 / 2


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("lengths", LENGTHS, ids=str)
def test_the_rule_begins_anew_with_each_sequence(lengths: tuple[int, ...], family: str) -> None:
    rule_comes_to_the_same(family, lengths, normed=True)


@pytest.mark.parametrize("size", [1, 2, 16, 64])
def test_the_rule_is_the_same_in_chunks_of_any_size(size: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("services.trainer.compute.recurrent.chunks.size_for", lambda lengths: size)
    assert chunks_of(MIXED).size == size
    rule_comes_to_the_same("qwen3_next", MIXED, normed=True)


def test_keys_that_are_not_to_be_of_length_1_stay_as_long_as_they_are() -> None:
    rule_comes_to_the_same("qwen3_next", MIXED, normed=False)


def chunks_of(lengths: tuple[int, ...]) -> Chunks:
    """Of sequences that share nothing."""
    (((part,),),) = (Levels.of(lengths, (), "cpu").levels,)
    return part.chunks


def rule_comes_to_the_same(family: str, lengths: tuple[int, ...], *, normed: bool) -> None:
    library, tokens, levels = of_library(family, RULE), sum(lengths), Levels.of(lengths, (), "cpu")

    def together(*given: Tensor) -> Tensor:
        return gated_delta_rule(*_signed(*given), levels, normed=normed)

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
    made = gated_delta_rule(*given, torch.full((128, HEADS), 0.5), Levels.of(lengths, (), "cpu"), normed=True)
    gradients = torch.autograd.grad(made.sum(), given)
    assert all(bool(each.isfinite().all()) for each in (made, *gradients))


def test_it_computes_in_float32_and_gives_what_it_was_given() -> None:
    given = [each.bfloat16() for each in drawn(*[(10, HEADS, KEYS)] * 3, (10, HEADS), (10, HEADS))]
    levels = Levels.of((7, 3), (), "cpu")
    found = gated_delta_rule(*_signed(*given), levels, normed=True)
    exact = gated_delta_rule(*(each.float() for each in _signed(*given)), levels, normed=True)
    assert found.dtype == torch.bfloat16 and torch.equal(found, exact.bfloat16())


@pytest.mark.parametrize("lengths", LENGTHS, ids=str)
def test_a_chunk_is_of_one_sequence_and_those_that_go_on_are_the_first(lengths: tuple[int, ...]) -> None:
    chunks = chunks_of(lengths)
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

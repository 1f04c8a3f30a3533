"""Attention over a tree of pieces is that of each sequence alone, with its gradient."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

from services.trainer.compute.attention import FLAT_ATTENTION, Sequences, attend, register
from services.trainer.compute.prefix import attention
from services.trainer.compute.prefix.attention import Rules, attend_tree
from services.trainer.compute.prefix.layout import Layout, TreeRun, lay_out
from services.trainer.order.prefixes import prefix_tree, unshared
from tests.unit.trainer.compute.architectures import FLAT, config_of, random_model


def nested(seed: int = 0) -> list[bytes]:
    """Sequences that continue each other at several depths, an equal pair, and two of their own."""
    rng = np.random.default_rng(seed)
    trunk, other = rng.integers(1, 64, 11), rng.integers(1, 64, 6)

    def then(prefix: np.ndarray, count: int) -> np.ndarray:
        return np.concatenate([prefix, rng.integers(1, 64, count)])

    branch = then(trunk[:7], 3)
    made = [
        then(trunk[:9], 4),
        other,
        then(trunk[:9], 4),
        then(branch, 2),
        trunk,
        then(branch, 5),
        trunk[:7],
        then(branch, 2),
        rng.integers(1, 64, 3),
        trunk,
    ]
    return [each.astype("<i4").tobytes() for each in made]


def laid_out(sequences: list[bytes], block: int = 1) -> Layout:
    return lay_out([(sequences, prefix_tree(sequences, block))])


def the_tree(layout: Layout) -> tuple[slice, TreeRun]:
    ((first, tree),) = layout.trees
    start = sum(layout.lengths[:first])
    return slice(start, start + tree.tokens), tree


def by_hand(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, seen: torch.Tensor, rules: Rules, sinks: Any
) -> torch.Tensor:
    """Plain attention with a mask, differentiable."""
    group = q.shape[0] // k.shape[0]
    k, v = k.repeat_interleave(group, 0), v.repeat_interleave(group, 0)
    scores = q @ k.transpose(1, 2) * rules.scale
    if rules.softcap is not None:
        scores = rules.softcap * torch.tanh(scores / rules.softcap)
    scores = scores.masked_fill(~seen, -torch.inf)
    if sinks is not None:
        scores = torch.cat([scores, sinks[:, None, None].expand(-1, scores.shape[1], 1)], dim=2)
    return scores.softmax(-1)[..., : k.shape[1]] @ v


def who_sees_whom(layout: Layout, tokens: slice, window: int | None) -> torch.Tensor:
    """bool [T, T], from where each sequence's tokens are."""
    seen = torch.zeros(len(layout.tokens), len(layout.tokens), dtype=torch.bool)
    for place in layout.places:
        for index, token in enumerate(place):
            first = 0 if window is None else max(0, index + 1 - window)
            seen[token, torch.from_numpy(place[first : index + 1])] = True
    return seen[tokens, tokens]


@pytest.mark.parametrize("most", [1, 40, 300, 1 << 24])
@pytest.mark.parametrize(
    ("rules", "with_sinks"),
    [
        (Rules(0.4), False),
        (Rules(0.4, window=4), False),
        (Rules(0.4, window=1), False),
        (Rules(0.4, softcap=1.5), False),
        (Rules(0.4, window=6, softcap=0.7), True),
    ],
    ids=["plain", "window", "only itself", "softcap", "sinks, window and softcap"],
)
def test_a_trees_attention_is_plain_attention_with_its_mask(
    rules: Rules, with_sinks: bool, most: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(attention, "SCORE_ELEMENTS", most)
    torch.manual_seed(1)
    layout = laid_out(nested())
    tokens, tree = the_tree(layout)
    assert len(tree.seen) >= 3
    positions = torch.from_numpy(layout.positions)[tokens]
    shapes = [(4, tree.tokens, 6), (2, tree.tokens, 6), (2, tree.tokens, 5)]
    given = [torch.randn(shape, requires_grad=True) for shape in shapes]
    sinks = torch.randn(4, requires_grad=True) if with_sinks else None
    leaves = [*given, *([sinks] if sinks is not None else [])]
    found = attend_tree(*given, positions, tree, rules, sinks)
    expected = by_hand(*given, who_sees_whom(layout, tokens, rules.window), rules, sinks)
    torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-6)
    above = torch.randn(expected.shape)
    pairs = zip(
        torch.autograd.grad((found * above).sum(), leaves),
        torch.autograd.grad((expected * above).sum(), leaves),
        strict=True,
    )
    for ours, theirs in pairs:
        torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-5)


def test_low_precision_is_computed_in_float32_and_rounded_once() -> None:
    torch.manual_seed(2)
    layout = laid_out(nested())
    tokens, tree = the_tree(layout)
    positions = torch.from_numpy(layout.positions)[tokens]
    given = [torch.randn(2, tree.tokens, 8).bfloat16() for _ in range(3)]
    found = attend_tree(*given, positions, tree, Rules(0.4))
    exact = attend_tree(*(each.float() for each in given), positions, tree, Rules(0.4))
    assert torch.equal(found, exact.bfloat16())


@pytest.mark.parametrize("model_type", sorted(FLAT))
def test_sequences_of_a_tree_are_computed_as_if_each_were_alone(model_type: str) -> None:
    register()
    config = config_of(model_type, FLAT[model_type])
    flat, plain = random_model(config, FLAT_ATTENTION), random_model(config, "eager")
    plain.load_state_dict(flat.state_dict())
    one, two = nested(1), nested(2)
    layout = lay_out([(one, prefix_tree(one, 1)), (two, prefix_tree(two, 2)), (one, unshared(one))])
    assert len(layout.trees) == 2
    cut = Sequences.laid_out(layout, "cpu")
    tokens = torch.from_numpy(layout.tokens)[None]

    embedded = flat.get_input_embeddings()(tokens).detach().requires_grad_()
    logits = flat(inputs_embeds=embedded, use_cache=False, position_ids=cut.positions, sequences=cut).logits[
        0
    ]
    weights = [torch.randn(len(place), logits.shape[1]) for place in layout.places]
    places = [torch.from_numpy(place) for place in layout.places]
    terms = [(logits[place] * weight).sum() for place, weight in zip(places, weights, strict=True)]
    (gradient,) = torch.autograd.grad(torch.stack(terms).sum(), embedded)

    expected = torch.zeros_like(gradient[0])
    for sequence, place, weight in zip((*one, *two, *one), places, weights, strict=True):
        ids = torch.from_numpy(np.frombuffer(sequence, "<i4").astype(np.int64))
        alone = plain.get_input_embeddings()(ids[None]).detach().requires_grad_()
        made = plain(inputs_embeds=alone, use_cache=False).logits[0]
        torch.testing.assert_close(logits[place], made, rtol=1e-4, atol=1e-5)
        (own,) = torch.autograd.grad((made * weight).sum(), alone)
        expected.index_add_(0, place, own[0])
    torch.testing.assert_close(gradient[0], expected, rtol=1e-3, atol=1e-4 * float(expected.abs().max()))


def test_a_batch_of_one_tree_is_in_one_piece_as_of_the_librarys_attention() -> None:
    """AFMoE views it by features, without asking."""
    sequences = [np.append(np.arange(9), number).astype("<i4").tobytes() for number in range(3)]
    cut = Sequences.laid_out(laid_out(sequences), "cpu")
    assert list(cut.runs()) == [cut.trees[0][1]]
    given = [torch.randn(1, heads, len(cut.positions[0]), 8) for heads in (4, 2, 2)]
    output, _ = attend(torch.nn.Module(), *given, None, sequences=cut)
    assert output.is_contiguous()


def test_a_layout_has_each_shared_token_once_and_groups_share_nothing() -> None:
    sequences = nested()
    tree = prefix_tree(sequences, 1)
    layout = lay_out([(sequences, tree), (sequences, tree)])
    assert layout.groups == (tree.tokens, tree.tokens)
    assert len(layout.tokens) == 2 * tree.tokens < 2 * sum(len(each) // 4 for each in sequences)
    for number, place in enumerate(layout.places):
        read = layout.tokens[place].astype("<i4").tobytes()
        assert read == sequences[number % len(sequences)]
        assert (layout.positions[place] == np.arange(len(place))).all()
        assert (place >= tree.tokens).all() == (number >= len(sequences))


def test_sequences_that_share_nothing_lie_as_they_came() -> None:
    sequences = [np.full(length, number, "<i4").tobytes() for number, length in enumerate((5, 20, 17))]
    shared, apart = laid_out(sequences, 16), lay_out([(sequences, unshared(sequences))])
    assert shared.trees == ()
    assert shared.lengths == apart.lengths == (5, 20, 17)
    assert shared.tokens.tolist() == apart.tokens.tolist()

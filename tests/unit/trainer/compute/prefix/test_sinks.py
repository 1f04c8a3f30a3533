"""Attention with sinks by calls of a kernel that knows none, with a kernel in plain PyTorch."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from services.trainer.compute import attention
from services.trainer.compute.attention import FLAT_ATTENTION, Sequences, register
from services.trainer.compute.prefix import flash, trial
from services.trainer.compute.prefix.calls import Call, levels_of, of_themselves, within_window
from services.trainer.compute.prefix.flash import attend_pieces
from services.trainer.compute.prefix.layout import TreeRun, lay_out
from services.trainer.compute.prefix.trial import attends_to_trees, works, works_with_sinks
from services.trainer.compute.split.asked import Asked
from services.trainer.order.prefixes import prefix_tree
from tests.unit.trainer.compute.architectures import FLAT, config_of, random_model
from tests.unit.trainer.compute.prefix.kernels import (
    Absent,
    ForgetsTheWindowOnItsWayBack,
    MixesSingleTokens,
    Plain,
    SeesOneMore,
    Wrong,
    repeated,
)

LENGTHS = (9, 4, 1, 12, 5)
# The first piece is continued by all but the last, and the second by the third.
TREE = [(0, TreeRun((9, 4, 1, 12), (-1, 0, 1, 0)))]
ABOVE = {1: (0,), 2: (0, 1), 3: (0,)}
CALLS: list[tuple[int | None, bool]] = []
"""The window of each call of a kernel, and whether it is causal."""


class Noted(Plain):
    def forward(self, *given: Any) -> tuple[Tensor, Tensor]:
        *_, causal, _, window = given if len(given) == 7 else (*given, None)
        CALLS.append((window, causal))
        return super().forward(*given)


class LogarithmsOfTwo(Plain):
    """Its sums are of another base."""

    def forward(self, *given: Any) -> tuple[Tensor, Tensor]:
        output, sums = super().forward(*given)
        return output, sums / np.log(2)


def calls_for(window: int | None, tree: bool) -> list[Call]:
    trees = TREE if tree else []
    if window is not None:
        return list(within_window(window, LENGTHS, trees, "cpu", 20))
    offsets = torch.tensor([0, *LENGTHS]).cumsum(0).int()
    return [*of_themselves(LENGTHS, offsets, "cpu"), *levels_of(LENGTHS, trees, "cpu")]


def seen_by(window: int | None, tree: bool) -> Tensor:
    """bool [T, T]"""
    piece = torch.repeat_interleave(torch.arange(len(LENGTHS)), torch.tensor(LENGTHS))
    above = ABOVE if tree else {}
    starts = [sum(LENGTHS[other] for other in above.get(at, ())) for at in range(len(LENGTHS))]
    places = torch.cat([start + torch.arange(size) for start, size in zip(starts, LENGTHS, strict=True)])
    found = piece[:, None] == piece
    for below, others in above.items():
        found |= (piece == below)[:, None] & torch.isin(piece, torch.tensor(others))
    behind = places[:, None] - places
    return found & (behind >= 0) & (behind < (window or len(piece)))


@pytest.mark.parametrize("key_heads", [4, 2, 1])
@pytest.mark.parametrize(
    ("window", "tree"),
    [(None, False), (3, False), (1, False), (None, True), (3, True), (11, True)],
    ids=["sequences", "a window", "only themselves", "a tree", "a tree, a window", "a tree, a long window"],
)
def test_merged_sinks_are_attention_with_them_and_so_is_their_gradient(
    window: int | None, tree: bool, key_heads: int
) -> None:
    generator = torch.Generator().manual_seed(4)
    total, scale = sum(LENGTHS), 0.3
    query, above = (torch.randn(total, 4, 8, generator=generator) for _ in range(2))
    key, value = (torch.randn(total, key_heads, 8, generator=generator) for _ in range(2))
    sinks = torch.tensor([-2.0, 0.0, 1.5, 4.0])
    ours, plain = ([each.clone().requires_grad_() for each in (query, key, value, sinks)] for _ in range(2))
    made = attend_pieces(*ours[:3], calls_for(window, tree), scale, Plain(), window=window, sinks=ours[3])

    scores = torch.einsum("qhd,khd->hqk", plain[0], repeated(plain[1], query)) * scale
    scores = scores.masked_fill(~seen_by(window, tree), -torch.inf)
    with_sinks = torch.cat([scores, plain[3][:, None, None].expand(-1, total, 1)], dim=2)
    shares = with_sinks.softmax(-1)[..., :-1]
    expected = torch.einsum("hqk,khd->qhd", shares, repeated(plain[2], query))
    torch.testing.assert_close(made, expected)
    made.backward(above)
    expected.backward(above)
    for mine, other in zip(ours, plain, strict=True):
        torch.testing.assert_close(mine.grad, other.grad)


def test_sinks_that_are_frozen_get_no_gradient_and_the_others_theirs() -> None:
    leaves = [torch.randn(6, 2, 8, requires_grad=True) for _ in range(3)]
    own = of_themselves([6], torch.tensor([0, 6], dtype=torch.int32), "cpu")
    found = []
    for frozen in (True, False):
        sinks = torch.ones(2, requires_grad=not frozen)
        made = attend_pieces(*leaves, own, 0.3, Plain(), sinks=sinks)
        found.append(torch.autograd.grad(made.square().sum(), leaves, retain_graph=True))
        made.sum().backward()
        assert (sinks.grad is None) == frozen
    for one, other in zip(*found, strict=True):
        assert torch.equal(one, other)


def test_pieces_are_not_met_as_a_whole_through_a_window() -> None:
    given = [torch.randn(sum(LENGTHS), 2, 8) for _ in range(3)]
    with pytest.raises(ValueError, match="not met as a whole through a window"):
        attend_pieces(*given, calls_for(None, True), 0.3, Plain(), window=3)


@pytest.mark.parametrize(
    ("window", "tree", "calls"),
    [
        (5, False, [(5, True), (None, True)]),
        (64, True, [(None, True), (None, False), (None, True), (None, False)]),
        (5, True, [(5, True), (None, True), (None, False)]),
    ],
    ids=["sequences", "a tree that no window is shorter than", "a tree and windows"],
)
def test_gpt_oss_comes_to_the_same_by_the_kernel_once_it_was_given_sinks(
    window: int, tree: bool, calls: list[tuple[int | None, bool]], monkeypatch: pytest.MonkeyPatch
) -> None:
    register()
    settings = FLAT["gpt_oss"] | {"sliding_window": window}
    model = random_model(config_of("gpt_oss", settings), FLAT_ATTENTION)
    for name, parameter in model.named_parameters():
        if name.endswith(".sinks"):
            torch.nn.init.normal_(parameter, mean=1.0)
    rng = np.random.default_rng(2)
    prompt = rng.integers(1, 60, 20)
    answers = [np.concatenate([prompt, rng.integers(1, 60, length)]) for length in (11, 5, 16)]
    sequences = [tokens.astype("<i4").tobytes() for tokens in (*answers, rng.integers(1, 60, 13))]
    layout = lay_out([(sequences, prefix_tree(sequences, 4))])
    tokens, cut = torch.from_numpy(layout.tokens)[None], Sequences.laid_out(layout, "cpu")
    given = replace(cut, levels=levels_of(layout.lengths, layout.trees, "cpu"))
    if not tree:
        cut = given = Sequences.of(layout.lengths, "cpu")
    weights = torch.randn(tokens.shape[1], 64)

    def computed(sequences: Sequences) -> list[Tensor]:
        model.zero_grad()
        options: dict[str, Any] = {"position_ids": sequences.positions, "sequences": sequences}
        logits = model(input_ids=tokens, use_cache=False, **options).logits[0]
        (logits * weights).sum().backward()
        return [logits.detach(), *(parameter.grad.clone() for parameter in model.parameters())]

    expected = computed(cut)
    monkeypatch.setattr(attention, "_has_kernel", lambda query, value: True)
    monkeypatch.setattr(flash, "FlashAttention", Noted)
    monkeypatch.setattr(attention, "_right_with_sinks", set())
    CALLS.clear()
    computed(given)
    attention.give_kernel_sinks(4, 2, 16)
    computed(given)
    assert not CALLS, "nothing, or another shape, was tried"
    attention.give_kernel_sinks(4, 2, 8)
    found = computed(given)
    assert calls == CALLS
    for one, other in zip(found, expected, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-3, atol=1e-5 * float(other.abs().max()))


@pytest.mark.parametrize("shape", [(4, 2, 64), (3, 3, 32)], ids=["shared keys", "keys of each head"])
def test_a_kernel_that_is_right_is_given_sinks(shape: tuple[int, int, int]) -> None:
    assert works_with_sinks("cpu", Plain(), *shape)


@pytest.mark.parametrize(
    "kernel",
    [
        Wrong(),
        SeesOneMore(),
        ForgetsTheWindowOnItsWayBack(),
        LogarithmsOfTwo(),
        MixesSingleTokens(),
        Absent(),
    ],
    ids=lambda each: type(each).__name__,
)
def test_a_kernel_that_comes_to_something_else_is_not(
    kernel: Plain, caplog: pytest.LogCaptureFixture
) -> None:
    assert not works_with_sinks("cpu", kernel)
    assert "scores are whole matrices, as attention with sinks" in caplog.text


@pytest.mark.parametrize("sinks", [True, False], ids=["with sinks", "without"])
def test_a_layer_with_sinks_attends_to_trees_where_a_tree_was_tried_with_them(
    sinks: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    def forgetful(*given: Any, sinks: Tensor | None, **options: Any) -> Tensor:
        made = attend_pieces(*given, **options)
        return made if sinks is None else made + 0 * sinks[:, None]

    tried = []

    def on_a_cpu(device: str, kernel: Any, *shape: int, sinks: bool, windows: bool) -> bool:
        tried.append(shape)
        return works("cpu", Plain(), *shape, sinks=sinks, windows=windows)

    monkeypatch.setattr(trial, "works", on_a_cpu)
    monkeypatch.setattr(trial, "least", lambda numbers, device: numbers)
    asked = [Asked(4, 2, 768, 128, kernel=True, plain=not sinks, sinks=sinks)]
    assert attends_to_trees(asked, 512, "cuda")
    monkeypatch.setattr(trial, "attend_pieces", forgetful)
    assert attends_to_trees(asked, 512, "cuda") is not sinks
    assert tried == [(4, 2, 64)] * 2

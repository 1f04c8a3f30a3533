"""Attention over trees by calls of a kernel whose outputs are merged, with a kernel in plain PyTorch."""

from __future__ import annotations

from dataclasses import replace
from itertools import accumulate, pairwise
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from services.trainer.compute import attention
from services.trainer.compute.prefix import flash, trial
from services.trainer.compute.prefix.calls import Run, levels_of, of_themselves, within_window
from services.trainer.compute.prefix.flash import FlashAttention, attend_pieces
from services.trainer.compute.prefix.layout import TreeRun, lay_out
from services.trainer.compute.prefix.trial import attends_to_trees, works
from services.trainer.compute.split.asked import Asked
from services.trainer.order.prefixes import prefix_tree
from tests.unit.trainer.compute.prefix.kernels import (
    Absent,
    CountsFromTheBegin,
    ForgetsTheWindowOnItsWayBack,
    LosesManyKeys,
    LosesManyKeysInAWindow,
    MixesSingleTokens,
    NotANumber,
    Plain,
    SeesOneMore,
    Wrong,
    repeated,
)

# A root of 6 tokens, below it one of 4 with two below, and one of 3; beside it a sequence and a second tree.
LENGTHS = (6, 4, 5, 2, 3, 7, 8, 1)
TREES = [(0, TreeRun((6, 4, 5, 2, 3), (-1, 0, 1, 1, 0))), (6, TreeRun((8, 1), (-1, 0)))]
PARENTS = (-1, 0, 1, 1, 0, -1, -1, 6)


def seen_by(window: int | None) -> Tensor:
    """bool [T, T], by walking up from each token."""
    starts = [0, *accumulate(LENGTHS)]
    found = torch.zeros(starts[-1], starts[-1], dtype=torch.bool)
    for piece, (start, stop) in enumerate(pairwise(starts)):
        for token in range(start, stop):
            seen, at = list(range(token, start - 1, -1)), piece
            while (at := PARENTS[at]) >= 0:
                seen += range(starts[at + 1] - 1, starts[at] - 1, -1)
            found[token, seen[:window]] = True
    return found


def test_what_is_below_pieces_meets_them_level_by_level() -> None:
    first, second = levels_of(LENGTHS, TREES, "cpu")
    assert isinstance(first.asking, Tensor) and isinstance(first.met, Tensor)
    assert first.asking.tolist() == [*range(6, 20), 35] and first.met.tolist() == [*range(6), *range(27, 35)]
    assert (first.queries.offsets.tolist(), first.keys.offsets.tolist()) == ([0, 14, 15], [0, 6, 14])
    assert (first.queries.longest, first.keys.longest) == (14, 8)
    assert (second.asking, second.met) == (slice(10, 17), slice(6, 10))


@pytest.mark.parametrize("most_keys", [1, 13, 100])
@pytest.mark.parametrize("window", [1, 2, 5, 6, 9, 40])
def test_through_a_window_a_piece_meets_the_end_of_what_is_above_it(window: int, most_keys: int) -> None:
    asked: list[int] = []
    met = torch.zeros(sum(LENGTHS), sum(LENGTHS), dtype=torch.bool)
    for call in within_window(window, LENGTHS, TREES, "cpu", most_keys):
        places = torch.arange(sum(LENGTHS))
        ends = zip(*(pairwise(run.offsets.tolist()) for run in call.runs), strict=True)
        assert call.causal
        assert len(places[call.met]) <= max(most_keys, call.keys.longest)
        for (first, after), (left, right) in ends:
            assert after - first <= call.queries.longest and right - left <= call.keys.longest
            assert right - left <= after - first + window - 1
            asking, keys = places[call.asking][first:after], places[call.met][left:right]
            asked += asking.tolist()
            # The last is met by the last, and so on.
            for back, token in enumerate(asking.flip(0).tolist()):
                seen = keys[: len(keys) - back][-window:]
                met[token, seen] = True
    assert asked == list(range(sum(LENGTHS)))
    assert torch.equal(met, seen_by(window))


@pytest.mark.parametrize("window", [None, 1, 3, 8, 40])
def test_calls_together_are_attention_over_the_whole_tree_and_so_is_their_gradient(
    window: int | None,
) -> None:
    generator = torch.Generator().manual_seed(4)
    total, scale = sum(LENGTHS), 0.3
    query, above = (torch.randn(total, 4, 8, generator=generator) for _ in range(2))
    key, value = (torch.randn(total, 2, 8, generator=generator) for _ in range(2))
    offsets = torch.tensor([0, *LENGTHS]).cumsum(0).int()
    if window is None:
        calls = *of_themselves(LENGTHS, offsets, "cpu"), *levels_of(LENGTHS, TREES, "cpu")
    else:
        calls = within_window(window, LENGTHS, TREES, "cpu", 20)

    ours, plain = ([each.clone().requires_grad_() for each in (query, key, value)] for _ in range(2))
    made = attend_pieces(*ours, calls, scale, Plain(), window=window)
    scores = torch.einsum("qhd,khd->hqk", plain[0], repeated(plain[1], query)) * scale
    shares = scores.masked_fill(~seen_by(window), -torch.inf).softmax(-1)
    expected = torch.einsum("hqk,khd->qhd", shares, repeated(plain[2], query))
    torch.testing.assert_close(made, expected)
    made.backward(above)
    expected.backward(above)
    for mine, other in zip(ours, plain, strict=True):
        torch.testing.assert_close(mine.grad, other.grad)


@pytest.mark.parametrize(
    "window",
    [None, 64, 7, 25],
    ids=["no window", "a window that nobody leaves", "a short one", "one over a whole piece"],
)
def test_a_layer_comes_to_the_same_by_it(window: int | None, monkeypatch: pytest.MonkeyPatch) -> None:
    rng = np.random.default_rng(2)
    prompt = rng.integers(0, 9, 20)
    answers = [np.concatenate([prompt, rng.integers(0, 9, length)]) for length in (11, 5, 16)]
    sequences = [tokens.astype("<i4").tobytes() for tokens in (*answers, rng.integers(9, 18, 13))]
    layout = lay_out([(sequences, prefix_tree(sequences, 4))])
    cut = attention.Sequences.laid_out(layout, "cpu")
    assert layout.trees and cut.longest == 36
    module: Any = nn.Module()
    module.num_key_value_groups, module.is_causal = 2, True
    generator = torch.Generator().manual_seed(8)
    given = [torch.randn(1, heads, len(layout.tokens), 16, generator=generator) for heads in (4, 2, 2)]

    def computed(sequences: attention.Sequences) -> list[Tensor]:
        leaves = [each.clone().requires_grad_() for each in given]
        made, _ = attention.attend(module, *leaves, window, sequences=sequences)
        return [made.detach(), *torch.autograd.grad(made.square().sum(), leaves)]

    expected = computed(cut)
    levels = levels_of(layout.lengths, layout.trees, "cpu")
    monkeypatch.setattr(attention, "_has_kernel", lambda query, value: True)
    monkeypatch.setattr(flash, "FlashAttention", Plain)
    for found, wanted in zip(computed(replace(cut, levels=levels)), expected, strict=True):
        torch.testing.assert_close(found, wanted)


@pytest.mark.parametrize("windows", [False, True], ids=["all before", "through windows"])
@pytest.mark.parametrize("shape", [(4, 2, 64), (3, 3, 32)], ids=["shared keys", "keys of each head"])
def test_a_kernel_that_is_right_is_taken(shape: tuple[int, int, int], windows: bool) -> None:
    assert works("cpu", Plain(), *shape, windows=windows)


@pytest.mark.parametrize(
    "kernel",
    [CountsFromTheBegin(), SeesOneMore(), ForgetsTheWindowOnItsWayBack(), LosesManyKeysInAWindow()],
    ids=lambda each: type(each).__name__,
)
def test_one_that_is_wrong_through_windows_is_taken_where_there_are_none(kernel: Plain) -> None:
    assert works("cpu", kernel)
    assert not works("cpu", kernel, windows=True)


@pytest.mark.parametrize(
    "kernel",
    [Wrong(), NotANumber(), MixesSingleTokens(), LosesManyKeys(), Absent()],
    ids=lambda each: type(each).__name__,
)
def test_a_kernel_that_comes_to_something_else_is_found_out(kernel: Plain) -> None:
    assert not works("cpu", kernel)


def layer(*, window: int | None = None, kernel: bool = True) -> Asked:
    return Asked(4, 2, 768, window, kernel, True)


def recurrent(*, kernel: bool = False) -> Asked:
    return replace(layer(kernel=kernel), plain=False, recurrent=True)


@pytest.mark.parametrize(
    ("asked", "shares"),
    [
        ([], False),
        ([layer(kernel=False)], True),
        ([layer(window=16)], True),
        ([layer(), recurrent()], True),
    ],
    ids=["one sequence at a time", "float32", "windows", "a state from token to token"],
)
def test_on_a_cpu_every_flat_model_attends_to_trees(asked: list[Asked], shares: bool) -> None:
    assert attends_to_trees(asked, 512, "cpu") == shares


@pytest.mark.parametrize("other", [layer(kernel=False), recurrent(kernel=True)])
def test_on_a_gpu_one_layer_that_a_rank_cannot_have_is_enough_for_no_rank_to(
    other: Asked, monkeypatch: pytest.MonkeyPatch
) -> None:
    told = []

    def least(numbers: list[int], device: str) -> list[int]:
        told.append(numbers)
        return [0]

    monkeypatch.setattr(trial, "works", lambda *_, **__: True)
    monkeypatch.setattr(trial, "least", least)
    # Another rank may have another image, and whatever a rank finds, it tells.
    assert not attends_to_trees([layer(), other], 512, "cuda")
    assert not attends_to_trees([layer()], 512, "cuda")
    assert told == [[0], [1]]


@pytest.mark.parametrize("kernel", [False, True], ids=["by tensors", "by a kernel"])
def test_on_a_gpu_a_state_goes_on_unless_a_kernel_computes_it(
    kernel: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(trial, "works", lambda *_, **__: True)
    monkeypatch.setattr(trial, "least", lambda numbers, device: numbers)
    assert attends_to_trees([layer(), recurrent(kernel=kernel)], 512, "cuda") is not kernel


@pytest.mark.parametrize(("length", "kinds"), [(512, [False, True]), (16, [False])])
def test_on_a_gpu_a_tree_is_tried_through_windows_where_sequences_leave_them(
    length: int, kinds: list[bool], monkeypatch: pytest.MonkeyPatch
) -> None:
    tried = []

    def on_a_cpu(device: str, kernel: Any, *shape: int, sinks: bool, windows: bool) -> bool:
        tried.append(windows)
        return works("cpu", CountsFromTheBegin(), *shape, windows=windows)

    monkeypatch.setattr(trial, "works", on_a_cpu)
    monkeypatch.setattr(trial, "least", lambda numbers, device: numbers)
    assert attends_to_trees([layer(), layer(window=16)], length, "cuda") == (length == 16)
    assert tried == kinds


@pytest.mark.parametrize(("causal", "window"), [(False, None), (True, None), (True, 7)])
def test_torchs_kernel_is_called_as_it_can_be(causal: bool, window: int | None) -> None:
    """Shapes and arguments, where there is no GPU."""
    query = torch.empty(12, 4, 64, dtype=torch.bfloat16, device="meta")
    key, value = (torch.empty(20, 2, 64, dtype=torch.bfloat16, device="meta") for _ in range(2))
    queries, keys = (Run(torch.empty(2, dtype=torch.int32, device="meta"), size) for size in (12, 20))
    kernel, how = FlashAttention(), ((queries, keys), causal, 0.125, window)
    with Called() as called:
        output, sums = kernel.forward(query, key, value, *how)
        found = kernel.backward(output, (query, key, value), (output, sums), *how)
    assert (output.shape, sums.shape, sums.dtype) == (query.shape, (4, 12), torch.float32)
    assert [each.shape for each in found] == [query.shape, key.shape, value.shape]
    # As `varlen_attn` calls it.
    before = -1 if window is None else window - 1
    assert called.with_ == [(causal and window is None, before, 0 if causal else -1)] * 2


class Called(TorchDispatchMode):
    """What kernels are told of who sees whom: causal or not, and the window before and after."""

    def __init__(self) -> None:
        super().__init__()
        self.with_: list[tuple[bool, int, int]] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        named = {each.name: given for each, given in zip(func._schema.arguments, args, strict=False)}
        named |= kwargs or {}
        if "is_causal" in named:
            self.with_.append((named["is_causal"], named["window_size_left"], named["window_size_right"]))
        return func(*args, **(kwargs or {}))

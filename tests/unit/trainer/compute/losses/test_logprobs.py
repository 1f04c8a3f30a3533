"""The chunked log-probability head gives what a full log-softmax gives."""

import math
from typing import Any

import pytest
import torch
from torch import nn

from services.trainer.compute import logprobs
from services.trainer.compute.data import LoraSpec
from services.trainer.compute.logprobs import LogprobHead, Targets, selective_log_softmax
from services.trainer.compute.lora.adapter import HEAD, Adapter, LinearShape
from services.trainer.compute.lora.grouped import LoraRouter
from services.trainer.compute.lora.stack import Segment
from services.trainer.compute.memory.buffers import FlatBuffers

HIDDEN, VOCAB, POSITIONS = 16, 50, 23


@pytest.fixture(autouse=True)
def seeded() -> None:
    torch.manual_seed(0)


def rectangular(targets: torch.Tensor) -> Targets:
    """Equally many at each position: [P, K]."""
    return Targets(targets.flatten(), (tuple(targets.shape),))


def test_selective_log_softmax_equals_log_softmax_with_its_gradient() -> None:
    logits = (torch.randn(7, VOCAB, dtype=torch.float64) * 5).float()
    targets = torch.randint(VOCAB, (7, 3))
    targets[0] = targets[0, 0]  # the same target thrice
    upstream = torch.randn(7, 3)
    ours, theirs = logits.clone().requires_grad_(), logits.double().requires_grad_()
    result = selective_log_softmax(ours, rectangular(targets)).view(7, 3)
    expected = theirs.log_softmax(-1).gather(-1, targets)
    torch.testing.assert_close(result.double(), expected, rtol=0, atol=2e-6)
    result.backward(upstream)
    expected.backward(upstream.double())
    torch.testing.assert_close(ours.grad.double(), theirs.grad, rtol=0, atol=2e-6)


def test_logits_of_bfloat16_are_normalised_in_float32() -> None:
    logits = (torch.randn(5, VOCAB) * 10).bfloat16()
    targets = torch.randint(VOCAB, (5, 1))
    result = selective_log_softmax(logits, rectangular(targets))
    assert result.dtype == torch.float32
    torch.testing.assert_close(result, logits.float().log_softmax(-1).gather(-1, targets)[:, 0])


@pytest.mark.parametrize("biased", [False, True])
def test_a_head_of_bfloat16_never_rounds_a_logit(biased: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    # Several parts of the weight, and a last one that is smaller.
    monkeypatch.setattr("services.trainer.compute.logprobs._CAST_ELEMENTS", 7 * HIDDEN)
    linear = nn.Linear(HIDDEN, VOCAB, bias=biased).bfloat16()
    hidden = (torch.randn(POSITIONS, HIDDEN) * 8).bfloat16().requires_grad_()
    targets = rectangular(torch.randint(VOCAB, (POSITIONS, 1)))
    result = LogprobHead(linear, LoraRouter(), chunk_elements=10 * VOCAB)(hidden, targets)
    parameters = [hidden, *linear.parameters()]
    gradients = torch.autograd.grad(result.square().sum(), parameters)

    exact = [parameter.detach().double().requires_grad_() for parameter in parameters]
    logits = torch.nn.functional.linear(*exact)
    expected = logits.log_softmax(-1).gather(-1, targets.ids[:, None])[:, 0]
    assert result.dtype == torch.float32
    torch.testing.assert_close(result.double(), expected, rtol=0, atol=2e-5)
    rounded = logits.bfloat16().double().log_softmax(-1).gather(-1, targets.ids[:, None])[:, 0]
    assert (rounded - expected).abs().max() > 1e-2
    wanted = torch.autograd.grad(expected.square().sum(), exact)
    for found, wants in zip(gradients, wanted, strict=True):
        assert found.dtype == torch.bfloat16
        torch.testing.assert_close(found.double(), wants, rtol=0.02, atol=0.02 * float(wants.abs().max()))


class Used(FlatBuffers):
    """What was in them before counts nowhere."""

    def take(self, elements: int, device: str | torch.device) -> torch.Tensor:
        return super().take(elements, device).fill_(math.nan)


def adapter(rank: int, seed: int, name: str = HEAD) -> Adapter:
    made = Adapter(LoraSpec(rank), {name: LinearShape(HIDDEN, VOCAB)}, "m", "cpu", HIDDEN)
    made.flat.normal_(std=0.2, generator=torch.Generator().manual_seed(seed))
    return made


@pytest.mark.parametrize("chunk_positions", [1, 4, 10, 1000])
def test_the_head_equals_a_plain_head_with_each_segments_adapter(chunk_positions: int) -> None:
    linear = nn.Linear(HIDDEN, VOCAB).requires_grad_(False)
    router = LoraRouter(Used())
    head = LogprobHead(linear, router, chunk_elements=chunk_positions * VOCAB)
    hidden = torch.randn(POSITIONS, HIDDEN, requires_grad=True)
    # Of three rows, one with five targets a position; chunks end inside of each.
    runs = [(7, 1), (2, 5), (14, 2)]
    targets = [torch.randint(VOCAB, shape) for shape in runs]
    # The one in the middle adapts something else.
    adapters = [adapter(3, 1), adapter(4, 2, "q_proj"), adapter(5, 3)]
    gradients = [torch.zeros_like(each.flat) for each in adapters]
    segments = [
        Segment(tokens, each, gradient)
        for tokens, each, gradient in zip((9, 6, 8), adapters, gradients, strict=True)
    ]
    with router.route(segments):
        result = head(hidden, Targets(torch.cat([part.flatten() for part in targets]), tuple(runs)))
        result.square().sum().backward()

    alone = hidden.detach().clone().requires_grad_()
    masters = [each.flat.clone().requires_grad_() for each in adapters]
    logits = linear(alone)
    deltas = [torch.zeros(6, VOCAB), torch.zeros(6, VOCAB), torch.zeros(8, VOCAB)]
    for number, tokens in ((0, slice(0, 9)), (2, slice(15, 23))):
        views = adapters[number].views(masters[number])
        low = alone[tokens] @ views[f"{HEAD}.lora_A"].T
        deltas[number] = adapters[number].scale * low @ views[f"{HEAD}.lora_B"].T
    distributions = (logits + torch.cat(deltas)).log_softmax(-1).split([count for count, _ in runs])
    found = [part.gather(-1, ids) for part, ids in zip(distributions, targets, strict=True)]
    expected = torch.cat([part.flatten() for part in found])
    expected.square().sum().backward()
    torch.testing.assert_close(result, expected, rtol=1e-5, atol=1e-5)
    assert hidden.grad is not None and alone.grad is not None
    torch.testing.assert_close(hidden.grad, alone.grad, rtol=1e-4, atol=1e-4)
    for number in (0, 2):
        expected_gradient = masters[number].grad
        assert expected_gradient is not None
        torch.testing.assert_close(gradients[number], expected_gradient, rtol=1e-4, atol=1e-4)
    assert not gradients[1].any()


def test_at_most_one_chunk_of_logits_exists_at_a_time(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[int] = []
    original = logprobs._logits

    def watched(x: torch.Tensor, *rest: Any) -> torch.Tensor:
        seen.append(x.shape[0])
        return original(x, *rest)

    monkeypatch.setattr(logprobs, "_logits", watched)
    head = LogprobHead(nn.Linear(HIDDEN, VOCAB), LoraRouter(), chunk_elements=4 * VOCAB)
    hidden = torch.randn(POSITIONS, HIDDEN, requires_grad=True)
    head(hidden, rectangular(torch.zeros(POSITIONS, 1, dtype=torch.int64))).sum().backward()
    assert max(seen) == 4
    # Every chunk once more in the backward pass: its logits were not kept.
    assert sum(seen) == 2 * POSITIONS


def test_where_the_slope_is_known_every_chunk_is_computed_once_and_comes_to_the_same(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    linear = nn.Linear(HIDDEN, VOCAB).requires_grad_(False)
    router = LoraRouter()
    head = LogprobHead(linear, router, chunk_elements=4 * VOCAB)
    runs = ((7, 1), (2, 5), (14, 2))
    ids = torch.randint(VOCAB, (sum(count * width for count, width in runs),))
    weights = torch.randn(ids.shape)
    adapters = [adapter(3, 1), adapter(5, 3)]
    seen: list[int] = []
    original = logprobs._logits

    def watched(x: torch.Tensor, *rest: Any) -> torch.Tensor:
        seen.append(x.shape[0])
        return original(x, *rest)

    def slope(logprobs: torch.Tensor, where: slice) -> torch.Tensor:
        return weights[where] * logprobs

    monkeypatch.setattr(logprobs, "_logits", watched)
    hidden = torch.randn(POSITIONS, HIDDEN)
    came_to = []
    for targets in (Targets(ids, runs), Targets(ids, runs, slope)):
        given = hidden.clone().requires_grad_()
        gradients = [torch.zeros_like(each.flat) for each in adapters]
        segments = [Segment(*each) for each in zip((9, 14), adapters, gradients, strict=True)]
        seen.clear()
        with router.route(segments):
            result = head(given, targets)
            (weights * result.square() / 2).sum().backward()
        assert given.grad is not None
        came_to.append((result.detach(), given.grad, *gradients))
        assert sum(seen) == (POSITIONS if targets.slope else 2 * POSITIONS)
    for found, expected in zip(*came_to, strict=True):
        assert expected.any()
        torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("below", [True, False], ids=["layers below", "nothing below"])
def test_so_comes_a_head_that_learns_to_its_own_gradient(dtype: torch.dtype, below: bool) -> None:
    linear = nn.Linear(HIDDEN, VOCAB).to(dtype)
    head = LogprobHead(linear, LoraRouter(), chunk_elements=4 * VOCAB)
    ids, weights = torch.randint(VOCAB, (POSITIONS,)), torch.randn(POSITIONS)
    hidden = torch.randn(POSITIONS, HIDDEN).to(dtype)

    def slope(logprobs: torch.Tensor, where: slice) -> torch.Tensor:
        return weights[where] * logprobs

    came_to = []
    for known in (None, slope):
        given = hidden.clone().requires_grad_(below)
        result = head(given, Targets(ids, ((POSITIONS, 1),), known))
        learned = [*linear.parameters(), *([given] if below else [])]
        came_to.append(torch.autograd.grad((weights * result.square() / 2).sum(), learned))
    for expected, found in zip(*came_to, strict=True):
        assert expected.any() and found.dtype == dtype
        error = 1e-5 if dtype == torch.float32 else 0.03
        torch.testing.assert_close(found, expected, rtol=error, atol=error * float(expected.abs().max()))

"""AdamW honours every setting of every step, and its state survives bit for bit."""

import pytest
import torch

from services.trainer.compute.data import AdamSpec
from services.trainer.compute.optimizer import AdapterOptimizer, FlatBuffers

STEPS = [
    AdamSpec(learning_rate=1e-2),
    AdamSpec(learning_rate=3e-3, beta1=0.5, beta2=0.9, eps=1e-3, weight_decay=0.3, grad_clip_norm=0.7),
    AdamSpec(learning_rate=0.0, beta1=0.0, beta2=0.999, eps=1e-8, weight_decay=0.1),
    AdamSpec(learning_rate=1e-2, grad_clip_norm=1e6),
]


def by_hand(flat: torch.Tensor, gradients: list[torch.Tensor], steps: list[AdamSpec]) -> torch.Tensor:
    """AdamW as in the paper, in float64."""
    w = flat.double()
    m, v = torch.zeros_like(w), torch.zeros_like(w)
    for t, (gradient, adam) in enumerate(zip(gradients, steps, strict=True), start=1):
        g = gradient.double()
        if adam.grad_clip_norm > 0 and g.norm() > adam.grad_clip_norm:
            g = g * adam.grad_clip_norm / g.norm()
        m = adam.beta1 * m + (1 - adam.beta1) * g
        v = adam.beta2 * v + (1 - adam.beta2) * g * g
        w = w * (1 - adam.learning_rate * adam.weight_decay)
        m_hat, v_hat = m / (1 - adam.beta1**t), v / (1 - adam.beta2**t)
        w = w - adam.learning_rate * m_hat / (v_hat.sqrt() + adam.eps)
    return w


@pytest.fixture
def flat() -> torch.Tensor:
    return torch.randn(1000, generator=torch.Generator().manual_seed(0))


@pytest.fixture
def gradients() -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(1)
    return [torch.randn(1000, generator=generator) for _ in STEPS]


def test_steps_equal_adamw_written_out(flat: torch.Tensor, gradients: list[torch.Tensor]) -> None:
    expected = by_hand(flat.clone(), gradients, STEPS)
    optimizer = AdapterOptimizer(flat, FlatBuffers("cpu"))
    for gradient, adam in zip(gradients, STEPS, strict=True):
        optimizer.step(gradient.clone(), adam)
    torch.testing.assert_close(flat.double(), expected, rtol=1e-5, atol=1e-6)


def test_metrics_are_the_norm_before_clipping_and_the_norm_of_the_change(flat: torch.Tensor) -> None:
    before = flat.clone()
    metrics = AdapterOptimizer(flat, FlatBuffers("cpu")).step(
        torch.full((1000,), 2.0), AdamSpec(1e-3, grad_clip_norm=0.1)
    )
    assert metrics["grad_norm"] == pytest.approx(2.0 * 1000**0.5)
    assert metrics["update_norm"] == pytest.approx(float((flat - before).norm()), rel=1e-5)
    assert metrics["learning_rate"] == 1e-3


def test_norms_of_large_tensors_are_exact() -> None:
    flat = torch.randn(100_003, generator=torch.Generator().manual_seed(2))
    gradient, before = flat * 3, flat.clone()
    expected = float(gradient.double().norm())
    metrics = AdapterOptimizer(flat, FlatBuffers("cpu")).step(gradient, AdamSpec(1e-3))
    assert metrics["grad_norm"] == pytest.approx(expected, rel=1e-12)
    assert metrics["update_norm"] == pytest.approx(float((before - flat).double().norm()), rel=1e-12)


@pytest.mark.parametrize("value", [float("nan"), float("inf"), -float("inf")])
def test_a_gradient_that_is_not_finite_changes_nothing(flat: torch.Tensor, value: float) -> None:
    optimizer = AdapterOptimizer(flat, FlatBuffers("cpu"))
    optimizer.step(torch.ones(1000), STEPS[0])
    before = flat.clone()
    gradient = torch.ones(1000)
    gradient[17] = value
    with pytest.raises(FloatingPointError):
        optimizer.step(gradient, STEPS[0])
    assert torch.equal(flat, before)
    assert optimizer.steps == 1


def test_exported_state_goes_on_bit_for_bit(flat: torch.Tensor, gradients: list[torch.Tensor]) -> None:
    optimizer = AdapterOptimizer(flat, FlatBuffers("cpu"))
    for gradient, adam in zip(gradients[:2], STEPS[:2], strict=True):
        optimizer.step(gradient.clone(), adam)
    steps, moments = optimizer.export()
    copy = flat.clone()
    resumed = AdapterOptimizer(copy, FlatBuffers("cpu"))
    resumed.restore(steps, {name: tensor.clone() for name, tensor in moments.items()})
    for gradient, adam in zip(gradients[2:], STEPS[2:], strict=True):
        optimizer.step(gradient.clone(), adam)
        resumed.step(gradient.clone(), adam)
    assert torch.equal(copy, flat)


def test_there_are_no_moments_before_the_first_step(flat: torch.Tensor) -> None:
    assert AdapterOptimizer(flat, FlatBuffers("cpu")).export() == (0, {})

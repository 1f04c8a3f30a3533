"""AdamW honours every setting of every step, and its state survives bit for bit."""

import msgspec
import pytest
import torch

from services.trainer.compute import optimizer as module
from services.trainer.compute.data import AdamSpec
from services.trainer.compute.memory.buffers import FlatBuffers
from services.trainer.compute.optimizer import (
    AdapterOptimizer,
    Due,
    MeasuredAdamW,
    step_together,
)

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


def step(optimizer: AdapterOptimizer, gradient: torch.Tensor, adam: AdamSpec) -> dict[str, float]:
    """A step for itself."""
    (found,) = step_together([Due(optimizer, gradient, adam)], FlatBuffers())
    if isinstance(found, FloatingPointError):
        raise found
    return found


@pytest.fixture
def flat() -> torch.Tensor:
    return torch.randn(1000, generator=torch.Generator().manual_seed(0))


@pytest.fixture
def gradients() -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(1)
    return [torch.randn(1000, generator=generator) for _ in STEPS]


def test_steps_equal_adamw_written_out(flat: torch.Tensor, gradients: list[torch.Tensor]) -> None:
    expected = by_hand(flat.clone(), gradients, STEPS)
    optimizer = AdapterOptimizer(flat)
    for gradient, adam in zip(gradients, STEPS, strict=True):
        step(optimizer, gradient.clone(), adam)
    torch.testing.assert_close(flat.double(), expected, rtol=1e-5, atol=1e-6)


def test_metrics_are_the_norm_before_clipping_and_the_norm_of_the_change(flat: torch.Tensor) -> None:
    before = flat.clone()
    metrics = step(AdapterOptimizer(flat), torch.full((1000,), 2.0), AdamSpec(1e-3, grad_clip_norm=0.1))
    assert metrics["grad_norm"] == pytest.approx(2.0 * 1000**0.5)
    assert metrics["update_norm"] == pytest.approx(float((flat - before).norm()), rel=1e-5)
    assert metrics["learning_rate"] == 1e-3


def norms(gradient: torch.Tensor) -> tuple[float, float, float]:
    """Of a step from zeros: the gradient's norm, the change's, and what the change's is in float64."""
    flat = torch.zeros(len(gradient))
    metrics = step(AdapterOptimizer(flat), gradient, AdamSpec(1e-3))
    return metrics["grad_norm"], metrics["update_norm"], float(flat.double().norm())


def test_norms_of_large_tensors_are_as_precise_as_float32() -> None:
    gradient = torch.randn(1_000_003, generator=torch.Generator().manual_seed(2))
    expected = float(gradient.double().norm())
    of_gradient, of_change, changed = norms(gradient)
    assert of_gradient == pytest.approx(expected, rel=2e-7)
    assert of_change == pytest.approx(changed, rel=2e-7)


@pytest.mark.parametrize("value", [0.1, 0.3, 1e-3, 7.7e-4, 2 / 3])
def test_norms_are_as_precise_where_all_values_are_the_same(value: float) -> None:
    gradient = torch.full((1_000_003,), value)
    expected = float(gradient.double().norm())
    of_gradient, of_change, changed = norms(gradient)
    assert of_gradient == pytest.approx(expected, rel=5e-7)
    assert of_change == pytest.approx(changed, rel=5e-7)


def test_norms_of_nothing_and_of_zeros_are_zero() -> None:
    assert norms(torch.zeros(0)) == (0.0, 0.0, 0.0)
    assert norms(torch.zeros(1000)) == (0.0, 0.0, 0.0)


@pytest.mark.parametrize("scale", [1e30, 1e-25, 1e-40])
def test_norms_are_right_of_values_whose_squares_float32_does_not_have(scale: float) -> None:
    gradient = torch.randn(100_003, generator=torch.Generator().manual_seed(2)) * scale
    gradient[40_000:70_000] = 0.0
    expected = float(gradient.double().norm())
    assert norms(gradient)[0] == pytest.approx(expected, rel=2e-7)


def test_a_norm_does_not_depend_on_where_in_memory_a_tensor_begins() -> None:
    values = torch.randn(50_000, generator=torch.Generator().manual_seed(2))
    room = torch.empty(50_016)
    found = set()
    for start in range(16):
        gradient = room[start : start + len(values)].copy_(values)
        found.add(norms(gradient)[0])
    assert len(found) == 1


@pytest.mark.parametrize("value", [float("nan"), float("inf"), -float("inf")])
def test_a_gradient_that_is_not_finite_changes_nothing(flat: torch.Tensor, value: float) -> None:
    optimizer = AdapterOptimizer(flat)
    step(optimizer, torch.ones(1000), STEPS[0])
    before = flat.clone()
    gradient = torch.ones(1000)
    gradient[17] = value
    with pytest.raises(FloatingPointError):
        step(optimizer, gradient, STEPS[0])
    assert torch.equal(flat, before)
    assert optimizer.steps == 1


def test_restored_state_goes_on_bit_for_bit(flat: torch.Tensor, gradients: list[torch.Tensor]) -> None:
    optimizer = AdapterOptimizer(flat)
    for gradient, adam in zip(gradients[:2], STEPS[:2], strict=True):
        step(optimizer, gradient.clone(), adam)
    copy = flat.clone()
    resumed = AdapterOptimizer(copy)
    resumed.restore(optimizer.steps, {name: moment.clone() for name, moment in optimizer.moments.items()})
    for gradient, adam in zip(gradients[2:], STEPS[2:], strict=True):
        step(optimizer, gradient.clone(), adam)
        step(resumed, gradient.clone(), adam)
    assert torch.equal(copy, flat)


def test_there_are_no_moments_before_the_first_step(flat: torch.Tensor) -> None:
    optimizer = AdapterOptimizer(flat)
    assert (optimizer.steps, optimizer.moments) == (0, {})


@pytest.mark.parametrize("block", [2**10, module.HOST_BLOCK])
def test_steps_of_several_adapters_are_bit_for_bit_those_of_each_alone(
    block: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "HOST_BLOCK", block)
    generator = torch.Generator().manual_seed(3)
    sizes = [1000, 7, 40_001, 1000, 65_536, 1]
    # Some have equal settings, and one a gradient that is not finite.
    settings = [STEPS[0], STEPS[1], STEPS[0], STEPS[2], STEPS[1], STEPS[3]]
    flats = [torch.randn(size, generator=generator) for size in sizes]
    alone, together = ([AdapterOptimizer(flat.clone()) for flat in flats] for _ in range(2))
    buffers = FlatBuffers()
    for number in range(4):
        gradients = [torch.randn(size, generator=generator) for size in sizes]
        if number == 2:
            gradients[3][5] = float("nan")
        # Not all step each time, so their counts differ.
        due = [each for each in range(len(sizes)) if (each + number) % 3]
        found = step_together(
            [Due(together[each], gradients[each].clone(), settings[each]) for each in due], buffers
        )
        for each, answer in zip(due, found, strict=True):
            if number == 2 and each == 3:
                assert isinstance(answer, FloatingPointError)
                continue
            assert answer == step(alone[each], gradients[each].clone(), settings[each])
    for one, other in zip(alone, together, strict=True):
        assert torch.equal(one.flat, other.flat)
        assert one.steps == other.steps
        for name, moment in one.moments.items():
            assert torch.equal(moment, other.moments[name])


def test_nothing_due_is_no_step() -> None:
    assert step_together([], FlatBuffers()) == []


@pytest.mark.parametrize("size", ["STEP_BLOCK", "HOST_BLOCK"])
def test_steps_in_blocks_equal_adamw_written_out_and_measure_the_change(
    flat: torch.Tensor, gradients: list[torch.Tensor], size: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, size, 300)
    unclipped = [msgspec.structs.replace(adam, grad_clip_norm=0.0) for adam in STEPS]
    expected = by_hand(flat.clone(), gradients, unclipped)
    optimizer = MeasuredAdamW([flat])
    optimizer.start(flat)
    for gradient, adam in zip(gradients, unclipped, strict=True):
        for group in optimizer.param_groups:
            betas = (adam.beta1, adam.beta2)
            group.update(lr=adam.learning_rate, betas=betas, eps=adam.eps, weight_decay=adam.weight_decay)
        flat.grad, before = gradient.clone(), flat.clone()
        optimizer.change = 0.0
        optimizer.step()
        change = float((flat - before).double().square().sum())
        assert float(optimizer.change) == pytest.approx(change, rel=2e-7)
    torch.testing.assert_close(flat.double(), expected, rtol=1e-5, atol=1e-6)
    assert float(optimizer.state[flat]["step"]) == len(STEPS)

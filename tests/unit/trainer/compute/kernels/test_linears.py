"""Linears with frozen weights come to what torch's own do, whichever library multiplies them."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from services.launcher.tiny_model import make_tiny_model
from services.trainer.compute.attention import Sequences
from services.trainer.compute.base_model import Scorer, load_model
from services.trainer.compute.blocks.checkpointing import checkpoint_blocks
from services.trainer.compute.data import LoraSpec
from services.trainer.compute.kernels import linears
from services.trainer.compute.kernels.linears import BLOCKS, FrozenProduct, is_frozen, row_blocks
from services.trainer.compute.logprobs import Targets
from services.trainer.compute.lora.adapter import Adapter, select_targets
from services.trainer.compute.lora.grouped import LoraRouter
from services.trainer.compute.lora.stack import Segment
from services.trainer.compute.lora.targets import find_linears, hook_adapters


@pytest.mark.parametrize("rows", [0, 1, 15, 16, 17, 79, 80, 255, 256, 337, 849])
@pytest.mark.parametrize("biased", [False, True])
def test_a_product_and_its_gradient_are_those_of_torch(rows: int, biased: bool) -> None:
    torch.manual_seed(rows)
    weight, x = torch.randn(40, 24), torch.randn(1, rows, 24, requires_grad=True)
    bias, above = torch.randn(40) if biased else None, torch.randn(1, rows, 40)
    made = FrozenProduct.apply(x, weight, bias)
    (below,) = torch.autograd.grad(made, x, above)
    wanted = F.linear(x.double(), weight.double(), None if bias is None else bias.double())
    assert made.shape == wanted.shape
    torch.testing.assert_close(made.double(), wanted, rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(below.double(), above.double() @ weight.double(), rtol=1e-5, atol=1e-5)


def test_a_gradient_that_is_one_number_seen_everywhere_is_taken() -> None:
    x, weight = torch.randn(1, 33, 24, requires_grad=True), torch.randn(40, 24)
    (below,) = torch.autograd.grad(FrozenProduct.apply(x, weight, None).sum(), x)
    torch.testing.assert_close(below, weight.sum(0).expand_as(x), rtol=1e-5, atol=1e-5)


def test_any_rows_are_cut_into_blocks_of_few_sizes() -> None:
    for rows in range(5000):
        cut = list(row_blocks(rows))
        assert sum(cut) == rows
        rest = [size for size in cut if size not in BLOCKS]
        assert len(rest) <= 1 and all(size < BLOCKS[-1] for size in rest)


@pytest.mark.parametrize("checkpointing", [False, True])
def test_a_model_and_its_adapters_come_to_the_same_with_and_without(
    checkpointing: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = make_tiny_model(tmp_path / "model", vocab=512)
    multiplied: list[tuple[int, ...]] = []
    product = linears._product

    def watched(x: Tensor, weight: Tensor) -> Tensor:
        multiplied.append(tuple(weight.shape))
        return product(x, weight)

    monkeypatch.setattr(linears, "_product", watched)
    came_to = []
    for chosen in (False, True):
        monkeypatch.setattr(linears, "uses_onednn", lambda chosen=chosen: chosen)
        multiplied.clear()
        model = load_model(str(path), torch.float32, None)
        if checkpointing:
            checkpoint_blocks(model)
        came_to.append(_trained(model))
        # Forward and backward, of all linears and the head.
        below = sum(shape == (512, model.config.hidden_size) for shape in multiplied)
        assert (below, bool(multiplied)) == ((1, True) if chosen else (0, False))
        assert not chosen or len(multiplied) >= 2 * (7 * model.config.num_hidden_layers) - 3
    for plain, ours in zip(*came_to, strict=True):
        assert plain.any()
        torch.testing.assert_close(ours, plain, rtol=1e-4, atol=2e-5 * float(plain.abs().max()))


def _trained(model: nn.Module) -> list[Tensor]:
    """Log-probabilities of two tenants' tokens, and their gradients."""
    torch.manual_seed(4)
    router, lengths = LoraRouter(), [20, 17]
    hook_adapters(model, router)
    targets = select_targets(find_linears(model), LoraSpec(4))
    hidden = int(model.config.hidden_size)  # type: ignore[union-attr, arg-type]
    adapters = [
        Adapter(LoraSpec(4, seed), targets, f"m{seed}", "cpu", hidden, torch.float32) for seed in (1, 2)
    ]
    for each in adapters:
        # Of B too, which begins as zeros.
        each.low.normal_(0, 0.02)
    gradients = [torch.zeros_like(each.low) for each in adapters]
    tokens = torch.randint(512, (1, sum(lengths)))
    with router.route([Segment(*each) for each in zip(lengths, adapters, gradients, strict=True)]):
        found, _ = Scorer(model, router, detached=False)(
            tokens, Targets(tokens[0].roll(-1), ((sum(lengths), 1),)), Sequences.of(lengths, "cpu")
        )
        found.sum().backward()
    return [found.detach(), *gradients]


def test_weights_that_learn_are_torchs_own(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(linears, "uses_onednn", lambda: True)
    model = nn.Sequential(nn.Linear(24, 40), nn.Linear(40, 8))
    linears.speed_up_linears(model)
    model(torch.randn(3, 20, 24)).sum().backward()
    assert all(each.grad is not None for each in model.parameters())


def test_weights_that_are_sharded_or_of_another_precision_are_torchs_own() -> None:
    x, weight = torch.randn(16, 24), torch.randn(40, 24)
    assert is_frozen(x, weight, None)
    assert not is_frozen(x.bfloat16(), weight.bfloat16())
    assert not is_frozen(x, weight.bfloat16())
    weight.ds_id = 1  # type: ignore[attr-defined]
    assert not is_frozen(x, weight)


@pytest.mark.parametrize(
    ("capability", "vendor", "chosen"),
    [
        ("AVX512", "AuthenticAMD", True),
        ("AVX512", "GenuineIntel", False),
        ("AVX2", "AuthenticAMD", False),
        ("AVX512", "", False),
    ],
)
def test_it_is_chosen_where_mkl_leaves_avx_512_unused(
    capability: str, vendor: str, chosen: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.backends.cpu, "get_cpu_capability", lambda: capability)
    named = f"vendor_id\t: {vendor}\n" if vendor else ""
    (tmp_path / "cpuinfo").write_bytes(f"processor\t: 0\n{named}model name\t: ".encode() + b"\xff\n")
    monkeypatch.setattr(linears, "_CPUS", tmp_path / "cpuinfo")
    assert linears.uses_onednn.__wrapped__() is chosen

"""Products with frozen weights are those of torch, whatever number of rows they have."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from services.trainer.compute.kernels import linears
from services.trainer.compute.kernels.linears import (
    PIECES,
    FrozenProduct,
    is_frozen,
    pieces,
    speed_up_linears,
)


@pytest.fixture
def faster(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(linears, "is_faster", lambda: True)


@pytest.mark.parametrize("rows", [0, 1, 15, 16, 17, 79, 80, 255, 256, 337, 1024, 1361])
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


def test_any_rows_are_cut_into_few_sizes() -> None:
    for rows in range(5000):
        cut = list(pieces(rows))
        assert sum(cut) == rows
        rest = [size for size in cut if size not in PIECES]
        assert len(rest) <= 1 and all(size < PIECES[-1] for size in rest)
    # Each size that oneDNN sees is compiled and kept.
    assert len(PIECES) == 3


def test_linears_of_a_frozen_model_compute_so_and_others_as_ever(faster: None) -> None:
    model = nn.Sequential(nn.Linear(24, 40), nn.Linear(40, 8)).requires_grad_(False)
    x = torch.randn(3, 20, 24, requires_grad=True)
    wanted = model(x)
    speed_up_linears(model)
    made = model(x)
    assert "FrozenProduct" in type(made.grad_fn).__name__
    torch.testing.assert_close(made, wanted, rtol=1e-5, atol=1e-5)
    model.requires_grad_(True)
    learning = model(x)
    assert "FrozenProduct" not in type(learning.grad_fn).__name__
    learning.sum().backward()
    assert all(each.grad is not None for each in model.parameters())


def test_weights_that_are_sharded_or_of_another_precision_are_torchs_own() -> None:
    x, weight = torch.randn(16, 24), torch.randn(40, 24)
    assert is_frozen(x, weight, None)
    assert not is_frozen(x.bfloat16(), weight.bfloat16())
    assert not is_frozen(x, weight.to("meta").to(torch.bfloat16))
    weight.ds_id = 1  # type: ignore[attr-defined]
    assert not is_frozen(x, weight)


@pytest.mark.parametrize(
    "capability, maker, faster",
    [
        ("AVX512", "AuthenticAMD", True),
        ("AVX512", "GenuineIntel", False),
        ("AVX2", "AuthenticAMD", False),
        ("AVX512", "", False),
    ],
)
def test_it_is_chosen_where_mkl_leaves_avx_512_unused(
    capability: str, maker: str, faster: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.backends.cpu, "get_cpu_capability", lambda: capability)
    said = f"processor\t: 0\nvendor_id\t: {maker}\nmodel name\t: x\n" if maker else "processor\t: 0\n"
    monkeypatch.setattr(Path, "read_text", lambda *_: said)
    assert linears.is_faster.__wrapped__() is faster

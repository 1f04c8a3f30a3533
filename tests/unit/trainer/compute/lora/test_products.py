"""Products of rows with their groups' matrices, added to what is there."""

from __future__ import annotations

from itertools import accumulate

import pytest
import torch

from services.trainer.compute.lora.products import Groups, add_outer, add_products

IN, OUT, SCALE = 8, 16, 2.0
SIZES = pytest.mark.parametrize(
    "sizes", [(6,), (3, 3, 3), (5, 1, 9), (0, 4, 0, 2)], ids=["one", "equal", "unequal", "some empty"]
)
DTYPES = pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])


def groups_of(sizes: tuple[int, ...]) -> Groups:
    return Groups(torch.tensor([*accumulate(sizes)], dtype=torch.int32), sizes)


@SIZES
@DTYPES
def test_what_each_groups_matrix_makes_of_its_rows_is_added_to_them(
    sizes: tuple[int, ...], dtype: torch.dtype
) -> None:
    torch.manual_seed(0)
    rows = torch.randn(sum(sizes), IN).to(dtype)
    matrices = torch.randn(len(sizes), IN, OUT).to(dtype)
    before = torch.randn(sum(sizes), OUT)
    total = before.clone()
    add_products(total, rows, matrices, groups_of(sizes), SCALE)
    parts = zip(rows.split(sizes), matrices, strict=True)
    made = torch.cat([(part @ matrix).float() for part, matrix in parts])
    torch.testing.assert_close(total, before + SCALE * made, rtol=1e-5, atol=1e-5)


@SIZES
@DTYPES
@pytest.mark.parametrize("fresh", [False, True])
def test_what_rows_come_to_is_added_to_their_groups_matrix_or_takes_its_place(
    sizes: tuple[int, ...], dtype: torch.dtype, fresh: bool
) -> None:
    torch.manual_seed(0)
    left, right = torch.randn(sum(sizes), IN).to(dtype), torch.randn(sum(sizes), OUT).to(dtype)
    before = torch.randn(len(sizes), IN, OUT)
    total = torch.full_like(before, float("nan")) if fresh else before.clone()
    add_outer(total, left, right, groups_of(sizes), SCALE, fresh)
    parts = zip(left.split(sizes), right.split(sizes), strict=True)
    made = SCALE * torch.stack([(one.T @ other).float() for one, other in parts])
    torch.testing.assert_close(total, made if fresh else before + made, rtol=1e-5, atol=1e-5)

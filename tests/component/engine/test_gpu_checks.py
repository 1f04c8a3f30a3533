"""The checks of `make test-gpu` on a CPU: they are known to run, and hold for its paths too."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.gpu import checks, pieces

pytestmark = pytest.mark.heavy

DEVICE = "cpu"


@pytest.fixture(autouse=True)
def one(one_rank: None) -> None:
    """Engines meet nobody."""


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_numbers_are_those_of_transformers(tmp_path: Path, dtype: str) -> None:
    checks.exact(DEVICE, tmp_path, dtype)


@pytest.mark.parametrize("window", [None, 16])
def test_attention_of_a_flat_batch_is_that_of_float32(window: int | None) -> None:
    pieces.attention(DEVICE, window)


@pytest.mark.parametrize("rank", [1, 2, 4, 16])
@pytest.mark.parametrize("count", [1, 8])
def test_grouped_adapters_are_a_loop_over_them(count: int, rank: int) -> None:
    pieces.grouped(DEVICE, count, rank)


@pytest.mark.parametrize("count", [1, 3, 17])
def test_adapters_of_experts_are_a_loop_over_tokens_and_experts(count: int) -> None:
    """Of 17 adapters there are more groups than one kernel takes."""
    pieces.experts(DEVICE, count)


def test_a_batch_that_does_not_fit_runs_in_parts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    checks.out_of_memory(DEVICE, tmp_path, monkeypatch)


@pytest.mark.parametrize("name", checks.ALONE)
def test_on_the_device(tmp_path: Path, name: str) -> None:
    checks.ALONE[name](DEVICE, tmp_path)

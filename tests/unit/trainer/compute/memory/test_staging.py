"""Copies from and to a device where the host refuses page-locked memory."""

from __future__ import annotations

import logging
from collections.abc import Sequence

import pytest
import torch
from prometheus_client import REGISTRY
from torch import Tensor

from services.trainer.compute.memory import staging
from services.trainer.compute.memory.failures import is_out_of_memory

MIB = 2**20


def cuda_error(code: int, message: str) -> torch.AcceleratorError:
    """As torch makes it of an error of CUDA's."""
    error = torch.AcceleratorError(f"CUDA error: {message}\nFor debugging consider passing ...")
    error.error_code = code  # type: ignore[attr-defined]
    return error


OUT_OF_MEMORY = cuda_error(2, "out of memory")


class Host:
    """A system that gives page-locked memory after it has refused some."""

    def __init__(self, *refusals: RuntimeError) -> None:
        self._refusals = list(refusals)
        self.asked = 0

    def __call__(self, shape: Sequence[int], dtype: torch.dtype) -> Tensor:
        self.asked += 1
        if self._refusals:
            raise self._refusals.pop(0)
        return torch.full(tuple(shape), 7, dtype=dtype)


def refused() -> float:
    return REGISTRY.get_sample_value("tinsmith_page_locked_refused_total") or 0.0


def test_where_the_host_refuses_page_locked_memory_a_copy_goes_by_pageable_memory() -> None:
    before, values = refused(), torch.randn(3, 5).bfloat16()
    host = Host(OUT_OF_MEMORY, OUT_OF_MEMORY)
    copy = staging.room(values.shape, values.dtype, host)
    assert not copy.is_pinned() and copy.shape == values.shape and copy.dtype == values.dtype
    staging.copy(copy, values)
    assert torch.equal(copy, values)
    assert host.asked == 2 and refused() == before + 1


def test_it_is_asked_again_once_what_is_kept_has_gone_back() -> None:
    before, host = refused(), Host(OUT_OF_MEMORY)
    assert staging.room([2], torch.uint8, host).tolist() == [7, 7]
    assert host.asked == 2 and refused() == before


def test_it_is_said_once_and_not_of_every_copy(caplog: pytest.LogCaptureFixture) -> None:
    staging._say_once.cache_clear()
    with caplog.at_level(logging.WARNING):
        for _ in range(3):
            staging.room([2], torch.uint8, Host(OUT_OF_MEMORY, OUT_OF_MEMORY))
    (said,) = caplog.messages
    assert "refuses page-locked memory (CUDA error: out of memory)" in said


@pytest.mark.parametrize(
    "error",
    [
        cuda_error(700, "an illegal memory access was encountered"),
        torch.OutOfMemoryError("CUDA out of memory"),
        RuntimeError("pin_memory=True requires a CUDA or other accelerator backend"),
    ],
)
def test_what_is_wrong_with_the_device_is_no_refusal(error: RuntimeError) -> None:
    with pytest.raises(type(error), match=str(error).partition("\n")[0]):
        staging.room([2], torch.uint8, Host(error))
    with pytest.raises(type(error)):
        staging.room([2], torch.uint8, Host(OUT_OF_MEMORY, error))


def test_a_host_without_any_memory_says_so_before_the_system_kills_a_process(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(staging, "free_machine_memory", lambda: 8 * MIB)

    def taken(nbytes: int) -> int:
        return staging.room([nbytes], torch.uint8, Host(OUT_OF_MEMORY, OUT_OF_MEMORY)).nbytes

    assert taken(8 * MIB) == 8 * MIB
    with pytest.raises(RuntimeError, match="takes 8388609 bytes of the host that has 8388608") as raised:
        taken(8 * MIB + 1)
    assert is_out_of_memory(raised.value)
    monkeypatch.setattr(staging, "free_machine_memory", lambda: 0)
    assert taken(1) == 1

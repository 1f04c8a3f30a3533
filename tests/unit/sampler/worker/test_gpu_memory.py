"""What a sampler has for keys and values on a GPU where a trainer works while it starts."""

from __future__ import annotations

import logging

import pytest
from vllm.utils.mem_utils import MemoryProfilingResult, MemorySnapshot
from vllm.v1.worker import gpu_worker

from services.sampler.worker.gpu import memory

GIB = 2**30
BESIDE = memory.BESIDE_BYTES


@pytest.fixture(autouse=True)
def as_it_was(monkeypatch: pytest.MonkeyPatch) -> None:
    """Leaves vLLM to others as they had it."""
    name = "maybe_rocm_profiling_fallback"
    monkeypatch.setattr(gpu_worker, name, getattr(gpu_worker, name))


def counted(measured: int, by_torch: int) -> int:
    """What vLLM goes by that measured so much, where torch has taken so much."""
    before = MemorySnapshot(device="cpu", auto_measure=False)
    before.torch_memory = GIB
    profile = MemoryProfilingResult(before_create=before)
    profile.after_profile.torch_memory = GIB + by_torch
    profile.total_consumed = measured
    memory.correct()
    return gpu_worker.maybe_rocm_profiling_fallback(profile)


@pytest.mark.parametrize("beside", [0, GIB // 2, BESIDE])
def test_where_nobody_else_takes_or_frees_memory_what_was_measured_counts(beside: int) -> None:
    assert counted(16 * GIB + beside, 16 * GIB) == 16 * GIB + beside


@pytest.mark.parametrize("freed", [17 * GIB, 16 * GIB, GIB])
def test_what_a_trainer_frees_meanwhile_is_not_the_samplers(
    freed: int, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.WARNING):
        assert counted(16 * GIB - freed, 16 * GIB) == 16 * GIB
    assert "other processes took or freed memory of this GPU" in caplog.text


def test_what_a_trainer_takes_meanwhile_is_not_taken_from_the_samplers_share() -> None:
    assert counted(46 * GIB, 16 * GIB) == 16 * GIB + BESIDE


def test_a_vllm_that_measures_in_another_way_is_seen_at_the_start(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr(gpu_worker, "maybe_rocm_profiling_fallback")
    with pytest.raises(RuntimeError, match="measures a GPU's memory in another way"):
        memory.correct()

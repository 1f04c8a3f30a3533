"""Attention with sinks on a device. On a CPU no kernel computes it."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch

from bench.gpu.engine import one_micro_batch, start
from bench.gpu.exactness import FACTOR, _gradient
from services.trainer.compute import attention
from services.trainer.compute.prefix.flash import FlashAttention
from services.trainer.compute.prefix.trial import works, works_with_sinks
from tests.component.engine.data import VOCAB, trained_model
from tests.unit.trainer.compute.architectures import FLAT, config_of, random_model

Numbers = tuple[np.ndarray, np.ndarray]
"""Log-probabilities, and an adapter's gradient."""


def attended(device: str, directory: Path) -> None:
    """FlashAttention is right with sinks, in a tiny model's shape and in GPT-OSS's, and in trees."""
    del directory
    on_cuda = device == "cuda"
    for shape in ((4, 2, 64), (64, 8, 64), (8, 1, 64)):
        assert works(device, FlashAttention(), *shape, sinks=True, windows=True) == on_cuda
        assert works_with_sinks(device, FlashAttention(), *shape) == on_cuda


def gpt_oss(device: str, directory: Path) -> None:
    """A tiny GPT-OSS goes by FlashAttention in bfloat16, and its numbers are as near to those in float32
    as by its own plain attention."""
    # All experts are chosen: rounding has no token meet others.
    sizes = {"vocab_size": VOCAB, "hidden_size": 256, "head_dim": 64, "num_experts_per_tok": 4}
    model = random_model(config_of("gpt_oss", FLAT["gpt_oss"] | sizes | {"sliding_window": 16}), "eager")
    for name, weight in model.named_parameters():
        weight.data.copy_(torch.randn(4) + 2 if name.endswith(".sinks") else weight.data * 0.2)
    model.bfloat16().save_pretrained(directory)
    exact, own, kernel = (
        _trained(device, directory, dtype, plain)
        for dtype, plain in (("float32", True), ("bfloat16", True), ("bfloat16", False))
    )
    for expected, plain, found in zip(exact, own, kernel, strict=True):
        assert np.linalg.norm(found - expected) <= FACTOR * np.linalg.norm(plain - expected)


def _trained(device: str, directory: Path, dtype: str, plain: bool) -> Numbers:
    """What a pass comes to. `plain`: by the model's own attention, whatever was found of the kernel."""
    engine, has_kernel = start(directory, device, dtype), device == "cuda" and dtype == "bfloat16"
    assert [layer.kernel for layer in engine._base.asked] == [has_kernel] * 2
    assert (engine.footprint.square == engine.footprint.masks == 0) == has_kernel
    before, rng = trained_model(engine, "m"), np.random.default_rng(4)
    sequences = [rng.integers(0, VOCAB, length) for length in (48, 7, 33)]
    with pytest.MonkeyPatch.context() as patched:
        if plain:
            patched.setattr(attention, "_right_with_sinks", set())
        results = engine.run_pass(one_micro_batch(["m"], sequences))
    assert [result.failure for result in results] == [None] * len(results)
    logprobs = np.concatenate([result.outputs["logprobs"].values() for result in results])
    return logprobs, _gradient(engine, "m", before)

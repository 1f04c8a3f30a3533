"""A sampler without adapters, whose model vLLM compiles on a CPU, against transformers in float32."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch

from tests.component.sampler.process import (
    NEVER,
    Sampler,
    floats,
    ints,
    prompt,
    replica,
    request,
    sample,
)
from tests.reference import Reference, check_logprobs

pytestmark = pytest.mark.heavy

FULL = 9
SETTINGS = ("--max-loras", "0", "--max-sequences", "64")


@contextmanager
def kept_in(directory: Path) -> Iterator[Path]:
    """Where processes that start meanwhile keep what vLLM compiles."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("VLLM_CACHE_ROOT", str(directory))
        yield directory


def made(kept: Path) -> list[Path]:
    """What was compiled."""
    return list((kept / "torch_compile_cache").rglob("model"))


@pytest.fixture(scope="module")
def compiled(sampler: Sampler, tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Sampler, Path]]:
    """A sampler of the same model, and where what was compiled is kept."""
    directory = tmp_path_factory.mktemp("compiled")
    with (
        kept_in(directory / "kept") as kept,
        replica(directory, sampler.model_dir, *SETTINGS) as started,
    ):
        started.store_full(FULL)
        yield started, kept


async def test_without_adapters_the_model_is_compiled(compiled: tuple[Sampler, Path]) -> None:
    _, kept = compiled
    assert made(kept)


async def test_prompts_and_what_is_sampled_have_the_reference_s_log_probabilities_and_so_have_full_models(
    compiled: tuple[Sampler, Path], judge
) -> None:
    started, _ = compiled
    models = {0: judge(0), FULL: Reference(started.stored(FULL))}
    async with started.client() as stub:
        # The base model again after the full one, whose weights were in its place.
        for version in (0, FULL, 0):
            wanted = [
                request(prompt(n, 5 + 9 * n), version, max_tokens=30, stop=NEVER, seed=n, scores=True)
                for n in range(4)
            ]
            for asked, result in zip(
                wanted, await asyncio.gather(*(sample(stub, each) for each in wanted)), strict=True
            ):
                (sequence,) = result.sequences
                whole = ints(asked.prompt) + ints(sequence.tokens)
                found = torch.cat([floats(result.prompt_logprobs)[1:], floats(sequence.logprobs)])
                expected = models[version].sequence_logprobs(whole)
                check_logprobs(found, expected)


def test_what_is_not_to_be_compiled_is_not(sampler: Sampler, tmp_path: Path) -> None:
    with (
        kept_in(tmp_path / "kept") as kept,
        replica(tmp_path, sampler.model_dir, *SETTINGS, "--enforce-eager", "yes"),
    ):
        assert not made(kept)

"""One sampler process for all tests that need one, and the judge of its answers.

Weight groups are numbered by the tests: test_broadcasts.py uses epochs below 10, test_full.py others.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterator
from functools import cache

import pytest

from tests.component.sampler.process import (
    Sampler,
    make_model,
    replica,
)
from tests.reference import Reference
from tinsmith.internal.v1 import sampler_pb2_grpc

# (rank, what it adapts) of the stored snapshots; three of them, and the engine has two slots.
STORED = {
    1: (8, {}),
    2: (4, {"mlp": False, "unembed": False}),
    3: (16, {"attn": False}),
}


@pytest.fixture(scope="session")
def sampler(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Sampler]:
    directory = tmp_path_factory.mktemp("sampler")
    model_dir = make_model(directory / "model", tied=True)
    # Two of the tiny full models fit, a third pushes one out.
    options = ("--max-loras", "2", "--max-sequences", "64", "--full-snapshot-cache-gib", "0.001")
    with replica(directory, model_dir, *options) as started:
        for version, (rank, targets) in STORED.items():
            started.store_adapter(version, rank, **targets)
        yield started


@pytest.fixture
async def stub(sampler: Sampler) -> AsyncIterator[sampler_pb2_grpc.SamplerServiceStub]:
    async with sampler.client() as stub:
        yield stub


@pytest.fixture(scope="session")
def judge(sampler: Sampler):  # type: ignore[no-untyped-def]
    """version -> the independent model of that stored snapshot (0 = base)."""

    @cache
    def made(version: int) -> Reference:
        directory = sampler.stored(version)
        if (directory / "config.json").exists():
            return Reference(directory)
        return Reference(sampler.model_dir, directory if version else None)

    return made

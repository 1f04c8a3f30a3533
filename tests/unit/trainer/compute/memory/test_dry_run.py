"""A dry run on ranks that have little memory."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import cast

import pytest

from services.common.contract.errors import Internal
from services.trainer.compute import exchange
from services.trainer.compute.data import Failure, LoraSpec, Pass, RowResult
from services.trainer.compute.engine import Engine
from services.trainer.compute.memory.dry_run import token_bytes


@dataclass
class Rank:
    """An engine that has memory for so many tokens, and takes a thousand bytes for each beside a fixed part.

    Attributes:
        tried: lengths of the sequences it was given.
        code: of the failure of those that are longer than `fits`.
    """

    fits: int
    code: str = "out_of_memory"
    context_length: int = 4096
    world_size: int = 1
    device: str = "cpu"
    tried: list[int] = field(default_factory=list)
    models: list[str] = field(default_factory=list)

    def largest_adapter(self, rank: int) -> LoraSpec:
        return LoraSpec(rank)

    def create_model(self, model_id: str, lora: LoraSpec) -> None:
        self.models.append(model_id)

    def drop_model(self, model_id: str) -> None:
        self.models.remove(model_id)

    def run_pass(self, work: Pass) -> list[RowResult]:
        self.tried.append(work.micro_batches[0].rows[0].length)
        if self.tried[-1] > self.fits:
            return [RowResult(0, 0, failure=Failure("server", self.code, "it failed"))]
        return [RowResult(0, 0)]

    def peak(self, run: Callable[[], None]) -> int:
        run()
        return 5000 + 1000 * self.tried[-1]

    def token_bytes(self) -> float | None:
        return token_bytes(cast(Engine, self), self.peak)


@pytest.fixture(autouse=True)
def one_rank(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(exchange.dist, "get_world_size", lambda: 1)


def test_what_does_not_grow_with_the_tokens_does_not_count() -> None:
    rank = Rank(fits=4096)
    assert rank.token_bytes() == 1000
    assert rank.tried == [256, 256, 2048]


def test_where_many_tokens_do_not_fit_fewer_are_measured() -> None:
    rank = Rank(fits=600)
    assert rank.token_bytes() == 1000
    assert rank.tried[-1] == 512 and rank.models == []


def test_where_hardly_any_fit_nothing_is_measured_and_nothing_raised() -> None:
    rank = Rank(fits=50)
    assert rank.token_bytes() is None
    assert rank.models == []


def test_a_short_context_is_measured_as_long_as_it_is() -> None:
    rank = Rank(fits=4096, context_length=16)
    assert rank.token_bytes() == 1000
    assert rank.tried[-1] == 16


def test_another_failure_than_memory_ends_the_start() -> None:
    rank = Rank(fits=0, code="internal")
    with pytest.raises(Internal, match="256 tokens could not be computed at the start: it failed"):
        rank.token_bytes()
    assert rank.models == []


def test_a_rank_that_is_told_nothing_goes_the_way_of_the_first(monkeypatch: pytest.MonkeyPatch) -> None:
    rank = Rank(fits=4096)
    told = iter([[False, False], [False, False], [False, True]])
    monkeypatch.setattr(
        "services.trainer.compute.memory.dry_run.any_rank", lambda flags, device: next(told, flags)
    )
    assert rank.token_bytes() == 1000
    assert rank.tried == [256, 256, 2048, 256, 256, 1024]

"""A dry run on ranks that have little memory."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import cast

import pytest

from services.common.contract.errors import Internal
from services.trainer.compute import exchange
from services.trainer.compute.blocks.checkpointing import Blocks
from services.trainer.compute.data import Failure, LoraSpec, Pass, RowResult
from services.trainer.compute.engine import Engine
from services.trainer.compute.memory.capacity import Footprint
from services.trainer.compute.memory.dry_run import LEAST, answers, measured, one_sequence, token_bytes
from services.trainer.order.prefixes import prefix_tree


@dataclass
class Rank:
    """An engine that has memory for so many tokens, and takes a thousand bytes for each beside a fixed part.
    Blocks that keep their activations take more, but for one, as that is computed again else.

    Attributes:
        fits_kept: where blocks keep theirs.
        kinds: what blocks add, one after the other and again, to the last one.
        tried: tokens that it computed.
        of_shared: bytes that a token takes where sequences share some.
        code: of the failure of those that are longer than `fits`.
    """

    fits: int
    fits_kept: int = 4096
    kinds: tuple[int, ...] = (300,)
    code: str = "out_of_memory"
    context_length: int = 4096
    world_size: int = 1
    device: str = "cpu"
    tried: list[int] = field(default_factory=list)
    shares_prefixes: bool = False
    of_shared: int = 1000
    token: int = 1000
    models: list[str] = field(default_factory=list)
    blocks: Blocks | None = None
    footprint: Footprint = field(default_factory=lambda: Footprint(weights=1, token=400, block=200))

    @property
    def sizes(self) -> Rank:
        return self

    def largest_adapter(self, rank: int) -> LoraSpec:
        return LoraSpec(rank)

    def create_model(self, model_id: str, lora: LoraSpec) -> None:
        self.models.append(model_id)

    def drop_model(self, model_id: str) -> None:
        self.models.remove(model_id)

    def run_pass(self, work: Pass) -> list[RowResult]:
        rows = work.micro_batches[0].rows
        assert len(
            {row.index for batch in work.micro_batches for row in batch.rows}
        ) == self.world_size * len(rows)
        self.token = self.of_shared if len(rows) > 1 else 1000
        self.tried.append(prefix_tree([row.tokens for row in rows]).tokens)
        if self.tried[-1] > (self.fits_kept if self.kept else self.fits):
            return [RowResult(0, 0, failure=Failure("server", self.code, "it failed"))]
        return [RowResult(0, 0)]

    def peak(self, run: Callable[[], None]) -> int:
        run()
        last = [self.kinds[-1 - number % len(self.kinds)] for number in range(self.kept)]
        return 5000 + (self.token + max(sum(last) - max(self.kinds), 0)) * self.tried[-1]

    @property
    def kept(self) -> int:
        return 0 if self.blocks is None else self.blocks.kept

    def token_bytes(self) -> float | None:
        return token_bytes(cast(Engine, self), self.peak, one_sequence)

    def measured(self, keeps_blocks: bool = True) -> tuple[float, float]:
        found = measured(cast(Engine, self), self.peak, keeps_blocks=keeps_blocks)
        assert found.weights == self.footprint.weights
        return found.token, found.block


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


@pytest.mark.parametrize("count", [2, 5, 36])
def test_what_a_block_adds_that_keeps_its_activations_is_measured_too(count: int) -> None:
    rank = Rank(fits=4096, blocks=Blocks(count))
    assert rank.measured() == (1000, 300)
    assert rank.blocks == Blocks(count, kept=0)


def test_of_blocks_of_two_kinds_it_is_their_mean() -> None:
    """As in models with linear attention, of whose blocks each fourth, the last one too, is another."""
    rank = Rank(fits=4096, blocks=Blocks(36), kinds=(500, 500, 500, 100))
    assert rank.measured() == (1000, 400)


@pytest.mark.parametrize("blocks", [None, Blocks(1)])
def test_where_there_are_no_two_blocks_none_keeps_anything(blocks: Blocks | None) -> None:
    assert Rank(fits=4096, blocks=blocks).measured() == (1000, 0)


def test_what_hardly_fits_keeps_nothing() -> None:
    assert Rank(fits=50, blocks=Blocks(5)).measured() == (400, 0)
    small = Rank(fits=4096, fits_kept=50, blocks=Blocks(5))
    assert small.measured() == (1000, 0)
    assert small.blocks == Blocks(5, kept=0)


def test_where_all_blocks_compute_again_it_is_not_measured() -> None:
    rank = Rank(fits=4096, blocks=Blocks(36))
    assert rank.measured(keeps_blocks=False) == (1000, 200)
    assert len(rank.tried) == 3


@pytest.mark.parametrize("ranks", [1, 3])
@pytest.mark.parametrize(("of_shared", "token"), [(1300, 1300), (700, 1000)])
def test_a_token_counts_as_much_as_it_takes_where_answers_share_a_prompt(
    of_shared: int, token: int, ranks: int
) -> None:
    rank = Rank(fits=4096, shares_prefixes=True, of_shared=of_shared, world_size=ranks, blocks=Blocks(36))
    assert rank.measured() == (token, 300)
    assert Rank(fits=4096, of_shared=of_shared).measured()[0] == 1000


@pytest.mark.parametrize("tokens", [LEAST // 2, 256, 1000, 2048])
def test_answers_to_a_prompt_are_as_many_tokens_as_are_said_and_no_two_alike(tokens: int) -> None:
    rows, computed = answers(1, tokens)
    assert prefix_tree([row.tokens for row in rows]).tokens == computed
    assert abs(computed - tokens) <= 32 and len({row.tokens for row in rows}) == len(rows)


def test_of_short_contexts_nothing_is_shared() -> None:
    rank = Rank(fits=4096, shares_prefixes=True, of_shared=1300, context_length=LEAST - 1)
    assert rank.measured()[0] == 1000

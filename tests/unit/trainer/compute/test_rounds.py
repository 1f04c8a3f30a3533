"""Micro-batches run one after the other, the next is made meanwhile, and what fails takes nothing with it."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any, cast

import numpy as np
import pytest
import torch
from msgspec.structs import replace
from prometheus_client import REGISTRY
from torch import Tensor, nn

from services.common.contract.tensors import from_values
from services.trainer.compute import rounds
from services.trainer.compute.attention import Sequences
from services.trainer.compute.base_model import BaseModel
from services.trainer.compute.data import LoraSpec, MicroBatch, Pass, PassOp, Row
from services.trainer.compute.exchange import SLOWEST_SPLIT
from services.trainer.compute.logprobs import LogprobHead, Targets
from services.trainer.compute.lora.adapter import Adapter, LinearShape
from services.trainer.compute.lora.grouped import LoraRouter
from services.trainer.compute.memory.buffers import FlatBuffers
from services.trainer.compute.memory.failures import LacksMemory
from services.trainer.compute.replay.routers import Replay
from services.trainer.compute.rounds import Rounds, in_turn
from services.trainer.compute.tenant import LoraTenant

VOCAB, HIDDEN = 16, 8
OPS = [PassOp("m", 1, "cross_entropy"), PassOp("m", 2, "cross_entropy")]


@pytest.mark.parametrize(
    ("jobs", "order"),
    [
        ("", ""),
        ("a", "prepare a, start a, wait a"),
        ("abc", "prepare a, start a, prepare b, start b, prepare c, wait a, start c, wait b, wait c"),
    ],
    ids=["none", "one", "three"],
)
def test_each_is_made_while_the_one_before_it_runs_and_waited_for_after_the_next_has_started(
    jobs: str, order: str
) -> None:
    done: list[str] = []

    def prepare(job: str) -> str:
        done.append(f"prepare {job}")
        return job.upper()

    def start(job: str, ready: str) -> str:
        assert ready == job.upper()
        done.append(f"start {job}")
        return job

    for started in in_turn(list(jobs), prepare, start):
        done.append(f"wait {started}")
    assert ", ".join(done) == order


class Head:
    """A base model without blocks: what follows a token depends on that token."""

    flat, device = True, "cpu"

    def __init__(self) -> None:
        torch.manual_seed(0)
        self.collective = False
        self.router, self.replay = LoraRouter(), Replay(nn.Module())
        self.embedding = torch.randn(VOCAB, HIDDEN)
        self.head = LogprobHead(nn.Linear(HIDDEN, VOCAB, bias=False).requires_grad_(False), self.router)
        self.scored: list[int] = []
        self.refuses: Callable[[int], str | Exception | None] = lambda tokens: None

    def score(self, tokens: Tensor, targets: Targets, sequences: Sequences) -> tuple[Tensor, Tensor]:
        refusal = self.refuses(tokens.numel())
        if refusal is not None:
            raise refusal if isinstance(refusal, Exception) else RuntimeError(refusal)
        self.scored.append(tokens.numel())
        return self.head(self.embedding[tokens[0]], targets), torch.zeros(0)

    def backward(self, loss: Tensor) -> None:
        loss.backward()


class Rank:
    """A rank of a world, with one adapter on the head."""

    def __init__(self, world_size: int = 1, rank: int = 0) -> None:
        self.base = Head()
        adapter = Adapter(LoraSpec(2, seed=0), {"lm_head": LinearShape(HIDDEN, VOCAB)}, "m", "cpu", HIDDEN)
        adapter.flat.copy_(torch.linspace(-0.3, 0.3, adapter.flat.numel()))
        adapter.begin_renewal()
        self.tenant = LoraTenant(adapter, FlatBuffers())
        self.rounds = Rounds(
            cast(BaseModel, self.base),
            self.base.router,
            {"m": self.tenant},
            rank,
            world_size,
            shares_prefixes=True,
        )

    def run(self, *micro_batches: Sequence[Row]) -> tuple[dict[tuple[int, int], Any], dict[int, Any]]:
        for op in OPS:
            self.tenant.begin(op.seq_id)
        results, failed = self.rounds.run(Pass(OPS, [MicroBatch(list(rows)) for rows in micro_batches]), {})
        return {(result.op, result.index): result.outputs["logprobs"] for result in results}, failed

    def gradient(self, seq_id: int) -> Tensor:
        gradient, _ = self.tenant.gradient(seq_id)
        return gradient


def row(op: int, index: int, length: int) -> Row:
    rng = np.random.default_rng([op, index])
    inputs = {
        "target_tokens": from_values(rng.integers(0, VOCAB, length)),
        "weights": from_values(rng.normal(size=length).astype(np.float32)),
    }
    return Row(op, index, rng.integers(0, VOCAB, length).astype("<i4").tobytes(), inputs)


ROWS = [row(0, 0, 5), row(0, 1, 9), row(1, 0, 7), row(0, 2, 4)]


def test_rows_come_to_the_same_however_they_are_cut_into_micro_batches() -> None:
    whole, cut = Rank(), Rank()
    expected, _ = whole.run(ROWS)
    found, failed = cut.run(*([each] for each in ROWS))
    assert cut.base.scored == [5, 9, 7, 4]
    assert not failed
    assert found.keys() == expected.keys() == {(0, 0), (0, 1), (1, 0), (0, 2)}
    for name, logprobs in found.items():
        np.testing.assert_allclose(logprobs.values(), expected[name].values(), rtol=1e-5, atol=1e-6)
    for op in OPS:
        assert whole.gradient(op.seq_id).any()
        torch.testing.assert_close(cut.gradient(op.seq_id), whole.gradient(op.seq_id))


@pytest.mark.parametrize(
    "refusal", ["can't allocate memory", torch.OutOfMemoryError("CUDA out of memory")], ids=["host", "device"]
)
def test_what_does_not_fit_runs_in_halves_and_what_was_made_meanwhile_goes_on(
    refusal: str | Exception, caplog: pytest.LogCaptureFixture
) -> None:
    whole, rank = Rank(), Rank()
    rank.base.refuses = lambda tokens: refusal if tokens > 10 else None
    expected, _ = whole.run(ROWS)
    before = REGISTRY.get_sample_value("tinsmith_micro_batch_splits_total") or 0.0
    found, failed = rank.run(ROWS[:3], ROWS[3:])
    assert rank.base.scored == [5, 9, 7, 4]
    # 21 tokens in halves, and of these the 16.
    assert (REGISTRY.get_sample_value("tinsmith_micro_batch_splits_total") or 0.0) - before == 2
    assert "a micro-batch of 3 rows, 21 tokens, was refused memory" in caplog.text
    assert not failed
    assert found.keys() == expected.keys()
    torch.testing.assert_close(rank.gradient(1), whole.gradient(1))


def collective_rank(refuses: Callable[[int], bool], world_size: int = 1) -> Rank:
    """One that other ranks wait for in every micro-batch, which is refused memory for some of them. Of two
    it is the last."""
    rank = Rank(world_size, world_size - 1)
    rank.base.collective = True
    rank.base.refuses = lambda tokens: torch.OutOfMemoryError("no memory") if refuses(tokens) else None
    return rank


def test_what_does_not_fit_where_all_ranks_take_part_is_raised_with_half_its_tokens() -> None:
    rank = collective_rank(lambda tokens: tokens > 10)
    with pytest.raises(LacksMemory, match="3 rows, 21 tokens") as caught:
        rank.run(ROWS[:3], ROWS[3:])
    assert (caught.value.tokens, caught.value.operation) == (10, None)


def test_of_a_micro_batch_smaller_than_what_had_fitted_it_is_half_of_that() -> None:
    rank = collective_rank(lambda tokens: tokens == 11)
    with pytest.raises(LacksMemory) as caught:
        rank.run(ROWS[:2], ROWS[2:])
    assert rank.base.scored == [14]
    assert caught.value.tokens == 7


def test_a_sequence_that_does_not_fit_by_itself_where_all_ranks_take_part_is_raised_with_its_operation() -> (
    None
):
    rank = collective_rank(lambda tokens: tokens == 7)
    with pytest.raises(LacksMemory, match="out of device memory on one sequence of 7 tokens") as caught:
        rank.run([ROWS[0]], [ROWS[2]])
    assert (caught.value.tokens, caught.value.operation) == (0, ("m", 2))


def test_what_cannot_even_be_made_for_want_of_memory_is_raised_with_half_of_what_it_would_compute(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def refuses(*_: Any, **__: Any) -> Any:
        raise torch.OutOfMemoryError("no memory")

    monkeypatch.setattr(rounds, "collate", refuses)
    # They share two blocks of 16 tokens, and each has 8 more.
    alike = [replace(row(0, index, 40), tokens=row(0, 0, 40).tokens) for index in range(4)]
    with pytest.raises(LacksMemory, match="4 rows, 64 tokens") as caught:
        collective_rank(lambda tokens: False).run(alike)
    assert (caught.value.tokens, caught.value.operation) == (32, None)
    with pytest.raises(LacksMemory) as caught:
        collective_rank(lambda tokens: False).run([ROWS[2]])
    assert (caught.value.tokens, caught.value.operation) == (0, ("m", 2))


def test_what_only_ran_forward_says_nothing_of_what_fits_with_a_backward_pass() -> None:
    # 21 tokens fit without one, and less than half of that with one.
    rank = collective_rank(lambda tokens: tokens == 11)
    forward = [replace(op, forward_only=True) for op in OPS]
    rank.rounds.run(Pass(forward, [MicroBatch(ROWS[:3])]), {})
    assert rank.base.scored == [21]
    with pytest.raises(LacksMemory) as caught:
        rank.run(ROWS[2:])
    assert caught.value.tokens == 5


def test_a_rank_without_memory_for_what_has_no_rows_blames_nobody_and_has_the_others_compute_less() -> None:
    rank = collective_rank(lambda tokens: tokens == 1, world_size=2)
    with pytest.raises(LacksMemory, match="on no rows, beside a micro-batch of 21 tokens") as caught:
        rank.run(ROWS[:3])
    assert (caught.value.tokens, caught.value.operation) == (10, None)


def test_where_the_others_compute_one_sequence_each_less_at_once_helps_no_rank_without_rows() -> None:
    rank = collective_rank(lambda tokens: tokens == 1, world_size=2)
    with pytest.raises(torch.OutOfMemoryError):
        rank.run(ROWS[:1])


def test_of_an_operation_that_failed_nothing_runs_any_more_and_others_run() -> None:
    rank = Rank()
    rank.base.refuses = lambda tokens: "broken" if tokens == 9 else None
    found, failed = rank.run([ROWS[0]], [ROWS[1]], [ROWS[2], ROWS[3]])
    # What was made of both rows before one of them was not to run any more is made again.
    assert rank.base.scored == [5, 7]
    assert failed.keys() == {0}
    assert "broken" in failed[0].message
    assert (1, 0) in found and (0, 2) not in found


def test_an_error_of_one_operation_is_not_of_those_that_share_its_micro_batch() -> None:
    whole, rank = Rank(), Rank()
    rank.base.refuses = lambda tokens: "broken" if tokens in (21, 14) else None
    whole.run(ROWS[2:3])
    found, failed = rank.run(ROWS[:3])
    assert rank.base.scored == [7]
    assert failed.keys() == {0} and "broken" in failed[0].message
    assert found.keys() == {(1, 0)}
    torch.testing.assert_close(rank.gradient(2), whole.gradient(2))


def test_an_error_of_the_device_is_no_operations_and_ends_the_pass() -> None:
    rank = Rank()
    rank.base.refuses = lambda tokens: torch.AcceleratorError("CUDA error") if tokens == 9 else None
    with pytest.raises(torch.AcceleratorError):
        rank.run([ROWS[0]], [ROWS[1]], [ROWS[2], ROWS[3]])
    assert 11 not in rank.base.scored


def test_what_cannot_be_made_fails_its_own_operation() -> None:
    rank = Rank()
    rows = [row(0, 0, 5), row(1, 0, 7)]
    del rows[1].loss_inputs["weights"]
    found, failed = rank.run([rows[0]], [rows[1]])
    assert found.keys() == {(0, 0)}
    assert failed.keys() == {1}


@pytest.mark.parametrize(("ranks", "busiest", "mean"), [(1, 25, 25), (2, 13, 12.5), (4, 9, 6.25)])
def test_how_unevenly_ranks_are_loaded_can_be_told_from_two_counters(
    ranks: int, busiest: float, mean: float
) -> None:
    names = ("tinsmith_busiest_rank_tokens_total", "tinsmith_mean_rank_tokens_total")
    before = [REGISTRY.get_sample_value(name) or 0.0 for name in names]
    # 5, 9, 7 and 4 tokens, each to who has the least: of two ranks to the first, the other, and again.
    Rank(ranks).run([ROWS[0]], [ROWS[1]], [ROWS[2]], [ROWS[3]])
    after = [REGISTRY.get_sample_value(name) or 0.0 for name in names]
    assert [late - early for late, early in zip(after, before, strict=True)] == [busiest, mean]


def test_ranks_that_compute_a_sequence_together_wait_for_each_other_as_long_as_its_tokens_say(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A GPU is asked for all of a pass at once, and the deadline of what is asked begins then."""
    seen: list[str | float] = []

    @contextmanager
    def patience(seconds: float) -> Iterator[None]:
        seen.append(seconds)
        yield
        seen.append("as before")

    def computed(*_: Any) -> Any:
        seen.append("computed")
        return SimpleNamespace(results=list)

    rank = Rank(world_size=2)
    monkeypatch.setattr(rounds, "patience", patience)
    monkeypatch.setattr(rank.rounds, "_run_split", computed)
    rank.rounds.run(Pass(OPS, [MicroBatch([row(0, 0, 400)], split=True)]), {})
    assert seen == [200 / SLOWEST_SPLIT, "computed", "as before"]

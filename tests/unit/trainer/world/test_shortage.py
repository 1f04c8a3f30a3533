"""What a world ended of for want of memory is known to the next one, and what to do about it."""

from __future__ import annotations

import os
from datetime import timedelta
from pathlib import Path
from typing import cast

import pytest

from services.common.process.crashes import Cause
from services.trainer.compute.data import Pass, RowResult
from services.trainer.compute.engine import Engine
from services.trainer.compute.memory.failures import LacksMemory
from services.trainer.world.channel import Channel, WorldFailure, execute
from services.trainer.world.commands import RunPass
from services.trainer.world.shortage import Shortage
from tests.unit.trainer.world.engines import Rank0

OPERATION = ("s:train:0", 7)
SEVERAL = LacksMemory(512, None, "out of device memory on a micro-batch of 4 rows, 1024 tokens")
ONE = LacksMemory(0, OPERATION, "out of device memory on one sequence of 900 tokens")


@pytest.fixture
def shortage(tmp_path: Path) -> Shortage:
    return Shortage(tmp_path / "run", "trainer-0")


def test_where_nothing_was_told_micro_batches_are_as_large_as_was_asked_for(shortage: Shortage) -> None:
    assert shortage.cause() is None
    assert shortage.tokens(1024) == 1024
    shortage.heard()
    shortage.forget()
    assert shortage.tokens(1024) == 1024


def test_several_sequences_that_did_not_fit_are_no_operations_fault_and_next_time_fewer(
    shortage: Shortage,
) -> None:
    shortage.tell(SEVERAL)
    cause = shortage.cause()
    assert cause is not None and cause.key is None
    assert shortage.tokens(1024) == 512
    assert shortage.tokens(256) == 256, "the trainer was started with less"


def test_what_was_heard_is_no_other_deaths_cause_and_the_tokens_stay(shortage: Shortage) -> None:
    shortage.tell(SEVERAL)
    shortage.heard()
    assert shortage.cause() is None
    assert shortage.tokens(1024) == 512
    # Another world, another lack.
    shortage.tell(ONE)
    assert shortage.cause() == Cause(OPERATION, "out_of_memory", ONE.why)
    assert shortage.tokens(1024) == 512


def test_of_two_ranks_that_lack_memory_at_once_the_lesser_tokens_count(shortage: Shortage) -> None:
    for tokens in (300, 512):
        shortage.tell(LacksMemory(tokens, None, "no memory"))
    assert shortage.tokens(1024) == 300


def test_a_trainer_that_ends_in_order_leaves_nothing(shortage: Shortage, tmp_path: Path) -> None:
    shortage.tell(SEVERAL)
    shortage.forget()
    assert list((tmp_path / "run").iterdir()) == []


def test_what_a_rank_left_that_was_killed_while_it_told_is_gone_after_the_next_start(
    shortage: Shortage, tmp_path: Path
) -> None:
    shortage.tell(SEVERAL)
    (tmp_path / "run" / "trainer-0.shortage.node.17").write_text('{"tok')
    (tmp_path / "run" / "trainer-1.shortage").write_text("{}")
    shortage.heard()
    assert {path.name for path in (tmp_path / "run").iterdir()} == {
        "trainer-0.shortage",
        "trainer-1.shortage",
    }
    assert shortage.tokens(1024) == 512


def test_a_file_that_nobody_understands_tells_nothing(shortage: Shortage, tmp_path: Path) -> None:
    shortage.tell(SEVERAL)
    (tmp_path / "run" / "trainer-0.shortage").write_text('{"tokens": "man')
    assert shortage.cause() is None
    assert shortage.tokens(1024) == 1024


def test_a_rank_tells_of_its_lack_before_the_world_ends(shortage: Shortage) -> None:
    class Full(Rank0):
        def run_pass(self, work: Pass) -> list[RowResult]:
            raise SEVERAL

    channel = Channel(1, timedelta(seconds=1), shortage.tell)
    with pytest.raises(WorldFailure, match="4 rows, 1024 tokens"):
        execute(cast(Engine, Full()), channel, RunPass(Pass([], [])))
    assert shortage.cause() is not None


def test_a_lack_that_cannot_be_written_down_ends_the_world_all_the_same(tmp_path: Path) -> None:
    (tmp_path / "run").write_text("no directory")
    Shortage(tmp_path / "run", "trainer-0").tell(SEVERAL)


def test_a_trainer_starts_on_a_disk_that_takes_no_new_files(shortage: Shortage, tmp_path: Path) -> None:
    shortage.tell(SEVERAL)
    in_the_way = tmp_path / "run" / f"trainer-0.shortage.{os.uname().nodename}.{os.getpid()}"
    in_the_way.mkdir()
    shortage.heard()
    assert shortage.tokens(1024) == 512
    assert shortage.cause() is None, "another death is another's"
    shortage.heard()
    assert shortage.tokens(1024) == 512

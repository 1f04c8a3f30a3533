"""What the ranks of a world tell rank 0 of a pass."""

from __future__ import annotations

import pytest

from services.trainer.compute import exchange
from services.trainer.compute.data import Failure, MicroBatch, Pass, PassOp, Row, RowResult

FULL = Failure("server", "out_of_memory", "a sequence of 9 tokens does not fit; send shorter data")


def row(op: int, index: int) -> Row:
    return Row("m", op, index, b"\0\0\0\0", {})


def test_the_rank_on_which_an_operation_failed_says_why(monkeypatch: pytest.MonkeyPatch) -> None:
    work = Pass(
        [PassOp("m", 1, "cross_entropy"), PassOp("n", 1, "cross_entropy")],
        [MicroBatch([row(0, 0), row(1, 0)]), MicroBatch([row(0, 1)])],
    )
    sent: list[bytes] = []

    def gather(payload: bytes, device: str) -> list[bytes]:
        sent.append(payload)
        return sent if len(sent) == 2 else []

    monkeypatch.setattr(exchange, "gather_bytes", gather)
    assert exchange.collect(work, [], {0: FULL}, "cpu") == []
    here = [RowResult(0, 0), RowResult(1, 0)]
    found = exchange.collect(work, here, {0: exchange.ELSEWHERE}, "cpu")
    assert found == [RowResult(0, 0, failure=FULL), RowResult(0, 1, failure=FULL), RowResult(1, 0)]

"""What the ranks of a world tell rank 0 of a pass."""

from __future__ import annotations

import pytest

from services.trainer.compute import exchange
from services.trainer.compute.data import Failure, MicroBatch, Pass, PassOp, Row, RowResult

FULL = Failure("server", "out_of_memory", "a sequence of 9 tokens does not fit; send shorter data")


def row(op: int, index: int) -> Row:
    return Row(op, index, b"\0\0\0\0", {})


def test_the_rank_on_which_an_operation_failed_says_why(monkeypatch: pytest.MonkeyPatch) -> None:
    work = Pass(
        [PassOp("m", 1, "cross_entropy"), PassOp("n", 1, "cross_entropy")],
        [MicroBatch([row(0, 0), row(1, 0)]), MicroBatch([row(0, 1)])],
    )
    sent: list[bytes] = []
    heads: list[list[int]] = []

    def everyones(mine: list[int], work: Pass, device: str) -> list[list[int]]:
        # The other rank failed on the first operation; this test plays it first.
        heads.append(mine)
        return [heads[0], mine]

    def gather(payload: bytes, sizes: list[int]) -> list[bytes]:
        sent.append(payload)
        assert sizes == [len(sent[0]), len(payload)]
        return sent if len(sent) == 2 else []

    monkeypatch.setattr(exchange, "_everyones", everyones)
    monkeypatch.setattr(exchange, "gather_bytes", gather)
    failed, found = exchange.exchange(work, [], {}, {0: FULL}, "cpu")
    assert (failed, found) == ({0: FULL}, [])
    here = [RowResult(0, 0), RowResult(1, 0)]
    failed, found = exchange.exchange(work, here, {}, {}, "cpu")
    assert failed == {0: exchange.ELSEWHERE}
    assert found == [RowResult(0, 0, failure=FULL), RowResult(0, 1, failure=FULL), RowResult(1, 0)]


def test_what_was_refused_has_a_failure_for_each_row_and_all_know_it(monkeypatch: pytest.MonkeyPatch) -> None:
    work = Pass([PassOp("m", 1, "cross_entropy")], [MicroBatch([row(0, 0), row(0, 1)])])
    monkeypatch.setattr(exchange.dist, "get_world_size", lambda: 1)
    failed, found = exchange.exchange(work, [], {0: FULL}, {}, "cpu")
    assert failed == {0: FULL}
    assert found == [RowResult(0, index, failure=FULL) for index in range(2)]


@pytest.mark.parametrize(
    ("sizes", "ranks", "device", "seconds"),
    [
        ([], 2, "cpu", 0),
        # One rank may have all of it, where the others were dealt more of the passes before.
        ([(4000, False)], 2, "cpu", 400),
        ([(4000, False)], 2, "cuda:1", 40),
        ([(1000, False)] * 40, 8, "cpu", 4000),
        # Of these each rank has a part.
        ([(4001, True)], 2, "cpu", 200.1),
        ([(4001, True)], 8, "cuda:0", 50.1),
        ([(4000, True), (1000, True), (9000, False)], 2, "cpu", 250 + 900),
    ],
)
def test_ranks_wait_for_each_other_as_long_as_their_tokens_may_take(
    sizes: list[tuple[int, bool]], ranks: int, device: str, seconds: float
) -> None:
    batches = [MicroBatch([Row(0, 0, bytes(4 * size), {})], split) for size, split in sizes]
    work = Pass([PassOp("m", 1, "cross_entropy")], batches)
    assert exchange.part_seconds(work, ranks, device) == pytest.approx(seconds)

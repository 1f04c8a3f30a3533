"""Results that are kept are bounded over all models, and none goes that somebody may need."""

from __future__ import annotations

import asyncio

import pytest
from redis.exceptions import ConnectionError

from services.common.contract.errors import Internal, ModelNotResident
from services.trainer.files import kept_results
from services.trainer.files.kept_results import ResultRoom
from services.trainer.order.sequencer import KEPT_RESULTS, Executed, Sequence


def executed(*sizes: int) -> Sequence[str, int]:
    """A model that has executed operations with results of these sizes."""
    sequence: Sequence[str, int] = Sequence(size_of=lambda size: size)
    for size in sizes:
        execute(sequence, size)
    return sequence


def execute(sequence: Sequence[str, int], size: int) -> None:
    seq_id = sequence.applied + 1
    sequence.admit(seq_id, seq_id - 1, f"op{seq_id}", accepted_at=1.0 + seq_id)
    sequence.executed(seq_id)
    sequence.finish(seq_id, size)


class Journal:
    """Where all results are stored, but for those that a test names."""

    def __init__(self, **lowest_pending: int) -> None:
        self.lowest = lowest_pending
        self.asked: list[str] = []

    async def lowest_pending(self, model: str) -> int:
        self.asked.append(model)
        return self.lowest.get(model, -1)


async def keeps(most: int, journal: Journal, **models: Sequence[str, int]) -> dict[str, list[int]]:
    """The operations whose results are kept of each model, once what was stored then has been for a while."""
    room = ResultRoom(most, lambda: models, journal.lowest_pending)
    before = {name: list(sequence.results) for name, sequence in models.items()}
    await room.keep_to_it()
    assert {name: list(sequence.results) for name, sequence in models.items()} == before, (
        "Redis may lose them"
    )
    await room.keep_to_it()
    return {name: list(sequence.results) for name, sequence in models.items()}


async def test_what_kept_results_take_is_told_over_all_models() -> None:
    models = {"small": executed(10, 10), "large": executed(20)}
    room = ResultRoom(0, lambda: models, Journal().lowest_pending)
    assert room.used() == 40
    models["small"].forget(before=9)
    assert room.used() == 30


async def test_results_of_who_keeps_most_go_first_and_no_more_than_need_be() -> None:
    journal = Journal()
    kept = await keeps(60, journal, small=executed(10, 10), large=executed(20, 20, 20))
    assert kept == {"small": [0, 1], "large": [2]}
    assert journal.asked == ["large", "small"], "of which nothing was known"


async def test_where_all_have_room_nobody_is_asked() -> None:
    journal = Journal()
    assert await keeps(60, journal, one=executed(30, 30)) == {"one": [0, 1]}
    assert journal.asked == []


async def test_what_no_gateway_has_stored_stays_whatever_it_takes() -> None:
    kept = await keeps(1, Journal(one=1, other=0), one=executed(10, 10, 10), other=executed(10, 10))
    assert kept == {"one": [1, 2], "other": [0, 1]}


async def test_what_ends_while_the_journal_is_asked_stays() -> None:
    model = executed(10, 10)

    class Slow(Journal):
        async def lowest_pending(self, name: str) -> int:
            execute(model, 10)
            return -1

    room = ResultRoom(1, lambda: {"model": model}, Slow().lowest_pending)
    await room.keep_to_it()
    execute(model, 10)
    await room.keep_to_it()
    assert list(model.results) == [2, 3, 4]


async def test_the_last_result_of_a_model_stays() -> None:
    assert await keeps(1, Journal(), one=executed(10, 10)) == {"one": [1]}


async def test_who_sends_another_operation_under_the_number_of_one_whose_result_went_is_told_so() -> None:
    model = executed(10, 10)
    await keeps(1, Journal(), model=model)
    assert model.find(1, 0, accepted_at=2.0) == Executed(10)
    with pytest.raises(Internal, match="no longer kept"):
        model.find(0, -1, accepted_at=1.0)
    with pytest.raises(ModelNotResident):
        model.find(0, -1, accepted_at=1.5)


async def test_what_is_remembered_of_numbers_is_bounded_whether_their_results_went_or_not() -> None:
    model = executed(*[10] * KEPT_RESULTS)
    await keeps(1, Journal(), model=model)
    for _ in range(KEPT_RESULTS):
        execute(model, 10)
    assert len(model._accepted_at) == len(model.results) == KEPT_RESULTS
    assert model.kept_bytes == 10 * KEPT_RESULTS


async def test_a_redis_that_does_not_answer_ends_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kept_results, "LOOK_S", 0.001)
    model = executed(10, 10)

    class Away(Journal):
        async def lowest_pending(self, name: str) -> int:
            self.asked.append(name)
            if len(self.asked) < 3:
                raise ConnectionError("Connection refused")
            return -1

    watching = asyncio.create_task(ResultRoom(1, lambda: {"model": model}, Away().lowest_pending).watch())
    async with asyncio.timeout(10):
        while len(model.results) > 1:  # noqa: ASYNC110
            await asyncio.sleep(0.001)
    watching.cancel()

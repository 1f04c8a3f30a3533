"""The journal: what is accepted takes effect once and is resolved once."""

from __future__ import annotations

import asyncio
import re

import pytest
import redis.asyncio

from services.common.contract import errors, ids
from services.common.contract.errors import Conflict, InvalidRequest, Overloaded
from services.common.state import keys
from services.common.state.journal import Journal
from services.common.state.journal_records import Accepted, InVain, JournalLimits, Published
from services.gateway.dispatch.leases import Lease, Leases
from services.gateway.results.futures import Futures
from tinsmith.internal.v1 import operation_pb2
from tinsmith.v1 import results_pb2, training_pb2, types_pb2

MODEL = ids.model_id("s", 0)


def step(seq_id: int, rate: float = 0.1, model_id: str = MODEL) -> operation_pb2.Operation:
    adam = training_pb2.AdamParams(learning_rate=rate)
    return operation_pb2.Operation(
        model_id=model_id, seq_id=seq_id, optim_step=operation_pb2.OptimStep(adam=adam)
    )


def creation(model_id: str = MODEL) -> operation_pb2.Operation:
    return operation_pb2.Operation(
        model_id=model_id, seq_id=0, create_model=operation_pb2.CreateModel(base_model="org/base")
    )


def batch(seq_id: int, forward_only: bool = False) -> operation_pb2.Operation:
    forward = training_pb2.ForwardBackward(loss_fn="cross_entropy", forward_only=forward_only)
    return operation_pb2.Operation(model_id=MODEL, seq_id=seq_id, forward_backward=forward)


def refusal(seq_id: int) -> operation_pb2.Operation:
    refused = errors.to_pb(InvalidRequest("no data; pass at least one datum"))
    return operation_pb2.Operation(model_id=MODEL, seq_id=seq_id, refused=refused)


def done(grad_norm: float = 1.0) -> bytes:
    result = results_pb2.OperationResult()
    result.optim_step.metrics["grad_norm"] = grad_norm
    return result.SerializeToString()


async def lead(client: redis.asyncio.Redis, gateway: str = "gateway-0", model_id: str = MODEL) -> Lease:
    lease = await Leases(client, gateway).acquire(model_id)
    assert isinstance(lease, Lease)
    return lease


async def created(client: redis.asyncio.Redis, journal: Journal) -> Lease:
    """Leads a model whose creation is done and durable."""
    await journal.accept(creation(), "ann")
    lease = await lead(client)
    await journal.publish(MODEL, lease.epoch, 0, done())
    await journal.mark_durable(MODEL, lease.epoch, 0, "0")
    return lease


async def view(client: redis.asyncio.Redis, seq_id: int) -> tuple[str, results_pb2.OperationResult]:
    found = await Futures(client).wait(ids.request_id(MODEL, seq_id), 0)
    return found.state, results_pb2.OperationResult.FromString(found.result or b"")


async def test_operations_accepted_in_any_order_are_read_in_order(any_redis: redis.asyncio.Redis) -> None:
    journal = Journal(any_redis)
    for seq_id in (3, 0, 2, 1):
        operation = creation() if seq_id == 0 else step(seq_id)
        assert await journal.accept(operation, "ann") == Accepted(f"{MODEL}:{seq_id}", to_run=True)
    entries = (await journal.index(MODEL, -1)).entries
    assert [entry.seq_id for entry in entries] == [0, 1, 2, 3]
    found = await journal.operations(MODEL, [0, 1, 2, 3])
    assert [operation and operation.seq_id for operation in found] == [0, 1, 2, 3]
    assert (await journal.index(MODEL, -1)).base_model == "org/base"


async def test_a_repeated_operation_is_journaled_once_and_another_payload_conflicts(
    any_redis: redis.asyncio.Redis,
) -> None:
    journal = Journal(any_redis)
    first = await journal.accept(step(1), "ann")
    assert first.to_run
    again = Accepted(first.request_id, to_run=False)
    assert await journal.accept(step(1), "ann") == again
    with pytest.raises(Conflict, match="seq_id 1"):
        await journal.accept(step(1, rate=0.2), "ann")
    assert (await journal.index(MODEL, -1)).pending == 1
    # The same holds when the operation is done and gone from the journal.
    lease = await lead(any_redis)
    assert await journal.publish(MODEL, lease.epoch, 1, done()) is Published.PUBLISHED
    assert await journal.mark_durable(MODEL, lease.epoch, 1, "1")
    assert await journal.accept(step(1), "ann") == again
    with pytest.raises(Conflict):
        await journal.accept(step(1, rate=0.2), "ann")
    assert (await journal.index(MODEL, -1)).entries == ()


async def test_many_gateways_that_accept_one_operation_at_once_make_one_entry(
    any_redis: redis.asyncio.Redis,
) -> None:
    journals = [Journal(any_redis) for _ in range(20)]
    accepted = await asyncio.gather(*(journal.accept(step(1), "ann") for journal in journals))
    assert {one.request_id for one in accepted} == {f"{MODEL}:1"}
    assert sum(one.to_run for one in accepted) == 1
    assert (await journals[0].index(MODEL, -1)).pending == 1


async def test_a_refused_operation_fails_its_future_and_uses_up_its_seq_id(
    any_redis: redis.asyncio.Redis,
) -> None:
    journal = Journal(any_redis)
    assert not (await journal.accept(refusal(1), "ann")).to_run
    state, result = await view(any_redis, 1)
    assert state == "done"
    assert result.error.category == types_pb2.ERROR_CATEGORY_USER
    assert "at least one datum" in result.error.message
    (entry,) = (await journal.index(MODEL, -1)).entries
    assert (entry.seq_id, entry.size, entry.pending) == (1, 0, False)
    assert await journal.operations(MODEL, [1]) == [None]
    # Once all before it is there, it needs no entry to be used up.
    await journal.accept(creation(), "ann")
    index = await journal.index(MODEL, -1)
    assert ([entry.seq_id for entry in index.entries], index.floor) == ([0], 1)
    assert await journal.last_seq_id(MODEL) == 1
    await any_redis.delete(keys.future(MODEL, 1))
    await journal.accept(step(1), "ann")
    assert (await view(any_redis, 1))[1].error.code == "seq_id_used"


async def test_a_result_is_published_once_and_only_under_the_current_epoch(
    any_redis: redis.asyncio.Redis,
) -> None:
    journal = Journal(any_redis)
    await journal.accept(step(1), "ann")
    old, new = await lead(any_redis), await lead(any_redis)
    assert new.epoch > old.epoch
    assert await journal.publish(MODEL, old.epoch, 1, done(1.0)) is Published.STALE_EPOCH
    assert (await view(any_redis, 1))[0] == "pending"
    assert await journal.publish(MODEL, new.epoch, 1, done(2.0)) is Published.PUBLISHED
    assert await journal.publish(MODEL, new.epoch, 1, done(3.0)) is Published.NOT_PENDING
    assert (await view(any_redis, 1))[1].optim_step.metrics["grad_norm"] == 2.0
    assert 23 * 3600 < await any_redis.ttl(keys.future(MODEL, 1)) <= 24 * 3600


async def test_a_durable_snapshot_trims_what_is_published_and_the_rest_when_it_is(
    any_redis: redis.asyncio.Redis,
) -> None:
    journal = Journal(any_redis)
    for seq_id in (1, 2, 3):
        await journal.accept(step(seq_id), "ann")
    lease = await lead(any_redis)
    assert await journal.durable(MODEL) is None
    assert await journal.publish(MODEL, lease.epoch, 1, done()) is Published.PUBLISHED
    assert await journal.mark_durable(MODEL, lease.epoch, 2, "here")
    assert await journal.durable(MODEL) == (2, "here")
    assert [entry.seq_id for entry in (await journal.index(MODEL, -1)).entries] == [2, 3]
    assert await journal.publish(MODEL, lease.epoch, 2, done()) is Published.PUBLISHED
    assert [entry.seq_id for entry in (await journal.index(MODEL, -1)).entries] == [3]
    assert not await journal.mark_durable(MODEL, lease.epoch, 1, "older")
    assert not await journal.mark_durable(MODEL, lease.epoch - 1, 3, "stale")
    assert await journal.durable(MODEL) == (2, "here")
    assert await journal.publish(MODEL, lease.epoch, 3, done()) is Published.PUBLISHED
    assert await journal.mark_durable(MODEL, lease.epoch, 3, "3")
    sizes = await any_redis.hmget(keys.journal_meta(MODEL), ["pending_bytes", "journal_bytes"])
    assert sizes == [b"0", b"0"]


async def test_a_seq_id_that_was_used_and_forgotten_fails_instead_of_running_again(
    any_redis: redis.asyncio.Redis,
) -> None:
    journal = Journal(any_redis)
    await journal.accept(step(1), "ann")
    lease = await lead(any_redis)
    await journal.publish(MODEL, lease.epoch, 1, done())
    await journal.mark_durable(MODEL, lease.epoch, 1, "1")
    await any_redis.delete(keys.future(MODEL, 1))
    assert await journal.accept(step(1), "ann") == Accepted(f"{MODEL}:1", to_run=False)
    state, result = await view(any_redis, 1)
    assert (state, result.error.code) == ("done", "seq_id_used")
    assert (await journal.index(MODEL, -1)).pending == 0


async def test_an_operation_that_redis_forgot_is_pending_again_though_a_snapshot_covers_it(
    any_redis: redis.asyncio.Redis,
) -> None:
    journal = Journal(any_redis)
    lease = await lead(any_redis)
    await journal.mark_durable(MODEL, lease.epoch, 3, "3")
    await journal.accept(step(2), "ann", accepted_before=True)
    assert (await view(any_redis, 2))[0] == "pending"
    assert (await journal.index(MODEL, -1)).lowest_pending == await journal.lowest_pending(MODEL) == 2
    assert await journal.publish(MODEL, lease.epoch, 2, done(7.0)) is Published.PUBLISHED
    assert (await view(any_redis, 2))[1].optim_step.metrics["grad_norm"] == 7.0
    assert (await journal.index(MODEL, -1)).entries == ()


async def test_what_comes_after_its_gap_was_skipped_fails(any_redis: redis.asyncio.Redis) -> None:
    journal = Journal(any_redis)
    await journal.accept(step(3), "ann")
    lease = await lead(any_redis)
    assert await journal.skip(MODEL, lease.epoch, 2)
    assert not await journal.skip(MODEL, lease.epoch - 1, 9)
    await journal.accept(step(2), "ann")
    assert (await view(any_redis, 2))[1].error.code == "seq_id_used"
    assert [entry.seq_id for entry in (await journal.index(MODEL, -1)).entries] == [3]


async def test_operations_of_a_model_that_was_not_created_fail_at_once(
    any_redis: redis.asyncio.Redis,
) -> None:
    journal = Journal(any_redis)
    await journal.accept(creation(), "ann")
    lease = await lead(any_redis)
    failure = results_pb2.OperationResult(error=types_pb2.Error(code="oom"))
    closing = results_pb2.OperationResult(error=types_pb2.Error(code="model_not_created"))
    await journal.publish(
        MODEL, lease.epoch, 0, failure.SerializeToString(), closing=closing.SerializeToString()
    )
    assert not (await journal.accept(step(1), "ann")).to_run
    assert (await view(any_redis, 0))[1].error.code == "oom"
    assert (await view(any_redis, 1))[1].error.code == "model_not_created"


async def test_a_full_journal_turns_operations_away_until_it_has_room(any_redis: redis.asyncio.Redis) -> None:
    size = step(1).ByteSize()
    journal = Journal(any_redis, JournalLimits(pending_bytes=2 * size, ahead=10))
    await journal.accept(step(1), "ann")
    await journal.accept(step(2), "ann")
    with pytest.raises(Overloaded, match="send this again later") as bytes_full:
        await journal.accept(step(3), "ann")
    assert bytes_full.value.about == {"limit": "--pending-bytes"}
    short = Journal(any_redis, JournalLimits(entries=2, ahead=10))
    with pytest.raises(Overloaded, match="send this again later") as entries_full:
        await short.accept(step(3), "ann")
    assert entries_full.value.about == {"limit": "--pending-operations"}
    # A refused one needs no room, and one that is known already takes none.
    await journal.accept(refusal(4), "ann")
    await journal.accept(step(2), "ann")
    lease = await lead(any_redis)
    await journal.publish(MODEL, lease.epoch, 1, done())
    await journal.accept(step(3), "ann")
    with pytest.raises(InvalidRequest, match="without gaps"):
        await journal.accept(step(100), "ann")


async def test_a_model_that_only_runs_forward_keeps_a_small_journal(any_redis: redis.asyncio.Redis) -> None:
    journal = Journal(any_redis, JournalLimits(entries=8))
    lease = await created(any_redis, journal)
    for seq_id in range(1, 1001):
        await journal.accept(batch(seq_id, forward_only=True), "ann")
        await journal.publish(MODEL, lease.epoch, seq_id, done(), replay_passes_over=True)
    assert (await journal.index(MODEL, -1)).entries == ()
    assert await any_redis.memory_usage(keys.journal_meta(MODEL)) < 4096
    await journal.accept(step(1001), "ann")
    assert await journal.last_seq_id(MODEL) == 1001
    # What was passed over is used up all the same.
    await any_redis.delete(keys.future(MODEL, 7))
    assert not (await journal.accept(step(7), "ann")).to_run
    assert (await view(any_redis, 7))[1].error.code == "seq_id_used"


async def test_passed_over_operations_leave_also_when_they_came_in_another_order(
    any_redis: redis.asyncio.Redis,
) -> None:
    journal = Journal(any_redis)
    lease = await created(any_redis, journal)
    for seq_id in (4, 2, 5, 3):
        await journal.accept(batch(seq_id, forward_only=seq_id != 3), "ann")
    for seq_id in (5, 4, 3, 2):
        passed = seq_id != 3
        await journal.publish(MODEL, lease.epoch, seq_id, done(), replay_passes_over=passed)
    # Without operation 1 nothing says that 2, 4 and 5 came.
    assert [(e.seq_id, e.size > 0) for e in (await journal.index(MODEL, -1)).entries] == [
        (2, False),
        (3, True),
        (4, False),
        (5, False),
    ]
    await journal.accept(batch(1, forward_only=True), "ann")
    index = await journal.index(MODEL, -1)
    assert ([entry.seq_id for entry in index.entries], index.floor) == ([1, 3], 5)


async def test_batches_since_the_last_step_fill_a_journal_and_never_keep_the_step_out(
    any_redis: redis.asyncio.Redis,
) -> None:
    size = batch(1).ByteSize()
    by_count, by_bytes = JournalLimits(entries=8), JournalLimits(journal_bytes=8 * size)
    for limits, flag in ((by_count, "--pending-operations"), (by_bytes, "--journal-bytes")):
        await any_redis.flushall()
        journal = Journal(any_redis, limits)
        lease = await created(any_redis, journal)
        for seq_id in range(1, 9):
            await journal.accept(batch(seq_id), "ann")
            await journal.publish(MODEL, lease.epoch, seq_id, done())
        with pytest.raises(Overloaded, match="send an optim_step") as full:
            await journal.accept(batch(9), "ann")
        assert (full.value.about, re.findall(r"--[a-z-]+", str(full.value))) == ({"limit": flag}, [flag])
        save = operation_pb2.SaveState(checkpoint_id="weights/a")
        await journal.accept(operation_pb2.Operation(model_id=MODEL, seq_id=9, save_state=save), "ann")
        await journal.accept(step(10), "ann")
        ended = operation_pb2.UnloadModel()
        await journal.accept(operation_pb2.Operation(model_id=MODEL, seq_id=11, unload_model=ended), "ann")
        for seq_id in (9, 10):
            await journal.publish(MODEL, lease.epoch, seq_id, done(), replay_passes_over=seq_id == 9)
        await journal.mark_durable(MODEL, lease.epoch, 10, "10")
        await journal.accept(batch(12), "ann")


async def test_what_the_waiting_operations_wait_for_is_never_turned_away(
    any_redis: redis.asyncio.Redis,
) -> None:
    journal = Journal(any_redis, JournalLimits(entries=4))
    await created(any_redis, journal)
    for seq_id in (2, 3, 4, 5):
        await journal.accept(step(seq_id), "ann")
    with pytest.raises(Overloaded, match="send this again later"):
        await journal.accept(step(6), "ann")
    await journal.accept(step(1), "ann")
    with pytest.raises(Overloaded, match="send this again later"):
        await journal.accept(step(6), "ann")


async def test_models_with_work_are_listed_until_they_are_idle(any_redis: redis.asyncio.Redis) -> None:
    journal = Journal(any_redis)
    await journal.accept(step(1), "ann")
    ((model_id, listed),) = await journal.models_with_work()
    assert model_id == MODEL
    await journal.forget_idle(MODEL, listed)
    assert await journal.models_with_work(), "it was listed a moment ago"
    await any_redis.zadd(keys.PENDING_MODELS, {MODEL: listed - 100})
    await journal.forget_idle(MODEL, listed - 101)
    assert await journal.models_with_work(), "it was listed again meanwhile"
    await journal.forget_idle(MODEL, listed - 100)
    assert await journal.models_with_work() == []


async def test_accepting_takes_one_round_trip(
    redis_client: redis.asyncio.Redis, monkeypatch: pytest.MonkeyPatch
) -> None:
    journal = Journal(redis_client)
    await journal.accept(step(1), "ann")
    sent: list[str] = []
    send = redis_client.execute_command

    async def counted(*args: object, **options: object) -> object:
        sent.append(str(args[0]))
        return await send(*args, **options)

    monkeypatch.setattr(redis_client, "execute_command", counted)
    for seq_id in range(2, 12):
        await journal.accept(step(seq_id), "ann")
    assert sent == ["EVALSHA"] * 10


@pytest.mark.parametrize("limits", [JournalLimits(entries=8), JournalLimits(journal_bytes=100)])
async def test_a_journal_says_that_it_is_half_full_until_a_durable_snapshot_trims_it(
    any_redis: redis.asyncio.Redis, limits: JournalLimits
) -> None:
    journal = Journal(any_redis, limits)
    lease = await created(any_redis, journal)
    assert not await journal.is_half_full(MODEL)
    for seq_id in range(1, 6):
        await journal.accept(step(seq_id), "ann")
        await journal.publish(MODEL, lease.epoch, seq_id, done())
    assert await journal.is_half_full(MODEL)
    assert await journal.mark_durable(MODEL, lease.epoch, 5, "5")
    assert not await journal.is_half_full(MODEL)


async def test_tries_in_vain_are_counted_whoever_makes_them_until_a_result_is_published(
    any_redis: redis.asyncio.Redis,
) -> None:
    journal = Journal(any_redis)
    lease = await created(any_redis, journal)
    await journal.accept(step(1), "ann")

    async def tried(epoch: int, waited: float, refused: bool) -> InVain | None:
        return await journal.tried_in_vain(MODEL, epoch, waited, refused)

    assert await tried(lease.epoch, 0.0, False) == InVain(0.0, 0.0)
    assert await tried(lease.epoch, 0.1, True) == InVain(0.1, 0.0), "refused since now"
    assert await tried(lease.epoch, 0.2, True) == InVain(0.3, 0.2)
    epoch = (await lead(any_redis)).epoch
    assert await tried(lease.epoch, 0.4, True) is None, "another start of the gateway leads the model"
    assert await tried(epoch, 0.4, True) == InVain(0.7, 0.6)
    assert await tried(epoch, 0.8, False) == InVain(1.5, 0.0)
    assert await tried(epoch, 300.0, True) == InVain(301.5, 0.0)
    assert await journal.publish(MODEL, epoch, 1, done()) is Published.PUBLISHED
    assert await tried(epoch, 0.1, True) == InVain(0.1, 0.0)

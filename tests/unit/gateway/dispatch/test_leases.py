"""Dispatch leases: one holder, growing epochs."""

from __future__ import annotations

import asyncio

import pytest
import redis.asyncio

from services.common.state import keys
from services.common.state.journal import Journal
from services.gateway.dispatch.leases import Lease, Leases
from tinsmith.internal.v1 import operation_pb2

MODEL = "s:train:0"


async def held(leases: Leases) -> Lease:
    """The lease on MODEL, which nobody else has."""
    lease = await leases.acquire(MODEL)
    assert isinstance(lease, Lease)
    return lease


async def test_only_one_gateway_holds_a_lease(any_redis: redis.asyncio.Redis) -> None:
    gateways = [Leases(any_redis, f"gateway-{n}") for n in range(10)]
    found = await asyncio.gather(*(gateway.acquire(MODEL) for gateway in gateways))
    assert len([lease for lease in found if isinstance(lease, Lease)]) == 1
    assert all(5 < lease <= 6 for lease in found if isinstance(lease, float))


async def test_a_lease_is_kept_by_renewal_and_passes_on_when_it_is_not(
    any_redis: redis.asyncio.Redis,
) -> None:
    first, second = Leases(any_redis, "gateway-0", ttl=1.0), Leases(any_redis, "gateway-1", ttl=1.0)
    lease = await held(first)
    first.start()
    await asyncio.sleep(2.2)
    assert not lease.lost
    assert isinstance(await second.acquire(MODEL), float)
    await first._renewals.stop()
    await asyncio.sleep(1.2)
    taken = await held(second)
    assert taken.epoch > lease.epoch
    await second.stop()


async def test_a_holder_that_finds_its_lease_taken_stops(any_redis: redis.asyncio.Redis) -> None:
    leases = Leases(any_redis, "gateway-0", ttl=0.3)
    lease = await held(leases)
    told = asyncio.Event()
    lease.on_lost = told.set
    await any_redis.set(keys.lease(MODEL), "gateway-9/other")
    leases.start()
    await asyncio.wait_for(told.wait(), 60)
    assert lease.lost
    await leases.stop()
    assert await any_redis.get(keys.lease(MODEL)) == b"gateway-9/other"


async def test_leases_that_an_outage_takes_are_one_line_with_its_cause(
    any_redis: redis.asyncio.Redis, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO")
    leases = Leases(any_redis, "gateway-0", ttl=0.3)
    many = [lease for n in range(50) if isinstance(lease := await leases.acquire(f"s:train:{n}"), Lease)]
    assert len(many) == 50

    async def silent(*_: object) -> int:
        await asyncio.Event().wait()
        return 0

    renew = leases._renew
    monkeypatch.setattr(leases, "_renew", silent)
    leases.start()
    async with asyncio.timeout(60):
        while not all(lease.lost for lease in many):  # noqa: ASYNC110
            await asyncio.sleep(0.01)
    lost = "leases on models are lost"
    assert caplog.messages.count(f"{lost}: Redis: it did not answer in time") == 1
    assert [one for one in caplog.messages if "s:train" in one] == []
    monkeypatch.setattr(leases, "_renew", renew)
    assert isinstance(await leases.acquire(MODEL), Lease)
    async with asyncio.timeout(60):
        while f"{lost}: no more of Redis, after 50 failures" not in caplog.messages:  # noqa: ASYNC110
            await asyncio.sleep(0.01)
    await leases.stop()


async def test_an_outage_is_not_over_while_redis_answers_for_some_leases_only(
    any_redis: redis.asyncio.Redis, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO")
    leases = Leases(any_redis, "gateway-0", ttl=60.0)
    many = [lease for n in range(20) if isinstance(lease := await leases.acquire(f"s:train:{n}"), Lease)]
    renew, unlucky = leases._renew, {keys.lease(f"s:train:{n}") for n in (1, 3, 5)}
    for n in (1, 3, 5):
        many[n].valid_until -= 50  # as after renewals that failed for a while

    async def some(named: list[str], *args: object) -> object:
        if named[0] in unlucky:
            raise redis.exceptions.ConnectionError("reset")
        return await renew(named, *args)

    monkeypatch.setattr(leases, "_renew", some)
    for _ in range(2):
        await leases._renew_all()
    assert [n for n, lease in enumerate(many) if lease.lost] == [1, 3, 5]
    lost = [message for message in caplog.messages if message.startswith("leases on models are lost")]
    assert lost == ["leases on models are lost: Redis: reset", lost[-1]]
    assert "no more of Redis" in lost[-1], "what was lost is renewed no more"


async def test_a_held_lease_gets_a_higher_epoch_and_one_taken_by_another_is_lost(
    any_redis: redis.asyncio.Redis,
) -> None:
    leases = Leases(any_redis, "gateway-0", ttl=1.0)
    lease = await held(leases)
    first = lease.epoch
    await leases.fence(lease)
    assert lease.epoch > first
    assert not lease.lost
    assert await any_redis.get(keys.epoch(MODEL)) == str(lease.epoch).encode()
    leases.start()
    await asyncio.sleep(1.4)
    assert not lease.lost, "it is renewed as before"
    await any_redis.set(keys.lease(MODEL), "gateway-9/other")
    await leases.fence(lease)
    assert lease.lost
    await leases.stop()


async def test_a_gateway_that_restarts_takes_its_leases_back_at_once(any_redis: redis.asyncio.Redis) -> None:
    before = await held(Leases(any_redis, "gateway-0"))
    after = await held(Leases(any_redis, "gateway-0"))
    assert after.epoch > before.epoch
    assert isinstance(await Leases(any_redis, "gateway-01").acquire(MODEL), float)


async def test_an_epoch_is_not_given_out_twice_when_redis_forgot_it(any_redis: redis.asyncio.Redis) -> None:
    leases = Leases(any_redis, "gateway-0")
    before = await held(leases)
    await any_redis.delete(keys.epoch(MODEL), keys.lease(MODEL))
    await asyncio.sleep(0.01)
    after = await held(leases)
    assert after.epoch > before.epoch


async def test_a_sweep_takes_only_models_with_work(any_redis: redis.asyncio.Redis) -> None:
    leases = Leases(any_redis, "gateway-0")
    assert await leases.acquire(MODEL, only_with_work=True) is None
    operation = operation_pb2.Operation(model_id=MODEL, seq_id=1, unload_model=operation_pb2.UnloadModel())
    await Journal(any_redis).accept(operation, "ann")
    assert isinstance(await leases.acquire(MODEL, only_with_work=True), Lease)


async def test_it_is_known_for_how_long_no_lease_was_renewed(any_redis: redis.asyncio.Redis) -> None:
    leases = Leases(any_redis, "gateway-0", ttl=0.3)
    assert leases.unrenewed == 0.0
    clock = asyncio.get_running_loop().time
    began = clock()
    leases.start()
    await asyncio.sleep(0.7)
    # It was renewed since.
    assert 0.0 < leases.unrenewed < clock() - began
    await leases._renewals.stop()
    before = leases.unrenewed
    await asyncio.sleep(0.2)
    assert leases.unrenewed > before
    await leases.stop()


async def test_a_lease_is_surely_held_as_long_as_it_was_last_renewed_for_and_not_once_it_is_lost(
    any_redis: redis.asyncio.Redis,
) -> None:
    leases, loop = Leases(any_redis, "gateway-0", ttl=30.0), asyncio.get_running_loop()
    lease = await held(leases)
    for renew in (leases._renew_all(), leases.fence(lease)):
        assert lease.surely_held
        assert lease.valid_until <= loop.time() + 30
        last = lease.valid_until
        await asyncio.sleep(0.01)
        await renew
        assert lease.valid_until > last
    lease.valid_until = loop.time()
    assert not lease.surely_held and not lease.lost
    lease.valid_until = loop.time() + 30
    lease.lose()
    assert not lease.surely_held


async def test_one_renewal_that_fails_loses_no_lease(
    any_redis: redis.asyncio.Redis, monkeypatch: pytest.MonkeyPatch
) -> None:
    leases = Leases(any_redis, "gateway-0", ttl=30.0)
    lease, renew = await held(leases), leases._renew

    async def reset(*_: object) -> object:
        raise redis.exceptions.ConnectionError("reset")

    monkeypatch.setattr(leases, "_renew", reset)
    await leases._renew_all()
    assert lease.surely_held
    last = lease.valid_until
    monkeypatch.setattr(leases, "_renew", renew)
    await leases._renew_all()
    assert lease.valid_until > last


async def test_a_gateway_that_stops_leaves_its_models_to_others_at_once(
    any_redis: redis.asyncio.Redis,
) -> None:
    leases = Leases(any_redis, "gateway-0")
    lease = await held(leases)
    leases.start()
    await leases.stop()
    assert lease.lost and not len(leases)
    await held(Leases(any_redis, "gateway-1"))


async def test_a_lease_that_was_given_back_is_not_taken_again_for_a_higher_epoch(
    any_redis: redis.asyncio.Redis,
) -> None:
    leases = Leases(any_redis, "gateway-0")
    lease = await held(leases)
    await leases.release(lease)
    await leases.fence(lease)
    assert not len(leases)
    await held(Leases(any_redis, "gateway-1"))

"""Models are spread over the trainers of a base model, and stay where they are."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import redis.asyncio

from services.common.contract import ids
from services.common.state.journal import Journal
from services.common.state.registry import ServiceRecord
from services.gateway.dispatch.placement import Loads, choose
from services.gateway.dispatch.plan import DispatchSettings
from tests.unit.gateway.dispatching import Gateway, GatewayFactory, create, started, step
from tests.unit.gateway.scripted_services import BASE, Running, ScriptedTrainer, serving

SETTINGS = DispatchSettings(trainer_poll=0.1, trainer_patience=0.5, idle_release=0.1)


def trainer_record(name: str, models: int = 0, queued: int = 0) -> ServiceRecord:
    load = {"models": models, "queued": queued}
    return ServiceRecord(kind="trainer", id=name, incarnation=name, address="h:1", base_model=BASE, **load)


def chosen(*ready: ServiceRecord, placed: str = "", away: float = 0.0, loads: Loads | None = None) -> str:
    found = choose(ready, placed, away, 30.0, (loads or Loads()).of)
    return "" if found is None else found.id


def test_a_new_model_goes_to_the_trainer_with_the_fewest_models_then_operations() -> None:
    assert chosen(trainer_record("a", 3), trainer_record("b", 2, 9)) == "b"
    assert chosen(trainer_record("a", 2, 9), trainer_record("b", 2, 1)) == "b"
    assert chosen() == ""


def test_a_model_stays_with_its_trainer_and_waits_for_it_for_a_while() -> None:
    both = (trainer_record("a", 9), trainer_record("b"))
    assert chosen(*both, placed="a") == "a"
    assert chosen(both[1], placed="a", away=29) == ""
    assert chosen(both[1], placed="a", away=31) == "b"


def test_what_was_placed_since_a_trainer_spoke_counts_until_it_speaks_again() -> None:
    loads = Loads()
    both = [trainer_record("a", 1), trainer_record("b", 2)]
    placed = []
    for _ in range(5):
        placed.append(chosen(*both, loads=loads))
        loads.note(next(record for record in both if record.id == placed[-1]), both)
    assert placed == ["a", "a", "b", "a", "b"]
    both[0] = trainer_record("a", 4)
    assert loads.of(both[0]) == (4, 0)
    loads.note(both[0], both[:1])
    assert len(loads._placed) == 1, "what is gone is forgotten"


def model(number: int) -> str:
    return ids.model_id("s", number)


@asynccontextmanager
async def two_trainers(
    client: redis.asyncio.Redis,
) -> AsyncIterator[tuple[dict[str, ScriptedTrainer], dict[str, Running]]]:
    """Two on one disk."""
    disk: dict[str, tuple[int, list[int]]] = {}
    trainers = {name: ScriptedTrainer(Journal(client), disk) for name in ("trainer-0", "trainer-1")}
    async with (
        serving(client, trainers["trainer-0"], "trainer-0") as first,
        serving(client, trainers["trainer-1"], "trainer-1") as second,
    ):
        yield trainers, {"trainer-0": first, "trainer-1": second}


async def created(gateway: Gateway, number: int) -> None:
    operation = create()
    operation.model_id = model(number)
    await gateway.accept(operation)
    view = await gateway.futures.wait(ids.request_id(model(number), 0), 10)
    assert view.state == "done"


async def stepped(gateway: Gateway, number: int, seq_id: int) -> None:
    operation = step(seq_id)
    operation.model_id = model(number)
    await gateway.accept(operation)
    view = await gateway.futures.wait(ids.request_id(model(number), seq_id), 10)
    assert view.state == "done"


def where(trainers: dict[str, ScriptedTrainer], number: int) -> list[str]:
    """The trainers that executed anything of a model."""
    return [
        name
        for name, trainer in trainers.items()
        if any(model_id == model(number) for model_id, _ in trainer.executed)
    ]


async def test_models_are_spread_and_stay_where_they_are_whoever_leads_them(
    redis_client: redis.asyncio.Redis, gateway_on: GatewayFactory
) -> None:
    async with two_trainers(redis_client) as (trainers, _):
        async with started(redis_client, "gateway-0", SETTINGS, 6.0) as gateway:
            for number in range(6):
                await created(gateway, number)
        homes = [where(trainers, number) for number in range(6)]
        assert sorted(map(tuple, homes)) == [("trainer-0",)] * 3 + [("trainer-1",)] * 3
        # Another gateway, with other ideas of who has how much to do.
        other = await gateway_on("gateway-1", SETTINGS)
        for number in range(6):
            await stepped(other, number, 1)
        assert [where(trainers, number) for number in range(6)] == homes


async def test_a_model_moves_when_its_trainer_stays_away_and_then_stays_there(
    redis_client: redis.asyncio.Redis, gateway_on: GatewayFactory
) -> None:
    async with two_trainers(redis_client) as (trainers, running):
        gateway = await gateway_on("gateway-0", SETTINGS)
        await created(gateway, 0)
        (home,) = where(trainers, 0)
        (other,) = set(trainers) - {home}
        await running[home].kill()
        await gateway.discovery.refresh()
        began = asyncio.get_running_loop().time()
        await stepped(gateway, 0, 1)
        assert asyncio.get_running_loop().time() - began > 0.4
        assert trainers[other].models[model(0)].effects == [0, 1]
        back = ScriptedTrainer(Journal(redis_client), trainers[home].disk)
        async with serving(redis_client, back, home):
            await gateway.discovery.refresh()
            await stepped(gateway, 0, 2)
        assert back.executed == []
        assert trainers[other].models[model(0)].effects == [0, 1, 2]


async def test_a_copy_of_a_model_that_moved_away_and_back_is_dropped_first(
    redis_client: redis.asyncio.Redis, gateway_on: GatewayFactory
) -> None:
    async with two_trainers(redis_client) as (trainers, running):
        gateway = await gateway_on("gateway-0", SETTINGS)
        await created(gateway, 0)
        (home,) = where(trainers, 0)
        (other,) = set(trainers) - {home}
        await stepped(gateway, 0, 1)
        cut_off = trainers[home]
        # It lives on, with all that it has, and nobody hears of it.
        await running[home].unannounce()
        await gateway.discovery.refresh()
        await stepped(gateway, 0, 2)
        assert (await gateway.journal.index(model(0), -1)).trainer == other
        await running[other].kill()
        await running[home].announce()
        await gateway.discovery.refresh()
        await stepped(gateway, 0, 3)
        assert cut_off.dropped == [model(0)]
        assert cut_off.models[model(0)].effects == [0, 1, 2, 3]

"""Weights are replaced with the engine at rest, and what enters it has the name of those that compute it."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace
from typing import Any

import pytest

from services.common.contract.errors import Internal, Unavailable
from services.common.process.tasks import cancel_all
from services.sampler.engine.calls.workers import NotStarted, Unfinished
from services.sampler.engine.runs import Runs
from services.sampler.engine.shifts import full_front
from services.sampler.engine.shifts.full_core import UPDATE
from services.sampler.engine.shifts.full_front import ModelWeights
from services.sampler.engine.snapshot_key import Adapter, SnapshotKey

OLD, NEW = SnapshotKey("model", 1), SnapshotKey("model", 2)


class Engine:
    """Records what it is told; its workers fail when they are to."""

    def __init__(self) -> None:
        self.told: list[str] = []
        self.sent: list[tuple[Any, ...]] = []
        self.failure: Exception | None = None
        self.deaf = self.dead = self.rests = False
        self.runs = Runs(SimpleNamespace(request_states={}, external_req_ids={}))
        llm = SimpleNamespace(
            pause_generation=self.pause, resume_generation=self.resume, engine_core=SimpleNamespace()
        )
        llm.engine_core.call_utility_async = self.call
        workers: Any = SimpleNamespace(run=self.run)
        self.weights = ModelWeights(llm, workers, self.runs, lambda: self.dead)

    async def pause(self, mode: str, clear_cache: bool) -> None:
        assert not clear_cache
        await asyncio.sleep(0)
        self.told.append(mode)

    async def resume(self) -> None:
        if self.rests:
            await asyncio.Event().wait()
        self.told.append("on")

    async def run(self, method: str, arguments: tuple[Any, ...], seconds: float) -> None:
        assert self.weights.at_rest
        await asyncio.sleep(0)
        if self.failure is not None:
            raise self.failure
        self.told.append(method)

    async def call(self, *arguments: Any) -> None:
        # vLLM sends before it waits.
        self.sent.append(arguments)
        await asyncio.sleep(0)
        if self.deaf:
            raise RuntimeError("it does not answer")
        self.told.append(arguments[0])


@pytest.fixture
async def engine() -> Engine:
    engine = Engine()
    await engine.weights.swap(OLD, "/old", 5)
    engine.told.clear()
    return engine


async def test_weights_are_swapped_when_nothing_runs_and_looked_at_while_what_runs_stands_still(
    engine: Engine,
) -> None:
    await engine.weights.check("/new", 5)
    await engine.weights.swap(NEW, "/new", 5)
    assert engine.told == ["keep", "tinsmith_check", "on", "wait", "tinsmith_swap", "on"]
    assert (engine.weights.present, engine.weights.at_rest) == (NEW, False)


async def test_an_update_is_told_to_the_core_before_the_engine_goes_on(engine: Engine) -> None:
    run = engine.runs.begin("a")
    run.take(None, OLD.version)
    await engine.weights.update(NEW, "/new", 5)
    assert engine.told == ["keep", "tinsmith_swap", UPDATE, "on"]
    assert engine.sent == [(UPDATE, "model@1", "model@2", 2)]
    assert (engine.weights.present, run.version, run.version_told(2)) == (NEW, 2, 2)
    assert not engine.weights.at_rest


async def test_no_request_enters_under_the_new_name_before_the_core_is_told_nor_under_the_old_one_after_it(
    engine: Engine,
) -> None:
    seen = set()

    async def entering() -> None:
        while True:
            seen.add((engine.weights.present, bool(engine.sent)))
            await asyncio.sleep(0)

    enters = asyncio.create_task(entering())
    await engine.weights.update(NEW, "/new", 5)
    await asyncio.sleep(0)
    await cancel_all([enters])
    assert seen == {(OLD, False), (NEW, True)}


@pytest.mark.parametrize("deaf", [False, True])
async def test_after_an_update_that_broke_off_the_engine_stays_at_rest_until_whole_weights_are_in(
    engine: Engine, deaf: bool
) -> None:
    engine.deaf = deaf
    engine.failure = None if deaf else Internal("cut off")
    with pytest.raises(Internal):
        await engine.weights.update(NEW, "/new", 5)
    assert "on" not in engine.told and engine.weights.at_rest
    engine.failure = None
    await engine.weights.swap(None, None, 5)
    assert engine.told[-3:] == ["wait", "tinsmith_swap", "on"]
    assert (engine.weights.present, engine.weights.at_rest) == (None, False)


async def test_weights_that_are_refused_or_not_swapped_keep_the_engine_from_nothing(engine: Engine) -> None:
    engine.failure = Internal("no")
    with pytest.raises(Internal):
        await engine.weights.check("/new", 5)
    with pytest.raises(Internal):
        await engine.weights.swap(NEW, "/new", 5)
    assert engine.told == ["keep", "on", "wait", "on"]
    assert (engine.weights.present, engine.weights.at_rest) == (OLD, False)


@pytest.mark.parametrize(
    "failure",
    [Unfinished("it did not finish in 5 s"), NotStarted("can't start new thread")],
    ids=["not finished", "not started on one of several"],
)
@pytest.mark.parametrize("what", ["check", "swap", "update"])
async def test_an_engine_whose_workers_may_still_be_at_its_weights_does_not_go_on(
    engine: Engine, what: str, failure: Exception
) -> None:
    engine.failure = failure
    arguments: tuple[Any, ...] = ("/new", 5) if what == "check" else (NEW, "/new", 5)
    with pytest.raises(Unfinished):
        await getattr(engine.weights, what)(*arguments)
    assert "on" not in engine.told
    assert (engine.weights.present, engine.weights.at_rest) == (OLD, True)


async def test_an_engine_that_does_not_say_that_it_goes_on_is_not_taken_for_one_that_does(
    engine: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(full_front, "CALL_S", 0.01)
    engine.rests = True
    with pytest.raises(Unfinished, match="go on"):
        await engine.weights.check("/new", 5)
    assert engine.weights.at_rest


async def test_an_engine_that_died_is_not_told_to_go_on(engine: Engine) -> None:
    engine.deaf = engine.dead = True
    with pytest.raises(Unavailable):
        await engine.weights.update(NEW, "/new", 5)
    assert "on" not in engine.told


def test_what_an_adapter_made_is_told_by_its_id(engine: Engine) -> None:
    run = engine.runs.begin("a")
    run.take(Adapter(7, "a", ""), 3)
    assert run.version_told(7) == 3

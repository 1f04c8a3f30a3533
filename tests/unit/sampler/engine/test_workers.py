"""Calls of vLLM's workers: whose answer is whose, and jobs that take effect everywhere or nowhere."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import AsyncIterator
from typing import Any

import pytest

from services.common.contract.errors import DataLoss, Internal, Unavailable
from services.sampler.engine.calls import workers as module
from services.sampler.engine.calls.reports import Reports
from services.sampler.engine.calls.workers import NotStarted, Unfinished, Workers
from services.sampler.worker.jobs import Outcome, Reporter


class Executor:
    """vLLM's multiprocess executor as far as it matters: calls are carried out one after another, and what
    the workers answer is matched by order. A call with a timeout leaves its answer behind."""

    def __init__(self) -> None:
        self.answers: deque[Any] = deque()
        self.stall = 0.0
        self._turn = asyncio.Lock()

    async def rpc(self, method: str, args: tuple[Any, ...] = (), **options: float) -> list[Any]:
        return await asyncio.shield(asyncio.ensure_future(self._carry_out(method, **options)))

    async def _carry_out(self, method: str, **options: float) -> list[Any]:
        async with self._turn:
            stall, self.stall = self.stall, 0.0
            self.answers.append(method)
            if stall > options.get("timeout", stall):
                await asyncio.sleep(options["timeout"])
                raise TimeoutError(f"RPC call to {method} timed out.")
            await asyncio.sleep(stall)
            return [self.answers.popleft()]


async def test_a_call_that_takes_too_long_does_not_shift_the_answers_of_those_after_it() -> None:
    executor = Executor()
    workers = Workers(executor.rpc, lambda: False, Reports(1), seconds=0.1)
    executor.stall = 0.15
    with pytest.raises(Unfinished, match="tinsmith_steps"):
        await workers.call("tinsmith_steps")
    assert await workers.call("execute_model") == ["execute_model"]
    assert await workers.call("tinsmith_drop") == ["tinsmith_drop"]


class World:
    """Two workers with jobs; `outcomes` is what each says of one when it starts, None = it still runs."""

    def __init__(self, reporters: list[Reporter]) -> None:
        self.reporters = reporters
        self.outcomes: list[Outcome | None] = [["done"], ["done"]]
        self.finished = [["ok", 3], ["ok", 5]]
        self.calls: list[str] = []
        self.arguments: list[tuple[Any, ...]] = []
        self.dead = False
        self.failure: Exception | None = None

    async def rpc(self, method: str, args: tuple[Any, ...] = ()) -> list[Any]:
        self.calls.append(method)
        self.arguments.append(args)
        if self.failure is not None:
            raise self.failure
        if method in ("tinsmith_load", "tinsmith_receive", "tinsmith_stage"):
            for rank, outcome in enumerate(self.outcomes):
                if outcome is not None:
                    self.reporters[rank].tell(args[0], outcome)
        return self.finished if method == "tinsmith_finish" else [None, None]

    async def until_called(self, *methods: str) -> None:
        """Waits until these were the last calls."""
        async with asyncio.timeout(60):
            while self.calls[-len(methods) :] != list(methods):  # noqa: ASYNC110
                await asyncio.sleep(0.001)


@pytest.fixture
async def reports() -> AsyncIterator[Reports]:
    made = Reports(2)
    yield made
    await made.close()


@pytest.fixture
async def world(reports: Reports) -> World:
    async with reports.listening(60) as path:
        return World([Reporter(path, 0), Reporter(path, 1)])


@pytest.fixture
async def workers(world: World, reports: Reports) -> AsyncIterator[Workers]:
    made = Workers(world.rpc, lambda: world.dead, reports, seconds=0.2)
    yield made
    await made.close()


async def test_a_job_takes_effect_when_all_workers_are_done(world: World, workers: Workers) -> None:
    world.outcomes = [["done"], None]
    running = asyncio.create_task(workers.run("tinsmith_load", (), 5))
    await asyncio.sleep(0.05)
    assert world.calls == ["tinsmith_load"], "nobody is asked whether it is done"
    world.reporters[1].tell(world.arguments[0][0], ["done"])
    assert await running == 8
    assert world.calls == ["tinsmith_load", "tinsmith_finish"]


async def test_a_job_that_is_done_before_its_start_is_answered_is_not_waited_for(
    world: World, workers: Workers
) -> None:
    assert await workers.run("tinsmith_load", (), 5) == 8


async def test_a_job_that_fails_on_one_worker_takes_effect_on_none(world: World, workers: Workers) -> None:
    world.outcomes = [["done"], ["error", "data_loss", "server", "checksum"]]
    with pytest.raises(DataLoss, match="checksum"):
        await workers.run("tinsmith_receive", (), 5)
    await asyncio.sleep(0.01)
    assert world.calls[-1] == "tinsmith_forget"
    assert "tinsmith_finish" not in world.calls


async def test_a_job_that_does_not_start_on_one_of_several_workers_may_go_on_on_others_and_is_forgotten(
    world: World, workers: Workers
) -> None:
    world.failure = Exception("can't start new thread")
    with pytest.raises(NotStarted, match="can't start new thread"):
        await workers.run("tinsmith_check", (), 5)
    world.failure = None
    await world.until_called("tinsmith_forget")


async def test_a_job_that_does_not_start_on_the_only_worker_runs_nowhere() -> None:
    async def fails(*_: Any, **__: Any) -> list[Any]:
        raise RuntimeError("can't start new thread")

    workers = Workers(fails, lambda: False, Reports(1), seconds=0.2)
    with pytest.raises(Internal, match="can't start new thread") as error:
        await workers.run("tinsmith_check", (), 5)
    assert not isinstance(error.value, NotStarted)
    await workers.close()


@pytest.mark.parametrize("end", ["cancelled", "late"])
async def test_a_job_that_nobody_waits_for_any_more_is_forgotten(
    world: World, workers: Workers, end: str
) -> None:
    world.outcomes = [None, None]
    running = asyncio.create_task(workers.run("tinsmith_stage", (), 60 if end == "cancelled" else 0.05))
    await asyncio.sleep(0.02)
    if end == "cancelled":
        running.cancel()
    with pytest.raises(asyncio.CancelledError if end == "cancelled" else Unfinished):
        await running
    await asyncio.sleep(0.01)
    assert world.calls[-1] == "tinsmith_forget"


async def test_a_job_that_could_not_be_forgotten_is_forgotten_later_and_so_is_what_could_not_be_dropped(
    world: World, workers: Workers, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "_AGAIN_S", 0.01)
    world.outcomes = [None, None]
    running = asyncio.create_task(workers.run("tinsmith_stage", (), 60))
    await world.until_called("tinsmith_stage")
    job = world.arguments[0][0]
    world.failure = Exception("the engine is busy")
    running.cancel()
    await world.until_called("tinsmith_forget", "tinsmith_forget", "tinsmith_forget")
    await workers.free("tinsmith_drop", [7])
    await world.until_called("tinsmith_drop", "tinsmith_forget")
    world.failure = None
    before = len(world.calls)
    async with asyncio.timeout(60):
        while len(world.calls) < before + 2:  # noqa: ASYNC110
            await asyncio.sleep(0.001)
    freed = dict(zip(world.calls[before:], world.arguments[before:], strict=True))
    assert freed == {"tinsmith_forget": ([job],), "tinsmith_drop": ([7],)}
    await asyncio.sleep(0.05)
    assert len(world.calls) == before + 2, "once is enough"


async def test_who_waits_for_a_worker_that_ends_is_told_so_and_so_is_who_comes_later(
    world: World, workers: Workers, reports: Reports
) -> None:
    world.outcomes = [["done"], None]
    running = asyncio.create_task(workers.run("tinsmith_load", (), 60))
    await world.until_called("tinsmith_load")
    world.reporters.pop()
    with pytest.raises(Unavailable, match="restarting"):
        await running
    assert reports.broken
    world.outcomes = [None]
    with pytest.raises(Unavailable, match="restarting"):
        await workers.run("tinsmith_load", (), 60)


async def test_a_method_that_fails_is_an_internal_error_and_one_of_a_dead_engine_unavailable(
    world: World, workers: Workers
) -> None:
    world.failure = Exception("KeyError: 'job'")
    with pytest.raises(Internal, match="tinsmith_steps failed on a worker: KeyError"):
        await workers.call("tinsmith_steps")
    world.dead = True
    with pytest.raises(Unavailable, match="restarting"):
        await workers.call("tinsmith_steps")

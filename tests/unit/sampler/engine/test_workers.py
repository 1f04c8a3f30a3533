"""Calls of vLLM's workers: whose answer is whose, and jobs that take effect everywhere or nowhere."""

from __future__ import annotations

import asyncio
from collections import deque
from typing import Any

import pytest

from services.common.contract.errors import DataLoss, DeadlineExceeded, Internal, Unavailable
from services.sampler.engine.workers import Workers


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
    workers = Workers(executor.rpc, lambda: False, seconds=0.1)
    executor.stall = 0.15
    with pytest.raises(DeadlineExceeded, match="tinsmith_steps"):
        await workers.call("tinsmith_steps")
    assert await workers.call("execute_model") == ["execute_model"]
    assert await workers.call("tinsmith_drop") == ["tinsmith_drop"]


class World:
    """Two workers with jobs; `outcomes` is what each says of a job, None = it still runs."""

    def __init__(self) -> None:
        self.outcomes: list[Any] = [["done"], ["done"]]
        self.finished = [["ok", 3], ["ok", 5]]
        self.calls: list[str] = []
        self.dead = False
        self.failure: Exception | None = None

    async def rpc(self, method: str, args: tuple[Any, ...] = ()) -> list[Any]:
        self.calls.append(method)
        if self.failure is not None:
            raise self.failure
        if method == "tinsmith_poll":
            return list(self.outcomes)
        return self.finished if method == "tinsmith_finish" else [None, None]


@pytest.fixture
def world() -> World:
    return World()


@pytest.fixture
def workers(world: World) -> Workers:
    return Workers(world.rpc, lambda: world.dead, seconds=0.2)


async def test_a_job_takes_effect_when_all_workers_are_done(world: World, workers: Workers) -> None:
    world.outcomes = [["done"], None]
    running = asyncio.create_task(workers.run("tinsmith_load", (), 5))
    await asyncio.sleep(0.05)
    assert "tinsmith_finish" not in world.calls
    world.outcomes = [["done"], ["done"]]
    assert await running == 5
    assert "tinsmith_forget" not in world.calls


async def test_a_job_that_fails_on_one_worker_takes_effect_on_none(world: World, workers: Workers) -> None:
    world.outcomes = [["done"], ["error", "data_loss", "server", "checksum"]]
    with pytest.raises(DataLoss, match="checksum"):
        await workers.run("tinsmith_receive", (), 5)
    await asyncio.sleep(0.01)
    assert world.calls[-1] == "tinsmith_forget"
    assert "tinsmith_finish" not in world.calls


@pytest.mark.parametrize("end", ["cancelled", "late"])
async def test_a_job_that_nobody_waits_for_any_more_is_forgotten(
    world: World, workers: Workers, end: str
) -> None:
    world.outcomes = [None, None]
    running = asyncio.create_task(workers.run("tinsmith_stage", (), 60 if end == "cancelled" else 0.05))
    await asyncio.sleep(0.02)
    if end == "cancelled":
        running.cancel()
    with pytest.raises(asyncio.CancelledError if end == "cancelled" else DeadlineExceeded):
        await running
    await asyncio.sleep(0.01)
    assert world.calls[-1] == "tinsmith_forget"


async def test_a_method_that_fails_is_an_internal_error_and_one_of_a_dead_engine_unavailable(
    world: World, workers: Workers
) -> None:
    world.failure = Exception("KeyError: 'job'")
    with pytest.raises(Internal, match="tinsmith_steps failed on a worker: KeyError"):
        await workers.call("tinsmith_steps")
    world.dead = True
    with pytest.raises(Unavailable, match="restarting"):
        await workers.call("tinsmith_steps")

"""Newer weights of a full model that take the place of those that requests run on."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path

import pytest

from services.common.contract.errors import Internal, InvalidRequest, SnapshotNotFound, Unavailable
from services.common.storage.data_dir import DataDir
from services.sampler.engine.calls.workers import Unfinished
from services.sampler.engine.snapshot_key import SnapshotKey, Weights
from services.sampler.snapshots.full_snapshots import GivenUp
from services.sampler.snapshots.held import Held
from services.sampler.snapshots.snapshots import Snapshots
from tests.unit.sampler.snapshots.recorded import Engine

OLD, NEW, NEWEST = (SnapshotKey("session:train:1", version) for version in (1, 2, 3))
BASE = "the base model's weights did not come back"


@pytest.fixture(autouse=True)
def stored(tmp_path: Path) -> None:
    for key in (OLD, NEW, NEWEST):
        directory = DataDir(tmp_path).snapshot(key.model_id, key.version)
        directory.mkdir(parents=True)
        (directory / "config.json").write_text("{}")


class Request:
    """Runs on a full model until it is told to end, and goes on with newer weights when it is told to."""

    def __init__(self, snapshots: Snapshots, key: SnapshotKey) -> None:
        self._snapshots, self._key = snapshots, key
        self._end = asyncio.Event()
        self._held = Held()
        self.runs = False
        self.task = asyncio.create_task(self._run())

    async def _run(self) -> None:
        async with self._snapshots.use(self._key) as self._held:
            self.runs = True
            try:
                await self._end.wait()
            finally:
                self.runs = False

    async def change(self, key: SnapshotKey) -> Weights:
        """Whose weights are in the engine when it has gone on with them."""
        async with within(f"{key} did not come under what runs on {self._key}"):
            await self._snapshots.update(self._held, key)
        return self._snapshots.weights

    async def end(self) -> None:
        self._end.set()
        async with within(f"a request on {self._key} did not end"):
            await self.task


@asynccontextmanager
async def within(otherwise: str) -> AsyncIterator[None]:
    """Fails with these words where something does not come: a decision that nobody took never does."""
    try:
        async with asyncio.timeout(10):
            yield
    except TimeoutError:
        pytest.fail(otherwise)


async def until(there: Callable[[], bool], otherwise: str) -> None:
    async with within(otherwise):
        while not there():  # noqa: ASYNC110
            await asyncio.sleep(0)


async def running(snapshots: Snapshots, *keys: SnapshotKey) -> list[Request]:
    requests = [Request(snapshots, key) for key in keys]
    await until(lambda: all(request.runs for request in requests), "requests were not let in")
    return requests


async def test_the_weights_of_all_that_runs_are_replaced_under_it(
    engine: Engine, snapshots: Snapshots, tmp_path: Path
) -> None:
    requests = await running(snapshots, OLD, OLD)
    changes = [asyncio.create_task(request.change(NEW)) for request in requests]
    assert await asyncio.gather(*changes) == [NEW, NEW]
    source = str(DataDir(tmp_path).snapshot(NEW.model_id, NEW.version))
    assert (engine.updates, engine.checks[-1]) == ([(NEW, source)], source)
    assert [weights for weights, _ in engine.swaps] == [OLD]
    assert all(request.runs for request in requests)
    assert snapshots.newer(OLD) == 1
    for request in requests:
        await request.end()
    async with snapshots.use(NEW):
        assert len(engine.swaps) == 1, "they are in the engine as if they had been put there"


async def test_a_request_that_is_to_end_on_its_weights_does_so_before_they_are_replaced(
    engine: Engine, snapshots: Snapshots
) -> None:
    moves, stays = await running(snapshots, OLD, OLD)
    change = asyncio.create_task(moves.change(NEW))
    await asyncio.sleep(0.05)
    assert (engine.updates, change.done(), moves.runs) == ([], False, True)
    await stays.end()
    assert await change == NEW
    await moves.end()


async def test_one_that_asks_for_newer_weights_still_is_not_given_those_that_it_asked_for_before(
    engine: Engine, snapshots: Snapshots
) -> None:
    moves, stays = await running(snapshots, OLD, OLD)
    change = asyncio.create_task(moves.change(NEW))
    await asyncio.sleep(0.05)
    change.cancel()
    again = asyncio.create_task(moves.change(NEWEST))
    await asyncio.sleep(0.05)
    await stays.end()
    assert await again == NEWEST
    assert [weights for weights, _ in engine.updates] == [NEWEST]
    await moves.end()


@pytest.mark.parametrize("error", [InvalidRequest("they do not fit"), SnapshotNotFound("not whole")])
async def test_newer_weights_that_are_refused_leave_what_runs_as_it_is(
    engine: Engine, snapshots: Snapshots, error: Exception
) -> None:
    (request,) = await running(snapshots, OLD)
    engine.unfit = error
    with pytest.raises(type(error)):
        await request.change(NEW)
    if isinstance(error, InvalidRequest):
        with pytest.raises(InvalidRequest, match="do not fit"):
            await request.change(NEW)
    assert (len(engine.checks), engine.updates) == (2, []), "what is known to be refused costs no second look"
    engine.unfit = None
    assert (request.runs, await request.change(NEWEST)) == (True, NEWEST)
    await request.end()


async def test_newer_weights_that_are_not_there_stop_nothing(
    engine: Engine, snapshots: Snapshots, tmp_path: Path
) -> None:
    (request,) = await running(snapshots, OLD)
    (DataDir(tmp_path).snapshot(NEW.model_id, NEW.version) / "config.json").unlink()
    with pytest.raises(SnapshotNotFound):
        await request.change(NEW)
    assert len(engine.checks) == 1
    await request.end()


async def test_an_update_that_breaks_off_ends_all_that_ran_and_then_the_base_weights_come_back(
    engine: Engine, snapshots: Snapshots
) -> None:
    requests = await running(snapshots, OLD, OLD)
    waits = Request(snapshots, NEW)
    await until(lambda: snapshots.waiting == 1, "a request for newer weights does not wait for them")
    engine.update_failures = [Internal("cut off")]
    changes = [asyncio.create_task(request.change(NEW)) for request in requests]
    for request in requests:
        with pytest.raises(Unavailable, match="send it again"):
            await request.task
        assert not request.runs
    with pytest.raises(Internal, match="cut off"):
        await waits.task
    await until(lambda: len(engine.swaps) == 2, BASE)
    assert engine.swaps[1] == (None, None)
    async with snapshots.use(None):
        assert (snapshots.weights, len(engine.swaps)) == (None, 2)
    for change in changes:
        change.cancel()
    await asyncio.gather(*changes, return_exceptions=True)


@pytest.mark.parametrize("what", ["looked at", "put in"])
async def test_all_that_ran_ends_where_the_workers_were_given_up_at_newer_weights(
    engine: Engine, snapshots: Snapshots, what: str
) -> None:
    request, other = await running(snapshots, OLD, OLD)
    gave_up = Unfinished("it did not finish")
    engine.unfit = gave_up if what == "looked at" else None
    engine.update_failures = [gave_up] if what == "put in" else []
    changes = [asyncio.create_task(each.change(key)) for each, key in ((other, NEW), (request, NEWEST))]
    with pytest.raises(GivenUp, match="did not finish"):
        await request.task
    with pytest.raises(Unavailable, match="send it again"):
        await other.task
    with pytest.raises(Unavailable, match="another sampler"):
        async with snapshots.use(OLD):
            pytest.fail("they are not sound")
    assert len(engine.swaps) == 1, "the base weights do not come into an engine that is still changed"
    for change in changes:
        change.cancel()
    await asyncio.gather(*changes, return_exceptions=True)


async def test_the_base_weights_do_not_come_while_one_of_those_that_are_to_end_still_runs(
    engine: Engine, snapshots: Snapshots
) -> None:
    left = asyncio.Event()

    async def slow() -> None:
        async with snapshots.use(OLD) as held:
            try:
                await snapshots.update(held, NEW)
                pytest.fail("there are no newer weights")
            finally:
                await left.wait()

    engine.update_failures = [Internal("cut off")]
    task = asyncio.create_task(slow())
    await until(lambda: bool(engine.updates), "newer weights were not put in")
    await asyncio.sleep(0.05)
    assert len(engine.swaps) == 1
    left.set()
    with pytest.raises(Unavailable):
        await task
    await until(lambda: len(engine.swaps) == 2, BASE)

"""Finding the one request that ends the engine among many that do not."""

from __future__ import annotations

import asyncio
import random
from pathlib import Path

import pytest

from services.common.process.crashes import CrashLedger
from services.sampler.requests.suspects import GivenUp, Suspects

TRIAL_S = 0.02


class Replica:
    """One life of a sampler: a culprit ends its engine as soon as it is there, with all that is there."""

    def __init__(self, path: Path, culprit: str) -> None:
        self.ledger = CrashLedger[str](path, str, "sampler")
        self.suspects = Suspects(self.ledger, lambda: self.dead.is_set(), several=4, trial=TRIAL_S)
        self.culprit = culprit
        self.dead = asyncio.Event()
        self.done: set[str] = set()
        self.refused: set[str] = set()
        self.most = 0
        self._inside = 0

    async def run(self, request_id: str, seconds: float) -> None:
        try:
            self.suspects.check(request_id)
        except GivenUp:
            self.refused.add(request_id)
            return
        async with self.suspects.turn(request_id):
            with self.suspects.executing(request_id):
                self._inside += 1
                self.most = max(self.most, self._inside)
                if request_id == self.culprit:
                    await asyncio.sleep(0.001)
                    self.dead.set()
                await asyncio.sleep(seconds)
                self._inside -= 1
        self.done.add(request_id)

    async def serve(self, requests: list[str], seconds: float = 0.005) -> None:
        """Until all are answered or the engine is dead."""
        tasks = [asyncio.create_task(self.run(request_id, seconds)) for request_id in requests]
        dead = asyncio.create_task(self.dead.wait())
        everything = asyncio.gather(*tasks, return_exceptions=True)
        await asyncio.wait({dead, everything}, return_when=asyncio.FIRST_COMPLETED)
        for task in (dead, *tasks):
            task.cancel()
        await asyncio.gather(dead, *tasks, return_exceptions=True)


async def test_one_culprit_among_sixty_requests_is_found_and_none_of_the_others_is_refused(
    tmp_path: Path,
) -> None:
    chance = random.Random(3)
    left = {f"request {number}" for number in range(60)}
    culprit = "request 17"
    deaths = 0
    refused: set[str] = set()
    async with asyncio.timeout(60):
        while left:
            replica = Replica(tmp_path / "ledger", culprit)
            await replica.serve(chance.sample(sorted(left), len(left)))
            deaths += replica.dead.is_set()
            refused |= replica.refused
            left -= replica.done | replica.refused
    assert (refused, deaths) == ({culprit}, 3)


@pytest.mark.parametrize(("deaths", "at_once"), [(0, 8), (1, 4), (2, 1)])
async def test_suspects_are_let_in_few_at_a_time_and_the_oldest_ones_one_by_one(
    tmp_path: Path, deaths: int, at_once: int
) -> None:
    requests = [f"request {number}" for number in range(8)]
    for _ in range(deaths):
        CrashLedger[str](tmp_path / "ledger", str, "sampler").begin(requests)
    replica = Replica(tmp_path / "ledger", culprit="none")
    await replica.serve(requests)
    assert (replica.most, len(replica.done)) == (at_once, 8)


async def test_a_suspect_that_does_no_harm_for_a_while_makes_room_and_is_not_blamed_with_the_next(
    tmp_path: Path,
) -> None:
    for _ in range(2):
        CrashLedger[str](tmp_path / "ledger", str, "sampler").begin(["long", "culprit"])
    replica = Replica(tmp_path / "ledger", culprit="culprit")
    await replica.serve(["long", "culprit"], seconds=10 * TRIAL_S)
    assert replica.dead.is_set() and not replica.done
    after = CrashLedger[str](tmp_path / "ledger", str, "sampler")
    assert (after.deaths("long"), after.deaths("culprit")) == (2, 3)


async def test_who_gives_up_while_it_waits_for_its_trial_keeps_nobody_out(tmp_path: Path) -> None:
    requests = ["first", "second", "third"]
    for _ in range(2):
        CrashLedger[str](tmp_path / "ledger", str, "sampler").begin(requests)
    replica = Replica(tmp_path / "ledger", culprit="none")
    first = asyncio.create_task(replica.run("first", 0.01))
    second = asyncio.create_task(replica.run("second", 0.01))
    await asyncio.sleep(0)
    second.cancel()
    await first
    await replica.run("third", 0.01)
    assert replica.done == {"first", "third"}


async def test_what_ends_in_one_turn_of_the_loop_is_written_down_together_and_not_blamed_later(
    tmp_path: Path,
) -> None:
    path = tmp_path / "ledger"
    suspects = Suspects(CrashLedger[str](path, str, "sampler"), lambda: False)
    over = asyncio.Event()

    async def run(request_id: str) -> None:
        with suspects.executing(request_id):
            await over.wait()

    async with asyncio.TaskGroup() as running:
        for number in range(10):
            running.create_task(run(f"s:{number}"))
        await asyncio.sleep(0)
        begun = len(path.read_bytes().splitlines())
        over.set()
    await asyncio.sleep(0)
    assert len(path.read_bytes().splitlines()) == begun + 1
    assert not any(CrashLedger[str](path, str, "sampler").is_suspect(f"s:{number}") for number in range(10))

"""Samples that are moved to newer weights or ended, with what the engine answers when it is interrupted."""

from __future__ import annotations

import asyncio
import dataclasses

import pytest

from services.common.contract.errors import Internal, SnapshotNotFound
from services.sampler.engine.calls.workers import Unfinished
from services.sampler.engine.snapshot_key import SnapshotKey
from services.sampler.snapshots.full_snapshots import GivenUp
from tests.unit.sampler.requests.moved import JOB, NEW, NEWER, NEWEST, OLD, OTHER, Sampler


async def test_a_moved_sample_leaves_its_weights_and_goes_on_with_the_newer_ones(sampler: Sampler) -> None:
    running = await sampler.begun()
    sampler.move(NEW)
    await sampler.in_engine()
    assert sampler.snapshots.held == 1
    sampler.engine.finish("length")
    assert await sampler.only(running) == ("length", [(1, 1), (2, 1)])


@pytest.mark.parametrize("weights", [OLD, OTHER, None, SnapshotKey("model", 0)])
async def test_only_newer_weights_of_its_own_model_move_a_sample(
    sampler: Sampler, weights: SnapshotKey | None
) -> None:
    running = await sampler.begun()
    sampler.move(weights)
    assert not sampler.engine.turn.is_set()
    sampler.engine.finish("stop")
    assert await sampler.only(running) == ("stop", [(1, 1)])


async def test_a_sample_that_does_not_move_finishes_where_it_is(sampler: Sampler) -> None:
    running = await sampler.begun(dataclasses.replace(JOB, moves=False))
    sampler.move(NEW)
    assert not sampler.engine.turn.is_set()
    sampler.engine.finish("length")
    assert await sampler.only(running) == ("length", [(1, 1)])


async def test_a_sample_that_waits_for_weights_goes_to_the_newer_ones_at_once(sampler: Sampler) -> None:
    sampler.snapshots.opened[OLD].clear()
    running = sampler.start()
    await asyncio.sleep(0)
    assert sampler.admission.waiting == 1
    sampler.move(NEW)
    await sampler.in_engine()
    sampler.engine.finish("length")
    assert await sampler.only(running) == ("length", [(2, 1)])
    assert sampler.snapshots.used == [2]


async def test_a_sample_that_waits_while_newer_weights_come_and_come_gets_a_token_in_between(
    sampler: Sampler,
) -> None:
    sampler.snapshots.opened[NEW].clear()
    sampler.snapshots.opened[NEWER].clear()
    running = await sampler.begun()
    sampler.move(NEW)
    await sampler.left()
    await sampler.move_on(NEWER)
    await sampler.move_on(NEWEST)
    assert sampler.snapshots.used == [1], "it gave up one wait for newer weights, and not a second"
    sampler.snapshots.opened[NEWER].set()
    await sampler.in_engine()
    await sampler.in_engine()
    sampler.engine.finish("length")
    assert await sampler.only(running) == ("length", [(1, 1), (3, 1), (4, 1)])
    assert sampler.engine.at_once == [False, False]


async def test_weights_that_a_sample_waited_for_in_vain_are_passed_over_for_newer_ones(
    sampler: Sampler,
) -> None:
    sampler.snapshots.opened[NEW].clear()
    sampler.snapshots.opened[NEWER].clear()
    running = await sampler.begun()
    sampler.move(NEW)
    await sampler.left()
    await sampler.move_on(NEWER)
    sampler.move(NEWEST)
    sampler.snapshots.missing.add(NEWER)
    sampler.snapshots.opened[NEWER].set()
    await sampler.in_engine()
    sampler.engine.finish("length")
    assert await sampler.only(running) == ("length", [(1, 1), (4, 1)])


async def test_a_sample_goes_on_with_its_own_weights_when_newer_ones_are_not_to_be_had(
    sampler: Sampler,
) -> None:
    sampler.snapshots.missing.add(NEW)
    running = await sampler.begun()
    sampler.move(NEW)
    await sampler.in_engine()
    sampler.engine.finish("length")
    assert await sampler.only(running) == ("length", [(1, 2)])


async def test_a_sample_whose_newer_weights_ended_the_engine_does_not_go_back_to_its_own(
    sampler: Sampler,
) -> None:
    sampler.snapshots.failures[NEW] = GivenUp(NEW, Unfinished("it did not finish"))
    running = await sampler.begun()
    sampler.move(NEW)
    with pytest.raises(GivenUp, match="did not finish"):
        await asyncio.wait_for(running, 10)
    assert sampler.snapshots.used == [OLD.version]


async def test_a_sample_whose_first_weights_are_not_to_be_had_fails_for_that_reason(sampler: Sampler) -> None:
    sampler.snapshots.missing.add(OLD)
    with pytest.raises(SnapshotNotFound):
        await sampler.start()
    assert sampler.admission.taken == 0


async def test_an_ended_sample_is_what_it_has_come_to(sampler: Sampler) -> None:
    running = await sampler.begun()
    sampler.samples.end(JOB.request_id)
    sampler.move(NEW)
    assert await sampler.only(running) == ("cancelled", [(1, 1)])
    assert sampler.engine.at_once == [True]


async def test_an_ended_sample_that_waits_for_newer_weights_is_what_its_old_ones_made(
    sampler: Sampler,
) -> None:
    sampler.snapshots.opened[NEW].clear()
    running = await sampler.begun()
    sampler.move(NEW)
    await sampler.left()
    assert sampler.admission.waiting == 1
    sampler.samples.end(JOB.request_id)
    assert await sampler.only(running) == ("cancelled", [(1, 1)])


async def test_a_sample_that_is_ended_before_it_began_has_no_tokens(sampler: Sampler) -> None:
    sampler.snapshots.opened[OLD].clear()
    running = sampler.start()
    await asyncio.sleep(0)
    sampler.samples.end(JOB.request_id)
    assert await sampler.only(running) == ("cancelled", [])


async def test_a_sequence_that_the_engine_ends_by_itself_is_an_error(sampler: Sampler) -> None:
    running = await sampler.begun()
    sampler.engine.finish("cancelled")
    with pytest.raises(Internal, match="by itself"):
        await running

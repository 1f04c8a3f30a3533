"""Samples that keep their keys and values when newer weights come, without being interrupted."""

from __future__ import annotations

import pytest

from services.common.contract.errors import Internal
from tests.unit.sampler.requests.moved import JOB, KEPT, NEW, NEWER, NEWEST, OLD, Sampler, settled


async def test_a_sample_that_keeps_its_keys_and_values_stays_in_the_engine_and_shifts_to_newer_weights(
    sampler: Sampler,
) -> None:
    running = await sampler.begun(KEPT)
    await sampler.move_on(NEW, OLD, NEWER)
    assert sampler.engine.shifted == [2, 3]
    assert sampler.engine.at_once == [], "nothing is interrupted"
    sampler.engine.finish("length")
    await sampler.only(running)
    assert sampler.snapshots.used == [1, 2, 3]


async def test_a_sample_that_keeps_its_keys_and_values_goes_on_while_it_waits_and_then_to_the_newest(
    sampler: Sampler,
) -> None:
    sampler.snapshots.opened[NEW].clear()
    running = await sampler.begun(KEPT)
    await sampler.move_on(NEW, NEWER, NEWEST)
    assert (sampler.engine.shifted, running.done()) == ([], False)
    sampler.snapshots.opened[NEW].set()
    await settled()
    assert sampler.engine.shifted == [2, 4], "what it waited for, and then the newest"
    sampler.engine.finish("length")
    await sampler.only(running)


async def test_a_sample_that_keeps_its_keys_and_values_passes_over_weights_that_are_not_to_be_had(
    sampler: Sampler,
) -> None:
    sampler.snapshots.missing.add(NEW)
    running = await sampler.begun(KEPT)
    await sampler.move_on(NEW, NEWER)
    assert sampler.engine.shifted == [3]
    sampler.engine.finish("stop")
    assert (await sampler.only(running))[0] == "stop"


async def test_a_shift_that_fails_ends_no_sample_and_is_the_last(
    sampler: Sampler, caplog: pytest.LogCaptureFixture
) -> None:
    sampler.engine.refuses = Internal("it failed in the engine")
    running = await sampler.begun(KEPT)
    await sampler.move_on(NEW, NEWER)
    sampler.engine.finish("length")
    assert (await sampler.only(running))[0] == "length"
    assert "does not move to newer weights: model@2: it failed in the engine" in caplog.text
    assert "model@3" not in caplog.text, "it has some of both, and gets no third"


async def test_a_sample_that_keeps_its_keys_and_values_ends_with_what_it_has_come_to(
    sampler: Sampler,
) -> None:
    running = await sampler.begun(KEPT)
    sampler.snapshots.opened[NEW].clear()
    await sampler.move_on(NEW)
    sampler.samples.end(KEPT.request_id)
    assert await sampler.only(running) == ("cancelled", [(1, 1)])
    assert (sampler.engine.at_once, sampler.engine.shifted) == ([True], [])


async def test_under_a_sample_of_all_weights_of_a_model_these_are_replaced_and_the_engine_shifts_nothing(
    sampler: Sampler,
) -> None:
    sampler.snapshots.adapters = False
    running = await sampler.begun(KEPT)
    await sampler.move_on(NEW, NEWER)
    assert (sampler.engine.shifted, sampler.engine.at_once) == ([], [])
    sampler.engine.finish("length")
    await sampler.only(running)
    assert sampler.snapshots.used == [1, 2, 3]


async def test_a_sample_that_waits_for_all_weights_of_a_model_is_given_the_newest_that_have_come_meanwhile(
    sampler: Sampler,
) -> None:
    sampler.snapshots.adapters = False
    sampler.snapshots.opened[NEW].clear()
    running = await sampler.begun(KEPT)
    await sampler.move_on(NEW, NEWER)
    sampler.engine.finish("length")
    await sampler.only(running)
    assert sampler.snapshots.used == [1, 3]


async def test_a_sample_whose_weights_are_said_to_be_there_and_are_waited_for_all_the_same_can_be_ended(
    sampler: Sampler,
) -> None:
    sampler.snapshots.opened[OLD].clear()
    sampler.snapshots.ready = True
    running = sampler.start()
    await settled()
    sampler.samples.end(JOB.request_id)
    assert await sampler.only(running) == ("cancelled", [])

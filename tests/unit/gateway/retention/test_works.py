"""Things that retention does, of which some fail again and again."""

from __future__ import annotations

import pytest

from services.common.contract.errors import Unavailable
from services.gateway.retention.works import Works


async def test_however_often_a_thing_fails_the_log_has_the_first_time_and_the_end(
    caplog: pytest.LogCaptureFixture,
) -> None:
    caplog.set_level("INFO")
    works, tries = Works(at_once=2, patience=60, first_rest=1, most_rest=10), 0

    async def work() -> bool:
        nonlocal tries
        tries += 1
        if tries <= 3:
            raise Unavailable("the trainer is away")
        return True

    for now in range(0, 400, 100):
        await works.do(now, {"one": work})
    assert caplog.messages == [
        "what nobody uses is not let go of yet: one: the trainer is away",
        "what nobody uses is not let go of yet: no more of one, after 3 failures",
    ]


async def test_a_mistake_of_the_program_is_said_with_its_place_once(
    caplog: pytest.LogCaptureFixture,
) -> None:
    works = Works(at_once=2, patience=60, first_rest=1, most_rest=10)

    async def work() -> bool:
        raise ZeroDivisionError("by nothing")

    for now in (0, 100, 200):
        await works.do(now, {"one": work})
    assert caplog.text.count("Traceback") == 1

"""A shift is asked for until it is done, however long the engine takes to answer."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace
from typing import Any

import pytest

from services.common.contract.errors import Unavailable
from services.sampler.engine.runs import Run
from services.sampler.engine.shifts import front
from services.sampler.engine.shifts.front import Shifts
from services.sampler.engine.snapshot_key import Adapter

NEWER = Adapter(2, "a@2", "")


class Core:
    """Answers from its `slow`-th call on; `dead`: not at all, and that with an error."""

    def __init__(self, slow: int) -> None:
        self.slow = slow
        self.calls = 0
        self.dead = False

    async def call_utility_async(self, method: str, ids: list[str], *adapter: Any) -> list[str]:
        self.calls += 1
        if self.calls <= self.slow:
            await asyncio.Event().wait()
        if self.dead:
            raise RuntimeError("EngineCore died")
        return ids


def shifting(core: Core) -> tuple[Shifts, Run]:
    processor = SimpleNamespace(
        external_req_ids={"one": ["one-x"]}, request_states={}, process_outputs=lambda outputs: None
    )
    run = Run()
    run.names.add("one")
    llm = SimpleNamespace(engine_core=core, output_processor=processor)
    return Shifts(llm, lambda: core.dead), run


async def test_an_engine_that_does_not_answer_in_time_is_asked_again(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(front, "CALL_S", 0.01)
    core = Core(slow=3)
    shifts, run = shifting(core)
    await shifts.shift(run, NEWER, 2)
    assert core.calls == 4
    assert run.version_of == {2: 2}
    assert len(caplog.messages) == 1


async def test_an_engine_that_has_ended_is_not_asked_again() -> None:
    core = Core(slow=0)
    core.dead = True
    shifts, run = shifting(core)
    with pytest.raises(Unavailable):
        await shifts.shift(run, NEWER, 2)
    assert core.calls == 1

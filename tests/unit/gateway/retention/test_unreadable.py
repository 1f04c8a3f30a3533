"""A record that cannot be read stops no sweep, and nothing else."""

from __future__ import annotations

import time

from services.common.state import keys
from services.gateway.retention.forget import Forgetting
from tests.unit.gateway.retention.stage import Stage


async def unreadable(stage: Stage, session_id: str) -> None:
    await stage.redis.hset(keys.session(session_id), "record", "{}")


async def met(stage: Stage) -> list[str]:
    await stage.stores.poison.write()
    return [one.name for one in await stage.stores.poison.listed()]


async def test_others_are_parked_beside_a_session_that_cannot_be_read(stage: Stage) -> None:
    broken, whole = await stage.session(), await stage.session()
    model_id = await stage.model(whole)
    await unreadable(stage, broken)
    await stage.sweep(later=200)
    assert stage.trainer.parked == [model_id]
    assert await met(stage) == [keys.session(broken)]


async def test_others_are_taken_down_beside_a_model_whose_session_cannot_be_read(stage: Stage) -> None:
    broken, whole = await stage.session(), await stage.session()
    models = [await stage.model(session_id) for session_id in (broken, whole)]
    for session_id in (broken, whole):
        await stage.sessions.finish("ann", session_id, "success", "")
    await unreadable(stage, broken)
    await stage.sweep(later=3)
    await stage.sweep(later=9)
    assert models[1] not in stage.trainer.disk
    assert models[0] in stage.trainer.disk
    assert await met(stage) == [keys.session(broken)]


async def test_others_are_forgotten_beside_a_session_that_cannot_be_read(stage: Stage) -> None:
    broken, whole = await stage.session(), await stage.session()
    for session_id in (broken, whole):
        await stage.sessions.finish("ann", session_id, "success", "")
    await unreadable(stage, broken)
    await Forgetting(stage.redis, stage.stores, "gateway-0", forget_after=10).sweep(time.time() + 100)
    assert await stage.redis.exists(keys.session(whole)) == 0
    assert await met(stage) == [keys.session(broken)]

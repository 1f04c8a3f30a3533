"""Pages of training runs: what is on them, and what one costs."""

from __future__ import annotations

import time

import redis.asyncio

from services.common.contract import ids
from services.common.state.redis_client import connect
from services.gateway.access.limits import Limits
from services.gateway.records.model import ModelRecord
from services.gateway.records.session import SessionRecord
from services.gateway.records.stores import Stores
from services.gateway.training.runs import Runs


async def made(stores: Stores, session_id: str, models: int, project_id: str = "") -> list[str]:
    """A session with so many models; their ids, newest first."""
    now = time.time()
    session = SessionRecord(
        session_id=session_id, owner="ann", created_at=now, last_heartbeat=now, project_id=project_id
    )
    await stores.sessions.create(session)
    for number in range(models):
        await stores.models.create_if_absent(
            ModelRecord(
                model_id=ids.model_id(session_id, number),
                session_id=session_id,
                owner="ann",
                base_model="org/tiny",
                lora_rank=4,
                created_at=time.time(),
                status="ready",
            )
        )
    return [ids.model_id(session_id, number) for number in reversed(range(models))]


def runs_of(stores: Stores) -> Runs:
    return Runs(stores.models, stores.sessions, stores.checkpoints, Limits())


async def connections(client: redis.asyncio.Redis) -> int:
    return (await client.info("clients"))["connected_clients"]


async def test_the_longest_page_leaves_others_their_connections(
    redis_client: redis.asyncio.Redis, redis_url: str
) -> None:
    models = await made(Stores.over(redis_client), "s", 1000)
    before = await connections(redis_client)
    client = connect(redis_url)
    try:
        page = await runs_of(Stores.over(client)).page("ann", 0, 1000)
        used = await connections(redis_client) - before
    finally:
        await client.aclose()
    assert (page.total, [run.model.model_id for run in page.runs]) == (1000, models)
    assert used <= 40


async def test_pages_of_a_project_go_through_all_its_runs(redis_client: redis.asyncio.Redis) -> None:
    stores = Stores.over(redis_client)
    sizes = (3, 0, 1, 5, 0, 2)
    every: list[str] = []
    for number, size in enumerate(sizes):
        every = [*await made(stores, f"s{number}", size, "p"), *every]
    await made(stores, "another", 4)
    runs = runs_of(stores)
    for offset in range(len(every) + 2):
        for limit in range(len(every) + 2):
            page = await runs.page("ann", offset, limit, "p")
            assert page.total == len(every)
            assert [run.model.model_id for run in page.runs] == every[offset : offset + limit]

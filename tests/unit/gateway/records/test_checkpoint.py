"""Records of named checkpoints."""

from __future__ import annotations

import msgspec
import pytest
import redis.asyncio

from services.common.contract.errors import TooLarge
from services.common.state import keys
from services.common.state.poison import Poison
from services.gateway.records import checkpoint as records
from services.gateway.records.checkpoint import CheckpointRecord, CheckpointStore

MANY = 2000


def record(number: int, note: str = "") -> CheckpointRecord:
    return CheckpointRecord(
        model_id="session:train:0",
        checkpoint_id=f"weights/{number}",
        owner="ann",
        kind="training",
        version=number,
        size_bytes=1,
        created_at=1.0,
        user_metadata={"note": note},
        base_model="org/base",
        lora_rank=8,
    )


async def stored(client: redis.asyncio.Redis, *made: CheckpointRecord) -> CheckpointStore:
    fields = {one.checkpoint_id: msgspec.json.encode(one) for one in made}
    await client.hset(keys.checkpoints("session:train:0"), mapping=fields)
    return CheckpointStore(client, Poison(client))


async def test_all_of_a_model_come_oldest_first_and_are_read_in_parts(any_redis: redis.asyncio.Redis) -> None:
    made = [record(number) for number in range(MANY)]
    store = await stored(any_redis, *reversed(made))
    await any_redis.config_resetstat()
    assert await store.of_model("session:train:0") == made
    commands = await any_redis.info("commandstats")
    assert sum(row["calls"] for row in commands.values()) > MANY / 1000


async def test_what_is_too_much_for_one_answer_is_refused_and_can_still_be_gone_through(
    any_redis: redis.asyncio.Redis, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(records, "_MOST_CHARS", 50_000)
    store = await stored(any_redis, *(record(number, "x" * 10_000) for number in range(6)))
    with pytest.raises(TooLarge, match=r"more than 50000 characters.*by pages"):
        await store.of_model("session:train:0")
    assert len([one async for one in store.each_of_model("session:train:0")]) == 6
    assert await store.any_of_model("session:train:0")

"""`tinsmith status` says what API keys may have, and what they have."""

from __future__ import annotations

from pathlib import Path

import redis.asyncio

from services.common.state import keys
from services.common.state.registry import Announcer, ServiceRecord
from services.common.storage.data_dir import DataDir
from services.launcher import status, usage


async def test_status_tells_the_limits_of_gateways_and_what_each_owner_has(
    redis_client: redis.asyncio.Redis, redis_url: str, tmp_path: Path
) -> None:
    for name in ("gateway-0", "gateway-1"):
        record = ServiceRecord(
            kind="gateway", id=name, address="h:1", limits={"--max-models": 7}, stalls=3, longest_stall_ms=80
        )
        await Announcer(redis_client, record).start()
    await redis_client.sadd(keys.OWNERS, "ann", "bob")
    await redis_client.zadd(keys.owner_sessions("ann"), {"s1": 1, "s2": 2})
    await redis_client.zadd(keys.owner_models("ann"), {"s1:train:0": 1})
    await redis_client.zadd(keys.owner_checkpoints("ann"), {"v": 1})
    await redis_client.hset(keys.owner_checkpoint_bytes("ann"), mapping={"v": 2**29, "total": 2**29})
    await redis_client.hset(keys.WAITING_OPERATIONS, "ann", 5)
    await redis_client.hset(keys.HELD_BYTES, "ann", 2**30)

    report = await status.collect(DataDir(tmp_path), redis_url)
    assert report["limits"] == {"gateway-0": {"--max-models": 7}, "gateway-1": {"--max-models": 7}}
    ann = {"sessions": 2, "models": 1, "checkpoints": 1, "checkpoint_bytes": 2**29}
    ann |= {"waiting_operations": 5, "state_bytes": 2**30, "snapshot_bytes": 0}
    assert report["owners"] == {"ann": ann, "bob": dict.fromkeys(ann, 0)}

    shown = status.show(report)
    assert "limits of gateway-0, gateway-1: --max-models=7" in shown
    assert (
        "ann  2 sessions, 1 models, 1 checkpoints (0.50 GiB), 5 operations that wait, 1.00 GiB in Redis"
    ) in shown
    assert shown.count("its event loop stood still 3 times, for 80 ms at most") == 2


def test_limits_fit_a_terminal_of_100_columns_and_no_flag_is_apart_from_its_value() -> None:
    flags = {f"--a-limit-of-gateways-{number}": 10**number for number in range(12)}
    lines = usage.show({"gateway-0": flags}, {})
    assert len(lines) > 1
    assert max(map(len, lines)) <= 100
    told = " ".join(lines).removeprefix("limits of gateway-0:").split()
    assert sorted(told) == sorted(f"{flag}={value}" for flag, value in flags.items())


async def test_status_tells_how_many_samples_each_gateway_has_not_answered(
    redis_client: redis.asyncio.Redis, redis_url: str, tmp_path: Path
) -> None:
    for name in ("gateway-0", "gateway-1"):
        await Announcer(redis_client, ServiceRecord(kind="gateway", id=name, address="h:1")).start()
    await redis_client.sadd(keys.gateway_samples("gateway-1"), "s:sample:0:1", "s:sample:0:2")
    report = await status.collect(DataDir(tmp_path), redis_url)
    assert {entry["id"]: entry["samples"] for entry in report["services"]} == {"gateway-0": 0, "gateway-1": 2}
    assert status.show(report).count("samples that wait or run") == 1
    assert "gateway-1  ready  h:1\n  samples that wait or run: 2" in status.show(report)


async def test_status_tells_how_full_the_volume_is_and_what_snapshots_take(
    redis_client: redis.asyncio.Redis, redis_url: str, tmp_path: Path
) -> None:
    await redis_client.hset(keys.SNAPSHOT_BYTES, mapping={"ann": 2**30, "bob": 2**29})
    report = await status.collect(DataDir(tmp_path), redis_url)
    assert report["storage"]["snapshot_bytes"] == {"ann": 2**30, "bob": 2**29}
    assert 0 < report["storage"]["free_bytes"] <= report["storage"]["volume_bytes"]
    shown = status.show(report)
    assert "GiB are free; snapshots without a name take 1.50 GiB\n  ann  1.00 GiB\n  bob  0.50 GiB" in shown

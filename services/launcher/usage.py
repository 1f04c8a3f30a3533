"""What API keys may have of a cluster and what they have, for `tinsmith status`."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from redis.asyncio import Redis

from services.common.state import keys
from services.common.state.registry import ServiceRecord

_GIB = 2**30


def limits(records: Iterable[ServiceRecord]) -> dict[str, dict[str, int]]:
    """Limits of each gateway, by their flags."""
    return {record.id: dict(record.limits) for record in records if record.kind == "gateway"}


async def collect(client: Redis) -> dict[str, dict[str, int]]:
    """What each owner has. Bytes are those that the limits count."""
    found: Any = await client.smembers(keys.OWNERS)
    owners = sorted(raw.decode() for raw in found)
    pipeline = client.pipeline(transaction=False)
    for owner in owners:
        pipeline.zcard(keys.owner_sessions(owner))
        pipeline.zcard(keys.owner_models(owner))
        pipeline.zcard(keys.owner_checkpoints(owner))
        pipeline.hget(keys.owner_checkpoint_bytes(owner), "total")
        pipeline.hget(keys.WAITING_OPERATIONS, owner)
        pipeline.hget(keys.HELD_BYTES, owner)
    replies: Any = await pipeline.execute()
    names = ("sessions", "models", "checkpoints", "checkpoint_bytes", "waiting_operations", "state_bytes")
    rows = [replies[start : start + len(names)] for start in range(0, len(replies), len(names))]
    return {
        owner: {name: int(value or 0) for name, value in zip(names, row, strict=True)}
        for owner, row in zip(owners, rows, strict=True)
    }


def show(limited: Mapping[str, Mapping[str, int]], owners: Mapping[str, Mapping[str, int]]) -> Sequence[str]:
    """Both as lines for people. Gateways with the same limits share a line."""
    lines: list[str] = []
    alike: dict[str, list[str]] = {}
    for gateway, flags in sorted(limited.items()):
        told = "  ".join(f"{flag} {value}" for flag, value in sorted(flags.items()))
        alike.setdefault(told, []).append(gateway)
    for told, gateways in alike.items():
        lines.append(f"limits of {', '.join(gateways)}: {told}")
    for owner, has in owners.items():
        counts = ", ".join(f"{has[name]} {name}" for name in ("sessions", "models", "checkpoints"))
        files, state = (has[name] / _GIB for name in ("checkpoint_bytes", "state_bytes"))
        waiting = f"{has['waiting_operations']} operations that wait"
        lines.append(
            f"  {owner}  {counts} ({files:.2f} GiB), {waiting}, {state:.2f} GiB of requests and results"
        )
    return lines

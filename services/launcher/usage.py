"""What API keys may have of a cluster and what they have, for `tinsmith status`."""

from __future__ import annotations

import textwrap
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict
from typing import Any

from redis.asyncio import Redis

from services.common.state import keys
from services.common.state.registry import ServiceRecord
from services.gateway.administration import owners

_GIB = 2**30
_COLUMNS = 100


def limits(records: Iterable[ServiceRecord]) -> dict[str, dict[str, int]]:
    """Limits of each gateway, by their flags."""
    return {record.id: dict(record.limits) for record in records if record.kind == "gateway"}


async def collect(client: Redis) -> dict[str, dict[str, int]]:
    """What each owner has. Bytes are those that the limits count."""
    found: Any = await client.smembers(keys.OWNERS)
    uses = await owners.of(client, sorted(raw.decode() for raw in found))
    return {
        use.owner: {name: value for name, value in asdict(use).items() if name != "owner"} for use in uses
    }


def show(limited: Mapping[str, Mapping[str, int]], used: Mapping[str, Mapping[str, int]]) -> Sequence[str]:
    """Both as lines for people. Gateways with the same limits share a line."""
    lines: list[str] = []
    alike: dict[str, list[str]] = {}
    for gateway, flags in sorted(limited.items()):
        told = "  ".join(f"{flag}={value}" for flag, value in sorted(flags.items()))
        alike.setdefault(told, []).append(gateway)
    for told, gateways in alike.items():
        text = f"limits of {', '.join(gateways)}: {told}"
        lines += textwrap.wrap(text, _COLUMNS, subsequent_indent="  ", break_on_hyphens=False)
    for owner, has in used.items():
        counts = ", ".join(f"{has[name]} {name}" for name in ("sessions", "models", "checkpoints"))
        files, state = (has[name] / _GIB for name in ("checkpoint_bytes", "state_bytes"))
        waiting = f"{has['waiting_operations']} operations that wait"
        lines.append(f"  {owner}  {counts} ({files:.2f} GiB), {waiting}, {state:.2f} GiB in Redis")
    return lines

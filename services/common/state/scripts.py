"""Atomic steps on Redis: the Lua scripts in `services/common/state/lua`.

Invariant: every key that a script touches is in its KEYS.

A line "-- USES name" puts another file in its place. What must not fail while Redis has no memory left,
because it makes room or keeps leases, says "flags=allow-oom" in its first line; everything else is refused
then.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from functools import cache
from importlib import resources
from typing import Any

import redis.asyncio
from prometheus_client import Histogram

from services.common.telemetry import tracing
from services.common.telemetry.metrics import SHORT_S

SECONDS = Histogram(
    "tinsmith_redis_script_seconds",
    "Atomic steps on Redis, waiting for a connection included",
    ["script"],
    buckets=SHORT_S,
)

_USES = re.compile(r"^-- USES (\w+)$", re.MULTILINE)


@cache
def _source(name: str) -> str:
    text = (resources.files("services.common.state") / "lua" / f"{name}.lua").read_text(encoding="utf-8")
    return _USES.sub(lambda used: _source(used[1]), text)


class Script:
    """One script, sent by its hash; Redis is given the text when it does not know it."""

    def __init__(self, client: redis.asyncio.Redis, name: str) -> None:
        self._script = client.register_script(_source(name))
        self._seconds = SECONDS.labels(name)
        self._span = f"redis {name}"

    async def __call__(self, keys: Sequence[str], *args: bytes | str | int | float) -> Any:
        """Runs the script; its reply, with strings as bytes."""
        with self._seconds.time(), tracing.span(self._span, "CLIENT"):
            return await self._script(keys=list(keys), args=list(args))

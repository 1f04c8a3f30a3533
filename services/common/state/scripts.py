"""Atomic steps on Redis: the Lua scripts in `services/common/lua`.

Invariant: every key a script touches is in its KEYS and shares one hash tag, so a script runs on
one slot of a Redis Cluster.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache
from importlib import resources
from typing import Any

import redis.asyncio


@cache
def _source(name: str) -> str:
    return (resources.files("services.common.state") / "lua" / f"{name}.lua").read_text(encoding="utf-8")


class Script:
    """One script, sent by its hash; Redis is given the text when it does not know it."""

    def __init__(self, client: redis.asyncio.Redis, name: str) -> None:
        self._script = client.register_script(_source(name))

    async def __call__(self, keys: Sequence[str], *args: bytes | str | int | float) -> Any:
        """Runs the script; its reply, with strings as bytes."""
        return await self._script(keys=list(keys), args=list(args))

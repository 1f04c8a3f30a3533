"""Atomic steps on Redis: the Lua scripts in `services/common/state/lua`.

Invariant: every key that a script touches is in its KEYS.

A line "-- USES name" puts another file in its place. What must not fail while Redis has no memory left,
because it makes room, keeps leases or lets a process start, says "flags=allow-oom" in its first line, or
begins by deleting something; everything else is refused then, and so is every plain command that adds.

Who runs one for every sample shares its round trips (`SharedScript`). Each run is still a step of its own,
which fails or succeeds by itself.
"""

from __future__ import annotations

import asyncio
import re
import time
from collections.abc import Sequence
from functools import cache
from importlib import resources
from typing import Any

import redis.asyncio
from prometheus_client import Histogram
from redis.exceptions import NoScriptError, ResponseError

from services.common.process.tasks import detached
from services.common.state.redis_client import packed, round_trip
from services.common.telemetry import tracing
from services.common.telemetry.metrics import SHORT_S

SECONDS = Histogram(
    "tinsmith_redis_script_seconds",
    "Atomic steps on Redis, waiting for a connection included",
    ["script"],
    buckets=SHORT_S,
)

_TOGETHER = 128
_TOGETHER_BYTES = 64 * 1024
"""Of the arguments of one run. A larger one has a round trip of its own, so that it holds nobody up."""

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


_Arguments = tuple[Sequence[str], Sequence[bytes | str | int | float]]
_Run = tuple[bytes, _Arguments, asyncio.Future[Any]]
"""A run that is wanted: as a command, what that was made of, and where its reply goes."""


class SharedScript(Script):
    """A script of which many runs are wanted at once: those that are asked for while a round trip is under
    way go together in the next one, in their order. Alone, a run waits for nobody.

    A run is sent also when who asked for it has gone meanwhile. When Redis does not answer, all that wait
    fail: none of them waits for another's timeout first.
    """

    def __init__(self, client: redis.asyncio.Redis, name: str) -> None:
        super().__init__(client, name)
        self._client = client
        self._waiting: list[_Run] = []
        self._trip: asyncio.Task[None] | None = None

    async def __call__(self, keys: Sequence[str], *args: bytes | str | int | float) -> Any:
        if _nbytes(args) > _TOGETHER_BYTES:
            return await super().__call__(keys, *args)
        command = packed(("EVALSHA", self._script.sha, len(keys), *keys, *args))
        reply: asyncio.Future[Any] = asyncio.get_running_loop().create_future()
        self._waiting.append((command, (keys, args), reply))
        if self._trip is None:
            self._trip = detached(self._trips(), f"round trips of {self._span}")
        began = time.perf_counter()
        try:
            with tracing.span(self._span, "CLIENT"):
                return await reply
        finally:
            self._seconds.observe(time.perf_counter() - began)

    async def _trips(self) -> None:
        some: list[_Run] = []
        try:
            while self._waiting:
                some, self._waiting = self._waiting[:_TOGETHER], self._waiting[_TOGETHER:]
                await self._run_all(some)
        except BaseException as error:
            for _, _, reply in some + self._waiting:
                if isinstance(error, asyncio.CancelledError):
                    reply.cancel()
                elif not reply.done():
                    reply.set_exception(error)
            self._waiting = []
            if not isinstance(error, Exception):
                raise
        finally:
            self._trip = None

    async def _run_all(self, some: list[_Run]) -> None:
        found = await round_trip(self._client, [command for command, _, _ in some])
        for (_, (keys, args), reply), answer in zip(some, found, strict=True):
            if isinstance(answer, NoScriptError):
                # It has not run. This gives Redis the text.
                try:
                    answer = await self._script(keys=list(keys), args=list(args))
                except ResponseError as error:
                    answer = error
            if reply.done():
                continue
            if isinstance(answer, Exception):
                reply.set_exception(answer)
            else:
                reply.set_result(answer)


def _nbytes(args: Sequence[bytes | str | int | float]) -> int:
    found = 0
    for arg in args:
        if isinstance(arg, bytes):
            found += len(arg)
    return found

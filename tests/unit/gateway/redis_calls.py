"""Counts how often this process goes to Redis."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
from redis.asyncio.connection import AbstractConnection


@contextmanager
def counted(part: str) -> Iterator[Counter[str]]:
    """What goes to Redis meanwhile that has this in it, such as a session's id, by the first command of those
    sent together."""
    seen: Counter[str] = Counter()
    send = AbstractConnection._send_packed_command

    async def count(self: AbstractConnection, command: Any, *args: Any, **kwargs: Any) -> None:
        sent = command if isinstance(command, bytes) else b"".join(command)
        if part.encode() in sent:
            words = [word.decode(errors="replace") for word in sent.split(b"\r\n")[2:7:2]]
            seen[" ".join(words)[:60]] += 1
        await send(self, command, *args, **kwargs)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(AbstractConnection, "_send_packed_command", count)
        yield seen

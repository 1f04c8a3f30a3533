"""Reading request bodies within bounds.

Invariant: no body is held in memory that is larger than its route allows, and all bodies that
are held at once stay within one budget per process, which none holds that has stopped arriving.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager

import zstandard
from starlette.requests import Request

from services.common.contract.errors import DeadlineExceeded, InvalidRequest, TooLarge
from services.gateway.access.body_budget import BodyBudget
from services.gateway.access.limits import THREAD_ABOVE_BYTES

_PAUSE_S = 60.0
"""Longest time between two parts of a body."""
_BEGINNING_BYTES = 64 * 1024
_MOST_WINDOW_BYTES = 2**31
"""Memory for it is only used as far as is decompressed."""


@asynccontextmanager
async def received(
    request: Request,
    budget: BodyBudget,
    limit: int,
    inflated_limit: int | None = None,
    check_beginning: Callable[[bytes], None] = lambda beginning: None,
) -> AsyncIterator[bytes]:
    """The body, decompressed. Its memory counts against the budget until the context ends.

    Args:
        limit: most bytes as sent.
        inflated_limit: most bytes after zstd decompression; None = compressed bodies are refused.
        check_beginning: looks at the first bytes of a compressed body, before the rest is decompressed.

    Raises:
        TooLarge: it is larger.
        InvalidRequest: it cannot be decompressed.
        Overloaded: the budget is used up.
        DeadlineExceeded: the client stopped sending it.
    """
    taken = 0
    try:
        parts = []
        declared = request.headers.get("content-length", "")
        if declared.isdigit() and int(declared) > limit:
            raise TooLarge(f"the body has {declared} bytes; this call takes at most {limit}")
        async for part in _parts(request):
            budget.take(len(part))
            taken += len(part)
            if taken > limit:
                raise TooLarge(f"the body has more than {limit} bytes")
            parts.append(part)
        body = b"".join(parts)
        encoding = request.headers.get("content-encoding", "identity").strip().lower()
        if encoding != "identity":
            size = inflated_size(body, encoding, inflated_limit)
            check_beginning(inflated_beginning(body, _BEGINNING_BYTES))
            budget.take(size)
            taken += size
            if size > THREAD_ABOVE_BYTES:
                body = await asyncio.to_thread(inflate, body, size)
            else:
                body = inflate(body, size)
        yield body
    finally:
        budget.give_back(taken)


async def _parts(request: Request) -> AsyncIterator[bytes]:
    """The body as it arrives.

    Raises:
        DeadlineExceeded: nothing more of it came for a while. It would hold its share of the budget for ever.
    """
    stream = request.stream()
    while True:
        try:
            async with asyncio.timeout(_PAUSE_S):
                part = await anext(stream)
        except StopAsyncIteration:
            return
        except TimeoutError as error:
            raise DeadlineExceeded(f"nothing more of the body came for {_PAUSE_S:g} s") from error
        yield part


def inflated_size(body: bytes, encoding: str, limit: int | None) -> int:
    """Size that a compressed body announces.

    Raises:
        InvalidRequest: another encoding than zstd, or a frame that does not tell its size.
        TooLarge: the size is above the limit.
    """
    if encoding != "zstd" or limit is None:
        raise InvalidRequest(f"content-encoding {encoding[:50]!r} is not taken here; send the body as it is")
    try:
        size = zstandard.get_frame_parameters(body).content_size
    except zstandard.ZstdError as error:
        raise InvalidRequest(f"the body is no zstd frame: {error}") from error
    if size in (zstandard.CONTENTSIZE_UNKNOWN, zstandard.CONTENTSIZE_ERROR):
        raise InvalidRequest("the zstd frame does not tell its size; compress the body in one call")
    if size > limit:
        raise TooLarge(f"the body has {size} bytes when decompressed; this call takes at most {limit}")
    return size


def inflated_beginning(body: bytes, size: int) -> bytes:
    """At most `size` bytes of a compressed body, which may be cut off.

    Raises:
        InvalidRequest: the frame is damaged where it begins.
    """
    try:
        with zstandard.ZstdDecompressor(max_window_size=_MOST_WINDOW_BYTES).stream_reader(body) as reader:
            return reader.read(size)
    except zstandard.ZstdError as error:
        raise InvalidRequest(f"the zstd body is damaged: {error}") from error


def inflate(body: bytes, size: int) -> bytes:
    """The decompressed body, which has exactly `size` bytes.

    Raises:
        InvalidRequest: the frame is damaged, or is followed by more.
    """
    if size == 0:
        return b""
    try:
        data = zstandard.ZstdDecompressor().decompress(body, max_output_size=size, allow_extra_data=False)
    except zstandard.ZstdError as error:
        raise InvalidRequest(f"the zstd body is damaged: {error}") from error
    if len(data) != size:
        raise InvalidRequest(f"the zstd body has {len(data)} bytes instead of the {size} it announces")
    return data

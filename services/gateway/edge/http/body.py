"""Reading request bodies within bounds.

Invariant: no body is held in memory that is larger than its route allows; what a body takes is counted from
its first byte until its request is done; and none is waited for that arrives slower than any network is.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Callable
from contextlib import suppress
from dataclasses import dataclass

import zstandard
from starlette.requests import ClientDisconnect, Request

from services.common.contract.errors import DeadlineExceeded, InvalidRequest, TinsmithError, TooLarge
from services.common.process.pools import COMPUTE
from services.gateway.access.body_budget import Account
from services.gateway.access.limits import THREAD_ABOVE_BYTES
from services.gateway.edge.http.wire.connection import WHOLE_BODY
from services.gateway.edge.http.wire.fields import field_of

_PATIENCE_S = 10.0
_BYTES_PER_S = 32 * 1024
_LONGEST_S = 300.0
"""A body may take 10 s and a second for every 32 KiB of it that came, and five minutes at most. (The largest
is in within them at 2 Mbit/s, a chunk of 5 MB of the SDK at 0.3 Mbit/s.)"""

_BEGINNING_BYTES = 64 * 1024
_HEAD_BYTES = 160 * 1024
"""More than the first block of a zstd frame, which tells nothing before it is whole."""
_END_BYTES = 1024
_MOST_WINDOW_BYTES = 2**31
"""Memory for it is only used as far as is decompressed."""
_KNOWN = "tinsmith.body"


@dataclass
class _Known:
    """What is known of a request's body so far: beginning and end of what came, and whether that is all."""

    head: bytes = b""
    end: bytes = b""
    begun: bool = False
    whole: bool = False


def _known(request: Request) -> _Known:
    # Beside Starlette's own: to miss an attribute of `request.state` costs more than reading a small body.
    found: _Known | None = request.scope.get(_KNOWN)
    if found is None:
        found = request.scope[_KNOWN] = _Known()
    return found


async def received(
    request: Request,
    account: Account,
    limit: int,
    inflated_limit: int | None = None,
    check_beginning: Callable[[bytes], None] = lambda beginning: None,
) -> bytes:
    """The body, decompressed. What it takes is counted in the account.

    Args:
        limit: most bytes as sent.
        inflated_limit: most bytes after zstd decompression; None = compressed bodies are refused.
        check_beginning: looks at the first bytes of a compressed body, before the rest is decompressed.

    Raises:
        TooLarge: it is larger.
        InvalidRequest: it cannot be decompressed.
        Overloaded: the owner's share is used up.
        DeadlineExceeded: the client sends it too slowly.
    """
    body = await _whole(request, account, limit)
    encoding = (field_of(request.scope, b"content-encoding") or "identity").strip().lower()
    if encoding == "identity":
        return body
    size = inflated_size(body, encoding, inflated_limit)
    check_beginning(inflated_beginning(body, _BEGINNING_BYTES))
    account.hold(len(body) + size)
    if size > THREAD_ABOVE_BYTES:
        return await COMPUTE.run(inflate, body, size)
    return inflate(body, size)


async def _whole(request: Request, account: Account, limit: int) -> bytes:
    declared = check_declared(request, limit)
    known = _known(request)
    if WHOLE_BODY in request.scope and not known.begun:
        body = await _next(request, known)
        if len(body) > limit:
            raise TooLarge(f"the body has more than {limit} bytes")
        account.hold(len(body))
        return body
    if declared is not None:
        account.check(declared)
    parts, taken = [], 0
    async for part in _parts(request):
        taken += len(part)
        if taken > limit:
            raise TooLarge(f"the body has more than {limit} bytes")
        account.hold(taken)
        parts.append(part)
    return b"".join(parts)


async def _parts(request: Request) -> AsyncIterator[bytes]:
    """The body as it arrives.

    Raises:
        DeadlineExceeded: it comes too slowly. It would hold its share of the budget for ever.
    """
    began, taken, known = time.monotonic(), 0, _known(request)
    # Whoever goes on where another stopped is told the rest, and waits for nothing after its end.
    while not known.whole:
        left = began + min(_PATIENCE_S + taken / _BYTES_PER_S, _LONGEST_S) - time.monotonic()
        try:
            async with asyncio.timeout(left):
                part = await _next(request, known)
        except TimeoutError as error:
            raise DeadlineExceeded(
                f"{taken} bytes of the body came in {time.monotonic() - began:.0f} s; send it faster"
            ) from error
        taken += len(part)
        yield part


async def _next(request: Request, known: _Known) -> bytes:
    """The next part of the body.

    Raises:
        ClientDisconnect: there is none, as the client went away.
    """
    message = await request.receive()
    if message["type"] == "http.disconnect":
        raise ClientDisconnect
    if not message.get("more_body", False):
        known.whole = True
    part: bytes = message.get("body", b"")
    _note(known, part)
    return part


async def skimmed(request: Request, limit: int) -> None:
    """Takes the rest of a refused body in, of which only the end is kept, for `end_of`: of one with no more
    bytes than the limit, that comes in time. Of another, nothing is known of its end."""
    with suppress(TinsmithError):
        check_declared(request, limit)
        if _known(request).whole:
            return
        taken = 0
        async for part in _parts(request):
            taken += len(part)
            if taken > limit:
                return


def check_declared(request: Request, limit: int) -> int | None:
    """The bytes that a body says it has, if it says so.

    Raises:
        TooLarge: they are more than the limit.
    """
    declared = field_of(request.scope, b"content-length") or ""
    if not declared.isdigit():
        return None
    if int(declared) > limit:
        raise TooLarge(f"the body has {declared} bytes; this call takes at most {limit}")
    return int(declared)


def end_of(request: Request) -> bytes:
    """The last bytes of a body that came as a whole, else nothing."""
    known = _known(request)
    return known.end if known.whole else b""


def _note(known: _Known, part: bytes) -> None:
    """Keeps beginning and end of a body, also of one that turns out to be too large."""
    if not known.begun:
        known.begun, known.head, known.end = True, part[:_HEAD_BYTES], part[-_END_BYTES:]
        return
    if len(known.head) < _HEAD_BYTES:
        known.head += part[: _HEAD_BYTES - len(known.head)]
    known.end = (known.end + part[-_END_BYTES:])[-_END_BYTES:]


async def head_of(request: Request) -> bytes:
    """The beginning of a body, decompressed as far as it can be. Of one that was not read yet it reads the
    first part."""
    try:
        if not _known(request).begun:
            async for part in _parts(request):
                if part:
                    break
        known = _known(request).head
        if (field_of(request.scope, b"content-encoding") or "").strip().lower() == "zstd":
            return inflated_beginning(known, _BEGINNING_BYTES)
    except TinsmithError:
        return b""
    return known


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

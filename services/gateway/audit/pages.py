"""Pages of records: several streams read together, in the order of time.

Invariant: what a page costs is bounded, however many records there are, and however few of them are wanted:
by the entries that are looked at, the bytes of its records, and the streams, of which the store has only so
many. A page that came to a bound is shorter, or empty, and names where the next one goes on; all of them
together leave out nothing and tell nothing twice.
"""

from __future__ import annotations

import asyncio
import heapq
import logging
import math
from collections import deque
from collections.abc import Sequence
from typing import Any, NamedTuple

import msgspec
import redis.asyncio

from services.common.contract.errors import InvalidRequest, Unavailable
from services.gateway.audit.record import AuditRecord, Wanted

FIELD = b"r"
MOST_BYTES = 4 * 2**20
"""Of the records of a page, as Redis has them."""
MOST_LOOKED = 50_000
"""Entries that are looked at for a page."""

log = logging.getLogger(__name__)

_FIRST, _CHUNK = 2, 256
"""So many entries of a stream are read at first, and at most."""
_STREAMS_AT_ONCE = 128
_LOOKED_AT_ONCE = 256
_MANY_STREAMS = 16
_PAGES_AT_ONCE = 2
"""Pages of so many streams that are made at a time; others wait."""
_PAGE_S = 20.0
_LAST_MS = 2**62
"""Further times are none that Redis can have in an id."""


class Place(NamedTuple):
    """Where a record stands: when it was kept (ms), its number within that, and its stream."""

    at_ms: int
    number: int
    stream: str


class Window(NamedTuple):
    """When records were kept: from, and before, in seconds since 1970."""

    start: float = 0.0
    end: float = math.inf


class Page(NamedTuple):
    """Records in order. `next`: where the next page goes on; None = there is none."""

    records: list[AuditRecord]
    next: Place | None


class Pages:
    """Pages of streams in one Redis."""

    def __init__(self, client: redis.asyncio.Redis) -> None:
        self._redis = client
        self._places = asyncio.Semaphore(_PAGES_AT_ONCE)

    async def read(
        self,
        streams: Sequence[str],
        window: Window,
        most: int,
        after: Place | None,
        wanted: Wanted,
        newest_first: bool,
    ) -> Page:
        """A page of records.

        Args:
            most: records, at least 1.
            after: `next` of the page before.
            wanted: which records.

        Raises:
            Unavailable: it takes too long.
        """
        try:
            async with asyncio.timeout(_PAGE_S):
                readers = [_Reader(self._redis, name, window, after, newest_first) for name in streams]
                if len(streams) < _MANY_STREAMS:
                    return await self._merged(readers, most, wanted)
                async with self._places:
                    return await self._merged(readers, most, wanted)
        except TimeoutError as error:
            raise Unavailable("Redis takes too long to read the audit; ask for a shorter time") from error

    async def _merged(self, readers: Sequence[_Reader], most: int, wanted: Wanted) -> Page:
        await self._begin(readers)
        heads = [(one.key, index) for index, one in enumerate(readers) if one.found]
        heapq.heapify(heads)
        records: list[AuditRecord] = []
        looked, size, last = 0, 0, None
        while heads:
            if looked == MOST_LOOKED:
                return Page(records, last)
            if looked % _LOOKED_AT_ONCE == 0:
                await asyncio.sleep(0)  # What was read is there: no other await lets others in.
            _, index = heapq.heappop(heads)
            reader = readers[index]
            place, raw = reader.found.popleft()
            record = _record(raw, place)
            if record is not None and wanted(record):
                if len(records) == most or (records and size + len(raw) > MOST_BYTES):
                    return Page(records, last)
                records.append(record)
                size += len(raw)
            looked, last = looked + 1, place
            if not reader.found:
                await reader.read_on()
            if reader.found:
                heapq.heappush(heads, (reader.key, index))
        return Page(records, None)

    async def _begin(self, readers: Sequence[_Reader]) -> None:
        """Reads the first entries of each stream, of many at once."""
        for start in range(0, len(readers), _STREAMS_AT_ONCE):
            some = readers[start : start + _STREAMS_AT_ONCE]
            pipeline = self._redis.pipeline(transaction=False)
            for one in some:
                one.ask(pipeline)
            for one, chunk in zip(some, await pipeline.execute(), strict=True):
                one.take(chunk)
        for one in readers:
            if not one.found:
                await one.read_on()


class _Reader:
    """Reads the entries of one stream in order, ever more at a time.

    Attributes:
        found: those that were read and not used yet.
    """

    __slots__ = ("_after", "_count", "_ended", "_high", "_low", "_newest_first", "_redis", "_stream", "found")

    def __init__(
        self,
        client: redis.asyncio.Redis,
        stream: str,
        window: Window,
        after: Place | None,
        newest_first: bool,
    ) -> None:
        self.found: deque[tuple[Place, bytes]] = deque()
        self._redis = client
        self._stream = stream
        self._after = after
        self._newest_first = newest_first
        self._low, self._high = _bounds(window, after, newest_first)
        self._count = _FIRST
        self._ended = False

    @property
    def key(self) -> tuple[int, int, str]:
        """Sorts readers by the next entry."""
        return _key(self.found[0][0], self._newest_first)

    async def read_on(self) -> None:
        """Reads until there is an entry, or no more."""
        while not self.found and not self._ended:
            self.take(await self.ask(self._redis))

    def ask(self, client: redis.asyncio.Redis) -> Any:
        """What reads the next entries: of a connection, or put into a pipeline."""
        read = client.xrevrange if self._newest_first else client.xrange
        return read(self._stream, max=self._high, min=self._low, count=self._count)

    def take(self, chunk: Sequence[tuple[bytes, dict[bytes, bytes]]]) -> None:
        """Takes what was read."""
        self._ended = len(chunk) < self._count
        self._count = min(self._count * 4, _CHUNK)
        passed = self._after and _key(self._after, self._newest_first)
        for raw_id, fields in chunk:
            place = _place(raw_id, self._stream)
            if not passed or _key(place, self._newest_first) > passed:
                self.found.append((place, fields.get(FIELD, b"")))
        if chunk:
            following = b"(" + chunk[-1][0]
            if self._newest_first:
                self._high = following
            else:
                self._low = following


def _key(place: Place, newest_first: bool) -> tuple[int, int, str]:
    """In which order records come."""
    sign = -1 if newest_first else 1
    return sign * place.at_ms, sign * place.number, place.stream


def _bounds(window: Window, after: Place | None, newest_first: bool) -> tuple[bytes | str, bytes | str]:
    """Ids of a stream's first and last entry that are read."""
    # Ids are whole milliseconds: both ends are rounded alike, so that windows which meet share no record and
    # leave none out.
    low = min(_LAST_MS, max(0, math.floor(window.start * 1000)))
    high = None if window.end == math.inf else min(_LAST_MS, math.floor(window.end * 1000) - 1)
    if after is not None and newest_first:
        high = after.at_ms if high is None else min(high, after.at_ms)
    elif after is not None:
        low = max(low, after.at_ms)
    # An id without its second number stands for the first one, or the last, of its millisecond.
    return str(low), "+" if high is None else str(max(0, high))


def _record(raw: bytes, place: Place) -> AuditRecord | None:
    try:
        return msgspec.msgpack.decode(raw, type=AuditRecord)
    except msgspec.DecodeError:
        log.error("a record of %s cannot be read: %d-%d", place.stream, place.at_ms, place.number)
        return None


def _place(raw_id: bytes, stream: str) -> Place:
    at_ms, _, number = raw_id.decode().partition("-")
    return Place(int(at_ms), int(number), stream)


def token_of(place: Place | None) -> str:
    """A place as a client passes it back; empty: there is none."""
    return "" if place is None else f"{place.at_ms}-{place.number}/{place.stream}"


def place_of(token: str, field: str) -> Place | None:
    """The place of a token; None: it is empty.

    Raises:
        InvalidRequest: it is not one of `token_of`.
    """
    if not token:
        return None
    at, _, stream = token.partition("/")
    at_ms, _, number = at.partition("-")
    if not (_is_number(at_ms) and _is_number(number) and stream and len(token) < 300):
        raise InvalidRequest(f"{field} is not one of ours; pass back what the page before told", field=field)
    return Place(int(at_ms), int(number), stream)


def _is_number(text: str) -> bool:
    return text.isascii() and text.isdecimal() and len(text) < 20

"""Which requests bring a process down.

Invariant: what a process was executing when it died, at whatever moment and of whatever cause, is known to
its successor, because it is written to a file before it is begun, where that can be written in good time. A
request that was under way in MOST_CRASHES deaths in a row is given up: it is not begun again for REST_S, and
then once at a time. Who asks for it after it was given up needs it, as a replay does, and what it died of
may be over. One that was under way in any death is a *suspect*: whoever runs it sees to it that few others
are blamed with it. Where the process could tell what it dies of, nobody else is blamed, and one death is
enough.
"""

from __future__ import annotations

import errno
import logging
import os
import time
from collections import Counter
from collections.abc import Callable, Iterable
from concurrent.futures import Future
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Generic, TypeVar

import msgspec

from services.common.contract.errors import Internal
from services.common.process.threads import WorkerThread
from services.common.telemetry.repeats import Repeats

log = logging.getLogger(__name__)

MOST_CRASHES = 3
REST_S = 3600.0
"""The others of a process bear so few deaths of it."""
_KEPT = 4096
_MOST_BYTES = 1 << 20
_PATIENCE_S = 1.0
"""For so long at most whoever executes requests waits for the file, and once: while it hangs nobody does."""
_CLOSED = -1

Key = TypeVar("Key")


@dataclass(frozen=True)
class Cause(Generic[Key]):
    """What a process told of its death, before it came.

    Attributes:
        key: the request that it cannot execute; None: none is to blame.
        code, why: of the error that whoever asks for it gets.
    """

    key: Key | None = None
    code: str = ""
    why: str = ""


class _Line(msgspec.Struct, Generic[Key], omit_defaults=True):
    """What has changed. The state is all lines of the file, in order."""

    begun: list[Key] = []
    ended: list[Key] = []
    acquitted: list[Key] = []
    crashes: list[tuple[Key, int]] = []
    """Deaths in a row; 0 = none any more."""
    resting: list[tuple[Key, float]] = []
    """Until when one that was given up is not begun, in seconds since the epoch."""
    reasons: list[tuple[Key, str, str]] = []
    """Code and sentence of what is known of one that was given up."""


class CrashLedger(Generic[Key]):
    """The file of one process that is restarted under the same name. One process at a time uses it.

    A change is one appended line, one system call: it survives the process, though not a power cut, which is
    no crash of the process's.

    Args:
        key_type: of the keys, for decoding them.
        who: what dies ("trainer").
        clock: seconds since the epoch.
        died_of: what the last death was of; None: that is not known, or there was none.
    """

    def __init__(
        self,
        path: Path,
        key_type: Any,
        who: str,
        clock: Callable[[], float] = time.time,
        died_of: Cause[Key] | None = None,
    ) -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        self._path = path
        self._who = who
        self._clock = clock
        self._unwritten = Repeats(log, "which requests are executed was not written down")
        self._executing: Counter[Key] = Counter()
        self._acquitted: set[Key] = set()
        self._crashes: dict[Key, int] = {}
        self._resting: dict[Key, float] = {}
        self._reasons: dict[Key, tuple[str, str]] = {}
        self._read(msgspec.json.Decoder(_Line[key_type]))
        for key in self._blamed(died_of):
            deaths = self._crashes.pop(key, 0) + 1
            self._crashes[key] = deaths if died_of is None else MOST_CRASHES
            self._resting[key] = clock() + REST_S
            self._reasons.pop(key, None)
            if died_of is not None:
                self._reasons[key] = died_of.code, died_of.why
        self._executing.clear()
        self._acquitted.clear()
        self._size = 0
        self._file = _CLOSED
        """Only its thread opens, writes and closes it, once this is made."""
        self._thread = WorkerThread("crash ledger")
        self._under_way: Future[None] | None = None
        self._closed = False
        try:
            self._replace(state := self._state())
            self._size = len(state)
        except OSError as error:
            self._unwritten.failed(path.name, error)
            self._size = _MOST_BYTES
            with suppress(OSError):
                self._file = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT)

    def _blamed(self, died_of: Cause[Key] | None) -> set[Key]:
        """The requests that the last death was of."""
        under_way = set(self._executing)
        if died_of is not None:
            return under_way & {died_of.key}
        # Whoever has shown for a while that it does no harm is blamed only when nobody else can be.
        return under_way - self._acquitted or under_way

    def _read(self, decoder: msgspec.json.Decoder[_Line[Key]]) -> None:
        if not self._path.exists():
            return
        for text in self._path.read_bytes().splitlines():
            try:
                line = decoder.decode(text)
            except msgspec.DecodeError:
                # The process died in the middle of this line, and had not yet acted on it.
                continue
            self._executing.update(line.begun)
            self._executing.subtract(line.ended)
            self._acquitted.update(line.acquitted)
            self._acquitted.difference_update(line.ended)
            self._crashes.update(line.crashes)
            self._resting.update(line.resting)
            self._reasons.update((key, (code, why)) for key, code, why in line.reasons)
        self._executing = +self._executing
        self._crashes = {key: deaths for key, deaths in self._crashes.items() if deaths}

    def begin(self, keys: Iterable[Key]) -> None:
        """These requests are about to be executed."""
        begun = list(keys)
        self._executing.update(begun)
        self._append(_Line(begun=begun))

    def end(self, keys: Iterable[Key]) -> None:
        """They are not being executed now; some of a request's work may still be to come."""
        ended = list(keys)
        for key in ended:
            self._executing[key] -= 1
            if self._executing[key] <= 0:
                del self._executing[key]
        self._acquitted.difference_update(ended)
        self._append(_Line(ended=ended))

    def acquit(self, key: Key) -> None:
        """A request that is being executed has done no harm for so long that a death is another one's."""
        self._acquitted.add(key)
        self._append(_Line(acquitted=[key]))

    def survived(self, key: Key) -> None:
        """A request was executed to its end. One that was not begun because of its crashes keeps them."""
        if key in self._crashes and not self._is_barred(key):
            del self._crashes[key]
            self._append(_Line(crashes=[(key, 0)]))

    def deaths(self, key: Key) -> int:
        """Deaths in a row in which the request was under way, since it was last executed whole."""
        return self._crashes.get(key, 0)

    def is_suspect(self, key: Key) -> bool:
        """Whether the process died while it executed the request and did not execute it whole since."""
        return key in self._crashes

    def verdict(self, key: Key) -> Internal | None:
        """Why the request is not begun now; None when it may be. One that has rested may once: another death
        has it rest again."""
        if not self._is_barred(key):
            return None
        if self._clock() >= self._resting.get(key, 0.0):
            self._crashes[key] = MOST_CRASHES - 1
            self._append(_Line(crashes=[(key, MOST_CRASHES - 1)]))
            return None
        if key in self._reasons:
            code, why = self._reasons[key]
            return Internal(why, code)
        return Internal(
            f"the {self._who} died {self._crashes[key]} times while it executed this request, which is "
            f"therefore given up; everything else goes on without it. The {self._who}'s log says more",
            f"crashed_{self._who}",
        )

    def close(self) -> None:
        """Nothing is executing any more: this process ends in order. Without crashes no file stays. Whoever
        ended it may have mended what requests died of, so those that were given up may be begun once."""
        self._crashes = {key: min(deaths, MOST_CRASHES - 1) for key, deaths in self._crashes.items()}
        self._executing.clear()
        self._acquitted.clear()
        self._closed = True
        state = self._state()
        self._in_good_time(lambda: self._end_with(state))
        self._thread.close()

    def _is_barred(self, key: Key) -> bool:
        return self._crashes.get(key, 0) >= MOST_CRASHES

    def _append(self, line: _Line[Key]) -> None:
        if self._closed:
            # What is still under way when a process ends in order does it no harm.
            return
        text = msgspec.json.encode(line) + b"\n"
        state = self._state() if self._size + len(text) > _MOST_BYTES else None
        if self._in_good_time(lambda: self._write(text, state)):
            self._size = len(state) if state is not None else self._size + len(text)
        else:
            # The next line that can be written has the whole state written, with what is missing now.
            self._size = _MOST_BYTES

    def _in_good_time(self, work: Callable[[], None]) -> bool:
        """Does something to the file on its thread, after what was done before; whether that was done. Of a
        volume that is full, hangs or is away: to end of it would be the crash that this is kept against."""
        if self._under_way is not None and not self._under_way.done():
            return False
        self._under_way = self._thread.submit(work)
        try:
            self._under_way.result(_PATIENCE_S)
        except OSError as error:
            # A wait that took too long is one, too.
            hangs = not self._under_way.done()
            self._unwritten.failed(self._path.name, "the disk hangs" if hangs else error)
            return False
        return True

    def _write(self, text: bytes, state: bytes | None) -> None:
        """Appends a line, or puts a file with the present state in the place of the grown one, if given."""
        if state is None:
            self._add(text)
            return
        # What cannot have another one in its place may grow on.
        with suppress(OSError):
            self._add(text)
        self._replace(state)

    def _add(self, text: bytes) -> None:
        if os.write(self._file, text) < len(text):
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    def _end_with(self, state: bytes) -> None:
        try:
            self._replace(state)
            if not self._crashes:
                self._path.unlink(missing_ok=True)
        finally:
            os.close(self._file)
            self._file = _CLOSED

    def _state(self) -> bytes:
        """The line that comes to what all of them do."""
        while len(self._crashes) > _KEPT:
            del self._crashes[next(iter(self._crashes))]
        line = _Line(
            begun=list(self._executing.elements()),
            acquitted=list(self._acquitted),
            crashes=list(self._crashes.items()),
            resting=[(key, until) for key, until in self._resting.items() if self._is_barred(key)],
            reasons=[(key, *reason) for key, reason in self._reasons.items() if self._is_barred(key)],
        )
        return msgspec.json.encode(line) + b"\n"

    def _replace(self, state: bytes) -> None:
        fresh = self._path.with_name(f"{self._path.name}.new")
        fresh.write_bytes(state)
        file = os.open(fresh, os.O_WRONLY | os.O_APPEND)
        try:
            fresh.replace(self._path)
        except OSError:
            os.close(file)
            raise
        if self._file != _CLOSED:
            os.close(self._file)
        self._file = file

"""Which operations bring the trainer down.

Invariant: what a process was executing when it died, at whatever moment and of whatever cause, is known to
its successor, because it is written to a file before it is begun. An operation that was under way in
MOST_CRASHES deaths in a row is not begun again. One that was under way in any is a *suspect* and is run
alone, so that no other is blamed with it.
"""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Iterable
from pathlib import Path

import msgspec

from services.common.contract.errors import Internal

MOST_CRASHES = 3
_KEPT = 256

Key = tuple[str, int]
"""(model id, seq_id)"""


class _Record(msgspec.Struct):
    executing: list[Key] = []
    crashes: list[tuple[str, int, int]] = []
    """(model id, seq_id, deaths)"""


class CrashLedger:
    """The file of one trainer. One process at a time uses it.

    A write is one system call: it survives the process, though not a power cut, which is no crash of the
    trainer's.
    """

    def __init__(self, path: Path) -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        self._path = path
        self._file = os.open(path, os.O_RDWR | os.O_CREAT, 0o644)
        self._size = os.fstat(self._file).st_size
        record = _Record()
        text = os.pread(self._file, self._size, 0).strip()
        if text:
            record = msgspec.json.decode(text, type=_Record)
        self._executing: Counter[Key] = Counter()
        self._crashes = {(model_id, seq_id): deaths for model_id, seq_id, deaths in record.crashes}
        for key in set(record.executing):
            self._crashes[key] = self._crashes.pop(key, 0) + 1
        self._write()

    def begin(self, operations: Iterable[Key]) -> None:
        """These operations are about to be executed."""
        self._executing.update(operations)
        self._write()

    def end(self, operations: Iterable[Key]) -> None:
        """They are not being executed now; some of an operation's work may still be to come."""
        self._executing.subtract(operations)
        self._executing = +self._executing
        self._write()

    def survived(self, key: Key) -> None:
        """An operation was executed to its end. One that was not begun because of its crashes keeps them."""
        if key in self._crashes and not self._is_barred(key):
            del self._crashes[key]
            self._write()

    def is_suspect(self, key: Key) -> bool:
        """Whether the trainer died while it executed the operation and did not execute it whole since."""
        return key in self._crashes

    def verdict(self, key: Key) -> Internal | None:
        """Why the operation is not begun any more; None when it may be."""
        if not self._is_barred(key):
            return None
        return Internal(
            f"the trainer died {self._crashes[key]} times while it executed this request, which is therefore "
            "given up; the model goes on without it. The trainer's log says more",
            "crashed_trainer",
        )

    def close(self) -> None:
        """Nothing is executing any more: this process ends in order. Without crashes no file stays."""
        self._executing.clear()
        self._write()
        os.close(self._file)
        if not self._crashes:
            self._path.unlink(missing_ok=True)

    def _is_barred(self, key: Key) -> bool:
        return self._crashes.get(key, 0) >= MOST_CRASHES

    def _write(self) -> None:
        while len(self._crashes) > _KEPT:
            del self._crashes[next(iter(self._crashes))]
        record = _Record(list(self._executing), [(*key, deaths) for key, deaths in self._crashes.items()])
        text = msgspec.json.encode(record)
        os.pwrite(self._file, text.ljust(self._size), 0)
        self._size = max(self._size, len(text))

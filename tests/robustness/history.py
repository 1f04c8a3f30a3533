"""What every client asked for and got, in the order in which it asked."""

from __future__ import annotations

import threading
import time
from dataclasses import dataclass, field
from itertools import takewhile
from typing import Any


@dataclass
class Entry:
    """One request of one client.

    Attributes:
        kind: "create", "forward", "forward_backward", "step", "publish", "save", "load" or "sample".
        arguments: plain data from which the request can be made again.
        submitted: time of the call; `done`: of its result (seconds, monotonic).
        result: plain data to be compared.
        error: what came instead of a result.
        refused: it was refused memory, which leaves the model as it was; its result is empty.
    """

    kind: str
    arguments: dict[str, Any]
    submitted: float
    done: float | None = None
    result: dict[str, Any] | None = None
    error: str | None = None
    refused: bool = False


@dataclass
class History:
    """One client's requests. `model_id` is empty for a client that only samples.

    The seq_id of a model's n-th request is n, with the creation as number 0; samples are kept apart.
    """

    client: str
    model_id: str = ""
    training: list[Entry] = field(default_factory=list)
    samples: list[Entry] = field(default_factory=list)
    _lock: threading.Lock = field(default_factory=threading.Lock)

    def ask(self, kind: str, arguments: dict[str, Any]) -> Entry:
        """Notes that a request is made now."""
        entry = Entry(kind, arguments, time.monotonic())
        with self._lock:
            (self.samples if kind == "sample" else self.training).append(entry)
        return entry

    def served_after(self, moment: float) -> float | None:
        """When the first result came of what was asked for after a moment; of a model, of any training."""
        with self._lock:
            entries = self.training or self.samples
            asked = takewhile(lambda entry: entry.submitted > moment, reversed(entries))
            return min((entry.done for entry in asked if entry.done is not None), default=None)

    def pending(self) -> str:
        """What has neither result nor error, in words."""
        now = time.monotonic()
        with self._lock:
            waiting = [
                f"{entry.kind} {number} since {now - entry.submitted:.0f} s"
                for entries in (self.training, self.samples)
                for number, entry in enumerate(entries)
                if entry.result is None and entry.error is None
            ]
        return f"{self.client} ({self.model_id}) waits for {', '.join(waiting) or 'nothing'}"

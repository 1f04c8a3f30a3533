"""A gateway in a process of its own that measures what a request takes of its memory at its peak.

    python -m tests.unit.gateway.edge.peak_memory REDIS_URL DIRECTORY

Prints where it listens. For each line of its input after that it forgets the peak so far and prints a line;
then for the next line it prints the peak since, in times of the most bytes that a request was counted with.
A process of its own, as memory that was used before and is used again would not be seen, and clients have
theirs. The peak is the kernel's (VmHWM), so memory of C libraries counts too.
"""

from __future__ import annotations

import asyncio
import ctypes
import gc
import json
import sys
from pathlib import Path

import msgspec
import uvloop

from services.gateway.access import body_budget
from tests.unit.gateway.edges import running

CONTEXT, VOCAB = 1 << 20, 1 << 17


class Peak:
    """The most memory that was used since `forget`, and the most bytes that a request was counted with."""

    def __init__(self) -> None:
        self._counted = self._before = 0
        hold = body_budget.Account.hold

        def counting(account: body_budget.Account, nbytes: int) -> None:
            hold(account, nbytes)
            self._counted = max(self._counted, nbytes)

        body_budget.Account.hold = counting  # type: ignore[method-assign]

    def forget(self) -> None:
        gc.collect()
        ctypes.CDLL("libc.so.6").malloc_trim(0)
        Path("/proc/self/clear_refs").write_text("5")
        self._before, self._counted = _in_use("VmRSS"), 0

    def of(self, nbytes: int) -> float:
        """The peak in times of so many bytes."""
        return round((_in_use("VmHWM") - self._before) / nbytes, 2)

    @property
    def times(self) -> float:
        return self.of(self._counted)


def _in_use(line: str) -> int:
    """Bytes of a line of /proc/self/status."""
    text = Path("/proc/self/status").read_text()
    (kib,) = [row.split()[1] for row in text.splitlines() if row.startswith(f"{line}:")]
    return int(kib) * 1024


def tell(what: object) -> None:
    print(json.dumps(what), flush=True)


async def main(redis_url: str, directory: Path) -> None:
    async with running(redis_url, directory) as edges:
        for announcer in edges.announcers.values():
            large = msgspec.structs.replace(announcer.record, context_length=CONTEXT, vocab_size=VOCAB)
            await announcer.update(large)
        peak = Peak()
        tell([edges.base_url, edges.grpc_address])
        while await asyncio.to_thread(sys.stdin.readline):
            peak.forget()
            tell("forgotten")
            await asyncio.to_thread(sys.stdin.readline)
            tell(peak.times)


if __name__ == "__main__":
    # As a gateway does: what buffers take depends on the loop.
    uvloop.run(main(sys.argv[1], Path(sys.argv[2])))

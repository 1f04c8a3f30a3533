"""The yardstick for publishing: the bytes of a snapshot in one gloo broadcast between two processes.

`python -m bench.sampling.raw_broadcast BYTES` prints the median seconds of a broadcast that the receiver
confirms.
"""

from __future__ import annotations

import datetime
import statistics
import subprocess
import sys
import tempfile
import time

import torch
import torch.distributed as dist

REPETITIONS = 15


def seconds(size: int) -> float:
    """Median seconds of broadcasting `size` bytes to one other process."""
    done = subprocess.run(
        [sys.executable, "-m", "bench.sampling.raw_broadcast", str(size)],
        stdout=subprocess.PIPE,
        text=True,
        timeout=120,
        check=True,
    )
    return float(done.stdout)


def _join(directory: str, rank: int) -> None:
    store = dist.FileStore(f"{directory}/store", 2)
    dist.init_process_group(
        "gloo", store=store, rank=rank, world_size=2, timeout=datetime.timedelta(seconds=60)
    )


def _take_part(directory: str, rank: int, size: int) -> float:
    _join(directory, rank)
    buffer, confirmed = torch.zeros(size, dtype=torch.uint8), torch.zeros(1)
    times = []
    for _ in range(REPETITIONS):
        start = time.perf_counter()
        dist.broadcast(buffer, 0)
        dist.broadcast(confirmed, 1)
        times.append(time.perf_counter() - start)
    dist.destroy_process_group()
    return statistics.median(times)


def main(arguments: list[str]) -> None:
    if len(arguments) == 2:
        _take_part(arguments[1], 1, int(arguments[0]))
        return
    with tempfile.TemporaryDirectory() as directory:
        command = [sys.executable, "-m", "bench.sampling.raw_broadcast", arguments[0], directory]
        with subprocess.Popen(command) as receiver:
            print(_take_part(directory, 0, int(arguments[0])))
            receiver.wait(timeout=60)


if __name__ == "__main__":
    main(sys.argv[1:])

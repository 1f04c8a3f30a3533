"""The device that is measured on: what it is called, what it could do at most, its clock and its memory."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass

import torch

PEAKS = {
    "B200": 2.25e15,
    "H200 NVL": 8.355e14,
    "H200": 9.89e14,
    "H100 PCIe": 7.56e14,
    "H100 NVL": 8.355e14,
    "H100 80GB HBM3": 9.89e14,
    "A100": 3.12e14,
    "L40S": 3.62e14,
    "L4": 1.21e14,
}
"""FLOPs a second of dense bfloat16 products, from NVIDIA's data sheets, which print twice as much for sparse
ones. A device is the first of these whose words its own name has."""

REPETITIONS = 3


@dataclass(frozen=True)
class Measured:
    """Attributes: seconds of each repetition; bytes, the most that were allocated; 0 = not told."""

    seconds: list[float]
    peak_bytes: int


def name_of(device: str) -> str:
    """What the device calls itself."""
    return torch.cuda.get_device_name() if device == "cuda" else "CPU"


def peak_flops(name: str) -> float | None:
    """Of a device by its name; None: it is not known."""
    words = f"{name} ".replace("-", " ")
    return next((peak for known, peak in PEAKS.items() if f" {known} " in f" {words}"), None)


def synchronize(device: str) -> None:
    """Waits until the device has done what it was given."""
    if device == "cuda":
        torch.cuda.synchronize()


def measure(step: Callable[[], None], device: str, limit_s: float) -> Measured:
    """Repeats a step after a first one that does not count, until `limit_s` are over, once at least."""
    step()
    synchronize(device)
    if device == "cuda":
        torch.cuda.reset_peak_memory_stats()
    times: list[float] = []
    begun = time.perf_counter()
    while len(times) < REPETITIONS and (not times or time.perf_counter() - begun < limit_s):
        start = time.perf_counter()
        step()
        synchronize(device)
        times.append(time.perf_counter() - start)
    return Measured(times, torch.cuda.max_memory_allocated() if device == "cuda" else 0)


def out_of_memory_events(device: str) -> int:
    """How often an allocation has failed so far, also where that was dealt with."""
    return int(torch.cuda.memory_stats().get("num_ooms", 0)) if device == "cuda" else 0

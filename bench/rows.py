"""Rows of results, and how they are come by.

Invariant: a row's value is a ratio or a difference of two things measured in this run, on the same model,
with the same number of threads each, or a time that is claimed as such; absolute figures are in its details.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field


@dataclass(frozen=True)
class Row:
    """One line of the report.

    Attributes:
        name: what was measured.
        value: the ratio or difference.
        unit: what `value` is: "x" for a ratio.
        at_most, at_least: the target, if there is one.
        required: a claim about the numbers that any run must meet, however slow the machine.
        details: absolute figures behind it, with their units in the keys.
    """

    name: str
    value: float
    unit: str
    at_most: float | None = None
    at_least: float | None = None
    required: bool = False
    details: dict[str, float | int | str] = field(default_factory=dict)

    @property
    def holds(self) -> bool:
        """Whether the value is at its target or better."""
        if self.at_most is not None and not self.value <= self.at_most:
            return False
        return self.at_least is None or self.value >= self.at_least


def seconds(work: Callable[[], object]) -> float:
    """Wall-clock seconds of a call."""
    start = time.perf_counter()
    work()
    return time.perf_counter() - start


def milliseconds(times: Sequence[float]) -> float:
    """Median of seconds, in milliseconds."""
    return round(1e3 * statistics.median(times), 2)


def ratio_row(name: str, ours: list[float], bare: list[float], tokens: int, at_least: float) -> Row:
    """Tokens per second of ours over the yardstick's: the median of the ratios of neighbouring repetitions.

    Args:
        ours, bare: seconds of each repetition, for `tokens` tokens.
    """
    ratios = [theirs / mine for theirs, mine in zip(bare, ours, strict=True)]
    return Row(
        name,
        statistics.median(ratios),
        "x tokens/s",
        at_least=at_least,
        details={
            "ours_tokens_per_s": round(tokens / statistics.median(ours), 1),
            "bare_tokens_per_s": round(tokens / statistics.median(bare), 1),
            "lowest_ratio": round(min(ratios), 2),
            "highest_ratio": round(max(ratios), 2),
            "repetitions": len(ours),
        },
    )


def added_row(
    name: str, ours: list[float], alone: list[float], sides: tuple[str, str], at_most: float
) -> Row:
    """What ours takes beyond the yardstick: median minus median, in milliseconds.

    Args:
        ours, alone: seconds of each repetition.
        sides: what the two are called in the details.
    """
    return Row(
        f"{name}, p50",
        1e3 * (statistics.median(ours) - statistics.median(alone)),
        "ms",
        at_most=at_most,
        details={
            f"{sides[0]}_p50_ms": milliseconds(ours),
            f"{sides[1]}_p50_ms": milliseconds(alone),
            "repetitions": len(ours),
        },
    )


def alternate(repetitions: int, *sides: Callable[[int], float]) -> list[list[float]]:
    """Calls the sides in turn, `repetitions` times, so that a slow minute of the machine meets all of them.

    Each side is called with the number of the repetition. Returns one list of results per side.
    """
    results: list[list[float]] = [[] for _ in sides]
    for repetition in range(repetitions):
        for side, kept in zip(sides, results, strict=True):
            kept.append(side(repetition))
    return results

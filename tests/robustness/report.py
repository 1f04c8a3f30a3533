"""The table of what was injected and what came of it; several runs' tables add up."""

from __future__ import annotations

import json
import statistics
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path


@dataclass
class Report:
    """Attributes:
    recoveries: per fault, seconds from each injection until every client had the result of a request
        that it made afterwards.
    amid: the same for injections that began, or were followed by another, before that.
    lost, wrong: sentences of the checker.
    """

    recoveries: dict[str, list[float]] = field(default_factory=dict)
    amid: dict[str, list[float]] = field(default_factory=dict)
    requests: int = 0
    lost: list[str] = field(default_factory=list)
    wrong: list[str] = field(default_factory=list)

    def note(self, fault: str, seconds: float, amid: bool) -> None:
        (self.amid if amid else self.recoveries).setdefault(fault, []).append(round(seconds, 2))

    @property
    def injected(self) -> int:
        return sum(map(len, (*self.recoveries.values(), *self.amid.values())))

    def times(self, fault: str) -> int:
        return len(self.recoveries.get(fault, ())) + len(self.amid.get(fault, ()))

    def add(self, other: Report) -> None:
        for mine, others in ((self.recoveries, other.recoveries), (self.amid, other.amid)):
            for fault, seconds in others.items():
                mine.setdefault(fault, []).extend(seconds)
        self.requests += other.requests
        self.lost += other.lost
        self.wrong += other.wrong

    def write(self, path: Path) -> None:
        path.write_text(json.dumps(asdict(self), indent=1))

    def markdown(self) -> str:
        """The table. What is lost or wrong shows at the end of a round and belongs to no fault by itself:
        then the faults' columns have a question mark, and the line below the table the number."""
        lost, wrong = "?" if self.lost else "0", "?" if self.wrong else "0"
        lines = [
            "| Fault | Alone | Recovered after, median s | at most s | Amid others | at most s | Lost "
            "| Duplicated |",
            "|---|---:|---:|---:|---:|---:|---:|---:|",
        ]
        for fault in sorted({*self.recoveries, *self.amid}):
            alone, amid = self.recoveries.get(fault, []), self.amid.get(fault, [])
            middle = f"{statistics.median(alone):.1f}" if alone else ""
            lines.append(
                f"| {fault} | {len(alone)} | {middle} | {_most(alone)} | {len(amid)} | {_most(amid)} "
                f"| {lost} | {wrong} |"
            )
        lines.append(
            f"\n{self.injected} faults, {self.requests} requests: {len(self.lost)} lost, "
            f"{len(self.wrong)} duplicated, reordered or otherwise wrong"
        )
        return "\n".join(lines)


def _most(seconds: Sequence[float]) -> str:
    return f"{max(seconds):.1f}" if seconds else ""


def read(paths: Sequence[Path]) -> Report:
    """The reports of these files, added up."""
    total = Report()
    for path in paths:
        total.add(Report(**json.loads(path.read_text())))
    return total


if __name__ == "__main__":
    import sys

    print(read([Path(name) for name in sys.argv[1:]]).markdown())

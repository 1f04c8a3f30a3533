"""What was done to the cluster, and how long clients and pods took."""

from __future__ import annotations

import json
import os
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from pathlib import Path

from tests.helm.rendered import ROOT

RESULT = Path(os.environ.get("K8S_RESULT", ROOT / ".cache" / "test-k8s.json"))


@dataclass
class Row:
    """Attributes:
    seconds: until everything was ready again, or done.
    training, sampling: longest pause that a client saw between two results; None = there was no client.
    """

    what: str
    seconds: float = 0.0
    training: float | None = None
    sampling: float | None = None


@dataclass
class Report:
    """Rows in the order in which things were done."""

    kubernetes: str = ""
    rows: list[Row] = field(default_factory=list)

    @contextmanager
    def row(self, what: str) -> Iterator[Row]:
        """Times what is done in the context; noted when it succeeded."""
        started, row = time.monotonic(), Row(what)
        yield row
        row.seconds = row.seconds or round(time.monotonic() - started, 1)
        self.rows.append(row)

    def write(self) -> None:
        RESULT.parent.mkdir(parents=True, exist_ok=True)
        RESULT.write_text(json.dumps(asdict(self), indent=2) + "\n")

    def table(self) -> str:
        lines = [
            f"Kubernetes {self.kubernetes}",
            "",
            "| what | s | training paused for s | sampling paused for s |",
            "|---|---|---|---|",
        ]
        for row in self.rows:
            pauses = ("" if one is None else f"{one}" for one in (row.training, row.sampling))
            lines.append(f"| {row.what} | {row.seconds} | {' | '.join(pauses)} |")
        return "\n".join(lines)

"""docs/operations.md names every metric, and none that is not."""

from __future__ import annotations

import re

from tests.helm.rendered import ROOT

_MADE = re.compile(r'"tinsmith_(\w+)"|Reading\(\s*"(\w+)"')


def test_the_table_of_metrics_is_the_code_s() -> None:
    sources = [path.read_text() for path in sorted((ROOT / "services").rglob("*.py"))]
    made = {
        f"tinsmith_{found[1] or found[2]}"
        for source in sources
        if "prometheus_client" in source or "Reading(" in source
        for found in _MADE.finditer(source)
    }
    table = (ROOT / "docs" / "operations.md").read_text()
    told = set(re.findall(r"^\| `(tinsmith_\w+)`", table, re.MULTILINE))
    assert told == made
    assert len(told) > 20

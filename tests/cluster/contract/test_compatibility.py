"""Every public method, command and variable of the installed SDK is called; docs/compatibility.md says what
came of it.

`make compatibility` writes the table anew.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping
from pathlib import Path

import pytest

from tests.cluster.conftest import Cluster
from tests.cluster.contract.compatibility import command_line, page, rest, sampling, sdk, service, training
from tests.cluster.contract.compatibility.walk import PROBES, WRONG, Row, Walk

PROBED = (service, training, sampling, rest, command_line)
WRITE = "TINSMITH_WRITE_COMPATIBILITY"


def parameters() -> dict[str, list[str]]:
    """Of all that has some."""
    of_commands = {f"tinker {words}": names for words, names in sdk.commands().items()}
    return {**sdk.methods(), **sdk.constructors(), **of_commands}


def test_there_is_a_probe_for_all_that_the_sdk_has() -> None:
    probed = {probe.key for probe in PROBES}
    cases = {(probe.key, probe.case) for probe in PROBES}
    assert sorted({*parameters(), *sdk.variables()} - probed) == []
    chosen = {**sdk.choices(), **sdk.fields()}
    assert sorted({(kind, value) for kind, values in chosen.items() for value in values} - cases) == []
    assert sorted(probed - {*parameters(), *sdk.variables(), *chosen}) == [], "probes of what is not there"


def test_what_the_sdk_asks_works_or_is_refused_as_the_table_says(cluster: Cluster, tmp_path: Path) -> None:
    walk = Walk(cluster, tmp_path)
    rows = walk.rows()
    assert [row for row in rows if row.verdict == WRONG] == []
    assert not_given(parameters(), walk.used) == []
    written = page.PAGE.read_text()
    found = page.with_tables(written, "walk", page.tables(rows, parameters()))
    if os.environ.get(WRITE):
        page.PAGE.write_text(found)
    elif found != written:
        pytest.fail(f"docs/compatibility.md is stale; run make compatibility:\n{changed(written, found)}")


def not_given(known: Mapping[str, Iterable[str]], used: Mapping[str, set[str]]) -> list[str]:
    """Parameters that no probe gave."""
    skipped = {f"tinker {words}" for words in command_line.NOT_CALLED}
    return [
        f"{key}: {name}"
        for key, names in known.items()
        for name in names
        if key not in skipped and name not in used.get(key.removeprefix("tinker "), set())
    ]


def changed(before: str, after: str) -> str:
    lines = set(before.splitlines())
    return "\n".join(line for line in after.splitlines() if line not in lines)


def test_a_row_tells_of_twins_apart_only_where_they_differ() -> None:
    rows = [Row("RestClient.a", "", False, "works", ""), Row("RestClient.a", "", True, "works", "")]
    assert "| `a(b)`, `_async` | works |" in page.tables(rows, {"RestClient.a": ["b"]})
    rows[1] = Row("RestClient.a", "", True, "refused", "why")
    assert "| `a_async(b)` | refused | why |" in page.tables(rows, {"RestClient.a": ["b"]})

"""docs/compatibility.md: its prose is written by hand, its tables by tests, each between two marks."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import groupby
from pathlib import Path

from tests.cluster.contract.compatibility.walk import Row

PAGE = Path(__file__).parents[4] / "docs" / "compatibility.md"
_ORDER = (
    *("ServiceClient", "optimizer", "TrainingClient", "loss_fn", "AdamParams", "kind of sampling client"),
    *("SamplingClient", "SamplingParams", "chunk", "RestClient", "AdminClient", "APIFuture", "auth"),
    *("tinker", ""),
)
_AREAS = {
    "loss_fn": "Losses (`loss_fn=`)",
    "optimizer": "Optimizers (`optimizer=`)",
    "chunk": "Chunks of a prompt or an input",
    "kind of sampling client": "`save_weights_and_get_sampling_client(kind=)`",
    "auth": "`tinker.auth`",
    "tinker": "The command line",
    "": "Environment variables",
}


def tables(rows: Sequence[Row], parameters: Mapping[str, Sequence[str]]) -> str:
    """The rows as Markdown, a table for each client.

    Args:
        parameters: of methods, constructors and commands, by key.
    """
    lines = []
    for area, found in groupby(sorted(rows, key=lambda row: _order(row.key)), key=lambda row: _area(row.key)):
        lines += ["", f"### {_AREAS.get(area, f'`{area}`')}", "", "| | | |", "|---|---|---|"]
        for _, same in groupby(found, key=lambda row: (row.key, row.case)):
            lines += _lines(list(same), parameters)
    return "\n".join([*lines[1:], ""])


def _lines(rows: list[Row], parameters: Mapping[str, Sequence[str]]) -> list[str]:
    """A method and its twin in one line, unless different things came of them."""
    if len({(row.verdict, row.note) for row in rows}) == 1:
        rows = rows[-1:]
        return [_line(rows[0], "", ", `_async`" if rows[0].twin else "", parameters)]
    return [_line(row, "_async" if row.twin else "", "", parameters) for row in rows]


def _line(row: Row, suffix: str, beside: str, parameters: Mapping[str, Sequence[str]]) -> str:
    if row.case:
        what = f"&nbsp;&nbsp;`{row.case}`" if row.key in parameters else f"`{row.case}`"
    elif row.key.startswith("tinker "):
        given = "".join(f" {name.upper()}" for name in parameters[row.key])
        what = f"`{row.key}`{given}"
    elif row.key in parameters:
        name = row.key.partition(".")[2] or row.key.removesuffix("()")
        what = f"`{name}{suffix}({', '.join(parameters[row.key])})`{beside}"
    else:
        what = f"`{row.key}`"
    note = " ".join(row.note.replace("|", "\\|").split())
    return f"| {what} | {row.verdict} | {note} |"


def _area(key: str) -> str:
    if key.startswith("tinker "):
        return "tinker"
    if key.isupper():
        return ""
    return key.removesuffix("()").partition(".")[0]


def _order(key: str) -> int:
    return _ORDER.index(_area(key))


def with_tables(page: str, name: str, text: str) -> str:
    """The page with the tables of this name replaced."""
    begin, end = f"<!-- begin: {name} -->\n", f"<!-- end: {name} -->"
    before, _, rest = page.partition(begin)
    _, mark, after = rest.partition(end)
    assert mark, f"{PAGE} lacks the marks of {name}"
    return f"{before}{begin}\n{text}\n{end}{after}"

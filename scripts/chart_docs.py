"""Writes the chart's README from the comments of its values.yaml.

    python scripts/chart_docs.py     writes deploy/k8s/tinsmith/README.md

Invariant: a comment tells of the values that follow it, to the next comment, empty line or end of a block.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

CHART = Path(__file__).resolve().parents[1] / "deploy" / "k8s" / "tinsmith"
README = CHART / "README.md"

_HEAD = """\
# Values of the chart

Written by `make chart-docs` from the comments of [values.yaml](values.yaml). How to install the chart is in
[deploy/README.md](../../README.md).
"""
_KEY = re.compile(r" *(?P<key>[A-Za-z]\w*):(?: +(?P<value>\S.*))?$")


@dataclass
class Entry:
    """Values that one comment tells of: dotted names with their defaults; "" = it is a block."""

    comment: str
    values: list[tuple[str, str]] = field(default_factory=list)


def entries(text: str) -> Sequence[Entry]:
    """The comments of a values.yaml, with the values that each is about. A block has no default."""
    found: list[Entry] = []
    path: list[tuple[int, str]] = []
    comment: list[str] = []
    current: Entry | None = None
    skip: int | None = None
    for line in text.splitlines():
        bare = line.strip()
        indent = len(line) - len(line.lstrip())
        if skip is not None and bare and (indent > skip or bare.startswith("- ")):
            continue
        skip = None
        if not bare:
            current, comment = None, []
        elif bare.startswith("#"):
            comment.append(bare.removeprefix("#").removeprefix(" "))
        elif match := _KEY.match(line):
            while path and path[-1][0] >= indent:
                current = None if path[-1][0] > indent else current
                path.pop()
            path.append((indent, match["key"]))
            name = ".".join(key for _, key in path)
            if comment or current is None or match["value"] is None:
                current = Entry("\n".join(comment))
                found.append(current)
                comment = []
            if match["value"] is not None:
                current.values.append((name, match["value"]))
            else:
                current.values.append((name, ""))
                current = None
                skip = indent if name == "models" else None
    return found


def page(text: str) -> str:
    """The README for a values.yaml."""
    lines = [_HEAD]
    section = ""
    for entry in entries(text):
        top = entry.values[0][0].split(".")[0]
        if top != section:
            section = top
            lines.append(f"\n## {top}\n")
        if entry.comment or entry.values[0][1]:
            lines.append(_item(entry))
    return "\n".join(lines) + "\n"


def _item(entry: Entry) -> str:
    names = ", ".join(f"`{name}`" + (f" = `{value}`" if value else "") for name, value in entry.values)
    if "\n  " in entry.comment:
        told = "\n\n" + "\n".join(f"      {line}" for line in entry.comment.splitlines())
        return f"- {names}:{told}\n"
    told = " ".join(entry.comment.split())
    return f"- {names}: {told}" if told else f"- {names}"


if __name__ == "__main__":
    README.write_text(page((CHART / "values.yaml").read_text()))

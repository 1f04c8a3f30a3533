"""The table of SDK versions in docs/compatibility.md."""

from __future__ import annotations

import ast
import re
from collections.abc import Mapping

STEPS = ("session", "train", "forward", "custom_loss", "sample", "save", "resume", "lists")
_DETAIL = re.compile(r"Error code: \d+ - (\{.*\})", re.DOTALL)


def table(found: Mapping[str, Mapping[str, str]]) -> str:
    """A line for each version: what came of its steps.

    Args:
        found: "works" or an error by step; a step that is not there was not tried.
    """
    lines = [f"| tinker | {' | '.join(name.replace('_', ' ') for name in STEPS)} | |"]
    lines += ["|---|" + "---|" * (len(STEPS) + 1)]
    lines += [line(version, told) for version, told in found.items()]
    return "\n".join([*lines, ""])


def line(version: str, told: Mapping[str, str]) -> str:
    """What came of the steps of one version."""
    cells = [_cell(told.get(step)) for step in STEPS]
    reasons = dict.fromkeys(reason(text) for text in told.values() if text != "works")
    return f"| {version} | {' | '.join(cells)} | {'; '.join(reasons)} |"


def _cell(told: str | None) -> str:
    return "" if told is None else "works" if told == "works" else "**no**"


def reason(text: str) -> str:
    """The cluster's own sentence where an error has one."""
    match = _DETAIL.search(text)
    if match is not None:
        text = str(ast.literal_eval(match[1])["detail"])
    else:
        text = text.partition("Request failed: ")[2].partition(" for self.request_id=")[0] or text
    return " ".join(text.replace("|", "\\|").split())

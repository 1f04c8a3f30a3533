"""What failed in a suite, once more at its end: pytest says it in each part's own output, half an hour apart.

python scripts/failed_tests.py REPORT...: files that pytest wrote with --junitxml.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path
from xml.etree import ElementTree

_LAST_LINES = 12
"""Of what pytest says of a failure: what was compared, or was raised, and where."""


def failures(report: Path) -> Iterator[str]:
    """Of each failed test of a report its name and the last of what pytest says of it.

    A part that ended before it had written its report has none. Of one that it had not written whole, that is
    said instead.
    """
    if not report.is_file():
        return
    try:
        cases = ElementTree.parse(report).iter("testcase")
    except ElementTree.ParseError as error:
        yield f"-- {report} cannot be read ({error}): what failed in that part is in its own output"
        return
    for case in cases:
        for kind in ("failure", "error"):
            for found in case.findall(kind):
                said = (found.text or found.get("message") or "").strip().splitlines()[-_LAST_LINES:]
                name = f"{case.get('classname', '').replace('.', '/')}.py::{case.get('name')}"
                yield "\n".join([f"-- {name} ({kind})", *(f"   {line}" for line in said)])


if __name__ == "__main__":
    for path in sys.argv[1:]:
        for failure in failures(Path(path)):
            print(failure)

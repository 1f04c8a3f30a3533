"""The chart's README tells of every value, in the words of values.yaml."""

from __future__ import annotations

import yaml

from scripts import chart_docs
from tests.helm.rendered import CHART


def leaves(values: object, prefix: str = "") -> set[str]:
    """Dotted names of all values, as deep as values.yaml has them on lines of their own."""
    if not isinstance(values, dict) or not values:
        return {prefix}
    return {name for key, one in values.items() for name in leaves(one, f"{prefix}.{key}".strip("."))}


def test_the_readme_is_current() -> None:
    text = (CHART / "values.yaml").read_text()
    assert chart_docs.README.read_text() == chart_docs.page(text), "run make chart-docs"


def test_every_value_is_told_of() -> None:
    text = (CHART / "values.yaml").read_text()
    told = {name for entry in chart_docs.entries(text) for name, _ in entry.values}
    for name in leaves(yaml.safe_load(text)):
        parts = name.split(".")
        assert any(".".join(parts[:end]) in told for end in range(1, len(parts) + 1)), name


def test_a_comment_is_of_the_values_that_follow_it() -> None:
    text = "a:\n  # One.\n  b: 1\n  c: []\n\n  d: 2\n# Block.\ne:\n  f: {}\n"
    found = [(entry.comment, entry.values) for entry in chart_docs.entries(text)]
    assert found == [
        ("", [("a", "")]),
        ("One.", [("a.b", "1"), ("a.c", "[]")]),
        ("", [("a.d", "2")]),
        ("Block.", [("e", "")]),
        ("", [("e.f", "{}")]),
    ]

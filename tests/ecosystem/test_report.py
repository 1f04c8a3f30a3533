"""The table of docs/cookbook.md keeps what did not run again, and takes what did."""

from __future__ import annotations

from pathlib import Path

from tests.ecosystem.report import Row, write


def text_of(path: Path, *rows: Row) -> str:
    write(path, list(rows), cookbook="0.6.1", policy="org/name", teacher="org/other")
    return path.read_text()


def test_a_row_is_replaced_and_the_others_stay_in_their_order(tmp_path: Path) -> None:
    path = tmp_path / "cookbook.md"
    text_of(
        path, Row("b", "b.train x=1", 2, "loss 2 to 1", 3.2, "one"), Row("a, killed", "a", 1, "", 1.0, "one")
    )
    text = text_of(path, Row("b", "b.train x=2", 4, "loss 3 to 1", 5.0, "two"))
    rows = [
        line for line in text.splitlines() if line.startswith("| ") and "`" in line and "Recipe" not in line
    ]
    assert rows[:2] == [
        "| a, killed | `a` | 1 |  | 1 | one |",
        "| b | `b.train x=2` | 4 | loss 3 to 1 | 5 | two |",
    ]


def test_what_comes_after_the_table_is_there_once(tmp_path: Path) -> None:
    path = tmp_path / "cookbook.md"
    row = Row("a", "a", 1, "", 1.0, "one")
    assert text_of(path, row) == text_of(path, row)
    assert path.read_text().count("## Not in the table") == 1


def test_a_recipe_that_ran_is_not_among_those_that_did_not(tmp_path: Path) -> None:
    path = tmp_path / "cookbook.md"
    assert "| rl_numerics_check | asks for" in text_of(path, Row("a", "a", 1, "", 1.0, "one"))
    assert text_of(path, Row("rl_numerics_check", "x", 1, "", 1.0, "one")).count("| rl_numerics_check |") == 1

"""The pictures of the dashboards: where a panel is, how a series becomes a path, how an axis is written."""

from __future__ import annotations

import json
import re
import xml.etree.ElementTree as ElementTree
from typing import Any

import pytest

from scripts.dashboards import FOLDER
from scripts.pictures import CELL, LINE, Series, asked, legend_lines, named, on_grid, path, picture, scale

SVG = "{http://www.w3.org/2000/svg}"
ROOT = FOLDER.parents[3]


def panel(number: int, x: int, y: int, title: str = "Steps", unit: str = "short") -> dict[str, Any]:
    return {
        "id": number,
        "type": "timeseries",
        "title": title,
        "gridPos": {"x": x, "y": y, "w": 8, "h": 7},
        "fieldConfig": {"defaults": {"unit": unit}},
    }


def drawn(*panels: dict[str, Any], **lines: list[Series]) -> ElementTree.Element:
    dashboard = {"title": "All", "panels": list(panels)}
    text = picture(dashboard, {int(name[1:]): found for name, found in lines.items()}, 0, 600)
    return ElementTree.fromstring(text)


def texts(found: ElementTree.Element) -> list[str]:
    return [one.text or "" for one in found.iter(f"{SVG}text")]


def test_a_panel_is_where_the_grid_has_it_and_the_picture_is_as_high_as_all() -> None:
    found = drawn(panel(1, 0, 1), panel(2, 16, 8))
    places = [one.get("transform") for one in found.iter(f"{SVG}g")]
    assert places[1:] == [f"translate(4 {LINE + 4})", f"translate({16 * CELL + 4} {8 * LINE + 4})"]
    assert found.get("viewBox") == f"0 0 {24 * CELL} {15 * LINE + 40}"


def test_a_panel_says_its_title_its_legend_and_its_unit_or_that_there_is_nothing() -> None:
    series = Series("a <b>", ((0, 0.0), (300, 0.05), (600, 0.1)))
    found = texts(drawn(panel(1, 0, 0, "Wait & run", "s"), panel(2, 8, 0), p1=[series], p2=[]))
    assert {"Wait & run", "a <b>", "0 ms", "100 ms", "No data"} <= set(found)
    assert found.count("No data") == 1


def test_a_series_without_a_value_is_no_line_and_not_in_the_legend() -> None:
    found = drawn(panel(1, 0, 0), p1=[Series("nothing", ((0, None), (600, None)))])
    assert "No data" in texts(found) and "nothing" not in texts(found)


@pytest.mark.parametrize(
    ("points", "expected"),
    [
        ([(0, 1), (10, 2.25), (20, 3)], "M0.0 1.0L10.0 2.2L20.0 3.0"),
        ([(0, 1), (10, 2), (20, None), (30, 4), (40, 5)], "M0.0 1.0L10.0 2.0M30.0 4.0L40.0 5.0"),
        ([(0, None), (10, 2), (20, None)], "M10.0 2.0h.1"),
        ([(0, None)], ""),
    ],
    ids=["in one", "with a gap", "alone", "nothing"],
)
def test_a_series_is_a_path_that_breaks_where_there_is_no_value(
    points: list[tuple[float, float | None]], expected: str
) -> None:
    assert path(points) == expected


@pytest.mark.parametrize(
    ("unit", "greatest", "ticks"),
    [
        ("s", 0.0031, ["0 ms", "1 ms", "2 ms", "3 ms", "4 ms"]),
        ("s", 0.25, ["0 ms", "100 ms", "200 ms", "300 ms"]),
        ("bytes", 3 * 2**20, ["0 MiB", "1 MiB", "2 MiB", "3 MiB"]),
        ("Bps", 3000, ["0 KiB/s", "1 KiB/s", "2 KiB/s", "3 KiB/s"]),
        ("percentunit", 0.031, ["0%", "1%", "2%", "3%", "4%"]),
        ("short", 12_000, ["0K", "5K", "10K", "15K"]),
        ("reqps", 0.0, ["0/s", "0.5/s", "1/s"]),
    ],
)
def test_an_axis_has_round_ticks_in_a_unit_that_fits_and_reaches_above_all(
    unit: str, greatest: float, ticks: list[str]
) -> None:
    axis = scale(unit, greatest)
    assert axis.top >= greatest
    assert [axis.text(tick) for tick in axis.ticks] == ticks


def test_values_are_found_at_their_steps_though_prometheus_rounds_to_milliseconds() -> None:
    start = 1_795_460_000.123_456
    values = [(1_795_460_000.123, "1"), (1_795_460_020.123, "NaN"), (1_795_460_030.123, "4")]
    assert [value for _, value in on_grid(values, start, start + 30, 10)] == [1.0, None, None, 4.0]


def test_every_unit_of_the_dashboards_has_an_axis() -> None:
    for source in FOLDER.glob("*.json"):
        for one in json.loads(source.read_text())["panels"]:
            if one["type"] != "row":
                assert scale(one["fieldConfig"]["defaults"]["unit"], 5.0).top >= 5


def test_a_legend_goes_on_in_the_next_line_where_a_name_does_not_fit() -> None:
    lines = legend_lines(["a" * 10, "b" * 10, "c" * 100, "d"], 200)
    assert [[name[0] for _, name in line] for line in lines] == [["a", "b"], ["c"], ["d"]]
    assert [line[0][0] for line in lines] == [0, 0, 0]


def test_what_grafana_fills_in_is_filled_in() -> None:
    assert named("{{kind}} {{outcome}}", {"kind": "sample", "outcome": "ok"}) == "sample ok"
    expression = 'sum (rate(a{namespace=~"$namespace"}[$__rate_interval]))'
    assert asked(expression, "1m") == 'sum (rate(a{namespace=~".*"}[1m]))'


@pytest.mark.parametrize("name", ["health", "runs"])
def test_the_picture_of_a_dashboard_that_the_documentation_shows_is_there_and_small(name: str) -> None:
    assert f"({name}.svg)" in (ROOT / "docs" / "operations.md").read_text()
    source = ROOT / "docs" / f"{name}.svg"
    assert source.stat().st_size < 300_000
    title = json.loads((FOLDER / f"{name}.json").read_text())["title"]
    assert texts(ElementTree.parse(source).getroot())[0] == title


def test_panels_that_the_pictures_of_the_documentation_lack_are_told() -> None:
    document = " ".join((ROOT / "docs" / "operations.md").read_text().split())
    (told,) = re.findall(r"not in the pictures: (.*?)\.", document)
    lacking = []
    for name in ("health", "runs"):
        drawn_ones = texts(ElementTree.parse(ROOT / "docs" / f"{name}.svg").getroot())
        panels = json.loads((FOLDER / f"{name}.json").read_text())["panels"]
        lacking += [one["title"] for one in panels if one["title"] not in drawn_ones]
    assert re.findall(r"\*(.*?)\*", told) == lacking

"""The demo's curves."""

from __future__ import annotations

from pathlib import Path

import pytest

from examples.demo import plot


def columns(chart: str) -> list[int]:
    """Height of each bar in eighths of a line, the scale and the axis left out."""
    rows = [line.split("┤", 1)[1] for line in chart.splitlines()[:-1]]
    heights = [" ▁▂▃▄▅▆▇█".index(row[index]) for row in rows for index in range(0, len(row), 3)]
    width = len(heights) // len(rows)
    return [sum(heights[index::width]) for index in range(width)]


def test_bars_are_as_high_as_their_values() -> None:
    assert columns(plot.bars([4.0, 2.0, 1.0, 0.0], height=4)) == [32, 16, 8, 0]


def test_a_falling_curve_falls_in_the_chart() -> None:
    heights = columns(plot.bars([5.9, 4.1, 2.5, 1.7, 0.9, 0.3]))
    assert heights == sorted(heights, reverse=True)
    assert heights[0] > heights[-1]


def test_the_scale_names_the_largest_value() -> None:
    assert plot.bars([0.25, 3.5]).splitlines()[0].startswith("  3.50 ")


def test_zeros_can_be_drawn() -> None:
    assert columns(plot.bars([0.0, 0.0], height=2)) == [0, 0]


@pytest.mark.parametrize("values", [[], [float("nan")], [float("inf")], [-1.0]])
def test_what_cannot_be_drawn_is_refused(values: list[float]) -> None:
    with pytest.raises(ValueError, match="finite"):
        plot.bars(values)


def test_the_png_is_a_png(tmp_path: Path) -> None:
    path = tmp_path / "curves.png"
    plot.save_png(path, [3.0, 1.0], [0.2, 0.9], "some/model")
    assert path.read_bytes().startswith(b"\x89PNG")

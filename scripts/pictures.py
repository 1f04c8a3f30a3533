"""Draws the dashboards of the chart from what a Prometheus has, in the layout that Grafana gives them.

    python -m scripts.pictures http://127.0.0.1:9090 docs --minutes 10

writes docs/health.svg and docs/runs.svg, of the last ten minutes of all namespaces.
"""

from __future__ import annotations

import argparse
import json
import math
import sys
import time
import urllib.parse
import urllib.request
from collections.abc import Sequence
from dataclasses import dataclass
from html import escape
from pathlib import Path
from typing import Any

from scripts.dashboards import FOLDER

CELL, LINE = 48, 26
"""Pixels of a column and of a row of Grafana's grid, which has 24 columns."""
COLORS = ("#3871dc", "#37872d", "#e0752d", "#c4162a", "#8f3bb8", "#b58b00", "#0a9396", "#7d7d7d")
_GAP, _LEFT, _TOP, _LEGEND, _GLYPH = 8, 62, 26, 14, 6.3
_MOST_LEGEND = 3
_TIMEOUT_S = 30.0

_SECONDS = ((1e-6, " µs"), (1e-3, " ms"), (1.0, " s"), (60.0, " min"))
_BYTES = ((1.0, " B"), (1024.0, " KiB"), (1024.0**2, " MiB"), (1024.0**3, " GiB"))
_SHORT = ((1.0, ""), (1e3, "K"), (1e6, "M"), (1e9, "G"))
_UNITS: dict[str, tuple[Sequence[tuple[float, str]], str]] = {
    "s": (_SECONDS, ""),
    "bytes": (_BYTES, ""),
    "Bps": (_BYTES, "/s"),
    "short": (_SHORT, ""),
    "reqps": (_SHORT, "/s"),
    "ops": (_SHORT, "/s"),
    "percentunit": (((0.01, "%"),), ""),
}


@dataclass(frozen=True)
class Series:
    """A line of a panel: (second, value) in order; None = there is no value."""

    name: str
    points: tuple[tuple[float, float | None], ...]


@dataclass(frozen=True)
class Scale:
    """Of an axis: its ticks, the value at its top, and how a value is written."""

    top: float
    ticks: tuple[float, ...]
    unit: tuple[float, str]

    def text(self, value: float) -> str:
        factor, name = self.unit
        return f"{value / factor:.6g}{name}"


def scale(unit: str, greatest: float) -> Scale:
    """An axis from 0 for values up to the greatest; what is 0 throughout gets one up to 1."""
    factors, suffix = _UNITS[unit]
    greatest = greatest or 1.0
    factor, name = max((one for one in factors if one[0] <= greatest), default=factors[0])
    step = _nice(greatest / factor / 4)
    count = math.ceil(greatest / factor / step - 1e-9)
    ticks = tuple(factor * step * index for index in range(count + 1))
    return Scale(ticks[-1], ticks, (factor, name + suffix))


def _nice(step: float) -> float:
    """The next of 1, 2, 5, 10, ... times a power of ten."""
    power = 10.0 ** math.floor(math.log10(step))
    return power * next(most for most in (1, 2, 5, 10) if step <= most * power * (1 + 1e-9))


def named(legend: str, labels: dict[str, str]) -> str:
    """What the legend calls a series."""
    for label, value in labels.items():
        legend = legend.replace("{{" + label + "}}", value)
    return legend


def path(points: Sequence[tuple[float, float | None]]) -> str:
    """Places in pixels as the path of an SVG, broken where one has no height; a lone one is a dot."""
    drawn, before = [], False
    for index, (x, y) in enumerate(points):
        if y is None:
            before = False
            continue
        after = index + 1 < len(points) and points[index + 1][1] is not None
        drawn.append(f"{'L' if before else 'M'}{x:.1f} {y:.1f}" + ("" if before or after else "h.1"))
        before = True
    return "".join(drawn)


def legend_lines(names: Sequence[str], width: float) -> list[list[tuple[float, str]]]:
    """(left edge, name) of each name, in as many lines as they take."""
    lines: list[list[tuple[float, str]]] = [[]]
    x = 0.0
    for name in names:
        needed = 26 + _GLYPH * len(name)
        if lines[-1] and x + needed > width:
            lines.append([])
            x = 0.0
        lines[-1].append((x, name))
        x += needed
    return lines


def panel(found: dict[str, Any], lines: Sequence[Series], start: float, end: float) -> str:
    """A panel of a dashboard with what its expressions came to."""
    place = found["gridPos"]
    left, top = place["x"] * CELL + _GAP / 2, place["y"] * LINE + _GAP / 2
    width, height = place["w"] * CELL - _GAP, place["h"] * LINE - _GAP
    out = [
        f'<g transform="translate({left:g} {top:g})">',
        f'<rect width="{width}" height="{height}" rx="3" fill="#fff" stroke="#d8d9da"/>',
        f'<text x="10" y="17" class="t">{escape(found["title"])}</text>',
    ]
    shown = [one for one in lines if any(value is not None for _, value in one.points)]
    if not shown:
        return "".join([*out, f'<text x="{width / 2:g}" y="{height / 2:g}" class="n">No data</text></g>'])
    listed = legend_lines([one.name for one in shown], width - 2 * _GAP)
    hidden = sum(len(line) for line in listed[_MOST_LEGEND:])
    listed = listed[:_MOST_LEGEND]
    bottom = height - 20 - _LEGEND * len(listed)
    right = width - 22
    values = [value for one in shown for _, value in one.points if value is not None]
    axis = scale(found["fieldConfig"]["defaults"]["unit"], max(values))

    def x_of(at: float) -> float:
        return _LEFT + (at - start) / (end - start) * (right - _LEFT)

    def y_of(value: float) -> float:
        return bottom - value / axis.top * (bottom - _TOP)

    out += [f'<path d="M{_LEFT} {y_of(tick):.1f}H{right}" class="g"/>' for tick in axis.ticks]
    out += [
        f'<text x="{_LEFT - 5}" y="{y_of(tick) + 3.5:.1f}" class="y">{escape(axis.text(tick))}</text>'
        for tick in axis.ticks
    ]
    step = max(1, math.ceil((end - start) / 60 / 5))
    for minute in range(0, int((end - start) / 60) + 1, step):
        label = f"{minute} min" if minute else "0"
        out.append(f'<text x="{x_of(start + 60 * minute):.1f}" y="{bottom + 13}" class="x">{label}</text>')
    for index, one in enumerate(shown):
        drawn = path([(x_of(at), None if value is None else y_of(value)) for at, value in one.points])
        out.append(f'<path d="{drawn}" class="c{index % len(COLORS)}"/>')
    names = iter(range(len(shown)))
    for number, line in enumerate(listed):
        y = bottom + 26 + _LEGEND * number
        for x, name in line:
            color = next(names) % len(COLORS)
            out.append(f'<path d="M{x + 10:.0f} {y - 3.5}h10" class="c{color}"/>')
            out.append(f'<text x="{x + 24:.0f}" y="{y}" class="l">{escape(name)}</text>')
    if hidden:
        out.append(
            f'<text x="{right}" y="{bottom + 26 + _LEGEND * (_MOST_LEGEND - 1)}" class="y">+{hidden}</text>'
        )
    return "".join([*out, "</g>"])


def picture(dashboard: dict[str, Any], lines: dict[int, list[Series]], start: float, end: float) -> str:
    """A dashboard as SVG.

    Args:
        lines: of each panel, by its id.
    """
    height = max(one["gridPos"]["y"] + one["gridPos"]["h"] for one in dashboard["panels"]) * LINE
    width, top = 24 * CELL, 40
    colors = "".join(f".c{index}{{stroke:{color}}}" for index, color in enumerate(COLORS))
    out = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height + top}" font-size="10.5"',
        ' font-family="Helvetica,Arial,sans-serif" fill="#444">',
        "<style>path{fill:none;stroke-width:1.5;stroke-linecap:round;stroke-linejoin:round}.g{stroke:#ebebeb}",
        ".t{font-weight:600;font-size:12px}.y{text-anchor:end}.x,.n{text-anchor:middle;fill:#777}",
        f".h{{font-size:15px;font-weight:600}}{colors}</style>",
        f'<rect width="{width}" height="{height + top}" fill="#f4f5f5"/>',
        f'<text x="8" y="27" class="h">{escape(dashboard["title"])}</text>',
        f'<g transform="translate(0 {top})">',
    ]
    for one in dashboard["panels"]:
        if one["type"] == "row":
            y = one["gridPos"]["y"] * LINE + 18
            out.append(f'<text x="8" y="{y}" class="t">{escape(one["title"])}</text>')
        else:
            out.append(panel(one, lines.get(one["id"], []), start, end))
    return "\n".join([*out, "</g></svg>"]) + "\n"


def asked(expression: str, window: str) -> str:
    """The expression of a panel with Grafana's variables in it replaced."""
    return expression.replace("$namespace", ".*").replace("$__rate_interval", window)


def query(prometheus: str, call: str, **parameters: str) -> Any:
    """What an endpoint of Prometheus' HTTP API answers.

    Raises:
        OSError: it does not, or refuses.
    """
    url = f"{prometheus}/api/v1/{call}?{urllib.parse.urlencode(parameters)}"
    with urllib.request.urlopen(url, timeout=_TIMEOUT_S) as reply:
        return json.load(reply)["data"]


def on_grid(
    values: Sequence[tuple[float, str]], start: float, end: float, step: float
) -> tuple[tuple[float, float | None], ...]:
    """Every step of a period, with its value if there is one; Prometheus rounds to milliseconds."""
    known = {round((at - start) / step): float(value) for at, value in values}
    found = [known.get(index, math.nan) for index in range(int((end - start) / step) + 1)]
    return tuple(
        (start + index * step, value if math.isfinite(value) else None) for index, value in enumerate(found)
    )


def drawn_by(
    prometheus: str, found: dict[str, Any], start: float, end: float, step: float, window: str
) -> list[Series]:
    """What the expressions of a panel come to. Raises OSError."""
    lines = []
    for target in found["targets"]:
        period = {"start": str(start), "end": str(end), "step": str(step)}
        data = query(prometheus, "query_range", query=asked(target["expr"], window), **period)
        for result in data["result"]:
            points = on_grid(result["values"], start, end, step)
            lines.append(Series(named(target["legendFormat"], result["metric"]), points))
    return sorted(lines, key=lambda one: one.name) if len(found["targets"]) == 1 else lines


def draw(
    prometheus: str, directory: Path, start: float, end: float, step: float, window: str
) -> dict[str, list[str]]:
    """Writes a picture of every dashboard; the titles of the panels without data, by dashboard.

    Raises:
        OSError: Prometheus does not answer.
    """
    empty: dict[str, list[str]] = {}
    for source in sorted(FOLDER.glob("*.json")):
        dashboard = json.loads(source.read_text())
        panels = [one for one in dashboard["panels"] if one["type"] != "row"]
        lines = {one["id"]: drawn_by(prometheus, one, start, end, step, window) for one in panels}
        (directory / f"{source.stem}.svg").write_text(picture(dashboard, lines, start, end))
        empty[source.stem] = [
            one["title"]
            for one in panels
            if not any(value is not None for line in lines[one["id"]] for _, value in line.points)
        ]
    return empty


def main() -> int:
    """The command line."""
    parser = argparse.ArgumentParser(description="Draw the dashboards from what a Prometheus has.")
    parser.add_argument("prometheus", help="its URL")
    parser.add_argument("directory", type=Path)
    parser.add_argument("--minutes", type=float, default=10, help="how many, up to --end (default: 10)")
    parser.add_argument("--end", type=float, help="seconds since 1970 (default: now)")
    parser.add_argument("--step", type=float, default=10, help="seconds between two points (default: 10)")
    parser.add_argument("--window", default="1m", help="$__rate_interval (default: 1m)")
    options = parser.parse_args()
    end = math.floor(options.end or time.time())
    empty = draw(
        options.prometheus, options.directory, end - 60 * options.minutes, end, options.step, options.window
    )
    for name, titles in empty.items():
        for title in titles:
            print(f"{name}: no data: {title}", file=sys.stderr)
    return 0


if __name__ == "__main__":
    sys.exit(main())

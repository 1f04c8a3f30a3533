"""Writes the Grafana dashboards of the chart.

    python -m scripts.dashboards            write deploy/k8s/tinsmith/monitoring/*.json
    python -m scripts.dashboards --check    exit 1 if one of them is out of date

What they show is in panels.py.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

from scripts.panels import HEALTH, RUNS, Panel

FOLDER = Path(__file__).resolve().parents[1] / "deploy" / "k8s" / "tinsmith" / "monitoring"
WIDTH, HEIGHT, PER_ROW = 8, 7, 3


def dashboard(title: str, uid: str, rows: dict[str, list[Panel]]) -> dict[str, Any]:
    """A dashboard as Grafana imports it."""
    panels: list[dict[str, Any]] = []
    y = 0
    for heading, row in rows.items():
        panels.append(
            {
                "type": "row",
                "title": heading,
                "id": len(panels) + 1,
                "gridPos": {"x": 0, "y": y, "w": 24, "h": 1},
            }
        )
        y += 1
        for index, panel in enumerate(row):
            place = {
                "x": index % PER_ROW * WIDTH,
                "y": y + index // PER_ROW * HEIGHT,
                "w": WIDTH,
                "h": HEIGHT,
            }
            panels.append(_panel(len(panels) + 1, panel, place))
        y += -(-len(row) // PER_ROW) * HEIGHT
    return {
        "uid": uid,
        "title": title,
        "tags": ["tinsmith"],
        "schemaVersion": 39,
        "refresh": "30s",
        "time": {"from": "now-1h", "to": "now"},
        "templating": {"list": _variables()},
        "panels": panels,
    }


def _variables() -> list[dict[str, Any]]:
    source = {"name": "datasource", "label": "Prometheus", "type": "datasource", "query": "prometheus"}
    namespace = {
        "name": "namespace",
        "label": "Namespace",
        "type": "query",
        "datasource": {"type": "prometheus", "uid": "${datasource}"},
        "query": {"query": "label_values(tinsmith_models_led, namespace)", "refId": "namespace"},
        "includeAll": True,
        # What is scraped outside of Kubernetes has no namespace.
        "allValue": ".*",
        "refresh": 2,
    }
    return [source, namespace]


def _panel(number: int, panel: Panel, place: dict[str, int]) -> dict[str, Any]:
    title, unit, shown = panel
    source = {"type": "prometheus", "uid": "${datasource}"}
    return {
        "id": number,
        "type": "timeseries",
        "title": title,
        "datasource": source,
        "gridPos": place,
        "fieldConfig": {"defaults": {"unit": unit, "min": 0}, "overrides": []},
        "options": {"legend": {"displayMode": "list", "placement": "bottom"}},
        "targets": [
            {"refId": chr(ord("A") + index), "datasource": source, "expr": expression, "legendFormat": legend}
            for index, (legend, expression) in enumerate(shown.items())
        ],
    }


def files() -> dict[Path, str]:
    """What is to be in the folder."""
    made = {
        "health.json": dashboard("Tinsmith: service health", "tinsmith-health", HEALTH),
        "runs.json": dashboard("Tinsmith: training runs", "tinsmith-runs", RUNS),
    }
    return {FOLDER / name: json.dumps(content, indent=1) + "\n" for name, content in made.items()}


def main() -> int:
    """The command line."""
    wanted = files()
    if sys.argv[1:] == ["--check"]:
        return int(any(not path.exists() or path.read_text() != text for path, text in wanted.items()))
    FOLDER.mkdir(parents=True, exist_ok=True)
    for path, text in wanted.items():
        path.write_text(text)
    return 0


if __name__ == "__main__":
    sys.exit(main())

"""Dashboards and alerts speak of series that exist, with labels that they have; each alert has a runbook."""

from __future__ import annotations

import ast
import json
import re
import subprocess
import sys
from functools import cache
from importlib import util
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.helm.rendered import CHART, ROOT

FOLDER = CHART / "monitoring"
TARGET_LABELS = {"namespace", "pod", "instance", "job", "app_kubernetes_io_component", "tinsmith_model"}
"""What a scrape adds: Prometheus' own, and those of the chart's PodMonitor."""
OF_A_PROCESS = {
    "process_resident_memory_bytes",
    "process_cpu_seconds_total",
    "process_start_time_seconds",
}
_KINDS = {"Histogram": ("_bucket", "_count", "_sum"), "Counter": ("",), "Gauge": ("",)}
_SERIES = re.compile(r"\b(?:tinsmith_\w+|process_\w+|up\b|vllm:\w+)")
_LABELS = re.compile(r"[{,]\s*(\w+)\s*(?:=~|!~|!=|=)|\bby\s*\(([^)]*)\)")
_FUNCTIONS = {
    *("sum", "max", "min", "count", "time"),
    *("max_over_time", "rate", "increase", "changes", "histogram_quantile"),
}


@cache
def series() -> dict[str, set[str]]:
    """Every series that the services expose, and its labels."""
    found: dict[str, set[str]] = {"up": set(), **{name: set() for name in OF_A_PROCESS}}
    for path in sorted((ROOT / "services").rglob("*.py")):
        for node in ast.walk(ast.parse(path.read_text())):
            if not isinstance(node, ast.Call) or not node.args:
                continue
            kind = node.func.attr if isinstance(node.func, ast.Attribute) else getattr(node.func, "id", "")
            name = node.args[0].value if isinstance(node.args[0], ast.Constant) else None
            if kind in _KINDS and isinstance(name, str) and name.startswith("tinsmith_"):
                labels = set(ast.literal_eval(node.args[2])) if len(node.args) > 2 else set()
                for suffix in _KINDS[kind]:
                    found[name + suffix] = labels | ({"le"} if suffix == "_bucket" else set())
            elif kind == "Reading" and isinstance(name, str):
                found[f"tinsmith_{name}"] = {ast.literal_eval(label) for label in node.args[3:]}
    return found


@cache
def of_the_engine() -> set[str]:
    """vLLM's series, as its source names them; the client library adds _total to its counters."""
    specification = util.find_spec("vllm")
    assert specification is not None and specification.submodule_search_locations
    folder = Path(specification.submodule_search_locations[0]) / "v1" / "metrics"
    names = {name for path in folder.glob("*.py") for name in re.findall(r'"(vllm:\w+)"', path.read_text())}
    return names | {f"{name}_total" for name in names}


def alerts() -> list[dict[str, Any]]:
    (group,) = yaml.safe_load((FOLDER / "alerts.yaml").read_text())["groups"]
    return group["rules"]


def panels() -> list[tuple[str, str, str]]:
    """(title, expression, legend) of everything that the dashboards show."""
    found = []
    for name in ("health.json", "runs.json"):
        for panel in json.loads((FOLDER / name).read_text())["panels"]:
            targets = panel.get("targets", ())
            found += [(panel["title"], target["expr"], target["legendFormat"]) for target in targets]
    return found


def wrong_with(expression: str) -> list[str]:
    """What an expression speaks of that is not there."""
    named = set(_SERIES.findall(expression)) - TARGET_LABELS
    found = [f"{name} does not exist" for name in named - series().keys() - of_the_engine()]
    known = TARGET_LABELS.union(*(series().get(name, set()) for name in named))
    used = set()
    for match in _LABELS.finditer(expression):
        used |= {match[1]} if match[1] else {label.strip() for label in match[2].split(",")}
    found += [f"{', '.join(sorted(named))} has no label {label}" for label in used - known]
    words = {word for word in re.findall(r"\b([a-z_]+)\s*\(", expression) if word != "by"}
    found += [f"no function {word}" for word in words - _FUNCTIONS]
    if expression.count("(") != expression.count(")") or expression.count("{") != expression.count("}"):
        found.append("parentheses do not match")
    return found + ([] if named else ["no series at all"])


def test_what_is_wrong_with_an_expression_is_found() -> None:
    assert wrong_with("sum by (status) (rate(tinsmith_http_seconds_count[5m]))") == []
    assert wrong_with("rate(tinsmith_no_such_total[5m])") == ["tinsmith_no_such_total does not exist"]
    assert wrong_with("rate(tinsmith_http_seconds[5m])") == ["tinsmith_http_seconds does not exist"]
    assert wrong_with('rate(tinsmith_models{owner="x"}[5m])') == ["tinsmith_models has no label owner"]
    assert wrong_with("sum by (kind) (tinsmith_models)") == ["tinsmith_models has no label kind"]
    assert wrong_with("average(tinsmith_models") == ["no function average", "parentheses do not match"]
    assert wrong_with("vllm:no_such > 1") == ["vllm:no_such does not exist"]


@pytest.mark.parametrize(("title", "expression", "legend"), panels(), ids=lambda text: text[:40])
def test_a_panel_shows_series_that_exist(title: str, expression: str, legend: str) -> None:
    assert wrong_with(expression) == []
    grouped = {
        label.strip() for labels in re.findall(r"by \(([^)]*)\)", expression) for label in labels.split(",")
    }
    assert set(re.findall(r"\{\{(\w+)\}\}", legend)) <= grouped, title


@pytest.mark.parametrize("alert", alerts(), ids=lambda alert: alert["alert"])
def test_an_alert_watches_series_that_exist_and_has_a_runbook(alert: dict[str, Any]) -> None:
    assert wrong_with(alert["expr"]) == []
    grouped = {
        label.strip()
        for labels in re.findall(r"by \(([^)]*)\)", alert["expr"])
        for label in labels.split(",")
    }
    told = set(re.findall(r"\$labels\.(\w+)", alert["annotations"]["summary"]))
    assert told <= (grouped or TARGET_LABELS)
    headings = re.findall(r"^### (\w+)$", (ROOT / "docs" / "operations.md").read_text(), re.MULTILINE)
    assert alert["alert"] in headings
    assert alert["labels"]["severity"] in ("critical", "warning")


def test_every_runbook_is_of_an_alert() -> None:
    headings = re.findall(r"^### (Tinsmith\w+)$", (ROOT / "docs" / "operations.md").read_text(), re.MULTILINE)
    assert headings == [alert["alert"] for alert in alerts()]


def test_every_metric_of_the_services_is_on_a_dashboard() -> None:
    shown = {name for _, expression, _ in panels() for name in _SERIES.findall(expression)}
    bases = {re.sub(r"_(bucket|count|sum)$", "", name) for name in series()} - {"up"}
    missing = {name for name in bases if not any(one.startswith(name) for one in shown)}
    assert missing <= {
        # As gauges beside those that are shown: how much of it, of what is shown how many.
        "tinsmith_sample_request_bytes",
        # The seconds say more than the times.
        "tinsmith_loop_stalls_total",
    }


def test_the_files_are_what_the_script_writes() -> None:
    command = [sys.executable, "-m", "scripts.dashboards", "--check"]
    assert subprocess.run(command, cwd=ROOT, check=False).returncode == 0

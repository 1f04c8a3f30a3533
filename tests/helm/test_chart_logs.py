"""What the chart's processes log, tried on the programs that read it, and what watches them."""

from __future__ import annotations

import json

import pytest
import yaml

from tests.helm.rendered import CHART, arguments, container, pod, render, workloads


def environment(workload: dict) -> dict[str, str]:
    return {one["name"]: one["value"] for one in container(workload)["env"] if "value" in one}


@pytest.mark.parametrize(
    ("values", "form", "access"),
    [({}, "json", False), ({"logs": {"format": "text", "access": True}}, "text", True)],
    ids=["default", "set"],
)
def test_logs_are_objects_and_what_else_is_set(
    values: dict, form: str, access: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    from services.gateway import config as gateway
    from services.sampler import config as sampler
    from services.trainer import config as trainer

    objects = render(values)
    for component, config in (("gateway", gateway), ("trainer", trainer), ("sampler", sampler)):
        (workload,) = workloads(objects, component)
        given = environment(workload)
        for name in ("TINSMITH_LOG_FORMAT", "TINSMITH_ACCESS_LOG"):
            monkeypatch.setenv(name, given[name])
        monkeypatch.setenv("TINSMITH_REDIS_URL", "redis://tinsmith-redis:6379/0")
        words = arguments(workload)
        # A trainer's launcher has words of its own before the ranks'.
        settings = config.parse(words[words.index("--") + 1 :] if "--" in words else words)
        assert (settings.log_format, settings.access_log) == (form, access), component


def test_why_a_container_failed_is_told_where_kubernetes_tells_that_it_did() -> None:
    objects = render({"models": [{"name": "org/a", "path": "org/a", "revision": "0" * 40}]})
    for component in ("gateway", "trainer", "sampler"):
        (workload,) = workloads(objects, component)
        for each in [*pod(workload).get("initContainers", []), container(workload)]:
            # The last line of a process says what it has against its settings.
            assert each.get("terminationMessagePolicy") == "FallbackToLogsOnError", each["name"]


def test_dashboards_and_alerts_are_those_of_the_files_when_they_are_asked_for() -> None:
    def kinds(values: dict) -> dict[str, dict]:
        return {one["kind"]: one for one in render(values) if one["metadata"]["name"] in names}

    names = ("tinsmith-dashboards", "tinsmith")
    assert not {"ConfigMap", "PrometheusRule"} & kinds({}).keys()
    asked = {
        "dashboards": {"enabled": True},
        "alerts": {"enabled": True, "labels": {"release": "prometheus"}},
    }
    objects = kinds({"metrics": asked})
    assert objects["ConfigMap"]["metadata"]["labels"]["grafana_dashboard"] == "1"
    for name, text in objects["ConfigMap"]["data"].items():
        file = CHART / "monitoring" / name.removeprefix("tinsmith-")
        assert json.loads(text) == json.loads(file.read_text())
    assert objects["PrometheusRule"]["metadata"]["labels"]["release"] == "prometheus"
    rules = yaml.safe_load((CHART / "monitoring" / "alerts.yaml").read_text())
    assert objects["PrometheusRule"]["spec"] == rules
    off = kinds({"metrics": {"enabled": False, **asked}})
    assert not {"ConfigMap", "PrometheusRule"} & off.keys()

"""Both dashboards and all alerts on what a real Prometheus has of a cluster that is worked with.

MINUTES=n works for longer than two. PICTURES=folder draws the dashboards there.
"""

from __future__ import annotations

import json
import os
import subprocess
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

from scripts import pictures
from scripts.dashboards import FOLDER
from tests.cluster.conftest import BASE_MODEL, free_port, start_cluster, stop_cluster
from tests.monitoring.prometheus import program, watching
from tests.monitoring.tenants import Tenants, closed

MINUTES = float(os.environ.get("MINUTES") or "2")
ALERTS = FOLDER / "alerts.yaml"


@dataclass(frozen=True)
class Watched:
    """What Prometheus has of the time in which tenants worked.

    Attributes:
        empty: the panels without data, by dashboard.
        alerts: those that fired, or would have soon.
    """

    empty: dict[str, list[str]]
    alerts: list[str]
    failures: list[Exception]


@pytest.fixture(scope="module")
def watched(tmp_path_factory: pytest.TempPathFactory, model_dir: Path) -> Iterator[Watched]:
    directory = tmp_path_factory.mktemp("monitored")
    first = free_port()
    options = ("--gateways", "2", "--metrics-port", str(first))
    cluster = start_cluster(directory, model_dir, *options, timeout=900)
    names = ("gateway-0", "gateway-1", "trainer-0", "sampler-0")
    targets = {name: first + index for index, name in enumerate(names)}
    tenants = Tenants(cluster)
    try:
        with watching(directory, targets, BASE_MODEL.rpartition("/")[2], ALERTS) as prometheus:
            start = time.time()
            tenants.start()
            time.sleep(30 * MINUTES)
            cluster.kill_and_wait("gateway-1")
            time.sleep(max(0.0, start + 60 * MINUTES - time.time()))
            end = time.time()
            drawn = Path(os.environ.get("PICTURES") or directory)
            empty = pictures.draw(prometheus, drawn, start, end, step=10, window="1m")
            told = pictures.query(prometheus, "alerts")["alerts"]
        yield Watched(empty, [json.dumps(alert) for alert in told], tenants.failures)
    finally:
        tenants.stop()
        closed(cluster.clients)
        stop_cluster(cluster)


@pytest.mark.timeout(7200)
def test_every_panel_shows_something_of_a_cluster_that_is_worked_with(watched: Watched) -> None:
    assert watched.failures == []
    assert [title for titles in watched.empty.values() for title in titles] == []


def test_no_alert_fires_or_is_about_to_because_one_of_two_gateways_was_restarted(watched: Watched) -> None:
    assert watched.alerts == []


def test_prometheus_takes_the_rules() -> None:
    checked = subprocess.run(
        [program("promtool"), "check", "rules", str(ALERTS)], capture_output=True, text=True, timeout=60
    )
    assert checked.returncode == 0, checked.stdout + checked.stderr

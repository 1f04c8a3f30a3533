"""A Prometheus that scrapes the processes of one `tinsmith up`, with the labels of the chart's PodMonitor."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import time
import urllib.request
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

import yaml

from services.common.process.process import die_with_parent
from services.launcher.machine import free_port

SCRAPE_S = 15


def program(name: str) -> str:
    """Where a program of Prometheus is: on the PATH, or in the folder PROMETHEUS.

    Raises:
        AssertionError: nowhere.
    """
    found = shutil.which(name, path=os.pathsep.join([os.environ.get("PROMETHEUS", ""), os.environ["PATH"]]))
    assert found is not None, f"{name} is not here: install Prometheus, or set PROMETHEUS to its folder"
    return found


def configuration(targets: Mapping[str, int], model: str, rules: Path) -> str:
    """Scrapes these processes (name -> port of its metrics), and evaluates these rules."""
    scraped = [
        {
            "targets": [f"127.0.0.1:{port}"],
            "labels": {
                "namespace": "tinsmith",
                "pod": name,
                "app_kubernetes_io_component": name.partition("-")[0],
                "tinsmith_model": "" if name.startswith("gateway") else model,
            },
        }
        for name, port in targets.items()
    ]
    every = f"{SCRAPE_S}s"
    return yaml.safe_dump(
        {
            "global": {"scrape_interval": every, "evaluation_interval": every},
            "rule_files": [str(rules)],
            "scrape_configs": [{"job_name": "tinsmith", "static_configs": scraped}],
        }
    )


@contextmanager
def watching(directory: Path, targets: Mapping[str, int], model: str, rules: Path) -> Iterator[str]:
    """Runs Prometheus meanwhile. Yields its URL."""
    address = f"127.0.0.1:{free_port()}"
    configured = directory / "prometheus.yml"
    configured.write_text(configuration(targets, model, rules))
    command = [program("prometheus"), f"--config.file={configured}", f"--web.listen-address={address}"]
    with (directory / "prometheus.log").open("wb") as log:
        process = subprocess.Popen(
            [*command, f"--storage.tsdb.path={directory / 'tsdb'}"],
            stdout=log,
            stderr=subprocess.STDOUT,
            preexec_fn=lambda: die_with_parent(signal.SIGTERM),
        )
    try:
        _wait_for(f"http://{address}/-/ready", process)
        yield f"http://{address}"
    finally:
        process.terminate()
        process.wait(timeout=30)


def _wait_for(url: str, process: subprocess.Popen[bytes]) -> None:
    deadline = time.monotonic() + 60
    while time.monotonic() < deadline and process.poll() is None:
        try:
            with urllib.request.urlopen(url, timeout=5):
                return
        except OSError:
            time.sleep(0.2)
    raise AssertionError("Prometheus does not come up")

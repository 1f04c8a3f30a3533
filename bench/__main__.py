"""Runs all measurements against one fresh cluster: `python -m bench [--name NAME]`.

Prints a table and writes bench/results/NAME.json. Exit code 1 when a row is above its bound.
"""

from __future__ import annotations

import argparse
import datetime
import json
import os
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import tinker
import transformers

from examples.demo import cluster, display
from services.launcher.tiny_model import make_tiny_model

from . import exactness, latency, machine, throughput, waiting
from .stack import BASE_MODEL, Row, Stack

ROOT = Path(__file__).resolve().parents[1]
VOCAB = 4096
# What the yardsticks run on, and in.
CPU = ("--device", "cpu", "--dtype", "float32")


def main(argv: list[str] | None = None) -> int:
    """Runs everything and returns the exit code."""
    parser = argparse.ArgumentParser(prog="python -m bench", description=__doc__)
    cores = len(os.sched_getaffinity(0))
    parser.add_argument("--name", default=f"cpu-{cores}-cores", help="of the file in bench/results")
    args = parser.parse_args(argv)
    started = time.monotonic()
    with tempfile.TemporaryDirectory(prefix="tinsmith-bench-") as scratch:
        rows = run(Path(scratch), threads=max(1, cores // 2))
    show(rows)
    path = save(args.name, rows, time.monotonic() - started)
    display.line(f"{path} ({time.monotonic() - started:.0f} s)")
    return 0 if all(row.holds for row in rows) else 1


def run(scratch: Path, threads: int) -> list[Row]:
    """Starts a cluster on a random model of 23 million parameters and measures.

    Args:
        threads: that `tinsmith up` gives to trainer and sampler each.
    """
    transformers.utils.logging.disable_progress_bar()
    model_dir = make_tiny_model(
        scratch / "model",
        vocab=VOCAB,
        hidden=512,
        layers=6,
        heads=8,
        kv_heads=4,
        intermediate=1536,
        tie_embeddings=False,
    )
    data_dir = scratch / "data"
    with display.waiting("Starting the cluster") as tell:
        running = cluster.start(BASE_MODEL, str(model_dir), data_dir, tell, *CPU)
    rows: list[Row] = []
    with running:
        to = running.endpoint
        with tinker.ServiceClient(base_url=to.base_url, api_key=to.api_key) as service:
            stack = Stack(
                service, to.base_url, to.grpc_address, to.api_key, data_dir, model_dir, VOCAB, threads
            )
            measurements: tuple[tuple[str, Callable[[], list[Row]]], ...] = (
                ("Comparing log-probabilities", lambda: exactness.measure(stack)),
                ("Training", lambda: [throughput.training(stack)]),
                ("Publishing weights", lambda: [latency.publishing(stack)]),
                ("Accepting requests", lambda: [latency.accepting(stack)]),
                ("Heartbeats", lambda: [waiting.heartbeats(stack)]),
                ("Sampling", lambda: throughput.sampling(stack, scratch)),
            )
            for label, measure in measurements:
                with display.waiting(label):
                    rows += measure()
    return rows


def show(rows: list[Row]) -> None:
    """Prints the table."""
    cells = []
    for row in rows:
        value = f"{row.value:.2g}" if row.bound is not None else f"{row.value:.2f}"
        if row.bound is not None:
            value += f"  ({'≤' if row.holds else 'NOT ≤'} {row.bound:g})"
        details = "\n".join(f"{key} {_number(figure)}" for key, figure in row.details.items())
        cells.append((row.name, value, row.unit, details))
    display.table(("measured", "value", "unit", "details"), cells)


def _number(figure: float | int | str) -> str:
    return f"{figure:.3g}" if isinstance(figure, float) and figure < 1e-2 else str(figure)


def save(name: str, rows: list[Row], seconds: float) -> Path:
    """Writes the results with what they were measured on."""
    path = ROOT / "bench" / "results" / f"{name}.json"
    path.parent.mkdir(parents=True, exist_ok=True)
    report = {
        "measured": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        "seconds": round(seconds),
        "machine": machine.facts(ROOT),
        "model": {"family": "Qwen3, random weights", "parameters_millions": 23, "dtype": "float32"},
        "rows": [
            {
                "name": row.name,
                "value": row.value,
                "unit": row.unit,
                "bound": row.bound,
                "holds": row.holds,
                "details": row.details,
            }
            for row in rows
        ],
    }
    path.write_text(json.dumps(report, indent=2) + "\n")
    return path


if __name__ == "__main__":
    sys.exit(main())

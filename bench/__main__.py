"""Runs measurements against one fresh cluster: `python -m bench [--name NAME] [--only MEASUREMENT ...]`.

Prints a table with the targets, and unless --only chose some writes bench/results/NAME.json and the tables
that documents make of checked-in results (bench/measured.py). Exit code 1 when
a row that holds on any machine (exactness) misses its target.

`python -m bench gpu` is another program, for a machine with a GPU: bench/gpu/program.py.
"""

from __future__ import annotations

import sys

if __name__ == "__main__" and sys.argv[1:2] == ["gpu"]:
    # Before the imports below, of which such a machine has not all.
    from bench.gpu.program import main as measure_a_gpu

    sys.exit(measure_a_gpu(sys.argv[2:]))

import argparse
import datetime
import json
import os
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import tinker
import transformers

from bench import machine, measured
from bench.counted import loss_memory, structure
from bench.requests import cost, latency, waiting
from bench.rows import Row
from bench.sampling import publishing
from bench.sampling import throughput as sampling
from bench.stack import BASE_MODEL, CPU, Stack
from bench.training import exactness, throughput
from examples.demo import cluster, display
from services.launcher.tiny_model import make_tiny_model

ROOT = Path(__file__).resolve().parents[1]
VOCAB = 4096


ALONE: dict[str, tuple[str, Callable[[], list[Row]]]] = {
    "structure": ("Counting", structure.measure),
    "loss-memory": ("Measuring the loss's memory", loss_memory.measure),
}
"""Without a cluster."""

MEASUREMENTS: dict[str, tuple[str, Callable[[Stack], list[Row]]]] = {
    "exactness": ("Comparing log-probabilities", exactness.measure),
    "training": ("Training", throughput.training),
    "mixed-lengths": ("Training on sequences of many lengths", throughput.mixed_lengths),
    "shared-prefixes": ("Training on answers to one prompt", throughput.shared_prefixes),
    "small-tenants": ("Training in small steps", throughput.small_tenants),
    "small-forward": ("Small requests", latency.small_forward),
    "waiting": ("Small requests beside training", waiting.small_forwards),
    "waiting-tiny": (
        "Small requests beside training of a tiny model",
        waiting.small_forwards_on_a_tiny_model,
    ),
    "accepting": ("Accepting requests", latency.accepting),
    "publishing": ("Publishing weights", publishing.measure),
    "sampling-base": ("Sampling the base model", sampling.base_model),
    "sampling-base-alone": ("Sampling the base model without adapters", sampling.base_model_alone),
    "sampling-adapters": ("Sampling adapters", sampling.adapters),
    "sampling-many": ("Sampling 1,024 sequences at once", sampling.many_sequences),
    "sample-costs": ("What a sample costs its services", cost.one_token_samples),
    "heartbeats": ("Heartbeats", waiting.heartbeats),
}


def main(argv: list[str] | None = None) -> int:
    """Runs what was chosen and returns the exit code."""
    parser = argparse.ArgumentParser(prog="python -m bench", description=__doc__)
    cores = len(os.sched_getaffinity(0))
    parser.add_argument("--name", default=f"cpu-{cores}-cores", help="of the file in bench/results")
    parser.add_argument(
        "--only",
        action="append",
        choices=[*ALONE, *MEASUREMENTS],
        help="measure this and write no file; repeatable",
    )
    args = parser.parse_args(argv)
    started = time.monotonic()
    with tempfile.TemporaryDirectory(prefix="tinsmith-bench-") as scratch:
        rows = run(Path(scratch), max(1, cores // 2), args.only or [*ALONE, *MEASUREMENTS])
    show(rows)
    elapsed = time.monotonic() - started
    where = "not saved" if args.only else save(args.name, rows, elapsed)
    display.line(f"{where} ({elapsed:.0f} s)")
    return 0 if all(row.holds for row in rows if row.required) else 1


def run(scratch: Path, threads: int, chosen: list[str]) -> list[Row]:
    """Measures; what needs one, in a fresh cluster on a random model of 23 million parameters.

    Args:
        threads: that `tinsmith up` gives to trainer and sampler each.
        chosen: keys of ALONE and MEASUREMENTS.
    """
    rows: list[Row] = []
    for name in (name for name in chosen if name in ALONE):
        label, count = ALONE[name]
        with display.waiting(label):
            rows += count()
    of_a_cluster = [name for name in chosen if name in MEASUREMENTS]
    return rows + (_in_a_cluster(scratch, threads, of_a_cluster) if of_a_cluster else [])


def _in_a_cluster(scratch: Path, threads: int, chosen: list[str]) -> list[Row]:
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
                service,
                to.base_url,
                to.grpc_address,
                to.api_key,
                data_dir,
                model_dir,
                scratch,
                VOCAB,
                threads,
                running.pid,
            )
            for name in chosen:
                label, measure = MEASUREMENTS[name]
                with display.waiting(label):
                    rows += measure(stack)
    return rows


def show(rows: list[Row]) -> None:
    """Prints the table."""
    cells = []
    for row in rows:
        value = f"{row.value:.2g}" if row.required else f"{row.value:.2f}"
        details = "\n".join(f"{key} {_number(figure)}" for key, figure in row.details.items())
        cells.append((row.name, value, row.unit, target(row), details))
    display.table(("measured", "value", "unit", "target", "details"), cells)


def target(row: Row) -> str:
    """The row's target and whether it is met."""
    if row.at_most is None and row.at_least is None:
        return ""
    wanted = f"≤ {row.at_most:g}" if row.at_most is not None else f"≥ {row.at_least:g}"
    return f"{wanted} {'met' if row.holds else 'MISSED'}"


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
                "at_most": row.at_most,
                "at_least": row.at_least,
                "holds": row.holds,
                "details": row.details,
            }
            for row in rows
        ],
    }
    path.write_text(json.dumps(report, indent=2) + "\n")
    measured.write()
    return path


if __name__ == "__main__":
    sys.exit(main())

"""What `python -m bench gpu` runs: both sides after each other on each shape, within ten minutes.

Each side has a process of its own, which is ended when the time is over. What was left out, did not fit or
failed is a row that says so.
"""

from __future__ import annotations

import argparse
import dataclasses
import datetime
import json
import tempfile
import threading
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

from bench import machine
from bench.child import Child
from bench.gpu.shapes import GRIDS, GROUPS, RANK, SHAPES, Grid, lengths
from bench.rows import Row

ROOT = Path(__file__).resolve().parents[2]
BUDGET_S = 540
CELL_S = 6.0
"""Seconds after which a cell is repeated no more."""
LEAST_S = 15.0
"""Seconds that must be left for another cell to begin."""

Answers = dict[tuple[str, str, int, int], dict[str, Any]]
"""By side, shape, adapters and tokens; those of an optimizer step have no tokens."""


class Clock:
    """How much of the time is left."""

    def __init__(self, budget_s: float) -> None:
        self._end = time.monotonic() + budget_s

    @property
    def left_s(self) -> float:
        """Seconds."""
        return self._end - time.monotonic()


class Side:
    """A worker, which lives until its context or the time ends."""

    def __init__(self, side: str, shape: str, device: str, scratch: Path, clock: Clock) -> None:
        environment = {"DS_ACCELERATOR": device, "LOCAL_RANK": "0"}
        if device == "cpu":
            environment["OMP_NUM_THREADS"] = "1"
        self._child: Child | None = None
        self._clock, self._why = clock, ""
        if clock.left_s < LEAST_S:
            return
        own = scratch / f"{side}-{shape}"
        own.mkdir()
        arguments = [side, shape, device, str(own)]
        self._child = Child("bench.gpu.worker", arguments, environment, own / "log")
        self._end = threading.Timer(clock.left_s, self._child.close)
        self._end.daemon = True
        self._end.start()

    def __enter__(self) -> Side:
        return self

    def __exit__(self, *_: object) -> None:
        if self._child is not None:
            self._end.cancel()
            self._child.close()

    def ask(self, job: str, **arguments: Any) -> dict[str, Any]:
        """What the worker answers, or {"failed": why}; when there is little time left, {"left_out": why}."""
        if self._clock.left_s < LEAST_S:
            return {"left_out": "no time was left"}
        if self._child is None:
            return {"failed": self._why}
        try:
            return dict(self._child.ask({"job": job, **arguments}))
        except RuntimeError as error:
            self._end.cancel()
            self._child.close()
            self._child = None
            if self._clock.left_s <= 0:
                return {"left_out": "the time was over before it was done"}
            self._why = str(error).strip().splitlines()[-1]
            return {"failed": self._why}


def main(argv: list[str]) -> int:
    """Measures, prints and saves; 1 when numbers are wrong or anything failed, 2 without such a device."""
    parser = argparse.ArgumentParser(prog="python -m bench gpu", description=__doc__)
    parser.add_argument("--name", help="of the file in bench/results; default: gpu- and the device's name")
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--shapes", choices=tuple(GRIDS), default="qwen3")
    parser.add_argument(
        "--seconds", type=int, default=BUDGET_S, help="what has not begun by then is left out (%(default)s)"
    )
    parser.add_argument("--out", type=Path, default=ROOT / "bench" / "results", help="directory of the file")
    args = parser.parse_args(argv)

    import torch

    from bench.gpu.device import name_of, peak_flops

    if args.device == "cuda" and not torch.cuda.is_available():
        print("there is no CUDA device here; `--device cpu --shapes tiny` runs the same code without one")
        return 2
    name = name_of(args.device)
    started = time.monotonic()
    with tempfile.TemporaryDirectory(prefix="tinsmith-bench-gpu-") as scratch:
        rows = run(
            GRIDS[args.shapes],
            args.device,
            Path(scratch),
            peak_flops(name),
            partial(print, flush=True),
            args.seconds,
        )
    seconds = time.monotonic() - started
    for row in rows:
        print(f"{row.name}: {row.value:.3g} {row.unit}")
        for key, figure in row.details.items():
            print(f"    {key} {figure}")
    path = save(args.out, args.name or "gpu-" + name.lower().replace(" ", "-"), name, rows, seconds)
    print(f"{path} ({seconds:.0f} s)")
    return 0 if all(row.holds and "failed" not in row.details for row in rows) else 1


def run(
    grid: Grid,
    device: str,
    scratch: Path,
    peak: float | None,
    tell: Callable[[str], None],
    seconds: float = BUDGET_S,
) -> list[Row]:
    """All rows.

    Args:
        peak: FLOPs a second of the device; None: not known.
        tell: is told what begins.
        seconds: after which nothing more begins.
    """
    clock = Clock(seconds)
    tell("exactness")
    rows = _exactness(device, scratch, clock)
    for shape in grid.shapes:
        answers: Answers = {}
        shared: list[dict[str, Any]] = []
        for side in ("ours", "peft"):
            tell(f"{shape}, {side}")
            with Side(side, shape, device, scratch, clock) as worker:
                if side == "ours":
                    shared = [worker.ask("prefix", **group, limit_s=CELL_S) for group in GROUPS]
                for adapters in grid.adapters:
                    for tokens in grid.tokens:
                        answers[side, shape, adapters, tokens] = worker.ask(
                            "train", tokens=tokens, adapters=adapters, limit_s=CELL_S
                        )
                    if side == "ours":
                        answers[side, shape, adapters, 0] = worker.ask("step", adapters=adapters)
        rows += [_prefix(answer, shape, group) for answer, group in zip(shared, GROUPS, strict=True)]
        for adapters in grid.adapters:
            rows += [_cell(answers, shape, adapters, tokens, peak) for tokens in grid.tokens]
            rows.append(_step(answers["ours", shape, adapters, 0], shape, adapters))
    return rows


def _exactness(device: str, scratch: Path, clock: Clock) -> list[Row]:
    from bench.gpu.exactness import FACTOR, GRADIENT, LOGPROBS

    rows = []
    with Side("exactness", "small", device, scratch, clock) as worker:
        for dtype in ("float32", "bfloat16"):
            answer = worker.ask("errors", dtype=dtype)
            exact = dtype == "float32"
            for what, bound in (("logprobs", LOGPROBS), ("gradient", GRADIENT)):
                name = f"{what} in {dtype} - plain PyTorch's in float32"
                if what not in answer:
                    rows.append(Row(name, 0.0, "not measured", details=dict(answer)))
                elif exact:
                    unit = "max |difference|, nats" if what == "logprobs" else "of the gradient's norm"
                    rows.append(Row(name, answer[what], unit, at_most=bound, required=True))
                else:
                    ratio = answer[what] / answer[f"plain_{what}"]
                    details = {"ours": answer[what], "plain": answer[f"plain_{what}"]}
                    unit = "x that of transformers with PEFT in bfloat16"
                    rows.append(Row(name, ratio, unit, at_most=FACTOR, required=True, details=details))
    return rows


def _cell(answers: Answers, shape: str, adapters: int, tokens: int, peak: float | None) -> Row:
    each = lengths(tokens, adapters)
    flops = SHAPES[shape].flops(each)
    details: dict[str, float | int | str] = {"sequences": len(each), "sequence_tokens": each[0]}
    rates = {}
    for side in ("ours", "peft"):
        answer = answers[side, shape, adapters, tokens]
        for why in ("failed", "left_out"):
            if why in answer:
                # Too little memory is a finding, and no fault of the run.
                known = answer[why] == "out of memory" or "out of device memory" in answer[why]
                details[f"{side}_did_not_fit" if known else f"{side}_{why}"] = answer[why]
                if why == "failed" and not known:
                    details["failed"] = side
        if "seconds" not in answer:
            continue
        seconds = min(answer["seconds"])
        rates[side] = sum(each) / seconds
        details[f"{side}_tokens_per_s"] = round(rates[side], 1)
        details[f"{side}_mfu"] = round(flops / seconds / peak, 4) if peak else "device's peak is not known"
        if answer["peak_bytes"]:
            details[f"{side}_peak_gib"] = round(answer["peak_bytes"] / 2**30, 2)
        details[f"{side}_repetitions"] = len(answer["seconds"])
        if answer.get("kept_seconds"):
            details[f"{side}_kept_blocks_tokens_per_s"] = round(sum(each) / min(answer["kept_seconds"]), 1)
            details[f"{side}_kept_blocks_peak_gib"] = round(answer["kept_peak_bytes"] / 2**30, 2)
        if answer.get("out_of_memory_and_split"):
            details[f"{side}_allocations_refused_and_batch_split"] = answer["out_of_memory_and_split"]
    name = (
        f"training {shape}, {tokens} tokens, {adapters} adapters of rank {RANK}: ours / PEFT with one adapter"
    )
    if len(rates) < 2:
        return Row(name, 0.0, "not compared", details=details)
    return Row(name, rates["ours"] / rates["peft"], "x tokens/s", details=details)


def _prefix(answer: dict[str, Any], shape: str, group: dict[str, int]) -> Row:
    of = "{answers} answers of {answer} tokens to each of {prompts} prompts of {prompt}".format(**group)
    name = f"training {shape}, {of}: shared prefix / without"
    if "shared" not in answer:
        return _not_measured(name, answer)
    details = {f"{key}_ms": round(1e3 * seconds, 1) for key, seconds in answer.items()}
    return Row(name, answer["apart"] / answer["shared"], "x", details=details)


def _step(answer: dict[str, Any], shape: str, adapters: int) -> Row:
    name = f"optimizer step of {adapters} adapters of {shape}"
    if "seconds" in answer:
        return Row(name, 1e3 * answer["seconds"][0], "ms")
    return _not_measured(name, answer)


def _not_measured(name: str, answer: dict[str, Any]) -> Row:
    known = answer.get("failed") == "out of memory"
    details = {"did_not_fit": answer["failed"]} if known else dict(answer)
    return Row(name, 0.0, "not measured", details=details)


def save(directory: Path, name: str, device: str, rows: list[Row], seconds: float) -> Path:
    """Writes the results with what they were measured on."""
    directory.mkdir(parents=True, exist_ok=True)
    report = {
        "measured": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        "seconds": round(seconds),
        "device": device,
        "machine": machine.facts(ROOT),
        "model": {"family": "Qwen3, random weights", "dtype": "bfloat16"},
        "rows": [{**dataclasses.asdict(row), "holds": row.holds} for row in rows],
    }
    path = directory / f"{name}.json"
    path.write_text(json.dumps(report, indent=2) + "\n")
    return path

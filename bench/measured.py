"""What was measured, as documents show it: `python -m bench.measured` writes it there from bench/results/.

Invariant: no table of results is written by hand. A document has a pair of comments for each, and between
them nothing but what this makes of the results.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
RESULTS = ROOT / "bench" / "results"
DOCUMENTS = ("README.md", "docs/measured.md")
_BLOCK = re.compile(r"(<!-- measured: (?P<name>[^>]*?) -->\n).*?(<!-- end -->)", re.DOTALL)
_HEADLINES = (
    "trainer logprobs - plain PyTorch fp32",
    "sampler logprobs - trainer's",
    "training: whole stack / bare PyTorch + PEFT",
    "training on lengths log-normal from 32 to 1024: whole stack / bare PyTorch + PEFT",
    "training on 16 answers of 64 tokens to a prompt of 512: shared prefix / without",
    "4 tenants at once / 1 tenant with the same batch",
    "sampling, base model: API / plain LLM.generate",
    "sampling, 4 adapters mixed: API / LLM.generate with LoRA",
    "publishing: save to first token - 2 x raw broadcast, p50",
)
"""Rows of a run on a CPU that the README shows."""


def headlines(results: dict[str, Any]) -> str:
    """The rows that say most, and how many of all are missed."""
    rows = {row["name"]: row for row in results["rows"]}
    missed = sum(not row["holds"] for row in rows.values())
    return (
        f"{_machine(results)}\n\n{_table([rows[name] for name in _HEADLINES])}\n"
        f"{missed} of {len(rows)} rows missed their targets in that run.\n"
    )


def cpu_rows(results: dict[str, Any]) -> str:
    """All rows of a run on a CPU."""
    return f"{_machine(results)}\n\n{_table(results['rows'])}"


def gpu_rows(results: dict[str, Any]) -> str:
    """What a GPU did with the larger model, beside PEFT."""
    model = results["model"]
    lines = [
        f"On one {results['device']}, {results['measured'][:10]}, forward and backward of Qwen3-8B, "
        f"{model['family'].partition(', ')[2]}, in {model['dtype']} (a run of {results['seconds']} s):",
        "",
        "| tokens | adapters of rank 32 | tokens/s | PEFT, one adapter | | MFU | peak GiB | PEFT's |",
        "|---|---|---|---|---|---|---|---|",
    ]
    for row in results["rows"]:
        found = re.match(r"training Qwen3-8B, (\d+) tokens, (\d+) adapters", row["name"])
        if found is None:
            continue
        figures = row["details"]
        ours, theirs = figures["ours_tokens_per_s"], figures["peft_tokens_per_s"]
        memory = f"{figures['ours_peak_gib']:.0f} | {figures['peft_peak_gib']:.0f}"
        lines.append(
            f"| {int(found[1]):,} | {found[2]} | {ours:,.0f} | {theirs:,.0f} | {row['value']:.2f} x "
            f"| {figures['ours_mfu']:.0%} | {memory} |"
        )
    return "".join(f"{line}\n" for line in lines)


def gpu_headline(results: dict[str, Any]) -> str:
    """In a sentence, what a GPU did with the larger model, beside PEFT."""
    ratios: dict[bool, list[float]] = {True: [], False: []}
    for row in results["rows"]:
        if found := re.match(r"training Qwen3-8B, (\d+) tokens, \d+ adapters", row["name"]):
            ratios[int(found[1]) < 8192].append(row["value"])
    (low, high), (short_low, short_high) = ((min(each), max(each)) for each in (ratios[False], ratios[True]))
    return (
        f"On one {results['device']} the trainer's engine takes {low:.1f} to {high:.1f} x the tokens/s of "
        "transformers with PEFT, FlashAttention\nand checkpointed activations, for Qwen3-8B with 1 to 64 "
        f"adapters in batches from 8,192 tokens on, and {short_low:.1f} to {short_high:.1f} x\nin batches of "
        f"1,024 ({results['measured'][:10]}).\n"
    )


_TABLES: dict[str, tuple[str, Callable[[dict[str, Any]], str]]] = {
    "headlines": ("cpu-2-cores", headlines),
    "cpu": ("cpu-2-cores", cpu_rows),
    "cpu-intel": ("cpu-2-cores-intel", cpu_rows),
    "gpu headline": ("gpu-nvidia-h200", gpu_headline),
    "gpu": ("gpu-nvidia-h200", gpu_rows),
}
"""By the name in a document: the file of the results, and what is made of it."""


def filled(document: str) -> str:
    """A document's text, with its tables as the results have them.

    Raises:
        KeyError: it has a comment with a name that is no table's.
    """

    def table(block: re.Match[str]) -> str:
        file, make = _TABLES[block["name"]]
        return f"{block[1]}{make(json.loads((RESULTS / f'{file}.json').read_text()))}{block[3]}"

    return _BLOCK.sub(table, document)


def write() -> None:
    """Fills the tables of all documents anew."""
    for name in DOCUMENTS:
        path = ROOT / name
        path.write_text(filled(path.read_text()))


def _machine(results: dict[str, Any]) -> str:
    machine, model = results["machine"], results["model"]
    return (
        f"On {machine['cores']} cores ({machine['cpu']}) with {machine['memory_gib']:.0f} GiB, without GPU, "
        f"a {model['family'].partition(',')[0]} of {model['parameters_millions']}M parameters in "
        f"{model['dtype']}, {results['measured'][:10]}:"
    )


def _table(rows: Sequence[dict[str, Any]]) -> str:
    lines = ["| | measured | target | |", "|---|---|---|---|"]
    for row in rows:
        bound, sign = (row["at_most"], "≤") if row["at_most"] is not None else (row["at_least"], "≥")
        met = "" if row["holds"] else "missed"
        unit = row["unit"].replace("|", "\\|")
        value = f"{row['value']:,.0f}" if row["value"] >= 999.5 else f"{row['value']:.3g}"
        lines.append(f"| {row['name']} | {value} {unit} | {sign} {bound:g} | {met} |")
    return "".join(f"{line}\n" for line in lines)


if __name__ == "__main__":
    write()

"""What the README claims and prints is so."""

from __future__ import annotations

import json
import os
import re
import subprocess
from pathlib import Path
from typing import Any

import pytest

from services.launcher import cli
from services.launcher.settings import options

ROOT = Path(__file__).resolve().parents[3]
README = (ROOT / "README.md").read_text()
RESULTS = json.loads((ROOT / "bench" / "results" / "cpu-2-cores.json").read_text())
GPU_RESULTS = json.loads((ROOT / "bench" / "results" / "gpu-nvidia-h200.json").read_text())
MACHINE = options.Machine(cores=tuple(range(64)), gpus=tuple("01234567"), cuda_build=True, addresses={})


def blocks(language: str) -> list[str]:
    return re.findall(rf"^```{language}\n(.*?)^```$", README, re.MULTILINE | re.DOTALL)


def numbers(results: dict[str, Any]) -> str:
    """The results of a benchmark, as the README shows them."""
    machine, model = results["machine"], results["model"]
    lines = [
        f"On {machine['cores']} cores of an {machine['cpu']} with {machine['memory_gib']:.0f} GiB, without "
        f"GPU, a {model['family'].partition(',')[0]} of",
        f"{model['parameters_millions']}M parameters in {model['dtype']}, {results['measured'][:10]}:",
        "",
        "| | measured | target | |",
        "|---|---|---|---|",
    ]
    for row in results["rows"]:
        bound, sign = (row["at_most"], "≤") if row["at_most"] is not None else (row["at_least"], "≥")
        met = "" if row["holds"] else "missed"
        unit = row["unit"].replace("|", "\\|")
        value = f"{row['value']:,.0f}" if row["value"] >= 999.5 else f"{row['value']:.3g}"
        lines.append(f"| {row['name']} | {value} {unit} | {sign} {bound:g} | {met} |")
    return "\n".join(lines)


def gpu_numbers(results: dict[str, Any]) -> str:
    """What a GPU did with the larger model, as the README shows it."""
    model = results["model"]
    lines = [
        f"On one {results['device']}, {results['measured'][:10]}, forward and backward of Qwen3-8B, "
        f"{model['family'].partition(', ')[2]}, in {model['dtype']}:",
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
    return "\n".join(lines)


def test_the_numbers_are_those_that_were_measured() -> None:
    assert numbers(RESULTS) in README
    assert gpu_numbers(GPU_RESULTS) in README
    assert f"{GPU_RESULTS['seconds']} s; [all of it](bench/results/gpu-nvidia-h200.json)" in README


def test_the_quickstart_in_the_readme_is_the_one_that_runs() -> None:
    (shown,) = blocks("python")
    assert shown in (ROOT / "examples" / "quickstart.py").read_text()


def commands() -> list[str]:
    printed = [line for block in blocks("sh") for line in block.splitlines()]
    examples = [line.strip() for line in cli._UP.splitlines()]
    return [
        line.partition(" #")[0].strip() for line in (*printed, *examples) if line.startswith("tinsmith up")
    ]


@pytest.mark.parametrize("command", commands())
def test_every_cluster_that_is_printed_can_be_asked_for(
    command: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    (written,) = blocks("toml")
    (tmp_path / "cluster.toml").write_text(written)
    flags, unknown = cli._parser().parse_known_args(command.replace("/models/", f"{tmp_path}/").split()[1:])
    (tmp_path / "qwen3-8b").mkdir()
    (tmp_path / "qwen3-8b" / "config.json").write_text("{}")
    flags.unknown = unknown
    chosen, _ = options.options(flags, MACHINE, {})
    if "-f cluster.toml" in command:
        assert (chosen.host, chosen.max_lora_rank, chosen.samplers) == ("0.0.0.0", 64, 1)
        assert [model.name for model in chosen.models] == ["Qwen/Qwen3-0.6B"]


def listed_verbs() -> set[str]:
    """What `make help` lists, without what `make` in a test is told of the one around it."""
    environment = {
        name: value for name, value in os.environ.items() if not name.startswith(("MAKE", "MFLAGS"))
    }
    done = subprocess.run(
        ["make", "help"], cwd=ROOT, env=environment, capture_output=True, text=True, check=True
    )
    return set(re.findall(r"^  make (\S+) ", done.stdout, re.MULTILINE))


def test_every_verb_of_the_makefile_is_listed() -> None:
    (phony,) = re.findall(r"^\.PHONY: (.*)$", (ROOT / "Makefile").read_text(), re.MULTILINE)
    assert listed_verbs() == set(phony.split())


@pytest.mark.parametrize(
    "document",
    [*ROOT.glob("*.md"), *ROOT.glob("docs/*.md"), ROOT / "deploy" / "README.md"],
    ids=lambda path: path.name,
)
def test_every_verb_that_is_printed_is_listed(document: Path) -> None:
    verbs = set(
        re.findall(r"`make ([a-z][a-z0-9-]+)|^make ([a-z][a-z0-9-]+)", document.read_text(), re.MULTILINE)
    )
    assert {verb for pair in verbs for verb in pair if verb} <= listed_verbs()
    if document.name == "README.md" and document.parent == ROOT:
        assert len(verbs) > 8

"""What the README claims and prints is so."""

from __future__ import annotations

import json
import os
import re
import subprocess
from pathlib import Path

import pytest

from bench import measured
from services.launcher import cli
from services.launcher.settings import options

ROOT = Path(__file__).resolve().parents[3]
README = (ROOT / "README.md").read_text()
MACHINE = options.Machine(cores=tuple(range(64)), gpus=tuple("01234567"), cuda_build=True, addresses={})


def blocks(language: str) -> list[str]:
    return re.findall(rf"^```{language}\n(.*?)^```$", README, re.MULTILINE | re.DOTALL)


@pytest.mark.parametrize("name", measured.DOCUMENTS)
def test_the_numbers_are_those_that_were_measured(name: str) -> None:
    document = (ROOT / name).read_text()
    assert document.count("<!-- measured: ") == document.count("<!-- end -->") > 1
    assert measured.filled(document) == document


def test_a_run_with_other_results_changes_what_documents_show(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for path in measured.RESULTS.glob("*.json"):
        results = json.loads(path.read_text())
        results["rows"][0]["value"] *= 3
        results["measured"] = "2031-01-01"
        (tmp_path / path.name).write_text(json.dumps(results))
    before = {name: (ROOT / name).read_text() for name in measured.DOCUMENTS}
    monkeypatch.setattr(measured, "RESULTS", tmp_path)
    for name, document in before.items():
        tables = document.count("<!-- measured: ")
        assert measured.filled(document).count("2031-01-01") == tables, name


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

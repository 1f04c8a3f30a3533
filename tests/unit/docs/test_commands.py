"""Every `tinsmith ...` that a document prints is one that the command takes, in a pod too."""

from __future__ import annotations

import contextlib
import io
import re
import shlex
from pathlib import Path

import pytest

from services.launcher import cli

ROOT = Path(__file__).resolve().parents[3]
DOCUMENTS = sorted(
    path
    for pattern in ("*.md", "docs/*.md", "deploy/*.md", "deploy/k8s/tinsmith/*.md")
    for path in ROOT.glob(pattern)
)
_BLOCK = re.compile(r"^ *```(?:sh|bash|console)\n(.*?)^ *```$|^((?: {4}[^\n]+\n)+)", re.MULTILINE | re.DOTALL)
_INLINE = re.compile(r"`tinsmith( [^`]+)`")
_BEFORE = re.compile(r"(?:^|[;&|(]|\$\() *(?:[A-Z_]+=\S* +)*(?:\S*/)?tinsmith ")
_IN_A_POD = re.compile(r"kubectl run (.*?) -- (.*)")
_UNSAID = re.compile(r"\[[^]]*\]|\bVERB\b|\.\.\.|…")
"""What a sentence leaves to its reader."""


def shell_lines(document: str) -> list[str]:
    """What its blocks have for the shell, a line each."""
    blocks = "".join(part for found in _BLOCK.findall(document) for part in found)
    return blocks.replace("\\\n", " ").splitlines()


def pasted(document: str) -> list[str]:
    """The commands in blocks for a shell, and in lines that are indented, as words after `tinsmith`."""
    found = []
    for line in shell_lines(document):
        if start := _BEFORE.search(line):
            found.append(re.split(r"[;&|)>]", line[start.end() :])[0])
    return found


def in_pods(document: str) -> list[tuple[str, str]]:
    """Flags of each `kubectl run`, and the words that the image's command gets."""
    return [(found[1], found[2]) for line in shell_lines(document) if (found := _IN_A_POD.search(line))]


def named(document: str) -> list[str]:
    """The commands in running text, which may leave out what they need."""
    return [" ".join(_UNSAID.sub("", words).split()) for words in _INLINE.findall(document)]


def wrong(command: str, whole: bool) -> str:
    """What the command says against its words; empty: nothing.

    Args:
        whole: all that it needs has to be there.
    """
    said = io.StringIO()
    try:
        with contextlib.redirect_stderr(said), contextlib.redirect_stdout(said):
            _, unknown = cli._parser().parse_known_args(shlex.split(command, comments=True))
    except SystemExit as ended:
        if ended.code == 0 or (not whole and "arguments are required" in said.getvalue()):
            return ""
        return said.getvalue().splitlines()[-1]
    return f"{unknown} are no flags" if unknown else ""


@pytest.mark.parametrize("document", DOCUMENTS, ids=lambda path: str(path.relative_to(ROOT)))
def test_a_command_that_a_document_prints_is_taken(document: Path) -> None:
    text = document.read_text()
    commands = [(command, True) for command in pasted(text)] + [(command, False) for command in named(text)]
    complaints = {command: wrong(command, whole) for command, whole in commands}
    assert {command: complaint for command, complaint in complaints.items() if complaint} == {}


def test_a_command_that_a_document_runs_in_a_pod_is_taken_and_not_run_again_when_it_ended() -> None:
    runs = [run for path in DOCUMENTS for run in in_pods(path.read_text())]
    assert runs
    assert [flags for flags, _ in runs if "--restart=Never" not in flags.split()] == []
    assert [wrong(command, whole=True) for _, command in runs] == [""] * len(runs)


def test_a_command_that_the_help_prints_is_taken() -> None:
    lines = [line.strip() for line in (cli._DESCRIPTION + cli._UP).splitlines()]
    commands = [
        line.removeprefix("tinsmith ").partition("   ")[0] for line in lines if line.startswith("tinsmith ")
    ]
    assert len(commands) > 8
    assert [wrong(command, whole=True) for command in commands] == [""] * len(commands)


def test_many_are_found() -> None:
    documents = [path.read_text() for path in DOCUMENTS]
    assert sum(len(pasted(text)) for text in documents) > 6
    assert sum(len(named(text)) for text in documents) > 40


def test_what_a_block_has_for_the_shell_is_no_part_of_a_command() -> None:
    block = """```sh
export A=$(TINSMITH_X=1 .venv/bin/tinsmith keys create bob)  # makes one
tinsmith up --model a/b=org/m \\
  --port 9000 > log &
cd there && tinsmith status --json | jq .
tinsmith-other --no
```
"""
    assert [command.split() for command in pasted(block)] == [
        ["keys", "create", "bob"],
        ["up", "--model", "a/b=org/m", "--port", "9000"],
        ["status", "--json"],
    ]


@pytest.mark.parametrize(
    "command", ["up --max-contxt 4", "stauts", "keys make bob", "status --quiet", "models retire"]
)
def test_one_that_is_not_taken_is_found(command: str) -> None:
    assert wrong(command, whole=True)


def test_a_sentence_may_leave_something_out() -> None:
    assert not wrong("models retire", whole=False)
    assert wrong("models retier", whole=False)
    assert named("`tinsmith doctor [MODEL]`, `tinsmith admin VERB`") == ["doctor", "admin"]

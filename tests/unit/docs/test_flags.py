"""The documents name flags and variables that exist."""

from __future__ import annotations

import re
from functools import cache
from pathlib import Path

import pytest

from services.launcher.settings.table import ROWS

ROOT = Path(__file__).resolve().parents[3]
PAGES = (
    *("*.md", "docs/*.md", "deploy/*.md", "deploy/k8s/tinsmith/*.md"),
    *("deploy/k8s/tinsmith/templates/NOTES.txt", "examples/*.py"),
)
DOCUMENTS = sorted(path for pattern in PAGES for path in ROOT.glob(pattern))
SOURCES = ("services", "bench", "scripts", "deploy", "examples", "tests", "tinsmith_client")
OF_OTHERS = {
    "build-arg",
    "for",
    "from-file",
    "go-grpc",
    "timeout",
    "protocol",
    "http2-prior-knowledge",
    "reflect-header",
    "restart",
    "rm",
}
"""Flags of docker, kubectl, buf and protoc."""
_FLAG = re.compile(r"(?<![\w-])--([a-z][a-z0-9-]+)")
_VARIABLE = re.compile(r"\bTINSMITH_([A-Z][A-Z_0-9]*[A-Z0-9])\b")


@cache
def text() -> str:
    """Everything that could have a flag or read a variable."""
    paths = (path for folder in SOURCES for path in sorted((ROOT / folder).rglob("*.py")))
    return "\n".join(path.read_text() for path in paths if path != Path(__file__))


def there_is(flag: str) -> bool:
    return flag in ROWS or any(f'"{name}"' in text() for name in (f"--{flag}", flag))


def unknown(document: str) -> set[str]:
    flags = {f"--{flag}" for flag in _FLAG.findall(document) if flag not in OF_OTHERS and not there_is(flag)}
    variables = {
        f"TINSMITH_{name}"
        for name in _VARIABLE.findall(document)
        if f"TINSMITH_{name}" not in text() and not there_is(name.lower().replace("_", "-"))
    }
    return flags | variables


@pytest.mark.parametrize("document", DOCUMENTS, ids=lambda path: str(path.relative_to(ROOT)))
def test_a_flag_or_variable_that_a_document_names_exists(document: Path) -> None:
    assert unknown(document.read_text()) == set()


def test_one_that_does_not_exist_is_found() -> None:
    said = "`up --max-context 9 --maximal-context 9`, or TINSMITH_MAX_CONTEXT and TINSMITH_LEAST_CONTEXT"
    assert unknown(said) == {"--maximal-context", "TINSMITH_LEAST_CONTEXT"}

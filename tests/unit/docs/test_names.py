"""The documents speak of files and rooms that exist."""

from __future__ import annotations

import re
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[3]
DOCUMENTS = [
    *sorted(ROOT.glob("*.md")),
    *sorted((ROOT / "docs").glob("*.md")),
    *sorted((ROOT / "deploy").glob("*.md")),
]
_CODE = re.compile(r"`([^`\n]+)`")
_FILE = re.compile(r"^[\w./-]+\.(?:py|lua|proto|sh|yaml|tpl|json)$")
_LINK = re.compile(r"\]\(([^)#\s]+)(?:#[^)]*)?\)")


def tracked() -> set[str]:
    """What is in the project, and what is about to be."""
    command = ["git", "ls-files", "--cached", "--others", "--exclude-standard"]
    listed = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True).stdout.split()
    return {name for name in listed if (ROOT / name).exists()}


def names_of_files(text: str) -> list[str]:
    """Names of files in code spans; one without a folder is the reader's own, or in every room."""
    spans = [name for name in _CODE.findall(text) if _FILE.match(name)]
    return [name for name in spans if "/" in name]


def missing(names: list[str], files: set[str]) -> list[str]:
    return [name for name in names if name not in files and f"services/{name}" not in files]


@pytest.mark.parametrize("document", DOCUMENTS, ids=lambda path: path.name)
def test_a_file_that_a_document_names_exists(document: Path) -> None:
    assert missing(names_of_files(document.read_text()), tracked()) == []


@pytest.mark.parametrize("document", DOCUMENTS, ids=lambda path: path.name)
def test_a_link_of_a_document_leads_somewhere(document: Path) -> None:
    links = [link for link in _LINK.findall(document.read_text()) if "://" not in link]
    assert [link for link in links if not (document.parent / link).exists()] == []


def test_the_architecture_names_files_by_their_whole_path() -> None:
    text = (ROOT / "docs/architecture.md").read_text()
    bare = [name for name in _CODE.findall(text) if _FILE.match(name) and "/" not in name]
    assert set(bare) <= {"__init__.py"}
    assert len(names_of_files(text)) > 60


def test_every_room_is_on_the_map() -> None:
    text = (ROOT / "docs/architecture.md").read_text()
    drawn = text[text.index("## The map") : text.index("## Names")]
    rooms = {path.parent for path in (ROOT / "services").glob("*/*/__init__.py")}
    assert rooms
    lacking = [
        str(room.relative_to(ROOT)) for room in rooms if not re.search(rf"\b{room.name}(?:/| )", drawn)
    ]
    assert lacking == []


def test_a_name_that_does_not_exist_is_found() -> None:
    text = "`gateway/dispatch/dispatcher.py` and `gateway/dispatch/dispatchers.py`"
    assert missing(names_of_files(text), tracked()) == ["gateway/dispatch/dispatchers.py"]

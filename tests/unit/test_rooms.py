"""The rooms of the services stay small and say what they are for.

What may import what is written down in pyproject.toml, and checked by `make lint`.
"""

from __future__ import annotations

import ast
import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
SERVICES = ROOT / "services"
MOST_FILES = 12
MOST_LINES = 400

FOLDERS = sorted(path.parent for path in SERVICES.rglob("__init__.py"))
ROOMS = [folder for folder in FOLDERS if len(folder.relative_to(SERVICES).parts) > 1]


def name(folder: Path) -> str:
    return str(folder.relative_to(SERVICES.parent))


@pytest.mark.parametrize("folder", FOLDERS, ids=name)
def test_a_room_has_few_files(folder: Path) -> None:
    files = [path.name for path in folder.glob("*.py") if path.name != "__init__.py"]
    assert len(files) <= MOST_FILES, (
        f"{len(files)} files; see which of them belong together in a room of theirs"
    )


@pytest.mark.parametrize("folder", FOLDERS, ids=name)
def test_a_file_is_short(folder: Path) -> None:
    lengths = {path.name: len(path.read_text().splitlines()) for path in folder.glob("*.py")}
    assert {file: lines for file, lines in lengths.items() if lines > MOST_LINES} == {}


@pytest.mark.parametrize("folder", ROOMS, ids=name)
def test_a_room_says_what_it_is_for_its_invariant_and_who_imports_it(folder: Path) -> None:
    said = ast.get_docstring(ast.parse((folder / "__init__.py").read_text())) or ""
    purpose, *rest = said.split("\n\n")
    assert purpose
    assert any(part.startswith("Invariant") for part in rest), "write: Invariant: ..."
    assert any(part.startswith("Imported by ") for part in rest), "write: Imported by ..."


def test_every_folder_with_code_is_a_package() -> None:
    folders = {path.parent for path in SERVICES.rglob("*.py")}
    assert folders == set(FOLDERS)


def test_the_whole_suite_has_every_folder_of_tests_but_those_of_hours_kubernetes_or_a_gpu() -> None:
    script = (ROOT / "scripts" / "test.sh").read_text()
    parts = re.search(r"^parts=\((.*)\)$", script, re.MULTILINE)
    assert parts is not None
    folders = {
        folder.name
        for folder in (ROOT / "tests").iterdir()
        if folder.is_dir() and any(folder.rglob("test_*.py"))
    }
    assert set(parts[1].split()) == folders - {"soak", "monitoring", "sdks", "k8s", "gpu", "interpreter"}

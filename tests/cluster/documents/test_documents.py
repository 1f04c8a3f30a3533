"""What documents print for pasting works on a running cluster, all of one document in one shell."""

from __future__ import annotations

import re
import sys
from pathlib import Path

import pytest

from tests.cluster.conftest import Cluster
from tests.cluster.documents.test_examples import run

ROOT = Path(__file__).resolve().parents[3]
SAYS = {
    "docs/grpc.md": (r'"trainable":\s*true', r"^\d+\.\d+$", r"^\[\d+[\d, ]*\]$"),
    "docs/inference.md": (r"^\d+$", r"TextBlock\("),
    "docs/losses.md": (),
    "docs/operations.md": (r"\btrainer-0\b",),
    "docs/security.md": (r"^tml-\S+$", r"\balice\b"),
}
"""What the examples of each document print."""
NAMES_FILES_OF_THE_READER = {"docs/wires.md"}
_BLOCK = re.compile(r"^```(python|sh)\n(.*?)^```$|^((?:    export [^\n]+\n)+)", re.MULTILINE | re.DOTALL)


def script(document: str, cluster: Cluster) -> str:
    """What a reader of a document pastes: its commands, then its Python as one program. The addresses are the
    cluster's instead of the default ones."""
    found = _BLOCK.findall((ROOT / document).read_text())
    commands = [code for language, code, _ in found if language == "sh"] + [lines for *_, lines in found]
    python = "\n".join(code for language, code, _ in found if language == "python")
    pasted = "\n".join([*commands, f"python - <<'END_OF_PYTHON'\n{python}\nEND_OF_PYTHON"])
    for default, port in ((8000, cluster.port), (8001, cluster.grpc_port)):
        pasted = pasted.replace(f"127.0.0.1:{default}", f"127.0.0.1:{port}")
    return pasted


@pytest.mark.parametrize("document", SAYS)
def test_what_a_document_prints_for_pasting_works(cluster: Cluster, document: str) -> None:
    tools = f"export PATH={Path(sys.executable).parent}:$PATH TINSMITH_DATA_DIR={cluster.data_dir}"
    said = run(cluster, "bash", "-c", f"set -eu\n{tools}\n{script(document, cluster)}", seconds=400)
    for pattern in SAYS[document]:
        assert re.search(pattern, said, re.MULTILINE), said


def test_every_document_with_something_to_paste_is_run() -> None:
    pages = {f"docs/{path.name}" for path in (ROOT / "docs").glob("*.md")}
    assert {
        page for page in pages if _BLOCK.search((ROOT / page).read_text())
    } == SAYS.keys() | NAMES_FILES_OF_THE_READER

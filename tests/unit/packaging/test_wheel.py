"""What `pip install` makes of a clone: a wheel that lacks nothing, and the `tinsmith` command."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import zipfile
from email.parser import Parser
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[3]
BUILT_FROM = ("pyproject.toml", "setup.py", "MANIFEST.in", "README.md", "LICENSE", "CHANGELOG.md")


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> zipfile.ZipFile:
    """The wheel of a clone in which nothing was generated yet."""
    clone = tmp_path_factory.mktemp("clone")
    for name in BUILT_FROM:
        shutil.copy(ROOT / name, clone / name)
    for name in ("proto", "services", "tinsmith_client"):
        shutil.copytree(ROOT / name, clone / name, ignore=shutil.ignore_patterns("__pycache__"))
    # A module that an earlier version had, left by an earlier build.
    gone = clone / "build" / "lib" / "services" / "gone.py"
    gone.parent.mkdir(parents=True)
    gone.touch()
    command = [sys.executable, "-m", "pip", "wheel", str(clone), "--no-deps", "--no-build-isolation"]
    command += ["--wheel-dir", str(clone / "wheel"), "--quiet", "--disable-pip-version-check"]
    subprocess.run(command, check=True, cwd=clone)
    (built,) = (clone / "wheel").glob("*.whl")
    return zipfile.ZipFile(built)


def metadata(wheel: zipfile.ZipFile, name: str) -> str:
    (member,) = (entry for entry in wheel.namelist() if entry.endswith(f".dist-info/{name}"))
    return wheel.read(member).decode()


def test_a_wheel_holds_all_of_the_services_and_nothing_of_an_earlier_build(wheel: zipfile.ZipFile) -> None:
    source = {
        str(path.relative_to(ROOT))
        for package in ("services", "tinsmith_client")
        for path in (ROOT / package).rglob("*")
        if path.is_file() and "__pycache__" not in path.parts
    }
    assert any(name.endswith(".lua") for name in source)
    assert {name for name in wheel.namelist() if name.startswith(("services/", "tinsmith_client/"))} == source


def test_a_wheel_holds_the_packages_of_every_proto_file(wheel: zipfile.ZipFile) -> None:
    protos = [path.relative_to(ROOT / "proto").with_suffix("") for path in (ROOT / "proto").rglob("*.proto")]
    expected = {f"{proto}_pb2{kind}.py" for proto in protos for kind in ("", "_grpc")}
    assert {name for name in wheel.namelist() if name.startswith("tinsmith/")} == expected


def test_a_wheel_says_its_license_and_its_extras(wheel: zipfile.ZipFile) -> None:
    said = Parser().parsestr(metadata(wheel, "METADATA"))
    assert said["License-Expression"] == "Apache-2.0"
    assert {"gateway", "trainer", "sampler", "local"} <= set(said.get_all("Provides-Extra"))
    assert "Apache License" in metadata(wheel, "licenses/LICENSE")
    assert "tinsmith = services.launcher.cli:main" in metadata(wheel, "entry_points.txt")


def test_an_installed_wheel_runs_the_command(wheel: zipfile.ZipFile, tmp_path: Path) -> None:
    site = tmp_path / "site"
    wheel.extractall(site)
    environment = {**os.environ, "PYTHONPATH": str(site)}

    def run(*code: str) -> str:
        command = [sys.executable, *code]
        return subprocess.run(
            command, cwd=tmp_path, env=environment, check=True, capture_output=True, text=True
        ).stdout

    main = "from services.launcher.cli import main; main(['{}'])"
    assert "tinsmith up" in run("-c", main.format("--help"))
    version = run("-c", main.format("--version"))
    assert version.strip() == f"tinsmith {Parser().parsestr(metadata(wheel, 'METADATA'))['Version']}"
    found = run("-c", "from tinsmith.v1 import service_pb2_grpc as stubs; print(stubs.__file__)")
    assert found.startswith(str(site))

"""Builds the package; what it is called and needs is in pyproject.toml.

Invariant: a wheel holds what the source tree holds now: modules that are gone are not taken from an earlier
build, and the Python packages of proto/ are generated anew. An installation in place (`pip install -e .`)
uses those that scripts/proto.sh generates in the tree.
"""

from __future__ import annotations

import shutil
import sys
from pathlib import Path

from setuptools import setup
from setuptools.command.build_py import build_py

ROOT = Path(__file__).resolve().parent


class BuildPackages(build_py):
    def run(self) -> None:
        if self.editable_mode:
            super().run()
            return
        target = Path(self.build_lib).resolve()
        for package in ("services", "tinsmith_client"):
            shutil.rmtree(target / package, ignore_errors=True)
        super().run()
        # What the tree may hold was generated for its developers, at some time.
        shutil.rmtree(target / "tinsmith", ignore_errors=True)
        _generate(target)


def _generate(target: Path) -> None:
    """Writes the package `tinsmith` below a folder."""
    import grpc_tools
    from grpc_tools import protoc

    files = sorted(str(path.relative_to(ROOT / "proto")) for path in (ROOT / "proto").rglob("*.proto"))
    included = Path(grpc_tools.__file__).parent / "_proto"
    arguments = [
        f"-I{ROOT / 'proto'}",
        f"-I{included}",
        f"--python_out={target}",
        f"--grpc_python_out={target}",
    ]
    if status := protoc.main(["protoc", *arguments, *files]):
        sys.exit(status)


setup(cmdclass={"build_py": BuildPackages})

